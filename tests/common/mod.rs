//! The oracle: formats as lists of values, rounding as comparison of exact f64 numbers. It shares no code with the crate.
#![allow(dead_code, reason = "each test file uses its part")]

#[cfg(feature = "std")]
pub(crate) mod reference;

use halfulp::Format;

/// A format written down anew: exponent bits, fraction bits, bias, and the kind of its top codes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spec {
    pub(crate) format: Format,
    pub(crate) e: i32,
    pub(crate) m: i32,
    pub(crate) bias: i32,
    pub(crate) signed: bool,
    pub(crate) top: Top,
    pub(crate) no_zero: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Top {
    /// Infinity and NaN in the largest exponent.
    Ieee,
    /// One NaN, the all-ones magnitude.
    Nan,
    Numbers,
}

const fn spec(format: Format, e: i32, m: i32, bias: i32, signed: bool, top: Top, no_zero: bool) -> Spec {
    Spec { format, e, m, bias, signed, top, no_zero }
}

pub(crate) const SPECS: [Spec; 12] = [
    spec(Format::BF16, 8, 7, 127, true, Top::Ieee, false),
    spec(Format::FP16, 5, 10, 15, true, Top::Ieee, false),
    spec(Format::E4M3, 4, 3, 7, true, Top::Nan, false),
    spec(Format::E5M2, 5, 2, 15, true, Top::Ieee, false),
    spec(Format::E3M2, 3, 2, 3, true, Top::Numbers, false),
    spec(Format::E2M3, 2, 3, 1, true, Top::Numbers, false),
    spec(Format::E2M1, 2, 1, 1, true, Top::Numbers, false),
    spec(Format::UE2M2, 2, 2, 1, false, Top::Numbers, false),
    spec(Format::UE2M2NZ, 2, 2, 1, false, Top::Numbers, true),
    spec(Format::UE5M3, 5, 3, 15, false, Top::Nan, false),
    spec(Format::UE4M4, 4, 4, 7, false, Top::Nan, false),
    spec(Format::E8M0, 8, 0, 127, false, Top::Nan, true),
];

/// A format as an ascending list of its values from code 0 up.
pub(crate) struct Grid {
    pub(crate) spec: Spec,
    /// Finite values, and one more: where the next would be if exponents did not end.
    pub(crate) values: Vec<f64>,
    sign: u16,
    nan: Option<u16>,
    /// What IEEE overflow gives: infinity, NaN, or the largest value.
    beyond: u16,
}

impl Grid {
    pub(crate) fn new(spec: Spec) -> Self {
        let Spec { e, m, bias, signed, top, no_zero, .. } = spec;
        let codes = 1usize << (e + m);
        let per_binade = 1usize << m;
        let finite = match top {
            Top::Ieee => codes - per_binade,
            Top::Nan => codes - 1,
            Top::Numbers => codes,
        };
        let value = |code: usize| {
            let (field, fraction) = ((code / per_binade) as i32, (code % per_binade) as f64 / per_binade as f64);
            if field == 0 { fraction * pow2(1 - bias) } else { (1.0 + fraction) * pow2(field - bias) }
        };
        let mut values: Vec<f64> = (0..=finite).map(value).collect();
        if no_zero {
            values[0] = values[1] / 2.0;
        }
        let sign = if signed { codes as u16 } else { 0 };
        let (nan, beyond) = match top {
            Top::Ieee => (Some((finite + per_binade / 2) as u16), finite as u16),
            Top::Nan => (Some(finite as u16), finite as u16),
            Top::Numbers => (None, finite as u16 - 1),
        };
        Self { spec, values, sign, nan, beyond }
    }

    pub(crate) fn max_code(&self) -> u16 {
        self.values.len() as u16 - 2
    }

    pub(crate) fn bits(&self) -> i32 {
        self.spec.e + self.spec.m + i32::from(self.spec.signed)
    }

    /// The code of `x`, where `up(d, code)` decides for the exact fraction `d` in (0, 1) above `code`.
    pub(crate) fn encode(&self, x: f64, payload: u64, ieee: bool, up: impl Fn(f64, u16) -> bool) -> u16 {
        let negative = x.is_sign_negative();
        let sign = if negative { self.sign } else { 0 };
        let over = if ieee { self.beyond } else { self.max_code() };
        if x.is_nan() {
            return match self.nan {
                None => self.max_code(),
                Some(nan) if self.bits() == 16 => sign | nan | (payload >> (52 - self.spec.m)) as u16,
                Some(nan) => sign | nan,
            };
        }
        if negative && !self.spec.signed && x != 0.0 {
            return if self.spec.format == Format::E8M0 { 0xFF } else { 0 };
        }
        let x = x.abs();
        if x.is_infinite() {
            return sign | over;
        }
        let above = self.values.partition_point(|&value| value <= x);
        let code = match above {
            0 => 0,
            _ if above == self.values.len() => above - 1,
            _ => {
                let (low, high) = (self.values[above - 1], self.values[above]);
                let d = (x - low) / (high - low);
                above - 1 + usize::from(d > 0.0 && up(d, above as u16 - 1))
            }
        };
        sign | if code as u16 > self.max_code() { over } else { code as u16 }
    }

    pub(crate) fn nearest(&self, x: f64, payload: u64, ieee: bool) -> u16 {
        self.encode(x, payload, ieee, |d, code| d > 0.5 || d == 0.5 && code & 1 == 1)
    }

    /// The centred rule with `n` bits.
    pub(crate) fn stochastic(&self, x: f64, payload: u64, ieee: bool, r: u32, n: i32) -> u16 {
        self.encode(x, payload, ieee, |d, _| (d * pow2(n + 1)).floor() + 2.0 * f64::from(r) + 1.0 >= pow2(n + 1))
    }

    pub(crate) fn nearest_f32(&self, x: f32, ieee: bool) -> u16 {
        self.nearest(f64::from(x), payload32(x), ieee)
    }
}

pub(crate) fn pow2(exponent: i32) -> f64 {
    2f64.powi(exponent)
}

/// The fraction field of a NaN, its top bit in bit 51.
pub(crate) fn payload32(x: f32) -> u64 {
    u64::from(x.to_bits() & 0x007F_FFFF) << 29
}

pub(crate) fn grids() -> impl Iterator<Item = Grid> {
    SPECS.into_iter().map(Grid::new)
}

pub(crate) fn is_ieee(format: Format) -> bool {
    format.has_infinity()
}

/// A small generator for test inputs (SplitMix64).
pub(crate) struct Inputs(pub(crate) u64);

impl Inputs {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }
}

/// f32 values that a cast to the format can trip over: every value, midpoint and quarter point with both f32 neighbours
/// and both signs, all specials, and random bits over the whole range and over the format's range.
pub(crate) fn f32_inputs(grid: &Grid) -> Vec<f32> {
    let mut x = special_f32();
    let mut around = |value: f64| {
        let y = value as f32;
        for bits in [y.to_bits().wrapping_sub(1), y.to_bits(), y.to_bits().wrapping_add(1)] {
            x.extend([f32::from_bits(bits), f32::from_bits(bits ^ 1 << 31)]);
        }
    };
    let stride = (grid.values.len() / 4096).max(1);
    for pair in grid.values.windows(2).step_by(stride) {
        for part in [0.0, 0.25, 0.5, 0.75, 1.0] {
            around(pair[0] + (pair[1] - pair[0]) * part);
        }
    }
    around(grid.values[grid.values.len() - 2]);
    around(grid.values[grid.values.len() - 1]);
    let mut inputs = Inputs(7);
    x.extend((0..20_000).map(|_| f32::from_bits(inputs.next() as u32)));
    let (low, high) =
        (grid.values[usize::from(!grid.spec.no_zero)].log2() - 4.0, grid.values.last().unwrap().log2() + 1.0);
    x.extend((0..20_000).map(|_| {
        let (u, s) = (inputs.next() as u32, inputs.next());
        let exponent = low + (high - low) * f64::from(u) / pow2(32);
        f32::from_bits((exponent.exp2() as f32).to_bits() ^ (s as u32 & 0x8000_0FFF))
    }));
    x
}

pub(crate) fn special_f32() -> Vec<f32> {
    let mut x = Vec::new();
    for bits in [
        0u32,
        1,
        2,
        0x007F_FFFF,
        0x0080_0000,
        0x0080_0001,
        0x3F80_0000,
        0x7F7F_FFFF,
        0x7F7F_8000,
        0x7F7F_7FFF,
        0x7F80_0000,
        0x7F80_0001,
        0x7F80_8000,
        0x7FBF_FFFF,
        0x7FC0_0000,
        0x7FC0_0001,
        0x7FFF_FFFF,
        0x7F81_0000,
        0x3F80_8000,
        0x3F81_8000,
    ] {
        x.extend([f32::from_bits(bits), f32::from_bits(bits | 1 << 31)]);
    }
    x
}

/// Gradients of every kind: ordinary, zeros, subnormals, huge, NaN and infinities.
pub(crate) fn gradient(inputs: &mut Inputs) -> f32 {
    let word = inputs.next();
    match word >> 60 {
        0 => 0.0,
        1 => f32::from_bits(word as u32 & 0x807F_FFFF),
        2 => f32::from_bits(word as u32 & 0x7FFF_FFFF | 0x7000_0000),
        3 if word >> 55 & 31 == 0 => [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0][(word & 3) as usize],
        _ => (word as i32 as f32) * 1e-10,
    }
}
