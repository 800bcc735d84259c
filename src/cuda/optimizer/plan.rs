//! The tables that steps over a list go by, and the states that it is missing.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::array::from_fn;
use std::sync::Mutex;

use super::list::{Listed, StepMemory};
use super::{Optimizer, Planned, State, Tensors, bytes_on_device, empty, new_generation};
use crate::cuda::launch::{aligned, disjoint};
use crate::cuda::plan::{COPIES, Options, Resident, Tables};
use crate::cuda::{CudaError, DeviceVec, ElementType};
use crate::optim::{self, Entry, Formats, MOST, NormError, OptimError, Rule, check};

/// Elements up to which steps of a list are not prepared. On an H200 to prepare one takes 4.4 us; that each block makes its own keys
/// takes some hundredths of the step.
const SMALL: u64 = 1 << 23;

impl<R: Rule> Optimizer<R> {
    /// Checks a list, makes the states that are missing, and its tables.
    #[cfg_attr(test, expect(clippy::arc_with_non_send_sync, reason = "the emulation of tests is of one thread"))]
    pub(super) fn plan(&mut self, list: &[Listed<'_>]) -> Result<Arc<Planned>, CudaError> {
        self.check(list)?;
        if self.gpu.is_capturing()? {
            let reason = "a list is stepped once, or planned, before its step is captured";
            return Err(CudaError::Unsupported { argument: "tensors", reason });
        }
        self.make_states(list)?;
        Ok(Arc::new(self.made(list)?))
    }

    /// Checks every tensor of a list. Nothing is changed.
    pub(super) fn check(&self, list: &[Listed<'_>]) -> Result<(), CudaError> {
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
            // Twice the bytes of the widest states and their scales are counted in 64 bits.
            if *n > u64::MAX / 64 {
                return Err(CudaError::OutOfMemory { bytes: usize::MAX });
            }
            if R::NORMS && *n > 1 << 34 {
                let reason = "norms of a tensor of more than 2^34 elements";
                return Err(CudaError::Unsupported { argument: "params", reason });
            }
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
        Ok(())
    }

    /// Makes the states that a checked list is missing.
    fn make_states(&mut self, list: &[Listed<'_>]) -> Result<(), CudaError> {
        let mut made = Vec::new();
        for Listed { tensor, memory, .. } in list.iter().filter(|listed| !self.tensors.contains_key(&listed.tensor.id))
        {
            let n = memory.n as usize;
            let settings = &self.groups[memory.group];
            let formats = settings.states.formats();
            let states = formats[..R::STATES.len()].iter().map(|&format| {
                let mut memory = self.gpu.zeroed(bytes_on_device(format, n))?;
                empty(&self.gpu, format, n, &mut memory)?;
                Ok(memory)
            });
            let states = states.collect::<Result<Vec<_>, CudaError>>()?;
            let rest = if settings.remainder { Some(self.gpu.zeroed(n)?) } else { None };
            let (name, first, slot) = (tensor.name(), tensor.first(), 0);
            made.push((memory.group, tensor.id, State { name, states, formats, rest, n: memory.n, first, slot }));
        }
        self.room(made.len())?;
        for (group, id, state) in made {
            self.tensors.insert(id, State { slot: self.host_ages.slots(), ..state });
            self.host_ages.push([0; MOST], group);
        }
        Ok(())
    }

    /// Makes room for the ages and counts of so many tensors more.
    pub(super) fn room(&mut self, more: usize) -> Result<(), CudaError> {
        let needed = self.host_ages.slots() as usize + more;
        if needed * MOST <= self.ages.len() {
            return Ok(());
        }
        let slots = needed.next_power_of_two();
        let (mut ages, mut counts) = (self.gpu.zeroed(slots * MOST)?, self.gpu.zeroed(slots * COPIES)?);
        self.gpu.copy(&self.ages, &mut ages)?;
        self.gpu.copy(&self.counts, &mut counts)?;
        let old = (core::mem::replace(&mut self.ages, ages), core::mem::replace(&mut self.counts, counts));
        if self.captured {
            self.retired.by_slot.push(old);
        }
        self.generation = new_generation();
        Ok(())
    }

    /// The tables of a list that was checked and has states.
    pub(super) fn made(&self, list: &[Listed<'_>]) -> Result<Planned, CudaError> {
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
        let slots = residents.iter().map(|resident| resident.slot).collect();
        let list: Vec<_> = list.iter().map(|listed| listed.memory).collect();
        let elements = list.iter().fold(0u64, |all, memory| all.saturating_add(memory.n));
        Ok(Planned {
            small: elements <= SMALL,
            tensors: Arc::new(Tensors { list, slots }),
            generation: self.generation,
            records: self.gpu.zeroed(2 * tables.items.len())?,
            ahead: Mutex::default(),
            items: self.gpu.upload(&tables.items)?,
            places: self.gpu.upload(&tables.places)?,
            sums: self.gpu.zeroed(2 * tables.chunks as usize)?,
            launches: tables.launches,
            chunks: tables.chunks,
            prepare: alloc::format!("prepare_{}", R::NAME),
        })
    }
}
