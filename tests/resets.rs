//! Resets: what the first step afterwards does, what stays, when they come, and that noise goes on.
#![cfg(feature = "stall")]

use halfulp::format::BlockVec;
use halfulp::optim::{
    AdamW, AdamWConfig, Moment, Parameter, ResetDue, ResetError, ResetMoments, ResetProgress, ResetSchedule,
    ResetScope, Resets, Rounding, StateFormat, States, Stepped,
};
use halfulp::random::{Draws, Role};
use halfulp::round::{Mode, Overflow, RandomBits, round};
use halfulp::stall::{AdaptiveReset, Comparison, StallCounts, reset_period};
use halfulp::{Draw, Format, bf16};

fn config() -> AdamWConfig {
    AdamWConfig { lr: 0.01, weight_decay: 0.0, ..AdamWConfig::default() }
}

fn plain(config: AdamWConfig) -> AdamW {
    AdamW::new(config, StateFormat::F32, Rounding::Nearest).unwrap()
}

/// F9: the first step after a reset moves by the learning rate; with an age that was not restarted it would move by 2.52 times
/// that at age 1000, and 3.16 times in the long run.
#[test]
fn the_first_step_moves_by_lr() {
    let first_move = |steps: u64, g: f32, weight_decay: f64| {
        let mut opt = plain(AdamWConfig { weight_decay, ..config() });
        let mut p = [1.0f32];
        for i in 0..steps {
            opt.step(&mut p, &[(i as f32).sin()]).unwrap();
        }
        assert!(opt.reset(0, ResetMoments::All));
        let (m, v) = opt.moments(0).unwrap();
        assert_eq!((m, v, opt.age(0), opt.steps()), (&Moment::F32(vec![0.0]), &Moment::F32(vec![0.0]), 0, steps));
        p = [1.0];
        opt.step(&mut p, &[g]).unwrap();
        assert_eq!((opt.age(0), opt.steps()), (1, steps + 1));
        1.0 - p[0]
    };
    for steps in [1, 10, 1000] {
        for g in [1.0, 1e-3, -7.0, 1e10] {
            assert!((first_move(steps, g, 0.0).abs() - 0.01).abs() < 1e-6, "{steps} {g}");
        }
        assert!((first_move(steps, 1.0, 0.1) - 0.011).abs() < 1e-6, "and the decay");
    }
    let stale = |age| (1.0 - config().scalars(age).unwrap().step(1.0, 1.0, 0.0, 0.0)[0]) / 0.01;
    assert!((stale(1001) - 2.52).abs() < 0.01 && (stale(100_000) - 3.16).abs() < 0.01);
}

/// The second moment alone: the first keeps its age, or it would be taken for ten times what it is.
#[test]
fn the_second_moment_alone() {
    let mut opt = plain(config());
    let mut p = [1.0f32];
    for _ in 0..200 {
        opt.step(&mut p, &[1.0]).unwrap();
    }
    assert!(opt.reset(0, ResetMoments::Second));
    assert_eq!(opt.age(0), 0);
    let Some((Moment::F32(m), Moment::F32(v))) = opt.moments(0) else { panic!() };
    assert!((m[0] - 1.0).abs() < 1e-5 && v[0] == 0.0);
    let before = p[0];
    opt.step(&mut p, &[1.0]).unwrap();
    assert!((before - p[0] - 0.01).abs() < 1e-6, "{}", before - p[0]);
    let wrong = config().scalars(1).unwrap().step(before, 1.0, 1.0, 0.0)[0];
    assert!(before - wrong > 0.09);
    // Both afterwards: the ages are one again.
    assert!(opt.reset(0, ResetMoments::All));
    p = [1.0];
    opt.step(&mut p, &[1.0]).unwrap();
    assert!((1.0 - p[0] - 0.01).abs() < 1e-6);
    assert!(!opt.reset(77, ResetMoments::All), "nothing is known of it");
}

/// F9 for moments in blocks: emptied are codes and scales, and the first step moves by the learning rate again.
#[test]
fn blocks_start_anew() {
    let n = 300;
    let amax = States { m: StateFormat::E5M2.amax(), v: StateFormat::UE4M4.block(32).unwrap().amax() };
    for states in [States { m: StateFormat::E4M3, v: StateFormat::UE4M4 }, States::FP4, amax] {
        for moments in [ResetMoments::All, ResetMoments::Second] {
            let mut opt = AdamW::new(config(), states, Rounding::stochastic(3)).unwrap();
            let mut p = vec![1f32; n];
            for step in 0..50 {
                let g: Vec<f32> =
                    (0..n).map(|i| ((i * 50 + step) as f32).sin() * 10f32.powi(i as i32 % 7 - 3)).collect();
                opt.step(&mut p, &g).unwrap();
            }
            let stepped = opt.moments(0).unwrap().0.clone();
            assert!(opt.reset(0, moments));
            let zeroed = |format| match format {
                StateFormat::Blocks(format) => Moment::Blocks(BlockVec::zeroed(format, n)),
                unscaled => panic!("{unscaled}"),
            };
            let (m, v) = opt.moments(0).unwrap();
            assert_eq!(v, &zeroed(states.v));
            let Moment::Blocks(blocks) = v else { panic!() };
            assert!(
                blocks.codes().iter().all(|&code| code == 0)
                    && (0..2).all(|b| blocks.scales().get(b) <= 2f64.powi(-126))
            );
            if moments == ResetMoments::Second {
                assert_eq!(m, &stepped);
                continue;
            }
            assert_eq!(m, &zeroed(states.m));
            let before = p.clone();
            let g: Vec<f32> = (0..n).map(|i| (i as f32).cos() * 10f32.powi(i as i32 % 7 - 3)).collect();
            opt.step(&mut p, &g).unwrap();
            assert_eq!((opt.age(0), opt.steps()), (1, 51));
            let largest = before.iter().zip(&p).map(|(old, new)| (old - new).abs()).fold(0.0, f32::max);
            assert!((largest - 0.01).abs() < 1e-6, "{states} {largest}");
        }
    }
}

fn words(p: &[f32]) -> Vec<u32> {
    p.iter().map(|p| p.to_bits()).collect()
}

/// A reset of one tensor leaves every bit of the others alone, and no draw is seen again.
#[test]
fn others_and_noise() {
    let n = 3000;
    let g = vec![0.25f32; n];
    let run = |reset: bool| {
        let mut opt = AdamW::new(config(), StateFormat::Bf16, Rounding::stochastic(3)).unwrap();
        let (mut a, mut b) = (vec![1f32; n], vec![1f32; n]);
        for step in 0..6 {
            if reset && step == 5 {
                assert!(opt.reset(1, ResetMoments::All));
            }
            opt.step_tensors(&mut [Parameter::numbered(1, &mut a, &g), Parameter::numbered(2, &mut b, &g)]).unwrap();
        }
        (opt, a, b)
    };
    let ((reset, a, b), (through, a_through, b_through)) = (run(true), run(false));
    assert_ne!(words(&a), words(&a_through));
    assert_eq!(words(&b), words(&b_through));
    assert_eq!(reset.moments(2), through.moments(2));
    assert_eq!((reset.age(1), reset.age(2)), (1, 6));

    // The step after the reset is the sixth, and so are its draws.
    let Some((_, Moment::Bf16(v))) = reset.moments(1) else { panic!() };
    let stored = config().scalars(1).unwrap().step(1.0, 0.25, 0.0, 0.0)[2];
    let by_draws_of = |step: u64| -> Vec<u16> {
        let draw = Draw::seeded(3).step(step).tensor(1).role(Role::SecondMoment);
        let stochastic = |i| Mode::Stochastic(RandomBits::of16(draw.draw16(i)));
        (0..n as u64).map(|i| round(stored, Format::BF16, stochastic(i), Overflow::Ieee)).collect()
    };
    let v: Vec<u16> = v.iter().map(|v| v.to_bits()).collect();
    assert_eq!(v, by_draws_of(6));
    assert_ne!(v, by_draws_of(1), "the noise of the first step");
}

fn unmeasured(tensor: u64) -> Stepped {
    Stepped { tensor, stalled: None }
}

fn due_at(schedule: ResetSchedule, steps: u64) -> Vec<u64> {
    let mut resets = Resets::new(schedule, ResetMoments::All, ResetScope::Tensor).unwrap();
    let due = |step: &u64| {
        assert!(*step > 0);
        resets.decide(&[unmeasured(4)]).unwrap() == ResetDue::Tensors(vec![4])
    };
    (1..=steps).filter(due).collect()
}

#[test]
fn fixed_periods() {
    assert!(due_at(ResetSchedule::Off, 1000).is_empty());
    assert_eq!(due_at(ResetSchedule::Every { steps: 1 }, 3), [1, 2, 3]);
    assert_eq!(due_at(ResetSchedule::Every { steps: 300 }, 1000), [300, 600, 900]);
    let period = reset_period(Format::E4M3, 0.999).unwrap().unwrap();
    assert_eq!(period, 320);
    assert_eq!(due_at(ResetSchedule::model(Format::E4M3, 0.999), 1000), [320, 640, 960]);
    assert!(due_at(ResetSchedule::model(Format::BF16, 0.99), 10_000).is_empty(), "stalls too little");
    let threshold = 0.7;
    let model = ResetSchedule::Model { format: Format::E2M1, beta2: 0.999, threshold };
    assert!(model.period().unwrap() > ResetSchedule::model(Format::E2M1, 0.999).period().unwrap());
}

/// Tensors count their own steps; all together, those of the optimizer.
#[test]
fn scopes() {
    let schedule = ResetSchedule::Every { steps: 4 };
    let mut tensor = Resets::new(schedule, ResetMoments::All, ResetScope::Tensor).unwrap();
    let mut all = Resets::new(schedule, ResetMoments::All, ResetScope::All).unwrap();
    let mut log = vec![];
    for step in 1..=8u64 {
        // Tensor 2 has a gradient in every other step.
        let stepped: Vec<Stepped> = [1, 2].into_iter().filter(|&id| id == 1 || step % 2 == 0).map(unmeasured).collect();
        log.push((tensor.decide(&stepped).unwrap(), all.decide(&stepped).unwrap()));
    }
    let none = ResetDue::Tensors(vec![]);
    let each = |tensors: &[u64]| ResetDue::Tensors(tensors.to_vec());
    assert_eq!(log[3], (each(&[1]), ResetDue::All));
    assert_eq!(log[7], (each(&[1, 2]), ResetDue::All));
    assert!([0, 1, 2, 4, 5, 6].iter().all(|&i: &usize| log[i] == (none.clone(), none.clone())));
    assert_eq!(all.decide(&[]).unwrap(), none);
    assert_eq!(all.progress()[0].steps, 0, "a step of nothing is none");
}

fn counts(stalled: usize, moved: usize) -> StallCounts {
    let old = vec![1f32; stalled + moved];
    let new: Vec<f32> = (0..stalled + moved).map(|i| if i < stalled { 1.0 } else { 2.0 }).collect();
    Comparison::new(&old[..], &new[..]).count().unwrap()
}

/// The adaptive schedule is the rule of the stalling model fed with what is measured.
#[test]
fn adaptive() {
    let mut resets = Resets::new(ResetSchedule::adaptive(0.999), ResetMoments::All, ResetScope::Tensor).unwrap();
    let mut rule = AdaptiveReset::new(0.999).unwrap();
    let mut dues = 0;
    for step in 0..3000u64 {
        let stalled = 60 + (step % 41) as usize;
        let expected = rule.observe(stalled as f64 / 100.0).unwrap();
        if expected {
            rule.restart();
        }
        let stepped = [
            Stepped { tensor: 9, stalled: Some(counts(stalled, 100 - stalled)) },
            Stepped { tensor: 1, stalled: Some(counts(50, 50)) },
        ];
        let due = resets.decide(&stepped).unwrap();
        assert_eq!(due, ResetDue::Tensors(if expected { vec![9] } else { vec![] }), "{step}");
        dues += usize::from(expected);
    }
    assert!(dues > 1);
    // All tensors together: the share of the sums.
    let mut all = Resets::new(ResetSchedule::adaptive(0.999), ResetMoments::All, ResetScope::All).unwrap();
    let mut rule = AdaptiveReset::new(0.999).unwrap();
    for _ in 0..1000 {
        let stepped =
            [Stepped { tensor: 1, stalled: Some(counts(90, 10)) }, Stepped { tensor: 2, stalled: Some(counts(10, 0)) }];
        let expected = rule.observe(100.0 / 110.0).unwrap();
        assert_eq!(all.decide(&stepped).unwrap() == ResetDue::All, expected);
        if expected {
            rule.restart();
        }
    }
    // Nothing that could stall: no reset, and no error of a share of nothing.
    let nothing = Stepped { tensor: 3, stalled: Some(StallCounts::default()) };
    assert!((0..5000).all(|_| resets.decide(&[nothing]).unwrap() == ResetDue::Tensors(vec![])));
}

/// Resumed from its progress, a schedule goes on as it would have, bit for bit.
#[test]
fn resumed() {
    for schedule in [ResetSchedule::Every { steps: 7 }, ResetSchedule::adaptive(0.99)] {
        for scope in [ResetScope::Tensor, ResetScope::All] {
            let new = || Resets::new(schedule, ResetMoments::Second, scope).unwrap();
            let mut through = new();
            let mut parts = new();
            for step in 0..300usize {
                parts = new().resume(&parts.progress()).unwrap();
                let stalled = 61 + step * 17 % 39;
                let stepped = [1, 2].map(|tensor| Stepped { tensor, stalled: Some(counts(stalled, 100 - stalled)) });
                assert_eq!(through.decide(&stepped), parts.decide(&stepped), "{step}");
                assert_eq!(through.progress(), parts.progress());
            }
        }
    }
}

#[test]
fn applied_and_logged() {
    let mut opt = AdamW::new(config(), StateFormat::Bf16, Rounding::stochastic(1)).unwrap();
    let mut resets = Resets::new(ResetSchedule::Every { steps: 3 }, ResetMoments::All, ResetScope::Tensor).unwrap();
    let (mut a, mut b) = ([bf16::ONE; 5], [bf16::ONE; 5]);
    let g = [0.5f32; 5];
    for step in 1..=7 {
        let mut list = vec![Parameter::numbered(1, &mut a, &g)];
        let mut stepped = vec![unmeasured(1)];
        if step > 1 {
            list.push(Parameter::numbered(2, &mut b, &g));
            stepped.push(unmeasured(2));
        }
        opt.step_tensors(&mut list).unwrap();
        let new = resets.after_step(&mut opt, &stepped).unwrap().len();
        assert_eq!(new, usize::from([3, 4, 6, 7].contains(&step)), "{step}");
    }
    let log: Vec<_> = resets.log().iter().map(|event| (event.step, event.tensor, event.age)).collect();
    assert_eq!(log, [(3, 1, 3), (4, 2, 3), (6, 1, 3), (7, 2, 3)]);
    assert_eq!((opt.age(1), opt.age(2), opt.steps()), (1, 0, 7));
    assert_eq!(opt.tensors().collect::<Vec<_>>(), [1, 2]);
    let mut all = Resets::new(ResetSchedule::Every { steps: 1 }, ResetMoments::Second, ResetScope::All).unwrap();
    // Tensor 2 has no gradient and is reset with the rest.
    opt.step_tensors(&mut [Parameter::numbered(1, &mut a, &g)]).unwrap();
    let events = all.after_step(&mut opt, &[unmeasured(1)]).unwrap();
    assert_eq!(events.iter().map(|event| event.tensor).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(events[0].moments, ResetMoments::Second);
}

#[test]
fn refusals() {
    let new = |schedule| Resets::new(schedule, ResetMoments::All, ResetScope::Tensor);
    assert_eq!(new(ResetSchedule::Every { steps: 0 }), Err(ResetError::Steps));
    assert!(matches!(new(ResetSchedule::adaptive(1.0)), Err(ResetError::Stall(_))));
    assert!(matches!(new(ResetSchedule::model(Format::BF16, f64::NAN)), Err(ResetError::Stall(_))));
    let mut adaptive = new(ResetSchedule::adaptive(0.999)).unwrap();
    adaptive.decide(&[Stepped { tensor: 5, stalled: Some(counts(9, 1)) }]).unwrap();
    let before = adaptive.clone();
    let error = adaptive.decide(&[Stepped { tensor: 5, stalled: Some(counts(9, 1)) }, unmeasured(6)]).unwrap_err();
    assert_eq!(error, ResetError::NotMeasured { tensor: 6 });
    let error = adaptive.decide(&[Stepped { tensor: 5, stalled: Some(counts(9, 1)) }; 2]).unwrap_err();
    assert_eq!(error, ResetError::Tensor { argument: "stepped", got: Some(5) });
    assert_eq!(adaptive, before);
    let progress = |tensor, loss| ResetProgress { tensor, steps: 3, loss };
    assert!(matches!(before.clone().resume(&[progress(None, 0.0)]), Err(ResetError::Tensor { .. })));
    assert!(matches!(before.clone().resume(&[progress(Some(1), 0.0); 2]), Err(ResetError::Tensor { .. })));
    for loss in [-1.0, 3.5, f64::NAN] {
        assert!(matches!(before.clone().resume(&[progress(Some(1), loss)]), Err(ResetError::Stall(_))));
    }
}
