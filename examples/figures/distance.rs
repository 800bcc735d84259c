//! Figure 4.

use halfulp::cast::Cast;
use halfulp::{Draw, Format, bf16};

use crate::plot::{Axis, INK, MUTED, NOTE, PATH, Panel, Picture, STOCHASTIC, Words};
use crate::{Drawing, Error, Figure};

pub(crate) const FIGURE: Figure = Figure {
    id: "4",
    file: "04-distance-becomes-probability",
    title: "Distance becomes probability",
    alt: "Left: 96 dots on two levels, about three in ten on the upper. Middle: a running mean that settles on \
          0.3 within a narrowing band. Right: errors of the mean falling along the line of one over root n.",
    caption: "The f32 value 0.3 of the way from 1 to 1.0078125, its neighbour in BF16, rounded stochastically \
              2048 times. Left: the first 96 results of seed 7. Middle: the mean of the first n, against the \
              fraction and one standard error, √(p(1−p)/n), on either side. Right: the error of that mean, and \
              its root mean square over 256 seeds.",
    see: "No draw gives the value; the mean of draws does. Its error halves with four times as many draws, as it \
          must for independent draws: the dots lie on the line.",
    draw,
};

const FRACTION: f64 = 0.3;
const DRAWS: usize = 2048;
const SHOWN: usize = 96;
const SEEDS: u64 = 256;
const SIZES: [usize; 7] = [32, 64, 128, 256, 512, 1024, 2048];

/// Whether each of the draws of a seed went up.
fn ups(seed: u64) -> Result<Vec<f64>, Error> {
    let x = vec![(1.0 + FRACTION * Format::BF16.epsilon()) as f32; DRAWS];
    let codes: Vec<bf16> = Cast::stochastic(Draw::seeded(seed)).to_vec(&x)?;
    Ok(codes.into_iter().map(|code| f64::from(u8::from(code > bf16::ONE))).collect())
}

/// The mean of the first 1, 2, ... draws.
fn means(ups: &[f64]) -> Vec<f64> {
    let sums = ups.iter().scan(0.0, |sum, up| {
        *sum += up;
        Some(*sum)
    });
    sums.zip(1u32..).map(|(sum, n)| sum / f64::from(n)).collect()
}

fn standard_error(n: f64) -> f64 {
    (FRACTION * (1.0 - FRACTION) / n).sqrt()
}

fn draws(ups: &[f64]) -> Panel {
    let levels = [(0.0, "1"), (FRACTION, "target"), (1.0, "1.0078125")];
    let mut panel = Panel::new(
        "The first 96 draws",
        Axis::linear("draw", 0.0..97.0, 24.0),
        Axis::linear("stored value", -0.15..1.25, 1.0).ticks(levels).room(112),
    );
    panel.dotted("target", vec![(0.0, FRACTION), (97.0, FRACTION)], INK);
    let points = ups[..SHOWN].iter().zip(1u32..).map(|(up, n)| (n.into(), *up)).collect();
    panel.dots("draw", points, STOCHASTIC, 5);
    let up: f64 = ups[..SHOWN].iter().sum();
    panel.words((48.5, 1.12), format!("{up} up"), STOCHASTIC, Words::centred());
    panel.words((48.5, -0.1), format!("{} down", SHOWN as f64 - up), STOCHASTIC, Words::centred());
    panel
}

/// Sizes at which lines are drawn, evenly on a logarithmic axis, with the sizes of [`SIZES`] among them.
fn abscissas() -> impl Iterator<Item = usize> {
    let all = (0..=220).map(|k| libm::round(libm::exp2(f64::from(k) / 20.0)) as usize);
    all.scan(0, |last, n| Some((std::mem::replace(last, n), n))).filter(|(last, n)| last != n).map(|(_, n)| n)
}

fn mean(means: &[f64]) -> Panel {
    let ticks = [1.0, 8.0, 64.0, 512.0].map(|n| (n, n.to_string()));
    let mut panel = Panel::new(
        "The mean of n draws",
        Axis::log("draws n", 1.0..2048.0).ticks(ticks),
        Axis::linear("fraction that went up", 0.0..1.0, 0.2),
    );
    for side in [-1.0, 1.0] {
        let band = abscissas().map(|n| n as f64).map(|n| (n, (FRACTION + side * standard_error(n)).max(0.0)));
        panel.line(format!("target {side:+} standard error"), band.collect(), PATH, 3);
    }
    panel.dotted("target", vec![(1.0, FRACTION), (2048.0, FRACTION)], INK);
    panel.line("mean", abscissas().map(|n| (n as f64, means[n - 1])).collect(), STOCHASTIC, 4);
    panel.label((20.0, 0.86), "p = 0.3, dotted", INK);
    panel.label((20.0, 0.79), "± one standard error", NOTE);
    panel.label((20.0, 0.72), "mean, seed 7", STOCHASTIC);
    panel
}

fn error(means: &[f64]) -> Result<Panel, Error> {
    let ticks = SIZES.map(|n| (n as f64, n.to_string()));
    let shares = [(0.001, "0.001"), (0.003, "0.003"), (0.01, "0.01"), (0.03, "0.03"), (0.1, "0.1")];
    let mut panel = Panel::new(
        "The error of the mean",
        Axis::log("draws n", 26.0..2500.0).ticks(ticks.into_iter().step_by(2)),
        Axis::log("distance from the fraction", 5e-4..0.3).ticks(shares),
    );
    let mut squares = SIZES.map(|_| 0.0);
    for seed in 0..SEEDS {
        let means = self::means(&ups(seed)?);
        for (sum, n) in squares.iter_mut().zip(SIZES) {
            *sum += (means[n - 1] - FRACTION) * (means[n - 1] - FRACTION);
        }
    }
    let law = SIZES.map(|n| (n as f64, standard_error(n as f64)));
    let own = abscissas().filter(|&n| n >= SIZES[0]).map(|n| (n as f64, (means[n - 1] - FRACTION).abs()));
    panel.line("error, seed 7", own.collect(), PATH, 3);
    panel.line("sqrt(p(1-p)/n)", law.into(), MUTED, 3);
    let roots = squares.iter().zip(SIZES).map(|(sum, n)| (n as f64, (sum / SEEDS as f64).sqrt()));
    panel.dots("root mean square of 256 seeds", roots.collect(), STOCHASTIC, 8);
    panel.label((130.0, 0.21), "√(p(1−p)/n)", NOTE);
    panel.label((130.0, 0.147), "256 seeds, rms", STOCHASTIC);
    panel.label((36.0, 0.0009), "one seed, pale", NOTE);
    Ok(panel)
}

fn draw() -> Result<Drawing, Error> {
    let ups = ups(7)?;
    let means = means(&ups);
    let panels = vec![draws(&ups), mean(&means), error(&means)?];
    Ok(Picture::new("A value 0.3 of the way between neighbours, rounded 2048 times", &[1, 1, 1], 760, panels).into())
}
