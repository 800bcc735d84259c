//! Figure 12.

use halfulp::Format;
use halfulp::stall::{self, Probability};
use plotters::style::RGBColor;

use crate::plot::{Axis, INK, NEAREST, NOTE, PAPER, Panel, Picture, Points, STOCHASTIC, TEXT, Words, mix, thousands};
use crate::prediction::{beta2, beta2_axis};
use crate::table::Table;
use crate::{Drawing, Error, Figure};

pub(crate) const FIGURE: Figure = Figure {
    id: "12",
    file: "12-map",
    title: "The map",
    alt: "Two maps, decay against fraction bits, from white at many bits and a small decay to full colour at few \
          bits and a decay near 1. A third panel has lines of equal reset period, 30 to 3,000 steps, that lean \
          to the lower right, below a dotted border.",
    caption: "The predicted stalled share of a second moment for any number of fraction bits and any β₂, at the \
              typical mantissa; numbers in per cent at 0.9, 0.99, 0.999 and 0.9999. Right: where the reset \
              period of arXiv:2603.16731 (threshold 0.6) reaches the length named, found for whole fraction bits \
              and joined. Above the dotted line fewer than 60 % of the steps stall, and there is nothing to \
              reset for.",
    see: "Along a diagonal, a bit for each halving of 1 − β₂, the share does not change: ε/(1 − β₂) is all that \
          counts. At β₂ = 0.999 every format of 8 bits or fewer stalls in nearly all steps, either way of \
          rounding. Fewer bits ask for more resets: at 0.999 one in 1,116 steps in BF16, in 320 in E4M3, in 224 \
          in UE2M2.",
    draw,
};

const BITS: std::ops::RangeInclusive<u8> = 1..=10;
/// Cells to a decade of `1 - beta2`.
const CELLS: i32 = 20;
const PERIODS: [u64; 5] = [30, 100, 300, 1000, 3000];

/// Fraction bits, after the formats that have them.
fn name(bits: u8) -> String {
    let formats = match bits {
        1 => "E2M1 ",
        2 => "E5M2, UE2M2 ",
        3 => "E4M3 ",
        4 => "UE4M4 ",
        7 => "BF16 ",
        10 => "FP16 ",
        _ => "",
    };
    format!("{formats}{bits}")
}

/// Any format of these fraction bits: nothing else counts here.
fn format(bits: u8) -> Result<Format, Error> {
    Ok(Format::builder(5, bits).build()?)
}

fn map(
    title: &str,
    ordinate: Axis,
    color: RGBColor,
    share: fn(Probability) -> f64,
    table: &mut Table,
) -> Result<Panel, Error> {
    let mut panel = Panel::new(title, beta2_axis(4.0), ordinate);
    // From the top row down and from left to right, each box to the lower right corner: boxes that only touched would show
    // their seams.
    for bits in BITS.rev() {
        let (format, y) = (format(bits)?, f64::from(bits));
        let at = |k: f64| stall::probability(format, beta2(k)).map(share);
        for i in CELLS..4 * CELLS {
            let [from, middle] = [0.0, 0.5].map(|part| (f64::from(i) + part) / f64::from(CELLS));
            let share = at(middle)?;
            panel.fill((from, 0.5), (4.0, y + 0.5), mix(PAPER, color, share));
            table.row([title.into(), y.into(), beta2(middle).into(), share.into(), "".into()]);
        }
        for k in [1.0, 2.0, 3.0, 4.0] {
            let share = at(k)?;
            let ink = if share > 0.6 { PAPER } else { INK };
            let words = match k {
                1.0 => Words::default().shifted(8, 0),
                4.0 => Words::ending().shifted(-8, 0),
                _ => Words::centred(),
            };
            panel.words((k, y), percent(share), ink, words.sized(TEXT - 3));
        }
    }
    Ok(panel)
}

/// Per cent, never 0 or 100 for what is neither.
fn percent(share: f64) -> String {
    match 100.0 * share {
        p if p < 0.1 => "<0.1".into(),
        p if p < 9.95 => format!("{p:.1}"),
        p if p > 99.9 => ">99.9".into(),
        p if p >= 99.0 => format!("{p:.1}"),
        p => format!("{p:.0}"),
    }
}

/// The smallest k, to 2^-20, from which on a condition holds; none where it holds from the start, or not even at 4.
fn threshold(holds: impl Fn(f64) -> Result<bool, Error>) -> Result<Option<f64>, Error> {
    let (mut low, mut high) = (1.0, 4.0);
    if !holds(high)? || holds(low)? {
        return Ok(None);
    }
    for _ in 0..20 {
        let middle = f64::midpoint(low, high);
        if holds(middle)? {
            high = middle;
        } else {
            low = middle;
        }
    }
    Ok(Some(high))
}

/// Where the reset period reaches a length.
fn period_line(length: u64) -> Result<Points, Error> {
    let mut points = vec![];
    for bits in BITS {
        let period = |k: f64| -> Result<u64, Error> { Ok(stall::reset_period(format(bits)?, beta2(k))?.unwrap_or(0)) };
        if let Some(k) = threshold(|k| Ok(period(k)? >= length))? {
            // Where resets begin to be worth while the period may be longer from the start.
            if period(k)? <= length + length / 50 + 1 {
                points.push((k, bits.into()));
            }
        }
    }
    Ok(points)
}

/// Where resets begin.
fn resets_begin() -> Result<Points, Error> {
    let mut points = vec![];
    for bits in BITS {
        let begins = |k: f64| -> Result<bool, Error> { Ok(stall::reset_period(format(bits)?, beta2(k))?.is_some()) };
        points.extend(threshold(begins)?.map(|k| (k, f64::from(bits))));
    }
    Ok(points)
}

/// Lines of equal reset period.
fn periods(ordinate: Axis, table: &mut Table) -> Result<Panel, Error> {
    let title = "Steps between resets";
    let mut panel = Panel::new(title, beta2_axis(4.0), ordinate);
    for length in PERIODS {
        let line = period_line(length)?;
        for &(k, bits) in &line {
            table.row([title.into(), bits.into(), beta2(k).into(), "".into(), (length as f64).into()]);
        }
        if let Some(&end) = line.first() {
            panel.words(end, thousands(length as f64), NEAREST, Words::centred().shifted(0, 20).bold());
        }
        panel.guide(line, NEAREST, 4);
    }
    panel.dotted("", resets_begin()?, INK);
    panel.label((1.15, 8.4), "nothing to", NOTE);
    panel.label((1.15, 7.8), "reset for", NOTE);
    Ok(panel)
}

fn draw() -> Result<Drawing, Error> {
    let mut table = Table::new(["panel", "fraction bits", "beta2", "stalled share", "reset period"]);
    let ordinate = |name: &str| Axis::linear(name, 0.5..10.5, 1.0);
    let names = BITS.map(|bits| (f64::from(bits), name(bits)));
    let named = ordinate("format and its fraction bits").ticks(names).room(196);
    let panels = vec![
        map("Nearest, % stalled", named, NEAREST, |share| share.nearest, &mut table)?,
        map("Stochastic, % stalled", ordinate("fraction bits"), STOCHASTIC, |share| share.stochastic, &mut table)?,
        periods(ordinate("fraction bits"), &mut table)?,
    ];
    Ok((Picture::new("Which second moments stand still, and when to reset them", &[13, 10, 10], 900, panels), table)
        .into())
}
