//! AdamW on the CPU, 2^24 elements, beside a copy of the same bytes.
//!
//! `cargo bench --bench optim`. Threads: `RAYON_NUM_THREADS`.
#![allow(missing_docs, reason = "criterion's macros make public items")]

use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use halfulp::optim::{AdamW, AdamWConfig, Real, Rounding, StateFormat, States};
use halfulp::{Draw, bf16};
use rayon::prelude::*;

const N: usize = 1 << 24;

/// Bell-shaped values, never zeros.
fn values(seed: u64) -> Vec<f32> {
    let mut words = vec![0u16; 4 * N];
    halfulp::random::Draws::fill16(&Draw::seeded(seed), 0, &mut words);
    words.chunks_exact(4).map(|w| (w.iter().map(|&w| f32::from(w)).sum::<f32>() - 131_070.0) * 1e-6).collect()
}

fn step<P: Real, G: Real>(
    c: &mut Criterion,
    name: &str,
    mut p: Vec<P>,
    g: &[G],
    states: impl Into<States>,
    rounding: Rounding,
) {
    let states = states.into();
    let bytes = 2 * size_of::<P>() + size_of::<G>() + 2 * states.bytes(N) / N;
    let mut group = c.benchmark_group(format!("adamw {bytes} bytes an element"));
    group.throughput(Throughput::Elements(N as u64)).sample_size(10).measurement_time(Duration::from_secs(2));
    let from = vec![1u8; bytes * N / 2];
    let mut to = vec![2u8; bytes * N / 2];
    group.bench_function("copy", |b| {
        b.iter(|| {
            to.par_chunks_mut(1 << 18).zip(from.par_chunks(1 << 18)).for_each(|(to, from)| to.copy_from_slice(from));
        });
    });
    let mut opt = AdamW::new(AdamWConfig::default(), states, rounding).expect("the defaults are in range");
    group.bench_function(name, |b| b.iter(|| opt.step(&mut p, g).expect("of one length")));
}

fn steps(c: &mut Criterion) {
    let (p, g) = (values(1), values(2));
    let narrow = |x: &[f32]| halfulp::nearest_cast::<bf16>(x);
    let stochastic = Rounding::stochastic(7);
    step(c, "f32, BF16 states, stochastic", p.clone(), &g, StateFormat::Bf16, stochastic);
    step(c, "f32, BF16 states, nearest", p.clone(), &g, StateFormat::Bf16, Rounding::Nearest);
    step(c, "BF16, BF16 states, stochastic", narrow(&p), &narrow(&g), StateFormat::Bf16, stochastic);
    let fp8 = States { m: StateFormat::E4M3, v: StateFormat::UE4M4 };
    step(c, "f32, 8-bit states, stochastic", p.clone(), &g, fp8, stochastic);
    step(c, "f32, 8-bit states, nearest", p.clone(), &g, fp8, Rounding::Nearest);
    step(c, "f32, 4-bit states, stochastic", p.clone(), &g, States::FP4, stochastic);
    step(c, "f32, f32 states", p, &g, StateFormat::F32, Rounding::Nearest);
}

criterion_group!(benches, steps);
criterion_main!(benches);
