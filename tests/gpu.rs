//! The GPU gives the bits of the CPU. Without a device these tests pass by without a word, unless `HALFULP_REQUIRE_GPU` is
//! set.
#![cfg(feature = "cuda")]

mod common;

use common::{Grid, Inputs, f32_inputs, gradient, grids};
use halfulp::cast::{Cast, CastError, MissingNan};
use halfulp::cuda::{
    AdamW, BlocksMemory, CastMemory, CudaError, DeviceParameter, DeviceVec, ElementType, Gpu, Source, StepMemory,
};
use halfulp::format::{BlockFormat, BlockScale, BlockVec, Scales};
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

fn block_formats() -> Vec<BlockFormat> {
    let presets = [
        BlockFormat::MXFP8_E4M3,
        BlockFormat::MXFP8_E5M2,
        BlockFormat::MXFP6_E3M2,
        BlockFormat::MXFP6_E2M3,
        BlockFormat::MXFP4,
        BlockFormat::NVFP4,
    ];
    let elements = Format::NAMED.map(|(_, format)| format).into_iter().filter(|format| format.bits() <= 8);
    let others = elements.flat_map(|element| {
        [16, 32, 64, 128, 256].into_iter().flat_map(move |block| {
            [BlockScale::Ceil, BlockScale::Floor, BlockScale::Amax]
                .map(|scale| BlockFormat::new(element, block, scale).unwrap())
        })
    });
    presets.into_iter().chain(others).collect()
}

/// Bits of codes and scales, NaN too.
fn bits_of_blocks(blocks: &BlockVec) -> (Vec<u8>, Vec<u32>, u32) {
    let bytes = |codes: &[u8]| codes.iter().map(|&code| code.into()).collect();
    let (scales, global) = match blocks.scales() {
        Scales::E8M0(codes) => (bytes(codes), 0),
        Scales::F32(scales) => (scales.iter().map(|scale| scale.to_bits()).collect(), 0),
        Scales::Nvfp4 { blocks, global } => (bytes(blocks), global.to_bits()),
        _ => unreachable!(),
    };
    (blocks.codes().to_vec(), scales, global)
}

/// Casts on both sides, and decodes on both.
fn blocks_alike<S: Source + std::fmt::Debug>(gpu: &Gpu, cast: &Cast, x: &[S], format: BlockFormat) {
    let host = cast.to_blocks(x, format).unwrap();
    let on_device = gpu.cast_blocks(cast, &gpu.upload(x).unwrap(), format).unwrap();
    assert_eq!((on_device.format(), on_device.len(), on_device.is_empty()), (format, x.len(), x.is_empty()));
    let device = gpu.download_blocks(&on_device).unwrap();
    let n = x.len();
    assert!(bits_of_blocks(&device) == bits_of_blocks(&host), "{format:?} {n} {} {cast:?}", std::any::type_name::<S>());
    let values = gpu.download(&gpu.decode_blocks(&on_device).unwrap()).unwrap();
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert!(bits(&values) == bits(&host.decode()), "{format:?} {n}: values");
}

/// Values of every exponent, another range in each sixteen, with zeros, and with what is not finite in one of eight.
fn block_values(n: usize) -> Vec<f32> {
    let mut inputs = Inputs(n as u64 + 5);
    let value = |i: usize| {
        let word = inputs.next();
        let top = (i / 16 * 37 % 220) as u32;
        match (word >> 56, i / 16 % 8) {
            (0..16, _) => 0.0,
            (16, 0) => [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][i % 3],
            (_, 1) => f32::from_bits(word as u32 & 0x8000_3FFF),
            _ => f32::from_bits(word as u32 & 0x807F_FFFF | (top + (word >> 32) as u32 % 35) << 23),
        }
    };
    (0..n).map(value).collect()
}

fn block_casts() -> [Cast; 4] {
    let draw = Draw::seeded(42).step(3).named("w");
    [
        Cast::nearest(),
        Cast::stochastic(draw),
        Cast::stochastic(draw.at(5)),
        Cast::stochastic(draw).overflow(Overflow::Ieee),
    ]
}

#[test]
fn casts_into_blocks() {
    let Some(gpu) = gpu() else { return };
    let halves: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
    let bfloats: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    let x = block_values(70_001);
    let ordinary: Vec<f32> = (0..70_001).map(|i| ((i * 7919 % 20_011) as f32 - 10_000.0) * 1e-4).collect();
    for format in block_formats() {
        for cast in block_casts() {
            blocks_alike(&gpu, &cast, &x, format);
            blocks_alike(&gpu, &cast, &ordinary, format);
            blocks_alike(&gpu, &cast, &halves, format);
            blocks_alike(&gpu, &cast, &bfloats, format);
            for n in [0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 127, 128, 129, 255, 257, 1023, 1024, 1025] {
                blocks_alike(&gpu, &cast, &x[..n], format);
            }
        }
    }
    // More than the grid of the maximum takes at once.
    let long = block_values((1 << 22) + 3);
    blocks_alike(&gpu, &Cast::stochastic(Draw::seeded(1)), &long, BlockFormat::NVFP4);
    // A maximum that is in the last element.
    let mut last = vec![1f32; (1 << 22) + 3];
    *last.last_mut().unwrap() = -3e20;
    blocks_alike(&gpu, &Cast::nearest(), &last, BlockFormat::NVFP4);
}

/// Somebody else's memory, off alignment: nothing is written outside.
#[test]
fn casts_into_blocks_of_every_alignment() {
    let Some(gpu) = gpu() else { return };
    let x = block_values(5000);
    for format in [
        BlockFormat::MXFP8_E4M3,
        BlockFormat::MXFP6_E2M3,
        BlockFormat::MXFP4,
        BlockFormat::NVFP4,
        BlockFormat::new(Format::E4M3, 64, BlockScale::Amax).unwrap(),
    ] {
        for n in [0, 1, 15, 17, 1000, 5000] {
            for (x_offset, offset) in [(0, 0), (1, 0), (0, 1), (3, 2), (4, 4)] {
                let cast = Cast::stochastic(Draw::seeded(7).at(x_offset as u64));
                let host = cast.to_blocks(&x[..n], format).unwrap();
                let (codes, scales, global) = bits_of_blocks(&host);
                let shifted: Vec<f32> = [&vec![0.0; x_offset], &x[..n]].concat();
                let scale_size = if format.scale() == BlockScale::Amax { 4 } else { 1 };
                let filled = |bytes: usize| gpu.upload(&vec![0xAAu8; bytes + 32]).unwrap();
                let values = gpu.upload(&shifted).unwrap();
                let (to, of, whole) = (filled(codes.len()), filled(scale_size * scales.len()), filled(4));
                let memory = BlocksMemory {
                    values: values.address() + 4 * x_offset as u64,
                    values_type: ElementType::F32,
                    codes: to.address() + offset,
                    scales: of.address() + scale_size as u64 * offset,
                    global: whole.address() + 4 * offset,
                    format,
                    n: n as u64,
                };
                // SAFETY: the buffers are this long and live until the downloads below.
                unsafe { gpu.cast_blocks_raw(&cast, memory) }.unwrap();
                let same = |memory: &DeviceVec<u8>, start: usize, expected: &[u8], what: &str| {
                    let all = gpu.download(memory).unwrap();
                    let (before, rest) = all.split_at(start);
                    let (got, after) = rest.split_at(expected.len());
                    assert!(got == expected, "{format:?} {n} {offset}: {what}");
                    assert!(before.iter().chain(after).all(|&byte| byte == 0xAA), "{format:?} {n} {offset}: outside");
                };
                let scale_bytes: Vec<u8> =
                    scales.iter().flat_map(|scale| scale.to_le_bytes()[..scale_size].to_vec()).collect();
                same(&to, offset as usize, &codes, "codes");
                same(&of, scale_size * offset as usize, &scale_bytes, "scales");
                let written =
                    if format.scale() == BlockScale::Nvfp4 && n > 0 { &global.to_le_bytes()[..] } else { &[] };
                same(&whole, 4 * offset as usize, written, "global");
                // And back, next to where it came from.
                let back = gpu.upload(&vec![7f32; n + 16]).unwrap();
                let memory = BlocksMemory { values: back.address() + 4 * x_offset as u64, ..memory };
                if format.scale() == BlockScale::Nvfp4 && n == 0 {
                    continue;
                }
                // SAFETY: as above.
                unsafe { gpu.decode_blocks_raw(memory) }.unwrap();
                let back = gpu.download(&back).unwrap();
                let expected = [&vec![7.0; x_offset], &host.decode()[..], &vec![7.0; 16 - x_offset]].concat();
                assert!(back.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()), "{format:?} {n}: values");
            }
        }
    }
}

/// The boundary of 2^32 groups inside a call, where blocks begin too; and where they do not, refused.
#[test]
fn casts_into_blocks_over_a_change_of_keys() {
    let Some(gpu) = gpu() else { return };
    let x: Vec<f32> = (0..10_000).map(|i| 1.0 + i as f32 * 1e-5).collect();
    for format in [BlockFormat::MXFP8_E4M3, BlockFormat::MXFP6_E3M2, BlockFormat::NVFP4] {
        for first in [(1u64 << 33) - 4096, u64::MAX - 4095, 5 << 33] {
            blocks_alike(&gpu, &Cast::stochastic(Draw::seeded(7).at(first)), &x, format);
        }
        let cast = Cast::stochastic(Draw::seeded(7).at((1 << 33) - 4001));
        let refused = gpu.cast_blocks(&cast, &gpu.upload(&x).unwrap(), format).unwrap_err();
        assert!(matches!(refused, CudaError::Unsupported { argument: "draw", .. }), "{refused}");
    }
}

/// Scales that no cast makes are read all the same.
#[test]
fn blocks_from_elsewhere_decode_alike() {
    let Some(gpu) = gpu() else { return };
    let mut inputs = Inputs(2);
    for format in block_formats() {
        let n = 256 * format.block() - 3;
        let codes = (0..format.element().bytes(n)).map(|_| inputs.next() as u8).collect();
        let scales = match format.scale() {
            BlockScale::Amax => Scales::F32((0..256).map(|_| f32::from_bits(inputs.next() as u32)).collect()),
            BlockScale::Nvfp4 => Scales::Nvfp4 { blocks: (0..=255).collect(), global: 1e-30 },
            _ => Scales::E8M0((0..=255).collect()),
        };
        let blocks = BlockVec::from_parts(format, n, codes, scales).unwrap();
        let on_device = gpu.upload_blocks(&blocks).unwrap();
        assert!(bits_of_blocks(&gpu.download_blocks(&on_device).unwrap()) == bits_of_blocks(&blocks));
        let values = gpu.download(&gpu.decode_blocks(&on_device).unwrap()).unwrap();
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(&values) == bits(&blocks.decode()), "{format:?}");
    }
}

#[test]
fn refused_casts_into_blocks() {
    let Some(gpu) = gpu() else { return };
    let (x, format) = (gpu.upload(&[1f32; 40]).unwrap(), BlockFormat::MXFP4);
    let refused = |cast: &Cast| gpu.cast_blocks(cast, &x, format).unwrap_err();
    assert_eq!(refused(&Cast::nearest().scale(3)), CudaError::Cast(CastError::Scale { got: 3 }));
    assert!(matches!(refused(&Cast::up()), CudaError::Unsupported { argument: "rounding", .. }));
    let missing_nan = refused(&Cast::nearest().missing_nan(MissingNan::Refuse));
    assert!(matches!(missing_nan, CudaError::Unsupported { argument: "missing_nan", .. }));
    let philox = Draw::seeded(1).stream(halfulp::random::Stream::Philox);
    assert!(matches!(refused(&Cast::stochastic(philox)), CudaError::Unsupported { argument: "draw", .. }));
    let mut short = gpu.cast_blocks(&Cast::nearest(), &gpu.upload(&[1f32; 39]).unwrap(), format).unwrap();
    let error = gpu.cast_blocks_into(&Cast::nearest(), &x, &mut short).unwrap_err();
    assert_eq!(error, CudaError::Length { argument: "out", expected: 40, got: 39 });
    let error = gpu.decode_blocks_into(&short, &mut gpu.zeroed(40).unwrap()).unwrap_err();
    assert_eq!(error, CudaError::Length { argument: "y", expected: 39, got: 40 });
    let wide = Format::builder(5, 2).bias(200).build().unwrap();
    let wide = BlockFormat::new(wide, 32, BlockScale::Ceil).unwrap();
    let error = gpu.cast_blocks(&Cast::nearest(), &x, wide).unwrap_err();
    assert!(matches!(error, CudaError::Unsupported { argument: "format", .. }), "{error}");
    let memory = BlocksMemory {
        values: x.address(),
        values_type: ElementType::F32,
        codes: x.address() + 156,
        scales: short.scales().address(),
        global: 0,
        format,
        n: 40,
    };
    // SAFETY: refused before anything is launched.
    let overlap = unsafe { gpu.cast_blocks_raw(&Cast::nearest(), memory) };
    assert!(matches!(overlap, Err(CudaError::Overlap { first: "values", second: "codes", .. })));
    let amax = BlockFormat::new(Format::E4M3, 32, BlockScale::Amax).unwrap();
    let memory = BlocksMemory { codes: short.codes().address(), scales: memory.scales + 1, format: amax, ..memory };
    // SAFETY: as above.
    let odd = unsafe { gpu.cast_blocks_raw(&Cast::nearest(), memory) };
    assert!(matches!(odd, Err(CudaError::Misaligned { argument: "scales", .. })));
    // SAFETY: as above.
    let half = unsafe { gpu.decode_blocks_raw(BlocksMemory { values_type: ElementType::Bf16, ..memory }) };
    assert!(matches!(half, Err(CudaError::Unsupported { argument: "values_type", .. })));
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
trait Both: optim::Real + Source {
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

/// Codes of a moment, and its scales as bits: a NaN is not equal to itself.
fn codes(moment: &optim::Moment) -> (Vec<u8>, Vec<u32>) {
    let optim::Moment::Blocks(blocks) = moment else { return (vec![], vec![]) };
    let scales = match blocks.scales() {
        Scales::F32(scales) => scales.iter().map(|scale| scale.to_bits()).collect(),
        Scales::E8M0(scales) => scales.iter().map(|&scale| scale.into()).collect(),
        other => panic!("{other:?}"),
    };
    (blocks.codes().to_vec(), scales)
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
            group: 0,
            part: None,
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
            assert!(codes(moment) == codes(host), "{which}: {name}");
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
        // More tiles than there are warps, each of which takes several.
        steps::<bf16, bf16>(&gpu, Run { n: (1 << 25) + 513, ..run });
    }
}

/// F32 scales of one moment or both, and blocks of two sizes, of which a warp takes the larger.
#[test]
fn moments_under_any_scale_step_alike() {
    let Some(gpu) = gpu() else { return };
    let r = Rounding::stochastic(1);
    for States { m, v } in PAIRS {
        for (m, v) in [(m.amax(), v), (m, v.amax()), (m.amax(), v.amax())] {
            for (block_m, block_v) in [(128, 128), (32, 256), (256, 32), (64, 128), (64, 32), (256, 256)] {
                let formats = States { m: m.block(block_m).unwrap(), v: v.block(block_v).unwrap() };
                for (states, wild) in [(r, false), (r, true), (Rounding::Nearest, true)] {
                    let run =
                        Run { n: 0, steps: 3, formats, states, parameters: r, weight_decay: 0.1, offset: 0, wild };
                    for n in [0, 1, 31, 32, 33, 127, 129, 255, 257, 4097] {
                        steps::<f32, f32>(&gpu, Run { n, ..run });
                        steps::<bf16, bf16>(&gpu, Run { n, offset: 1, ..run });
                    }
                    steps::<f16, f32>(&gpu, Run { n: 65_537, ..run });
                }
            }
        }
        for (block_m, block_v) in [(32, 256), (256, 32), (64, 128)] {
            let formats = States { m: m.block(block_m).unwrap(), v: v.block(block_v).unwrap() };
            for wild in [false, true] {
                let run = Run { n: 0, steps: 3, formats, states: r, parameters: r, weight_decay: 0.1, offset: 0, wild };
                for n in [1, 33, 255, 257, 65_537] {
                    steps::<f32, f32>(&gpu, Run { n, ..run });
                    steps::<bf16, bf16>(&gpu, Run { n, ..run });
                }
            }
        }
    }
}

/// A tensor may begin anywhere in memory, and a block be of any scale: gradients from 1e-40 to 1e30, a magnitude a block.
#[test]
fn blocks_of_every_magnitude_step_alike() {
    let Some(gpu) = gpu() else { return };
    let n = 128 * 70 + 5;
    let grads: Vec<f32> = (0..n).map(|i| ((i % 128) as f32 - 60.0) * 10f32.powi((i / 128) as i32 - 42)).collect();
    let on_device = gpu.upload(&grads).unwrap();
    for formats in PAIRS.into_iter().flat_map(|States { m, v }| [States { m, v }, States { m: m.amax(), v: v.amax() }])
    {
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
        assert!(codes(&m) == codes(host_m) && codes(&v) == codes(host_v), "{formats:?}");
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
