//! Trains a small network on real data with AdamW whose moments are stored in f32, and in few bits rounded to nearest and
//! stochastically, and shows what becomes of the moments.
//!
//! ```text
//! cargo run --release --example adamw -- [--states S,...] [--steps N] [--seed N] [--seeds N] [--lr X] [--params f32|bf16]
//!     [--cpu] [--json FILE]
//! ```
//!
//! `--states` names what the moments are stored in: a format for both (`bf16`, the default, `e4m3`, `e5m2`), two for the
//! first and the second (`e4m3+ue4m4`, `bf16+ue5m3`, `e2m1+ue2m2nz`, ...), or several of these with commas between.
//!
//! All runs start from the same weights and see the same batches of handwritten digits (`examples/data/digits.csv`),
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
//! `--seeds 10` trains with as many seeds from `--seed` on, over the threads of the pool, and shows the final training loss:
//! its mean, its standard deviation over seeds (the *spread*), and how many spreads of f32 the mean is above that of f32.
//!
//! With `--features cuda` the optimizer steps on a GPU if there is one, and the digests are those of the CPU (`--cpu`). The
//! network itself runs on one CPU thread. `--params bf16` also stores the parameters in BF16, rounded as the moments are; the
//! run with f32 moments rounds them to nearest.

mod data;
mod digest;
mod math;
mod meter;
mod model;
mod progress;
mod stepper;

use std::error::Error;
use std::fs::File;
use std::io::{self, Write};
use std::process::ExitCode;

use halfulp::optim::{AdamW, AdamWConfig, Rounding, StateFormat, States};
use halfulp::stall::{self, StallError};
use halfulp::{Format, bf16};
use indicatif::ProgressBar;
use rayon::prelude::*;
use serde_json::json;

use data::{Batches, Images};
use meter::Meter;
use progress::progress_bar;
use stepper::{Device, Stepper, Stored};

const USAGE: &str = "usage: adamw [--states FORMAT[+FORMAT],...] [--steps N] [--seed N] [--seeds N] [--lr X] \
                     [--params f32|bf16] [--cpu] [--json FILE]";
/// Images of a batch.
const BATCH: usize = 32;

struct Options {
    states: Vec<(String, States)>,
    steps: u64,
    seed: u64,
    /// How many seeds, if asked for.
    seeds: Option<u64>,
    config: AdamWConfig,
    bf16_params: bool,
    cpu: bool,
    json: Option<String>,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self {
            states: parse_states("bf16")?,
            steps: 4000,
            seed: 0,
            seeds: None,
            config: AdamWConfig::default(),
            bf16_params: false,
            cpu: false,
            json: None,
        };
        while let Some(name) = args.next() {
            if name == "--cpu" {
                options.cpu = true;
                continue;
            }
            if !["--states", "--steps", "--seed", "--seeds", "--lr", "--params", "--json"].contains(&&*name) {
                return Err(format!("{name}: unknown; {USAGE}"));
            }
            let value = args.next().ok_or_else(|| format!("{name} takes a value"))?;
            let wrong = |expected: &str| format!("{name}: expected {expected}, got {value}");
            match &*name {
                "--states" => options.states = parse_states(&value)?,
                "--seeds" => {
                    let seeds = value.parse().ok().filter(|seeds| (2..=1000).contains(seeds));
                    options.seeds = Some(seeds.ok_or_else(|| wrong("a number from 2 to 1000"))?);
                }
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

/// Reads a list of formats, each for both moments or two with a plus between.
fn parse_states(list: &str) -> Result<Vec<(String, States)>, String> {
    let one = |name: &str| {
        let format = |name: &str| name.parse::<StateFormat>().map_err(|error| format!("--states: {error}"));
        let (m, v) = name.split_once('+').unwrap_or((name, name));
        let states = States { m: format(m)?, v: format(v)? };
        let name = if states.m == states.v { states.m.to_string() } else { format!("{}+{}", states.m, states.v) };
        // Refused here rather than after other runs.
        AdamW::new(AdamWConfig::default(), states, Rounding::Nearest).map_err(|error| format!("--states: {error}"))?;
        Ok((name, states))
    };
    list.split(',').map(one).collect()
}

/// How moments are stored in a run.
struct Moments {
    name: String,
    states: States,
    stochastic: bool,
    /// Share of v that is predicted to stall.
    predicted: Option<f64>,
}

impl Moments {
    /// f32, and each of the others to nearest and stochastically.
    fn all(options: &Options) -> Result<Vec<Self>, StallError> {
        let f32 = Self { name: "f32".into(), states: StateFormat::F32.into(), stochastic: false, predicted: None };
        let mut all = vec![f32];
        for (name, states) in &options.states {
            let predicted = match states.v {
                StateFormat::Bf16 => Some(stall::probability(Format::BF16, options.config.beta2)?),
                StateFormat::Blocks(format) => Some(stall::probability(format.element(), options.config.beta2)?),
                _ => None,
            };
            for stochastic in [false, true] {
                all.push(Self {
                    name: format!("{name} {}", if stochastic { "stochastic" } else { "nearest" }),
                    states: *states,
                    stochastic,
                    predicted: predicted.map(|p| if stochastic { p.stochastic } else { p.nearest }),
                });
            }
        }
        Ok(all)
    }

    fn rounding(&self, seed: u64) -> Rounding {
        if self.stochastic { Rounding::stochastic(seed) } else { Rounding::Nearest }
    }
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

/// A training under way.
struct Training<'a, P> {
    stepper: Stepper<P>,
    batches: Batches<'a>,
}

impl<'a, P: Stored> Training<'a, P> {
    fn new(
        options: &Options,
        device: &Device,
        moments: &Moments,
        images: &'a Images,
        seed: u64,
    ) -> Result<Self, Box<dyn Error>> {
        let (config, rounding) = (options.config, moments.rounding(seed));
        let stepper = Stepper::new(device, config, moments.states, rounding, model::initial(seed))?;
        Ok(Self { stepper, batches: Batches::new(images, seed) })
    }

    /// Makes a step, and gives its gradients.
    fn step(&mut self) -> Result<Vec<Vec<f32>>, Box<dyn Error>> {
        let (grads, loss) = model::gradients(&self.stepper.values(), &self.batches.next(BATCH));
        if !loss.is_finite() {
            return Err(format!("the loss is {loss}; try a smaller --lr").into());
        }
        self.stepper.step(&grads)?;
        Ok(grads)
    }
}

fn train<P: Stored>(
    options: &Options,
    device: &Device,
    moments: &Moments,
    [images, test]: &[Images; 2],
    bar: &ProgressBar,
) -> Result<Outcome, Box<dyn Error>> {
    bar.set_message(moments.name.clone());
    let mut meter = Meter::new(&options.config, &model::initial(options.seed));
    let mut training = Training::<P>::new(options, device, moments, images, options.seed)?;
    for step in 1..=options.steps {
        let grads = training.step().map_err(|error| format!("{}, step {step}: {error}", moments.name))?;
        meter.feed(&grads);
        // The moments at the middle are the first to compare with.
        if step >= options.steps / 2 {
            meter.look(&grads, training.stepper.moments()?)?;
        }
        bar.inc(1);
    }
    let params = training.stepper.values();
    let (train, _) = model::evaluate(&params, images);
    let (test, accuracy) = model::evaluate(&params, test);
    let stalled = [meter.first.share(), meter.second.share()];
    let (untouched, drift) = (meter.untouched(), meter.drift());
    Ok(Outcome { train, test, accuracy, stalled, untouched, drift, digest: training.stepper.digest()? })
}

fn table(runs: &[(Moments, Outcome)]) -> String {
    let mut text = format!(
        "{:<24} {:>9} {:>8} {:>9} {:>10} {:>10} {:>10} {:>8}  {}\n",
        "moments", "train", "test", "accuracy", "m stalled", "v stalled", "predicted", "v drift", "digest"
    );
    for (moments, Outcome { train, test, accuracy, stalled: [m, v], drift, digest, .. }) in runs {
        let predicted = moments.predicted.map_or("-".into(), |share| format!("{share:.4}"));
        text += &format!(
            "{:<24} {train:>9.6} {test:>8.4} {accuracy:>9.4} {m:>10.4} {v:>10.4} {predicted:>10} {drift:>8.4}  {digest:016x}\n",
            moments.name
        );
    }
    text
}

/// The data, the optimizer and what all runs share, in words.
fn heading(options: &Options, device: &Device, digits: &[Images; 2]) -> Result<String, Box<dyn Error>> {
    let Options { steps, config, bf16_params, .. } = options;
    let params = if *bf16_params { "BF16" } else { "f32" };
    let [images, test] = digits.each_ref().map(|images| images.digits.len());
    let (lr, beta2, device) = (config.lr, config.beta2, device.name()?);
    Ok(format!(
        "{steps} steps of {BATCH} of {images} digits, {test} to test; AdamW, lr {lr}, beta2 {beta2}, {params} parameters, on {device}"
    ))
}

/// What `--json` says of all runs.
fn shared_json(options: &Options, device: &Device) -> Result<serde_json::Value, Box<dyn Error>> {
    let Options { steps, seed, config, bf16_params, .. } = options;
    Ok(json!({
        "steps": steps,
        "batch": BATCH,
        "seed": seed,
        "lr": config.lr,
        "beta1": config.beta1,
        "beta2": config.beta2,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
        "parameters": if *bf16_params { "BF16" } else { "f32" },
        "device": device.name()?,
    }))
}

/// One seed, in detail.
fn detail(options: &Options, device: &Device, digits: &[Images; 2]) -> Result<serde_json::Value, Box<dyn Error>> {
    let all = Moments::all(options)?;
    let bar = progress_bar(options.steps * all.len() as u64)?;
    let mut runs = Vec::new();
    for moments in all {
        let train = if options.bf16_params { train::<bf16> } else { train::<f32> };
        let outcome = train(options, device, &moments, digits, &bar)?;
        runs.push((moments, outcome));
    }
    bar.finish_and_clear();

    let mut text = format!("{}, seed {}\n\n{}\n", heading(options, device, digits)?, options.seed, table(&runs));
    text += "predicted: for v, were gradients Gaussian with a variance that does not change\n";
    text += &format!("left out: {:.2} % of the coordinates, without a gradient so far\n", 100.0 * runs[0].1.untouched);
    io::stdout().write_all(text.as_bytes())?;

    let runs = runs.iter().map(|(moments, outcome)| {
        json!({
            "moments": moments.name,
            "train_loss": outcome.train,
            "test_loss": outcome.test,
            "test_accuracy": outcome.accuracy,
            "m_stalled": outcome.stalled[0],
            "v_stalled": outcome.stalled[1],
            "v_stalled_predicted": moments.predicted,
            "untouched": outcome.untouched,
            "v_drift": outcome.drift,
            "digest": format!("{:016x}", outcome.digest),
        })
    });
    Ok(runs.collect())
}

/// The final training loss of one seed.
fn final_loss<P: Stored>(
    options: &Options,
    device: &Device,
    moments: &Moments,
    images: &Images,
    seed: u64,
    bar: &ProgressBar,
) -> Result<f64, String> {
    let run = || {
        let mut training = Training::<P>::new(options, device, moments, images, seed)?;
        for _ in 0..options.steps {
            training.step()?;
            bar.inc(1);
        }
        Ok(model::evaluate(&training.stepper.values(), images).0)
    };
    run().map_err(|error: Box<dyn Error>| format!("{}, seed {seed}: {error}", moments.name))
}

/// Mean and standard deviation.
fn mean_and_spread(values: &[f64]) -> (f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    (mean, (values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0)).sqrt())
}

/// Final losses over many seeds.
fn over_seeds(
    options: &Options,
    device: &Device,
    digits: &[Images; 2],
    seeds: u64,
) -> Result<serde_json::Value, Box<dyn Error>> {
    let all = Moments::all(options)?;
    let bar = progress_bar(options.steps * all.len() as u64 * seeds)?;
    let last =
        options.seed.checked_add(seeds - 1).ok_or("--seed: expected one with as many above it as --seeds asks for")?;
    let mut text = format!("{}, seeds {} to {last}\n\n", heading(options, device, digits)?, options.seed);
    text += &format!(
        "{:<24} {:>9} {:>9} {:>9} {:>9} {:>12} {:>8}\n",
        "moments", "mean loss", "spread", "least", "largest", "above f32 by", "spreads"
    );
    let (mut f32, mut runs) = (None, Vec::new());
    for moments in &all {
        bar.set_message(moments.name.clone());
        let run = if options.bf16_params { final_loss::<bf16> } else { final_loss::<f32> };
        let each = (options.seed..=last).into_par_iter();
        let losses = each.map(|seed| run(options, device, moments, &digits[0], seed, &bar));
        let losses = losses.collect::<Result<Vec<f64>, _>>()?;
        let (mean, spread) = mean_and_spread(&losses);
        let (f32_mean, f32_spread) = *f32.get_or_insert((mean, spread));
        let least = losses.iter().copied().fold(f64::INFINITY, f64::min);
        let largest = losses.iter().copied().fold(0.0, f64::max);
        let above = mean - f32_mean;
        text += &format!(
            "{:<24} {mean:>9.5} {spread:>9.5} {least:>9.5} {largest:>9.5} {above:>12.5} {:>8.2}\n",
            moments.name,
            above / f32_spread
        );
        runs.push(json!({ "moments": moments.name, "mean": mean, "spread": spread, "losses": losses }));
    }
    bar.finish_and_clear();
    io::stdout().write_all(text.as_bytes())?;
    Ok(runs.into())
}

fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    // Opened first: an impossible name is better known before the training than after.
    let file = options.json.as_ref().map(|name| File::create(name).map_err(|error| format!("{name}: {error}")));
    let file = file.transpose()?;
    let device = Device::find(options.cpu)?;
    let digits = data::digits()?;
    let runs = match options.seeds {
        None => detail(options, &device, &digits)?,
        Some(seeds) => over_seeds(options, &device, &digits, seeds)?,
    };
    if let Some(mut file) = file {
        let mut all = shared_json(options, &device)?;
        all["runs"] = runs;
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
