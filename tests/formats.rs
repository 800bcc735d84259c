//! The questions anyone asks of a format, against the plain list of its values.

mod common;

use common::{Grid, Inputs, grids, pow2};
use halfulp::format::{FormatError, Negative, Specials, power_of_two_scale};
use halfulp::{E2M1, E4M3, E5M2, E8M0, Element, Format, PackedVec, UE2M2Nz, UE4M4, UE5M3};

/// Every value of the format in ascending order, infinities included.
fn all_values(grid: &Grid) -> Vec<f64> {
    let finite = &grid.values[..grid.values.len() - 1];
    let mut all = finite.to_vec();
    if grid.spec.format.has_infinity() {
        all.push(f64::INFINITY);
    }
    if grid.spec.signed {
        all.extend(all.clone().iter().filter(|&&v| v != 0.0).map(|v| -v));
    }
    all.sort_by(f64::total_cmp);
    all
}

#[test]
fn extremes() {
    for (format, smallest, normal, max) in [
        (Format::BF16, pow2(-133), pow2(-126), 255.0 * pow2(120)),
        (Format::FP16, pow2(-24), pow2(-14), 65_504.0),
        (Format::E4M3, pow2(-9), pow2(-6), 448.0),
        (Format::E5M2, pow2(-16), pow2(-14), 57_344.0),
        (Format::E3M2, pow2(-4), pow2(-2), 28.0),
        (Format::E2M3, 0.125, 1.0, 7.5),
        (Format::E2M1, 0.5, 1.0, 6.0),
        (Format::UE5M3, pow2(-17), pow2(-14), 114_688.0),
        (Format::UE4M4, pow2(-10), pow2(-6), 480.0),
        (Format::UE2M2, 0.25, 1.0, 7.0),
        (Format::UE2M2NZ, 0.125, 1.0, 7.0),
        (Format::E8M0, pow2(-127), pow2(-126), pow2(127)),
    ] {
        assert_eq!(
            (format.min_positive(), format.min_positive_normal(), format.max()),
            (smallest, normal, max),
            "{format}"
        );
        assert_eq!(format.min(), if format.is_signed() { -max } else { format.value(0) });
    }
}

#[test]
fn neighbours_are_those_of_the_list() {
    let mut inputs = Inputs(2);
    for grid in grids() {
        let format = grid.spec.format;
        let all = all_values(&grid);
        let mut points: Vec<f64> = all.iter().step_by((all.len() / 500).max(1)).copied().collect();
        points.extend(
            all.windows(2).step_by((all.len() / 500).max(1)).map(|w| w[0].max(-1e300) / 2.0 + w[1].min(1e300) / 2.0),
        );
        points.extend([0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, 1e-300, -1e-300, 5e-324, f64::MAX, f64::MIN]);
        points.extend((0..2000).map(|_| f64::from_bits(inputs.next())).filter(|x| !x.is_nan()));
        for x in points {
            let low = all.iter().copied().rfind(|&v| v <= x);
            let high = all.iter().copied().find(|&v| v >= x);
            assert_eq!(format.neighbours(x), (low, high), "{format} at {x:e}");
            assert_eq!(format.next_up(x), all.iter().copied().find(|&v| v > x), "{format} above {x:e}");
            assert_eq!(format.next_down(x), all.iter().copied().rfind(|&v| v < x), "{format} below {x:e}");
        }
        assert_eq!(format.neighbours(f64::NAN), (None, None));
        assert_eq!((format.next_up(f64::NAN), format.next_down(f64::NAN)), (None, None));
    }
}

#[test]
fn ulp_is_the_gap() {
    for grid in grids() {
        let format = grid.spec.format;
        for pair in grid.values.windows(2) {
            let (low, high) = (pair[0], pair[1]);
            for x in [low, low + (high - low) / 2.0] {
                // Below code 1 of a format without zero the gap down to "nothing" is as wide as the one above.
                assert_eq!(format.ulp(x), high - low, "{format} at {x:e}");
                assert_eq!(format.ulp(-x), high - low);
            }
        }
        assert!(format.ulp(f64::NAN).is_nan() && format.ulp(f64::INFINITY).is_nan());
        assert_eq!(format.epsilon(), pow2(-(format.fraction_bits() as i32)));
    }
}

#[test]
fn codes_and_names() {
    for (name, format) in Format::NAMED {
        assert_eq!(format.to_string(), name);
        assert_eq!(name.to_lowercase().parse(), Ok(format));
        assert_eq!(format.values().len(), 1 << format.bits());
    }
    assert_eq!("f16".parse(), Ok(Format::FP16));
    let error = "e9m9".parse::<Format>().unwrap_err().to_string();
    assert!(error.starts_with("unknown format `e9m9`, expected one of bf16,"), "{error}");
    for (format, nan) in [
        (Format::BF16, Some(0x7FC0)),
        (Format::FP16, Some(0x7E00)),
        (Format::E4M3, Some(0x7F)),
        (Format::E5M2, Some(0x7E)),
        (Format::UE5M3, Some(0xFF)),
        (Format::UE4M4, Some(0xFF)),
        (Format::E8M0, Some(0xFF)),
        (Format::E2M1, None),
    ] {
        assert_eq!(format.nan_code(), nan, "{format}");
        assert!(nan.is_none_or(|code| format.value(code).is_nan()));
    }
    assert_eq!(Format::UE2M2NZ.value(0), 0.125);
    assert_eq!(Format::E8M0.value(0), pow2(-127));
}

#[test]
fn bytes_of_codes() {
    for (format, n, bytes) in [
        (Format::BF16, 3, 6),
        (Format::E4M3, 3, 3),
        (Format::E2M1, 0, 0),
        (Format::E2M1, 3, 2),
        (Format::E3M2, 1, 1),
        (Format::E3M2, 2, 2),
        (Format::E3M2, 3, 3),
        (Format::E3M2, 4, 3),
        (Format::E3M2, 5, 4),
        (Format::E2M1, usize::MAX, usize::MAX / 2 + 1),
        (Format::E2M3, usize::MAX, usize::MAX / 4 * 3 + 3),
    ] {
        assert_eq!(format.bytes(n), bytes, "{format} {n}");
    }
}

#[test]
fn descriptions_are_checked() {
    let error = |builder: halfulp::format::FormatBuilder| builder.build().unwrap_err();
    assert_eq!(error(Format::builder(0, 3)), FormatError::NoExponent);
    assert_eq!(error(Format::builder(8, 8)), FormatError::TooWide { bits: 17 });
    assert_eq!(error(Format::builder(200, 200)), FormatError::TooWide { bits: 401 });
    assert_eq!(error(Format::builder(4, 0).specials(Specials::Ieee)), FormatError::NoFractionForNan);
    assert_eq!(error(Format::builder(1, 2).specials(Specials::Ieee)), FormatError::NoNormal);
    assert_eq!(error(Format::builder(1, 0).unsigned().specials(Specials::NanOnly)), FormatError::NoNormal);
    assert_eq!(error(Format::builder(4, 3).without_zero()), FormatError::SignedWithoutZero);
    assert_eq!(error(Format::builder(4, 3).unsigned().negative(Negative::Nan)), FormatError::NegativeNan);
    assert_eq!(error(Format::builder(11, 4)), FormatError::OutOfRange { bias: 1023 });
    assert_eq!(error(Format::builder(4, 3).bias(i32::MIN)), FormatError::OutOfRange { bias: i32::MIN });
    assert_eq!(
        Format::builder(8, 8).build().unwrap_err().to_string(),
        "exponent_bits + fraction_bits + sign: expected at most 16 bits, got 17"
    );
    let e3m4 = Format::builder(3, 4).build().unwrap();
    assert_eq!(
        (e3m4.max(), e3m4.min_positive(), e3m4.to_string().as_str()),
        (31.0, pow2(-6), "E3M4(bias 3, numbers only)")
    );
    let built = Format::builder(4, 3).specials(Specials::NanOnly).build();
    assert_eq!(built, Ok(Format::E4M3));
}

/// The storage types are their formats: constants, round trips of every code, comparison by value.
#[test]
fn storage_types() {
    fn check<T: Element + Into<f64>>(from_f32: impl Fn(f32) -> T, ignored: u16) {
        let format = T::FORMAT;
        for (code, value) in format.values() {
            let x = T::from_code(code);
            assert_eq!(T::from_code(code | ignored).code(), code, "{format} ignores bits above the code");
            assert_eq!(x.code(), code);
            assert!(x.into() == value || value.is_nan() && x.into().is_nan());
            assert!(f64::from(x.value()) == value || value.is_nan());
            if !value.is_nan() {
                assert_eq!(from_f32(value as f32).code(), code, "{format} {code:#x}");
                assert_eq!(x.to_string(), (value as f32).to_string());
            }
        }
    }
    check(E4M3::from_f32, 0);
    check(E5M2::from_f32, 0);
    check(E2M1::from_f32, 0xF0);
    check(halfulp::E3M2::from_f32, 0xC0);
    check(halfulp::E2M3::from_f32, 0xC0);
    check(halfulp::UE2M2::from_f32, 0xF0);
    check(UE2M2Nz::from_f32, 0xF0);
    check(UE5M3::from_f32, 0);
    check(UE4M4::from_f32, 0);
    check(E8M0::from_f32, 0);
    assert_eq!((E4M3::ONE, E5M2::ONE, E2M1::ONE).0.to_f32(), 1.0);
    for one in [
        f64::from(E5M2::ONE),
        E2M1::ONE.into(),
        UE2M2Nz::ONE.into(),
        UE5M3::ONE.into(),
        UE4M4::ONE.into(),
        E8M0::ONE.into(),
    ] {
        assert_eq!(one, 1.0);
    }
    assert_eq!((E4M3::MIN.to_f32(), E5M2::NEG_INFINITY.to_f32()), (-448.0, f32::NEG_INFINITY));
    assert!(E4M3::NAN.is_nan() && E4M3::NAN != E4M3::NAN && E4M3::from_bits(0x80) == E4M3::ZERO);
    assert!(E4M3::from_f32(-1.0) < E4M3::ONE && E4M3::NAN.partial_cmp(&E4M3::ONE).is_none());
    assert_eq!(E4M3::from_bits(0xFF).total_cmp(&E4M3::MIN), std::cmp::Ordering::Less);
    const CONSTANT: E4M3 = E4M3::from_f32(0.3);
    assert_eq!(CONSTANT.to_bits(), 0x2A);
    let bytes: &[u8] = bytemuck::cast_slice(&[CONSTANT]);
    assert_eq!(bytes, [0x2A]);
}

#[test]
fn packed_slices() {
    for n in 0..20usize {
        let codes: Vec<u8> = (0..n).map(|i| (i * 7 % 16) as u8).collect();
        let mut v: PackedVec<E2M1> = codes.iter().map(|&c| E2M1::from_bits(c)).collect();
        let mut w: PackedVec<halfulp::E3M2> = codes.iter().map(|&c| halfulp::E3M2::from_bits(c * 4)).collect();
        assert_eq!((v.len(), v.as_bytes().len(), w.as_bytes().len()), (n, n.div_ceil(2), (6 * n).div_ceil(8)));
        assert_eq!((v.get(n), w.get(n)), (None, None));
        for (i, &code) in codes.iter().enumerate() {
            assert_eq!(v.as_bytes()[i / 2] >> (i % 2 * 4) & 0xF, code);
            assert_eq!((v.get(i).unwrap().to_bits(), w.get(i).unwrap().to_bits()), (code, code * 4));
        }
        assert_eq!(PackedVec::<E2M1>::from_bytes(v.as_bytes().to_vec(), n).as_ref(), Ok(&v));
        assert_eq!(PackedVec::<halfulp::E3M2>::from_bytes(w.as_bytes().to_vec(), n).as_ref(), Ok(&w));
        for i in 0..n {
            v.set(i, E2M1::MAX);
            w.set(i, halfulp::E3M2::MAX);
        }
        assert!(v.iter().all(|x| x == E2M1::MAX) && w.iter().all(|x| x == halfulp::E3M2::MAX));
    }
    let error = PackedVec::<E2M1>::from_bytes(vec![0; 2], 5).unwrap_err().to_string();
    assert_eq!(error, "bytes: expected 3 for 5 elements of E2M1, got 2");
    let error = PackedVec::<E2M1>::from_bytes(vec![0x11, 0x11], 3).unwrap_err().to_string();
    assert_eq!(error, "bytes: expected zero bits past element 3 of E2M1, got 0x11 in the last byte");
}

/// The smallest k with amax <= max * 2^k, by trying them all.
#[test]
fn scales() {
    let mut inputs = Inputs(4);
    for (_, format) in Format::NAMED {
        let mut amax: Vec<f64> =
            (0..500).map(|_| f64::from(f32::from_bits(inputs.next() as u32 >> 1))).filter(|x| x.is_finite()).collect();
        amax.extend([
            format.max(),
            format.max() * 0.999_999,
            format.max() * 1.000_001,
            1e-45,
            1e-300,
            5e-324,
            f64::from(f32::MAX),
            1e308,
        ]);
        for amax in amax {
            let k = (-126..=127).find(|&k| amax <= format.max() * pow2(k)).unwrap_or(127);
            assert_eq!(power_of_two_scale(format, amax), k, "{format} {amax:e}");
        }
        assert_eq!(power_of_two_scale(format, 0.0), 0);
    }
}
