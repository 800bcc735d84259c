//! Figure 2.

use halfulp::Format;
use halfulp::format::FormatError;
use halfulp::stall::{Law, Simulation, Storage, Variances};

use crate::plot::{Axis, INK, MUTED, NEAREST, NOTE, PAPER, Panel, Picture, Points, STOCHASTIC, mix};
use crate::{Drawing, Error, Figure};

pub(crate) const FIGURE: Figure = Figure {
    id: "2",
    file: "02-second-moment",
    title: "Adam's second moment in low precision",
    alt: "Eight panels, BF16 above FP8, four decays. In BF16 nearest parts from f32 at 0.999, where it climbs \
          and stays up, and at 0.9999, where it is flat; in FP8 it never comes down; the stochastic line follows \
          f32 everywhere.",
    caption: "The moment v = β₂v + (1 − β₂)g² of Gaussian gradients whose variance falls from 1 to 0.25 after \
              step 2000, mean of 64 coordinates that start at v = 1. FP8 here has 3 fraction bits and an \
              exponent that does not end (7 bits of it). All four lines of a panel see the same gradients.",
    see: "BF16 rounded to nearest follows at 0.95 and nearly at 0.99; at 0.999 it only ever climbs, and at \
          0.9999 it never moves. FP8 is stuck everywhere: at 0.95 in 1.25 and 2.5, from about 0.97 on in any \
          value. Stochastic rounding has the mean of f32 and some noise on it. At 0.9999 even f32 has not \
          arrived after 6000 steps: that is the memory of the average.",
    draw,
};

const BETAS: [f64; 4] = [0.95, 0.99, 0.999, 0.9999];
const STEPS: u64 = 6000;
const CHANGE: u64 = 2000;
const FACTOR: f64 = 0.25;
/// Steps between points.
const EVERY: usize = 20;
const TOP: f64 = 2.2;

/// A format of these fraction bits whose exponent range, 2^-62 to 2^64, plays no part.
pub(crate) fn unbounded(fraction_bits: u8) -> Result<Format, FormatError> {
    Format::builder(7, fraction_bits).build()
}

fn mean(beta: f64, storage: Storage) -> Result<Points, Error> {
    let simulation = Simulation {
        beta,
        storage,
        law: Law::VarianceChange { after: CHANGE, factor: FACTOR },
        variances: Variances::Equal(1.0),
        coordinates: 64,
        checkpoints: (EVERY as u64..=STEPS).step_by(EVERY).collect(),
        ..Simulation::default()
    };
    let report = simulation.run()?;
    let later = report.checkpoints.iter().map(|at| (at.step as f64, at.mean));
    Ok([(0.0, 1.0)].into_iter().chain(later).collect())
}

fn panel(name: &str, format: Format, beta: f64) -> Result<Panel, Error> {
    let mut panel = Panel::new(
        format!("{name}, β₂ = {beta}"),
        Axis::linear("steps", 0.0..STEPS as f64, 2000.0),
        Axis::linear("mean of v", 0.0..TOP, 0.5),
    );
    let change = CHANGE as f64;
    let truth = vec![(0.0, 1.0), (change, 1.0), (change, FACTOR), (STEPS as f64, FACTOR)];
    panel.dotted("", truth, MUTED);
    // Where they coincide, each shows beside the ones over it.
    panel.line("nearest", mean(beta, Storage::nearest(format))?, NEAREST, 6);
    panel.line("f32", mean(beta, Storage::F32)?, INK, 4);
    panel.line("stochastic", mean(beta, Storage::stochastic(format, 7))?, mix(STOCHASTIC, PAPER, 0.25), 2);
    Ok(panel)
}

fn draw() -> Result<Drawing, Error> {
    let formats = [("BF16", Format::BF16), ("FP8", unbounded(3)?)];
    let all = formats.iter().flat_map(|&(name, format)| BETAS.map(|beta| panel(name, format, beta)));
    let mut panels = all.collect::<Result<Vec<_>, _>>()?;
    for (row, (text, color)) in
        [("nearest", NEAREST), ("stochastic", STOCHASTIC), ("f32", INK), ("variance of g, dotted", NOTE)]
            .iter()
            .enumerate()
    {
        panels[0].label((350.0, 2.05 - 0.2 * row as f64), *text, *color);
    }
    Ok(Picture::new("Mean of 64 second moments; the variance falls after step 2000", &[1, 1, 1, 1], 1080, panels)
        .into())
}
