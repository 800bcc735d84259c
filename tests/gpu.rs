//! The GPU gives the bits of the CPU. Without a device these tests pass by without a word, unless `HALFULP_REQUIRE_GPU` is
//! set.
#![cfg(feature = "cuda")]

mod common;

use common::{Grid, Inputs, f32_inputs, gradient, grids};
use halfulp::cast::Cast;
use halfulp::cuda::{AdamW, CastMemory, CudaError, DeviceParameter, DeviceVec, ElementType, Gpu, StepMemory};
use halfulp::optim::{self, AdamWConfig, Parameter, Rounding, StateFormat, States};
use halfulp::round::Overflow;
use halfulp::{Draw, E2M1, E4M3, E5M2, Format, bf16, f16};

/// The device, or `None` (and a failure where one is required).
fn gpu() -> Option<Gpu> {
    match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            assert!(std::env::var_os("HALFULP_REQUIRE_GPU").is_none(), "{error}");
            None
        }
    }
}

/// Opening a device never panics: it is there, or the error says what is missing.
#[test]
fn opening_is_a_result() {
    match Gpu::open(0) {
        Ok(gpu) => {
            assert!(!gpu.name().unwrap().is_empty());
            assert!(matches!(Gpu::open(1000), Err(CudaError::Ordinal { ordinal: 1000, .. })));
        }
        Err(CudaError::NoDriver { .. } | CudaError::StubDriver { .. } | CudaError::NoDevice { .. }) => {}
        Err(other) => panic!("{other}"),
    }
}

/// For the test below, which runs this one in a process of its own.
#[test]
fn what_opening_says() {
    if std::env::var_os("HALFULP_SAY").is_some() {
        println!("said: {}", Gpu::open(0).map_or_else(|error| error.to_string(), |_| "open".into()));
    }
}

/// A library of the driver's name without its functions, as toolkits bring to link against, and none at all.
#[test]
#[cfg(target_os = "linux")]
fn a_stub_is_no_driver() {
    use std::process::Command;
    let directory = std::env::temp_dir().join(format!("halfulp-stub-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let said = || {
        let exe = std::env::current_exe().unwrap();
        let mut run = Command::new(exe);
        run.args(["--exact", "what_opening_says", "--nocapture"]).env("HALFULP_SAY", "1");
        let output = run.env("LD_LIBRARY_PATH", &directory).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().find_map(|line| line.split_once("said: ")).unwrap().1.to_string()
    };
    let without = said();
    assert!(without == "open" || without.contains("no CUDA driver: none of libcuda.so, libcuda.so.1"), "{without}");
    let source = directory.join("stub.c");
    std::fs::write(&source, "int cuSomething(void) { return 0; }\n").unwrap();
    let built =
        Command::new("gcc").args(["-shared", "-fPIC", "-o"]).arg(directory.join("libcuda.so")).arg(&source).status();
    if !built.is_ok_and(|status| status.success()) {
        assert!(std::env::var_os("CI").is_none(), "gcc is needed");
        eprintln!("no gcc: no stub was tried");
        return;
    }
    assert_eq!(
        said(),
        "no CUDA driver: libcuda.so is a stub without `cuInit`; install an NVIDIA driver, no toolkit is needed"
    );
    std::fs::remove_dir_all(&directory).unwrap();
}

/// Codes of a cast on the device, from memory `x_offset` elements and `y_offset` bytes off alignment.
fn on_device<S: bytemuck::Pod>(
    gpu: &Gpu,
    cast: &Cast,
    x: &[S],
    source: ElementType,
    format: Format,
    (x_offset, y_offset): (usize, usize),
) -> Vec<u8> {
    let mut shifted = vec![S::zeroed(); x_offset];
    shifted.extend_from_slice(x);
    let bytes = format.bytes(x.len());
    let (from, to) = (gpu.upload(&shifted).unwrap(), gpu.upload(&vec![0xAAu8; bytes + y_offset + 16]).unwrap());
    let memory = CastMemory {
        x: from.address() + (x_offset * size_of::<S>()) as u64,
        source,
        y: to.address() + y_offset as u64,
        format,
        n: x.len() as u64,
    };
    // SAFETY: both buffers are this long and live until the download below.
    unsafe { gpu.cast_raw(cast, memory) }.unwrap();
    let all = gpu.download(&to).unwrap();
    assert!(all[..y_offset].iter().chain(&all[y_offset + bytes..]).all(|&b| b == 0xAA), "wrote outside");
    all[y_offset..y_offset + bytes].to_vec()
}

fn on_host<S: halfulp::round::Source>(cast: &Cast, x: &[S], format: Format) -> Vec<u8> {
    let mut bytes = vec![0x55; format.bytes(x.len())];
    cast.into_bytes(x, format, &mut bytes).unwrap();
    bytes
}

fn casts() -> Vec<Cast> {
    let mut casts = vec![];
    for overflow in [Overflow::Saturate, Overflow::Ieee] {
        casts.push(Cast::nearest().overflow(overflow));
        casts.push(Cast::stochastic(Draw::seeded(42).step(3).named("w")).overflow(overflow));
        casts.push(Cast::stochastic(Draw::seeded(42).step(3).named("w").at(5)).overflow(overflow));
    }
    casts
}

#[test]
fn casts_of_every_format_and_source() {
    let Some(gpu) = gpu() else { return };
    let halves: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
    let bfloats: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    for grid in grids() {
        let Grid { spec, .. } = &grid;
        let format = spec.format;
        let x = f32_inputs(&grid);
        for cast in casts() {
            let same = |a: Vec<u8>, b: Vec<u8>, source: &str| {
                let at = a.iter().zip(&b).position(|(a, b)| a != b);
                assert!(at.is_none(), "{format} from {source}, byte {at:?}, {cast:?}");
            };
            same(on_device(&gpu, &cast, &x, ElementType::F32, format, (0, 0)), on_host(&cast, &x, format), "f32");
            same(
                on_device(&gpu, &cast, &halves, ElementType::Fp16, format, (0, 0)),
                on_host(&cast, &halves, format),
                "f16",
            );
            same(
                on_device(&gpu, &cast, &bfloats, ElementType::Bf16, format, (0, 0)),
                on_host(&cast, &bfloats, format),
                "bf16",
            );
        }
        for k in [-100, -3, 0, 9, 100] {
            let scaled = Cast::stochastic(Draw::seeded(1)).scale(k);
            if format == Format::BF16 && k != 0 {
                continue;
            }
            match on_host_or_refused(&gpu, &scaled, &x, format) {
                Some(device) => assert!(device == on_host(&scaled, &x, format), "{format} scale {k}"),
                None => assert!(k < 0, "{format} scale {k} was refused"),
            }
        }
    }
}

fn on_host_or_refused(gpu: &Gpu, cast: &Cast, x: &[f32], format: Format) -> Option<Vec<u8>> {
    let (from, to) = (gpu.upload(x).unwrap(), gpu.zeroed::<u8>(format.bytes(x.len())).unwrap());
    let memory = CastMemory { x: from.address(), source: ElementType::F32, y: to.address(), format, n: x.len() as u64 };
    // SAFETY: both buffers are this long and live until the download below.
    match unsafe { gpu.cast_raw(cast, memory) } {
        Ok(()) => Some(gpu.download(&to).unwrap()),
        Err(CudaError::Unsupported { .. }) => None,
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn casts_of_every_length_and_alignment() {
    let Some(gpu) = gpu() else { return };
    let mut inputs = Inputs(1);
    let x: Vec<f32> = (0..70_000).map(|_| inputs.next() as i32 as f32 * 1e-9).collect();
    for (_, format) in Format::NAMED {
        let align = if format.bits() > 8 { 2 } else { 1 };
        for n in [0, 1, 2, 3, 7, 15, 16, 17, 31, 33, 127, 128, 129, 2047, 2048, 2049, 65_535, 65_537] {
            for first in [0, 1, 3, 4] {
                let cast = Cast::stochastic(Draw::seeded(7).at(first));
                let expected = on_host(&cast, &x[..n], format);
                for offsets in [(0, 0), (1, 0), (0, align), (3, 3 * align)] {
                    let device = on_device(&gpu, &cast, &x[..n], ElementType::F32, format, offsets);
                    assert!(device == expected, "{format} n {n} from {first} at {offsets:?}");
                }
            }
        }
    }
}

/// The boundary of 2^32 groups inside a call, whose keys change there.
#[test]
fn casts_over_a_change_of_keys() {
    let Some(gpu) = gpu() else { return };
    let x: Vec<f32> = (0..10_000).map(|i| 1.0 + i as f32 * 1e-5).collect();
    for format in [Format::BF16, Format::E4M3, Format::E2M1] {
        for first in [(1u64 << 34) - 4000, (1 << 33) - 4000, u64::MAX - 3999, 5 << 34] {
            let cast = Cast::stochastic(Draw::seeded(7).at(first));
            let device = on_device(&gpu, &cast, &x, ElementType::F32, format, (0, 0));
            assert!(device == on_host(&cast, &x, format), "{format} from {first}");
        }
    }
}

#[test]
fn typed_casts() {
    let Some(gpu) = gpu() else { return };
    let x: Vec<f32> = (0..1001).map(|i| i as f32 * 0.37 - 100.0).collect();
    let on = gpu.upload(&x).unwrap();
    let draw = Draw::seeded(3);
    assert_eq!(gpu.download(&gpu.sr_cast::<bf16, _>(&on, draw).unwrap()).unwrap(), halfulp::sr_cast::<bf16>(&x, draw));
    let bits = |v: Vec<E4M3>| v.into_iter().map(E4M3::to_bits).collect::<Vec<_>>();
    assert_eq!(bits(gpu.download(&gpu.nearest_cast(&on).unwrap()).unwrap()), bits(halfulp::nearest_cast(&x)));
    let packed = gpu.cast_packed::<E2M1, _>(&Cast::stochastic(draw), &on).unwrap();
    assert_eq!(gpu.download_packed(&packed).unwrap(), Cast::stochastic(draw).to_packed::<E2M1>(&x).unwrap());
    // 4-bit codes one in a byte, as the storage type has them.
    let whole = gpu.download(&gpu.sr_cast::<E2M1, _>(&on, draw).unwrap()).unwrap();
    assert!(whole.iter().zip(halfulp::sr_cast::<E2M1>(&x, draw)).all(|(a, b)| a.to_bits() == b.to_bits()));
    let empty = gpu.upload::<f32>(&[]).unwrap();
    assert!(gpu.download(&gpu.sr_cast::<bf16, _>(&empty, draw).unwrap()).unwrap().is_empty());
}

#[test]
fn copies_into_existing_memory() {
    let Some(gpu) = gpu() else { return };
    let mut on = gpu.zeroed::<f32>(3).unwrap();
    gpu.upload_into(&[1.0, 2.0, 3.0], &mut on).unwrap();
    let address = on.address();
    gpu.upload_into(&[4.0, 5.0, 6.0], &mut on).unwrap();
    let mut back = [0.0; 3];
    gpu.download_into(&on, &mut back).unwrap();
    assert_eq!((back, on.address()), ([4.0, 5.0, 6.0], address));
    let error = gpu.upload_into(&[1.0, 2.0], &mut on).unwrap_err();
    assert_eq!(error, CudaError::Length { argument: "to", expected: 2, got: 3 });
    let error = gpu.download_into(&on, &mut [0.0; 4]).unwrap_err();
    assert_eq!(error, CudaError::Length { argument: "to", expected: 3, got: 4 });
    gpu.upload_into(&[], &mut gpu.zeroed::<f32>(0).unwrap()).unwrap();
}

#[test]
fn refusals() {
    let Some(gpu) = gpu() else { return };
    let (x, mut y) = (gpu.upload(&[1f32; 4]).unwrap(), gpu.zeroed::<bf16>(3).unwrap());
    let error = gpu.cast_into(&Cast::nearest(), &x, &mut y).unwrap_err();
    assert_eq!(error, CudaError::Length { argument: "y", expected: 4, got: 3 });
    let memory =
        CastMemory { x: x.address(), source: ElementType::F32, y: x.address() + 4, format: Format::BF16, n: 4 };
    // SAFETY: refused before anything is launched.
    let overlap = unsafe { gpu.cast_raw(&Cast::nearest(), memory) };
    assert!(matches!(overlap, Err(CudaError::Overlap { .. })));
    // SAFETY: as above.
    let odd = unsafe { gpu.cast_raw(&Cast::nearest(), CastMemory { x: x.address() + 2, ..memory }) };
    assert!(matches!(odd, Err(CudaError::Misaligned { argument: "x", .. })));
    let philox = Draw::seeded(1).stream(halfulp::random::Stream::Philox);
    assert!(matches!(gpu.sr_cast::<bf16, _>(&x, philox), Err(CudaError::Unsupported { argument: "draw", .. })));
    assert!(matches!(gpu.cast::<bf16, _>(&Cast::up(), &x), Err(CudaError::Unsupported { argument: "rounding", .. })));
    assert!(matches!(gpu.zeroed::<u8>(1 << 50), Err(CudaError::OutOfMemory { .. })));
    let sr = Rounding::SrStates { seed: 1 };
    assert!(matches!(
        AdamW::new(&gpu, AdamWConfig::default(), StateFormat::Bf16, sr),
        Err(CudaError::Unsupported { .. })
    ));
}

/// A device without hardware rounding says so; one that has it gives neighbours, representable values themselves, and up
/// as often as the fraction says.
#[test]
fn hardware_rounding_where_there_is_some() {
    let Some(gpu) = gpu() else { return };
    let n = 1 << 20;
    let x: Vec<f32> = (0..n).map(|i| if i % 4 == 3 { -1.5 } else { 1.0 + 0.3 / 128.0 * (i % 4) as f32 }).collect();
    let (on, draw) = (gpu.upload(&x).unwrap(), Draw::seeded(5));
    let capability = gpu.capability().unwrap();
    if ![(10, 0), (10, 3)].contains(&capability) {
        let refused = CudaError::Capability { argument: "hardware_sr_cast", expected: "10.0 or 10.3", got: capability };
        assert_eq!(gpu.hardware_sr_cast::<bf16>(&on, draw).unwrap_err(), refused);
        assert_eq!(gpu.hardware_sr_cast_packed::<E2M1>(&on, draw).unwrap_err(), refused);
        return;
    }
    let halves = gpu.download(&gpu.hardware_sr_cast::<bf16>(&on, draw).unwrap()).unwrap();
    assert!(halves == halfulp::sr_cast::<bf16>(&x, draw));
    let values = |format: Format, codes: Vec<u16>| codes.into_iter().map(|code| format.value(code)).collect::<Vec<_>>();
    let bytes = gpu.download(&gpu.hardware_sr_cast::<E4M3>(&on, draw).unwrap()).unwrap();
    let e4m3 = values(Format::E4M3, bytes.iter().map(|code| code.to_bits().into()).collect());
    let bytes = gpu.download(&gpu.hardware_sr_cast::<E5M2>(&on, draw).unwrap()).unwrap();
    let e5m2 = values(Format::E5M2, bytes.iter().map(|code| code.to_bits().into()).collect());
    let packed = gpu.download_packed(&gpu.hardware_sr_cast_packed::<E2M1>(&on, draw).unwrap()).unwrap();
    let e2m1: Vec<f64> = (0..n).map(|i| f64::from(packed.get(i).unwrap().to_f32())).collect();
    for (name, ulp, y) in [("E4M3", 0.125, e4m3), ("E5M2", 0.25, e5m2), ("E2M1", 0.5, e2m1)] {
        for (lane, &value) in x[..4].iter().enumerate() {
            let ups =
                (lane..n).step_by(4).map(|i| if lane == 3 { y[i] + 1.5 } else { y[i] - 1.0 } / ulp).collect::<Vec<_>>();
            assert!(ups.iter().all(|&up| up == 0.0 || up == 1.0 && lane != 3), "{name} lane {lane}");
            let p = if lane == 3 { 0.0 } else { (f64::from(value) - 1.0) / ulp };
            let count = ups.len() as f64;
            let bound = 5.0 * (p * (1.0 - p) / count).sqrt() + 2f64.powi(-16);
            assert!((ups.iter().sum::<f64>() / count - p).abs() <= bound, "{name} lane {lane}");
        }
    }
    // Any cut and any alignment gives the elements of the whole.
    let part = gpu.upload(&x[1..10_000]).unwrap();
    let part = gpu.download(&gpu.hardware_sr_cast::<E4M3>(&part, draw.at(1)).unwrap()).unwrap();
    assert!(part.iter().zip(&bytes_of_e4m3(&gpu, &on, draw)[1..10_000]).all(|(a, b)| a.to_bits() == *b));
}

fn bytes_of_e4m3(gpu: &Gpu, x: &DeviceVec<f32>, draw: Draw) -> Vec<u8> {
    let codes = gpu.download(&gpu.hardware_sr_cast::<E4M3>(x, draw).unwrap()).unwrap();
    codes.into_iter().map(E4M3::to_bits).collect()
}

/// Kernels compiled at run time give the bits of those that are shipped: both equal the CPU.
#[test]
#[cfg(feature = "nvrtc")]
fn compiled_kernels_give_the_same_bits() {
    if gpu().is_none() {
        return;
    }
    let gpu = match Gpu::compiled(0) {
        Ok(gpu) => gpu,
        Err(error) => {
            assert!(std::env::var_os("HALFULP_REQUIRE_NVRTC").is_none(), "{error}");
            assert!(matches!(error, CudaError::NoNvrtc { .. }), "{error}");
            eprintln!("{error}: nothing compared");
            return;
        }
    };
    let mut inputs = Inputs(3);
    let x: Vec<f32> = (0..70_001).map(|_| f32::from_bits(inputs.next() as u32)).collect();
    for (_, format) in Format::NAMED {
        for cast in [Cast::nearest(), Cast::stochastic(Draw::seeded(7))] {
            let device = on_device(&gpu, &cast, &x, ElementType::F32, format, (0, 0));
            assert!(device == on_host(&cast, &x, format), "{format}");
        }
    }
    let r = Rounding::stochastic(1);
    let run = Run {
        n: 65_537,
        steps: 3,
        formats: StateFormat::Bf16.into(),
        states: r,
        parameters: r,
        weight_decay: 0.1,
        offset: 0,
        wild: true,
    };
    steps::<f32, f32>(&gpu, run);
    steps::<bf16, bf16>(&gpu, run);
    steps::<f16, f16>(&gpu, run);
}

/// A type of parameters or gradients on both sides.
trait Both: optim::Real + halfulp::cuda::Source {
    fn of(x: f32) -> Self;
}
impl Both for f32 {
    fn of(x: f32) -> Self {
        x
    }
}
impl Both for bf16 {
    fn of(x: f32) -> Self {
        Self::from_f32(x)
    }
}
impl Both for f16 {
    fn of(x: f32) -> Self {
        Self::from_f32(x)
    }
}

#[derive(Clone, Copy, Debug)]
struct Run {
    n: usize,
    steps: u64,
    formats: States,
    states: Rounding,
    parameters: Rounding,
    weight_decay: f64,
    offset: usize,
    /// Gradients of every kind, NaN and infinities too; else like those of training, with zeros.
    wild: bool,
}

fn steps<P: Both, G: Both>(gpu: &Gpu, run: Run) {
    let Run { n, steps, formats, states, parameters, weight_decay, offset, wild } = run;
    let config = AdamWConfig { lr: 0.01, weight_decay, ..AdamWConfig::default() };
    let mut inputs = Inputs(n as u64 ^ 99);
    let mut p: Vec<P> = (0..n).map(|_| P::of(inputs.next() as i32 as f32 * 1e-9)).collect();
    let mut host = optim::AdamW::new(config, formats, states).unwrap().parameter_rounding(parameters).unwrap();
    let mut device = AdamW::new(gpu, config, formats, states).unwrap().parameter_rounding(parameters).unwrap();
    let pad = |x: &[P]| [&vec![P::of(7.0); offset], x, &[P::of(7.0); 8]].concat();
    let on_device = gpu.upload(&pad(&p)).unwrap();
    for _ in 0..steps {
        let mut gradient = || match inputs.next() {
            word if !wild => [0.0, word as i32 as f32 * 1e-10][usize::from(word >> 60 != 0)],
            _ => gradient(&mut inputs),
        };
        let g: Vec<G> = (0..n).map(|_| G::of(gradient())).collect();
        host.step_tensors(&mut [Parameter::numbered(5, &mut p, &g)]).unwrap();
        let g = gpu.upload(&g).unwrap();
        let memory = StepMemory {
            id: 5,
            params: on_device.address() + (offset * size_of::<P>()) as u64,
            params_type: P::TYPE,
            grads: g.address(),
            grads_type: G::TYPE,
            n: n as u64,
        };
        // SAFETY: the buffers are this long and outlive the work: `g` is waited for below.
        unsafe { device.step_raw(&[memory]) }.unwrap();
        gpu.synchronize().unwrap();
    }
    let name = format!("{} {} {run:?}", std::any::type_name::<P>(), std::any::type_name::<G>());
    let bytes = |x: &[P]| bytemuck::cast_slice::<P, u8>(x).to_vec();
    assert!(bytes(&gpu.download(&on_device).unwrap()) == bytes(&pad(&p)), "parameters: {name}");
    if n > 0 {
        let (m, v) = device.moments(5).unwrap().unwrap();
        let (host_m, host_v) = host.moments(5).unwrap();
        let bits = |m: &optim::Moment| m.to_f32().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        for (moment, host, which) in [(&m, host_m, "m"), (&v, host_v, "v")] {
            assert!(bits(moment) == bits(host), "{which}: {name}");
            // Codes and scales too.
            assert!(!matches!(host, optim::Moment::Blocks(_)) || moment == host, "{which}: {name}");
        }
    }
}

const STATES: [(StateFormat, Rounding); 3] = [
    (StateFormat::F32, Rounding::Nearest),
    (StateFormat::Bf16, Rounding::Nearest),
    (StateFormat::Bf16, Rounding::Stochastic { seed: 42 }),
];

#[test]
fn every_dtype_and_rounding_steps_alike() {
    let Some(gpu) = gpu() else { return };
    for (format, states) in STATES {
        for parameters in [Rounding::Nearest, Rounding::stochastic(3)] {
            for (n, weight_decay) in [(4097, 0.0), (4097, 0.1), (65_537, 0.0), (65_537, 0.1)] {
                let run = Run {
                    n,
                    steps: 3,
                    formats: format.into(),
                    states,
                    parameters,
                    weight_decay,
                    offset: 0,
                    wild: true,
                };
                steps::<f32, f32>(&gpu, run);
                steps::<f32, bf16>(&gpu, run);
                steps::<f32, f16>(&gpu, run);
                steps::<bf16, f32>(&gpu, run);
                steps::<bf16, bf16>(&gpu, run);
                steps::<bf16, f16>(&gpu, run);
                steps::<f16, f32>(&gpu, run);
                steps::<f16, bf16>(&gpu, run);
                steps::<f16, f16>(&gpu, run);
            }
        }
    }
}

#[test]
fn every_length_steps_alike() {
    let Some(gpu) = gpu() else { return };
    let lengths = [0, 1, 3, 127, 128, 129, 255, 256, 257, 4095, 4096, 4097, 8191, 8192, 8193, 65_535, 65_536, 65_537];
    let r = Rounding::stochastic(1);
    for n in lengths {
        for offset in [0, 1, 2, 3] {
            let run = Run {
                n,
                steps: 2,
                formats: StateFormat::Bf16.into(),
                states: r,
                parameters: r,
                weight_decay: 0.1,
                offset,
                wild: true,
            };
            steps::<f32, f32>(&gpu, run);
            steps::<f32, bf16>(&gpu, run);
            steps::<bf16, bf16>(&gpu, run);
        }
    }
    for (n, count) in [(257, 1000), (4097, 1000), (65_537, 10), ((1 << 20) + 3, 10), (1 << 24, 10)] {
        let run = Run {
            n,
            steps: count,
            formats: StateFormat::Bf16.into(),
            states: r,
            parameters: r,
            weight_decay: 0.1,
            offset: 0,
            wild: true,
        };
        steps::<f32, f32>(&gpu, run);
        steps::<bf16, bf16>(&gpu, run);
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
    let Some(gpu) = gpu() else { return };
    for (m, v) in FIRST.into_iter().flat_map(|m| SECOND.map(|v| (m, v))) {
        for (states, wild) in
            [false, true].into_iter().flat_map(|wild| [(Rounding::Nearest, wild), (Rounding::stochastic(4), wild)])
        {
            let formats = States { m, v };
            let run =
                Run { n: 1537, steps: 3, formats, states, parameters: states, weight_decay: 0.1, offset: 0, wild };
            steps::<f32, f32>(&gpu, run);
            steps::<bf16, bf16>(&gpu, run);
        }
    }
}

#[test]
fn moments_in_blocks_step_alike() {
    let Some(gpu) = gpu() else { return };
    let r = Rounding::stochastic(1);
    let lengths = [
        0, 1, 3, 127, 128, 129, 255, 256, 257, 511, 512, 513, 4095, 4096, 4097, 8191, 8192, 8193, 65_535, 65_536,
        65_537,
    ];
    for formats in PAIRS {
        for wild in [false, true] {
            let run = Run { n: 0, steps: 2, formats, states: r, parameters: r, weight_decay: 0.1, offset: 0, wild };
            for n in lengths {
                for offset in [0, 1, 2, 3] {
                    steps::<f32, f32>(&gpu, Run { n, offset, ..run });
                    steps::<bf16, bf16>(&gpu, Run { n, offset, ..run });
                }
            }
            for (parameters, weight_decay) in [(Rounding::Nearest, 0.0), (Rounding::Nearest, 0.1), (r, 0.0)] {
                let run = Run { n: 4097, parameters, weight_decay, ..run };
                steps::<f32, bf16>(&gpu, run);
                steps::<f32, f16>(&gpu, run);
                steps::<bf16, f32>(&gpu, run);
                steps::<bf16, bf16>(&gpu, run);
                steps::<bf16, f16>(&gpu, run);
                steps::<f16, f32>(&gpu, run);
                steps::<f16, bf16>(&gpu, run);
                steps::<f16, f16>(&gpu, run);
            }
            for block in [32, 64, 256] {
                let [m, v] = [formats.m, formats.v].map(|format| format.block(block).unwrap());
                for n in [1, block - 1, block + 1, 4097, 65_537] {
                    steps::<f32, f32>(&gpu, Run { n, formats: States { m, v }, ..run });
                    steps::<bf16, bf16>(&gpu, Run { n, formats: States { m, v }, ..run });
                }
            }
            for (n, steps_) in [(4097, 1000), (65_537, 10), ((1 << 20) + 3, 10)] {
                steps::<f32, f32>(&gpu, Run { n, steps: steps_, ..run });
                steps::<bf16, bf16>(&gpu, Run { n, steps: steps_, ..run });
            }
        }
        let run =
            Run { n: 1 << 24, steps: 2, formats, states: r, parameters: r, weight_decay: 0.1, offset: 0, wild: false };
        steps::<bf16, bf16>(&gpu, run);
    }
}

/// A tensor may begin anywhere in memory, and a block be of any scale: gradients from 1e-40 to 1e30, a magnitude a block.
#[test]
fn blocks_of_every_magnitude_step_alike() {
    let Some(gpu) = gpu() else { return };
    let n = 128 * 70 + 5;
    let grads: Vec<f32> = (0..n).map(|i| ((i % 128) as f32 - 60.0) * 10f32.powi((i / 128) as i32 - 42)).collect();
    let on_device = gpu.upload(&grads).unwrap();
    for formats in PAIRS {
        let r = Rounding::stochastic(3);
        let mut host = optim::AdamW::new(AdamWConfig::default(), formats, r).unwrap();
        let mut device = AdamW::new(&gpu, AdamWConfig::default(), formats, r).unwrap();
        let mut p = vec![0.5f32; n];
        let mut p_on_device = gpu.upload(&p).unwrap();
        for _ in 0..3 {
            host.step(&mut p, &grads).unwrap();
            device.step(&mut p_on_device, &on_device).unwrap();
        }
        let bits = |p: &[f32]| bytemuck::cast_slice::<f32, u32>(p).to_vec();
        assert!(bits(&gpu.download(&p_on_device).unwrap()) == bits(&p), "{formats:?}");
        let (m, v) = device.moments(0).unwrap().unwrap();
        let (host_m, host_v) = host.moments(0).unwrap();
        assert!(&m == host_m && &v == host_v, "{formats:?}");
    }
}

#[test]
fn tensors_step_alike_in_any_order() {
    let Some(gpu) = gpu() else { return };
    let run = |reverse: bool| {
        let mut opt = AdamW::new(&gpu, AdamWConfig::default(), StateFormat::Bf16, Rounding::stochastic(5)).unwrap();
        let (mut a, mut b) = (gpu.upload(&vec![bf16::ONE; 1000]).unwrap(), gpu.upload(&vec![bf16::ONE; 513]).unwrap());
        let (ga, gb) = (gpu.upload(&vec![0.3f32; 1000]).unwrap(), gpu.upload(&vec![-0.7f32; 513]).unwrap());
        for _ in 0..3 {
            let mut list = [DeviceParameter::numbered(1, &mut a, &ga), DeviceParameter::named("b", &mut b, &gb)];
            if reverse {
                list.reverse();
            }
            opt.step_tensors(&mut list).unwrap();
        }
        (gpu.download(&a).unwrap(), gpu.download(&b).unwrap(), opt.moments(halfulp::random::tensor_id("b")).unwrap())
    };
    assert!(run(false) == run(true));
}

/// Parts of a tensor on optimizers of their own, as shards are, get the bits of the whole. The list is checked as on the CPU.
#[test]
fn parts_step_as_the_whole() {
    let Some(gpu) = gpu() else { return };
    let n = 14_000;
    let (p, g): (Vec<bf16>, Vec<f32>) = {
        let mut inputs = Inputs(8);
        (0..n).map(|_| (bf16::from_f32(inputs.next() as i32 as f32 * 1e-9), gradient(&mut inputs))).unzip()
    };
    let new = || AdamW::new(&gpu, AdamWConfig::default(), StateFormat::Bf16, Rounding::stochastic(5)).unwrap();
    let run = |first: usize, end: usize| {
        let (mut params, grads) = (gpu.upload(&p[first..end]).unwrap(), gpu.upload(&g[first..end]).unwrap());
        let mut opt = new();
        for _ in 0..3 {
            let part = DeviceParameter::named("w", &mut params, &grads).part(first as u64, n as u64);
            opt.step_tensors(&mut [part]).unwrap();
        }
        let (m, v) = opt.moments(halfulp::random::tensor_id("w")).unwrap().unwrap();
        (gpu.download(&params).unwrap(), m.to_f32(), v.to_f32())
    };
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let (whole_p, whole_m, whole_v) = run(0, n);
    for (first, end) in [(0, 4096), (4096, 12_288), (12_288, n), (n, n)] {
        let (p, m, v) = run(first, end);
        assert!(bytemuck::cast_slice::<bf16, u8>(&p) == bytemuck::cast_slice::<bf16, u8>(&whole_p[first..end]));
        assert!(bits(&m) == bits(&whole_m[first..end]) && bits(&v) == bits(&whole_v[first..end]));
    }
    let (mut params, grads) = (gpu.upload(&p[..4000]).unwrap(), gpu.upload(&g[..4000]).unwrap());
    let (mut other, short) = (gpu.upload(&p[..4000]).unwrap(), gpu.upload(&g[..10]).unwrap());
    let error = new().step_tensors(&mut [DeviceParameter::named("w", &mut params, &grads).part(0, 9000)]).unwrap_err();
    let CudaError::Optim(optim::OptimError::Cut { source, .. }) = error else { panic!("{error}") };
    assert_eq!(source, optim::ShardError::Cut { argument: "end", below: 0, above: 4096, got: 4000 });
    let error = new().step(&mut params, &short).unwrap_err();
    assert_eq!(error.to_string(), "grads of tensor 0: expected 4000 elements, got 10");
    let mut twice = [DeviceParameter::named("w", &mut params, &grads), DeviceParameter::named("w", &mut other, &grads)];
    let error = new().step_tensors(&mut twice).unwrap_err();
    assert!(error.to_string().contains("got `w` and `w` with the same id"), "{error}");
}

/// Updates of .002 ulp, 10,000 times: of 2^24 second moments, and of as many BF16 parameters, independent draws leave .034 where
/// they were. Two seconds on an H200.
#[test]
fn small_updates_arrive_everywhere() {
    let Some(gpu) = gpu() else { return };
    let n = 1 << 24;
    let base = AdamWConfig { lr: 0.0, beta1: 0.0, beta2: 0.0, weight_decay: 0.0, ..AdamWConfig::default() };
    let left = |stay: f64| stay.powi(10_000) * n as f64;

    let mut opt = AdamW::new(&gpu, base, StateFormat::Bf16, Rounding::stochastic(7)).unwrap();
    let mut p = gpu.zeroed::<bf16>(n).unwrap();
    // Moments of 1, and from then on second moments that grow by .001 (g^2 - 1) of 2^-7.
    opt.step(&mut p, &gpu.upload(&vec![1f32; n]).unwrap()).unwrap();
    let g = (1.0f64 + 0.002 / 128.0 / 0.001).sqrt() as f32;
    let config = AdamWConfig { beta1: 0.9, beta2: 0.999, ..base };
    opt.set_config(config).unwrap();
    let [_, _, v] = config.scalars(2).unwrap().step(0.0, g, 1.0, 1.0);
    let up = f64::from(v.to_bits() & 0xFFFF) / 65_536.0;
    assert!((up - 0.002).abs() < 2e-5 && left(1.0 - up) < 0.05);
    let grads = gpu.upload(&vec![g; n]).unwrap();
    for _ in 0..10_000 {
        opt.step(&mut p, &grads).unwrap();
    }
    let (_, v) = opt.moments(0).unwrap().unwrap();
    let optim::Moment::Bf16(v) = v else { panic!("moments are in BF16") };
    let still = v.iter().filter(|&&v| v == bf16::ONE).count();
    assert!(still <= 4, "{still} second moments never moved");

    // A constant gradient moves parameters by lr a step.
    let start = bf16::from_f32(1.5);
    let mut p = gpu.upload(&vec![start; n]).unwrap();
    let config = AdamWConfig { lr: 0.002 / 128.0, beta1: 0.9, beta2: 0.999, ..base };
    let mut opt = AdamW::new(&gpu, config, StateFormat::F32, Rounding::stochastic(8)).unwrap();
    for _ in 0..10_000 {
        opt.step(&mut p, &grads).unwrap();
    }
    let still = gpu.download(&p).unwrap().iter().filter(|&&p| p == start).count();
    assert!(still <= 4, "{still} parameters never moved");
}

/// 2^31 + 7 elements: the first, the last and those around 2^31 are stepped. Needs 13 GB of device memory.
#[test]
#[ignore = "needs a large GPU"]
fn more_than_two_to_the_31() {
    let Some(gpu) = gpu() else { return };
    let n = (1usize << 31) + 7;
    let mut p = gpu.zeroed::<bf16>(n).unwrap();
    let g = gpu.zeroed::<bf16>(n).unwrap();
    let ones = gpu.upload(&vec![1f32; 1 << 20]).unwrap();
    let cast = Cast::nearest();
    // Ones for gradients at both ends, by casts into the middle of the buffer.
    for start in [0, n - (1 << 20)] {
        let memory = CastMemory {
            x: ones.address(),
            source: ElementType::F32,
            y: g.address() + 2 * start as u64,
            format: Format::BF16,
            n: 1 << 20,
        };
        // SAFETY: inside `g`, which lives on.
        unsafe { gpu.cast_raw(&cast, memory) }.unwrap();
    }
    let config = AdamWConfig { lr: 0.5, weight_decay: 0.0, ..AdamWConfig::default() };
    let mut opt = AdamW::new(&gpu, config, StateFormat::Bf16, Rounding::stochastic(1)).unwrap();
    opt.step(&mut p, &g).unwrap();
    let p = gpu.download(&p).unwrap();
    for i in [0, 1, (1 << 20) - 1, n - (1 << 20), (1 << 31) - 1, 1 << 31, n - 1] {
        assert!((p[i].to_f32() + 0.5).abs() < 0.01, "element {i} is {}", p[i]);
    }
    assert_eq!(p[1 << 20].to_f32(), 0.0);
}
