//! The measurements around a cast, against the format's own answers taken one element at a time.

mod common;

use common::{f32_inputs, grids};
use halfulp::cast::Cast;
use halfulp::measure::{UlpErrors, amax};
use halfulp::{Draw, E2M1, Format, bf16, f16};

/// The error of every element that counts, by `Format::ulp` and `Format::value`.
fn naive(x: &[f64], format: Format, scale: i32, codes: &[u16]) -> (u64, f64, f64) {
    let (mut n, mut sum, mut squares) = (0, 0.0, 0.0);
    for (&x, &code) in x.iter().zip(codes) {
        let x = x * common::pow2(-scale);
        let smallest = format.min();
        if x >= smallest && x <= format.max() {
            let error = (format.value(code) - x) / format.ulp(x);
            (n, sum, squares) = (n + 1, sum + error, squares + error * error);
        }
    }
    (n, sum, squares)
}

fn close(a: f64, b: f64, n: u64) -> bool {
    (a - b).abs() <= 1e-13 * (n as f64 + 1.0)
}

#[test]
fn every_format_scale_and_source() {
    let mut formats: Vec<Format> = grids().map(|grid| grid.spec.format).collect();
    formats.push(Format::builder(3, 4).build().unwrap());
    formats.push(Format::builder(4, 7).unsigned().without_zero().build().unwrap());
    formats.push(Format::builder(2, 2).build().unwrap());
    for format in formats {
        let x: Vec<f32> = grids().flat_map(|grid| f32_inputs(&grid).into_iter().step_by(7)).collect();
        let narrow: Vec<f16> = x.iter().map(|&x| f16::from_f32(x)).collect();
        for scale in [0, -126, 3, 127] {
            for cast in [Cast::nearest(), Cast::stochastic(Draw::seeded(1))] {
                let cast = cast.scale(scale);
                let (mut codes, mut bytes) = (vec![0; x.len()], vec![0; format.bytes(x.len())]);
                let measured = [
                    {
                        cast.into_codes(&x, format, &mut codes).unwrap();
                        cast.into_bytes(&x, format, &mut bytes).unwrap();
                        let wide: Vec<f64> = x.iter().map(|&x| x.into()).collect();
                        let naive = naive(&wide, format, scale, &codes);
                        let from_wide = UlpErrors::of(&wide, format, scale, &bytes).unwrap();
                        let from_source = UlpErrors::of(&x, format, scale, &bytes).unwrap();
                        assert_eq!(from_source, from_wide, "{format}");
                        (from_source, naive)
                    },
                    {
                        cast.into_codes(&narrow, format, &mut codes).unwrap();
                        cast.into_bytes(&narrow, format, &mut bytes).unwrap();
                        let wide: Vec<f64> = narrow.iter().map(|&x| x.into()).collect();
                        let naive = naive(&wide, format, scale, &codes);
                        (UlpErrors::of(&narrow, format, scale, &bytes).unwrap(), naive)
                    },
                ];
                for (errors, (n, sum, squares)) in measured {
                    assert_eq!(errors.elements, n, "{format} scale {scale}");
                    assert!(close(errors.sum, sum, n), "{format} scale {scale}: {} against {sum}", errors.sum);
                    assert!(close(errors.sum_of_squares, squares, n), "{format} scale {scale}");
                }
            }
        }
    }
}

/// The sums do not depend on threads, and lengths around every chunk are whole.
#[cfg(feature = "parallel")]
#[test]
fn threads_and_lengths() {
    let x: Vec<f32> = (0..200_000).map(|i| (i as f32 * 0.37).sin()).collect();
    for format in [Format::BF16, Format::E4M3, Format::E2M1, Format::E3M2] {
        for n in [0, 1, 7, 8, 9, 511, 513, 32_767, 32_769, 65_536, 199_999] {
            let mut bytes = vec![0; format.bytes(n)];
            Cast::stochastic(Draw::seeded(3)).into_bytes(&x[..n], format, &mut bytes).unwrap();
            let of = || UlpErrors::of(&x[..n], format, 0, &bytes).unwrap();
            let [one, three] =
                [1, 3].map(|n| rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap().install(of));
            assert_eq!((one.elements, one), (n as u64, three), "{format} {n}");
        }
    }
}

#[test]
fn largest_magnitudes() {
    assert_eq!(amax::<f32>(&[]), 0.0);
    assert_eq!(amax(&[f32::NAN, f32::INFINITY, -0.0]), 0.0);
    assert_eq!(amax(&[1.0, -f64::MAX, f64::NEG_INFINITY]), f64::MAX);
    assert_eq!(amax(&[f16::MAX, f16::INFINITY]), 65_504.0);
    assert_eq!(amax(&[bf16::MIN_POSITIVE_SUBNORMAL]), common::pow2(-133));
    let mut x = vec![0.25f32; 100_000];
    for i in [0, 511, 32_768, 99_999] {
        x[i] = -2.0;
        assert_eq!(amax(&x), 2.0);
        x[i] = 0.25;
    }
}

/// What no neighbour was there for is left out, a saturated value that rounds to the largest among it.
#[test]
fn what_counts() {
    let mut bytes = [0; 4];
    let x = [6.5f32, f32::NAN, f32::INFINITY, 2.25, -6.0, -1e9, 0.25];
    Cast::nearest().into_packed::<E2M1>(&x, &mut bytes).unwrap();
    let errors = UlpErrors::of(&x, Format::E2M1, 0, &bytes).unwrap();
    assert_eq!((errors.elements, errors.sum, errors.sum_of_squares), (3, -0.75, 0.3125)); // 2.25 -> 2, -6, 0.25 -> 0
    let mut bytes = [0; 3];
    let x = [-1.0f32, -0.0, 1.015_625];
    Cast::nearest().into_bytes(&x, Format::UE4M4, &mut bytes).unwrap();
    assert_eq!(UlpErrors::of(&x, Format::UE4M4, 0, &bytes).unwrap().elements, 2);
    // Below code 0 of a format without zero there is one neighbour alone.
    let (x, mut packed) = ([0.0f32, 0.1, 0.125, 0.2], [0; 2]);
    Cast::nearest().into_bytes(&x, Format::UE2M2NZ, &mut packed).unwrap();
    assert_eq!(UlpErrors::of(&x, Format::UE2M2NZ, 0, &packed).unwrap().elements, 2);
    let error = UlpErrors::of(&[0f32; 3], Format::BF16, 0, &bytes).unwrap_err();
    assert_eq!(error.to_string(), "out: expected 6 bytes, got 3");
    let none = UlpErrors::default();
    assert!(none.mean().is_nan());
    #[cfg(feature = "std")]
    assert!(none.standard_error().is_nan());
}
