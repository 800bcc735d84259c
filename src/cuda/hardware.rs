//! Casts by the stochastic rounding of the hardware, where there is some.

use super::cast::packed;
use super::launch::{HardwareArguments, Shape, aligned, disjoint, keys, launch, pieces};
use super::{CastMemory, CudaError, DevicePacked, DeviceVec, ElementType, Gpu};
use crate::format::{Element, Format, SubByte};
use crate::random::{Draw, Sealed, Width};

impl Gpu {
    /// Casts f32 stochastically by the instructions that devices of compute capability 10.0 and 10.3 have for it
    /// (`cvt.rs`), to BF16, E4M3 or E5M2 in new memory. For those who want these instructions:
    /// [`sr_cast`](Self::sr_cast) never takes them.
    ///
    /// Every element gets 16 random bits, its 16-bit draw's place in stream 1, and no bit serves two elements. Codes differ
    /// from those of the CPU and of other devices: E4M3, E5M2 and E2M1 take 32-bit draws elsewhere, so here P(up) is only
    /// within 2^-16 of the exact fraction, and the draws are others. BF16 drops 16 bits at most and should agree with
    /// [`sr_cast`](Self::sr_cast) but for NaN. Too large values and infinities become the largest value, but in BF16
    /// infinity; NaN is one code, which is positive, and the largest value in E2M1.
    ///
    /// These kernels are assembled for both architectures and **have never been run**.
    ///
    /// # Errors
    /// [`CudaError::Capability`] on any other device; [`CudaError::Unsupported`] for other targets and for streams other
    /// than 1; [`CudaError::WrongDevice`]; [`CudaError::OutOfMemory`].
    pub fn hardware_sr_cast<T: Element>(&self, x: &DeviceVec<f32>, draw: Draw) -> Result<DeviceVec<T>, CudaError> {
        self.own(x, "x")?;
        // Checked before there is memory for an answer.
        self.hardware_module()?;
        hardware_kernel(T::FORMAT, T::FORMAT.bits().next_multiple_of(8))?;
        let y = self.zeroed(x.len())?;
        // SAFETY: both buffers live on this device and are this long; nobody else has `y`.
        unsafe { self.hardware_sr_cast_raw(draw, memory(x, &y, T::FORMAT)) }?;
        Ok(y)
    }

    /// As [`hardware_sr_cast`](Self::hardware_sr_cast), to packed E2M1.
    ///
    /// # Errors
    /// As [`hardware_sr_cast`](Self::hardware_sr_cast).
    pub fn hardware_sr_cast_packed<T: SubByte>(
        &self,
        x: &DeviceVec<f32>,
        draw: Draw,
    ) -> Result<DevicePacked<T>, CudaError> {
        self.own(x, "x")?;
        self.hardware_module()?;
        let bytes = self.zeroed::<u8>(T::FORMAT.bytes(x.len()))?;
        // SAFETY: as above; the packed bytes are as many as the codes take.
        unsafe { self.hardware_sr_cast_raw(draw, memory(x, &bytes, T::FORMAT)) }?;
        Ok(packed(bytes, x.len()))
    }

    /// As [`hardware_sr_cast`](Self::hardware_sr_cast), of somebody else's memory on this `Gpu`'s stream.
    ///
    /// # Safety
    /// As [`cast_raw`](Self::cast_raw).
    ///
    /// # Errors
    /// [`CudaError::Misaligned`] and [`CudaError::Overlap`] for addresses that cannot be, and as
    /// [`hardware_sr_cast`](Self::hardware_sr_cast).
    pub unsafe fn hardware_sr_cast_raw(&self, draw: Draw, memory: CastMemory) -> Result<(), CudaError> {
        let CastMemory { x, source, y, format, n } = memory;
        let module = self.hardware_module()?;
        if source != ElementType::F32 {
            return Err(CudaError::Unsupported { argument: "source", reason: "the instructions convert f32" });
        }
        let (kernel, width) = hardware_kernel(format, format.bits())?;
        let Some((key, first)) = draw.stream_1(Width::Bits16) else {
            return Err(CudaError::Unsupported { argument: "draw", reason: "kernels draw from stream 1" });
        };
        aligned("x", x, 4)?;
        aligned("y", y, u64::from(width).div_ceil(8))?;
        let out_bytes = (u128::from(n) * u128::from(width)).div_ceil(8) as u64;
        disjoint(&[("x", x, n.saturating_mul(4)), ("y", y, out_bytes)])?;
        for piece in pieces(first, n, 2) {
            // Only past 2^34 elements from an odd place in the tensor.
            if width < 8 && !piece.start.is_multiple_of(2) {
                let reason = "packed codes over 2^32 groups start at a multiple of 2";
                return Err(CudaError::Unsupported { argument: "draw", reason });
            }
            let (x, y) = (x + 4 * piece.start, y + piece.start * u64::from(width) / 8);
            let vector = piece.skip == 0 && x.is_multiple_of(16) && y.is_multiple_of(u64::from(width) / 2);
            let arguments = HardwareArguments {
                x,
                y,
                n: piece.len,
                group: piece.group,
                skip: piece.skip,
                vector: vector.into(),
                keys: keys(Some(key), piece.high),
            };
            // SAFETY: the kernel of this name reads f32 and writes codes of this format; memory is promised by the caller.
            unsafe { launch(self, module, kernel, piece.len, Shape::of(16), &arguments) }?;
        }
        Ok(())
    }

    /// The module with the instructions for this device.
    fn hardware_module(&self) -> Result<&'static str, CudaError> {
        match self.capability()? {
            (10, 0) => Ok("hardware_100a"),
            (10, 3) => Ok("hardware_103a"),
            got => Err(CudaError::Capability { argument: "hardware_sr_cast", expected: "10.0 or 10.3", got }),
        }
    }
}

fn memory<T>(x: &DeviceVec<f32>, y: &DeviceVec<T>, format: Format) -> CastMemory {
    CastMemory { x: x.address(), source: ElementType::F32, y: y.address(), format, n: x.len() as u64 }
}

/// The kernel that makes codes of `width` bits, and the width.
fn hardware_kernel(format: Format, width: u32) -> Result<(&'static str, u32), CudaError> {
    let kernel = match (format, width) {
        (Format::BF16, 16) => "hardware_bf16",
        (Format::E4M3, 8) => "hardware_e4m3",
        (Format::E5M2, 8) => "hardware_e5m2",
        (Format::E2M1, 4) => "hardware_e2m1",
        _ => {
            let reason = "the instructions make BF16, E4M3, E5M2 and packed E2M1";
            return Err(CudaError::Unsupported { argument: "format", reason });
        }
    };
    Ok((kernel, width))
}
