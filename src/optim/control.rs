//! What a step is told beside its gradients.

use super::{Clipped, OptimError, StepReport};

/// Loss scaling, clipping and skipping of one step.
///
/// ```
/// use halfulp::optim::{AdamW, AdamWConfig, ChunkSums, Clip, GradientNorm, NonFinite, Rounding, StateFormat};
/// use halfulp::optim::{Parameter, StepControl, StepOutcome};
/// let mut opt = AdamW::new(AdamWConfig::default(), StateFormat::Bf16, Rounding::stochastic(7))?;
/// let (mut w, loss_scale) = ([1.0f32; 4], 1024.0);
/// let grads = [3.0 * loss_scale, f32::INFINITY, 0.0, 0.0]; // of the scaled loss
/// let control = StepControl { gradient_scale: 1.0 / loss_scale, ..StepControl::default() };
/// let norm = GradientNorm::gather([&ChunkSums::of(0, &grads)])?;
/// let clip = Clip::new(1.0)?.non_finite(NonFinite::Skip);
/// let control = control.clipped(clip.coefficient(norm, control.gradient_scale)?);
/// let outcome = opt.step_controlled(&control, &mut [Parameter::numbered(0, &mut w, &grads)])?;
/// assert_eq!((outcome, w, opt.steps()), (StepOutcome::Skipped, [1.0; 4], 0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepControl {
    /// Gradients are multiplied by it in f32: 1 over the loss scale. Finite. 1.
    pub gradient_scale: f32,
    /// They are multiplied by it next: the clip coefficient, from 0 to 1, or NaN where the norm is. 1.
    pub clip: f32,
    /// Whether a gradient is NaN or infinite and the step is to be left out for it. False.
    pub found_inf: bool,
}

impl Default for StepControl {
    fn default() -> Self {
        Self { gradient_scale: 1.0, clip: 1.0, found_inf: false }
    }
}

impl StepControl {
    /// With what became of the clip: its coefficient, or the step left out.
    #[must_use]
    pub fn clipped(self, clipped: Clipped) -> Self {
        match clipped {
            Clipped::Factor(clip) => Self { clip, ..self },
            Clipped::Skip => Self { found_inf: true, ..self },
        }
    }

    pub(crate) fn check(&self) -> Result<(), OptimError> {
        let within = |argument, expected, got: f32, ok: bool| {
            if ok { Ok(()) } else { Err(OptimError::Config { argument, expected, got: got.into() }) }
        };
        within("gradient_scale", "a finite f32", self.gradient_scale, self.gradient_scale.is_finite())?;
        let clip = self.clip;
        within("clip", "a coefficient from 0 to 1, or NaN", clip, clip.is_nan() || (0.0..=1.0).contains(&clip))
    }
}

/// Whether a step was executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum StepOutcome {
    /// It was.
    Executed(StepReport),
    /// It was left out: parameters, moments, ages and the step are what they were.
    Skipped,
}
