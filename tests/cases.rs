//! Faults that were reported of systems like this one, by kind: conversion (A) and stochastic rounding (B).

mod common;

use common::Inputs;
use halfulp::cast::Cast;
use halfulp::format::PackedVec;
use halfulp::round::{Mode, Overflow, RandomBits, round};
use halfulp::{Draw, E2M1, E4M3, Format, Isa, bf16, decode, nearest_cast, sr_cast};

fn bits(x: u32) -> f32 {
    f32::from_bits(x)
}

fn nearest(x: f32, format: Format, overflow: Overflow) -> u16 {
    round(x, format, Mode::NearestEven, overflow)
}

fn rn_bf16(x: u32) -> u16 {
    nearest(bits(x), Format::BF16, Ieee)
}

fn sr_bf16(x: u32, r: u16) -> u16 {
    round(bits(x), Format::BF16, Mode::Stochastic(RandomBits::of16(r)), Ieee)
}

use Overflow::{Ieee, Saturate};

/// A1, A2: NaN is never lost, whether its payload sits in the dropped half or all bits are set.
#[test]
fn nan_stays_nan() {
    assert_eq!((rn_bf16(0x7F80_0001), rn_bf16(0xFF80_0001)), (0x7FC0, 0xFFC0));
    for mode in [Mode::TowardZero, Mode::Up, Mode::Down, Mode::NearestAway] {
        assert_eq!(round(bits(0x7F80_0001), Format::BF16, mode, Ieee), 0x7FC0);
    }
    for x in [0x7FFF_FFFF, 0xFFFF_FFFF, 0x7F80_0001, 0xFF80_8000] {
        for r in 0..=u16::MAX {
            assert!(bf16::from_bits(sr_bf16(x, r)).is_nan(), "{x:#x} {r}");
        }
    }
}

/// A3, A6, A7, A8, A19, B22: each overflow policy says what it does, at the edge and beyond, after rounding.
#[test]
fn overflow_by_name() {
    assert_eq!((rn_bf16(0x7F7F_FFFF), rn_bf16(0x7F7F_7FFF), rn_bf16(0x7F7F_8000)), (0x7F80, 0x7F7F, 0x7F80));
    assert_eq!(nearest(f32::MAX, Format::BF16, Saturate), 0x7F7F);
    let e4m3 = |x, overflow| nearest(x, Format::E4M3, overflow);
    for (x, ieee, saturate) in [
        (448.0, 0x7E, 0x7E),
        (464.0, 0x7E, 0x7E),
        (bits(464f32.to_bits() + 1), 0x7F, 0x7E),
        (f32::INFINITY, 0x7F, 0x7E),
        (-500.0, 0xFF, 0xFE),
        (f32::NEG_INFINITY, 0xFF, 0xFE),
        (f32::NAN, 0x7F, 0x7F),
        (-f32::NAN, 0xFF, 0xFF),
    ] {
        assert_eq!((e4m3(x, Ieee), e4m3(x, Saturate)), (ieee, saturate), "{x}");
    }
    for (x, ieee) in [(57_344.0, 0x7B), (58_000.0, 0x7B), (61_439.0, 0x7B), (61_440.0, 0x7C)] {
        assert_eq!((nearest(x, Format::E5M2, Ieee), nearest(x, Format::E5M2, Saturate)), (ieee, 0x7B), "{x}");
    }
    assert_eq!(E4M3::from_f32(1e9), E4M3::MAX);
    let ups = (0..=u16::MAX).filter(|&r| sr_bf16(0x7F7F_FFFF, r) == 0x7F80).count();
    assert_eq!(ups, 65_535);
    let saturates = |r| round(f32::MAX, Format::BF16, Mode::Stochastic(RandomBits::of16(r)), Saturate) == 0x7F7F;
    assert!((0..=u16::MAX).all(saturates));
}

/// A4: to nearest is not truncation, in one value and in the mean of a million.
#[test]
fn nearest_is_unbiased() {
    assert_eq!(rn_bf16(0x3E89_CCD5), 0x3E8A);
    let mut inputs = Inputs(1);
    // Sums of four uniform words, bell-shaped.
    let x: Vec<f32> = (0..1_000_000)
        .map(|_| {
            let word = inputs.next();
            (0..4).map(|k| (word >> (16 * k) & 0xFFFF) as f32).sum::<f32>() / 65_536.0 - 1.999_99
        })
        .collect();
    let error = |y: &[f32]| x.iter().zip(y).map(|(x, y)| f64::from(y - x) / f64::from(*x)).sum::<f64>() / 1e6;
    assert!(error(&decode(&nearest_cast::<bf16>(&x))).abs() < 1e-5);
    let mut truncated = vec![bf16::ZERO; x.len()];
    Cast::toward_zero().into_slice(&x, &mut truncated).unwrap();
    assert!(
        (error(&decode(&truncated)) + 0.5f64.powi(9) * 1.386).abs() < 2e-4,
        "half a ulp low, and a ulp is 2^-7 ln 2 of x on average"
    );
}

/// A5: ties go to the even code on every path.
#[test]
fn ties_to_even() {
    assert_eq!((rn_bf16(0x3F80_8000), rn_bf16(0x3F81_8000)), (0x3F80, 0x3F82));
    let ties: Vec<f32> =
        (0..=u16::MAX).map(|half| bits(u32::from(half) << 16 | 0x8000)).filter(|x| x.is_finite()).collect();
    for isa in Isa::available() {
        let mut codes = vec![bf16::ZERO; ties.len()];
        Cast::nearest().isa(isa).into_slice(&ties, &mut codes).unwrap();
        for (x, code) in ties.iter().zip(codes) {
            let half = (x.to_bits() >> 16) as u16;
            assert_eq!(code.to_bits(), half + (half & 1), "{x:e} on {isa}");
        }
    }
}

/// A11, A12, A13, A14: no truncation, carries, subnormals with their sticky bits, every code there and back.
#[test]
fn small_formats() {
    let e4m3 = |x: f32| E4M3::from_f32(x).to_bits();
    assert_eq!((e4m3(4.25), e4m3(232.0368), e4m3(1.0625)), (0x48, 0x77, 0x38));
    let half_smallest = 0.5f32.powi(10);
    assert_eq!((e4m3(half_smallest), e4m3(bits(half_smallest.to_bits() + 1))), (0, 1));
    for m in 1..8u8 {
        assert_eq!(E4M3::from_bits(m).to_f32(), f32::from(m) / 512.0);
        assert_eq!(halfulp::E5M2::from_bits(m % 4).to_f32(), f32::from(m % 4) / 65_536.0);
    }
    for (x, code) in [
        (0.25, 0x0),
        (0.250_000_06, 0x1),
        (0.75, 0x2),
        (1.25, 0x2),
        (1.75, 0x4),
        (2.5, 0x4),
        (3.5, 0x6),
        (5.0, 0x6),
        (5.0001, 0x7),
        (100.0, 0x7),
    ] {
        assert_eq!(E2M1::from_f32(x).to_bits(), code, "{x}");
    }
    for (_, format) in Format::NAMED {
        for (code, value) in format.values().filter(|(_, value)| !value.is_nan()) {
            assert_eq!(nearest(value as f32, format, Overflow::of(format)), code, "{format} {code:#x}");
        }
    }
}

/// A15: the nibble order is documented, odd lengths end in a zero nibble that is no value.
#[test]
fn packing() {
    let v: PackedVec<E2M1> = Cast::nearest().to_packed(&[0.5f32, 6.0]).unwrap();
    assert_eq!(v.as_bytes(), [0x71]);
    let v: PackedVec<E2M1> = Cast::nearest().to_packed(&[0.5f32, 6.0, -6.0]).unwrap();
    assert_eq!((v.as_bytes(), v.len(), v.decode()), (&[0x71, 0x0F][..], 3, vec![0.5, 6.0, -6.0]));
}

/// A17: -0 and -NaN keep their sign; unsigned formats give code 0 for what is below zero.
#[test]
fn signs() {
    assert_eq!(E4M3::from_f32(-0.0).to_bits(), 0x80);
    assert_eq!(E2M1::from_f32(-0.25).to_bits(), 0x8);
    for x in [-0.0, -1e-30, -1.0, f32::NEG_INFINITY] {
        assert_eq!(halfulp::UE4M4::from_f32(x).to_bits(), 0);
        assert_eq!(halfulp::UE2M2Nz::from_f32(x).to_f32(), 0.125);
    }
}

/// B2, B3: infinities and representable values never move.
#[test]
fn fixed_points() {
    for r in 0..=u16::MAX {
        assert_eq!((sr_bf16(0x7F80_0000, r), sr_bf16(0xFF80_0000, r)), (0x7F80, 0xFF80));
    }
    for half in 0..=u16::MAX {
        if !bf16::from_bits(half).is_nan() {
            for r in [0, 1, 0x7FFF, 0xFFFF] {
                assert_eq!(sr_bf16(u32::from(half) << 16, r), half);
            }
        }
    }
}

/// B4, B5: the number of draws that go up is the dropped bits, all of them.
#[test]
fn exact_probability() {
    for low in [0x0001, 0x8000, 0xFFFF] {
        assert_eq!((0..=u16::MAX).filter(|&r| sr_bf16(0x3F80_0000 | low, r) == 0x3F81).count(), low as usize);
    }
    let mut inputs = Inputs(5);
    for _ in 0..30 {
        let x = 0x3F80_0000 | (inputs.next() as u32 & 0x007F_FFFF);
        let floor = (0x38 + (x >> 20 & 7)) as u16;
        let up = |r: &u32| {
            let mode = Mode::Stochastic(RandomBits::new(*r, 20).unwrap());
            round(bits(x), Format::E4M3, mode, Saturate) == floor + 1
        };
        assert_eq!((0..1 << 20).filter(up).count(), (x & 0xF_FFFF) as usize);
    }
}

/// The share of 32-bit draws (thinned to 2^20) that go up from x.
fn share_up(x: f32, format: Format, code: u16) -> f64 {
    let ups = (0..1u32 << 20).filter(|&r| {
        let mode = Mode::Stochastic(RandomBits::of32(r << 12 | 0x800));
        let result = round(x, format, mode, Saturate);
        assert!(result == code || result == code + 1);
        result == code + 1
    });
    ups.count() as f64 / f64::from(1 << 20)
}

/// B6, B7: subnormals of the target are rounded with their own fraction, not to nearest and not with fixed noise.
#[test]
fn target_subnormals() {
    let unit = 0.5f32.powi(9);
    for (x, format, code, share) in [
        (1.25 * unit, Format::E4M3, 1, 0.25),
        (0.5 * unit, Format::E4M3, 0, 0.5),
        (4.08 * unit, Format::E4M3, 4, 0.08),
        (0.1, Format::E2M1, 0, 0.2),
    ] {
        assert!((share_up(x, format, code) - share).abs() < 1e-6, "{format} {x}");
    }
    let x = vec![4.08 * unit; 100_000];
    let y = decode(&sr_cast::<E4M3>(&x, Draw::seeded(7)));
    let mean = y.iter().map(|&y| f64::from(y)).sum::<f64>() / 1e5;
    let error = f64::from(unit) * (0.08f64 * 0.92 / 1e5).sqrt();
    assert!((mean - f64::from(x[0])).abs() < 5.0 * error);
}

/// B15, B16: the stochastic result is what is stored, whichever format and path: the moved share is the fraction.
#[test]
fn the_flag_is_honoured() {
    let n = 100_000;
    for isa in Isa::available() {
        for (format, x, d) in [
            (Format::BF16, 1.001f32, 0.128),
            (Format::E4M3, 1.03, 0.24),
            (Format::E5M2, 1.03, 0.12),
            (Format::E2M1, 1.1, 0.2),
            (Format::UE4M4, 1.03, 0.48),
            (Format::FP16, 1.0 + 0.3 / 1024.0, 0.3),
        ] {
            let one = nearest(1.0, format, Saturate);
            let mut codes = vec![0; n];
            Cast::stochastic(Draw::seeded(3)).isa(isa).into_codes(&vec![x; n], format, &mut codes).unwrap();
            let moved = codes.iter().filter(|&&code| code == one + 1).count() as f64 / n as f64;
            let bound = 5.0 * (d * (1.0 - d) / n as f64).sqrt() + 1e-5;
            assert!((moved - d).abs() < bound, "{format} on {isa}: {moved} for {d}");
            assert_eq!(codes.iter().filter(|&&code| code != one && code != one + 1).count(), 0);
        }
    }
}

/// B21: by magnitude, not toward minus infinity.
#[test]
fn symmetric() {
    let mut inputs = Inputs(9);
    for _ in 0..100 {
        let x = inputs.next() as u32 & 0x7FFF_FFFF;
        for r in 0..=u16::MAX {
            assert_eq!(sr_bf16(x, r) ^ 0x8000, sr_bf16(x | 1 << 31, r));
        }
    }
}

/// B19, B23: the same call twice, and in two shards with their place in the whole, gives the same bits.
#[test]
fn repeatable_and_shardable() {
    let x: Vec<f32> = (0..10_001).map(|i| 1.0 + i as f32 * 1e-6).collect();
    let draw = Draw::seeded(7).named("w");
    let whole: Vec<bf16> = sr_cast(&x, draw);
    assert_eq!(whole, sr_cast::<bf16>(&x, draw));
    let (a, b) = x.split_at(4999);
    assert_eq!(whole, [sr_cast::<bf16>(a, draw), sr_cast::<bf16>(b, draw.at(4999))].concat());
}
