//! What a step is given: tensors in device memory, or addresses.

use alloc::vec::Vec;

use crate::cuda::{DeviceVec, ElementType, Source};
use crate::optim::{Real, Tensor};

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

    /// As [`optim::Parameter::part`](crate::optim::Parameter::part).
    #[must_use]
    pub fn part(self, first: u64, whole: u64) -> Self {
        Self { tensor: self.tensor.part(first, whole), ..self }
    }

    /// In another parameter group than 0: [`Optimizer::add_group`](super::Optimizer::add_group).
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
    pub(super) tensor: Tensor<'a>,
    pub(super) memory: StepMemory,
    pub(super) grads: usize,
}

/// A list of tensors that share types, for [`Optimizer::step_mixed`](super::Optimizer::step_mixed): a slice, an array or a vector of [`DeviceParameter`]. Sealed.
pub trait DeviceParameters: sealed::Lists {}

impl<L: sealed::Lists> DeviceParameters for L {}

mod sealed {
    use alloc::vec::Vec;

    use super::{DeviceParameter, Listed, StepMemory};
    use crate::cuda::{CudaError, Gpu, Source};
    use crate::optim::Real;

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

pub(super) fn raw(tensors: &[StepMemory]) -> Vec<Listed<'static>> {
    let listed = |memory: &StepMemory| {
        let grads = usize::try_from(memory.n).unwrap_or(usize::MAX);
        let tensor = Tensor::numbered(memory.id);
        let tensor = memory.part.map_or(tensor, |(first, whole)| tensor.part(first, whole));
        Listed { tensor, memory: *memory, grads }
    };
    tensors.iter().map(listed).collect()
}
