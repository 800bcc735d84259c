//! Trains a small network on real data with AdamW whose moments are stored in f32, in BF16 rounded to nearest, and in BF16
//! rounded stochastically, and shows what becomes of the moments.
//!
//! ```text
//! cargo run --release --example adamw -- [--steps N] [--seed N] [--lr X] [--params f32|bf16] [--cpu] [--json FILE]
//! ```
//!
//! The three runs start from the same weights and see the same batches of handwritten digits (`examples/data/digits.csv`),
//! each moved by up to a pixel. Nearest rounding loses every change of a moment below half a ulp. At beta2 = 0.999 that is
//! every decrease of the second moment: it ratchets up, and the steps shrink. Stochastic rounding stalls nearly as often, but
//! keeps the mean.
//!
//! Columns, where *stalled* is the share of coordinates whose stored moment reads as before after a step, over the second
//! half of training (coordinates that never had a gradient are left out):
//!
//! - `train`, `test`, `accuracy`: mean cross-entropy of the final network on both sets, share of test images read right;
//! - `m stalled`, `v stalled`: first and second moment;
//! - `predicted`: what [`stall::probability`] expects for v if gradients were Gaussian with a variance that does not change.
//!   Real gradients are mostly far below their root mean square and now and then far above it, and training shrinks them:
//!   nearest, which cannot follow down, stalls more than predicted, and stochastic a little less;
//! - `v drift`: the stored second moment over one in f32 fed with the same gradients, averaged over the coordinates at the
//!   end; 1 is none;
//! - `digest`: a hash of all parameters and moments.
//!
//! With `--features cuda` the optimizer steps on a GPU if there is one, and the digests are those of the CPU (`--cpu`). The
//! network itself runs on one CPU thread. `--params bf16` also stores the parameters in BF16, rounded as the moments are; the
//! run with f32 moments rounds them to nearest.

mod data;
mod math;
mod meter;
mod model;
mod stepper;

use std::error::Error;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use halfulp::optim::{AdamWConfig, Rounding, StateFormat};
use halfulp::{Format, bf16, stall};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;

use data::{Batches, Images};
use meter::Meter;
use stepper::{Device, Stepper, Stored};

const USAGE: &str = "usage: adamw [--steps N] [--seed N] [--lr X] [--params f32|bf16] [--cpu] [--json FILE]";
/// Images of a batch.
const BATCH: usize = 32;

struct Options {
    steps: u64,
    seed: u64,
    config: AdamWConfig,
    bf16_params: bool,
    cpu: bool,
    json: Option<String>,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options =
            Self { steps: 4000, seed: 0, config: AdamWConfig::default(), bf16_params: false, cpu: false, json: None };
        while let Some(name) = args.next() {
            if name == "--cpu" {
                options.cpu = true;
                continue;
            }
            if !["--steps", "--seed", "--lr", "--params", "--json"].contains(&&*name) {
                return Err(format!("{name}: unknown; {USAGE}"));
            }
            let value = args.next().ok_or_else(|| format!("{name} takes a value"))?;
            let wrong = |expected: &str| format!("{name}: expected {expected}, got {value}");
            match &*name {
                "--steps" => {
                    let steps = value.parse().ok().filter(|steps| (2..=1_000_000).contains(steps));
                    options.steps = steps.ok_or_else(|| wrong("a number from 2 to 1000000"))?;
                }
                "--seed" => options.seed = value.parse().map_err(|_| wrong("a number below 2^64"))?,
                "--lr" => options.config.lr = value.parse().map_err(|_| wrong("a number"))?,
                "--params" => match &*value {
                    "f32" => options.bf16_params = false,
                    "bf16" => options.bf16_params = true,
                    _ => return Err(wrong("f32 or bf16")),
                },
                _ => options.json = Some(value),
            }
        }
        options.config.check().map_err(|error| error.to_string())?;
        Ok(options)
    }
}

/// How moments are stored in a run.
struct States {
    name: &'static str,
    format: StateFormat,
    rounding: Rounding,
    predicted: Option<f64>,
}

/// What came of it.
struct Outcome {
    train: f64,
    test: f64,
    accuracy: f64,
    stalled: [f64; 2],
    untouched: f64,
    drift: f64,
    digest: u64,
}

fn train<P: Stored>(
    options: &Options,
    device: &Device,
    states: &States,
    [images, test]: &[Images; 2],
    bar: &ProgressBar,
) -> Result<Outcome, Box<dyn Error>> {
    let &Options { steps, seed, config, .. } = options;
    bar.set_message(states.name);
    let initial = model::initial(seed);
    let mut meter = Meter::new(&config, &initial);
    let mut stepper = Stepper::<P>::new(device, config, states.format, states.rounding, initial)?;
    let mut batches = Batches::new(images, seed);
    for step in 1..=steps {
        let (grads, loss) = model::gradients(&stepper.values(), &batches.next(BATCH));
        if !loss.is_finite() {
            return Err(format!("{}: the loss is {loss} at step {step}; try a smaller --lr", states.name).into());
        }
        stepper.step(&grads)?;
        meter.feed(&grads);
        // The moments at the middle are the first to compare with.
        if step >= steps / 2 {
            meter.look(&grads, stepper.moments()?)?;
        }
        bar.inc(1);
    }
    let params = stepper.values();
    let (train, _) = model::evaluate(&params, images);
    let (test, accuracy) = model::evaluate(&params, test);
    let stalled = [meter.first.share(), meter.second.share()];
    let (untouched, drift) = (meter.untouched(), meter.drift());
    Ok(Outcome { train, test, accuracy, stalled, untouched, drift, digest: stepper.digest()? })
}

fn table(runs: &[(States, Outcome)]) -> String {
    let mut text = format!(
        "{:<16} {:>9} {:>8} {:>9} {:>10} {:>10} {:>10} {:>8}  {}\n",
        "moments", "train", "test", "accuracy", "m stalled", "v stalled", "predicted", "v drift", "digest"
    );
    for (states, Outcome { train, test, accuracy, stalled: [m, v], drift, digest, .. }) in runs {
        let predicted = states.predicted.map_or("-".into(), |share| format!("{share:.4}"));
        text += &format!(
            "{:<16} {train:>9.6} {test:>8.4} {accuracy:>9.4} {m:>10.4} {v:>10.4} {predicted:>10} {drift:>8.4}  {digest:016x}\n",
            states.name
        );
    }
    text
}

fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    // Opened first: an impossible name is better known before the training than after.
    let file = options.json.as_ref().map(|name| File::create(name).map_err(|error| format!("{name}: {error}")));
    let file = file.transpose()?;
    let device = Device::find(options.cpu)?;
    let digits = data::digits()?;
    let nearest = Rounding::Nearest;
    let stochastic = Rounding::stochastic(options.seed);
    let predicted = stall::probability(Format::BF16, options.config.beta2)?;
    let all = [
        ("f32", StateFormat::F32, nearest, None),
        ("BF16 nearest", StateFormat::Bf16, nearest, Some(predicted.nearest)),
        ("BF16 stochastic", StateFormat::Bf16, stochastic, Some(predicted.stochastic)),
    ];
    let target = if io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(options.steps * all.len() as u64), target);
    bar.set_style(ProgressStyle::with_template("{msg:16} {wide_bar} {pos}/{len} steps, {eta} left")?);
    let mut runs = Vec::new();
    for (name, format, rounding, predicted) in all {
        let states = States { name, format, rounding, predicted };
        let train = if options.bf16_params { train::<bf16> } else { train::<f32> };
        let outcome = train(options, &device, &states, &digits, &bar)?;
        runs.push((states, outcome));
    }
    bar.finish_and_clear();

    let Options { steps, seed, config, bf16_params, .. } = options;
    let params = if *bf16_params { "BF16" } else { "f32" };
    let [images, test] = digits.each_ref().map(|images| images.digits.len());
    let mut text = format!(
        "{steps} steps of {BATCH} of {images} digits, {test} to test; AdamW, lr {}, beta2 {}, {params} parameters, seed {seed}, on {}\n\n{}\n",
        config.lr,
        config.beta2,
        device.name()?,
        table(&runs)
    );
    text += "predicted: for v, were gradients Gaussian with a variance that does not change\n";
    text += &format!("left out: {:.2} % of the coordinates, without a gradient so far\n", 100.0 * runs[0].1.untouched);
    io::stdout().write_all(text.as_bytes())?;

    if let Some(mut file) = file {
        let runs = runs.iter().map(|(states, outcome)| {
            json!({
                "moments": states.name,
                "train_loss": outcome.train,
                "test_loss": outcome.test,
                "test_accuracy": outcome.accuracy,
                "m_stalled": outcome.stalled[0],
                "v_stalled": outcome.stalled[1],
                "v_stalled_predicted": states.predicted,
                "untouched": outcome.untouched,
                "v_drift": outcome.drift,
                "digest": format!("{:016x}", outcome.digest),
            })
        });
        let all = json!({
            "steps": steps,
            "batch": BATCH,
            "seed": seed,
            "lr": config.lr,
            "beta1": config.beta1,
            "beta2": config.beta2,
            "eps": config.eps,
            "weight_decay": config.weight_decay,
            "parameters": params,
            "device": device.name()?,
            "runs": runs.collect::<Vec<_>>(),
        });
        writeln!(file, "{all:#}")?;
    }
    Ok(())
}

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("adamw: {error}");
            return ExitCode::from(2);
        }
    };
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("adamw: {error}");
            ExitCode::FAILURE
        }
    }
}
