//! Kernels compiled at run time by NVRTC, from the sources in this crate, for one architecture.
//!
//! [`Gpu::compiled`](super::Gpu::compiled) does that by itself; the functions here are for looking at what comes out, which
//! needs no GPU. NVRTC is loaded when first asked for. Its functions are called through a table of this crate's own: cudarc
//! panics where the library, or a function of it, is missing, and looks for the versions known when it was built.

use alloc::borrow::ToOwned;
use alloc::ffi::CString;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec;
use alloc::vec::Vec;
use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr;
use std::sync::OnceLock;

use libloading::Library;

use super::CudaError;

/// Names of the modules.
pub const MODULES: [&str; 20] = [
    "cast_f32",
    "cast_bf16",
    "cast_fp16",
    "step_adamw_f32",
    "step_adamw_bf16",
    "step_adamw_fp16",
    "step_adam",
    "step_sgd",
    "step_lion",
    "step_ademamix",
    "step_lamb",
    "any",
    "prepare",
    "blocks_f32",
    "blocks_bf16",
    "encode_f32",
    "encode_bf16",
    "encode_fp16",
    "decode",
    "norm",
];

/// The kernels' sources: files that are compiled, and those that they include.
const SOURCES: [(&str, &CStr); 8] = [
    ("cast", source(concat!(include_str!("../../kernels/cast.cu"), "\0"))),
    ("step", source(concat!(include_str!("../../kernels/step.cu"), "\0"))),
    ("any", source(concat!(include_str!("../../kernels/any.cu"), "\0"))),
    ("prepare", source(concat!(include_str!("../../kernels/prepare.cu"), "\0"))),
    ("blocks", source(concat!(include_str!("../../kernels/blocks.cu"), "\0"))),
    ("encode", source(concat!(include_str!("../../kernels/encode.cu"), "\0"))),
    ("decode", source(concat!(include_str!("../../kernels/decode.cu"), "\0"))),
    ("norm", source(concat!(include_str!("../../kernels/norm.cu"), "\0"))),
];
const HEADERS: [(&CStr, &CStr); 13] = [
    (c"common.cuh", source(concat!(include_str!("../../kernels/common.cuh"), "\0"))),
    (c"exact.cuh", source(concat!(include_str!("../../kernels/exact.cuh"), "\0"))),
    (c"random.cuh", source(concat!(include_str!("../../kernels/random.cuh"), "\0"))),
    (c"round.cuh", source(concat!(include_str!("../../kernels/round.cuh"), "\0"))),
    (c"memory.cuh", source(concat!(include_str!("../../kernels/memory.cuh"), "\0"))),
    (c"rules.cuh", source(concat!(include_str!("../../kernels/rules.cuh"), "\0"))),
    (c"many.cuh", source(concat!(include_str!("../../kernels/many.cuh"), "\0"))),
    (c"any.cuh", source(concat!(include_str!("../../kernels/any.cuh"), "\0"))),
    (c"sums.cuh", source(concat!(include_str!("../../kernels/sums.cuh"), "\0"))),
    (c"blocks.cuh", source(concat!(include_str!("../../kernels/blocks.cuh"), "\0"))),
    (c"bounds.cuh", source(concat!(include_str!("../../kernels/bounds.cuh"), "\0"))),
    (c"scaled.cuh", source(concat!(include_str!("../../kernels/scaled.cuh"), "\0"))),
    (c"norm.cuh", source(concat!(include_str!("../../kernels/norm.cuh"), "\0"))),
];

const fn source(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("a source has a zero byte"),
    }
}

#[cfg(target_os = "windows")]
const LIBRARIES: [&str; 3] = ["nvrtc64_130_0.dll", "nvrtc64_120_0.dll", "nvrtc64_112_0.dll"];
#[cfg(target_os = "windows")]
const TRIED: &str = "nvrtc64_130_0.dll, nvrtc64_120_0.dll, nvrtc64_112_0.dll";
#[cfg(not(target_os = "windows"))]
const LIBRARIES: [&str; 4] = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2"];
#[cfg(not(target_os = "windows"))]
const TRIED: &str = "libnvrtc.so, libnvrtc.so.13, libnvrtc.so.12, libnvrtc.so.11.2";

type Program = *mut c_void;

macro_rules! functions {
    ($($name:ident = $symbol:literal ($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions of NVRTC, and the library that they live in.
        struct Nvrtc {
            $($name: unsafe extern "C" fn($($argument),*) -> $result,)*
            _library: Library,
        }

        impl Nvrtc {
            fn of(library: Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: the types are those of nvrtc.h, unchanged since CUDA 11.2.
                    $($name: *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }?,)*
                    _library: library,
                })
            }
        }
    };
}

functions! {
    version = "nvrtcVersion" (*mut c_int, *mut c_int) -> c_int;
    architecture_count = "nvrtcGetNumSupportedArchs" (*mut c_int) -> c_int;
    architectures = "nvrtcGetSupportedArchs" (*mut c_int) -> c_int;
    create = "nvrtcCreateProgram"
        (*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> c_int;
    compile = "nvrtcCompileProgram" (Program, c_int, *const *const c_char) -> c_int;
    ptx_size = "nvrtcGetPTXSize" (Program, *mut usize) -> c_int;
    ptx = "nvrtcGetPTX" (Program, *mut c_char) -> c_int;
    cubin_size = "nvrtcGetCUBINSize" (Program, *mut usize) -> c_int;
    cubin = "nvrtcGetCUBIN" (Program, *mut c_char) -> c_int;
    log_size = "nvrtcGetProgramLogSize" (Program, *mut usize) -> c_int;
    log = "nvrtcGetProgramLog" (Program, *mut c_char) -> c_int;
    destroy = "nvrtcDestroyProgram" (*mut Program) -> c_int;
    error_text = "nvrtcGetErrorString" (c_int) -> *const c_char;
}

/// A function of NVRTC that gives the size of a text, and the one that gives the text.
type Text = (unsafe extern "C" fn(Program, *mut usize) -> c_int, unsafe extern "C" fn(Program, *mut c_char) -> c_int);

impl Nvrtc {
    /// The library, loaded once.
    fn get() -> Result<&'static Self, CudaError> {
        static LOADED: OnceLock<Result<Nvrtc, CudaError>> = OnceLock::new();
        let loaded = LOADED.get_or_init(|| {
            let mut reasons = vec![];
            for name in LIBRARIES {
                // SAFETY: loading NVRTC runs its initialisers, which is what a caller asks for.
                match unsafe { Library::new(name) }.and_then(Self::of) {
                    Ok(nvrtc) => return Ok(nvrtc),
                    Err(error) => reasons.push(error.to_string()),
                }
            }
            Err(CudaError::NoNvrtc { tried: TRIED, reason: reasons.join("; ") })
        });
        loaded.as_ref().map_err(Clone::clone)
    }

    fn version_text(&self) -> String {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes two integers.
        unsafe { (self.version)(&raw mut major, &raw mut minor) };
        format!("{major}.{minor}")
    }

    /// Numbers of the architectures, as 90.
    fn supported(&self) -> Vec<c_int> {
        let mut count = 0;
        // SAFETY: writes one integer.
        unsafe { (self.architecture_count)(&raw mut count) };
        let mut numbers = vec![0; usize::try_from(count).unwrap_or(0)];
        if !numbers.is_empty() {
            // SAFETY: writes as many integers as it said.
            unsafe { (self.architectures)(numbers.as_mut_ptr()) };
        }
        numbers
    }

    fn describe(&self, code: c_int) -> String {
        // SAFETY: gives a static text for every code.
        unsafe { CStr::from_ptr((self.error_text)(code)) }.to_string_lossy().into_owned()
    }

    /// The bytes of a text of a program.
    fn read(&self, program: &Held<'_>, (size, text): Text) -> Result<Vec<u8>, c_int> {
        let mut length = 0;
        // SAFETY: writes one integer.
        checked(unsafe { size(program.program, &raw mut length) })?;
        let mut bytes = vec![0u8; length];
        // SAFETY: writes as many bytes as it said.
        checked(unsafe { text(program.program, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

fn checked(code: c_int) -> Result<(), c_int> {
    if code == 0 { Ok(()) } else { Err(code) }
}

/// A program, destroyed when dropped.
struct Held<'a> {
    nvrtc: &'a Nvrtc,
    program: Program,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `create`, destroyed once.
        unsafe { (self.nvrtc.destroy)(&raw mut self.program) };
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end_matches(['\0', '\n']).to_owned()
}

/// A module as NVRTC made it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Compiled {
    /// The PTX.
    pub ptx: String,
    /// The same assembled for the architecture.
    pub cubin: Vec<u8>,
}

/// Checks that NVRTC is there and compiles for a compute capability.
///
/// # Errors
/// [`CudaError::NoNvrtc`] and [`CudaError::Architecture`].
pub fn supports((major, minor): (u32, u32)) -> Result<(), CudaError> {
    let nvrtc = Nvrtc::get()?;
    let supported = nvrtc.supported();
    if supported.iter().any(|&number| i64::from(number) == i64::from(major) * 10 + i64::from(minor)) {
        return Ok(());
    }
    Err(CudaError::Architecture {
        architecture: format!("sm_{major}{minor}"),
        version: nvrtc.version_text(),
        supported: supported.iter().map(|number| format!("sm_{number}")).collect::<Vec<_>>().join(", "),
    })
}

/// Compiles one of [`MODULES`] for a compute capability, with the options under which the shipped PTX was made.
///
/// # Errors
/// As [`supports`], and [`CudaError::Compile`] with the compiler's log.
pub fn compile(module: &str, capability: (u32, u32)) -> Result<Compiled, CudaError> {
    supports(capability)?;
    let nvrtc = Nvrtc::get()?;
    let architecture = format!("sm_{}{}", capability.0, capability.1);
    let refused = |error: String, log: String| CudaError::Compile {
        module: module.to_owned(),
        architecture: architecture.clone(),
        version: nvrtc.version_text(),
        error,
        log,
    };
    // One source serves several types; that of the norm is for all.
    let (file, kind) = module.split_once('_').unwrap_or((module, "ALL"));
    let source = SOURCES.iter().find(|(name, _)| *name == file && MODULES.contains(&module));
    let Some(&(_, source)) = source else {
        return Err(refused("no such module".to_owned(), format!("there are {}", MODULES.join(", "))));
    };
    let options = [
        format!("--gpu-architecture={architecture}"),
        "--std=c++17".to_owned(),
        // A multiplication and an addition stay two operations, each rounded, as on the CPU.
        "--fmad=false".to_owned(),
        format!("--define-macro=SOURCE_{}", kind.to_uppercase()),
    ];
    build(nvrtc, module, source, &options).map_err(|(code, log)| refused(nvrtc.describe(code), log))
}

/// Compiles a source with the headers of the kernels in memory; an error comes with the log, if there is one.
fn build(nvrtc: &Nvrtc, name: &str, source: &CStr, options: &[String]) -> Result<Compiled, (c_int, String)> {
    let strings =
        |texts: &[String]| texts.iter().map(|text| CString::new(text.as_str()).unwrap_or_default()).collect::<Vec<_>>();
    let pointers = |texts: &[CString]| texts.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
    let name = strings(&[format!("{name}.cu")]);
    let headers = HEADERS.map(|(_, text)| text.as_ptr());
    let includes = HEADERS.map(|(name, _)| name.as_ptr());
    let without_log = |code| (code, String::new());
    let mut program = ptr::null_mut();
    // SAFETY: every pointer is to a text that ends in zero and outlives the program, in lists as long as said.
    let made = unsafe {
        (nvrtc.create)(
            &raw mut program,
            source.as_ptr(),
            name[0].as_ptr(),
            HEADERS.len() as c_int,
            headers.as_ptr(),
            includes.as_ptr(),
        )
    };
    checked(made).map_err(without_log)?;
    let program = Held { nvrtc, program };
    let options = strings(options);
    let list = pointers(&options);
    // SAFETY: as above.
    let compiled = unsafe { (nvrtc.compile)(program.program, list.len() as c_int, list.as_ptr()) };
    checked(compiled).map_err(|code| {
        let log = nvrtc.read(&program, (nvrtc.log_size, nvrtc.log));
        (code, log.map_or_else(|_| String::new(), |log| text(&log)))
    })?;
    let ptx = nvrtc.read(&program, (nvrtc.ptx_size, nvrtc.ptx)).map_err(without_log)?;
    let cubin = nvrtc.read(&program, (nvrtc.cubin_size, nvrtc.cubin)).map_err(without_log)?;
    Ok(Compiled { ptx: text(&ptx), cubin })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All of the kernels' files but the one of the two modules that are shipped compiled.
    #[test]
    fn every_file_is_there() {
        let sources = SOURCES.iter().map(|(name, _)| format!("{name}.cu"));
        let headers = HEADERS.iter().map(|(name, _)| name.to_string_lossy().into_owned());
        let known: Vec<String> = sources.chain(headers).collect();
        let folder = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels")).unwrap();
        for name in folder.filter_map(|entry| entry.unwrap().file_name().into_string().ok()) {
            let is_source = name.ends_with(".cu") || name.ends_with(".cuh");
            assert!(!is_source || name == "hardware.cu" || known.contains(&name), "{name}");
        }
    }

    /// A source that is no program: the error carries the compiler's log.
    #[test]
    fn a_refused_source_says_why() {
        let Ok(nvrtc) = Nvrtc::get() else { return };
        let (code, log) =
            build(nvrtc, "wrong", c"#include \"common.cuh\"\nint f() { return nothing; }", &[]).unwrap_err();
        assert_eq!(nvrtc.describe(code), "NVRTC_ERROR_COMPILATION");
        assert!(log.contains("wrong.cu(2)") && log.contains("\"nothing\""), "{log}");
    }
}
