//! What the host knows of tensors by slot: their ages, as long as no step is left to the device to decide on, and the groups in which
//! they were last stepped. Steps are remembered by the list, so that no step takes the time of all its tensors.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::array::from_fn;

use super::Tensors;
use crate::optim::MOST;

#[derive(Debug)]
pub(super) struct Ages {
    /// States that there are; others have an age of 0.
    states: usize,
    /// By slot, ages and group, without what is pending.
    settled: Vec<([u64; MOST], usize)>,
    /// No tensor is in two of these.
    pending: Vec<Pending>,
    /// By slot, which of them it is in, counted from 1; 0: in none.
    pending_of: Vec<u32>,
}

/// Steps of a list.
#[derive(Debug)]
pub(super) struct Pending {
    tensors: Arc<Tensors>,
    pub(super) steps: u64,
    /// What ages all of its tensors have, without these steps, if they have the same.
    same: Option<[u64; MOST]>,
}

/// Lists of tensors whose steps are pending.
const MOST_PENDING: usize = 64;

impl Ages {
    pub(super) fn new(states: usize) -> Self {
        Self { states, settled: Vec::new(), pending: Vec::new(), pending_of: Vec::new() }
    }

    /// Slots so far.
    pub(super) fn slots(&self) -> u32 {
        self.settled.len() as u32
    }

    /// One slot more, for a tensor of these ages and this group.
    pub(super) fn push(&mut self, ages: [u64; MOST], group: usize) {
        self.settled.push((ages, group));
        self.pending_of.push(0);
    }

    /// Ages after so many steps more.
    fn later(&self, ages: [u64; MOST], steps: u64) -> [u64; MOST] {
        from_fn(|s| if s < self.states { ages[s].saturating_add(steps) } else { 0 })
    }

    /// Where steps of this list are counted.
    pub(super) fn steps_of(&mut self, tensors: &Arc<Tensors>) -> &mut Pending {
        let known = self.pending.iter().position(|pending| Arc::ptr_eq(&pending.tensors, tensors));
        let at = known.unwrap_or_else(|| {
            let free = tensors.slots.iter().all(|&slot| self.pending_of[slot as usize] == 0);
            if !free || self.pending.len() >= MOST_PENDING {
                self.settle();
            }
            let mut ages = tensors.slots.iter().map(|&slot| self.settled[slot as usize].0);
            let first = ages.next();
            let same = first.filter(|first| ages.all(|ages| ages == *first));
            self.pending.push(Pending { tensors: tensors.clone(), steps: 0, same });
            for &slot in &tensors.slots {
                self.pending_of[slot as usize] = self.pending.len() as u32;
            }
            self.pending.len() - 1
        });
        &mut self.pending[at]
    }

    /// The ages that all tensors of this list have after its next step, if they have the same.
    pub(super) fn next_of(&mut self, tensors: &Arc<Tensors>) -> Option<[u64; MOST]> {
        let &mut Pending { steps, same, .. } = self.steps_of(tensors);
        same.map(|ages| self.later(ages, steps.saturating_add(1)))
    }

    /// Adds what is pending.
    fn settle(&mut self) {
        for Pending { tensors, steps, .. } in core::mem::take(&mut self.pending) {
            for (&slot, memory) in tensors.slots.iter().zip(&tensors.list) {
                let slot = slot as usize;
                self.settled[slot] = (self.later(self.settled[slot].0, steps), memory.group);
                self.pending_of[slot] = 0;
            }
        }
    }

    /// A state of a tensor starts anew.
    pub(super) fn reset(&mut self, slot: u32, state: usize) {
        self.settle();
        self.settled[slot as usize].0[state] = 0;
    }

    /// The ages of a slot.
    pub(super) fn of(&self, slot: u32) -> [u64; MOST] {
        let at = self.pending_of[slot as usize] as usize;
        let steps = at.checked_sub(1).map_or(0, |at| self.pending[at].steps);
        self.later(self.settled[slot as usize].0, steps)
    }

    /// The group of every slot.
    pub(super) fn groups(&self) -> Vec<usize> {
        let mut groups: Vec<usize> = self.settled.iter().map(|&(_, group)| group).collect();
        for Pending { tensors, .. } in &self.pending {
            for (&slot, memory) in tensors.slots.iter().zip(&tensors.list) {
                groups[slot as usize] = memory.group;
            }
        }
        groups
    }
}
