//! The same properties on every path of the casts: the definition, each instruction-set level, threads, chunks, packed
//! bytes, codes, bytes, wider and narrower sources.

mod common;

use common::{Grid, Inputs, f32_inputs, grids, is_ieee, special_f32};
use halfulp::cast::{Cast, CastError, Report};
use halfulp::random::{Draws, SrStates, Stream};
use halfulp::round::{Mode, Overflow, RandomBits, round};
use halfulp::{Draw, E2M1, E2M3, E3M2, Format, Isa, UE2M2, UE2M2Nz, bf16, f16};

/// A way of casting f32 to the codes of a format.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Path {
    Definition,
    Baseline,
    Best,
    EachLevel,
    Threads,
    Chunked,
    Packed,
    Bytes,
    FromF64,
}

#[derive(Clone, Copy)]
enum Rounding {
    Nearest,
    /// A draw, and the index of the first element.
    Stochastic(Draw, u64),
    SrStates(SrStates),
}

impl Path {
    fn cast(self, format: Format, x: &[f32], rounding: Rounding, overflow: Overflow) -> Vec<u16> {
        match rounding {
            Rounding::Nearest => self.with(format, x, |_| Cast::nearest().overflow(overflow), |_, _| None),
            Rounding::Stochastic(draw, base) => {
                let cast = |first| Cast::stochastic(draw.at(base + first)).overflow(overflow);
                let draw = draw.at(base);
                self.with(format, x, cast, |i, wide| Some(if wide { draw.draw32(i) } else { draw.draw16(i).into() }))
            }
            Rounding::SrStates(draw) => {
                let cast = |first| Cast::stochastic(draw.advanced(first)).overflow(overflow);
                self.with(format, x, cast, |i, wide| Some(if wide { draw.draw32(i) } else { draw.draw16(i).into() }))
            }
        }
    }

    fn with<D: Draws>(
        self,
        format: Format,
        x: &[f32],
        cast: impl Fn(u64) -> Cast<D> + Sync,
        draw: impl Fn(u64, bool) -> Option<u32>,
    ) -> Vec<u16> {
        let mut codes = vec![0xAAAA; x.len()];
        match self {
            Self::Definition => {
                let wide = format != Format::BF16;
                for ((code, &x), i) in codes.iter_mut().zip(x).zip(0..) {
                    let mode = match draw(i, wide) {
                        None => Mode::NearestEven,
                        Some(r) => Mode::Stochastic(RandomBits::new(r, if wide { 32 } else { 16 }).unwrap()),
                    };
                    *code = round(x, format, mode, cast(0).overflow_or_default(format));
                }
            }
            Self::Baseline => drop(cast(0).isa(Isa::BASELINE).into_codes(x, format, &mut codes).unwrap()),
            Self::Best => drop(cast(0).into_codes(x, format, &mut codes).unwrap()),
            Self::EachLevel => {
                let mut all = Isa::available().map(|isa| {
                    let mut codes = vec![0xAAAA; x.len()];
                    cast(0).isa(isa).into_codes(x, format, &mut codes).unwrap();
                    (isa, codes)
                });
                (_, codes) = all.next().unwrap();
                for (isa, other) in all {
                    assert_eq!(codes, other, "{isa} against the baseline");
                }
            }
            Self::Threads => {
                for threads in [1, 2, 3] {
                    let mut here = vec![0xAAAA; x.len()];
                    in_pool(threads, || cast(0).into_codes(x, format, &mut here).unwrap());
                    assert!(threads == 1 || here == codes, "{threads} threads against 1");
                    codes = here;
                }
            }
            Self::Chunked => {
                // Odd cuts, empty ones among them.
                let mut sizes = [0, 1, 3, 511, 512, 513, 1000, 5, 0, 4097].into_iter().cycle();
                let mut first = 0;
                while first < x.len() {
                    let end = x.len().min(first + sizes.next().unwrap());
                    cast(first as u64).into_codes(&x[first..end], format, &mut codes[first..end]).unwrap();
                    first = end;
                }
            }
            Self::Packed => {
                let packed = match format {
                    Format::E2M1 => cast(0).to_packed::<E2M1>(x).unwrap().into_bytes(),
                    Format::UE2M2 => cast(0).to_packed::<UE2M2>(x).unwrap().into_bytes(),
                    Format::UE2M2NZ => cast(0).to_packed::<UE2M2Nz>(x).unwrap().into_bytes(),
                    Format::E2M3 => cast(0).to_packed::<E2M3>(x).unwrap().into_bytes(),
                    Format::E3M2 => cast(0).to_packed::<E3M2>(x).unwrap().into_bytes(),
                    _ => return Self::Bytes.with(format, x, cast, draw),
                };
                unpack_bits(format, &packed, &mut codes);
            }
            Self::Bytes => {
                let mut bytes = vec![0xAA; format.bytes(x.len())];
                cast(0).into_bytes(x, format, &mut bytes).unwrap();
                unpack_bits(format, &bytes, &mut codes);
            }
            Self::FromF64 => {
                let x: Vec<f64> = x.iter().map(|&x| widen(x)).collect();
                cast(0).into_codes(&x, format, &mut codes).unwrap();
            }
        }
        codes
    }
}

/// f32 to f64 on bits, since hardware may quiet a NaN.
fn widen(x: f32) -> f64 {
    if x.is_nan() {
        f64::from_bits(u64::from(x.to_bits() >> 31) << 63 | 0x7FF << 52 | common::payload32(x))
    } else {
        x.into()
    }
}

trait OverflowOf {
    fn overflow_or_default(&self, format: Format) -> Overflow;
}

impl<D: Draws> OverflowOf for Cast<D> {
    /// Reads the policy back from what the cast does to a too large value.
    fn overflow_or_default(&self, format: Format) -> Overflow {
        let mut code = [0];
        self.into_codes(&[f64::MAX], format, &mut code).unwrap();
        if code[0] == format.max_code() { Overflow::Saturate } else { Overflow::Ieee }
    }
}

/// The obvious reader of the documented layout: bit `k` of the stream is bit `k % 8` of byte `k / 8`.
fn unpack_bits(format: Format, bytes: &[u8], codes: &mut [u16]) {
    let width = match format.bits() {
        4 => 4,
        6 => 6,
        9.. => 16,
        _ => 8,
    };
    for (i, code) in codes.iter_mut().enumerate() {
        *code = (0..width)
            .map(|b| i * width + b)
            .enumerate()
            .fold(0, |code, (b, k)| code | u16::from(bytes[k / 8] >> (k % 8) & 1) << b);
    }
}

#[cfg(feature = "parallel")]
fn in_pool<R: Send>(threads: usize, work: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(work)
}

#[cfg(not(feature = "parallel"))]
fn in_pool<R>(_: usize, work: impl FnOnce() -> R) -> R {
    work()
}

fn policies() -> [Overflow; 2] {
    [Overflow::Saturate, Overflow::Ieee]
}

fn roundings() -> [Rounding; 4] {
    [
        Rounding::Nearest,
        Rounding::Stochastic(Draw::seeded(42).step(3).named("w"), 0),
        Rounding::Stochastic(Draw::seeded(u64::MAX).tensor(9).stream(Stream::Philox), (1 << 34) - 1000),
        Rounding::SrStates(SrStates::seeded(7).advanced(0xFFFF_FF00)),
    ]
}

/// The path gives what the oracle gives, nearest and under each stream.
fn oracle(path: Path) {
    for grid in grids() {
        let format = grid.spec.format;
        let x = f32_inputs(&grid);
        for overflow in policies() {
            for rounding in roundings() {
                let codes = path.cast(format, &x, rounding, overflow);
                let wide = format != Format::BF16;
                for (i, (&x, code)) in x.iter().zip(codes).enumerate() {
                    let (ieee, payload, i) = (overflow == Overflow::Ieee, common::payload32(x), i as u64);
                    let stochastic = |r16: u16, r32: u32| {
                        let (r, n) = if wide { (r32, 32) } else { (r16.into(), 16) };
                        grid.stochastic(x.into(), payload, ieee, r, n)
                    };
                    let expected = match rounding {
                        Rounding::Nearest => grid.nearest(x.into(), payload, ieee),
                        Rounding::Stochastic(draw, base) => {
                            stochastic(draw.at(base).draw16(i), draw.at(base).draw32(i))
                        }
                        Rounding::SrStates(draw) => stochastic(draw.draw16(i), draw.draw32(i)),
                    };
                    assert_eq!(code, expected, "{path:?} {format} {x:e} ({:#x}) at {i}, {overflow:?}", x.to_bits());
                }
            }
        }
    }
}

/// Representable values never move, whatever the random bits.
fn identity(path: Path) {
    for grid in grids() {
        let format = grid.spec.format;
        let (codes, x): (Vec<u16>, Vec<f32>) =
            format.values().filter(|(_, value)| value.is_finite()).map(|(code, value)| (code, value as f32)).unzip();
        for rounding in roundings() {
            for seed in 0..4 {
                let rounding = match rounding {
                    Rounding::Stochastic(draw, base) => Rounding::Stochastic(draw.step(seed), base),
                    other => other,
                };
                assert_eq!(path.cast(format, &x, rounding, Overflow::of(format)), codes, "{path:?} {format}");
            }
        }
    }
}

/// sr(-x, r) = -sr(x, r) in signed formats, NaN included where the format has one.
fn symmetry(path: Path) {
    for grid in grids().filter(|grid| grid.spec.signed) {
        let format = grid.spec.format;
        let x: Vec<f32> = f32_inputs(&grid).into_iter().filter(|x| !x.is_nan() || format.has_nan()).collect();
        let minus: Vec<f32> = x.iter().map(|x| f32::from_bits(x.to_bits() ^ 1 << 31)).collect();
        let sign = 1 << (format.bits() - 1);
        for rounding in roundings() {
            let a = path.cast(format, &x, rounding, Overflow::of(format));
            let b = path.cast(format, &minus, rounding, Overflow::of(format));
            assert!(a.iter().zip(&b).all(|(a, b)| a ^ sign == *b), "{path:?} {format}");
        }
    }
}

/// Infinity, NaN, zeros and negatives have the answers of the documentation for every draw.
fn specials(path: Path) {
    for grid in grids() {
        let format = grid.spec.format;
        let specials = special_f32();
        let x: Vec<f32> = specials.iter().copied().cycle().take(40 * specials.len()).collect();
        for overflow in policies() {
            for rounding in roundings() {
                for (&x, code) in x.iter().zip(path.cast(format, &x, rounding, overflow)) {
                    let value = format.value(code);
                    if x.is_nan() {
                        assert!(value.is_nan() || !format.has_nan() && code == format.max_code(), "{path:?} {format}");
                    } else if x.is_infinite() && (x > 0.0 || format.is_signed()) {
                        let right = match (overflow, format.has_infinity(), format.has_nan()) {
                            (Overflow::Ieee, true, _) => value == f64::from(x),
                            (Overflow::Ieee, false, true) => value.is_nan(),
                            _ => value == format.max().copysign(f64::from(x)),
                        };
                        assert!(right, "{path:?} {format} {x} gave {value}");
                    } else if x == 0.0 {
                        let zero = if format.has_zero() { 0.0 } else { format.min_positive() };
                        assert_eq!(value, zero);
                        assert_eq!(value.is_sign_negative(), format.is_signed() && x.is_sign_negative());
                    } else if x < 0.0 && !format.is_signed() {
                        assert!(if format == Format::E8M0 { code == 0xFF } else { code == 0 }, "{path:?} {format}");
                    }
                }
            }
        }
    }
}

/// Neighbours only: a stochastic result is one of the two that enclose the source.
fn neighbours(path: Path) {
    for grid in grids() {
        let format = grid.spec.format;
        let x: Vec<f32> =
            f32_inputs(&grid).into_iter().filter(|x| x.is_finite() && (format.is_signed() || *x >= 0.0)).collect();
        let codes = path.cast(format, &x, roundings()[1], Overflow::Saturate);
        for (&x, code) in x.iter().zip(codes) {
            let value = format.value(code);
            let (low, high) = format.neighbours(x.into());
            let near = Some(value) == low.filter(|v| v.is_finite()) || Some(value) == high.filter(|v| v.is_finite());
            assert!(near, "{path:?} {format} {x:e} gave {value}, not {low:?} or {high:?}");
        }
    }
}

/// The draws that decide: for a value with exact threshold T (`!r < T` goes up), r = !T stays and r = !(T-1) goes up. The
/// compatibility hash is a bijection, so a slice can be given any draw at any place.
fn thresholds(path: Path) {
    let mut inputs = Inputs(5);
    for grid in grids() {
        let format = grid.spec.format;
        let n = if format == Format::BF16 { 16 } else { 32 };
        for x in f32_inputs(&grid).into_iter().step_by(53).filter(|x| x.is_finite()) {
            let ups = threshold(&grid, x, n);
            let at = (inputs.next() % 70) as usize;
            for (draw, up) in [(ups.checked_sub(1), true), (Some(ups).filter(|&t| t < 1 << n), false)] {
                let Some(draw) = draw else { continue };
                let r = !(draw as u32) & (u32::MAX >> (32 - n));
                // BF16 reads the low 16 bits of the hashed counter.
                let word = if n == 16 { r | (inputs.next() as u32) << 16 } else { r };
                let start = unhash(word).wrapping_sub(at as u32);
                let slice = [x; 70];
                let codes =
                    path.cast(format, &slice, Rounding::SrStates(SrStates::seeded(start.into())), Overflow::Saturate);
                let expected = grid.encode(x.into(), 0, false, |_, _| up);
                assert_eq!(codes[at], expected, "{path:?} {format} {x:e} r {r:#x}");
            }
        }
    }
}

/// How many of the 2^n draws go up, by the centred rule in exact numbers.
fn threshold(grid: &Grid, x: f32, n: i32) -> u64 {
    let ups = std::cell::Cell::new(0);
    grid.encode(x.into(), 0, false, |d, _| {
        ups.set((((d * common::pow2(n + 1)).floor() + 1.0) / 2.0).floor() as u64);
        false
    });
    ups.get()
}

/// The inverse of the compatibility hash.
fn unhash(x: u32) -> u32 {
    let inverse = |odd: u32| (0..5).fold(odd, |y, _| y.wrapping_mul(2u32.wrapping_sub(odd.wrapping_mul(y))));
    let mut x = x ^ x >> 16;
    x = x.wrapping_mul(inverse(0x846C_A68B));
    x ^= x >> 15 ^ x >> 30;
    x = x.wrapping_mul(inverse(0x7FEB_352D));
    x ^ x >> 16
}

#[test]
fn unhash_is_the_inverse() {
    for x in [0, 1, 7, 0xFFFF_FFFF, 0x1234_5678] {
        assert_eq!(halfulp::random::sr_states_hash(unhash(x)), x);
    }
}

/// Lengths around every block and chunk, and every alignment of the first element, against single elements.
fn lengths(path: Path) {
    let mut inputs = Inputs(1);
    let x: Vec<f32> = (0..70_000).map(|_| inputs.next() as i32 as f32 * 1e-9).collect();
    for format in [Format::BF16, Format::E4M3, Format::E2M1, Format::E3M2] {
        let rounding = |first: u64| Rounding::Stochastic(Draw::seeded(1), first);
        for first in [0, 1, 2, 3, 5, 511] {
            let whole = Path::Definition.cast(format, &x[..1200], rounding(first), Overflow::Saturate);
            for n in [0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 63, 64, 65, 127, 511, 512, 513, 1023, 1024, 1025, 1200] {
                let part = path.cast(format, &x[..n], rounding(first), Overflow::Saturate);
                assert_eq!(part, whole[..n], "{path:?} {format} n {n} from {first}");
            }
        }
        for n in [32_767, 32_768, 32_769, 65_535, 65_536, 65_537, 70_000] {
            let whole = Path::Definition.cast(format, &x[..n], rounding(3), Overflow::Saturate);
            assert_eq!(path.cast(format, &x[..n], rounding(3), Overflow::Saturate), whole, "{path:?} {format} n {n}");
        }
    }
}

macro_rules! on_every_path {
    ($($module:ident: $path:ident;)*) => {$(
        mod $module {
            use super::Path::$path as PATH;
            #[test]
            fn oracle() { super::oracle(PATH); }
            #[test]
            fn identity() { super::identity(PATH); }
            #[test]
            fn symmetry() { super::symmetry(PATH); }
            #[test]
            fn specials() { super::specials(PATH); }
            #[test]
            fn neighbours() { super::neighbours(PATH); }
            #[test]
            fn thresholds() { super::thresholds(PATH); }
            #[test]
            fn lengths() { super::lengths(PATH); }
        }
    )*};
}

on_every_path! {
    definition: Definition;
    baseline: Baseline;
    best: Best;
    each_level: EachLevel;
    threads: Threads;
    chunked: Chunked;
    packed: Packed;
    bytes: Bytes;
    from_f64: FromF64;
}

/// f16 and bf16 sources are f32 sources of the same values.
#[test]
fn narrow_sources() {
    let f16s: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
    let bf16s: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    for grid in grids() {
        let format = grid.spec.format;
        for isa in Isa::available() {
            let draw = Draw::seeded(3);
            let (mut codes, mut expected) = (vec![0; 1 << 16], vec![0; 1 << 16]);
            let cast = Cast::stochastic(draw).isa(isa).overflow(Overflow::Ieee);
            cast.into_codes(&f16s, format, &mut codes).unwrap();
            for ((expected, &x), i) in expected.iter_mut().zip(&f16s).zip(0..) {
                *expected = element(draw, x, i, format);
            }
            assert_eq!(codes, expected, "{format} from f16 on {isa}");
            cast.into_codes(&bf16s, format, &mut codes).unwrap();
            for ((expected, &x), i) in expected.iter_mut().zip(&bf16s).zip(0..) {
                *expected = element(draw, x, i, format);
            }
            assert_eq!(codes, expected, "{format} from bf16 on {isa}");
        }
    }
}

fn element(draw: Draw, x: impl halfulp::round::Source, i: u64, format: Format) -> u16 {
    let bits = match format {
        Format::BF16 => RandomBits::of16(draw.draw16(i)),
        _ => RandomBits::of32(draw.draw32(i)),
    };
    round(x, format, Mode::Stochastic(bits), Overflow::Ieee)
}

/// A scale is exact: x cast with scale k is x * 2^-k cast, wherever that product is exact in f64.
#[test]
fn scales() {
    for grid in grids() {
        let format = grid.spec.format;
        let x = f32_inputs(&grid);
        for k in [-126, -40, -1, 0, 1, 17, 127] {
            let scaled: Vec<f64> =
                x.iter().map(|&x| widen(x)).map(|x| if x.is_nan() { x } else { x * common::pow2(-k) }).collect();
            for isa in Isa::available() {
                let (mut a, mut b) = (vec![0; x.len()], vec![0; x.len()]);
                let cast = Cast::stochastic(Draw::seeded(5)).isa(isa);
                let report = cast.scale(k).into_codes(&x, format, &mut a).unwrap();
                let expected = cast.into_codes(&scaled, format, &mut b).unwrap();
                assert_eq!(a, b, "{format} scale {k} on {isa}");
                assert_eq!(report, expected);
            }
        }
    }
}

/// Formats that no lane serves, and modes that take no draw, still cast slices.
#[test]
fn formats_and_modes_without_lanes() {
    // An exponent range beyond f32's on both sides.
    let wide = Format::builder(10, 5).build().unwrap();
    let x: Vec<f32> = special_f32().into_iter().filter(|x| x.is_finite()).collect();
    let mut codes = vec![0; x.len()];
    Cast::nearest().into_codes(&x, wide, &mut codes).unwrap();
    for (&x, code) in x.iter().zip(codes) {
        assert_eq!(code, round(x, wide, Mode::NearestEven, Overflow::Saturate));
        let (low, high) = wide.neighbours(x.into());
        assert!(Some(wide.value(code)) == low || Some(wide.value(code)) == high, "{x:e}");
    }
    for (cast, mode) in [
        (Cast::nearest_away(), Mode::NearestAway),
        (Cast::toward_zero(), Mode::TowardZero),
        (Cast::up(), Mode::Up),
        (Cast::down(), Mode::Down),
    ] {
        let mut codes = vec![0; x.len()];
        cast.into_codes(&x, Format::E4M3, &mut codes).unwrap();
        assert!(x.iter().zip(codes).all(|(&x, code)| code == round(x, Format::E4M3, mode, Overflow::Saturate)));
    }
}

#[test]
fn reports() {
    let x = [1.0, f32::NAN, 1e9, f32::INFINITY, -1.0, f32::NEG_INFINITY, -0.0, -1e9, 448.0, 464.0];
    for isa in Isa::available() {
        let report = |format| {
            let mut codes = [0; 10];
            let Report { elements, nan, overflow, negative, .. } =
                Cast::nearest().isa(isa).into_codes(&x, format, &mut codes).unwrap();
            (elements, nan, overflow, negative)
        };
        assert_eq!(report(Format::E4M3), (10, 1, 4, 0)); // 464 rounds to 448
        assert_eq!(report(Format::E5M2), (10, 1, 4, 0));
        assert_eq!(report(Format::UE4M4), (10, 1, 2, 3));
        assert_eq!(report(Format::E2M1), (10, 1, 6, 0));
        assert_eq!(report(Format::BF16), (10, 1, 2, 0));
    }
}

#[test]
fn refusals_write_nothing() {
    use halfulp::cast::MissingNan;
    let x = [1.0f32, f32::NAN];
    let mut codes = [0xAA; 2];
    let strict = Cast::nearest().missing_nan(MissingNan::Refuse);
    let error = strict.into_codes(&x, Format::E2M1, &mut codes).unwrap_err();
    assert_eq!(error, CastError::Nan { format: Format::E2M1, index: 1 });
    assert_eq!(error.to_string(), "x: expected no NaN, for E2M1 has none, got one at index 1");
    assert!(strict.into_codes(&x, Format::E4M3, &mut codes.clone()).is_ok());
    let error = strict.into_codes(&x, Format::E4M3, &mut codes[..1]).unwrap_err();
    assert_eq!(error.to_string(), "out: expected 2 elements, got 1");
    let error = strict.into_packed::<E2M1>(&[1.0f32; 3], &mut [0; 1]).unwrap_err();
    assert_eq!(error.to_string(), "out: expected 2 bytes, got 1");
    assert_eq!(codes, [0xAA; 2]);
}

/// The default of a cast is the default of its target.
#[test]
fn default_overflow() {
    for grid in grids() {
        let mut code = [0];
        Cast::nearest().into_codes(&[f32::MAX], grid.spec.format, &mut code).unwrap();
        let expected = grid.nearest_f32(f32::MAX, is_ieee(grid.spec.format));
        assert_eq!(code[0], expected);
    }
}

#[test]
fn decoding() {
    use halfulp::{E4M3, decode, format::PackedVec};
    let codes: Vec<E4M3> = (0..=255).map(E4M3::from_bits).collect();
    for (x, code) in decode(&codes).iter().zip(0u16..) {
        let value = Format::E4M3.value(code) as f32;
        assert!(x == &value || x.is_nan() && value.is_nan());
    }
    let packed: PackedVec<E2M3> = (0..100).map(E2M3::from_bits).collect();
    assert_eq!(packed.decode(), packed.iter().map(E2M3::to_f32).collect::<Vec<_>>());
}
