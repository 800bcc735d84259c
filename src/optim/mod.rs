//! Optimizer steps whose states are stored in few bits: the arithmetic in f32, one rounding for each stored value.
//!
//! [`AdamW`] steps tensors in CPU memory. Its moments are f32 or BF16, rounded to nearest or stochastically; parameters and
//! gradients are f32, BF16 or FP16. A stored value is a pure function of the inputs, the seed, the step and the element's
//! place: the same bits for any number of threads, at any instruction-set level, and resumed as straight through.
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

mod adamw;
#[cfg(feature = "checkpoint")]
pub mod checkpoint;
mod control;
mod norm;
pub mod remainder;
mod reset;
mod rule;
mod shard;
mod state;
mod tensor;

pub use adamw::{AdamW, AdamWConfig, Parameter, ParameterGroup};
pub use control::{StepControl, StepOutcome};
#[cfg(feature = "cuda")]
pub(crate) use norm::ClipRule;
pub use norm::{ChunkSums, Clip, Clipped, GradientNorm, NonFinite, NormError};
pub use reset::ResetMoments;
#[cfg(feature = "stall")]
pub use reset::{ResetDue, ResetError, ResetEvent, ResetProgress, ResetSchedule, ResetScope, Resets, Stepped};
pub use rule::Scalars;
#[cfg(feature = "stall")]
pub(crate) use rule::power;
pub use shard::{Shard, ShardError};
pub use state::{Moment, Real, StateFormat};
#[cfg(feature = "cuda")]
pub(crate) use tensor::{Entry, Tensor, check};

use alloc::string::String;

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
    /// A parameter group with another state format than the tensor has been stepped in.
    #[error("group of tensor {tensor}: expected one of state format {expected:?}, as its states have, got {got:?}")]
    GroupFormat {
        /// The tensor, by name or number.
        tensor: String,
        /// Format of its states.
        expected: StateFormat,
        /// Of the group.
        got: StateFormat,
    },
    /// A part of a tensor that is not cut at a multiple of 4096 elements, or at the end of the tensor.
    #[error(
        "{argument} of the part of tensor {tensor}: expected a multiple of 4096 or the end of the tensor, the nearest {below} and {above}, got {got}"
    )]
    Cut {
        /// Which cut: the first element or the end.
        argument: &'static str,
        /// The tensor, by name or number.
        tensor: String,
        /// The nearest cut below.
        below: u64,
        /// The nearest cut above.
        above: u64,
        /// What came.
        got: u64,
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
}
