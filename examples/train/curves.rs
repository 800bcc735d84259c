//! The picture of a log.

use std::ops::Range;

use plotters::style::RGBColor;

use crate::log::{Log, Row};
use crate::options::Setup;
use crate::plot::{Axis, INK, MUTED, NOTE, PAPER, Panel, Picture, Points, STOCHASTIC, Words, mix, thousands};
use crate::table::six_digits;

/// Means that a curve is made of: of losses and norms, and of shares, which resets break off.
const MEANS: usize = 80;
const SHARES: usize = 400;

/// Of what a mean is made of, drawn under it.
fn raw() -> RGBColor {
    mix(PAPER, MUTED, 0.5)
}

pub(crate) fn draw(setup: &Setup, log: &Log) -> Picture {
    let title = format!("Digits, 8-bit AdamW, {} steps, seed {}", thousands(setup.steps as f64), setup.seed);
    let panels = vec![loss(setup, log), learning_rate(setup, log), norm(setup, log), stalls(setup, log)];
    Picture::new(title, &[1, 1], 1040, panels)
}

fn steps(setup: &Setup) -> Axis {
    let steps = setup.steps as f64;
    Axis::linear("step", 0.0..steps, tick(steps, 5.0))
}

/// The smallest of 1, 2, 5, 10, ... times a power of ten, that has at most so many multiples up to an end.
fn tick(end: f64, most: f64) -> f64 {
    let power = libm::exp10(libm::floor(libm::log10(end / most)));
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|k| k * power).find(|tick| end / tick <= most).unwrap_or(end)
}

/// What a row says, at its step, where it says something finite.
fn points(log: &Log, value: impl Fn(&Row) -> Option<f64>) -> Points {
    let points = log.rows.iter().zip(1u32..).filter_map(|(row, step)| Some((step.into(), value(row)?)));
    points.filter(|(_, value)| value.is_finite()).collect()
}

/// Means over runs of steps, in their middles.
fn means(points: &Points, log: &Log, number: usize) -> Points {
    let mean = |run: &[(f64, f64)]| {
        let sum = run.iter().fold((0.0, 0.0), |sum, at| (sum.0 + at.0, sum.1 + at.1));
        (sum.0 / run.len() as f64, sum.1 / run.len() as f64)
    };
    points.chunks(log.rows.len().div_ceil(number)).map(mean).collect()
}

/// Whole powers of ten, or halves of them, around values, and room for words above.
fn around<'a>(values: impl IntoIterator<Item = &'a (f64, f64)>) -> Range<f64> {
    let positive = values.into_iter().map(|(_, value)| *value).filter(|value| *value > 0.0);
    let (low, high) = positive.fold((f64::INFINITY, 0f64), |(low, high), value| (low.min(value), high.max(value)));
    if low > high {
        return 0.1..10.0;
    }
    let halves = |x: f64| 2.0 * libm::log10(x);
    libm::exp10(libm::floor(halves(low)) / 2.0)..libm::exp10(libm::ceil(halves(2.0 * high)) / 2.0)
}

/// A logarithmic axis with ticks at powers of ten, and at two and five times these where there are few.
fn logarithmic(name: &str, range: Range<f64>) -> Axis {
    let powers = libm::floor(libm::log10(range.start)) as i32..=libm::ceil(libm::log10(range.end)) as i32;
    let few = range.end / range.start < 300.0;
    let multiples: &[f64] = if few { &[1.0, 2.0, 5.0] } else { &[1.0] };
    let ticks = powers.flat_map(|k| multiples.iter().map(move |m| m * libm::exp10(k.into())));
    let ticks: Vec<_> = ticks.filter(|at| range.contains(at)).map(|at| (at, six_digits(at))).collect();
    Axis::log(name, range).ticks(ticks)
}

/// Words at the top right, one after another from the right, each in the colour of what it names.
fn legend<const N: usize>(panel: &mut Panel, at: (f64, f64), words: [(&str, RGBColor); N]) {
    let mut right = -8;
    for (text, color) in words.into_iter().rev() {
        panel.words(at, text, color, Words::ending().shifted(right, 18));
        right -= 14 * text.chars().count() as i32 + 24;
    }
}

fn loss(setup: &Setup, log: &Log) -> Panel {
    let batches = points(log, |row| Some(row.loss));
    let test = points(log, |row| row.test);
    let range = around(batches.iter().chain(&test));
    let corner = (setup.steps as f64, range.end);
    let mut panel = Panel::new("Loss", steps(setup), logarithmic("mean cross-entropy, nats", range));
    let mean = means(&batches, log, MEANS);
    panel.line("loss of the batch", batches, raw(), 2);
    panel.line("its mean", mean, STOCHASTIC, 4);
    panel.line("test loss", test.clone(), INK, 3);
    panel.dots("", test, INK, 5);
    legend(&mut panel, corner, [("a batch", MUTED), ("mean of batches", STOCHASTIC), ("test images", INK)]);
    panel
}

fn learning_rate(setup: &Setup, log: &Log) -> Panel {
    let rates = points(log, |row| Some(row.lr));
    let end = if setup.lr > 0.0 { 1.15 * setup.lr } else { 1.0 };
    let tick = tick(end, 4.0);
    let multiples = (0..).map(|k| f64::from(k) * tick).take_while(|at| *at <= end);
    let ticks = multiples.map(|at| (at, six_digits(at)));
    let mut panel =
        Panel::new("Learning rate", steps(setup), Axis::linear("of both groups", 0.0..end, tick).ticks(ticks).room(90));
    panel.line("learning rate", rates, STOCHASTIC, 4);
    panel
}

fn norm(setup: &Setup, log: &Log) -> Panel {
    let norms = points(log, |row| Some(row.norm));
    let clip = [(0.0, setup.clip), (setup.steps as f64, setup.clip)];
    // Far from all norms it would leave no room for them.
    let near = norms.iter().any(|(_, norm)| (0.01..100.0).contains(&(norm / setup.clip)));
    let clip = if near { &clip[..] } else { &[] };
    let range = around(norms.iter().chain(clip));
    let corner = (setup.steps as f64, range.end);
    let mut panel = Panel::new("Global norm of the gradients", steps(setup), logarithmic("before clipping", range));
    let mean = means(&norms, log, MEANS);
    panel.line("gradient norm", norms, raw(), 2);
    panel.line("its mean", mean, STOCHASTIC, 4);
    panel.dotted("", clip.into(), INK);
    legend(
        &mut panel,
        corner,
        [
            ("a batch", MUTED),
            ("mean of batches", STOCHASTIC),
            (&format!("clipped above {}", six_digits(setup.clip)), INK),
        ],
    );
    panel
}

fn stalls(setup: &Setup, log: &Log) -> Panel {
    let measured = points(log, |row| row.stalled.map(|[measured, _]| measured));
    let predicted = points(log, |row| row.stalled.map(|[_, predicted]| predicted));
    let ticks = [(0.0, "0"), (0.2, "0.2"), (0.4, "0.4"), (0.6, "0.6"), (0.8, "0.8"), (1.0, "1")];
    let axis = Axis::linear("share of UE4M4 values that a step leaves as they were", 0.0..1.2, 0.2).ticks(ticks);
    let mut panel = Panel::new("Stalled second moments", steps(setup), axis);
    let mean = means(&measured, log, SHARES);
    panel.line("measured", measured, raw(), 2);
    panel.line("its mean", mean, STOCHASTIC, 4);
    panel.dotted("predicted", predicted, INK);
    for (step, _) in points(log, |row| (!row.resets.is_empty()).then_some(0.0)) {
        panel.guide(vec![(step, 1.01), (step, 1.06)], NOTE, 3);
    }
    legend(
        &mut panel,
        (setup.steps as f64, 1.2),
        [("reset", NOTE), ("a step", MUTED), ("mean of steps", STOCHASTIC), ("predicted", INK)],
    );
    panel
}
