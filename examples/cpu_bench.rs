//! The casts as a process that a benchmark of several libraries can drive, so that their rounds interleave.
//!
//! `cpu_bench --threads N --elements N --sets N` reads commands, one a line: `cases` gives the names, each with the bytes
//! that it reads and writes; `run CASE` casts one of the buffer sets, the next in turn, and gives the nanoseconds. All
//! sets together should exceed the last-level cache several times. `benches/peers/cpu.py` is its user.

use std::hint::black_box;
use std::io::{self, BufRead, Write};
use std::process::ExitCode;
use std::time::Instant;

use half::slice::HalfFloatSliceExt;
use halfulp::cast::Cast;
use halfulp::random::Draws;
use halfulp::{Draw, Format, bf16};
use rayon::prelude::*;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Elements that a thread copies or converts at a time.
const CHUNK: usize = 1 << 16;
const FORMATS: [&str; 6] = ["bf16", "fp16", "e5m2", "e4m3", "e3m2", "e2m1"];

fn main() -> ExitCode {
    match drive() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cpu_bench: {error}");
            ExitCode::from(2)
        }
    }
}

fn drive() -> Result<()> {
    let (mut threads, mut elements, mut sets) = (1, 1 << 24, 3);
    let mut args = std::env::args().skip(1);
    while let Some(name) = args.next() {
        let value = args.next().ok_or_else(|| format!("{name}: expected a number, got none"))?;
        let value = value.parse().map_err(|e| format!("{name}: {e}, got `{value}`"))?;
        match name.as_str() {
            "--threads" => threads = value,
            "--elements" => elements = value,
            "--sets" => sets = value,
            _ => return Err(format!("unknown option `{name}`").into()),
        }
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    let mut sets: Vec<Set> = (0..sets.max(1)).map(|set| Set::new(set as u64, elements)).collect();
    let mut turn = 0;
    for line in io::stdin().lock().lines() {
        let line = line?;
        match line.split_once(' ') {
            None if line == "cases" => {
                let all = cases().map(|case| format!("{}:{}", case.name(), case.bytes(elements)));
                println!("{}", all.collect::<Vec<_>>().join(" "));
            }
            Some(("run", name)) => {
                let case = cases().find(|case| case.name() == name).ok_or_else(|| format!("unknown case `{name}`"))?;
                turn += 1;
                let set = turn % sets.len();
                let set = &mut sets[set];
                println!("{}", pool.install(|| set.time(case, turn as u64))?);
            }
            _ => return Err(format!("unknown command `{line}`").into()),
        }
        io::stdout().flush()?;
    }
    Ok(())
}

#[derive(Clone, Copy)]
enum Case {
    Copy,
    Half,
    Nearest(&'static str, Format),
    Stochastic(&'static str, Format),
}

fn cases() -> impl Iterator<Item = Case> {
    let formats = || FORMATS.map(|name| (name, name.parse().expect("a named format"))).into_iter();
    [Case::Copy, Case::Half]
        .into_iter()
        .chain(formats().map(|(name, format)| Case::Nearest(name, format)))
        .chain(formats().map(|(name, format)| Case::Stochastic(name, format)))
}

impl Case {
    fn name(self) -> String {
        match self {
            Self::Copy => "copy".into(),
            Self::Half => "half-bf16-nearest".into(),
            Self::Nearest(name, _) => format!("{name}-nearest"),
            Self::Stochastic(name, _) => format!("{name}-stochastic"),
        }
    }

    /// Bytes read and written.
    fn bytes(self, elements: usize) -> usize {
        let written = match self {
            Self::Copy => 4 * elements,
            Self::Half => 2 * elements,
            Self::Nearest(_, format) | Self::Stochastic(_, format) => format.bytes(elements),
        };
        4 * elements + written
    }
}

struct Set {
    x: Vec<f32>,
    out: Vec<f32>,
}

impl Set {
    /// Bell-shaped values of standard deviation 1, none beyond 3.5: they use all codes of the narrow formats.
    fn new(set: u64, elements: usize) -> Self {
        let mut words = vec![0; 4 * elements];
        Draw::seeded(1).tensor(set).fill16(0, &mut words);
        let value = |w: &[u16]| (w.iter().map(|&w| f32::from(w)).sum::<f32>() - 131_070.0) / 37_837.0;
        // Written once, so that no page of the output is touched for the first time while the clock runs.
        Self { x: words.chunks_exact(4).map(value).collect(), out: vec![1.0; elements] }
    }

    fn time(&mut self, case: Case, step: u64) -> Result<u128> {
        let (x, out) = (black_box(&self.x[..]), &mut self.out[..]);
        let start = Instant::now();
        match case {
            Case::Copy => {
                let out = out.par_chunks_mut(CHUNK);
                out.zip(x.par_chunks(CHUNK)).for_each(|(out, x)| out.copy_from_slice(x));
            }
            Case::Half => {
                let out = &mut bytemuck::cast_slice_mut::<f32, bf16>(out)[..x.len()];
                let out = out.par_chunks_mut(CHUNK);
                out.zip(x.par_chunks(CHUNK)).for_each(|(out, x)| out.convert_from_f32_slice(x));
            }
            Case::Nearest(_, format) => {
                Cast::nearest().into_bytes(x, format, bytes(out, format))?;
            }
            Case::Stochastic(_, format) => {
                let draw = Draw::seeded(7).step(step);
                Cast::stochastic(draw).into_bytes(x, format, bytes(out, format))?;
            }
        }
        let elapsed = start.elapsed();
        black_box(&self.out);
        Ok(elapsed.as_nanos())
    }
}

/// Room for the codes of as many elements.
fn bytes(out: &mut [f32], format: Format) -> &mut [u8] {
    let length = format.bytes(out.len());
    &mut bytemuck::cast_slice_mut(out)[..length]
}
