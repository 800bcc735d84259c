//! What ranks that hold shards of the same tensors do together.

use alloc::string::String;
use alloc::vec::Vec;

use super::{ChunkSums, GradientNorm, OptimError};

/// A way to other ranks: how sums of shards become sums of whole tensors.
///
/// Sums are gathered before they are combined, never combined on the way, so that a norm has the bits that one rank alone
/// would give it. A sum travels as the eight bytes of its f64; [`ChunkSums::from_sums`] makes it one again.
///
/// ```
/// use halfulp::optim::{ChunkSums, Collective, OptimError};
/// /// Two ranks in one process.
/// struct Pair(Vec<ChunkSums>);
/// impl Collective for Pair {
///     fn gather(&mut self, own: Vec<ChunkSums>) -> Result<Vec<ChunkSums>, OptimError> {
///         Ok([self.0.clone(), own].concat())
///     }
/// }
/// let (mine, other) = (ChunkSums::of(0, &[3.0f32]), ChunkSums::of(1, &[4.0f32]));
/// assert_eq!(Pair(vec![other]).norm([mine])?.value(), 5.0);
/// # Ok::<(), OptimError>(())
/// ```
pub trait Collective {
    /// Gives the sums of all ranks, in any order, this rank's included. Every rank calls it the same number of times, in the
    /// same order.
    ///
    /// # Errors
    /// Whatever kept sums from arriving, as [`OptimError::Collective`]: the step is not executed then.
    fn gather(&mut self, own: Vec<ChunkSums>) -> Result<Vec<ChunkSums>, OptimError>;

    /// The norm of gradients over all ranks.
    ///
    /// # Errors
    /// As [`gather`](Self::gather) and [`GradientNorm::gather`].
    fn norm(&mut self, own: impl IntoIterator<Item = ChunkSums>) -> Result<GradientNorm, OptimError>
    where
        Self: Sized,
    {
        Ok(GradientNorm::gather(&self.gather(own.into_iter().collect())?)?)
    }
}

/// One rank that holds all there is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Alone;

impl Collective for Alone {
    fn gather(&mut self, own: Vec<ChunkSums>) -> Result<Vec<ChunkSums>, OptimError> {
        Ok(own)
    }
}

impl OptimError {
    /// A [`Collective`]'s failure, in its own words.
    pub fn collective(message: impl Into<String>) -> Self {
        Self::Collective { message: message.into() }
    }
}
