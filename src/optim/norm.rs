//! The global norm of gradients in one fixed order, and the clip coefficient that follows from it.

use alloc::vec::Vec;

use super::state::Real;
use super::{Shard, ShardError};
use crate::isa::{Isa, Kernel, at_level};
use crate::random::BLOCK;
use crate::threads::join;

/// Elements of a chunk, which is the unit of shards too.
const CHUNK: usize = Shard::CUT as usize;
/// Sums that run side by side in a chunk: part of its order.
pub(super) const LANES: usize = BLOCK;

/// The sums of squares of the chunks of one tensor, or of a shard of it.
///
/// The order of every addition is fixed, so that a norm has the same bits from one thread or many, at any instruction-set
/// level, on a CPU or a GPU, whole or in shards. All sums are in f64, where the square of an f32 is exact and no sum of
/// squares overflows.
///
/// # The tree
/// A chunk is 4096 elements, counted from element 0 of the tensor; places past the end of the tensor count as zero. Lane `l`
/// of 512 adds the squares of elements `l`, `l + 512`, ..., `l + 3584` of the chunk in this order, beginning with 0. Of the 512
/// lane sums, neighbours `2k` and `2k + 1` are added, of those sums neighbours again, and so on nine times over. (A block of
/// 128 threads does so with four lanes a thread: two additions, five shuffles, and two additions across its four warps.)
///
/// The sums of chunks, ordered by tensor id and within a tensor by chunk, are combined by the same tree: each run of 4096 of
/// them, taken in the place of squares, gives one sum, the sums give sums in the same way, until one is left. Of none it is 0.
///
/// A sum is NaN (one NaN, whatever its payload was) if an element is, else infinite if an element is.
///
/// ```
/// use halfulp::optim::{ChunkSums, Clip, Clipped, GradientNorm};
/// let (a, b) = (vec![3.0f32; 4], vec![4.0f32; 4]);
/// let norm = GradientNorm::gather([&ChunkSums::of(0, &a), &ChunkSums::of(1, &b)])?;
/// assert_eq!(norm.value(), 10.0);
/// assert_eq!(Clip::new(1.0)?.coefficient(norm, 1.0)?, Clipped::Factor((1.0 / (10.0 + 1e-6)) as f32));
/// # Ok::<(), halfulp::optim::NormError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ChunkSums {
    tensor: u64,
    shard: Shard,
    sums: Vec<f64>,
}

/// What a norm refuses.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum NormError {
    /// An illegal cut.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// Not as many gradients or sums as the shard has.
    #[error("{argument} of tensor {tensor}: expected {expected}, got {got}")]
    Length {
        /// What has the wrong length.
        argument: &'static str,
        /// The tensor's id.
        tensor: u64,
        /// What the shard has.
        expected: u64,
        /// What came.
        got: u64,
    },
    /// Shards of one tensor that disagree on its length.
    #[error("shards of tensor {tensor}: expected all of a tensor of {expected} elements, got one of {got}")]
    Total {
        /// The tensor's id.
        tensor: u64,
        /// Elements of the tensor by its first shard.
        expected: u64,
        /// By another.
        got: u64,
    },
    /// Shards that leave out elements of their tensor or have them twice.
    #[error("shards of tensor {tensor}: expected elements from {expected} on, got {got}")]
    Cover {
        /// The tensor's id.
        tensor: u64,
        /// First element after the shards so far.
        expected: u64,
        /// First element of the next shard, or the tensor's length if there is none.
        got: u64,
    },
    /// A number out of its range.
    #[error("{argument}: expected {expected}, got {got}")]
    Range {
        /// The argument.
        argument: &'static str,
        /// Its range.
        expected: &'static str,
        /// What came.
        got: f64,
    },
    /// A norm that is infinite or NaN, under [`NonFinite::Refuse`].
    #[error("gradients: expected a finite norm, got {got}")]
    NonFinite {
        /// The norm.
        got: f64,
    },
}

impl ChunkSums {
    /// Of a whole tensor.
    #[must_use]
    pub fn of<G: Real>(tensor: u64, grads: &[G]) -> Self {
        Self { tensor, shard: Shard::whole(grads.len() as u64), sums: squares(Isa::best(), grads) }
    }

    /// Of a shard, whose gradients these are.
    ///
    /// # Errors
    /// [`NormError::Length`] if there are not as many as the shard has elements.
    pub fn of_shard<G: Real>(tensor: u64, shard: Shard, grads: &[G]) -> Result<Self, NormError> {
        length("grads", tensor, shard.len(), grads.len())?;
        Ok(Self { tensor, shard, sums: squares(Isa::best(), grads) })
    }

    /// Sums that came from elsewhere: from another rank, or from a GPU.
    ///
    /// # Errors
    /// [`NormError::Length`] if there is not one for each chunk of the shard, [`NormError::Range`] for one below 0.
    pub fn from_sums(tensor: u64, shard: Shard, sums: Vec<f64>) -> Result<Self, NormError> {
        length("sums", tensor, shard.chunks(), sums.len())?;
        if let Some(&got) = sums.iter().find(|&&sum| sum < 0.0) {
            return Err(NormError::Range { argument: "sums", expected: "sums of squares, 0 or more", got });
        }
        Ok(Self { tensor, shard, sums })
    }

    /// The tensor's id.
    #[must_use]
    pub fn tensor(&self) -> u64 {
        self.tensor
    }

    /// Which part of the tensor.
    #[must_use]
    pub fn shard(&self) -> Shard {
        self.shard
    }

    /// The sums, one a chunk.
    #[must_use]
    pub fn sums(&self) -> &[f64] {
        &self.sums
    }
}

fn length(argument: &'static str, tensor: u64, expected: u64, got: usize) -> Result<(), NormError> {
    let got = got as u64;
    if expected == got { Ok(()) } else { Err(NormError::Length { argument, tensor, expected, got }) }
}

/// The norm of all gradients of a step: the root of the sum of their squares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradientNorm {
    sum_of_squares: f64,
}

impl GradientNorm {
    /// Combines the sums of all tensors, which may come in any order and in shards from any number of ranks.
    ///
    /// # Errors
    /// [`NormError::Total`] and [`NormError::Cover`] if the shards of a tensor are not the whole of it, each element once.
    pub fn gather<'a>(parts: impl IntoIterator<Item = &'a ChunkSums>) -> Result<Self, NormError> {
        // A rank that owns nothing of a tensor has nothing to add.
        let mut parts: Vec<&ChunkSums> = parts.into_iter().filter(|part| !part.shard.is_empty()).collect();
        parts.sort_by_key(|part| (part.tensor, part.shard.start()));
        for tensor in parts.chunk_by(|a, b| a.tensor == b.tensor) {
            check_cover(tensor)?;
        }
        let sums = parts.iter().flat_map(|part| &part.sums).copied().collect();
        Ok(Self { sum_of_squares: combine(sums) })
    }

    /// The sum of squares.
    #[must_use]
    pub fn sum_of_squares(self) -> f64 {
        self.sum_of_squares
    }

    /// Its root, the norm.
    #[must_use]
    pub fn value(self) -> f64 {
        self.sum_of_squares.sqrt()
    }

    /// Whether every gradient is: a NaN or infinity anywhere, and nothing else, makes the norm one.
    #[must_use]
    pub fn is_finite(self) -> bool {
        self.sum_of_squares.is_finite()
    }
}

/// Checks the shards of one tensor, sorted, of which there is one.
fn check_cover(shards: &[&ChunkSums]) -> Result<(), NormError> {
    let (tensor, expected) = (shards[0].tensor, shards[0].shard.total());
    let mut next = 0;
    for shard in shards.iter().map(|part| part.shard) {
        if shard.total() != expected {
            return Err(NormError::Total { tensor, expected, got: shard.total() });
        }
        if shard.start() != next {
            return Err(NormError::Cover { tensor, expected: next, got: shard.start() });
        }
        next = shard.end();
    }
    if next == expected { Ok(()) } else { Err(NormError::Cover { tensor, expected: next, got: expected }) }
}

/// What a clip does about a norm that is infinite or NaN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NonFinite {
    /// What the formula gives, as PyTorch does: 0 for an infinite norm, which leaves NaN where the gradient was infinite and
    /// zero elsewhere, and NaN for one that is NaN.
    #[default]
    Propagate,
    /// The step is to be left out: [`Clipped::Skip`].
    Skip,
    /// An error: [`NormError::NonFinite`].
    Refuse,
}

/// Clipping by the global norm: gradients are scaled down together to a norm of at most `max_norm`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clip {
    max_norm: f64,
    eps: f64,
    non_finite: NonFinite,
}

/// What is to become of the gradients of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Clipped {
    /// They are multiplied by this, at most 1, in f32: [`Scalars::clip`](super::Scalars::clip).
    Factor(f32),
    /// The step is left out.
    Skip,
}

impl Clip {
    /// Clips to `max_norm`, finite and not negative, with an `eps` of 1e-6 and [`NonFinite::Propagate`].
    ///
    /// # Errors
    /// [`NormError::Range`].
    pub fn new(max_norm: f64) -> Result<Self, NormError> {
        let (argument, expected) = ("max_norm", "a finite number, 0 or more");
        let fits = max_norm.is_finite() && max_norm >= 0.0;
        if fits {
            Ok(Self { max_norm, eps: 1e-6, non_finite: NonFinite::default() })
        } else {
            Err(NormError::Range { argument, expected, got: max_norm })
        }
    }

    /// Another `eps`, finite and positive.
    ///
    /// # Errors
    /// [`NormError::Range`].
    pub fn eps(self, eps: f64) -> Result<Self, NormError> {
        let (argument, expected) = ("eps", "a finite number above 0");
        if eps.is_finite() && eps > 0.0 {
            Ok(Self { eps, ..self })
        } else {
            Err(NormError::Range { argument, expected, got: eps })
        }
    }

    /// Another policy for a norm that is infinite or NaN.
    #[must_use]
    pub fn non_finite(self, non_finite: NonFinite) -> Self {
        Self { non_finite, ..self }
    }

    /// The coefficient for gradients of this norm, after they were multiplied by `gradient_scale`:
    ///
    /// ```text
    /// min(1, max_norm/(norm * |gradient_scale| + eps))
    /// ```
    ///
    /// in f64, then rounded to f32 once. That is the formula of PyTorch's `torch.nn.utils.clip_grad_norm_`, where the `eps` is
    /// 1e-6 and gradients have been unscaled.
    ///
    /// # Errors
    /// [`NormError::NonFinite`] if the norm is not finite, under [`NonFinite::Refuse`].
    pub fn coefficient(&self, norm: GradientNorm, gradient_scale: f32) -> Result<Clipped, NormError> {
        match self.non_finite {
            NonFinite::Skip if !norm.is_finite() => Ok(Clipped::Skip),
            NonFinite::Refuse if !norm.is_finite() => Err(NormError::NonFinite { got: norm.value() }),
            _ => Ok(Clipped::Factor(self.rule(gradient_scale).factor(norm.sum_of_squares))),
        }
    }

    pub(crate) fn rule(&self, gradient_scale: f32) -> ClipRule {
        ClipRule { max_norm: self.max_norm, eps: self.eps, gradient_scale: f64::from(gradient_scale).abs() }
    }
}

/// What the coefficient is made of, in the layout of `ClipRule` in `kernels/norm.cuh`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct ClipRule {
    max_norm: f64,
    eps: f64,
    /// Absolute.
    gradient_scale: f64,
}

impl ClipRule {
    /// `clip_factor` of `kernels/norm.cuh`.
    pub(crate) fn factor(&self, sum_of_squares: f64) -> f32 {
        let scaled = sum_of_squares.sqrt() * self.gradient_scale;
        let factor = self.max_norm / (scaled + self.eps);
        // A comparison that NaN fails, so that it stays.
        if factor > 1.0 { 1.0 } else { factor as f32 }
    }
}

/// Sums of squares of every chunk, the first of which starts with the slice.
fn squares<G: Real>(isa: Isa, grads: &[G]) -> Vec<f64> {
    let mut sums = bytemuck::allocation::zeroed_vec(grads.len().div_ceil(CHUNK));
    spread(isa, grads, &mut sums);
    sums
}

/// Chunks that a thread takes at a time.
const RUN: usize = 8;

/// Halves the work until a thread takes it.
fn spread<G: Real>(isa: Isa, grads: &[G], sums: &mut [f64]) {
    if sums.len() <= RUN {
        at_level(isa, Squares { grads, sums });
        return;
    }
    let middle = sums.len() / 2;
    let (sums, more_sums) = sums.split_at_mut(middle);
    let (grads, more_grads) = grads.split_at(middle * CHUNK);
    join(|| spread(isa, grads, sums), || spread(isa, more_grads, more_sums));
}

/// A run of chunks.
struct Squares<'a, G> {
    grads: &'a [G],
    sums: &'a mut [f64],
}

impl<G: Real> Kernel for Squares<'_, G> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let mut room = [0u32; LANES];
        for (sum, chunk) in self.sums.iter_mut().zip(self.grads.chunks(CHUNK)) {
            let mut lanes = [0f64; LANES];
            for round in chunk.chunks(LANES) {
                for (lane, &word) in lanes.iter_mut().zip(G::words(round, &mut room)) {
                    let x = f64::from(f32::from_bits(word));
                    // The square is exact, so that a fused operation gives the same.
                    *lane += x * x;
                }
            }
            *sum = canonical(pairs(&mut lanes));
        }
    }
}

/// Adds neighbours until one sum is left.
#[inline(always)]
pub(super) fn pairs(lanes: &mut [f64; LANES]) -> f64 {
    let mut half = LANES / 2;
    while half > 0 {
        for k in 0..half {
            lanes[k] = lanes[2 * k] + lanes[2 * k + 1];
        }
        half /= 2;
    }
    lanes[0]
}

/// One NaN: payloads differ between machines.
#[inline(always)]
pub(super) fn canonical(x: f64) -> f64 {
    if x.is_nan() { f64::from_bits(0x7FF8_0000_0000_0000) } else { x }
}

/// The tree over sums of chunks.
pub(crate) fn combine(mut sums: Vec<f64>) -> f64 {
    while sums.len() > 1 {
        sums = sums.chunks(CHUNK).map(run_sum).collect();
    }
    sums.first().map_or(0.0, |&sum| canonical(sum))
}

/// The sum of at most [`CHUNK`] sums.
fn run_sum(run: &[f64]) -> f64 {
    let mut lanes = [0f64; LANES];
    for round in run.chunks(LANES) {
        for (lane, x) in lanes.iter_mut().zip(round) {
            *lane += x;
        }
    }
    canonical(pairs(&mut lanes))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sums of every level are those of the baseline, in one thread or three, for lengths around every unit.
    #[test]
    fn levels_and_threads() {
        let mut words = vec![0u32; 300_000];
        crate::random::Draws::fill32(&crate::Draw::seeded(3), 0, &mut words);
        // Every exponent, NaN and infinities too.
        let x: Vec<f32> = words.iter().map(|&word| f32::from_bits(word)).collect();
        let bits = |sums: Vec<f64>| sums.into_iter().map(f64::to_bits).collect::<Vec<_>>();
        for n in [0, 1, 511, 512, 513, 4095, 4096, 4097, 32_768, 32_769, 300_000] {
            let expected = bits(squares(Isa::BASELINE, &x[..n]));
            for isa in Isa::available() {
                assert_eq!(bits(squares(isa, &x[..n])), expected, "{isa} {n}");
                #[cfg(feature = "parallel")]
                for threads in [1, 3] {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                    assert_eq!(bits(pool.install(|| squares(isa, &x[..n]))), expected, "{isa} {n} {threads}");
                }
            }
        }
    }
}
