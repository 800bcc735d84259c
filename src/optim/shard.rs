//! Where a tensor may be cut into the parts of several ranks.

use core::ops::Range;

/// A part of a tensor: a range of its elements that is cut where no bit depends on the cut.
///
/// A cut lies on a multiple of [`CUT`](Self::CUT) elements, or at the tensor's end: whole blocks of a scaled state, whole
/// chunks of a [norm](super::ChunkSums), whole groups of random draws.
///
/// ```
/// use halfulp::optim::Shard;
/// let shard = Shard::new(4096..10_000, 10_000)?;
/// assert_eq!((shard.start(), shard.len()), (4096, 5904));
/// assert_eq!(
///     Shard::new(0..5000, 10_000).unwrap_err().to_string(),
///     "end: expected a multiple of 4096 or the tensor's end, of which 4096 and 8192 are nearest, got 5000"
/// );
/// # Ok::<(), halfulp::optim::ShardError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shard {
    start: u64,
    end: u64,
    total: u64,
}

/// A range that is no shard of its tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShardError {
    /// A cut inside a run of [`Shard::CUT`] elements.
    #[error(
        "{argument}: expected a multiple of {} or the tensor's end, of which {below} and {above} are nearest, got {got}",
        Shard::CUT
    )]
    Cut {
        /// Which end of the range.
        argument: &'static str,
        /// The nearest legal cut below.
        below: u64,
        /// The nearest legal cut above.
        above: u64,
        /// What came.
        got: u64,
    },
    /// A range that runs backward or past the end of its tensor.
    #[error("range: expected start <= end <= {total}, the tensor's length, got {start}..{end}")]
    Range {
        /// Elements of the tensor.
        total: u64,
        /// Start of the range.
        start: u64,
        /// Its end.
        end: u64,
    },
}

impl Shard {
    /// Elements between legal cuts.
    pub const CUT: u64 = 4096;

    /// A whole tensor of `total` elements.
    #[must_use]
    pub const fn whole(total: u64) -> Self {
        Self { start: 0, end: total, total }
    }

    /// Elements `range` of a tensor of `total`; an empty range is a shard of a rank that owns nothing.
    ///
    /// # Errors
    /// [`ShardError::Range`] if the range does not lie in the tensor, [`ShardError::Cut`] if it begins or ends elsewhere than
    /// at a legal cut.
    pub fn new(range: Range<u64>, total: u64) -> Result<Self, ShardError> {
        let Range { start, end } = range;
        if start > end || end > total {
            return Err(ShardError::Range { total, start, end });
        }
        for (argument, got) in [("start", start), ("end", end)] {
            if !got.is_multiple_of(Self::CUT) && got != total {
                let below = got - got % Self::CUT;
                return Err(ShardError::Cut {
                    argument,
                    below,
                    above: total.min(below.saturating_add(Self::CUT)),
                    got,
                });
            }
        }
        Ok(Self { start, end, total })
    }

    /// Its first element.
    #[must_use]
    pub const fn start(self) -> u64 {
        self.start
    }

    /// One past its last element.
    #[must_use]
    pub const fn end(self) -> u64 {
        self.end
    }

    /// Elements of the whole tensor.
    #[must_use]
    pub const fn total(self) -> u64 {
        self.total
    }

    /// Number of its elements.
    #[must_use]
    pub const fn len(self) -> u64 {
        self.end - self.start
    }

    /// Whether there are no elements.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.end == self.start
    }

    /// Number of its runs of [`CUT`](Self::CUT) elements, the last of which may be short.
    #[must_use]
    pub const fn chunks(self) -> u64 {
        self.len().div_ceil(Self::CUT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts() {
        for total in [0, 1, 4095, 4096, 4097, 8192, 10_000, u64::MAX] {
            assert_eq!(Shard::new(0..total, total), Ok(Shard::whole(total)));
            assert_eq!(Shard::new(total..total, total).map(Shard::len), Ok(0));
        }
        let cut = |range| Shard::new(range, 10_000).unwrap_err();
        assert_eq!(cut(1..8192), ShardError::Cut { argument: "start", below: 0, above: 4096, got: 1 });
        assert_eq!(cut(0..9999), ShardError::Cut { argument: "end", below: 8192, above: 10_000, got: 9999 });
        assert_eq!(cut(0..10_001), ShardError::Range { total: 10_000, start: 0, end: 10_001 });
        #[expect(clippy::reversed_empty_ranges, reason = "it is refused")]
        let backward = 8192..4096;
        assert!(matches!(cut(backward), ShardError::Range { .. }));
        // The last legal cut below 2^64 has no multiple above it.
        let last = u64::MAX - 1;
        let above = u64::MAX;
        assert_eq!(
            Shard::new(0..last, u64::MAX),
            Err(ShardError::Cut { argument: "end", below: u64::MAX - 4095, above, got: last })
        );
        assert_eq!(Shard::new(4096..10_000, 10_000).unwrap().chunks(), 2);
    }
}
