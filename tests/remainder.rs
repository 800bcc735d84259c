//! BF16 numbers with a 16-bit remainder: exact for every f32, the nearest number, NaN as said.
#![cfg(feature = "std")]

mod common;

use common::Inputs;
use halfulp::bf16;
use halfulp::optim::remainder::{LengthError, join, join_into, join_slices, split, split_into, split_slice};
use halfulp::round::{Mode, Overflow, round};
use halfulp::{Format, decode};

/// What is promised of one f32.
fn check(bits: u32) {
    let x = f32::from_bits(bits);
    let (number, rest) = split(x);
    assert_eq!(join(number, rest).to_bits(), bits, "{bits:#010x}");
    assert_eq!(rest, bits as u16);
    let code = number.to_bits();
    if !x.is_nan() {
        assert_eq!(code, round(x, Format::BF16, Mode::NearestAway, Overflow::Ieee), "{bits:#010x}");
    } else if bits & 0x7FFF_0000 != 0x7F80_0000 {
        assert_eq!(u32::from(code), bits >> 16, "{bits:#010x}");
    } else {
        assert_eq!(code, (bits >> 16) as u16 & if rest < 0x8000 { 0xFF80 } else { 0x8000 }, "{bits:#010x}");
    }
}

#[test]
fn sampled() {
    let mut inputs = Inputs(1);
    for _ in 0..1_000_000 {
        check(inputs.next() as u32);
    }
    // All remainders of the codes at which something turns, and the turning remainders of all codes.
    for high in [0u32, 1, 0x7F, 0x80, 0x3F7F, 0x3F80, 0x7F7E, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF] {
        for low in 0..=0xFFFF {
            check(high << 16 | low);
            check((high | 0x8000) << 16 | low);
        }
    }
    for high in 0..=0xFFFFu32 {
        for low in [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
            check(high << 16 | low);
        }
    }
}

/// All 2^32: `cargo test --release --test remainder -- --ignored`.
#[test]
#[ignore = "a minute or more"]
fn every_f32() {
    (0..=u32::MAX).for_each(check);
}

/// All pairs stand for some f32, which gives the pair again.
#[test]
#[ignore = "a minute or more"]
fn every_pair() {
    for code in 0..=u16::MAX {
        for rest in 0..=u16::MAX {
            let (number, again) = split(join(bf16::from_bits(code), rest));
            assert_eq!((number.to_bits(), again), (code, rest));
        }
    }
}

#[test]
fn examples() {
    let bits = |x: f32| (split(x).0.to_bits(), split(x).1);
    assert_eq!(bits(0.0), (0, 0));
    assert_eq!(bits(-0.0), (0x8000, 0));
    assert_eq!(bits(f32::INFINITY), (0x7F80, 0));
    assert_eq!(bits(f32::NEG_INFINITY), (0xFF80, 0));
    assert_eq!(bits(f32::MAX), (0x7F80, 0xFFFF));
    assert_eq!(bits(f32::from_bits(0x7FC0_0000)), (0x7FC0, 0));
    // Half way between 1 and 1.0078125, and just below.
    assert_eq!(bits(f32::from_bits(0x3F80_8000)), (0x3F81, 0x8000));
    assert_eq!(bits(f32::from_bits(0x3F80_7FFF)), (0x3F80, 0x7FFF));
    // A NaN that addition of half a spacing would carry into the sign.
    assert_eq!(bits(f32::from_bits(0x7FFF_FFFF)), (0x7FFF, 0xFFFF));
}

#[test]
fn slices() {
    let mut inputs = Inputs(2);
    for n in [0, 1, 7, 511, 513, 32_768, 32_769, 200_001] {
        let x: Vec<f32> = (0..n).map(|_| f32::from_bits(inputs.next() as u32)).collect();
        let (numbers, rest) = split_slice(&x);
        for ((&x, &number), &rest) in x.iter().zip(&numbers).zip(&rest) {
            assert_eq!((split(x).0.to_bits(), split(x).1), (number.to_bits(), rest));
        }
        let words = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(words(&join_slices(&numbers, &rest).unwrap()) == words(&x));
    }
    let mut numbers = [bf16::ZERO; 3];
    let mut rest = [0; 3];
    split_into(&[1.001, -2.5, 3e38], &mut numbers, &mut rest).unwrap();
    let mut back = [0.0; 3];
    join_into(&numbers, &rest, &mut back).unwrap();
    assert_eq!(back, [1.001, -2.5, 3e38]);
    let length = |argument, got| Err(LengthError { argument, expected: 3, got });
    assert_eq!(split_into(&[0.0; 3], &mut numbers[..2], &mut rest), length("numbers", 2));
    assert_eq!(split_into(&[0.0; 3], &mut numbers, &mut rest[..2]), length("remainders", 2));
    assert_eq!(join_slices(&numbers, &rest[..1]).map(drop), length("remainders", 1));
    assert_eq!(join_into(&numbers, &rest, &mut back[..2]), length("out", 2));
    assert_eq!(length("out", 2).unwrap_err().to_string(), "out: expected 3 elements, got 2");
}

/// Small updates arrive: 10,000 of 2^-20 each, which BF16 alone would lose, and a model that reads the numbers sees them.
#[test]
fn updates_arrive() {
    let (mut numbers, mut rest) = split_slice(&[1.0; 4]);
    for _ in 0..10_000 {
        let mut x = join_slices(&numbers, &rest).unwrap();
        x.iter_mut().for_each(|x| *x += 2f32.powi(-20));
        split_into(&x, &mut numbers, &mut rest).unwrap();
    }
    let expected = 1.0 + 10_000.0 * 2f32.powi(-20);
    assert_eq!(join_slices(&numbers, &rest).unwrap(), [expected; 4]);
    assert_eq!(decode(&numbers), [1.007_812_5; 4]);
}
