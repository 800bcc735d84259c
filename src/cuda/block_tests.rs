//! Casts into and out of blocks, run on the host by the code that launches them on a GPU, against the CPU path bit by bit.

use core::fmt::Debug;

use half::{bf16, f16};

use super::emulated::{Emulated, FORWARD, REVERSE};
use super::kernel_tests::{Inputs, Value, orders};
use super::launch::{Device, LargestArguments, Launch};
use super::{BlocksMemory, CudaError, ElementType, Gpu};
use crate::cast::{Cast, CastError, MissingNan};
use crate::format::{BlockFormat, BlockScale, BlockVec, Format, Negative, Scales, Specials};
use crate::random::{Draw, Draws, Stream};
use crate::round::Overflow;

fn gpu(order: u64) -> Option<Gpu> {
    Emulated::new(order).map(Gpu::emulated)
}

const PRESETS: [BlockFormat; 6] = [
    BlockFormat::MXFP8_E4M3,
    BlockFormat::MXFP8_E5M2,
    BlockFormat::MXFP6_E3M2,
    BlockFormat::MXFP6_E2M3,
    BlockFormat::MXFP4,
    BlockFormat::NVFP4,
];
const RULES: [BlockScale; 3] = [BlockScale::Ceil, BlockScale::Floor, BlockScale::Amax];
const SIZES: [usize; 5] = [16, 32, 64, 128, 256];

/// Elements with a name, and of one's own: every width, with and without sign, zero, fraction, infinity and NaN, and exponents that
/// f32 arithmetic does not serve.
fn elements() -> impl Iterator<Item = Format> {
    let own = [
        Format::builder(6, 2).specials(Specials::Ieee).unsigned().bias(3),
        Format::builder(8, 0).unsigned().without_zero().negative(Negative::Nan).specials(Specials::NanOnly),
        Format::builder(7, 1).unsigned().negative(Negative::Nan).specials(Specials::NanOnly),
        Format::builder(7, 0).bias(40),
        Format::builder(5, 2).bias(70),
        Format::builder(2, 5).bias(-30),
        Format::builder(3, 3).unsigned().without_zero(),
        Format::builder(5, 0),
        Format::builder(3, 0),
        Format::builder(1, 2),
    ];
    let named = Format::NAMED.into_iter().map(|(_, format)| format).filter(|format| format.bits() <= 8);
    named.chain(own.map(|builder| builder.build().unwrap()))
}

/// Presets, and all elements under all rules in blocks of all sizes.
fn formats() -> impl Iterator<Item = BlockFormat> {
    let rules = || SIZES.into_iter().flat_map(|size| RULES.map(|scale| (size, scale)));
    let others = elements()
        .flat_map(move |element| rules().map(move |(size, scale)| BlockFormat::new(element, size, scale).unwrap()));
    PRESETS.into_iter().chain(others)
}

/// Bits of codes and scales, NaN too.
fn bits_of(blocks: &BlockVec) -> (&[u8], Vec<u8>, u32) {
    match blocks.scales() {
        Scales::E8M0(codes) => (blocks.codes(), codes.clone(), 0),
        Scales::F32(scales) => (blocks.codes(), bytemuck::pod_collect_to_vec(scales), 0),
        Scales::Nvfp4 { blocks: codes, global } => (blocks.codes(), codes.clone(), global.to_bits()),
    }
}

fn bits(x: &[f32]) -> &[u32] {
    bytemuck::cast_slice(x)
}

/// Casts on both sides, and decodes on both.
fn alike<S: Value>(order: u64, cast: &Cast, x: &[S], format: BlockFormat) {
    let Some(gpu) = gpu(order) else { return };
    let name = format!("{format:?} of {} {}: {cast:?}", x.len(), S::TYPE.name());
    let host = cast.to_blocks(x, format).unwrap();
    let on_device = gpu.cast_blocks(cast, &gpu.upload(x).unwrap(), format).unwrap_or_else(|e| panic!("{e}: {name}"));
    assert_eq!((on_device.format(), on_device.len(), on_device.is_empty()), (format, x.len(), x.is_empty()));
    let device = gpu.download_blocks(&on_device).unwrap();
    let (host_bits, device_bits) = (bits_of(&host), bits_of(&device));
    assert!(device_bits.1 == host_bits.1 && device_bits.2 == host_bits.2, "scales: {name}");
    let at = device_bits.0.iter().zip(host_bits.0).position(|(a, b)| a != b);
    assert!(at.is_none(), "codes, byte {at:?}: {name}");
    let values = gpu.decode_blocks(&on_device).unwrap_or_else(|e| panic!("{e}: {name}"));
    assert!(bits(&gpu.download(&values).unwrap()) == bits(&host.decode()), "values: {name}");
}

/// Values of every exponent, another range in each sixteen, with zeros and subnormals, and with what is not finite in one of eight.
fn values(n: usize) -> Vec<f32> {
    let mut inputs = Inputs(n as u64 + 5);
    let value = |i: usize| {
        let word = inputs.next();
        let top = (i / 16 * 37 % 220) as u32;
        match (word >> 56, i / 16 % 8) {
            (0..16, _) => 0.0,
            (16..20, 0) => [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][i % 3],
            (_, 1) => f32::from_bits(word as u32 & 0x8000_3FFF),
            _ => f32::from_bits(word as u32 & 0x807F_FFFF | (top + (word >> 32) as u32 % 35) << 23),
        }
    };
    (0..n).map(value).collect()
}

/// Blocks of one magnitude each, whose largest value is that of the format times a power of two, or next to it, or next to the
/// largest that the power of two below serves; with zeros, of either sign, and ties.
fn edges(format: BlockFormat) -> Vec<f32> {
    let element = format.element();
    let max = element.max() as f32;
    let mut x = vec![];
    for power in [-140, -127, -126, -3, 0, 5, 120] {
        for step in [-1i32, 0, 1] {
            let mut block: Vec<f32> = (0..format.block())
                .map(|i| {
                    let code = i as u32 * 7 % (u32::from(element.max_code()) + 1);
                    let middle = element.value(code as u16) / 2.0 + element.value((code / 2) as u16) / 2.0;
                    (middle * 2f64.powi(power)) as f32 * if i % 3 == 0 { -1.0 } else { 1.0 }
                })
                .collect();
            let largest = (f64::from(max) * 2f64.powi(power)) as f32;
            block[step as usize % 5] = f32::from_bits(largest.to_bits().saturating_add_signed(step).min(0x7F7F_FFFF));
            block[7] = -0.0;
            x.append(&mut block);
        }
    }
    // Zeros alone, then the least and the largest there is, and one that is not finite at the end of a block.
    let other = |first: f32, rest: f32| core::iter::once(first).chain(core::iter::repeat_n(rest, format.block() - 1));
    x.extend(other(0.0, 0.0).chain(other(f32::from_bits(1), -0.0)).chain(other(f32::MAX, f32::MIN)));
    x.extend(other(f32::NAN, 1.0).chain(other(1.0, f32::INFINITY)).chain(other(f32::NEG_INFINITY, 0.0)));
    x
}

fn casts() -> [Cast; 4] {
    let draw = Draw::seeded(42).step(3).named("w");
    [
        Cast::nearest(),
        Cast::stochastic(draw),
        Cast::stochastic(draw.at(5)),
        Cast::stochastic(draw).overflow(Overflow::Ieee),
    ]
}

#[test]
fn every_format_source_and_rule_casts_alike() {
    let (mut orders, mut part) = (orders(), 0);
    let x = values(1301);
    let ordinary: Vec<f32> = (0..1301).map(|i| ((i * 7919 % 20_011) as f32 - 10_000.0) * 1e-4).collect();
    for format in formats() {
        let edges = edges(format);
        for cast in casts() {
            let mut order = || orders.next().unwrap();
            alike(order(), &cast, &x, format);
            alike(order(), &cast, &ordinary, format);
            alike(order(), &cast, &edges, format);
            // All codes of sources of 16 bits, a sixty-fourth at a time.
            let codes = || (0..1024u16).map(|i| (i % 16) << 12 | (part % 64) << 6 | (i / 16));
            alike(order(), &cast, &codes().map(f16::from_bits).collect::<Vec<_>>(), format);
            alike(order(), &cast, &codes().map(bf16::from_bits).collect::<Vec<_>>(), format);
            part += 1;
        }
    }
}

/// Below the smallest normal value of the format, where an f32 has bits that arithmetic in the units of codes drops: a hair beside
/// ties, and values that go up, or not, by the last bits of their draw.
#[test]
fn small_values_cast_alike() {
    let mut orders = orders();
    let draw = Draw::seeded(11).step(2);
    let mut words = vec![0u32; 512];
    draw.fill32(0, &mut words);
    for element in elements() {
        let (ulp, drop) = (element.min_positive(), 23 - element.fraction_bits());
        for (scale, power) in RULES.into_iter().flat_map(|scale| [-20, 0, 20].map(|power| (scale, power))) {
            let format = BlockFormat::new(element, 32, scale).unwrap();
            let unit = 2f64.powi(power);
            let value = |i: usize| match i % 32 {
                0 => (element.max() * unit) as f32,
                place if i < 256 => {
                    let tie = ((0.5 + (place / 3 % 4) as f64) * ulp * unit) as f32;
                    f32::from_bits(tie.to_bits() - 1 + place as u32 % 3)
                }
                // Its own bits and those of the draw make ones, as far as the draw has bits in the code's f32.
                _ => {
                    let rest = (1u32 << drop) - 1 - (words[i] >> (32 - drop));
                    ((f64::from(rest) + 0.75) / f64::from(1 << drop) * ulp * unit) as f32
                }
            };
            let x: Vec<f32> = (0..512).map(value).collect();
            alike(orders.next().unwrap(), &Cast::nearest(), &x, format);
            alike(orders.next().unwrap(), &Cast::stochastic(draw), &x, format);
        }
    }
}

/// Nearest with the other policy of overflow, which only the rule that clips meets.
#[test]
fn overflow_to_nearest_casts_alike() {
    for format in formats().filter(|format| format.scale() == BlockScale::Floor) {
        alike(REVERSE, &Cast::nearest().overflow(Overflow::Ieee), &edges(format), format);
    }
}

/// Sizes around those of a thread, of a block of each size, and of a block of threads.
#[test]
fn every_length_casts_alike() {
    let mut orders = orders();
    let x = values(2100);
    let all_sizes = SIZES.into_iter().flat_map(|size| RULES.map(|scale| (size, scale)));
    let elements = [Format::E4M3, Format::E2M3, Format::E2M1].into_iter().cycle();
    let formats =
        all_sizes.zip(elements).map(|((size, scale), element)| BlockFormat::new(element, size, scale).unwrap());
    for format in formats.chain([BlockFormat::NVFP4]) {
        let size = format.block();
        for n in [0, 1, 7, 8, 9, size - 1, size, size + 1, 2 * size - 3, 1023, 1024, 1025, 1024 + size] {
            let cast = [Cast::nearest(), Cast::stochastic(Draw::seeded(7).at(n as u64))];
            alike(orders.next().unwrap(), &cast[n % 2], &x[..n], format);
            let narrow: Vec<bf16> = x[2100 - n..].iter().map(|&x| bf16::from_f32(x)).collect();
            alike(orders.next().unwrap(), &cast[1 - n % 2], &narrow, format);
        }
    }
}

/// Somebody else's memory, off alignment by elements of the source and by bytes of codes and scales: nothing else is read or written.
fn raw<S: Value>(order: u64, x: &[S], format: BlockFormat, offsets: [usize; 3], first: u64) {
    let Some(gpu) = gpu(order) else { return };
    let device = gpu.emulation().unwrap();
    let cast = Cast::stochastic(Draw::seeded(7).at(first));
    let name = format!("{format:?} of {} {} at {offsets:?} from {first}", x.len(), S::TYPE.name());
    let host = cast.to_blocks(x, format).unwrap();
    let (codes, scales, global) = bits_of(&host);
    let scale_size = if format.scale() == BlockScale::Amax { 4 } else { 1 };
    let nvfp4 = format.scale() == BlockScale::Nvfp4;
    let memory = BlocksMemory {
        values: device.input(x, offsets[0] * size_of::<S>()),
        values_type: S::TYPE,
        codes: device.put(&vec![0xAAu8; codes.len()], offsets[1]),
        scales: device.put(&vec![0xAAu8; scales.len()], offsets[2] * scale_size),
        global: if nvfp4 { device.put(&[global.wrapping_add(1)], 4 * offsets[2]) } else { 0 },
        format,
        n: x.len() as u64,
    };
    // SAFETY: memory of the emulation, as long as it says.
    unsafe { gpu.cast_blocks_raw(&cast, memory) }.unwrap_or_else(|error| panic!("{error}: {name}"));
    assert!(device.get::<u8>(memory.codes) == codes, "codes: {name}");
    assert!(device.get::<u8>(memory.scales) == scales, "scales: {name}");
    let written = global.wrapping_add((x.is_empty() && nvfp4).into());
    assert!(!nvfp4 || device.get::<u32>(memory.global) == [written], "global: {name}");
    // And back, from memory that is only read.
    let memory = BlocksMemory {
        values: device.put(&vec![7f32; x.len()], 4 * offsets[0]),
        values_type: ElementType::F32,
        codes: device.input(codes, offsets[1]),
        scales: device.input(&scales, offsets[2] * scale_size),
        global: if nvfp4 { device.input(&[global], 4 * offsets[2]) } else { 0 },
        ..memory
    };
    // SAFETY: as above.
    unsafe { gpu.decode_blocks_raw(memory) }.unwrap_or_else(|error| panic!("{error}: {name}"));
    assert!(bits(&device.get::<f32>(memory.values)) == bits(&host.decode()), "values: {name}");
}

#[test]
fn every_alignment_casts_alike() {
    let mut orders = orders();
    let x = values(1100);
    let narrow: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
    let narrower: Vec<f16> = x.iter().map(|&x| f16::from_f32(x)).collect();
    let amax = BlockFormat::new(Format::E4M3, 64, BlockScale::Amax).unwrap();
    for format in [BlockFormat::MXFP8_E4M3, BlockFormat::MXFP6_E2M3, BlockFormat::MXFP4, BlockFormat::NVFP4, amax] {
        for n in [0, 1, 15, 17, 1000, 1100] {
            for offsets in [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [3, 2, 3], [4, 4, 2], [2, 8, 1]] {
                for first in [0, 2, 3] {
                    raw(orders.next().unwrap(), &x[..n], format, offsets, first);
                }
                raw(orders.next().unwrap(), &narrow[..n], format, offsets, 1);
                raw(orders.next().unwrap(), &narrower[..n], format, offsets, 4);
            }
        }
    }
}

/// The boundary of 2^32 groups inside a call, where blocks begin too; and where they do not, refused.
#[test]
fn casts_over_a_change_of_keys() {
    let x: Vec<f32> = (0..1500).map(|i| 1.0 + i as f32 * 1e-5).collect();
    let amax = BlockFormat::new(Format::E4M3, 256, BlockScale::Amax).unwrap();
    for format in [BlockFormat::MXFP8_E4M3, BlockFormat::MXFP6_E3M2, BlockFormat::NVFP4, amax] {
        for first in [(1u64 << 33) - 512, u64::MAX - 511, 5 << 33] {
            alike(first, &Cast::stochastic(Draw::seeded(7).at(first)), &x, format);
        }
        let Some(gpu) = gpu(FORWARD) else { return };
        let cast = Cast::stochastic(Draw::seeded(7).at((1 << 33) - 501));
        let refused = gpu.cast_blocks(&cast, &gpu.upload(&x).unwrap(), format).unwrap_err();
        assert!(matches!(refused, CudaError::Unsupported { argument: "draw", .. }), "{refused}");
    }
}

/// Tensors whose scale as a whole comes from a special value: none finite, zeros, the least, the largest; first and last.
#[test]
fn scales_of_the_whole_are_alike() {
    let mut orders = orders();
    for special in [0, 1 << 31, 1, 0x0080_0000, 0x7F7F_FFFF, 0xFF7F_FFFF, 0x7F80_0000, 0xFFC0_0001, 0x7F80_0001] {
        let special = f32::from_bits(special);
        for (n, rest) in [(1, 0.0), (40, 0.0), (40, special), (2100, 1e-20), (2100, f32::NAN)] {
            for at in [0, n / 2, n - 1] {
                let mut x = vec![rest; n];
                x[at] = special;
                alike(orders.next().unwrap(), &Cast::nearest(), &x, BlockFormat::NVFP4);
                alike(orders.next().unwrap(), &Cast::stochastic(Draw::seeded(3)), &x, BlockFormat::NVFP4);
            }
        }
    }
}

/// With any grid: also with one whose threads go around many times.
#[test]
fn the_largest_magnitude_is_that_of_all() {
    for (n, blocks) in [(1, 1), (1024, 1), (5003, 1), (5003, 3), (9000, 2), (3000, 7)] {
        for (order, offset) in [(FORWARD, 0), (REVERSE, 1), (5, 4)] {
            for at in [0, n / 3, n - 1] {
                let Some(device) = Emulated::new(order) else { return };
                let mut x = values(n);
                x.iter_mut().for_each(|x| *x *= if x.is_finite() { 1e-9 } else { 1.0 });
                x[at] = -3e38;
                let at_x = device.input(&x, 4 * offset);
                let largest = device.put(&[0u32], 0);
                let vector = at_x.is_multiple_of(16).into();
                let arguments = LargestArguments { x: at_x, largest, n: n as u64, vector };
                let launch = Launch { module: "encode_f32", kernel: "encode_f32_amax", blocks, threads: 128 };
                // SAFETY: memory of the emulation, as long as it says; the kernel takes any grid.
                unsafe { device.enqueue(launch, &arguments) }.unwrap();
                assert_eq!(device.get::<f32>(largest), [3e38], "{n} by {blocks}");
            }
        }
    }
}

/// Codes and scales that no cast makes are read all the same.
#[test]
fn blocks_from_elsewhere_decode_alike() {
    let mut inputs = Inputs(2);
    let mut orders = orders();
    for format in formats() {
        let Some(gpu) = gpu(orders.next().unwrap()) else { return };
        // All scales that there are, two blocks at a time; but of larger blocks the ends, or this takes long.
        let blocks = 256 * 16 / format.block();
        let n = blocks * format.block() - 3;
        let codes = (0..format.element().bytes(n)).map(|_| inputs.next() as u8).collect();
        let all = (0..blocks).map(|b| (b as u8).rotate_right(1) ^ if b % 4 < 2 { 0 } else { 0xFF });
        let scales = match format.scale() {
            BlockScale::Amax => Scales::F32((0..blocks).map(|_| f32::from_bits(inputs.next() as u32)).collect()),
            BlockScale::Nvfp4 => Scales::Nvfp4 { blocks: (0..=255).collect(), global: 1e-30 },
            BlockScale::Ceil | BlockScale::Floor => Scales::E8M0(all.collect()),
        };
        let blocks = BlockVec::from_parts(format, n, codes, scales).unwrap();
        let on_device = gpu.upload_blocks(&blocks).unwrap();
        assert_eq!(on_device.global().map(super::DeviceVec::len), (format.scale() == BlockScale::Nvfp4).then_some(1));
        assert!(bits_of(&gpu.download_blocks(&on_device).unwrap()) == bits_of(&blocks));
        let values = gpu.download(&gpu.decode_blocks(&on_device).unwrap()).unwrap();
        assert!(bits(&values) == bits(&blocks.decode()), "{format:?}");
    }
}

/// What is refused is refused before anything runs.
#[test]
fn refusals_name_the_argument() {
    let Some(gpu) = gpu(FORWARD) else { return };
    let (x, format) = (gpu.upload(&[1f32; 40]).unwrap(), BlockFormat::MXFP4);
    let refused = |cast: &Cast| gpu.cast_blocks(cast, &x, format).unwrap_err();
    assert_eq!(refused(&Cast::nearest().scale(3)), CudaError::Cast(CastError::Scale { got: 3 }));
    let unsupported = |cast: &Cast, expected: &str| match refused(cast) {
        CudaError::Unsupported { argument, .. } => assert_eq!(argument, expected),
        error => panic!("{expected}: {error}"),
    };
    unsupported(&Cast::up(), "rounding");
    unsupported(&Cast::nearest().missing_nan(MissingNan::Refuse), "missing_nan");
    unsupported(&Cast::stochastic(Draw::seeded(1).stream(Stream::Philox)), "draw");
    let mut short = gpu.cast_blocks(&Cast::nearest(), &gpu.upload(&[1f32; 39]).unwrap(), format).unwrap();
    let error = gpu.cast_blocks_into(&Cast::nearest(), &x, &mut short).unwrap_err();
    assert_eq!(error, CudaError::Length { argument: "out", expected: 40, got: 39 });
    let error = gpu.decode_blocks_into(&short, &mut gpu.zeroed(40).unwrap()).unwrap_err();
    assert_eq!(error, CudaError::Length { argument: "y", expected: 39, got: 40 });
    let wide = Format::builder(5, 2).bias(200).build().unwrap();
    let error =
        gpu.cast_blocks(&Cast::nearest(), &x, BlockFormat::new(wide, 32, BlockScale::Ceil).unwrap()).unwrap_err();
    assert!(matches!(error, CudaError::Unsupported { argument: "format", .. }), "{error}");
    let memory = BlocksMemory {
        values: x.address(),
        values_type: ElementType::F32,
        codes: short.codes().address(),
        scales: short.scales().address(),
        global: 0,
        format,
        n: 39,
    };
    // SAFETY: refused before anything is launched.
    let cast = |memory: BlocksMemory| unsafe { gpu.cast_blocks_raw(&Cast::nearest(), memory) }.unwrap_err();
    // SAFETY: as above.
    let decode = |memory: BlocksMemory| unsafe { gpu.decode_blocks_raw(memory) }.unwrap_err();
    let refused = |change: &dyn Fn(&mut BlocksMemory), expected: &str| {
        let mut memory = memory;
        change(&mut memory);
        for error in [cast(memory), decode(memory)] {
            let got = match error {
                CudaError::Overlap { first, second, .. } => format!("{first} over {second}"),
                CudaError::Misaligned { argument, .. } => argument.into(),
                error => panic!("{expected}: {error}"),
            };
            assert_eq!(got, expected);
        }
    };
    refused(&|memory| memory.codes = memory.values + 155, "values over codes");
    refused(&|memory| memory.scales = memory.codes + 19, "codes over scales");
    refused(&|memory| memory.values += 2, "values");
    let amax = BlockFormat::new(Format::E4M3, 32, BlockScale::Amax).unwrap();
    refused(&|memory| (memory.format, memory.scales) = (amax, memory.scales + 1), "scales");
    refused(&|memory| (memory.format, memory.global) = (BlockFormat::NVFP4, memory.values + 2), "global");
    refused(&|memory| (memory.format, memory.global) = (BlockFormat::NVFP4, memory.values + 152), "values over global");
    let error = decode(BlocksMemory { values_type: ElementType::Bf16, ..memory });
    assert!(matches!(error, CudaError::Unsupported { argument: "values_type", .. }), "{error}");
}

/// Runs each kernel.
pub(super) fn every_kernel() {
    fn of<S: Value + Debug>() {
        let x: Vec<S> = (0..300).map(|i| S::of(i as f32 * 0.01 - 1.0)).collect();
        for format in [BlockFormat::MXFP8_E4M3, BlockFormat::MXFP6_E3M2, BlockFormat::NVFP4] {
            alike(FORWARD, &Cast::nearest(), &x, format);
            alike(FORWARD, &Cast::stochastic(Draw::seeded(1)), &x, format);
        }
    }
    of::<f32>();
    of::<bf16>();
    of::<f16>();
}
