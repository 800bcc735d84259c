//! AdamW on CPU memory.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;

use half::bf16;

use super::rule::{Scalars, power};
use super::state::{Moment, Real, States, Store};
use super::store::{Drawer, MomentMut, Noise};
use super::tensor::{Entry, Tensor, check};
use super::{OptimError, ResetMoments, Rounding, StepControl, StepOutcome, StepReport};
use crate::isa::{Isa, Kernel, at_level};
use crate::random::{BLOCK, Draw, Role, SrStates};
use crate::round::lanes::{Decide, Draws16, NearestEven};
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
        self.scalars_of_ages(t, t)
    }

    /// [`scalars`](Self::scalars) where the moments differ in age, the second having been reset alone.
    ///
    /// # Errors
    /// [`OptimError::Config`] if either is 0.
    pub fn scalars_of_ages(&self, first: u64, second: u64) -> Result<Scalars, OptimError> {
        if first == 0 || second == 0 {
            return Err(OptimError::Config { argument: "t", expected: "an age of 1 or more", got: 0.0 });
        }
        Ok(Scalars {
            beta1: self.beta1 as f32,
            one_minus_beta1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            one_minus_beta2: (1.0 - self.beta2) as f32,
            minus_step: -(self.lr / (1.0 - power(self.beta1, first))) as f32,
            root_correction: (1.0 / (1.0 - power(self.beta2, second)).sqrt()) as f32,
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
    group: usize,
}

impl<'a, P: Real, G: Real> Parameter<'a, P, G> {
    /// A tensor known by name; its id is the name's [`tensor_id`](crate::random::tensor_id).
    pub fn named(name: &'a str, params: &'a mut [P], grads: &'a [G]) -> Self {
        Self { tensor: Tensor::named(name), params, grads, group: 0 }
    }

    /// A tensor known by number.
    pub fn numbered(id: u64, params: &'a mut [P], grads: &'a [G]) -> Self {
        Self { tensor: Tensor::numbered(id), params, grads, group: 0 }
    }

    /// Says that the memory holds the elements from index `first` on of a tensor of `whole` elements, a shard: it gets the
    /// bits that it would get in the whole. Parts are cut at multiples of 4096 elements, and at the end of the tensor; an
    /// optimizer steps one part of a tensor, the same in every step.
    #[must_use]
    pub fn part(self, first: u64, whole: u64) -> Self {
        Self { tensor: self.tensor.part(first, whole), ..self }
    }

    /// In another parameter group than 0: [`AdamW::add_group`].
    #[must_use]
    pub fn group(self, group: usize) -> Self {
        Self { group, ..self }
    }
}

/// State of one tensor.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TensorState {
    /// `None` if it is known by number.
    pub(super) name: Option<String>,
    pub(super) m: Moment,
    pub(super) v: Moment,
    /// Steps since the second moment was zero.
    pub(super) age: u64,
    /// Steps since the first moment was zero: as many, or more where the second alone was reset.
    pub(super) first_age: u64,
    /// Index of the first element in its tensor.
    pub(super) first: u64,
    /// The parameter group that it was last stepped in.
    pub(super) group: usize,
}

/// What the tensors of a parameter group have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ParameterGroup {
    /// Hyper-parameters. Tensors are excluded from decay in a group with a `weight_decay` of 0.
    pub config: AdamWConfig,
    /// What moments are stored as.
    pub states: States,
}

impl ParameterGroup {
    /// A group whose moments are stored as `states` says (a [`StateFormat`](super::StateFormat) for both, or [`States`]).
    #[must_use]
    pub fn new(config: AdamWConfig, states: impl Into<States>) -> Self {
        Self { config, states: states.into() }
    }

    fn check(&self, rounding: Rounding) -> Result<(), OptimError> {
        self.config.check()?;
        self.states.check()?;
        if matches!(rounding, Rounding::SrStates { .. }) && self.states.has_blocks() {
            let reason = "the package `sr-states` stores moments in BF16";
            return Err(OptimError::Unsupported { argument: "rounding", reason });
        }
        Ok(())
    }
}

/// AdamW with stored moments of few bits.
///
/// Two counters: the *age* of a tensor counts its own steps from 1 and corrects the bias of its moments; the *step* of the
/// optimizer counts calls and keys the random draws.
#[derive(Clone, Debug)]
pub struct AdamW {
    /// At least one.
    pub(super) groups: Vec<ParameterGroup>,
    pub(super) states: Rounding,
    pub(super) parameters: Rounding,
    pub(super) isa: Isa,
    pub(super) step: u64,
    /// Counters used so far under [`Rounding::SrStates`].
    pub(super) offset: u64,
    pub(super) tensors: BTreeMap<u64, TensorState>,
}

impl AdamW {
    /// An optimizer whose moments are stored as `states` says (a [`StateFormat`](super::StateFormat) for both, or [`States`]),
    /// with `rounding` for moments and for parameters of fewer than 32 bits.
    ///
    /// # Errors
    /// As [`AdamWConfig::check`]; [`OptimError::State`] for a format that its moment can't have, [`OptimError::Unsupported`] for
    /// [`Rounding::SrStates`] with blocks.
    pub fn new(config: AdamWConfig, states: impl Into<States>, rounding: Rounding) -> Result<Self, OptimError> {
        let group = ParameterGroup::new(config, states);
        group.check(rounding)?;
        Ok(Self {
            groups: alloc::vec![group],
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

    /// The hyper-parameters of group 0.
    #[must_use]
    pub fn config(&self) -> &AdamWConfig {
        &self.groups[0].config
    }

    /// Changes the hyper-parameters of group 0 from the next step on, as a schedule does.
    ///
    /// # Errors
    /// As [`AdamWConfig::check`]; the old ones stay then.
    pub fn set_config(&mut self, config: AdamWConfig) -> Result<(), OptimError> {
        config.check()?;
        self.groups[0].config = config;
        Ok(())
    }

    /// The parameter groups: the one that [`new`](Self::new) made, and those added.
    #[must_use]
    pub fn groups(&self) -> &[ParameterGroup] {
        &self.groups
    }

    /// Adds a parameter group and gives its number, for [`Parameter::group`].
    ///
    /// ```
    /// use halfulp::optim::{AdamW, AdamWConfig, Parameter, ParameterGroup, Rounding, StateFormat};
    /// let decayed = AdamWConfig::default();
    /// let mut opt = AdamW::new(decayed, StateFormat::Bf16, Rounding::stochastic(7))?;
    /// let config = AdamWConfig { weight_decay: 0.0, ..decayed };
    /// let undecayed = opt.add_group(ParameterGroup::new(config, StateFormat::F32))?;
    /// let (mut weight, mut bias) = ([1.0f32; 8], [1.0f32; 2]);
    /// opt.step_tensors(&mut [
    ///     Parameter::named("weight", &mut weight, &[0.0f32; 8]),
    ///     Parameter::named("bias", &mut bias, &[0.0f32; 2]).group(undecayed),
    /// ])?;
    /// assert_eq!((weight[0], bias[0]), (1.0 - 1e-5, 1.0));
    /// # Ok::<(), halfulp::optim::OptimError>(())
    /// ```
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn add_group(&mut self, group: ParameterGroup) -> Result<usize, OptimError> {
        group.check(self.states)?;
        self.groups.push(group);
        Ok(self.groups.len() - 1)
    }

    /// Changes the hyper-parameters of every group from the next step on, as a schedule does: `change` is given the number of
    /// a group and its hyper-parameters.
    ///
    /// # Errors
    /// As [`AdamWConfig::check`]; the old ones stay then, of every group.
    pub fn set_configs(&mut self, mut change: impl FnMut(usize, &mut AdamWConfig)) -> Result<(), OptimError> {
        let mut groups = self.groups.clone();
        for (number, group) in groups.iter_mut().enumerate() {
            change(number, &mut group.config);
            group.config.check()?;
        }
        self.groups = groups;
        Ok(())
    }

    /// Steps executed.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Age of a tensor: its own steps executed since the last reset. 0 for one that has not been stepped.
    #[must_use]
    pub fn age(&self, id: u64) -> u64 {
        self.tensors.get(&id).map_or(0, |state| state.age)
    }

    /// Ids of the tensors that have states, ascending.
    pub fn tensors(&self) -> impl Iterator<Item = u64> {
        self.tensors.keys().copied()
    }

    /// Zeroes moments of a tensor and restarts their age. The optimizer's step, which keys the random draws, goes on, so that
    /// no noise is seen twice. False, and nothing to do, for a tensor that has not been stepped.
    pub fn reset(&mut self, id: u64, moments: ResetMoments) -> bool {
        let Some(state) = self.tensors.get_mut(&id) else { return false };
        let (states, n) = (self.groups[state.group].states, state.v.len());
        state.v = Moment::zeroed(states.v, n);
        state.age = 0;
        if moments == ResetMoments::Both {
            state.m = Moment::zeroed(states.m, n);
            state.first_age = 0;
        }
        true
    }

    /// First and second moment of a tensor; `None` for one that has not been stepped.
    #[must_use]
    pub fn moments(&self, id: u64) -> Option<(&Moment, &Moment)> {
        self.tensors.get(&id).map(|state| (&state.m, &state.v))
    }

    /// What moments of group 0 are stored as.
    #[must_use]
    pub fn states(&self) -> States {
        self.groups[0].states
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
    /// [`OptimError::SameTensor`] for two tensors with one id; [`OptimError::Group`] and [`OptimError::GroupStates`] for a group
    /// that there is not, or that stores states otherwise than the tensor does. Nothing is changed then.
    pub fn step_tensors<P: Real, G: Real>(
        &mut self,
        tensors: &mut [Parameter<'_, P, G>],
    ) -> Result<StepReport, OptimError> {
        self.check(tensors)?;
        self.execute(&StepControl::default(), tensors)
    }

    /// Steps tensors, with gradients scaled and clipped, or not at all where [`StepControl::found_inf`] is set.
    ///
    /// # Errors
    /// As [`step_tensors`](Self::step_tensors), and [`OptimError::Config`] for factors out of their range.
    pub fn step_controlled<P: Real, G: Real>(
        &mut self,
        control: &StepControl,
        tensors: &mut [Parameter<'_, P, G>],
    ) -> Result<StepOutcome, OptimError> {
        control.check()?;
        self.check(tensors)?;
        if control.found_inf {
            return Ok(StepOutcome::Skipped);
        }
        self.execute(control, tensors).map(StepOutcome::Executed)
    }

    fn execute<P: Real, G: Real>(
        &mut self,
        control: &StepControl,
        tensors: &mut [Parameter<'_, P, G>],
    ) -> Result<StepReport, OptimError> {
        self.step += 1;
        let mut report = StepReport::default();
        for tensor in tensors {
            report += self.step_tensor(control, tensor)?;
        }
        Ok(report)
    }

    fn check<P: Real, G: Real>(&self, tensors: &[Parameter<'_, P, G>]) -> Result<(), OptimError> {
        check(tensors.iter().map(|Parameter { tensor, params, grads, .. }| Entry {
            tensor: *tensor,
            params: params.len(),
            grads: grads.len(),
            state: self.tensors.get(&tensor.id).map(|state| (state.first, state.m.len())),
        }))?;
        tensors.iter().try_for_each(|parameter| self.check_group(parameter.group, &parameter.tensor))
    }

    fn check_group(&self, group: usize, tensor: &Tensor<'_>) -> Result<(), OptimError> {
        let Some(ParameterGroup { states: got, .. }) = self.groups.get(group).copied() else {
            return Err(OptimError::Group { tensor: tensor.text(), expected: self.groups.len(), got: group });
        };
        let expected = self.tensors.get(&tensor.id).map_or(got, |state| self.groups[state.group].states);
        if expected == got { Ok(()) } else { Err(OptimError::GroupStates { tensor: tensor.text(), expected, got }) }
    }

    fn step_tensor<P: Real, G: Real>(
        &mut self,
        control: &StepControl,
        tensor: &mut Parameter<'_, P, G>,
    ) -> Result<StepReport, OptimError> {
        let n = tensor.params.len();
        let ParameterGroup { config, states } = self.groups[tensor.group];
        let (id, first, whole) = (tensor.tensor.id, tensor.tensor.first(), tensor.tensor.whole(n as u64));
        let state = self.tensors.entry(id).or_insert_with(|| TensorState {
            name: tensor.tensor.name(),
            m: Moment::zeroed(states.m, n),
            v: Moment::zeroed(states.v, n),
            age: 0,
            first_age: 0,
            first,
            group: tensor.group,
        });
        let mut scalars = config.scalars_of_ages(state.first_age + 1, state.age + 1)?;
        // The factor is 1 or -1 here, so that the product is exact.
        scalars.gradient_scale *= control.gradient_scale;
        scalars.clip = control.clip;
        state.group = tensor.group;
        state.age += 1;
        state.first_age += 1;
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
        let [of_m, of_v] = states.encoders();
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
            let index = first + at as u64;
            let (m, v) = match (m.piece(at..at + n), v.piece(at..at + n)) {
                (MomentMut::Bf16(m), MomentMut::Bf16(v)) if moves_bits::<P>() && moves_bits::<G>() => {
                    let draws = [&mut draws_p, &mut draws_m, &mut draws_v];
                    at_level(isa, InOne { scalars, index, p, g, m, v, draws });
                    continue;
                }
                others => others,
            };
            let (new_m, new_v) = (&mut new_m[..n], &mut new_v[..n]);
            let (old_m, old_v) = (m.values(isa, &mut room_m), v.values(isa, &mut room_v));
            let (old, new) = ([old_m, old_v], [&mut *new_m, &mut *new_v]);
            at_level(isa, Rule { scalars, index, p, g, old, new, draws: &mut draws_p, rooms: &mut rooms });
            report.nan_blocks += m.store(isa, &mut draws_m, index, new_m) + v.store(isa, &mut draws_v, index, new_v);
        }
        report
    }
}

/// Whether numbers of a type are f32 but for a move of bits.
fn moves_bits<T: Real>() -> bool {
    T::zeroed().widen().is_some()
}

/// A step of up to [`BLOCK`] elements in one loop, in which divisions and memory overlap: for moments in BF16, and parameters and
/// gradients that are f32 but for a move of bits.
struct InOne<'a, P, G> {
    scalars: &'a Scalars,
    index: u64,
    p: &'a mut [P],
    g: &'a [G],
    m: &'a mut [bf16],
    v: &'a mut [bf16],
    draws: [&'a mut Drawer; 3],
}

impl<P: Real, G: Real> Kernel for InOne<'_, P, G> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { scalars, index, p, g, m, v, draws: [of_p, of_m, of_v] } = self;
        let (n, none) = (p.len(), &[(); BLOCK][..p.len()]);
        let of_p = if size_of::<P>() < 4 { of_p.draws(index, n) } else { None };
        match (of_p, of_m.draws(index, n), of_v.draws(index, n)) {
            (None, None, _) | (None, _, None) => {
                in_one::<P, G, NearestEven, NearestEven>(scalars, g, p, m, v, none, [none; 2]);
            }
            (Some(of_p), None, _) | (Some(of_p), _, None) => {
                in_one::<P, G, Draws16, NearestEven>(scalars, g, p, m, v, of_p, [none; 2]);
            }
            (None, Some(of_m), Some(of_v)) => {
                in_one::<P, G, NearestEven, Draws16>(scalars, g, p, m, v, none, [of_m, of_v]);
            }
            (Some(of_p), Some(of_m), Some(of_v)) => {
                in_one::<P, G, Draws16, Draws16>(scalars, g, p, m, v, of_p, [of_m, of_v]);
            }
        }
    }
}

#[inline(always)]
fn in_one<P: Real, G: Real, OfP: Decide, OfM: Decide>(
    scalars: &Scalars,
    g: &[G],
    p: &mut [P],
    m: &mut [bf16],
    v: &mut [bf16],
    of_p: &[OfP::Draw],
    [of_m, of_v]: [&[OfM::Draw]; 2],
) {
    let (scalars, n, target) = (*scalars, p.len(), P::target());
    let (g, m, v) = (&g[..n], &mut m[..n], &mut v[..n]);
    let (of_p, of_m, of_v) = (&of_p[..n], &of_m[..n], &of_v[..n]);
    for i in 0..n {
        let old = [p[i].widen(), g[i].widen(), m[i].widen(), v[i].widen()].map(Option::unwrap_or_default);
        let [new_p, new_m, new_v] = scalars.step(old[0], old[1], old[2], old[3]);
        p[i] = P::store::<OfP>(&target, new_p, of_p[i]);
        m[i] = bf16::store::<OfM>(&(), new_m, of_m[i]);
        v[i] = bf16::store::<OfM>(&(), new_v, of_v[i]);
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
