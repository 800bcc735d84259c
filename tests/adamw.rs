//! AdamW on the CPU: the written arithmetic element by element, every dtype, rounding, level and cut; closed forms; f64.
#![cfg(feature = "std")]

mod common;

use common::reference::{Run, bits};
use common::{Inputs, gradient};
use halfulp::optim::{AdamW, AdamWConfig, Moment, OptimError, Parameter, Rounding, ShardError, StateFormat};
use halfulp::random::sr_states_hash;
use halfulp::{Element, Format, Isa, bf16, f16};
use rayon::prelude::*;

fn compare<P: common::reference::Value, G: common::reference::Value>(
    n: usize,
    steps: u64,
    format: StateFormat,
    states: Rounding,
    parameters: Rounding,
    weight_decay: f64,
    isa: Isa,
) {
    let mut inputs = Inputs(n as u64);
    Run { n, steps, states: format.into(), rounding: states, parameters, weight_decay, isa }
        .compare::<P, G>(|_, _| gradient(&mut inputs));
}

const STATES: [(StateFormat, Rounding); 4] = [
    (StateFormat::F32, Rounding::Nearest),
    (StateFormat::Bf16, Rounding::Nearest),
    (StateFormat::Bf16, Rounding::Stochastic { seed: 42 }),
    (StateFormat::Bf16, Rounding::SrStates { seed: 7 }),
];

#[test]
fn every_dtype_and_rounding_is_the_reference() {
    for isa in Isa::available() {
        for (format, states) in STATES {
            for parameters in [Rounding::Nearest, Rounding::stochastic(3)] {
                for decay in [0.0, 0.1] {
                    let n = 1537;
                    compare::<f32, f32>(n, 3, format, states, parameters, decay, isa);
                    compare::<f32, bf16>(n, 3, format, states, parameters, decay, isa);
                    compare::<f32, f16>(n, 3, format, states, parameters, decay, isa);
                    compare::<bf16, f32>(n, 3, format, states, parameters, decay, isa);
                    compare::<bf16, bf16>(n, 3, format, states, parameters, decay, isa);
                    compare::<bf16, f16>(n, 3, format, states, parameters, decay, isa);
                    compare::<f16, f32>(n, 3, format, states, parameters, decay, isa);
                    compare::<f16, bf16>(n, 3, format, states, parameters, decay, isa);
                    compare::<f16, f16>(n, 3, format, states, parameters, decay, isa);
                }
            }
        }
    }
}

#[test]
fn every_length_is_the_reference() {
    let r = Rounding::stochastic(1);
    for n in [0, 1, 3, 127, 128, 129, 511, 512, 513, 4095, 4097, 16_383, 16_384, 16_385, 65_537] {
        compare::<f32, f32>(n, 2, StateFormat::Bf16, r, r, 0.1, Isa::best());
        compare::<bf16, bf16>(n, 2, StateFormat::Bf16, r, r, 0.1, Isa::best());
    }
    compare::<f32, f32>(257, 1000, StateFormat::Bf16, r, r, 0.1, Isa::best());
}

/// Shards of a tensor, on optimizers of their own, get the bits of the whole under stream 1 and in the layout of `sr-states`.
#[test]
fn parts_are_the_whole() {
    let n = 40_000;
    let mut inputs = Inputs(8);
    let p: Vec<bf16> = (0..n).map(|_| bf16::from_f32(inputs.next() as i32 as f32 * 1e-9)).collect();
    let g: Vec<f32> = (0..n).map(|_| gradient(&mut inputs)).collect();
    let id = halfulp::random::tensor_id("w");
    for (format, states) in STATES {
        let run = |first: usize, end: usize| {
            let mut opt = AdamW::new(AdamWConfig::default(), format, states).unwrap();
            let (mut p, g) = (p[first..end].to_vec(), &g[first..end]);
            for _ in 0..3 {
                opt.step_tensors(&mut [Parameter::named("w", &mut p, g).part(first as u64, n as u64)]).unwrap();
            }
            let (m, v) = opt.moments(id).unwrap();
            (bytemuck::cast_slice::<bf16, u16>(&p).to_vec(), bits(&m.to_f32()), bits(&v.to_f32()))
        };
        let (whole_p, whole_m, whole_v) = run(0, n);
        for (first, end) in [(0, 4096), (4096, 36_864), (36_864, n), (n, n)] {
            let (p, m, v) = run(first, end);
            assert!(
                p == whole_p[first..end] && m == whole_m[first..end] && v == whole_v[first..end],
                "{states:?} {first}"
            );
        }
    }
    let mut opt = AdamW::new(AdamWConfig::default(), StateFormat::Bf16, Rounding::Nearest).unwrap();
    let (mut p, g) = (vec![1f32; 4096], vec![1f32; 4096]);
    let mut step = |first, whole| opt.step_tensors(&mut [Parameter::named("w", &mut p, &g).part(first, whole)]);
    let mut cut = |first, whole| match step(first, whole) {
        Err(OptimError::Cut { tensor, source }) if tensor == "`w`" => source,
        other => panic!("{other:?}"),
    };
    assert_eq!(cut(4, 9000), ShardError::Cut { argument: "start", below: 0, above: 4096, got: 4 });
    assert_eq!(cut(4096, 8000), ShardError::Range { total: 8000, start: 4096, end: 8192 });
    step(4096, 9000).unwrap();
    assert_eq!(
        step(0, 9000).unwrap_err().to_string(),
        "part of tensor `w`: expected element 4096 first, as in the steps before, got 0"
    );
}

/// The layout of `sr-states`: within a step, and over tensors and steps, first moments draw at `offset + i`, second ones at
/// `offset + n + i`, and the offset moves on by `2n`.
#[test]
fn counters_of_sr_states() {
    let config = AdamWConfig::default();
    let seed = 123;
    let mut opt = AdamW::new(config, StateFormat::Bf16, Rounding::SrStates { seed }).unwrap();
    let lengths = [1000usize, 37];
    let grads = lengths.map(|n| (0..n).map(|i| (i as f32 * 0.7).sin()).collect::<Vec<_>>());
    let mut params = lengths.map(|n| vec![1f32; n]);
    let mut moments = lengths.map(|n| [vec![0f32; n], vec![0f32; n]]);
    let mut offset = 0u32;
    for t in 1..=3 {
        let mut list: Vec<_> =
            (0u64..).zip(&mut params).zip(&grads).map(|((id, p), g)| Parameter::numbered(id, p, g)).collect();
        opt.step_tensors(&mut list).unwrap();
        let scalars = config.scalars(t).unwrap();
        for (id, [m, v]) in moments.iter_mut().enumerate() {
            let n = lengths[id] as u32;
            for i in 0..n {
                let at = i as usize;
                let [_, new_m, new_v] = scalars.step(0.0, grads[id][at], m[at], v[at]);
                let stored = |x: f32, counter: u32| {
                    let word = sr_states_hash(counter.wrapping_add(seed as u32));
                    f32::from_bits((x.to_bits() + (word & 0xFFFF)) & 0xFFFF_0000)
                };
                (m[at], v[at]) = (stored(new_m, offset + i), stored(new_v, offset + n + i));
            }
            offset += 2 * n;
            let (got_m, got_v) = opt.moments(id as u64).unwrap();
            assert_eq!((bits(&got_m.to_f32()), bits(&got_v.to_f32())), (bits(m), bits(v)), "tensor {id}, step {t}");
        }
    }
}

/// The share of second moments that never moved under updates of .002 ulp: 16 runs of 4096 elements of a tensor of 2^24, as
/// shards on optimizers of their own. Independent draws leave (1 - p)^t of them; the hash of `sr-states`, whose counters are
/// back after 128 steps of so many elements, leaves (1 - p)^128 for ever.
#[test]
fn small_updates_arrive_everywhere() {
    let whole = 1u64 << 24;
    let (runs, length) = (16u64, 4096usize);
    let base = AdamWConfig { lr: 0.0, beta1: 0.0, beta2: 0.0, weight_decay: 0.0, ..AdamWConfig::default() };
    // Moments of 1 after a first step, and from then on second moments that grow by .001 (g^2 - 1) of 2^-7.
    let config = AdamWConfig { beta1: 0.9, beta2: 0.999, ..base };
    let g = (1.0f64 + 0.002 / 128.0 / 0.001).sqrt() as f32;
    let [_, _, v] = config.scalars(2).unwrap().step(0.0, g, 1.0, 1.0);
    let up = f64::from(v.to_bits() & 0xFFFF) / 65_536.0;
    assert!((up - 0.002).abs() < 2e-5);
    let checkpoints = [100, 1000, 10_000];
    let never_moved = |rounding| {
        let shares = (0..runs).into_par_iter().map(|run| {
            let mut opt = AdamW::new(base, StateFormat::Bf16, rounding).unwrap();
            let mut p = vec![0f32; length];
            let mut step = |opt: &mut AdamW, g: &[f32]| {
                opt.step_tensors(&mut [Parameter::numbered(3, &mut p, g).part(run * (whole / runs), whole)]).unwrap();
            };
            step(&mut opt, &vec![1.0; length]);
            opt.set_config(config).unwrap();
            let grads = vec![g; length];
            let mut done = 0;
            checkpoints.map(|steps| {
                (done..steps).for_each(|_| step(&mut opt, &grads));
                done = steps;
                let Some((_, Moment::Bf16(v))) = opt.moments(3) else { panic!("moments are in BF16") };
                v.iter().filter(|&&v| v == bf16::ONE).count()
            })
        });
        shares.reduce(|| [0; 3], |a, b| [a[0] + b[0], a[1] + b[1], a[2] + b[2]])
    };
    let n = runs as f64 * length as f64;
    for (t, count) in checkpoints.into_iter().zip(never_moved(Rounding::stochastic(7))) {
        let expected = (1.0 - up).powi(t);
        let bound = 5.0 * (n * expected * (1.0 - expected)).sqrt();
        assert!(
            (count as f64 - n * expected).abs() <= bound,
            "{count} of {n} never moved in {t} steps, expected {}",
            n * expected
        );
    }
    let left = never_moved(Rounding::SrStates { seed: 7 })[2] as f64 / n;
    assert!((left - (1.0 - up).powi(128)).abs() < 0.01, "{left} never moved");
}

/// torch.optim.AdamW, recorded by tests/oracles/adamw.py: five default steps with f32 states.
#[test]
fn torch_agrees() {
    let record = include_str!("data/adamw_torch.tsv");
    let rows: Vec<Vec<f32>> = record
        .lines()
        .skip(2)
        .map(|row| row.split('\t').map(|bits| f32::from_bits(u32::from_str_radix(bits, 16).unwrap())).collect())
        .collect();
    let column = |c: usize| rows.iter().map(|row| row[c]).collect::<Vec<_>>();
    let run = |config| {
        let mut opt = AdamW::new(config, StateFormat::F32, Rounding::Nearest).unwrap();
        let mut p = column(0);
        for t in 1..=5 {
            opt.step(&mut p, &column(t)).unwrap();
        }
        let (m, v) = opt.moments(0).unwrap();
        [p, m.to_f32(), v.to_f32()]
    };
    // Where a moment is next to 0 the relative error says nothing: sums of gradients of either sign.
    let far = |got: &[f32], expected: &[f32], absolute: f32| {
        got.iter()
            .zip(expected)
            .filter(|&(got, expected)| (got - expected).abs() > 2e-6 * expected.abs() + absolute)
            .count()
    };
    let [p, m, v] = run(AdamWConfig::default());
    assert_eq!(rows.len(), 256);
    assert_eq!(far(&p, &column(6), 2e-7), 0);
    assert_eq!((far(&m, &column(7), 2e-7), far(&v, &column(8), 0.0)), (0, 0));
    // Without decay, and with another memory of gradients, most are far.
    let [without, ..] = run(AdamWConfig { weight_decay: 0.0, ..AdamWConfig::default() });
    assert!(far(&without, &column(6), 2e-7) > 200);
    let [other, ..] = run(AdamWConfig { beta1: 0.89, ..AdamWConfig::default() });
    assert!(far(&other, &column(6), 2e-7) > 100);
}

#[test]
fn threads_and_order_change_nothing() {
    let run = |threads, swap: bool| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let mut opt = AdamW::new(AdamWConfig::default(), StateFormat::Bf16, Rounding::stochastic(5)).unwrap();
            let (mut a, mut b) =
                (vec![1f32; 100_000], vec![bf16::ONE; 70_001].iter().map(|x| x.to_f32()).collect::<Vec<_>>());
            let (ga, gb) = (vec![0.3f32; 100_000], vec![-0.7f32; 70_001]);
            for _ in 0..2 {
                let mut list = [Parameter::named("a", &mut a, &ga), Parameter::named("b", &mut b, &gb)];
                if swap {
                    list.reverse();
                }
                opt.step_tensors(&mut list).unwrap();
            }
            (bits(&a), bits(&b), opt.moments(halfulp::random::tensor_id("b")).unwrap().1.clone())
        })
    };
    let one = run(1, false);
    assert_eq!(one, run(2, false));
    assert_eq!(one, run(3, true));
}

fn one_step(config: AdamWConfig, p: f32, g: f32) -> (f32, f32, f32) {
    let mut opt = AdamW::new(config, StateFormat::F32, Rounding::Nearest).unwrap();
    let mut p = [p];
    opt.step(&mut p, &[g]).unwrap();
    let (m, v) = opt.moments(0).unwrap();
    (p[0], m.to_f32()[0], v.to_f32()[0])
}

/// D1, D2, D10, D11, D17: the decay acts on the old parameter with the raw learning rate; scalars are not rounded twice.
#[test]
fn closed_forms() {
    let config = AdamWConfig { lr: 0.1, weight_decay: 0.1, ..AdamWConfig::default() };
    let (p, m, v) = one_step(config, 1.0, 1.0);
    assert!((p - 0.89).abs() <= f32::EPSILON / 2.0, "the wrong order of decay gives 0.891, this {p}");
    assert!((m - 0.1).abs() < 1e-8 && (v - 1e-3).abs() < 1e-7);
    assert_eq!(one_step(config, 1.0, 0.0), (0.99, 0.0, 0.0));
    assert_eq!(one_step(AdamWConfig { weight_decay: 0.0, ..config }, 1.0, 0.0), (1.0, 0.0, 0.0));
    let up = one_step(AdamWConfig { maximize: true, weight_decay: 0.0, ..config }, 1.0, 1.0).0;
    assert!((up - 1.1).abs() < 1e-6);
    let (_, _, v) = one_step(config, 1.0, 1e-20);
    assert!(v > 0.0 && v < f32::MIN_POSITIVE, "subnormals are kept");
    let corrections = |t| config.scalars(t).unwrap().root_correction;
    assert!((f64::from(corrections(1)) - 1.0 / 1e-3f64.sqrt()).abs() < 2e-6);
    assert_eq!(corrections(1_000_000), 1.0);
    assert!((1..5000).all(|t| corrections(t) >= corrections(t + 1)));
}

/// A double-precision AdamW, with the decay before or after the update.
fn double(n: usize, steps: u64, decay_first: bool, config: AdamWConfig, g: impl Fn(u64, usize) -> f64) -> Vec<f64> {
    let (mut p, mut m, mut v) = (vec![1.0f64; n], vec![0.0f64; n], vec![0.0f64; n]);
    for t in 1..=steps {
        for i in 0..n {
            let g = g(t, i);
            m[i] = config.beta1 * m[i] + (1.0 - config.beta1) * g;
            v[i] = config.beta2 * v[i] + (1.0 - config.beta2) * g * g;
            let m_hat = m[i] / (1.0 - config.beta1.powi(t as i32));
            let v_hat = v[i] / (1.0 - config.beta2.powi(t as i32));
            let update = config.lr * m_hat / (v_hat.sqrt() + config.eps);
            let keep = 1.0 - config.lr * config.weight_decay;
            p[i] = if decay_first { p[i] * keep - update } else { (p[i] - update) * keep };
        }
    }
    p
}

#[test]
fn hundred_steps_of_double_precision() {
    let config = AdamWConfig { lr: 0.1, weight_decay: 0.1, ..AdamWConfig::default() };
    let n = 1000;
    let g = |t: u64, i: usize| f64::from(((t as f64 * 0.7 + i as f64 * 1.3).sin() + 0.2) as f32);
    let mut opt = AdamW::new(config, StateFormat::F32, Rounding::Nearest).unwrap();
    let mut p = vec![1f32; n];
    for t in 1..=100 {
        let grads: Vec<f32> = (0..n).map(|i| g(t, i) as f32).collect();
        opt.step(&mut p, &grads).unwrap();
    }
    let right = double(n, 100, true, config, g);
    let wrong = double(n, 100, false, config, g);
    let far = |q: &[f64], bound: f64| p.iter().zip(q).filter(|(p, q)| (f64::from(**p) - **q).abs() > bound).count();
    assert_eq!(far(&right, 1e-5), 0);
    assert!(far(&wrong, 1e-3) > n / 2);
}

fn mean(x: &[f32]) -> f64 {
    x.iter().map(|&x| f64::from(x)).sum::<f64>() / x.len() as f64
}

/// D6: v = 1 and no gradient, 1000 steps: nearest BF16 never moves, stochastic follows b2^1000 = .3677.
#[test]
fn a_second_moment_that_must_fall() {
    let n = 100_000;
    let run = |rounding| {
        let config = AdamWConfig { lr: 0.0, ..AdamWConfig::default() };
        let mut opt = AdamW::new(config, StateFormat::Bf16, rounding).unwrap();
        // One step with g^2 = 1000 makes v = 1.
        let (mut p, g) = (vec![0f32; n], vec![1000f32.sqrt(); n]);
        opt.step(&mut p, &g).unwrap();
        let zero = vec![0f32; n];
        for _ in 0..1000 {
            opt.step(&mut p, &zero).unwrap();
        }
        opt.moments(0).unwrap().1.to_f32()
    };
    assert!(run(Rounding::Nearest).iter().all(|&v| v == 1.0));
    assert!((mean(&run(Rounding::stochastic(7))) - 0.3677).abs() < 4e-4);
}

/// D4, D5: BF16 parameters under small decay and small updates.
#[test]
fn parameters_that_must_move() {
    let n = 100_000;
    let run = |rounding, lr, weight_decay, g: f32, steps| {
        let config = AdamWConfig { lr, weight_decay, ..AdamWConfig::default() };
        let mut opt = AdamW::new(config, StateFormat::F32, rounding).unwrap();
        let (mut p, g) = (vec![bf16::ONE; n], vec![g; n]);
        for _ in 0..steps {
            opt.step(&mut p, &g).unwrap();
        }
        p.iter().map(|p| p.to_f32()).collect::<Vec<_>>()
    };
    // The smallest value below 1 is 1 - 2^-8; an update of 6e-4 is a sixth of that.
    assert!(run(Rounding::Nearest, 6e-4, 0.0, 1.0, 100).iter().all(|&p| p == 1.0));
    assert!((mean(&run(Rounding::stochastic(7), 6e-4, 0.0, 1.0, 100)) - 0.94).abs() < 5e-4);
    assert!(run(Rounding::Nearest, 1e-3, 0.01, 0.0, 1000).iter().all(|&p| p == 1.0));
}

/// A decay of 1e-5 a step for 10,000 steps: .904834 by the arithmetic of the step, 1 to nearest.
#[test]
fn slow_decay() {
    let n = 100_000;
    let run = |rounding, n| {
        let config = AdamWConfig { weight_decay: 0.01, ..AdamWConfig::default() };
        let mut opt = AdamW::new(config, StateFormat::Bf16, rounding).unwrap();
        let (mut p, g) = (vec![bf16::ONE; n], vec![bf16::ZERO; n]);
        for _ in 0..10_000 {
            opt.step(&mut p, &g).unwrap();
        }
        p.iter().map(|p| p.to_f32()).collect::<Vec<_>>()
    };
    assert!(run(Rounding::Nearest, 100).iter().all(|&p| p == 1.0));
    let mean = mean(&run(Rounding::stochastic(7), n));
    assert!((mean - 0.904_834).abs() < 3e-4, "{mean}");
}

#[test]
fn refusals() {
    let refused =
        |config: AdamWConfig| AdamW::new(config, StateFormat::Bf16, Rounding::Nearest).unwrap_err().to_string();
    let base = AdamWConfig::default();
    assert_eq!(refused(AdamWConfig { beta2: 1.0, ..base }), "beta2: expected 0 <= beta2 < 1, got 1");
    assert_eq!(refused(AdamWConfig { beta1: f64::NAN, ..base }), "beta1: expected 0 <= beta1 < 1, got NaN");
    assert_eq!(refused(AdamWConfig { lr: -1.0, ..base }), "lr: expected a finite f32, 0 or more, got -1");
    assert_eq!(
        refused(AdamWConfig { lr: 1e300, ..base }),
        format!("lr: expected a finite f32, 0 or more, got {}", 1e300)
    );
    assert_eq!(
        refused(AdamWConfig { eps: 1e-60, ..base }).split(',').next(),
        Some("eps: expected positive and finite as f32")
    );
    assert!(refused(AdamWConfig { amsgrad: true, ..base }).starts_with("amsgrad: not supported"));
    assert!(base.scalars(0).is_err());

    let mut opt = AdamW::new(base, StateFormat::Bf16, Rounding::Nearest).unwrap();
    let (mut p, mut q) = ([1f32; 3], [1f32; 3]);
    assert_eq!(opt.step(&mut p, &[1f32; 2]).unwrap_err().to_string(), "grads of tensor 0: expected 3 elements, got 2");
    opt.step(&mut p, &[1f32; 3]).unwrap();
    let before = (opt.steps(), opt.age(0));
    assert_eq!(
        opt.step(&mut p[..2], &[1f32; 2]).unwrap_err().to_string(),
        "state of tensor 0: expected 2 elements, got 3"
    );
    let mut twice = [Parameter::named("w", &mut p, &[0f32; 3]), Parameter::named("w", &mut q, &[0f32; 3])];
    assert!(matches!(opt.step_tensors(&mut twice), Err(OptimError::SameTensor { .. })));
    assert_eq!((opt.steps(), opt.age(0)), before);
    let sr = Rounding::SrStates { seed: 0 };
    assert!(AdamW::new(base, StateFormat::Bf16, sr).unwrap().parameter_rounding(sr).is_err());
}

/// F7: a tensor without a gradient stands still and has its own age.
#[test]
fn ages() {
    let mut opt = AdamW::new(AdamWConfig::default(), StateFormat::Bf16, Rounding::stochastic(1)).unwrap();
    let (mut a, mut b) = ([1f32; 4], [1f32; 4]);
    for _ in 0..5 {
        opt.step_tensors(&mut [Parameter::named("a", &mut a, &[1f32; 4])]).unwrap();
    }
    opt.step_tensors(&mut [Parameter::named("a", &mut a, &[1f32; 4]), Parameter::named("b", &mut b, &[1f32; 4])])
        .unwrap();
    let id = halfulp::random::tensor_id;
    assert_eq!((opt.steps(), opt.age(id("a")), opt.age(id("b"))), (6, 6, 1));
    assert!((b[0] - (1.0 - 1e-3 - 1e-5)).abs() < 1e-6, "its first update is lr, and the decay");
    assert_eq!(opt.bytes(), 2 * 4 * 4);
    assert!(matches!(opt.moments(id("a")), Some((Moment::Bf16(_), Moment::Bf16(_)))));
    assert_eq!(<bf16 as Element>::FORMAT, Format::BF16);
}
