//! `round` against the oracle, element by element.

mod common;

use common::{Grid, Inputs, f32_inputs, grids, payload32, pow2};
use halfulp::Format;
use halfulp::round::{FewBits, Mode, Overflow, RandomBits, round};
use halfulp::{bf16, f16};

fn policy(ieee: bool) -> Overflow {
    if ieee { Overflow::Ieee } else { Overflow::Saturate }
}

#[test]
fn nearest_even_is_the_oracle() {
    for grid in grids() {
        for x in f32_inputs(&grid) {
            for ieee in [false, true] {
                let code = round(x, grid.spec.format, Mode::NearestEven, policy(ieee));
                assert_eq!(code, grid.nearest_f32(x, ieee), "{} {x:e} {:#x} {ieee}", grid.spec.format, x.to_bits());
            }
        }
    }
}

#[test]
fn other_modes_are_the_oracle() {
    for grid in grids() {
        for x in f32_inputs(&grid) {
            let negative = x.is_sign_negative();
            let check = |mode, up: &dyn Fn(f64) -> bool| {
                let expected = grid.encode(x.into(), payload32(x), false, |d, _| up(d));
                let code = round(x, grid.spec.format, mode, Overflow::Saturate);
                assert_eq!(code, expected, "{} {x:e} {mode:?}", grid.spec.format);
            };
            check(Mode::NearestAway, &|d| d >= 0.5);
            check(Mode::TowardZero, &|_| false);
            check(Mode::Up, &|_| !negative);
            check(Mode::Down, &|_| negative);
        }
    }
}

/// IEEE 754 section 7.4: overflow in a directed mode gives infinity on the side it rounds to, the largest value elsewhere.
#[test]
fn directed_overflow() {
    for (x, mode, code) in [
        (1e9f32, Mode::TowardZero, 0x7B),
        (-1e9, Mode::TowardZero, 0xFB),
        (1e9, Mode::Up, 0x7C),
        (-1e9, Mode::Up, 0xFB),
        (1e9, Mode::Down, 0x7B),
        (-1e9, Mode::Down, 0xFC),
        (57344.1, Mode::Up, 0x7C),
        (61440.0, Mode::NearestAway, 0x7C),
        (f32::INFINITY, Mode::TowardZero, 0x7C),
        (f32::NEG_INFINITY, Mode::Up, 0xFC),
    ] {
        assert_eq!(round(x, Format::E5M2, mode, Overflow::Ieee), code, "{x} {mode:?}");
        assert_eq!(round(x, Format::E5M2, mode, Overflow::Saturate), (code & 0x80) | 0x7B, "{x} {mode:?}");
    }
    assert_eq!(round(449.0f32, Format::E4M3, Mode::Up, Overflow::Ieee), 0x7F);
    assert_eq!(round(449.0f32, Format::E4M3, Mode::Down, Overflow::Ieee), 0x7E);
}

#[test]
fn f64_is_rounded_once() {
    let mut inputs = Inputs(11);
    for grid in grids() {
        for x in f32_inputs(&grid) {
            // Both sides of every f32 by less than an f32 can tell.
            for delta in [0u64.wrapping_sub(1), 0, 1, inputs.next() >> 36] {
                let x = f64::from_bits(f64::from(x).to_bits().wrapping_add(delta));
                let payload = x.to_bits() & ((1 << 52) - 1);
                let code = round(x, grid.spec.format, Mode::NearestEven, Overflow::Ieee);
                assert_eq!(code, grid.nearest(x, payload, true), "{} {x:e}", grid.spec.format);
                let r = inputs.next() as u32;
                let code = round(x, grid.spec.format, Mode::Stochastic(RandomBits::of32(r)), Overflow::Ieee);
                assert_eq!(code, grid.stochastic(x, payload, true, r, 32), "{} {x:e} {r:#x}", grid.spec.format);
            }
        }
    }
}

#[test]
fn every_half_and_bfloat() {
    for grid in grids() {
        for bits in 0..=u16::MAX {
            let (a, b) = (f16::from_bits(bits), bf16::from_bits(bits));
            let code = round(a, grid.spec.format, Mode::NearestEven, Overflow::Ieee);
            let payload = u64::from(bits & 0x3FF) << 42;
            assert_eq!(code, grid.nearest(a.to_f64(), payload, true), "{} f16 {bits:#x}", grid.spec.format);
            let code = round(b, grid.spec.format, Mode::NearestEven, Overflow::Ieee);
            let payload = u64::from(bits & 0x7F) << 45;
            assert_eq!(code, grid.nearest(b.to_f64(), payload, true), "{} bf16 {bits:#x}", grid.spec.format);
        }
    }
}

#[test]
fn stochastic_is_the_centred_rule() {
    let mut inputs = Inputs(3);
    for grid in grids() {
        for x in f32_inputs(&grid) {
            for n in [1, 4, 8, 16, 24, 31, 32] {
                let r = (inputs.next() as u32) >> (32 - n);
                let mode = Mode::Stochastic(RandomBits::new(r, n).unwrap());
                for ieee in [false, true] {
                    let expected = grid.stochastic(x.into(), payload32(x), ieee, r, n as i32);
                    let code = round(x, grid.spec.format, mode, policy(ieee));
                    assert_eq!(code, expected, "{} {x:e} r {r:#x} of {n}", grid.spec.format);
                }
            }
        }
    }
}

/// Mean bias and largest error of the three rules, in ulp, over all dropped patterns: the numbers of their documentation.
#[test]
fn few_bits_rules() {
    let bias = |rule, n: u32, d: u32| {
        let (mut sum, mut worst) = (0.0, 0f64);
        for dropped in 0..1u32 << d {
            // Without fraction bits, 1 + fraction lies that fraction of the way from 1 to 2.
            let format = Format::builder(4, 0).build().unwrap();
            let fraction = f64::from(dropped) / pow2(d as i32);
            let x = 1.0 + fraction;
            let ups = (0..1u32 << n)
                .filter(|&r| {
                    let bits = RandomBits::new(r, n).unwrap().with_rule(rule);
                    format.value(round(x, format, Mode::Stochastic(bits), Overflow::Saturate)) == 2.0
                })
                .count();
            let error = ups as f64 / pow2(n as i32) - fraction;
            sum += error;
            worst = worst.max(error.abs());
        }
        (sum / pow2(d as i32), worst)
    };
    let (n, d) = (4, 9);
    let near = |got: (f64, f64), mean: f64, worst: f64| {
        assert_eq!(got.0, mean);
        assert!(got.1 <= worst && got.1 > worst * 0.9, "{} {worst}", got.1);
    };
    near(bias(FewBits::Centred, n, d), pow2(-(d as i32) - 1), pow2(-(n as i32) - 1));
    near(bias(FewBits::Nearest, n, d), 0.0, pow2(-(n as i32) - 1));
    let (mean, worst) = bias(FewBits::Floor, n, d);
    assert_eq!(mean, -pow2(-(n as i32) - 1) + pow2(-(d as i32) - 1));
    assert!(worst < pow2(-(n as i32)) && worst > 0.9 * pow2(-(n as i32)));
    // Enough bits: every rule is exact.
    for rule in [FewBits::Centred, FewBits::Floor, FewBits::Nearest] {
        assert_eq!(bias(rule, 7, 7), (0.0, 0.0));
        assert_eq!(bias(rule, 9, 6), (0.0, 0.0));
    }
}

/// Every row of the table of hand-checked conversions.
#[test]
fn table_of_conversions() {
    let mut rows = 0;
    for line in include_str!("data/conversions.tsv").lines().skip(1) {
        let [case, source, bits, _, name, saturate, ieee, _] = line.split('\t').collect::<Vec<_>>()[..] else {
            panic!("row of another shape: {line}");
        };
        let bits = u64::from_str_radix(bits.trim_start_matches("0x"), 16).unwrap();
        let format: Format = if name == "e4m3fn" { Format::E4M3 } else { name.parse().unwrap() };
        for (overflow, expected) in [(Overflow::Saturate, saturate), (Overflow::Ieee, ieee)] {
            let code = match source {
                "f32" => round(f32::from_bits(bits as u32), format, Mode::NearestEven, overflow),
                "f64" => round(f64::from_bits(bits), format, Mode::NearestEven, overflow),
                other => panic!("source {other}"),
            };
            if expected == "NaN" {
                let negative = bits >> if source == "f32" { 31 } else { 63 } != 0;
                let sign = u16::from(negative) << (format.bits() - 1);
                assert!(format.value(code).is_nan() && code & 1 << (format.bits() - 1) == sign, "{case}");
            } else {
                let expected = u16::from_str_radix(expected.trim_start_matches("0x"), 16).unwrap();
                assert_eq!(code, expected, "{case} {format} {overflow:?}");
            }
        }
        rows += 1;
    }
    assert_eq!(rows, 58);
}

#[test]
fn grids_are_the_values() {
    for grid in grids() {
        let Grid { spec, values, .. } = &grid;
        let format = spec.format;
        assert_eq!(format.max_code(), grid.max_code());
        for (code, &value) in values[..values.len() - 1].iter().enumerate() {
            assert_eq!(format.value(code as u16), value, "{format} {code:#x}");
        }
    }
}
