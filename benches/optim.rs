//! AdamW on the CPU, 2^24 elements, beside a copy of the same bytes.
//!
//! `cargo bench --bench optim`. Threads: `RAYON_NUM_THREADS`.
//!
//! `optim --serve --threads N --elements N --sets N` is driven by another program instead, so that its rounds and others'
//! interleave: of the lines it reads, `cases` gives the names, each with the bytes that it reads and writes, and `run CASE` works
//! on one of the buffer sets, the next in turn, and gives the nanoseconds. `benches/peers/cpu_adamw.py` is its user.
#![allow(missing_docs, reason = "criterion's macros make public items")]

use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group};
use halfulp::optim::{AdamW, AdamWConfig, Parameter, Real, Rounding, StateFormat, States};
use halfulp::{Draw, bf16};
use rayon::prelude::*;

const N: usize = 1 << 24;

type Error = Box<dyn std::error::Error + Send + Sync>;

/// Bell-shaped values, never zeros.
fn values(seed: u64, n: usize) -> Vec<f32> {
    let mut words = vec![0u16; 4 * n];
    halfulp::random::Draws::fill16(&Draw::seeded(seed), 0, &mut words);
    words.chunks_exact(4).map(|w| (w.iter().map(|&w| f32::from(w)).sum::<f32>() - 131_070.0) * 1e-6).collect()
}

fn copy(to: &mut [u8], from: &[u8]) {
    to.par_chunks_mut(1 << 18).zip(from.par_chunks(1 << 18)).for_each(|(to, from)| to.copy_from_slice(from));
}

fn narrow(x: &[f32]) -> Vec<bf16> {
    halfulp::nearest_cast(x)
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
        b.iter(|| copy(&mut to, &from));
    });
    let mut opt = AdamW::new(AdamWConfig::default(), states, rounding).expect("the defaults are in range");
    group.bench_function(name, |b| b.iter(|| opt.step(&mut p, g).expect("of one length")));
}

fn steps(c: &mut Criterion) {
    let (p, g) = (values(1, N), values(2, N));
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

/// Work on one of several buffer sets.
type Work = Box<dyn FnMut(usize) -> Result<(), Error> + Send>;

/// A name, the bytes an element, and the work.
type Case = (&'static str, usize, Work);

/// Copies of the bytes of one step, over buffer sets of their own.
fn copies(width: usize, n: usize, sets: usize) -> Work {
    let mut memory: Vec<_> = (0..sets).map(|_| (vec![1u8; width * n / 2], vec![2u8; width * n / 2])).collect();
    Box::new(move |set| {
        let (from, to) = &mut memory[set];
        copy(to, from);
        Ok(())
    })
}

/// Steps with BF16 states, over tensors of their own.
fn adamw<P: Real, G: Real>(mut tensors: Vec<(Vec<P>, Vec<G>)>, rounding: Rounding) -> Result<Work, Error> {
    let mut opt = AdamW::new(AdamWConfig::default(), StateFormat::Bf16, rounding)?;
    Ok(Box::new(move |set| {
        let (p, g) = &mut tensors[set];
        opt.step_tensors(&mut [Parameter::numbered(set as u64, p, g)])?;
        Ok(())
    }))
}

fn cases(n: usize, sets: usize) -> Result<Vec<Case>, Error> {
    let wide = || (0..sets as u64).map(|set| (values(2 * set, n), values(2 * set + 1, n))).collect::<Vec<_>>();
    let halves = || wide().iter().map(|(p, g)| (narrow(p), narrow(g))).collect::<Vec<_>>();
    let stochastic = Rounding::stochastic(7);
    Ok(vec![
        ("copy-20", 20, copies(20, n, sets)),
        ("copy-14", 14, copies(14, n, sets)),
        ("adamw-20-stochastic", 20, adamw(wide(), stochastic)?),
        ("adamw-20-nearest", 20, adamw(wide(), Rounding::Nearest)?),
        ("adamw-14-stochastic", 14, adamw(halves(), stochastic)?),
    ])
}

fn serve(mut options: impl Iterator<Item = String>) -> Result<(), Error> {
    let (mut threads, mut elements, mut sets) = (1, N, 3);
    while let Some(name) = options.next() {
        let value = options.next().ok_or_else(|| format!("{name}: expected a number, got none"))?.parse()?;
        match name.as_str() {
            "--threads" => threads = value,
            "--elements" => elements = value,
            "--sets" => sets = value,
            _ => return Err(format!("unknown option `{name}`").into()),
        }
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    let mut cases = cases(elements, sets)?;
    let mut turn = 0;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        if line == "cases" {
            let all: Vec<_> = cases.iter().map(|(name, width, _)| format!("{name}:{}", width * elements)).collect();
            println!("{}", all.join(" "));
        } else {
            let case = cases.iter_mut().find(|(name, ..)| line.strip_prefix("run ") == Some(name));
            let (_, _, work) = case.ok_or_else(|| format!("unknown command `{line}`"))?;
            turn = (turn + 1) % sets;
            let start = Instant::now();
            pool.install(|| work(turn))?;
            println!("{}", start.elapsed().as_nanos());
        }
        std::io::stdout().flush()?;
    }
    Ok(())
}

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench").peekable();
    if arguments.next_if(|argument| argument == "--serve").is_some() {
        return serve(arguments);
    }
    benches();
    Criterion::default().configure_from_args().final_summary();
    Ok(())
}
