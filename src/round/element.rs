//! The definition of rounding: unpack, split at the target's spacing, decide, pack.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::lanes::Word;
use super::{Mode, Overflow, is_nearest_up};
use crate::format::{Format, Negative, Specials};

/// A source value in parts.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Parts {
    negative: bool,
    class: Class,
    /// Finite: the value is `significand * 2^exponent`. NaN: the payload, its top bit (the quiet bit) in bit 51.
    significand: u64,
    exponent: i32,
}

#[derive(Clone, Copy, Debug)]
enum Class {
    Finite,
    Infinite,
    Nan,
}

impl Parts {
    /// Reads an IEEE-like code of `exponent_bits` and `fraction_bits`.
    const fn of(bits: u64, exponent_bits: u32, fraction_bits: u32) -> Self {
        let negative = bits >> (exponent_bits + fraction_bits) & 1 != 0;
        let top = (1 << exponent_bits) - 1;
        let field = bits >> fraction_bits & top;
        let fraction = bits & ((1 << fraction_bits) - 1);
        let hidden = (field != 0) as u64;
        let bias = (top >> 1) as i32;
        let exponent = field as i32 + (field == 0) as i32 - bias - fraction_bits as i32;
        match (field == top, fraction) {
            (true, 0) => Self { negative, class: Class::Infinite, significand: 0, exponent: 0 },
            (true, _) => {
                Self { negative, class: Class::Nan, significand: fraction << (52 - fraction_bits), exponent: 0 }
            }
            _ => Self { negative, class: Class::Finite, significand: fraction | hidden << fraction_bits, exponent },
        }
    }
}

mod sealed {
    use super::{Parts, Word};

    /// How the lanes and the definition read a source.
    pub trait SourceLanes: Sized {
        /// Bits of the f32 or f64 that holds every value of the type.
        type Word: Word;
        fn parts(self) -> Parts;
        /// The bits of each value, read in place or made in `room`, which is long enough.
        fn words<'a>(x: &'a [Self], room: &'a mut [Self::Word]) -> &'a [Self::Word];
    }
}
pub(crate) use sealed::SourceLanes;

/// A type that can be rounded from: `f32`, `f64`, `half::f16`, `half::bf16`. Sealed.
pub trait Source: SourceLanes + Copy + Send + Sync + 'static {
    /// Whether the value is NaN.
    #[must_use]
    fn is_nan(self) -> bool {
        matches!(self.parts().class, Class::Nan)
    }
}

macro_rules! source {
    ($($type:ty as $word:ty: $exponent_bits:literal, $fraction_bits:literal, $words:expr;)*) => {$(
        impl SourceLanes for $type {
            type Word = $word;
            fn parts(self) -> Parts {
                Parts::of(self.to_bits().into(), $exponent_bits, $fraction_bits)
            }
            #[inline(always)]
            fn words<'a>(x: &'a [Self], room: &'a mut [$word]) -> &'a [$word] {
                let read: fn(&'a [Self], &'a mut [$word]) -> &'a [$word] = $words;
                read(x, room)
            }
        }
        impl Source for $type {}
    )*};
}

source! {
    f32 as u32: 8, 23, |x, _| bytemuck::cast_slice(x);
    f64 as u64: 11, 52, |x, _| bytemuck::cast_slice(x);
    f16 as u32: 5, 10, |x, room| {
        let room = &mut room[..x.len()];
        // Exact, NaN excepted, which keeps its sign and payload and turns quiet as it would in rounding.
        x.convert_to_f32_slice(bytemuck::cast_slice_mut(room));
        room
    };
    bf16 as u32: 8, 7, |x, room| {
        let room = &mut room[..x.len()];
        for (word, x) in room.iter_mut().zip(x) {
            *word = u32::from(x.to_bits()) << 16;
        }
        room
    };
}

/// What a result lost besides precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    Nothing,
    Nan,
    Overflow,
    Negative,
}

/// [`round_scaled`], and what was lost.
pub(crate) fn encode<S: Source>(x: S, scale: i32, format: Format, mode: Mode, overflow: Overflow) -> (u16, Loss) {
    encode_parts(x.parts(), format, scale, mode, overflow)
}

/// Rounds `x` once, to the code of `format`.
///
/// The [module](super) says what becomes of special values. With `q-` and `q+` the neighbours of `x`, stochastic rounding
/// takes the outer one with probability `(x - q-)/(q+ - q-)`, to the resolution of its random bits.
///
/// ```
/// use halfulp::{Format, round::{Mode, Overflow, RandomBits, round}};
/// let nearest = |x: f32| round(x, Format::E4M3, Mode::NearestEven, Overflow::Saturate);
/// assert_eq!(nearest(1.0625), 0x38); // a tie between 1 and 1.125: the even code
/// // 1.25 + .3 ulp: up for 3 draws in 10.
/// let x = 1.25 + 0.3 / 128.0;
/// let ups = (0..=u16::MAX).filter(|&r| {
///     round(x, Format::BF16, Mode::Stochastic(RandomBits::of16(r)), Overflow::Ieee) == 0x3FA1
/// });
/// assert_eq!(ups.count(), 19_661); // of 65,536: exactly the 16 dropped bits of x
/// # let x: f32 = x;
/// ```
#[must_use]
pub fn round<S: Source>(x: S, format: Format, mode: Mode, overflow: Overflow) -> u16 {
    encode_parts(x.parts(), format, 0, mode, overflow).0
}

/// Rounds `x / 2^scale` once, without forming the quotient: the scale acts on exponents and never rounds.
///
/// Any `scale` is defined; exponents saturate far outside every format.
#[must_use]
pub fn round_scaled<S: Source>(x: S, scale: i32, format: Format, mode: Mode, overflow: Overflow) -> u16 {
    encode_parts(x.parts(), format, scale, mode, overflow).0
}

/// [`round`] of an f32 as a constant function.
#[must_use]
pub const fn round_f32(x: f32, format: Format, mode: Mode, overflow: Overflow) -> u16 {
    encode_parts(Parts::of(x.to_bits() as u64, 8, 23), format, 0, mode, overflow).0
}

/// [`round`] of an f64 as a constant function.
#[must_use]
pub const fn round_f64(x: f64, format: Format, mode: Mode, overflow: Overflow) -> u16 {
    encode_parts(Parts::of(x.to_bits(), 11, 52), format, 0, mode, overflow).0
}

const fn encode_parts(x: Parts, format: Format, scale: i32, mode: Mode, overflow: Overflow) -> (u16, Loss) {
    let sign = if x.negative { format.sign_mask() } else { 0 };
    match x.class {
        Class::Nan => return (nan(x, format), Loss::Nan),
        Class::Infinite if x.negative && !format.is_signed() => return (negative_in_unsigned(format), Loss::Negative),
        Class::Infinite => return (sign | beyond(format, overflow), Loss::Overflow),
        Class::Finite => {}
    }
    if x.negative && !format.is_signed() && x.significand != 0 {
        return (negative_in_unsigned(format), Loss::Negative);
    }
    if x.significand == 0 {
        return (sign, Loss::Nothing);
    }

    // The spacing 2^quantum of the target around |x|, and |x| in units of it: `whole` and a fraction.
    // Beyond 2^+-4096 one scale is like another, and no sum of exponents below overflows.
    let exponent = x.exponent
        - match scale {
            ..-4096 => -4096,
            4097.. => 4096,
            _ => scale,
        };
    let leading = exponent.saturating_add(63 - x.significand.leading_zeros() as i32);
    let smallest = format.min_quantum_exponent();
    let below_code_1 = !format.has_zero() && leading < smallest;
    let quantum = if below_code_1 {
        smallest - 1
    } else {
        let normal = leading.saturating_sub(format.fraction_bits() as i32);
        if normal > smallest { normal } else { smallest }
    };
    let (whole, frac, sticky) = split(x.significand, quantum.saturating_sub(exponent));

    // Codes count values from the smallest up, so that a carry into the next binade is the next code.
    let code = if below_code_1 {
        if whole == 0 {
            return (0, Loss::Nothing); // below the value of code 0: code 0, no draw
        }
        whole - 1
    } else {
        // More binades than codes is overflow, and stays so under the shift.
        let binades = (quantum - smallest) as u64;
        let binades = if binades > 0xFFFF { 0xFFFF } else { binades };
        (binades << format.fraction_bits()) + whole
    };
    let inexact = frac != 0 || sticky;
    let up = inexact
        && match mode {
            Mode::NearestEven => is_nearest_up(frac, sticky, code & 1 != 0),
            Mode::NearestAway => frac >> 63 != 0,
            Mode::TowardZero => false,
            Mode::Up => !x.negative,
            Mode::Down => x.negative,
            Mode::Stochastic(random) => random.goes_up(frac, sticky),
        };
    let code = code + up as u64;

    let max = format.max_code();
    if code <= max as u64 {
        return (sign | code as u16, Loss::Nothing);
    }
    // IEEE 754: directed modes that point back to the finite side stop at the largest finite value.
    let stops = match mode {
        Mode::TowardZero => true,
        Mode::Up => x.negative,
        Mode::Down => !x.negative,
        _ => false,
    };
    (sign | if stops { max } else { beyond(format, overflow) }, Loss::Overflow)
}

/// `significand / 2^shift` as a whole part, 64 bits of fraction, and whether more is left.
const fn split(significand: u64, shift: i32) -> (u64, u64, bool) {
    match shift {
        ..=0 => (significand << -shift, 0, false), // `whole` has at most 16 bits, so nothing is shifted out
        1..=63 => (significand >> shift, significand << (64 - shift), false),
        64..=127 => (0, significand >> (shift - 64), significand << (127 - shift) << 1 != 0),
        _ => (0, 0, significand != 0),
    }
}

/// Magnitude of the result for infinity and for what rounds beyond the largest finite value.
pub(super) const fn beyond(format: Format, overflow: Overflow) -> u16 {
    match (overflow, format.specials()) {
        (Overflow::Ieee, Specials::Ieee) => format.infinity_magnitude(),
        (Overflow::Ieee, Specials::NanOnly) => format.magnitude_mask(),
        _ => format.max_code(),
    }
}

const fn negative_in_unsigned(format: Format) -> u16 {
    match (format.negative(), format.nan_code()) {
        (Negative::Nan, Some(nan)) => nan,
        _ => 0,
    }
}

const fn nan(x: Parts, format: Format) -> u16 {
    let Some(canonical) = format.nan_code() else {
        return format.max_code();
    };
    let sign = if x.negative { format.sign_mask() } else { 0 };
    let payload = if format.keeps_payload() { (x.significand >> (52 - format.fraction_bits())) as u16 } else { 0 };
    sign | canonical | payload
}
