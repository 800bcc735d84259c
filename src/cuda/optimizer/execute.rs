//! What a step launches.

use alloc::sync::Arc;
use core::array::from_fn;

use super::{Ahead, Optimizer, Planned, StepProgress, enqueue};
use crate::cuda::CudaError;
use crate::cuda::plan::{
    AnyArguments, AnyNormsArguments, COPIES, Direct, Item, MOST_GROUPS, ManyArguments, NormsArguments, Places,
    PlannedLaunch, PrepareArguments, Record, Takes, TrustArguments, scalars,
};
use crate::optim::{ParameterGroup, Rounding, Rule};
use crate::random::Keys;

/// Blocks of threads that prepare a step.
const MOST_PREPARING: u64 = 128;

/// Items up to which steps of a list are not prepared: one block sees to their ages.
const FEW: usize = 2048;

impl<R: Rule> Optimizer<R> {
    /// # Safety
    /// As [`step_plan`](Self::step_plan), and the plan was made for what there is now.
    pub(super) unsafe fn execute(&mut self, plan: &Arc<Planned>, norm: Option<(u64, bool)>) -> Result<(), CudaError> {
        let skips = norm.is_some_and(|(_, skips)| skips);
        if self.gpu.is_capturing()? {
            self.known = None;
            self.captured = true;
            if !self.retired.plans.iter().any(|kept| Arc::ptr_eq(kept, plan)) {
                self.retired.plans.push(plan.clone());
            }
        }
        if skips {
            self.known = None;
        }
        // Nothing is there if a launch fails on the way.
        let ahead = core::mem::take(&mut *plan.ahead());
        let records = plan.records(ahead.half);
        let (direct, ahead) = self.direct(plan, norm.is_some(), ahead);
        // Until all is enqueued, the device alone knows how far it is.
        let known = self.known.take();
        let counts = if self.meter { self.counts.address() } else { 0 };
        if direct.on == 0 {
            let prepare = PrepareArguments {
                items: plan.items.address(),
                records,
                ages: self.ages.address(),
                hyper: self.hyper.address(),
                clock: self.clock.address(),
                norm: norm.map_or(0, |(address, _)| address),
                counts,
                count: plan.items.len() as u32,
                skips: skips.into(),
            };
            // A job for scalars and for each role's keys of an item, and others for its counts.
            let jobs = plan.items.len() as u64 * (2 + R::STATES.len()).max(COPIES * usize::from(self.meter)) as u64;
            let blocks = jobs.div_ceil(128).clamp(1, MOST_PREPARING) as u32;
            // SAFETY: tables of this plan, and memory of this optimizer.
            unsafe { enqueue(&self.gpu, "prepare", &plan.prepare, blocks, 128, &prepare) }?;
        }
        if R::NORMS {
            // SAFETY: promised by the caller.
            unsafe { self.norms(plan, records) }?;
        }
        let stands = self.control.found_inf;
        for launch in &plan.launches {
            let tiles_ahead = launch.ahead(self.multiprocessors)[0];
            let mut arguments = self.arguments(plan, launch, launch.places[0], records, tiles_ahead);
            arguments.launch.counts = counts;
            arguments.launch.direct = direct;
            if direct.next_records != 0 {
                arguments.launch.direct.next_records += launch.records_at();
            }
            let blocks = launch.blocks(self.multiprocessors);
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
        let stands = u64::from(stands);
        self.known =
            known.map(|known| StepProgress { executed: known.executed + 1 - stands, skipped: known.skipped + stands });
        self.host_ages.steps_of(&plan.tensors).steps += 1 - stands;
        self.last = plan.tensors.clone();
        *plan.ahead() = ahead;
        Ok(())
    }

    /// What the launches of a step are told, where the host knows all that it goes by, and what is made ahead then.
    fn direct(&mut self, plan: &Planned, clipped: bool, ahead: Ahead) -> (Direct, Ahead) {
        let mut direct = Direct { seeded: self.seeded.into(), ..Direct::OFF };
        let mut after = Ahead { half: ahead.half, ..Ahead::default() };
        let told = !clipped && !R::NORMS && !self.meter && !self.control.found_inf;
        let Some(known) = self.known.filter(|_| told && plan.launches.iter().all(|launch| launch.tiles > 0)) else {
            return (direct, after);
        };
        let step = known.executed + 1;
        let seed = |rounding| if let Rounding::Stochastic { seed } = rounding { seed } else { 0 };
        let seeds = [self.parameters, self.rounding].map(seed);
        [direct.seed_parameters, direct.seed_states] = seeds;
        // One tensor of one item, and the high half of its groups.
        let alone = match (&plan.launches[..], &plan.tensors.list[..]) {
            ([launch], [memory]) if launch.items.len() == 1 => {
                self.tensors.get(&memory.id).map(|state| (memory, (state.first >> 34) as u32))
            }
            _ => None,
        };
        let few = self.groups.len() <= MOST_GROUPS && plan.launches.iter().all(|launch| launch.items.len() <= FEW);
        let ready = !self.captured && ahead.step == step && ahead.seeds == seeds;
        let mode = match (alone.is_some(), few) {
            (true, _) => 1,
            (_, true) if ready => 3,
            (_, true) if plan.small => 2,
            _ => 0,
        };
        if let Some(ages) = self.host_ages.next_of(&plan.tensors).filter(|_| mode > 0) {
            // Scalars of states that there are not are those of an age of 1, as the device makes them.
            let (ages, control) = (ages.map(|age| age.max(1)), self.control);
            let of =
                |group: &ParameterGroup<R>| scalars(&group.config.scalars(ages, &control), group.config.skips_zeros());
            direct.on = mode;
            direct.states = R::STATES.len() as u32;
            (direct.clock, direct.ages, direct.step) = (self.clock.address(), self.ages.address(), step);
            if let Some((memory, high)) = alone {
                let key = |role: usize| {
                    Keys::new(seeds[usize::from(role > 0)], step, memory.id, role as u32 + 1, high).words()
                };
                direct.record = Record::new(from_fn(key), &of(&self.groups[memory.group]));
            } else {
                direct.scalars.iter_mut().zip(&self.groups).for_each(|(to, group)| *to = of(group));
            }
        }
        if few && alone.is_none() && !self.captured {
            // As long after this step as this one comes after the last.
            let since = if ahead.last == 0 { 1 } else { step.saturating_sub(ahead.last).max(1) };
            let next = step.saturating_add(since);
            after = Ahead { half: !ahead.half, step: next, seeds, last: step };
            (direct.next_records, direct.next_step) = (plan.records(after.half), next);
        }
        (direct, after)
    }

    /// The norms of whole tensors, and what follows from them.
    ///
    /// # Safety
    /// As [`execute`](Self::execute).
    unsafe fn norms(&self, plan: &Planned, records: u64) -> Result<(), CudaError> {
        let chunks = u64::from(plan.chunks);
        for launch in &plan.launches {
            let Some((module, kernel)) = &launch.kernel.norms else { continue };
            let ahead = launch.ahead(self.multiprocessors)[1];
            let arguments = self.arguments(plan, launch, launch.places[1], records, ahead);
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
            records,
            hyper: self.hyper.address(),
            sums: plan.sums.address(),
            chunks,
        };
        // SAFETY: tables of this plan; a block for each item.
        unsafe { enqueue(&self.gpu, "prepare", "trust_lamb", plan.items.len() as u32, 1024, &trust) }
    }

    fn arguments(
        &self,
        plan: &Planned,
        launch: &PlannedLaunch,
        places: Places,
        records: u64,
        ahead: u32,
    ) -> AnyArguments {
        let PlannedLaunch { items, p_type, g_type, states, kernel, .. } = launch;
        let stochastic = |rounding| matches!(rounding, Rounding::Stochastic { .. }).into();
        AnyArguments {
            launch: ManyArguments {
                places: plan.places.address() + 4 * places.at as u64,
                items: plan.items.address() + (size_of::<Item>() * items.start) as u64,
                records: records + launch.records_at(),
                counts: 0,
                count: items.len() as u32,
                place_shift: places.shift,
                p_draws: stochastic(self.parameters),
                s_draws: stochastic(self.rounding),
                ahead,
                direct: Direct { seeded: self.seeded.into(), ..Direct::OFF },
            },
            p_type: p_type.number(),
            g_type: g_type.number(),
            log_run: kernel.log_run(),
            tiles: launch.tiles,
            states: *states,
        }
    }
}
