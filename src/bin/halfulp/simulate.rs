//! `halfulp simulate`: moments fed with random gradients, stored in a format.

use std::io::{self, IsTerminal, Write};

use halfulp::Format;
use halfulp::optim::Rounding;
use halfulp::random::Role;
use halfulp::stall::{
    Checkpoint, Law, Report, Scaling, Simulation, StallError, Start, Storage, Variances, average_probability,
    average_probability_since_reset, noise,
};
use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};
use serde_json::{Value, json};

use crate::error::Error;
use crate::options::{Round, pool};

/// Simulate moments of an optimizer stored in a low-precision format
///
/// Each coordinate is an exponential moving average of random gradients (of their squares for second moments), stored after
/// each step. The variances of the gradients are spread evenly over a binade, so that every mantissa has its turn. Prints,
/// for ten or so steps along the way, who stalled (the stored value reads as before the step) beside what the model of
/// `halfulp predict` says, and how far the moments are off; in units of a coordinate's variance, or of its standard deviation
/// for first moments, of which there is no model.
///
/// The numbers depend on these options alone, not on threads or the machine.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Format of the stored moments, a name of `halfulp formats` in any case, or f32
    #[arg(long, value_name = "FORMAT", default_value = "bf16", value_parser = stored)]
    format: Stored,
    /// Simulate second moments with this decay, from 0 to below 1 [default: 0.999]
    #[arg(long, value_name = "X", conflicts_with = "beta1", value_parser = decay, allow_negative_numbers = true)]
    beta2: Option<f64>,
    /// Simulate first moments with this decay, from 0 to below 1
    #[arg(long, value_name = "X", value_parser = decay, allow_negative_numbers = true)]
    beta1: Option<f64>,
    /// Rounding to nearest even, or up with the probability of the fraction passed
    #[arg(long, value_enum, default_value_t = Round::Stochastic)]
    rounding: Round,
    /// Steps
    #[arg(long, value_name = "N", default_value_t = 5000, value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    steps: u64,
    /// Coordinates
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    coordinates: u32,
    /// Gradients: constant, gaussian, change:AFTER:FACTOR (Gaussian, whose variance is multiplied by FACTOR after step AFTER),
    /// or student-t:FREEDOM (a heavy tail)
    #[arg(long, value_name = "LAW", default_value = "gaussian", value_parser = law)]
    law: Law,
    /// How values are scaled [default: power-of-two for 8 bits or fewer]
    #[arg(long, value_enum)]
    scaling: Option<ScalingName>,
    /// Elements that share a scale, up to 2^20; each of them takes half a kilobyte of memory
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    block: u32,
    /// Where moments start: at zero, as an optimizer's, or at the exact moment
    #[arg(long, value_enum, default_value_t = StartName::Exact)]
    start: StartName,
    /// Seed of gradients and of stochastic rounding
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Threads [default: one a core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
}

const EXAMPLES: &str = "\
Examples:
  halfulp simulate --format e4m3 --beta2 0.999
  halfulp simulate --format bf16 --rounding nearest --steps 12000
  halfulp simulate --format bf16 --beta1 0.9 --start zero --law student-t:4 --json";

/// A format, or f32, where nothing is rounded.
#[derive(Clone, Copy)]
struct Stored(Option<Format>);

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum ScalingName {
    None,
    PowerOfTwo,
    Amax,
}

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum StartName {
    Zero,
    Exact,
}

fn stored(name: &str) -> Result<Stored, String> {
    if name.eq_ignore_ascii_case("f32") {
        return Ok(Stored(None));
    }
    name.parse()
        .map(|format| Stored(Some(format)))
        .map_err(|error: halfulp::format::ParseFormatError| error.to_string())
}

fn decay(text: &str) -> Result<f64, String> {
    let decay = text.parse().ok().filter(|decay| (0.0..1.0).contains(decay));
    decay.ok_or_else(|| "expected a number from 0 to below 1".into())
}

fn law(text: &str) -> Result<Law, String> {
    let parts: Vec<&str> = text.split(':').collect();
    let law = match parts[..] {
        ["constant"] => Some(Law::Constant),
        ["gaussian"] => Some(Law::Gaussian),
        ["change", after, factor] => {
            after.parse().ok().zip(factor.parse().ok()).map(|(after, factor)| Law::VarianceChange { after, factor })
        }
        ["student-t", freedom] => freedom.parse().ok().map(|freedom| Law::StudentT { freedom }),
        _ => None,
    };
    law.ok_or_else(|| "expected constant, gaussian, change:AFTER:FACTOR or student-t:FREEDOM".into())
}

impl Args {
    fn simulation(&self) -> Simulation {
        let (role, beta) = match self.beta1 {
            Some(beta1) => (Role::FirstMoment, beta1),
            None => (Role::SecondMoment, self.beta2.unwrap_or(0.999)),
        };
        let block = self.block as usize;
        let short = self.format.0.is_some_and(|format| format.bits() <= 8);
        let scaling = match self.scaling.unwrap_or(if short { ScalingName::PowerOfTwo } else { ScalingName::None }) {
            ScalingName::None => Scaling::Unscaled,
            ScalingName::PowerOfTwo => Scaling::PowerOfTwo { block },
            ScalingName::Amax => Scaling::Amax { block },
        };
        let rounding = match self.rounding {
            Round::Nearest => Rounding::Nearest,
            Round::Stochastic => Rounding::stochastic(self.seed),
        };
        // About ten, and the last step.
        let stride = self.steps.div_ceil(10);
        let checkpoints =
            (1..).map(|k| self.steps.min(k * stride)).take(self.steps.div_ceil(stride) as usize).collect();
        Simulation {
            role,
            beta,
            gain: None,
            storage: Storage { format: self.format.0, rounding, scaling },
            law: self.law,
            variances: Variances::Binade(1.0),
            start: if self.start == StartName::Zero { Start::Zero } else { Start::Exact },
            coordinates: self.coordinates as usize,
            seed: self.seed,
            checkpoints,
        }
    }
}

/// What the stalling model says of a simulation.
struct Prediction {
    /// The stalled share after each checkpoint's step, averaged over mantissas as the simulation is.
    stalled: Vec<f64>,
    /// The variance in the long run, under stochastic rounding.
    variance: Option<f64>,
}

impl Prediction {
    /// None for what the model does not know: first moments, no memory, nothing rounded or nothing random, and a grid that
    /// moves, on which no value compares equal.
    fn of(simulation: &Simulation) -> Result<Option<Self>, StallError> {
        let Simulation { role, beta, storage, law, start, .. } = simulation;
        let known = *role == Role::SecondMoment && *beta > 0.0 && *law != Law::Constant;
        let still = !matches!(storage.scaling, Scaling::Amax { .. });
        let Some(format) = storage.format.filter(|_| known && still) else { return Ok(None) };
        let nearest = storage.rounding == Rounding::Nearest;
        let stationary = average_probability(format, *beta)?;
        let stalled = simulation.checkpoints.iter().map(|&step| {
            let share = match start {
                // A step starts from the age before it.
                Start::Zero => average_probability_since_reset(format, *beta, step - 1)?,
                _ => stationary,
            };
            Ok(if nearest { share.nearest } else { share.stochastic })
        });
        let stalled = stalled.collect::<Result<_, StallError>>()?;
        let variance = if nearest { None } else { Some(noise(format, *beta)?.still_grid) };
        Ok(Some(Self { stalled, variance }))
    }
}

/// Runs and prints.
pub(crate) fn run(args: &Args, out: &mut impl Write) -> Result<(), Error> {
    let simulation = args.simulation();
    let progress = progress(u64::from(args.coordinates) * args.steps);
    let report = pool(args.threads)?.install(|| simulation.run_with_progress(|steps| progress.inc(steps)))?;
    progress.finish_and_clear();
    let prediction = Prediction::of(&simulation)?;
    let printed = if args.json {
        writeln!(out, "{:#}", numbers(&simulation, &report, prediction.as_ref()))
    } else {
        out.write_all(text(&simulation, &report, prediction.as_ref()).as_bytes())
    };
    printed.map_err(Error::Print)
}

/// A bar on stderr where that is a terminal.
fn progress(steps: u64) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:40} {percent} %, {per_sec} element steps, {eta} left");
    let bar = ProgressBar::new(steps).with_finish(ProgressFinish::AndClear);
    if let Ok(style) = style { bar.with_style(style) } else { bar }
}

/// What was simulated, one thing each: name and value.
fn description(simulation: &Simulation) -> [(&'static str, Value); 9] {
    let Simulation { role, beta, storage, law, start, coordinates, seed, .. } = simulation;
    let scaling = match storage.scaling {
        Scaling::PowerOfTwo { block } => json!({ "scale": "power of two", "block": block }),
        Scaling::Amax { block } => json!({ "scale": "amax", "block": block }),
        _ => Value::Null,
    };
    let law = match law {
        Law::Constant => json!({ "law": "constant" }),
        Law::VarianceChange { after, factor } => json!({ "law": "change", "after": after, "factor": factor }),
        Law::StudentT { freedom } => json!({ "law": "student-t", "freedom": freedom }),
        _ => json!({ "law": "gaussian" }),
    };
    let rounding = if storage.rounding == Rounding::Nearest { "nearest" } else { "stochastic" };
    [
        ("moment", json!(if *role == Role::FirstMoment { "first" } else { "second" })),
        ("beta", json!(beta)),
        ("format", json!(storage.format.map_or("F32".into(), |format| format.to_string()))),
        ("rounding", if storage.format.is_none() { Value::Null } else { json!(rounding) }),
        ("scaling", scaling),
        ("gradients", law),
        ("start", json!(if *start == Start::Zero { "zero" } else { "exact" })),
        ("coordinates", json!(coordinates)),
        ("seed", json!(seed)),
    ]
}

fn numbers(simulation: &Simulation, report: &Report, prediction: Option<&Prediction>) -> Value {
    let share = |share: f64| if share.is_nan() { Value::Null } else { json!(share) };
    let checkpoint = |(i, checkpoint): (usize, &Checkpoint)| {
        let Checkpoint { step, stalls, window, never_moved, mean, variance, exact, correction, up, down, .. } =
            checkpoint;
        json!({
            "step": step,
            "stalled": share(stalls.share()),
            "predicted": prediction.map(|prediction| prediction.stalled[i]),
            "window": {
                "stalled": share(window.share()),
                "same_code": share(window.same_code_share()),
                "up": { "proposed": up.proposed, "delivered": up.delivered },
                "down": { "proposed": down.proposed, "delivered": down.delivered },
            },
            "never_moved": never_moved,
            "mean": mean,
            "exact": exact,
            "variance": variance,
            "correction": correction,
        })
    };
    let mut all: serde_json::Map<_, _> =
        description(simulation).into_iter().map(|(name, value)| (name.into(), value)).collect();
    all.insert("predicted_variance".into(), json!(prediction.and_then(|prediction| prediction.variance)));
    all.insert("checkpoints".into(), report.checkpoints.iter().enumerate().map(checkpoint).collect());
    all.into()
}

fn text(simulation: &Simulation, report: &Report, prediction: Option<&Prediction>) -> String {
    let mut text = String::new();
    for (name, value) in description(simulation) {
        let value = match value {
            Value::Null => continue,
            Value::String(value) => value,
            Value::Object(parts) => {
                let parts = parts.iter().map(|(name, part)| format!("{name} {part}").replace('"', ""));
                parts.collect::<Vec<_>>().join(", ")
            }
            value => value.to_string(),
        };
        text += &format!("{name:<12} {value}\n");
    }
    text += &format!(
        "\n{:>10} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>10} {:>10}\n",
        "step", "stalled", "window", "predicted", "no move", "mean", "exact", "deviation", "up", "down"
    );
    for (i, checkpoint) in report.checkpoints.iter().enumerate() {
        let Checkpoint { step, stalls, window, never_moved, mean, variance, exact, up, down, .. } = checkpoint;
        text += &format!(
            "{step:>10} {:>9.5} {:>9.5} {:>9} {never_moved:>9.5} {mean:>9.5} {exact:>9.5} {:>9.5} {:>10} {:>10}\n",
            stalls.share(),
            window.share(),
            prediction.map_or("-".into(), |prediction| format!("{:.5}", prediction.stalled[i])),
            variance.sqrt(),
            delivered(up.delivered, up.proposed),
            delivered(down.delivered, down.proposed),
        );
    }
    text +=
        "\nstalled: in this step; window: in all steps since the line before; no move: coordinates that never moved\n";
    text += "deviation: standard deviation over coordinates; up, down: share delivered of the increases and decreases proposed\n";
    if let Some(Prediction { variance, .. }) = prediction {
        text += "predicted: stalled, averaged over mantissas, for Gaussian gradients and a moment near their variance";
        let deviation = variance.map(|variance| format!("; deviation in the long run: {:.5}", variance.sqrt()));
        text += &(deviation.unwrap_or_default() + "\n");
    }
    text
}

/// A share of what was proposed, if anything was.
fn delivered(delivered: f64, proposed: f64) -> String {
    if proposed == 0.0 { "-".into() } else { format!("{:.5}", delivered / proposed + 0.0) }
}
