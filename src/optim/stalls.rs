//! What the meter of an optimizer counted, beside what the model predicts.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use super::engine::Counts;
use super::hyper::{MOST, Rule, StateKind};
use super::{Optimizer, Rounding, StateFormat, Stepped};
use crate::format::Format;
use crate::random::Role;
use crate::stall::{StallCounts, average_probability_since_reset};

/// Who stalled in one state of one tensor in the last step.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct StateStalls {
    /// The tensor's id.
    pub tensor: u64,
    /// Its name, if it is known by one.
    pub name: Option<String>,
    /// The state: `m`, `v` or `slow`.
    pub state: &'static str,
    /// What it is stored as.
    pub format: StateFormat,
    /// Steps since it was zero.
    pub age: u64,
    /// What was counted.
    pub counts: StallCounts,
    /// For a second moment of few bits, the share that
    /// [`average_probability_since_reset`](crate::stall::average_probability_since_reset) predicts for the step from the age before, of
    /// Gaussian gradients; `None` for others, and for decays of 0.
    pub predicted: Option<f64>,
}

impl StateStalls {
    pub(crate) fn new<R: Rule>(
        tensor: u64,
        name: Option<String>,
        kind: StateKind,
        format: StateFormat,
        age: u64,
        counts: Counts,
        (config, rounding): (&R, Rounding),
    ) -> Self {
        let predicted = || {
            let rounded = rounded(format).filter(|_| kind.role == Role::SecondMoment)?;
            let probability =
                average_probability_since_reset(rounded, config.second_decay()?, age.checked_sub(1)?).ok()?;
            Some(if rounding == Rounding::Nearest { probability.nearest } else { probability.stochastic })
        };
        let (state, counts, predicted) = (kind.name, counts.public(), predicted());
        Self { tensor, name, state, format, age, counts, predicted }
    }
}

impl fmt::Display for StateStalls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => write!(f, "{name}::{}", self.state)?,
            None => write!(f, "#{}::{}", self.tensor, self.state)?,
        }
        write!(f, " ({}, age {}): stalled {:.4}", self.format, self.age, self.counts.share())?;
        self.predicted.map_or(Ok(()), |predicted| write!(f, ", predicted {predicted:.4}"))
    }
}

impl Counts {
    pub(crate) fn public(self) -> StallCounts {
        let Self { counted, stalled, nan, untouched, moved_to_same } = self;
        StallCounts { stalled, moved: counted - stalled, nan, untouched, same_code: stalled + moved_to_same }
    }
}

/// The format in which a state's values are rounded, if they are.
fn rounded(format: StateFormat) -> Option<Format> {
    match format {
        StateFormat::F32 => None,
        StateFormat::Bf16 => Some(Format::BF16),
        StateFormat::Blocks(format) => Some(format.element()),
    }
}

impl<R: Rule> Optimizer<R> {
    /// What the [meter](Self::meter) counted in the states of a tensor in the last executed step, in the order of their formats;
    /// empty without a meter, or for a tensor that was not part of the step.
    #[must_use]
    pub fn stalls(&self, id: u64) -> Vec<StallCounts> {
        let counts = self.metered.get(&id);
        counts.map_or(Vec::new(), |counts| counts[..R::STATES.len()].iter().map(|counts| counts.public()).collect())
    }

    /// The tensors of the last executed step with the counts of their second moments, for
    /// [`Resets::after_step`](super::Resets::after_step) under an adaptive schedule. Empty without a [meter](Self::meter).
    #[must_use]
    pub fn stepped(&self) -> Vec<Stepped> {
        let second = R::STATES.iter().position(|kind| kind.role == Role::SecondMoment);
        let of = |(&tensor, counts): (&u64, &[Counts; MOST])| Stepped {
            tensor,
            stalled: second.map(|second| counts[second].public()),
        };
        self.metered.iter().map(of).collect()
    }

    /// What the [meter](Self::meter) counted in the last executed step, by tensor and state, with what the model of stalling
    /// predicts.
    #[must_use]
    pub fn stall_report(&self) -> Vec<StateStalls> {
        let mut report = Vec::new();
        for (&tensor, counts) in &self.metered {
            let Some(state) = self.tensors.get(&tensor) else { continue };
            for (s, (kind, stored)) in R::STATES.iter().zip(&state.states).enumerate() {
                let rounding = (&self.groups[state.group].config, self.rounding);
                let (age, name) = (state.ages[s], state.name.clone());
                report.push(StateStalls::new(tensor, name, *kind, stored.format(), age, counts[s], rounding));
            }
        }
        report
    }
}
