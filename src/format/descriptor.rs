//! The descriptor of a format and the questions anyone asks of it.

use alloc::string::String;
use core::fmt;
use core::str::FromStr;

/// Which codes of a format are not numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Specials {
    /// As IEEE 754: the largest exponent is reserved, infinity at fraction 0, NaN elsewhere (BF16, FP16, E5M2).
    Ieee,
    /// The all-ones magnitude is NaN, there is no infinity (E4M3, UE5M3, UE4M4, E8M0).
    NanOnly,
    /// Every code is a number (E3M2, E2M3, E2M1, UE2M2).
    Finite,
}

/// What a negative source value becomes in an unsigned format. `-0` is never negative here: it gives code 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Negative {
    /// Code 0: zero, or the smallest value of a format without a zero.
    Smallest,
    /// NaN (E8M0, as the OCP microscaling specification has it for scales).
    Nan,
}

/// A number format of at most 16 bits: sign (if signed), exponent, fraction, from the top bit down.
///
/// With `E` exponent bits, `M` fraction bits and bias `B`, exponent field `e > 0` and fraction field `f` stand for
/// `(1 + f/2^M) * 2^(e-B)`; field `e = 0` is subnormal, `f/2^M * 2^(1-B)`. A format [without zero](Self::has_zero) reads
/// code 0 as half the value of code 1.
///
/// ```
/// use halfulp::Format;
/// assert_eq!(Format::E4M3.max(), 448.0);
/// assert_eq!(Format::E4M3.min_positive(), 2f64.powi(-9));
/// assert_eq!(Format::BF16.ulp(1.0), 1.0 / 128.0);
/// let e3m4 = Format::builder(3, 4).build()?;
/// assert_eq!((e3m4.bias(), e3m4.max()), (3, 31.0));
/// # Ok::<(), halfulp::format::FormatError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Format {
    exponent_bits: u8,
    fraction_bits: u8,
    bias: i16,
    signed: bool,
    zero: bool,
    specials: Specials,
    negative: Negative,
}

const fn signed(exponent_bits: u8, fraction_bits: u8, bias: i16, specials: Specials) -> Format {
    Format { exponent_bits, fraction_bits, bias, signed: true, zero: true, specials, negative: Negative::Smallest }
}

const fn unsigned(exponent_bits: u8, fraction_bits: u8, bias: i16, specials: Specials) -> Format {
    Format { signed: false, ..signed(exponent_bits, fraction_bits, bias, specials) }
}

impl Format {
    /// bfloat16: 8 exponent and 7 fraction bits, infinities and NaN.
    pub const BF16: Self = signed(8, 7, 127, Specials::Ieee);
    /// IEEE binary16: 5 exponent and 10 fraction bits, infinities and NaN.
    pub const FP16: Self = signed(5, 10, 15, Specials::Ieee);
    /// OCP E4M3: largest value 448, NaN, no infinity.
    pub const E4M3: Self = signed(4, 3, 7, Specials::NanOnly);
    /// OCP E5M2: largest value 57,344, infinities and NaN.
    pub const E5M2: Self = signed(5, 2, 15, Specials::Ieee);
    /// OCP MX E3M2, 6 bits, largest value 28, numbers only.
    pub const E3M2: Self = signed(3, 2, 3, Specials::Finite);
    /// OCP MX E2M3, 6 bits, largest value 7.5, numbers only.
    pub const E2M3: Self = signed(2, 3, 1, Specials::Finite);
    /// OCP MX E2M1, 4 bits: 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives.
    pub const E2M1: Self = signed(2, 1, 1, Specials::Finite);
    /// Unsigned E2M2, 4 bits: 0, .25, .5, .75, 1, 1.25, ... 7.
    pub const UE2M2: Self = unsigned(2, 2, 1, Specials::Finite);
    /// Unsigned E2M2 whose code 0 is .125: the format has no zero, so that a second moment never divides by one.
    pub const UE2M2NZ: Self = Self { zero: false, ..Self::UE2M2 };
    /// Unsigned E5M3: E5M2's exponent range with one more fraction bit, NaN 0xFF, no infinity.
    pub const UE5M3: Self = unsigned(5, 3, 15, Specials::NanOnly);
    /// Unsigned E4M4: E4M3's exponent range with one more fraction bit, NaN 0xFF, no infinity.
    pub const UE4M4: Self = unsigned(4, 4, 7, Specials::NanOnly);
    /// OCP MX E8M0: powers of two from 2^-127 to 2^127, NaN 0xFF, no zero; a negative value becomes NaN.
    pub const E8M0: Self = Self { zero: false, negative: Negative::Nan, ..unsigned(8, 0, 127, Specials::NanOnly) };

    /// Every named format with its name, widest first.
    pub const NAMED: [(&'static str, Self); 12] = [
        ("BF16", Self::BF16),
        ("FP16", Self::FP16),
        ("E5M2", Self::E5M2),
        ("E4M3", Self::E4M3),
        ("UE5M3", Self::UE5M3),
        ("UE4M4", Self::UE4M4),
        ("E8M0", Self::E8M0),
        ("E3M2", Self::E3M2),
        ("E2M3", Self::E2M3),
        ("E2M1", Self::E2M1),
        ("UE2M2", Self::UE2M2),
        ("UE2M2Nz", Self::UE2M2NZ),
    ];

    /// Starts the description of a format of one's own. Unless told otherwise it is signed, has a zero, the bias
    /// `2^(exponent_bits-1) - 1`, and every code is a number.
    pub const fn builder(exponent_bits: u8, fraction_bits: u8) -> FormatBuilder {
        FormatBuilder {
            exponent_bits,
            fraction_bits,
            bias: None,
            signed: true,
            zero: true,
            specials: Specials::Finite,
            negative: Negative::Smallest,
        }
    }

    /// Number of exponent bits.
    #[must_use]
    pub const fn exponent_bits(self) -> u32 {
        self.exponent_bits as u32
    }

    /// Number of stored fraction bits.
    #[must_use]
    pub const fn fraction_bits(self) -> u32 {
        self.fraction_bits as u32
    }

    /// Exponent bias.
    #[must_use]
    pub const fn bias(self) -> i32 {
        self.bias as i32
    }

    /// Whether there is a sign bit.
    #[must_use]
    pub const fn is_signed(self) -> bool {
        self.signed
    }

    /// Whether code 0 is zero. Where it is not, code 0 is half of code 1.
    #[must_use]
    pub const fn has_zero(self) -> bool {
        self.zero
    }

    /// Which codes are not numbers.
    #[must_use]
    pub const fn specials(self) -> Specials {
        self.specials
    }

    /// What a negative source becomes; of interest in unsigned formats alone.
    #[must_use]
    pub const fn negative(self) -> Negative {
        self.negative
    }

    /// Whether the format has an infinity.
    #[must_use]
    pub const fn has_infinity(self) -> bool {
        matches!(self.specials, Specials::Ieee)
    }

    /// Whether the format has a NaN.
    #[must_use]
    pub const fn has_nan(self) -> bool {
        !matches!(self.specials, Specials::Finite)
    }

    /// Whether a NaN keeps the upper bits of its payload: in formats of more than 8 bits with IEEE specials (BF16, FP16).
    #[must_use]
    pub const fn keeps_payload(self) -> bool {
        self.has_infinity() && self.bits() > 8
    }

    /// Width of a code in bits.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.exponent_bits() + self.fraction_bits() + self.signed as u32
    }

    /// Bytes that `n` codes take: two a code above 8 bits, one from 7 to 8, packed (rounded up) at 6 and 4 bits.
    ///
    /// Widths of 1 to 3 and 5 bits are stored in a byte each.
    ///
    /// # Panics
    /// If the number of bytes does not fit `usize`, which no slice in memory can reach.
    #[must_use]
    pub const fn bytes(self, n: usize) -> usize {
        match self.bits() {
            4 => n.div_ceil(2),
            6 => n / 4 * 3 + (n % 4 * 6).div_ceil(8),
            ..=8 => n,
            _ => match n.checked_mul(2) {
                Some(bytes) => bytes,
                None => panic!("n: expected a number of elements whose bytes a usize counts"),
            },
        }
    }

    /// Number of codes, `2^bits`.
    #[must_use]
    pub const fn code_count(self) -> u32 {
        1 << self.bits()
    }

    /// Whether this is [`E2M1`](Self::E2M1), for constants, in which formats don't compare.
    pub(crate) const fn is_e2m1(self) -> bool {
        let shape = self.exponent_bits == 2 && self.fraction_bits == 1 && self.bias == 1;
        shape && self.signed && matches!(self.specials, Specials::Finite)
    }

    /// Mask of the bits of a code below the sign.
    pub(crate) const fn magnitude_mask(self) -> u16 {
        ((1u32 << (self.exponent_bits() + self.fraction_bits())) - 1) as u16
    }

    /// The sign bit of a code, or 0 in an unsigned format.
    pub(crate) const fn sign_mask(self) -> u16 {
        if self.signed { self.magnitude_mask() + 1 } else { 0 }
    }

    /// Code of the largest finite value.
    #[must_use]
    pub const fn max_code(self) -> u16 {
        match self.specials {
            Specials::Ieee => self.infinity_magnitude() - 1,
            Specials::NanOnly => self.magnitude_mask() - 1,
            Specials::Finite => self.magnitude_mask(),
        }
    }

    /// The exponent field all ones, the fraction zero: infinity in IEEE formats.
    pub(crate) const fn infinity_magnitude(self) -> u16 {
        self.magnitude_mask() >> self.fraction_bits << self.fraction_bits
    }

    /// Code of positive infinity, where there is one.
    #[must_use]
    pub const fn infinity_code(self) -> Option<u16> {
        if self.has_infinity() { Some(self.infinity_magnitude()) } else { None }
    }

    /// Code of the canonical quiet NaN (positive), where there is one: 0x7FC0 (BF16), 0x7E00 (FP16), 0x7F (E4M3),
    /// 0x7E (E5M2), 0xFF (unsigned 8-bit formats).
    #[must_use]
    pub const fn nan_code(self) -> Option<u16> {
        match self.specials {
            Specials::Ieee => Some(self.infinity_magnitude() | 1 << (self.fraction_bits - 1)),
            Specials::NanOnly => Some(self.magnitude_mask()),
            Specials::Finite => None,
        }
    }

    /// Exponent of the spacing of subnormals (and of the first normal binade): `1 - bias - fraction_bits`.
    pub(crate) const fn min_quantum_exponent(self) -> i32 {
        1 - self.bias() - self.fraction_bits as i32
    }

    /// Largest finite value.
    #[must_use]
    pub const fn max(self) -> f64 {
        self.value(self.max_code())
    }

    /// Smallest finite value: `-max` in signed formats, else the value of code 0.
    #[must_use]
    pub const fn min(self) -> f64 {
        if self.signed { -self.max() } else { self.value(0) }
    }

    /// Smallest positive normal value, `2^(1-bias)`.
    #[must_use]
    pub const fn min_positive_normal(self) -> f64 {
        exact(1, 1 - self.bias())
    }

    /// Smallest positive value: the smallest subnormal where the format has fraction bits, or the value of code 0 where
    /// code 0 is not zero.
    #[must_use]
    pub const fn min_positive(self) -> f64 {
        self.value(self.zero as u16)
    }

    /// Spacing of the values just above 1, `2^-fraction_bits`.
    #[must_use]
    pub const fn epsilon(self) -> f64 {
        exact(1, -(self.fraction_bits as i32))
    }

    /// The exact value of a code; bits above the width of the format are ignored. NaN codes give a quiet NaN with the
    /// code's sign.
    #[must_use]
    pub const fn value(self, code: u16) -> f64 {
        let magnitude = code & self.magnitude_mask();
        let negative = code & self.sign_mask() != 0;
        let absolute = if magnitude > self.max_code() {
            if self.has_infinity() && magnitude == self.infinity_magnitude() { f64::INFINITY } else { f64::NAN }
        } else {
            let fraction = magnitude & ((1u32 << self.fraction_bits) - 1) as u16;
            let field = (magnitude >> self.fraction_bits) as i32;
            match (magnitude, self.zero) {
                (0, false) => exact(1, self.min_quantum_exponent() - 1),
                _ if field == 0 => exact(fraction as u64, self.min_quantum_exponent()),
                _ => {
                    let significand = fraction as u64 | 1 << self.fraction_bits;
                    exact(significand, self.min_quantum_exponent() + field - 1)
                }
            }
        };
        // Signs are set on bits: `-NaN` has no promised sign in a constant.
        f64::from_bits(absolute.to_bits() & !(1 << 63) | (negative as u64) << 63)
    }

    /// Every code with its value, from code 0 up.
    ///
    /// ```
    /// use halfulp::Format;
    /// let positive: Vec<f64> = Format::E2M1.values().take(8).map(|(_, v)| v).collect();
    /// assert_eq!(positive, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
    /// ```
    #[must_use]
    pub fn values(self) -> impl ExactSizeIterator<Item = (u16, f64)> {
        let last = (self.code_count() - 1) as u16;
        // A range of u32 has no exact size; one of u16 cannot end past 0xFFFF. Count in usize.
        (0..usize::from(last) + 1).map(move |code| (code as u16, self.value(code as u16)))
    }

    /// The spacing of the format at `x` in magnitude: the distance between the two neighbours that enclose `|x|`, where
    /// `|x|` on a power of two belongs to the binade above it. Subnormals, and everything below them, have the spacing of
    /// the smallest normal binade; above [`max`](Self::max) the spacing goes on as if exponents did not end.
    ///
    /// NaN and infinity give NaN. A format without zero halves the spacing below code 1.
    #[must_use]
    pub const fn ulp(self, x: f64) -> f64 {
        if !x.is_finite() {
            return f64::NAN;
        }
        exact(1, self.quantum_exponent(x))
    }

    /// Exponent of [`ulp`](Self::ulp) at a finite `x`.
    const fn quantum_exponent(self, x: f64) -> i32 {
        let smallest = self.min_quantum_exponent();
        let bits = x.to_bits() & !(1 << 63);
        // A subnormal f64 lies below the normal range of every valid format, so its field's -1023 will do.
        let exponent = (bits >> 52) as i32 - 1023;
        if !self.zero && exponent < smallest {
            return smallest - 1;
        }
        let normal = exponent - self.fraction_bits as i32;
        if normal > smallest { normal } else { smallest }
    }

    /// The largest value of the format `<= x` and the smallest `>= x` (equal when `x` is representable).
    ///
    /// `None` stands for "there is none": below [`min`](Self::min), or above [`max`](Self::max) in a format without an
    /// infinity. In one with infinities they count as values. NaN has no neighbours.
    ///
    /// ```
    /// use halfulp::Format;
    /// assert_eq!(Format::E2M1.neighbours(2.2), (Some(2.0), Some(3.0)));
    /// assert_eq!(Format::E2M1.neighbours(7.0), (Some(6.0), None));
    /// assert_eq!(Format::E5M2.neighbours(1e9), (Some(57344.0), Some(f64::INFINITY)));
    /// ```
    #[must_use]
    pub const fn neighbours(self, x: f64) -> (Option<f64>, Option<f64>) {
        if x.is_nan() {
            return (None, None);
        }
        (self.at_rank(self.rank_above(x) - 1), self.at_rank(self.rank_from(x)))
    }

    /// The smallest value of the format greater than `x`; `None` where there is none, and for NaN.
    #[must_use]
    pub const fn next_up(self, x: f64) -> Option<f64> {
        if x.is_nan() { None } else { self.at_rank(self.rank_above(x)) }
    }

    /// The largest value of the format less than `x`; `None` where there is none, and for NaN.
    #[must_use]
    pub const fn next_down(self, x: f64) -> Option<f64> {
        if x.is_nan() { None } else { self.at_rank(self.rank_from(x) - 1) }
    }

    /// Number of values from zero (or code 0) up, infinity included.
    const fn ranks(self) -> i32 {
        self.max_code() as i32 + 1 + self.has_infinity() as i32
    }

    /// The value at a place in the ascending list of values: code 0 has rank 0, negative values negative ranks, and the
    /// two zeros are one value.
    const fn at_rank(self, rank: i32) -> Option<f64> {
        if rank < self.lowest_rank() || rank >= self.ranks() {
            None
        } else if rank >= 0 {
            Some(self.value(rank as u16))
        } else {
            let code = -rank - !self.zero as i32;
            Some(self.value(self.sign_mask() | code as u16))
        }
    }

    const fn lowest_rank(self) -> i32 {
        if self.signed { self.zero as i32 - self.ranks() } else { 0 }
    }

    /// Rank of the first value `>= x`.
    const fn rank_from(self, x: f64) -> i32 {
        let (mut low, mut high) = (self.lowest_rank(), self.ranks());
        while low < high {
            let middle = low + (high - low) / 2;
            match self.at_rank(middle) {
                Some(value) if value < x => low = middle + 1,
                _ => high = middle,
            }
        }
        low
    }

    /// Rank of the first value `> x`.
    const fn rank_above(self, x: f64) -> i32 {
        let rank = self.rank_from(x);
        match self.at_rank(rank) {
            Some(value) if value == x => rank + 1,
            _ => rank,
        }
    }

    /// The name of a named format.
    #[must_use]
    pub fn name(self) -> Option<&'static str> {
        Self::NAMED.iter().find(|(_, format)| *format == self).map(|(name, _)| *name)
    }
}

/// `significand * 2^exponent`, exactly: the builder keeps every value in the normal range of f64.
const fn exact(significand: u64, exponent: i32) -> f64 {
    significand as f64 * f64::from_bits(((exponent + 1023) as u64) << 52)
}

impl fmt::Display for Format {
    /// The name, or for an unnamed format its name by the same rule with what is not the default: `E3M4`,
    /// `UE3M3(bias 5, no zero)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(name) = self.name() {
            return f.pad(name);
        }
        let sign = if self.signed { "" } else { "U" };
        write!(f, "{sign}E{}M{}(bias {}, ", self.exponent_bits, self.fraction_bits, self.bias)?;
        f.write_str(match self.specials {
            Specials::Ieee => "IEEE specials",
            Specials::NanOnly => "NaN only",
            Specials::Finite => "numbers only",
        })?;
        f.write_str(if self.zero { ")" } else { ", no zero)" })
    }
}

impl fmt::Debug for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Error of reading a format's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown format `{0}`, expected one of bf16, fp16 (f16), e5m2, e4m3, ue5m3, ue4m4, e8m0, e3m2, e2m3, e2m1, ue2m2, ue2m2nz"
)]
pub struct ParseFormatError(String);

impl FromStr for Format {
    type Err = ParseFormatError;

    /// Reads a name of [`Format::NAMED`] in any case; `f16` is FP16.
    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let known = if name.eq_ignore_ascii_case("f16") { "FP16" } else { name };
        let found = Self::NAMED.iter().find(|(named, _)| named.eq_ignore_ascii_case(known));
        found.map(|(_, format)| *format).ok_or_else(|| ParseFormatError(name.into()))
    }
}

/// A format in the making; see [`Format::builder`].
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct FormatBuilder {
    exponent_bits: u8,
    fraction_bits: u8,
    bias: Option<i32>,
    signed: bool,
    zero: bool,
    specials: Specials,
    negative: Negative,
}

impl FormatBuilder {
    /// Sets the exponent bias.
    pub const fn bias(self, bias: i32) -> Self {
        Self { bias: Some(bias), ..self }
    }

    /// Drops the sign bit.
    pub const fn unsigned(self) -> Self {
        Self { signed: false, ..self }
    }

    /// Reads code 0 as half of code 1, so that the format has no zero.
    pub const fn without_zero(self) -> Self {
        Self { zero: false, ..self }
    }

    /// Says which codes are not numbers.
    pub const fn specials(self, specials: Specials) -> Self {
        Self { specials, ..self }
    }

    /// Says what a negative source becomes in an unsigned format.
    pub const fn negative(self, negative: Negative) -> Self {
        Self { negative, ..self }
    }

    /// Checks the description.
    ///
    /// # Errors
    /// [`FormatError`] names the argument that does not fit: no exponent bit, more than 16 bits in all, IEEE specials
    /// without a fraction bit, no normal number left, a value outside the range of f64, a sign in a format without zero,
    /// or negatives that should become a NaN the format does not have.
    pub const fn build(self) -> Result<Format, FormatError> {
        let (exponent_bits, fraction_bits) = (self.exponent_bits, self.fraction_bits);
        if exponent_bits == 0 {
            return Err(FormatError::NoExponent);
        }
        let bits = exponent_bits as u32 + fraction_bits as u32 + self.signed as u32;
        if bits > 16 {
            return Err(FormatError::TooWide { bits });
        }
        if matches!(self.specials, Specials::Ieee) && fraction_bits == 0 {
            return Err(FormatError::NoFractionForNan);
        }
        if self.signed && !self.zero {
            return Err(FormatError::SignedWithoutZero);
        }
        if matches!(self.negative, Negative::Nan) && (self.signed || matches!(self.specials, Specials::Finite)) {
            return Err(FormatError::NegativeNan);
        }
        let bias = match self.bias {
            Some(bias) => bias,
            None => (1 << (exponent_bits - 1)) - 1,
        };
        // Beyond +-2^14 no exponent of up to 16 bits fits f64 either way, and the sums below stay far from overflow.
        if bias < -(1 << 14) || bias > 1 << 14 {
            return Err(FormatError::OutOfRange { bias });
        }
        let Self { signed, zero, specials, negative, .. } = self;
        let format = Format { exponent_bits, fraction_bits, bias: bias as i16, signed, zero, specials, negative };
        if format.max_code() >> fraction_bits == 0 {
            return Err(FormatError::NoNormal);
        }
        let largest = (format.max_code() >> fraction_bits) as i32 - bias;
        if largest > 1023 || format.min_quantum_exponent() - (!zero as i32) < -1022 {
            return Err(FormatError::OutOfRange { bias });
        }
        Ok(format)
    }
}

/// What is wrong with the description of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// No exponent bit.
    #[error("exponent_bits: expected at least 1, got 0")]
    NoExponent,
    /// More than 16 bits.
    #[error("exponent_bits + fraction_bits + sign: expected at most 16 bits, got {bits}")]
    TooWide {
        /// The width asked for.
        bits: u32,
    },
    /// IEEE specials need a fraction bit to tell infinity from NaN.
    #[error("specials: `Ieee` needs at least 1 fraction bit to tell infinity from NaN, got 0")]
    NoFractionForNan,
    /// Nothing but zero, subnormals and specials is left.
    #[error("exponent_bits: expected at least one normal number besides zero and the specials, got none")]
    NoNormal,
    /// A signed format needs a zero: half of code 1 on either side would leave no sign for zero.
    #[error("without_zero: expected an unsigned format, got a signed one")]
    SignedWithoutZero,
    /// `Negative::Nan` asks for an unsigned format that has a NaN.
    #[error("negative: `Nan` needs an unsigned format with a NaN")]
    NegativeNan,
    /// A value is no normal f64, the type in which values are reported.
    #[error("bias: expected every value within 2^-1022 and 2^1024 (the normal range of f64), got bias {bias}")]
    OutOfRange {
        /// The bias asked for.
        bias: i32,
    },
}
