//! The branch-free form of [`round`](super::round) for nearest-even and stochastic rounding, which compilers turn into
//! SIMD: every format is the same few integer steps with other constants.
//!
//! With `s` the number of dropped bits, the fraction passed is kept as `frac = d * 2^W`, `W` the width of the source word:
//! exactly for `s <= W`. A draw `r` of `N` bits goes up iff `!r < T` with `T = (floor(d 2^(N+1)) + 1) / 2`, which is the
//! centred rule `floor(d 2^(N+1)) + 2r + 1 >= 2^(N+1)` solved for `r`.

use core::ops::AddAssign;

use super::Overflow;
use super::element::{Loss, beyond};
use crate::format::{Format, Negative};

/// How many elements of a run lost more than precision.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lost {
    pub(crate) nan: u32,
    pub(crate) overflow: u32,
    pub(crate) negative: u32,
}

impl Lost {
    pub(crate) fn count(&mut self, loss: Loss) {
        match loss {
            Loss::Nothing => {}
            Loss::Nan => self.nan += 1,
            Loss::Overflow => self.overflow += 1,
            Loss::Negative => self.negative += 1,
        }
    }
}

impl AddAssign for Lost {
    fn add_assign(&mut self, other: Self) {
        self.nan += other.nan;
        self.overflow += other.overflow;
        self.negative += other.negative;
    }
}

/// The bits of a source value, as wide as the lanes it is rounded in.
pub trait Word: Copy + Default {
    /// The constants of a target.
    type Target: Copy + Send + Sync;
    /// `None` where a normal number of the target is subnormal in the source, which lanes do not normalise.
    fn target(format: Format, scale: i32, overflow: Overflow) -> Option<Self::Target>;
    /// The code of element `i`.
    fn code(self, target: &Self::Target, i: usize, decide: impl Decide, lost: &mut Lost) -> u32;
}

/// The decision between the two neighbours of element `i`.
pub trait Decide: Copy {
    /// For an f32: `frac = d * 2^32` where at most 32 bits are dropped, or else `tiny = floor(d * 2^33)`; the other is 0.
    fn up32(self, i: usize, frac: u32, tiny: u32, odd: u32) -> bool;
    /// For an f64: `frac = floor(d * 2^64)`.
    fn up64(self, i: usize, frac: u64, odd: u64) -> bool;
}

/// To nearest, ties to the even code.
#[derive(Clone, Copy)]
pub(crate) struct NearestEven;

impl Decide for NearestEven {
    #[inline(always)]
    fn up32(self, _: usize, frac: u32, _: u32, odd: u32) -> bool {
        // With fewer than 32 dropped bits `frac` is even, and with 32 it is below 2^24: the sum never wraps.
        frac + odd > 1 << 31
    }
    #[inline(always)]
    fn up64(self, _: usize, frac: u64, odd: u64) -> bool {
        frac + odd > 1 << 63
    }
}

/// Stochastically, with 16-bit draws.
#[derive(Clone, Copy)]
pub(crate) struct Draws16<'a>(pub(crate) &'a [u16]);

impl Decide for Draws16<'_> {
    #[inline(always)]
    fn up32(self, i: usize, frac: u32, tiny: u32, _: u32) -> bool {
        u32::from(!self.0[i]) < ((frac >> 15 | tiny >> 16) + 1) >> 1
    }
    #[inline(always)]
    fn up64(self, i: usize, frac: u64, _: u64) -> bool {
        u64::from(!self.0[i]) < ((frac >> 47) + 1) >> 1
    }
}

/// Stochastically, with 32-bit draws.
#[derive(Clone, Copy)]
pub(crate) struct Draws32<'a>(pub(crate) &'a [u32]);

impl Decide for Draws32<'_> {
    #[inline(always)]
    fn up32(self, i: usize, frac: u32, tiny: u32, _: u32) -> bool {
        !self.0[i] < frac | (tiny + 1) >> 1
    }
    #[inline(always)]
    fn up64(self, i: usize, frac: u64, _: u64) -> bool {
        u64::from(!self.0[i]) < ((frac >> 31) + 1) >> 1
    }
}

/// `(frac, tiny)` of [`Decide::up32`].
#[inline(always)]
fn fraction32(significand: u32, shift: u32) -> (u32, u32) {
    let frac = significand << (32u32.wrapping_sub(shift) & 31);
    let tiny = significand >> shift.wrapping_sub(33).min(31);
    if shift <= 32 { (frac, 0) } else { (0, tiny) }
}

/// `frac` of [`Decide::up64`].
#[inline(always)]
fn fraction64(significand: u64, shift: u64) -> u64 {
    let exact = significand << (64u64.wrapping_sub(shift) & 63);
    if shift <= 64 { exact } else { significand >> (shift - 64).min(63) }
}

macro_rules! lanes {
    ($target:ident, $word:ident, fraction $fraction:literal, bias $bias:literal, up $up:expr) => {
        /// A format, scale and overflow policy as constants of the lanes of one source type.
        #[derive(Clone, Copy, Debug)]
        pub struct $target {
            fraction_bits: $word,
            /// Dropped bits of a normal value.
            drop: $word,
            /// Biased source exponent of the target's smallest normal value.
            min_exponent: $word,
            max_code: $word,
            beyond: $word,
            sign_shift: $word,
            signed: bool,
            negative: $word,
            /// The source word of code 1, below which a format without zero halves its spacing; 0 elsewhere.
            code_1: $word,
            nan: $word,
            nan_sign: $word,
            payload: $word,
        }

        impl $target {
            const fn new(format: Format, scale: i32, overflow: Overflow) -> Option<Self> {
                let min_exponent = scale.saturating_add(1 - format.bias() + $bias);
                if min_exponent < 1 {
                    return None;
                }
                // Above the source's largest exponent by more than its fraction, everything is far below the smallest value.
                const TOP: i32 = 4 * $bias;
                let min_exponent = if min_exponent > TOP { TOP } else { min_exponent } as $word;
                let p = format.fraction_bits() as $word;
                let beyond = beyond(format, overflow) as $word;
                // Code 1 of a format without zero is 2^(min_exponent - p): its word, normal or subnormal.
                let code_1 = if format.has_zero() {
                    0
                } else if min_exponent > p {
                    if min_exponent - p < 2 * $bias + 1 { (min_exponent - p) << $fraction } else { <$word>::MAX }
                } else {
                    1 << ($fraction + min_exponent - p - 1)
                };
                let nan = match format.nan_code() {
                    Some(code) => code,
                    None => format.max_code(),
                };
                Some(Self {
                    fraction_bits: p,
                    drop: $fraction - p,
                    min_exponent,
                    max_code: format.max_code() as $word,
                    beyond,
                    sign_shift: format.bits() as $word - 1,
                    signed: format.is_signed(),
                    negative: match (format.negative(), format.nan_code()) {
                        (Negative::Nan, Some(nan)) => nan as $word,
                        _ => 0,
                    },
                    code_1,
                    nan: nan as $word,
                    nan_sign: (format.has_nan() && format.is_signed()) as $word,
                    payload: if format.keeps_payload() { (1 << p) - 1 } else { 0 },
                })
            }

            #[inline(always)]
            fn code(&self, i: usize, bits: $word, decide: impl Decide, lost: &mut Lost) -> $word {
                const SIGN: $word = 1 << (<$word>::BITS - 1);
                const INFINITY: $word = (2 * $bias + 1) << $fraction;
                let magnitude = bits & !SIGN;
                let sign = bits >> (<$word>::BITS - 1);

                // |x| = significand * 2^(exponent - bias - fraction), subnormals with exponent 1 and no hidden bit.
                let field = magnitude >> $fraction;
                let exponent = field.max(1);
                let significand = magnitude - ((exponent - 1) << $fraction);

                // Dropped bits grow below the target's normal range, and shrink by one below code 1 without a zero.
                let below_code_1 = (magnitude < self.code_1) as $word;
                let shift = self.drop + self.min_exponent.saturating_sub(exponent) - below_code_1;
                let binades = exponent.max(self.min_exponent) - self.min_exponent;
                let whole = significand >> shift.min(<$word>::BITS as $word - 1);
                let floor = (binades << self.fraction_bits) + whole.max(below_code_1) - below_code_1;
                let up = $up(decide, i, significand, shift, floor & 1) & (whole >= below_code_1);
                let code = floor + up as $word;

                let too_large = (code > self.max_code) | (magnitude == INFINITY);
                let code = if too_large { self.beyond } else { code };
                let code = if self.signed {
                    code | sign << self.sign_shift
                } else {
                    let negative = (sign != 0) & (magnitude != 0);
                    lost.negative += (negative & (magnitude <= INFINITY)) as u32;
                    if negative { self.negative } else { code }
                };
                let is_nan = magnitude > INFINITY;
                lost.nan += is_nan as u32;
                lost.overflow += (too_large & !is_nan & (self.signed | (sign == 0))) as u32;
                let nan = self.nan | magnitude >> self.drop & self.payload | (sign & self.nan_sign) << self.sign_shift;
                if is_nan { nan } else { code }
            }
        }

        impl Word for $word {
            type Target = $target;
            fn target(format: Format, scale: i32, overflow: Overflow) -> Option<$target> {
                $target::new(format, scale, overflow)
            }
            #[inline(always)]
            fn code(self, target: &$target, i: usize, decide: impl Decide, lost: &mut Lost) -> u32 {
                target.code(i, self, decide, lost) as u32
            }
        }
    };
}

lanes! {
    Target32, u32, fraction 23, bias 127,
    up |decide: _, i, significand, shift, odd| {
        let (frac, tiny) = fraction32(significand, shift);
        Decide::up32(decide, i, frac, tiny, odd)
    }
}
lanes! {
    Target64, u64, fraction 52, bias 1023,
    up |decide: _, i, significand, shift, odd| Decide::up64(decide, i, fraction64(significand, shift), odd)
}
