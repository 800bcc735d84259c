//! Formats of any description, values of any bits: nothing panics, and everything is what the list of values says.
//!
//! `PROPTEST_CASES=100000 cargo test --test proptests` looks longer than the 256 cases a property that are the default.

use halfulp::cast::{Cast, Report};
use halfulp::format::{FormatBuilder, Negative, PackedError, PackedVec, Specials, SubByte, power_of_two_scale};
use halfulp::random::{Draws, Stream};
use halfulp::round::{FewBits, Mode, Overflow, RandomBits, Source, round, round_scaled};
use halfulp::{Draw, E2M1, E2M3, E3M2, Format, Isa, UE2M2, UE2M2Nz, bf16, f16};
use proptest::prelude::*;
use proptest::sample::{Index, select};

fn config() -> ProptestConfig {
    ProptestConfig { failure_persistence: None, max_local_rejects: u32::MAX, ..ProptestConfig::default() }
}

/// A description, valid or not.
#[derive(Clone, Copy, Debug)]
struct Shape {
    e: u8,
    m: u8,
    bias: Option<i32>,
    signed: bool,
    zero: bool,
    specials: Specials,
    negative: Negative,
}

impl Shape {
    fn builder(self) -> FormatBuilder {
        let mut builder = Format::builder(self.e, self.m).specials(self.specials).negative(self.negative);
        if let Some(bias) = self.bias {
            builder = builder.bias(bias);
        }
        if !self.signed {
            builder = builder.unsigned();
        }
        if !self.zero {
            builder = builder.without_zero();
        }
        builder
    }

    fn bits(self) -> u32 {
        u32::from(self.e) + u32::from(self.m) + u32::from(self.signed)
    }

    fn bias(self) -> i64 {
        self.bias.map_or_else(|| (1i64 << (self.e - 1)) - 1, i64::from)
    }

    /// Codes of finite values of one sign.
    fn finite(self) -> u32 {
        let all = 1 << (self.e + self.m);
        match self.specials {
            Specials::Ieee => all - (1 << self.m),
            Specials::NanOnly => all - 1,
            _ => all,
        }
    }

    /// What `build` promises to accept.
    fn is_valid(self) -> bool {
        if self.e == 0 || self.bits() > 16 || self.specials == Specials::Ieee && self.m == 0 {
            return false;
        }
        if self.signed && !self.zero {
            return false;
        }
        if self.negative == Negative::Nan && (self.signed || self.specials == Specials::Finite) {
            return false;
        }
        let last = i64::from(self.finite()) - 1;
        let largest = (last >> self.m) - self.bias();
        let smallest = 1 - self.bias() - i64::from(self.m) - i64::from(!self.zero);
        last >> self.m > 0 && largest <= 1023 && smallest >= -1022
    }

    /// The finite values of positive sign, from code 0 up.
    fn values(self) -> Vec<f64> {
        let (m, bias) = (i32::from(self.m), self.bias() as i32);
        let value = |code: u32| {
            let (field, fraction) = ((code >> m) as i32, f64::from(code & ((1 << m) - 1)));
            match field {
                0 => fraction * pow2(1 - bias - m),
                _ => (fraction + pow2(m)) * pow2(field - bias - m),
            }
        };
        let mut values: Vec<f64> = (0..self.finite()).map(value).collect();
        if !self.zero {
            values[0] = values[1] / 2.0;
        }
        values
    }
}

fn pow2(exponent: i32) -> f64 {
    // `powi` may go through a reciprocal that is not normal.
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// A valid description with its values.
#[derive(Clone)]
struct Grid {
    shape: Shape,
    format: Format,
    /// Finite, positive sign, from code 0 up.
    values: Vec<f64>,
}

impl std::fmt::Debug for Grid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.shape.fmt(f)
    }
}

impl Grid {
    fn new(shape: Shape) -> Option<Self> {
        let format = shape.builder().build().ok()?;
        Some(Self { shape, format, values: shape.values() })
    }

    fn max(&self) -> f64 {
        self.values[self.values.len() - 1]
    }

    fn max_code(&self) -> u16 {
        (self.values.len() - 1) as u16
    }

    fn sign(&self) -> u16 {
        if self.shape.signed { 1 << (self.shape.bits() - 1) } else { 0 }
    }

    /// From this value to the next, as if exponents did not end.
    fn step(&self, code: usize) -> f64 {
        match self.values.get(code + 1) {
            Some(next) => next - self.values[code],
            None => pow2((self.max().to_bits() >> 52) as i32 - 1023 - i32::from(self.shape.m)),
        }
    }

    /// All values, infinities too, each once, in order.
    fn sorted(&self) -> Vec<f64> {
        let mut all = self.values.clone();
        if self.shape.specials == Specials::Ieee {
            all.push(f64::INFINITY);
        }
        if self.shape.signed {
            let negative: Vec<f64> = all.iter().rev().filter(|&&v| v != 0.0).map(|v| -v).collect();
            all.splice(0..0, negative);
        }
        all
    }

    /// Of what is too large, without sign.
    fn beyond(&self, overflow: Overflow) -> u16 {
        let ieee = overflow == Overflow::Ieee && self.shape.specials != Specials::Finite;
        self.max_code() + u16::from(ieee) // the code above the largest is infinity, or the one NaN
    }

    /// Of any source that is not NaN.
    fn encode(&self, x: f64, mode: Mode, overflow: Overflow) -> u16 {
        let negative = x.is_sign_negative();
        if negative && !self.shape.signed && x != 0.0 {
            let nan = self.shape.negative == Negative::Nan;
            return if nan { self.format.nan_code().unwrap() } else { 0 };
        }
        let sign = if negative { self.sign() } else { 0 };
        let x = x.abs();
        let Some(code) = self.values.partition_point(|&v| v <= x).checked_sub(1) else {
            return 0; // below code 0 of a format without zero
        };
        let (low, step) = (self.values[code], self.step(code));
        if x.is_infinite() {
            return sign | self.beyond(overflow);
        }
        // Exact: `low` is a multiple of the last place of x, and the difference is below a step, or far above.
        let d = (x - low) / step;
        let up = x != low
            && match mode {
                Mode::NearestEven => d > 0.5 || d == 0.5 && code % 2 == 1,
                Mode::NearestAway => d >= 0.5,
                Mode::TowardZero => false,
                Mode::Up => !negative,
                Mode::Down => negative,
                _ => unreachable!("has no list of its own"),
            };
        self.finish(sign, code, up, d >= 1.0, mode, overflow)
    }

    /// Of a finite source by `count` random bits.
    fn stochastic(&self, x: f64, draw: u32, count: u32, rule: FewBits, overflow: Overflow) -> u16 {
        let mode = Mode::Stochastic(RandomBits::new(draw, count).unwrap());
        let down = self.encode(x, Mode::TowardZero, Overflow::Saturate);
        if x.is_sign_negative() && !self.shape.signed {
            return down;
        }
        let (sign, code) = (down & self.sign(), usize::from(down & !self.sign()));
        let d = (x.abs() - self.values[code]) / self.step(code);
        if d <= 0.0 {
            return down; // itself, or below code 0
        }
        let (one, r) = (pow2(count as i32), f64::from(draw));
        let up = match rule {
            FewBits::Centred => (d * 2.0 * one).floor() + 2.0 * r + 1.0 >= 2.0 * one,
            FewBits::Floor => (d * one).floor() + r >= one,
            _ => (d * one).round_ties_even() + r >= one,
        };
        self.finish(sign, code, up, d >= 1.0, mode, overflow)
    }

    fn finish(&self, sign: u16, code: usize, up: bool, over: bool, mode: Mode, overflow: Overflow) -> u16 {
        let code = code + usize::from(up);
        if code < self.values.len() && !over {
            return sign | code as u16;
        }
        sign | if stops(mode, sign != 0) { self.max_code() } else { self.beyond(overflow) }
    }
}

/// Whether a finite value that is too large rounds to the largest value.
fn stops(mode: Mode, negative: bool) -> bool {
    match mode {
        Mode::TowardZero => true,
        Mode::Up => negative,
        Mode::Down => !negative,
        _ => false,
    }
}

fn shapes() -> impl Strategy<Value = Shape> {
    let bits = prop_oneof![8 => 0u8..=17, 1 => any::<u8>()];
    let bias = prop_oneof![
        3 => Just(None),
        3 => (-40..60).prop_map(Some),
        3 => (-1100..1100).prop_map(Some),
        1 => any::<i32>().prop_map(Some),
    ];
    let specials = select(vec![Specials::Ieee, Specials::NanOnly, Specials::Finite]);
    let negative = select(vec![Negative::Smallest, Negative::Smallest, Negative::Nan]);
    (bits.clone(), bits, bias, any::<bool>(), prop::bool::weighted(0.7), specials, negative).prop_map(
        |(e, m, bias, signed, zero, specials, negative)| Shape { e, m, bias, signed, zero, specials, negative },
    )
}

/// A valid format: of any width, mostly narrow, or a named one.
fn grids() -> impl Strategy<Value = Grid> {
    let fit = |(mut shape, e, m): (Shape, u8, u8)| {
        shape.e = e;
        shape.m = m.min(16u8.saturating_sub(e + u8::from(shape.signed)));
        shape.signed &= e + shape.m < 16;
        shape.zero |= shape.signed;
        if shape.signed || shape.specials == Specials::Finite {
            shape.negative = Negative::Smallest;
        }
        Grid::new(shape)
    };
    let narrow = (shapes(), 1u8..=5, 0u8..=4).prop_filter_map("not valid", fit);
    let wide = (shapes(), 1u8..=11, 0u8..=15).prop_filter_map("not valid", fit);
    let named = select(Format::NAMED.to_vec()).prop_map(|(_, format)| {
        let shape = Shape {
            e: format.exponent_bits() as u8,
            m: format.fraction_bits() as u8,
            bias: Some(format.bias()),
            signed: format.is_signed(),
            zero: format.has_zero(),
            specials: format.specials(),
            negative: format.negative(),
        };
        Grid::new(shape).expect("named formats are valid")
    });
    prop_oneof![4 => narrow, 1 => wide, 2 => named]
}

/// Where an f64 lies in a format that is not known yet.
#[derive(Clone, Debug)]
enum Spot {
    Bits(u64),
    /// Some way up from a value to the next, moved by so many in the last place.
    Between(Index, f64, i64, bool),
    /// A significand in the range of the format and a little beyond.
    Range(f64, f64, bool),
}

impl Spot {
    fn on(&self, grid: &Grid) -> f64 {
        let signed = |x: f64, negative: bool| if negative { -x } else { x };
        match *self {
            Self::Bits(bits) => f64::from_bits(bits),
            Self::Between(i, part, ulps, negative) => {
                let code = i.index(grid.values.len());
                let x = grid.values[code] + grid.step(code) * part;
                let moved = f64::from_bits(x.to_bits().saturating_add_signed(ulps));
                signed(moved, negative)
            }
            Self::Range(part, significand, negative) => {
                let low = grid.values[usize::from(grid.shape.zero)].log2() - 3.0;
                let exponent = low + (grid.max().log2() + 2.0 - low) * part;
                signed(exponent.exp2() * significand, negative)
            }
        }
    }
}

fn spots() -> impl Strategy<Value = Spot> {
    let parts = select(vec![0.0, 0.0, 0.25, 0.5, 0.5, 0.5, 0.75, 0.1, 0.9]);
    let special = select(vec![0.0, 1.0, f64::MIN_POSITIVE, 5e-324, f64::MAX, f64::INFINITY, f64::NAN]);
    prop_oneof![
        1 => any::<u64>().prop_map(Spot::Bits),
        1 => (special, any::<bool>()).prop_map(|(x, minus)| Spot::Bits(x.to_bits() | u64::from(minus) << 63)),
        4 => (any::<Index>(), parts, -2i64..=2, any::<bool>()).prop_map(|(i, p, u, s)| Spot::Between(i, p, u, s)),
        2 => (0.0..1.0, 1.0..2.0, any::<bool>()).prop_map(|(p, x, s)| Spot::Range(p, x, s)),
    ]
}

fn plain_modes() -> impl Strategy<Value = Mode> {
    select(vec![Mode::NearestEven, Mode::NearestAway, Mode::TowardZero, Mode::Up, Mode::Down])
}

fn rules() -> impl Strategy<Value = FewBits> {
    select(vec![FewBits::Centred, FewBits::Floor, FewBits::Nearest])
}

/// A number of bits, and as many bits.
fn draws() -> impl Strategy<Value = (u32, u32)> {
    let word = prop_oneof![4 => any::<u32>(), 1 => Just(0), 1 => Just(u32::MAX)];
    (1u32..=32, word).prop_map(|(count, word)| (word >> (32 - count), count))
}

fn modes() -> impl Strategy<Value = Mode> {
    let stochastic = (draws(), rules())
        .prop_map(|((r, n), rule)| Mode::Stochastic(RandomBits::new(r, n).expect("as many bits").with_rule(rule)));
    prop_oneof![plain_modes(), stochastic]
}

fn overflows() -> impl Strategy<Value = Overflow> {
    select(vec![Overflow::Saturate, Overflow::Ieee])
}

fn scales() -> impl Strategy<Value = i32> {
    let ends = select(vec![i32::MIN, i32::MIN + 1, i32::MIN + 1000, i32::MAX, i32::MAX - 1, i32::MAX - 1000]);
    prop_oneof![4 => Just(0), 4 => -20..20, 2 => -1200..1200, 1 => any::<i32>(), 1 => ends]
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn any_description_is_a_format_or_an_error(shape in shapes()) {
        match shape.builder().build() {
            Err(error) => {
                prop_assert!(!shape.is_valid(), "{error}");
                prop_assert!(error.to_string().contains(": "));
            }
            Ok(format) => {
                prop_assert!(shape.is_valid());
                prop_assert!(!format.to_string().is_empty());
                prop_assert_eq!(format.bits(), shape.bits());
                prop_assert_eq!(format.code_count(), 1 << shape.bits());
                prop_assert_eq!(format.name().is_some(), Format::NAMED.iter().any(|(_, named)| *named == format));
            }
        }
    }

    #[test]
    fn values_are_the_list(grid in grids()) {
        let (format, values) = (grid.format, &grid.values);
        prop_assert_eq!(format.values().len(), 1 << grid.shape.bits());
        for (code, value) in format.values() {
            let magnitude = code & !grid.sign();
            let negative = code & grid.sign() != 0;
            let expected = match values.get(usize::from(magnitude)) {
                Some(&value) => value,
                None if format.infinity_code() == Some(magnitude) => f64::INFINITY,
                None => f64::NAN,
            };
            prop_assert!(value.abs() == expected || value.is_nan() && expected.is_nan(), "{code:#x}: {value:e}");
            prop_assert_eq!(value.is_sign_negative(), negative, "{:#x}", code);
        }
        prop_assert_eq!(format.max(), grid.max());
        prop_assert_eq!(format.min(), if grid.shape.signed { -grid.max() } else { values[0] });
        prop_assert_eq!(format.min_positive(), values[usize::from(grid.shape.zero)]);
        prop_assert_eq!(format.min_positive_normal(), values[1 << grid.shape.m]);
        prop_assert_eq!(format.nan_code().is_some_and(|code| format.value(code).is_nan()), format.has_nan());
        prop_assert_eq!(format.infinity_code().map(|code| format.value(code)), format.has_infinity().then_some(f64::INFINITY));
    }

    #[test]
    fn neighbours_are_those_of_the_list(grid in grids(), spots in prop::collection::vec(spots(), 32)) {
        let (format, sorted) = (grid.format, grid.sorted());
        for x in spots.iter().map(|spot| spot.on(&grid)) {
            if x.is_nan() {
                prop_assert_eq!(format.neighbours(x), (None, None));
                prop_assert_eq!((format.next_up(x), format.next_down(x)), (None, None));
                prop_assert!(format.ulp(x).is_nan());
                continue;
            }
            let (from, above) = (sorted.partition_point(|&v| v < x), sorted.partition_point(|&v| v <= x));
            let before = |place: usize| place.checked_sub(1).map(|place| sorted[place]);
            prop_assert_eq!(format.neighbours(x), (before(above), sorted.get(from).copied()), "{:e}", x);
            prop_assert_eq!(format.next_up(x), sorted.get(above).copied(), "{:e}", x);
            prop_assert_eq!(format.next_down(x), before(from), "{:e}", x);
            if x.is_infinite() {
                prop_assert!(format.ulp(x).is_nan());
                continue;
            }
            let place = grid.values.partition_point(|&v| v <= x.abs());
            let ulp = if place == grid.values.len() {
                pow2((x.abs().to_bits() >> 52) as i32 - 1023 - i32::from(grid.shape.m))
            } else {
                grid.step(place.saturating_sub(1))
            };
            prop_assert_eq!(format.ulp(x), ulp, "{:e}", x);
        }
    }

    #[test]
    fn codes_are_their_own_rounding(grid in grids(), mode in modes(), more in prop::collection::vec(modes(), 4)) {
        let format = grid.format;
        for (code, value) in format.values() {
            for mode in [Mode::NearestEven, mode].into_iter().chain(more.iter().copied()) {
                let ieee = round(value, format, mode, Overflow::Ieee);
                let saturated = round(value, format, mode, Overflow::Saturate);
                if value.is_nan() {
                    let sign = code & grid.sign();
                    prop_assert_eq!((ieee, saturated), (sign | format.nan_code().unwrap(), ieee), "{:#x}", code);
                } else if value.is_infinite() {
                    prop_assert_eq!((ieee, saturated), (code, code - 1), "{:#x}", code);
                } else {
                    prop_assert_eq!((ieee, saturated), (code, code), "{:#x} {:?}", code, mode);
                }
                let narrow = value as f32;
                if f64::from(narrow) == value {
                    prop_assert_eq!(round(narrow, format, mode, Overflow::Ieee), ieee, "{:#x} {:?}", code, mode);
                }
            }
        }
    }

    #[test]
    fn rounding_is_that_of_the_list(
        grid in grids(),
        spots in prop::collection::vec(spots(), 64),
        mode in plain_modes(),
        overflow in overflows(),
        (draw, count) in draws(),
        rule in rules(),
    ) {
        let format = grid.format;
        for x in spots.iter().map(|spot| spot.on(&grid)) {
            let code = round(x, format, mode, overflow);
            if x.is_nan() {
                prop_assert_eq!(code, nan_code(&grid, x));
                continue;
            }
            prop_assert_eq!(code, grid.encode(x, mode, overflow), "{:e} {:#x}", x, x.to_bits());
            if x.is_finite() {
                let random = RandomBits::new(draw, count).unwrap().with_rule(rule);
                let code = round(x, format, Mode::Stochastic(random), overflow);
                let expected = grid.stochastic(x, draw, count, rule, overflow);
                prop_assert_eq!(code, expected, "{:e} {:#x}", x, x.to_bits());
            }
        }
    }

    #[test]
    fn results_are_neighbours(grid in grids(), spots in prop::collection::vec(spots(), 64), mode in modes()) {
        let format = grid.format;
        for x in spots.iter().map(|spot| spot.on(&grid)).filter(|x| !x.is_nan()) {
            let value = format.value(round(x, format, mode, Overflow::Saturate));
            if grid.shape.negative == Negative::Nan && x < 0.0 {
                prop_assert!(value.is_nan());
                continue;
            }
            let inside = x.clamp(format.min(), format.max());
            let (low, high) = format.neighbours(inside);
            prop_assert!(Some(value) == low || Some(value) == high, "{x:e} gave {value:e} of {low:?} {high:?}");
        }
    }

    #[test]
    fn rounding_is_monotone(
        grid in grids(),
        spots in prop::collection::vec(spots(), 64),
        mode in modes(),
        overflow in overflows(),
    ) {
        let format = grid.format;
        let mut x: Vec<f64> = spots.iter().map(|spot| spot.on(&grid)).filter(|x| !x.is_nan()).collect();
        x.sort_by(f64::total_cmp);
        let values = x.iter().map(|&x| format.value(round(x, format, mode, overflow))).filter(|value| !value.is_nan());
        let values: Vec<f64> = values.collect();
        prop_assert!(values.is_sorted(), "{x:?} gave {values:?}");
    }

    #[test]
    fn signs_are_symmetric(grid in grids(), spots in prop::collection::vec(spots(), 32), mode in modes(), overflow in overflows()) {
        if !grid.shape.signed {
            return Ok(());
        }
        let mirrored = match mode {
            Mode::Up => Mode::Down,
            Mode::Down => Mode::Up,
            other => other,
        };
        for x in spots.iter().map(|spot| spot.on(&grid)) {
            let code = round(x, grid.format, mode, overflow);
            // A format without NaN has no sign for it.
            let flip = if x.is_nan() && !grid.format.has_nan() { 0 } else { grid.sign() };
            let minus_x = f64::from_bits(x.to_bits() ^ 1 << 63);
            prop_assert_eq!(round(minus_x, grid.format, mirrored, overflow), code ^ flip, "{:e}", x);
        }
    }

    #[test]
    fn scales_divide(
        grid in grids(),
        spots in prop::collection::vec(spots(), 32),
        mode in modes(),
        overflow in overflows(),
        scale in scales(),
    ) {
        let format = grid.format;
        for x in spots.iter().map(|spot| spot.on(&grid)) {
            let code = round_scaled(x, scale, format, mode, overflow);
            let expected = if !x.is_finite() || x == 0.0 {
                round(x, format, mode, overflow)
            } else if scale > 4000 {
                // Below every value, yet not zero: as the smallest f64 is.
                round(5e-324f64.copysign(x), format, mode, overflow)
            } else if scale < -4000 {
                let over = round(f64::INFINITY.copysign(x), format, mode, overflow);
                let negative = x.is_sign_negative();
                let largest = if negative { grid.sign() | grid.max_code() } else { grid.max_code() };
                if stops(mode, negative) && (!negative || grid.shape.signed) { largest } else { over }
            } else {
                // In two halves, so that neither factor leaves the range of f64.
                let (a, b) = (scale / 2, scale - scale / 2);
                if a.abs() > 1000 || b.abs() > 1000 {
                    continue;
                }
                let y = x * pow2(-a) * pow2(-b);
                if !y.is_normal() || y * pow2(a) * pow2(b) != x {
                    continue;
                }
                round(y, format, mode, overflow)
            };
            prop_assert_eq!(code, expected, "{:e}", x);
        }
    }

    #[test]
    fn slices_are_their_elements(
        grid in grids(),
        spots in prop::collection::vec(spots(), 0..1100),
        overflow in prop::option::of(overflows()),
        scale in scales(),
        mode in plain_modes(),
        (seed, step, tensor) in any::<(u64, u64, u64)>(),
        first in prop_oneof![0..2000u64, any::<u64>(), (1u64 << 34) - 600..1 << 34],
        philox in any::<bool>(),
    ) {
        let x: Vec<f64> = spots.iter().map(|spot| spot.on(&grid)).collect();
        let draw = Draw::seeded(seed).step(step).tensor(tensor).at(first);
        let draw = if philox { draw.stream(Stream::Philox) } else { draw };
        let case = Slices { format: grid.format, scale, overflow, mode, draw };
        case.check(&x)?;
        case.check(&x.iter().map(|&x| x as f32).collect::<Vec<_>>())?;
        case.check(&x.iter().map(|&x| bf16::from_f64(x)).collect::<Vec<_>>())?;
        case.check(&x.iter().map(|&x| f16::from_f64(x)).collect::<Vec<_>>())?;
    }

    #[test]
    fn names_are_known_or_refused(
        name in prop_oneof![any::<String>(), "[uU]?[eE]?[0-9]{0,3}[mM]?[0-9]{0,3}(n[zZ])?", "[bBfFpP]{1,2}16", "\\PC{0,12}"],
    ) {
        match name.parse::<Format>() {
            Ok(format) => {
                let known = if name.eq_ignore_ascii_case("f16") { "FP16" } else { &name };
                prop_assert!(format.name().unwrap().eq_ignore_ascii_case(known));
                prop_assert_eq!(format.to_string().parse(), Ok(format));
            }
            Err(error) => prop_assert!(error.to_string().contains(&name)),
        }
    }

    #[test]
    fn power_of_two_scales_are_the_smallest(grid in grids(), spot in spots()) {
        let amax = spot.on(&grid).abs();
        let amax = if amax.is_finite() { amax } else { f64::MAX };
        let k = power_of_two_scale(grid.format, amax);
        prop_assert!((-126..=127).contains(&k));
        let fits = |k: i32| {
            let reach = grid.max() * pow2(k);
            (reach.is_normal() || reach.is_infinite()).then_some(amax <= reach)
        };
        if amax == 0.0 {
            prop_assert_eq!(k, 0);
        } else {
            prop_assert!(k == 127 || fits(k) != Some(false), "{k}");
            prop_assert!(k == -126 || fits(k - 1) != Some(true), "{k}");
        }
    }

    #[test]
    fn packed_vectors_are_bit_streams(
        len in 0usize..40,
        codes in prop::collection::vec(any::<u16>(), 40),
        bytes in prop::collection::vec(any::<u8>(), 0..32),
        writes in prop::collection::vec((any::<Index>(), any::<u16>()), 0..20),
    ) {
        packed::<E2M1>(len, &codes, &bytes, &writes)?;
        packed::<UE2M2>(len, &codes, &bytes, &writes)?;
        packed::<UE2M2Nz>(len, &codes, &bytes, &writes)?;
        packed::<E2M3>(len, &codes, &bytes, &writes)?;
        packed::<E3M2>(len, &codes, &bytes, &writes)?;
    }
}

/// Scales at the ends of i32, of a value whose exponent they push past its own end.
#[test]
fn any_scale_is_defined() {
    for (scale, code) in [(i32::MIN, 0x7E), (i32::MIN + 1, 0x7E), (i32::MAX, 0), (i32::MAX - 1, 0)] {
        for x in [1.0, f64::MAX, 5e-324] {
            let rounded = round_scaled(x, scale, Format::E4M3, Mode::NearestEven, Overflow::Saturate);
            assert_eq!(rounded, code, "{x:e} / 2^{scale}");
        }
    }
}

/// The code of a NaN: sign and upper payload where there is room for them.
fn nan_code(grid: &Grid, x: f64) -> u16 {
    let Shape { m, specials, .. } = grid.shape;
    let sign = if x.is_sign_negative() { grid.sign() } else { 0 };
    match specials {
        Specials::Finite => grid.max_code(),
        Specials::NanOnly => sign | (grid.max_code() + 1),
        _ => {
            let payload = if grid.shape.bits() > 8 { (x.to_bits() & ((1 << 52) - 1)) >> (52 - m) } else { 0 };
            sign | (grid.max_code() + 1) | 1 << (m - 1) | payload as u16
        }
    }
}

struct Slices {
    format: Format,
    scale: i32,
    overflow: Option<Overflow>,
    mode: Mode,
    draw: Draw,
}

impl Slices {
    fn check<S: Source>(&self, x: &[S]) -> Result<(), TestCaseError> {
        self.cast(x, Cast::nearest(), |_| Mode::NearestEven)?;
        self.cast(x, Cast::stochastic(self.draw), |i| {
            Mode::Stochastic(if self.format == Format::BF16 {
                RandomBits::of16(self.draw.draw16(i))
            } else {
                RandomBits::of32(self.draw.draw32(i))
            })
        })?;
        let other = match self.mode {
            Mode::NearestAway => Cast::nearest_away(),
            Mode::TowardZero => Cast::toward_zero(),
            Mode::Up => Cast::up(),
            Mode::Down => Cast::down(),
            _ => return Ok(()),
        };
        self.cast(x, other, |_| self.mode)
    }

    fn cast<S: Source>(&self, x: &[S], cast: Cast, mode: impl Fn(u64) -> Mode) -> Result<(), TestCaseError> {
        let Self { format, scale, .. } = *self;
        let overflow = self.overflow.unwrap_or(Overflow::of(format));
        let cast = self.overflow.map_or(cast, |overflow| cast.overflow(overflow)).scale(scale);
        let expected: Vec<u16> =
            (0..).zip(x).map(|(i, &x)| round_scaled(x, scale, format, mode(i), overflow)).collect();
        let mut reports: Vec<Report> = Vec::new();
        for isa in Isa::available() {
            let mut codes = vec![0xAAAA; x.len()];
            reports.push(cast.isa(isa).into_codes(x, format, &mut codes).unwrap());
            let differs = codes.iter().zip(&expected).position(|(a, b)| a != b);
            prop_assert!(
                differs.is_none(),
                "{isa} {:?}: element {differs:?} of {}, codes {:x?}",
                mode(0),
                x.len(),
                differs.map(|i| (codes[i], expected[i]))
            );
        }
        let mut bytes = vec![0xAA; format.bytes(x.len())];
        reports.push(cast.into_bytes(x, format, &mut bytes).unwrap());
        prop_assert_eq!(bytes, bit_stream(stored_width(format), &expected));
        for report in &reports {
            prop_assert_eq!(report, &reports[0]);
        }
        prop_assert_eq!(reports[0].elements, x.len() as u64);
        prop_assert_eq!(reports[0].nan, x.iter().filter(|x| x.is_nan()).count() as u64);
        Ok(())
    }
}

/// Bits that a code takes in memory.
fn stored_width(format: Format) -> usize {
    match format.bits() {
        4 => 4,
        6 => 6,
        ..=8 => 8,
        _ => 16,
    }
}

/// The little-endian bit stream of codes of one width.
fn bit_stream(width: usize, codes: &[u16]) -> Vec<u8> {
    let mut bytes = vec![0; (width * codes.len()).div_ceil(8)];
    for (i, code) in codes.iter().enumerate() {
        for b in (0..width).filter(|b| code >> b & 1 != 0) {
            bytes[(width * i + b) / 8] |= 1 << ((width * i + b) % 8);
        }
    }
    bytes
}

fn packed<T: SubByte>(len: usize, codes: &[u16], bytes: &[u8], writes: &[(Index, u16)]) -> Result<(), TestCaseError> {
    let (format, width) = (T::FORMAT, T::FORMAT.bits() as usize);
    let mut codes: Vec<u16> = codes[..len].iter().map(|code| code & (format.code_count() - 1) as u16).collect();
    let mut vector: PackedVec<T> = codes.iter().map(|&code| T::from_code(code)).collect();
    for (i, code) in writes.iter().filter(|_| len > 0) {
        let (i, value) = (i.index(len), T::from_code(*code));
        vector.set(i, value);
        codes[i] = value.code();
    }
    let stream = bit_stream(width, &codes);
    prop_assert_eq!(vector.as_bytes(), &stream[..]);
    prop_assert_eq!((vector.len(), vector.is_empty()), (len, len == 0));
    let again = PackedVec::<T>::from_bytes(stream, len).unwrap();
    prop_assert_eq!(&again, &vector);
    for (i, &code) in codes.iter().enumerate() {
        prop_assert_eq!(again.get(i).map(T::code), Some(code), "element {}", i);
    }
    prop_assert!(again.get(len).is_none() && again.get(usize::MAX).is_none());
    prop_assert!(again.iter().map(T::code).eq(codes.iter().copied()));
    prop_assert_eq!(again.decode(), codes.iter().map(|&code| format.value(code) as f32).collect::<Vec<_>>());

    // Any bytes, of this length or another.
    let expected = (width * len).div_ceil(8);
    let used = width * len % 8;
    let padded = used != 0 && bytes.last().is_some_and(|last| last >> used != 0);
    match PackedVec::<T>::from_bytes(bytes.to_vec(), len) {
        Ok(vector) => {
            prop_assert!(bytes.len() == expected && !padded);
            let codes: Vec<u16> = vector.iter().map(T::code).collect();
            prop_assert_eq!(&bit_stream(width, &codes)[..], bytes);
        }
        Err(PackedError::Padding { .. }) => prop_assert!(bytes.len() == expected && padded),
        Err(_) => prop_assert!(bytes.len() != expected),
    }
    Ok(())
}
