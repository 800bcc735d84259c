//! The command line, and what shapes a training.

use std::collections::BTreeMap;
use std::f64::consts::PI;
use std::path::PathBuf;

use halfulp::Format;
use halfulp::optim::{AdamWConfig, Clip, NonFinite, NormError, ResetSchedule};

use crate::error::TrainError;

const USAGE: &str = "usage: train [--quick] [--steps N] [--seed N] [--lr X] [--clip X] [--resets off|model|adaptive] \
                     [--every N] [--out DIR], or train --resume DIR/step-N [--every N] [--out DIR]";
const STEPS: u64 = 4000;
const QUICK: u64 = 1000;
/// Those that shape a training.
const SHAPING: [&str; 5] = ["--steps", "--seed", "--lr", "--clip", "--resets"];
const OTHERS: [&str; 3] = ["--every", "--out", "--resume"];

pub(crate) struct Options {
    pub(crate) start: Start,
    /// Steps from one checkpoint to the next, if asked for.
    pub(crate) every: Option<u64>,
    pub(crate) out: PathBuf,
}

pub(crate) enum Start {
    Fresh(Setup),
    /// From this checkpoint.
    Resume(PathBuf),
}

/// What shapes a training: all of its bits follow from it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Setup {
    pub(crate) steps: u64,
    pub(crate) seed: u64,
    /// The highest learning rate.
    pub(crate) lr: f64,
    /// The highest norm of gradients.
    pub(crate) clip: f64,
    pub(crate) resets: Schedule,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Schedule {
    Off,
    Model,
    Adaptive,
}

const SCHEDULES: [(&str, Schedule); 3] =
    [("off", Schedule::Off), ("model", Schedule::Model), ("adaptive", Schedule::Adaptive)];

impl Default for Setup {
    fn default() -> Self {
        Self { steps: STEPS, seed: 0, lr: 3e-3, clip: 1.0, resets: Schedule::Model }
    }
}

impl Setup {
    /// Sets what an argument names.
    fn set(&mut self, argument: &'static str, value: &str) -> Result<(), TrainError> {
        let wrong = |expected| TrainError::Argument { argument, expected, got: value.into() };
        match argument {
            "--steps" => {
                let steps = value.parse().ok().filter(|steps| (2..=1_000_000).contains(steps));
                self.steps = steps.ok_or(wrong("a number from 2 to 1000000"))?;
            }
            "--seed" => self.seed = value.parse().map_err(|_| wrong("a number below 2^64"))?,
            "--lr" => {
                let lr = value.parse().ok().filter(|&lr| AdamWConfig { lr, ..AdamWConfig::default() }.check().is_ok());
                self.lr = lr.ok_or(wrong("a learning rate, finite and not negative"))?;
            }
            "--clip" => {
                let clip = value.parse().ok().filter(|&clip| Clip::new(clip).is_ok());
                self.clip = clip.ok_or(wrong("a norm, finite and not negative"))?;
            }
            _ => {
                let found = SCHEDULES.iter().find(|(name, _)| *name == value);
                self.resets = found.ok_or(wrong("off, model or adaptive"))?.1;
            }
        }
        Ok(())
    }

    /// As a command line, without what may be another when it goes on.
    pub(crate) fn line(&self) -> String {
        let Self { steps, seed, lr, clip, resets } = self;
        let schedule = SCHEDULES.iter().find(|(_, schedule)| schedule == resets).map_or("", |(name, _)| name);
        format!("--steps {steps} --seed {seed} --lr {lr} --clip {clip} --resets {schedule}")
    }

    /// Up along a line, down along half a cosine.
    pub(crate) fn learning_rate(&self, step: u64) -> f64 {
        let warm_up = self.warm_up();
        if step <= warm_up {
            return self.lr * step as f64 / warm_up as f64;
        }
        let way = (step - warm_up - 1) as f64 / (self.steps - warm_up) as f64;
        self.lr * 0.5 * (1.0 + libm::cos(PI * way))
    }

    pub(crate) fn warm_up(&self) -> u64 {
        self.steps / 20
    }

    pub(crate) fn clip(&self) -> Result<Clip, NormError> {
        Ok(Clip::new(self.clip)?.non_finite(NonFinite::Skip))
    }

    /// When moments are reset whose second ones are stored in `format`.
    pub(crate) fn schedule(&self, format: Format, beta2: f64) -> ResetSchedule {
        match self.resets {
            Schedule::Off => ResetSchedule::Off,
            Schedule::Model => ResetSchedule::model(format, beta2),
            Schedule::Adaptive => ResetSchedule::adaptive(beta2),
        }
    }
}

impl Options {
    pub(crate) fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, TrainError> {
        let (mut given, mut quick) = (BTreeMap::new(), false);
        while let Some(name) = args.next() {
            if name == "--quick" {
                quick = true;
                continue;
            }
            let Some(argument) = SHAPING.into_iter().chain(OTHERS).find(|argument| *argument == name) else {
                return Err(TrainError::Unknown { got: name, usage: USAGE });
            };
            let missing = || TrainError::Argument { argument, expected: "a value", got: "none".into() };
            given.insert(argument, args.next().ok_or_else(missing)?);
        }
        let every = given.remove("--every").map(|value| {
            let steps = value.parse().ok().filter(|&steps| steps > 0);
            steps.ok_or(TrainError::Argument {
                argument: "--every",
                expected: "a number of steps from 1 on",
                got: value,
            })
        });
        let every = every.transpose()?;
        let out = given.remove("--out").map_or("target/train".into(), PathBuf::from);
        let resume = given.remove("--resume").map(PathBuf::from);
        if let Some(path) = resume {
            let shaping = given.into_keys().next().or(quick.then_some("--quick"));
            return match shaping {
                Some(argument) => Err(TrainError::Fixed { argument }),
                None => Ok(Self { start: Start::Resume(path), every, out }),
            };
        }
        let mut setup = Setup { steps: if quick { QUICK } else { STEPS }, ..Setup::default() };
        for (argument, value) in given {
            setup.set(argument, &value)?;
        }
        Ok(Self { start: Start::Fresh(setup), every, out })
    }
}
