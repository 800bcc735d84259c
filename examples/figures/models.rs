//! Figure 6, from the paper's values and the trainings recorded by the example `trainings`.

use std::ops::Range;

use halfulp::{Format, stall};
use serde_json::Value;

use crate::plot::{Axis, INK, NEAREST, NOTE, Panel, Picture, STOCHASTIC, TEXT, Words};
use crate::table::Table;
use crate::{Drawing, Error, Figure, root};

pub(crate) const FIGURE: Figure = Figure {
    id: "6",
    file: "06-one-prediction",
    title: "One prediction, many models",
    alt: "Two panels, BF16 and FP8, with a row for each of seven language models of the paper and seven small \
          trainings, a red dot for nearest and a purple one for stochastic, each with its distance in points from \
          one of two dotted vertical lines, the predictions: up to 2.8 for the paper's models, up to 5.2 for the \
          small trainings.",
    caption: "Share of second moments that stall in a step at β₂ = 0.999, and the predictions for the typical \
              mantissa, dotted; beside each dot the error of the prediction, measured less predicted, in percentage \
              points. Open, not measured here: the values of arXiv:2603.16731 for language models. Filled, measured \
              here: small models trained by AdamW with its moments in BF16 or in E4M3 with one power-of-two scale a \
              tensor, mean over steps 2001 to 4000 (cargo run --release --example trainings; \
              figures/trainings.json).",
    see: "One formula, which knows the format and β₂ and nothing of the model, comes within 3 points for every \
          large model and within 5.2 for the small ones. In BF16 nearest lies above it everywhere, for its moments \
          have climbed above the mean square of the gradients, where they stall still more often: 1.4 to 2.7 times \
          that high in the small trainings, and 5.9 times in the autoencoder, the farthest off. Stochastic rounding \
          lies below it where gradients are not Gaussian. In the matrix factors 96 % of the coordinates are zero \
          in most steps; without them the error is 0.8 points and not 4.4. In the letters 41 % are, but leaving \
          them out changes little: the tails are heavy everywhere (kurtosis 7.7, Gaussian 3), as in most of these \
          models.",
    draw,
};

/// Stalled shares of a model in the two formats, nearest and stochastic.
struct Model {
    name: String,
    shares: [[f64; 2]; 2],
}

/// The paper's values: BF16 nearest, stochastic; FP8 nearest, stochastic.
const PAPER: [(&str, [[f64; 2]; 2]); 7] = [
    ("LLaMA-60M", [[0.969, 0.812], [0.999, 0.986]]),
    ("LLaMA-100M", [[0.967, 0.814], [0.998, 0.983]]),
    ("LLaMA-1B, short run", [[0.974, 0.825], [0.997, 0.986]]),
    ("LLaMA-7B, short run", [[0.970, 0.823], [0.998, 0.988]]),
    ("GPT-NeoX-160M", [[0.971, 0.817], [0.999, 0.989]]),
    ("GPT-NeoX-410M", [[0.971, 0.820], [0.999, 0.988]]),
    ("MoE-520M", [[0.970, 0.822], [0.993, 0.982]]),
];

const FORMATS: [Format; 2] = [Format::BF16, Format::E4M3];
const ROUNDINGS: [&str; 2] = ["nearest", "stochastic"];
const BETA2: f64 = 0.999;

/// The models of `figures/trainings.json`.
fn trained() -> Result<Vec<Model>, Error> {
    let record: Value = serde_json::from_slice(&std::fs::read(root().join("figures/trainings.json"))?)?;
    let missing = |what: &str| format!("figures/trainings.json: expected {what}, found none");
    if record["beta2"].as_f64() != Some(BETA2) {
        return Err(missing("a beta2 of 0.999").into());
    }
    let model = |model: &Value| -> Result<Model, Error> {
        let name = model["model"].as_str().ok_or_else(|| missing("the name of a model"))?;
        let share = |format: Format, rounding: &str| {
            let mut runs = model["runs"].as_array().into_iter().flatten();
            let run = runs.find(|run| run["format"] == format.to_string() && run["rounding"] == rounding);
            let share = run.and_then(|run| run["stalled"].as_f64());
            share.ok_or_else(|| missing(&format!("the stalled share of {name}, {format}, {rounding}")))
        };
        let mut shares = [[0.0; 2]; 2];
        for (shares, format) in shares.iter_mut().zip(FORMATS) {
            for (value, rounding) in shares.iter_mut().zip(ROUNDINGS) {
                *value = share(format, rounding)?;
            }
        }
        Ok(Model { name: name.into(), shares })
    };
    record["models"].as_array().ok_or_else(|| missing("models"))?.iter().map(model).collect()
}

/// The groups with their headings; a heading takes a row.
struct Group {
    heading: &'static str,
    models: Vec<Model>,
    measured: bool,
}

/// Nearest and stochastic.
fn predictions(format: Format) -> Result<[f64; 2], Error> {
    let predicted = stall::probability(format, BETA2)?;
    Ok([predicted.nearest, predicted.stochastic])
}

/// The error of a prediction in percentage points, to a thousandth of one: shares are known to no more.
fn points(share: f64, predicted: f64) -> f64 {
    (1e5 * (share - predicted)).round() / 1e3
}

/// The error of a prediction in words, on the side away from the prediction if there is room.
fn error(share: f64, predicted: f64, range: &Range<f64>) -> (String, Words) {
    let points = points(share, predicted);
    let sign = if points < 0.0 { "−" } else { "+" };
    let text = match points.abs() {
        p if p < 0.005 => "0".into(),
        p if p < 0.95 => format!("{sign}{p:.2}"),
        p => format!("{sign}{p:.1}"),
    };
    let room = 0.1 * (range.end - range.start);
    let left = if share < predicted { share - range.start > room } else { range.end - share < room };
    let words = if left { Words::ending().shifted(-15, 0) } else { Words::default().shifted(15, 0) };
    (text, words.sized(TEXT - 5))
}

fn panel(which: usize, groups: &[Group], range: Range<f64>, step: f64, room: Option<u32>) -> Result<Panel, Error> {
    let format = FORMATS[which];
    let mut row = 0.0;
    let (mut ticks, mut marks, mut headings) = (vec![], vec![], vec![]);
    for group in groups {
        headings.push((row, group.heading));
        for model in &group.models {
            row += 1.0;
            ticks.push((row, if room.is_some() { model.name.clone() } else { String::new() }));
            marks.push((row, model.shares[which], group.measured));
        }
        row += 1.4;
    }
    let bottom = row - 0.7;
    let title = if which == 0 { "BF16" } else { "FP8 (E4M3)" };
    let ordinate = Axis::linear("", bottom..-0.6, 1.0).ticks(ticks).room(room.unwrap_or(0));
    let mut panel = Panel::new(title, Axis::linear("stalled share", range.clone(), step), ordinate);
    let predicted = predictions(format)?;
    for (share, color) in predicted.into_iter().zip([NEAREST, STOCHASTIC]) {
        panel.dotted("", vec![(share, -0.6), (share, bottom)], color);
    }
    for (row, shares, measured) in marks {
        for ((share, predicted), color) in shares.into_iter().zip(predicted).zip([NEAREST, STOCHASTIC]) {
            if measured {
                panel.dots("", vec![(share, row)], color, 9);
            } else {
                panel.rings("", vec![(share, row)], color, 8);
            }
            let (text, words) = error(share, predicted, &range);
            panel.words((share, row), text, NOTE, words);
        }
    }
    if room.is_some() {
        for (row, heading) in headings {
            panel.words((range.start, row), heading, INK, Words::ending().shifted(-12, 0).bold());
        }
    }
    Ok(panel)
}

fn table(groups: &[Group]) -> Result<Table, Error> {
    let mut table =
        Table::new(["source", "model", "format", "rounding", "stalled share", "predicted", "error in points"]);
    for group in groups {
        for model in &group.models {
            for (format, shares) in FORMATS.into_iter().zip(model.shares) {
                for (i, predicted) in predictions(format)?.into_iter().enumerate() {
                    table.row([
                        group.heading.into(),
                        model.name.as_str().into(),
                        format.to_string().into(),
                        ROUNDINGS[i].into(),
                        shares[i].into(),
                        predicted.into(),
                        points(shares[i], predicted).into(),
                    ]);
                }
            }
        }
    }
    Ok(table)
}

fn draw() -> Result<Drawing, Error> {
    let paper = PAPER.map(|(name, shares)| Model { name: name.into(), shares });
    let groups = [
        Group { heading: "the paper's values", models: paper.into(), measured: false },
        Group { heading: "measured here", models: trained()?, measured: true },
    ];
    let mut bf16 = panel(0, &groups, 0.76..1.0, 0.05, Some(340))?;
    bf16.words((0.825, 0.0), "stochastic", STOCHASTIC, Words::ending().shifted(-10, 0));
    bf16.words((0.9458, 0.0), "nearest", NEAREST, Words::ending().shifted(-10, 0));
    let fp8 = panel(1, &groups, 0.975..1.0, 0.01, None)?;
    let title = "Stalled share of second moments at β₂ = 0.999; predictions dotted, their errors in points";
    Ok((Picture::new(title, &[13, 9], 1060, vec![bf16, fp8]), table(&groups)?).into())
}
