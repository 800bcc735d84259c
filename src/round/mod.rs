//! One element: a source value, and for stochastic rounding its random bits, to the code of a format. Pure functions, no
//! memory, no generator.
//!
//! [`round`] is the definition: any format, any mode, any number of random bits, in plain integer steps. The casts of
//! [`cast`](crate::cast) run branch-free forms of its two common modes; the tests hold them to it, and it to exact
//! arithmetic.
//!
//! What becomes of a source value, whatever the mode:
//!
//! | source | result |
//! |---|---|
//! | representable | itself, always |
//! | -0 | -0; code 0 in unsigned formats |
//! | subnormal, or below the target's smallest value | rounded like any other value |
//! | too large | by [`Overflow`], after rounding |
//! | infinity | by [`Overflow`] |
//! | NaN | NaN: sign and upper payload kept, quiet bit set (BF16, FP16); the canonical code with the sign (E4M3, E5M2) or without (unsigned formats). The largest value where the format has no NaN, which casts count |
//! | negative, unsigned format | code 0, no draw; NaN in E8M0 |
//! | below code 0, format without a zero | code 0, no draw |
//!
//! Signed formats are symmetric: `round(-x) = -round(x)` with the same random bits, [`Mode::Up`] and [`Mode::Down`] trading
//! places.

mod element;
pub(crate) mod lanes;

pub(crate) use element::encode;
pub use element::{Source, round, round_f32, round_f64, round_scaled};

use crate::format::Format;

/// How a value between two neighbours picks one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mode {
    /// The nearer neighbour; a tie goes to the even code.
    NearestEven,
    /// The nearer neighbour; a tie goes away from zero.
    NearestAway,
    /// The neighbour of smaller magnitude.
    TowardZero,
    /// The larger neighbour.
    Up,
    /// The smaller neighbour.
    Down,
    /// Away from zero with the probability of the fraction passed, toward zero otherwise, as these random bits decide.
    Stochastic(RandomBits),
}

/// What becomes of magnitudes above the largest finite value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Overflow {
    /// The largest finite value of that sign, for infinity too.
    Saturate,
    /// As IEEE 754, after rounding as if exponents did not end: infinity, or NaN in a format that has NaN alone, where the
    /// rounded value is too large (the modes that round toward the finite side give the largest finite value). Infinity
    /// stays, or becomes NaN. A format in which every code is a number can only saturate and does so here too.
    Ieee,
}

impl Overflow {
    /// The default of a format: `Ieee` where the format has an infinity, `Saturate` elsewhere.
    #[must_use]
    pub const fn of(format: Format) -> Self {
        if format.has_infinity() { Self::Ieee } else { Self::Saturate }
    }
}

/// The rule by which `N` random bits decide when more than `N` bits are dropped.
///
/// With `d` the exact fraction passed (in ulps of the target) and `r` the `N`-bit draw. All three give P(up) = `d`
/// exactly when `N` is at least the number `D` of dropped bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FewBits {
    /// `floor(d 2^(N+1)) + 2r + 1 >= 2^(N+1)`: P(up) within `2^-(N+1)` of `d`, mean bias over all dropped patterns
    /// `2^-(D+1)` ulp.
    #[default]
    Centred,
    /// `floor(d 2^N) + r >= 2^N`: the plain addition of random bits; P(up) less than `2^-N` too small, mean bias
    /// `2^-(D+1) - 2^-(N+1)` ulp.
    Floor,
    /// `rne(d 2^N) + r >= 2^N`, the fraction first rounded to nearest even: P(up) within `2^-(N+1)` of `d`, no mean bias.
    Nearest,
}

/// Random bits for one decision: `count` of them, 1 to 32, uniform.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RandomBits {
    bits: u32,
    count: u8,
    rule: FewBits,
}

/// Random bits that are not what they are said to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RandomBitsError {
    /// No bits, or more than a word holds.
    #[error("count: expected 1 to 32 random bits, got {0}")]
    Count(u32),
    /// A bit above the count is set.
    #[error("bits: expected at most {count} bits, got {bits:#x}")]
    Range {
        /// The word.
        bits: u32,
        /// How many bits it should have.
        count: u32,
    },
}

impl RandomBits {
    /// The low `count` bits of `bits`, with the [centred](FewBits::Centred) rule.
    ///
    /// # Errors
    /// [`RandomBitsError`] if `count` is not 1 to 32 or `bits` has a bit set above them.
    pub const fn new(bits: u32, count: u32) -> Result<Self, RandomBitsError> {
        if count == 0 || count > 32 {
            return Err(RandomBitsError::Count(count));
        }
        if count < 32 && bits >> count != 0 {
            return Err(RandomBitsError::Range { bits, count });
        }
        Ok(Self { bits, count: count as u8, rule: FewBits::Centred })
    }

    /// 16 random bits, enough to be exact for BF16 from f32.
    #[must_use]
    pub const fn of16(bits: u16) -> Self {
        Self { bits: bits as u32, count: 16, rule: FewBits::Centred }
    }

    /// 32 random bits, exact wherever an f32 is rounded above 2^-9 of the target's smallest spacing.
    #[must_use]
    pub const fn of32(bits: u32) -> Self {
        Self { bits, count: 32, rule: FewBits::Centred }
    }

    /// Another rule for the case of fewer random bits than dropped bits.
    #[must_use]
    pub const fn with_rule(self, rule: FewBits) -> Self {
        Self { rule, ..self }
    }

    /// Whether the fraction `frac/2^64`, with more below it if `sticky`, goes up.
    const fn goes_up(self, frac: u64, sticky: bool) -> bool {
        let n = self.count as u32;
        let (draw, one) = (self.bits as u64, 1u64 << n);
        match self.rule {
            FewBits::Centred => (frac >> (63 - n)) + 2 * draw + 1 >= 2 * one,
            FewBits::Floor => (frac >> (64 - n)) + draw >= one,
            FewBits::Nearest => {
                let kept = frac >> (64 - n);
                let rest = frac << n;
                let up = is_nearest_up(rest, sticky, kept & 1 != 0);
                kept + up as u64 + draw >= one
            }
        }
    }
}

/// Whether a fraction `frac/2^64 (+ sticky)` rounds up to nearest, ties to even.
const fn is_nearest_up(frac: u64, sticky: bool, odd: bool) -> bool {
    const HALF: u64 = 1 << 63;
    frac > HALF || (frac == HALF && (sticky || odd))
}
