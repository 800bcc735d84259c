//! A device in tests: kernels compiled for the host by g++ over kernels/emulation, and launched by the code that launches them on
//! a GPU. Addresses are those of the host.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::process::Command;
use std::sync::{Mutex, OnceLock};

use bytemuck::Pod;
use cudarc::driver::DeviceRepr;
use libloading::Library;

use super::CudaError;
use super::host_tests::has_compiler;
use super::launch::{Device, Launch, declared};

/// Memory of launches: `Range` of emulate.cpp.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Range {
    at: u64,
    bytes: u64,
    writable: u64,
}

/// `Launch` of emulate.cpp.
#[repr(C)]
struct EmulatedLaunch {
    call: unsafe extern "C" fn(*const c_void),
    context: *const c_void,
    blocks: u64,
    threads: u64,
    order: u64,
    ranges: *const Range,
    range_count: u64,
}

/// A kernel and its arguments, which it takes by value.
struct Call<A> {
    kernel: unsafe extern "C" fn(A),
    arguments: *const A,
}

/// Runs a kernel as one thread.
///
/// # Safety
/// `context` is a `Call<A>`, whose kernel takes an `A`.
unsafe extern "C" fn call<A>(context: *const c_void) {
    // SAFETY: promised by the caller; arguments are plain integers and floats.
    unsafe {
        let call = &*context.cast::<Call<A>>();
        (call.kernel)(call.arguments.read());
    }
}

type Emulate = unsafe extern "C" fn(*const EmulatedLaunch, *mut c_char, u64) -> c_int;

/// A module of kernels and the emulation, which runs one launch at a time.
struct Module {
    library: Library,
    free: Mutex<()>,
}

impl Module {
    /// The module of this name, compiled once.
    fn of(name: &'static str) -> &'static Self {
        static MODULES: Mutex<BTreeMap<&str, &OnceLock<Module>>> = Mutex::new(BTreeMap::new());
        let mut modules = MODULES.lock().unwrap();
        let module = *modules.entry(name).or_insert_with(|| Box::leak(Box::default()));
        drop(modules);
        module.get_or_init(|| Self::compiled(name))
    }

    fn compiled(name: &str) -> Self {
        let out = std::env::temp_dir().join(format!("halfulp-emulated-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&out).unwrap();
        let [objects, runner, library] = ["kernels.o", "emulate.o", "kernels.so"].map(|file| out.join(file));
        // One source serves several types.
        let (file, kind) = name.split_once('_').unwrap_or((name, "ALL"));
        let source = if file == "misuse" { "emulation/misuse.cu".into() } else { format!("{file}.cu") };
        let kind = format!("-DSOURCE_{}", kind.to_uppercase());
        compiler().args(CHECKED).arg(kind).args(["-x", "c++", "-c", &source, "-o"]).arg(&objects).run();
        std::fs::write(&runner, emulation()).unwrap();
        compiler().args(["-shared", "-Wl,-z,defs", "-o"]).args([&library, &objects, &runner]).run();
        // SAFETY: made above; it has no initialisers.
        let library = unsafe { Library::new(&library) }.unwrap();
        std::fs::remove_dir_all(&out).unwrap();
        Self { library, free: Mutex::default() }
    }
}

/// g++ in the folder of the kernels.
fn compiler() -> Command {
    let mut command = Command::new("g++");
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels"));
    // A multiplication and an addition stay two operations, each rounded.
    command.args(["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-strict-aliasing"]);
    command.args(["-Wall", "-Werror", "-Wno-parentheses", "-Wno-unknown-pragmas"]);
    command
}

/// What makes kernels call the emulation, whose answers are in emulate.cpp.
const CHECKED: [&str; 7] = [
    "-fsanitize=thread,undefined",
    "-fno-sanitize=vptr",
    "-fno-sanitize-recover=undefined",
    "-I.",
    "-include",
    "emulation/emulate.hpp",
    "-Wno-unused",
];

trait Run {
    /// Runs a compiler, which must succeed.
    fn run(&mut self);
}
impl Run for Command {
    fn run(&mut self) {
        assert!(self.status().unwrap().success(), "{self:?}");
    }
}

/// The object of emulate.cpp, of which every module has its own copy.
fn emulation() -> &'static [u8] {
    static OBJECT: OnceLock<Vec<u8>> = OnceLock::new();
    OBJECT.get_or_init(|| {
        let object = std::env::temp_dir().join(format!("halfulp-emulation-{}.o", std::process::id()));
        compiler().args(["-O2", "-c", "emulation/emulate.cpp", "-o"]).arg(&object).run();
        let bytes = std::fs::read(&object).unwrap();
        std::fs::remove_file(&object).unwrap();
        bytes
    })
}

/// Blocks, and threads of a block, in this order.
pub(super) const FORWARD: u64 = 0;
pub(super) const REVERSE: u64 = 1;

/// Kernels that were launched, and what their PTX says of them.
pub(super) static SEEN: Mutex<BTreeMap<String, Option<(usize, u32)>>> = Mutex::new(BTreeMap::new());

/// Memory of an [`Emulated`]: words, and which bytes of them are in use.
struct Memory {
    words: Vec<Cell<u128>>,
    range: Range,
}

/// The host as a device. Kernels see the memory that was put here and no other.
pub(super) struct Emulated {
    /// [`FORWARD`], [`REVERSE`], or the seed of a shuffle.
    pub(super) order: u64,
    memory: RefCell<Vec<Memory>>,
}

impl Emulated {
    /// `None` without a compiler, and off Linux.
    pub(super) fn new(order: u64) -> Option<Self> {
        (cfg!(target_os = "linux") && has_compiler()).then(|| Self { order, memory: RefCell::default() })
    }

    /// Memory that kernels read and write, `offset` bytes past a multiple of 16: its address.
    pub(super) fn put<T: Pod>(&self, values: &[T], offset: usize) -> u64 {
        self.add(values, offset, true)
    }

    /// Memory that kernels only read.
    pub(super) fn input<T: Pod>(&self, values: &[T], offset: usize) -> u64 {
        self.add(values, offset, false)
    }

    fn add<T: Pod>(&self, values: &[T], offset: usize, writable: bool) -> u64 {
        let bytes = size_of_val(values);
        let words = vec![Cell::new(0); (offset + bytes).div_ceil(16) + 1];
        let range = Range {
            at: words.as_ptr().expose_provenance() as u64 + offset as u64,
            bytes: bytes as u64,
            writable: writable.into(),
        };
        self.memory.borrow_mut().push(Memory { words, range });
        self.set(range.at, values);
        range.at
    }

    /// Writes what was put at an address.
    pub(super) fn set<T: Pod>(&self, at: u64, values: &[T]) {
        let memory = self.memory.borrow();
        let memory = memory.iter().find(|memory| memory.range.at == at).unwrap();
        let bytes = bytemuck::cast_slice::<T, u8>(values);
        assert_eq!(bytes.len() as u64, memory.range.bytes);
        let offset = at as usize - memory.words.as_ptr().addr();
        // SAFETY: as many bytes as the range has, in cells of this thread.
        unsafe { memory.words.as_ptr().cast::<u8>().add(offset).cast_mut().copy_from(bytes.as_ptr(), bytes.len()) };
    }

    /// Changes what was put at an address.
    pub(super) fn edit(&self, at: u64, change: impl FnOnce(&mut [u8])) {
        let mut bytes = self.get::<u8>(at);
        change(&mut bytes);
        self.set(at, &bytes);
    }

    /// Sets bytes within what was put somewhere.
    pub(super) fn fill(&self, at: u64, bytes: usize, byte: u8) {
        let holds = |range: &Range| range.at <= at && at + bytes as u64 <= range.at + range.bytes;
        let start = self.memory.borrow().iter().find(|memory| holds(&memory.range)).unwrap().range.at;
        self.edit(start, |all| all[(at - start) as usize..][..bytes].fill(byte));
    }

    /// Takes it away.
    pub(super) fn forget(&self, at: u64) {
        self.memory.borrow_mut().retain(|memory| memory.range.at != at);
    }

    /// All of what was put at an address, as it is now.
    pub(super) fn get<T: Pod>(&self, at: u64) -> Vec<T> {
        let memory = self.memory.borrow();
        let memory = memory.iter().find(|memory| memory.range.at == at).unwrap();
        let offset = at as usize - memory.words.as_ptr().addr();
        let mut values = bytemuck::allocation::zeroed_vec(memory.range.bytes as usize / size_of::<T>());
        let bytes = bytemuck::cast_slice_mut::<T, u8>(&mut values);
        // SAFETY: as in `set`.
        unsafe { memory.words.as_ptr().cast::<u8>().add(offset).copy_to(bytes.as_mut_ptr(), bytes.len()) };
        values
    }
}

impl Device for Emulated {
    unsafe fn enqueue<A: DeviceRepr>(&self, launch: Launch<'_>, arguments: &A) -> Result<(), CudaError> {
        let Launch { module, kernel, blocks, threads } = launch;
        let refused = |message: String| CudaError::Driver { name: kernel.into(), message };
        let known = *SEEN
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .entry(kernel.into())
            .or_insert_with(|| declared(module, kernel));
        if let Some((bytes, most)) = known {
            if bytes != size_of::<A>() || threads > most {
                let got = size_of::<A>();
                return Err(refused(format!("{got} bytes for {bytes}, {threads} threads for {most}")));
            }
        } else if module != "misuse" {
            return Err(refused(format!("no such kernel in module {module}")));
        }
        let Module { library, free } = Module::of(module);
        let ranges: Vec<Range> = self.memory.borrow().iter().map(|memory| memory.range).collect();
        let _running = free.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut message = [0u8; 512];
        // SAFETY: kernels take the arguments of their launches by value; memory is checked where it is accessed.
        let failed = unsafe {
            let emulate = library.get::<Emulate>(b"emulate\0").unwrap();
            let kernel = *library.get::<unsafe extern "C" fn(A)>(kernel.as_bytes()).unwrap();
            let context = Call { kernel, arguments };
            let launch = EmulatedLaunch {
                call: call::<A>,
                context: (&raw const context).cast(),
                blocks: blocks.into(),
                threads: threads.into(),
                order: self.order,
                ranges: ranges.as_ptr(),
                range_count: ranges.len() as u64,
            };
            emulate(&raw const launch, message.as_mut_ptr().cast(), message.len() as u64)
        };
        if failed == 0 {
            return Ok(());
        }
        Err(refused(CStr::from_bytes_until_nul(&message).unwrap().to_string_lossy().into_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `Words` of misuse.cu.
    #[derive(Clone, Copy, Debug)]
    #[repr(C)]
    struct Words {
        x: u64,
        y: u64,
        n: u32,
    }

    // SAFETY: `repr(C)`, integers alone, in the layout of the struct of the same fields in misuse.cu.
    unsafe impl DeviceRepr for Words {}

    fn run(device: &Emulated, kernel: &str, blocks: u32, words: Words) -> Result<(), String> {
        let launch = Launch { module: "misuse", kernel, blocks, threads: 64 };
        // SAFETY: the kernels take these arguments; what they do wrong is caught.
        unsafe { device.enqueue(launch, &words) }.map_err(|error| error.to_string())
    }

    #[test]
    fn misuse_is_told() {
        for (kernel, expected) in [
            (
                "wrong_read",
                "block 0, thread 63: read of 4 bytes outside of all memory: at byte 260 of memory 1, which has 260",
            ),
            ("wrong_end", "block 0, thread 0: read of 8 bytes at byte 256 of memory 1, which has 260"),
            ("wrong_write", "write at byte 0 of memory 1, which is only read"),
            ("wrong_vector", "block 0, thread 5: a null or misaligned pointer at emulation/misuse.cu:"),
            ("wrong_barrier", "a barrier that 24 of 64 threads never reach"),
            (
                "wrong_lanes",
                "lanes diverged: a collective of mask 0xffffffff waits for lanes 0xffff, of which the first waits at a barrier",
            ),
            (
                "wrong_end_of_lane",
                "lanes diverged: a collective of mask 0xffffffff waits for lanes 0x2, of which the first has ended",
            ),
            ("wrong_collective", "lanes diverged: collective 8 of mask 0xffffffff where others wait in collective 5"),
            ("wrong_mask", "block 0, thread 16: a collective of mask 0xffff, which this lane is not in"),
            ("wrong_source", "a shuffle from lane 16, which is not in the mask 0xffff"),
            ("wrong_shared", "memory 2 after a read by block 0, thread 0, with nothing between"),
            ("wrong_again", "a race: read of byte"),
            ("wrong_byte", "block 0, thread 1: a race: write of byte 0 of memory 0 after a write by block 0, thread 0"),
            (
                "wrong_blocks",
                "block 1, thread 0: a race: write of byte 0 of memory 0 after a write by block 0, thread 0",
            ),
            (
                "wrong_blocks_read",
                "block 1, thread 63: a race: write of byte 252 of memory 0 after a read by block 0, thread 62",
            ),
            ("wrong_counter", "a race: read of byte 4 of memory 0 after a write by block 0, thread 0"),
            (
                "wrong_counter_of_block",
                "block 1, thread 0: a race: read of byte 4 of memory 0 after a write by block 0, thread 0",
            ),
            ("wrong_shift", "block 0, thread 31: a shift too far at emulation/misuse.cu:"),
            ("wrong_index", "block 0, thread 4: an index out of bounds at emulation/misuse.cu:"),
            ("wrong_loop", "no end in sight"),
        ] {
            let Some(device) = Emulated::new(FORWARD) else { return };
            let words = Words {
                x: device.put(&[0u32; 64], 0),
                y: device.input::<u32>(&std::array::from_fn::<_, 65, _>(|i| i as u32), 0),
                n: 64,
            };
            let told = run(&device, kernel, 2, words).unwrap_err();
            assert!(told.contains(expected), "{kernel}: {told}");
        }
    }

    #[test]
    fn what_is_right_passes_in_any_order() {
        for order in [FORWARD, REVERSE, 2, 3, 4] {
            let Some(device) = Emulated::new(order) else { return };
            for blocks in [1, 2, 40] {
                let y: Vec<u32> = (0..5000).map(|i| i * 7).collect();
                let words = Words { x: device.put(&[0u32; 42], 0), y: device.input(&y, 0), n: 5000 };
                for _ in 0..2 {
                    run(&device, "right", blocks, words).unwrap();
                    assert_eq!(device.get::<u32>(words.x)[..2], [0, y.iter().sum()]);
                }
            }
        }
    }

    #[test]
    fn intrinsics_are_those_of_cuda() {
        let y: Vec<u32> = (0..64u32).map(|i| i.wrapping_mul(0x9E37_79B9) ^ 0x55AA).collect();
        for order in [FORWARD, REVERSE, 7] {
            let Some(device) = Emulated::new(order) else { return };
            let words = Words { x: device.put(&[0u32; 64 * 14], 0), y: device.input(&y, 0), n: 64 };
            run(&device, "intrinsics", 1, words).unwrap();
            let x = device.get::<u32>(words.x);
            for i in 0..64usize {
                let (lane, first) = (i % 32, i / 32 * 32);
                let (warp, y) = (&y[first..first + 32], y[i]);
                let odd = |y: &u32| y % 2 == 1;
                // Bytes 4, 13 - 8 with its sign, 2 and 9 - 8 with its sign, of y and ~y.
                let sign = |byte: u32| if byte & 0x80 == 0 { 0 } else { 0xFF };
                let permuted =
                    (!y & 0xFF) | sign(!y >> 8 & 0xFF) << 8 | (y >> 16 & 0xFF) << 16 | sign(y >> 8 & 0xFF) << 24;
                let halves = |word: u32| [word & 0xFFFF, word >> 16];
                let [low, high] = std::array::from_fn(|half| halves(y)[half].max(halves((!y).wrapping_mul(3))[half]));
                let wide = u64::from(!y) << 32 | u64::from(y);
                let expected = [
                    warp[lane & 16 | (lane * 5) & 15],
                    warp[if lane < 3 { lane } else { lane - 3 }],
                    warp[if lane % 8 < 5 { lane + 3 } else { lane }],
                    warp[lane ^ 21],
                    warp.iter().enumerate().map(|(l, y)| u32::from(odd(y)) << l).sum(),
                    1,
                    if lane < 8 {
                        warp[..8].iter().fold(0, |sum, &y| sum.wrapping_add(y))
                    } else {
                        *warp[8..].iter().max().unwrap()
                    },
                    warp.iter().map(|&y| y as i32).min().unwrap() as u32,
                    x[512],
                    permuted,
                    (wide << ((lane + 1) % 32) >> 32) as u32,
                    high << 16 | low,
                    ((u64::from(y) * 0xD256_D193) >> 32) as u32,
                    y.count_ones() << 16 | y.leading_zeros() << 8 | (y.trailing_zeros() + 1),
                ];
                let got: [u32; 14] = std::array::from_fn(|k| x[64 * k + i]);
                assert_eq!(got, expected, "thread {i}");
            }
            assert_eq!(x[512] as usize, y.iter().filter(|&y| y % 2 == 1).count());
        }
    }

    #[test]
    fn atomics_are_those_of_cuda() {
        let y: Vec<u32> = (0..64u32).map(|i| i.wrapping_mul(0x9E37_79B9) | 0x0010_0000).collect();
        let all: Vec<u32> = y.iter().flat_map(|y| [*y, y + 1]).collect();
        let sum: u64 = all.iter().map(|&y| u64::from(y)).sum();
        let wide = sum << 20;
        let expected = [
            sum as u32,
            (sum as u32).wrapping_neg(),
            *all.iter().max().unwrap(),
            *all.iter().min().unwrap(),
            all.iter().map(|&y| y as i32).max().unwrap() as u32,
            all.iter().fold(0, |old, y| old | y & (y << 3)),
            all.iter().fold(!0, |old, y| old & (y | y << 3)),
            all.iter().fold(0, |old, y| old ^ y),
            128 % 7,
            0,
            wide as u32,
            (wide >> 32) as u32,
            *all.iter().max().unwrap(),
            y[0],
        ];
        for order in [FORWARD, REVERSE, 7] {
            let Some(device) = Emulated::new(order) else { return };
            let mut x = [0u32; 14];
            [x[3], x[6]] = [!0, !0];
            let words = Words { x: device.put(&x, 0), y: device.input(&y, 0), n: 64 };
            run(&device, "atomics", 2, words).unwrap();
            assert_eq!(device.get::<u32>(words.x), expected);
        }
    }

    /// What the driver refuses is refused: arguments of another size, larger blocks, unknown kernels.
    #[test]
    fn launches_are_checked_by_the_ptx() {
        let Some(device) = Emulated::new(FORWARD) else { return };
        for (kernel, threads, expected) in [
            ("norm_combine", 128, "4 bytes for 56, 128 threads for 128"),
            ("norm_chunks", 256, "4 bytes for 16, 256 threads for 128"),
            ("norm", 128, "no such kernel in module norm"),
        ] {
            let launch = Launch { module: "norm", kernel, blocks: 1, threads };
            // SAFETY: refused before anything runs.
            let told = unsafe { device.enqueue(launch, &0u32) }.unwrap_err().to_string();
            assert!(told.contains(expected), "{told}");
        }
    }
}
