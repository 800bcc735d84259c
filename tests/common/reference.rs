//! The slow, obvious step of AdamW: arithmetic 1 in scalars, each stored value from its definition.

use halfulp::format::{BlockFormat, BlockScale, Scales};
use halfulp::optim::{AdamW, AdamWConfig, Moment, Parameter, Real, Rounding, StateFormat, States};
use halfulp::random::{Draws, Role, SrStates};
use halfulp::round::{Mode, Overflow, RandomBits, Source, round};
use halfulp::{Draw, Format, Isa, bf16, f16};

use super::{Grid, Inputs, grids, pow2};

pub(crate) trait Value: Real + Source {
    const STORED: Option<Format>;
    fn to(self) -> f32;
    fn of_code(code: u16) -> Self;
    fn of(x: f32) -> Self;
}

impl Value for f32 {
    const STORED: Option<Format> = None;
    fn to(self) -> f32 {
        self
    }
    fn of_code(_: u16) -> Self {
        unreachable!()
    }
    fn of(x: f32) -> Self {
        x
    }
}

impl Value for bf16 {
    const STORED: Option<Format> = Some(Format::BF16);
    fn to(self) -> f32 {
        self.to_f32()
    }
    fn of_code(code: u16) -> Self {
        Self::from_bits(code)
    }
    fn of(x: f32) -> Self {
        Self::from_f32(x)
    }
}

impl Value for f16 {
    const STORED: Option<Format> = Some(Format::FP16);
    fn to(self) -> f32 {
        self.to_f32()
    }
    fn of_code(code: u16) -> Self {
        Self::from_bits(code)
    }
    fn of(x: f32) -> Self {
        Self::from_f32(x)
    }
}

fn power(base: f64, t: u64) -> f64 {
    if t == 0 {
        return 1.0;
    }
    // Multiplies the squares of the set bits from the lowest up, as the step is written.
    let mut square = base;
    let mut product = 1.0;
    for bit in 0..64 - t.leading_zeros() {
        if t >> bit & 1 == 1 {
            product *= square;
        }
        square *= square;
    }
    product
}

fn stored(x: f32, format: Format, rounding: Rounding, draw: impl FnOnce() -> u16) -> u16 {
    let x = if x.is_nan() { f32::from_bits(0x7FC0_0000) } else { x };
    let mode = match rounding {
        Rounding::Nearest => Mode::NearestEven,
        _ => Mode::Stochastic(RandomBits::of16(draw())),
    };
    round(x, format, mode, Overflow::Ieee)
}

/// What a block-scaled moment is stored as.
pub(crate) struct Stored {
    pub(crate) codes: Vec<u16>,
    pub(crate) scales: Vec<f64>,
    pub(crate) values: Vec<f32>,
}

/// The scale of a block: the first, from the smallest up, under which nothing clips.
pub(crate) fn scale(grid: &Grid, rule: BlockScale, block: &[f32]) -> f64 {
    if block.iter().any(|x| !x.is_finite()) {
        return f64::NAN;
    }
    let amax = block.iter().fold(0.0, |largest: f64, x| largest.max(f64::from(x.abs())));
    let max = grid.values[usize::from(grid.max_code())];
    if rule == BlockScale::Ceil {
        return (-126..=127).map(pow2).find(|scale| amax <= max * scale).unwrap();
    }
    let mut scale = ((amax / max) as f32).max(f32::from_bits(1));
    while scale > f32::from_bits(1) && f64::from(scale.next_down()) * max >= amax {
        scale = scale.next_down();
    }
    while f64::from(scale) * max < amax {
        scale = scale.next_up();
    }
    scale.into()
}

/// The code of `x / scale` in a format, to nearest or with a 16-bit draw. Products of the scale (24 bits) with values, their
/// midpoints or their 2^17th parts (at most 22) are exact in f64, and so is the comparison of `x` with them.
pub(crate) fn code(grid: &Grid, scale: f64, x: f32, draw: Option<u16>, floor: bool) -> u16 {
    let magnitude = f64::from(x.abs());
    let below = grid.values.partition_point(|value| value * scale <= magnitude);
    let mut code = below.max(1) - 1;
    let (low, high) = (grid.values[code], grid.values[code + 1]);
    let up = match draw {
        _ if below == 0 || low * scale == magnitude => false,
        None => {
            let (two, middle) = (2.0 * magnitude, scale * (low + high));
            two > middle || two == middle && code % 2 == 1
        }
        // floor(d 2^17) + 2r + 1 >= 2^17 where d 2^17 >= t, a whole number.
        Some(r) => {
            let t = pow2(17) - f64::from(r) * 2.0 - 1.0;
            magnitude * pow2(17) >= scale * (low * pow2(17) + t * (high - low))
        }
    };
    code += usize::from(up);
    if floor && x > 0.0 && !grid.spec.no_zero {
        code = code.max(1);
    }
    assert!(code as u16 <= grid.max_code(), "{x} clips under {scale}");
    let sign = 1u16 << (grid.bits() - 1);
    code as u16 | if grid.spec.signed && x.is_sign_negative() { sign } else { 0 }
}

pub(crate) fn store(format: BlockFormat, new: &[f32], floor: bool, draw: impl Fn(usize) -> Option<u16>) -> Stored {
    let grid = grids().find(|grid| grid.spec.format == format.element()).unwrap();
    let mut stored = Stored { codes: Vec::new(), scales: Vec::new(), values: Vec::new() };
    for (b, block) in new.chunks(format.block()).enumerate() {
        let scale = scale(&grid, format.scale(), block);
        stored.scales.push(scale);
        for (j, &x) in block.iter().enumerate() {
            let code = if scale.is_nan() { 0 } else { code(&grid, scale, x, draw(b * format.block() + j), floor) };
            let magnitude = usize::from(code & ((1 << (grid.spec.e + grid.spec.m)) - 1));
            let value = (grid.values[magnitude] * scale) as f32;
            stored.codes.push(code);
            stored.values.push(if usize::from(code) == magnitude { value } else { -value });
        }
    }
    stored
}

/// The state of the reference. Moments are kept as f32 values.
struct Reference {
    config: AdamWConfig,
    run: Run,
    id: u64,
    step: u64,
    offset: u64,
    m: Vec<f32>,
    v: Vec<f32>,
    /// Of the last step, where moments are in blocks.
    blocks: [Option<Stored>; 2],
}

/// The value of a fresh moment.
fn fresh(format: StateFormat) -> f32 {
    match format {
        StateFormat::Blocks(format) if !format.element().has_zero() => {
            let smallest = if format.scale() == BlockScale::Ceil { pow2(-126) } else { pow2(-149) };
            (format.element().min_positive() * smallest) as f32
        }
        _ => 0.0,
    }
}

impl Reference {
    fn step<P: Value, G: Value>(&mut self, p: &mut [P], g: &[G]) {
        let AdamWConfig { lr, beta1, beta2, eps, weight_decay, maximize, .. } = self.config;
        self.step += 1;
        let t = self.step;
        let (b1, b2, c1, c2) = (beta1 as f32, beta2 as f32, (1.0 - beta1) as f32, (1.0 - beta2) as f32);
        let size = (lr / (1.0 - power(beta1, t))) as f32;
        let rc2 = (1.0 / (1.0 - power(beta2, t)).sqrt()) as f32;
        let decay = (lr * weight_decay) as f32;
        let n = p.len();
        for i in 0..n {
            let (mut old, gradient) = (p[i].to(), if maximize { -g[i].to() } else { g[i].to() });
            let m = c1.mul_add(gradient, b1 * self.m[i]);
            let v = c2.mul_add(gradient * gradient, b2 * self.v[i]);
            let d = v.sqrt().mul_add(rc2, eps as f32);
            old = (-size).mul_add(m / d, (-decay).mul_add(old, old));
            let parameters = self.run.parameters;
            let draw = || self.draw(parameters, Role::Parameter, 0, i).unwrap();
            p[i] = match P::STORED {
                None => P::of(if old.is_nan() { f32::from_bits(0x7FC0_0000) } else { old }),
                Some(format) => P::of_code(stored(old, format, parameters, draw)),
            };
            (self.m[i], self.v[i]) = (m, v);
        }
        let States { m, v } = self.run.states;
        for (k, (format, role)) in [(m, Role::FirstMoment), (v, Role::SecondMoment)].into_iter().enumerate() {
            let new = std::mem::take(if k == 0 { &mut self.m } else { &mut self.v });
            let rounding = self.run.rounding;
            let draw = |i| self.draw(rounding, role, self.offset + (k * n) as u64, i);
            let stored = match format {
                StateFormat::F32 => {
                    new.iter().map(|&x| if x.is_nan() { f32::from_bits(0x7FC0_0000) } else { x }).collect()
                }
                StateFormat::Bf16 => {
                    let code = |i: usize| stored(new[i], Format::BF16, rounding, || draw(i).unwrap());
                    (0..n).map(|i| bf16::from_bits(code(i)).to_f32()).collect()
                }
                StateFormat::Blocks(format) => {
                    let stored = store(format, &new, role == Role::SecondMoment, draw);
                    let values = stored.values.clone();
                    self.blocks[k] = Some(stored);
                    values
                }
                _ => unreachable!(),
            };
            *if k == 0 { &mut self.m } else { &mut self.v } = stored;
        }
        self.offset += 2 * n as u64;
    }

    fn draw(&self, rounding: Rounding, role: Role, counter: u64, i: usize) -> Option<u16> {
        match rounding {
            Rounding::Stochastic { seed } => {
                Some(Draw::seeded(seed).step(self.step).tensor(self.id).role(role).draw16(i as u64))
            }
            Rounding::SrStates { seed } => Some(SrStates::seeded(seed).draw16(counter + i as u64)),
            _ => None,
        }
    }
}

pub(crate) fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| if x.is_nan() { 0x7FC0_0000 } else { x.to_bits() }).collect()
}

/// A few steps of one tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) n: usize,
    pub(crate) steps: u64,
    pub(crate) states: States,
    pub(crate) rounding: Rounding,
    pub(crate) parameters: Rounding,
    pub(crate) weight_decay: f64,
    pub(crate) isa: Isa,
}

impl Run {
    /// Holds the optimizer to the reference under gradients by step and element. Returns the NaN blocks of the last step.
    pub(crate) fn compare<P: Value, G: Value>(self, mut gradient: impl FnMut(u64, usize) -> f32) -> u64 {
        let Self { n, steps, states, rounding, parameters, weight_decay, isa } = self;
        let config = AdamWConfig { lr: 0.1, weight_decay, ..AdamWConfig::default() };
        let mut inputs = Inputs(n as u64);
        let start: Vec<P> = (0..n).map(|_| P::of(inputs.next() as i32 as f32 * 1e-9)).collect();
        let mut opt = AdamW::new(config, states, rounding).unwrap().parameter_rounding(parameters).unwrap().isa(isa);
        let (m, v) = (vec![fresh(states.m); n], vec![fresh(states.v); n]);
        let mut reference = Reference { config, run: self, id: 9, step: 0, offset: 0, m, v, blocks: [None, None] };
        let (mut a, mut b) = (start.clone(), start);
        let mut nan_blocks = 0;
        for t in 1..=steps {
            let g: Vec<G> = (0..n).map(|i| G::of(gradient(t, i))).collect();
            nan_blocks = opt.step_tensors(&mut [Parameter::numbered(9, &mut a, &g)]).unwrap().nan_blocks;
            reference.step(&mut b, &g);
        }
        assert!(bytemuck::cast_slice::<P, u8>(&a) == bytemuck::cast_slice::<P, u8>(&b), "parameters: {self:?}");
        let (m, v) = opt.moments(9).unwrap();
        assert_eq!(bits(&m.to_f32()), bits(&reference.m), "m: {self:?}");
        assert_eq!(bits(&v.to_f32()), bits(&reference.v), "v: {self:?}");
        let mut nan_expected = 0;
        for (moment, expected) in [m, v].into_iter().zip(&reference.blocks) {
            let (Moment::Blocks(blocks), Some(expected)) = (moment, expected) else { continue };
            assert!((0..n).all(|i| blocks.code(i) == expected.codes[i]), "codes: {self:?}");
            let scales: Vec<f64> = (0..blocks.scales().len()).map(|b| blocks.scales().get(b)).collect();
            assert!(scales.iter().zip(&expected.scales).all(|(a, b)| a == b || a.is_nan() && b.is_nan()), "{self:?}");
            if let Scales::E8M0(codes) = blocks.scales() {
                assert!(codes.iter().all(|&code| code != 0));
            }
            nan_expected += scales.iter().filter(|scale| scale.is_nan()).count() as u64;
        }
        assert_eq!(nan_blocks, nan_expected, "{self:?}");
        nan_blocks
    }
}
