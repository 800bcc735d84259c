//! Figure 3.

use std::f64::consts::PI;

use halfulp::{Format, stall};
use plotters::style::RGBColor;

use crate::plot::{Axis, MUTED, NEAREST, NOTE, PAPER, Panel, Picture, Points, STOCHASTIC, Words, mix};
use crate::{Drawing, Error, Figure};

pub(crate) const FIGURE: Figure = Figure {
    id: "3",
    file: "03-less-precision-more-stalling",
    title: "Less precision, more stalling",
    alt: "Left: stalled share rising from 0 to 1 as the decay goes to 1, earliest for UE2M2, then E4M3, then \
          BF16; the stochastic lines rise more slowly than those of nearest, which leap where rho is 1. Right: bell curves of the gradient, \
          the part that stalls filled: a wide middle for nearest, less for stochastic.",
    caption: "Left: the predicted probability that a second moment does not change in a step, at its stationary \
              value and at the typical mantissa, for 7, 3 and 2 fraction bits. Right: the density of the \
              gradient in BF16 at β₂ = 0.999; filled, the density times the probability that this gradient \
              stalls. The filled area is the probability.",
    see: "The fraction bits decide at which β₂ stalling sets in: each bit less moves the curve to twice the 1 − \
          β₂. Nearest stalls for every gradient below 1.93 σ. Stochastic rounding stalls for certain only at |g| \
          = σ, where there is nothing to add, and less often the farther from it.",
    draw,
};

/// Abscissas of the left panel, as k in `beta2 = 1 - 10^-k`.
const PER_DECADE: i32 = 40;

pub(crate) fn beta2(k: f64) -> f64 {
    1.0 - libm::exp10(-k)
}

/// The axis of `beta2 = 1 - 10^-k`, up to an end.
pub(crate) fn beta2_axis(end: f64) -> Axis {
    let ticks = [(1.0, "0.9"), (2.0, "0.99"), (3.0, "0.999"), (4.0, "0.9999")];
    Axis::linear("β₂", 1.0..end, 1.0).ticks(ticks)
}

fn shares() -> Result<Panel, Error> {
    let mut panel = Panel::new("Stalled share against β₂", beta2_axis(4.0), Axis::linear("probability", 0.0..1.0, 0.2));
    for format in [Format::BF16, Format::E4M3, Format::UE2M2] {
        let mut lines: [Points; 2] = Default::default();
        for i in PER_DECADE..=4 * PER_DECADE {
            let k = f64::from(i) / f64::from(PER_DECADE);
            let share = stall::probability(format, beta2(k))?;
            lines[0].push((k, share.nearest));
            lines[1].push((k, share.stochastic));
        }
        let [nearest, stochastic] = lines;
        panel.line(format!("{format} nearest"), nearest, NEAREST, 4);
        panel.line(format!("{format} stochastic"), stochastic, STOCHASTIC, 4);
    }
    for (at, text) in [((2.58, 0.42), "BF16"), ((1.34, 0.42), "E4M3"), ((1.03, 0.965), "UE2M2")] {
        panel.words(at, text, NOTE, Words::default().bold());
    }
    panel.label((2.75, 0.14), "nearest", NEAREST);
    panel.label((2.75, 0.07), "stochastic", STOCHASTIC);
    Ok(panel)
}

/// The density of the gradient, and what of it stalls.
fn density(title: &str, color: RGBColor, stalls: impl Fn(f64) -> f64, share: f64) -> Panel {
    let mut panel = Panel::new(
        title,
        Axis::linear("gradient, in σ", -4.0..4.0, 2.0),
        Axis::linear("density, BF16 at β₂ = 0.999", 0.0..0.5, 0.1),
    );
    let abscissas = || (-200..=200).map(|i| f64::from(i) / 50.0);
    let normal = |x: f64| libm::exp(-x * x / 2.0) / (2.0 * PI).sqrt();
    panel.area("stalls", abscissas().map(|x| (x, normal(x) * stalls(x))).collect(), 0.0, mix(PAPER, color, 0.45));
    panel.line("density", abscissas().map(|x| (x, normal(x))).collect(), MUTED, 3);
    panel.words((0.0, 0.46), format!("stalls: {:.1} %", 100.0 * share), color, Words::centred().bold());
    panel
}

fn draw() -> Result<Drawing, Error> {
    let (format, beta2) = (Format::BF16, 0.999);
    let rho = stall::rho(format, beta2)?;
    let share = stall::probability(format, beta2)?;
    // |step| in ulp is |z - 1|/(2 rho).
    let step = move |x: f64| (x * x - 1.0).abs() / (2.0 * rho);
    let nearest = density("Nearest", NEAREST, move |x| f64::from(u8::from(step(x) < 0.5)), share.nearest);
    let stochastic = density("Stochastic", STOCHASTIC, move |x| (1.0 - step(x)).max(0.0), share.stochastic);
    Ok(Picture::new(
        "How often a second moment stands still, as predicted",
        &[9, 5, 5],
        760,
        vec![shares()?, nearest, stochastic],
    )
    .into())
}
