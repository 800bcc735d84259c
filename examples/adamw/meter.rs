//! What rounding does to the moments: how many stand still, and how far the second drifts.

use halfulp::optim::{AdamWConfig, Moment};
use halfulp::stall::{Comparison, MeterError, StallCounts};

/// Watches the moments of a run. A tensor is known by its place.
pub(crate) struct Meter {
    keep: f32,
    add: f32,
    /// Second moments in f32, fed with the gradients of the run.
    exact: Vec<Vec<f32>>,
    /// Moments after the step before; none until the first look.
    before: Vec<[Moment; 2]>,
    pub(crate) first: StallCounts,
    pub(crate) second: StallCounts,
}

impl Meter {
    pub(crate) fn new(config: &AdamWConfig, tensors: &[Vec<f32>]) -> Self {
        Self {
            keep: config.beta2 as f32,
            add: (1.0 - config.beta2) as f32,
            exact: tensors.iter().map(|tensor| vec![0.0; tensor.len()]).collect(),
            before: Vec::new(),
            first: StallCounts::default(),
            second: StallCounts::default(),
        }
    }

    /// Takes note of the gradients of a step.
    pub(crate) fn feed(&mut self, grads: &[Vec<f32>]) {
        for (exact, g) in self.exact.iter_mut().flatten().zip(grads.iter().flatten()) {
            *exact = self.add.mul_add(g * g, self.keep * *exact);
        }
    }

    /// Compares the moments after a step with those after the step before, if it has seen those.
    pub(crate) fn look(&mut self, grads: &[Vec<f32>], moments: Vec<[Moment; 2]>) -> Result<(), MeterError> {
        for ((g, [m, v]), [old_m, old_v]) in grads.iter().zip(&moments).zip(&self.before) {
            self.first += Comparison::new(old_m, m).gradients(g).second_moment(old_v).count()?;
            self.second += Comparison::new(old_v, v).gradients(g).count()?;
        }
        self.before = moments;
        Ok(())
    }

    /// Share of the coordinates left out for want of a gradient.
    pub(crate) fn untouched(&self) -> f64 {
        let StallCounts { untouched, nan, .. } = self.second;
        untouched as f64 / (untouched + nan + self.second.counted()) as f64
    }

    /// Mean of the stored second moment over the exact one, where that is positive, after the last look.
    pub(crate) fn drift(&self) -> f64 {
        let stored = self.before.iter().flat_map(|[_, v]| v.to_f32());
        let ratios = stored.zip(self.exact.iter().flatten()).filter(|(_, exact)| **exact > 0.0);
        let (sum, n) = ratios.fold((0.0, 0u64), |(sum, n), (v, exact)| (sum + f64::from(v) / f64::from(*exact), n + 1));
        sum / n as f64
    }
}
