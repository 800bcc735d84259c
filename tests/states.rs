//! Moments in 8 and 4 bits on the CPU: every format, block, scale and length against the definition; the cases of blocks.
#![cfg(feature = "std")]

mod common;

use common::reference::{Run, bits};
use common::{Inputs, pow2};
use halfulp::format::{BlockError, BlockFormat, BlockScale, Scales};
use halfulp::optim::{AdamW, AdamWConfig, Moment, OptimError, Rounding, StateFormat, States};
use halfulp::{Format, Isa, bf16, f16};

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
                let run = Run { n: 257, steps, states, rounding, parameters: NEAREST, isa: Isa::best() };
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
                    let run = |n| Run { n, steps: 2, states, rounding, parameters: NEAREST, isa: Isa::best() };
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
                let run = Run { n, steps: 2, states, rounding, parameters: rounding, isa };
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
