//! The gradient norm on a GPU has the bits of the CPU. Without a device these tests pass by without a word, unless
//! `HALFULP_REQUIRE_GPU` is set.
#![cfg(feature = "cuda")]

mod common;

use common::Inputs;
use halfulp::cuda::{CudaError, DeviceGradients, DeviceNorm, ElementType, Gpu, GradientMemory};
use halfulp::optim::{ChunkSums, Clip, Clipped, GradientNorm, NormError, Shard};
use halfulp::{bf16, f16};

fn gpu() -> Option<Gpu> {
    match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            assert!(std::env::var_os("HALFULP_REQUIRE_GPU").is_none(), "{error}");
            None
        }
    }
}

/// Gradients over eight binades, so that the order of additions shows.
fn gradients(n: usize, seed: u64) -> Vec<f32> {
    let mut inputs = Inputs(seed);
    let mut next = || {
        let word = inputs.next();
        f32::from_bits((word as u32 & 0x807F_FFFF) | (117 + (word >> 32) as u32 % 8) << 23)
    };
    (0..n).map(|_| next()).collect()
}

fn bits(sums: &[ChunkSums]) -> Vec<(u64, Shard, Vec<u64>)> {
    sums.iter()
        .map(|part| (part.tensor(), part.shard(), part.sums().iter().map(|sum| sum.to_bits()).collect()))
        .collect()
}

fn clip() -> Clip {
    Clip::new(1.0).unwrap()
}

/// Compares chunk sums, norm, coefficient and flag of the last call with those of the CPU.
fn compare(norm: &DeviceNorm, mut expected: Vec<ChunkSums>, clip: &Clip, scale: f32) {
    expected.sort_by_key(ChunkSums::tensor);
    assert_eq!(bits(&norm.chunk_sums().unwrap()), bits(&expected));
    let (result, on_host) = (norm.result().unwrap(), GradientNorm::gather(&expected).unwrap());
    assert_eq!(result.sum_of_squares.to_bits(), on_host.sum_of_squares().to_bits());
    assert_eq!(result.found_inf == 1, !on_host.is_finite());
    match clip.coefficient(on_host, scale).unwrap() {
        Clipped::Factor(factor) if factor.is_nan() => assert!(result.clip.is_nan()),
        Clipped::Factor(factor) => assert_eq!(result.clip.to_bits(), factor.to_bits()),
        other => panic!("{other:?}"),
    }
    assert_eq!(norm.norm().unwrap().sum_of_squares().to_bits(), on_host.sum_of_squares().to_bits());
}

#[test]
fn every_length_and_type() {
    let Some(gpu) = gpu() else { return };
    let mut norm = DeviceNorm::new(&gpu).unwrap();
    for n in [0, 1, 3, 4, 5, 127, 511, 512, 513, 4095, 4096, 4097, 8191, 8193, 100_003, 1 << 21] {
        let x = gradients(n, n as u64);
        let half: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
        let fp16: Vec<f16> = x.iter().map(|&x| f16::from_f32(x)).collect();
        let on_device = (gpu.upload(&x).unwrap(), gpu.upload(&half).unwrap(), gpu.upload(&fp16).unwrap());
        let list = [
            DeviceGradients::of(9, &on_device.0),
            DeviceGradients::of(4, &on_device.1),
            DeviceGradients::of(7, &on_device.2),
        ];
        let expected = [ChunkSums::of(9, &x), ChunkSums::of(4, &half), ChunkSums::of(7, &fp16)];
        norm.enqueue(&clip(), 1.0, &list).unwrap();
        compare(&norm, expected.to_vec(), &clip(), 1.0);
        // Each alone, in another order, and again.
        for (gradients, expected) in list.iter().zip(expected) {
            norm.enqueue(&clip(), 0.125, std::slice::from_ref(gradients)).unwrap();
            compare(&norm, vec![expected], &clip(), 0.125);
        }
        let before = {
            norm.enqueue(&clip(), 1.0, &list).unwrap();
            norm.result().unwrap()
        };
        norm.enqueue(&clip(), 1.0, &[list[2], list[0], list[1]]).unwrap();
        assert_eq!(norm.result().unwrap(), before);
    }
    norm.enqueue(&clip(), 1.0, &[]).unwrap();
    compare(&norm, vec![], &clip(), 1.0);
}

/// More than 4096 chunks, so that sums are combined twice; a thousand tensors; twenty runs.
#[test]
fn many() {
    let Some(gpu) = gpu() else { return };
    let mut norm = DeviceNorm::new(&gpu).unwrap();
    let x = gradients(4096 * 4097 + 5, 1);
    let on_device = gpu.upload(&x).unwrap();
    norm.enqueue(&clip(), 1.0, &[DeviceGradients::of(0, &on_device)]).unwrap();
    compare(&norm, vec![ChunkSums::of(0, &x)], &clip(), 1.0);
    let first = norm.result().unwrap();
    for _ in 0..20 {
        norm.enqueue(&clip(), 1.0, &[DeviceGradients::of(0, &on_device)]).unwrap();
        assert_eq!(norm.result().unwrap(), first);
    }
    let tensors: Vec<Vec<f32>> = (0..1000).map(|i| gradients(i * 37 % 9000, i as u64)).collect();
    let buffers: Vec<_> = tensors.iter().map(|x| gpu.upload(x).unwrap()).collect();
    let list: Vec<_> = buffers.iter().zip(0..).map(|(x, id)| DeviceGradients::of(id, x)).collect();
    norm.enqueue(&clip(), 1.0, &list).unwrap();
    compare(&norm, tensors.iter().zip(0..).map(|(x, id)| ChunkSums::of(id, x)).collect(), &clip(), 1.0);
}

#[test]
fn specials() {
    let Some(gpu) = gpu() else { return };
    let mut norm = DeviceNorm::new(&gpu).unwrap();
    for bad in [0u32, 1, 0x7F7F_FFFF, 0x7F80_0000, 0xFF80_0000, 0x7F80_0001, 0xFFFF_FFFF] {
        for at in [0, 4095, 4096, 8191] {
            let mut x = vec![1f32; 8192];
            x[at] = f32::from_bits(bad);
            let on_device = gpu.upload(&x).unwrap();
            norm.enqueue(&clip(), 1.0, &[DeviceGradients::of(0, &on_device)]).unwrap();
            compare(&norm, vec![ChunkSums::of(0, &x)], &clip(), 1.0);
        }
    }
}

/// Views at odd offsets, read element by element.
#[test]
fn unaligned() {
    let Some(gpu) = gpu() else { return };
    let mut norm = DeviceNorm::new(&gpu).unwrap();
    let x = gradients(20_000, 3);
    let half: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
    let (on_device, halves) = (gpu.upload(&x).unwrap(), gpu.upload(&half).unwrap());
    for offset in 1..4 {
        let memory = |id, grads, grads_type| GradientMemory {
            id,
            shard: Shard::whole((x.len() - offset) as u64),
            grads,
            grads_type,
        };
        let list = [
            memory(0, on_device.address() + 4 * offset as u64, ElementType::F32),
            memory(1, halves.address() + 2 * offset as u64, ElementType::Bf16),
        ];
        // SAFETY: both buffers are this long past the offset, and live until the results are read.
        unsafe { norm.enqueue_raw(&clip(), 1.0, &list) }.unwrap();
        compare(&norm, vec![ChunkSums::of(0, &x[offset..]), ChunkSums::of(1, &half[offset..])], &clip(), 1.0);
    }
    let bad =
        GradientMemory { id: 0, shard: Shard::whole(1), grads: on_device.address() + 1, grads_type: ElementType::F32 };
    // SAFETY: refused before anything is read.
    let error = unsafe { norm.enqueue_raw(&clip(), 1.0, &[bad]) }.unwrap_err();
    assert!(matches!(error, CudaError::Misaligned { argument: "grads", .. }));
}

/// Shards on the device, gathered on the host, and some of them from the host.
#[test]
fn shards() {
    let Some(gpu) = gpu() else { return };
    let x = gradients(50_000, 8);
    let whole = GradientNorm::gather([&ChunkSums::of(3, &x)]).unwrap();
    let cuts = [0u64, 4096, 20_480, 20_480, 50_000];
    let mut parts = vec![];
    for cut in cuts.windows(2) {
        let shard = Shard::new(cut[0]..cut[1], 50_000).unwrap();
        let own = &x[cut[0] as usize..cut[1] as usize];
        let on_device = gpu.upload(own).unwrap();
        let mut norm = DeviceNorm::new(&gpu).unwrap();
        norm.enqueue(&clip(), 1.0, &[DeviceGradients::of_shard(3, shard, &on_device).unwrap()]).unwrap();
        if cut[0] == 4096 {
            parts.push(ChunkSums::of_shard(3, shard, own).unwrap());
        } else {
            parts.extend(norm.chunk_sums().unwrap());
        }
    }
    assert_eq!(GradientNorm::gather(&parts).unwrap(), whole);

    let on_device = gpu.upload(&x).unwrap();
    let wrong = DeviceGradients::of_shard(3, Shard::whole(7), &on_device).unwrap_err();
    assert!(matches!(wrong, CudaError::Length { argument: "grads", expected: 7, got: 50_000 }));
    let twice = [DeviceGradients::of(3, &on_device), DeviceGradients::of(3, &on_device)];
    let error = DeviceNorm::new(&gpu).unwrap().enqueue(&clip(), 1.0, &twice).unwrap_err();
    assert!(matches!(error, CudaError::Norm(NormError::Cover { tensor: 3, .. })));
}
