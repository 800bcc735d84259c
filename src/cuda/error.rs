//! What can go wrong on the way to a GPU and on it.

use alloc::string::{String, ToString};

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;

use crate::cast::CastError;
use crate::optim::{NormError, OptimError};

/// Why a GPU call was refused or failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// No driver library was found.
    #[error("no CUDA driver: none of {tried} could be loaded; install an NVIDIA driver, no toolkit is needed")]
    NoDriver {
        /// Names that were tried.
        tried: &'static str,
    },
    /// A library of the driver's name without the driver's functions, as toolkits bring to link against.
    #[error("no CUDA driver: {library} is a stub without `cuInit`; install an NVIDIA driver, no toolkit is needed")]
    StubDriver {
        /// The library found.
        library: &'static str,
    },
    /// The driver found no device.
    #[error("no CUDA device: the driver reports none ({reason})")]
    NoDevice {
        /// What the driver said.
        reason: String,
    },
    /// No device of this number.
    #[error("ordinal: expected below {count}, the number of devices, got {ordinal}")]
    Ordinal {
        /// What came.
        ordinal: usize,
        /// Number of devices.
        count: usize,
    },
    /// The driver cannot read the kernels.
    #[error(
        "kernels: expected a driver that reads PTX {ptx}, which CUDA {needed} and later do, got a driver for CUDA {driver}"
    )]
    PtxTooNew {
        /// PTX version of the kernels.
        ptx: &'static str,
        /// First CUDA version that reads it.
        needed: &'static str,
        /// CUDA version of the driver.
        driver: String,
    },
    /// Something that only some devices have.
    #[error("{argument}: expected a device of compute capability {expected}, got {}.{}", got.0, got.1)]
    Capability {
        /// What was asked for.
        argument: &'static str,
        /// Capabilities that have it.
        expected: &'static str,
        /// Major and minor capability of the device.
        got: (u32, u32),
    },
    /// NVRTC was asked for and is not there.
    #[error(
        "no NVRTC: expected one of {tried} with its functions, got: {reason}; only kernels compiled at run time need it"
    )]
    NoNvrtc {
        /// Names that were tried.
        tried: &'static str,
        /// What loading said.
        reason: String,
    },
    /// NVRTC is too old, or too new, for the device.
    #[error("architecture: expected one that NVRTC {version} compiles for ({supported}), got {architecture}")]
    Architecture {
        /// That of the device, as `sm_90`.
        architecture: String,
        /// Version of NVRTC.
        version: String,
        /// What it compiles for.
        supported: String,
    },
    /// NVRTC refused a module.
    #[error("module {module} for {architecture}: NVRTC {version} says {error}: {log}")]
    Compile {
        /// The module.
        module: String,
        /// What it was compiled for, as `sm_90`.
        architecture: String,
        /// Version of NVRTC.
        version: String,
        /// Name of the error.
        error: String,
        /// The compiler's log.
        log: String,
    },
    /// Device memory ran out.
    #[error("out of device memory: expected room for {bytes} bytes")]
    OutOfMemory {
        /// What was asked for.
        bytes: usize,
    },
    /// Memory of one device handed to another.
    #[error("{argument}: expected memory of device {expected}, got memory of device {got}")]
    WrongDevice {
        /// The argument.
        argument: &'static str,
        /// Device of the call.
        expected: usize,
        /// Device of the memory.
        got: usize,
    },
    /// Memory of one stream handed to another.
    #[error(
        "{argument}: expected memory made on this stream, got memory of another, whose work may come after; order the streams and \
         hand over addresses"
    )]
    WrongStream {
        /// The argument.
        argument: &'static str,
    },
    /// A wrong number of elements.
    #[error("{argument}: expected {expected} elements, got {got}")]
    Length {
        /// The argument.
        argument: &'static str,
        /// What is needed.
        expected: u64,
        /// What came.
        got: u64,
    },
    /// Two buffers that must not overlap do.
    #[error(
        "{first} and {second}: expected memory that does not overlap, got {first_at:#x} and {second_at:#x}, {bytes} bytes from the former"
    )]
    Overlap {
        /// One argument.
        first: &'static str,
        /// The other.
        second: &'static str,
        /// Address of the one.
        first_at: u64,
        /// Address of the other.
        second_at: u64,
        /// Length of the one in bytes.
        bytes: u64,
    },
    /// A pointer that is not a multiple of its element's size.
    #[error("{argument}: expected an address that is a multiple of {align}, got {address:#x}")]
    Misaligned {
        /// The argument.
        argument: &'static str,
        /// Size of an element.
        align: u64,
        /// What came.
        address: u64,
    },
    /// Something that the CPU can do and kernels cannot.
    #[error("{argument}: not supported on a GPU: {reason}")]
    Unsupported {
        /// The argument.
        argument: &'static str,
        /// Why.
        reason: &'static str,
    },
    /// A cast's own refusal.
    #[error(transparent)]
    Cast(#[from] CastError),
    /// An optimizer's own refusal.
    #[error(transparent)]
    Optim(#[from] OptimError),
    /// A reset schedule's own refusal.
    #[cfg(feature = "stall")]
    #[error(transparent)]
    Reset(#[from] crate::optim::ResetError),
    /// A norm's own refusal.
    #[error(transparent)]
    Norm(#[from] NormError),
    /// Anything else that the driver reports.
    #[error("CUDA driver: {name}: {message}")]
    Driver {
        /// Name of the error.
        name: String,
        /// What the driver says of it.
        message: String,
    },
}

impl From<DriverError> for CudaError {
    fn from(error: DriverError) -> Self {
        let text = |text: Result<&core::ffi::CStr, DriverError>, otherwise: &str| {
            text.map_or_else(|_| otherwise.to_string(), |text| text.to_string_lossy().into_owned())
        };
        if error.0 == CUresult::CUDA_ERROR_NO_DEVICE {
            return Self::NoDevice { reason: text(error.error_name(), "CUDA_ERROR_NO_DEVICE") };
        }
        Self::Driver {
            name: text(error.error_name(), "unknown error"),
            message: text(error.error_string(), "no message"),
        }
    }
}
