//! Which numbers exist: one descriptor per format, its storage type, packed slices, blocks that share a scale.
//!
//! A format is data. [`Format`] says how many exponent and fraction bits a code has, its exponent bias, whether it has a
//! sign, which codes are not numbers, and whether code 0 is zero. Everything else (largest value, ulp, neighbours, every
//! code's value) is computed from that, and so are the storage types ([`E4M3`], [`UE4M4`], ...) and their documentation.
//!
//! | name | bits | bias | specials | smallest / smallest normal / largest |
//! |---|---|---|---|---|
//! | BF16 | 1+8+7 | 127 | infinity, NaN | 2^-133 / 2^-126 / 3.39e38 |
//! | FP16 | 1+5+10 | 15 | infinity, NaN | 2^-24 / 2^-14 / 65,504 |
//! | E5M2 | 1+5+2 | 15 | infinity, NaN | 2^-16 / 2^-14 / 57,344 |
//! | E4M3 | 1+4+3 | 7 | NaN (0x7F, 0xFF), no infinity | 2^-9 / 2^-6 / 448 |
//! | E3M2 | 1+3+2 | 3 | none | 2^-4 / 2^-2 / 28 |
//! | E2M3 | 1+2+3 | 1 | none | 2^-3 / 1 / 7.5 |
//! | E2M1 | 1+2+1 | 1 | none | 0.5 / 1 / 6 |
//! | UE5M3 | 5+3 | 15 | NaN (0xFF), no infinity | 2^-17 / 2^-14 / 114,688 |
//! | UE4M4 | 4+4 | 7 | NaN (0xFF), no infinity | 2^-10 / 2^-6 / 480 |
//! | UE2M2 | 2+2 | 1 | none | 0.25 / 1 / 7 |
//! | UE2M2Nz | 2+2 | 1 | none; code 0 is 0.125, there is no zero | 0.125 / 1 / 7 |
//! | E8M0 | 8+0 | 127 | NaN (0xFF); code 0 is 2^-127, there is no zero | 2^-127 / 2^-126 / 2^127 |
//!
//! E4M3, E5M2, E3M2, E2M3, E2M1 and E8M0 are those of the OCP 8-bit floating point (2023) and microscaling (MX 1.0)
//! specifications. The unsigned formats spend the sign bit of a second moment, which is never negative.

mod block;
mod decoder;
mod descriptor;
mod packed;
mod scale;
mod types;

pub use block::{BlockError, BlockFormat, BlockScale, BlockVec, Scales};
#[cfg(feature = "std")]
pub(crate) use decoder::Decoder;
pub use descriptor::{Format, FormatBuilder, FormatError, Negative, ParseFormatError, Specials};
pub use packed::{PackedError, PackedVec};
pub(crate) use packed::{pack, unpack};
pub use scale::power_of_two_scale;
pub use types::{E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, Element, SubByte, UE2M2, UE2M2Nz, UE4M4, UE5M3};
