//! Figure 10.

use halfulp::cast::Cast;
use halfulp::random::{Draws, Role, SrStates};
use halfulp::{Draw, Format, bf16};
use rayon::prelude::*;

use crate::plot::{Axis, INK, NEAREST, Panel, Picture, Points, STOCHASTIC, power_of_ten};
use crate::{Drawing, Error, Figure};

pub(crate) const FIGURE: Figure = Figure {
    id: "10",
    file: "10-random-numbers-repeat",
    title: "When the random numbers repeat",
    alt: "Share of values that have not moved, on a logarithmic axis, against steps. The 32-bit counter stays at \
          0.77 from step 128 on; stream 1 falls along the ideal line to one in a hundred thousand.",
    caption: "The second moments of a tensor of 2²⁴ parameters, each a BF16 value of 1.25 that is offered 0.002 \
              ulp in every step, 10,000 steps, stochastic rounding with the real words at 131,072 of the \
              coordinates, in 32 runs spread evenly. Red: the counter of sr-states 0.1.0, which moves on by 2²⁵ \
              a step and wraps at 2³². Purple: stream 1. Dotted: independent draws. A line ends where every \
              sampled coordinate has moved.",
    see: "After 128 steps the 32-bit counter comes round, and every coordinate sees its 128 words again for \
          ever: whoever has not moved by then never will, 77 % of all, where independent draws would leave 2 in \
          10⁹ after 10,000 steps. Stream 1 follows the ideal as far as the sample can tell.",
    draw,
};

/// Parameters of the tensor.
const N: u64 = 1 << 24;
const STEPS: u64 = 10_000;
const START: f32 = 1.25;
const UPDATE: f64 = 0.002;
/// Runs of coordinates that are followed, and the length of each.
const RUNS: u64 = 32;
const RUN: usize = 4096;

/// Rounds of a run: which coordinates still have their first value after each step, as a count.
fn unmoved<D: Draws>(draw: impl Fn(u64) -> D) -> Result<Vec<u64>, Error> {
    let proposed = vec![START + (UPDATE * Format::BF16.ulp(START.into())) as f32; RUN];
    let mut stored = vec![bf16::ZERO; RUN];
    let mut still = vec![true; RUN];
    let mut counts = vec![RUN as u64];
    for step in 1..=STEPS {
        if counts.last() == Some(&0) {
            break;
        }
        Cast::stochastic(draw(step)).into_slice(&proposed, &mut stored)?;
        for (still, stored) in still.iter_mut().zip(&stored) {
            *still &= stored.to_f32() == START;
        }
        counts.push(still.iter().filter(|still| **still).count() as u64);
    }
    Ok(counts)
}

/// The share of all followed coordinates that never moved, after each step.
fn share<D: Draws>(draw: impl Fn(u64, u64) -> D + Sync) -> Result<Vec<f64>, Error> {
    let runs: Vec<_> =
        (0..RUNS).into_par_iter().map(|run| unmoved(|step| draw(step, run * (N / RUNS)))).collect::<Result<_, _>>()?;
    let total = |step: usize| runs.iter().map(|counts| counts.get(step).unwrap_or(&0)).sum::<u64>();
    Ok((0..=STEPS as usize).map(|step| total(step) as f64 / (RUNS as f64 * RUN as f64)).collect())
}

/// Every 20th step, as long as anything is left.
fn thinned(share: &[f64]) -> Points {
    let steps = share.iter().zip(0u32..).step_by(20);
    steps.take_while(|(share, _)| **share > 0.0).map(|(share, step)| (step.into(), *share)).collect()
}

fn draw() -> Result<Drawing, Error> {
    // A step of AdamW draws for m at offset + i and for v at offset + n + i, and moves the offset on by 2n.
    let counter = share(|step, first| SrStates::seeded(0).advanced((step - 1) * 2 * N + N + first))?;
    let stream = share(|step, first| Draw::seeded(0).step(step).role(Role::SecondMoment).at(first))?;
    let moves = libm::round(UPDATE * 65536.0) / 65536.0;
    let ideal = |step: f64| libm::exp(step * libm::log1p(-moves));
    let powers = [0, -2, -4, -6, -8].map(|k| (libm::exp10(k.into()), power_of_ten(k)));
    let mut panel = Panel::new(
        "",
        Axis::linear("steps", 0.0..10_000.0, 2000.0),
        Axis::log("share of coordinates that never moved", 1e-9..1.5).ticks(powers),
    );
    panel.dotted("independent draws", (0..=100).map(|k| 100.0 * f64::from(k)).map(|s| (s, ideal(s))).collect(), INK);
    panel.line("stream 1", thinned(&stream), STOCHASTIC, 4);
    panel.line("32-bit counter", thinned(&counter), NEAREST, 4);
    let stuck = counter[STEPS as usize];
    panel.label((5200.0, 0.28), format!("32-bit counter: {:.0} % never move", 100.0 * stuck), NEAREST);
    panel.label((1300.0, 4e-4), "stream 1,", STOCHASTIC);
    panel.label((1300.0, 1.3e-4), "131,072 coordinates", STOCHASTIC);
    panel.label((7000.0, 1.2e-5), "independent draws:", INK);
    let left = format!("{:.0} × 10⁻⁹ after 10,000 steps", 1e9 * ideal(STEPS as f64));
    panel.label((7000.0, 4e-6), left, INK);
    Ok(Picture::new("An update of 0.002 ulp in each step: who never moves", &[1], 900, vec![panel]).into())
}
