//! A device, its memory, and how to get there without a panic.

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;
use core::marker::PhantomData;
use core::ops::{Bound, Range, RangeBounds};
use std::sync::{Arc, OnceLock};

use bytemuck::Pod;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, result, sys};

use super::CudaError;
use super::launch::Modules;

/// A CUDA device and a stream on it.
///
/// Cheap to clone. Work of one `Gpu` runs in order.
#[derive(Clone)]
pub struct Gpu {
    backend: Backend,
}

#[derive(Clone)]
enum Backend {
    Cuda {
        context: Arc<CudaContext>,
        stream: Arc<CudaStream>,
        modules: Arc<Modules>,
    },
    /// The host in place of a device, in tests.
    #[cfg(test)]
    Emulated(std::rc::Rc<super::emulated::Emulated>),
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu").field("ordinal", &self.ordinal()).finish_non_exhaustive()
    }
}

#[cfg(target_os = "windows")]
const LIBRARIES: [&str; 1] = ["nvcuda.dll"];
#[cfg(target_os = "windows")]
const TRIED: &str = "nvcuda.dll";
#[cfg(not(target_os = "windows"))]
const LIBRARIES: [&str; 2] = ["libcuda.so", "libcuda.so.1"];
#[cfg(not(target_os = "windows"))]
const TRIED: &str = "libcuda.so, libcuda.so.1";

/// Finds out, once, whether there is a driver: a library of its name, with its entry point, that initialises.
///
/// The wrapper underneath panics in the first two cases, so they are tried here first.
fn driver() -> Result<(), CudaError> {
    static FOUND: OnceLock<Result<(), CudaError>> = OnceLock::new();
    FOUND
        .get_or_init(|| {
            // In the order of the wrapper, which takes the first that loads.
            let loaded = LIBRARIES.into_iter().find_map(|name| {
                // SAFETY: loading the driver runs its initialisers, which is what a user of CUDA asks for.
                unsafe { libloading::Library::new(name) }.ok().map(|library| (name, library))
            });
            let Some((name, library)) = loaded else { return Err(CudaError::NoDriver { tried: TRIED }) };
            // SAFETY: the symbol is looked up and not called.
            if unsafe { library.get::<*const ()>(b"cuInit\0") }.is_err() {
                return Err(CudaError::StubDriver { library: name });
            }
            Ok(result::init()?)
        })
        .clone()
}

impl Gpu {
    /// Opens a device, with a stream of its own.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`], [`CudaError::StubDriver`] or [`CudaError::NoDevice`] where there is nothing to open,
    /// [`CudaError::Ordinal`] for a number that no device has, [`CudaError::Driver`] for anything else.
    pub fn open(ordinal: usize) -> Result<Self, CudaError> {
        driver()?;
        let count = result::device::get_count()? as usize;
        if count == 0 {
            return Err(CudaError::NoDevice { reason: "a count of 0".to_string() });
        }
        if ordinal >= count {
            return Err(CudaError::Ordinal { ordinal, count });
        }
        let context = CudaContext::new(ordinal)?;
        // SAFETY: every buffer of this crate stays on the stream it was made on, and other memory is ordered by its owner,
        // so no event need be recorded; a captured graph could not hold them either.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream()?;
        Ok(Self::cuda(context, stream, Arc::default()))
    }

    /// Opens a device whose kernels are compiled for it at run time, from the sources in this crate: the bits of
    /// [`open`](Self::open), by a compiler that knows the device's architecture. Needs NVRTC, of the CUDA toolkit, where
    /// the dynamic linker finds it. Each module is compiled when first used, in one to three seconds.
    ///
    /// # Errors
    /// [`CudaError::NoNvrtc`], [`CudaError::Architecture`] where NVRTC does not know the device, and as [`open`](Self::open).
    /// A later call that is the first to use a module gives [`CudaError::Compile`] if NVRTC refuses it.
    #[cfg(feature = "nvrtc")]
    pub fn compiled(ordinal: usize) -> Result<Self, CudaError> {
        let gpu = Self::open(ordinal)?;
        super::nvrtc::supports(gpu.capability()?)?;
        let modules = Arc::new(Modules::of(super::launch::Origin::Compiled));
        Ok(Self::cuda(gpu.context().clone(), gpu.stream().clone(), modules))
    }

    /// The same device on somebody else's stream, which is not destroyed when this is dropped.
    ///
    /// # Safety
    /// `stream` is a `CUstream` (or `cudaStream_t`) of this device's primary context and outlives the result and all that is
    /// made with it. Memory that work on other streams writes or reads is ordered by the caller.
    #[must_use]
    pub unsafe fn on_stream(&self, stream: *mut core::ffi::c_void) -> Self {
        // SAFETY: promised by the caller.
        let stream = unsafe { self.context().wrap_borrowed_stream(stream.cast()) };
        Self::cuda(self.context().clone(), stream, self.shared_modules().clone())
    }

    fn cuda(context: Arc<CudaContext>, stream: Arc<CudaStream>, modules: Arc<Modules>) -> Self {
        Self { backend: Backend::Cuda { context, stream, modules } }
    }

    /// The host in place of a device.
    #[cfg(test)]
    pub(super) fn emulated(device: super::emulated::Emulated) -> Self {
        Self { backend: Backend::Emulated(device.into()) }
    }

    #[cfg(test)]
    pub(super) fn emulation(&self) -> Option<&std::rc::Rc<super::emulated::Emulated>> {
        match &self.backend {
            Backend::Emulated(device) => Some(device),
            Backend::Cuda { .. } => None,
        }
    }

    /// Number of the device.
    #[must_use]
    pub fn ordinal(&self) -> usize {
        match &self.backend {
            Backend::Cuda { context, .. } => context.ordinal(),
            #[cfg(test)]
            Backend::Emulated(_) => 0,
        }
    }

    /// Name of the device.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn name(&self) -> Result<String, CudaError> {
        Ok(self.context().name()?)
    }

    /// Major and minor compute capability of the device, as (9, 0).
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn capability(&self) -> Result<(u32, u32), CudaError> {
        let (major, minor) = self.context().compute_capability()?;
        Ok((major.unsigned_abs(), minor.unsigned_abs()))
    }

    /// Whether what is enqueued goes into a graph.
    pub(super) fn is_capturing(&self) -> Result<bool, CudaError> {
        match &self.backend {
            Backend::Cuda { stream, .. } => {
                Ok(stream.capture_status()? != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
            }
            #[cfg(test)]
            Backend::Emulated(_) => Ok(false),
        }
    }

    /// Number of multiprocessors of the device.
    pub(super) fn multiprocessors(&self) -> Result<u32, CudaError> {
        match &self.backend {
            Backend::Cuda { context, .. } => {
                let count = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
                Ok(context.attribute(count)?.unsigned_abs())
            }
            #[cfg(test)]
            Backend::Emulated(_) => Ok(1),
        }
    }

    /// Waits until all work of this stream is done.
    ///
    /// # Errors
    /// [`CudaError::Driver`], also for what earlier work ran into.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        match &self.backend {
            Backend::Cuda { stream, .. } => Ok(stream.synchronize()?),
            #[cfg(test)]
            Backend::Emulated(_) => Ok(()),
        }
    }

    /// The stream, to enqueue work of one's own in order with this crate's.
    #[must_use]
    pub fn stream(&self) -> &Arc<CudaStream> {
        match &self.backend {
            Backend::Cuda { stream, .. } => stream,
            #[cfg(test)]
            Backend::Emulated(_) => unreachable!("an emulation has no stream"),
        }
    }

    pub(super) fn modules(&self) -> &Modules {
        self.shared_modules()
    }

    /// What is known of the device's approximations; an emulation is asked every time.
    pub(super) fn seeds(&self) -> Option<&OnceLock<bool>> {
        match &self.backend {
            Backend::Cuda { modules, .. } => Some(&modules.seeds),
            #[cfg(test)]
            Backend::Emulated(_) => None,
        }
    }

    fn shared_modules(&self) -> &Arc<Modules> {
        match &self.backend {
            Backend::Cuda { modules, .. } => modules,
            #[cfg(test)]
            Backend::Emulated(_) => unreachable!("an emulation has modules of its own"),
        }
    }

    pub(super) fn context(&self) -> &Arc<CudaContext> {
        match &self.backend {
            Backend::Cuda { context, .. } => context,
            #[cfg(test)]
            Backend::Emulated(_) => unreachable!("an emulation has no context"),
        }
    }

    /// Memory of zero bits for `len` elements.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub fn zeroed<T: Pod>(&self, len: usize) -> Result<DeviceVec<T>, CudaError> {
        let bytes = len.checked_mul(size_of::<T>()).ok_or(CudaError::OutOfMemory { bytes: usize::MAX })?;
        let memory = match &self.backend {
            // A driver refuses allocations of nothing; one byte is never touched.
            Backend::Cuda { stream, .. } => {
                Memory::Cuda(stream.alloc_zeros::<u8>(bytes.max(1)).map_err(|error| match error.0 {
                    sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => CudaError::OutOfMemory { bytes },
                    _ => error.into(),
                })?)
            }
            #[cfg(test)]
            Backend::Emulated(device) => Memory::Emulated(device.clone(), device.put(&alloc::vec![0u8; bytes], 0)),
        };
        Ok(DeviceVec { memory, len, element: PhantomData })
    }

    /// Sets a range of bytes, after all earlier work of the stream.
    pub(super) fn fill(
        &self,
        memory: &mut DeviceVec<u8>,
        range: impl RangeBounds<usize>,
        byte: u8,
    ) -> Result<(), CudaError> {
        let Range { start, end } = range_of(range, memory.len);
        if start == end {
            return Ok(());
        }
        // SAFETY: the range lies in memory of this device, which is borrowed mutably.
        unsafe { self.fill_raw(memory.address() + start as u64, end - start, byte) }
    }

    /// [`fill`](Self::fill) of somebody else's memory.
    ///
    /// # Safety
    /// So many bytes are there to be written, by this stream.
    pub(super) unsafe fn fill_raw(&self, at: u64, bytes: usize, byte: u8) -> Result<(), CudaError> {
        match &self.backend {
            _ if bytes == 0 => {}
            Backend::Cuda { context, stream, .. } => {
                context.bind_to_thread()?;
                // SAFETY: promised by the caller.
                unsafe { result::memset_d8_async(at, byte, bytes, stream.cu_stream()) }?;
            }
            #[cfg(test)]
            Backend::Emulated(device) => device.fill(at, bytes, byte),
        }
        Ok(())
    }

    /// Sets the words from a byte on, a multiple of 4, as [`fill`](Self::fill).
    pub(super) fn fill_words(&self, memory: &mut DeviceVec<u8>, start: usize, word: u32) -> Result<(), CudaError> {
        let words = (memory.len - start) / 4;
        if words == 0 {
            return Ok(());
        }
        match &self.backend {
            Backend::Cuda { context, stream, .. } => {
                context.bind_to_thread()?;
                let at = memory.address() + start as u64;
                // SAFETY: the range lies in memory of this device, which is borrowed mutably.
                unsafe { sys::cuMemsetD32Async(at, word, words, stream.cu_stream()) }.result()?;
            }
            #[cfg(test)]
            Backend::Emulated(device) => device.edit(memory.address(), |bytes| {
                bytes[start..].chunks_exact_mut(4).for_each(|to| to.copy_from_slice(&word.to_le_bytes()));
            }),
        }
        Ok(())
    }

    /// Zeroes elements from one on, as [`fill`](Self::fill).
    pub(super) fn zero<T: Pod>(&self, to: &mut DeviceVec<T>, start: usize, len: usize) -> Result<(), CudaError> {
        same_length("to", start + len, to.len.min(start + len))?;
        let at = to.address() + (start * size_of::<T>()) as u64;
        // SAFETY: the range lies in memory of this device, which is borrowed mutably.
        unsafe { self.fill_raw(at, len * size_of::<T>(), 0) }
    }

    /// Copies to the beginning of memory that is no shorter, after all earlier work of the stream.
    pub(super) fn copy<T: Pod>(&self, from: &DeviceVec<T>, to: &mut DeviceVec<T>) -> Result<(), CudaError> {
        same_length("to", from.len, from.len.min(to.len))?;
        let bytes = from.len * size_of::<T>();
        match &self.backend {
            Backend::Cuda { context, stream, .. } => {
                context.bind_to_thread()?;
                // SAFETY: both lie on this device, the one that is written is borrowed mutably.
                unsafe { result::memcpy_dtod_async(to.address(), from.address(), bytes, stream.cu_stream()) }?;
            }
            #[cfg(test)]
            Backend::Emulated(device) => {
                let values = device.get::<u8>(from.address());
                device.edit(to.address(), |all| all[..bytes].copy_from_slice(&values));
            }
        }
        Ok(())
    }

    /// Copies a slice to new memory on the device.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub fn upload<T: Pod>(&self, values: &[T]) -> Result<DeviceVec<T>, CudaError> {
        let mut on_device = self.zeroed(values.len())?;
        self.upload_into(values, &mut on_device)?;
        Ok(on_device)
    }

    /// Copies a slice to existing memory of its length on the device, after all earlier work of the stream.
    ///
    /// # Errors
    /// [`CudaError::Length`], [`CudaError::WrongDevice`]; nothing is copied then.
    pub fn upload_into<T: Pod>(&self, values: &[T], to: &mut DeviceVec<T>) -> Result<(), CudaError> {
        self.own(to, "to")?;
        same_length("to", values.len(), to.len)?;
        if !values.is_empty() {
            match (&self.backend, &mut to.memory) {
                (Backend::Cuda { stream, .. }, Memory::Cuda(memory)) => {
                    stream.memcpy_htod(bytemuck::cast_slice::<T, u8>(values), memory)?;
                }
                #[cfg(test)]
                (_, memory) => memory.emulation().edit(memory.address(), |bytes| {
                    bytes.copy_from_slice(bytemuck::cast_slice::<T, u8>(values));
                }),
            }
        }
        Ok(())
    }

    /// Copies to a new vector on the host, after all earlier work of the stream.
    ///
    /// # Errors
    /// [`CudaError::WrongDevice`], or [`CudaError::Driver`] for what earlier work ran into.
    pub fn download<T: Pod>(&self, values: &DeviceVec<T>) -> Result<Vec<T>, CudaError> {
        let mut out = bytemuck::allocation::zeroed_vec(values.len);
        self.download_into(values, &mut out)?;
        Ok(out)
    }

    /// Copies to a slice of the same length on the host, after all earlier work of the stream, and waits for it.
    ///
    /// # Errors
    /// [`CudaError::Length`] and [`CudaError::WrongDevice`], where nothing is copied, or [`CudaError::Driver`] for what
    /// earlier work ran into.
    pub fn download_into<T: Pod>(&self, values: &DeviceVec<T>, to: &mut [T]) -> Result<(), CudaError> {
        self.own(values, "values")?;
        same_length("to", values.len, to.len())?;
        if !to.is_empty() {
            match (&self.backend, &values.memory) {
                (Backend::Cuda { stream, .. }, Memory::Cuda(memory)) => {
                    let bytes = memory.slice(..values.len * size_of::<T>());
                    stream.memcpy_dtoh(&bytes, bytemuck::cast_slice_mut::<T, u8>(to))?;
                }
                #[cfg(test)]
                (_, memory) => bytemuck::cast_slice_mut::<T, u8>(to)
                    .copy_from_slice(&memory.emulation().get::<u8>(memory.address())),
            }
        }
        self.synchronize()
    }

    pub(super) fn own<T>(&self, values: &DeviceVec<T>, argument: &'static str) -> Result<(), CudaError> {
        self.own_place(values.place(), argument)
    }

    /// Refuses memory of another device or of another stream, after whose work this one's does not come.
    pub(super) fn own_place(&self, (got, stream): Place, argument: &'static str) -> Result<(), CudaError> {
        let expected = self.ordinal();
        match &self.backend {
            _ if expected != got => Err(CudaError::WrongDevice { argument, expected, got }),
            Backend::Cuda { stream: own, .. } if own.cu_stream().addr() != stream => {
                Err(CudaError::WrongStream { argument })
            }
            _ => Ok(()),
        }
    }
}

/// A device's number and a stream's address.
pub(super) type Place = (usize, usize);

fn same_length(argument: &'static str, expected: usize, got: usize) -> Result<(), CudaError> {
    if expected == got {
        return Ok(());
    }
    Err(CudaError::Length { argument, expected: expected as u64, got: got as u64 })
}

/// A range of `0..len`.
fn range_of(range: impl RangeBounds<usize>, len: usize) -> Range<usize> {
    let start = match range.start_bound() {
        Bound::Included(&start) => start,
        Bound::Excluded(&before) => before + 1,
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&last) => last + 1,
        Bound::Excluded(&end) => end,
        Bound::Unbounded => len,
    };
    start..end
}

/// Elements in device memory.
pub struct DeviceVec<T> {
    memory: Memory,
    len: usize,
    element: PhantomData<T>,
}

enum Memory {
    Cuda(CudaSlice<u8>),
    /// At an address of the host, in tests.
    #[cfg(test)]
    Emulated(std::rc::Rc<super::emulated::Emulated>, u64),
}

impl Memory {
    fn address(&self) -> u64 {
        match self {
            Self::Cuda(memory) => memory.device_ptr(memory.stream()).0,
            #[cfg(test)]
            Self::Emulated(_, address) => *address,
        }
    }

    #[cfg(test)]
    fn emulation(&self) -> &super::emulated::Emulated {
        match self {
            Self::Emulated(device, _) => device,
            Self::Cuda(_) => unreachable!("memory of a device, handed to an emulation"),
        }
    }
}

#[cfg(test)]
impl Drop for Memory {
    fn drop(&mut self) {
        if let Self::Emulated(device, address) = self {
            device.forget(*address);
        }
    }
}

impl<T> DeviceVec<T> {
    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn place(&self) -> Place {
        match &self.memory {
            Memory::Cuda(memory) => (memory.context().ordinal(), memory.stream().cu_stream().addr()),
            #[cfg(test)]
            Memory::Emulated(..) => (0, 0),
        }
    }

    /// The address in device memory, to hand to others. It is valid as long as this lives.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.memory.address()
    }
}

impl<T> fmt::Debug for DeviceVec<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceVec").field("len", &self.len).finish_non_exhaustive()
    }
}
