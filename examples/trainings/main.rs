//! Trains small models on real data with AdamW whose moments are stored in BF16 or E4M3, to nearest or stochastically, and
//! sets the share of second moments that stalled beside what theory predicts.
//!
//! ```text
//! cargo run --release --example trainings [-- --steps N]
//! ```
//!
//! Writes `figures/trainings.json` unless the number of steps is changed. Every run starts from the same weights and sees
//! the same batches; each gradient moves parameters by the unrounded moments. BF16 is unscaled; E4M3 has one power-of-two
//! scale a tensor, and second moments the floor of [`State`]. Measured over the second half of each run, as the meter counts.
//!
//! The prediction takes gradients for Gaussian with a variance that stands still (Topollai, Choromanska, arXiv:2603.16731).
//! Nearest stalls more than that: it ratchets up and leaves the variance behind, the more so where training shrinks gradients.
//! Stochastic rounding stalls more where gradients shrink, and less where their tail is heavy. Columns beside it:
//!
//! - `error`: measured less predicted, in percentage points;
//! - `mostly zero`: share of coordinates whose gradient was zero in more than half of the steps of the first half: a rare
//!   letter, a pixel that is mostly blank, a unit that is mostly off, an image that is rarely drawn. Such a gradient is not
//!   Gaussian: second moments decay most of the time, which nearest never shows in 8 bits of fraction or fewer;
//! - `others`: the stalled share of all other coordinates;
//! - `kurtosis`: fourth moment of a coordinate's gradients over the square of their second, 3 for Gaussian ones; the median
//!   over coordinates, of the second half. A heavy tail has most gradients far below their root mean square, and a moment
//!   that mostly decays;
//! - `level`: mean of a coordinate's stored second moment over the mean square of its gradients, both of the second half;
//!   the median over coordinates. The prediction takes it for 1; far above, no gradient is large enough to move the moment;
//! - `loss`: the mean over the second half.

#[path = "../adamw/data.rs"]
mod data;
mod layers;
#[path = "../adamw/math.rs"]
mod math;
mod models;

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

use halfulp::Format;
use halfulp::optim::{AdamWConfig, Rounding};
use halfulp::random::Role;
use halfulp::stall::{self, Comparison, Scaling, StallCounts, State, Storage};
use rayon::prelude::*;
use serde_json::{Value, json};

use data::Images;
use models::Named;

const STEPS: u64 = 4000;
const SEED: u64 = 0;

const FORMATS: [Format; 2] = [Format::BF16, Format::E4M3];
const ROUNDINGS: [(&str, Rounding); 2] = [("nearest", Rounding::Nearest), ("stochastic", Rounding::stochastic(SEED))];

/// A tensor with its moments.
struct Tensor {
    m: State,
    v: State,
    /// Steps of the first half without a gradient, for each coordinate.
    zeros: Vec<u64>,
    /// Coordinates that are not mostly zero; known after the first half.
    others: Vec<usize>,
    powers: Vec<Powers>,
}

/// Sums over the gradients of a coordinate in the second half.
#[derive(Clone, Copy, Default)]
struct Powers {
    square: f64,
    fourth: f64,
    /// Of the stored second moment.
    moment: f64,
}

impl Tensor {
    fn new(storage: Storage, number: u64, n: usize) -> Result<Self, Box<dyn Error>> {
        let scaling =
            if storage.format == Some(Format::BF16) { Scaling::Unscaled } else { Scaling::PowerOfTwo { block: n } };
        let moment = |role| State::zeroed(storage.scaled(scaling), role, n).map(|state| state.tensor(number));
        let (m, v) = (moment(Role::FirstMoment)?, moment(Role::SecondMoment)?);
        Ok(Self { m, v, zeros: vec![0; n], others: Vec::new(), powers: vec![Powers::default(); n] })
    }
}

/// What was measured.
#[derive(Default)]
struct Outcome {
    all: StallCounts,
    others: StallCounts,
    coordinates: usize,
    mostly_zero: usize,
    zero_gradients: u64,
    kurtosis: f64,
    level: f64,
    loss: f64,
}

fn train(model: &Named, digits: &Images, storage: Storage, steps: u64) -> Result<Outcome, Box<dyn Error>> {
    let mut model = (model.make)(digits);
    let mut parameters = model.initial();
    let tensors = parameters.iter().zip(0..).map(|(tensor, number)| Tensor::new(storage, number, tensor.len()));
    let mut tensors = tensors.collect::<Result<Vec<_>, _>>()?;
    let coordinates = parameters.iter().map(Vec::len).sum();
    let mut outcome = Outcome { coordinates, ..Outcome::default() };
    let config = AdamWConfig::default();
    let half = steps / 2;
    for step in 1..=steps {
        let (gradients, loss) = model.next(&parameters);
        let scalars = config.scalars(step)?;
        for ((parameters, tensor), gradients) in parameters.iter_mut().zip(&mut tensors).zip(&gradients) {
            let (mut new_m, mut new_v) = (tensor.m.values().to_vec(), tensor.v.values().to_vec());
            for (((p, g), m), v) in parameters.iter_mut().zip(gradients).zip(&mut new_m).zip(&mut new_v) {
                [*p, *m, *v] = scalars.step(*p, *g, *m, *v);
            }
            let old = if step > half { Some(tensor.v.clone()) } else { None };
            tensor.m.store(&new_m, step)?;
            tensor.v.store(&new_v, step)?;
            match old {
                None => tensor.zeros.iter_mut().zip(gradients).for_each(|(zeros, g)| *zeros += u64::from(*g == 0.0)),
                Some(old) => outcome.measure(&old, tensor, gradients)?,
            }
        }
        if step == half {
            for tensor in &mut tensors {
                tensor.others = (0..tensor.zeros.len()).filter(|&i| tensor.zeros[i] <= half / 2).collect();
                outcome.mostly_zero += tensor.zeros.len() - tensor.others.len();
            }
        }
        outcome.loss += if step > half { loss / (steps - half) as f64 } else { 0.0 };
    }
    let touched = || tensors.iter().flat_map(|tensor| &tensor.powers).filter(|powers| powers.square > 0.0);
    let measured = (steps - half) as f64;
    outcome.kurtosis = median(touched().map(|powers| powers.fourth * measured / (powers.square * powers.square)));
    outcome.level = median(touched().map(|powers| powers.moment / powers.square));
    Ok(outcome)
}

/// NaN of none.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut all: Vec<f64> = values.collect();
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
}

impl Outcome {
    fn measure(&mut self, old: &State, tensor: &mut Tensor, gradients: &[f32]) -> Result<(), Box<dyn Error>> {
        self.all += Comparison::new(old.view(), tensor.v.view()).gradients(gradients).count()?;
        let [old, new, g] = [old.values(), tensor.v.values(), gradients]
            .map(|values| tensor.others.iter().map(|&i| values[i]).collect::<Vec<f32>>());
        self.others += Comparison::new(&old[..], &new[..]).gradients(&g).count()?;
        for ((powers, g), v) in tensor.powers.iter_mut().zip(gradients).zip(tensor.v.values()) {
            let square = f64::from(*g).powi(2);
            powers.square += square;
            powers.fourth += square * square;
            powers.moment += f64::from(*v);
        }
        self.zero_gradients += gradients.iter().filter(|g| **g == 0.0).count() as u64;
        Ok(())
    }
}

/// Six digits after the point.
fn rounded(x: f64) -> Value {
    if x.is_nan() { Value::Null } else { json!((x * 1e6).round() / 1e6) }
}

/// All runs of a model: lines of the table, and their numbers.
fn runs(model: &Named, digits: &Images, steps: u64) -> Result<(String, Value), String> {
    let (mut lines, mut numbers, mut parameters) = (String::new(), Vec::new(), 0);
    for format in FORMATS {
        let predicted = stall::probability(format, AdamWConfig::default().beta2).map_err(|error| error.to_string())?;
        for ((name, rounding), predicted) in ROUNDINGS.into_iter().zip([predicted.nearest, predicted.stochastic]) {
            let storage = Storage { rounding, ..Storage::nearest(format) };
            let outcome = train(model, digits, storage, steps).map_err(|error| format!("{}: {error}", model.name))?;
            let Outcome { all, others, coordinates, mostly_zero, zero_gradients, kurtosis, level, loss } = outcome;
            parameters = coordinates;
            let mostly_zero = mostly_zero as f64 / coordinates as f64;
            let zero_gradients = zero_gradients as f64 / (coordinates as u64 * (steps - steps / 2)) as f64;
            let (stalled, others) = (all.share(), others.share());
            let untouched = all.untouched as f64 / (all.untouched + all.counted()) as f64;
            lines += &format!(
                "{:<28} {format:<5} {name:<11} {stalled:>8.4} {predicted:>10.4} {:>7.2} {:>12.4} {others:>8.4} {kurtosis:>9.2} {level:>6.3} {loss:>9.5}\n",
                model.name,
                100.0 * (stalled - predicted),
                mostly_zero,
            );
            numbers.push(json!({
                "format": format.to_string(),
                "rounding": name,
                "stalled": rounded(stalled),
                "predicted": rounded(predicted),
                "mostly_zero": rounded(mostly_zero),
                "stalled_others": rounded(others),
                "zero_gradients": rounded(zero_gradients),
                "kurtosis": rounded(kurtosis),
                "level": rounded(level),
                "untouched": rounded(untouched),
                "loss": rounded(loss),
            }));
        }
    }
    Ok((lines, json!({ "model": model.name, "data": model.data, "parameters": parameters, "runs": numbers })))
}

fn run(steps: u64) -> Result<(), Box<dyn Error>> {
    let [digits, _] = data::digits()?;
    let all: Vec<(String, Value)> =
        models::ALL.par_iter().map(|model| runs(model, &digits, steps)).collect::<Result<_, _>>()?;
    println!(
        "{:<28} {:<5} {:<11} {:>8} {:>10} {:>7} {:>12} {:>8} {:>9} {:>6} {:>9}",
        "model", "", "", "stalled", "predicted", "error", "mostly zero", "others", "kurtosis", "level", "loss"
    );
    let (lines, models): (Vec<_>, Vec<_>) = all.into_iter().unzip();
    println!("{}", lines.concat());
    if steps == STEPS {
        let config = AdamWConfig::default();
        let numbers = json!({
            "steps": steps,
            "measured_after": steps / 2,
            "seed": SEED,
            "lr": config.lr,
            "beta1": config.beta1,
            "beta2": config.beta2,
            "scaling": "E4M3: one power of two a tensor",
            "models": models,
        });
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("figures/trainings.json");
        std::fs::write(path, format!("{numbers:#}\n"))?;
        println!("figures/trainings.json");
    }
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let steps = match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => Some(STEPS),
        ["--steps", steps] => steps.parse().ok().filter(|steps| (2..=1_000_000).contains(steps)),
        _ => None,
    };
    let Some(steps) = steps else {
        let got = arguments.join(" ");
        eprintln!("trainings: expected nothing, or --steps and a number from 2 to 1000000, got `{got}`");
        return ExitCode::from(2);
    };
    match run(steps) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("trainings: {error}");
            ExitCode::FAILURE
        }
    }
}
