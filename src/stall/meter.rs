//! The meter: who stalled and who moved between two stored states.

use core::iter::Sum;
use core::ops::{Add, AddAssign, Range};

use crate::format::{BlockVec, Element, Format};
use crate::measure::fold;
use crate::optim::Moment;
use crate::random::BLOCK;
use crate::round::{Mode, Overflow, encode};

/// A stored state to read: its codes, or its values where it is held in f32.
///
/// ```
/// use halfulp::{Format, bf16, stall::StateView};
/// let v = [bf16::ONE; 8];
/// assert_eq!(StateView::from(&v[..]).len(), 8);
/// // Codes of E4M3 in blocks of four, each with its scale.
/// let scaled = StateView::codes(&[0x38; 8], Format::E4M3).scaled(&[1.0, 0.5], 4);
/// assert_eq!([scaled.value(3), scaled.value(4)], [1.0, 0.5]);
/// ```
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct StateView<'a> {
    data: Data<'a>,
    /// Scales, and how many elements share one.
    scales: Option<(&'a [f32], usize)>,
}

#[derive(Clone, Copy, Debug)]
enum Data<'a> {
    F32(&'a [f32]),
    Codes8(&'a [u8], Format),
    Codes16(&'a [u16], Format),
    Blocks(&'a BlockVec),
}

impl<'a> From<&'a [f32]> for StateView<'a> {
    fn from(values: &'a [f32]) -> Self {
        Self { data: Data::F32(values), scales: None }
    }
}

impl<'a, T: Element> From<&'a [T]> for StateView<'a> {
    fn from(elements: &'a [T]) -> Self {
        let data = if size_of::<T>() == 1 {
            Data::Codes8(bytemuck::cast_slice(elements), T::FORMAT)
        } else {
            Data::Codes16(bytemuck::cast_slice(elements), T::FORMAT)
        };
        Self { data, scales: None }
    }
}

impl<'a> From<&'a Moment> for StateView<'a> {
    fn from(moment: &'a Moment) -> Self {
        match moment {
            Moment::F32(values) => values[..].into(),
            Moment::Bf16(values) => values[..].into(),
            Moment::Blocks(values) => values.into(),
        }
    }
}

impl<'a> From<&'a BlockVec> for StateView<'a> {
    fn from(values: &'a BlockVec) -> Self {
        Self { data: Data::Blocks(values), scales: None }
    }
}

impl<'a> StateView<'a> {
    /// Codes of any format, one in each `u16`; bits above the width of the format are ignored.
    pub const fn codes(codes: &'a [u16], format: Format) -> Self {
        Self { data: Data::Codes16(codes, format), scales: None }
    }

    /// Reads each value times the scale of its block: elements `b * block..(b + 1) * block` share `scales[b]`. A NaN scale
    /// makes a block of NaN.
    pub const fn scaled(self, scales: &'a [f32], block: usize) -> Self {
        Self { scales: Some((scales, block)), ..self }
    }

    /// Number of elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        match self.data {
            Data::F32(values) => values.len(),
            Data::Codes8(codes, _) => codes.len(),
            Data::Codes16(codes, _) => codes.len(),
            Data::Blocks(values) => values.len(),
        }
    }

    /// Whether there are no elements.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The value of element `i`: the exact product of code and scale.
    ///
    /// # Panics
    /// If `i` is not below [`len`](Self::len), or has no scale.
    #[must_use]
    pub fn value(&self, i: usize) -> f64 {
        let unscaled = match self.data {
            Data::F32(values) => values[i].into(),
            Data::Codes8(codes, format) => format.value(codes[i].into()),
            Data::Codes16(codes, format) => format.value(codes[i]),
            Data::Blocks(values) => values.format().element().value(values.code(i)),
        };
        // At most 24 bits either: f64 holds the product exactly.
        unscaled * self.scale(i)
    }

    fn scale(&self, i: usize) -> f64 {
        let own = match self.data {
            Data::Blocks(values) => values.scales().get(i / values.format().block()),
            _ => 1.0,
        };
        own * self.scales.map_or(1.0, |(scales, block)| scales[i / block].into())
    }

    fn is_scaled(&self) -> bool {
        self.scales.is_some() || matches!(self.data, Data::Blocks(_))
    }

    /// Reads up to [`BLOCK`] values.
    fn read(&self, range: Range<usize>, out: &mut [f64; BLOCK]) {
        match (self.data, self.scales) {
            (Data::F32(values), None) => out.iter_mut().zip(&values[range]).for_each(|(out, &x)| *out = x.into()),
            _ => out.iter_mut().zip(range).for_each(|(out, i)| *out = self.value(i)),
        }
    }

    /// Whether the code of element `i` is the one that `value` rounds to on its block's grid, ties to even.
    fn is_nearest_to(&self, i: usize, value: f64) -> bool {
        let (code, format) = match self.data {
            Data::F32(_) => return value == self.value(i),
            Data::Codes8(codes, format) => (codes[i].into(), format),
            Data::Codes16(codes, format) => (codes[i], format),
            Data::Blocks(values) => (values.code(i), values.format().element()),
        };
        let (nearest, _) = encode(value / self.scale(i), 0, format, Mode::NearestEven, Overflow::Saturate);
        format.value(nearest) == format.value(code)
    }

    fn check(&self, argument: &'static str) -> Result<(), MeterError> {
        let Some((scales, block)) = self.scales else { return Ok(()) };
        if block == 0 {
            return Err(MeterError::Block { argument });
        }
        let expected = self.len().div_ceil(block);
        if scales.len() == expected {
            Ok(())
        } else {
            Err(MeterError::Scales { argument, expected, got: scales.len() })
        }
    }
}

/// How many coordinates of a state stalled, and how many moved. Counts of chunks, tensors and steps add up in any order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StallCounts {
    /// Coordinates whose old and new value are equal as real numbers (0 and -0 are).
    pub stalled: u64,
    /// Coordinates whose value changed.
    pub moved: u64,
    /// Coordinates with a NaN before or after.
    pub nan: u64,
    /// Coordinates without a gradient so far: the gradient is zero and so is the second moment. Nothing there can move.
    pub untouched: u64,
    /// Of `stalled + moved`, the coordinates whose new code is the one that the old value rounds to on the new grid. Under
    /// scales that move every step no value compares equal, and this is what can be seen of stalling.
    pub same_code: u64,
}

impl StallCounts {
    /// Coordinates that could stall or move.
    #[must_use]
    pub const fn counted(&self) -> u64 {
        self.stalled + self.moved
    }

    /// Share of the counted coordinates that stalled; NaN of none.
    #[must_use]
    pub fn share(&self) -> f64 {
        self.stalled as f64 / self.counted() as f64
    }

    /// Share of the counted coordinates whose code is that of the old value; NaN of none.
    #[must_use]
    pub fn same_code_share(&self) -> f64 {
        self.same_code as f64 / self.counted() as f64
    }
}

impl AddAssign for StallCounts {
    fn add_assign(&mut self, other: Self) {
        self.stalled += other.stalled;
        self.moved += other.moved;
        self.nan += other.nan;
        self.untouched += other.untouched;
        self.same_code += other.same_code;
    }
}

impl Add for StallCounts {
    type Output = Self;
    fn add(mut self, other: Self) -> Self {
        self += other;
        self
    }
}

impl Sum for StallCounts {
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        counts.fold(Self::default(), Add::add)
    }
}

/// A stalled share that was estimated, with its standard error.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Share {
    /// Stalled over counted.
    pub value: f64,
    /// Of the value. It comes of how much the groups differ, so that what happens to an element in one step may depend on
    /// the steps before.
    pub standard_error: f64,
}

impl Share {
    /// Of groups that are independent of each other, as tensors or runs with seeds of their own are; steps of one tensor are
    /// not. Of one group the standard error is NaN.
    ///
    /// ```
    /// use halfulp::stall::{Share, StallCounts};
    /// let group = |stalled| {
    ///     let mut counts = StallCounts::default();
    ///     (counts.stalled, counts.moved) = (stalled, 100 - stalled);
    ///     counts
    /// };
    /// let share = Share::of(&[group(10), group(14)]);
    /// assert!((share.value - 0.12).abs() < 1e-15 && (share.standard_error - 0.02).abs() < 1e-15);
    /// ```
    #[must_use]
    pub fn of(groups: &[StallCounts]) -> Self {
        let all: StallCounts = groups.iter().copied().sum();
        let (value, n) = (all.share(), groups.len() as f64);
        let off = groups.iter().map(|group| group.stalled as f64 - value * group.counted() as f64);
        let standard_error = (off.map(|off| off * off).sum::<f64>() * n / (n - 1.0)).sqrt() / all.counted() as f64;
        Self { value, standard_error }
    }
}

/// What cannot be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MeterError {
    /// Not as many elements as the old state.
    #[error("{argument}: expected {expected} elements, as in the old state, got {got}")]
    Length {
        /// What has the wrong length.
        argument: &'static str,
        /// Elements of the old state.
        expected: usize,
        /// What came.
        got: usize,
    },
    /// Not one scale for each block.
    #[error("{argument}: expected {expected} scales, one a block, got {got}")]
    Scales {
        /// The state.
        argument: &'static str,
        /// Blocks.
        expected: usize,
        /// What came.
        got: usize,
    },
    /// Blocks of no elements.
    #[error("{argument}: expected blocks of at least 1 element, got 0")]
    Block {
        /// The state.
        argument: &'static str,
    },
}

/// Compares a state after a step with the one before.
///
/// ```
/// use halfulp::{bf16, stall::Comparison};
/// let old = [1.0, 0.0, 2.0, f32::NAN].map(bf16::from_f32);
/// let new = [1.0, -0.0, 2.5, 1.0].map(bf16::from_f32);
/// let counts = Comparison::new(&old[..], &new[..]).count()?;
/// assert_eq!((counts.stalled, counts.moved, counts.nan), (2, 1, 1));
/// # Ok::<(), halfulp::stall::MeterError>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Comparison<'a> {
    old: StateView<'a>,
    new: StateView<'a>,
    gradients: Option<&'a [f32]>,
    second_moment: Option<StateView<'a>>,
}

impl<'a> Comparison<'a> {
    /// Of `new` with `old`, two states of the same tensor. Formats and scales may differ.
    pub fn new(old: impl Into<StateView<'a>>, new: impl Into<StateView<'a>>) -> Self {
        Self { old: old.into(), new: new.into(), gradients: None, second_moment: None }
    }

    /// Counts apart the coordinates whose gradient in the step is zero while their old second moment is zero.
    pub const fn gradients(self, gradients: &'a [f32]) -> Self {
        Self { gradients: Some(gradients), ..self }
    }

    /// The old second moment, where the states compared are not second moments themselves.
    pub fn second_moment(self, old: impl Into<StateView<'a>>) -> Self {
        Self { second_moment: Some(old.into()), ..self }
    }

    /// Counts.
    ///
    /// # Errors
    /// [`MeterError`] names what does not have a value for each coordinate of the old state.
    pub fn count(&self) -> Result<StallCounts, MeterError> {
        self.check()?;
        Ok(fold(0..self.old.len(), &|chunk| self.count_chunk(chunk), &Add::add))
    }

    fn check(&self) -> Result<(), MeterError> {
        let expected = self.old.len();
        let length = |argument, got| {
            if got == expected { Ok(()) } else { Err(MeterError::Length { argument, expected, got }) }
        };
        length("new", self.new.len())?;
        length("gradients", self.gradients.map_or(expected, <[f32]>::len))?;
        length("second_moment", self.second_moment.map_or(expected, |v| v.len()))?;
        self.old.check("old")?;
        self.new.check("new")?;
        self.second_moment.map_or(Ok(()), |v| v.check("second_moment"))
    }

    fn count_chunk(&self, chunk: Range<usize>) -> StallCounts {
        let mut counts = StallCounts::default();
        let (mut old, mut new) = ([0.0; BLOCK], [0.0; BLOCK]);
        for first in chunk.clone().step_by(BLOCK) {
            let block = first..chunk.end.min(first + BLOCK);
            self.old.read(block.clone(), &mut old);
            self.new.read(block.clone(), &mut new);
            for (i, (&old, &new)) in block.zip(old.iter().zip(&new)) {
                let untouched = self.is_untouched(i);
                let nan = !untouched & (old.is_nan() | new.is_nan());
                let counted = !untouched & !nan;
                let stalled = counted & (old == new);
                counts.untouched += u64::from(untouched);
                counts.nan += u64::from(nan);
                counts.stalled += u64::from(stalled);
                counts.moved += u64::from(counted & !stalled);
                counts.same_code += u64::from(stalled || counted && self.keeps_code(i, old));
            }
        }
        counts
    }

    fn is_untouched(&self, i: usize) -> bool {
        self.gradients.is_some_and(|g| g[i] == 0.0) && self.second_moment.unwrap_or(self.old).value(i) == 0.0
    }

    /// Whether a value that changed has the code of the old one on a grid that moved.
    fn keeps_code(&self, i: usize, old: f64) -> bool {
        self.new.is_scaled() && self.new.is_nearest_to(i, old)
    }
}
