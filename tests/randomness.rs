//! Statistics of the streams. Each test is a function of a source of words: distances, in standard errors, from what
//! independent uniform words give. The streams must stay within the bound; a wrong source of the kind the test is for
//! must not. Seeds are fixed, so every outcome is too; `--nocapture` shows the distances.

use std::iter::repeat_n;
use std::ops::Range;

use halfulp::random::{Draws, Keys, Role, SrStates, Stream, sr_states_hash};
use halfulp::{Draw, bf16, sr_cast};

/// Standard errors that a stream may be off, the worst of some dozens of statistics.
const BOUND: f64 = 5.0;
/// The same for counts of common words.
const WIDE: f64 = 6.0;

/// The largest of some distances.
fn worst(z: impl IntoIterator<Item = f64>) -> f64 {
    z.into_iter().map(f64::abs).fold(0.0, f64::max)
}

/// The distance of a count from that of `n` trials of probability `p`.
fn binomial(count: usize, n: usize, p: f64) -> f64 {
    (count as f64 - n as f64 * p) / (n as f64 * p * (1.0 - p)).sqrt()
}

#[track_caller]
fn holds(what: &str, z: f64, bound: f64) {
    println!("{what}: {z:.2}");
    assert!(z < bound, "{what}: {z:.2} standard errors");
}

#[track_caller]
fn is_caught(what: &str, z: f64, bound: f64) {
    println!("{what}: {z:.2}, caught");
    assert!(z > bound, "{what} passes with {z:.2} standard errors");
}

fn streams(seed: u64) -> [(&'static str, Draw); 2] {
    [("V1", Draw::seeded(seed)), ("Philox", Draw::seeded(seed).stream(Stream::Philox))]
}

// Adjacent words.

/// Chi-square of the disjoint pairs of neighbours in a sequence of bytes: pairs from even places, and from odd ones.
fn pairs(bytes: &[u8]) -> [f64; 2] {
    [0, 1].map(|parity| {
        let pairs = bytes[parity..].as_chunks().0;
        let mut counts = vec![0u32; 1 << 16];
        for &pair in pairs {
            counts[usize::from(u16::from_le_bytes(pair))] += 1;
        }
        let (n, cells) = (pairs.len() as f64, counts.len() as f64);
        let squares: f64 = counts.iter().map(|&c| f64::from(c).powi(2)).sum();
        let freedom = cells - 1.0;
        (squares * cells / n - n - freedom) / (2.0 * freedom * (1.0 - 1.0 / n)).sqrt()
    })
}

/// Neighbours at each byte of the words.
fn word_pairs(words: &[u64]) -> f64 {
    worst((0..8).flat_map(|k| pairs(&words.iter().map(|word| (word >> (8 * k)) as u8).collect::<Vec<_>>())))
}

/// Neighbours among 16-bit draws: their low bytes, their high bytes.
fn draw_pairs(words: &[u64]) -> f64 {
    let draws: &[u16] = bytemuck::cast_slice(words);
    worst([0, 8].into_iter().flat_map(|k| pairs(&draws.iter().map(|draw| (draw >> k) as u8).collect::<Vec<_>>())))
}

/// The words of consecutive groups of four 16-bit draws.
fn elements(draws: impl Draws, count: usize) -> Vec<u64> {
    let mut words = vec![0; count];
    draws.fill16(0, bytemuck::cast_slice_mut(&mut words));
    words
}

/// One group at consecutive steps.
fn steps<D: Draws>(at_step: impl Fn(u64) -> D, count: usize) -> Vec<u64> {
    let mut words = vec![0; count];
    for (word, step) in words.iter_mut().zip(0..) {
        at_step(step).fill16(40, bytemuck::cast_slice_mut(std::slice::from_mut(word)));
    }
    words
}

/// The mixer of stream 1 with fewer rounds.
fn short(rounds: usize, keys: Keys, group: u32) -> u64 {
    let [start, keys @ ..] = keys.words();
    let (mut x0, mut x1) = (group.wrapping_mul(0x9E37_79B1).wrapping_add(start), group);
    for key in &keys[..rounds] {
        let product = u64::from(x0) * 0xD256_D193;
        (x0, x1) = ((product >> 32) as u32 ^ x1 ^ key, product as u32);
    }
    u64::from(x0) | u64::from(x1) << 32
}

#[test]
fn neighbours_are_independent() {
    for (name, draw) in streams(1) {
        let words = elements(draw, 1 << 23);
        holds(&format!("{name}, words of neighbours"), word_pairs(&words), BOUND);
        holds(&format!("{name}, draws of neighbours"), draw_pairs(&words), BOUND);
        let words = steps(|step| draw.step(step), 1 << 21);
        holds(&format!("{name}, words of successive steps"), word_pairs(&words), BOUND);
    }

    // One round less than stream 1 shows.
    let keys = Keys::new(1, 0, 0, 0, 0);
    for rounds in [2, 3] {
        let words: Vec<u64> = (0..1 << 23).map(|group| short(rounds, keys, group)).collect();
        is_caught(&format!("{rounds} rounds, words of neighbours"), word_pairs(&words), BOUND);
    }
    let sr_states = SrStates::seeded(1);
    is_caught("sr-states, draws of neighbours", draw_pairs(&elements(sr_states, 1 << 22)), BOUND);
    // AdamW over 2^20 elements: the counter comes back after 2048 steps.
    let words = steps(|step| sr_states.advanced(step << 21), 1 << 16);
    is_caught("sr-states, words of successive steps", word_pairs(&words), BOUND);
}

// Words of two streams.

fn draws32(draws: impl Draws, first: u64, count: usize) -> Vec<u32> {
    let mut out = vec![0; count];
    draws.fill32(first, &mut out);
    out
}

/// The pairs of equal words in two sequences, the first sorted; `n * m / 2^32` by chance, and as many is the variance.
fn common_words(sorted: &[u32], mut other: Vec<u32>) -> f64 {
    let p = 0.5f64.powi(32);
    let n = sorted.len() * other.len();
    other.sort_unstable();
    let (mut rest, mut last, mut equal, mut common) = (sorted, None, 0, 0);
    for word in other {
        if last != Some(word) {
            let from = rest.iter().position(|&a| a >= word).unwrap_or(rest.len());
            equal = rest[from..].iter().take_while(|&&a| a == word).count();
            rest = &rest[from + equal..];
            last = Some(word);
        }
        common += equal;
    }
    binomial(common, n, p)
}

#[test]
fn streams_share_no_words() {
    for (((name, draw), (_, next)), n) in streams(7).into_iter().zip(streams(8)).zip([1 << 24, 1 << 22]) {
        let (draw, next) = (draw.step(3).tensor(5), next.step(3).tensor(5));
        let mut sorted = draws32(draw, 0, n);
        sorted.sort_unstable();
        for (what, other) in
            [("seed", next), ("step", draw.step(4)), ("tensor", draw.tensor(6)), ("role", draw.role(Role::Parameter))]
        {
            let z = common_words(&sorted, draws32(other, 0, n));
            holds(&format!("{name}, {n} words in common with another {what}"), z.abs(), WIDE);
        }
    }

    // A key that only moves the index permutes the words of one stream.
    let keys = Keys::new(7, 3, 5, 32, 0);
    let keyed = |key: u32| -> Vec<u32> {
        let halves = |group: u32| {
            let word = keys.word(group ^ key);
            [word as u32, (word >> 32) as u32]
        };
        (0..1 << 21).flat_map(halves).collect()
    };
    let mut sorted = keyed(0x12_3456);
    sorted.sort_unstable();
    is_caught("a key onto the index", common_words(&sorted, keyed(0x0F_EDCB)), WIDE);
}

/// Two sequences of words, place by place: equal words, and agreement at each bit.
fn likeness(a: &[u32], b: &[u32]) -> f64 {
    let mut agree = [0; 32];
    let mut equal = 0;
    for (a, b) in a.iter().zip(b) {
        equal += usize::from(a == b);
        for (bit, agree) in agree.iter_mut().enumerate() {
            *agree += usize::from((a ^ b) >> bit & 1 == 0);
        }
    }
    let n = a.len();
    worst(agree.map(|count| binomial(count, n, 0.5))).max(binomial(equal, n, 0.5f64.powi(32)))
}

#[test]
fn seeds_are_no_shifts() {
    const N: usize = 1 << 20;
    for ((name, draw), (_, next)) in streams(7).into_iter().zip(streams(8)) {
        let z = likeness(&draws32(draw, 1, N), &draws32(next, 0, N));
        holds(&format!("{name}, seed s from element 1 and s + 1 from 0"), z, BOUND);
    }
    let z = likeness(&draws32(SrStates::seeded(7), 1, N), &draws32(SrStates::seeded(8), 0, N));
    is_caught("sr-states, seed s from element 1 and s + 1 from 0", z, BOUND);
}

#[test]
fn indices_do_not_wrap() {
    const N: usize = 1 << 20;
    // One set of keys serves 2^33 draws of 32 bits.
    for far in [32, 33, 34] {
        for (name, draw) in streams(7) {
            let z = likeness(&draws32(draw, 0, N), &draws32(draw, 1 << far, N));
            holds(&format!("{name}, elements from 0 and from 2^{far}"), z, BOUND);
        }
        let draw = SrStates::seeded(7);
        let z = likeness(&draws32(draw, 0, N), &draws32(draw, 1 << far, N));
        is_caught(&format!("sr-states, elements from 0 and from 2^{far}"), z, BOUND);
    }
}

// Decisions.

/// Values that lie `dropped / 2^16` of a BF16 ulp above 1.
fn above_one(dropped: impl IntoIterator<Item = u16>) -> Vec<f32> {
    dropped.into_iter().map(|dropped| f32::from_bits(1.0f32.to_bits() | u32::from(dropped))).collect()
}

/// Which of them are rounded up.
fn ups(x: &[f32], draws: impl Draws) -> Vec<bool> {
    sr_cast::<bf16>(x, draws).into_iter().map(|y| y != bf16::ONE).collect()
}

fn fraction(dropped: u16) -> f64 {
    f64::from(dropped) / 65536.0
}

/// Correlation of two arrays of decisions on the same values: the mean product of standardized decisions, which has
/// standard error `1 / sqrt(n)`.
fn correlation(x: &[f32], a: &[bool], b: &[bool]) -> f64 {
    let mut sum = 0.0;
    for ((x, &a), &b) in x.iter().zip(a).zip(b) {
        let f = fraction(x.to_bits() as u16);
        sum += (f64::from(a) - f) * (f64::from(b) - f) / (f * (1.0 - f));
    }
    sum / (x.len() as f64).sqrt()
}

#[test]
fn decisions_of_roles_and_tensors_are_uncorrelated() {
    let x = above_one((0..1_000_000).map(|i| (i % 15 + 1) as u16 * 4096));
    for (name, draw) in streams(7) {
        let m = ups(&x, draw.role(Role::FirstMoment));
        let v = ups(&x, draw.role(Role::SecondMoment));
        holds(&format!("{name}, decisions for m and v"), correlation(&x, &m, &v).abs(), BOUND);
        let [a, b] = ["layers.0.weight", "layers.1.weight"].map(|name| ups(&x, draw.named(name)));
        holds(&format!("{name}, decisions in two tensors"), correlation(&x, &a, &b).abs(), BOUND);
    }
    // One seed and no offset for every tensor.
    let [a, b] = [(); 2].map(|()| ups(&x, SrStates::seeded(7)));
    is_caught("sr-states, decisions in two tensors", correlation(&x, &a, &b).abs(), BOUND);
}

/// The four joint outcomes of decisions at two fractions.
fn cells(a: &[bool], f: f64, b: &[bool], g: f64) -> f64 {
    let mut counts = [[0; 2]; 2];
    for (&a, &b) in a.iter().zip(b) {
        counts[usize::from(a)][usize::from(b)] += 1;
    }
    let (p, q) = ([1.0 - f, f], [1.0 - g, g]);
    worst([(0, 0), (0, 1), (1, 0), (1, 1)].map(|(i, j)| binomial(counts[i][j], a.len(), p[i] * q[j])))
}

#[test]
fn decisions_of_two_roles_fill_four_cells() {
    const N: usize = 1 << 20;
    const HALF: u16 = 1 << 15;
    // Rounds up when the high 13 bits of the draw are ones.
    const RARE: u16 = 1 << 3;
    for (name, draw) in streams(7) {
        let (draw, other) = (draw.role(Role::Parameter), draw.role(Role::SecondMoment));
        for (d, e) in [(HALF, HALF), (HALF, RARE), (RARE, HALF)] {
            let (a, b) = (ups(&above_one(repeat_n(d, N)), draw), ups(&above_one(repeat_n(e, N)), other));
            let z = cells(&a, fraction(d), &b, fraction(e));
            holds(&format!("{name}, joint decisions of p and v at {d:#x} and {e:#x}"), z, BOUND);
        }
    }

    // Two draws out of one word: the same bits, and bits 0-15 and 12-27.
    let words = draws32(Draw::seeded(7), 0, N);
    for (shift, e) in [(0, HALF), (12, RARE)] {
        let a: Vec<bool> = words.iter().map(|&word| up(HALF, word as u16)).collect();
        let b: Vec<bool> = words.iter().map(|&word| up(e, (word >> shift) as u16)).collect();
        let z = cells(&a, fraction(HALF), &b, fraction(e));
        is_caught(&format!("joint decisions on bits from 0 and from {shift} of one word"), z, BOUND);
    }
}

/// The rule of a cast that drops 16 bits.
fn up(dropped: u16, draw: u16) -> bool {
    dropped.checked_add(draw).is_none()
}

/// How many decisions of two launches on the same values differ, `2 f (1 - f)` of them by chance.
fn changed(dropped: u16, a: impl Draws, b: impl Draws) -> f64 {
    let x = above_one(repeat_n(dropped, 1_000_000));
    let count = ups(&x, a).into_iter().zip(ups(&x, b)).filter(|(a, b)| a != b).count();
    let f = fraction(dropped);
    binomial(count, x.len(), 2.0 * f * (1.0 - f)).abs()
}

#[test]
fn every_step_decides_anew() {
    for dropped in [0x3333, 0x8000] {
        for (name, draw) in streams(7) {
            let z = changed(dropped, draw.step(1), draw.step(2));
            holds(&format!("{name}, decisions at {dropped:#x} that change from step 1 to 2"), z, BOUND);
        }
        let constant = SrStates::seeded(0);
        let z = changed(dropped, constant, constant);
        is_caught(&format!("constant noise, decisions at {dropped:#x} that change"), z, BOUND);
    }
}

/// Mean and variance of the displacement, in ulps, of BF16 values after 1000 updates of 0.2 ulp.
fn walk<D: Draws>(at_step: impl Fn(u64) -> D) -> f64 {
    const N: usize = 20_000;
    const STEPS: u64 = 1000;
    const DROPPED: u16 = 0x3333;
    let mut y = vec![bf16::ONE; N];
    let mut x = vec![0.0; N];
    let mut taken_back = vec![0.0; N];
    for step in 0..STEPS {
        for ((x, y), back) in x.iter_mut().zip(&mut y).zip(&mut taken_back) {
            // 64 ulps back, exactly, so that the ulp stays the same.
            if y.to_f32() >= 1.5 {
                *y = bf16::from_f32(y.to_f32() - 0.5);
                *back += 64.0;
            }
            *x = f32::from_bits(y.to_f32().to_bits() | u32::from(DROPPED));
        }
        y = sr_cast(&x, at_step(step));
    }
    let (n, f, steps) = (N as f64, fraction(DROPPED), STEPS as f64);
    let moved = y.iter().zip(taken_back).map(|(y, back)| back + (y.to_f64() - 1.0) * 128.0 - f * steps);
    let (sum, squares) = moved.fold((0.0, 0.0), |(sum, squares), d| (sum + d, squares + d * d));
    // Binomial: the fourth central moment is variance * (1 + 3 (steps - 2) f (1 - f)).
    let variance = steps * f * (1.0 - f);
    let fourth = variance * (1.0 + 3.0 * (steps - 2.0) * f * (1.0 - f));
    println!("mean {:.3}, standard deviation {:.3}", sum / n + f * steps, (squares / n).sqrt());
    worst([sum / (n * variance).sqrt(), (squares / n - variance) / ((fourth - variance * variance) / n).sqrt()])
}

#[test]
fn small_updates_add_up() {
    for (name, draw) in streams(7) {
        holds(&format!("{name}, 1000 updates of 0.2 ulp"), walk(|step| draw.step(step)), BOUND);
    }
    is_caught("constant thresholds, 1000 updates of 0.2 ulp", walk(|_| Draw::seeded(7)), BOUND);
}

/// Updates of 0.002 ulp at every 4096th of 2^24 elements: how many have not moved after 1000 and after 10,000 steps.
fn never_moved<R: Fn(u32) -> u16>(at_step: impl Fn(u64) -> R) -> ([usize; 2], f64) {
    const DROPPED: u16 = 131;
    let mut still: Vec<u32> = (0..4096).map(|j| j << 12).collect();
    let mut after = |steps: Range<u64>| {
        for step in steps {
            let draw = at_step(step);
            still.retain(|&i| !up(DROPPED, draw(i)));
        }
        still.len()
    };
    let counts = [after(0..1000), after(1000..10_000)];
    let [a, b] = counts;
    let f = fraction(DROPPED);
    (counts, worst([binomial(a, 4096, (1.0 - f).powi(1000)), binomial(b, 4096, (1.0 - f).powi(10_000))]))
}

#[test]
fn rare_moves_reach_every_element() {
    let m = Role::FirstMoment.number();
    // Draw 0 of the group of four.
    let (counts, z) = never_moved(|step| {
        let keys = Keys::new(7, step, 0, m, 0);
        move |i| keys.word(i >> 2) as u16
    });
    holds(&format!("V1, {counts:?} of 4096 never moved"), z, BOUND);

    // AdamW takes 2^25 counters a step: 128 steps, and the same words again.
    let (counts, z) = never_moved(|step| move |i| sr_states_hash((step << 25) as u32 + i) as u16);
    is_caught(&format!("sr-states, {counts:?} of 4096 never moved"), z, BOUND);
    assert!(binomial(counts[1], 4096, 0.774).abs() < BOUND);
}
