//! Casts on the CPU, 2^24 elements, beside a copy of the same bytes and `half`'s slice conversion.
//!
//! `cargo bench --bench cast`. Threads: `RAYON_NUM_THREADS`.
#![allow(missing_docs, reason = "criterion's macros make public items")]

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::slice::HalfFloatSliceExt;
use halfulp::cast::Cast;
use halfulp::{Draw, Format, Isa, bf16};

const N: usize = 1 << 24;

/// Bell-shaped values as weights have them, never zeros.
fn input() -> Vec<f32> {
    let draw = Draw::seeded(1);
    let mut words = vec![0u16; 4 * N];
    halfulp::random::Draws::fill16(&draw, 0, &mut words);
    words.chunks_exact(4).map(|w| (w.iter().map(|&w| f32::from(w)).sum::<f32>() - 131_070.0) * 1e-6).collect()
}

fn casts(c: &mut Criterion) {
    let x = input();
    let mut bytes = vec![0xAAu8; 2 * N];
    let mut halves = vec![bf16::ZERO; N];
    let mut copy = vec![0f32; N];
    let mut group = c.benchmark_group("cast");
    group.throughput(Throughput::Elements(N as u64)).sample_size(20).measurement_time(Duration::from_secs(2));
    group.bench_function("copy f32", |b| {
        b.iter(|| {
            use rayon::prelude::*;
            copy.par_chunks_mut(1 << 16).zip(x.par_chunks(1 << 16)).for_each(|(y, x)| y.copy_from_slice(x));
        });
    });
    group.bench_function("half bf16 nearest", |b| b.iter(|| halves.convert_from_f32_slice(black_box(&x))));
    for (name, format) in [
        ("bf16", Format::BF16),
        ("fp16", Format::FP16),
        ("e4m3", Format::E4M3),
        ("e5m2", Format::E5M2),
        ("e2m1", Format::E2M1),
        ("e3m2", Format::E3M2),
        ("ue4m4", Format::UE4M4),
    ] {
        let out = &mut bytes[..format.bytes(N)];
        for isa in Isa::available() {
            let draw = Draw::seeded(7);
            group.bench_function(BenchmarkId::new(format!("{name} nearest"), isa), |b| {
                b.iter(|| Cast::nearest().isa(isa).into_bytes(black_box(&x), format, out).unwrap());
            });
            group.bench_function(BenchmarkId::new(format!("{name} stochastic"), isa), |b| {
                b.iter(|| Cast::stochastic(draw).isa(isa).into_bytes(black_box(&x), format, out).unwrap());
            });
        }
    }
}

criterion_group!(benches, casts);
criterion_main!(benches);
