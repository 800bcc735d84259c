//! Every optimizer by one macro: the definition bit by bit in every dtype, state format, rounding, level and length; parts,
//! resets, checkpoints, clips, the meter and remainders. Then vectors in f64, and closed forms.
#![cfg(feature = "std")]

mod common;

use std::collections::BTreeMap;

use common::reference::{Naive, RunOf, Value, bits, norm};
use common::{Inputs, gradient};
use halfulp::optim::{
    AdEMAMix, AdEMAMixConfig, Adam, AdamConfig, AdamW, AdamWConfig, ChunkSums, Collective, Lamb, LambConfig, Lion,
    LionConfig, MixStates, OptimError, Optimizer, Parameter, ParameterGroup, ResetMoments, Rounding, Rule, Sgd,
    SgdConfig, StateFormat, States, StepControl, StepOutcome, remainder,
};
use halfulp::{Isa, bf16, f16};

/// Hyper-parameters that show: a large learning rate and decay, and one set with the other options.
trait Sets: Naive {
    fn sets() -> Vec<Self>;
    fn mixed() -> Self::States;
}

const MIXED: States = States { m: StateFormat::E4M3, v: StateFormat::UE4M4 };

impl Sets for AdamWConfig {
    fn sets() -> Vec<Self> {
        let config = Self { lr: 0.1, weight_decay: 0.1, ..Self::default() };
        vec![config, Self { maximize: true, skip_zeros: true, ..config }]
    }
    fn mixed() -> States {
        MIXED
    }
}

impl Sets for AdamConfig {
    fn sets() -> Vec<Self> {
        let config = Self { lr: 0.1, weight_decay: 0.1, ..Self::default() };
        vec![config, Self { maximize: true, skip_zeros: true, ..config }]
    }
    fn mixed() -> States {
        States { v: StateFormat::UE2M2NZ, ..MIXED }
    }
}

impl Sets for SgdConfig {
    fn sets() -> Vec<Self> {
        let config = Self { lr: 0.1, weight_decay: 0.1, ..Self::default() };
        vec![
            Self { dampening: 0.25, ..config },
            Self { decoupled: true, nesterov: true, ..config },
            Self { maximize: true, skip_zeros: true, ..config },
        ]
    }
    fn mixed() -> StateFormat {
        StateFormat::E5M2
    }
}

impl Sets for LionConfig {
    fn sets() -> Vec<Self> {
        let config = Self { lr: 0.1, weight_decay: 0.1, ..Self::default() };
        vec![config, Self { maximize: true, skip_zeros: true, ..config }]
    }
    fn mixed() -> StateFormat {
        StateFormat::E2M1
    }
}

impl Sets for AdEMAMixConfig {
    fn sets() -> Vec<Self> {
        let config = Self { lr: 0.1, weight_decay: 0.1, ..Self::default() };
        let scheduled = Self { alpha_steps: 7, beta3_steps: 5, ..config };
        vec![config, scheduled, Self { maximize: true, skip_zeros: true, ..scheduled }]
    }
    fn mixed() -> MixStates {
        MixStates { slow: StateFormat::Bf16, ..MIXED.into() }
    }
}

impl Sets for LambConfig {
    fn sets() -> Vec<Self> {
        let config = Self { lr: 0.1, weight_decay: 0.1, ..Self::default() };
        vec![
            config,
            Self { max_trust: 0.01, ..config },
            Self { max_unorm: Some(0.02), maximize: true, skip_zeros: true, ..config },
        ]
    }
    fn mixed() -> States {
        States::FP4
    }
}

const STOCHASTIC: Rounding = Rounding::Stochastic { seed: 42 };

fn compare<R: Sets, P: Value, G: Value>(run: RunOf<R>) {
    let mut inputs = Inputs(run.n as u64);
    run.compare::<P, G>(|_, i| if i % 7 == 3 { 0.0 } else { gradient(&mut inputs) });
}

/// Every dtype, rounding, format and level.
fn is_the_reference<R: Sets>() {
    for isa in Isa::available() {
        for config in R::sets() {
            for states in [StateFormat::F32.into(), StateFormat::Bf16.into(), R::mixed()] {
                for (rounding, parameters) in
                    [(Rounding::Nearest, STOCHASTIC), (STOCHASTIC, Rounding::Nearest), (STOCHASTIC, STOCHASTIC)]
                {
                    let run = RunOf { config, n: 1061, steps: 3, states, rounding, parameters, isa };
                    compare::<R, f32, f32>(run);
                    compare::<R, f32, bf16>(run);
                    compare::<R, bf16, f32>(run);
                    compare::<R, bf16, bf16>(run);
                    compare::<R, f16, f16>(run);
                }
            }
        }
    }
    let config = R::sets()[0];
    for n in [0, 1, 3, 127, 128, 129, 511, 512, 513, 4095, 4096, 4097, 16_385] {
        for states in [StateFormat::Bf16.into(), R::mixed()] {
            let isa = Isa::best();
            let run = RunOf { config, n, steps: 2, states, rounding: STOCHASTIC, parameters: STOCHASTIC, isa };
            compare::<R, f32, f32>(run);
            compare::<R, bf16, bf16>(run);
        }
    }
}

/// Ranks of one process, each in a thread of its own.
#[derive(Clone)]
struct Ranks {
    count: usize,
    shared: std::sync::Arc<(std::sync::Mutex<Vec<ChunkSums>>, std::sync::Barrier)>,
}

impl Ranks {
    fn new(count: usize) -> Self {
        Self { count, shared: std::sync::Arc::new((Default::default(), std::sync::Barrier::new(count))) }
    }
}

impl Collective for Ranks {
    fn gather(&mut self, own: Vec<ChunkSums>) -> Result<Vec<ChunkSums>, OptimError> {
        let (all, barrier) = &*self.shared;
        all.lock().unwrap().extend(own);
        barrier.wait();
        let gathered = all.lock().unwrap().clone();
        barrier.wait();
        all.lock().unwrap().clear();
        barrier.wait();
        Ok(gathered)
    }
}

fn gradients(n: usize, seed: u64) -> Vec<f32> {
    let mut inputs = Inputs(seed);
    (0..n).map(|i| if i % 5 == 1 { 0.0 } else { inputs.next() as i32 as f32 * 1e-9 }).collect()
}

/// Two tensors in shards, one rank of which has nothing of the second, with a clip by the norm over all ranks.
fn shards_are_the_whole<R: Sets>(states: R::States) {
    let (config, lengths, steps) = (R::sets()[0], [20_000usize, 5000], 3);
    let control = |norm: f64| StepControl { clip: (0.5 / norm).min(1.0) as f32, ..StepControl::default() };
    let start =
        |which: usize| -> Vec<bf16> { gradients(lengths[which], 77).iter().map(|&x| bf16::from_f32(x)).collect() };
    let grads = |which: usize, t: u64| gradients(lengths[which], 10 * t + which as u64);
    let new = || Optimizer::new(config, states, STOCHASTIC).unwrap();

    let mut whole = new();
    let [mut a, mut b] = [0, 1].map(start);
    for t in 1..=steps {
        let g = [0, 1].map(|which| grads(which, t));
        let sums = [ChunkSums::of(1, &g[0]), ChunkSums::of(2, &g[1])];
        let norm = halfulp::optim::Alone.norm(sums).unwrap();
        let mut list = [Parameter::numbered(1, &mut a, &g[0]), Parameter::numbered(2, &mut b, &g[1])];
        let _ = whole.step_controlled(&control(norm.value()), &mut list).unwrap();
    }
    for cuts in [vec![0, 20_000], vec![0, 8192, 20_000], vec![0, 4096, 12_288, 20_000]] {
        let count = cuts.len() - 1;
        let ranks = Ranks::new(count);
        let parts: Vec<_> = std::thread::scope(|scope| {
            let run = |rank: usize| {
                let (own, mut ranks) = (cuts[rank]..cuts[rank + 1], ranks.clone());
                scope.spawn(move || {
                    assert_eq!(ranks.count, count);
                    let mut opt = new();
                    // The last rank has all of the second tensor.
                    let second = if rank == count - 1 { 0..5000 } else { 0..0 };
                    let [mut a, mut b] = [start(0)[own.clone()].to_vec(), start(1)[second.clone()].to_vec()];
                    for t in 1..=steps {
                        let g = [grads(0, t)[own.clone()].to_vec(), grads(1, t)[second.clone()].to_vec()];
                        let shard = |range: std::ops::Range<usize>, n: usize| {
                            halfulp::optim::Shard::new(range.start as u64..range.end as u64, n as u64).unwrap()
                        };
                        let sums = [
                            ChunkSums::of_shard(1, shard(own.clone(), 20_000), &g[0]).unwrap(),
                            ChunkSums::of_shard(2, shard(second.clone(), 5000), &g[1]).unwrap(),
                        ];
                        let norm = ranks.norm(sums).unwrap();
                        let mut list = [
                            Parameter::numbered(1, &mut a, &g[0]).part(own.start as u64, 20_000),
                            Parameter::numbered(2, &mut b, &g[1]).part(second.start as u64, 5000),
                        ];
                        let _ = opt.step_sharded(&control(norm.value()), &mut ranks, &mut list).unwrap();
                    }
                    let stored = |id| -> Vec<Vec<u32>> {
                        opt.stored(id).unwrap().iter().map(|state| bits(&state.to_f32())).collect()
                    };
                    (a, b, stored(1), stored(2))
                })
            };
            let threads: Vec<_> = (0..count).map(run).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let joined = |of: &dyn Fn(usize) -> Vec<bf16>| (0..count).flat_map(of).collect::<Vec<_>>();
        assert_eq!(joined(&|rank| parts[rank].0.clone()), a, "{cuts:?}");
        assert_eq!(joined(&|rank| parts[rank].1.clone()), b, "{cuts:?}");
        for (s, expected) in whole.stored(1).unwrap().iter().enumerate() {
            let got: Vec<u32> = (0..count).flat_map(|rank| parts[rank].2[s].clone()).collect();
            assert_eq!(got, bits(&expected.to_f32()), "state {s} {cuts:?}");
        }
        for (s, expected) in whole.stored(2).unwrap().iter().enumerate() {
            assert_eq!(parts[count - 1].3[s], bits(&expected.to_f32()), "state {s} {cuts:?}");
        }
    }
}

/// A clip of a half is half of the gradients; a step left out leaves everything; a reset makes a first step, but for the noise.
fn control_and_resets<R: Sets>(states: R::States) {
    let config = R::sets()[0];
    let new = || Optimizer::new(config, states, STOCHASTIC).unwrap();
    let g = gradients(1000, 5);
    let half: Vec<f32> = g.iter().map(|g| g / 2.0).collect();
    let (mut a, mut b) = (new(), new());
    let (mut p, mut q) = (vec![bf16::ONE; 1000], vec![bf16::ONE; 1000]);
    let control = StepControl { clip: 0.5, ..StepControl::default() };
    let _ = a.step_controlled(&control, &mut [Parameter::numbered(3, &mut p, &g)]).unwrap();
    b.step_tensors(&mut [Parameter::numbered(3, &mut q, &half)]).unwrap();
    assert_eq!((&p, a.stored(3)), (&q, b.stored(3)));

    let before = (p.clone(), format!("{a:?}"));
    let skip = StepControl { found_inf: true, ..control };
    let outcome = a.step_controlled(&skip, &mut [Parameter::numbered(3, &mut p, &g)]).unwrap();
    assert_eq!((outcome, (p.clone(), format!("{a:?}"))), (StepOutcome::Skipped, before));

    // In f32, where there is no noise, a step after a reset is that of a new optimizer.
    let (mut old, mut fresh) = [(); 2].map(|()| Optimizer::new(config, StateFormat::F32, STOCHASTIC).unwrap()).into();
    let mut w = vec![0.5f32; 1000];
    for t in 0..3 {
        old.step(&mut w, &gradients(1000, 20 + t)).unwrap();
    }
    assert!(old.reset(0, ResetMoments::All));
    assert_eq!((old.age(0), old.steps()), (0, 3));
    let mut again = w.clone();
    old.step(&mut w, &g).unwrap();
    fresh.step(&mut again, &g).unwrap();
    assert_eq!((w, old.stored(0)), (again, fresh.stored(0)));
}

/// What is counted within steps is what comparing states finds.
#[cfg(feature = "stall")]
fn meter_counts<R: Sets>(formats: &[R::States]) {
    use halfulp::random::Role;
    use halfulp::stall::Comparison;
    for &states in formats {
        for (grads_zero, params_bf16) in [(false, false), (true, true)] {
            let config = R::sets()[usize::from(grads_zero)];
            let new = || Optimizer::new(config, states, STOCHASTIC).unwrap();
            let (mut metered, mut plain) = (new().meter(true), new());
            let n = 1500;
            let (mut p, mut q) = (vec![1.0f32; n], vec![1.0f32; n]);
            let (mut p16, mut q16) = (vec![bf16::ONE; n], vec![bf16::ONE; n]);
            for t in 0..5u64 {
                let mut g = gradients(n, 100 + t);
                g[10] = if t == 3 { f32::NAN } else { 0.0 };
                let old: Vec<_> = metered.stored(0).map(<[_]>::to_vec).unwrap_or_default();
                if params_bf16 {
                    metered.step(&mut p16, &g).unwrap();
                    plain.step(&mut q16, &g).unwrap();
                } else {
                    metered.step(&mut p, &g).unwrap();
                    plain.step(&mut q, &g).unwrap();
                }
                let stored = metered.stored(0).unwrap();
                assert_eq!(
                    stored.iter().map(|s| bits(&s.to_f32())).collect::<Vec<_>>(),
                    plain.stored(0).unwrap().iter().map(|s| bits(&s.to_f32())).collect::<Vec<_>>()
                );
                assert!(plain.stalls(0).is_empty());
                if old.is_empty() {
                    continue;
                }
                let witness = R::ROLES.iter().position(|&role| role == Role::SecondMoment).unwrap_or(0);
                let counts = metered.stalls(0);
                assert_eq!(counts.len(), R::ROLES.len());
                for (s, counts) in counts.iter().enumerate() {
                    let comparison = Comparison::new(&old[s], &stored[s]).gradients(&g).second_moment(&old[witness]);
                    assert_eq!(*counts, comparison.count().unwrap(), "{states:?} state {s} step {t}");
                    // Coupled decay is a gradient, and a format without zero never was untouched.
                    let zero = stored[witness].to_f32().contains(&0.0);
                    assert!(counts.counted() > 0 && (counts.untouched > 0 || !zero));
                }
                let report = metered.stall_report();
                assert_eq!(report.len(), R::ROLES.len());
                assert_eq!(report[witness].counts, counts[witness]);
            }
            assert!(
                bits(&p) == bits(&q)
                    && bytemuck::cast_slice::<bf16, u16>(&p16) == bytemuck::cast_slice::<bf16, u16>(&q16)
            );
        }
    }
}

/// BF16 parameters with remainders are f32 parameters.
fn remainders_are_f32<R: Sets>(states: R::States) {
    let config = R::sets()[0];
    let group = ParameterGroup::new(config, states).remainder();
    let mut kept = Optimizer::with_group(group, STOCHASTIC).unwrap();
    let mut plain = Optimizer::new(config, states, STOCHASTIC).unwrap();
    let n = 5000;
    let mut p: Vec<bf16> = gradients(n, 9).iter().map(|&x| bf16::from_f32(x)).collect();
    let mut q: Vec<f32> = p.iter().map(|p| p.to_f32()).collect();
    for t in 0..4 {
        let g = gradients(n, 200 + t);
        kept.step(&mut p, &g).unwrap();
        plain.step(&mut q, &g).unwrap();
    }
    let joined = remainder::join_slices(&p, kept.rest(0).unwrap()).unwrap();
    assert_eq!(bits(&joined), bits(&q));
    assert!(p.iter().zip(&q).any(|(p, q)| p.to_f32() != *q), "f32 has more than BF16 does");
    assert_eq!(kept.bytes(), plain.bytes() + 2 * n);
    let refused = Optimizer::with_group(group, STOCHASTIC).unwrap().step(&mut q, &[0.0f32; 5000]).unwrap_err();
    assert!(refused.to_string().starts_with("remainder: not supported"), "{refused}");
}

/// Saved, loaded and gone on with is straight through.
#[cfg(feature = "checkpoint")]
fn resumed_is_straight_through<R: Sets>(states: R::States) {
    use halfulp::optim::checkpoint::{CheckpointError, load, restore, save};
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("opt");
    for config in R::sets() {
        for remainder in [false, true] {
            let mut group = ParameterGroup::new(config, states);
            group.remainder = remainder;
            let mut opt = Optimizer::with_group(group, STOCHASTIC).unwrap();
            save(&path, &opt, None).unwrap();
            let fresh = load::<R>(&path).unwrap().optimizer;
            assert_eq!(format!("{fresh:?}"), format!("{opt:?}"));
            let mut p = vec![bf16::ONE; 3001];
            let step = |opt: &mut Optimizer<R>, p: &mut Vec<bf16>, t: u64| {
                opt.step_tensors(&mut [Parameter::named("w", p, &gradients(3001, 300 + t))]).unwrap();
            };
            (0..3).for_each(|t| step(&mut opt, &mut p, t));
            save(&path, &opt, None).unwrap();
            let mut resumed: Optimizer<R> = load(&path).unwrap().optimizer;
            let mut q = p.clone();
            for t in 3..13 {
                step(&mut opt, &mut p, t);
                step(&mut resumed, &mut q, t);
            }
            assert_eq!(p, q);
            assert_eq!(format!("{resumed:?}"), format!("{opt:?}"));
            // Another optimizer's file.
            let error = if R::NAME == "lion" {
                load::<SgdConfig>(&path).map(drop)
            } else {
                load::<LionConfig>(&path).map(drop)
            };
            assert!(
                matches!(&error, Err(CheckpointError::Unknown { argument: "optimizer", got, .. }) if got == R::NAME),
                "{error:?}"
            );
            if remainder {
                let before = format!("{opt:?}");
                group.remainder = false;
                let mut other = Optimizer::with_group(group, STOCHASTIC).unwrap();
                other.step_tensors(&mut [Parameter::named("w", &mut q, &gradients(3001, 1))]).unwrap();
                let error = restore(&path, &mut other).unwrap_err();
                assert!(error.to_string().contains("remainder"), "{error}");
                assert_eq!(format!("{opt:?}"), before);
            }
        }
    }
}

macro_rules! optimizers {
    ($($name:ident: $config:ty;)*) => {$(
        mod $name {
            use super::*;
            type States = <$config as Rule>::States;

            fn formats() -> [States; 3] {
                [StateFormat::F32.into(), StateFormat::Bf16.into(), <$config as Sets>::mixed()]
            }
            #[test]
            fn is_the_reference() {
                super::is_the_reference::<$config>();
            }
            #[test]
            fn shards_are_the_whole() {
                formats().into_iter().for_each(super::shards_are_the_whole::<$config>);
            }
            #[test]
            fn control_and_resets() {
                formats().into_iter().for_each(super::control_and_resets::<$config>);
            }
            #[cfg(feature = "stall")]
            #[test]
            fn meter_counts() {
                super::meter_counts::<$config>(&formats());
            }
            #[test]
            fn remainders_are_f32() {
                formats().into_iter().for_each(super::remainders_are_f32::<$config>);
            }
            #[cfg(feature = "checkpoint")]
            #[test]
            fn resumed_is_straight_through() {
                formats().into_iter().for_each(super::resumed_is_straight_through::<$config>);
            }
        }
    )*};
}

optimizers! {
    adamw: AdamWConfig;
    adam: AdamConfig;
    sgd: SgdConfig;
    lion: LionConfig;
    ademamix: AdEMAMixConfig;
    lamb: LambConfig;
}

/// The gradient of tests/golden/optimizers.tsv.
fn golden_gradient(kind: &str, t: u32, i: u32) -> f32 {
    match kind {
        "one" => return 1.0,
        "zero" => return 0.0,
        _ => {}
    }
    let mut x = 64 * t + i;
    x = (x ^ x >> 16).wrapping_mul(0x7FEB_352D);
    x = (x ^ x >> 15).wrapping_mul(0x846C_A68B);
    x ^= x >> 16;
    if i == 7 || x >> 29 == 0 {
        return 0.0;
    }
    let e = [5, -8, -18, -30].get(i.wrapping_sub(8) as usize).copied().unwrap_or(0);
    let negative = (i % 2 == 1) != (x >> 8 & 3 == 0);
    let magnitude = ((x & 15) + 1) as f32 * f32::powi(2.0, e - 4 - (x >> 4 & 7) as i32);
    if negative { -magnitude } else { magnitude }
}

/// A row: hyper-parameters by name, and columns.
struct Row<'a> {
    hyper: BTreeMap<&'a str, &'a str>,
    columns: Vec<&'a str>,
}

impl Row<'_> {
    fn number(&self, name: &str) -> f64 {
        self.hyper[name].parse().unwrap()
    }
    fn flag(&self, name: &str) -> bool {
        self.number(name) == 1.0
    }
    fn list(&self, column: usize) -> Vec<f64> {
        self.columns[column].split(' ').filter(|x| *x != "-").map(|x| x.parse().unwrap()).collect()
    }

    /// Runs in f32, and holds it to the row.
    fn compare<R: Rule>(&self, config: R) -> f64 {
        let mut opt = Optimizer::new(config, StateFormat::F32, Rounding::Nearest).unwrap();
        let mut p: Vec<f32> = self.list(5).into_iter().map(|x| x as f32).collect();
        for t in 1..=self.columns[3].parse().unwrap() {
            let g: Vec<f32> = (0..p.len()).map(|i| golden_gradient(self.columns[4], t, i as u32)).collect();
            opt.step(&mut p, &g).unwrap();
        }
        let mut worst = 0.0f64;
        let mut see = |got: &[f32], expected: &[f64]| {
            for (&got, &expected) in got.iter().zip(expected) {
                worst = worst.max((f64::from(got) - expected).abs() / expected.abs().max(1.0));
            }
        };
        see(&p, &self.list(6));
        for (s, state) in opt.stored(0).unwrap().iter().enumerate() {
            if self.hyper.get("momentum") != Some(&"0") {
                see(&state.to_f32(), &self.list(7 + s));
            }
        }
        assert!(worst < 1e-5, "{} {}: {worst:e}", self.columns[1], self.columns[0]);
        worst
    }
}

/// Independent references in f64, which agree with the peers that there are (`tests/oracles/optimizers.py`). Wrong orders of decay
/// and wrong variants are off by more than 1e-3 in at least one row each.
#[test]
fn agree_with_f64() {
    let mut seen = BTreeMap::new();
    for line in include_str!("golden/optimizers.tsv").lines().filter(|line| !line.starts_with(['#', 'c'])) {
        let columns: Vec<&str> = line.split('\t').collect();
        let hyper = columns[2].split(' ').map(|field| field.split_once('=').unwrap()).collect();
        let row = Row { hyper, columns };
        let (lr, weight_decay) = (row.number("lr"), row.number("weight_decay"));
        let (maximize, skip_zeros) = (row.flag("maximize"), row.flag("skip_zeros"));
        let betas = || (row.number("beta1"), row.number("beta2"));
        let worst = match row.columns[1] {
            "adamw" => {
                let ((beta1, beta2), eps) = (betas(), row.number("eps"));
                let amsgrad = false;
                row.compare(AdamWConfig { lr, beta1, beta2, eps, weight_decay, maximize, skip_zeros, amsgrad })
            }
            "adam" => {
                let ((beta1, beta2), eps) = (betas(), row.number("eps"));
                let amsgrad = false;
                row.compare(AdamConfig { lr, beta1, beta2, eps, weight_decay, maximize, skip_zeros, amsgrad })
            }
            "sgd" => row.compare(SgdConfig {
                lr,
                momentum: row.number("momentum"),
                dampening: row.number("dampening"),
                nesterov: row.flag("nesterov"),
                decoupled: row.hyper["decay"] == "decoupled",
                weight_decay,
                maximize,
                skip_zeros,
            }),
            "lion" => {
                let (beta1, beta2) = betas();
                row.compare(LionConfig { lr, beta1, beta2, weight_decay, maximize, skip_zeros })
            }
            "ademamix" => {
                let ((beta1, beta2), eps) = (betas(), row.number("eps"));
                row.compare(AdEMAMixConfig {
                    lr,
                    beta1,
                    beta2,
                    beta3: row.number("beta3"),
                    alpha: row.number("alpha"),
                    alpha_steps: row.number("t_alpha") as u64,
                    beta3_steps: row.number("t_beta3") as u64,
                    eps,
                    weight_decay,
                    maximize,
                    skip_zeros,
                })
            }
            // A decay outside of the update is not this crate's.
            "lamb" if row.hyper["decay"] == "decoupled" => continue,
            "lamb" => {
                let ((beta1, beta2), eps) = (betas(), row.number("eps"));
                row.compare(LambConfig {
                    lr,
                    beta1,
                    beta2,
                    eps,
                    weight_decay,
                    max_trust: row.number("max_trust"),
                    max_unorm: Some(row.number("max_unorm")).filter(|&max_unorm| max_unorm > 0.0),
                    maximize,
                    skip_zeros,
                })
            }
            other => panic!("{other}"),
        };
        let (count, largest) = seen.entry(row.columns[1].to_string()).or_insert((0, 0.0f64));
        *count += 1;
        *largest = largest.max(worst);
    }
    println!("rows and largest differences: {seen:?}");
    assert_eq!(seen.len(), 6);
    assert!(seen.values().all(|&(count, _)| count >= 10), "{seen:?}");
}

/// One step from zero states at `lr = wd = .1`, for every format, which holds these moments exactly: the order of the decay.
#[test]
fn one_step_in_every_format() {
    let formats = [StateFormat::F32, StateFormat::Bf16, StateFormat::E4M3, StateFormat::E5M2];
    let seconds = [StateFormat::UE4M4, StateFormat::UE5M3, StateFormat::UE2M2NZ];
    let pairs = formats.map(States::from).into_iter().chain(seconds.map(|v| States { m: StateFormat::E4M3, v }));
    for states in pairs.chain([States::FP4]) {
        for g in [1.0f32, -1.0, 1e-3, 1e3] {
            let step = |p: [f32; 1]| p[0];
            let mut p = [1.0f32];
            let config = AdamWConfig { lr: 0.1, weight_decay: 0.1, ..AdamWConfig::default() };
            AdamW::new(config, states, STOCHASTIC).unwrap().step(&mut p, &[g]).unwrap();
            assert!((step(p) - (0.99 - 0.1 * g.signum())).abs() < 2e-6, "adamw {states} {g}: {p:?}");

            p = [1.0];
            let config = AdamConfig { lr: 0.1, weight_decay: 0.1, ..AdamConfig::default() };
            Adam::new(config, states, STOCHASTIC).unwrap().step(&mut p, &[g]).unwrap();
            let sign = (g + 0.1).signum(); // of the gradient with its decay
            assert!((step(p) - (1.0 - 0.1 * sign)).abs() < 2e-6, "adam {states} {g}: {p:?}");

            p = [1.0];
            let config = AdEMAMixConfig { lr: 0.1, weight_decay: 0.1, ..AdEMAMixConfig::default() };
            AdEMAMix::new(config, states, STOCHASTIC).unwrap().step(&mut p, &[g]).unwrap();
            let u = (1.0 + 5.0 * 1e-4) * g.signum();
            assert!((step(p) - (0.99 - 0.1 * u)).abs() < 2e-6, "ademamix {states} {g}: {p:?}");

            p = [1.0];
            let config = LambConfig { lr: 0.1, weight_decay: 0.1, max_trust: 0.5, ..LambConfig::default() };
            Lamb::new(config, states, STOCHASTIC).unwrap().step(&mut p, &[g]).unwrap();
            let u = g.signum() * f64::from(g.abs() / (g.abs() + 1e-6)) as f32 + 0.1;
            let expected = 1.0 - 0.1 * f32::min(0.5, 1.0 / u.abs()) * u;
            assert!((step(p) - expected).abs() < 2e-6, "lamb {states} {g}: {p:?}, {expected}");
        }
        for g in [1.0f32, -1.0] {
            let mut p = [1.0f32];
            let config = SgdConfig { lr: 0.1, weight_decay: 0.1, decoupled: true, ..SgdConfig::default() };
            Sgd::new(config, states.m, STOCHASTIC).unwrap().step(&mut p, &[g]).unwrap();
            assert!((p[0] - (0.99 - 0.1 * g)).abs() < 2e-6, "sgd {states} {g}: {p:?}");
            p = [1.0];
            let config = LionConfig { lr: 0.1, weight_decay: 0.1, ..LionConfig::default() };
            Lion::new(config, states.m, STOCHASTIC).unwrap().step(&mut p, &[g]).unwrap();
            assert!((p[0] - (0.99 - 0.1 * g)).abs() < 2e-6, "lion {states} {g}: {p:?}");
        }
    }
}

/// The norms of LAMB, twenty times with any number of threads: the case that failed elsewhere.
#[test]
fn lamb_norms_are_the_same_in_every_run() {
    let n = 65_536;
    let config = LambConfig { lr: 0.01, ..LambConfig::default() };
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let mut opt = Lamb::new(config, StateFormat::F32, Rounding::Nearest).unwrap();
            let mut p: Vec<f16> = gradients(n, 1).into_iter().map(f16::from_f32).collect();
            let mut looks = Vec::new();
            for t in 1..=10 {
                let g: Vec<f16> = gradients(n, 40 + t).into_iter().map(f16::from_f32).collect();
                opt.step(&mut p, &g).unwrap();
                if t == 1 || t == 10 {
                    looks.push((p.clone(), opt.stored(0).unwrap().to_vec()));
                }
            }
            looks
        })
    };
    let first = run(1);
    assert!((0..20).all(|i| run(1 + i % 3) == first));
    // A sum of squares in another order has other bits.
    let p: Vec<f64> = gradients(n, 1).into_iter().map(f64::from).collect();
    let in_turn = p.iter().map(|x| x * x).sum::<f64>().sqrt();
    assert_ne!(norm(p.iter().copied()).to_bits(), in_turn.to_bits());
}

/// A part alone is refused where the rule goes by the norm of the whole, and changes nothing.
#[test]
fn lamb_refuses_a_part_alone() {
    let mut opt = Lamb::new(LambConfig::default(), StateFormat::Bf16, STOCHASTIC).unwrap();
    let mut p = vec![1.0f32; 4096];
    let before = format!("{opt:?}");
    let error = opt.step_tensors(&mut [Parameter::numbered(5, &mut p, &[1.0f32; 4096]).part(0, 8192)]).unwrap_err();
    assert!(matches!(error, OptimError::Norm(_)), "{error}");
    assert_eq!((format!("{opt:?}"), p), (before, vec![1.0; 4096]));
    /// Other ranks that do not answer.
    struct Silent;
    impl Collective for Silent {
        fn gather(&mut self, _: Vec<ChunkSums>) -> Result<Vec<ChunkSums>, OptimError> {
            Err(OptimError::collective("rank 1: connection lost"))
        }
    }
    let before = format!("{opt:?}");
    let mut p = vec![1.0f32; 10];
    let list = &mut [Parameter::numbered(5, &mut p, &[1.0f32; 10])];
    let error = opt.step_sharded(&StepControl::default(), &mut Silent, list).unwrap_err();
    assert_eq!(error.to_string(), "collective: rank 1: connection lost");
    assert_eq!((format!("{opt:?}"), p), (before, vec![1.0; 10]));
}

/// Every hyper-parameter out of its range is named.
#[test]
fn hyper_parameters_are_checked() {
    fn refused(error: Result<(), OptimError>, name: &str) {
        let error = error.unwrap_err().to_string();
        assert!(error.starts_with(&format!("{name}: ")), "{name}: {error}");
    }
    for bad in [f64::NAN, f64::INFINITY, -1.0, 1e39] {
        refused(Rule::check(&AdamConfig { lr: bad, ..Default::default() }), "lr");
        refused(SgdConfig { lr: bad, ..Default::default() }.check(), "lr");
        refused(LionConfig { lr: bad, ..Default::default() }.check(), "lr");
        refused(AdEMAMixConfig { lr: bad, ..Default::default() }.check(), "lr");
        refused(LambConfig { lr: bad, ..Default::default() }.check(), "lr");
        refused(AdamConfig { weight_decay: bad, ..Default::default() }.check(), "weight_decay");
        refused(SgdConfig { weight_decay: bad, ..Default::default() }.check(), "weight_decay");
        refused(AdEMAMixConfig { alpha: bad, ..Default::default() }.check(), "alpha");
        refused(LambConfig { max_trust: bad, ..Default::default() }.check(), "max_trust");
        refused(LambConfig { max_unorm: Some(bad), ..Default::default() }.check(), "max_unorm");
    }
    for bad in [f64::NAN, 1.0, -0.1, 2.0] {
        refused(AdamConfig { beta1: bad, ..Default::default() }.check(), "beta1");
        refused(SgdConfig { momentum: bad, ..Default::default() }.check(), "momentum");
        refused(LionConfig { beta2: bad, ..Default::default() }.check(), "beta2");
        refused(AdEMAMixConfig { beta3: bad, ..Default::default() }.check(), "beta3");
        refused(LambConfig { beta2: bad, ..Default::default() }.check(), "beta2");
    }
    for eps in [0.0, 1e-60, f64::NAN, f64::INFINITY] {
        refused(AdamConfig { eps, ..Default::default() }.check(), "eps");
        refused(AdEMAMixConfig { eps, ..Default::default() }.check(), "eps");
        refused(LambConfig { eps, ..Default::default() }.check(), "eps");
    }
    refused(SgdConfig { dampening: 1.5, ..Default::default() }.check(), "dampening");
    refused(SgdConfig { dampening: 0.5, momentum: 0.0, ..Default::default() }.check(), "dampening");
    refused(SgdConfig { dampening: 0.5, nesterov: true, ..Default::default() }.check(), "nesterov");
    refused(SgdConfig { momentum: 0.0, nesterov: true, ..Default::default() }.check(), "nesterov");
    refused(AdamConfig { amsgrad: true, ..Default::default() }.check(), "amsgrad");
    // A first moment has both signs, and a momentum is one.
    for v in [StateFormat::UE4M4, StateFormat::UE5M3, StateFormat::UE2M2NZ] {
        refused(Sgd::new(SgdConfig::default(), v, STOCHASTIC).map(drop), "m");
        refused(Lion::new(LionConfig::default(), v, STOCHASTIC).map(drop), "m");
        let states = MixStates { slow: v, ..MIXED.into() };
        refused(AdEMAMix::new(AdEMAMixConfig::default(), states, STOCHASTIC).map(drop), "slow");
    }
    refused(Lamb::new(LambConfig::default(), StateFormat::E2M1, STOCHASTIC).map(drop), "v");
}
