//! Measurements around a cast: the largest magnitude before it, the error after it.
//!
//! Both run over the current rayon pool in fixed chunks that combine in a fixed order, so that a sum of errors is the same
//! number for any count of threads.

use core::ops::{AddAssign, Range};

use crate::cast::{CHUNK, CastError};
use crate::format::{Format, unpack};
use crate::isa::{Isa, Kernel, at_level};
use crate::random::BLOCK;
use crate::round::Source;
use crate::round::lanes::Word;
use crate::threads::join;

/// The largest finite magnitude, 0 if there is none: what a [scale](crate::format::power_of_two_scale) is chosen for.
///
/// ```
/// use halfulp::{Format, format::power_of_two_scale, measure::amax};
/// let x = [0.5f32, -3.0, f32::INFINITY, f32::NAN];
/// assert_eq!(amax(&x), 3.0);
/// assert_eq!(power_of_two_scale(Format::E2M1, amax(&x)), -1); // 3 = 6 / 2
/// ```
#[must_use]
pub fn amax<S: Source>(x: &[S]) -> f64 {
    let isa = Isa::best();
    fold(0..x.len(), &|chunk| at_level(isa, Amax { x: &x[chunk] }), &Ord::max).float()
}

struct Amax<'a, S> {
    x: &'a [S],
}

impl<S: Source> Kernel for Amax<'_, S> {
    type Output = S::Word;
    #[inline(always)]
    fn run(self) -> S::Word {
        let mut room = [S::Word::default(); BLOCK];
        let mut largest = S::Word::default();
        for x in self.x.chunks(BLOCK) {
            for &word in &S::words(x, &mut room)[..x.len()] {
                largest = largest.max(word.finite_magnitude());
            }
        }
        largest
    }
}

/// The signed errors of a cast, in ulps of the target, as sums that add up over chunks and tensors.
///
/// The error of one element is (stored value - source) / [`Format::ulp`] at the source, both sides in units of the scale.
/// Left out are elements that a cast could not round to one of two neighbours: NaN and infinity, magnitudes above the
/// largest finite value (also those that came out as that value, since their upper neighbour was not to be had), negatives
/// in unsigned formats, and sources below code 0 in a format without zero.
///
/// Nearest errors lie within half a ulp. Stochastic errors lie within one, and their mean is zero up to chance.
///
/// ```
/// use halfulp::{Draw, Format, cast::Cast, measure::UlpErrors};
/// let x: Vec<f32> = (0..100_000).map(|i| i as f32 * 1e-3).collect();
/// let mut bytes = vec![0; Format::E4M3.bytes(x.len())];
/// Cast::stochastic(Draw::seeded(7)).into_bytes(&x, Format::E4M3, &mut bytes)?;
/// let errors = UlpErrors::of(&x, Format::E4M3, 0, &bytes)?;
/// # #[cfg(feature = "std")]
/// assert!(errors.mean().abs() < 4.0 * errors.standard_error());
/// # Ok::<(), halfulp::cast::CastError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct UlpErrors {
    /// Elements measured.
    pub elements: u64,
    /// Sum of their errors.
    pub sum: f64,
    /// Sum of the squares of their errors.
    pub sum_of_squares: f64,
}

impl UlpErrors {
    /// Measures what [`Cast::into_bytes`](crate::cast::Cast::into_bytes) wrote to `out` against the sources that it was
    /// cast from with this scale.
    ///
    /// # Errors
    /// [`CastError::Length`] if `out` is not of the `format.bytes(x.len())` bytes that the codes take.
    pub fn of<S: Source>(x: &[S], format: Format, scale: i32, out: &[u8]) -> Result<Self, CastError> {
        let expected = format.bytes(x.len());
        if out.len() != expected {
            return Err(CastError::Length { expected, got: out.len(), unit: "bytes" });
        }
        let (isa, grid) = (Isa::best(), Grid::new(format, scale));
        let measure = |chunk: Range<usize>| {
            let bytes = &out[format.bytes(chunk.start)..format.bytes(chunk.end)];
            at_level(isa, Errors { grid, x: &x[chunk], bytes })
        };
        Ok(fold(0..x.len(), &measure, &|mut a, b| {
            a += b;
            a
        }))
    }

    /// The mean error; NaN of no elements.
    #[must_use]
    pub fn mean(self) -> f64 {
        self.sum / self.elements as f64
    }

    /// The standard error of the mean, the elements taken as independent; NaN of fewer than two.
    #[cfg(feature = "std")]
    #[must_use]
    pub fn standard_error(self) -> f64 {
        let n = self.elements as f64;
        let variance = (self.sum_of_squares - self.sum * self.mean()).max(0.0) / (n - 1.0);
        if self.elements < 2 { f64::NAN } else { (variance / n).sqrt() }
    }
}

impl AddAssign for UlpErrors {
    fn add_assign(&mut self, other: Self) {
        self.elements += other.elements;
        self.sum += other.sum;
        self.sum_of_squares += other.sum_of_squares;
    }
}

/// Halves a range at multiples of [`CHUNK`] until it is one chunk; results combine up the same tree on any number of threads.
pub(crate) fn fold<R: Send>(
    range: Range<usize>,
    work: &(impl Fn(Range<usize>) -> R + Sync),
    combine: &(impl Fn(R, R) -> R + Sync),
) -> R {
    if range.len() <= CHUNK {
        return work(range);
    }
    let middle = range.start + range.len().div_ceil(CHUNK) / 2 * CHUNK;
    let (head, tail) = (|| fold(range.start..middle, work, combine), || fold(middle..range.end, work, combine));
    let (head, tail) = join(head, tail);
    combine(head, tail)
}

/// A format and scale as constants for lanes of f64.
#[derive(Clone, Copy)]
struct Grid {
    format: Format,
    /// Two powers of two whose product is `2^-scale`: one alone may lie outside f64.
    unscale: [f64; 2],
    /// Sources outside are left out.
    low: f64,
    high: f64,
    epsilon: f64,
    /// The smallest spacing, and the magnitude below which a format without zero halves it.
    spacing: f64,
    code_1: f64,
    spacing_below: f64,
}

impl Grid {
    fn new(format: Format, scale: i32) -> Self {
        let power = |k: i32| f64::from_bits(((k.clamp(-1022, 1023) + 1023) as u64) << 52);
        let half = scale / 2;
        let spacing = format.ulp(format.min_positive_normal());
        Self {
            format,
            unscale: [power(half.saturating_neg()), power(half - scale)],
            // Of a format without zero, what lies below code 0 has one neighbour alone. In units of the scale as all else.
            low: format.min(),
            high: format.max(),
            epsilon: format.epsilon(),
            spacing,
            code_1: if format.has_zero() { 0.0 } else { spacing },
            spacing_below: format.ulp(0.0),
        }
    }

    /// The error of a stored value in ulps, and whether it counts; 0 where it does not.
    #[inline(always)]
    fn error(&self, source: f64, stored: f64) -> (f64, bool) {
        const EXPONENT: u64 = 0x7FF << 52;
        let counts = (source >= self.low) & (source <= self.high) & stored.is_finite();
        let binade = f64::from_bits(source.to_bits() & EXPONENT);
        let smallest = if binade < self.code_1 { self.spacing_below } else { self.spacing };
        let ulp = binade * self.epsilon;
        let ulp = if ulp > smallest { ulp } else { smallest };
        (if counts { (stored - source) / ulp } else { 0.0 }, counts)
    }
}

/// Sums run in this many lanes, whatever the instruction set: it is part of their order.
const LANES: usize = 8;

/// A run of errors.
struct Errors<'a, S> {
    grid: Grid,
    x: &'a [S],
    bytes: &'a [u8],
}

impl<S: Source> Kernel for Errors<'_, S> {
    type Output = UlpErrors;
    #[inline(always)]
    fn run(self) -> UlpErrors {
        let Self { grid, x, bytes } = self;
        let mut room = [S::Word::default(); BLOCK];
        let (mut sources, mut codes) = ([f64::NAN; BLOCK], [0; BLOCK]);
        let (mut stored, mut errors) = ([0.0; BLOCK], [0.0; BLOCK]);
        let (mut elements, mut sum, mut squares) = (0, [0.0; LANES], [0.0; LANES]);
        for (b, x) in x.chunks(BLOCK).enumerate() {
            let n = x.len();
            for (source, &word) in sources.iter_mut().zip(S::words(x, &mut room)) {
                *source = word.float() * grid.unscale[0] * grid.unscale[1];
            }
            sources[n..].fill(f64::NAN);
            unpack(grid.format, &bytes[grid.format.bytes(b * BLOCK)..], &mut codes[..n]);
            decode(grid.format, &codes, &mut stored);
            for ((error, &source), &stored) in errors.iter_mut().zip(&sources).zip(&stored) {
                let counts;
                (*error, counts) = grid.error(source, stored);
                elements += u64::from(counts);
            }
            for errors in errors.as_chunks::<LANES>().0 {
                for lane in 0..LANES {
                    sum[lane] += errors[lane];
                    squares[lane] += errors[lane] * errors[lane];
                }
            }
        }
        UlpErrors { elements, sum: sum.iter().sum(), sum_of_squares: squares.iter().sum() }
    }
}

/// [`Format::value`] without branches; NaN for infinities too.
#[inline(always)]
fn decode(format: Format, codes: &[u16; BLOCK], values: &mut [f64; BLOCK]) {
    let shift = 52 - format.fraction_bits();
    let (mask, max, first_normal) = (format.magnitude_mask(), format.max_code(), 1 << format.fraction_bits());
    let (sign, sign_shift) = (format.sign_mask(), 64 - format.bits());
    let at_0 = format.value(0);
    // The exponent field of f64 for field 0 of the format, and for field 1, from which subnormals are told by a difference.
    let (field_0, field_1) = (((1023 - format.bias()) as u64) << 52, ((1024 - format.bias()) as u64) << 52);
    for (value, &code) in values.iter_mut().zip(codes) {
        let magnitude = code & mask;
        let bits = u64::from(magnitude) << shift;
        let normal = f64::from_bits(bits.wrapping_add(field_0));
        let subnormal = f64::from_bits(bits.wrapping_add(field_1)) - f64::from_bits(field_1);
        let absolute = if magnitude < first_normal { subnormal } else { normal };
        let absolute = if magnitude == 0 { at_0 } else { absolute };
        let absolute = if magnitude > max { f64::NAN } else { absolute };
        *value = f64::from_bits(absolute.to_bits() | u64::from(code & sign) << sign_shift);
    }
}
