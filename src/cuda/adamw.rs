//! AdamW on device memory.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::vec;
use alloc::vec::Vec;

use super::blocks::Wide;
use super::cast::Source;
use super::launch::{BlockArguments, MomentArguments, Shape, StepArguments, aligned, disjoint, keys, launch, pieces};
use super::{CudaError, DeviceVec, ElementType, Gpu};
use crate::format::{BlockFormat, BlockScale, Format};
use crate::optim::{
    AdamWConfig, Entry, Moment, Real, Rounding, Scalars, StateFormat, States, Tensor, check, check_states,
};
use crate::random::Role;
use crate::round::Overflow;
use crate::round::lanes::Target32;

/// One tensor of a step, or a part of one, in device memory.
#[derive(Debug)]
pub struct DeviceParameter<'a, P, G> {
    tensor: Tensor<'a>,
    params: &'a mut DeviceVec<P>,
    grads: &'a DeviceVec<G>,
}

impl<'a, P: Source + Real, G: Source + Real> DeviceParameter<'a, P, G> {
    /// A tensor known by name; its id is the name's [`tensor_id`](crate::random::tensor_id).
    pub fn named(name: &'a str, params: &'a mut DeviceVec<P>, grads: &'a DeviceVec<G>) -> Self {
        Self { tensor: Tensor::named(name), params, grads }
    }

    /// A tensor known by number.
    pub fn numbered(id: u64, params: &'a mut DeviceVec<P>, grads: &'a DeviceVec<G>) -> Self {
        Self { tensor: Tensor::numbered(id), params, grads }
    }

    /// As [`optim::Parameter::part`](crate::optim::Parameter::part).
    #[must_use]
    pub fn part(self, first: u64, whole: u64) -> Self {
        Self { tensor: self.tensor.part(first, whole), ..self }
    }
}

/// Somebody else's memory to step: addresses, length and types.
#[derive(Clone, Copy, Debug)]
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
}

/// A tensor of a step's list: what it is, where it is, and the length of its gradients.
struct Listed<'a> {
    tensor: Tensor<'a>,
    memory: StepMemory,
    grads: usize,
}

/// Moments of one tensor.
#[derive(Debug)]
struct State {
    m: DeviceVec<u8>,
    v: DeviceVec<u8>,
    n: u64,
    age: u64,
    /// Index of the first element in its tensor.
    first: u64,
}

/// AdamW whose parameters, gradients and moments are on a GPU: the bits of [`optim::AdamW`](crate::optim::AdamW).
///
/// A step enqueues one kernel a tensor on the stream of its [`Gpu`] and does not wait.
#[derive(Debug)]
pub struct AdamW {
    gpu: Gpu,
    config: AdamWConfig,
    formats: States,
    states: Rounding,
    parameters: Rounding,
    step: u64,
    tensors: BTreeMap<u64, State>,
}

impl AdamW {
    /// As [`optim::AdamW::new`](crate::optim::AdamW::new).
    ///
    /// # Errors
    /// [`CudaError::Optim`] for hyper-parameters out of range or formats that moments are not stored in,
    /// [`CudaError::Unsupported`] for [`Rounding::SrStates`].
    pub fn new(
        gpu: &Gpu,
        config: AdamWConfig,
        states: impl Into<States>,
        rounding: Rounding,
    ) -> Result<Self, CudaError> {
        config.check()?;
        whole(&config)?;
        let formats = states.into();
        check_states::<AdamWConfig>(&formats)?;
        supported("rounding", rounding)?;
        Ok(Self {
            gpu: gpu.clone(),
            config,
            formats,
            states: rounding,
            parameters: rounding,
            step: 0,
            tensors: BTreeMap::new(),
        })
    }

    /// Another rounding for parameters than for moments.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] for [`Rounding::SrStates`].
    pub fn parameter_rounding(self, rounding: Rounding) -> Result<Self, CudaError> {
        supported("parameter_rounding", rounding)?;
        Ok(Self { parameters: rounding, ..self })
    }

    /// Changes the hyper-parameters from the next step on.
    ///
    /// # Errors
    /// [`CudaError::Optim`]; the old ones stay then.
    pub fn set_config(&mut self, config: AdamWConfig) -> Result<(), CudaError> {
        config.check()?;
        whole(&config)?;
        self.config = config;
        Ok(())
    }

    /// Steps executed.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Age of a tensor: its own steps executed.
    #[must_use]
    pub fn age(&self, id: u64) -> u64 {
        self.tensors.get(&id).map_or(0, |state| state.age)
    }

    /// Copies the moments of a tensor to the host, after all earlier work; `None` for one that has not been stepped.
    ///
    /// # Errors
    /// As [`Gpu::download`].
    pub fn moments(&self, id: u64) -> Result<Option<(Moment, Moment)>, CudaError> {
        let Some(state) = self.tensors.get(&id) else { return Ok(None) };
        let moment = |format: StateFormat, bytes: &DeviceVec<u8>| {
            let (n, mut bytes) = (state.n as usize, self.gpu.download(bytes)?);
            if let StateFormat::Blocks(format) = format {
                bytes.drain(format.element().bytes(n)..scales_at(format, n));
            }
            let length =
                CudaError::Length { argument: "state", expected: format.bytes(n) as u64, got: bytes.len() as u64 };
            Moment::from_bytes(format, n, &bytes).ok_or(length)
        };
        Ok(Some((moment(self.formats.m, &state.m)?, moment(self.formats.v, &state.v)?)))
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

    /// Steps tensors, one kernel each. Their order changes no bit.
    ///
    /// # Errors
    /// [`CudaError::WrongDevice`], [`CudaError::OutOfMemory`] for new moments, and [`CudaError::Optim`] as
    /// [`optim::AdamW::step_tensors`](crate::optim::AdamW::step_tensors). Nothing is changed then.
    pub fn step_tensors<P: Source + Real, G: Source + Real>(
        &mut self,
        tensors: &mut [DeviceParameter<'_, P, G>],
    ) -> Result<(), CudaError> {
        let mut list = Vec::with_capacity(tensors.len());
        for DeviceParameter { tensor, params, grads } in &*tensors {
            self.gpu.own(params, "params")?;
            self.gpu.own(grads, "grads")?;
            let memory = StepMemory {
                id: tensor.id,
                params: params.address(),
                params_type: P::TYPE,
                grads: grads.address(),
                grads_type: G::TYPE,
                n: params.len() as u64,
            };
            list.push(Listed { tensor: *tensor, memory, grads: grads.len() });
        }
        // SAFETY: the buffers live on this device and, once checked, are as long as they say; parameters are borrowed mutably.
        unsafe { self.step_list(&list) }
    }

    /// Steps somebody else's memory in place, one kernel a tensor, on the stream of the [`Gpu`]. Only enqueues work.
    ///
    /// # Safety
    /// Addresses are device memory of this device, as long as [`StepMemory`] says until the work is done; nothing else
    /// writes them, or reads parameters, in the meantime. Gradients were written by work that this stream comes after.
    ///
    /// # Errors
    /// [`CudaError::Misaligned`] and [`CudaError::Overlap`] for addresses that cannot be, and as
    /// [`step_tensors`](Self::step_tensors). Nothing is changed then. An error that the
    /// driver reports at a launch leaves the tensors before it stepped and the step counted.
    pub unsafe fn step_raw(&mut self, tensors: &[StepMemory]) -> Result<(), CudaError> {
        let listed = |memory: &StepMemory| {
            let grads = usize::try_from(memory.n).unwrap_or(usize::MAX);
            Listed { tensor: Tensor::numbered(memory.id), memory: *memory, grads }
        };
        let list: Vec<_> = tensors.iter().map(listed).collect();
        // SAFETY: promised by the caller.
        unsafe { self.step_list(&list) }
    }

    /// # Safety
    /// As [`step_raw`](Self::step_raw), once lengths are checked.
    unsafe fn step_list(&mut self, list: &[Listed<'_>]) -> Result<(), CudaError> {
        self.prepare(list)?;
        self.step += 1;
        for Listed { tensor, memory, .. } in list {
            let Some(state) = self.tensors.get_mut(&tensor.id) else { continue };
            let scalars = self.config.scalars(state.age + 1)?;
            state.age += 1;
            let (m, v) = (state.m.address(), state.v.address());
            // SAFETY: promised by the caller; the moments were made for this many elements.
            unsafe { self.launch(memory, tensor.first(), m, v, &scalars) }?;
        }
        Ok(())
    }

    /// Checks every tensor, then makes the moments that are missing.
    fn prepare(&mut self, list: &[Listed<'_>]) -> Result<(), CudaError> {
        let length = |n: u64| usize::try_from(n).map_err(|_| CudaError::OutOfMemory { bytes: usize::MAX });
        let mut entries = Vec::with_capacity(list.len());
        for Listed { tensor, memory, grads } in list {
            let state = self.tensors.get(&tensor.id).map(|state| (state.first, state.n as usize));
            entries.push(Entry { tensor: *tensor, params: length(memory.n)?, grads: *grads, state });
        }
        // Lengths first: memory overlaps or not over the length that it has.
        check(entries.into_iter())?;
        for Listed { memory: StepMemory { params, params_type, grads, grads_type, n, .. }, .. } in list {
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
            let (m, v) = (self.zeros(self.formats.m, n)?, self.zeros(self.formats.v, n)?);
            made.push((tensor.id, State { m, v, n: memory.n, age: 0, first: tensor.first() }));
        }
        self.tensors.extend(made);
        Ok(())
    }

    /// Memory of a moment of `n` zeros: codes, and then the scales of blocks.
    fn zeros(&self, format: StateFormat, n: usize) -> Result<DeviceVec<u8>, CudaError> {
        let StateFormat::Blocks(format) = format else { return self.gpu.zeroed(format.bytes(n)) };
        let at = scales_at(format, n);
        // The smallest scale.
        if format.scale() == BlockScale::Amax {
            let smallest = vec![f32::from_bits(1); format.blocks(n)];
            return self.gpu.upload(&[&vec![0; at], bytemuck::cast_slice::<f32, u8>(&smallest)].concat());
        }
        let mut memory = self.gpu.zeroed(at + format.blocks(n))?;
        self.gpu.fill(&mut memory, at.., 1)?;
        Ok(memory)
    }

    /// # Safety
    /// As [`step_raw`](Self::step_raw), with moments at `m` and `v`; element 0 is element `first` of its tensor.
    unsafe fn launch(
        &self,
        memory: &StepMemory,
        first: u64,
        m: u64,
        v: u64,
        scalars: &Scalars,
    ) -> Result<(), CudaError> {
        let key = |rounding, role: Role| match rounding {
            Rounding::Stochastic { seed } => Some((seed, self.step, memory.id, role.number())),
            _ => None,
        };
        let draws = [
            key(self.parameters, Role::Parameter),
            key(self.states, Role::FirstMoment),
            key(self.states, Role::SecondMoment),
        ];
        let work = Launch { memory, first, m, v, scalars, draws };
        // SAFETY: promised by the caller, and the moments are what the formats say.
        unsafe {
            match (self.formats.m, self.formats.v) {
                (StateFormat::F32, StateFormat::F32) => self.launch_unscaled(&work, "f32", 4),
                (StateFormat::Bf16, StateFormat::Bf16) => self.launch_unscaled(&work, "bf16", 2),
                _ => self.launch_blocks(&work),
            }
        }
    }

    /// # Safety
    /// As [`launch`](Self::launch), with both moments unscaled in this type of this size.
    unsafe fn launch_unscaled(&self, work: &Launch<'_>, moments: &str, size: u64) -> Result<(), CudaError> {
        let StepMemory { params, params_type, grads, grads_type, n, .. } = *work.memory;
        let (module, params_name, each) = match params_type {
            ElementType::F32 => ("adamw_f32", "f32".into(), 4),
            ElementType::Bf16 => ("adamw_bf16", rounded("bf16", self.parameters), 8),
            ElementType::Fp16 => ("adamw_fp16", rounded("fp16", self.parameters), 8),
        };
        let moments = if size == 4 { moments.into() } else { rounded(moments, self.states) };
        let kernel = format!("adamw_{params_name}_{}_{moments}", grads_type.name());
        for piece in pieces(work.first, n, 2) {
            let [p, g] = [(params, params_type), (grads, grads_type)].map(|(at, of)| at + piece.start * of.bytes());
            let [m, v] = [work.m, work.v].map(|at| at + piece.start * size);
            let arguments = StepArguments {
                p,
                g,
                m,
                v,
                n: piece.len,
                group: piece.group,
                skip: piece.skip,
                vector: (piece.skip == 0
                    && p.is_multiple_of(4 * params_type.bytes())
                    && g.is_multiple_of(4 * grads_type.bytes())
                    && [m, v].iter().all(|at| at.is_multiple_of(4 * size)))
                .into(),
                keys: work.draws.map(|draw| keys(draw, piece.high)),
                scalars: *work.scalars,
            };
            // SAFETY: the kernel of this name steps memory of these types; memory is promised by the caller.
            unsafe { launch(&self.gpu, module, &kernel, piece.len, Shape::of(each), &arguments) }?;
        }
        Ok(())
    }

    /// The kernel that has these types and formats built in, if there is one: its module, its name, and the elements of a
    /// thread.
    fn built_in(&self, params: ElementType, grads: ElementType) -> Option<(&'static str, String, u32)> {
        let (StateFormat::Blocks(m), StateFormat::Blocks(v)) = (self.formats.m, self.formats.v) else { return None };
        if m.block() != v.block() || [m, v].iter().any(|format| format.scale() != BlockScale::Ceil) {
            return None;
        }
        let pair = [m, v].map(|format| format.element().to_string().to_lowercase()).join("_");
        let (module, types, each) = match (params, grads) {
            (ElementType::F32, ElementType::F32) => ("blocks_f32", "f32_f32".into(), 8),
            (ElementType::Bf16, ElementType::Bf16) => {
                ("blocks_bf16", format!("{}_bf16", rounded("bf16", self.parameters)), 16)
            }
            _ => return None,
        };
        BUILT_IN.contains(&&*pair).then(|| (module, rounded(&format!("blocks_{types}_{pair}_"), self.states), each))
    }

    /// # Safety
    /// As [`launch`](Self::launch).
    unsafe fn launch_blocks(&self, work: &Launch<'_>) -> Result<(), CudaError> {
        let StepMemory { params, params_type, grads, grads_type, n, .. } = *work.memory;
        let log_block = log_block(self.formats);
        let moments = [
            moment(self.formats.m, Role::FirstMoment, work.m, n, log_block),
            moment(self.formats.v, Role::SecondMoment, work.v, n, log_block),
        ];
        let mixed = moments.iter().any(|(moment, ..)| moment.kind == 3 || moment.log_block != log_block);
        let any = if mixed { "blocks_mixed" } else { "blocks_any" };
        let (module, kernel, each) = self
            .built_in(params_type, grads_type)
            // A block to each of four warps.
            .unwrap_or_else(|| ("blocks_any", any.into(), (1 << log_block) / 32));
        // Parts begin, and groups change their high half, at whole blocks.
        for piece in pieces(work.first, n, 2) {
            let [p, g] = [(params, params_type), (grads, grads_type)].map(|(at, of)| at + piece.start * of.bytes());
            let [(m, m_scales), (v, v_scales)] = moments.map(|(arguments, bits, at, scales)| {
                let scale_size = if arguments.kind == 3 { 4 } else { 1 };
                (at + piece.start * bits / 8, scales + (piece.start >> arguments.log_block) * scale_size)
            });
            let arguments = BlockArguments {
                p,
                g,
                m,
                v,
                m_scales,
                v_scales,
                n: piece.len,
                group: piece.group,
                log_block,
                vector: [p, g].iter().all(|at| at.is_multiple_of(16)).into(),
                p_type: params_type.number(),
                g_type: grads_type.number(),
                p_draws: work.draws[0].is_some().into(),
                m_draws: work.draws[1].is_some().into(),
                keys: work.draws.map(|draw| keys(draw, piece.high)),
                scalars: *work.scalars,
                moments: moments.map(|(arguments, ..)| arguments),
            };
            // SAFETY: the kernel of this name steps memory of these types and formats, or of those that the arguments name;
            // memory is promised by the caller.
            unsafe { launch(&self.gpu, module, &kernel, piece.len, Shape::of(each), &arguments) }?;
        }
        Ok(())
    }
}

/// One tensor's step.
struct Launch<'a> {
    memory: &'a StepMemory,
    first: u64,
    m: u64,
    v: u64,
    scalars: &'a Scalars,
    /// Of parameters, first and second moments.
    draws: [Option<(u64, u64, u64, u32)>; 3],
}

/// Elements of first and second moments that kernels have built in.
const BUILT_IN: [&str; 4] = ["e4m3_ue4m4", "e4m3_e4m3", "e5m2_ue5m3", "e2m1_ue2m2nz"];

/// The name of what is rounded, for a kernel's name.
fn rounded(name: &str, rounding: Rounding) -> String {
    match rounding {
        Rounding::Stochastic { .. } => format!("{name}s"),
        _ => format!("{name}n"),
    }
}

/// log2 of the size of blocks that a step goes by: the larger one of its moments.
fn log_block(States { m, v }: States) -> u32 {
    let block = |format| if let StateFormat::Blocks(format) = format { Some(format.block()) } else { None };
    block(m).max(block(v)).unwrap_or(256).ilog2()
}

/// Bytes of a moment's memory before its scales: those of the codes, up to where an f32 is aligned if scales are f32.
fn scales_at(format: BlockFormat, n: usize) -> usize {
    let codes = format.element().bytes(n);
    if format.scale() == BlockScale::Amax { codes.next_multiple_of(4) } else { codes }
}

/// A moment of `n` elements: how it is stored, bits of an element, its address and that of its scales.
pub(super) fn moment(
    format: StateFormat,
    role: Role,
    at: u64,
    n: u64,
    log_block: u32,
) -> (MomentArguments, u64, u64, u64) {
    let (kind, element, log_block, scales) = match format {
        StateFormat::F32 => (0, Format::BF16, log_block, at),
        StateFormat::Bf16 => (1, Format::BF16, log_block, at),
        StateFormat::Blocks(format) => {
            let kind = if format.scale() == BlockScale::Amax { 3 } else { 2 };
            (kind, format.element(), format.block().ilog2(), at + scales_at(format, n as usize) as u64)
        }
    };
    let bits = if kind == 0 { 32 } else { element.bits().into() };
    let arguments = MomentArguments {
        kind,
        fraction_bits: element.fraction_bits(),
        bias: element.bias(),
        floor: (role == Role::SecondMoment && element.has_zero()).into(),
        log_block,
        target: Target32::new(element, 0, Overflow::Saturate).expect("a normal number of these formats is one of f32"),
        max: element.max(),
        wide: Wide::new(element, Overflow::Saturate),
    };
    (arguments, bits, at, scales)
}

/// Refuses options that kernels do not have.
fn whole(config: &AdamWConfig) -> Result<(), CudaError> {
    let reason = "kernels step every element";
    if config.skip_zeros { Err(CudaError::Unsupported { argument: "skip_zeros", reason }) } else { Ok(()) }
}

fn supported(argument: &'static str, rounding: Rounding) -> Result<(), CudaError> {
    match rounding {
        Rounding::SrStates { .. } => {
            Err(CudaError::Unsupported { argument, reason: "the `sr-states` words are for the CPU, to compare with" })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_a_step_goes_by() {
        let bf16 = StateFormat::Bf16;
        for states in [bf16.into(), StateFormat::E4M3.into(), States::FP4, States { m: bf16, ..States::FP4 }] {
            assert_eq!(log_block(states), if states.has_blocks() { 7 } else { 8 });
        }
        let fine = StateFormat::UE4M4.block(32).unwrap();
        assert_eq!(log_block(States { m: StateFormat::E4M3, v: fine }), 7);
        assert_eq!(log_block(States { m: bf16, v: fine.amax() }), 5);
        let (StateFormat::Blocks(fine), StateFormat::Blocks(amax)) = (fine, fine.amax()) else { panic!() };
        assert_eq!([fine, amax].map(|format| scales_at(format, 33)), [33, 36]);
    }
}
