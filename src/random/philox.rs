//! Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers, as easy as 1, 2, 3; SC 2011).

/// Philox4x32 with ten rounds: four words from a 128-bit counter and a 64-bit key, words lowest first.
///
/// ```
/// use halfulp::random::philox4x32_10;
/// assert_eq!(philox4x32_10([0; 4], [0; 2]), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]);
/// ```
#[inline(always)]
#[must_use]
pub const fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    let [mut k0, mut k1] = key;
    let mut round = 0;
    while round < 10 {
        let p0 = 0xD251_1F53 * c0 as u64;
        let p1 = 0xCD9E_8D57 * c2 as u64;
        (c0, c1, c2, c3) = ((p1 >> 32) as u32 ^ c1 ^ k0, p1 as u32, (p0 >> 32) as u32 ^ c3 ^ k1, p0 as u32);
        k0 = k0.wrapping_add(0x9E37_79B9);
        k1 = k1.wrapping_add(0xBB67_AE85);
        round += 1;
    }
    [c0, c1, c2, c3]
}

/// The stream of that name: two 64-bit words a counter. The counter is (block of two groups, step), the key the first
/// two words over (tensor, role, 1) under the seed; stream 1 derives its own under a last word of 0.
#[derive(Clone, Copy, Debug)]
pub(super) struct Philox {
    key: [u32; 2],
    step: [u32; 2],
}

impl Philox {
    pub(super) const fn new(seed: u64, step: u64, tensor: u64, role: u32) -> Self {
        let counter = [tensor as u32, (tensor >> 32) as u32, role, 1];
        let [k0, k1, _, _] = philox4x32_10(counter, [seed as u32, (seed >> 32) as u32]);
        Self { key: [k0, k1], step: [step as u32, (step >> 32) as u32] }
    }

    fn block(self, block: u64) -> [u64; 2] {
        let [s0, s1] = self.step;
        let [a, b, c, d] = philox4x32_10([block as u32, (block >> 32) as u32, s0, s1], self.key);
        [u64::from(a) | u64::from(b) << 32, u64::from(c) | u64::from(d) << 32]
    }

    /// Words of consecutive groups from `group`.
    #[inline(always)]
    pub(super) fn fill(self, group: u64, words: &mut [u64]) {
        let head = words.len().min((group & 1) as usize);
        if head == 1 {
            words[0] = self.block(group >> 1)[1];
        }
        let first = group.div_ceil(2);
        for (pair, block) in words[head..].chunks_mut(2).zip(first..) {
            let both = self.block(block);
            pair.copy_from_slice(&both[..pair.len()]);
        }
    }
}
