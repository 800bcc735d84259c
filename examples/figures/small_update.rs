//! Figure 1.

use halfulp::random::Draws;
use halfulp::round::{Mode, Overflow, RandomBits, round};
use halfulp::{Draw, Format, bf16};

use crate::plot::{Axis, INK, NEAREST, NOTE, PATH, Panel, Picture, Points, STOCHASTIC};
use crate::{Drawing, Error, Figure};

pub(crate) const FIGURE: Figure = Figure {
    id: "1",
    file: "01-small-update",
    title: "A small update, added 96 times",
    alt: "Three panels, updates of 0.2, 0.5 and 0.8 ulp. The exact sums are straight dotted lines; stochastic \
          paths climb around them; nearest stays at zero in the first two panels and climbs a whole ulp a step \
          in the third.",
    caption: "A BF16 value starts at 1.25 and gets the same update 96 times; each sum is rounded before the \
              next. Dotted: the sum without rounding. Purple: rounded stochastically with seed 7; pale: seeds 1 \
              to 16, one draw a step.",
    see: "Nearest loses every update of 0.2 ulp, and of 0.5 ulp too, since a tie at 1.25 goes to the even code, \
          which is 1.25 itself. At 0.8 ulp it delivers a whole ulp each time, a quarter too much. Stochastic \
          rounding wanders, and follows the exact sum in all three.",
    draw,
};

const STEPS: u32 = 96;
const START: f32 = 1.25;

/// BF16 from [`START`], an update of `size` ulp added again and again: the distance gone, in ulp.
fn path(size: f64, mode: impl Fn(u32) -> Mode) -> Points {
    let ulp = Format::BF16.ulp(START.into());
    let mut value = START;
    let mut points = vec![(0.0, 0.0)];
    for step in 1..=STEPS {
        let code = round(f64::from(value) + size * ulp, Format::BF16, mode(step), Overflow::Ieee);
        value = bf16::from_bits(code).to_f32();
        points.push((step.into(), f64::from(value - START) / ulp));
    }
    points
}

fn panel(size: f64, top: f64, tick: f64) -> Panel {
    let seeded =
        |seed| move |step: u32| Mode::Stochastic(RandomBits::of16(Draw::seeded(seed).step(step.into()).draw16(0)));
    let mut panel = Panel::new(
        format!("{size} ulp a step"),
        Axis::linear("steps", 0.0..STEPS.into(), 24.0),
        Axis::linear("distance from 1.25, in ulp", -0.12 * top..top, tick),
    );
    for seed in 1..=16 {
        panel.line(format!("stochastic, seed {seed}"), path(size, seeded(seed)), PATH, 2);
    }
    panel.line("stochastic, seed 7", path(size, seeded(7)), STOCHASTIC, 4);
    panel.dotted("exact", (0..=STEPS).map(|step| (step.into(), size * f64::from(step))).collect(), INK);
    panel.line("nearest", path(size, |_| Mode::NearestEven), NEAREST, 4);
    panel
}

fn draw() -> Result<Drawing, Error> {
    let mut small = panel(0.2, 32.0, 8.0);
    small.label((4.0, 29.5), "exact sum, dotted", INK);
    small.label((4.0, 27.2), "stochastic", STOCHASTIC);
    small.label((4.0, 24.9), "16 more seeds", NOTE);
    small.label((22.0, -1.9), "nearest: nothing arrives", NEAREST);
    let mut half = panel(0.5, 64.0, 16.0);
    half.label((22.0, -3.8), "nearest: nothing arrives", NEAREST);
    let mut large = panel(0.8, 100.0, 20.0);
    large.label((8.0, 62.0), "nearest:", NEAREST);
    large.label((8.0, 55.0), "too much", NEAREST);
    Ok(Picture::new("A small update, added 96 times to 1.25 in BF16", &[1, 1, 1], 760, vec![small, half, large]).into())
}
