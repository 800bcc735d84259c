//! What the meter counted on the device, beside what the model predicts.

use alloc::vec::Vec;

use super::{Optimizer, StepMemory, ages_of};
use crate::cuda::CudaError;
use crate::cuda::plan::{COPIES, DeviceCounts};
use crate::optim::{self, MOST, Rule};
use crate::random::Role;

impl<R: Rule> Optimizer<R> {
    /// As [`optim::Optimizer::stalls`]. Waits for the step.
    ///
    /// # Errors
    /// As [`Gpu::download`](crate::cuda::Gpu::download).
    pub fn stalls(&self, id: u64) -> Result<Vec<crate::stall::StallCounts>, CudaError> {
        if !self.meter || !self.last.list.iter().any(|memory| memory.id == id) {
            return Ok(Vec::new());
        }
        let counts = self.gpu.download(&self.counts)?;
        Ok(self.counts_of(&counts, id).iter().map(|counts| counts.public()).collect())
    }

    /// As [`optim::Optimizer::stepped`]: without a meter the tensors alone. Waits for the step if there is one.
    ///
    /// # Errors
    /// As [`Gpu::download`](crate::cuda::Gpu::download).
    pub fn stepped(&self) -> Result<Vec<optim::Stepped>, CudaError> {
        let counts = if self.meter { Some(self.gpu.download(&self.counts)?) } else { None };
        let second = R::STATES.iter().position(|kind| kind.role == Role::SecondMoment);
        let of = |memory: &StepMemory| {
            let tensor = memory.id;
            let stalled = counts
                .as_ref()
                .zip(second)
                .and_then(|(counts, second)| self.counts_of(counts, tensor).get(second).map(|counts| counts.public()));
            optim::Stepped { tensor, stalled }
        };
        Ok(self.last.list.iter().map(of).collect())
    }

    /// As [`optim::Optimizer::stall_report`]. Waits for the step.
    ///
    /// # Errors
    /// As [`Gpu::download`](crate::cuda::Gpu::download).
    pub fn stall_report(&self) -> Result<Vec<optim::StateStalls>, CudaError> {
        if !self.meter {
            return Ok(Vec::new());
        }
        let (counts, ages) = (self.gpu.download(&self.counts)?, self.gpu.download(&self.ages)?);
        let mut report = Vec::new();
        let mut last: Vec<u64> = self.last.list.iter().map(|memory| memory.id).collect();
        last.sort_unstable();
        let groups = self.host_ages.groups();
        for id in last {
            let Some(state) = self.tensors.get(&id) else { continue };
            let group = groups[state.slot as usize];
            let of_states = self.counts_of(&counts, id).into_iter().zip(ages_of(&ages, state.slot)).enumerate();
            for (s, (counts, age)) in of_states {
                report.push(optim::StateStalls::new::<R>(
                    id,
                    state.name.clone(),
                    R::STATES[s],
                    state.formats[s],
                    age,
                    counts,
                    (&self.groups[group].config, self.rounding),
                ));
            }
        }
        Ok(report)
    }

    /// As [`optim::Resets::after_step`], for this optimizer. Waits for the age of tensors that are reset.
    ///
    /// # Errors
    /// [`CudaError::Reset`] as `after_step`, and as [`reset`](Self::reset) and [`Gpu::download`](crate::cuda::Gpu::download).
    pub fn reset_after_step(
        &mut self,
        resets: &mut optim::Resets,
        stepped: &[optim::Stepped],
    ) -> Result<(), CudaError> {
        let tensors = match resets.decide(stepped)? {
            optim::ResetDue::Tensors(tensors) => tensors,
            optim::ResetDue::All => self.tensors().collect(),
        };
        for tensor in tensors {
            let (step, age, moments) = (self.steps()?, self.age(tensor)?, resets.moments());
            if self.reset(tensor, moments)? {
                resets.record(optim::ResetEvent { step, tensor, age, moments });
            }
        }
        Ok(())
    }

    /// What was counted in each state of a tensor.
    fn counts_of(&self, counts: &[DeviceCounts], id: u64) -> Vec<optim::Counts> {
        let Some(state) = self.tensors.get(&id) else { return Vec::new() };
        let copies = &counts[state.slot as usize * COPIES..][..COPIES];
        let sum = |of: fn(&DeviceCounts) -> u64| copies.iter().map(of).sum::<u64>();
        let untouched = sum(|counts| counts.untouched);
        let of = |s: usize| {
            let by = |of: fn(&DeviceCounts) -> [u64; MOST]| copies.iter().map(|counts| of(counts)[s]).sum::<u64>();
            let (stalled, nan) = (by(|counts| counts.stalled), by(|counts| counts.nan));
            let moved_to_same = by(|counts| counts.moved_to_same);
            optim::Counts { counted: state.n - untouched - nan, stalled, nan, untouched, moved_to_same }
        };
        (0..R::STATES.len()).map(of).collect()
    }
}
