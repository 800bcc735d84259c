//! The counter hash of `sr-states` 0.1.0.

use super::{Draws, Generator, Sealed, Width, Words};

/// The 32-bit finalizer that `sr-states` applies to `index + offset + seed`: a bijection of 32-bit words that maps 0 to 0.
#[inline(always)]
#[must_use]
pub const fn sr_states_hash(counter: u32) -> u32 {
    let mut x = counter ^ counter >> 16;
    x = x.wrapping_mul(0x7FEB_352D);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846C_A68B);
    x ^ x >> 16
}

/// The random words of the Python package `sr-states` 0.1.0, bit for bit, to compare with it or continue one of its runs.
///
/// The word of element `i` is [`sr_states_hash`] of `i + offset + seed` mod 2^32; BF16 takes its low 16 bits. (The package
/// rounds to BF16 alone; every other target here takes the whole word.) There is no tensor and no step: a caller moves the
/// offset on, as the package does (by `n` for SGD with momentum, by `2n` for AdamW, whose first moment draws at `offset + i`
/// and second at `offset + n + i`).
///
/// Its limits, which the default stream does not have:
/// - the counter wraps at 2^32: at 16,777,216 parameters every element sees the same 128 words for ever, and small
///   updates never arrive at most elements;
/// - seed, offset and index are added: seeds 7 and 8 are one stream, one element apart;
/// - words of adjacent counters are correlated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use]
pub struct SrStates {
    start: u32,
}

impl SrStates {
    /// The stream of a seed, at offset 0. Seeds are equal mod 2^32.
    pub const fn seeded(seed: u64) -> Self {
        Self { start: seed as u32 }
    }

    /// Moves on by `n` counters.
    pub const fn advanced(self, n: u64) -> Self {
        Self { start: self.start.wrapping_add(n as u32) }
    }
}

impl Draws for SrStates {}

impl Sealed for SrStates {
    type Generator = SrStatesGenerator;
    fn generator(&self, width: Width) -> SrStatesGenerator {
        SrStatesGenerator { start: self.start, width }
    }
}

#[doc(hidden)]
#[derive(Clone, Debug)]
pub struct SrStatesGenerator {
    start: u32,
    width: Width,
}

impl Generator for SrStatesGenerator {
    #[inline(always)]
    fn fill<'a>(&mut self, index: u64, count: usize, words: &'a mut Words) -> (&'a [u64], usize) {
        let start = self.start.wrapping_add(index as u32);
        let length = count.div_ceil(1 << self.width.shift());
        let words = &mut words.0[..length];
        match self.width {
            Width::Bits16 => {
                for (draw, j) in bytemuck::cast_slice_mut::<u64, u16>(words).iter_mut().zip(0..) {
                    *draw = sr_states_hash(start.wrapping_add(j)) as u16;
                }
            }
            Width::Bits32 => {
                for (draw, j) in bytemuck::cast_slice_mut::<u64, u32>(words).iter_mut().zip(0..) {
                    *draw = sr_states_hash(start.wrapping_add(j));
                }
            }
        }
        (words, 0)
    }
}
