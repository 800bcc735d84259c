//! [`Format::value`] without branches, which compilers turn into SIMD.
#![cfg_attr(not(feature = "std"), allow(dead_code, reason = "optimizers alone read this way"))]

use super::Format;

/// A format of at most 8 bits, all of whose values are normal numbers of f32 (or 0), as constants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decoder {
    /// From the fraction of a code to that of an f32.
    shift: u32,
    magnitude_mask: u32,
    max_code: u32,
    first_normal: u32,
    /// The value of code 0.
    at_0: f32,
    sign_mask: u32,
    sign_shift: u32,
    /// What is added to the exponent of a normal code.
    rebias: u32,
}

impl Decoder {
    pub(crate) const fn new(format: Format) -> Self {
        Self {
            shift: 23 - format.fraction_bits(),
            magnitude_mask: format.magnitude_mask() as u32,
            max_code: format.max_code() as u32,
            first_normal: 1 << format.fraction_bits(),
            at_0: format.value(0) as f32,
            sign_mask: format.sign_mask() as u32,
            sign_shift: 32 - format.bits(),
            rebias: ((127 - format.bias()) as u32) << 23,
        }
    }

    /// The value of a code; NaN, without its sign, for infinities too.
    #[inline(always)]
    pub(crate) fn value(&self, code: u8) -> f32 {
        let code = u32::from(code);
        let magnitude = code & self.magnitude_mask;
        let bits = (magnitude << self.shift) + self.rebias;
        let normal = f32::from_bits(bits);
        // With one more in the exponent a subnormal has a hidden bit, which is taken off.
        let hidden = self.rebias + (1 << 23);
        let subnormal = f32::from_bits((magnitude << self.shift) + hidden) - f32::from_bits(hidden);
        let absolute = if magnitude < self.first_normal { subnormal } else { normal };
        let absolute = if magnitude == 0 { self.at_0 } else { absolute };
        let signed = f32::from_bits(absolute.to_bits() | (code & self.sign_mask) << self.sign_shift);
        if magnitude > self.max_code { f32::NAN } else { signed }
    }
}
