//! Steps in CUDA graphs and on somebody's stream. Passes by where there is no GPU, unless `HALFULP_REQUIRE_GPU` is set.
#![cfg(feature = "cuda")]

use cudarc::driver::sys;
use half::bf16;
use halfulp::cuda::{
    self, CudaError, DeviceGradients, DeviceNorm, DeviceParameter, DeviceVec, ElementType, Gpu, Optimizer, StepMemory,
};
use halfulp::optim::{
    self, AdEMAMixConfig, AdamWConfig, ChunkSums, Clip, GradientNorm, LambConfig, LionConfig, NonFinite, Parameter,
    Rounding, Rule, StateFormat, States, StepControl,
};

fn gpu() -> Option<Gpu> {
    match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            assert!(std::env::var_os("HALFULP_REQUIRE_GPU").is_none(), "{error}");
            eprintln!("{error}: nothing compared");
            None
        }
    }
}

/// Numbers of either sign from a counter.
fn values(seed: u64, n: usize) -> Vec<f32> {
    let value = |i: usize| {
        let word = (seed << 32 | i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        ((word ^ word >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 32) as i32 as f32 * 1e-9
    };
    (0..n).map(value).collect()
}

const LENGTHS: [usize; 4] = [5000, 0, 65_537, 130];

/// Ten steps with a schedule and a clip, of which all but the first are replays of one graph, against the CPU.
fn replays<R: Rule>(gpu: &Gpu, states: impl Into<R::States>, schedule: impl Fn(u64) -> R) -> Result<(), CudaError> {
    let (states, rounding) = (states.into(), Rounding::stochastic(7));
    let mut host = optim::Optimizer::new(schedule(0), states, rounding)?;
    let mut device = Optimizer::new(gpu, schedule(0), states, rounding)?;
    let clip = Clip::new(3.0)?.non_finite(NonFinite::Skip);
    let mut p: Vec<Vec<f32>> = (0u64..).zip(LENGTHS).map(|(i, n)| values(i, n)).collect();
    let mut on_device = p.iter().map(|p| gpu.upload(p)).collect::<Result<Vec<_>, _>>()?;
    let mut grads: Vec<DeviceVec<f32>> = LENGTHS.map(|n| gpu.zeroed(n)).into_iter().collect::<Result<_, _>>()?;
    let mut norm = DeviceNorm::new(gpu)?;
    let mut graph = None;
    let mut skipped = 0;
    for step in 0..10u64 {
        let mut g: Vec<Vec<f32>> = (0u64..).zip(LENGTHS).map(|(i, n)| values(100 * step + i, n)).collect();
        if step == 6 {
            g[2][60_000] = f32::NAN;
        }
        g.iter().zip(&mut grads).try_for_each(|(g, grads)| gpu.upload_into(g, grads))?;
        host.set_config(schedule(step))?;
        device.set_config(schedule(step))?;

        let sums: Vec<ChunkSums> = (0u64..).zip(&g).map(|(id, g)| ChunkSums::of(id, g)).collect();
        let control = StepControl::default().clipped(clip.coefficient(GradientNorm::gather(&sums)?, 1.0)?);
        skipped += u64::from(control.found_inf);
        let mut list: Vec<_> =
            (0u64..).zip(p.iter_mut().zip(&g)).map(|(id, (p, g))| Parameter::numbered(id, p, g)).collect();
        let _ = host.step_controlled(&control, &mut list)?;

        let mut enqueue = || {
            let gradients: Vec<_> = (0u64..).zip(&grads).map(|(id, g)| DeviceGradients::of(id, g)).collect();
            norm.enqueue(&clip, 1.0, &gradients)?;
            let list = (0u64..).zip(on_device.iter_mut().zip(&grads));
            let mut list: Vec<_> = list.map(|(id, (p, g))| DeviceParameter::numbered(id, p, g)).collect();
            device.step_clipped(&norm, NonFinite::Skip, &mut list)
        };
        match &graph {
            None if step == 0 => enqueue()?,
            None => {
                let stream = gpu.stream();
                stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
                let enqueued = enqueue();
                let captured = stream.end_capture(sys::CUgraphInstantiate_flags(0))?;
                enqueued?;
                let captured = captured.expect("something was captured");
                captured.launch()?;
                graph = Some(captured);
            }
            Some(graph) => graph.launch()?,
        }
        for (i, (p, device)) in p.iter().zip(&on_device).enumerate() {
            let same = bytemuck::cast_slice::<f32, u32>(&gpu.download(device)?) == bytemuck::cast_slice::<f32, u32>(p);
            assert!(same, "{} in {states}, step {step}, tensor {i}", R::NAME);
        }
    }
    let progress = device.progress()?;
    assert_eq!((progress.executed, progress.skipped, skipped), (host.steps(), skipped, 1), "{}", R::NAME);
    for id in 0..LENGTHS.len() as u64 {
        let (host, device) = (host.stored(id).expect("it was stepped"), device.stored(id)?.expect("it was stepped"));
        assert!(host == device, "{} in {states}, states of tensor {id}", R::NAME);
    }
    Ok(())
}

#[test]
fn a_replayed_graph_is_ten_steps() -> Result<(), CudaError> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let lr = |step: u64| 1e-2 / (step + 1) as f64;
    let fp8 = States { m: StateFormat::E4M3, v: StateFormat::UE4M4 };
    for states in
        [StateFormat::F32.into(), StateFormat::Bf16.into(), fp8, States::FP4, States { m: StateFormat::Bf16, ..fp8 }]
    {
        replays(&gpu, states, |step| AdamWConfig { lr: lr(step), weight_decay: 0.1, ..AdamWConfig::default() })?;
        replays(&gpu, states, |step| LambConfig { lr: lr(step), ..LambConfig::default() })?;
    }
    for states in [StateFormat::Bf16, StateFormat::E4M3] {
        replays(&gpu, states, |step| LionConfig { lr: lr(step), weight_decay: 0.1, ..LionConfig::default() })?;
        let mix = AdEMAMixConfig { alpha_steps: 5, beta3_steps: 5, ..AdEMAMixConfig::default() };
        replays(&gpu, states, |step| AdEMAMixConfig { lr: lr(step), ..mix })?;
    }
    Ok(())
}

/// One tensor, whose steps the host prepares until one is captured, and the device from then on.
#[test]
fn one_tensor_before_in_and_after_a_graph() -> Result<(), CudaError> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let (n, config) = (70_001, AdamWConfig { lr: 0.1, weight_decay: 0.1, ..AdamWConfig::default() });
    let (mut p, g) = (values(1, n), values(2, n));
    let mut host = optim::AdamW::new(config, StateFormat::Bf16, Rounding::stochastic(1))?;
    let mut device = cuda::AdamW::new(&gpu, config, StateFormat::Bf16, Rounding::stochastic(1))?;
    let (mut on_device, grads) = (gpu.upload(&p)?, gpu.upload(&g)?);
    let mut graph = None;
    for step in 0..12 {
        host.step(&mut p, &g)?;
        match (step, &graph) {
            (3, _) => {
                gpu.stream().begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
                let enqueued = device.step(&mut on_device, &grads);
                let captured = gpu.stream().end_capture(sys::CUgraphInstantiate_flags(0))?;
                enqueued?;
                let captured = captured.expect("something was captured");
                captured.launch()?;
                graph = Some(captured);
            }
            (4..7 | 9, Some(graph)) => graph.launch()?,
            _ => device.step(&mut on_device, &grads)?,
        }
        let got = gpu.download(&on_device)?;
        assert!(bytemuck::cast_slice::<f32, u32>(&got) == bytemuck::cast_slice::<f32, u32>(&p), "step {step}");
        assert_eq!((device.steps()?, device.age(0)?), (step + 1, step + 1));
    }
    Ok(())
}

/// Gradients that work on another stream, which takes its time, has still to write: the step waits for them, the host does not.
#[test]
fn a_slow_producer_on_another_stream() -> Result<(), CudaError> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let producer = Gpu::open(0)?;
    let n = 100_003;
    let config = AdamWConfig { lr: 0.1, ..AdamWConfig::default() };
    let (mut p, source) = (values(1, n), values(2, n));
    let g: Vec<bf16> = halfulp::nearest_cast(&source);
    let mut host = optim::AdamW::new(config, StateFormat::Bf16, Rounding::stochastic(1))?;
    let mut device = cuda::AdamW::new(&gpu, config, StateFormat::Bf16, Rounding::stochastic(1))?;
    let mut on_device = gpu.upload(&p)?;
    let on_producer = producer.upload(&source)?;
    let mut grads = producer.upload(&vec![bf16::NAN; n])?;
    let (busy, mut out) = (producer.zeroed::<f32>(1 << 28)?, producer.zeroed::<bf16>(1 << 28)?);
    producer.synchronize()?;
    // Modules and states are there before the clock runs.
    let mut warm = gpu.upload(&[0.0f32; 8])?;
    let zeros = gpu.upload(&[bf16::ZERO; 8])?;
    device.step_tensors(&mut [DeviceParameter::numbered(9, &mut warm, &zeros)])?;
    host.step_tensors(&mut [Parameter::numbered(9, &mut [0.0f32; 8], &[bf16::ZERO; 8])])?;
    gpu.synchronize()?;

    let cast = halfulp::cast::Cast::nearest();
    for _ in 0..50 {
        producer.cast_into(&cast, &busy, &mut out)?;
    }
    producer.cast_into(&cast, &on_producer, &mut grads)?;
    let written = producer.stream().record_event(None)?;
    gpu.stream().wait(&written)?;
    let refused = device.step_tensors(&mut [DeviceParameter::numbered(0, &mut on_device, &grads)]).unwrap_err();
    assert_eq!(refused, CudaError::WrongStream { argument: "grads" });
    let memory = StepMemory {
        id: 0,
        params: on_device.address(),
        params_type: ElementType::F32,
        grads: grads.address(),
        grads_type: ElementType::Bf16,
        n: n as u64,
        group: 0,
        part: None,
    };
    // SAFETY: memory of this device, as long as it says, whose writer the stream waits for.
    unsafe { device.step_raw(&[memory]) }?;
    // SAFETY: an event that was recorded.
    let still_at_work = unsafe { sys::cuEventQuery(written.cu_event()) } == sys::CUresult::CUDA_ERROR_NOT_READY;
    assert!(still_at_work, "the step waited for its gradients on the host");
    host.step_tensors(&mut [Parameter::numbered(0, &mut p, &g)])?;
    let got = gpu.download(&on_device)?;
    assert!(bytemuck::cast_slice::<f32, u32>(&got) == bytemuck::cast_slice::<f32, u32>(&p));
    Ok(())
}
