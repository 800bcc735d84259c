//! AdamW on CPU memory.

use alloc::collections::BTreeMap;

use super::rule::{Scalars, power};
use super::state::{Moment, Real, States};
use super::store::{Drawer, MomentMut, Noise};
use super::tensor::{Entry, Tensor, check};
use super::{OptimError, Rounding, StepReport};
use crate::isa::{Isa, Kernel, at_level};
use crate::random::{BLOCK, Draw, Role, SrStates};
use crate::threads::join;

/// Hyper-parameters, with the field's usual defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWConfig {
    /// Learning rate, finite and not negative. 1e-3.
    pub lr: f64,
    /// Decay of the first moment, in [0, 1). 0.9.
    pub beta1: f64,
    /// Decay of the second moment, in [0, 1). 0.999.
    pub beta2: f64,
    /// Added to the root of the second moment; positive as f32. 1e-8.
    pub eps: f64,
    /// Decoupled weight decay, finite and not negative: the old parameter shrinks by `lr * weight_decay` of itself. 1e-2.
    pub weight_decay: f64,
    /// Climb instead of descend. False.
    pub maximize: bool,
    /// Not supported: refused when true.
    pub amsgrad: bool,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 1e-2, maximize: false, amsgrad: false }
    }
}

impl AdamWConfig {
    /// Checks every hyper-parameter.
    ///
    /// # Errors
    /// [`OptimError::Config`] names the first that is out of its range, [`OptimError::Unsupported`] an option that there
    /// is not.
    pub fn check(&self) -> Result<(), OptimError> {
        let within = |argument, expected, got: f64, ok: bool| {
            if ok { Ok(()) } else { Err(OptimError::Config { argument, expected, got }) }
        };
        let finite = |x: f64| x >= 0.0 && (x as f32).is_finite();
        within("lr", "a finite f32, 0 or more", self.lr, finite(self.lr))?;
        within("beta1", "0 <= beta1 < 1", self.beta1, (0.0..1.0).contains(&self.beta1))?;
        within("beta2", "0 <= beta2 < 1", self.beta2, (0.0..1.0).contains(&self.beta2))?;
        let eps = self.eps as f32;
        within("eps", "positive and finite as f32", self.eps, eps > 0.0 && eps.is_finite())?;
        within("weight_decay", "a finite f32, 0 or more", self.weight_decay, finite(self.weight_decay))?;
        within("lr * weight_decay", "a finite f32", self.lr * self.weight_decay, finite(self.lr * self.weight_decay))?;
        if self.amsgrad {
            let reason = "a running maximum of the second moment would need a third state";
            return Err(OptimError::Unsupported { argument: "amsgrad", reason });
        }
        Ok(())
    }

    /// The scalars of a tensor at age `t`, counted from 1.
    ///
    /// # Errors
    /// [`OptimError::Config`] for `t = 0`, where the bias corrections divide by zero.
    pub fn scalars(&self, t: u64) -> Result<Scalars, OptimError> {
        if t == 0 {
            return Err(OptimError::Config { argument: "t", expected: "an age of 1 or more", got: 0.0 });
        }
        Ok(Scalars {
            beta1: self.beta1 as f32,
            one_minus_beta1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            one_minus_beta2: (1.0 - self.beta2) as f32,
            minus_step: -(self.lr / (1.0 - power(self.beta1, t))) as f32,
            root_correction: (1.0 / (1.0 - power(self.beta2, t)).sqrt()) as f32,
            eps: self.eps as f32,
            minus_decay: -(self.lr * self.weight_decay) as f32,
            gradient_scale: if self.maximize { -1.0 } else { 1.0 },
            clip: 1.0,
        })
    }
}

/// One tensor of a step, or a part of one: its parameters and gradients.
#[derive(Debug)]
pub struct Parameter<'a, P, G> {
    tensor: Tensor<'a>,
    params: &'a mut [P],
    grads: &'a [G],
}

impl<'a, P: Real, G: Real> Parameter<'a, P, G> {
    /// A tensor known by name; its id is the name's [`tensor_id`](crate::random::tensor_id).
    pub fn named(name: &'a str, params: &'a mut [P], grads: &'a [G]) -> Self {
        Self { tensor: Tensor::named(name), params, grads }
    }

    /// A tensor known by number.
    pub fn numbered(id: u64, params: &'a mut [P], grads: &'a [G]) -> Self {
        Self { tensor: Tensor::numbered(id), params, grads }
    }

    /// Says that the memory holds the elements from index `first` on of a tensor of `whole` elements, a shard: it gets the
    /// bits that it would get in the whole. Parts are cut at multiples of 4096 elements, and at the end of the tensor; an
    /// optimizer steps one part of a tensor, the same in every step.
    #[must_use]
    pub fn part(self, first: u64, whole: u64) -> Self {
        Self { tensor: self.tensor.part(first, whole), ..self }
    }
}

/// State of one tensor.
#[derive(Clone, Debug, PartialEq)]
struct TensorState {
    m: Moment,
    v: Moment,
    age: u64,
    /// Index of the first element in its tensor.
    first: u64,
}

/// AdamW with stored moments of few bits.
///
/// Two counters: the *age* of a tensor counts its own steps from 1 and corrects the bias of its moments; the *step* of the
/// optimizer counts calls and keys the random draws.
#[derive(Clone, Debug)]
pub struct AdamW {
    config: AdamWConfig,
    formats: States,
    states: Rounding,
    parameters: Rounding,
    isa: Isa,
    step: u64,
    /// Counters used so far under [`Rounding::SrStates`].
    offset: u64,
    tensors: BTreeMap<u64, TensorState>,
}

impl AdamW {
    /// An optimizer whose moments are stored as `states` says (a [`StateFormat`](super::StateFormat) for both, or [`States`]),
    /// with `rounding` for moments and for parameters of fewer than 32 bits.
    ///
    /// # Errors
    /// As [`AdamWConfig::check`]; [`OptimError::State`] for a format that its moment can't have, [`OptimError::Unsupported`] for
    /// [`Rounding::SrStates`] with blocks.
    pub fn new(config: AdamWConfig, states: impl Into<States>, rounding: Rounding) -> Result<Self, OptimError> {
        config.check()?;
        let formats = states.into();
        formats.check()?;
        if matches!(rounding, Rounding::SrStates { .. }) && formats.has_blocks() {
            let reason = "the package `sr-states` stores moments in BF16";
            return Err(OptimError::Unsupported { argument: "rounding", reason });
        }
        Ok(Self {
            config,
            formats,
            states: rounding,
            parameters: match rounding {
                Rounding::SrStates { .. } => Rounding::Nearest,
                other => other,
            },
            isa: Isa::best(),
            step: 0,
            offset: 0,
            tensors: BTreeMap::new(),
        })
    }

    /// Another rounding for parameters than for moments.
    ///
    /// # Errors
    /// [`OptimError::Unsupported`] for [`Rounding::SrStates`], which has no counters for parameters.
    pub fn parameter_rounding(self, rounding: Rounding) -> Result<Self, OptimError> {
        if let Rounding::SrStates { .. } = rounding {
            let reason = "`SrStates` has no counters for parameters";
            return Err(OptimError::Unsupported { argument: "parameter_rounding", reason });
        }
        Ok(Self { parameters: rounding, ..self })
    }

    /// Runs at this instruction-set level instead of the best one; no bit depends on it.
    #[must_use]
    pub fn isa(self, isa: Isa) -> Self {
        Self { isa, ..self }
    }

    /// The hyper-parameters.
    #[must_use]
    pub fn config(&self) -> &AdamWConfig {
        &self.config
    }

    /// Changes the hyper-parameters from the next step on, as a schedule does.
    ///
    /// # Errors
    /// As [`AdamWConfig::check`]; the old ones stay then.
    pub fn set_config(&mut self, config: AdamWConfig) -> Result<(), OptimError> {
        config.check()?;
        self.config = config;
        Ok(())
    }

    /// Steps executed.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Age of a tensor: its own steps executed. 0 for one that has not been stepped.
    #[must_use]
    pub fn age(&self, id: u64) -> u64 {
        self.tensors.get(&id).map_or(0, |state| state.age)
    }

    /// First and second moment of a tensor; `None` for one that has not been stepped.
    #[must_use]
    pub fn moments(&self, id: u64) -> Option<(&Moment, &Moment)> {
        self.tensors.get(&id).map(|state| (&state.m, &state.v))
    }

    /// What moments are stored as.
    #[must_use]
    pub fn states(&self) -> States {
        self.formats
    }

    /// Bytes of the states of all tensors that have been stepped: [`States::bytes`] of each.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.tensors.values().map(|state| state.m.bytes() + state.v.bytes()).sum()
    }

    /// Steps one tensor, of id 0.
    ///
    /// # Errors
    /// As [`step_tensors`](Self::step_tensors).
    pub fn step<P: Real, G: Real>(&mut self, params: &mut [P], grads: &[G]) -> Result<StepReport, OptimError> {
        self.step_tensors(&mut [Parameter::numbered(0, params, grads)])
    }

    /// Steps tensors. Their order, and which others are stepped with them, change no bit (but under
    /// [`Rounding::SrStates`], whose counters run through the tensors).
    ///
    /// A tensor that is not in the list, for want of a gradient, stands still: its age does not move.
    ///
    /// # Errors
    /// [`OptimError::Length`] for gradients of another length than the parameters, or parameters of another length than
    /// before; [`OptimError::Cut`] and [`OptimError::Part`] for parts that are cut elsewhere than they may be, or than before;
    /// [`OptimError::SameTensor`] for two tensors with one id. Nothing is changed then.
    pub fn step_tensors<P: Real, G: Real>(
        &mut self,
        tensors: &mut [Parameter<'_, P, G>],
    ) -> Result<StepReport, OptimError> {
        self.check(tensors)?;
        self.step += 1;
        let mut report = StepReport::default();
        for tensor in tensors {
            report += self.step_tensor(tensor)?;
        }
        Ok(report)
    }

    fn check<P: Real, G: Real>(&self, tensors: &[Parameter<'_, P, G>]) -> Result<(), OptimError> {
        check(tensors.iter().map(|Parameter { tensor, params, grads }| Entry {
            tensor: *tensor,
            params: params.len(),
            grads: grads.len(),
            state: self.tensors.get(&tensor.id).map(|state| (state.first, state.m.len())),
        }))
    }

    fn step_tensor<P: Real, G: Real>(&mut self, tensor: &mut Parameter<'_, P, G>) -> Result<StepReport, OptimError> {
        let n = tensor.params.len();
        let (id, first, whole) = (tensor.tensor.id, tensor.tensor.first(), tensor.tensor.whole(n as u64));
        let state = self.tensors.entry(id).or_insert_with(|| TensorState {
            m: Moment::zeroed(self.formats.m, n),
            v: Moment::zeroed(self.formats.v, n),
            age: 0,
            first,
        });
        let scalars = self.config.scalars(state.age + 1)?;
        state.age += 1;
        let draws = |rounding, role, sr_states: u64| match rounding {
            Rounding::Nearest => Noise::None,
            Rounding::Stochastic { seed } => Noise::Draw(Draw::seeded(seed).step(self.step).tensor(id).role(role)),
            Rounding::SrStates { seed } => Noise::SrStates(SrStates::seeded(seed).advanced(sr_states)),
        };
        let noise = [
            draws(self.parameters, Role::Parameter, 0),
            draws(self.states, Role::FirstMoment, self.offset),
            draws(self.states, Role::SecondMoment, self.offset.wrapping_add(whole)),
        ];
        if let Rounding::SrStates { .. } = self.states {
            self.offset = self.offset.wrapping_add(whole.wrapping_mul(2));
        }
        let [of_m, of_v] = self.formats.encoders();
        let (m, v) = (state.m.memory(of_m.as_ref()), state.v.memory(of_v.as_ref()));
        let work = Step { isa: self.isa, scalars: &scalars, noise: &noise };
        Ok(work.spread(first, (&mut *tensor.params, tensor.grads, m, v)))
    }
}

/// Elements that a thread takes at a time: whole blocks of every state format.
const CHUNK: usize = 32 * BLOCK;

/// Parameters, gradients, first and second moments.
type Slices<'a, P, G> = (&'a mut [P], &'a [G], MomentMut<'a>, MomentMut<'a>);

/// One step of one tensor.
struct Step<'a> {
    isa: Isa,
    scalars: &'a Scalars,
    noise: &'a [Noise; 3],
}

impl Step<'_> {
    /// Halves the work until it is one chunk. `first` is the index of the first element.
    fn spread<P: Real, G: Real>(&self, first: u64, (p, g, m, v): Slices<'_, P, G>) -> StepReport {
        if p.len() <= CHUNK {
            return self.chunk(first, (p, g, m, v));
        }
        let middle = p.len().div_ceil(CHUNK) / 2 * CHUNK;
        let (p, p1) = p.split_at_mut(middle);
        let (g, g1) = g.split_at(middle);
        let (m, m1) = m.split(middle);
        let (v, v1) = v.split(middle);
        let (mut report, more) =
            join(|| self.spread(first, (p, g, m, v)), || self.spread(first + middle as u64, (p1, g1, m1, v1)));
        report += more;
        report
    }

    fn chunk<P: Real, G: Real>(&self, first: u64, (p, g, mut m, mut v): Slices<'_, P, G>) -> StepReport {
        let Self { isa, scalars, noise } = *self;
        let [mut draws_p, mut draws_m, mut draws_v] = noise.each_ref().map(Drawer::new);
        let [mut room_m, mut room_v, mut new_m, mut new_v] = [[0f32; BLOCK]; 4];
        let mut rooms = Rooms { p: [0; BLOCK], g: [0; BLOCK], new_p: [0.0; BLOCK] };
        let mut report = StepReport::default();
        for (b, (p, g)) in p.chunks_mut(BLOCK).zip(g.chunks(BLOCK)).enumerate() {
            let (at, n) = (b * BLOCK, p.len());
            let (m, v) = (m.piece(at..at + n), v.piece(at..at + n));
            let (new_m, new_v) = (&mut new_m[..n], &mut new_v[..n]);
            let index = first + at as u64;
            let (old_m, old_v) = (m.values(isa, &mut room_m), v.values(isa, &mut room_v));
            let (old, new) = ([old_m, old_v], [&mut *new_m, &mut *new_v]);
            at_level(isa, Rule { scalars, index, p, g, old, new, draws: &mut draws_p, rooms: &mut rooms });
            report.nan_blocks += m.store(isa, &mut draws_m, index, new_m) + v.store(isa, &mut draws_v, index, new_v);
        }
        report
    }
}

/// The element rule over up to [`BLOCK`] elements: stores parameters, leaves moments unrounded.
struct Rule<'a, P, G> {
    scalars: &'a Scalars,
    index: u64,
    p: &'a mut [P],
    g: &'a [G],
    old: [&'a [f32]; 2],
    new: [&'a mut [f32]; 2],
    draws: &'a mut Drawer,
    rooms: &'a mut Rooms,
}

/// Parameters and gradients as f32 bits, where they are not already, and new parameters.
struct Rooms {
    p: [u32; BLOCK],
    g: [u32; BLOCK],
    new_p: [f32; BLOCK],
}

impl<P: Real, G: Real> Kernel for Rule<'_, P, G> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { scalars, index, p, g, old: [old_m, old_v], new: [new_m, new_v], draws, rooms } = self;
        let (scalars, n) = (*scalars, p.len());
        let (words_p, words_g) = (&P::words(p, &mut rooms.p)[..n], &G::words(g, &mut rooms.g)[..n]);
        let new_p = &mut rooms.new_p[..n];
        apply(&scalars, [words_p, words_g], [old_m, old_v], new_p, new_m, new_v);
        draws.write(index, new_p, p);
    }
}

/// A function of its own for its arguments, of which the compiler then knows that none overlaps another.
#[inline(always)]
fn apply(
    scalars: &Scalars,
    [p, g]: [&[u32]; 2],
    [m, v]: [&[f32]; 2],
    new_p: &mut [f32],
    new_m: &mut [f32],
    new_v: &mut [f32],
) {
    let n = new_p.len();
    let (p, g, m, v) = (&p[..n], &g[..n], &m[..n], &v[..n]);
    let (new_m, new_v) = (&mut new_m[..n], &mut new_v[..n]);
    for i in 0..n {
        let [p, g] = [p[i], g[i]].map(f32::from_bits);
        [new_p[i], new_m[i], new_v[i]] = scalars.step(p, g, m[i], v[i]);
    }
}
