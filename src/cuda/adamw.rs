//! AdamW on device memory.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::vec::Vec;

use super::cast::Source;
use super::launch::{StepArguments, aligned, disjoint, keys, launch, pieces};
use super::{CudaError, DeviceVec, ElementType, Gpu};
use crate::optim::{AdamWConfig, Moment, OptimError, Real, Rounding, Scalars, StateFormat, States};
use crate::random::Role;

/// One tensor of a step in device memory.
#[derive(Debug)]
pub struct DeviceParameter<'a, P, G> {
    /// Its id.
    pub id: u64,
    /// Its parameters.
    pub params: &'a mut DeviceVec<P>,
    /// Its gradients.
    pub grads: &'a DeviceVec<G>,
}

/// Somebody else's memory to step: addresses, length and types.
#[derive(Clone, Copy, Debug)]
pub struct StepMemory {
    /// The tensor's id.
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

/// Moments of one tensor.
#[derive(Debug)]
struct State {
    m: DeviceVec<u8>,
    v: DeviceVec<u8>,
    n: u64,
    age: u64,
}

/// AdamW whose parameters, gradients and moments are on a GPU: the bits of [`optim::AdamW`](crate::optim::AdamW).
///
/// A step enqueues one kernel a tensor on the stream of its [`Gpu`] and does not wait.
#[derive(Debug)]
pub struct AdamW {
    gpu: Gpu,
    config: AdamWConfig,
    format: StateFormat,
    states: Rounding,
    parameters: Rounding,
    step: u64,
    tensors: BTreeMap<u64, State>,
}

impl AdamW {
    /// As [`optim::AdamW::new`](crate::optim::AdamW::new).
    ///
    /// # Errors
    /// [`CudaError::Optim`] for hyper-parameters out of range, [`CudaError::Unsupported`] for [`Rounding::SrStates`], for moments
    /// in blocks, and for two moments that are stored differently.
    pub fn new(
        gpu: &Gpu,
        config: AdamWConfig,
        states: impl Into<States>,
        rounding: Rounding,
    ) -> Result<Self, CudaError> {
        config.check()?;
        let format = unscaled(states.into())?;
        supported("rounding", rounding)?;
        Ok(Self {
            gpu: gpu.clone(),
            config,
            format,
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
        let moment = |bytes: &DeviceVec<u8>| {
            let (n, bytes) = (state.n as usize, self.gpu.download(bytes)?);
            let length =
                CudaError::Length { argument: "state", expected: self.format.bytes(n) as u64, got: bytes.len() as u64 };
            Moment::from_bytes(self.format, n, &bytes).ok_or(length)
        };
        Ok(Some((moment(&state.m)?, moment(&state.v)?)))
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
        self.step_tensors(&mut [DeviceParameter { id: 0, params, grads }])
    }

    /// Steps tensors, one kernel each. Their order changes no bit.
    ///
    /// # Errors
    /// [`CudaError::Length`], [`CudaError::WrongDevice`], [`CudaError::OutOfMemory`] for new moments, and
    /// [`CudaError::Optim`] for two tensors of one id. Nothing is changed then.
    pub fn step_tensors<P: Source + Real, G: Source + Real>(
        &mut self,
        tensors: &mut [DeviceParameter<'_, P, G>],
    ) -> Result<(), CudaError> {
        let mut memory = Vec::with_capacity(tensors.len());
        for tensor in &mut *tensors {
            self.gpu.own(tensor.params, "params")?;
            self.gpu.own(tensor.grads, "grads")?;
            let (n, got) = (tensor.params.len() as u64, tensor.grads.len() as u64);
            if n != got {
                return Err(CudaError::Length { argument: "grads", expected: n, got });
            }
            memory.push(StepMemory {
                id: tensor.id,
                params: tensor.params.address(),
                params_type: P::TYPE,
                grads: tensor.grads.address(),
                grads_type: G::TYPE,
                n,
            });
        }
        // SAFETY: the buffers live on this device and are as long as they say; parameters are borrowed mutably.
        unsafe { self.step_raw(&memory) }
    }

    /// Steps somebody else's memory in place, one kernel a tensor, on the stream of the [`Gpu`]. Only enqueues work.
    ///
    /// # Safety
    /// Addresses are device memory of this device, as long as [`StepMemory`] says until the work is done; nothing else
    /// writes them, or reads parameters, in the meantime. Gradients were written by work that this stream comes after.
    ///
    /// # Errors
    /// [`CudaError::Misaligned`] and [`CudaError::Overlap`] for addresses that cannot be, [`CudaError::Length`] for a tensor
    /// of another length than before, and as [`step_tensors`](Self::step_tensors). Nothing is changed then. An error that the
    /// driver reports at a launch leaves the tensors before it stepped and the step counted.
    pub unsafe fn step_raw(&mut self, tensors: &[StepMemory]) -> Result<(), CudaError> {
        self.prepare(tensors)?;
        self.step += 1;
        for tensor in tensors {
            let Some(state) = self.tensors.get_mut(&tensor.id) else { continue };
            let scalars = self.config.scalars(state.age + 1)?;
            state.age += 1;
            let (m, v) = (state.m.address(), state.v.address());
            // SAFETY: promised by the caller; the moments were made for this many elements.
            unsafe { self.launch(tensor, m, v, &scalars) }?;
        }
        Ok(())
    }

    /// Checks every tensor, then makes the moments that are missing.
    fn prepare(&mut self, tensors: &[StepMemory]) -> Result<(), CudaError> {
        let mut seen = BTreeMap::new();
        for tensor in tensors {
            let StepMemory { id, params, params_type, grads, grads_type, n } = *tensor;
            aligned("params", params, params_type.bytes())?;
            aligned("grads", grads, grads_type.bytes())?;
            disjoint(&[
                ("params", params, n.saturating_mul(params_type.bytes())),
                ("grads", grads, n.saturating_mul(grads_type.bytes())),
            ])?;
            if let Some(state) = self.tensors.get(&id).filter(|state| state.n != n) {
                return Err(CudaError::Length { argument: "params", expected: state.n, got: n });
            }
            if seen.insert(id, ()).is_some() {
                let name = format!("{id}");
                return Err(OptimError::SameTensor { first: name.clone(), second: name, id }.into());
            }
        }
        let mut made = Vec::new();
        for tensor in tensors.iter().filter(|tensor| !self.tensors.contains_key(&tensor.id)) {
            let n = usize::try_from(tensor.n).map_err(|_| CudaError::OutOfMemory { bytes: usize::MAX })?;
            let bytes = self.format.bytes(n);
            let state = State { m: self.gpu.zeroed(bytes)?, v: self.gpu.zeroed(bytes)?, n: tensor.n, age: 0 };
            made.push((tensor.id, state));
        }
        self.tensors.extend(made);
        Ok(())
    }

    /// # Safety
    /// As [`step_raw`](Self::step_raw), with moments at `m` and `v`.
    unsafe fn launch(&self, tensor: &StepMemory, m: u64, v: u64, scalars: &Scalars) -> Result<(), CudaError> {
        let StepMemory { id, params, params_type, grads, grads_type, n } = *tensor;
        let rounded = |name: &str, rounding| match rounding {
            Rounding::Stochastic { .. } => format!("{name}s"),
            _ => format!("{name}n"),
        };
        let (module, params_name, each) = match params_type {
            ElementType::F32 => ("adamw_f32", "f32".into(), 4),
            ElementType::Bf16 => ("adamw_bf16", rounded("bf16", self.parameters), 8),
            ElementType::Fp16 => ("adamw_fp16", rounded("fp16", self.parameters), 8),
        };
        let (moments_name, moment_size) = match self.format {
            StateFormat::F32 => ("f32".into(), 4),
            StateFormat::Bf16 => (rounded("bf16", self.states), 2),
            StateFormat::Blocks(_) => return Err(NO_BLOCKS),
        };
        let kernel = format!("adamw_{params_name}_{}_{moments_name}", grads_type.name());
        let key = |rounding, role: Role| match rounding {
            Rounding::Stochastic { seed } => Some((seed, self.step, id, role.number())),
            _ => None,
        };
        let draws = [
            key(self.parameters, Role::Parameter),
            key(self.states, Role::FirstMoment),
            key(self.states, Role::SecondMoment),
        ];
        for piece in pieces(0, n, 2) {
            let [p, g] = [(params, params_type), (grads, grads_type)].map(|(at, of)| at + piece.start * of.bytes());
            let [m, v] = [m, v].map(|at| at + piece.start * moment_size);
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
                    && [m, v].iter().all(|at| at.is_multiple_of(4 * moment_size)))
                .into(),
                keys: draws.map(|draw| keys(draw, piece.high)),
                scalars: *scalars,
            };
            // SAFETY: the kernel of this name steps memory of these types; memory is promised by the caller.
            unsafe { launch(&self.gpu, module, &kernel, piece.len, each, &arguments) }?;
        }
        Ok(())
    }
}

const NO_BLOCKS: CudaError =
    CudaError::Unsupported { argument: "states", reason: "kernels have both moments in f32 or both in BF16" };

fn unscaled(States { m, v }: States) -> Result<StateFormat, CudaError> {
    match m {
        StateFormat::F32 | StateFormat::Bf16 if m == v => Ok(m),
        _ => Err(NO_BLOCKS),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_without_kernels_are_refused() {
        for format in [StateFormat::F32, StateFormat::Bf16] {
            assert_eq!(unscaled(format.into()).unwrap(), format);
        }
        let mixed = States { m: StateFormat::Bf16, v: StateFormat::F32 };
        for states in [States::FP4, StateFormat::E4M3.into(), States { m: StateFormat::Bf16, ..States::FP4 }, mixed] {
            let message = "states: not supported on a GPU: kernels have both moments in f32 or both in BF16";
            assert_eq!(unscaled(states).unwrap_err().to_string(), message);
        }
    }
}
