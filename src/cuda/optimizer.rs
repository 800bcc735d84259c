//! Optimizers on device memory.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use core::array::from_fn;
use core::convert::Infallible;
use core::sync::atomic::{AtomicU64, Ordering};

use super::cast::Source;
use super::launch::{Shape, aligned, disjoint, launch};
use super::plan::{
    AnyArguments, AnyNormsArguments, COPIES, Clock, ControlArguments, DeviceCounts, HYPER, HyperArguments, Item,
    ManyArguments, NormsArguments, Options, PlannedLaunch, PrepareArguments, Record, Resident, Tables, Takes,
    TrustArguments, scales_at,
};
use super::{CudaError, DeviceNorm, DeviceVec, ElementType, Gpu};
use crate::format::{BlockScale, Scales};
use crate::optim::{self, Entry, MOST, Moment, NonFinite, NormError, OptimError, ParameterGroup, Real, ResetMoments};
use crate::optim::{Formats, Rounding, Rule, StateFormat, States, StepControl, Tensor, TensorState, Visit, check};
use crate::random::Role;

/// One tensor of a step, or a part of one, in device memory.
#[derive(Debug)]
pub struct DeviceParameter<'a, P, G> {
    tensor: Tensor<'a>,
    params: &'a mut DeviceVec<P>,
    grads: &'a DeviceVec<G>,
    group: usize,
}

impl<'a, P: Source + Real, G: Source + Real> DeviceParameter<'a, P, G> {
    /// A tensor known by name; its id is the name's [`tensor_id`](crate::random::tensor_id).
    pub fn named(name: &'a str, params: &'a mut DeviceVec<P>, grads: &'a DeviceVec<G>) -> Self {
        Self { tensor: Tensor::named(name), params, grads, group: 0 }
    }

    /// A tensor known by number.
    pub fn numbered(id: u64, params: &'a mut DeviceVec<P>, grads: &'a DeviceVec<G>) -> Self {
        Self { tensor: Tensor::numbered(id), params, grads, group: 0 }
    }

    /// As [`optim::Parameter::part`].
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

/// Somebody else's memory to step: addresses, length and types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepMemory {
    /// The tensor's id: a number, or the [`tensor_id`](crate::random::tensor_id) of a name.
    pub id: u64,
    /// Address of the parameters, aligned to their size.
    pub params: u64,
    /// Their type.
    pub params_type: ElementType,
    /// Address of the gradients, aligned to their size.
    pub grads: u64,
    /// Their type.
    pub grads_type: ElementType,
    /// Number of elements of each.
    pub n: u64,
    /// The parameter group.
    pub group: usize,
    /// Of a shard, the index of its first element and the number of elements of the whole tensor.
    pub part: Option<(u64, u64)>,
}

/// A tensor of a step's list: what it is, where it is, and the length of its gradients.
#[derive(Clone, Copy, Debug)]
pub struct Listed<'a> {
    tensor: Tensor<'a>,
    memory: StepMemory,
    grads: usize,
}

/// States of one tensor.
#[derive(Debug)]
struct State {
    /// `None` if it is known by number.
    name: Option<String>,
    states: Vec<DeviceVec<u8>>,
    formats: [StateFormat; MOST],
    rest: Option<DeviceVec<u16>>,
    n: u64,
    /// Index of the first element in its tensor.
    first: u64,
    /// Where its ages and counts are.
    slot: u32,
    /// The parameter group that it was last stepped in.
    group: usize,
}

/// A list of tensors with the tables that steps over it go by: [`Optimizer::plan_raw`].
#[derive(Debug)]
pub struct StepPlan {
    list: Vec<StepMemory>,
    /// Of the optimizer's memory when this was made.
    generation: u64,
    items: DeviceVec<Item>,
    records: DeviceVec<Record>,
    first: DeviceVec<u32>,
    /// Sums of squares of chunks, under a rule that goes by norms.
    sums: DeviceVec<f64>,
    launches: Vec<PlannedLaunch>,
    chunks: u32,
}

/// A number that no optimizer had before.
fn new_generation() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// What a step found in the control on the device: [`Optimizer::progress`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepProgress {
    /// Steps executed.
    pub executed: u64,
    /// Steps left out for a gradient that was not finite.
    pub skipped: u64,
}

/// An optimizer whose parameters, gradients and states are on a GPU: the bits of [`optim::Optimizer`], by the names of
/// [`optim`].
///
/// A step over any number of tensors is a launch that prepares it and one for each combination of types and formats among them,
/// on the stream of the [`Gpu`]; it does not wait. Tables of the list of tensors stay on the device and are made anew when the list
/// differs from that of the last step, and then only. Step and ages, learning rates and other hyper-parameters, loss
/// scale, clip coefficient and seeds are on the device, too, so that a CUDA graph of a step, captured once, replays with all of them as
/// they are by then: [`set_config`](Self::set_config) and [`set_control`](Self::set_control) enqueue their change. The list
/// must be stepped once before the capture, and the graph must not outlive the optimizer, or a change of its tensors or groups.
#[derive(Debug)]
pub struct Optimizer<R: Rule> {
    gpu: Gpu,
    /// At least one.
    groups: Vec<ParameterGroup<R>>,
    rounding: Rounding,
    parameters: Rounding,
    tensors: BTreeMap<u64, State>,
    clock: DeviceVec<Clock>,
    control: StepControl,
    /// By slot and state; more than there are tensors.
    ages: DeviceVec<u64>,
    counts: DeviceVec<DeviceCounts>,
    slots: u32,
    /// Of every group.
    hyper: DeviceVec<f64>,
    meter: bool,
    generation: u64,
    multiprocessors: u32,
    plan: Option<StepPlan>,
    /// Tensors of the last step.
    last: Vec<u64>,
}

/// Slots of the first table of ages.
const FIRST_SLOTS: usize = 256;

impl<R: Rule> Optimizer<R> {
    /// As [`optim::Optimizer::new`].
    ///
    /// # Errors
    /// [`CudaError::Optim`] for hyper-parameters out of range or formats that states are not stored in,
    /// [`CudaError::Unsupported`] for [`Rounding::SrStates`] and for schedules of more than 2^53 steps.
    pub fn new(gpu: &Gpu, config: R, states: impl Into<R::States>, rounding: Rounding) -> Result<Self, CudaError> {
        Self::with_group(gpu, ParameterGroup::new(config, states), rounding)
    }

    /// As [`optim::Optimizer::with_group`].
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_group(gpu: &Gpu, group: ParameterGroup<R>, rounding: Rounding) -> Result<Self, CudaError> {
        group.check(rounding)?;
        supported("rounding", rounding)?;
        let control = StepControl::default();
        let words = words(&group.config)?;
        let optimizer = Self {
            gpu: gpu.clone(),
            groups: vec![group],
            rounding,
            parameters: rounding,
            tensors: BTreeMap::new(),
            clock: gpu.upload(&[clock_of(0, rounding, rounding, &control)])?,
            control,
            ages: gpu.zeroed(FIRST_SLOTS * MOST)?,
            counts: gpu.zeroed(FIRST_SLOTS * COPIES)?,
            slots: 0,
            hyper: gpu.upload(&words)?,
            meter: false,
            generation: new_generation(),
            multiprocessors: gpu.multiprocessors()?,
            plan: None,
            last: Vec::new(),
        };
        Ok(optimizer)
    }

    /// Another rounding for parameters than for states. For an optimizer that has not stepped yet.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] for [`Rounding::SrStates`].
    pub fn parameter_rounding(mut self, rounding: Rounding) -> Result<Self, CudaError> {
        supported("parameter_rounding", rounding)?;
        self.parameters = rounding;
        let step = self.progress()?.executed;
        self.gpu.upload_into(&[clock_of(step, self.parameters, self.rounding, &self.control)], &mut self.clock)?;
        self.generation = new_generation();
        Ok(self)
    }

    /// As [`optim::Optimizer::meter`]. Counts stay on the device until they are asked for.
    #[cfg(feature = "stall")]
    #[must_use]
    pub fn meter(mut self, on: bool) -> Self {
        self.meter = on;
        self.generation = new_generation();
        self
    }

    /// The hyper-parameters of group 0.
    #[must_use]
    pub fn config(&self) -> &R {
        &self.groups[0].config
    }

    /// Changes the hyper-parameters of group 0 from the next step on, as a schedule does.
    ///
    /// # Errors
    /// As [`set_configs`](Self::set_configs).
    pub fn set_config(&mut self, config: R) -> Result<(), CudaError> {
        self.set_configs(|group, old| {
            if group == 0 {
                *old = config;
            }
        })
    }

    /// As [`optim::Optimizer::set_configs`]: a small launch for each group that changes. Steps that were enqueued before keep the old
    /// ones, and a captured graph that is replayed next has the new ones, but for `skip_zeros`, for which it is captured again.
    ///
    /// # Errors
    /// [`CudaError::Optim`]; the old ones stay then, of every group.
    pub fn set_configs(&mut self, mut change: impl FnMut(usize, &mut R)) -> Result<(), CudaError> {
        let mut groups = self.groups.clone();
        let mut changed = Vec::new();
        for (number, group) in groups.iter_mut().enumerate() {
            change(number, &mut group.config);
            group.config.check()?;
            let (old, new) = (self.groups[number].config, group.config);
            if old != new {
                changed.push((number, words(&new)?));
            }
            if old.skips_zeros() != new.skips_zeros() {
                self.generation = new_generation();
            }
        }
        self.groups = groups;
        for (number, values) in changed {
            let arguments = HyperArguments { hyper: self.hyper.address() + (number * HYPER * 8) as u64, values };
            // SAFETY: as many words as a group has are there.
            unsafe { self.small("set_hyper", &arguments) }?;
        }
        Ok(())
    }

    /// The parameter groups: the one that [`new`](Self::new) made, and those added.
    #[must_use]
    pub fn groups(&self) -> &[ParameterGroup<R>] {
        &self.groups
    }

    /// As [`optim::Optimizer::add_group`].
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn add_group(&mut self, group: ParameterGroup<R>) -> Result<usize, CudaError> {
        group.check(self.rounding)?;
        let mut all = Vec::new();
        for group in self.groups.iter().chain([&group]) {
            all.extend(words(&group.config)?);
        }
        self.hyper = self.gpu.upload(&all)?;
        self.groups.push(group);
        self.generation = new_generation();
        Ok(self.groups.len() - 1)
    }

    /// Gradient scale, clip coefficient and whether steps are left out, from the next step on, until it is changed again. A small
    /// launch, where it differs.
    ///
    /// # Errors
    /// [`CudaError::Optim`] for factors out of their range; the old ones stay then.
    pub fn set_control(&mut self, control: &StepControl) -> Result<(), CudaError> {
        control.check()?;
        let bits =
            |control: &StepControl| (control.gradient_scale.to_bits(), control.clip.to_bits(), control.found_inf);
        if bits(&self.control) != bits(control) {
            let &StepControl { gradient_scale, clip, found_inf } = control;
            let clock = self.clock.address();
            let arguments = ControlArguments { clock, gradient_scale, clip, found_inf: found_inf.into(), unused: 0 };
            // SAFETY: the clock is there.
            unsafe { self.small("set_control", &arguments) }?;
            self.control = *control;
        }
        Ok(())
    }

    /// Steps executed and left out. Waits for them.
    ///
    /// # Errors
    /// As [`Gpu::download`].
    pub fn progress(&self) -> Result<StepProgress, CudaError> {
        let clock = self.clock()?;
        Ok(StepProgress { executed: clock.step, skipped: clock.skipped })
    }

    /// Steps executed. Waits for them.
    ///
    /// # Errors
    /// As [`Gpu::download`].
    pub fn steps(&self) -> Result<u64, CudaError> {
        Ok(self.clock()?.step)
    }

    fn clock(&self) -> Result<Clock, CudaError> {
        Ok(self.gpu.download(&self.clock)?[0])
    }

    /// Address of two u64, the [`StepProgress`], for a reader on the device. Valid as long as this lives.
    #[must_use]
    pub fn progress_address(&self) -> u64 {
        self.clock.address()
    }

    /// Age of a tensor: its own steps executed since the last reset; 0 for one that has not been stepped. Waits for them.
    ///
    /// # Errors
    /// As [`Gpu::download`].
    pub fn age(&self, id: u64) -> Result<u64, CudaError> {
        let Some(state) = self.tensors.get(&id) else { return Ok(0) };
        let ages = self.gpu.download(&self.ages)?;
        Ok(ages_of(&ages, state.slot)[..R::STATES.len()].iter().copied().min().unwrap_or(0))
    }

    /// Ids of the tensors that have states, ascending.
    pub fn tensors(&self) -> impl Iterator<Item = u64> {
        self.tensors.keys().copied()
    }

    /// What states of group 0 are stored as.
    #[must_use]
    pub fn states(&self) -> R::States {
        self.groups[0].states
    }

    /// Bytes of the states of all tensors that have been stepped, remainders of parameters included.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let of = |state: &State| {
            let rest = state.rest.as_ref().map_or(0, |rest| 2 * rest.len());
            let formats = state.formats.iter().take(state.states.len());
            formats.map(|format| format.bytes(state.n as usize)).sum::<usize>() + rest
        };
        self.tensors.values().map(of).sum()
    }

    /// As [`optim::Optimizer::reset`]: enqueued, in order with steps.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn reset(&mut self, id: u64, moments: ResetMoments) -> Result<bool, CudaError> {
        let Some(state) = self.tensors.get_mut(&id) else { return Ok(false) };
        let formats = state.formats;
        for (s, (kind, memory)) in R::STATES.iter().zip(&mut state.states).enumerate() {
            if moments == ResetMoments::All || kind.role == Role::SecondMoment {
                empty(&self.gpu, formats[s], state.n as usize, memory)?;
                self.gpu.zero(&mut self.ages, state.slot as usize * MOST + s, 1)?;
            }
        }
        Ok(true)
    }

    /// The states of a tensor, in the order of their formats; `None` for one that has not been stepped. Copies them to the host,
    /// after all earlier work.
    ///
    /// # Errors
    /// As [`Gpu::download`].
    pub fn stored(&self, id: u64) -> Result<Option<Vec<Moment>>, CudaError> {
        let Some(state) = self.tensors.get(&id) else { return Ok(None) };
        let moment = |(memory, &format): (&DeviceVec<u8>, &StateFormat)| {
            let (n, mut bytes) = (state.n as usize, self.gpu.download(memory)?);
            if let StateFormat::Blocks(format) = format {
                bytes.drain(format.element().bytes(n)..scales_at(format, n));
            }
            let length =
                CudaError::Length { argument: "state", expected: format.bytes(n) as u64, got: bytes.len() as u64 };
            Moment::from_bytes(format, n, &bytes).ok_or(length)
        };
        state.states.iter().zip(&state.formats).map(moment).collect::<Result<Vec<_>, _>>().map(Some)
    }

    /// As [`optim::Optimizer::rest`], copied to the host.
    ///
    /// # Errors
    /// As [`Gpu::download`].
    pub fn rest(&self, id: u64) -> Result<Option<Vec<u16>>, CudaError> {
        let rest = self.tensors.get(&id).and_then(|state| state.rest.as_ref());
        rest.map(|rest| self.gpu.download(rest)).transpose()
    }

    /// A copy of everything on the host: what is saved, and stepped on, there. Waits for all earlier work.
    ///
    /// # Errors
    /// As [`Gpu::download`].
    pub fn to_host(&self) -> Result<optim::Optimizer<R>, CudaError> {
        let mut host = optim::Optimizer::with_group(self.groups[0], self.rounding)?;
        host.groups.clone_from(&self.groups);
        host.parameters = self.parameters;
        host.meter = self.meter;
        host.step = self.steps()?;
        let ages = self.gpu.download(&self.ages)?;
        for (&id, state) in &self.tensors {
            let states = self.stored(id)?.unwrap_or_default();
            let state = TensorState {
                name: state.name.clone(),
                states,
                ages: ages_of(&ages, state.slot),
                rest: self.rest(id)?,
                n: state.n as usize,
                first: state.first,
                group: state.group,
            };
            host.tensors.insert(id, state);
        }
        Ok(host)
    }

    /// A copy of an optimizer of the host, as from a checkpoint, to go on with here.
    ///
    /// # Errors
    /// As [`new`](Self::new), and [`CudaError::OutOfMemory`].
    pub fn from_host(gpu: &Gpu, host: &optim::Optimizer<R>) -> Result<Self, CudaError> {
        let mut optimizer = Self::with_group(gpu, host.groups[0], host.rounding)?;
        supported("parameter_rounding", host.parameters)?;
        optimizer.parameters = host.parameters;
        optimizer.meter = host.meter;
        for &group in &host.groups[1..] {
            optimizer.add_group(group)?;
        }
        let clock = clock_of(host.step, host.parameters, host.rounding, &optimizer.control);
        gpu.upload_into(&[clock], &mut optimizer.clock)?;
        optimizer.room(host.tensors.len())?;
        let mut ages = gpu.download(&optimizer.ages)?;
        for (&id, state) in &host.tensors {
            let slot = optimizer.slots;
            optimizer.slots += 1;
            ages[slot as usize * MOST..][..MOST].copy_from_slice(&state.ages);
            let state = State {
                name: state.name.clone(),
                states: state.states.iter().map(|moment| gpu.upload(&bytes(moment))).collect::<Result<_, _>>()?,
                formats: from_fn(|s| state.states.get(s).map_or(StateFormat::F32, Moment::format)),
                rest: state.rest.as_ref().map(|rest| gpu.upload(rest)).transpose()?,
                n: state.n as u64,
                first: state.first,
                slot,
                group: state.group,
            };
            optimizer.tensors.insert(id, state);
        }
        gpu.upload_into(&ages, &mut optimizer.ages)?;
        Ok(optimizer)
    }

    /// Steps one tensor, of id 0.
    ///
    /// # Errors
    /// As [`step_tensors`](Self::step_tensors).
    pub fn step<P: Source + Real, G: Source + Real>(
        &mut self,
        params: &mut DeviceVec<P>,
        grads: &DeviceVec<G>,
    ) -> Result<(), CudaError> {
        self.step_tensors(&mut [DeviceParameter::numbered(0, params, grads)])
    }

    /// Steps tensors. Their order, and which others are stepped with them, change no bit.
    ///
    /// # Errors
    /// [`CudaError::WrongDevice`], [`CudaError::OutOfMemory`] for new states, [`CudaError::Unsupported`] for a part alone under a
    /// rule that goes by norms of whole tensors (LAMB), and [`CudaError::Optim`] as
    /// [`optim::Optimizer::step_tensors`]. Nothing is changed then.
    pub fn step_tensors<P: Source + Real, G: Source + Real>(
        &mut self,
        tensors: &mut [DeviceParameter<'_, P, G>],
    ) -> Result<(), CudaError> {
        self.step_with(&mut [&mut &mut *tensors], None, None)
    }

    /// Steps tensors, with gradients scaled and clipped, or not at all where [`StepControl::found_inf`] is set.
    ///
    /// # Errors
    /// As [`step_tensors`](Self::step_tensors), and as [`set_control`](Self::set_control).
    pub fn step_controlled<P: Source + Real, G: Source + Real>(
        &mut self,
        control: &StepControl,
        tensors: &mut [DeviceParameter<'_, P, G>],
    ) -> Result<(), CudaError> {
        control.check()?;
        self.step_with(&mut [&mut &mut *tensors], Some(control), None)
    }

    /// Steps tensors with the clip coefficient that a [`DeviceNorm`] has left on the device, in this step alone. Under
    /// [`NonFinite::Skip`] the step is left out if the norm has found a gradient that is not finite: nobody waits to know.
    ///
    /// # Errors
    /// As [`step_tensors`](Self::step_tensors), and [`CudaError::WrongDevice`].
    pub fn step_clipped<P: Source + Real, G: Source + Real>(
        &mut self,
        norm: &DeviceNorm,
        non_finite: NonFinite,
        tensors: &mut [DeviceParameter<'_, P, G>],
    ) -> Result<(), CudaError> {
        norm.own(&self.gpu)?;
        self.step_with(&mut [&mut &mut *tensors], None, Some((norm.address(), non_finite)))
    }

    /// Steps tensors of several types of parameters and gradients at once: one step.
    ///
    /// # Errors
    /// As [`step_tensors`](Self::step_tensors).
    pub fn step_mixed(&mut self, lists: &mut [&mut dyn DeviceParameters]) -> Result<(), CudaError> {
        self.step_with(lists, None, None)
    }

    fn step_with(
        &mut self,
        lists: &mut [&mut dyn DeviceParameters],
        control: Option<&StepControl>,
        norm: Option<(u64, NonFinite)>,
    ) -> Result<(), CudaError> {
        let mut list = Vec::new();
        for tensors in &*lists {
            tensors.list(&self.gpu, &mut list)?;
        }
        // SAFETY: the buffers live on this device and, once checked, are as long as they say; parameters are borrowed mutably.
        unsafe { self.step_list(&list, control, norm) }
    }

    /// Steps somebody else's memory in place, on the stream of the [`Gpu`]. Only enqueues work.
    ///
    /// # Safety
    /// Addresses are device memory of this device, as long as [`StepMemory`] says until the work is done; nothing else
    /// writes them, or reads parameters, in the meantime. Gradients were written by work that this stream comes after.
    ///
    /// # Errors
    /// [`CudaError::Misaligned`] and [`CudaError::Overlap`] for addresses that cannot be, and as
    /// [`step_tensors`](Self::step_tensors). Nothing is changed then. An error that the
    /// driver reports at a launch leaves a step half done.
    pub unsafe fn step_raw(&mut self, tensors: &[StepMemory]) -> Result<(), CudaError> {
        let list = raw(tensors);
        // SAFETY: promised by the caller.
        unsafe { self.step_list(&list, None, None) }
    }

    /// The tables for steps over somebody else's memory, made once: [`step_plan`](Self::step_plan) then takes the host a few
    /// microseconds for any number of tensors.
    ///
    /// # Errors
    /// As [`step_raw`](Self::step_raw).
    pub fn plan_raw(&mut self, tensors: &[StepMemory]) -> Result<StepPlan, CudaError> {
        let list = raw(tensors);
        self.prepare(&list)?;
        self.made(&list)
    }

    /// Steps the tensors of a plan. A plan of another optimizer, or from before a change of parameter groups, meter or tensors, is
    /// made anew first.
    ///
    /// # Safety
    /// As [`step_raw`](Self::step_raw), for the memory that the plan was made of.
    ///
    /// # Errors
    /// As [`step_raw`](Self::step_raw).
    pub unsafe fn step_plan(&mut self, plan: &mut StepPlan) -> Result<(), CudaError> {
        // SAFETY: promised by the caller.
        unsafe { self.step_plan_with(plan, None) }
    }

    /// [`step_plan`](Self::step_plan) as [`step_clipped`](Self::step_clipped).
    ///
    /// # Safety
    /// As [`step_plan`](Self::step_plan).
    ///
    /// # Errors
    /// As [`step_clipped`](Self::step_clipped).
    pub unsafe fn step_plan_clipped(
        &mut self,
        norm: &DeviceNorm,
        non_finite: NonFinite,
        plan: &mut StepPlan,
    ) -> Result<(), CudaError> {
        norm.own(&self.gpu)?;
        // SAFETY: promised by the caller.
        unsafe { self.step_plan_with(plan, Some((norm.address(), non_finite))) }
    }

    /// # Safety
    /// As [`step_plan`](Self::step_plan).
    unsafe fn step_plan_with(&mut self, plan: &mut StepPlan, norm: Option<(u64, NonFinite)>) -> Result<(), CudaError> {
        if plan.generation != self.generation {
            let list = raw(&plan.list);
            self.prepare(&list)?;
            *plan = self.made(&list)?;
        }
        self.last.clear();
        self.last.extend(plan.list.iter().map(|memory| memory.id));
        // SAFETY: promised by the caller; the states were made for these lengths.
        unsafe { self.execute(plan, norm) }
    }

    /// # Safety
    /// As [`step_raw`](Self::step_raw), once lengths are checked.
    unsafe fn step_list(
        &mut self,
        list: &[Listed<'_>],
        control: Option<&StepControl>,
        norm: Option<(u64, NonFinite)>,
    ) -> Result<(), CudaError> {
        let planned = self.plan.take().filter(|plan| {
            plan.generation == self.generation
                && plan.list.len() == list.len()
                && plan
                    .list
                    .iter()
                    .zip(list)
                    .all(|(memory, listed)| *memory == listed.memory && listed.grads as u64 == memory.n)
        });
        let plan = match planned {
            Some(plan) => plan,
            None => {
                self.prepare(list)?;
                self.made(list)?
            }
        };
        if let Some(control) = control {
            self.set_control(control)?;
        }
        self.last.clear();
        self.last.extend(list.iter().map(|listed| listed.memory.id));
        // SAFETY: promised by the caller; the states were made for these lengths.
        let done = unsafe { self.execute(&plan, norm) };
        self.plan = Some(plan);
        done
    }

    /// Checks every tensor, then makes the states that are missing.
    fn prepare(&mut self, list: &[Listed<'_>]) -> Result<(), CudaError> {
        let length = |n: u64| usize::try_from(n).map_err(|_| CudaError::OutOfMemory { bytes: usize::MAX });
        let mut entries = Vec::with_capacity(list.len());
        for Listed { tensor, memory, grads } in list {
            let state = self.tensors.get(&tensor.id).map(|state| (state.first, state.n as usize));
            entries.push(Entry { tensor: *tensor, params: length(memory.n)?, grads: *grads, state });
        }
        // Lengths first: memory overlaps or not over the length that it has.
        check(entries.into_iter())?;
        for Listed { tensor, memory: StepMemory { params, params_type, grads, grads_type, n, group, .. }, .. } in list {
            let state = self.tensors.get(&tensor.id);
            let stored = state.map(|state| (R::States::of_formats(state.formats), state.rest.is_some()));
            let of_bf16 = *params_type == ElementType::Bf16;
            optim::check_group(&self.groups, *group, tensor, of_bf16, stored)?;
            if R::NORMS && (tensor.first(), tensor.whole(*n)) != (0, *n) {
                let expected = tensor.whole(*n);
                return Err(OptimError::Norm(NormError::Cover { tensor: tensor.id, expected, got: *n }).into());
            }
            aligned("params", *params, params_type.bytes())?;
            aligned("grads", *grads, grads_type.bytes())?;
            disjoint(&[
                ("params", *params, n.saturating_mul(params_type.bytes())),
                ("grads", *grads, n.saturating_mul(grads_type.bytes())),
            ])?;
        }
        let mut made = Vec::new();
        for Listed { tensor, memory, .. } in list.iter().filter(|listed| !self.tensors.contains_key(&listed.tensor.id))
        {
            let n = length(memory.n)?;
            let settings = &self.groups[memory.group];
            let formats = settings.states.formats();
            let states = formats[..R::STATES.len()].iter().map(|&format| {
                let mut memory = self.gpu.zeroed(bytes_on_device(format, n))?;
                empty(&self.gpu, format, n, &mut memory)?;
                Ok(memory)
            });
            let states = states.collect::<Result<Vec<_>, CudaError>>()?;
            let rest = if settings.remainder { Some(self.gpu.zeroed(n)?) } else { None };
            let (name, first, slot, group) = (tensor.name(), tensor.first(), 0, memory.group);
            made.push((tensor.id, State { name, states, formats, rest, n: memory.n, first, slot, group }));
        }
        self.room(made.len())?;
        for (id, state) in made {
            self.tensors.insert(id, State { slot: self.slots, ..state });
            self.slots += 1;
        }
        for Listed { tensor, memory, .. } in list {
            if let Some(state) = self.tensors.get_mut(&tensor.id) {
                state.group = memory.group;
            }
        }
        Ok(())
    }

    /// Makes room for the ages and counts of so many tensors more.
    fn room(&mut self, more: usize) -> Result<(), CudaError> {
        let needed = self.slots as usize + more;
        if needed * MOST <= self.ages.len() {
            return Ok(());
        }
        let slots = needed.next_power_of_two();
        let (mut ages, counts) = (self.gpu.zeroed(slots * MOST)?, self.gpu.zeroed(slots * COPIES)?);
        self.gpu.copy(&self.ages, &mut ages)?;
        (self.ages, self.counts) = (ages, counts);
        self.generation = new_generation();
        Ok(())
    }

    /// The tables of a list that was checked and has states.
    fn made(&self, list: &[Listed<'_>]) -> Result<StepPlan, CudaError> {
        let mut residents = Vec::with_capacity(list.len());
        for Listed { tensor, memory, .. } in list {
            let Some(state) = self.tensors.get(&tensor.id) else { continue };
            residents.push(Resident {
                id: tensor.id,
                first: state.first,
                n: memory.n,
                p: memory.params,
                p_type: memory.params_type,
                g: memory.grads,
                g_type: memory.grads_type,
                rest: state.rest.as_ref().map_or(0, DeviceVec::address),
                states: from_fn(|s| state.states.get(s).map_or(0, DeviceVec::address)),
                formats: state.formats,
                slot: state.slot,
                hyper: memory.group as u32,
                skip_zeros: self.groups[memory.group].config.skips_zeros(),
            });
        }
        let options = Options {
            rule: R::NAME,
            kinds: R::STATES,
            parameters: self.parameters,
            states: self.rounding,
            meter: self.meter,
            norms: R::NORMS,
        };
        let tables = Tables::new(&options, &residents)?;
        Ok(StepPlan {
            list: list.iter().map(|listed| listed.memory).collect(),
            generation: self.generation,
            records: self.gpu.zeroed(tables.items.len())?,
            items: self.gpu.upload(&tables.items)?,
            first: self.gpu.upload(&tables.first)?,
            sums: self.gpu.zeroed(2 * tables.chunks as usize)?,
            launches: tables.launches,
            chunks: tables.chunks,
        })
    }

    /// # Safety
    /// As [`step_plan`](Self::step_plan), and the plan was made for what there is now.
    unsafe fn execute(&self, plan: &StepPlan, norm: Option<(u64, NonFinite)>) -> Result<(), CudaError> {
        let counts = if self.meter { self.counts.address() } else { 0 };
        let prepare = PrepareArguments {
            items: plan.items.address(),
            records: plan.records.address(),
            ages: self.ages.address(),
            hyper: self.hyper.address(),
            clock: self.clock.address(),
            norm: norm.map_or(0, |(address, _)| address),
            counts,
            count: plan.items.len() as u32,
            skips: norm.is_some_and(|(_, non_finite)| non_finite == NonFinite::Skip).into(),
        };
        // SAFETY: tables of this plan, and memory of this optimizer.
        unsafe { enqueue(&self.gpu, "prepare", &alloc::format!("prepare_{}", R::NAME), 1, 512, &prepare) }?;
        if R::NORMS {
            // SAFETY: promised by the caller.
            unsafe { self.norms(plan) }?;
        }
        for launch in &plan.launches {
            let arguments = self.arguments(plan, launch, launch.first, counts, launch.ahead(self.multiprocessors)[0]);
            let blocks = launch.tiles;
            let (module, name) = (launch.kernel.module, &launch.kernel.name);
            // SAFETY: the kernel of this name takes memory of these types; memory is promised by the caller, and the tables are of
            // this plan.
            unsafe {
                match launch.kernel.takes {
                    Takes::Many => enqueue(&self.gpu, module, name, blocks, 128, &arguments.launch),
                    Takes::Any => enqueue(&self.gpu, module, name, blocks, 128, &arguments),
                }
            }?;
        }
        Ok(())
    }

    /// The norms of whole tensors, and what follows from them.
    ///
    /// # Safety
    /// As [`execute`](Self::execute).
    unsafe fn norms(&self, plan: &StepPlan) -> Result<(), CudaError> {
        let chunks = u64::from(plan.chunks);
        for launch in &plan.launches {
            let Some((module, kernel)) = &launch.kernel.norms else { continue };
            let arguments = self.arguments(
                plan,
                launch,
                launch.first + launch.items.len(),
                0,
                launch.ahead(self.multiprocessors)[1],
            );
            let sums = plan.sums.address() + 8 * u64::from(launch.chunk);
            // SAFETY: promised by the caller; there is room for two sums of each chunk.
            unsafe {
                match launch.kernel.takes {
                    Takes::Many => {
                        let arguments = NormsArguments { launch: arguments.launch, sums, chunks };
                        enqueue(&self.gpu, module, kernel, launch.chunks, 128, &arguments)
                    }
                    Takes::Any => {
                        let arguments = AnyNormsArguments { launch: arguments, sums, chunks };
                        enqueue(&self.gpu, module, kernel, launch.chunks, 128, &arguments)
                    }
                }
            }?;
        }
        let trust = TrustArguments {
            items: plan.items.address(),
            records: plan.records.address(),
            hyper: self.hyper.address(),
            sums: plan.sums.address(),
            chunks,
        };
        // SAFETY: tables of this plan; a block for each item.
        unsafe { enqueue(&self.gpu, "prepare", "trust_lamb", plan.items.len() as u32, 128, &trust) }
    }

    fn arguments(
        &self,
        plan: &StepPlan,
        launch: &PlannedLaunch,
        first: usize,
        counts: u64,
        ahead: u32,
    ) -> AnyArguments {
        let PlannedLaunch { items, p_type, g_type, states, kernel, .. } = launch;
        let stochastic = |rounding| matches!(rounding, Rounding::Stochastic { .. }).into();
        AnyArguments {
            launch: ManyArguments {
                first: plan.first.address() + 4 * first as u64,
                items: plan.items.address() + (size_of::<Item>() * items.start) as u64,
                records: plan.records.address() + (size_of::<Record>() * items.start) as u64,
                counts,
                count: items.len() as u32,
                p_draws: stochastic(self.parameters),
                s_draws: stochastic(self.rounding),
                ahead,
            },
            p_type: p_type.number(),
            g_type: g_type.number(),
            log_run: kernel.log_run(),
            unused: 0,
            states: *states,
        }
    }

    /// # Safety
    /// As the kernel expects.
    unsafe fn small<A: cudarc::driver::DeviceRepr>(&self, kernel: &str, arguments: &A) -> Result<(), CudaError> {
        // SAFETY: promised by the caller.
        unsafe { enqueue(&self.gpu, "prepare", kernel, 1, 32, arguments) }
    }
}

#[cfg(feature = "stall")]
impl<R: Rule> Optimizer<R> {
    /// As [`optim::Optimizer::stalls`]. Waits for the step.
    ///
    /// # Errors
    /// As [`Gpu::download`].
    pub fn stalls(&self, id: u64) -> Result<Vec<crate::stall::StallCounts>, CudaError> {
        if !self.meter || !self.last.contains(&id) {
            return Ok(Vec::new());
        }
        let counts = self.gpu.download(&self.counts)?;
        Ok(self.counts_of(&counts, id).iter().map(|counts| counts.public()).collect())
    }

    /// As [`optim::Optimizer::stepped`]: without a meter the tensors alone. Waits for the step if there is one.
    ///
    /// # Errors
    /// As [`Gpu::download`].
    pub fn stepped(&self) -> Result<Vec<optim::Stepped>, CudaError> {
        let counts = if self.meter { Some(self.gpu.download(&self.counts)?) } else { None };
        let second = R::STATES.iter().position(|kind| kind.role == Role::SecondMoment);
        let of = |&tensor: &u64| {
            let stalled = counts
                .as_ref()
                .zip(second)
                .and_then(|(counts, second)| self.counts_of(counts, tensor).get(second).map(|counts| counts.public()));
            optim::Stepped { tensor, stalled }
        };
        Ok(self.last.iter().map(of).collect())
    }

    /// As [`optim::Optimizer::stall_report`]. Waits for the step.
    ///
    /// # Errors
    /// As [`Gpu::download`].
    pub fn stall_report(&self) -> Result<Vec<optim::StateStalls>, CudaError> {
        if !self.meter {
            return Ok(Vec::new());
        }
        let (counts, ages) = (self.gpu.download(&self.counts)?, self.gpu.download(&self.ages)?);
        let mut report = Vec::new();
        let mut last = self.last.clone();
        last.sort_unstable();
        for id in last {
            let Some(state) = self.tensors.get(&id) else { continue };
            let of_states = self.counts_of(&counts, id).into_iter().zip(ages_of(&ages, state.slot)).enumerate();
            for (s, (counts, age)) in of_states {
                report.push(optim::StateStalls::new::<R>(
                    id,
                    state.name.clone(),
                    R::STATES[s],
                    state.formats[s],
                    age,
                    counts,
                    (&self.groups[state.group].config, self.rounding),
                ));
            }
        }
        Ok(report)
    }

    /// As [`optim::Resets::after_step`], for this optimizer. Waits for the age of tensors that are reset.
    ///
    /// # Errors
    /// [`CudaError::Optim`] never; [`CudaError::Reset`] as `after_step`, and as [`Gpu::download`].
    pub fn reset_after_step(
        &mut self,
        resets: &mut optim::Resets,
        stepped: &[optim::Stepped],
    ) -> Result<(), CudaError> {
        let tensors = match resets.decide(stepped)? {
            optim::ResetDue::Tensors(tensors) => tensors,
            optim::ResetDue::All => self.tensors().collect(),
        };
        for tensor in tensors {
            let (step, age, moments) = (self.steps()?, self.age(tensor)?, resets.moments());
            if self.reset(tensor, moments)? {
                resets.record(optim::ResetEvent { step, tensor, age, moments });
            }
        }
        Ok(())
    }

    /// What was counted in each state of a tensor.
    fn counts_of(&self, counts: &[DeviceCounts], id: u64) -> Vec<optim::Counts> {
        let Some(state) = self.tensors.get(&id) else { return Vec::new() };
        let copies = &counts[state.slot as usize * COPIES..][..COPIES];
        let sum = |of: fn(&DeviceCounts) -> u64| copies.iter().map(of).sum::<u64>();
        let untouched = sum(|counts| counts.untouched);
        let of = |s: usize| {
            let by = |of: fn(&DeviceCounts) -> [u64; MOST]| copies.iter().map(|counts| of(counts)[s]).sum::<u64>();
            let (stalled, nan) = (by(|counts| counts.stalled), by(|counts| counts.nan));
            let moved_to_same = by(|counts| counts.moved_to_same);
            optim::Counts { counted: state.n - untouched - nan, stalled, nan, untouched, moved_to_same }
        };
        (0..R::STATES.len()).map(of).collect()
    }
}

impl<R: Rule<States = States>> Optimizer<R> {
    /// First and second moment of a tensor, copied to the host after all earlier work; `None` for one that has not been
    /// stepped.
    ///
    /// # Errors
    /// As [`Gpu::download`].
    pub fn moments(&self, id: u64) -> Result<Option<(Moment, Moment)>, CudaError> {
        Ok(self.stored(id)?.and_then(|states| <[Moment; 2]>::try_from(states).ok()).map(|[m, v]| (m, v)))
    }
}

/// A list of tensors that share types, for [`Optimizer::step_mixed`]: a slice, an array or a vector of [`DeviceParameter`]. Sealed.
pub trait DeviceParameters: sealed::Lists {}

impl<L: sealed::Lists> DeviceParameters for L {}

mod sealed {
    use super::{CudaError, DeviceParameter, Gpu, Listed, Real, Source, StepMemory};
    use alloc::vec::Vec;

    pub trait Lists {
        /// Adds what there is, if it is of this device.
        fn list<'b>(&'b self, gpu: &Gpu, to: &mut Vec<Listed<'b>>) -> Result<(), CudaError>;
    }

    fn list<'b, P: Source + Real, G: Source + Real>(
        tensors: &'b [DeviceParameter<'_, P, G>],
        gpu: &Gpu,
        to: &mut Vec<Listed<'b>>,
    ) -> Result<(), CudaError> {
        for DeviceParameter { tensor, params, grads, group } in tensors {
            gpu.own(params, "params")?;
            gpu.own(grads, "grads")?;
            let memory = StepMemory {
                id: tensor.id,
                params: params.address(),
                params_type: P::TYPE,
                grads: grads.address(),
                grads_type: G::TYPE,
                n: params.len() as u64,
                group: *group,
                part: tensor.of(),
            };
            to.push(Listed { tensor: *tensor, memory, grads: grads.len() });
        }
        Ok(())
    }

    macro_rules! lists {
        ($([$($generics:tt)*] $list:ty),*) => {
            $(impl<P: Source + Real, G: Source + Real, $($generics)*> Lists for $list {
                fn list<'b>(&'b self, gpu: &Gpu, to: &mut Vec<Listed<'b>>) -> Result<(), CudaError> {
                    list(self, gpu, to)
                }
            })*
        };
    }
    lists!(
        [] Vec<DeviceParameter<'_, P, G>>,
        [] &mut [DeviceParameter<'_, P, G>],
        [const N: usize] [DeviceParameter<'_, P, G>; N]
    );
}

fn raw(tensors: &[StepMemory]) -> Vec<Listed<'static>> {
    let listed = |memory: &StepMemory| {
        let grads = usize::try_from(memory.n).unwrap_or(usize::MAX);
        let tensor = Tensor::numbered(memory.id);
        let tensor = memory.part.map_or(tensor, |(first, whole)| tensor.part(first, whole));
        Listed { tensor, memory: *memory, grads }
    };
    tensors.iter().map(listed).collect()
}

/// Launches so many blocks of a kernel.
///
/// # Safety
/// The kernel takes `arguments`, whose memory is as it expects.
unsafe fn enqueue<A: cudarc::driver::DeviceRepr>(
    gpu: &Gpu,
    module: &'static str,
    kernel: &str,
    blocks: u32,
    threads: u32,
    arguments: &A,
) -> Result<(), CudaError> {
    if blocks == 0 {
        return Ok(());
    }
    let n = u64::from(blocks) * u64::from(threads);
    // SAFETY: promised by the caller.
    unsafe { launch(gpu, module, kernel, n, Shape { threads, each: 1 }, arguments) }
}

fn clock_of(step: u64, parameters: Rounding, states: Rounding, control: &StepControl) -> Clock {
    let seed = |rounding| if let Rounding::Stochastic { seed } = rounding { seed } else { 0 };
    Clock {
        step,
        skipped: 0,
        seed_parameters: seed(parameters),
        seed_states: seed(states),
        gradient_scale: control.gradient_scale,
        clip: control.clip,
        found_inf: control.found_inf.into(),
        unused: 0,
    }
}

/// The ages of a slot.
fn ages_of(ages: &[u64], slot: u32) -> [u64; MOST] {
    from_fn(|s| ages[slot as usize * MOST + s])
}

/// Bytes of a state on the device.
fn bytes_on_device(format: StateFormat, n: usize) -> usize {
    match format {
        StateFormat::Blocks(blocks) => scales_at(blocks, n) + format.bytes(n) - blocks.element().bytes(n),
        _ => format.bytes(n),
    }
}

/// Zeroes a state: codes, and scales to the smallest.
fn empty(gpu: &Gpu, format: StateFormat, n: usize, memory: &mut DeviceVec<u8>) -> Result<(), CudaError> {
    let StateFormat::Blocks(format) = format else { return gpu.fill(memory, 0.., 0) };
    let at = scales_at(format, n);
    if format.scale() == BlockScale::Amax {
        gpu.fill(memory, 0.., 0)?;
        return gpu.fill_words(memory, at, 1);
    }
    gpu.fill(memory, 0..at, 0)?;
    gpu.fill(memory, at.., 1)
}

/// A state as it lies on the device.
fn bytes(moment: &Moment) -> Vec<u8> {
    match moment {
        Moment::F32(x) => bytemuck::cast_slice(x).to_vec(),
        Moment::Bf16(x) => bytemuck::cast_slice(x).to_vec(),
        Moment::Blocks(x) => {
            let scales: &[u8] = match x.scales() {
                Scales::F32(scales) => bytemuck::cast_slice(scales),
                Scales::E8M0(scales) => scales,
                Scales::Nvfp4 { .. } => unreachable!("no state is stored so"),
            };
            let mut bytes = x.codes().to_vec();
            bytes.resize(scales_at(x.format(), x.len()), 0);
            bytes.extend_from_slice(scales);
            bytes
        }
    }
}

/// Hyper-parameters as kernels read them.
pub(super) fn words<R: Rule>(config: &R) -> Result<[f64; HYPER], CudaError> {
    struct Words {
        values: [f64; HYPER],
        n: usize,
        exact: bool,
    }
    impl Words {
        fn push(&mut self, value: f64) -> Result<(), Infallible> {
            self.values[self.n] = value;
            self.n += 1;
            Ok(())
        }
    }
    impl Visit for Words {
        type Error = Infallible;
        fn number(&mut self, _: &'static str, value: &mut f64) -> Result<(), Infallible> {
            self.push(*value)
        }
        fn flag(&mut self, _: &'static str, value: &mut bool) -> Result<(), Infallible> {
            self.push(u8::from(*value).into())
        }
        fn integer(&mut self, _: &'static str, value: &mut u64) -> Result<(), Infallible> {
            self.exact &= *value <= 1 << 53;
            self.push(*value as f64)
        }
        fn option(&mut self, _: &'static str, value: &mut Option<f64>) -> Result<(), Infallible> {
            self.push(value.unwrap_or(0.0))
        }
    }
    let mut words = Words { values: [0.0; HYPER], n: 0, exact: true };
    let mut config = *config;
    match config.fields(&mut words) {
        Ok(()) if words.exact => Ok(words.values),
        Ok(()) => Err(CudaError::Unsupported {
            argument: "config",
            reason: "schedules of more than 2^53 steps are for the CPU",
        }),
        Err(never) => match never {},
    }
}

fn supported(argument: &'static str, rounding: Rounding) -> Result<(), CudaError> {
    match rounding {
        Rounding::SrStates { .. } => {
            Err(CudaError::Unsupported { argument, reason: "the `sr-states` words are for the CPU, to compare with" })
        }
        _ => Ok(()),
    }
}
