//! Optimizer steps whose states are stored in few bits: the arithmetic in f32, one rounding for each stored value.
//!
//! [`AdamW`] steps tensors in CPU memory. Its moments are f32, BF16, or 8 or 4 bits in blocks that share a scale, rounded to
//! nearest or stochastically; parameters and gradients are f32, BF16 or FP16. A stored value is a pure function of the inputs,
//! the seed, the step and the element's place: the same bits for any number of threads, at any instruction-set level, and resumed
//! as straight through.
//!
//! Around the step: [`ParameterGroup`]s; [`StepControl`] for loss scales, clipping and steps left out; [`ChunkSums`] and
//! [`Clip`] for the global norm of gradients, in one order whatever the threads and [`Shard`]s; `Resets` (feature `stall`) for
//! states that stall; [`remainder`] for BF16 parameters that lose nothing; `checkpoint` (feature `checkpoint`) to stop and go on.
//!
//! ```
//! use halfulp::optim::{AdamW, AdamWConfig, Rounding, StateFormat};
//! let mut opt = AdamW::new(AdamWConfig { lr: 1e-2, ..AdamWConfig::default() }, StateFormat::Bf16, Rounding::stochastic(7))?;
//! let mut w = vec![1.0f32; 1000];
//! for _ in 0..100 {
//!     let grads: Vec<f32> = w.iter().map(|w| 2.0 * w).collect(); // of the sum of squares
//!     opt.step(&mut w, &grads)?;
//! }
//! assert!(w.iter().all(|w| w.abs() < 0.4));
//! # Ok::<(), halfulp::optim::OptimError>(())
//! ```
//!
//! # Moments in blocks
//!
//! A block of 128 elements (32, 64 or 256 if asked for; the last may be shorter) has one scale, by default the smallest power
//! of two under which its largest new value is no larger than the largest of the format. Powers of two keep the grid still
//! from step to step, so that what did not change is not rounded again.
//!
//! - A second moment above zero is never stored as zero: below the smallest positive code it becomes that code. This is the one
//!   place where stochastic rounding is left; it makes `v` larger, and steps smaller, where a zero would make them boundless.
//! - A block with a new value that is NaN or infinite, as after such a gradient, becomes NaN as a whole, and
//!   [`StepReport`] counts it. The parameter of the element itself is NaN whatever the moments are stored in.
//!
//! | [`States`] | bytes a parameter |
//! |---|---|
//! | `F32` | 8 |
//! | `Bf16` | 4 |
//! | `m: Bf16`, `v: UE4M4` or another of 8 bits | 3.008 |
//! | `m: E4M3` or `E5M2`, `v: UE4M4`, `UE5M3`, `E4M3` or `E5M2` | 2.016 |
//! | `m: E4M3` or `E5M2`, `v: UE2M2NZ` | 1.516 |
//! | `FP4` | 1.016 |

#[cfg(feature = "checkpoint")]
pub mod checkpoint;
mod collective;
mod control;
mod engine;
mod hyper;
mod norm;
mod optimizer;
pub mod remainder;
mod reset;
mod rule;
mod shard;
#[cfg(feature = "stall")]
mod stalls;
mod state;
mod store;
mod tensor;

pub use collective::{Alone, Collective};
pub use control::{StepControl, StepOutcome};
#[cfg(all(feature = "cuda", feature = "stall"))]
pub(crate) use engine::Counts;
#[cfg(all(test, feature = "cuda"))]
pub(crate) use hyper::sealed;
pub use hyper::{AdEMAMixConfig, AdamConfig, AdamWConfig, LambConfig, LionConfig, Rule, SgdConfig, StateSet};
#[cfg(feature = "cuda")]
pub(crate) use hyper::{Formats, MOST, StateKind, Visit};
#[cfg(feature = "cuda")]
pub(crate) use norm::ClipRule;
#[cfg(all(test, feature = "cuda"))]
pub(crate) use norm::combine;
pub use norm::{ChunkSums, Clip, Clipped, GradientNorm, NonFinite, NormError};
pub use optimizer::{Optimizer, Parameter, ParameterGroup};
#[cfg(feature = "cuda")]
pub(crate) use optimizer::{TensorState, check_group};
pub use reset::ResetMoments;
#[cfg(feature = "stall")]
pub use reset::{ResetDue, ResetError, ResetEvent, ResetProgress, ResetSchedule, ResetScope, Resets, Stepped};
#[cfg(feature = "stall")]
pub(crate) use rule::power;
pub use rule::{AdEMAMixScalars, AdamScalars, LambScalars, LionScalars, Scalars, SgdScalars};
pub use shard::{Shard, ShardError};
#[cfg(feature = "stall")]
pub use stalls::StateStalls;
pub use state::{MixStates, Moment, ParseStateFormatError, Real, StateFormat, States};
#[cfg(any(feature = "stall", all(test, feature = "cuda")))]
pub(crate) use store::BlockEncoder;
#[cfg(feature = "stall")]
pub(crate) use store::{Drawer, Noise, StoreBlocks};
#[cfg(feature = "cuda")]
pub(crate) use tensor::{Entry, Tensor, check};

use alloc::string::String;
use core::ops::AddAssign;

/// AdamW: Adam with decoupled weight decay. The update is [`Scalars::step`].
pub type AdamW = Optimizer<AdamWConfig>;
/// Adam with L2 regularisation. The update is [`AdamScalars::step`].
pub type Adam = Optimizer<AdamConfig>;
/// Stochastic gradient descent with momentum. The update is [`SgdScalars::step`].
pub type Sgd = Optimizer<SgdConfig>;
/// Lion. The update is [`LionScalars::step`].
pub type Lion = Optimizer<LionConfig>;
/// AdEMAMix: a fast and a slow first moment. The update is [`AdEMAMixScalars::step`].
pub type AdEMAMix = Optimizer<AdEMAMixConfig>;
/// LAMB: Adam whose updates are scaled, tensor by tensor, to the norm of the parameters. The update is
/// [`LambScalars::step`].
pub type Lamb = Optimizer<LambConfig>;

/// How values are rounded when they are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rounding {
    /// To nearest, ties to the even code. In few bits this loses every update below half a ulp.
    Nearest,
    /// Stochastically, under stream 1 with this seed: each moment, and each parameter of fewer than 32 bits, by draws of
    /// its own.
    Stochastic {
        /// The seed.
        seed: u64,
    },
    /// Stochastically, with the words of the Python package `sr-states` in its layout: the first moment draws at counters
    /// `offset + i`, the second at `offset + n + i`, and the offset moves on by `2n` for each tensor and step. Parameters
    /// are rounded to nearest. For comparison, on the CPU alone: a GPU refuses it. See
    /// [`SrStates`](crate::random::SrStates) for its limits.
    ///
    /// Stored moments equal the package's wherever its f32 arithmetic is that of this crate. It is not where the compiler
    /// behind the package fuses a multiplication and an addition that [`Scalars::step`] does not, or the other way round.
    SrStates {
        /// The seed, of which the low 32 bits count.
        seed: u64,
    },
}

impl Rounding {
    /// Stochastic rounding under stream 1.
    #[must_use]
    pub const fn stochastic(seed: u64) -> Self {
        Self::Stochastic { seed }
    }
}

/// What came of a step, besides the step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepReport {
    /// Blocks of moments, first and second ones, that hold a NaN: a new value was a NaN or infinite, as it is after such a
    /// gradient, or where the block was NaN before. All of such a block reads NaN from the next step on.
    pub nan_blocks: u64,
}

impl AddAssign for StepReport {
    fn add_assign(&mut self, other: Self) {
        self.nan_blocks += other.nan_blocks;
    }
}

/// What an optimizer refuses. Nothing was changed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OptimError {
    /// A hyper-parameter out of its range.
    #[error("{argument}: expected {expected}, got {got}")]
    Config {
        /// Name of the hyper-parameter.
        argument: &'static str,
        /// Its range.
        expected: &'static str,
        /// What came.
        got: f64,
    },
    /// An option that this optimizer does not have.
    #[error("{argument}: not supported: {reason}")]
    Unsupported {
        /// Name of the option.
        argument: &'static str,
        /// Why.
        reason: &'static str,
    },
    /// A format that a moment can't be stored in.
    #[error("{argument}: expected {expected}, got {got}")]
    State {
        /// The moment: `m` or `v`.
        argument: &'static str,
        /// What it can be.
        expected: &'static str,
        /// What came.
        got: StateFormat,
    },
    /// Gradients or a state of another length than the parameters.
    #[error("{argument} of tensor {tensor}: expected {expected} elements, got {got}")]
    Length {
        /// What has the wrong length.
        argument: &'static str,
        /// The tensor, by name or number.
        tensor: String,
        /// Number of parameters.
        expected: usize,
        /// What came.
        got: usize,
    },
    /// A parameter group that there is not.
    #[error("group of tensor {tensor}: expected one of {expected} groups, counted from 0, got {got}")]
    Group {
        /// The tensor, by name or number.
        tensor: String,
        /// Number of groups.
        expected: usize,
        /// What came.
        got: usize,
    },
    /// A parameter group whose states are stored otherwise than those that the tensor has.
    #[error("group of tensor {tensor}: expected one with states in {expected}, as the tensor's are, got {got}")]
    GroupStates {
        /// The tensor, by name or number.
        tensor: String,
        /// What the tensor's states are stored as.
        expected: String,
        /// What the group's are.
        got: String,
    },
    /// A part of a tensor that is no [`Shard`] of it.
    #[error("part of tensor {tensor}: {source}")]
    Cut {
        /// The tensor, by name or number.
        tensor: String,
        /// What is wrong with its range.
        source: ShardError,
    },
    /// Another part of a tensor than was stepped before.
    #[error("part of tensor {tensor}: expected element {expected} first, as in the steps before, got {got}")]
    Part {
        /// The tensor, by name or number.
        tensor: String,
        /// First element of the part with a state.
        expected: u64,
        /// What came.
        got: u64,
    },
    /// Two tensors of one call with the same id.
    #[error("tensor: expected different ids in one step, got {first} and {second} with the same id {id:#018x}")]
    SameTensor {
        /// The first of them, by name or number.
        first: String,
        /// The second.
        second: String,
        /// Their id.
        id: u64,
    },
    /// A norm's own refusal.
    #[error(transparent)]
    Norm(#[from] NormError),
    /// Sums that did not come from other ranks.
    #[error("collective: {message}")]
    Collective {
        /// What the [`Collective`] says.
        message: String,
    },
}
