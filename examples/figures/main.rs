//! Draws the figures into `figures/`: `cargo run --release --example figures`.
//!
//! Every number comes from the crate, with fixed seeds, so that a second run writes the same bytes.

mod plot;

use std::path::Path;

use halfulp::random::Draws;
use halfulp::round::{Mode, Overflow, RandomBits, round};
use halfulp::{Draw, Format, bf16};
use plot::{INK, MUTED, NEAREST, PATH, Panel, STOCHASTIC};

const STEPS: u32 = 96;
const START: f32 = 1.25;
/// The update in ulps of BF16 at 1.25.
const SIZE: f64 = 0.3;

/// BF16 from 1.25, the same update added again and again, each sum rounded.
fn path(mode: impl Fn(u32) -> Mode) -> Vec<(f64, f64)> {
    let ulp = Format::BF16.ulp(START.into());
    let mut value = START;
    let mut points = vec![(0.0, 0.0)];
    for step in 1..=STEPS {
        let code = round(f64::from(value) + SIZE * ulp, Format::BF16, mode(step), Overflow::Ieee);
        value = bf16::from_bits(code).to_f32();
        points.push((step.into(), f64::from(value - START) / ulp));
    }
    points
}

fn small_update() -> Panel {
    let seeded =
        |seed| move |step: u32| Mode::Stochastic(RandomBits::of16(Draw::seeded(seed).step(step.into()).draw16(0)));
    let mut panel = Panel::new(
        "An update of 0.3 ulp, added 96 times in BF16",
        ("steps", 0.0..f64::from(STEPS)),
        ("distance from 1.25, in ulp", -1.0..38.0),
    );
    for seed in 1..=16 {
        panel.line(format!("seed {seed}"), path(seeded(seed)), PATH, 3);
    }
    panel.line("stochastic", path(seeded(7)), STOCHASTIC, 6);
    panel.dotted("exact", (0..=STEPS).map(|step| (step.into(), SIZE * f64::from(step))).collect(), INK);
    panel.line("nearest", path(|_| Mode::NearestEven), NEAREST, 6);
    panel.label((3.0, 35.0), "exact sum, dotted", INK);
    panel.label((3.0, 32.0), "stochastic, seed 7", STOCHASTIC);
    panel.label((3.0, 29.0), "stochastic, 16 more seeds", MUTED);
    panel.label((50.0, 1.7), "nearest: every update is lost", NEAREST);
    panel
}

fn main() -> Result<(), plot::Error> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("figures");
    small_update().write(&directory, "small-update")?;
    println!("figures/small-update.svg, figures/small-update.csv");
    Ok(())
}
