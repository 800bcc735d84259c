//! The same verbs where the memory is on a GPU: the bits of the CPU, at the speed of device memory.
//!
//! Needs an NVIDIA driver at run time and nothing at build time: kernels are shipped as PTX, and the driver is loaded when a
//! [`Gpu`] is opened. Where there is none, [`Gpu::open`] says so in a typed error.
//!
//! ```no_run
//! use halfulp::{Draw, bf16, cuda::Gpu, sr_cast};
//! let gpu = Gpu::open(0)?;
//! let x = vec![1.001f32; 1 << 20];
//! let on_device = gpu.upload(&x)?;
//! let y = gpu.sr_cast::<bf16, _>(&on_device, Draw::seeded(7))?;
//! assert_eq!(gpu.download(&y)?, sr_cast::<bf16>(&x, Draw::seeded(7))); // the same bits
//! # Ok::<(), halfulp::cuda::CudaError>(())
//! ```
//!
//! The kernels that a [`Gpu`] takes are those shipped, unless it was asked for others by name: compiled from their sources for
//! the device at hand (`Gpu::compiled`, feature `nvrtc`), with the same bits; or, for casts on two architectures, the
//! rounding of the hardware ([`Gpu::hardware_sr_cast`]), with others.
//!
//! Calls enqueue work on one stream and return; only [`Gpu::download`] and [`Gpu::synchronize`] wait. Memory that belongs to
//! somebody else, and somebody else's stream, come in through the `unsafe` entry points, as structs of raw addresses.

#[cfg(test)]
mod block_tests;
mod blocks;
mod cast;
#[cfg(test)]
mod emulated;
mod error;
mod gpu;
mod hardware;
#[cfg(test)]
mod host_tests;
#[cfg(test)]
mod kernel_tests;
mod launch;
mod norm;
#[cfg(feature = "nvrtc")]
pub mod nvrtc;
mod optimizer;
#[cfg(test)]
mod optimizer_tests;
mod plan;

pub use blocks::{BlocksMemory, DeviceBlocks};
pub use cast::{CastMemory, DevicePacked, Source};
pub use error::CudaError;
pub use gpu::{DeviceVec, Gpu};
pub use launch::{ElementType, SOURCES};
pub use norm::{DeviceGradients, DeviceNorm, GradientMemory, NormResult};
pub use optimizer::{DeviceParameter, DeviceParameters, Optimizer, StepMemory, StepPlan, StepProgress};

use crate::optim::{AdEMAMixConfig, AdamConfig, AdamWConfig, LambConfig, LionConfig, SgdConfig};

/// [`optim::AdamW`](crate::optim::AdamW) on a GPU.
pub type AdamW = Optimizer<AdamWConfig>;
/// [`optim::Adam`](crate::optim::Adam) on a GPU.
pub type Adam = Optimizer<AdamConfig>;
/// [`optim::Sgd`](crate::optim::Sgd) on a GPU.
pub type Sgd = Optimizer<SgdConfig>;
/// [`optim::Lion`](crate::optim::Lion) on a GPU.
pub type Lion = Optimizer<LionConfig>;
/// [`optim::AdEMAMix`](crate::optim::AdEMAMix) on a GPU.
pub type AdEMAMix = Optimizer<AdEMAMixConfig>;
/// [`optim::Lamb`](crate::optim::Lamb) on a GPU.
pub type Lamb = Optimizer<LambConfig>;
