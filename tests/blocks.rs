//! Casts into blocks that share a scale, against the definition.

mod common;

use common::{Grid, Inputs, grids, pow2};
use halfulp::cast::{Cast, CastError, MissingNan};
use halfulp::format::{BlockError, BlockFormat, BlockScale, BlockVec, Scales};
use halfulp::random::Draws;
use halfulp::round::Source;
use halfulp::{Draw, E4M3, Format, bf16};

fn formats() -> Vec<BlockFormat> {
    let own = |element, block, scale| BlockFormat::new(element, block, scale).unwrap();
    let presets = [
        BlockFormat::MXFP8_E4M3,
        BlockFormat::MXFP8_E5M2,
        BlockFormat::MXFP6_E3M2,
        BlockFormat::MXFP6_E2M3,
        BlockFormat::MXFP4,
        BlockFormat::NVFP4,
    ];
    let others = [
        own(Format::E4M3, 128, BlockScale::Ceil),
        own(Format::E2M1, 32, BlockScale::Ceil),
        own(Format::E2M3, 64, BlockScale::Ceil),
        own(Format::UE4M4, 256, BlockScale::Ceil),
        own(Format::UE2M2NZ, 32, BlockScale::Ceil),
        own(Format::E5M2, 16, BlockScale::Amax),
        own(Format::UE5M3, 64, BlockScale::Amax),
        own(Format::E2M1, 128, BlockScale::Amax),
    ];
    presets.into_iter().chain(others).collect()
}

/// The first f32 from the smallest positive one up that is not below `x`, by bisection over the bits.
fn f32_not_below(x: f64) -> f32 {
    let (mut low, mut high) = (0u32, f32::MAX.to_bits());
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        *if f64::from(f32::from_bits(middle)) < x { &mut low } else { &mut high } = middle;
    }
    f32::from_bits(high)
}

fn amax(x: &[f64]) -> f64 {
    x.iter().filter(|x| x.is_finite()).fold(0.0, |largest, x| largest.max(x.abs()))
}

/// Scales by their rules.
fn scales(format: BlockFormat, x: &[f64]) -> Vec<f64> {
    let grid = grids().find(|grid| grid.spec.format == format.element()).unwrap();
    let max = grid.values[usize::from(grid.max_code())];
    // floor(log2), of 0 below all.
    let octave = |x: f64| (-1100..1100).rev().find(|&e| pow2(e) <= x).unwrap_or(-1100);
    let global = f32_not_below(amax(x) / (6.0 * 448.0));
    let of_block = |block: &[f64]| {
        let amax = amax(block);
        match format.scale() {
            _ if block.iter().any(|x| !x.is_finite()) => f64::NAN,
            BlockScale::Ceil => (-126..=127).map(pow2).find(|scale| amax <= max * scale).unwrap(),
            BlockScale::Floor => pow2((octave(amax) - octave(max)).clamp(-127, 127)),
            BlockScale::Amax => f32_not_below(amax / max).into(),
            BlockScale::Nvfp4 => {
                let e4m3 = (0..=E4M3::MAX.to_bits()).map(|code| E4M3::from_bits(code).to_f64());
                let mut scales = e4m3.map(|scale| scale * f64::from(global));
                scales.find(|scale| 6.0 * scale >= amax).unwrap()
            }
            _ => unreachable!(),
        }
    };
    x.chunks(format.block()).map(of_block).collect()
}

fn code(grid: &Grid, scale: f64, x: f64, draw: Option<u32>) -> u16 {
    let quotient = if scale == 0.0 { x } else { x / scale };
    match draw {
        None => grid.nearest(quotient, 0, false),
        Some(r) => grid.stochastic(quotient, 0, false, r, 32),
    }
}

fn check<S: Source>(format: BlockFormat, x: &[S], values: &[f64]) -> BlockVec {
    let grid = grids().find(|grid| grid.spec.format == format.element()).unwrap();
    let draw = Draw::seeded(7).step(3).named("w").at(5);
    let scales = scales(format, values);
    let mut made = None;
    for stochastic in [true, false] {
        let y =
            if stochastic { Cast::stochastic(draw).to_blocks(x, format) } else { Cast::nearest().to_blocks(x, format) };
        let y = y.unwrap();
        assert_eq!((y.len(), y.scales().len(), y.bytes()), (x.len(), scales.len(), format.bytes(x.len())));
        for (b, scale) in scales.iter().enumerate() {
            let got = y.scales().get(b);
            assert!(got == *scale || got.is_nan() && scale.is_nan(), "{format:?} block {b}: {got:e}, not {scale:e}");
        }
        let decoded = y.decode();
        for (i, &x) in values.iter().enumerate() {
            let scale = scales[i / format.block()];
            let expected = match scale.is_nan() {
                true => 0,
                false => code(&grid, scale, x, stochastic.then(|| draw.draw32(i as u64))),
            };
            assert_eq!(y.code(i), expected, "{format:?} {i}: {x:e} under {scale:e}");
            let value = format.element().value(expected) * scale;
            assert!(decoded[i] == value as f32 || value.is_nan() && decoded[i].is_nan());
            assert!(y.value(i) == value || value.is_nan() && y.value(i).is_nan());
        }
        made = Some(y);
    }
    made.unwrap()
}

fn values(kind: usize, n: usize) -> Vec<f32> {
    let mut inputs = Inputs(kind as u64 * 1000 + n as u64);
    let value = |i: usize| {
        let word = inputs.next();
        let ordinary = word as i32 as f32 * 1e-9;
        match (kind, word >> 56) {
            (_, 0..8) => 0.0,
            (0, _) => ordinary,
            // Every exponent, another range in each block.
            (1, _) => f32::from_bits(
                word as u32 & 0x807F_FFFF | ((i / 16 * 37 % 200) as u32 + (word >> 32) as u32 % 55) << 23,
            ),
            (2, _) => f32::from_bits(word as u32 & 0x8000_3FFF),
            (_, 8) if word & 7 == 0 => [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][i % 3],
            _ => ordinary,
        }
    };
    (0..n).map(value).collect()
}

#[test]
fn every_format_is_its_definition() {
    for format in formats() {
        for n in [0, 1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 257, 1003] {
            for kind in 0..4 {
                let x = values(kind, n);
                check(format, &x, &x.iter().map(|&x| x.into()).collect::<Vec<_>>());
            }
        }
        let x: Vec<bf16> = values(0, 300).into_iter().map(bf16::from_f32).collect();
        check(format, &x, &x.iter().map(|x| x.to_f64()).collect::<Vec<_>>());
        let x: Vec<f64> = values(0, 300).into_iter().map(|x| f64::from(x) * 1.000_000_01).collect();
        check(format, &x, &x);
    }
}

#[test]
fn any_number_of_threads() {
    for format in formats() {
        let x = values(3, 100_003);
        let cast = Cast::stochastic(Draw::seeded(1));
        let on = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let y = pool.install(|| cast.to_blocks(&x, format).unwrap());
            (y.codes().to_vec(), (0..y.scales().len()).map(|b| y.scales().get(b).to_bits()).collect::<Vec<_>>())
        };
        let one = on(1);
        assert_eq!(one, on(3));
        // Parts at multiples of the block, where blocks alone make scales.
        if format.scale() != BlockScale::Nvfp4 {
            let tail = Cast::stochastic(Draw::seeded(1).at(4096)).to_blocks(&x[4096..], format).unwrap();
            assert!(one.0.ends_with(tail.codes()));
        }
    }
}

/// A13: every code comes back under its scale, where a block holds them all.
#[test]
fn codes_round_trip() {
    for format in formats() {
        let element = format.element();
        for scale in [pow2(-20), 1.0, pow2(9)] {
            let codes = element.values().filter(|(_, value)| value.is_finite());
            let (codes, values): (Vec<u16>, Vec<f64>) = codes.map(|(code, value)| (code, value * scale)).unzip();
            for (codes, values) in codes.chunks(format.block() - 1).zip(values.chunks(format.block() - 1)) {
                // The largest value in each block.
                let x: Vec<f64> = values.iter().copied().chain([element.max() * scale]).collect();
                let y = Cast::stochastic(Draw::seeded(1)).to_blocks(&x, format).unwrap();
                assert!((0..codes.len()).all(|i| y.code(i) == codes[i]), "{format:?} {scale}");
            }
        }
    }
}

#[test]
fn not_finite() {
    let mut x = [1.5f32; 70];
    (x[3], x[4], x[40]) = (f32::NAN, f32::NAN, f32::INFINITY);
    for format in formats().into_iter().filter(|format| format.block() == 32) {
        let mut y = BlockVec::zeroed(format, 70);
        let report = Cast::nearest().into_blocks(&x, &mut y).unwrap();
        assert_eq!((report.elements, report.nan, report.overflow, y.nan_blocks()), (70, 2, 1, 2));
        let decoded = y.decode();
        assert!(decoded[..64].iter().all(|x| x.to_bits() == 0x7FC0_0000) && decoded[64..] == [1.5; 6], "{decoded:?}");
    }
    let refused = Cast::nearest().missing_nan(MissingNan::Refuse).to_blocks(&x, BlockFormat::MXFP4);
    assert_eq!(refused, Err(CastError::Nan { format: Format::E2M1, index: 3 }));
    let scaled = Cast::nearest().scale(3).to_blocks(&x, BlockFormat::MXFP4).unwrap_err();
    assert_eq!(scaled.to_string(), "scale: expected 0, for blocks have scales of their own, got 3");
}

/// A block of zeros, of one value, of 1e-42; what OCP's rule clips and the other does not.
#[test]
fn special_blocks() {
    for format in formats() {
        let of = |x: f32| Cast::nearest().to_blocks(&[x; 40], format).unwrap();
        let zero = of(0.0);
        assert_eq!(zero, BlockVec::zeroed(format, 40));
        assert!(zero.decode().iter().all(|&x| x == 0.0 || !format.element().has_zero() && x < 2e-39));
        let element = format.element();
        for x in [1e-42f32, 1e-40] {
            let smallest = element.min_positive() * pow2(-126);
            assert!(of(x).decode().iter().all(|&y| f64::from(y) <= (2.0 * f64::from(x)).max(smallest)), "{format:?}");
        }
        for x in [0.3f32, 7e5] {
            let clips = format.scale() == BlockScale::Floor;
            let bound = if clips { 0.26 } else { element.epsilon() / 2.0 + 1e-6 };
            assert!(of(x).decode().iter().all(|y| f64::from((y / x - 1.0).abs()) <= bound), "{format:?} {x}");
        }
    }
    let x = [7.9f32; 32];
    let floor = Cast::nearest().to_blocks(&x, BlockFormat::MXFP4).unwrap();
    assert_eq!((floor.scales(), floor.decode()), (&Scales::E8M0(vec![127]), vec![6.0; 32]));
    let ceil = BlockFormat::new(Format::E2M1, 32, BlockScale::Ceil).unwrap();
    let ceil = Cast::nearest().to_blocks(&x, ceil).unwrap();
    assert_eq!((ceil.scales(), ceil.decode()), (&Scales::E8M0(vec![128]), vec![8.0; 32]));
    let mut clipped = BlockVec::zeroed(BlockFormat::MXFP4, 32);
    assert_eq!(Cast::nearest().into_blocks(&x, &mut clipped).unwrap().overflow, 32);
    // Two blocks of NVFP4: the larger stands on 448 times the whole's scale.
    let x: Vec<f32> = [[2688.0f32; 16], [3.0; 16]].concat();
    let nvfp4 = Cast::nearest().to_blocks(&x, BlockFormat::NVFP4).unwrap();
    assert_eq!(nvfp4.scales(), &Scales::Nvfp4 { blocks: vec![0x7E, 0x30], global: 1.0 });
    assert_eq!(nvfp4.decode(), x);
}

/// The mean of a stochastic cast is the value, within 5 standard errors; nearest is not.
#[test]
fn stochastic_is_unbiased() {
    let n = 1 << 17;
    for format in formats().into_iter().filter(|format| format.scale() != BlockScale::Floor) {
        // The first of a block sets its scale, the others lie at 0.3 of the way between two values.
        let of_block = |i: usize| if i.is_multiple_of(format.block()) { 7.0f32 } else { 2.3 };
        let x: Vec<f32> = (0..n).map(of_block).collect();
        let error = |cast: Cast| {
            let y = cast.to_blocks(&x, format).unwrap().decode();
            let errors = y.iter().zip(&x).filter(|(_, x)| **x == 2.3).map(|(y, x)| f64::from(*y) - f64::from(*x));
            let (sum, squares, count) =
                errors.fold((0.0, 0.0, 0.0), |(sum, squares, count), e| (sum + e, squares + e * e, count + 1.0));
            let mean: f64 = sum / count;
            (mean, ((squares / count - mean * mean).max(0.0) / count).sqrt())
        };
        let (mean, standard_error) = error(Cast::stochastic(Draw::seeded(9)));
        assert!(mean.abs() <= 5.0 * standard_error + 1e-6, "{format:?}: {mean} of {standard_error}");
        let (nearest, _) = error(Cast::nearest());
        assert!(nearest.abs() > 5.0 * standard_error, "{format:?}: {nearest} of {standard_error}");
    }
}

/// The largest distance, in standard errors, of codes of E2M1 from what independent stochastic rounding is expected to give: per
/// place of a pattern that `x` repeats, of the mean error from zero and of the squared error from (x - lo)(hi - x), and of the
/// squared error of a block's sum from the sum of these. In units of scales.
fn distances(format: BlockFormat, x: &[f32], pattern: usize, code: impl Fn(usize, f64) -> u16) -> [f64; 3] {
    const VALUES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let scales = scales(format, &x.iter().map(|&x| x.into()).collect::<Vec<_>>());
    let quotient = |i: usize| f64::from(x[i]) / scales[i / format.block()];
    let error = |i: usize| {
        let code = code(i, scales[i / format.block()]);
        VALUES[usize::from(code & 7)] * if code & 8 == 0 { 1.0 } else { -1.0 } - quotient(i)
    };
    let repeats = (x.len() / pattern) as f64;
    let errors: Vec<f64> = (0..x.len()).map(error).collect();
    let z = |got: f64, expected: f64, variance: f64| (got - expected).abs() / (variance.sqrt() + 1e-9);
    let mut worst = [0f64; 3];
    for first in (0..pattern).step_by(format.block()) {
        let (mut variance, mut cumulant) = (0.0, 0.0);
        for i in first..first + format.block() {
            let q = quotient(i).abs();
            let low = VALUES.into_iter().rfind(|&value| value <= q).unwrap();
            let high = VALUES.into_iter().find(|&value| value >= q).unwrap();
            // An error is one of two: its square has this variance, its fourth cumulant is that below.
            let of_one = (q - low) * (high - q);
            let of_square = of_one * (high + low - 2.0 * q).powi(2);
            let seen = errors.iter().skip(i).step_by(pattern);
            let (sum, squares) = seen.fold((0.0, 0.0), |(sum, squares), e| (sum + e, squares + e * e));
            worst[0] = worst[0].max(z(sum, 0.0, repeats * of_one));
            worst[1] = worst[1].max(z(squares, repeats * of_one, repeats * of_square));
            variance += of_one;
            cumulant += of_one * ((high - low).powi(2) - 6.0 * of_one);
        }
        let of_block = |at: usize| errors[at..at + format.block()].iter().sum::<f64>().powi(2);
        let squares: f64 = (first..x.len()).step_by(pattern).map(of_block).sum();
        worst[2] = worst[2].max(z(squares, repeats * variance, repeats * (cumulant + 2.0 * variance * variance)));
    }
    worst
}

/// FP4 in blocks has mean error zero and the variance of independent stochastic rounding, exactly (x - lo)(hi - x) for each element,
/// within 5 standard errors; nearest, one draw for all and one draw a block do not.
#[test]
fn fp4_has_the_variance_of_stochastic_rounding() {
    let own = |block, scale| BlockFormat::new(Format::E2M1, block, scale).unwrap();
    let grid = grids().find(|grid| grid.spec.format == Format::E2M1).unwrap();
    let pattern = 256;
    let mut inputs = Inputs(4);
    // No more than 5.7 of 6 under a power of two, and 5.7 among every 16, so that `Floor` clips none; four octaves.
    let value = |i: usize| {
        let word = inputs.next();
        let magnitude = if i.is_multiple_of(16) { 5.7 } else { 5.7 * (word >> 33) as f32 / (1u64 << 31) as f32 };
        magnitude * (1 << (i / 16 % 4)) as f32 * if word & 1 == 0 { 1.0 } else { -1.0 }
    };
    let x = (0..pattern).map(value).collect::<Vec<_>>().repeat(1024);
    for format in [BlockFormat::MXFP4, BlockFormat::NVFP4, own(32, BlockScale::Ceil), own(128, BlockScale::Amax)] {
        let draw = Draw::seeded(11).step(2).named("w");
        let y = Cast::stochastic(draw).to_blocks(&x, format).unwrap();
        let right = distances(format, &x, pattern, |i, _| y.code(i));
        assert!(right.iter().all(|z| *z <= 5.0), "{format:?}: {right:?}");

        let with = |draw: &dyn Fn(usize) -> Option<u32>| {
            distances(format, &x, pattern, |i, scale| code(&grid, scale, x[i].into(), draw(i)))
        };
        let nearest = with(&|_| None);
        let constant = with(&|_| Some(draw.draw32(0)));
        let of_block = with(&|i| Some(draw.draw32((i / format.block()) as u64)));
        for (variant, wrong) in [("nearest", nearest), ("constant noise", constant)] {
            assert!(wrong.iter().all(|z| *z > 5.0), "{format:?}, {variant}: {wrong:?}");
        }
        assert!(of_block[2] > 5.0, "{format:?}, noise of a block: {of_block:?}");
    }
}

#[test]
fn errors() {
    let refused = |element, block, scale| BlockFormat::new(element, block, scale).unwrap_err().to_string();
    let bf16 = refused(Format::BF16, 32, BlockScale::Ceil);
    assert_eq!(bf16, "element: expected a format of 4, 6 or 8 bits, got BF16 of 16 bits");
    let block = "block: expected 16, 32, 64, 128 or 256 elements, got 48";
    assert_eq!(refused(Format::E4M3, 48, BlockScale::Ceil), block);
    let nvfp4 = "scale: expected E2M1 in blocks of 16 under Nvfp4, got E2M1 in blocks of 32";
    assert_eq!(refused(Format::E2M1, 32, BlockScale::Nvfp4), nvfp4);
    let format = BlockFormat::MXFP4;
    let parts = |codes: usize, scales| BlockVec::from_parts(format, 33, vec![0; codes], scales).map(|y| y.len());
    assert_eq!(parts(17, Scales::E8M0(vec![127; 2])), Ok(33));
    let length = BlockError::Length { argument: "codes", len: 33, expected: 17, got: 16 };
    assert_eq!(parts(16, Scales::E8M0(vec![127; 2])), Err(length));
    assert_eq!(
        parts(17, Scales::E8M0(vec![127; 3])).unwrap_err().to_string(),
        "scales: expected 2, as 33 elements take, got 3"
    );
    assert_eq!(parts(17, Scales::F32(vec![1.0; 2])), Err(BlockError::Scales { scale: BlockScale::Floor }));
    let mut out = BlockVec::zeroed(format, 3);
    let length = CastError::Length { expected: 4, got: 3, unit: "elements" };
    assert_eq!(Cast::nearest().into_blocks(&[1f32; 4], &mut out), Err(length));
}
