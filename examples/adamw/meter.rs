//! What rounding does to the moments: how many stand still, and how far the second drifts.

use halfulp::optim::AdamWConfig;

/// Coordinates of one moment: those counted, and those of them that stalled.
#[derive(Clone, Copy, Default)]
pub(crate) struct Share {
    stalled: u64,
    counted: u64,
}

impl Share {
    pub(crate) fn value(self) -> f64 {
        self.stalled as f64 / self.counted as f64
    }
}

/// Watches the moments of a run. A tensor is known by its place.
pub(crate) struct Meter {
    keep: f32,
    add: f32,
    /// Second moments in f32, fed with the gradients of the run.
    exact: Vec<Vec<f32>>,
    /// Moments after the step before; none until the first look.
    before: Vec<[Vec<f32>; 2]>,
    pub(crate) first: Share,
    pub(crate) second: Share,
    /// Coordinates without a gradient so far: nothing there can move.
    untouched: u64,
    looked: u64,
}

impl Meter {
    pub(crate) fn new(config: &AdamWConfig, tensors: &[Vec<f32>]) -> Self {
        Self {
            keep: config.beta2 as f32,
            add: (1.0 - config.beta2) as f32,
            exact: tensors.iter().map(|tensor| vec![0.0; tensor.len()]).collect(),
            before: Vec::new(),
            first: Share::default(),
            second: Share::default(),
            untouched: 0,
            looked: 0,
        }
    }

    /// Takes note of the gradients of a step.
    pub(crate) fn feed(&mut self, grads: &[Vec<f32>]) {
        for (exact, g) in self.exact.iter_mut().flatten().zip(grads.iter().flatten()) {
            *exact = self.add.mul_add(g * g, self.keep * *exact);
        }
    }

    /// Compares the moments after a step with those after the step before, if it has seen those.
    ///
    /// Stalled: the same real number as before. Left out: NaN, and coordinates whose gradient and second moment are zero.
    pub(crate) fn look(&mut self, grads: &[Vec<f32>], moments: Vec<[Vec<f32>; 2]>) {
        for ((g, [m, v]), [old_m, old_v]) in grads.iter().zip(&moments).zip(&self.before) {
            for i in 0..g.len() {
                self.looked += 1;
                if g[i] == 0.0 && old_v[i] == 0.0 {
                    self.untouched += 1;
                    continue;
                }
                for (share, old, new) in [(&mut self.first, old_m[i], m[i]), (&mut self.second, old_v[i], v[i])] {
                    if !old.is_nan() && !new.is_nan() {
                        share.counted += 1;
                        share.stalled += u64::from(old == new);
                    }
                }
            }
        }
        self.before = moments;
    }

    /// Share of the coordinates left out for want of a gradient.
    pub(crate) fn untouched(&self) -> f64 {
        self.untouched as f64 / self.looked as f64
    }

    /// Mean of the stored second moment over the exact one, where that is positive, after the last look.
    pub(crate) fn drift(&self) -> f64 {
        let stored = self.before.iter().flat_map(|[_, v]| v);
        let ratios = stored.zip(self.exact.iter().flatten()).filter(|(_, exact)| **exact > 0.0);
        let (sum, n) =
            ratios.fold((0.0, 0u64), |(sum, n), (v, exact)| (sum + f64::from(*v) / f64::from(*exact), n + 1));
        sum / n as f64
    }
}
