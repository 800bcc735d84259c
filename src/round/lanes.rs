//! The branch-free form of [`round`](super::round) for nearest-even and stochastic rounding, which compilers turn into
//! SIMD: every format is the same few integer steps with other constants.
//!
//! With `s` the number of dropped bits, the fraction passed is kept as `frac = d * 2^W`, `W` the width of the source word:
//! exactly for `s <= W`. A draw `r` of `N` bits goes up iff `!r < T` with `T = (floor(d 2^(N+1)) + 1) / 2`, which is the
//! centred rule `floor(d 2^(N+1)) + 2r + 1 >= 2^(N+1)` solved for `r`.
//!
//! Elements that lose more than precision are rare, so lanes only say that there was one; a block that had one is made
//! again by the form that counts.

#![allow(unreachable_pub, reason = "sealed traits name these types, out of reach all the same")]

use core::ops::AddAssign;

use super::Overflow;
use super::element::{Loss, beyond};
use crate::format::{Format, Negative};

/// How many elements of a run lost more than precision.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Lost {
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

/// A format, scale and overflow policy as constants for the lanes of one source width.
pub trait Target: Copy + Send + Sync {
    /// The bits of a source value.
    type Word: Copy + Default;
    /// The code of the value with these bits. Where it [lost](Coded::lost) anything, [`certain`](Self::certain) has the say.
    fn code<D: Decide>(&self, word: Self::Word, draw: D::Draw) -> Coded;
    /// The code, and what it lost besides precision.
    #[inline(always)]
    fn certain<D: Decide>(&self, word: Self::Word, draw: D::Draw) -> Coded {
        self.code::<D>(word, draw)
    }
}

/// The bits of an f32 or an f64, which hold every source value.
pub trait Word: Copy + Default + Ord + Send {
    /// The value with these bits.
    fn float(self) -> f64;
    /// The bits without sign, or 0 if they are not finite. Such words order as their values.
    fn finite_magnitude(self) -> Self;
    /// Gives `work` the shortest lanes of a target. `None` where a normal number of the target is subnormal in the source,
    /// which lanes do not normalise.
    fn with_target<V: WithTarget<Self>>(format: Format, scale: i32, overflow: Overflow, work: V) -> Option<V::Output>;
}

/// Work for any target from one source width.
pub trait WithTarget<W> {
    /// The result.
    type Output;
    /// Does the work.
    fn run(self, target: impl Target<Word = W>) -> Self::Output;
}

/// A code, and what it lost besides precision, as numbers 0 and 1.
#[derive(Clone, Copy, Debug)]
pub struct Coded {
    pub(crate) code: u32,
    nan: u32,
    overflow: u32,
    negative: u32,
}

impl Coded {
    /// Not 0 if anything was lost besides precision.
    #[inline(always)]
    pub(crate) fn lost(self) -> u32 {
        self.nan | self.overflow | self.negative
    }
}

impl AddAssign<Coded> for Lost {
    #[inline(always)]
    fn add_assign(&mut self, coded: Coded) {
        // A NaN is nothing else besides, and a value below zero does not overflow.
        self.nan += coded.nan;
        self.negative += coded.negative & !coded.nan;
        self.overflow += coded.overflow & !coded.nan & !coded.negative;
    }
}

/// The decision between two neighbours.
pub trait Decide {
    /// The random bits of one element.
    type Draw: Copy;
    /// For an f32: `frac = d * 2^32` where at most 32 bits are dropped, or else `tiny = floor(d * 2^33)`; the other is 0.
    fn up32(draw: Self::Draw, frac: u32, tiny: u32, odd: u32) -> bool;
    /// For an f64: `frac = floor(d * 2^64)`.
    fn up64(draw: Self::Draw, frac: u64, odd: u64) -> bool;
    /// What is added to the bits of an f32 so that a carry out of the low 16 is "up".
    fn addend(draw: Self::Draw, odd: u32) -> u32;
    /// The draw as the high bits of a fraction, and below them the middle of what they leave open; `None` if not drawn.
    fn noise(draw: Self::Draw) -> Option<u32>;
}

/// To nearest, ties to the even code.
pub(crate) struct NearestEven;

impl Decide for NearestEven {
    type Draw = ();
    #[inline(always)]
    fn up32((): (), frac: u32, _: u32, odd: u32) -> bool {
        // With fewer than 32 dropped bits `frac` is even, and with 32 it is below 2^24: the sum never wraps.
        frac.wrapping_add(odd) > 1 << 31
    }
    #[inline(always)]
    fn up64((): (), frac: u64, odd: u64) -> bool {
        frac.wrapping_add(odd) > 1 << 63
    }
    #[inline(always)]
    fn addend((): (), odd: u32) -> u32 {
        0x7FFF + odd
    }
    #[inline(always)]
    fn noise((): ()) -> Option<u32> {
        None
    }
}

/// Stochastically, with 16-bit draws.
pub(crate) struct Draws16;

impl Decide for Draws16 {
    type Draw = u16;
    #[inline(always)]
    fn up32(draw: u16, frac: u32, tiny: u32, _: u32) -> bool {
        u32::from(!draw) < ((frac >> 15 | tiny >> 16) + 1) >> 1
    }
    #[inline(always)]
    fn up64(draw: u16, frac: u64, _: u64) -> bool {
        u64::from(!draw) < ((frac >> 47) + 1) >> 1
    }
    #[inline(always)]
    fn addend(draw: u16, _: u32) -> u32 {
        draw.into()
    }
    #[inline(always)]
    fn noise(draw: u16) -> Option<u32> {
        Some(u32::from(draw) << 16 | 0x8000)
    }
}

/// Stochastically, with 32-bit draws.
pub(crate) struct Draws32;

impl Decide for Draws32 {
    type Draw = u32;
    #[inline(always)]
    fn up32(draw: u32, frac: u32, tiny: u32, _: u32) -> bool {
        !draw < frac | tiny.wrapping_add(1) >> 1
    }
    #[inline(always)]
    fn up64(draw: u32, frac: u64, _: u64) -> bool {
        u64::from(!draw) < ((frac >> 31) + 1) >> 1
    }
    #[inline(always)]
    fn addend(draw: u32, _: u32) -> u32 {
        draw >> 16
    }
    #[inline(always)]
    fn noise(draw: u32) -> Option<u32> {
        Some(draw)
    }
}

/// Whether an f32 with this significand goes up when `shift` bits are dropped.
#[inline(always)]
fn up32<D: Decide>(draw: D::Draw, significand: u32, shift: u32, odd: u32) -> bool {
    // A shift by more than the width, or by a negative number, leaves nothing.
    let frac = significand.checked_shl(32u32.wrapping_sub(shift)).unwrap_or(0);
    let tiny = significand.checked_shr(shift.wrapping_sub(33)).unwrap_or(0);
    D::up32(draw, frac, tiny, odd)
}

/// As [`up32`], for an f64.
#[inline(always)]
fn up64<D: Decide>(draw: D::Draw, significand: u64, shift: u64, odd: u64) -> bool {
    let exact = significand.checked_shl(64u32.wrapping_sub(shift as u32)).unwrap_or(0);
    let floor = significand.checked_shr((shift as u32).wrapping_sub(64)).unwrap_or(0);
    D::up64(draw, if shift <= 64 { exact } else { floor }, odd)
}

/// BF16 from f32, unscaled: at every exponent the dropped bits are the low 16 of the word.
#[derive(Clone, Copy, Debug)]
pub struct Bf16 {
    /// The code, without sign, of what is too large.
    beyond: u32,
}

impl Bf16 {
    pub(crate) const fn new(overflow: Overflow) -> Self {
        Self { beyond: beyond(Format::BF16, overflow) as u32 }
    }
}

impl Target for Bf16 {
    type Word = u32;
    #[inline(always)]
    fn code<D: Decide>(&self, bits: u32, draw: D::Draw) -> Coded {
        let magnitude = bits & 0x7FFF_FFFF;
        let sign = bits >> 16 & 0x8000;
        let code = (magnitude + D::addend(draw, bits >> 16 & 1)) >> 16;
        let too_large = code >= 0x7F80;
        let is_nan = magnitude > 0x7F80_0000;
        let code = if too_large { self.beyond } else { code };
        let code = if is_nan { magnitude >> 16 | 0x40 } else { code };
        Coded { code: code | sign, nan: is_nan as u32, overflow: too_large as u32, negative: 0 }
    }
}

macro_rules! lanes {
    ($target:ident, $word:ident, fraction $fraction:literal, bias $bias:literal, up $up:ident) => {
        /// Any target from one source width. `PLAIN` ones are signed, have a zero, and keep no payload.
        #[derive(Clone, Copy, Debug)]
        #[repr(C)]
        pub struct $target<const PLAIN: bool> {
            fraction_bits: $word,
            /// Dropped bits of a normal value.
            drop: $word,
            /// Biased source exponent of the target's smallest normal value.
            min_exponent: $word,
            max_code: $word,
            /// The code, without sign, of what is too large.
            beyond: $word,
            sign_shift: $word,
            /// 1 in an unsigned format.
            unsigned: $word,
            /// The code of a value below zero in an unsigned format.
            negative: $word,
            /// The source word of code 1, below which a format without zero halves its spacing; 0 elsewhere.
            code_1: $word,
            nan: $word,
            nan_sign: $word,
            payload: $word,
            /// `2^(1 - min_exponent)`, which takes the smallest normal value to that of the source, or 0; for the kernels.
            unit: $word,
        }

        impl<const PLAIN: bool> $target<PLAIN> {
            pub(crate) const fn new(format: Format, scale: i32, overflow: Overflow) -> Option<Self> {
                let min_exponent = scale.saturating_add(1 - format.bias() + $bias);
                if min_exponent < 1 {
                    return None;
                }
                // Above the source's largest exponent by more than its fraction, everything is far below the smallest value.
                const TOP: i32 = 4 * $bias;
                let min_exponent = if min_exponent > TOP { TOP } else { min_exponent } as $word;
                let p = format.fraction_bits() as $word;
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
                    beyond: beyond(format, overflow) as $word,
                    sign_shift: format.bits() as $word - 1,
                    unsigned: !format.is_signed() as $word,
                    negative: match (format.negative(), format.nan_code()) {
                        (Negative::Nan, Some(nan)) => nan as $word,
                        _ => 0,
                    },
                    code_1,
                    nan: nan as $word,
                    nan_sign: (format.has_nan() && format.is_signed()) as $word,
                    payload: if format.keeps_payload() { (1 << p) - 1 } else { 0 },
                    unit: if min_exponent <= $bias {
                        ($bias + 1 - min_exponent) << $fraction
                    } else if min_exponent <= $bias + $fraction {
                        1 << ($bias + $fraction - min_exponent)
                    } else {
                        0
                    },
                })
            }
        }

        impl<const PLAIN: bool> Target for $target<PLAIN> {
            type Word = $word;
            #[inline(always)]
            fn code<D: Decide>(&self, bits: $word, draw: D::Draw) -> Coded {
                const SIGN: $word = 1 << (<$word>::BITS - 1);
                const INFINITY: $word = (2 * $bias + 1) << $fraction;
                let magnitude = bits & !SIGN;
                let sign = bits >> (<$word>::BITS - 1);

                // |x| = significand * 2^(exponent - bias - fraction), subnormals with exponent 1 and no hidden bit.
                let exponent = (magnitude >> $fraction).max(1);
                let significand = magnitude - ((exponent - 1) << $fraction);

                // Dropped bits grow below the target's normal range, and shrink by one below code 1 without a zero.
                let below_code_1 = (!PLAIN && magnitude < self.code_1) as $word;
                let shift = self.drop + self.min_exponent.saturating_sub(exponent) - below_code_1;
                let binades = exponent.max(self.min_exponent) - self.min_exponent;
                let whole = significand.checked_shr(shift as u32).unwrap_or(0);
                let floor = (binades << self.fraction_bits) + whole.max(below_code_1) - below_code_1;
                let up = $up::<D>(draw, significand, shift, floor & 1) & (whole >= below_code_1);
                let code = floor + up as $word;

                let too_large = (code > self.max_code) | (magnitude >= INFINITY);
                let code = if too_large { self.beyond } else { code };
                let unsigned = if PLAIN { 0 } else { self.unsigned };
                let below_zero = sign & unsigned & (magnitude != 0) as $word;
                let code = code | (sign & (unsigned ^ 1)) << self.sign_shift;
                let code = if below_zero != 0 { self.negative } else { code };

                let is_nan = magnitude > INFINITY;
                let payload = if PLAIN { 0 } else { magnitude >> self.drop & self.payload };
                let nan = self.nan | payload | (sign & self.nan_sign) << self.sign_shift;
                Coded {
                    code: if is_nan { nan } else { code } as u32,
                    nan: is_nan as u32,
                    overflow: too_large as u32,
                    negative: below_zero as u32,
                }
            }
        }
    };
}

lanes! { Target32, u32, fraction 23, bias 127, up up32 }
lanes! { Target64, u64, fraction 52, bias 1023, up up64 }

/// A plain target from f32 whose stochastic rounding is one addition.
///
/// In units where the target's subnormals are those of f32, every value has its code above the same number of dropped bits.
/// Noise of as many bits is added to them and the sum cut. Subnormals lose what lies below the unit, and the noise its low
/// bits: together less than two units, so that only a sum of ones throughout is in doubt. That, and what is too large or NaN, is
/// left to the lanes of any plain target.
#[derive(Clone, Copy, Debug)]
pub struct Scaled32 {
    any: Target32<true>,
    /// What the word of a normal value is above its code and dropped bits.
    offset: i32,
    /// Units in 1, as f32.
    units: f32,
    dropped: u32,
    /// The first sum of what is too large.
    end: i32,
}

impl Scaled32 {
    /// `None` where `units` is no normal f32, infinity would not be too large, or doubt would be frequent.
    fn new(any: Target32<true>) -> Option<Self> {
        let dropped = any.drop;
        if !(24..=254).contains(&any.min_exponent) || dropped < 18 {
            return None;
        }
        let offset = (any.min_exponent - 1) << 23;
        let end = (any.max_code + 1) << dropped;
        (end <= 0x7F80_0000 - offset).then_some(Self {
            any,
            offset: offset as i32,
            units: f32::from_bits((277 - any.min_exponent) << 23),
            dropped,
            end: end as i32,
        })
    }
}

impl Target for Scaled32 {
    type Word = u32;
    #[inline(always)]
    fn code<D: Decide>(&self, bits: u32, draw: D::Draw) -> Coded {
        let Some(noise) = D::noise(draw) else { return self.any.code::<D>(bits, draw) };
        let magnitude = bits & 0x7FFF_FFFF;
        // The smallest normal value has 2^23 units. The product is exact, or below a unit.
        const NORMAL: f32 = (1 << 23) as f32;
        let units = f32::from_bits(magnitude) * self.units;
        let units = if units < NORMAL { units } else { NORMAL };
        // SAFETY: between 0 and 2^23, also for NaN.
        let units: i32 = unsafe { units.to_int_unchecked() };
        let sum = units.max(magnitude as i32 - self.offset) + (noise >> (32 - self.dropped)) as i32;
        let doubt = (sum ^ (sum + 1)) as u32 >> self.dropped;
        let sign = bits >> (31 - self.any.sign_shift) & 1 << self.any.sign_shift;
        let unsure = doubt | (sum >= self.end) as u32;
        Coded { code: sum as u32 >> self.dropped | sign, nan: 0, overflow: unsure, negative: 0 }
    }
    #[inline(always)]
    fn certain<D: Decide>(&self, bits: u32, draw: D::Draw) -> Coded {
        self.any.code::<D>(bits, draw)
    }
}

/// Whether a format is signed, has a zero and keeps no payload.
const fn is_plain(format: Format) -> bool {
    format.is_signed() && format.has_zero() && !format.keeps_payload()
}

impl Word for u32 {
    #[inline(always)]
    fn float(self) -> f64 {
        f32::from_bits(self).into()
    }
    #[inline(always)]
    fn finite_magnitude(self) -> Self {
        let magnitude = self & 0x7FFF_FFFF;
        if magnitude < 0x7F80_0000 { magnitude } else { 0 }
    }
    fn with_target<V: WithTarget<Self>>(format: Format, scale: i32, overflow: Overflow, work: V) -> Option<V::Output> {
        if format == Format::BF16 && scale == 0 {
            Some(work.run(Bf16::new(overflow)))
        } else if is_plain(format) {
            let plain = Target32::<true>::new(format, scale, overflow)?;
            Some(match Scaled32::new(plain) {
                Some(scaled) => work.run(scaled),
                None => work.run(plain),
            })
        } else {
            Some(work.run(Target32::<false>::new(format, scale, overflow)?))
        }
    }
}

impl Word for u64 {
    #[inline(always)]
    fn float(self) -> f64 {
        f64::from_bits(self)
    }
    #[inline(always)]
    fn finite_magnitude(self) -> Self {
        let magnitude = self & !(1 << 63);
        if magnitude < 0x7FF << 52 { magnitude } else { 0 }
    }
    fn with_target<V: WithTarget<Self>>(format: Format, scale: i32, overflow: Overflow, work: V) -> Option<V::Output> {
        Some(work.run(Target64::<false>::new(format, scale, overflow)?))
    }
}

#[cfg(feature = "cuda")]
impl Target32<false> {
    /// Whether the kernels' shorter steps serve this target: it has a zero and a fraction bit, its unit is an f32, and
    /// negatives become 0 if it is unsigned.
    pub(crate) fn is_plain_on_gpu(&self, format: Format) -> bool {
        self.unit > 0 && format.has_zero() && self.fraction_bits >= 1 && self.negative == 0
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::{Mode, RandomBits, round_scaled};
    use super::*;

    /// The first draw whose code is another than that of draw 0, or the largest draw.
    pub(crate) fn first_up(code: impl Fn(u32) -> u32) -> u32 {
        let (mut down, mut up) = (0, u32::MAX);
        while down < up {
            let middle = down + (up - down) / 2;
            if code(middle) == code(0) { down = middle + 1 } else { up = middle }
        }
        up
    }

    /// The shortest lanes right where a decision turns: the draws around the first that goes up, and any, for values of every
    /// exponent. Counts the decisions that the lanes left, of draws where one turns and of any.
    struct Turns(Format, i32);

    impl WithTarget<u32> for Turns {
        type Output = [u32; 2];
        fn run(self, target: impl Target<Word = u32>) -> [u32; 2] {
            let Self(format, scale) = self;
            let (mut left, mut state) = ([0; 2], 1u32);
            for i in 0..30_000u32 {
                state = state.wrapping_mul(0x915F_77F5).wrapping_add(0x2545_F491);
                let word = if i % 4 == 0 { state } else { state & 0x807F_FFFF | (110 + (state >> 9) % 30) << 23 };
                let x = f32::from_bits(word);
                let code = |r| {
                    round_scaled(x, scale, format, Mode::Stochastic(RandomBits::of32(r)), Overflow::Saturate).into()
                };
                let up = first_up(code);
                let any = state.rotate_left(7);
                for draw in [up.wrapping_sub(1), up, up.wrapping_add(1), any] {
                    let (fast, certain) = (target.code::<Draws32>(word, draw), target.certain::<Draws32>(word, draw));
                    assert_eq!(certain.code, code(draw), "{format} {scale} {word:#x} {draw:#x}");
                    if fast.lost() == 0 {
                        assert_eq!(fast.code, certain.code, "{format} {scale} {word:#x} {draw:#x}");
                    } else {
                        left[usize::from(draw == any)] += u32::from(certain.lost() == 0);
                    }
                }
            }
            left
        }
    }

    #[test]
    fn short_lanes_decide_or_decline() {
        for (_, format) in Format::NAMED.iter().filter(|(_, format)| *format != Format::BF16) {
            for scale in [-20, 0, 9, 90] {
                let Some(left) = u32::with_target(*format, scale, Overflow::Saturate, Turns(*format, scale)) else {
                    continue;
                };
                let [turning, any] = left;
                assert_eq!(turning > 1000, is_plain(*format), "{format} {scale}: {turning}");
                assert!(any < 5, "{format} {scale}: {any}");
            }
        }
    }
}
