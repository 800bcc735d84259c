//! Figure 5.

use halfulp::Format;
use halfulp::round::{Mode, Overflow, RandomBits, round};
use plotters::style::RGBColor;

use crate::plot::{Axis, GRID, NEAREST, NOTE, Panel, Picture, Points, STOCHASTIC, Words};
use crate::{Drawing, Error, Figure};

pub(crate) const FIGURE: Figure = Figure {
    id: "5",
    file: "05-delivered-update",
    title: "A state that rarely moves can still be unbiased",
    alt: "Three panels over the proposed update from -1 to 1 ulp. Delivered: a staircase for nearest, a straight \
          line for stochastic. Mean square error: two arcs for stochastic, smaller teeth for nearest. Stalled \
          share: 1 within half a ulp for nearest, a triangle for stochastic.",
    caption: "A BF16 value of 1.25 is offered an update of Δ ulp. For each Δ the result is averaged over all \
              65,536 draws, so the lines are exact. Grey: the cell in which nearest rounding stalls, |Δ| < 1/2.",
    see: "Stochastic rounding stalls with probability 1 − |Δ|, for small updates nearly always, and still \
          delivers Δ on average: its bias is zero everywhere. It pays with an error of mean square |Δ|(1 − |Δ|), \
          at least as large as that of nearest rounding, which is all bias.",
    draw,
};

const START: f64 = 1.25;
/// Updates to a ulp.
const GRID_STEPS: i32 = 32;

/// What became of one proposed update, in ulp.
#[derive(Clone, Copy, Default)]
struct Outcome {
    proposed: f64,
    delivered: f64,
    square_error: f64,
    stalled: f64,
}

/// The average over rounding modes.
fn outcome(proposed: f64, modes: impl ExactSizeIterator<Item = Mode>) -> Outcome {
    let ulp = Format::BF16.ulp(START);
    let weight = 1.0 / modes.len() as f64;
    let mut sum = Outcome { proposed, ..Outcome::default() };
    for mode in modes {
        let stored = Format::BF16.value(round(START + proposed * ulp, Format::BF16, mode, Overflow::Ieee));
        let delivered = (stored - START) / ulp;
        sum.delivered += delivered * weight;
        sum.square_error += (delivered - proposed) * (delivered - proposed) * weight;
        sum.stalled += f64::from(u8::from(delivered == 0.0)) * weight;
    }
    sum
}

fn every_draw(proposed: f64) -> Outcome {
    let modes: Vec<_> = (0..=u16::MAX).map(|bits| Mode::Stochastic(RandomBits::of16(bits))).collect();
    outcome(proposed, modes.into_iter())
}

/// A panel over the proposed update, with the stalling cell shaded.
fn panel(title: &str, name: &str, range: std::ops::Range<f64>, tick: f64) -> Panel {
    let mut panel = Panel::new(
        title,
        Axis::linear("proposed update Δ, in ulp", -1.0..1.0, 0.5),
        Axis::linear(name, range.clone(), tick),
    );
    panel.fill((-0.5, range.start), (0.5, range.end), GRID);
    panel
}

fn draw() -> Result<Drawing, Error> {
    // Nearest jumps at half a ulp: a point just inside and one just outside of each half make the jump upright.
    let edge = 1.0 / 65536.0;
    let mut at: Vec<f64> = (-GRID_STEPS..=GRID_STEPS).map(|k| f64::from(k) / f64::from(GRID_STEPS)).collect();
    at.extend([-0.5 - edge, 0.5 + edge]);
    at.sort_by(f64::total_cmp);
    let nearest: Vec<_> = at.iter().map(|&d| outcome(d, [Mode::NearestEven].into_iter())).collect();
    let stochastic: Vec<_> = at.iter().map(|&d| every_draw(d)).collect();
    let both = |panel: &mut Panel, of: fn(&Outcome) -> f64| {
        let line = |outcomes: &[Outcome]| -> Points { outcomes.iter().map(|o| (o.proposed, of(o))).collect() };
        let kinds: [(&str, &[Outcome], RGBColor); 2] =
            [("nearest", &nearest, NEAREST), ("stochastic, mean", &stochastic, STOCHASTIC)];
        for (name, outcomes, color) in kinds {
            panel.line(name, line(outcomes), color, 4);
        }
    };
    let mut delivered = panel("Delivered", "mean change of the stored value, in ulp", -1.4..1.2, 0.5);
    delivered.guide(vec![(-1.0, 0.0), (1.0, 0.0)], NOTE, 1);
    both(&mut delivered, |o| o.delivered);
    delivered.label((-0.98, -1.13), "nearest", NEAREST);
    delivered.label((-0.95, 0.9), "stochastic: Δ, no bias", STOCHASTIC);
    delivered.words((0.0, -1.29), "nearest stalls", NOTE, Words::centred());

    let mut error = panel("Mean square error", "ulp²", 0.0..0.33, 0.1);
    both(&mut error, |o| o.square_error);
    error.words((0.0, 0.303), "stochastic: |Δ|(1 − |Δ|)", STOCHASTIC, Words::centred());
    error.words((0.0, 0.28), "nearest", NEAREST, Words::centred());

    let mut stalled = panel("Stalled", "share of draws that change nothing", 0.0..1.2, 0.25);
    both(&mut stalled, |o| o.stalled);
    stalled.words((0.0, 1.06), "nearest: all of them", NEAREST, Words::centred());
    stalled.words((0.0, 0.45), "stochastic:", STOCHASTIC, Words::centred());
    stalled.words((0.0, 0.37), "1 − |Δ|", STOCHASTIC, Words::centred());
    Ok(Picture::new(
        "One update of a BF16 value, proposed and delivered",
        &[1, 1, 1],
        760,
        vec![delivered, error, stalled],
    )
    .into())
}
