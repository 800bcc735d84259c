//! Figure 11.

use halfulp::stall::{Scaling, Simulation, Start, Storage, Variances, noise};
use plotters::style::RGBColor;

use crate::plot::{Axis, INK, MUTED, NEAREST, Panel, Picture, STOCHASTIC, Words, mix};
use crate::prediction::{beta2, beta2_axis};
use crate::second_moment::unbounded;
use crate::{Drawing, Error, Figure};

pub(crate) const FIGURE: Figure = Figure {
    id: "11",
    file: "11-what-the-noise-costs",
    title: "What the noise costs",
    alt: "Three panels over the decay. The variance of stochastically rounded moments levels off at a height set \
          by the fraction bits, measured dots on the lines of the law, higher under a moving scale. The mean \
          under nearest rounding leaves 1, in coarse formats down to a fiftieth; that of stochastic rounding stays \
          at 1.",
    caption: "Relative variance of stored second moments under stochastic rounding, simulated (dots, 2048 \
              coordinates whose variances spread evenly over a binade: a standard error of 3 to 4 %) and by the \
              law of this crate (lines): on a grid that stands still, and under a float scale that follows the \
              largest of each 128 values in every step, for which the line is an upper bound. Dotted: the \
              variance of the average in exact arithmetic. Right: the mean of bias-corrected moments, from zero, \
              after three memories 1/(1 − β₂). Fraction bits as in BF16 (7), UE4M4 (4), E4M3 (3) and UE2M2 (2), \
              exponents without end.",
    see: "From the β₂ on at which most steps stall, the noise no longer depends on β₂: it is 0.349 ε, a standard \
          deviation of 5 % in BF16 and 21 % in E4M3. A scale that moves adds to it, since every stored value is \
          then rounded again in every step. Nearest rounding has no such noise, and a mean that is wrong by far \
          more.",
    draw,
};

/// Fraction bits, and the format known for them.
const FORMATS: [(u8, &str); 4] = [(7, "BF16"), (4, "UE4M4"), (3, "E4M3"), (2, "UE2M2")];
/// k of `beta2 = 1 - 10^-k` at which is measured.
const MEASURED: [f64; 7] = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0];
/// Coordinates that share a scale.
const BLOCK: usize = 128;

/// Shades of a colour, one a format, the finest format the palest.
fn shade(color: RGBColor, i: usize) -> RGBColor {
    mix(color, INK, 0.2 * i as f64)
}

/// Mean and variance after three memories (bias-corrected for a start at zero).
fn measure(k: f64, storage: Storage, start: Start) -> Result<(f64, f64), Error> {
    let memory = libm::exp10(k);
    let simulation = Simulation {
        beta: beta2(k),
        storage,
        start,
        variances: Variances::Binade(1.0),
        coordinates: 2048,
        checkpoints: vec![libm::round(3.0 * memory) as u64],
        ..Simulation::default()
    };
    let report = simulation.run()?;
    let last = report.checkpoints.last().ok_or("a report without checkpoints")?;
    Ok((if start == Start::Zero { last.corrected_mean() } else { last.mean }, last.variance))
}

fn variance(title: &str, scaling: Scaling, law: fn(halfulp::stall::Noise) -> f64) -> Result<Panel, Error> {
    let mut panel = Panel::new(title, beta2_axis(4.9), Axis::log("variance of v over σ⁴", 7e-5..0.4));
    let fine = || (10..=40).map(|i| f64::from(i) / 10.0);
    for (i, (bits, name)) in FORMATS.into_iter().enumerate() {
        let (format, color) = (unbounded(bits)?, shade(STOCHASTIC, i));
        let line = fine().map(|k| Ok((k, law(noise(format, beta2(k))?)))).collect::<Result<Vec<_>, Error>>()?;
        let end = line.last().map_or(0.0, |(_, y)| *y);
        panel.line(format!("{name} law"), line, color, 3);
        let storage = Storage::stochastic(format, 7).scaled(scaling);
        let dots = MEASURED.map(|k| measure(k, storage, Start::Exact).map(|(_, variance)| (k, variance)));
        panel.dots(format!("{name} measured"), dots.into_iter().collect::<Result<_, _>>()?, color, 7);
        panel.words((4.0, end), name, color, Words::default().shifted(14, 0));
    }
    let exact = fine().map(|k| (k, 2.0 * (1.0 - beta2(k)) / (1.0 + beta2(k)))).collect();
    panel.dotted("exact arithmetic", exact, INK);
    panel.words((3.0, 5e-4), "exact", INK, Words::ending());
    Ok(panel)
}

fn bias() -> Result<Panel, Error> {
    let ticks = [(0.01, "0.01"), (0.03, "0.03"), (0.1, "0.1"), (0.3, "0.3"), (1.0, "1")];
    let mut panel = Panel::new(
        "The bias of nearest beside it",
        beta2_axis(4.9),
        Axis::log("mean of v over σ²", 0.01..2.5).ticks(ticks),
    );
    panel.guide(vec![(1.0, 1.0), (4.0, 1.0)], MUTED, 2);
    for (i, (bits, name)) in FORMATS.into_iter().enumerate() {
        let format = unbounded(bits)?;
        for (kind, storage, color) in [
            ("stochastic", Storage::stochastic(format, 7), shade(STOCHASTIC, i)),
            ("nearest", Storage::nearest(format), shade(NEAREST, i)),
        ] {
            let means = MEASURED.map(|k| measure(k, storage, Start::Zero).map(|(mean, _)| (k, mean)));
            let means = means.into_iter().collect::<Result<Vec<_>, _>>()?;
            let end = means.last().map_or(0.0, |(_, y)| *y);
            panel.line(format!("{name} {kind}"), means.clone(), color, 3);
            panel.dots("", means, color, 6);
            if kind == "nearest" {
                panel.words((4.0, end), name, color, Words::default().shifted(14, 0));
            }
        }
    }
    panel.words((4.0, 1.0), "stochastic", STOCHASTIC, Words::default().shifted(14, -14));
    panel.words((4.0, 1.0), "all four", STOCHASTIC, Words::default().shifted(14, 14));
    panel.label((1.2, 0.1), "nearest", NEAREST);
    Ok(panel)
}

fn draw() -> Result<Drawing, Error> {
    let still = variance("Noise, still grid", Scaling::Unscaled, |noise| noise.still_grid)?;
    let moving = variance("Noise, moving scale", Scaling::Amax { block: BLOCK }, |noise| noise.moving_grid)?;
    Ok(Picture::new(
        "Stochastic rounding is noisy, nearest rounding wrong",
        &[1, 1, 1],
        860,
        vec![still, moving, bias()?],
    )
    .into())
}
