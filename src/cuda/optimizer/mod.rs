//! Optimizers on device memory.

mod ages;
mod execute;
mod list;
mod plan;
#[cfg(feature = "stall")]
mod stalls;

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::array::from_fn;
use core::convert::Infallible;
use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use ages::Ages;
pub use list::{DeviceParameter, DeviceParameters, StepMemory};
use list::{Listed, raw};

use super::cast::Source;
use super::launch::{Shape, launch};
use super::plan::{
    AskSeedsArguments, COPIES, Clock, ControlArguments, DeviceCounts, HYPER, HyperArguments, Item, PlannedLaunch,
    Record, scales_at,
};
use super::{CudaError, DeviceNorm, DeviceVec, Gpu};
use crate::format::BlockScale;
use crate::optim::{self, MOST, Moment, NonFinite, ParameterGroup, Real, ResetMoments};
use crate::optim::{Rounding, Rule, StateFormat, States, StepControl, TensorState, Visit};
use crate::random::Role;

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
}

/// A list of tensors with the tables that steps over it go by: [`Optimizer::plan_raw`].
#[derive(Debug)]
pub struct StepPlan(Arc<Planned>);

/// The tables, which a captured graph may outlive the plan with.
#[derive(Debug)]
struct Planned {
    tensors: Arc<Tensors>,
    /// Of the optimizer's memory when this was made.
    generation: u64,
    items: DeviceVec<Item>,
    /// Of each item two: that of a step, and what it makes ahead.
    records: DeviceVec<Record>,
    ahead: Mutex<Ahead>,
    places: DeviceVec<u32>,
    /// Sums of squares of chunks, under a rule that goes by norms.
    sums: DeviceVec<f64>,
    launches: Vec<PlannedLaunch>,
    chunks: u32,
    /// The kernel that prepares a step.
    prepare: String,
    /// Whether that would take longer than what every block of the step does in its place.
    small: bool,
}

impl Planned {
    /// The address of one half of the records.
    fn records(&self, half: bool) -> u64 {
        self.records.address() + (size_of::<Record>() * self.items.len() * usize::from(half)) as u64
    }

    fn ahead(&self) -> MutexGuard<'_, Ahead> {
        self.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a plan's steps leave for its next one.
#[derive(Clone, Copy, Debug, Default)]
struct Ahead {
    /// Which half of the records the next step goes by.
    half: bool,
    /// The step, seeds and time between steps that keys there were made for; 0: none were.
    step: u64,
    seeds: [u64; 2],
    /// The last step.
    last: u64,
}

/// The tensors of a plan, and where their ages are.
#[derive(Debug, Default)]
struct Tensors {
    list: Vec<StepMemory>,
    slots: Vec<u32>,
}

/// What captured graphs hold the addresses of.
#[derive(Debug, Default)]
struct Retired {
    plans: Vec<Arc<Planned>>,
    by_slot: Vec<(DeviceVec<u64>, DeviceVec<DeviceCounts>)>,
    hyper: Vec<DeviceVec<f64>>,
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
/// A step over any number of tensors is a launch for each combination of types and formats among them, on the stream of the [`Gpu`],
/// after one that prepares them, which a single tensor and a few small ones may do without; it does not wait, and gives no report of
/// blocks that hold a NaN. The first optimizer of a [`Gpu`] waits for earlier work once: it asks the device how good its approximations
/// are. Tables of the list of tensors stay on the device and are made anew when the list differs from that of the last step,
/// and then only. Step and ages, learning rates and other hyper-parameters, loss
/// scale, clip coefficient and seeds are on the device, too, so that a CUDA graph of a step, captured once, replays with all of them as
/// they are by then: [`set_config`](Self::set_config) and [`set_control`](Self::set_control) enqueue their change. The list
/// must be stepped once before the capture. The graph must not outlive the optimizer, and steps the tensors and groups that there were.
#[derive(Debug)]
pub struct Optimizer<R: Rule> {
    gpu: Gpu,
    /// At least one.
    groups: Vec<ParameterGroup<R>>,
    rounding: Rounding,
    parameters: Rounding,
    tensors: BTreeMap<u64, State>,
    clock: DeviceVec<Clock>,
    /// What steps are told that are told nothing else.
    standing: StepControl,
    /// What the device has.
    control: StepControl,
    /// By slot and state; more than there are tensors.
    ages: DeviceVec<u64>,
    counts: DeviceVec<DeviceCounts>,
    /// Of every group.
    hyper: DeviceVec<f64>,
    meter: bool,
    generation: u64,
    multiprocessors: u32,
    /// Whether roots and quotients may be refined from the device's approximations.
    seeded: bool,
    /// Steps executed and left out, as long as the host knows them: until a step is left to the device to leave out, or captured.
    known: Option<StepProgress>,
    /// Steps that the host has left out, which the device does not count.
    left_out: u64,
    /// Ages as the host knows them, and groups.
    host_ages: Ages,
    plan: Option<Arc<Planned>>,
    /// Tensors of the last step that was enqueued.
    last: Arc<Tensors>,
    /// Whether a graph was captured, and what it holds the addresses of.
    captured: bool,
    retired: Retired,
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
            clock: gpu.upload(&[clock_of(StepProgress { executed: 0, skipped: 0 }, rounding, rounding, &control)])?,
            standing: control,
            control,
            ages: gpu.zeroed(FIRST_SLOTS * MOST)?,
            counts: gpu.zeroed(FIRST_SLOTS * COPIES)?,
            hyper: gpu.upload(&words)?,
            meter: false,
            generation: new_generation(),
            multiprocessors: gpu.multiprocessors()?,
            seeded: seeds_hold(gpu)?,
            known: Some(StepProgress { executed: 0, skipped: 0 }),
            left_out: 0,
            host_ages: Ages::new(R::STATES.len()),
            plan: None,
            last: Arc::default(),
            captured: false,
            retired: Retired::default(),
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
        self.not_captured("parameter_rounding")?;
        let progress = self.progress()?;
        self.gpu.upload_into(&[clock_of(progress, self.parameters, self.rounding, &self.control)], &mut self.clock)?;
        self.left_out = 0;
        self.generation = new_generation();
        Ok(self)
    }

    /// As on a device whose approximations do not do.
    #[cfg(test)]
    pub(in crate::cuda) fn without_seeds(mut self) -> Self {
        self.seeded = false;
        self
    }

    #[cfg(test)]
    pub(in crate::cuda) fn is_seeded(&self) -> bool {
        self.seeded
    }

    /// As [`optim::Optimizer::meter`]. Counts stay on the device until they are asked for.
    #[cfg(feature = "stall")]
    #[must_use]
    pub fn meter(mut self, on: bool) -> Self {
        self.meter = on;
        self.last = Arc::default();
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
    /// [`CudaError::Optim`], and [`CudaError::Unsupported`] for schedules of more than 2^53 steps and while a graph is captured; the
    /// old ones stay then, of every group. [`CudaError::Driver`].
    pub fn set_configs(&mut self, mut change: impl FnMut(usize, &mut R)) -> Result<(), CudaError> {
        let mut changed = Vec::new();
        for (number, group) in self.groups.iter().enumerate() {
            let mut new = group.config;
            change(number, &mut new);
            new.check()?;
            let (old_words, new_words) = (words(&group.config)?, words(&new)?);
            if old_words.map(f64::to_bits) != new_words.map(f64::to_bits) {
                changed.push((number, new, new_words));
            }
        }
        if !changed.is_empty() {
            self.not_captured("config")?;
        }
        for (number, new, values) in changed {
            let arguments = HyperArguments { hyper: self.hyper.address() + (number * HYPER * 8) as u64, values };
            // SAFETY: as many words as a group has are there.
            unsafe { self.small("set_hyper", &arguments) }?;
            if self.groups[number].config.skips_zeros() != new.skips_zeros() {
                self.generation = new_generation();
            }
            self.groups[number].config = new;
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
        self.not_captured("group")?;
        let old = core::mem::replace(&mut self.hyper, self.gpu.upload(&all)?);
        if self.captured {
            self.retired.hyper.push(old);
        }
        self.groups.push(group);
        self.generation = new_generation();
        Ok(self.groups.len() - 1)
    }

    /// Gradient scale, clip coefficient and whether steps are left out, for all steps that are told nothing else, until it is changed
    /// again. A small launch, where it differs; a captured graph that is replayed next has it.
    ///
    /// # Errors
    /// [`CudaError::Optim`] for factors out of their range, [`CudaError::Unsupported`] while a graph is captured; the old ones stay
    /// then.
    pub fn set_control(&mut self, control: &StepControl) -> Result<(), CudaError> {
        control.check()?;
        self.send(control)?;
        self.standing = *control;
        Ok(())
    }

    /// Tells the device.
    fn send(&mut self, control: &StepControl) -> Result<(), CudaError> {
        let bits =
            |control: &StepControl| (control.gradient_scale.to_bits(), control.clip.to_bits(), control.found_inf);
        if bits(&self.control) != bits(control) {
            self.not_captured("control")?;
            let &StepControl { gradient_scale, clip, found_inf } = control;
            let clock = self.clock.address();
            let arguments = ControlArguments { clock, gradient_scale, clip, found_inf: found_inf.into(), unused: 0 };
            // SAFETY: the clock is there.
            unsafe { self.small("set_control", &arguments) }?;
            self.control = *control;
        }
        Ok(())
    }

    /// Refuses what a captured graph would do again at every replay.
    fn not_captured(&self, argument: &'static str) -> Result<(), CudaError> {
        if self.gpu.is_capturing()? {
            let reason =
                "a graph that is being captured would do it again at every replay: do it before, or between replays";
            return Err(CudaError::Unsupported { argument, reason });
        }
        Ok(())
    }

    /// Steps executed and left out. Waits for them where the device decides on that, or a graph was captured.
    ///
    /// # Errors
    /// As [`Gpu::download`].
    pub fn progress(&self) -> Result<StepProgress, CudaError> {
        if let Some(known) = self.known {
            return Ok(known);
        }
        let clock = self.clock()?;
        Ok(StepProgress { executed: clock.step, skipped: clock.skipped + self.left_out })
    }

    /// Steps executed. Waits as [`progress`](Self::progress) does.
    ///
    /// # Errors
    /// As [`Gpu::download`].
    pub fn steps(&self) -> Result<u64, CudaError> {
        Ok(self.progress()?.executed)
    }

    fn clock(&self) -> Result<Clock, CudaError> {
        Ok(self.gpu.download(&self.clock)?[0])
    }

    /// Address of two u64, the [`StepProgress`], for a reader on the device. Valid as long as this lives.
    #[must_use]
    pub fn progress_address(&self) -> u64 {
        self.clock.address()
    }

    /// Age of a tensor: its own steps executed since the last reset; 0 for one that has not been stepped. Waits as
    /// [`progress`](Self::progress) does.
    ///
    /// # Errors
    /// As [`Gpu::download`].
    pub fn age(&self, id: u64) -> Result<u64, CudaError> {
        let Some(state) = self.tensors.get(&id) else { return Ok(0) };
        let ages = match self.known {
            Some(_) => self.host_ages.of(state.slot),
            None => ages_of(&self.gpu.download(&self.ages)?, state.slot),
        };
        Ok(ages[..R::STATES.len()].iter().copied().min().unwrap_or(0))
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
    /// [`CudaError::Unsupported`] while a graph is captured, [`CudaError::Driver`].
    pub fn reset(&mut self, id: u64, moments: ResetMoments) -> Result<bool, CudaError> {
        self.not_captured("reset")?;
        let Some(state) = self.tensors.get_mut(&id) else { return Ok(false) };
        let formats = state.formats;
        for (s, (kind, memory)) in R::STATES.iter().zip(&mut state.states).enumerate() {
            if moments == ResetMoments::All || kind.role == Role::SecondMoment {
                empty(&self.gpu, formats[s], state.n as usize, memory)?;
                self.gpu.zero(&mut self.ages, state.slot as usize * MOST + s, 1)?;
                self.host_ages.reset(state.slot, s);
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

    /// A copy on the host, of all but the standing control and the number of steps left out: what is saved, and stepped on, there. Waits
    /// for all earlier work.
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
        let groups = self.host_ages.groups();
        for (&id, state) in &self.tensors {
            let states = self.stored(id)?.unwrap_or_default();
            let state = TensorState {
                name: state.name.clone(),
                states,
                ages: ages_of(&ages, state.slot),
                rest: self.rest(id)?,
                n: state.n as usize,
                first: state.first,
                group: groups[state.slot as usize],
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
        let progress = StepProgress { executed: host.step, skipped: 0 };
        let clock = clock_of(progress, host.parameters, host.rounding, &optimizer.control);
        gpu.upload_into(&[clock], &mut optimizer.clock)?;
        optimizer.known = Some(progress);
        optimizer.room(host.tensors.len())?;
        let mut ages = gpu.download(&optimizer.ages)?;
        for (&id, state) in &host.tensors {
            let slot = optimizer.host_ages.slots();
            optimizer.host_ages.push(state.ages, state.group);
            ages[slot as usize * MOST..][..MOST].copy_from_slice(&state.ages);
            let state = State {
                name: state.name.clone(),
                states: state.states.iter().map(|moment| gpu.upload(&bytes(moment))).collect::<Result<_, _>>()?,
                formats: from_fn(|s| state.states.get(s).map_or(StateFormat::F32, Moment::format)),
                rest: state.rest.as_ref().map(|rest| gpu.upload(rest)).transpose()?,
                n: state.n as u64,
                first: state.first,
                slot,
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
    /// [`CudaError::WrongDevice`], [`CudaError::WrongStream`], [`CudaError::Unsupported`] for a list that is new while a graph is
    /// captured, and [`CudaError::Optim`] as [`optim::Optimizer::step_tensors`]; nothing is changed then.
    /// [`CudaError::OutOfMemory`], after which some tensors may have states, which are zero; [`CudaError::Driver`], after which a
    /// step may be half done.
    pub fn step_tensors<P: Source + Real, G: Source + Real>(
        &mut self,
        tensors: &mut [DeviceParameter<'_, P, G>],
    ) -> Result<(), CudaError> {
        self.step_with(&mut [&mut &mut *tensors], None, None)
    }

    /// Steps tensors, with gradients scaled and clipped, or not at all where [`StepControl::found_inf`] is set, in this step alone.
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

    /// Steps tensors with the clip coefficient that a [`DeviceNorm`] has left on the device, in this step alone; 1 if it was asked for
    /// none. The gradient scale is that of [`set_control`](Self::set_control), with which the norm is asked for, too, and its flag
    /// counts. Under [`NonFinite::Skip`] the step is left out if the norm has found a gradient that is not finite: nobody waits to
    /// know, so that from then on [`steps`](Self::steps) and [`age`](Self::age) ask the device.
    ///
    /// # Errors
    /// As [`step_tensors`](Self::step_tensors), [`CudaError::WrongDevice`] and [`CudaError::WrongStream`], and
    /// [`CudaError::Unsupported`] for [`NonFinite::Refuse`].
    pub fn step_clipped<P: Source + Real, G: Source + Real>(
        &mut self,
        norm: &DeviceNorm,
        non_finite: NonFinite,
        tensors: &mut [DeviceParameter<'_, P, G>],
    ) -> Result<(), CudaError> {
        let skips = skips(non_finite)?;
        norm.own(&self.gpu)?;
        self.step_with(&mut [&mut &mut *tensors], None, Some((norm.address(), skips)))
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
        norm: Option<(u64, bool)>,
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

    /// The tables for steps over somebody else's memory, made once, and the states that are missing: [`step_plan`](Self::step_plan)
    /// then takes the host a few microseconds for any number of tensors.
    ///
    /// # Errors
    /// As [`step_raw`](Self::step_raw).
    pub fn plan_raw(&mut self, tensors: &[StepMemory]) -> Result<StepPlan, CudaError> {
        Ok(StepPlan(self.plan(&raw(tensors))?))
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
        let skips = skips(non_finite)?;
        norm.own(&self.gpu)?;
        // SAFETY: promised by the caller.
        unsafe { self.step_plan_with(plan, Some((norm.address(), skips))) }
    }

    /// # Safety
    /// As [`step_plan`](Self::step_plan).
    unsafe fn step_plan_with(&mut self, plan: &mut StepPlan, norm: Option<(u64, bool)>) -> Result<(), CudaError> {
        let control = self.standing;
        if norm.is_none() && control.found_inf && !self.gpu.is_capturing()? {
            self.leave_out();
            return Ok(());
        }
        if plan.0.generation != self.generation {
            let list = raw(&plan.0.tensors.list);
            let new = self.plan(&list)?;
            plan.0 = new;
        }
        self.send(&control)?;
        // SAFETY: promised by the caller; the states were made for these lengths.
        unsafe { self.execute(&plan.0, norm) }
    }

    /// # Safety
    /// As [`step_raw`](Self::step_raw), once lengths are checked.
    unsafe fn step_list(
        &mut self,
        list: &[Listed<'_>],
        control: Option<&StepControl>,
        norm: Option<(u64, bool)>,
    ) -> Result<(), CudaError> {
        let control = control.copied().unwrap_or(self.standing);
        if norm.is_none() && control.found_inf && !self.gpu.is_capturing()? {
            self.check(list)?;
            self.leave_out();
            return Ok(());
        }
        let planned = self.plan.as_ref().filter(|plan| {
            let planned = &plan.tensors.list;
            plan.generation == self.generation
                && planned.len() == list.len()
                && planned
                    .iter()
                    .zip(list)
                    .all(|(memory, listed)| *memory == listed.memory && listed.grads as u64 == memory.n)
        });
        let plan = match planned {
            Some(plan) => plan.clone(),
            None => self.plan(list)?,
        };
        self.send(&control)?;
        self.plan = Some(plan.clone());
        // SAFETY: promised by the caller; the states were made for these lengths.
        unsafe { self.execute(&plan, norm) }
    }

    /// Counts a step that the host has left out.
    fn leave_out(&mut self) {
        self.left_out += 1;
        if let Some(known) = &mut self.known {
            known.skipped += 1;
        }
    }

    /// # Safety
    /// As the kernel expects.
    unsafe fn small<A: cudarc::driver::DeviceRepr>(&self, kernel: &str, arguments: &A) -> Result<(), CudaError> {
        // SAFETY: promised by the caller.
        unsafe { enqueue(&self.gpu, "prepare", kernel, 1, 32, arguments) }
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

/// Whether the approximations of this device, refined, give roots and quotients correctly rounded where not every approximation
/// would: asked once, for which it waits. `Seeded` of exact.cuh.
fn seeds_hold(gpu: &Gpu) -> Result<bool, CudaError> {
    let known = gpu.seeds();
    if let Some(known) = known.and_then(OnceLock::get) {
        return Ok(*known);
    }
    let failed = gpu.zeroed::<u32>(1)?;
    // SAFETY: one word is there.
    unsafe { enqueue(gpu, "prepare", "ask_seeds", 8, 128, &AskSeedsArguments { failed: failed.address() }) }?;
    let hold = gpu.download(&failed)?[0] == 0;
    Ok(known.map_or(hold, |known| *known.get_or_init(|| hold)))
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

/// Whether a step is left out for a norm that is not finite.
fn skips(non_finite: NonFinite) -> Result<bool, CudaError> {
    match non_finite {
        NonFinite::Propagate => Ok(false),
        NonFinite::Skip => Ok(true),
        _ => {
            let reason = "nobody waits to know whether a norm is finite";
            Err(CudaError::Unsupported { argument: "non_finite", reason })
        }
    }
}

fn clock_of(progress: StepProgress, parameters: Rounding, states: Rounding, control: &StepControl) -> Clock {
    let seed = |rounding| if let Rounding::Stochastic { seed } = rounding { seed } else { 0 };
    Clock {
        step: progress.executed,
        skipped: progress.skipped,
        seed_parameters: seed(parameters),
        seed_states: seed(states),
        gradient_scale: control.gradient_scale,
        clip: control.clip,
        found_inf: control.found_inf.into(),
        arrived: 0,
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
    let mut bytes = Vec::with_capacity(bytes_on_device(moment.format(), moment.len()));
    for (i, part) in moment.parts().into_iter().enumerate() {
        if let (1, StateFormat::Blocks(format)) = (i, moment.format()) {
            bytes.resize(scales_at(format, moment.len()), 0);
        }
        bytes.extend_from_slice(part);
    }
    bytes
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
