//! Kernels on a GPU, timed by events, beside copies of the same bytes.
//!
//! `gpu` measures every case in interleaved rounds and prints a table; `gpu --serve` answers one case name a line on
//! standard input with microseconds a call, so that a script can interleave other programs' measurements.
//!
//! A name that ends in `-graph` is the same calls captured once and replayed, for sizes where launching takes longer than
//! working. A replay of casts repeats the keys of its capture.
#![allow(missing_docs, reason = "a program")]

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::sync::OnceLock;
use std::time::Instant;

use cudarc::driver::{CudaGraph, sys};
use halfulp::cast::Cast;
use halfulp::cuda::{CastMemory, DeviceNorm, DeviceVec, ElementType, Gpu, GradientMemory, Optimizer, StepMemory};
use halfulp::optim::{
    AdEMAMixConfig, AdamConfig, AdamWConfig, Clip, LambConfig, LionConfig, NonFinite, Rounding, Rule, SgdConfig, Shard,
    StateFormat, StateSet, States,
};
use halfulp::random::Draws;
use halfulp::round::{Mode, Overflow, round};
use halfulp::{Draw, Format, bf16};

type Error = Box<dyn std::error::Error>;

/// Work of one call on one of several buffer sets.
type Call = Box<dyn FnMut(usize) -> Result<(), Error>>;

struct Case {
    call: Call,
    sets: usize,
    /// Calls between the two events of a sample.
    calls: usize,
    bytes: f64,
    /// These calls, to be replayed.
    graph: Option<CudaGraph>,
}

impl Case {
    /// As many calls over the sets in turn, or all of the graph's.
    fn turn(&mut self, calls: usize) -> Result<(), Error> {
        if let Some(graph) = &self.graph {
            return Ok(graph.launch()?);
        }
        (0..calls).try_for_each(|i| (self.call)(i % self.sets))
    }
}

/// Bell-shaped values as weights have them.
fn values(n: usize) -> Vec<f32> {
    let mut words = vec![0u16; 4 * n];
    Draw::seeded(1).fill16(0, &mut words);
    words.chunks_exact(4).map(|w| (w.iter().map(|&w| f32::from(w)).sum::<f32>() - 131_070.0) * 2e-5).collect()
}

/// `n` values repeated from 2^22 of them.
fn filled(gpu: &Gpu, n: usize) -> Result<DeviceVec<f32>, Error> {
    static VALUES: OnceLock<Vec<f32>> = OnceLock::new();
    let some = VALUES.get_or_init(|| values(1 << 22));
    let mut ready = n.min(some.len());
    let some = gpu.upload(&some[..ready])?;
    if ready == n {
        return Ok(some);
    }
    let all = gpu.zeroed::<f32>(n)?;
    let stream = gpu.stream().cu_stream();
    // SAFETY: `some` is `ready` values long, which is less than `n`.
    unsafe { sys::cuMemcpyDtoDAsync_v2(all.address(), some.address(), 4 * ready, stream) }.result()?;
    while ready < n {
        let next = ready.min(n - ready);
        let to = all.address() + 4 * ready as u64;
        // SAFETY: `ready + next` values are at most `n`, and those that are read lie before those that are written.
        unsafe { sys::cuMemcpyDtoDAsync_v2(to, all.address(), 4 * next, stream) }.result()?;
        ready += next;
    }
    gpu.synchronize()?;
    Ok(all)
}

fn narrow(gpu: &Gpu, x: &DeviceVec<f32>) -> Result<DeviceVec<bf16>, Error> {
    Ok(gpu.nearest_cast(x)?)
}

/// As many sets of `bytes` as pass through four times a 64 MB cache.
fn sets(bytes: f64) -> usize {
    ((256e6 / bytes).ceil() as usize).clamp(1, 64)
}

fn calls(bytes: f64) -> usize {
    // About a millisecond of traffic, or as many launches as a graph takes well, and a whole turn of the sets.
    ((4e9 / bytes).ceil() as usize).min(4096).next_multiple_of(sets(bytes))
}

fn case(bytes: f64, call: Call) -> Case {
    Case { call, sets: sets(bytes), calls: calls(bytes), bytes, graph: None }
}

/// The case with its calls captured. They have run before, so that modules are loaded and moments there.
fn captured(gpu: &Gpu, mut case: Case) -> Result<Case, Error> {
    warm_up(gpu, &mut case)?;
    let stream = gpu.stream();
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    let calls = case.turn(case.calls);
    case.graph = stream.end_capture(sys::CUgraphInstantiate_flags(0))?;
    calls?;
    if case.graph.is_none() {
        return Err("nothing was captured".into());
    }
    Ok(case)
}

fn copy(gpu: &Gpu, bytes: f64) -> Result<Case, Error> {
    let half = (bytes / 2.0) as usize;
    let memory = (0..sets(bytes))
        .map(|_| Ok((filled(gpu, half / 4)?, gpu.zeroed::<u8>(half)?)))
        .collect::<Result<Vec<_>, Error>>()?;
    let stream = gpu.stream().clone();
    let call = move |set: usize| {
        let (x, y): &(DeviceVec<f32>, DeviceVec<u8>) = &memory[set];
        // SAFETY: both are `half` bytes long.
        unsafe { sys::cuMemcpyDtoDAsync_v2(y.address(), x.address(), half, stream.cu_stream()) }.result()?;
        Ok(())
    };
    Ok(case(bytes, Box::new(call)))
}

fn cast(gpu: &Gpu, n: usize, format: Format, stochastic: bool) -> Result<Case, Error> {
    let bytes = (4 * n + format.bytes(n)) as f64;
    let memory = (0..sets(bytes))
        .map(|_| Ok((filled(gpu, n)?, gpu.zeroed::<u8>(format.bytes(n))?)))
        .collect::<Result<Vec<_>, Error>>()?;
    let gpu = gpu.clone();
    let mut step = 0;
    let call = move |set: usize| {
        let (x, y): &(DeviceVec<f32>, DeviceVec<u8>) = &memory[set];
        let memory = CastMemory { x: x.address(), source: ElementType::F32, y: y.address(), format, n: n as u64 };
        step += 1;
        let draw = Draw::seeded(7).step(step);
        // SAFETY: both are as long as `memory` says.
        unsafe {
            if stochastic {
                gpu.cast_raw(&Cast::stochastic(draw), memory)
            } else {
                gpu.cast_raw(&Cast::nearest(), memory)
            }
        }?;
        Ok(())
    };
    Ok(case(bytes, Box::new(call)))
}

#[derive(Clone, Copy)]
enum Types {
    /// f32 parameters and gradients.
    Wide,
    /// BF16 parameters and gradients.
    Narrow,
}

/// What a step does besides its tensors.
#[derive(Clone, Copy, PartialEq)]
enum Extra {
    Nothing,
    /// The norm of all gradients, and its clip coefficient.
    Clip,
    Meter,
}

/// Steps over lists of tensors of these lengths, a plan for each set.
fn steps<R: Rule + 'static>(
    gpu: &Gpu,
    lengths: &[usize],
    types: Types,
    (formats, states, params): (R::States, Rounding, Rounding),
    extra: Extra,
) -> Result<Case, Error> {
    let (size, element) = match types {
        Types::Wide => (4, ElementType::F32),
        Types::Narrow => (2, ElementType::Bf16),
    };
    // A rule that goes by norms reads everything once before.
    let read_before = |n: usize| if R::NAME == "lamb" { 2 * size * n + formats.bytes(n) } else { 0 };
    let clip = if extra == Extra::Clip { size } else { 0 };
    let bytes: usize = lengths.iter().map(|&n| (3 * size + clip) * n + 2 * formats.bytes(n) + read_before(n)).sum();
    let bytes = bytes as f64;
    let opt = Optimizer::<R>::new(gpu, R::default(), formats, states)?;
    let mut opt = opt.parameter_rounding(params)?.meter(extra == Extra::Meter);
    let mut keep: Vec<(DeviceVec<f32>, DeviceVec<bf16>)> = vec![];
    let mut lists = vec![];
    let mut ids = 0..;
    for _ in 0..sets(bytes) {
        let mut list = vec![];
        for (&n, id) in lengths.iter().zip(&mut ids) {
            let mut address = || {
                let x = filled(gpu, n)?;
                let (wide, narrow) = match types {
                    Types::Wide => (x, gpu.zeroed(0)?),
                    Types::Narrow => (gpu.zeroed(0)?, narrow(gpu, &x)?),
                };
                let address = if let Types::Wide = types { wide.address() } else { narrow.address() };
                keep.push((wide, narrow));
                Ok::<u64, Error>(address)
            };
            let (params, grads) = (address()?, address()?);
            let (params_type, grads_type, n) = (element, element, n as u64);
            list.push(StepMemory { id, params, params_type, grads, grads_type, n, group: 0, part: None });
        }
        lists.push(list);
    }
    let gradients = |list: &[StepMemory]| -> Vec<GradientMemory> {
        let of = |memory: &StepMemory| GradientMemory {
            id: memory.id,
            shard: Shard::whole(memory.n),
            grads: memory.grads,
            grads_type: memory.grads_type,
        };
        list.iter().map(of).collect()
    };
    let mut norms = vec![];
    for list in &lists {
        norms.push((DeviceNorm::new(gpu)?, gradients(list)));
    }
    // All states first: plans are of what there is.
    for list in &lists {
        opt.plan_raw(list)?;
    }
    let mut plans = lists.iter().map(|list| opt.plan_raw(list)).collect::<Result<Vec<_>, _>>()?;
    let clip = Clip::new(1.0)?;
    let call = move |set: usize| {
        let _alive = &keep;
        // SAFETY: the buffers are this long and live as long as the closure.
        unsafe {
            if extra == Extra::Clip {
                let (norm, gradients) = &mut norms[set];
                norm.enqueue_raw(&clip, 1.0, gradients)?;
                opt.step_plan_clipped(norm, NonFinite::Propagate, &mut plans[set])?;
            } else {
                opt.step_plan(&mut plans[set])?;
            }
        }
        Ok(())
    };
    Ok(case(bytes, Box::new(call)))
}

/// Lengths of the tensors of a model in the shape of `LLaMA`: 134 M parameters in 111 tensors.
fn llama() -> Vec<usize> {
    let (width, inner, vocabulary) = (768, 2048, 32_000);
    let square = width * width;
    let layer = [square, square, square, square, width * inner, width * inner, width * inner, width, width];
    let layers = (0..12).flat_map(|_| layer);
    [vocabulary * width].into_iter().chain(layers).chain([width, vocabulary * width]).collect()
}

/// What stands behind the @ of a case: log2 of one length, `COUNTxLOG2`, `ROWS*COLUMNS`, or `llama`.
fn lengths(text: &str) -> Result<Vec<usize>, Error> {
    if text == "llama" {
        return Ok(llama());
    }
    if let Some((rows, columns)) = text.split_once('*') {
        return Ok(vec![rows.parse::<usize>()? * columns.parse::<usize>()?]);
    }
    let (count, k) = text.split_once('x').unwrap_or(("1", text));
    Ok(vec![1 << k.parse::<u32>()?; count.parse()?])
}

/// Moments of 8 bits, in blocks of 128.
const FP8: States = States { m: StateFormat::E4M3, v: StateFormat::UE4M4 };

/// Names and makers of the cases.
fn make(gpu: &Gpu, name: &str) -> Result<Case, Error> {
    let (kind, at) = name.rsplit_once('@').ok_or("a case is NAME@LENGTHS")?;
    if let Some(kind) = kind.strip_suffix("-graph") {
        return captured(gpu, make(gpu, &format!("{kind}@{at}"))?);
    }
    let list = lengths(at)?;
    let n: usize = list.iter().sum();
    let r = Rounding::stochastic(7);
    let near = Rounding::Nearest;
    let bf16 = || StateFormat::Bf16;
    if let Some(bytes) = kind.strip_prefix("copy-") {
        return copy(gpu, bytes.parse::<f64>()? * n as f64);
    }
    if let Some((format, rounding)) = kind.strip_prefix("cast-").and_then(|rest| rest.rsplit_once('-')) {
        return cast(gpu, n, format.parse()?, rounding == "stochastic");
    }
    let (kind, extra) = match kind.rsplit_once('-') {
        Some((kind, "clip")) => (kind, Extra::Clip),
        Some((kind, "meter")) => (kind, Extra::Meter),
        _ => (kind, Extra::Nothing),
    };
    let adamw = |types, formats: States, states, params| {
        steps::<AdamWConfig>(gpu, &list, types, (formats, states, params), extra)
    };
    match kind {
        "adamw-20-stochastic" => adamw(Types::Wide, bf16().into(), r, near),
        "adamw-20-nearest" => adamw(Types::Wide, bf16().into(), near, near),
        "adamw-14-stochastic" => adamw(Types::Narrow, bf16().into(), r, r),
        "adamw-14-nearest" => adamw(Types::Narrow, bf16().into(), near, near),
        "adamw-16-stochastic" => adamw(Types::Wide, FP8, r, near),
        "adamw-16-nearest" => adamw(Types::Wide, FP8, near, near),
        "adamw-14-fp4-stochastic" => adamw(Types::Wide, States::FP4, r, near),
        "adamw-10-stochastic" => adamw(Types::Narrow, FP8, r, near),
        "adamw-10-nearest" => adamw(Types::Narrow, FP8, near, near),
        "adamw-10-all-stochastic" => adamw(Types::Narrow, FP8, r, r),
        "adamw-8-stochastic" => adamw(Types::Narrow, States::FP4, r, near),
        "adamw-8-nearest" => adamw(Types::Narrow, States::FP4, near, near),
        "adamw-8-all-stochastic" => adamw(Types::Narrow, States::FP4, r, r),
        "adamw-28" => adamw(Types::Wide, StateFormat::F32.into(), near, near),
        "adam-20-stochastic" => steps::<AdamConfig>(gpu, &list, Types::Wide, (bf16().into(), r, near), extra),
        "sgd-16-stochastic" => steps::<SgdConfig>(gpu, &list, Types::Wide, (bf16(), r, near), extra),
        "sgd-10-stochastic" => steps::<SgdConfig>(gpu, &list, Types::Narrow, (bf16(), r, r), extra),
        "lion-16-stochastic" => steps::<LionConfig>(gpu, &list, Types::Wide, (bf16(), r, near), extra),
        "lion-10-stochastic" => steps::<LionConfig>(gpu, &list, Types::Narrow, (bf16(), r, r), extra),
        "ademamix-24-stochastic" => steps::<AdEMAMixConfig>(gpu, &list, Types::Wide, (bf16().into(), r, near), extra),
        "ademamix-18-stochastic" => steps::<AdEMAMixConfig>(gpu, &list, Types::Narrow, (bf16().into(), r, r), extra),
        "lamb-32-stochastic" => steps::<LambConfig>(gpu, &list, Types::Wide, (bf16().into(), r, near), extra),
        "adam-16-any-stochastic" => steps::<AdamConfig>(gpu, &list, Types::Wide, (FP8, r, near), extra),
        "lion-13-any-stochastic" => steps::<LionConfig>(gpu, &list, Types::Wide, (StateFormat::E4M3, r, near), extra),
        _ => Err(format!("no case {name}").into()),
    }
}

/// Microseconds a call, by events.
fn sample(gpu: &Gpu, case: &mut Case) -> Result<f64, Error> {
    let timing = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
    let stream = gpu.stream();
    // Calls ahead of the first event keep the device busy, so that the first launch's way there is not measured.
    case.turn(case.sets.max(2))?;
    let start = stream.record_event(timing)?;
    case.turn(case.calls)?;
    let end = stream.record_event(timing)?;
    Ok(f64::from(start.elapsed_ms(&end)?) * 1e3 / case.calls as f64)
}

fn warm_up(gpu: &Gpu, case: &mut Case) -> Result<(), Error> {
    case.turn(case.sets.max(20))?;
    Ok(gpu.synchronize()?)
}

/// Host microseconds of one call, a queue's length at a time.
fn host_time(gpu: &Gpu, case: &mut Case) -> Result<f64, Error> {
    let mut best = f64::MAX;
    for _ in 0..50 {
        let start = Instant::now();
        case.turn(100)?;
        best = best.min(start.elapsed().as_secs_f64() * 1e4);
        gpu.synchronize()?;
    }
    Ok(best)
}

const DEFAULT: [&str; 96] = [
    "copy-6@24",
    "cast-bf16-nearest@24",
    "cast-bf16-stochastic@24",
    "copy-6@28",
    "cast-bf16-nearest@28",
    "cast-bf16-stochastic@28",
    "copy-5@24",
    "cast-e4m3-nearest@24",
    "cast-e4m3-stochastic@24",
    "cast-e5m2-stochastic@24",
    "copy-5@28",
    "cast-e4m3-nearest@28",
    "cast-e4m3-stochastic@28",
    "cast-e5m2-stochastic@28",
    "cast-ue4m4-stochastic@28",
    "copy-4.5@24",
    "cast-e2m1-nearest@24",
    "cast-e2m1-stochastic@24",
    "copy-4.5@28",
    "cast-e2m1-nearest@28",
    "cast-e2m1-stochastic@28",
    "copy-20@24",
    "adamw-20-nearest@24",
    "adamw-20-stochastic@24",
    "copy-20@28",
    "adamw-20-nearest@28",
    "adamw-20-stochastic@28",
    "copy-14@28",
    "adamw-14-nearest@28",
    "adamw-14-stochastic@28",
    "copy-16.03125@28",
    "adamw-16-nearest@28",
    "adamw-16-stochastic@28",
    "copy-10.03125@28",
    "adamw-10-nearest@28",
    "adamw-10-stochastic@28",
    "adamw-10-all-stochastic@28",
    "copy-8.03125@28",
    "adamw-8-nearest@28",
    "adamw-8-stochastic@28",
    "adamw-8-all-stochastic@28",
    "copy-28@28",
    "adamw-28@28",
    "cast-fp16-stochastic@28",
    "copy-6@16",
    "copy-6-graph@16",
    "cast-bf16-stochastic@16",
    "cast-bf16-stochastic-graph@16",
    "copy-6@20",
    "copy-6-graph@20",
    "cast-bf16-stochastic@20",
    "cast-bf16-stochastic-graph@20",
    "copy-20@llama",
    "adamw-20-nearest@llama",
    "adamw-20-stochastic@llama",
    "adamw-20-stochastic-meter@llama",
    "copy-24@llama",
    "adamw-20-stochastic-clip@llama",
    "copy-16.03125@llama",
    "adamw-16-stochastic@llama",
    "copy-14.03125@llama",
    "adamw-14-fp4-stochastic@llama",
    "copy-20@32x16",
    "copy-20-graph@32x16",
    "adamw-20-stochastic@32x16",
    "adamw-20-stochastic-graph@32x16",
    "copy-20@1000x12",
    "adamw-20-stochastic@1000x12",
    "copy-16@28",
    "sgd-16-stochastic@28",
    "lion-16-stochastic@28",
    "copy-10@28",
    "sgd-10-stochastic@28",
    "lion-10-stochastic@28",
    "copy-24@28",
    "ademamix-24-stochastic@28",
    "copy-18@28",
    "ademamix-18-stochastic@28",
    "copy-32@28",
    "lamb-32-stochastic@28",
    "copy-20@28",
    "adam-20-stochastic@28",
    "copy-16.03125@28",
    "adam-16-any-stochastic@28",
    "copy-14.015625@28",
    "lion-13-any-stochastic@28",
    "copy-20@8192*28672",
    "adamw-20-stochastic@8192*28672",
    "adam-20-stochastic@8192*28672",
    "copy-16@8192*28672",
    "sgd-16-stochastic@8192*28672",
    "lion-16-stochastic@8192*28672",
    "copy-24@8192*28672",
    "ademamix-24-stochastic@8192*28672",
    "copy-32@8192*28672",
    "lamb-32-stochastic@8192*28672",
];

/// The cases above, and those of few elements by every rule, eager and captured.
fn default_cases() -> Vec<String> {
    const RULES: [(u32, &[&str]); 4] =
        [(20, &["adamw", "adam"]), (16, &["sgd", "lion"]), (24, &["ademamix"]), (32, &["lamb"])];
    let mut names = DEFAULT.map(String::from).to_vec();
    for k in [8, 12, 16, 20] {
        for (bytes, rules) in RULES {
            let steps = rules.iter().map(|rule| format!("{rule}-{bytes}-stochastic"));
            let cases = std::iter::once(format!("copy-{bytes}")).chain(steps);
            names.extend(cases.flat_map(|case| [format!("{case}@{k}"), format!("{case}-graph@{k}")]));
        }
    }
    names
}

fn main() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(error) if std::env::var_os("HALFULP_REQUIRE_GPU").is_none() => {
            println!("nothing to measure: {error}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    // The kernels are right before they are timed.
    let x = values(1000);
    let y = gpu.download(&gpu.nearest_cast::<bf16, _>(&gpu.upload(&x)?)?)?;
    assert!(x.iter().zip(&y).all(|(x, y)| y.to_bits() == round(*x, Format::BF16, Mode::NearestEven, Overflow::Ieee)));

    if arguments.first().is_some_and(|a| a == "--serve") {
        let mut cases: BTreeMap<String, Case> = BTreeMap::new();
        for line in std::io::stdin().lock().lines() {
            let line = line?;
            if line == "clear" {
                cases.clear();
                println!("0 0");
            } else if let Some(name) = line.strip_prefix("host ") {
                let mut case = make(&gpu, name)?;
                warm_up(&gpu, &mut case)?;
                println!("{} {}", host_time(&gpu, &mut case)?, case.bytes);
            } else {
                if !cases.contains_key(&line) {
                    let mut case = make(&gpu, &line)?;
                    warm_up(&gpu, &mut case)?;
                    cases.insert(line.clone(), case);
                }
                if let Some(case) = cases.get_mut(&line) {
                    println!("{} {}", sample(&gpu, case)?, case.bytes);
                }
            }
            std::io::stdout().flush()?;
        }
        return Ok(());
    }

    let names = if arguments.is_empty() { default_cases() } else { arguments };
    println!("{} | {}", gpu.name()?, names.len());
    // A copy and the cases of the same bytes that follow it are measured together.
    let mut groups: Vec<Vec<&str>> = vec![];
    for name in &names {
        let is_copy = name.starts_with("copy") && !name.contains("-graph@");
        if is_copy || groups.is_empty() {
            groups.push(vec![]);
        }
        if let Some(group) = groups.last_mut() {
            group.push(name);
        }
    }
    for group in groups {
        let mut cases = group.iter().map(|name| make(&gpu, name)).collect::<Result<Vec<_>, Error>>()?;
        for case in &mut cases {
            warm_up(&gpu, case)?;
        }
        let mut samples = vec![vec![]; cases.len()];
        for _ in 0..9 {
            for (case, samples) in cases.iter_mut().zip(&mut samples) {
                samples.push(sample(&gpu, case)?);
            }
        }
        let mut reference = None;
        for ((name, case), samples) in group.iter().zip(&mut cases).zip(&mut samples) {
            samples.sort_by(f64::total_cmp);
            let [low, median, high] = [0, samples.len() / 2, samples.len() - 1].map(|i| samples[i]);
            let time_a_byte = median / case.bytes;
            let reference = *reference.get_or_insert(time_a_byte);
            println!(
                "{name:28} {median:9.2} us [{low:.2}, {high:.2}]  {:6.0} GB/s  {:.4} of copy time",
                1e-3 / time_a_byte,
                time_a_byte / reference
            );
        }
    }
    for name in ["adamw-20-stochastic@10", "adamw-20-stochastic@1000x12", "cast-bf16-stochastic@10"] {
        let mut case = make(&gpu, name)?;
        warm_up(&gpu, &mut case)?;
        println!("{name:28} {:9.2} us of host time a call", host_time(&gpu, &mut case)?);
    }
    Ok(())
}
