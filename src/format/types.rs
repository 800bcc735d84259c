//! Storage types: one transparent byte a code, in the manner of `half::bf16`.

use core::cmp::Ordering;
use core::fmt;

use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};

use super::Format;
use crate::round::{Mode, Overflow, Source, round};

mod sealed {
    pub trait Sealed {}
    impl Sealed for half::bf16 {}
    impl Sealed for half::f16 {}
}

/// A storage type of a format: `half::bf16`, `half::f16`, and the types of this module.
///
/// Sealed: a type promises that its bytes are codes of its format. A format of one's own is cast through
/// [`Cast::into_codes`](crate::cast::Cast::into_codes).
pub trait Element:
    sealed::Sealed + Pod + Send + Sync + PartialEq + PartialOrd + fmt::Debug + fmt::Display + 'static
{
    /// The format whose codes the type holds.
    const FORMAT: Format;
    /// The unsigned integer of the same width.
    type Code: crate::cast::Code;
    /// The code, in the low bits.
    #[must_use]
    fn code(self) -> u16;
    /// The element with this code; bits above the width of the format are ignored.
    #[must_use]
    fn from_code(code: u16) -> Self;
    /// The value, exactly.
    #[must_use]
    fn value(self) -> f32;
}

/// A storage type of 4 or 6 bits, which [`PackedVec`](super::PackedVec) stores without gaps.
pub trait SubByte: Element<Code = u8> {}

impl Element for bf16 {
    const FORMAT: Format = Format::BF16;
    type Code = u16;
    fn code(self) -> u16 {
        self.to_bits()
    }
    fn from_code(code: u16) -> Self {
        Self::from_bits(code)
    }
    fn value(self) -> f32 {
        self.to_f32()
    }
}

impl Element for f16 {
    const FORMAT: Format = Format::FP16;
    type Code = u16;
    fn code(self) -> u16 {
        self.to_bits()
    }
    fn from_code(code: u16) -> Self {
        Self::from_bits(code)
    }
    fn value(self) -> f32 {
        self.to_f32()
    }
}

macro_rules! storage_type {
    ($(#[$doc:meta])* $name:ident = $format:ident, one $one:literal $(, signed $neg:tt)? $(, nan $nan:literal)? $(, infinity $inf:literal)? $(, packed $packed:tt)?) => {
        $(#[$doc])*
        ///
        /// One byte a value, the code in its low bits; bits above the code are ignored. Comparison is by value: NaN is
        /// unordered and `-0 == 0`.
        #[derive(Clone, Copy, Default, Pod, Zeroable)]
        #[repr(transparent)]
        pub struct $name(u8);

        impl $name {
            /// The format.
            pub const FORMAT: Format = Format::$format;
            const MASK: u8 = (Self::FORMAT.code_count() - 1) as u8;
            /// Largest finite value.
            pub const MAX: Self = Self(Self::FORMAT.max_code() as u8);
            /// Smallest positive value.
            pub const MIN_POSITIVE: Self = Self(Self::FORMAT.has_zero() as u8);
            /// Smallest positive normal value.
            pub const MIN_POSITIVE_NORMAL: Self = Self(1 << Self::FORMAT.fraction_bits());
            /// The value of code 0: zero, or the smallest value of a format without a zero.
            pub const ZERO: Self = Self(0);
            /// The value 1.
            pub const ONE: Self = Self($one);
            $(
                /// Most negative finite value.
                pub const MIN: Self = Self(Self::MAX.0 | $neg);
            )?
            $(
                /// The canonical NaN.
                pub const NAN: Self = Self($nan);
            )?
            $(
                /// Positive infinity.
                pub const INFINITY: Self = Self($inf);
                /// Negative infinity.
                pub const NEG_INFINITY: Self = Self($inf | 0x80);
            )?

            /// The value with this code; bits above the width of the format are dropped.
            #[must_use]
            pub const fn from_bits(bits: u8) -> Self {
                Self(bits & Self::MASK)
            }

            /// The code.
            #[must_use]
            pub const fn to_bits(self) -> u8 {
                self.0 & Self::MASK
            }

            /// Rounds to nearest, ties to the even code, with the format's default overflow
            /// ([`Overflow::of`](crate::round::Overflow::of)): infinity where there is one, else the largest value. NaN stays NaN where
            /// the format has one and becomes the largest value elsewhere; in an unsigned format a negative value
            /// becomes code 0 (NaN in E8M0). Subnormals are rounded like any other value.
            #[must_use]
            pub const fn from_f32(x: f32) -> Self {
                Self(crate::round::round_f32(x, Self::FORMAT, Mode::NearestEven, Overflow::of(Self::FORMAT)) as u8)
            }

            /// As [`from_f32`](Self::from_f32), with one rounding from the f64.
            #[must_use]
            pub const fn from_f64(x: f64) -> Self {
                Self(crate::round::round_f64(x, Self::FORMAT, Mode::NearestEven, Overflow::of(Self::FORMAT)) as u8)
            }

            /// Rounds with any mode and overflow policy; see [`round`](crate::round::round).
            #[must_use]
            pub fn rounded(x: impl Source, mode: Mode, overflow: Overflow) -> Self {
                Self(round(x, Self::FORMAT, mode, overflow) as u8)
            }

            /// The value, exactly.
            #[must_use]
            pub const fn to_f32(self) -> f32 {
                TABLES.$name[self.to_bits() as usize]
            }

            /// The value, exactly.
            #[must_use]
            pub const fn to_f64(self) -> f64 {
                Self::FORMAT.value(self.to_bits() as u16)
            }

            /// Whether the value is NaN.
            #[must_use]
            pub const fn is_nan(self) -> bool {
                self.to_f32().is_nan()
            }

            /// Whether the value is neither infinite nor NaN.
            #[must_use]
            pub const fn is_finite(self) -> bool {
                self.to_f32().is_finite()
            }

            /// A total order: by value, -0 before 0, negative NaN first and positive NaN last.
            #[must_use]
            pub fn total_cmp(&self, other: &Self) -> Ordering {
                self.to_f32().total_cmp(&other.to_f32())
            }
        }

        impl sealed::Sealed for $name {}

        impl Element for $name {
            const FORMAT: Format = Format::$format;
            type Code = u8;
            fn code(self) -> u16 {
                u16::from(self.to_bits())
            }
            fn from_code(code: u16) -> Self {
                Self::from_bits(code as u8)
            }
            fn value(self) -> f32 {
                self.to_f32()
            }
        }

        $(
            impl SubByte for $name {}
            const _: u32 = $packed;
        )?

        impl PartialEq for $name {
            fn eq(&self, other: &Self) -> bool {
                self.to_f32() == other.to_f32()
            }
        }

        impl PartialOrd for $name {
            fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
                self.to_f32().partial_cmp(&other.to_f32())
            }
        }

        impl From<$name> for f32 {
            fn from(x: $name) -> Self {
                x.to_f32()
            }
        }

        impl From<$name> for f64 {
            fn from(x: $name) -> Self {
                x.to_f64()
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.to_f32(), f)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.to_f32(), f)
            }
        }
    };
}

storage_type! {
    /// OCP E4M3: 448 the largest, no infinity.
    /// ```
    /// use halfulp::E4M3;
    /// assert_eq!(E4M3::from_f32(4.25).to_f32(), 4.0);
    /// assert_eq!(E4M3::from_f32(1e9), E4M3::MAX); // saturates: there is no infinity
    /// assert!(E4M3::from_f32(f32::NAN).is_nan());
    /// ```
    E4M3 = E4M3, one 0x38, signed 0x80, nan 0x7F
}
storage_type! {
    /// OCP E5M2: 57,344 the largest finite value, infinities.
    /// ```
    /// use halfulp::E5M2;
    /// assert_eq!(E5M2::from_f32(61_439.0), E5M2::MAX);
    /// assert_eq!(E5M2::from_f32(61_440.0), E5M2::INFINITY);
    /// ```
    E5M2 = E5M2, one 0x3C, signed 0x80, nan 0x7E, infinity 0x7C
}
storage_type! {
    /// OCP MX E3M2, 6 bits: 28 the largest value, every code a number.
    E3M2 = E3M2, one 0x0C, signed 0x20, packed 6
}
storage_type! {
    /// OCP MX E2M3, 6 bits: 7.5 the largest value, every code a number.
    E2M3 = E2M3, one 0x08, signed 0x20, packed 6
}
storage_type! {
    /// OCP MX E2M1, 4 bits: 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives.
    E2M1 = E2M1, one 0x2, signed 0x8, packed 4
}
storage_type! {
    /// Unsigned E2M2, 4 bits: 0, .25, .5, ... 7.
    UE2M2 = UE2M2, one 0x4, packed 4
}
storage_type! {
    /// Unsigned E2M2 without a zero, 4 bits: code 0 is .125.
    UE2M2Nz = UE2M2NZ, one 0x4, packed 4
}
storage_type! {
    /// Unsigned E5M3: 2^-17 to 114,688, NaN 0xFF.
    UE5M3 = UE5M3, one 0x78, nan 0xFF
}
storage_type! {
    /// Unsigned E4M4: 2^-10 to 480, NaN 0xFF.
    UE4M4 = UE4M4, one 0x70, nan 0xFF
}
storage_type! {
    /// OCP MX E8M0: the powers of two from 2^-127 to 2^127, NaN 0xFF; a scale rather than a number, for it has no zero.
    /// ```
    /// use halfulp::E8M0;
    /// assert_eq!(E8M0::from_f32(3.0).to_f32(), 2.0); // a tie: the code of 2 is even
    /// assert_eq!(E8M0::from_f32(0.0).to_f64(), 2f64.powi(-127));
    /// assert!(E8M0::from_f32(-1.0).is_nan());
    /// ```
    E8M0 = E8M0, one 0x7F, nan 0xFF
}

/// Values of the codes, one array a type, computed from the descriptors at compile time.
#[allow(non_snake_case, reason = "fields are named after the types")]
struct Tables {
    E4M3: [f32; 256],
    E5M2: [f32; 256],
    E3M2: [f32; 64],
    E2M3: [f32; 64],
    E2M1: [f32; 16],
    UE2M2: [f32; 16],
    UE2M2Nz: [f32; 16],
    UE5M3: [f32; 256],
    UE4M4: [f32; 256],
    E8M0: [f32; 256],
}

static TABLES: Tables = Tables {
    E4M3: table(Format::E4M3),
    E5M2: table(Format::E5M2),
    E3M2: table(Format::E3M2),
    E2M3: table(Format::E2M3),
    E2M1: table(Format::E2M1),
    UE2M2: table(Format::UE2M2),
    UE2M2Nz: table(Format::UE2M2NZ),
    UE5M3: table(Format::UE5M3),
    UE4M4: table(Format::UE4M4),
    E8M0: table(Format::E8M0),
};

const fn table<const N: usize>(format: Format) -> [f32; N] {
    let mut values = [0.0; N];
    let mut code = 0;
    while code < N {
        values[code] = value_f32(format, code as u16);
        code += 1;
    }
    values
}

/// The value of a code as f32, exact wherever the value is an f32; a NaN has the code's sign and the quiet bit alone.
pub(crate) const fn value_f32(format: Format, code: u16) -> f32 {
    let value = format.value(code);
    if value.is_nan() { f32::from_bits(0x7FC0_0000 | (value.to_bits() >> 63 << 31) as u32) } else { value as f32 }
}
