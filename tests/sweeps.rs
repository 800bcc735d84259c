//! Exhaustive sweeps, and thin ones of the same kind that always run.
//!
//! The whole of it, some ten minutes on two cores: `cargo test --release --test sweeps -- --include-ignored`.

mod common;

use common::{Grid, Inputs, grids};
use halfulp::cast::Cast;
use halfulp::round::{Mode, Overflow, RandomBits, round};
use halfulp::{Draw, Format, Isa};
use rayon::prelude::*;

/// Codes of all non-negative f32 by their place between exact boundaries: a reference as fast as a fill.
struct Boundaries {
    /// `first[c]`: the smallest f32 bits that round to a code above `c`.
    first: Vec<u32>,
    beyond: u16,
}

const INFINITY: u32 = 0x7F80_0000;

impl Boundaries {
    fn new(grid: &Grid, ieee: bool) -> Self {
        let first = grid.values.windows(2).enumerate().map(|(code, pair)| {
            let middle = pair[0] + (pair[1] - pair[0]) / 2.0;
            let goes_up = |bits: u32| {
                let x = f64::from(f32::from_bits(bits));
                x > middle || x == middle && code % 2 == 1
            };
            let (mut low, mut high) = (0, INFINITY);
            while low < high {
                let bits = low + (high - low) / 2;
                if goes_up(bits) { high = bits } else { low = bits + 1 }
            }
            low
        });
        Self { first: first.collect(), beyond: grid.nearest(f64::INFINITY, 0, ieee) }
    }

    /// The codes of `start..start + out.len()` as f32 bits, all below infinity.
    fn fill(&self, start: u32, out: &mut [u16]) {
        let mut code = self.first.partition_point(|&first| first <= start);
        let mut i = 0;
        while i < out.len() {
            let end = self.first.get(code).map_or(out.len(), |&first| out.len().min((first - start) as usize));
            let stored = if code == self.first.len() { self.beyond } else { code as u16 };
            out[i..end].fill(stored);
            (i, code) = (end, code + 1);
        }
    }
}

const CHUNK: u32 = 1 << 16;

/// Nearest over the chunks of f32 bits that `pick` takes, by every instruction-set level and the definition.
fn nearest(pick: impl Fn(u32) -> bool + Sync, definition: bool) {
    for grid in grids() {
        let format = grid.spec.format;
        for overflow in [Overflow::Saturate, Overflow::Ieee] {
            let ieee = overflow == Overflow::Ieee;
            let boundaries = Boundaries::new(&grid, ieee);
            (0..u32::MAX / CHUNK + 1).into_par_iter().filter(|&chunk| pick(chunk)).for_each(|chunk| {
                let start = chunk * CHUNK;
                let x: Vec<f32> = (start..=start + (CHUNK - 1)).map(f32::from_bits).collect();
                let mut expected = vec![0; CHUNK as usize];
                if start & !(1 << 31) < INFINITY && (start >> 31 == 0 || grid.spec.signed) {
                    boundaries.fill(start & !(1 << 31), &mut expected);
                    let sign = (start >> 31) as u16 * if grid.spec.signed { 1 << (format.bits() - 1) } else { 0 };
                    expected.iter_mut().for_each(|code| *code |= sign);
                } else {
                    // Infinity, NaN, and negatives of unsigned formats.
                    expected.iter_mut().zip(&x).for_each(|(code, &x)| *code = grid.nearest_f32(x, ieee));
                }
                let mut codes = vec![0; CHUNK as usize];
                for isa in Isa::available() {
                    codes.fill(0xAAAA);
                    Cast::nearest().overflow(overflow).isa(isa).into_codes(&x, format, &mut codes).unwrap();
                    assert!(codes == expected, "{format} {overflow:?} on {isa} from {start:#x}");
                }
                if definition {
                    for (&x, &expected) in x.iter().zip(&expected) {
                        let code = round(x, format, Mode::NearestEven, overflow);
                        assert_eq!(code, expected, "{format} {overflow:?} {:#x}", x.to_bits());
                    }
                }
            });
        }
    }
}

/// Every 97th chunk of 2^16 patterns, and those at zero, one and infinity.
#[test]
fn nearest_thin() {
    let edges = [0, 0x3F80, 0x7F7F, 0x7F80, 0x7FFF, 0x8000, 0xBF80, 0xFF7F, 0xFF80, 0xFFFF];
    nearest(|chunk| chunk % 97 == 13 || edges.contains(&chunk), true);
}

#[test]
#[ignore = "all 2^32 inputs of every format"]
fn nearest_all() {
    nearest(|_| true, true);
}

/// The oracle that the boundaries stand in for agrees with them.
#[test]
fn boundaries_are_the_oracle() {
    for grid in grids() {
        for ieee in [false, true] {
            let boundaries = Boundaries::new(&grid, ieee);
            let mut inputs = Inputs(8);
            for _ in 0..20_000 {
                let bits = inputs.next() as u32 % INFINITY;
                let mut code = [0];
                boundaries.fill(bits, &mut code);
                assert_eq!(code[0], grid.nearest_f32(f32::from_bits(bits), ieee));
            }
        }
    }
}

fn bf16(x: f32, r: u16) -> u16 {
    round(x, Format::BF16, Mode::Stochastic(RandomBits::of16(r)), Overflow::Ieee)
}

/// Upper halves of BF16 sources: subnormal, smallest normal, about one, large, of both signs.
const BF16_HALVES: [u32; 6] = [0x0000, 0x0080, 0x3FA0, 0x7F7F, 0x8012, 0xC2F7];

/// For every dropped pattern l, r = 2^16 - l - 1 stays and r = 2^16 - l goes up; with `all_r` every r is tried and the
/// number that goes up counted, which is l exactly.
fn bf16_counts(patterns: impl ParallelIterator<Item = u32> + Clone, all_r: bool) {
    for half in BF16_HALVES {
        patterns.clone().for_each(|dropped| {
            let x = f32::from_bits(half << 16 | dropped);
            let (stays, up) = (half as u16, half as u16 + 1);
            assert_eq!(bf16(x, (0xFFFF - dropped) as u16), stays, "{half:#x} {dropped:#x}");
            if dropped > 0 {
                assert_eq!(bf16(x, (0x1_0000 - dropped) as u16), up, "{half:#x} {dropped:#x}");
            }
            if all_r {
                let ups = (0..=u16::MAX).filter(|&r| bf16(x, r) == up).count();
                assert_eq!(ups, dropped as usize, "{half:#x} {dropped:#x}");
            }
        });
    }
}

#[test]
fn bf16_counts_thin() {
    bf16_counts((0..1 << 16).into_par_iter(), false);
    bf16_counts([0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xABCD, 0xFFFF].into_par_iter(), true);
}

#[test]
#[ignore = "every draw of every dropped pattern"]
fn bf16_counts_all() {
    bf16_counts((0..1 << 16).into_par_iter(), true);
}

/// For f32 sources of which a format drops `d` bits, in its normal range (the fewest) and below it: a code from which to
/// go up, and the source bits of that code.
fn starts(grid: &Grid, d: u32) -> Option<(u16, u32)> {
    let format = grid.spec.format;
    let normal = 23 - format.fraction_bits();
    if format.bits() > 8 || d < normal || format == Format::E8M0 && d > normal {
        return None;
    }
    // In the normal range any code will do; d - normal binades below it, the last value that has so few significant bits.
    let code =
        if d == normal { (format.max_code() / 2).max(1 << format.fraction_bits()) } else { 1 << (23 - d.min(23)) };
    let (code, value) = if d > 23 { (0, 0.0) } else { (code, format.value(code) as f32) };
    // 24 dropped bits: sources between half the smallest value and all of it.
    let bits = if d == 24 { (format.value(1) as f32 / 2.0).to_bits() } else { value.to_bits() };
    (d < 24 || format.has_zero()).then_some((code, bits))
}

fn thresholds(step: usize) {
    for grid in grids() {
        let format = grid.spec.format;
        for d in 1..=24 {
            let Some((code, bits)) = starts(&grid, d) else { continue };
            // With 24 dropped bits the hidden bit is dropped too.
            let (patterns, hidden) = if d == 24 { (1u32 << 23, 1 << 23) } else { (1 << d, 0) };
            let goes_up = |x: f32, r: u32, n: u32| {
                let mode = Mode::Stochastic(RandomBits::new(r, n).unwrap());
                let result = round(x, format, mode, Overflow::Saturate);
                assert!(result == code || result == code + 1, "{format} {x:e} gave {result:#x}");
                result == code + 1
            };
            (0..patterns).into_par_iter().step_by(step).for_each(|low| {
                let x = f32::from_bits(bits + low);
                let l = low | hidden;
                let stays = (1u64 << d) - u64::from(l) - 1;
                for n in [d, 32] {
                    let scaled = stays << (n - d);
                    let last = scaled + ((1 << (n - d)) - 1);
                    assert!(!goes_up(x, last as u32, n), "{format} drops {l:#x} of {d} bits, {n} random");
                    if l > 0 {
                        assert!(goes_up(x, (last + 1) as u32, n), "{format} drops {l:#x} of {d} bits, {n} random");
                    }
                }
            });
        }
    }
}

/// r = 2^D - l - 1 stays and r = 2^D - l goes up, with D draws and with 32, subnormals included.
#[test]
fn thresholds_thin() {
    thresholds(61);
}

#[test]
#[ignore = "every dropped pattern of every format of 8 bits or fewer"]
fn thresholds_all() {
    thresholds(1);
}

/// Every draw for a few patterns: monotone, and as many go up as the dropped bits say.
fn all_draws(patterns: u64, most_dropped: u32) {
    let mut inputs = Inputs(6);
    for grid in grids() {
        let format = grid.spec.format;
        for d in 1..=most_dropped {
            let Some((code, bits)) = starts(&grid, d).filter(|_| d < 24) else { continue };
            for _ in 0..patterns {
                let dropped = inputs.next() as u32 & ((1 << d) - 1);
                let x = f32::from_bits(bits + dropped);
                let up = |r| {
                    let mode = Mode::Stochastic(RandomBits::new(r, d).unwrap());
                    round(x, format, mode, Overflow::Saturate) != code
                };
                let ups = (0..1u32 << d).into_par_iter().filter(|&r| up(r)).count();
                assert_eq!(ups, dropped as usize, "{format} {x:e}");
            }
        }
    }
}

#[test]
fn all_draws_thin() {
    all_draws(2, 21);
}

#[test]
#[ignore = "every draw of 64 patterns a format and number of dropped bits"]
fn all_draws_64() {
    all_draws(64, 23);
}

/// Nearest from f64 at every f32 midpoint's neighbourhood has one rounding: no value near a tie goes the other way.
#[test]
fn f64_ties() {
    for grid in grids().filter(|grid| grid.spec.format.bits() <= 8) {
        let format = grid.spec.format;
        for (code, pair) in grid.values.windows(2).enumerate() {
            let middle = pair[0] + (pair[1] - pair[0]) / 2.0;
            for (step, up) in [(-1i64, false), (0, code % 2 == 1), (1, true)] {
                let x = f64::from_bits(middle.to_bits().wrapping_add_signed(step));
                let expected = format.max_code().min(code as u16 + u16::from(up));
                assert_eq!(round(x, format, Mode::NearestEven, Overflow::Saturate), expected, "{format} {x:e}");
            }
        }
    }
}

/// A cast of more elements than a chunk of work, on any number of threads, is the cast of its parts.
#[test]
fn large_slices() {
    let x: Vec<f32> = (0..1 << 20).map(|i| (i as f32 - 5e5) * 1.7e-4).collect();
    let draw = Draw::seeded(1).named("large");
    let mut whole = vec![0; x.len()];
    Cast::stochastic(draw).into_codes(&x, Format::E4M3, &mut whole).unwrap();
    for (i, (x, code)) in (0..).zip(x.chunks(100_003).zip(whole.chunks(100_003))) {
        let mut part = vec![0; x.len()];
        Cast::stochastic(draw.at(i * 100_003)).into_codes(x, Format::E4M3, &mut part).unwrap();
        assert!(part == code);
    }
}
