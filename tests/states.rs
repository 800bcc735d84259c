//! Moments in 8 and 4 bits on the CPU: every format, block, scale and length against the definition; the cases of blocks.
#![cfg(feature = "std")]

mod common;

use common::reference::{Run, bits, code, store};
use common::{Inputs, grids, pow2};
use halfulp::format::{BlockFormat, BlockScale};
use halfulp::optim::{AdamW, AdamWConfig, Moment, Parameter, Rounding, StateFormat, States};
use halfulp::random::{Draws, Role};
use halfulp::{Draw, Format, Isa, bf16, f16};

const FIRST: [StateFormat; 5] =
    [StateFormat::F32, StateFormat::Bf16, StateFormat::E4M3, StateFormat::E5M2, StateFormat::E2M1];
const SECOND: [StateFormat; 7] = [
    StateFormat::F32,
    StateFormat::Bf16,
    StateFormat::E4M3,
    StateFormat::E5M2,
    StateFormat::UE5M3,
    StateFormat::UE4M4,
    StateFormat::UE2M2NZ,
];

fn pairs() -> impl Iterator<Item = States> {
    FIRST.into_iter().flat_map(|m| SECOND.into_iter().map(move |v| States { m, v }))
}

/// Pairs in which every scaled format occurs.
const SCALED: [States; 5] = [
    States { m: StateFormat::E4M3, v: StateFormat::E4M3 },
    States { m: StateFormat::E5M2, v: StateFormat::UE5M3 },
    States { m: StateFormat::E4M3, v: StateFormat::UE4M4 },
    States { m: StateFormat::E5M2, v: StateFormat::E5M2 },
    States::FP4,
];

const ROUNDINGS: [Rounding; 2] = [Rounding::Nearest, Rounding::Stochastic { seed: 42 }];

/// Kinds of gradients. Squares of huge ones are infinite, which makes the second moment of a block NaN.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Ordinary,
    Wide,
    Tiny,
    Huge,
    NotFinite,
}

fn gradient(kind: Kind, word: u64) -> f32 {
    let ordinary = word as i32 as f32 * 1e-10;
    let with_exponent = |low: u32, count: u32| {
        f32::from_bits(word as u32 & 0x807F_FFFF | (127 + low + (word >> 32) as u32 % count - 64) << 23)
    };
    match kind {
        _ if word >> 60 == 0 => 0.0,
        Kind::Ordinary => ordinary,
        Kind::Wide => with_exponent(0, 124),
        Kind::Tiny if word >> 59 & 1 == 0 => f32::from_bits(word as u32 & 0x807F_FFFF),
        Kind::Tiny => ordinary * 1e-36,
        Kind::Huge if word >> 50 & 0x3FF == 0x3FF => f32::from_bits(word as u32 & 0x7FFF_FFFF | 0x7000_0000),
        Kind::NotFinite if word >> 50 & 0x3FF == 0x3FF => {
            [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][word as usize % 3]
        }
        Kind::Huge | Kind::NotFinite => ordinary,
    }
}

fn compare(run: Run, kind: Kind) -> u64 {
    let mut inputs = Inputs(run.n as u64 ^ 77);
    run.compare::<f32, f32>(|_, _| gradient(kind, inputs.next()))
}

const NEAREST: Rounding = Rounding::Nearest;

#[test]
fn every_pair_is_the_reference() {
    for states in pairs() {
        for rounding in ROUNDINGS {
            for steps in [1, 2, 10] {
                let run =
                    Run { n: 257, steps, states, rounding, parameters: NEAREST, weight_decay: 0.1, isa: Isa::best() };
                compare(run, Kind::Ordinary);
                compare(run, Kind::Wide);
                compare(run, Kind::Tiny);
            }
        }
    }
}

#[test]
fn every_block_and_length_is_the_reference() {
    let lengths = [0, 1, 31, 32, 33, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1025];
    for states in SCALED {
        for block in [32, 64, 128, 256] {
            for amax in [false, true] {
                let of = |format: StateFormat| {
                    let format = format.block(block).unwrap();
                    if amax { format.amax() } else { format }
                };
                let states = States { m: of(states.m), v: of(states.v) };
                for rounding in ROUNDINGS {
                    let run = |n| Run {
                        n,
                        steps: 2,
                        states,
                        rounding,
                        parameters: NEAREST,
                        weight_decay: 0.1,
                        isa: Isa::best(),
                    };
                    for n in lengths {
                        compare(run(n), Kind::Ordinary);
                        compare(run(n), Kind::Wide);
                    }
                    compare(run(700), Kind::Tiny);
                    let lost = compare(run(4097), Kind::Huge) + compare(run(4097), Kind::NotFinite);
                    assert!(lost > 0);
                }
            }
        }
    }
}

#[test]
fn long_tensors_and_all_types() {
    for isa in Isa::available() {
        for states in SCALED {
            let rounding = Rounding::stochastic(3);
            for n in [4095, 4096, 16_385] {
                let run = Run { n, steps: 2, states, rounding, parameters: rounding, weight_decay: 0.1, isa };
                compare(run, Kind::Wide);
                let mut inputs = Inputs(5);
                run.compare::<bf16, bf16>(|_, _| gradient(Kind::Ordinary, inputs.next()));
                run.compare::<f16, f32>(|_, _| gradient(Kind::Ordinary, inputs.next()));
            }
        }
    }
}

#[test]
fn threads_change_nothing() {
    for states in SCALED.into_iter().chain([States::from(StateFormat::E4M3.amax())]) {
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let mut opt = AdamW::new(AdamWConfig::default(), states, Rounding::stochastic(5)).unwrap();
                let mut inputs = Inputs(1);
                let mut p = vec![1f32; 70_001];
                let g: Vec<f32> = p.iter().map(|_| gradient(Kind::NotFinite, inputs.next())).collect();
                let lost = [0; 3].map(|_| opt.step(&mut p, &g).unwrap().nan_blocks);
                let (m, v) = opt.moments(0).unwrap();
                (bits(&p), bits(&m.to_f32()), bits(&v.to_f32()), lost)
            })
        };
        let one = run(1);
        assert!(one.3[0] > 0);
        assert_eq!(one, run(2));
        assert_eq!(one, run(7));
    }
}

/// Shards of a tensor, on optimizers of their own, get the bits of the whole.
#[test]
fn parts_are_the_whole() {
    let n = 40_000;
    let mut inputs = Inputs(8);
    let g: Vec<f32> = (0..n).map(|_| gradient(Kind::NotFinite, inputs.next())).collect();
    for states in SCALED.into_iter().chain([States { m: StateFormat::Bf16, v: StateFormat::UE4M4.amax() }]) {
        let run = |first: usize, end: usize| {
            let mut opt = AdamW::new(AdamWConfig::default(), states, Rounding::stochastic(3)).unwrap();
            let (mut p, g) = (vec![1f32; end - first], &g[first..end]);
            for _ in 0..3 {
                opt.step_tensors(&mut [Parameter::named("w", &mut p, g).part(first as u64, n as u64)]).unwrap();
            }
            let (m, v) = opt.moments(halfulp::random::tensor_id("w")).unwrap();
            [bits(&p), bits(&m.to_f32()), bits(&v.to_f32())]
        };
        let whole = run(0, n);
        for (first, end) in [(0, 4096), (4096, 36_864), (36_864, n), (n, n)] {
            let part = run(first, end);
            assert!((0..3).all(|k| part[k] == whole[k][first..end]), "{states:?} {first}");
        }
    }
}

/// C9: the elements of a partial last block are stored as those of a whole one that ends in zeros.
#[test]
fn a_partial_block_is_a_padded_one() {
    for states in SCALED {
        for n in [1, 127, 128, 129, 255, 256, 257, 4095, 4096, 4097] {
            let run = |padded: usize| {
                let mut inputs = Inputs(3);
                let mut opt = AdamW::new(AdamWConfig::default(), states, Rounding::stochastic(5)).unwrap();
                let mut p = vec![0f32; padded];
                for _ in 0..3 {
                    let g: Vec<f32> =
                        (0..padded).map(|i| if i < n { gradient(Kind::Wide, inputs.next()) } else { 0.0 }).collect();
                    opt.step(&mut p, &g).unwrap();
                }
                let (m, v) = opt.moments(0).unwrap();
                [bits(&p[..n]), bits(&m.to_f32()[..n]), bits(&v.to_f32()[..n])]
            };
            assert_eq!(run(n), run(n.next_multiple_of(128) + 128), "{states:?} {n}");
        }
    }
}

fn zero_value(format: StateFormat) -> f32 {
    match format {
        StateFormat::Blocks(format) if !format.element().has_zero() => 0.125 * 2f32.powi(-126),
        _ => 0.0,
    }
}

/// C1: a block of zeros stays one, at the smallest scale, and parameters change by their decay alone.
#[test]
fn zero_blocks() {
    for states in pairs() {
        for rounding in ROUNDINGS {
            let config = AdamWConfig { lr: 0.1, weight_decay: 0.1, ..AdamWConfig::default() };
            let mut opt = AdamW::new(config, states, rounding).unwrap();
            let mut p = vec![1f32; 200];
            for _ in 0..2 {
                assert_eq!(opt.step(&mut p, &[0f32; 200]).unwrap().nan_blocks, 0);
                let (m, v) = opt.moments(0).unwrap();
                assert_eq!(m.to_f32(), [zero_value(states.m); 200]);
                assert_eq!(v.to_f32(), [zero_value(states.v); 200], "{states:?}");
                assert!(zero_value(states.v) < 2e-39);
            }
            let once = (-0.01f32).mul_add(1.0, 1.0);
            assert_eq!(p, [(-0.01f32).mul_add(once, once); 200]);
        }
    }
}

/// C2: moments of 1e-42 and 1e-40 are finite, and no larger than they may be.
#[test]
fn tiny_blocks() {
    for states in pairs() {
        for amax in [1e-42f32, 1e-40] {
            // (1 - b1) g and (1 - b2) g^2.
            for (g, second) in [(10.0 * amax, false), ((1000.0 * amax).sqrt(), true)] {
                for states in [states, States { m: states.m.amax(), v: states.v.amax() }] {
                    let mut opt = AdamW::new(AdamWConfig::default(), states, Rounding::stochastic(1)).unwrap();
                    let mut p = vec![1f32; 130];
                    opt.step(&mut p, &[g; 130]).unwrap();
                    let (m, v) = opt.moments(0).unwrap();
                    let (moment, format) = if second { (v, states.v) } else { (m, states.m) };
                    let smallest = match format {
                        StateFormat::Blocks(format) => format.element().min_positive() * pow2(-126),
                        _ => Format::BF16.min_positive(),
                    };
                    // Of a format without zero the step is not from nothing.
                    let bound = (2.0 * f64::from(amax + zero_value(format))).max(smallest);
                    assert!(moment.to_f32().iter().all(|&x| f64::from(x) <= bound), "{states:?} {amax} {moment:?}");
                    opt.step(&mut p, &[g; 130]).unwrap();
                    assert!(p.iter().all(|p| p.is_finite()));
                }
            }
        }
    }
}

/// C8: whatever the states, a NaN or infinite gradient makes that parameter NaN; a block turns NaN as a whole, and is counted.
#[test]
fn gradients_that_are_not_finite() {
    let g = [1.0, f32::NAN, 1.0, f32::INFINITY];
    for states in pairs() {
        for rounding in ROUNDINGS {
            let mut opt = AdamW::new(AdamWConfig::default(), states, rounding).unwrap();
            let mut p = [1f32; 4];
            let blocks = [states.m, states.v].iter().filter(|format| matches!(format, StateFormat::Blocks(_))).count();
            assert_eq!(opt.step(&mut p, &g).unwrap().nan_blocks, blocks as u64, "{states:?}");
            assert_eq!(p.map(|p| p.to_bits() == 0x7FC0_0000), [false, true, false, true]);
            assert!(p[0] == p[2] && (p[0] - (1.0 - 1e-3 - 1e-5)).abs() < 1e-6);
            let (m, v) = opt.moments(0).unwrap();
            for (moment, format) in [(m, states.m), (v, states.v)] {
                let nan: Vec<bool> = moment.to_f32().iter().map(|x| x.is_nan()).collect();
                match moment {
                    Moment::Blocks(blocks) => {
                        assert_eq!(nan, [true; 4]);
                        assert!(blocks.codes().iter().all(|&code| code == 0));
                        assert_eq!(blocks.nan_blocks(), 1, "{format}");
                    }
                    _ => assert!(!nan[0] && nan[1] && !nan[2]),
                }
            }
            // The block reads NaN from the next step on, and stays so.
            for _ in 0..2 {
                assert_eq!(opt.step(&mut p, &[1f32; 4]).unwrap().nan_blocks, blocks as u64);
                assert_eq!(p.map(f32::is_nan), if blocks > 0 { [true; 4] } else { [false, true, false, true] });
            }
        }
    }
}

/// A block of one value is stored within half a ulp of it, to nearest, and one of the largest value exactly.
#[test]
fn constant_blocks() {
    for states in pairs() {
        for g in [1.3f32, -2e-5, 7e4] {
            let mut opt = AdamW::new(AdamWConfig::default(), states, NEAREST).unwrap();
            opt.step(&mut [1f32; 300], &[g; 300]).unwrap();
            let config = opt.config().scalars(1).unwrap();
            let exact = [config.one_minus_beta1 * g, config.one_minus_beta2 * (g * g)];
            let (m, v) = opt.moments(0).unwrap();
            for ((moment, format), exact) in [(m, states.m), (v, states.v)].into_iter().zip(exact) {
                let half_ulp = match format {
                    StateFormat::F32 => 0.0,
                    StateFormat::Bf16 => pow2(-8),
                    StateFormat::Blocks(format) => format.element().epsilon() / 2.0,
                    _ => unreachable!(),
                };
                let bound = f64::from(exact.abs()) * half_ulp;
                assert!(
                    moment.to_f32().iter().all(|&x| (f64::from(x) - f64::from(exact)).abs() <= bound),
                    "{format} {exact}"
                );
            }
        }
    }
}

#[test]
fn refusals() {
    let config = AdamWConfig::default();
    let refused = |states: States| AdamW::new(config, states, NEAREST).unwrap_err().to_string();
    let (e4m3, ue4m4) = (StateFormat::E4M3, StateFormat::UE4M4);
    assert_eq!(refused(ue4m4.into()), "m: expected F32, BF16, E4M3, E5M2 or E2M1, got UE4M4");
    let v = "v: expected F32, BF16, E4M3, E5M2, UE5M3, UE4M4 or UE2M2Nz, got";
    assert_eq!(refused(States { m: e4m3, v: StateFormat::E2M1 }), format!("{v} E2M1"));
    let mx = StateFormat::Blocks(BlockFormat::MXFP8_E4M3);
    assert_eq!(refused(States { m: e4m3, v: mx }), format!("{v} E4M3 in blocks of 32 (Floor scales)"));
    assert!(refused(States { m: StateFormat::Blocks(BlockFormat::NVFP4), v: e4m3 }).starts_with("m: expected"));
    let ue2m2 = StateFormat::Blocks(BlockFormat::new(Format::UE2M2, 128, BlockScale::Ceil).unwrap());
    assert!(refused(States { m: e4m3, v: ue2m2 }).ends_with("got UE2M2 in blocks of 128 (Ceil scales)"));
    for block in [0, 16, 48, 512] {
        let message = format!("block: expected 16, 32, 64, 128 or 256 elements, got {block}");
        assert_eq!(e4m3.block(block).unwrap_err().to_string(), message);
    }
    assert_eq!(StateFormat::Bf16.block(3), Ok(StateFormat::Bf16));
    // C12.
    let amsgrad = AdamWConfig { amsgrad: true, ..config };
    assert!(AdamW::new(amsgrad, e4m3, NEAREST).unwrap_err().to_string().starts_with("amsgrad: not supported"));
    let sr_states = AdamW::new(config, e4m3, Rounding::SrStates { seed: 1 }).unwrap_err();
    assert_eq!(sr_states.to_string(), "rounding: not supported: the package `sr-states` stores moments in BF16");
    assert!("e4m4".parse::<StateFormat>().is_err());
    assert_eq!("UE2M2NZ".parse(), Ok(StateFormat::UE2M2NZ));
}

/// Bytes a parameter: of the formats, and of an optimizer.
#[test]
fn memory() {
    use StateFormat as S;
    let n = 1 << 16;
    let fp8 = States { m: S::E4M3, v: S::UE4M4 };
    let of_32 = |format: S| format.block(32).unwrap();
    for (states, bytes) in [
        (S::F32.into(), 8.0),
        (S::Bf16.into(), 4.0),
        (States { m: S::Bf16, v: S::UE4M4 }, 3.007_812_5),
        (fp8, 2.015_625),
        (S::E4M3.into(), 2.015_625),
        (S::E5M2.into(), 2.015_625),
        (States { m: S::E5M2, v: S::UE5M3 }, 2.015_625),
        (States { m: of_32(S::E4M3), v: of_32(S::UE4M4) }, 2.062_5),
        (S::E4M3.amax().into(), 2.062_5),
        (States { m: S::E4M3, v: S::UE2M2NZ }, 1.515_625),
        (States::FP4, 1.015_625),
    ] {
        let states: States = states;
        let mut opt = AdamW::new(AdamWConfig::default(), states, NEAREST).unwrap();
        opt.step(&mut vec![1f32; n], &vec![1f32; n]).unwrap();
        assert_eq!(opt.bytes() as f64 / n as f64, bytes, "{states:?}");
        assert_eq!(states.bytes(n), opt.bytes());
        let (m, v) = opt.moments(0).unwrap();
        assert_eq!(m.bytes() + v.bytes(), opt.bytes());
    }
    assert_eq!(States::FP4.bytes(129), 2 * (65 + 2));
}

/// One step from zero states: the decay acts on the old parameter, whatever stores the moments.
#[test]
fn order_of_decay() {
    let config = AdamWConfig { lr: 0.1, weight_decay: 0.1, eps: 1e-12, ..AdamWConfig::default() };
    for states in pairs() {
        for rounding in ROUNDINGS {
            for g in [1f32, -1.0, 1e-3, -1e-3, 1e3, -1e3] {
                let mut p = [g.signum()];
                AdamW::new(config, states, rounding).unwrap().step(&mut p, &[g]).unwrap();
                assert!((p[0].abs() - 0.89).abs() < 1e-6, "the wrong order gives 0.891, this {p:?}: {states:?} {g}");
            }
        }
    }
}

/// Where the scale of its block stays, a code changes only through its own update: without one, to nearest, never. Under amax
/// scales it does.
#[test]
fn the_grid_of_powers_of_two_is_still() {
    let changes = |format: StateFormat| {
        let mut opt = AdamW::new(AdamWConfig::default(), format, NEAREST).unwrap();
        let mut inputs = Inputs(3);
        let mut last: Option<(Vec<u16>, f64)> = None;
        let (mut changes, mut stayed) = (0, 0);
        for step in 0..300 {
            // Only the first step has gradients at the first four.
            let g: Vec<f32> = (0..128)
                .map(|i| match (i, step) {
                    (0..4, 0) => 9.0 * (i + 3) as f32,
                    (0..4, _) => 0.0,
                    _ => 30.0 + (inputs.next() as i32 as f32) * 1e-9,
                })
                .collect();
            opt.step(&mut [0f32; 128], &g).unwrap();
            let Moment::Blocks(v) = opt.moments(0).unwrap().1 else { panic!("in blocks") };
            let now = ((0..4).map(|i| v.code(i)).collect::<Vec<_>>(), v.scales().get(0));
            if let Some((codes, scale)) = &last
                && (*scale == now.1 || format == format.amax())
            {
                stayed += 1;
                changes += usize::from(*codes != now.0);
            }
            last = Some(now);
        }
        assert!(stayed > 250, "{stayed}");
        changes
    };
    assert_eq!(changes(StateFormat::E4M3), 0);
    assert_ne!(changes(StateFormat::E4M3.amax()), 0);
}

/// P(up), counted over all draws, is within 2^-17 of the exact fraction, for every value tried.
#[test]
fn probability_is_the_fraction() {
    let mut inputs = Inputs(8);
    for grid in grids().filter(|grid| grid.bits() <= 8 && grid.spec.format != Format::E8M0) {
        for scale in [1.0, pow2(-31), f64::from(0.3f32)] {
            for _ in 0..12 {
                // Over the whole range of the format, below its smallest value too.
                let octaves = (grid.values[usize::from(grid.max_code())].log2() + 22.0) * (inputs.next() >> 40) as f64;
                let x = (scale * (octaves * pow2(-24) - 22.0).exp2()) as f32;
                let below = grid.values.partition_point(|value| value * scale <= f64::from(x));
                let Some(low) = below.checked_sub(1) else { continue };
                let ups = (0..=u16::MAX).filter(|&r| usize::from(code(&grid, scale, x, Some(r), false)) > low).count();
                // In units of a ulp times the scale: 2^17 P(up), and 2^17 d.
                let ulp = (grid.values[low + 1] - grid.values[low]) * scale;
                let exact = (f64::from(x) - grid.values[low] * scale) * pow2(17);
                assert!((2.0 * ups as f64 * ulp - exact).abs() <= ulp, "{:?} {scale} {x}: {ups}", grid.spec.format);
            }
        }
    }
}

/// Normal numbers, by Box and Muller's method.
fn normal(inputs: &mut Inputs) -> f64 {
    let [u, w] = [0; 2].map(|_| ((inputs.next() >> 11) as f64 + 0.5) * pow2(-53));
    (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * w).cos()
}

#[derive(Clone, Copy, Debug)]
enum Law {
    Gaussian,
    Constant,
    Sparse,
    Bursts,
}

const LAWS: [Law; 4] = [Law::Gaussian, Law::Constant, Law::Sparse, Law::Bursts];

impl Law {
    /// Gradients of a step: sigma from 1e-6 to 1e6 in each block, and in each one coordinate without a gradient.
    fn fill(self, inputs: &mut Inputs, step: u64, g: &mut [f32]) {
        for (i, g) in g.iter_mut().enumerate() {
            let sigma = 10f64.powf(-6.0 + 12.0 * (i % 128) as f64 / 127.0);
            let unit = match self {
                _ if i % 128 == 64 => 0.0,
                Self::Gaussian => normal(inputs),
                Self::Constant => 1.0,
                Self::Sparse if !inputs.next().is_multiple_of(50) => 0.0,
                // Fifty steps with gradients, five hundred without, at a time of its own.
                Self::Bursts if (step + 7 * i as u64) % 550 >= 50 => 0.0,
                Self::Sparse | Self::Bursts => normal(inputs),
            };
            *g = (sigma * unit) as f32;
        }
    }
}

/// Steps that are all update: the parameter after one from 0 is minus m^ / (sqrt(v^) + eps).
fn bare() -> AdamWConfig {
    AdamWConfig { lr: 1.0, weight_decay: 0.0, eps: 1e-30, ..AdamWConfig::default() }
}

/// What exact Adam obeys: |m^| / sqrt(v^) <= (1 - b1) / sqrt(1 - b2) / sqrt(1 - b1^2 / b2).
fn bound() -> f32 {
    (0.1 / 0.001f64.sqrt() / (1.0 - 0.81 / 0.999f64).sqrt()) as f32
}

/// The largest |m^| / sqrt(v^) of each pair.
fn largest_updates(pairs: &[States], law: Law, blocks: usize, steps: u64) -> Vec<f32> {
    let n = 128 * blocks;
    let mut inputs = Inputs(11);
    let (mut g, mut p) = (vec![0f32; n], vec![0f32; n]);
    let mut opts: Vec<AdamW> =
        pairs.iter().map(|&states| AdamW::new(bare(), states, Rounding::stochastic(1)).unwrap()).collect();
    let mut largest = vec![0f32; pairs.len()];
    for step in 1..=steps {
        law.fill(&mut inputs, step, &mut g);
        for (opt, largest) in opts.iter_mut().zip(&mut largest) {
            p.fill(0.0);
            assert_eq!(opt.step(&mut p, &g).unwrap().nan_blocks, 0);
            // C1: no gradient, no move.
            assert!(p.iter().skip(64).step_by(128).all(|&p| p == 0.0));
            *largest = p.iter().fold(*largest, |largest, p| largest.max(p.abs()));
        }
    }
    largest
}

/// Pairs whose second moment does not reach further below the largest of its block than the first one does, as roots go: a
/// first moment is rounded up from nothing to no more than the root of what the second one is stored as.
fn kept(states: &States) -> bool {
    let reach = |format: StateFormat| match format {
        StateFormat::Blocks(format) => format.element().min_positive() / format.element().max(),
        _ => 0.0,
    };
    reach(states.m) <= 2.0 * reach(states.v).sqrt()
}

fn floor_of_v(blocks: usize, steps: u64) {
    let pairs: Vec<States> = pairs().collect();
    assert_eq!(pairs.iter().filter(|states| states.has_blocks() && kept(states)).count(), 21);
    for law in LAWS {
        let largest = largest_updates(&pairs, law, blocks, steps);
        for (states, largest) in pairs.iter().zip(largest) {
            println!("{law:?} {} {}: {largest}", states.m, states.v);
            assert!(!kept(states) || largest <= 2.0 * bound(), "{law:?} {states:?}: {largest}");
        }
    }
}

#[test]
fn the_floor_of_v_keeps_updates_bounded() {
    floor_of_v(2, 700);
}

/// All of it: a minute or so in release.
#[test]
#[ignore = "minutes in a debug build"]
fn the_floor_of_v_keeps_updates_bounded_for_long() {
    floor_of_v(64, 3000);
}

/// Without the floor, made by the definition alone, an update is beyond all bounds.
#[test]
fn without_the_floor_updates_are_not_bounded() {
    for states in &SCALED[..4] {
        let (StateFormat::Blocks(m_format), StateFormat::Blocks(v_format)) = (states.m, states.v) else { panic!() };
        let n = 128 * 4;
        let largest = |floor: bool, law: Law| {
            let mut inputs = Inputs(11);
            let (mut g, mut m, mut v) = (vec![0f32; n], vec![0f32; n], vec![0f32; n]);
            let mut largest = 0f32;
            for step in 1..=600 {
                law.fill(&mut inputs, step, &mut g);
                let scalars = bare().scalars(step).unwrap();
                for i in 0..n {
                    let [p, new_m, new_v] = scalars.step(0.0, g[i], m[i], v[i]);
                    largest = largest.max(p.abs());
                    (m[i], v[i]) = (new_m, new_v);
                }
                let draws = |role| {
                    let mut draws = vec![0; n];
                    Draw::seeded(1).step(step).role(role).fill16(0, &mut draws);
                    move |i: usize| Some(draws[i])
                };
                m = store(m_format, &m, false, draws(Role::FirstMoment)).values;
                v = store(v_format, &v, floor, draws(Role::SecondMoment)).values;
            }
            largest
        };
        let over_laws = |floor| LAWS.map(|law| largest(floor, law)).into_iter().fold(0.0, f32::max);
        let [without, with] = [over_laws(false), over_laws(true)];
        println!("{states:?}: {without} without the floor, {with} with it");
        assert!(without > 1e4 && with <= 2.0 * bound(), "{states:?}: {without} {with}");
    }
}
