//! Casts of device memory into blocks that share a scale, and back.

use alloc::format;

use super::cast::Source;
use super::launch::{DecodeArguments, EncodeArguments, GlobalArguments, LargestArguments};
use super::launch::{Shape, aligned, disjoint, keys, launch, pieces};
use super::{CudaError, DeviceVec, ElementType, Gpu};
use crate::cast::{Cast, CastError, GpuRounding};
use crate::format::{BlockFormat, BlockScale, BlockVec, Format, Negative, Scales};
use crate::random::{Draw, Draws};
use crate::round::{Mode, Overflow, round};

/// Block-scaled values in device memory: codes, and a scale for each block, as in [`BlockVec`].
#[derive(Debug)]
pub struct DeviceBlocks {
    format: BlockFormat,
    len: usize,
    codes: DeviceVec<u8>,
    scales: DeviceVec<u8>,
    global: DeviceVec<f32>,
}

impl DeviceBlocks {
    /// The format.
    #[must_use]
    pub fn format(&self) -> BlockFormat {
        self.format
    }

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

    /// The packed codes.
    #[must_use]
    pub fn codes(&self) -> &DeviceVec<u8> {
        &self.codes
    }

    /// The scales: a code a block, or an f32 a block (four bytes, aligned) under [`BlockScale::Amax`].
    #[must_use]
    pub fn scales(&self) -> &DeviceVec<u8> {
        &self.scales
    }

    /// The f32 of [`BlockScale::Nvfp4`].
    #[must_use]
    pub fn global(&self) -> Option<&DeviceVec<f32>> {
        (self.format.scale() == BlockScale::Nvfp4).then_some(&self.global)
    }
}

/// Somebody else's memory of a cast into blocks, or of their values: addresses, types and length.
#[derive(Clone, Copy, Debug)]
pub struct BlocksMemory {
    /// Address of the values, aligned to their size.
    pub values: u64,
    /// Their type; f32 to decode.
    pub values_type: ElementType,
    /// Address of the codes, `format.element().bytes(n)` bytes.
    pub codes: u64,
    /// Address of the scales, one a block: a byte each, or an f32, then aligned to 4.
    pub scales: u64,
    /// Address of the f32 of [`BlockScale::Nvfp4`], aligned to 4; not looked at under other rules.
    pub global: u64,
    /// The format of codes and scales.
    pub format: BlockFormat,
    /// Number of elements.
    pub n: u64,
}

impl Gpu {
    /// Casts stochastically into new blocks: [`cast_blocks`](Self::cast_blocks) of [`Cast::stochastic`].
    ///
    /// # Errors
    /// As [`cast_blocks_into`](Self::cast_blocks_into), or [`CudaError::OutOfMemory`].
    pub fn sr_cast_blocks<S: Source>(
        &self,
        x: &DeviceVec<S>,
        format: BlockFormat,
        draw: Draw,
    ) -> Result<DeviceBlocks, CudaError> {
        self.cast_blocks(&Cast::stochastic(draw), x, format)
    }

    /// Casts into new blocks: the bits of [`Cast::to_blocks`].
    ///
    /// ```no_run
    /// use halfulp::{Draw, cast::Cast, cuda::Gpu, format::BlockFormat};
    /// let (gpu, x) = (Gpu::open(0)?, vec![0.3f32; 1000]);
    /// let cast = Cast::stochastic(Draw::seeded(7));
    /// let y = gpu.cast_blocks(&cast, &gpu.upload(&x)?, BlockFormat::NVFP4)?;
    /// assert_eq!(gpu.download_blocks(&y)?, cast.to_blocks(&x, BlockFormat::NVFP4)?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`cast_blocks_into`](Self::cast_blocks_into), or [`CudaError::OutOfMemory`].
    pub fn cast_blocks<S: Source>(
        &self,
        cast: &Cast<impl Draws>,
        x: &DeviceVec<S>,
        format: BlockFormat,
    ) -> Result<DeviceBlocks, CudaError> {
        let n = x.len();
        let mut out = self.blocks(format, n, &[f32::from_bits(1)])?;
        self.cast_blocks_into(cast, x, &mut out)?;
        Ok(out)
    }

    /// Casts into existing blocks; see [`Cast::into_blocks`] for scales, overflow and what is not finite. Only enqueues work,
    /// and gives no report.
    ///
    /// # Errors
    /// [`CudaError::Length`] if the lengths differ, [`CudaError::WrongDevice`] for memory of another device,
    /// [`CudaError::Cast`] for a [`scale`](Cast::scale) beside those of the blocks, [`CudaError::Unsupported`] for a rounding
    /// or format that kernels do not have: directed modes, streams other than 1, refused NaN, elements with a value that is
    /// no f32, and 2^33 elements or more in blocks that draw from an index within a block.
    pub fn cast_blocks_into<S: Source>(
        &self,
        cast: &Cast<impl Draws>,
        x: &DeviceVec<S>,
        out: &mut DeviceBlocks,
    ) -> Result<(), CudaError> {
        self.own(x, "x")?;
        self.own(&out.codes, "out")?;
        if x.len() != out.len {
            return Err(CudaError::Length { argument: "out", expected: x.len() as u64, got: out.len as u64 });
        }
        // SAFETY: the buffers live on this device and stream and are as long as they say; `out` is borrowed mutably.
        unsafe { self.cast_blocks_raw(cast, memory(out, x.address(), S::TYPE)) }
    }

    /// Casts somebody else's memory into blocks on this `Gpu`'s stream. Only enqueues work.
    ///
    /// # Safety
    /// All addresses are device memory of this device that is as long as [`BlocksMemory`] says and stays so until the work is
    /// done; nothing else writes it, or reads codes and scales, in the meantime.
    ///
    /// # Errors
    /// [`CudaError::Misaligned`] and [`CudaError::Overlap`] for addresses that cannot be, and as
    /// [`cast_blocks_into`](Self::cast_blocks_into).
    pub unsafe fn cast_blocks_raw(&self, cast: &Cast<impl Draws>, memory: BlocksMemory) -> Result<(), CudaError> {
        let BlocksMemory { values: x, values_type: source, codes, scales, global, format, n } = memory;
        let element = format.element();
        let (scale, overflow, rounding) = cast.on_gpu(element, Overflow::Saturate)?;
        if scale != 0 {
            return Err(CastError::Scale { got: scale }.into());
        }
        let encoder = Encoder::new(format, overflow)?;
        check(&memory)?;
        let (rounding, draw, first) = match rounding {
            GpuRounding::Nearest => ("nearest", None, 0),
            GpuRounding::Stochastic { key, first } => ("stochastic", Some(key), first),
        };
        let block = format.block() as u64;
        if pieces(first, n, 1).any(|piece| !piece.start.is_multiple_of(block)) {
            let reason = "blocks over 2^32 groups draw from an index that is a multiple of their size";
            return Err(CudaError::Unsupported { argument: "draw", reason });
        }
        let (module, name) = match source {
            ElementType::F32 => ("encode_f32", "f32"),
            ElementType::Bf16 => ("encode_bf16", "bf16"),
            ElementType::Fp16 => ("encode_fp16", "fp16"),
        };
        if format.scale() == BlockScale::Nvfp4 && n > 0 {
            // SAFETY: one f32, as promised by the caller.
            unsafe { self.set_global(module, name, x, global, n) }?;
        }
        let (width, size) = (element_width(format), source.bytes());
        let kernel = format!("encode_{name}_{width}_{rounding}");
        let scale_size = if format.scale() == BlockScale::Amax { 4 } else { 1 };
        for piece in pieces(first, n, 1) {
            let x = x + piece.start * size;
            let codes = codes + piece.start / 8 * width;
            let arguments = EncodeArguments {
                x,
                codes,
                scales: scales + piece.start / block * scale_size,
                global,
                n: piece.len,
                group: piece.group,
                skip: piece.skip,
                vector: (piece.skip == 0 && x.is_multiple_of(16) && codes.is_multiple_of(access(width))).into(),
                log_block: format.block().ilog2(),
                keys: keys(draw, piece.high),
                encoder,
            };
            // SAFETY: the kernel of this name reads sources of this type and writes codes of this width; memory is
            // promised by the caller.
            unsafe { launch(self, module, &kernel, piece.len, Shape::of(EACH), &arguments) }?;
        }
        Ok(())
    }

    /// The scale of the whole of `n > 0` elements.
    ///
    /// # Safety
    /// `x` is `n` elements of the module's type, `global` one f32, both device memory of this device.
    unsafe fn set_global(
        &self,
        module: &'static str,
        name: &str,
        x: u64,
        global: u64,
        n: u64,
    ) -> Result<(), CudaError> {
        // SAFETY: promised by the caller.
        unsafe { self.fill_raw(global, 4, 0) }?;
        let arguments = LargestArguments { x, largest: global, n, vector: x.is_multiple_of(16).into() };
        // Enough blocks to fill a device, few enough for one maximum each.
        let threads = n.min(2048 * 128 * u64::from(EACH));
        let kernel = format!("encode_{name}_amax");
        // SAFETY: the kernel takes any grid; memory is promised by the caller.
        unsafe { launch(self, module, &kernel, threads, Shape::of(EACH), &arguments) }?;
        let kernel = format!("encode_{name}_global");
        // SAFETY: the kernel reads and writes one f32.
        unsafe { launch(self, module, &kernel, 1, Shape::of(EACH), &GlobalArguments { global }) }
    }

    /// The values, each rounded to f32 once: the bits of [`BlockVec::decode`].
    ///
    /// # Errors
    /// [`CudaError::WrongDevice`], [`CudaError::OutOfMemory`], or [`CudaError::Unsupported`] for elements with a value that is
    /// no f32.
    pub fn decode_blocks(&self, blocks: &DeviceBlocks) -> Result<DeviceVec<f32>, CudaError> {
        let mut y = self.zeroed(blocks.len)?;
        self.decode_blocks_into(blocks, &mut y)?;
        Ok(y)
    }

    /// As [`decode_blocks`](Self::decode_blocks), into existing memory. Only enqueues work.
    ///
    /// # Errors
    /// [`CudaError::Length`] if the lengths differ, and as [`decode_blocks`](Self::decode_blocks).
    pub fn decode_blocks_into(&self, blocks: &DeviceBlocks, y: &mut DeviceVec<f32>) -> Result<(), CudaError> {
        self.own(&blocks.codes, "blocks")?;
        self.own(y, "y")?;
        if y.len() != blocks.len {
            return Err(CudaError::Length { argument: "y", expected: blocks.len as u64, got: y.len() as u64 });
        }
        // SAFETY: the buffers live on this device and stream and are as long as they say; `y` is borrowed mutably.
        unsafe { self.decode_blocks_raw(memory(blocks, y.address(), ElementType::F32)) }
    }

    /// Decodes somebody else's memory on this `Gpu`'s stream, to f32. Only enqueues work.
    ///
    /// # Safety
    /// All addresses are device memory of this device that is as long as [`BlocksMemory`] says and stays so until the work is
    /// done; nothing else writes it, or reads values, in the meantime.
    ///
    /// # Errors
    /// [`CudaError::Misaligned`] and [`CudaError::Overlap`] for addresses that cannot be, [`CudaError::Unsupported`] for values
    /// of another type than f32, and as [`decode_blocks`](Self::decode_blocks).
    pub unsafe fn decode_blocks_raw(&self, memory: BlocksMemory) -> Result<(), CudaError> {
        let BlocksMemory { values: y, values_type, codes, scales, global, format, n } = memory;
        if values_type != ElementType::F32 {
            return Err(CudaError::Unsupported { argument: "values_type", reason: "kernels decode to f32" });
        }
        let decoder = Decoder::new(format.element())?;
        check(&memory)?;
        let width = element_width(format);
        let arguments = DecodeArguments {
            codes,
            scales,
            global,
            y,
            n,
            vector: (y.is_multiple_of(16) && codes.is_multiple_of(access(width))).into(),
            log_block: format.block().ilog2(),
            rule: rule(format.scale()),
            decoder,
        };
        if n == 0 {
            return Ok(());
        }
        // SAFETY: the kernel of this name reads codes of this width; memory is promised by the caller.
        unsafe { launch(self, "decode", &format!("decode_{width}"), n, Shape::of(EACH), &arguments) }
    }

    /// Copies blocks to the host, after all earlier work of the stream.
    ///
    /// # Errors
    /// As [`download`](Self::download).
    pub fn download_blocks(&self, blocks: &DeviceBlocks) -> Result<BlockVec, CudaError> {
        let (codes, scales) = (self.download(&blocks.codes)?, self.download(&blocks.scales)?);
        let scales = match blocks.format.scale() {
            BlockScale::Ceil | BlockScale::Floor => Scales::E8M0(scales),
            BlockScale::Amax => Scales::F32(bytemuck::pod_collect_to_vec(&scales)),
            BlockScale::Nvfp4 => Scales::Nvfp4 { blocks: scales, global: self.download(&blocks.global)?[0] },
        };
        BlockVec::from_parts(blocks.format, blocks.len, codes, scales)
            .map_err(|error| CudaError::Driver { name: "blocks".into(), message: format!("{error}") })
    }

    /// Copies blocks to new memory on the device.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub fn upload_blocks(&self, values: &BlockVec) -> Result<DeviceBlocks, CudaError> {
        let (scales, global): (&[u8], _) = match values.scales() {
            Scales::E8M0(codes) => (codes, None),
            Scales::F32(scales) => (bytemuck::cast_slice(scales), None),
            Scales::Nvfp4 { blocks, global } => (blocks, Some(*global)),
        };
        let mut out = self.blocks(values.format(), values.len(), global.as_slice())?;
        self.upload_into(values.codes(), &mut out.codes)?;
        self.upload_into(scales, &mut out.scales)?;
        Ok(out)
    }

    /// Memory for blocks, with this f32 of the whole.
    fn blocks(&self, format: BlockFormat, len: usize, global: &[f32]) -> Result<DeviceBlocks, CudaError> {
        let scale_size = if format.scale() == BlockScale::Amax { 4 } else { 1 };
        Ok(DeviceBlocks {
            format,
            len,
            codes: self.zeroed(format.element().bytes(len))?,
            scales: self.zeroed(scale_size * format.blocks(len))?,
            global: self.upload(if format.scale() == BlockScale::Nvfp4 { global } else { &[] })?,
        })
    }
}

/// Elements of a thread.
const EACH: u32 = 8;

/// Bits of a code: of the formats that blocks have, those of the element.
fn element_width(format: BlockFormat) -> u64 {
    format.element().bits().into()
}

/// Bytes that a thread reads or writes at a time of codes of this width.
fn access(width: u64) -> u64 {
    if width == 6 { 2 } else { width }
}

/// Of the rules, which are all known here, the number that kernels know each by.
pub(super) fn rule(scale: BlockScale) -> u32 {
    match scale {
        BlockScale::Ceil => 0,
        BlockScale::Floor => 1,
        BlockScale::Amax => 2,
        BlockScale::Nvfp4 => 3,
    }
}

fn memory(blocks: &DeviceBlocks, values: u64, values_type: ElementType) -> BlocksMemory {
    let DeviceBlocks { format, len, codes, scales, global } = blocks;
    BlocksMemory {
        values,
        values_type,
        codes: codes.address(),
        scales: scales.address(),
        global: global.address(),
        format: *format,
        n: *len as u64,
    }
}

/// Refuses addresses that cannot be.
fn check(memory: &BlocksMemory) -> Result<(), CudaError> {
    let BlocksMemory { values, values_type, codes, scales, global, format, n } = *memory;
    let (amax, nvfp4) = (format.scale() == BlockScale::Amax, format.scale() == BlockScale::Nvfp4);
    aligned("values", values, values_type.bytes())?;
    aligned("scales", scales, if amax { 4 } else { 1 })?;
    let blocks = n.div_ceil(format.block() as u64);
    let code_bytes = (u128::from(n) * u128::from(element_width(format))).div_ceil(8) as u64;
    let ranges = [
        ("values", values, n.saturating_mul(values_type.bytes())),
        ("codes", codes, code_bytes),
        ("scales", scales, if amax { blocks.saturating_mul(4) } else { blocks }),
        ("global", global, 4),
    ];
    if nvfp4 {
        aligned("global", global, 4)?;
    }
    disjoint(&ranges[..if nvfp4 { 4 } else { 3 }])
}

/// Refuses element formats whose values are not all finite numbers of f32, with an exponent of f32 for each of the format.
fn all_of_f32(element: Format) -> Result<(), CudaError> {
    let largest_field = element.max_code() >> element.fraction_bits();
    if element.max() <= f32::MAX.into() && element.min_positive() >= f32::from_bits(1).into() && largest_field < 255 {
        return Ok(());
    }
    Err(CudaError::Unsupported { argument: "format", reason: "its elements have values that are not of f32" })
}

/// A format and overflow policy, for quotients in f64: `Wide` of scaled.cuh.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Wide {
    fraction_bits: u32,
    max_code: u32,
    beyond: u32,
    sign_shift: u32,
    is_unsigned: u32,
    negative: u32,
    normal: f64,
    code_1: f64,
}

impl Wide {
    pub(super) fn new(element: Format, overflow: Overflow) -> Self {
        let negative = match (element.negative(), element.nan_code()) {
            (Negative::Nan, Some(nan)) => nan,
            _ => 0,
        };
        Self {
            fraction_bits: element.fraction_bits(),
            max_code: element.max_code().into(),
            beyond: round(f32::INFINITY, element, Mode::NearestEven, overflow).into(),
            sign_shift: element.bits() - 1,
            is_unsigned: (!element.is_signed()).into(),
            negative: negative.into(),
            normal: element.min_positive_normal(),
            code_1: if element.has_zero() { 0.0 } else { element.value(1) },
        }
    }
}

/// How blocks are encoded: `Encoder` of scaled.cuh.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Encoder {
    rule: u32,
    plain: u32,
    unit: f32,
    from_unit: f32,
    largest: u32,
    saturates: u32,
    max: f64,
    wide: Wide,
}

impl Encoder {
    pub(super) fn new(format: BlockFormat, overflow: Overflow) -> Result<Self, CudaError> {
        let element = format.element();
        all_of_f32(element)?;
        let wide = Wide::new(element, overflow);
        // Above f32's subnormals, by more than a draw of 32 bits, stands the smallest value; and scaled values are f32.
        let plain = element.has_zero() && element.fraction_bits() > 0 && wide.negative == 0;
        let plain = plain && (1..=60).contains(&element.bias());
        let bias = element.bias().clamp(1, 60) as u32;
        Ok(Self {
            rule: rule(format.scale()),
            plain: plain.into(),
            unit: f32::from_bits(bias << 23),
            from_unit: f32::from_bits((254 - bias) << 23),
            largest: u32::from(element.max_code()) << (23 - element.fraction_bits()),
            saturates: (wide.beyond == wide.max_code).into(),
            max: element.max(),
            wide,
        })
    }
}

/// How codes are read: `Decoder` of scaled.cuh.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Decoder {
    fraction_bits: u32,
    max_code: u32,
    infinity: u32,
    sign_shift: u32,
    is_unsigned: u32,
    half_ulp: u32,
    first: f32,
    second: f32,
}

impl Decoder {
    pub(super) fn new(element: Format) -> Result<Self, CudaError> {
        all_of_f32(element)?;
        // The biased exponent of 2^(127 - bias), in two parts that are those of f32.
        let exponent = 254 - element.bias();
        let first = exponent.min(254);
        let power = |exponent: i32| if exponent > 0 { f32::from_bits((exponent as u32) << 23) } else { 0.0 };
        Ok(Self {
            fraction_bits: element.fraction_bits(),
            max_code: element.max_code().into(),
            infinity: element.infinity_code().map_or(u32::MAX, u32::from),
            sign_shift: element.bits() - 1,
            is_unsigned: (!element.is_signed()).into(),
            half_ulp: if element.has_zero() { 0 } else { 1 << (22 - element.fraction_bits()) },
            first: power(first),
            second: power(127 + exponent - first),
        })
    }
}
