//! Whole kernels, run on the host by the code that launches them on a GPU, against the CPU path bit by bit: no GPU needed.

use core::fmt::Debug;

use cudarc::driver::DeviceRepr;
use half::{bf16, f16};

use super::cast::{Casts, Source, packed_width};
use super::emulated::{Emulated, FORWARD, REVERSE, SEEN};
use super::launch::{Device, Launch, kernels};
use super::norm::{self, NormResult};
use super::{CastMemory, CudaError, ElementType, Gpu, GradientMemory, StepMemory};
use crate::cast::Cast;
use crate::cuda;
use crate::format::{Format, Negative, Specials};
use crate::optim::{
    AdamW, AdamWConfig, ChunkSums, Clip, GradientNorm, Moment, Parameter, Real, Rounding, Shard, StateFormat, States,
};
use crate::random::Draw;
use crate::round::Overflow;

/// A type of memory on both sides.
pub(super) trait Value: Real + Source + Debug {
    fn of(x: f32) -> Self;
}
impl Value for f32 {
    fn of(x: f32) -> Self {
        x
    }
}
impl Value for bf16 {
    fn of(x: f32) -> Self {
        Self::from_f32(x)
    }
}
impl Value for f16 {
    fn of(x: f32) -> Self {
        Self::from_f32(x)
    }
}

/// SplitMix64.
pub(super) struct Inputs(pub(super) u64);

impl Inputs {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    /// Ordinary or zero; if `wild`, also subnormal, huge, and now and then NaN or infinite.
    fn gradient(&mut self, wild: bool) -> f32 {
        let word = self.next();
        match word >> 60 {
            0 => 0.0,
            1 if wild => f32::from_bits(word as u32 & 0x807F_FFFF),
            2 if wild => f32::from_bits(word as u32 & 0x7FFF_FFFF | 0x7000_0000),
            3 if wild && word >> 52 & 0xFF < 8 => {
                [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0][(word & 3) as usize]
            }
            _ => word as i32 as f32 * 1e-10,
        }
    }
}

fn bytes<T: bytemuck::Pod>(x: &[T]) -> &[u8] {
    bytemuck::cast_slice(x)
}

#[derive(Clone, Copy, Debug)]
struct Run {
    n: usize,
    /// Index of the first element in its tensor.
    first: u64,
    steps: u64,
    formats: States,
    states: Rounding,
    parameters: Rounding,
    weight_decay: f64,
    /// Elements that parameters and gradients lie off alignment.
    offsets: [usize; 2],
    wild: bool,
    order: u64,
}

const RUN: Run = Run {
    n: 4097,
    first: 0,
    steps: 3,
    formats: States { m: StateFormat::Bf16, v: StateFormat::Bf16 },
    states: Rounding::Stochastic { seed: 42 },
    parameters: Rounding::Stochastic { seed: 3 },
    weight_decay: 0.1,
    offsets: [0, 0],
    wild: true,
    order: FORWARD,
};

/// Steps of one tensor on both sides.
fn steps<P: Value, G: Value>(run: Run) {
    let mut inputs = Inputs(run.n as u64 ^ 99);
    let wild = run.wild;
    steps_of::<P, G>(run, |_| inputs.gradient(wild));
}

/// With gradients by place.
fn steps_of<P: Value, G: Value>(run: Run, mut gradient: impl FnMut(usize) -> f32) {
    let Run { n, first, steps, formats, states, parameters, weight_decay, offsets, order, .. } = run;
    let Some(device) = Emulated::new(order) else { return };
    let gpu = Gpu::emulated(device);
    let device = gpu.emulation().unwrap();
    let name = format!("{} {} {run:?}", core::any::type_name::<P>(), core::any::type_name::<G>());
    let config = AdamWConfig { lr: 0.01, weight_decay, ..AdamWConfig::default() };
    let mut host = AdamW::new(config, formats, states).unwrap().parameter_rounding(parameters).unwrap();
    let mut inputs = Inputs(n as u64);
    let mut p: Vec<P> = (0..n).map(|_| P::of(inputs.next() as i32 as f32 * 1e-9)).collect();
    let memory = StepMemory {
        id: 5,
        params: device.put(&p, offsets[0] * size_of::<P>()),
        params_type: P::TYPE,
        grads: device.input(&vec![G::of(0.0); n], offsets[1] * size_of::<G>()),
        grads_type: G::TYPE,
        n: n as u64,
        group: 0,
        part: Some((first, first + n as u64)),
    };
    let opt = cuda::AdamW::new(&gpu, config, formats, states).unwrap();
    let mut opt = opt.parameter_rounding(parameters).unwrap();
    for _ in 0..steps {
        let g: Vec<G> = (0..n).map(|i| G::of(gradient(i))).collect();
        host.step_tensors(&mut [Parameter::numbered(5, &mut p, &g).part(first, first + n as u64)]).unwrap();
        device.set(memory.grads, &g);
        // SAFETY: memory of the emulation, as long as it says.
        unsafe { opt.step_raw(&[memory]) }.unwrap_or_else(|error| panic!("{error}: {name}"));
    }
    let wrong = |a: &[u8], b: &[u8]| a.iter().zip(b).position(|(a, b)| a != b);
    let at = wrong(bytes(&device.get::<P>(memory.params)), bytes(&p));
    assert!(at.is_none(), "parameters, byte {at:?}: {name}");
    let (Some(host), Some(stored)) = (host.stored(5), opt.stored(5).unwrap()) else { return };
    same_states(host, &stored, &name);
    assert_eq!((opt.steps().unwrap(), opt.age(5).unwrap()), (steps, steps), "{name}");
}

/// States of the host, and of the device.
fn same_states(host: &[Moment], device: &[Moment], name: &str) {
    assert_eq!(host.len(), device.len(), "{name}");
    for (which, (host, stored)) in host.iter().zip(device).enumerate() {
        let bits = |moment: &Moment| moment.to_f32().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(stored) == bits(host), "state {which}: {name}");
        // Codes and scales too.
        assert!(!matches!(host, Moment::Blocks(_)) || stored == host, "state {which}: {name}");
    }
}

const LENGTHS: [usize; 19] =
    [0, 1, 3, 4, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1025, 2049, 4095, 4096, 4097];

/// Orders of blocks and threads by turns, and a shuffle of its own for each.
pub(super) fn orders() -> impl Iterator<Item = u64> {
    (0..).map(|i| match i % 4 {
        0 => FORWARD,
        1 => REVERSE,
        _ => i,
    })
}

const STATES: [(StateFormat, Rounding); 3] = [
    (StateFormat::F32, Rounding::Nearest),
    (StateFormat::Bf16, Rounding::Nearest),
    (StateFormat::Bf16, Rounding::Stochastic { seed: 42 }),
];

/// Every combination of types.
fn steps_of_all_types(run: Run) {
    steps::<f32, f32>(run);
    steps::<f32, bf16>(run);
    steps::<f32, f16>(run);
    steps::<bf16, f32>(run);
    steps::<bf16, bf16>(run);
    steps::<bf16, f16>(run);
    steps::<f16, f32>(run);
    steps::<f16, bf16>(run);
    steps::<f16, f16>(run);
}

#[test]
fn every_dtype_and_rounding_steps_alike() {
    let mut orders = orders();
    for (format, states) in STATES {
        for parameters in [Rounding::Nearest, Rounding::stochastic(3)] {
            for (n, weight_decay, wild) in [(4097, 0.1, true), (2500, 0.0, false), (1500, 0.1, true)] {
                let order = orders.next().unwrap();
                steps_of_all_types(Run {
                    n,
                    formats: format.into(),
                    states,
                    parameters,
                    weight_decay,
                    wild,
                    order,
                    ..RUN
                });
            }
        }
    }
}

#[test]
fn every_length_and_alignment_steps_alike() {
    let mut orders = orders();
    for n in LENGTHS {
        for offsets in [[0, 0], [1, 0], [0, 1], [2, 2], [3, 3]] {
            let run = Run { n, offsets, steps: 2, order: orders.next().unwrap(), ..RUN };
            steps::<f32, f32>(run);
            steps::<f32, bf16>(run);
            steps::<bf16, bf16>(run);
            steps::<f16, f32>(run);
        }
    }
    for (n, count) in [(257, 100), (13_003, 4)] {
        steps::<f32, f32>(Run { n, steps: count, ..RUN });
        steps::<bf16, bf16>(Run { n, steps: count, order: 9, ..RUN });
    }
}

/// Parts of a tensor, and a change of keys inside of one, at 2^32 groups.
#[test]
fn parts_and_high_groups_step_alike() {
    for formats in [StateFormat::Bf16.into(), PAIRS[0], States::FP4, PAIRS[4]] {
        for first in [4096, 5 << 34, (1 << 34) - 4096, (3 << 34) - 4096] {
            for n in [4096, 4096 + 700] {
                let run = Run { n, first, formats, steps: 2, order: first, wild: false, ..RUN };
                steps::<f32, f32>(run);
                steps::<bf16, bf16>(Run { order: REVERSE, ..run });
            }
        }
    }
}

const FIRST: [StateFormat; 5] =
    [StateFormat::F32, StateFormat::Bf16, StateFormat::E4M3, StateFormat::E5M2, StateFormat::E2M1];
const SECOND: [StateFormat; 7] = [
    StateFormat::F32,
    StateFormat::Bf16,
    StateFormat::E4M3,
    StateFormat::E5M2,
    StateFormat::UE5M3,
    StateFormat::UE4M4,
    StateFormat::UE2M2NZ,
];
/// Those that kernels have built in, and one that they have not.
const PAIRS: [States; 5] = [
    States { m: StateFormat::E4M3, v: StateFormat::UE4M4 },
    States { m: StateFormat::E4M3, v: StateFormat::E4M3 },
    States { m: StateFormat::E5M2, v: StateFormat::UE5M3 },
    States::FP4,
    States { m: StateFormat::Bf16, v: StateFormat::UE4M4 },
];

#[test]
fn every_pair_of_moments_steps_alike() {
    let mut orders = orders();
    for (m, v) in FIRST.into_iter().flat_map(|m| SECOND.map(|v| (m, v))) {
        for (states, wild) in
            [false, true].into_iter().flat_map(|wild| [(Rounding::Nearest, wild), (Rounding::stochastic(4), wild)])
        {
            let order = orders.next().unwrap();
            let formats = States { m, v };
            let run = Run { n: 1030, steps: 2, formats, states, parameters: states, wild, order, ..RUN };
            steps::<f32, f32>(run);
            steps::<bf16, bf16>(run);
        }
    }
}

#[test]
fn moments_in_blocks_step_alike() {
    let mut orders = orders();
    for formats in PAIRS {
        for wild in [false, true] {
            for n in [1, 31, 127, 129, 256, 1023, 1025, 2048, 4097] {
                // Gradients that are wild make most blocks NaN, or take them the long way.
                for offsets in if wild { &[[0, 0]][..] } else { &[[0, 0], [1, 0], [0, 1], [3, 3]] } {
                    let run =
                        Run { n, formats, wild, offsets: *offsets, steps: 2, order: orders.next().unwrap(), ..RUN };
                    steps::<f32, f32>(run);
                    steps::<bf16, bf16>(run);
                }
            }
            for (states, parameters) in
                [(RUN.states, Rounding::Nearest), (Rounding::Nearest, RUN.parameters), (RUN.states, RUN.parameters)]
            {
                let run = Run { n: 2049, formats, wild, states, parameters, order: orders.next().unwrap(), ..RUN };
                steps_of_all_types(run);
            }
        }
        for block in [32, 64, 256] {
            let [m, v] = [formats.m, formats.v].map(|format| format.block(block).unwrap());
            for n in [1, block - 1, block + 1, 4097] {
                let run = Run { n, formats: States { m, v }, wild: false, order: orders.next().unwrap(), ..RUN };
                steps::<f32, f32>(run);
                steps::<bf16, bf16>(run);
            }
        }
    }
}

/// Gradients from 1e-40 to 1e30, a magnitude a block; zeros; and one that is not finite here and there.
#[test]
fn blocks_of_every_magnitude_step_alike() {
    for formats in PAIRS {
        for bad in [1.0, f32::NAN, f32::INFINITY] {
            let gradient = |i: usize| match (i / 128, i % 128) {
                (block, 77) if block % 9 == 4 => bad,
                (block, _) if block % 11 == 3 => 0.0,
                (block, place) => (place as f32 - 60.0) * 10f32.powi(block as i32 - 42),
            };
            let run = Run { n: 128 * 70 + 5, formats, order: REVERSE, ..RUN };
            steps_of::<f32, f32>(run, gradient);
            steps_of::<bf16, bf16>(run, gradient);
        }
    }
}

/// Memory for a cast to codes of `width` bits, so many elements and bytes off alignment.
fn cast_memory<S: Value>(
    device: &Emulated,
    x: &[S],
    format: Format,
    width: u32,
    (x_offset, y_offset): (usize, usize),
) -> CastMemory {
    let room = (x.len() * width as usize).div_ceil(8);
    CastMemory {
        x: device.input(x, x_offset * size_of::<S>()),
        source: S::TYPE,
        y: device.put(&vec![0xAAu8; room], y_offset),
        format,
        n: x.len() as u64,
    }
}

/// Codes of a cast by kernels, of `width` bits each.
fn on_device<S: Value>(
    order: u64,
    cast: &Cast,
    x: &[S],
    format: Format,
    width: u32,
    offsets: (usize, usize),
) -> Result<Vec<u8>, CudaError> {
    let Some(device) = Emulated::new(order) else { return Ok(on_host(cast, x, format, width)) };
    let memory = cast_memory(&device, x, format, width, offsets);
    // SAFETY: memory of the emulation, as long as it says.
    unsafe { device.cast_memory(cast, memory, width) }?;
    Ok(device.get(memory.y))
}

fn on_host<S: Value>(cast: &Cast, x: &[S], format: Format, width: u32) -> Vec<u8> {
    if width != packed_width(format) {
        let mut codes = vec![0; x.len()];
        cast.into_codes(x, format, &mut codes).unwrap();
        return codes.into_iter().map(|code| code as u8).collect();
    }
    let mut bytes = vec![0x55; format.bytes(x.len())];
    cast.into_bytes(x, format, &mut bytes).unwrap();
    bytes
}

fn same_cast<S: Value>(order: u64, cast: &Cast, x: &[S], format: Format, offsets: (usize, usize)) {
    let whole = format.bits().next_multiple_of(8);
    for width in [packed_width(format), whole] {
        let device = on_device(order, cast, x, format, width, offsets);
        let device = device.unwrap_or_else(|error| panic!("{format} from {}, {cast:?}: {error}", S::TYPE.name()));
        let host = on_host(cast, x, format, width);
        let at = device.iter().zip(&host).position(|(a, b)| a != b);
        let n = x.len();
        assert!(at.is_none(), "{format} from {}, {n} at {offsets:?}, byte {at:?}: {cast:?}", S::TYPE.name());
        if width == whole {
            return;
        }
    }
}

/// f32 values that a cast to the format can trip over: codes' values, what lies between and beside them, specials, random bits
/// over all exponents and over those of the format.
fn cast_inputs(format: Format) -> Vec<f32> {
    let mut x = vec![];
    let mut add = |bits: u32| x.extend([f32::from_bits(bits), f32::from_bits(bits ^ 1 << 31)]);
    for bits in [0u32, 1, 0x007F_FFFF, 0x0080_0000, 0x7F7F_7FFF, 0x7F7F_FFFF, 0x7F80_0000, 0x7F80_0001, 0x7FFF_FFFF] {
        add(bits);
    }
    let codes = 1u32 << format.bits().min(15);
    for code in (0..codes).step_by((codes as usize / 256).max(1)) {
        let bits = (format.value(code as u16) as f32).to_bits() & 0x7FFF_FFFF;
        let next = (format.value((code + 1).min(codes - 1) as u16) as f32).to_bits() & 0x7FFF_FFFF;
        let middle = bits / 2 + next / 2;
        [bits.saturating_sub(1), bits, bits + 1, middle, middle + 1].into_iter().for_each(&mut add);
    }
    let mut inputs = Inputs(7);
    let range = f32::from_bits(((format.max() as f32).to_bits() + (1 << 22)).min(0x7F7F_FFFF));
    for _ in 0..1500 {
        let word = inputs.next();
        add(word as u32);
        add((range * (word >> 40) as f32 * 2f32.powi(-24 - (word & 15) as i32)).to_bits());
    }
    x
}

/// Those with a name, and of one's own: every width, with and without sign, zero, fraction, infinity and NaN.
fn formats() -> impl Iterator<Item = Format> {
    let own = [
        Format::builder(5, 10),
        Format::builder(6, 10).unsigned(),
        Format::builder(5, 6).specials(Specials::Ieee),
        Format::builder(8, 1).unsigned().without_zero().negative(Negative::Nan).specials(Specials::NanOnly),
        Format::builder(4, 3).unsigned(),
        Format::builder(7, 0),
        Format::builder(4, 1),
        Format::builder(3, 3).unsigned().without_zero(),
        Format::builder(2, 2),
        Format::builder(3, 0),
        Format::builder(2, 0),
    ];
    let named = Format::NAMED.map(|(_, format)| format);
    named.into_iter().chain(own.map(|builder| builder.build().unwrap()))
}

#[test]
fn casts_of_every_format_and_source() {
    let mut orders = orders();
    for format in formats() {
        let x = cast_inputs(format);
        // All codes of sources of 16 bits, an eighth at a time.
        let halves = |k: usize| (k..65_536).step_by(8).map(|code| f16::from_bits(code as u16)).collect::<Vec<_>>();
        let bfloats = |k: usize| (k..65_536).step_by(8).map(|code| bf16::from_bits(code as u16)).collect::<Vec<_>>();
        let mut eighth = 0;
        for overflow in [Overflow::Saturate, Overflow::Ieee] {
            let draw = Draw::seeded(42).step(3).named("w");
            for cast in [Cast::nearest(), Cast::stochastic(draw), Cast::stochastic(draw.at(5))] {
                let (cast, order) = (cast.overflow(overflow), orders.next().unwrap());
                same_cast(order, &cast, &x, format, (0, 0));
                for _ in 0..2 {
                    same_cast(order, &cast, &halves(eighth % 8), format, (0, 0));
                    same_cast(order, &cast, &bfloats(eighth % 8), format, (0, 0));
                    eighth += 1;
                }
            }
        }
        for k in [-100, -3, 9, 100] {
            let scaled = [Cast::nearest().scale(k), Cast::stochastic(Draw::seeded(1)).scale(k)];
            for cast in &scaled[..if format == Format::BF16 { 1 } else { 2 }] {
                match on_device(FORWARD, cast, &x, format, packed_width(format), (0, 0)) {
                    Ok(codes) => assert!(codes == on_host(cast, &x, format, packed_width(format)), "{format} {k}"),
                    Err(error) => {
                        assert!(k < 0 && matches!(error, CudaError::Unsupported { .. }), "{format} {k}: {error}");
                    }
                }
            }
        }
    }
}

#[test]
fn casts_of_every_length_and_alignment() {
    let mut inputs = Inputs(1);
    let x: Vec<f32> = (0..9000).map(|_| inputs.next() as i32 as f32 * 1e-9).collect();
    let halves: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
    let mut orders = orders();
    for format in formats() {
        let align = if format.bits() > 8 { 2 } else { 1 };
        for n in LENGTHS.into_iter().chain([2047, 2048, 8191, 8193]) {
            for (first, offsets) in [(0, (0, 0)), (4, (1, 0)), (8, (0, align)), (1, (0, 0)), (3, (3, 3 * align))] {
                let cast = Cast::stochastic(Draw::seeded(7).at(first));
                same_cast(orders.next().unwrap(), &cast, &x[..n], format, offsets);
                if n % 4 != 0 {
                    same_cast(orders.next().unwrap(), &Cast::nearest(), &halves[..n], format, offsets);
                }
            }
        }
    }
}

/// A device whose blocks have other sizes than the host asks for.
struct Shaped<'a> {
    device: &'a Emulated,
    threads: u32,
    /// Elements of a thread, and of a launch.
    each: u32,
    n: usize,
}

impl Device for Shaped<'_> {
    unsafe fn enqueue<A: DeviceRepr>(&self, launch: Launch<'_>, arguments: &A) -> Result<(), CudaError> {
        let Self { device, threads, each, n } = *self;
        let blocks = n.div_ceil((threads * each) as usize) as u32;
        // SAFETY: promised by the caller; the kernels of casts take any size of block.
        unsafe { device.enqueue(Launch { blocks, threads, ..launch }, arguments) }
    }
}

#[test]
fn casts_in_blocks_of_every_size() {
    let mut inputs = Inputs(5);
    let x: Vec<f32> = (0..5003).map(|_| inputs.next() as i32 as f32 * 1e-9).collect();
    let mut orders = orders();
    for format in [Format::BF16, Format::FP16, Format::E4M3, Format::E2M3, Format::E2M1] {
        let width = packed_width(format);
        let (each, most) = if width == 16 { (8, 512) } else { (16, 128) };
        for (threads, n) in [1, 32, 33, 96, most].into_iter().flat_map(|threads| [(threads, 4096), (threads, 5003)]) {
            let Some(device) = Emulated::new(orders.next().unwrap()) else { return };
            let cast = Cast::stochastic(Draw::seeded(7));
            let x = &x[..n];
            let memory = cast_memory(&device, x, format, width, (0, 0));
            // SAFETY: memory of the emulation, as long as it says.
            unsafe { Shaped { device: &device, threads, each, n }.cast_memory(&cast, memory, width) }.unwrap();
            assert!(device.get::<u8>(memory.y) == on_host(&cast, x, format, width), "{format} {threads} {n}");
        }
    }
}

/// The boundary of 2^32 groups inside a call, whose keys change there.
#[test]
fn casts_over_a_change_of_keys() {
    let x: Vec<f32> = (0..6000).map(|i| 1.0 + i as f32 * 1e-5).collect();
    for format in [Format::BF16, Format::FP16, Format::E4M3, Format::E2M3, Format::E2M1] {
        for first in [(1u64 << 34) - 3000, (1 << 33) - 3000, u64::MAX - 2999, 5 << 34] {
            same_cast(first, &Cast::stochastic(Draw::seeded(7).at(first)), &x, format, (0, 0));
        }
    }
}

/// Whatever the other tests do, each kernel steps or casts something here.
#[test]
fn no_kernel_is_left_out() {
    if Emulated::new(FORWARD).is_none() {
        return;
    }
    let run = Run { n: 700, steps: 1, wild: false, ..RUN };
    for (format, states) in STATES {
        steps_of_all_types(Run { formats: format.into(), states, ..run });
        steps_of_all_types(Run { formats: format.into(), states, parameters: Rounding::Nearest, ..run });
    }
    for formats in PAIRS {
        for (states, parameters) in [RUN.states, Rounding::Nearest]
            .into_iter()
            .flat_map(|states| [(states, RUN.parameters), (states, Rounding::Nearest)])
        {
            steps::<f32, f32>(Run { formats, states, parameters, ..run });
            steps::<bf16, bf16>(Run { formats, states, parameters, ..run });
        }
    }
    let x: Vec<f32> = (0..700).map(|i| i as f32 * 0.01 - 3.0).collect();
    for format in formats() {
        for cast in [Cast::nearest(), Cast::stochastic(Draw::seeded(1))] {
            same_cast(FORWARD, &cast, &x, format, (0, 0));
            same_cast(FORWARD, &cast, &x.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>(), format, (0, 0));
            same_cast(FORWARD, &cast, &x.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>(), format, (0, 0));
        }
    }
    norms_of_specials();
    super::block_tests::every_kernel();
    super::optimizer_tests::every_kernel();
    let seen = SEEN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    // Meters are of a feature.
    let there = kernels().filter(|kernel| cfg!(feature = "stall") || !kernel.ends_with("_meter"));
    let left: Vec<_> = there.filter(|kernel| !seen.contains_key(*kernel)).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// A norm by kernels and on the host.
struct Gradients<'a> {
    device: &'a Emulated,
    memory: Vec<GradientMemory>,
    sums: Vec<ChunkSums>,
}

impl Gradients<'_> {
    fn add<G: Value>(&mut self, x: &[G], offset: usize) {
        let id = self.memory.len() as u64;
        let grads = self.device.input(x, offset * size_of::<G>());
        self.memory.push(GradientMemory { id, shard: Shard::whole(x.len() as u64), grads, grads_type: G::TYPE });
        self.sums.push(ChunkSums::of(id, x));
    }

    fn compare(&self, clip: &Clip, scale: f32, name: &str) {
        let device = self.device;
        let table: Vec<norm::Chunk> = self.memory.iter().flat_map(norm::chunks).collect();
        // Sums start as what no kernel would leave.
        let levels: Vec<_> =
            norm::lengths(table.len()).iter().map(|&n| (device.put(&vec![-1f64; n], 0), n as u64)).collect();
        let result = device.put(&[-1f64; 2], 0);
        // SAFETY: memory of the emulation, as long as it says.
        unsafe { norm::launch_all(device, device.input(&table, 0), &levels, result, clip.rule(scale)) }
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let bits = |x: &[f64]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let sums: Vec<f64> = self.sums.iter().flat_map(|part| part.sums().to_vec()).collect();
        assert!(bits(&device.get::<f64>(levels[0].0)) == bits(&sums), "{name}");
        let got = device.get::<NormResult>(result)[0];
        let sum = GradientNorm::gather(&self.sums).unwrap().sum_of_squares();
        assert_eq!(got.sum_of_squares.to_bits(), sum.to_bits(), "{name}");
        let factor = clip.rule(scale).factor(sum);
        assert!(got.clip.to_bits() == factor.to_bits() || got.clip.is_nan() && factor.is_nan(), "{name}: {}", got.clip);
        assert_eq!(got.found_inf, u32::from(!sum.is_finite()), "{name}");
    }
}

fn gradients(device: &Emulated) -> Gradients<'_> {
    Gradients { device, memory: vec![], sums: vec![] }
}

#[test]
fn norms_of_every_length_type_and_alignment() {
    let clip = Clip::new(0.7).unwrap();
    let mut orders = orders();
    for wild in [false, true] {
        for n in LENGTHS.into_iter().chain([8191, 8193, 13_003]) {
            for offset in [0, 1, 3] {
                let Some(device) = Emulated::new(orders.next().unwrap()) else { return };
                let mut inputs = Inputs(n as u64);
                let x: Vec<f32> = (0..n).map(|_| inputs.gradient(wild)).collect();
                let mut all = gradients(&device);
                all.add(&x, offset);
                all.add(&x.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>(), offset);
                all.add(&x.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>(), offset);
                all.compare(&clip, [1.0, 1.0 / 1024.0][offset % 2], &format!("{n} at {offset}, wild {wild}"));
            }
        }
    }
    let Some(device) = Emulated::new(FORWARD) else { return };
    gradients(&device).compare(&clip, 1.0, "none");
    // Every code of FP16, through the instruction.
    let mut all = gradients(&device);
    all.add(&(0..0x7C00).map(f16::from_bits).collect::<Vec<_>>(), 0);
    all.compare(&clip, 1.0, "FP16");
}

/// One value that is not ordinary, at either end of a chunk.
#[test]
fn norms_of_specials() {
    for bad in [0u32, 1, 0x7F7F_FFFF, 0x7F80_0000, 0xFF80_0000, 0x7F80_0001, 0xFFFF_FFFF] {
        for at in [0, 4095, 4096, 8191] {
            let Some(device) = Emulated::new(REVERSE) else { return };
            let mut x = vec![1f32; 8192];
            x[at] = f32::from_bits(bad);
            let mut all = gradients(&device);
            all.add(&x, 0);
            all.compare(&Clip::new(1.0).unwrap(), 1.0, &format!("{bad:#x} at {at}"));
        }
    }
}

/// More than 4096 chunks, so that sums are combined twice.
#[test]
fn norms_of_many() {
    for order in [REVERSE, 5] {
        let Some(device) = Emulated::new(order) else { return };
        let mut inputs = Inputs(4);
        let x: Vec<f32> = (0..64).map(|_| inputs.gradient(false)).collect();
        let at = device.input(&x, 0);
        let mut all = gradients(&device);
        for id in 0..4100 {
            let (start, n) = (id as usize * 7 % 50, 1 + id as usize % 13);
            let shard = Shard::whole(n as u64);
            let grads = at + 4 * start as u64;
            all.memory.push(GradientMemory { id, shard, grads, grads_type: ElementType::F32 });
            all.sums.push(ChunkSums::of(id, &x[start..start + n]));
        }
        all.compare(&Clip::new(1.0).unwrap(), 1.0, "many");
    }
}
