//! Casts of device memory.

use alloc::format;

use half::{bf16, f16};

use super::launch::{CastArguments, Device, Shape, aligned, disjoint, keys, launch, pieces};
use super::{CudaError, DeviceVec, ElementType, Gpu};
use crate::cast::{Cast, GpuRounding};
use crate::format::{Element, Format, PackedVec, SubByte};
use crate::random::{Draw, Draws};
use crate::round::Overflow;
use crate::round::lanes::Target32;

/// Shapes of targets that have shorter kernels: width, signed or unsigned, fraction bits.
const PLAIN: [&str; 9] = ["16s10", "8s3", "8s2", "8u3", "8u4", "6s2", "6s3", "4s1", "4u2"];

/// A source type of casts on a GPU: `f32`, `bf16`, `f16`. Sealed.
pub trait Source: crate::round::Source + bytemuck::Pod {
    /// The type by name.
    const TYPE: ElementType;
}

impl Source for f32 {
    const TYPE: ElementType = ElementType::F32;
}
impl Source for bf16 {
    const TYPE: ElementType = ElementType::Bf16;
}
impl Source for f16 {
    const TYPE: ElementType = ElementType::Fp16;
}

/// 4-bit or 6-bit codes in device memory, in the layout of [`PackedVec`].
#[derive(Debug)]
pub struct DevicePacked<T> {
    bytes: DeviceVec<u8>,
    len: usize,
    element: core::marker::PhantomData<T>,
}

impl<T: SubByte> DevicePacked<T> {
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

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &DeviceVec<u8> {
        &self.bytes
    }
}

/// The codes of `len` elements in bytes that hold them.
pub(super) fn packed<T>(bytes: DeviceVec<u8>, len: usize) -> DevicePacked<T> {
    DevicePacked { bytes, len, element: core::marker::PhantomData }
}

/// Somebody else's memory to cast: addresses, lengths and types.
#[derive(Clone, Copy, Debug)]
pub struct CastMemory {
    /// Address of the sources, aligned to their size.
    pub x: u64,
    /// Their type.
    pub source: ElementType,
    /// Address of the codes: two bytes each above 8 bits, then aligned to 2; packed at 6 and 4 bits.
    pub y: u64,
    /// Their format.
    pub format: Format,
    /// Number of elements. The codes take `format.bytes(n)` bytes.
    pub n: u64,
}

impl Gpu {
    /// Casts stochastically into new memory, with the default overflow of the target.
    ///
    /// # Errors
    /// As [`cast_into`](Self::cast_into), or [`CudaError::OutOfMemory`].
    pub fn sr_cast<T: Element, S: Source>(&self, x: &DeviceVec<S>, draw: Draw) -> Result<DeviceVec<T>, CudaError> {
        self.cast(&Cast::stochastic(draw), x)
    }

    /// Casts to nearest, ties to even, into new memory.
    ///
    /// # Errors
    /// As [`cast_into`](Self::cast_into), or [`CudaError::OutOfMemory`].
    pub fn nearest_cast<T: Element, S: Source>(&self, x: &DeviceVec<S>) -> Result<DeviceVec<T>, CudaError> {
        self.cast(&Cast::nearest(), x)
    }

    /// Casts into new memory.
    ///
    /// # Errors
    /// As [`cast_into`](Self::cast_into), or [`CudaError::OutOfMemory`].
    pub fn cast<T: Element, S: Source>(
        &self,
        cast: &Cast<impl Draws>,
        x: &DeviceVec<S>,
    ) -> Result<DeviceVec<T>, CudaError> {
        let mut y = self.zeroed(x.len())?;
        self.cast_into(cast, x, &mut y)?;
        Ok(y)
    }

    /// Casts into existing memory. Only enqueues work.
    ///
    /// # Errors
    /// [`CudaError::Length`] if the lengths differ, [`CudaError::WrongDevice`] for memory of another device,
    /// [`CudaError::Unsupported`] for a rounding or target that kernels do not have: directed modes, streams other than 1,
    /// refused NaN, normal numbers below f32's.
    pub fn cast_into<T: Element, S: Source>(
        &self,
        cast: &Cast<impl Draws>,
        x: &DeviceVec<S>,
        y: &mut DeviceVec<T>,
    ) -> Result<(), CudaError> {
        self.own(x, "x")?;
        self.own(y, "y")?;
        if x.len() != y.len() {
            return Err(CudaError::Length { argument: "y", expected: x.len() as u64, got: y.len() as u64 });
        }
        let memory =
            CastMemory { x: x.address(), source: S::TYPE, y: y.address(), format: T::FORMAT, n: x.len() as u64 };
        // SAFETY: both buffers live on this device and stream and are as long as they say; `y` is borrowed mutably.
        unsafe { self.cast_memory(cast, memory, T::FORMAT.bits().next_multiple_of(8)) }
    }

    /// Casts into new packed memory.
    ///
    /// # Errors
    /// As [`cast_into`](Self::cast_into), or [`CudaError::OutOfMemory`].
    pub fn cast_packed<T: SubByte, S: Source>(
        &self,
        cast: &Cast<impl Draws>,
        x: &DeviceVec<S>,
    ) -> Result<DevicePacked<T>, CudaError> {
        self.own(x, "x")?;
        let bytes = self.zeroed(T::FORMAT.bytes(x.len()))?;
        let memory =
            CastMemory { x: x.address(), source: S::TYPE, y: bytes.address(), format: T::FORMAT, n: x.len() as u64 };
        // SAFETY: as in `cast_into`; the packed bytes are as many as the codes take.
        unsafe { self.cast_raw(cast, memory) }?;
        Ok(packed(bytes, x.len()))
    }

    /// Copies packed codes to the host.
    ///
    /// # Errors
    /// As [`download`](Self::download).
    pub fn download_packed<T: SubByte>(&self, values: &DevicePacked<T>) -> Result<PackedVec<T>, CudaError> {
        let bytes = self.download(&values.bytes)?;
        PackedVec::from_bytes(bytes, values.len)
            .map_err(|error| CudaError::Driver { name: "packed codes".into(), message: format!("{error}") })
    }

    /// Casts somebody else's memory on this `Gpu`'s stream. Only enqueues work.
    ///
    /// # Safety
    /// Both addresses are device memory of this device that is as long as [`CastMemory`] says and stays so until the work
    /// is done; nothing else writes them, or reads `y`, in the meantime.
    ///
    /// # Errors
    /// [`CudaError::Misaligned`] and [`CudaError::Overlap`] for addresses that cannot be, and as
    /// [`cast_into`](Self::cast_into).
    pub unsafe fn cast_raw(&self, cast: &Cast<impl Draws>, memory: CastMemory) -> Result<(), CudaError> {
        // SAFETY: promised by the caller.
        unsafe { self.cast_memory(cast, memory, packed_width(memory.format)) }
    }
}

/// Bits that a code takes where 4-bit and 6-bit ones are packed.
pub(super) fn packed_width(format: Format) -> u32 {
    match format.bits() {
        width @ (4 | 6) => width,
        ..=8 => 8,
        _ => 16,
    }
}

/// The launches of casts.
pub(super) trait Casts: Device + Sized {
    /// # Safety
    /// As [`Gpu::cast_raw`], with codes of `width` bits.
    unsafe fn cast_memory(&self, cast: &Cast<impl Draws>, memory: CastMemory, width: u32) -> Result<(), CudaError> {
        let CastMemory { x, source, y, format, n } = memory;
        let shape = match width {
            // On an H200 large blocks take half a per cent less time at 2^24 elements, and as much more at 2^28.
            16 if n <= 1 << 26 => Shape { threads: 512, each: 8 },
            16 => Shape::of(8),
            _ => Shape::of(16),
        };
        let unsupported = |argument, reason| CudaError::Unsupported { argument, reason };
        let (scale, overflow, rounding) = cast.on_gpu(format, Overflow::of(format))?;
        let target = Target32::<false>::new(format, scale, overflow)
            .ok_or_else(|| unsupported("format", "its normal numbers, as scaled, go below those of f32"))?;
        let size = source.bytes();
        aligned("x", x, size)?;
        aligned("y", y, if width == 16 { 2 } else { 1 })?;
        let out_bytes = (u128::from(n) * u128::from(width)).div_ceil(8) as u64;
        disjoint(&[("x", x, n.saturating_mul(size)), ("y", y, out_bytes)])?;

        let is_bf16 = format == Format::BF16 && scale == 0;
        let kind = match width {
            16 if is_bf16 => "bf16".into(),
            width if source != ElementType::Fp16 && target.is_plain_on_gpu(format) => {
                let sign = if format.is_signed() { 's' } else { 'u' };
                let shape = format!("{width}{sign}{}", format.fraction_bits());
                let full = format.bits() == width;
                if full && PLAIN.contains(&shape.as_str()) { shape } else { format!("{width}") }
            }
            width => format!("{width}"),
        };
        // A scaled BF16 target takes 16-bit draws on the CPU, for which there is no kernel.
        if format == Format::BF16 && !is_bf16 && matches!(rounding, GpuRounding::Stochastic { .. }) {
            return Err(unsupported("scale", "stochastic BF16 has no scale"));
        }
        let (name, draw, first) = match rounding {
            GpuRounding::Nearest => ("nearest", None, 0),
            GpuRounding::Stochastic { key, first } => ("stochastic", Some(key), first),
        };
        let shift = if format == Format::BF16 { 2 } else { 1 };
        let module = match source {
            ElementType::F32 => "cast_f32",
            ElementType::Bf16 => "cast_bf16",
            ElementType::Fp16 => "cast_fp16",
        };
        let kernel = format!("cast_{}_{kind}_{name}", source.name());
        for piece in pieces(first, n, shift) {
            // Only past 2^33 elements from an odd place in the tensor.
            if width < 8 && !piece.start.is_multiple_of(8) {
                return Err(unsupported("draw", "packed codes over 2^32 groups start at a multiple of 8"));
            }
            let (x, y) = (x + piece.start * size, y + piece.start * u64::from(width) / 8);
            // A thread reads four elements and writes four codes, or eight of 4 bits, up to 16 bytes at a time; 6-bit codes go
            // byte by byte.
            let (load, store) = match width {
                16 => (4 * size, 8),
                6 => (4 * size, 1),
                4 => (16, 4),
                _ => (4 * size, 4),
            };
            let arguments = CastArguments {
                x,
                y,
                n: piece.len,
                group: piece.group,
                skip: piece.skip,
                vector: (piece.skip == 0 && x.is_multiple_of(load) && y.is_multiple_of(store)).into(),
                keys: keys(draw, piece.high),
                target,
            };
            // SAFETY: the kernel of this name reads sources of this type and writes codes of this width; memory is
            // promised by the caller.
            unsafe { launch(self, module, &kernel, piece.len, shape, &arguments) }?;
        }
        Ok(())
    }
}

impl<D: Device> Casts for D {}
