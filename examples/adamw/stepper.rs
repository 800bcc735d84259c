//! The optimizer on the CPU or on a GPU, behind one face.

use std::error::Error;

#[cfg(feature = "cuda")]
use halfulp::cuda::{self, CudaError, DeviceParameter, DeviceVec, Gpu};
use halfulp::optim::{AdamW, AdamWConfig, Moment, Parameter, Real, Rounding, States};
use halfulp::random::tensor_id;
use halfulp::{bf16, nearest_cast};

use crate::digest::Digest;
use crate::model;

/// A type of parameters.
#[cfg(feature = "cuda")]
pub(crate) trait Stored: Value + cuda::Source {}
#[cfg(feature = "cuda")]
impl<T: Value + cuda::Source> Stored for T {}
/// A type of parameters.
#[cfg(not(feature = "cuda"))]
pub(crate) trait Stored: Value {}
#[cfg(not(feature = "cuda"))]
impl<T: Value> Stored for T {}

pub(crate) trait Value: Real {
    fn encode(values: Vec<f32>) -> Vec<Self>;
    fn decode(stored: &[Self]) -> Vec<f32>;
}

impl Value for f32 {
    fn encode(values: Vec<f32>) -> Vec<Self> {
        values
    }
    fn decode(stored: &[Self]) -> Vec<f32> {
        stored.to_vec()
    }
}

impl Value for bf16 {
    fn encode(values: Vec<f32>) -> Vec<Self> {
        nearest_cast(&values)
    }
    fn decode(stored: &[Self]) -> Vec<f32> {
        halfulp::decode(stored)
    }
}

/// Where steps are made.
pub(crate) enum Device {
    Cpu,
    #[cfg(feature = "cuda")]
    Gpu(Gpu),
}

impl Device {
    /// The first GPU if there is one. Without a driver or a device one line says so, and the CPU steps.
    pub(crate) fn find(cpu: bool) -> Result<Self, Box<dyn Error>> {
        #[cfg(feature = "cuda")]
        if !cpu {
            match Gpu::open(0) {
                Ok(gpu) => return Ok(Self::Gpu(gpu)),
                Err(
                    error @ (CudaError::NoDriver { .. } | CudaError::StubDriver { .. } | CudaError::NoDevice { .. }),
                ) => eprintln!("adamw: {error}; stepping on the CPU"),
                Err(error) => return Err(error.into()),
            }
        }
        let _ = cpu;
        Ok(Self::Cpu)
    }

    pub(crate) fn name(&self) -> Result<String, Box<dyn Error>> {
        match self {
            Self::Cpu => Ok("the CPU".into()),
            #[cfg(feature = "cuda")]
            Self::Gpu(gpu) => Ok(gpu.name()?),
        }
    }
}

/// Parameters with their optimizer.
pub(crate) struct Stepper<P> {
    params: Vec<Vec<P>>,
    optimizer: Optimizer<P>,
}

enum Optimizer<P> {
    Cpu(AdamW, std::marker::PhantomData<P>),
    #[cfg(feature = "cuda")]
    Gpu {
        gpu: Gpu,
        adamw: Box<cuda::AdamW>,
        params: Vec<DeviceVec<P>>,
    },
}

impl<P: Stored> Stepper<P> {
    pub(crate) fn new(
        device: &Device,
        config: AdamWConfig,
        states: States,
        rounding: Rounding,
        initial: Vec<Vec<f32>>,
    ) -> Result<Self, Box<dyn Error>> {
        let params: Vec<Vec<P>> = initial.into_iter().map(P::encode).collect();
        let optimizer = match device {
            Device::Cpu => Optimizer::Cpu(AdamW::new(config, states, rounding)?, std::marker::PhantomData),
            #[cfg(feature = "cuda")]
            Device::Gpu(gpu) => Optimizer::Gpu {
                gpu: gpu.clone(),
                adamw: Box::new(cuda::AdamW::new(gpu, config, states, rounding)?),
                params: params.iter().map(|params| gpu.upload(params)).collect::<Result<_, _>>()?,
            },
        };
        Ok(Self { params, optimizer })
    }

    /// The parameters as f32 values.
    pub(crate) fn values(&self) -> Vec<Vec<f32>> {
        self.params.iter().map(|params| P::decode(params)).collect()
    }

    pub(crate) fn step(&mut self, grads: &[Vec<f32>]) -> Result<(), Box<dyn Error>> {
        match &mut self.optimizer {
            Optimizer::Cpu(adamw, _) => {
                let tensors = model::names().zip(&mut self.params).zip(grads);
                let mut tensors: Vec<_> =
                    tensors.map(|((name, params), grads)| Parameter::named(name, params, grads)).collect();
                adamw.step_tensors(&mut tensors)?;
            }
            #[cfg(feature = "cuda")]
            Optimizer::Gpu { gpu, adamw, params } => {
                let grads = grads.iter().map(|grads| gpu.upload(grads)).collect::<Result<Vec<_>, _>>()?;
                let tensors = model::names().zip(&mut *params).zip(&grads);
                let mut tensors: Vec<_> =
                    tensors.map(|((name, params), grads)| DeviceParameter::named(name, params, grads)).collect();
                adamw.step_tensors(&mut tensors)?;
                for (host, device) in self.params.iter_mut().zip(params) {
                    *host = gpu.download(device)?;
                }
            }
        }
        Ok(())
    }

    /// First and second moment of each tensor.
    pub(crate) fn moments(&self) -> Result<Vec<[Moment; 2]>, Box<dyn Error>> {
        let mut moments = Vec::new();
        for name in model::names() {
            let id = tensor_id(name);
            let pair = match &self.optimizer {
                Optimizer::Cpu(adamw, _) => adamw.moments(id).map(|(m, v)| (m.clone(), v.clone())),
                #[cfg(feature = "cuda")]
                Optimizer::Gpu { adamw, .. } => adamw.moments(id)?,
            };
            let (m, v) = pair.ok_or_else(|| format!("{name}: no step yet"))?;
            moments.push([m, v]);
        }
        Ok(moments)
    }

    /// Of all parameters and moments.
    pub(crate) fn digest(&self) -> Result<u64, Box<dyn Error>> {
        let mut digest = Digest::default();
        for (params, moments) in self.params.iter().zip(self.moments()?) {
            digest.take(params);
            for moment in &moments {
                digest.take_moment(moment)?;
            }
        }
        Ok(digest.value())
    }
}
