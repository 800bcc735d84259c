//! One whole training: a schedule, parameter groups, clipping, 8-bit moments, resets, a meter, checkpoints and a curve.
//!
//! ```text
//! cargo run --release --features checkpoint --example train -- [--quick] [--steps N] [--seed N] [--lr X] [--clip X]
//!     [--resets off|model|adaptive] [--every N] [--out DIR]
//! cargo run --release --features checkpoint --example train -- --resume DIR/step-N [--every N] [--out DIR]
//! ```
//!
//! A perceptron learns handwritten digits (`examples/data/digits.csv`). Its parameters are BF16, of which the optimizer keeps
//! the low halves; first moments are E4M3 and second ones UE4M4, rounded stochastically: 6.016 bytes a parameter in all, where
//! f32 takes 12.
//!
//! - The learning rate climbs to `--lr` over a twentieth of the steps, and falls to zero along a cosine. Weights decay, biases,
//!   which are a parameter group of their own, do not.
//! - Gradients are clipped to a global norm of `--clip`; a step whose norm is infinite or NaN is left out.
//! - `--resets`: moments are emptied `off` (never), by the `model` of stalling or `adaptive`ly, when the stalled share that
//!   was measured says so.
//! - A checkpoint is written every `--every` steps (a quarter of all) and after the last, as a directory `step-N`. `--resume`
//!   goes on from one, to the bits of a training that never stopped: what shapes the training is read from there.
//! - `--quick` makes 1000 steps in place of 4000.
//!
//! In `--out` (`target/train`) there are at the end the checkpoints, every step in `log.csv`, and the curves in `curves.svg` and
//! `curves.png`. The table sets the shares of moments that stalled over the second half of the steps beside what the model
//! predicts at the ages that they had. The model knows one size of gradients. Late in training the norms of batches differ by
//! two orders of magnitude, and a batch whose gradients are small leaves moments that larger ones have made: in the steps
//! after a reset more of them stall than predicted, which with `--resets off` they do not.

mod checkpoint;
mod curves;
#[path = "../adamw/data.rs"]
mod data;
#[path = "../adamw/digest.rs"]
mod digest;
mod error;
mod log;
#[path = "../adamw/math.rs"]
mod math;
#[path = "../adamw/model.rs"]
mod model;
mod options;
#[path = "../figures/plot/mod.rs"]
#[allow(dead_code, unused_imports, reason = "the figures use more of it")]
mod plot;
#[path = "../adamw/progress.rs"]
mod progress;
#[path = "../figures/table.rs"]
#[allow(dead_code, reason = "the figures use more of it")]
mod table;
#[cfg(test)]
mod tests;
mod training;

use std::fs;
use std::io::{self, Write};
use std::process::ExitCode;

use data::Images;
use error::TrainError;
use options::{Options, Start};
use progress::progress_bar;
use training::{BATCH, STATES, Training};

/// What pictures go wrong with.
type Error = Box<dyn std::error::Error + Send + Sync>;

/// What came of it, in words.
fn summary(training: &Training<'_>, [images, test]: &[Images; 2]) -> Result<String, TrainError> {
    let values = training.values();
    let (train_loss, _) = model::evaluate(&values, images);
    let (test_loss, accuracy) = model::evaluate(&values, test);
    let (setup, log) = (&training.setup, &training.log);
    let mut text = format!(
        "{} steps of {BATCH} of {} digits, {} to test; AdamW, learning rate up to {}, seed {}\n",
        setup.steps,
        images.digits.len(),
        test.digits.len(),
        setup.lr,
        setup.seed
    );
    let bytes = training.bytes() as f64 / values.iter().map(Vec::len).sum::<usize>() as f64;
    text += &format!("parameters BF16 with 16 bits more, moments {STATES}: {bytes:.3} bytes a parameter\n\n");
    text +=
        &format!("loss      {train_loss:.4} to train on, {test_loss:.4} to test, where {accuracy:.4} are read right\n");
    let (clipped, skipped) = (log.clipped(), log.skipped());
    text += &format!("gradients clipped to a norm of {} in {clipped} steps, {skipped} steps left out\n", setup.clip);
    text += &format!("resets    {}\n\n", log.resets(setup));
    text += &log.stalls.table();
    text += &format!("\ndigest of parameters and moments: {:016x}\n", training.digest()?);
    Ok(text)
}

/// Trains as told; gives what is printed.
fn run(options: &Options) -> Result<String, TrainError> {
    let digits = data::digits().map_err(|error| TrainError::Digits(error.to_string()))?;
    let mut training = match &options.start {
        Start::Fresh(setup) => Training::new(setup.clone(), &digits)?,
        Start::Resume(path) => checkpoint::load(path, &digits)?,
    };
    let out = &options.out;
    // Before the training, which would be lost for an impossible name.
    fs::create_dir_all(out).map_err(|source| TrainError::io("--out", out, "create", source))?;
    let steps = training.setup.steps;
    let every = options.every.unwrap_or(steps.div_ceil(4));
    let bar = progress_bar(steps)?;
    bar.set_position(training.log.steps());
    while training.log.steps() < steps {
        training.step()?;
        let step = training.log.steps();
        if step.is_multiple_of(every) || step == steps {
            checkpoint::save(out, &training)?;
        }
        bar.inc(1);
        bar.set_message(format!("loss {:.4}", training.log.recent_loss()));
    }
    bar.finish_and_clear();

    let picture = curves::draw(&training.setup, &training.log);
    let svg = picture.svg().map_err(TrainError::Picture)?;
    let png = plot::png(&svg).map_err(TrainError::Picture)?;
    for (name, bytes) in
        [("log.csv", training.log.csv().into_bytes()), ("curves.svg", svg.into_bytes()), ("curves.png", png)]
    {
        let path = out.join(name);
        fs::write(&path, bytes).map_err(|source| TrainError::io("--out", &path, "write", source))?;
    }
    summary(&training, &digits)
}

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("train: {error}");
            return ExitCode::from(2);
        }
    };
    let text = match run(&options) {
        Ok(text) => text,
        Err(error) => {
            eprintln!("train: {error}");
            return ExitCode::FAILURE;
        }
    };
    let text = format!("{text}\nin {}: curves.svg, curves.png, log.csv, checkpoints step-N\n", options.out.display());
    match io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("train: stdout: {error}");
            ExitCode::FAILURE
        }
    }
}
