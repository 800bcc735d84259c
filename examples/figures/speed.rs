//! Figure 9, from the measurements recorded on one H200.

use std::path::PathBuf;

use serde_json::Value;

use crate::plot::{Axis, MUTED, NEAREST, NOTE, Panel, Picture, STOCHASTIC, TEXT, Words, thousands};
use crate::table::Table;
use crate::{Drawing, Error, Figure, root};

pub(crate) const FIGURE: Figure = Figure {
    id: "9",
    file: "09-time-per-call",
    title: "Time per call",
    alt: "Dots on a logarithmic axis of microseconds. Of the casts, this crate's two take as long as a copy, as do \
          PyTorch's nearest and Triton with blocks of 1024; eager PyTorch takes some forty times as long. Of the AdamW \
          steps this crate's two and Triton's take about as long as a copy.",
    caption: "Microseconds a call on one NVIDIA H200, 2²⁴ elements in one tensor. Filled: medians of one run, \
              this crate's kernels and their peers side by side (benches/peers/results, newest record). Open: \
              not measured here, the values of the companion post for its kernels and PyTorch's, on its H200 and \
              with its way of timing. The copy moves as many bytes as the kernel reads and writes.",
    see: "Rounding stochastically is free where the kernel is bound by memory: the draws hide behind the loads, in \
          Triton too if its blocks are large enough. In eager PyTorch the same arithmetic costs some forty times \
          as much, since each of its steps goes through memory.",
    draw,
};

/// A row: what it is called here, the contender in the record, and the post's value.
type Row = (&'static str, Option<&'static str>, Option<f64>);

const CAST: [Row; 9] = [
    ("halfulp, stochastic", Some("cast-bf16-stochastic"), None),
    ("halfulp, nearest", Some("cast-bf16-nearest"), None),
    ("copy of 6 bytes an element", Some("copy-6"), None),
    ("PyTorch, nearest", Some("torch nearest"), Some(32.22)),
    ("Triton, nearest", None, Some(61.97)),
    ("Triton, stochastic, blocks of 256", Some("Triton SR, block 256"), Some(62.42)),
    ("Triton, stochastic, blocks of 1024", Some("Triton SR, block 1024"), None),
    ("torch.compile, stochastic", Some("torch.compile SR"), Some(120.94)),
    ("PyTorch eager, stochastic", Some("torch eager SR"), Some(2236.56)),
];

const ADAMW: [Row; 9] = [
    ("halfulp, stochastic", Some("adamw-20-stochastic"), None),
    ("halfulp, nearest", Some("adamw-20-nearest"), None),
    ("copy of 20 bytes an element", Some("copy-20"), None),
    ("Triton, stochastic", Some("Triton SR, BF16 states"), Some(84.03)),
    ("f32 states, PyTorch fused", Some("torch fused, FP32 states"), None),
    ("f32 states, Triton", None, Some(114.99)),
    ("whole step(), Triton, stochastic", None, Some(145.90)),
    ("whole step(), torch.compile, stochastic", None, Some(381.07)),
    ("whole step(), PyTorch eager, stochastic", None, Some(5033.19)),
];

const OTHERS: [Row; 6] = [
    ("SGD, momentum, step(), Triton, stochastic", None, Some(122.94)),
    ("the same, torch.compile", None, Some(147.20)),
    ("the same, PyTorch eager", None, Some(2494.40)),
    ("AdamW step(), 813,072 in 10 tensors", None, Some(520.50)),
    ("the same, 32 tensors of 32,768", None, Some(1296.36)),
    ("the same, 32 tensors of 524,288", None, Some(1302.90)),
];

/// The newest record of an H200, by name.
fn record() -> Result<Value, Error> {
    let directory = root().join("benches/peers/results");
    let files =
        std::fs::read_dir(&directory)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<PathBuf>, Error>>()?;
    let name = |path: &PathBuf| path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let records = files.iter().map(name).filter(|name| name.starts_with("h200-") && name.ends_with(".json"));
    let newest = records.max().ok_or("benches/peers/results: expected a file h200-*.json, found none")?;
    Ok(serde_json::from_slice(&std::fs::read(directory.join(newest))?)?)
}

/// Median of the samples of a contender, in microseconds.
fn median(record: &Value, group: &str, contender: &str) -> Result<f64, Error> {
    let samples = record["groups"][group][contender]["samples"].as_array().into_iter().flatten();
    let mut samples: Vec<f64> = samples.filter_map(Value::as_f64).collect();
    samples.sort_by(f64::total_cmp);
    let middle = |i: usize| samples.get(i).copied();
    let (low, high) = (middle(samples.len().saturating_sub(1) / 2), middle(samples.len() / 2));
    let missing = || format!("groups / {group} / {contender}: expected samples in the record, found none");
    Ok((low.ok_or_else(missing)? + high.ok_or_else(missing)?) / 2.0)
}

fn panel(title: &str, group: &str, rows: &[Row], record: &Value, table: &mut Table) -> Result<Panel, Error> {
    let ticks = [30.0, 100.0, 300.0, 1000.0, 3000.0].map(|us| (us, thousands(us)));
    let names = rows.iter().zip((0..).map(f64::from)).map(|(&(name, ..), y)| (y, name));
    let mut panel = Panel::new(
        title,
        Axis::log("microseconds a call", 15.0..9000.0).ticks(ticks),
        Axis::linear("", rows.len() as f64 - 0.4..-0.6, 1.0).ticks(names).room(500),
    );
    for (&(name, contender, post), y) in rows.iter().zip((0..).map(f64::from)) {
        let color = match name {
            _ if name.contains("nearest") => NEAREST,
            _ if name.starts_with("f32") || name.starts_with("copy") => MUTED,
            _ => STOCHASTIC,
        };
        let measured = contender.map(|contender| median(record, group, contender)).transpose()?;
        if let (Some(measured), Some(post)) = (measured, post) {
            panel.guide(vec![(measured, y), (post, y)], MUTED, 2);
        }
        for (us, source) in [(post, "the post"), (measured, "this record")] {
            let Some(us) = us else { continue };
            if Some(us) == measured {
                panel.dots("", vec![(us, y)], color, 9);
            } else {
                panel.rings("", vec![(us, y)], color, 8);
            }
            let left = measured.is_some_and(|measured| post.is_some_and(|post| us == measured.min(post)));
            let words = if left { Words::ending().shifted(-16, 0) } else { Words::default().shifted(16, 0) };
            let text = if us < 100.0 { format!("{us:.1}") } else { thousands(us.round()) };
            panel.words((us, y), text, NOTE, words.sized(TEXT - 2));
            table.row([title.into(), name.into(), source.into(), us.into()]);
        }
    }
    Ok(panel)
}

fn draw() -> Result<Drawing, Error> {
    let record = record()?;
    let mut table = Table::new(["panel", "what", "source", "microseconds"]);
    let panels = [
        ("Cast, f32 to BF16, 2²⁴ elements", "cast bf16 2^24", &CAST[..]),
        ("AdamW, f32 parameters and gradients, BF16 moments, 2²⁴ elements: the update", "adamw 20 B 2^24", &ADAMW),
        ("Other values of the post: 2²⁴ elements, or many tensors", "", &OTHERS),
    ];
    let panels = panels.map(|(title, group, rows)| panel(title, group, rows, &record, &mut table));
    let title = "Time per call on one H200: filled, measured here; open, the post's values";
    Ok((Picture::new(title, &[1], 1840, panels.into_iter().collect::<Result<_, _>>()?), table).into())
}
