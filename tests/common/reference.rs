//! The slow, obvious step of every optimizer: its arithmetic in scalars, each stored value from its definition.

use halfulp::format::{BlockFormat, BlockScale, Scales};
use halfulp::optim::{
    AdEMAMixConfig, AdamConfig, AdamWConfig, LambConfig, LionConfig, MixStates, Moment, Optimizer, Parameter, Real,
    Rounding, Rule, SgdConfig, StateFormat, States,
};
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

/// Three values, of which a rule has as many as it has states.
pub(crate) type Three = [f32; 3];

/// A rule written down anew: one element in scalars.
pub(crate) trait Naive: Rule {
    const ROLES: &'static [Role];
    fn formats(states: Self::States) -> Vec<StateFormat>;
    fn maximize(&self) -> bool;
    fn skip_zeros(&self) -> bool;
    /// New parameter and states at age `t`. Of LAMB, the update in place of the parameter.
    fn element(&self, t: u64, p: f32, g: f32, states: Three) -> (f32, Three);
    /// New parameters from old ones and updates.
    fn finish(&self, _: &[f32], new: Vec<f32>) -> Vec<f32> {
        new
    }
}

fn mean(beta: f64, x: f32, old: f32) -> f32 {
    ((1.0 - beta) as f32).mul_add(x, beta as f32 * old)
}

fn divisor(beta2: f64, t: u64, eps: f64, v: f32) -> f32 {
    v.sqrt().mul_add((1.0 / (1.0 - power(beta2, t)).sqrt()) as f32, eps as f32)
}

fn decayed(lr: f64, weight_decay: f64, p: f32) -> f32 {
    (-((lr * weight_decay) as f32)).mul_add(p, p)
}

const TWO: &[Role] = &[Role::FirstMoment, Role::SecondMoment];

impl Naive for AdamWConfig {
    const ROLES: &'static [Role] = TWO;
    fn formats(States { m, v }: States) -> Vec<StateFormat> {
        vec![m, v]
    }
    fn maximize(&self) -> bool {
        self.maximize
    }
    fn skip_zeros(&self) -> bool {
        self.skip_zeros
    }
    fn element(&self, t: u64, p: f32, g: f32, [m, v, _]: Three) -> (f32, Three) {
        let (m, v) = (mean(self.beta1, g, m), mean(self.beta2, g * g, v));
        let size = (self.lr / (1.0 - power(self.beta1, t))) as f32;
        let ratio = m / divisor(self.beta2, t, self.eps, v);
        ((-size).mul_add(ratio, decayed(self.lr, self.weight_decay, p)), [m, v, 0.0])
    }
}

impl Naive for AdamConfig {
    const ROLES: &'static [Role] = TWO;
    fn formats(States { m, v }: States) -> Vec<StateFormat> {
        vec![m, v]
    }
    fn maximize(&self) -> bool {
        self.maximize
    }
    fn skip_zeros(&self) -> bool {
        self.skip_zeros
    }
    fn element(&self, t: u64, p: f32, g: f32, [m, v, _]: Three) -> (f32, Three) {
        let g = (self.weight_decay as f32).mul_add(p, g);
        let (m, v) = (mean(self.beta1, g, m), mean(self.beta2, g * g, v));
        let size = (self.lr / (1.0 - power(self.beta1, t))) as f32;
        ((-size).mul_add(m / divisor(self.beta2, t, self.eps, v), p), [m, v, 0.0])
    }
}

impl Naive for SgdConfig {
    const ROLES: &'static [Role] = &[Role::FirstMoment];
    fn formats(m: StateFormat) -> Vec<StateFormat> {
        vec![m]
    }
    fn maximize(&self) -> bool {
        self.maximize
    }
    fn skip_zeros(&self) -> bool {
        self.skip_zeros
    }
    fn element(&self, t: u64, p: f32, g: f32, [m, ..]: Three) -> (f32, Three) {
        let coupled = if self.decoupled { 0.0 } else { self.weight_decay };
        let g = (coupled as f32).mul_add(p, g);
        let gain = if t == 1 { 1.0 } else { (1.0 - self.dampening) as f32 };
        let m = gain.mul_add(g, self.momentum as f32 * m);
        let u = if self.nesterov { (self.momentum as f32).mul_add(m, g) } else { m };
        let decoupled = if self.decoupled { self.weight_decay } else { 0.0 };
        ((-self.lr as f32).mul_add(u, decayed(self.lr, decoupled, p)), [m, 0.0, 0.0])
    }
}

impl Naive for LionConfig {
    const ROLES: &'static [Role] = &[Role::FirstMoment];
    fn formats(m: StateFormat) -> Vec<StateFormat> {
        vec![m]
    }
    fn maximize(&self) -> bool {
        self.maximize
    }
    fn skip_zeros(&self) -> bool {
        self.skip_zeros
    }
    fn element(&self, _: u64, p: f32, g: f32, [m, ..]: Three) -> (f32, Three) {
        let c = mean(self.beta1, g, m);
        let sign = if c.is_nan() || c == 0.0 { c } else { c.signum() };
        let p = (-self.lr as f32).mul_add(sign, decayed(self.lr, self.weight_decay, p));
        (p, [mean(self.beta2, g, m), 0.0, 0.0])
    }
}

impl Naive for AdEMAMixConfig {
    const ROLES: &'static [Role] = &[Role::FirstMoment, Role::SecondMoment, Role::ThirdState];
    fn formats(MixStates { m, v, slow }: MixStates) -> Vec<StateFormat> {
        vec![m, v, slow]
    }
    fn maximize(&self) -> bool {
        self.maximize
    }
    fn skip_zeros(&self) -> bool {
        self.skip_zeros
    }
    fn element(&self, t: u64, p: f32, g: f32, [m, v, slow]: Three) -> (f32, Three) {
        let (alpha, beta3) = (self.alpha_at(t), self.beta3_at(t));
        let (m, v, slow) = (mean(self.beta1, g, m), mean(self.beta2, g * g, v), mean(beta3, g, slow));
        let correction = (1.0 / (1.0 - power(self.beta1, t))) as f32;
        let u = (alpha as f32).mul_add(slow, m * correction) / divisor(self.beta2, t, self.eps, v);
        ((-self.lr as f32).mul_add(u, decayed(self.lr, self.weight_decay, p)), [m, v, slow])
    }
}

/// The root of the sum of squares: lanes of 512 places over chunks of 4096, then neighbours, then the same over chunks.
pub(crate) fn norm(x: impl Iterator<Item = f64>) -> f64 {
    fn tree(values: &[f64]) -> f64 {
        let mut lanes = vec![0.0; 512];
        for (i, value) in values.iter().enumerate() {
            lanes[i % 512] += value;
        }
        while lanes.len() > 1 {
            lanes = lanes.chunks(2).map(|pair| pair[0] + pair[1]).collect();
        }
        lanes[0]
    }
    let mut level: Vec<f64> = x.map(|x| x * x).collect();
    loop {
        level = level.chunks(4096).map(tree).collect();
        match level[..] {
            [] => return 0.0,
            [sum] => return sum.sqrt(),
            _ => {}
        }
    }
}

impl Naive for LambConfig {
    const ROLES: &'static [Role] = TWO;
    fn formats(States { m, v }: States) -> Vec<StateFormat> {
        vec![m, v]
    }
    fn maximize(&self) -> bool {
        self.maximize
    }
    fn skip_zeros(&self) -> bool {
        self.skip_zeros
    }
    fn element(&self, t: u64, p: f32, g: f32, [m, v, _]: Three) -> (f32, Three) {
        let (m, v) = (mean(self.beta1, g, m), mean(self.beta2, g * g, v));
        let correction = (1.0 / (1.0 - power(self.beta1, t))) as f32;
        let u = m * correction / divisor(self.beta2, t, self.eps, v);
        ((self.weight_decay as f32).mul_add(p, u), [m, v, 0.0])
    }
    fn finish(&self, old: &[f32], u: Vec<f32>) -> Vec<f32> {
        let [of_p, of_u] = [old, &u].map(|x| norm(x.iter().map(|&x| x.into())));
        let trust = match self.max_unorm {
            _ if !(of_p > 0.0 && of_u > 0.0) => 1.0,
            Some(most) => f64::min(1.0, most * of_p / of_u),
            None => f64::min(self.max_trust, of_p / of_u),
        };
        let size = (self.lr * trust) as f32;
        old.iter().zip(u).map(|(&p, u)| (-size).mul_add(u, p)).collect()
    }
}

/// The state of the reference. States are kept as f32 values.
struct Reference<R: Naive> {
    run: RunOf<R>,
    id: u64,
    step: u64,
    offset: u64,
    states: Vec<Vec<f32>>,
    /// Of the last step, where states are in blocks.
    blocks: Vec<Option<Stored>>,
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

impl<R: Naive> Reference<R> {
    fn step<P: Value, G: Value>(&mut self, p: &mut [P], g: &[G]) {
        let (config, n) = (self.run.config, p.len());
        self.step += 1;
        let old: Vec<f32> = p.iter().map(|p| p.to()).collect();
        let mut new = Vec::new();
        let mut new_states = self.states.clone();
        for i in 0..n {
            let gradient = if config.maximize() { -g[i].to() } else { g[i].to() };
            let mut states = [0.0; 3];
            for (state, values) in states.iter_mut().zip(&self.states) {
                *state = values[i];
            }
            let (mut x, mut states_after) = config.element(self.step, old[i], gradient, states);
            if config.skip_zeros() && gradient == 0.0 {
                states_after = states;
                // Of updates, none.
                x = config.finish(&[], vec![old[i]]).first().map_or(0.0, |&p| p);
            }
            new.push(x);
            for (values, x) in new_states.iter_mut().zip(states_after) {
                values[i] = x;
            }
        }
        for (i, x) in config.finish(&old, new).into_iter().enumerate() {
            let parameters = self.run.parameters;
            let draw = || self.draw(parameters, Role::Parameter, 0, i).unwrap();
            p[i] = match P::STORED {
                None => P::of(if x.is_nan() { f32::from_bits(0x7FC0_0000) } else { x }),
                Some(format) => P::of_code(stored(x, format, parameters, draw)),
            };
        }
        for (k, (format, &role)) in R::formats(self.run.states).into_iter().zip(R::ROLES).enumerate() {
            let new = std::mem::take(&mut new_states[k]);
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
            self.states[k] = stored;
        }
        self.offset += (R::ROLES.len() * n) as u64;
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

/// A few steps of AdamW of one tensor.
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
    /// As [`RunOf::compare`].
    pub(crate) fn compare<P: Value, G: Value>(self, gradient: impl FnMut(u64, usize) -> f32) -> u64 {
        let Self { n, steps, states, rounding, parameters, weight_decay, isa } = self;
        let config = AdamWConfig { lr: 0.1, weight_decay, ..AdamWConfig::default() };
        RunOf { config, n, steps, states, rounding, parameters, isa }.compare::<P, G>(gradient)
    }
}

/// A few steps of one tensor under any rule.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunOf<R: Naive> {
    pub(crate) config: R,
    pub(crate) n: usize,
    pub(crate) steps: u64,
    pub(crate) states: R::States,
    pub(crate) rounding: Rounding,
    pub(crate) parameters: Rounding,
    pub(crate) isa: Isa,
}

impl<R: Naive> RunOf<R> {
    /// Holds the optimizer to the reference under gradients by step and element. Returns the NaN blocks of the last step.
    pub(crate) fn compare<P: Value, G: Value>(self, mut gradient: impl FnMut(u64, usize) -> f32) -> u64 {
        let Self { config, n, steps, states, rounding, parameters, isa } = self;
        let mut inputs = Inputs(n as u64);
        let start: Vec<P> = (0..n).map(|_| P::of(inputs.next() as i32 as f32 * 1e-9)).collect();
        let new = Optimizer::new(config, states, rounding).unwrap();
        let mut opt = new.parameter_rounding(parameters).unwrap().isa(isa);
        let formats = R::formats(states);
        let mut reference = Reference {
            run: self,
            id: 9,
            step: 0,
            offset: 0,
            states: formats.iter().map(|&format| vec![fresh(format); n]).collect(),
            blocks: formats.iter().map(|_| None).collect(),
        };
        let (mut a, mut b) = (start.clone(), start);
        let mut nan_blocks = 0;
        for t in 1..=steps {
            let g: Vec<G> = (0..n).map(|i| G::of(gradient(t, i))).collect();
            nan_blocks = opt.step_tensors(&mut [Parameter::numbered(9, &mut a, &g)]).unwrap().nan_blocks;
            reference.step(&mut b, &g);
        }
        assert!(bytemuck::cast_slice::<P, u8>(&a) == bytemuck::cast_slice::<P, u8>(&b), "parameters: {self:?}");
        let mut nan_expected = 0;
        for (k, (stored, expected)) in opt.stored(9).unwrap().iter().zip(&reference.states).enumerate() {
            assert_eq!(bits(&stored.to_f32()), bits(expected), "state {k}: {self:?}");
            let (Moment::Blocks(blocks), Some(expected)) = (stored, &reference.blocks[k]) else { continue };
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
