//! Stream 1.

use super::philox::philox4x32_10;

/// The keys of stream 1 for one tensor, step, role and run of 2^32 groups.
///
/// A group is a 64-bit word: four 16-bit draws or two 32-bit ones, lowest bits first. With `t` the first two words of
/// Philox4x32-10 over the tensor under the seed, the keys are five words of Philox4x32-10 over (step, high half of the
/// group, role) under `t`. For fixed keys the map from group to word is injective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keys([u32; 5]);

/// Philox2x32's multiplier.
const MULTIPLIER: u64 = 0xD256_D193;
/// The Weyl increment, 2^32 over the golden ratio, odd.
const WEYL: u32 = 0x9E37_79B1;

const fn halves(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

impl Keys {
    /// The keys of the groups whose high half is `high`. `role` is a [role's number](super::Role::number), plus 32 for
    /// 32-bit draws.
    #[must_use]
    pub const fn new(seed: u64, step: u64, tensor: u64, role: u32, high: u32) -> Self {
        let ([t0, t1], [s0, s1]) = (halves(tensor), halves(step));
        let [t0, t1, _, _] = philox4x32_10([t0, t1, 0, 0], halves(seed));
        let [k0, k1, k2, k3] = philox4x32_10([s0, s1, high, role << 1], [t0, t1]);
        let [k4, ..] = philox4x32_10([s0, s1, high, role << 1 | 1], [t0, t1]);
        Self([k0, k1, k2, k3, k4])
    }

    /// The five key words.
    #[must_use]
    pub const fn words(self) -> [u32; 5] {
        self.0
    }

    /// The word of the group with low half `group`: `x0` in its low half, `x1` in its high half.
    #[inline(always)]
    #[must_use]
    pub const fn word(self, group: u32) -> u64 {
        self.rounds(group as u64, group.wrapping_mul(WEYL).wrapping_add(self.0[0]) as u64)
    }

    /// The four rounds. Both words are kept in 64 bits whose high halves do not matter until the end, so that a round is a
    /// widening multiplication, a shift and an exclusive or.
    #[inline(always)]
    const fn rounds(self, mut x1: u64, mut x0: u64) -> u64 {
        const LOW: u64 = u32::MAX as u64;
        let [_, keys @ ..] = self.0;
        let mut round = 0;
        while round < 4 {
            let product = (x0 & LOW) * MULTIPLIER;
            x0 = product >> 32 ^ x1 ^ keys[round] as u64;
            x1 = product;
            round += 1;
        }
        x0 & LOW | x1 << 32
    }

    /// Words of consecutive groups from `group`; the low half must not wrap on the way.
    #[inline(always)]
    pub(super) fn fill(self, group: u32, words: &mut [u64]) {
        // Running sums in 64 bits: a product with the index in 32 makes slower SIMD.
        let mut x1 = u64::from(group);
        let mut x0 = u64::from(group.wrapping_mul(WEYL).wrapping_add(self.0[0]));
        for word in words {
            *word = self.rounds(x1, x0);
            x1 = x1.wrapping_add(1);
            x0 = x0.wrapping_add(WEYL.into());
        }
    }
}

/// The id of a tensor known by name: FNV-1a 64 of its UTF-8 bytes.
#[must_use]
pub const fn tensor_id(name: &str) -> u64 {
    let mut hash = 0xCBF2_9CE4_8422_2325u64;
    let bytes = name.as_bytes();
    let mut i = 0;
    while i < bytes.len() {
        hash = (hash ^ bytes[i] as u64).wrapping_mul(0x0000_0100_0000_01B3);
        i += 1;
    }
    hash
}
