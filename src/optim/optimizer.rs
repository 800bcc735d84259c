//! An optimizer on CPU memory: states, groups and counters around the rule of one element.

use alloc::collections::BTreeMap;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::any::TypeId;
use core::array::from_fn;

use half::bf16;

use super::engine::{Counts, Memory, Step, Tally, no_state};
use super::hyper::{Formats, MOST, Rule, check_states, sealed};
use super::state::{Moment, Real, States};
use super::store::{BlockEncoder, Noise};
use super::tensor::{Entry, Tensor, check};
use super::{
    AdamWConfig, Alone, ChunkSums, Collective, GradientNorm, OptimError, ResetMoments, Rounding, Shard, StepControl,
    StepOutcome, StepReport,
};
use crate::isa::Isa;
use crate::random::{Draw, Role, SrStates};

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

    /// In another parameter group than 0: [`Optimizer::add_group`].
    #[must_use]
    pub fn group(self, group: usize) -> Self {
        Self { group, ..self }
    }
}

/// State of one tensor.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TensorState {
    /// `None` if it is known by number.
    pub(crate) name: Option<String>,
    /// One for each state of the rule.
    pub(crate) states: Vec<Moment>,
    /// Steps since each state was zero; 0 for states that there are not.
    pub(crate) ages: [u64; MOST],
    /// The low halves of parameters, if the group keeps them.
    pub(crate) rest: Option<Vec<u16>>,
    /// Number of elements.
    pub(crate) n: usize,
    /// Index of the first element in its tensor.
    pub(crate) first: u64,
    /// The parameter group that it was last stepped in.
    pub(crate) group: usize,
}

impl TensorState {
    /// Before its first step.
    fn new<R: Rule>(tensor: &Tensor<'_>, n: usize, group: usize, settings: &ParameterGroup<R>) -> Self {
        let formats = settings.states.formats();
        Self {
            name: tensor.name(),
            states: R::STATES.iter().zip(formats).map(|(_, format)| Moment::zeroed(format, n)).collect(),
            ages: [0; MOST],
            rest: settings.remainder.then(|| bytemuck::allocation::zeroed_vec(n)),
            n,
            first: tensor.first(),
            group,
        }
    }

    /// What its states are stored as.
    pub(super) fn formats<R: Rule>(&self) -> R::States {
        R::States::of_formats(from_fn(|s| self.states.get(s).map_or(super::StateFormat::F32, Moment::format)))
    }

    /// Steps since all states were zero, or the last of them.
    pub(super) fn age<R: Rule>(&self) -> u64 {
        self.ages[..R::STATES.len()].iter().copied().min().unwrap_or(0)
    }

    /// Bytes of memory.
    fn bytes(&self) -> usize {
        self.states.iter().map(Moment::bytes).sum::<usize>() + self.rest.as_ref().map_or(0, |rest| 2 * rest.len())
    }
}

/// What the tensors of a parameter group have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ParameterGroup<R: Rule = AdamWConfig> {
    /// Hyper-parameters. Tensors are excluded from decay in a group with a `weight_decay` of 0.
    pub config: R,
    /// What states are stored as.
    pub states: R::States,
    /// Whether parameters, which are BF16 then, are kept as f32: the optimizer has their low halves, 2 bytes a parameter.
    pub remainder: bool,
}

impl<R: Rule> ParameterGroup<R> {
    /// A group whose states are stored as `states` says: for two moments [`States`], for all of them one
    /// [`StateFormat`](super::StateFormat).
    #[must_use]
    pub fn new(config: R, states: impl Into<R::States>) -> Self {
        Self { config, states: states.into(), remainder: false }
    }

    /// With parameters in BF16 that lose nothing: in place of rounding them, the optimizer keeps what BF16 does not hold, as
    /// [`remainder`](super::remainder) splits it. To a step they are f32; at the first, those that BF16 holds.
    #[must_use]
    pub fn remainder(self) -> Self {
        Self { remainder: true, ..self }
    }

    pub(crate) fn check(&self, rounding: Rounding) -> Result<(), OptimError> {
        self.config.check()?;
        check_states::<R>(&self.states)?;
        let formats = self.states.formats();
        let blocks = |format| matches!(format, super::StateFormat::Blocks(_));
        if matches!(rounding, Rounding::SrStates { .. }) && formats[..R::STATES.len()].iter().any(|&f| blocks(f)) {
            let reason = "the package `sr-states` stores moments in BF16";
            return Err(OptimError::Unsupported { argument: "rounding", reason });
        }
        Ok(())
    }
}

/// An optimizer with stored states of few bits, by its rule: [`AdamW`](super::AdamW) and the others are names of it.
///
/// Two counters: the *age* of a tensor counts its own steps from 1 and corrects the bias of its moments; the *step* of the
/// optimizer counts calls and keys the random draws.
#[derive(Clone, Debug)]
pub struct Optimizer<R: Rule> {
    /// At least one.
    pub(crate) groups: Vec<ParameterGroup<R>>,
    pub(crate) rounding: Rounding,
    pub(crate) parameters: Rounding,
    pub(crate) isa: Isa,
    pub(crate) step: u64,
    /// Counters used so far under [`Rounding::SrStates`].
    pub(crate) offset: u64,
    pub(crate) tensors: BTreeMap<u64, TensorState>,
    pub(crate) meter: bool,
    /// What the meter counted in the last step.
    pub(crate) metered: BTreeMap<u64, [Counts; MOST]>,
}

impl<R: Rule> Optimizer<R> {
    /// An optimizer whose states are stored as `states` says: for two moments [`States`], for all of them one
    /// [`StateFormat`](super::StateFormat); with `rounding` for states and for parameters of fewer than 32 bits.
    ///
    /// # Errors
    /// As [`Rule::check`]; [`OptimError::State`] for a format that its state can't have, [`OptimError::Unsupported`] for
    /// [`Rounding::SrStates`] with blocks.
    pub fn new(config: R, states: impl Into<R::States>, rounding: Rounding) -> Result<Self, OptimError> {
        Self::with_group(ParameterGroup::new(config, states), rounding)
    }

    /// An optimizer whose first parameter group is `group`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_group(group: ParameterGroup<R>, rounding: Rounding) -> Result<Self, OptimError> {
        group.check(rounding)?;
        Ok(Self {
            groups: alloc::vec![group],
            rounding,
            parameters: match rounding {
                Rounding::SrStates { .. } => Rounding::Nearest,
                other => other,
            },
            isa: Isa::best(),
            step: 0,
            offset: 0,
            tensors: BTreeMap::new(),
            meter: false,
            metered: BTreeMap::new(),
        })
    }

    /// Another rounding for parameters than for states.
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

    /// Counts in every step, for each tensor and state, the elements that stalled. No bit depends on it.
    #[cfg(feature = "stall")]
    #[must_use]
    pub fn meter(self, on: bool) -> Self {
        Self { meter: on, ..self }
    }

    /// The hyper-parameters of group 0.
    #[must_use]
    pub fn config(&self) -> &R {
        &self.groups[0].config
    }

    /// Changes the hyper-parameters of group 0 from the next step on, as a schedule does.
    ///
    /// # Errors
    /// As [`Rule::check`]; the old ones stay then.
    pub fn set_config(&mut self, config: R) -> Result<(), OptimError> {
        config.check()?;
        self.groups[0].config = config;
        Ok(())
    }

    /// The parameter groups: the one that [`new`](Self::new) made, and those added.
    #[must_use]
    pub fn groups(&self) -> &[ParameterGroup<R>] {
        &self.groups
    }

    /// Adds a parameter group and gives its number, for [`Parameter::group`].
    ///
    /// ```
    /// use halfulp::optim::{AdamW, AdamWConfig, Parameter, ParameterGroup, Rounding, StateFormat};
    /// let config = AdamWConfig::default();
    /// let mut opt = AdamW::new(config, StateFormat::Bf16, Rounding::stochastic(7))?;
    /// let undecayed = AdamWConfig { weight_decay: 0.0, ..config };
    /// let undecayed = opt.add_group(ParameterGroup::new(undecayed, StateFormat::Bf16))?;
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
    pub fn add_group(&mut self, group: ParameterGroup<R>) -> Result<usize, OptimError> {
        group.check(self.rounding)?;
        self.groups.push(group);
        Ok(self.groups.len() - 1)
    }

    /// Changes the hyper-parameters of every group from the next step on, as a schedule does: `change` is given the number of
    /// a group and its hyper-parameters.
    ///
    /// # Errors
    /// As [`Rule::check`]; the old ones stay then, of every group.
    pub fn set_configs(&mut self, mut change: impl FnMut(usize, &mut R)) -> Result<(), OptimError> {
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
        self.tensors.get(&id).map_or(0, TensorState::age::<R>)
    }

    /// Ids of the tensors that have states, ascending.
    pub fn tensors(&self) -> impl Iterator<Item = u64> {
        self.tensors.keys().copied()
    }

    /// Zeroes states of a tensor and restarts their age. The optimizer's step, which keys the random draws, goes on, so that
    /// no noise is seen twice. False, and nothing to do, for a tensor that has not been stepped.
    pub fn reset(&mut self, id: u64, moments: ResetMoments) -> bool {
        let Some(state) = self.tensors.get_mut(&id) else { return false };
        for ((kind, stored), age) in R::STATES.iter().zip(&mut state.states).zip(&mut state.ages) {
            if moments == ResetMoments::All || kind.role == Role::SecondMoment {
                *stored = Moment::zeroed(stored.format(), state.n);
                *age = 0;
            }
        }
        true
    }

    /// The states of a tensor, in the order of their formats; `None` for one that has not been stepped.
    #[must_use]
    pub fn stored(&self, id: u64) -> Option<&[Moment]> {
        self.tensors.get(&id).map(|state| &state.states[..])
    }

    /// The low halves of a tensor's parameters, which with their BF16 numbers [`join`](super::remainder::join) to f32; `None`
    /// for one that has not been stepped, or in a group without [`remainder`](ParameterGroup::remainder).
    #[must_use]
    pub fn rest(&self, id: u64) -> Option<&[u16]> {
        self.tensors.get(&id).and_then(|state| state.rest.as_deref())
    }

    /// What states of group 0 are stored as.
    #[must_use]
    pub fn states(&self) -> R::States {
        self.groups[0].states
    }

    /// Bytes of the states of all tensors that have been stepped, remainders of parameters included.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.tensors.values().map(TensorState::bytes).sum()
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
    /// that there is not, or that stores states otherwise than the tensor does; [`OptimError::Unsupported`] for a group with
    /// remainders and parameters that are not BF16; [`OptimError::Norm`] for a part alone under a rule that goes by the norm of
    /// the whole (LAMB). Nothing is changed then.
    pub fn step_tensors<P: Real, G: Real>(
        &mut self,
        tensors: &mut [Parameter<'_, P, G>],
    ) -> Result<StepReport, OptimError> {
        self.check(tensors)?;
        self.execute(&StepControl::default(), &mut Alone, tensors)
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
        self.step_sharded(control, &mut Alone, tensors)
    }

    /// Steps the parts that this rank holds, as all ranks do at once. Only a rule that goes by norms of whole tensors (LAMB)
    /// needs the others for it; the norm of gradients, for a clip, is gathered [before](Collective::norm).
    ///
    /// # Errors
    /// As [`step_controlled`](Self::step_controlled), and as [`Collective::gather`].
    pub fn step_sharded<P: Real, G: Real>(
        &mut self,
        control: &StepControl,
        collective: &mut impl Collective,
        tensors: &mut [Parameter<'_, P, G>],
    ) -> Result<StepOutcome, OptimError> {
        control.check()?;
        self.check(tensors)?;
        if control.found_inf {
            return Ok(StepOutcome::Skipped);
        }
        self.execute(control, collective, tensors).map(StepOutcome::Executed)
    }

    fn execute<P: Real, G: Real>(
        &mut self,
        control: &StepControl,
        collective: &mut impl Collective,
        tensors: &mut [Parameter<'_, P, G>],
    ) -> Result<StepReport, OptimError> {
        let norms = if R::NORMS { self.norms(control, collective, tensors)? } else { Vec::new() };
        self.step += 1;
        self.metered.clear();
        let mut report = StepReport::default();
        for (i, tensor) in tensors.iter_mut().enumerate() {
            report += self.step_tensor(control, norms.get(i), tensor);
        }
        Ok(report)
    }

    fn check<P: Real, G: Real>(&self, tensors: &[Parameter<'_, P, G>]) -> Result<(), OptimError> {
        check(tensors.iter().map(|Parameter { tensor, params, grads, .. }| Entry {
            tensor: *tensor,
            params: params.len(),
            grads: grads.len(),
            state: self.tensors.get(&tensor.id).map(|state| (state.first, state.n)),
        }))?;
        let of_bf16 = TypeId::of::<P>() == TypeId::of::<bf16>();
        tensors.iter().try_for_each(|Parameter { tensor, group, .. }| {
            let stored = self.tensors.get(&tensor.id).map(|state| (state.formats::<R>(), state.rest.is_some()));
            check_group(&self.groups, *group, tensor, of_bf16, stored)
        })
    }

    /// The scalars of a tensor's next step.
    fn scalars(&self, group: usize, ages: [u64; MOST], control: &StepControl) -> R::Scalars {
        let ages = from_fn(|s| if s < R::STATES.len() { ages[s] + 1 } else { 0 });
        sealed::Rule::scalars(&self.groups[group].config, ages, control)
    }

    /// Norms of parameters and update of whole tensors.
    fn norms<P: Real, G: Real>(
        &mut self,
        control: &StepControl,
        collective: &mut impl Collective,
        tensors: &mut [Parameter<'_, P, G>],
    ) -> Result<Vec<[f64; 2]>, OptimError> {
        let (mut own_p, mut own_u) = (Vec::new(), Vec::new());
        for tensor in &mut *tensors {
            let [p, u] = self.chunk_sums(control, tensor)?;
            own_p.push(p);
            own_u.push(u);
        }
        let [p, u] = [collective.gather(own_p)?, collective.gather(own_u)?];
        let by_tensor = |sums: Vec<ChunkSums>| {
            let mut tensors: BTreeMap<u64, Vec<ChunkSums>> = BTreeMap::new();
            for part in sums {
                tensors.entry(part.tensor()).or_default().push(part);
            }
            tensors
        };
        let (p, u) = (by_tensor(p), by_tensor(u));
        let norm = |sums: &BTreeMap<u64, Vec<ChunkSums>>, tensor: &Tensor<'_>, n: usize| {
            let whole = |norm: &[ChunkSums]| {
                let covered: u64 = norm.iter().map(|part| part.shard().len()).sum();
                let expected = tensor.whole(n as u64);
                if covered == expected {
                    Ok(())
                } else {
                    Err(super::NormError::Cover { tensor: tensor.id, expected, got: covered })
                }
            };
            let parts = sums.get(&tensor.id).map_or(&[][..], Vec::as_slice);
            whole(parts)?;
            Ok::<_, OptimError>(GradientNorm::gather(parts)?.value())
        };
        let of_tensor = |Parameter { tensor, params, .. }: &Parameter<'_, P, G>| {
            Ok([norm(&p, tensor, params.len())?, norm(&u, tensor, params.len())?])
        };
        tensors.iter().map(of_tensor).collect()
    }

    /// Sums of squares of parameters and update of what is here of a tensor. Nothing is changed.
    fn chunk_sums<P: Real, G: Real>(
        &mut self,
        control: &StepControl,
        tensor: &mut Parameter<'_, P, G>,
    ) -> Result<[ChunkSums; 2], OptimError> {
        let (id, n) = (tensor.tensor.id, tensor.params.len());
        let settings = self.groups[tensor.group];
        let taken = self.tensors.remove(&id);
        let is_new = taken.is_none();
        let mut state = taken.unwrap_or_else(|| TensorState::new(&tensor.tensor, n, tensor.group, &settings));
        let scalars = self.scalars(tensor.group, state.ages, control);
        let step = Step::<R> {
            isa: self.isa,
            scalars: &scalars,
            noise: &[Noise::None; 1 + MOST],
            skip_zeros: settings.config.skips_zeros(),
            meter: false,
        };
        let mut sums = [(); 2].map(|()| alloc::vec![0f64; n.div_ceil(Shard::CUT as usize)]);
        let encoders = encoders::<R>(&settings.states);
        let [of_p, of_u] = &mut sums;
        step.norms(memory(&mut state, &encoders, tensor), [of_p, of_u]);
        if !is_new {
            self.tensors.insert(id, state);
        }
        let (first, whole) = (tensor.tensor.first(), tensor.tensor.whole(n as u64));
        let shard = Shard::new(first..first + n as u64, whole)
            .map_err(|source| OptimError::Cut { tensor: tensor.tensor.text(), source })?;
        let [of_p, of_u] = sums;
        Ok([ChunkSums::from_sums(id, shard, of_p)?, ChunkSums::from_sums(id, shard, of_u)?])
    }

    fn step_tensor<P: Real, G: Real>(
        &mut self,
        control: &StepControl,
        norms: Option<&[f64; 2]>,
        tensor: &mut Parameter<'_, P, G>,
    ) -> StepReport {
        let n = tensor.params.len();
        let settings = self.groups[tensor.group];
        let (id, first, whole) = (tensor.tensor.id, tensor.tensor.first(), tensor.tensor.whole(n as u64));
        let ages = self.tensors.get(&id).map_or([0; MOST], |state| state.ages);
        let mut scalars = self.scalars(tensor.group, ages, control);
        if let Some(&[params, update]) = norms {
            scalars = settings.config.with_norms(scalars, params, update);
        }
        let draws = |rounding, role, sr_states: u64| match rounding {
            Rounding::Nearest => Noise::None,
            Rounding::Stochastic { seed } => Noise::Draw(Draw::seeded(seed).step(self.step).tensor(id).role(role)),
            Rounding::SrStates { seed } => Noise::SrStates(SrStates::seeded(seed).advanced(sr_states)),
        };
        let mut noise = [Noise::None; 1 + MOST];
        noise[0] = draws(self.parameters, Role::Parameter, 0);
        for (kind, noise) in R::STATES.iter().zip(&mut noise[1..]) {
            *noise = draws(self.rounding, kind.role, self.offset);
            if let Rounding::SrStates { .. } = self.rounding {
                self.offset = self.offset.wrapping_add(whole);
            }
        }
        let state =
            self.tensors.entry(id).or_insert_with(|| TensorState::new(&tensor.tensor, n, tensor.group, &settings));
        state.group = tensor.group;
        state.ages[..R::STATES.len()].iter_mut().for_each(|age| *age += 1);
        let step = Step::<R> {
            isa: self.isa,
            scalars: &scalars,
            noise: &noise,
            skip_zeros: settings.config.skips_zeros(),
            meter: self.meter,
        };
        let encoders = encoders::<R>(&settings.states);
        let Tally { report, counts } = step.spread(first, memory(state, &encoders, tensor));
        if self.meter {
            self.metered.insert(id, counts);
        }
        report
    }
}

/// Refuses a group that there is not, one with remainders of parameters that are not BF16, and one that stores states otherwise
/// than the tensor does, which `stored` describes.
pub(crate) fn check_group<R: Rule>(
    groups: &[ParameterGroup<R>],
    group: usize,
    tensor: &Tensor<'_>,
    of_bf16: bool,
    stored: Option<(R::States, bool)>,
) -> Result<(), OptimError> {
    let Some(settings) = groups.get(group) else {
        return Err(OptimError::Group { tensor: tensor.text(), expected: groups.len(), got: group });
    };
    if settings.remainder && !of_bf16 {
        let reason = "what is kept beside a parameter is what BF16 does not hold: parameters are BF16 then";
        return Err(OptimError::Unsupported { argument: "remainder", reason });
    }
    let describe = |states: R::States, remainder| {
        if remainder { alloc::format!("{states}, and a remainder") } else { states.to_string() }
    };
    let got = (settings.states, settings.remainder);
    match stored {
        Some(stored) if describe(stored.0, stored.1) != describe(got.0, got.1) => Err(OptimError::GroupStates {
            tensor: tensor.text(),
            expected: describe(stored.0, stored.1),
            got: describe(got.0, got.1),
        }),
        _ => Ok(()),
    }
}

/// How states are encoded, those that are in blocks.
fn encoders<R: Rule>(states: &R::States) -> [Option<BlockEncoder>; MOST] {
    let formats = states.formats();
    from_fn(|s| R::STATES.get(s).and_then(|kind| formats[s].encoder(kind.role)))
}

/// The memory of one tensor.
fn memory<'a, P: Real, G: Real>(
    state: &'a mut TensorState,
    encoders: &'a [Option<BlockEncoder>; MOST],
    tensor: &'a mut Parameter<'_, P, G>,
) -> Memory<'a, P, G> {
    let mut states = from_fn(|_| no_state());
    for ((memory, stored), encoder) in states.iter_mut().zip(&mut state.states).zip(encoders) {
        *memory = stored.memory(encoder.as_ref());
    }
    Memory { p: &mut *tensor.params, rest: state.rest.as_deref_mut(), g: tensor.grads, states }
}

impl<R: Rule<States = States>> Optimizer<R> {
    /// First and second moment of a tensor; `None` for one that has not been stepped.
    #[must_use]
    pub fn moments(&self, id: u64) -> Option<(&Moment, &Moment)> {
        match self.stored(id) {
            Some([m, v]) => Some((m, v)),
            _ => None,
        }
    }
}
