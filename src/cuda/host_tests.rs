//! The kernels' element functions, compiled for the host by g++, against Rust: no GPU needed.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use half::f16;

use super::blocks::{Decoder, Encoder, rule};
use super::plan::MomentArguments;
use super::plan::moment;
use crate::cast::Cast;
use crate::format::{BlockFormat, BlockScale, BlockVec, Decoder as CpuDecoder, Scales, Specials, pack};
use crate::optim::sealed;
use crate::optim::{
    AdEMAMixConfig, AdamConfig, AdamWConfig, BlockEncoder, ChunkSums, Clip, LambConfig, LionConfig, Rule, SgdConfig,
    StateFormat, StepControl, Visit,
};
use crate::random::{Draws, Keys, Role};
use crate::round::lanes::tests::first_up;
use crate::round::lanes::{Draws16, NearestEven, Target32};
use crate::round::{Mode, Overflow, RandomBits, round, round_scaled};
use crate::{Draw, Format};

/// Whether there is a compiler. None is an error where `CI` or `HALFULP_REQUIRE_KERNELS` is set.
pub(super) fn has_compiler() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| match Command::new("g++").arg("--version").output() {
        Ok(_) => true,
        Err(error) => {
            let required = ["CI", "HALFULP_REQUIRE_KERNELS"].into_iter().find(|name| std::env::var_os(name).is_some());
            assert!(required.is_none(), "g++, which {} asks for: {error}", required.unwrap_or_default());
            eprintln!("no g++ ({error}): kernels are not compared");
            false
        }
    })
}

/// The program, built once; `None` without a compiler.
fn program() -> Option<&'static PathBuf> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    PROGRAM
        .get_or_init(|| {
            let out = std::env::temp_dir().join(format!("halfulp-host-{}", std::process::id()));
            let source = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/host.cpp");
            if !has_compiler() {
                return None;
            }
            let built = Command::new("g++")
                .args(["-O2", "-std=c++17", "-ffp-contract=off", "-Wall", "-Werror", "-Wno-parentheses", "-o"])
                .arg(&out)
                .arg(source)
                .status()
                .unwrap();
            assert!(built.success(), "g++ refused {source}");
            Some(out)
        })
        .as_ref()
}

/// Sends words, receives words.
fn ask(program: &PathBuf, request: &[u32]) -> Vec<u32> {
    let mut child = Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let bytes = bytemuck::cast_slice::<u32, u8>(request).to_vec();
    let writer = std::thread::spawn(move || input.write_all(&bytes).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(output.status.success());
    bytemuck::pod_collect_to_vec(&output.stdout)
}

/// Bits with every exponent, and specials, from a counter.
fn words(n: usize) -> Vec<u32> {
    let mut words = vec![0u32; n];
    Draw::seeded(99).fill32(0, &mut words);
    let specials =
        [0, 1 << 31, 1, 0x007F_FFFF, 0x0080_0000, 0x7F7F_FFFF, 0x7F80_0000, 0x7F80_0001, 0x7FFF_FFFF, 0xFFFF_FFFF];
    words[..10].copy_from_slice(&specials);
    words
}

fn target_words(target: &Target32<false>) -> [u32; 13] {
    // SAFETY: `repr(C)` and thirteen u32.
    unsafe { core::mem::transmute::<Target32<false>, [u32; 13]>(*target) }
}

#[test]
fn words_are_those_of_stream_1() {
    let Some(program) = program() else { return };
    let keys = Keys::new(42, 7, 3, 2, 1);
    let groups = words(1 << 16);
    let request = [&[0][..], &keys.words(), &[groups.len() as u32], &groups].concat();
    let expected: Vec<u32> =
        groups.iter().map(|&g| keys.word(g)).flat_map(|word| [word as u32, (word >> 32) as u32]).collect();
    assert!(ask(program, &request) == expected);
}

#[test]
fn codes_are_those_of_the_definition() {
    let Some(program) = program() else { return };
    let formats = Format::NAMED.map(|(_, format)| format);
    let n = 1 << 18;
    for format in formats {
        for (scale, overflow) in
            [(0, Overflow::Ieee), (0, Overflow::Saturate), (-20, Overflow::Saturate), (90, Overflow::Saturate)]
        {
            let Some(target) = Target32::<false>::new(format, scale, overflow) else { continue };
            let plain = if target.is_plain_on_gpu(format) { format.fraction_bits() } else { 0 };
            for decision in [0, 16, 32] {
                // Half of the values over all exponents, half around the target's range.
                let draws = words(2 * n);
                let code = |bits, draw| -> u32 {
                    let mode = match decision {
                        0 => Mode::NearestEven,
                        16 => Mode::Stochastic(RandomBits::of16(draw as u16)),
                        _ => Mode::Stochastic(RandomBits::of32(draw)),
                    };
                    round_scaled(f32::from_bits(bits), scale, format, mode, overflow).into()
                };
                let pairs: Vec<u32> = (0..n)
                    .flat_map(|i| {
                        let word = draws[i];
                        let near = (word & 0x807F_FFFF)
                            | (127u32.wrapping_add_signed(scale).wrapping_add(word >> 23 & 31).wrapping_sub(20) & 0xFF)
                                << 23;
                        let bits = if i % 8 < 4 { word } else { near };
                        // Some decisions are taken where they turn.
                        let draw = match (decision, i % 64) {
                            (32, turn @ 0..6) => first_up(|draw| code(bits, draw)).wrapping_sub(turn as u32 & 1),
                            (16, _) => draws[n + i] >> 16,
                            _ => draws[n + i],
                        };
                        [bits, draw]
                    })
                    .collect();
                let request = [&[1, decision, plain][..], &target_words(&target), &[n as u32], &pairs].concat();
                let answer = ask(program, &request);
                let expected: Vec<u32> = pairs.chunks(2).map(|pair| code(pair[0], pair[1])).collect();
                let (codes, quads) = answer.split_at(n);
                let wrong = codes.iter().zip(&expected).position(|(a, b)| a != b);
                assert!(
                    wrong.is_none(),
                    "{format} {scale} {overflow:?} {decision}: {:#x?}",
                    wrong.map(|i| pairs[2 * i])
                );
                let mut done = 0;
                for (i, quad) in quads.chunks(5).enumerate().filter(|(_, quad)| quad[0] == 1) {
                    for j in 0..4 {
                        let (bits, expected) = (pairs[2 * (4 * i + j)], expected[4 * i + j]);
                        // The sign is the caller's part.
                        let magnitude =
                            if format.is_signed() { expected & !u32::from(format.sign_mask()) } else { expected };
                        if format.is_signed() || bits >> 31 == 0 {
                            assert_eq!(quad[1 + j], magnitude, "{format} {scale} {decision} {bits:#x}");
                        }
                    }
                    done += 1;
                }
                assert!(plain == 0 || done > n / 64, "{format} {scale}: {done} quads were done at once");
            }
        }
    }
}

#[test]
fn stored_halves_are_those_of_the_definition() {
    let Some(program) = program() else { return };
    let n = 1 << 18;
    for decision in [0, 16] {
        let pairs: Vec<u32> = words(2 * n).chunks(2).flat_map(|pair| [pair[0], pair[1] & 0xFFFF]).collect();
        let answer = ask(program, &[&[2, decision, 0x7F80, n as u32][..], &pairs].concat());
        for (format, codes) in [Format::BF16, Format::FP16].into_iter().zip(answer.chunks(n)) {
            for (pair, &code) in pairs.chunks(2).zip(codes) {
                let mode = match decision {
                    0 => Mode::NearestEven,
                    _ => Mode::Stochastic(RandomBits::of16(pair[1] as u16)),
                };
                let expected = round_scaled(f32::from_bits(pair[0]), 0, format, mode, Overflow::Ieee);
                assert_eq!(code, u32::from(expected), "{format} {:#x} {:#x}", pair[0], pair[1]);
            }
        }
    }
    let codes: Vec<u32> = (0..1 << 16).collect();
    let answer = ask(program, &[&[4, codes.len() as u32][..], &codes].concat());
    for (code, (bf16, fp16)) in (0..=u16::MAX).zip(answer[..1 << 16].iter().zip(&answer[1 << 16..])) {
        assert_eq!(*bf16, u32::from(code) << 16);
        let value = f16::from_bits(code);
        if value.is_nan() {
            assert_eq!(*fp16, u32::from(code & 0x8000) << 16 | 0x7F80_0000 | u32::from(code & 0x3FF) << 13);
        } else {
            assert_eq!(*fp16, value.to_f32().to_bits(), "{code:#x}");
        }
    }
}

/// Asks the program of the rule of this number.
type Comparison = fn(&PathBuf, u32);

/// Numbers of rules.
fn rules() -> [(u32, Comparison); 6] {
    [
        (0, the_rule::<AdamWConfig>),
        (1, the_rule::<AdamConfig>),
        (2, the_rule::<SgdConfig>),
        (3, the_rule::<LionConfig>),
        (4, the_rule::<AdEMAMixConfig>),
        (5, the_rule::<LambConfig>),
    ]
}

/// The words of some scalars.
fn scalar_words<S: Copy>(scalars: S) -> [u32; 14] {
    let mut words = [0u32; 14];
    assert!(size_of::<S>() <= size_of_val(&words));
    // SAFETY: `repr(C)` structs of f32 and u32, no longer than the words.
    unsafe { core::ptr::from_ref(&scalars).cast::<u8>().copy_to(words.as_mut_ptr().cast(), size_of::<S>()) };
    words
}

/// Configurations of a rule in which every hyper-parameter counts, from its defaults.
fn configs<R: Rule>() -> Vec<R> {
    struct Set(f64);
    impl Visit for Set {
        type Error = core::convert::Infallible;
        fn number(&mut self, name: &'static str, value: &mut f64) -> Result<(), Self::Error> {
            *value = match name {
                "lr" | "weight_decay" => 0.1,
                "dampening" => *value,
                _ => *value * self.0,
            };
            Ok(())
        }
        fn flag(&mut self, name: &'static str, value: &mut bool) -> Result<(), Self::Error> {
            *value = self.0 < 1.0 && name != "skip_zeros";
            Ok(())
        }
        fn integer(&mut self, _: &'static str, value: &mut u64) -> Result<(), Self::Error> {
            *value = if self.0 < 1.0 { 1000 } else { 0 };
            Ok(())
        }
        fn option(&mut self, _: &'static str, value: &mut Option<f64>) -> Result<(), Self::Error> {
            *value = (self.0 < 1.0).then_some(0.3);
            Ok(())
        }
    }
    let of = |factor| {
        let mut config = R::default();
        let Ok(()) = config.fields(&mut Set(factor));
        config.check().unwrap();
        config
    };
    vec![R::default(), of(1.0), of(0.99)]
}

/// 2^19 elements of random bits over every exponent, and every tuple of specials, under each configuration; scalars at every
/// kind of age.
fn the_rule<R: Rule>(program: &PathBuf, number: u32) {
    let control = StepControl { gradient_scale: 1.0 / 1024.0, clip: 0.7, ..StepControl::default() };
    for (config, control) in configs::<R>().into_iter().zip([StepControl::default(), control, control]) {
        let hyper: Vec<u32> = bytemuck::pod_collect_to_vec(&super::optimizer::words(&config).unwrap());
        let ages: Vec<[u64; 3]> = (0..200u64)
            .map(|i| [i + 1, i * i + 1, (1 << (i % 60)) + i])
            .chain([[1, 1, 1], [1, 5, 9], [999, 1000, 1001], [u64::MAX; 3], [7, 7, 1_000_000]])
            .collect();
        let given = ages.iter().flat_map(|ages| {
            let ages = ages.iter().flat_map(|age| [*age as u32, (age >> 32) as u32]);
            ages.chain([control.gradient_scale.to_bits(), control.clip.to_bits()])
        });
        let request: Vec<u32> = [12, number].into_iter().chain(hyper).chain([ages.len() as u32]).chain(given).collect();
        for (ages, got) in ages.iter().zip(ask(program, &request).chunks(14)) {
            let expected = scalar_words(config.scalars(*ages, &control));
            assert_eq!(got, expected, "{config:?} at {ages:?}");
        }

        let scalars = config.scalars([3, 3, 3], &control);
        let mut elements = words(5 << 19);
        let specials = [
            0u32,
            1 << 31,
            1,
            0x0080_0000,
            0x3F80_0000,
            0xBF80_0000,
            0x7F7F_FFFF,
            0x7F80_0000,
            0xFF80_0000,
            0x7FC0_0001,
        ];
        for (i, word) in elements.iter_mut().take(5 * 100_000).enumerate() {
            *word = specials[i / 5 / 10usize.pow(i as u32 % 5) % 10];
        }
        if let Some(second) = R::STATES.iter().position(|kind| kind.role == Role::SecondMoment) {
            elements.iter_mut().skip(2 + second).step_by(5).for_each(|v| *v &= 0x7FFF_FFFF);
        }
        let n = elements.len() / 5;
        let request = [&[3, number][..], &scalar_words(scalars), &[n as u32], &elements].concat();
        for (input, output) in elements.chunks(5).zip(ask(program, &request).chunks(4)) {
            let [p, g, states @ ..] = [0, 1, 2, 3, 4].map(|i| f32::from_bits(input[i]));
            let (p, states) = R::step(&scalars, p, g, states);
            let expected =
                [p, states[0], states[1], states[2]].map(|x| if x.is_nan() { 0x7FC0_0000 } else { x.to_bits() });
            let mut output: [u32; 4] = output.try_into().unwrap();
            output[1 + R::STATES.len()..].copy_from_slice(&expected[1 + R::STATES.len()..]);
            assert_eq!(output, expected, "{config:?} {input:#x?}");
        }
    }
}

/// Significands for which a seed within its error may give a wrong root, with one of two exponents, or a wrong quotient: `seed_holds`
/// of exact.cuh asks a device about these.
const ROOTS: [u32; 2] = [0x3FFC_114A, 0x406E_9372];
const INVERSES: [u32; 2] = [0x3FFF_FFFD, 0x3FFF_FFFF];

/// Every significand with every seed that lies within the error of the hardware's.
#[test]
fn roots_and_quotients_do_not_depend_on_their_seeds() {
    let Some(program) = program() else { return };
    std::thread::scope(|scope| {
        let roots = scope.spawn(|| ask(program, &[15, 0x3F80_0000, 1 << 24]));
        let inverses = ask(program, &[16, 0x3F80_0000, 1 << 23]);
        let roots = roots.join().unwrap();
        // More than two for each, and not all of those asked for.
        assert!((2 << 24..4 << 24).contains(&roots[0]) && (3 << 23..5 << 23).contains(&inverses[0]));
        assert_eq!(roots[1..], ROOTS);
        // Some inverses are not the nearest to theirs; quotients by all but two of them are.
        let wrong: Vec<u32> = inverses[1..].chunks(3).filter(|wrong| wrong[2] > 0).map(|wrong| wrong[0]).collect();
        assert!(inverses.len() > 1 + 3 * 32);
        assert!(wrong.iter().all(|b| INVERSES.contains(b)) && INVERSES.iter().all(|b| wrong.contains(b)), "{wrong:x?}");
    });
}

/// Quotients near the middle of two f32 and all around, for zeros of both signs and over every exponent that is taken.
#[test]
fn quotients_are_those_of_ieee_754() {
    let Some(program) = program() else { return };
    let random = words(1 << 21);
    let mut pairs = Vec::new();
    for (i, pair) in random.chunks(2).enumerate() {
        // b from 2^-60 to 2^43, a from 2^-75 to where the quotient is largest.
        let b = (67 + (pair[1] >> 23 & 0x7F)).min(169) << 23 | pair[1] & 0x7F_FFFF;
        let a = match i % 4 {
            0 => pair[0] & 0x8000_0000,
            1 => pair[0] & 0x807F_FFFF | (52 + (pair[0] >> 23 & 0x7F)) << 23,
            _ => {
                // Just above or below (k + 1/2) ulp times b.
                let half = (u64::from(pair[0] & 0x7F_FFFF | 0x80_0000) * 2 + 1) * u64::from(b & 0x7F_FFFF | 0x80_0000);
                let shift = 64 - half.leading_zeros() - 24;
                let a = (half >> shift) as u32 + u32::from(i % 4 == 3);
                (127 << 23) + (a - 0x80_0000)
            }
        };
        if !INVERSES.contains(&(b & 0x7F_FFFF | 0x3F80_0000)) {
            pairs.extend([a, b]);
        }
    }
    let request = [&[17, pairs.len() as u32 / 2][..], &pairs].concat();
    for (pair, got) in pairs.chunks(2).zip(ask(program, &request).chunks(4)) {
        assert_eq!(got, [got[3]; 4], "{pair:x?}");
    }
}

/// The step by seeds is the step, wherever it says so: over all bits, and over those of a training, which it covers.
#[test]
fn seeded_rules_are_the_rules() {
    let Some(program) = program() else { return };
    fn check<R: Rule>(program: &PathBuf, number: u32) {
        let config = R::default();
        let scalars =
            config.scalars([3, 3, 3], &StepControl { gradient_scale: 1.0 / 1024.0, ..StepControl::default() });
        let mut elements = words(5 << 19);
        for (i, element) in elements.chunks_mut(5).enumerate() {
            if i % 2 == 0 {
                // From 2^-20 to 2^12, and every tenth a zero.
                let tame =
                    |word: u32| if word.is_multiple_of(10) { word & 1 << 31 } else { word & 0x87FF_FFFF | 0x3400_0000 };
                element.iter_mut().for_each(|word| *word = tame(*word));
            }
            element[3] &= if R::STATES.len() > 1 { 0x7FFF_FFFF } else { !0 };
        }
        let request = [&[18, number][..], &scalar_words(scalars), &[1 << 19], &elements].concat();
        let mut covered = [0; 2];
        for (i, (input, output)) in elements.chunks(5).zip(ask(program, &request).chunks(5)).enumerate() {
            let [p, g, states @ ..] = [0, 1, 2, 3, 4].map(|i| f32::from_bits(input[i]));
            let (p, states) = R::step(&scalars, p, g, states);
            if output[0] == 1 {
                covered[i % 2] += 1;
                assert_eq!(output[1], p.to_bits(), "{input:#x?}");
                let states: Vec<u32> = states[..R::STATES.len()].iter().map(|x| x.to_bits()).collect();
                assert_eq!(output[2..][..states.len()], states, "{input:#x?}");
            }
        }
        assert!(covered[0] == 1 << 18 && covered[1] > 1 << 13, "{} covers {covered:?} of 2^18", R::NAME);
    }
    check::<AdamWConfig>(program, 0);
    check::<AdamConfig>(program, 1);
    check::<AdEMAMixConfig>(program, 4);
    check::<LambConfig>(program, 5);
}

/// Moments in units of their blocks are those of the rule, and its parameter lies between the bounds, whatever the seeds: over the scales
/// and scalars that are covered, to their ends.
#[test]
fn parameters_lie_between_bounds() {
    let Some(program) = program() else { return };
    let usual = AdamWConfig::default();
    let configs = [
        (usual, 1),
        (AdamWConfig { lr: 0.1, weight_decay: 0.1, ..usual }, 3),
        (AdamWConfig { lr: 1e-6, eps: 1e-12, beta1: 0.0, ..usual }, 1000),
        (AdamWConfig { lr: 10.0, eps: 1.0, beta2: 0.5, weight_decay: 0.04, ..usual }, 2),
        (AdamWConfig { lr: 1e-3, eps: 1e10, beta2: 0.9999, maximize: true, ..usual }, 10),
    ];
    let (mut covered, mut most) = (0, 0);
    for (number, (config, age)) in configs.into_iter().enumerate() {
        let scalars = sealed::Rule::scalars(&config, [age; 3], &StepControl::default());
        let n = 1 << 16;
        let mut elements = words(6 * n);
        for (i, element) in elements.chunks_mut(6).enumerate() {
            let draw = |j: usize| f64::from(element[j]) / f64::from(u32::MAX);
            // The least and the largest that are covered, and what lies on either side.
            let [scale_m, scale_v] = [66, 26].map(|least| least + element[(least as usize) % 2] % (143 - least));
            let p = (draw(2) - 0.5) * 2f64.powi((element[2] % 40) as i32 - 30);
            let m = (draw(3) - 0.5) * 2.0 * 448.0 * 2f64.powi(-((element[3] % 20) as i32));
            let v = draw(4) * 480.0 * 2f64.powi(-((element[4] % 20) as i32));
            // A gradient in the range of either moment, or none.
            let size =
                if i.is_multiple_of(2) { f64::from(scale_m) - 127.0 } else { (f64::from(scale_v) - 127.0) / 2.0 };
            let g =
                if i.is_multiple_of(9) { 0.0 } else { (draw(5) - 0.5) * 2f64.powf(size + f64::from(element[5] % 16)) };
            let [p, g, m, v] = [p, g, m, v].map(|x| (x as f32).to_bits());
            element.copy_from_slice(&[scale_m, scale_v, p, g, m, v]);
        }
        let request = [&[19][..], &scalar_words(scalars), &[n as u32], &elements].concat();
        let answer = ask(program, &request);
        assert_eq!(answer[0], 1, "{config:?}");
        let mut rest = &answer[1..];
        for input in elements.chunks(6) {
            let (covers, tail) = rest.split_first().unwrap();
            rest = tail;
            if *covers == 1 {
                assert_eq!(rest[..2], [1, 1], "{number}: {input:#x?}");
                most = most.max(rest[2]);
                covered += 1;
                rest = &rest[3..];
            }
        }
    }
    assert!(covered > 5 << 14, "{covered} are covered");
    // Of 16 parts of 2^-24 that are allowed for, and of 11.3 that may be.
    assert!((7000..11_300).contains(&most), "{most} / 1000 parts");
}

#[test]
fn the_rules_are_the_rules() {
    let Some(program) = program() else { return };
    for (number, check) in rules() {
        check(program, number);
    }
}

#[test]
fn keys_are_those_of_stream_1() {
    let Some(program) = program() else { return };
    let random = words(8 << 10);
    let request = [&[13, 1 << 10][..], &random].concat();
    for (given, got) in random.chunks(8).zip(ask(program, &request).chunks(5)) {
        let wide = |i: usize| u64::from(given[i + 1]) << 32 | u64::from(given[i]);
        assert_eq!(got, Keys::new(wide(0), wide(2), wide(4), given[6], given[7]).words());
    }
}

#[test]
fn the_trust_ratio_is_that_of_lamb() {
    let Some(program) = program() else { return };
    let values = [0.0, 1e-300, 0.5, 3.0, 1e300, f64::INFINITY, f64::NAN, 0.1, 7.0, 1e-5];
    let norms: Vec<[f64; 2]> = values.iter().flat_map(|&p| values.map(|u| [p, u])).collect();
    for config in configs::<LambConfig>() {
        let hyper: Vec<u32> = bytemuck::pod_collect_to_vec(&super::optimizer::words(&config).unwrap());
        let request = [&[14][..], &hyper, &[norms.len() as u32], bytemuck::cast_slice(&norms)].concat();
        for (&[p, u], got) in norms.iter().zip(ask(program, &request)) {
            let scalars = sealed::Rule::scalars(&config, [1; 3], &StepControl::default());
            let scalars = sealed::Rule::with_norms(&config, scalars, p, u);
            assert_eq!(got, scalars.minus_step.to_bits(), "{p} {u} {config:?}");
        }
    }
}

/// Chunks of every length around a lane, a thread and a round; the clip factor over every exponent.
#[test]
fn the_norm_is_the_norm() {
    let Some(program) = program() else { return };
    for n in (0..8).chain([127, 128, 511, 512, 513, 2047, 4093, 4095, 4096]) {
        for finite in [true, false] {
            let mut bits = words(n.max(16));
            bits.truncate(n);
            if finite {
                // Few binades, so that the order of additions shows.
                bits.iter_mut().for_each(|bits| *bits = *bits & 0x83FF_FFFF | 120 << 23);
            }
            let answer = ask(program, &[&[6, n as u32][..], &bits].concat());
            let grads: Vec<f32> = bits.iter().map(|&bits| f32::from_bits(bits)).collect();
            let expected = ChunkSums::of(0, &grads).sums().first().map_or(0, |sum| sum.to_bits());
            assert_eq!([answer[0], answer[1]], [expected as u32, (expected >> 32) as u32], "{n} {finite}");
        }
    }
    let sums: Vec<f64> = words(1 << 15)
        .chunks(2)
        .map(|pair| f64::from_bits(u64::from(pair[0] & 0x7FFF_FFFF) << 32 | u64::from(pair[1])))
        .chain([0.0, 1.0, f64::INFINITY, f64::NAN, 1e308])
        .collect();
    for (max_norm, scale) in [(1.0, 1.0), (0.3, -1.0 / 1024.0), (1e30, 3.0), (0.0, 1.0)] {
        let rule = Clip::new(max_norm).unwrap().rule(scale);
        // SAFETY: `repr(C)` and three f64.
        let rule_words = unsafe { core::mem::transmute::<crate::optim::ClipRule, [u32; 6]>(rule) };
        let pairs = sums.iter().flat_map(|sum| [sum.to_bits() as u32, (sum.to_bits() >> 32) as u32]);
        let request: Vec<u32> = [7].into_iter().chain(rule_words).chain([sums.len() as u32]).chain(pairs).collect();
        for (&sum, got) in sums.iter().zip(ask(program, &request)) {
            let (expected, got) = (rule.factor(sum), f32::from_bits(got));
            assert!(expected.to_bits() == got.to_bits() || expected.is_nan() && got.is_nan(), "{max_norm} {sum} {got}");
        }
    }
}

/// Moments in blocks: scale, codes and values, over all exponents in a block and over a few, under every scale.
#[test]
fn blocks_are_those_of_the_step() {
    let Some(program) = program() else { return };
    let elements = [Format::E4M3, Format::E5M2, Format::UE5M3, Format::UE4M4, Format::E2M1, Format::UE2M2NZ];
    let (n, block) = (1 << 16, 32);
    let random = words(2 * n);
    let (mut near, mut far, mut nan) = (0, 0, 0);
    for (number, element) in (0u32..).zip(elements) {
        for (decision, role) in [0, 16].into_iter().flat_map(|d| [(d, Role::FirstMoment), (d, Role::SecondMoment)]) {
            let second = role == Role::SecondMoment;
            if !second && !element.is_signed() {
                continue;
            }
            let pairs: Vec<u32> = (0..n)
                .flat_map(|i| {
                    let word = random[i];
                    // The largest exponent of a block, from that of subnormals to that of infinity.
                    let top = (i / block) as u32 * 7 % 256;
                    let below = if i / block % 2 == 0 { word >> 23 & 7 } else { word >> 23 & 63 };
                    let bits = match (i / block % 16, i % 5) {
                        (0, _) => word,
                        (1, _) => 0,
                        (_, 0) => top << 23,
                        _ => word & 0x807F_FFFF | top.saturating_sub(below) << 23,
                    };
                    [if second { bits & 0x7FFF_FFFF } else { bits }, random[n + i] & 0xFFFF]
                })
                .collect();
            let request = [5, number, decision, second.into(), block as u32, n as u32];
            let answer = ask(program, &[&request[..], &pairs].concat());
            let encoder = BlockEncoder::new(element, BlockScale::Ceil, role);
            let mut answer = &answer[..];
            for pairs in pairs.chunks(2 * block) {
                let x: Vec<f32> = pairs.chunks(2).map(|pair| f32::from_bits(pair[0])).collect();
                let draws: Vec<u16> = pairs.chunks(2).map(|pair| pair[1] as u16).collect();
                let scale = encoder.scale(&x);
                assert_eq!(answer[0], scale.to_bits() >> 23, "{element} {x:?}");
                answer = &answer[1..];
                if scale.is_nan() {
                    nan += 1;
                    continue;
                }
                let is_near = answer[0] == 1;
                answer = &answer[1..];
                if !is_near {
                    far += 1;
                    continue;
                }
                near += 1;
                let mut codes = vec![0u8; block];
                match decision {
                    0 => encoder.codes::<NearestEven, _>(scale, &x, &vec![(); block], &mut codes),
                    _ => encoder.codes::<Draws16, _>(scale, &x, &draws, &mut codes),
                }
                let mut bytes = vec![0; element.bytes(block)];
                match element.bits() {
                    4 => pack(4, &codes, &mut bytes),
                    _ => bytes.copy_from_slice(&codes),
                }
                let each = 32 / element.bits() as usize;
                let words = bytes.as_chunks::<4>().0;
                for (word, codes) in words.iter().zip(codes.chunks(each)) {
                    let word = u32::from_le_bytes(*word);
                    assert_eq!(answer[0], word, "{element} {decision} {role:?} {scale:e} {x:?}");
                    for (code, got) in codes.iter().zip(&answer[1..]) {
                        let value = (element.value(u16::from(*code)) * f64::from(scale)) as f32;
                        assert_eq!(*got, value.to_bits(), "{element} {code:#x} {scale:e}");
                    }
                    answer = &answer[1 + each..];
                }
            }
            assert!(answer.is_empty());
        }
    }
    assert!(near > 18 * 2048 / 4 && far > 0 && nan > 0, "{near} blocks by the short way");
}

/// Every preset, every element of 4, 6 and 8 bits under every rule, and elements of a user's own at the ends of f32.
fn block_formats() -> Vec<BlockFormat> {
    let own = |exponent_bits, fraction_bits, bias| Format::builder(exponent_bits, fraction_bits).bias(bias);
    let elements = Format::NAMED.map(|(_, format)| format).into_iter().chain([
        own(5, 2, 130).build().unwrap(),
        own(5, 2, -60).build().unwrap(),
        own(3, 0, 3).build().unwrap(),
        own(2, 5, 0).build().unwrap(),
        own(7, 0, 63).specials(Specials::NanOnly).build().unwrap(),
        own(2, 4, 20).unsigned().without_zero().build().unwrap(),
        own(5, 3, 90).unsigned().without_zero().specials(Specials::Ieee).build().unwrap(),
    ]);
    let formats = elements.filter(|element| matches!(element.bits(), 4 | 6 | 8)).flat_map(|element| {
        [(16, BlockScale::Ceil), (32, BlockScale::Floor), (128, BlockScale::Amax)]
            .map(|(block, scale)| BlockFormat::new(element, block, scale).unwrap())
    });
    formats.chain([BlockFormat::NVFP4]).collect()
}

/// Values of every kind, another range in each sixteen; `kind` 0 has all exponents, NaN and infinities too.
fn block_values(kind: usize, n: usize) -> Vec<f32> {
    let random = words(2 * n);
    let value = |i: usize| {
        let (word, other) = (random[i], random[n + i]);
        // The largest exponent of the sixteen.
        let top = match kind {
            0 | 1 => (i / 16 * 7 % 255) as u32,
            _ => 100 + (i / 16 * 7 % 40) as u32,
        };
        let bits = match (i / 16 % 16, other % 16) {
            (0, _) if kind == 0 => word,
            (1, _) => word & 0x8000_0000,
            (_, 0) => word & 0x8000_0000,
            (_, 1) => word & 0x8000_0000 | top << 23,
            // On a tie of many formats, or next to it.
            (_, 2) => word & 0x8040_0001 | top.saturating_sub(other >> 8 & 31) << 23,
            (_, 3..9) => word & 0x807F_FFFF | top.saturating_sub(other >> 8 & 3) << 23,
            _ => word & 0x807F_FFFF | top.saturating_sub(other >> 8 & 31) << 23,
        };
        f32::from_bits(bits)
    };
    (0..n).map(value).collect()
}

/// Moments in blocks of any format under scales of both kinds, as the kernel for all combinations makes them, at the draws at
/// which decisions turn.
#[test]
fn moments_under_any_scale_are_those_of_the_step() {
    let Some(program) = program() else { return };
    let moments = [Format::E4M3, Format::E5M2, Format::E2M1].map(|element| (element, Role::FirstMoment)).into_iter();
    let seconds = [Format::E4M3, Format::E5M2, Format::UE5M3, Format::UE4M4, Format::UE2M2NZ];
    let mut nan = 0;
    for (element, role) in moments.chain(seconds.map(|element| (element, Role::SecondMoment))) {
        for (scale, block) in [(BlockScale::Ceil, 32), (BlockScale::Amax, 32), (BlockScale::Amax, 256)] {
            let format = StateFormat::Blocks(BlockFormat::new(element, block, scale).unwrap());
            let arguments = moment(format, role, 8);
            // SAFETY: `repr(C)`, thirty words without padding.
            let arguments = unsafe { core::mem::transmute::<MomentArguments, [u32; 30]>(arguments) };
            let (encoder, decoder) = (BlockEncoder::new(element, scale, role), CpuDecoder::new(element));
            let second = role == Role::SecondMoment;
            let x: Vec<f32> = (0..2).flat_map(|kind| block_values(kind, 1 << 13)).collect();
            let x: Vec<f32> = x.into_iter().map(|x| if second { x.abs() } else { x }).collect();
            for stochastic in [false, true] {
                let code = |scale: f32, x: f32, draw: u16| {
                    let mut code = [0u8];
                    match stochastic {
                        _ if scale.is_nan() => {}
                        true => encoder.codes::<Draws16, _>(scale, &[x], &[draw], &mut code),
                        false => encoder.codes::<NearestEven, _>(scale, &[x], &[()], &mut code),
                    }
                    code[0]
                };
                let mut request = [11].into_iter().chain(arguments).collect::<Vec<_>>();
                request.extend([stochastic.into(), block as u32, x.len() as u32]);
                let mut expected = vec![];
                for x in x.chunks(block) {
                    let new = encoder.scale(x);
                    nan += u32::from(new.is_nan());
                    expected.push(if scale == BlockScale::Amax { new.to_bits() } else { new.to_bits() >> 23 & 0xFF });
                    for (i, &x) in x.iter().enumerate() {
                        let turn = first_up(|draw| code(new, x, (draw >> 16) as u16).into()) >> 16;
                        let draw = turn.wrapping_sub(i as u32 & 1) as u16;
                        let code = code(new, x, draw);
                        let value = decoder.value(code) * new;
                        request.extend([x.to_bits(), draw.into()]);
                        expected.extend([code.into(), if value.is_nan() { 0x7FC0_0000 } else { value.to_bits() }]);
                    }
                }
                let answer = ask(program, &request);
                let at = answer.iter().zip(&expected).position(|(a, b)| a != b);
                assert!(at.is_none() && answer.len() == expected.len(), "{format} {stochastic}: word {at:?}");
            }
        }
    }
    assert!(nan > 0);
}

fn encoder_words(encoder: Encoder) -> [u32; 18] {
    // SAFETY: `repr(C)`, eighteen words without padding.
    unsafe { core::mem::transmute::<Encoder, [u32; 18]>(encoder) }
}

/// The scale of block `b` as stored.
fn stored(scales: &Scales, b: usize) -> u32 {
    match scales {
        Scales::E8M0(codes) | Scales::Nvfp4 { blocks: codes, .. } => codes[b].into(),
        Scales::F32(scales) => scales[b].to_bits(),
    }
}

/// Casts into blocks: scales and codes, with the draws of the stream, and with those at which decisions turn.
#[test]
fn casts_into_blocks_are_those_of_the_cpu() {
    let Some(program) = program() else { return };
    let (mut nan, mut ups) = (0, 0);
    for format in block_formats() {
        let (element, block, width) = (format.element(), format.block(), format.element().bits());
        for (kind, overflow) in [(0, Overflow::Saturate), (1, Overflow::Ieee), (2, Overflow::Saturate)] {
            let x = block_values(kind, 1 << 13);
            let draw = Draw::seeded(5).step(2);
            let encoder = Encoder::new(format, overflow).unwrap();
            let by = |cast: Cast<Draw>| cast.overflow(overflow).to_blocks(&x, format).unwrap();
            let (nearest, stochastic) = (by(Cast::nearest()), by(Cast::stochastic(draw)));
            let global = if let Scales::Nvfp4 { global, .. } = nearest.scales() { *global } else { 1.0 };
            let ask_for = |decision: u32, draws: &dyn Fn(usize) -> u32| {
                let request = [8, decision, width].into_iter().chain(encoder_words(encoder));
                let request = request.chain([global.to_bits(), block as u32, x.len() as u32]);
                let pairs = x.iter().enumerate().flat_map(|(i, x)| [x.to_bits(), draws(i)]);
                ask(program, &request.chain(pairs).collect::<Vec<_>>())
            };
            let compare = |answer: &[u32], code: &dyn Fn(usize) -> u16, scales: &Scales| {
                let mut answer = answer.iter().copied();
                for b in 0..format.blocks(x.len()) {
                    assert_eq!(answer.next(), Some(stored(scales, b)), "{format:?} {kind} block {b}");
                    for first in (b * block..(b + 1) * block).step_by(8) {
                        let [low, high] = [answer.next().unwrap(), answer.next().unwrap()].map(u64::from);
                        for (i, x) in x.iter().enumerate().skip(first).take(8) {
                            let got = (high << 32 | low) >> (width as usize * (i - first)) & ((1 << width) - 1);
                            assert_eq!(got, u64::from(code(i)), "{format:?} {overflow:?} {i}: {x:e}");
                        }
                    }
                }
            };
            compare(&ask_for(0, &|_| 0), &|i| nearest.code(i), nearest.scales());
            compare(&ask_for(32, &|i| draw.draw32(i as u64)), &|i| stochastic.code(i), stochastic.scales());
            nan += nearest.nan_blocks();
            ups += (0..x.len()).filter(|&i| nearest.code(i) != stochastic.code(i)).count();

            let code = |i: usize, draw: u32| {
                let scale = nearest.scales().get(i / block);
                let quotient = f64::from(x[i]) / if scale == 0.0 { 1.0 } else { scale };
                let mode = Mode::Stochastic(RandomBits::of32(draw));
                if scale.is_nan() { 0 } else { round(quotient, element, mode, overflow) }
            };
            let turns: Vec<u32> =
                (0..x.len()).map(|i| first_up(|draw| code(i, draw).into()).wrapping_sub(i as u32 >> 3 & 1)).collect();
            compare(&ask_for(32, &|i| turns[i]), &|i| code(i, turns[i]), nearest.scales());
        }
    }
    assert!(nan > 0 && ups > 0, "{nan} {ups}");
    let amax: Vec<u32> = words(1 << 12).into_iter().map(|word| (word & 0x7FFF_FFFF).min(0x7F7F_FFFF)).collect();
    let answer = ask(program, &[&[10, amax.len() as u32][..], &amax].concat());
    let globals = amax.iter().map(|&amax| BlockFormat::nvfp4_global(f32::from_bits(amax).into()).to_bits());
    assert!(globals.eq(answer));
}

/// Every code under scales of every kind, those too that no cast makes.
#[test]
fn values_of_blocks_are_those_of_the_cpu() {
    let Some(program) = program() else { return };
    for format in block_formats() {
        let (element, block) = (format.element(), format.block());
        let random = words(1 << 8);
        let codes: Vec<u8> = (0..random.len() * block).map(|i| (i % element.code_count() as usize) as u8).collect();
        let mut bytes = vec![0; element.bytes(codes.len())];
        match element.bits() {
            8 => bytes.copy_from_slice(&codes),
            width => pack(width as usize, &codes, &mut bytes),
        }
        let global = 0.3f32;
        let scales = match format.scale() {
            BlockScale::Ceil | BlockScale::Floor => Scales::E8M0((0..=u8::MAX).collect()),
            BlockScale::Amax => Scales::F32(random.iter().map(|&bits| f32::from_bits(bits)).collect()),
            BlockScale::Nvfp4 => Scales::Nvfp4 { blocks: (0..=u8::MAX).collect(), global },
        };
        let blocks = BlockVec::from_parts(format, codes.len(), bytes, scales).unwrap();
        let decoder = Decoder::new(element).unwrap();
        // SAFETY: `repr(C)` and eight words.
        let decoder = unsafe { core::mem::transmute::<Decoder, [u32; 8]>(decoder) };
        let request =
            [9].into_iter().chain(decoder).chain([rule(format.scale()), global.to_bits(), codes.len() as u32]);
        let pairs = codes.iter().enumerate().flat_map(|(i, &code)| [code.into(), stored(blocks.scales(), i / block)]);
        let answer = ask(program, &request.chain(pairs).collect::<Vec<_>>());
        for (i, (got, expected)) in answer.iter().zip(blocks.decode()).enumerate() {
            assert_eq!(*got, expected.to_bits(), "{format:?} {:#x} {:e}", codes[i], blocks.scales().get(i / block));
        }
    }
}
