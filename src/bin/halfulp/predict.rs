//! `halfulp predict`: what the stalling model says of a format and a decay.

use std::io::Write;

use halfulp::Format;
use halfulp::stall::{self, EffectiveDecay, Noise, Probability, StallError};
use serde_json::{Value, json};

use crate::error::Error;
use crate::table;

/// Predict how often a second moment stalls, its noise, and when to reset it
///
/// For v' = BETA2 v + (1 - BETA2) g^2 with Gaussian gradients, v stored in FORMAT near the variance of g.
#[derive(clap::Args)]
#[command(after_help = COLUMNS_AND_EXAMPLES)]
pub(crate) struct Args {
    /// Formats, names of `halfulp formats` in any case [default: all with a fraction bit]
    #[arg(long, value_name = "FORMAT,...", value_delimiter = ',')]
    format: Vec<Format>,
    /// Decay of the second moment, above 0 and below 1
    #[arg(long, value_name = "BETA2", default_value_t = 0.999, allow_negative_numbers = true)]
    beta2: f64,
    /// Print JSON, numbers to their last digit; null stands for no reset, a level never reached, an endless memory
    #[arg(long)]
    json: bool,
}

const COLUMNS_AND_EXAMPLES: &str = "\
Columns:
  rho                  half the spacing at v, in units of the step (1 - BETA2) v
  nearest, stochastic  share of steps that leave the stored v as it is, under either rounding
  decay, memory        what remains of BETA2 rounded to nearest, and its length in steps; stochastic rounding keeps BETA2
  noise, moving        relative standard deviation of v rounded stochastically: on a grid that stands still, and under a
                       block scale that follows the largest value in every step
  reset                steps from one reset to the next, rounded to nearest; none: it stalls too rarely to pay
  50 % to 95 %         steps after a reset until so many coordinates stall, rounded to nearest; never: fewer do

Examples:
  halfulp predict
  halfulp predict --format bf16,e4m3 --beta2 0.95
  halfulp predict --format bf16 --beta2 0.999 --json";

const TITLES: [&str; 13] = [
    "format",
    "rho",
    "nearest",
    "stochastic",
    "decay",
    "memory",
    "noise",
    "moving",
    "reset",
    "50 %",
    "80 %",
    "90 %",
    "95 %",
];

const LEVELS: [f64; 4] = [0.5, 0.8, 0.9, 0.95];

/// Prints the predictions, a line a format or as JSON.
pub(crate) fn run(args: &Args, out: &mut impl Write) -> Result<(), Error> {
    let with_fraction = || Format::NAMED.map(|(_, format)| format).into_iter().filter(|f| f.fraction_bits() > 0);
    let formats = if args.format.is_empty() { with_fraction().collect() } else { args.format.clone() };
    let predictions = formats.into_iter().map(|format| Prediction::new(format, args.beta2));
    let predictions = predictions.collect::<Result<Vec<_>, _>>()?;
    let printed = if args.json {
        let formats: Vec<Value> = predictions.iter().map(Prediction::json).collect();
        writeln!(out, "{:#}", json!({ "beta2": args.beta2, "formats": formats }))
    } else {
        table::print(out, TITLES, predictions.iter().map(Prediction::row))
    };
    printed.map_err(Error::Print)
}

struct Prediction {
    format: Format,
    rho: f64,
    stalled: Probability,
    effective: EffectiveDecay,
    noise: Noise,
    reset_period: Option<u64>,
    windows: [Option<u64>; LEVELS.len()],
}

impl Prediction {
    fn new(format: Format, beta2: f64) -> Result<Self, StallError> {
        let stalled = stall::probability(format, beta2)?;
        let mut windows = [None; LEVELS.len()];
        for (window, level) in windows.iter_mut().zip(LEVELS) {
            *window = stall::startup_window(format, beta2, level)?;
        }
        Ok(Self {
            format,
            rho: stall::rho(format, beta2)?,
            stalled,
            effective: stall::effective_decay(beta2, stalled.nearest_moves)?,
            noise: stall::noise(format, beta2)?,
            reset_period: stall::reset_period(format, beta2)?,
            windows,
        })
    }

    fn row(&self) -> [String; TITLES.len()] {
        let Self { format, rho, stalled, effective, noise, reset_period, windows } = self;
        let steps = |steps: Option<u64>, none: &str| steps.map_or(none.into(), |steps| steps.to_string());
        let percent = |variance: f64| format!("{:.1} %", 100.0 * variance.sqrt());
        let [half, most, nine, nearly_all] = windows.map(|window| steps(window, "never"));
        [
            format.to_string(),
            number(*rho),
            share(stalled.nearest, stalled.nearest_moves),
            share(stalled.stochastic, stalled.stochastic_moves),
            share(effective.decay, 1.0 / effective.time_constant),
            number(effective.time_constant),
            percent(noise.still_grid),
            percent(noise.moving_grid),
            steps(*reset_period, "none"),
            half,
            most,
            nine,
            nearly_all,
        ]
    }

    fn json(&self) -> Value {
        let Self { format, rho, stalled, effective, noise, reset_period, windows } = self;
        let windows = LEVELS.iter().zip(windows).map(|(level, age)| json!({ "level": level, "age": age }));
        json!({
            "format": format.to_string(),
            "epsilon": format.epsilon(),
            "rho": rho,
            "nearest": { "stalled": stalled.nearest, "moves": stalled.nearest_moves },
            "stochastic": { "stalled": stalled.stochastic, "moves": stalled.stochastic_moves },
            "effective_decay": effective.decay,
            "effective_time_constant": effective.time_constant,
            "variance": { "exact": noise.exact, "still_grid": noise.still_grid, "moving_grid": noise.moving_grid },
            "reset_period": reset_period,
            "startup_windows": windows.collect::<Vec<_>>(),
        })
    }
}

/// A number near 1 as what it lacks.
fn share(share: f64, complement: f64) -> String {
    if complement < 1e-4 { format!("1 - {complement:.1e}") } else { format!("{share:.6}") }
}

/// Five digits.
fn number(x: f64) -> String {
    match x {
        1e-4..10.0 => format!("{x:.4}"),
        10.0..1e3 => format!("{x:.2}"),
        1e3..1e6 => format!("{x:.0}"),
        _ => format!("{x:.4e}"),
    }
}
