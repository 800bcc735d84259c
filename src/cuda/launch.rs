//! All launches: modules of kernels, their arguments, and how work is cut.

use alloc::borrow::Cow;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use std::sync::{Mutex, OnceLock};

use cudarc::driver::{CudaFunction, DeviceRepr, LaunchConfig, PushKernelArg, sys};
use cudarc::nvrtc::Ptx;

use super::blocks::{Decoder, Encoder};
use super::{CudaError, Gpu};
use crate::optim::ClipRule;
use crate::random::Keys;
use crate::round::lanes::Target32;

/// What parameters, gradients and cast sources are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ElementType {
    /// f32.
    F32,
    /// BF16.
    Bf16,
    /// FP16.
    Fp16,
}

impl ElementType {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
        }
    }

    /// Its number in arguments.
    pub(super) const fn number(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::Bf16 => 1,
            Self::Fp16 => 2,
        }
    }

    pub(super) const fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::Fp16 => 2,
        }
    }
}

/// What the PTX says of a kernel: bytes of its arguments, and threads that a block has at most.
#[cfg(test)]
pub(super) fn declared(module: &str, kernel: &str) -> Option<(usize, u32)> {
    let ptx = MODULES.iter().find(|known| known.name == module)?.ptx;
    let entry = ptx.split(".visible .entry ").find(|entry| entry.starts_with(&format!("{kernel}(")))?;
    let number = |before: &str| {
        let (_, rest) = entry.split_once(before)?;
        rest[..rest.find(|c: char| !c.is_ascii_digit())?].parse().ok()
    };
    Some((number(&format!("{kernel}_param_0["))?, number(".maxntid ")? as u32))
}

/// The kernels for every device, by name.
#[cfg(test)]
pub(super) fn kernels() -> impl Iterator<Item = &'static str> {
    let portable = MODULES.iter().filter(|known| !known.name.starts_with("hardware_"));
    let entries = portable.flat_map(|known| known.ptx.lines().filter_map(|line| line.strip_prefix(".visible .entry ")));
    entries.map(|entry| entry.trim_end_matches('('))
}

/// A module of kernels.
struct Module {
    name: &'static str,
    ptx: &'static str,
    /// The PTX version, and the first CUDA version whose driver reads it.
    version: (&'static str, &'static str),
}

/// The kernels' PTX.
const MODULES: [Module; 22] = [
    portable("cast_f32", include_str!("../../kernels/ptx/cast_f32.ptx")),
    portable("cast_bf16", include_str!("../../kernels/ptx/cast_bf16.ptx")),
    portable("cast_fp16", include_str!("../../kernels/ptx/cast_fp16.ptx")),
    portable("step_adamw_f32", include_str!("../../kernels/ptx/step_adamw_f32.ptx")),
    portable("step_adamw_bf16", include_str!("../../kernels/ptx/step_adamw_bf16.ptx")),
    portable("step_adamw_fp16", include_str!("../../kernels/ptx/step_adamw_fp16.ptx")),
    portable("step_adam", include_str!("../../kernels/ptx/step_adam.ptx")),
    portable("step_sgd", include_str!("../../kernels/ptx/step_sgd.ptx")),
    portable("step_lion", include_str!("../../kernels/ptx/step_lion.ptx")),
    portable("step_ademamix", include_str!("../../kernels/ptx/step_ademamix.ptx")),
    portable("step_lamb", include_str!("../../kernels/ptx/step_lamb.ptx")),
    portable("any", include_str!("../../kernels/ptx/any.ptx")),
    portable("prepare", include_str!("../../kernels/ptx/prepare.ptx")),
    portable("blocks_f32", include_str!("../../kernels/ptx/blocks_f32.ptx")),
    portable("blocks_bf16", include_str!("../../kernels/ptx/blocks_bf16.ptx")),
    portable("encode_f32", include_str!("../../kernels/ptx/encode_f32.ptx")),
    portable("encode_bf16", include_str!("../../kernels/ptx/encode_bf16.ptx")),
    portable("encode_fp16", include_str!("../../kernels/ptx/encode_fp16.ptx")),
    portable("decode", include_str!("../../kernels/ptx/decode.ptx")),
    portable("norm", include_str!("../../kernels/ptx/norm.ptx")),
    hardware("hardware_100a", include_str!("../../kernels/ptx/hardware_100a.ptx")),
    hardware("hardware_103a", include_str!("../../kernels/ptx/hardware_103a.ptx")),
];

const fn portable(name: &'static str, ptx: &'static str) -> Module {
    Module { name, ptx, version: ("7.1", "11.1") }
}

const fn hardware(name: &'static str, ptx: &'static str) -> Module {
    Module { name, ptx, version: ("8.8", "12.9") }
}
/// Digest of every kernel source as it was when the PTX was made.
pub const SOURCES: &str = include_str!("../../kernels/ptx/sources.sha256");

/// Where kernels come from.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum Origin {
    /// The PTX of this crate.
    #[default]
    Shipped,
    /// Their sources, compiled for the device; but hardware rounding, which is shipped for its two architectures.
    #[cfg(feature = "nvrtc")]
    Compiled,
}

/// Functions loaded so far. A module is compiled by the driver when its first function is asked for.
#[derive(Debug, Default)]
pub(super) struct Modules {
    origin: Origin,
    functions: Mutex<BTreeMap<String, CudaFunction>>,
    /// Whether the device's approximations do, once it was asked.
    pub(super) seeds: OnceLock<bool>,
}

impl Modules {
    #[cfg(feature = "nvrtc")]
    pub(super) fn of(origin: Origin) -> Self {
        Self { origin, ..Self::default() }
    }

    /// The function of this name in this module.
    fn function(&self, gpu: &Gpu, module: &'static str, name: &str) -> Result<CudaFunction, CudaError> {
        let mut functions = self.functions.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(function) = functions.get(name) {
            return Ok(function.clone());
        }
        let missing = || CudaError::Driver {
            name: "CUDA_ERROR_NOT_FOUND".into(),
            message: format!("no kernel {name} in module {module}"),
        };
        let shipped = MODULES.iter().find(|known| known.name == module).ok_or_else(missing)?;
        let (image, text) = self.image(gpu, shipped)?;
        let loaded = gpu.context().load_module(image).map_err(|error| match error.0 {
            sys::CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
                let (ptx, needed) = shipped.version;
                CudaError::PtxTooNew { ptx, needed, driver: driver_version() }
            }
            _ => error.into(),
        })?;
        // Every kernel of the module, so that it is compiled once.
        for line in text.lines().filter_map(|line| line.strip_prefix(".visible .entry ")) {
            let entry = line.trim_end_matches('(');
            functions.insert(entry.into(), loaded.load_function(entry)?);
        }
        functions.get(name).cloned().ok_or_else(missing)
    }

    /// What the driver loads, and its PTX, which names the kernels.
    fn image(&self, gpu: &Gpu, shipped: &Module) -> Result<(Ptx, Cow<'static, str>), CudaError> {
        match self.origin {
            #[cfg(feature = "nvrtc")]
            Origin::Compiled if super::nvrtc::MODULES.contains(&shipped.name) => {
                let compiled = super::nvrtc::compile(shipped.name, gpu.capability()?)?;
                Ok((Ptx::from_binary(compiled.cubin), compiled.ptx.into()))
            }
            _ => {
                let _ = gpu;
                Ok((Ptx::from_src(shipped.ptx), shipped.ptx.into()))
            }
        }
    }
}

fn driver_version() -> String {
    let mut version = 0;
    // SAFETY: writes one integer; the driver was found before any module is loaded.
    match unsafe { sys::cuDriverGetVersion(&raw mut version) } {
        sys::CUresult::CUDA_SUCCESS => format!("{}.{}", version / 1000, version % 1000 / 10),
        _ => "unknown".into(),
    }
}

/// Arguments of the kernels of cast.cu.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct CastArguments {
    pub(super) x: u64,
    pub(super) y: u64,
    pub(super) n: u64,
    pub(super) group: u32,
    pub(super) skip: u32,
    pub(super) vector: u32,
    pub(super) keys: [u32; 5],
    pub(super) target: Target32<false>,
}

/// Arguments of `norm_chunks` of norm.cu.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct ChunksArguments {
    pub(super) chunks: u64,
    pub(super) sums: u64,
}

/// Arguments of `norm_combine` of norm.cu.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct CombineArguments {
    pub(super) sums: u64,
    pub(super) n: u64,
    pub(super) out: u64,
    pub(super) norm: u64,
    pub(super) clip: ClipRule,
}

/// Arguments of the casts of encode.cu.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct EncodeArguments {
    pub(super) x: u64,
    pub(super) codes: u64,
    pub(super) scales: u64,
    pub(super) global: u64,
    pub(super) n: u64,
    pub(super) group: u32,
    pub(super) skip: u32,
    pub(super) vector: u32,
    pub(super) log_block: u32,
    pub(super) keys: [u32; 5],
    pub(super) encoder: Encoder,
}

/// Arguments of the largest magnitude of encode.cu.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct LargestArguments {
    pub(super) x: u64,
    pub(super) largest: u64,
    pub(super) n: u64,
    pub(super) vector: u32,
}

/// Arguments of the scale of the whole of encode.cu.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct GlobalArguments {
    pub(super) global: u64,
}

/// Arguments of the kernels of decode.cu.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct DecodeArguments {
    pub(super) codes: u64,
    pub(super) scales: u64,
    pub(super) global: u64,
    pub(super) y: u64,
    pub(super) n: u64,
    pub(super) vector: u32,
    pub(super) log_block: u32,
    pub(super) rule: u32,
    pub(super) decoder: Decoder,
}

/// Arguments of the kernels of hardware.cu.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct HardwareArguments {
    pub(super) x: u64,
    pub(super) y: u64,
    pub(super) n: u64,
    pub(super) group: u32,
    pub(super) skip: u32,
    pub(super) vector: u32,
    pub(super) keys: [u32; 5],
}

// SAFETY: `repr(C)`, integers and floats alone, in the layout of the struct of the same fields in cast.cu.
unsafe impl DeviceRepr for CastArguments {}
// SAFETY: as above, in norm.cu.
unsafe impl DeviceRepr for ChunksArguments {}
// SAFETY: as above.
unsafe impl DeviceRepr for CombineArguments {}
// SAFETY: as above, in encode.cu.
unsafe impl DeviceRepr for EncodeArguments {}
// SAFETY: as above; four bytes behind the last field are not read.
unsafe impl DeviceRepr for LargestArguments {}
// SAFETY: as above.
unsafe impl DeviceRepr for GlobalArguments {}
// SAFETY: as above, in decode.cu.
unsafe impl DeviceRepr for DecodeArguments {}
// SAFETY: as above, in hardware.cu.
unsafe impl DeviceRepr for HardwareArguments {}

/// Threads of a block.
pub(super) const THREADS: u32 = 128;

/// How elements are spread over threads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Threads of a block.
    pub(super) threads: u32,
    /// Elements of a thread.
    pub(super) each: u32,
}

impl Shape {
    /// So many elements to a thread, in blocks of [`THREADS`].
    pub(super) const fn of(each: u32) -> Self {
        Self { threads: THREADS, each }
    }
}

/// A kernel and how often it runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launch<'a> {
    pub(super) module: &'static str,
    pub(super) kernel: &'a str,
    pub(super) blocks: u32,
    /// Of a block.
    pub(super) threads: u32,
}

/// Where kernels run: on a GPU, or in tests on the host.
pub(super) trait Device {
    /// # Safety
    /// The kernel takes `arguments`, whose memory is as it expects, and is made for this grid.
    unsafe fn enqueue<A: DeviceRepr>(&self, launch: Launch<'_>, arguments: &A) -> Result<(), CudaError>;
}

impl Device for Gpu {
    unsafe fn enqueue<A: DeviceRepr>(&self, launch: Launch<'_>, arguments: &A) -> Result<(), CudaError> {
        #[cfg(test)]
        if let Some(emulation) = self.emulation() {
            // SAFETY: promised by the caller.
            return unsafe { emulation.enqueue(launch, arguments) };
        }
        let Launch { module, kernel, blocks, threads } = launch;
        let function = self.modules().function(self, module, kernel)?;
        let config = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (threads, 1, 1), shared_mem_bytes: 0 };
        let mut builder = self.stream().launch_builder(&function);
        builder.arg(arguments);
        // SAFETY: promised by the caller.
        unsafe { builder.launch(config) }?;
        Ok(())
    }
}

/// Launches a kernel over `n` elements.
///
/// # Safety
/// The kernel takes `arguments`, whose memory is as it expects and covers `n` elements, and is made for this shape.
pub(super) unsafe fn launch<A: DeviceRepr>(
    device: &impl Device,
    module: &'static str,
    kernel: &str,
    n: u64,
    Shape { threads, each }: Shape,
    arguments: &A,
) -> Result<(), CudaError> {
    let blocks = n.div_ceil(u64::from(threads * each));
    let blocks = u32::try_from(blocks).map_err(|_| CudaError::Length { argument: "n", expected: 1 << 40, got: n })?;
    // SAFETY: promised by the caller; the grid covers the elements and kernels bound themselves by `n`.
    unsafe { device.enqueue(Launch { module, kernel, blocks, threads }, arguments) }
}

/// A piece of a tensor whose groups share a high half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Its first element, counted from the first of the call.
    pub(super) start: u64,
    /// Its number of elements.
    pub(super) len: u64,
    /// High half of its groups.
    pub(super) high: u32,
    /// Low half of its first group.
    pub(super) group: u32,
    /// Draws of that group before its first element.
    pub(super) skip: u32,
}

/// Cuts `n` elements from index `first` on where the high half of the group changes. A group has `2^shift` elements.
pub(super) fn pieces(first: u64, n: u64, shift: u32) -> impl Iterator<Item = Piece> {
    let mut start = 0;
    core::iter::from_fn(move || {
        (start < n).then(|| {
            let index = first.wrapping_add(start);
            let group = index >> shift;
            let until_high_changes = (1u64 << (32 + shift)) - (index & ((1 << (32 + shift)) - 1));
            let len = (n - start).min(until_high_changes);
            let piece = Piece {
                start,
                len,
                high: (group >> 32) as u32,
                group: group as u32,
                skip: (index & ((1 << shift) - 1)) as u32,
            };
            start += len;
            piece
        })
    })
}

/// Keys of a role for a piece; zeros where nothing is drawn.
pub(super) fn keys(draw: Option<(u64, u64, u64, u32)>, high: u32) -> [u32; 5] {
    draw.map_or([0; 5], |(seed, step, tensor, role)| Keys::new(seed, step, tensor, role, high).words())
}

/// Refuses two ranges of bytes that share one.
pub(super) fn disjoint(ranges: &[(&'static str, u64, u64)]) -> Result<(), CudaError> {
    for (i, &(first, first_at, bytes)) in ranges.iter().enumerate() {
        for &(second, second_at, more) in &ranges[i + 1..] {
            if bytes > 0
                && more > 0
                && first_at < second_at.saturating_add(more)
                && second_at < first_at.saturating_add(bytes)
            {
                return Err(CudaError::Overlap { first, second, first_at, second_at, bytes });
            }
        }
    }
    Ok(())
}

/// Refuses an address that is not a multiple of its element's size.
pub(super) fn aligned(argument: &'static str, address: u64, align: u64) -> Result<(), CudaError> {
    if address.is_multiple_of(align) { Ok(()) } else { Err(CudaError::Misaligned { argument, align, address }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_and_share_a_high_half() {
        for (first, n) in [(0, 10), (3, 10), ((1 << 34) - 5, 20), ((1 << 34) - 5, 1 << 36), (u64::MAX - 3, 10), (7, 0)]
        {
            for shift in [1, 2] {
                let mut next = 0;
                for piece in pieces(first, n, shift) {
                    assert_eq!(piece.start, next);
                    let index = |i: u64| first.wrapping_add(i) >> shift;
                    assert_eq!(piece.high, (index(piece.start) >> 32) as u32);
                    assert_eq!(piece.high, (index(piece.start + piece.len - 1) >> 32) as u32);
                    assert_eq!(
                        (piece.group, u64::from(piece.skip)),
                        (index(next) as u32, first.wrapping_add(next) & ((1 << shift) - 1))
                    );
                    next += piece.len;
                }
                assert_eq!(next, n);
            }
        }
    }

    #[test]
    fn layouts_are_those_of_the_kernels() {
        use crate::cuda::plan::AnyArguments;
        assert_eq!(
            (size_of::<CastArguments>(), size_of::<AnyArguments>(), size_of::<HardwareArguments>()),
            (112, 1264, 56)
        );
        for (module, bytes) in [("cast_", 112), ("blocks_", 1264), ("hardware_", 56)] {
            for Module { name, ptx: source, .. } in MODULES.iter().filter(|known| known.name.starts_with(module)) {
                let entries = source.matches(".visible .entry ").count();
                let parameters = source.matches(&format!("_param_0[{bytes}]")).count();
                assert!(
                    entries > 0 && entries == parameters,
                    "{name}: {entries} kernels, {parameters} with {bytes} bytes"
                );
                assert!(!source.contains("_param_1"), "{name}");
            }
        }
    }

    #[test]
    fn layouts_of_casts_into_blocks() {
        assert_eq!((size_of::<EncodeArguments>(), size_of::<DecodeArguments>()), (152, 88));
        assert_eq!((size_of::<LargestArguments>(), size_of::<GlobalArguments>()), (32, 8));
        let encode = MODULES.iter().filter(|known| known.name.starts_with("encode_"));
        let decode = MODULES.iter().filter(|known| known.name == "decode");
        for (Module { name, ptx: source, .. }, sizes) in encode
            .map(|known| (known, vec![(152, 6), (32, 1), (8, 1)]))
            .chain(decode.map(|known| (known, vec![(88, 3)])))
        {
            let entries: usize = sizes.iter().map(|(_, count)| count).sum();
            assert_eq!(source.matches(".visible .entry ").count(), entries, "{name}");
            for (bytes, count) in sizes {
                assert_eq!(source.matches(&format!("_param_0[{bytes}]")).count(), count, "{name}: {bytes}");
            }
            assert!(!source.contains("_param_1"), "{name}");
        }
    }

    #[test]
    fn layouts_of_the_norm() {
        assert_eq!((size_of::<ChunksArguments>(), size_of::<CombineArguments>(), size_of::<ClipRule>()), (16, 56, 24));
        let source = MODULES.iter().find(|known| known.name == "norm").unwrap().ptx;
        assert_eq!(source.matches(".visible .entry ").count(), 2);
        assert!(source.contains("norm_chunks_param_0[16]") && source.contains("norm_combine_param_0[56]"));
        assert!(!source.contains("_param_1"));
    }

    #[test]
    fn overlap() {
        assert!(disjoint(&[("a", 0, 8), ("b", 8, 8), ("c", 4, 0)]).is_ok());
        let error = disjoint(&[("a", 0, 8), ("b", 100, 8), ("c", 7, 1)]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "a and c: expected memory that does not overlap, got 0x0 and 0x7, 8 bytes from the former"
        );
    }
}
