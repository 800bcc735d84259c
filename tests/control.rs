//! Scaling, clipping, skipping and parameter groups of the CPU step.
#![cfg(feature = "std")]

use halfulp::bf16;
use halfulp::optim::{
    AdamW, AdamWConfig, ChunkSums, Clip, Clipped, GradientNorm, Moment, NonFinite, OptimError, Parameter,
    ParameterGroup, Rounding, StateFormat, States, StepControl, StepOutcome, StepReport,
};

fn config() -> AdamWConfig {
    AdamWConfig { lr: 0.1, weight_decay: 0.1, ..AdamWConfig::default() }
}

fn stochastic() -> AdamW {
    AdamW::new(config(), StateFormat::Bf16, Rounding::stochastic(5)).unwrap()
}

const ONE: StepControl = StepControl { gradient_scale: 1.0, clip: 1.0, found_inf: false };

fn gradients(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * 0.37).sin() * 3.0).collect()
}

/// Three steps with `control` and with gradients as `change` makes them beforehand: the bits.
fn run(control: StepControl, change: impl Fn(f32) -> f32) -> (Vec<u32>, String) {
    let mut opt = stochastic();
    let mut p = vec![1f32; 700];
    for step in 1..=3 {
        let grads: Vec<f32> = gradients(700).iter().map(|g| change(g * step as f32)).collect();
        let outcome = opt.step_controlled(&control, &mut [Parameter::numbered(1, &mut p, &grads)]).unwrap();
        assert!(matches!(outcome, StepOutcome::Executed(report) if report == StepReport::default()));
    }
    (p.iter().map(|p| p.to_bits()).collect(), format!("{opt:?}"))
}

/// F11, F2: a factor is the gradients multiplied beforehand, in f32 and in this order; factors of 1 leave them alone.
#[test]
fn factors() {
    let plain = run(ONE, |g| g);
    assert_eq!(run(StepControl { clip: 0.5, ..ONE }, |g| g), run(ONE, |g| g * 0.5));
    assert_eq!(run(StepControl { clip: 0.3, ..ONE }, |g| g), run(ONE, |g| g * 0.3));
    assert_eq!(run(StepControl { gradient_scale: 0.7, clip: 0.3, ..ONE }, |g| g), run(ONE, |g| g * 0.7 * 0.3));
    assert_eq!(run(StepControl { gradient_scale: 1.0 / 1024.0, ..ONE }, |g| g * 1024.0), plain);
    assert_ne!(run(StepControl { clip: 0.5, ..ONE }, |g| g), plain);

    let mut up = AdamW::new(AdamWConfig { maximize: true, ..config() }, StateFormat::F32, Rounding::Nearest).unwrap();
    let mut p = [0f32];
    let control = StepControl { gradient_scale: 0.25, ..ONE };
    let _ = up.step_controlled(&control, &mut [Parameter::numbered(0, &mut p, &[4f32])]).unwrap();
    assert!((p[0] - 0.1).abs() < 1e-6, "it climbs");
}

/// D15: a scale is not rounded into the 16 bits of the gradient.
#[test]
fn scaled_in_f32() {
    let mut opt = AdamW::new(config(), StateFormat::F32, Rounding::Nearest).unwrap();
    let control = StepControl { gradient_scale: 0.3, ..ONE };
    let mut p = [bf16::ONE];
    let _ = opt.step_controlled(&control, &mut [Parameter::numbered(0, &mut p, &[bf16::ONE])]).unwrap();
    let Some((Moment::F32(m), _)) = opt.moments(0) else { panic!() };
    assert!((m[0] - 0.03).abs() < 1e-8, "{}: in BF16 it would be .030078", m[0]);
}

/// F1, F3, F12: a step with a NaN or an infinity is left out whole, and said to be.
#[test]
fn skipped() {
    let mut opt = stochastic();
    let mut p = vec![1f32; 700];
    opt.step_tensors(&mut [Parameter::numbered(1, &mut p, &gradients(700))]).unwrap();
    let before = (p.clone(), format!("{opt:?}"));
    let clip = Clip::new(1.0).unwrap().non_finite(NonFinite::Skip);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut grads = gradients(700);
        grads[333] = bad;
        let norm = GradientNorm::gather([&ChunkSums::of(1, &grads)]).unwrap();
        let control = ONE.clipped(clip.coefficient(norm, 1.0).unwrap());
        assert!(control.found_inf);
        let (mut other, g) = ([1f32; 2], [1f32; 2]);
        let mut list = [Parameter::numbered(1, &mut p, &grads), Parameter::numbered(2, &mut other, &g)];
        assert_eq!(opt.step_controlled(&control, &mut list).unwrap(), StepOutcome::Skipped);
        assert_eq!((&p, format!("{opt:?}")), (&before.0, before.1.clone()));
        assert_eq!((other, opt.age(2)), ([1.0; 2], 0), "nor is anything made for a new tensor");
    }
    // The step after it is the one that would have come.
    let mut through = stochastic();
    let mut q = vec![1f32; 700];
    for _ in 0..2 {
        through.step_tensors(&mut [Parameter::numbered(1, &mut q, &gradients(700))]).unwrap();
    }
    opt.step_tensors(&mut [Parameter::numbered(1, &mut p, &gradients(700))]).unwrap();
    assert_eq!((p, format!("{opt:?}")), (q, format!("{through:?}")));
}

/// Not skipped, an element with a NaN gradient is NaN, and with it, by a clip that propagates, every other.
#[test]
fn propagated() {
    let mut opt = stochastic();
    let (mut p, grads) = ([1f32; 3], [1.0, f32::NAN, 1.0]);
    opt.step(&mut p, &grads).unwrap();
    assert_eq!(p.map(f32::is_nan), [false, true, false]);
    let norm = GradientNorm::gather([&ChunkSums::of(0, &grads)]).unwrap();
    let control = ONE.clipped(Clip::new(1.0).unwrap().coefficient(norm, 1.0).unwrap());
    let _ = opt.step_controlled(&control, &mut [Parameter::numbered(0, &mut p, &grads)]).unwrap();
    assert_eq!(p.map(f32::is_nan), [true; 3]);
}

#[test]
fn clipped() {
    assert_eq!(ONE.clipped(Clipped::Factor(0.25)), StepControl { clip: 0.25, ..ONE });
    assert_eq!(ONE.clipped(Clipped::Skip), StepControl { found_inf: true, ..ONE });
    assert_eq!(StepControl::default(), ONE);
    let mut opt = stochastic();
    let refused = |control: StepControl, opt: &mut AdamW| {
        opt.step_controlled(&control, &mut [Parameter::numbered(0, &mut [1f32], &[1f32])]).unwrap_err().to_string()
    };
    let before = format!("{opt:?}");
    assert_eq!(
        refused(StepControl { clip: 1.5, ..ONE }, &mut opt),
        "clip: expected a coefficient from 0 to 1, or NaN, got 1.5"
    );
    assert!(refused(StepControl { clip: -0.5, ..ONE }, &mut opt).starts_with("clip"));
    for scale in [f32::NAN, f32::INFINITY] {
        assert!(
            refused(StepControl { gradient_scale: scale, ..ONE }, &mut opt)
                .starts_with("gradient_scale: expected a finite f32")
        );
    }
    assert_eq!(format!("{opt:?}"), before);
}

/// Groups in one step are optimizers of their own with the same seed, bit for bit; their order in the list is nothing.
#[test]
fn groups_are_separate_optimizers() {
    let others = [
        ParameterGroup::new(AdamWConfig { weight_decay: 0.0, ..config() }, StateFormat::F32),
        ParameterGroup::new(AdamWConfig { lr: 0.3, beta2: 0.9, ..config() }, StateFormat::Bf16),
        ParameterGroup::new(
            AdamWConfig { lr: 0.2, ..config() },
            States { m: StateFormat::E4M3, v: StateFormat::UE4M4 },
        ),
        ParameterGroup::new(config(), States::FP4),
    ];
    let mut opt = stochastic();
    assert_eq!(others.map(|group| opt.add_group(group).unwrap()), [1, 2, 3, 4]);
    assert_eq!(opt.groups().len(), 5);
    let mut alone = vec![stochastic()];
    alone.extend(others.map(|group| AdamW::new(group.config, group.states, Rounding::stochastic(5)).unwrap()));
    let mut p = vec![vec![bf16::ONE; 600]; 5];
    let mut q = p.clone();
    let grads = gradients(600);
    for step in 0..4 {
        let mut list: Vec<_> =
            p.iter_mut().zip(0..).map(|(p, i)| Parameter::numbered(i, p, &grads).group(i as usize)).collect();
        list.rotate_left(step % 5);
        opt.step_tensors(&mut list).unwrap();
        for (i, (opt, q)) in alone.iter_mut().zip(&mut q).enumerate() {
            opt.step_tensors(&mut [Parameter::numbered(i as u64, q, &grads)]).unwrap();
        }
        // A schedule for all.
        opt.set_configs(|_, config| config.lr *= 0.5).unwrap();
        for opt in &mut alone {
            opt.set_config(AdamWConfig { lr: opt.config().lr * 0.5, ..*opt.config() }).unwrap();
        }
    }
    assert_eq!(p, q);
    for (i, alone) in alone.iter().enumerate() {
        assert_eq!(opt.moments(i as u64), alone.moments(i as u64));
        assert_eq!(opt.groups()[i].config, *alone.config());
        assert_eq!(opt.groups()[i].states, alone.states());
    }
    assert!(matches!(opt.moments(1), Some((Moment::F32(_), _))));
    assert_ne!(p[0], p[1], "the decay shows");
}

/// A step that is not skipped says which blocks became NaN; one that is leaves them alone.
#[test]
fn blocks_reported() {
    let states = States { m: StateFormat::E4M3, v: StateFormat::UE4M4 };
    let mut opt = AdamW::new(config(), states, Rounding::stochastic(5)).unwrap();
    let (mut p, mut grads) = (vec![1f32; 700], gradients(700));
    assert_eq!(opt.step(&mut p, &grads).unwrap().nan_blocks, 0);
    let before = format!("{opt:?}");
    grads[130] = f32::NAN;
    let skip = StepControl { found_inf: true, ..ONE };
    let outcome = opt.step_controlled(&skip, &mut [Parameter::numbered(0, &mut p, &grads)]).unwrap();
    assert_eq!((outcome, format!("{opt:?}")), (StepOutcome::Skipped, before));
    let outcome = opt.step_controlled(&ONE, &mut [Parameter::numbered(0, &mut p, &grads)]).unwrap();
    assert!(matches!(outcome, StepOutcome::Executed(report) if report.nan_blocks == 2), "one of each moment");
    // Of each tensor of a step, and by either way to step.
    let (mut other, clean) = (vec![1f32; 700], gradients(700));
    let mut list = [Parameter::numbered(0, &mut p, &clean), Parameter::numbered(1, &mut other, &grads)];
    assert_eq!(opt.step_tensors(&mut list).unwrap().nan_blocks, 4);
}

#[test]
fn groups_refused() {
    let mut opt = stochastic();
    let bad = ParameterGroup::new(AdamWConfig { lr: -1.0, ..config() }, StateFormat::F32);
    assert!(matches!(opt.add_group(bad), Err(OptimError::Config { argument: "lr", .. })));
    let f32s = opt.add_group(ParameterGroup::new(config(), StateFormat::F32)).unwrap();
    let halves = opt.add_group(ParameterGroup::new(AdamWConfig { lr: 0.0, ..config() }, StateFormat::Bf16)).unwrap();
    let (mut p, g) = ([1f32; 3], [1f32; 3]);
    let error = opt.step_tensors(&mut [Parameter::named("w", &mut p, &g).group(3)]).unwrap_err();
    assert_eq!(error.to_string(), "group of tensor `w`: expected one of 3 groups, counted from 0, got 3");
    opt.step_tensors(&mut [Parameter::named("w", &mut p, &g)]).unwrap();
    let before = format!("{opt:?}");
    let error = opt.step_tensors(&mut [Parameter::named("w", &mut p, &g).group(f32s)]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "group of tensor `w`: expected one with states in BF16 and BF16, as the tensor's are, got F32 and F32"
    );
    assert_eq!(format!("{opt:?}"), before);
    let states = States { m: StateFormat::Bf16, v: StateFormat::UE4M4 };
    let blocks = opt.add_group(ParameterGroup::new(config(), states)).unwrap();
    let fine = States { v: states.v.block(32).unwrap(), ..states };
    let fine = opt.add_group(ParameterGroup::new(config(), fine)).unwrap();
    opt.step_tensors(&mut [Parameter::named("b", &mut p, &g).group(blocks)]).unwrap();
    for group in [0, fine] {
        let error = opt.step_tensors(&mut [Parameter::named("b", &mut p, &g).group(group)]).unwrap_err();
        assert!(
            matches!(&error, OptimError::GroupStates { expected, .. } if *expected == states.to_string()),
            "{error}"
        );
    }
    let unsigned = ParameterGroup::new(config(), StateFormat::UE4M4);
    assert!(matches!(opt.add_group(unsigned), Err(OptimError::State { argument: "m", .. })));
    let mut sr_states = AdamW::new(config(), StateFormat::Bf16, Rounding::SrStates { seed: 5 }).unwrap();
    let error = sr_states.add_group(ParameterGroup::new(config(), states)).unwrap_err();
    assert!(matches!(error, OptimError::Unsupported { argument: "rounding", .. }));

    let before = format!("{opt:?}");
    let mut calls = 0;
    let result = opt.set_configs(|number, config| {
        calls += 1;
        config.lr = if number == 2 { f64::NAN } else { 7.0 };
    });
    assert!(matches!(result, Err(OptimError::Config { argument: "lr", .. })) && calls == 3);
    assert_eq!(format!("{opt:?}"), before);
    // Into another group of the same format it may go.
    let q = p;
    opt.step_tensors(&mut [Parameter::named("w", &mut p, &g).group(halves)]).unwrap();
    assert_eq!((p, opt.age(halfulp::random::tensor_id("w"))), (q, 2), "with a learning rate of 0");
}
