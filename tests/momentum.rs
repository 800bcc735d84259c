//! Stalling of first moments and momentums: the closed form, its simulation, the optimizers, and what is refused.
#![cfg(feature = "stall")]

use std::f64::consts::{SQRT_2, TAU};

use halfulp::Format;
use halfulp::optim::{
    AdEMAMixConfig, AdamConfig, AdamWConfig, LambConfig, LionConfig, MixStates, OptimError, Optimizer, Rounding, Rule,
    SgdConfig, StateFormat, States,
};
use halfulp::random::Role;
use halfulp::stall::{
    self, Law, Probability, Scaling, Share, Simulation, StallCounts, StallError, Start, State, Step, Storage,
    Variances, momentum_probability, momentum_probability_at_mantissa, momentum_probability_since_reset,
};

/// Fraction bits with exponents that do not end here.
fn unlimited(fraction_bits: u8) -> Format {
    Format::builder(7, fraction_bits).build().unwrap()
}

/// Simpson's rule.
fn simpson(a: f64, b: f64, steps: u32, f: impl Fn(f64) -> f64) -> f64 {
    let h = (b - a) / f64::from(steps);
    let term = |k: u32| f(a + h * f64::from(k)) * if k == 0 || k == steps { 1.0 } else { f64::from(2 + k % 2 * 2) };
    h / 3.0 * (0..=steps).map(term).sum::<f64>()
}

fn gaussian(x: f64) -> f64 {
    (-x * x / 2.0).exp() / TAU.sqrt()
}

/// Stalled to nearest and stochastically at one mantissa, as integrals over moment and gradient: the deviation of the moment
/// is `spread` times that of a gradient.
fn by_quadrature(epsilon: f64, beta: f64, mantissa: f64, spread: f64) -> [f64; 2] {
    let below = |x: f64| libm::erfc(-x / SQRT_2) / 2.0;
    let shares = |m: f64| {
        // Gradients that move m by half a spacing, and by a whole one, are so far from it.
        let half = epsilon * m / (2.0 * mantissa * (1.0 - beta));
        let stays = |g: f64| gaussian(g) * (1.0 - (g - m).abs() / (2.0 * half));
        let (low, high) = ((m - 2.0 * half).max(-9.0), (m + 2.0 * half).min(9.0));
        [below(m + half) - below(m - half), simpson(low, m, 200, stays) + simpson(m, high, 200, stays)]
    };
    [0, 1].map(|k| 2.0 * simpson(1e-9, 9.0, 2000, |x| gaussian(x) * shares(spread * x)[k]))
}

fn both(p: Probability) -> [f64; 2] {
    [p.nearest, p.stochastic]
}

#[test]
fn closed_form_is_the_integral() {
    for format in [Format::FP16, Format::BF16, Format::UE4M4, Format::E4M3, Format::E2M1] {
        for beta in [0.0f64, 0.5, 0.9, 0.99, 0.9999] {
            let spread = ((1.0 - beta) / (1.0 + beta)).sqrt();
            for mantissa in [1.0, 1.3, 1.99] {
                let expected = by_quadrature(format.epsilon(), beta, mantissa, spread);
                let p = momentum_probability_at_mantissa(format, beta, mantissa).unwrap();
                let moves = [p.nearest_moves, p.stochastic_moves];
                for k in 0..2 {
                    let (got, expected) = (both(p)[k], expected[k]);
                    assert!((got - expected).abs() < 2e-6, "{format} {beta} {mantissa} {k}: {got} {expected}");
                    assert!((got + moves[k] - 1.0).abs() < 1e-11, "{format} {beta} {mantissa} {k}");
                }
            }
        }
    }
}

#[test]
fn averages_over_the_mantissa_and_ages() {
    for format in [Format::BF16, Format::E4M3, Format::E2M1] {
        for beta in [0.5f64, 0.9, 0.999] {
            let mean = both(momentum_probability(format, beta).unwrap());
            let at = |x: f64| both(momentum_probability_at_mantissa(format, beta, x.exp2()).unwrap());
            for (k, mean) in mean.into_iter().enumerate() {
                let expected = simpson(0.0, 1.0 - 1e-12, 200, |x| at(x)[k]);
                assert!((mean - expected).abs() < 1e-9, "{format} {beta}: {mean} {expected}");
            }
            let of_age = |age| both(momentum_probability_since_reset(format, beta, age).unwrap());
            assert_eq!(of_age(0), [0.0; 2]);
            let ages = [1, 2, 5, 20, 100, 1000, 20_000].map(of_age);
            // Up to where nothing is left to grow.
            assert!(ages.windows(2).all(|pair| (0..2).all(|k| pair[0][k] <= pair[1][k] + 1e-15)), "{ages:?}");
            assert!((0..2).all(|k| (ages[6][k] - mean[k]).abs() < 1e-12));
        }
    }
    // The age enters through the deviation of the moment alone.
    let spread = (0.1f64 / 1.9 * (1.0 - 0.9f64.powi(6))).sqrt();
    let of_age = |k: usize| simpson(0.0, 1.0, 20, |x| by_quadrature(0.125, 0.9, x.exp2(), spread)[k]);
    let p = both(momentum_probability_since_reset(Format::E4M3, 0.9, 3).unwrap());
    assert!((0..2).all(|k| (p[k] - of_age(k)).abs() < 2e-6), "{p:?}");
}

#[test]
fn ranges() {
    for beta in [1.0, -0.1, f64::NAN] {
        let refused = momentum_probability(Format::BF16, beta).unwrap_err();
        assert!(matches!(refused, StallError::Range { argument: "beta", .. }), "{refused}");
        assert!(momentum_probability_since_reset(Format::BF16, beta, 3).is_err());
    }
    for mantissa in [0.99, 2.0, f64::NAN] {
        let refused = momentum_probability_at_mantissa(Format::BF16, 0.9, mantissa).unwrap_err();
        assert!(matches!(refused, StallError::Range { argument: "mantissa", .. }), "{refused}");
    }
    // Without memory the next gradient is the next moment, at any age above 0.
    let p = both(momentum_probability(Format::BF16, 0.0).unwrap());
    assert_eq!(p, both(momentum_probability_since_reset(Format::BF16, 0.0, 1).unwrap()));
}

#[test]
fn shares_of_groups() {
    let group = |stalled, moved| {
        let mut counts = StallCounts::default();
        (counts.stalled, counts.moved) = (stalled, moved);
        counts
    };
    let share = Share::of(&[group(10, 90), group(20, 80), group(15, 85)]);
    assert_eq!((share.value, share.standard_error), (0.15, (50.0f64 * 3.0 / 2.0).sqrt() / 300.0));
    // A group counts for as much as there is in it.
    assert_eq!(Share::of(&[group(0, 10), group(90, 0)]).value, 0.9);
    assert!(Share::of(&[group(1, 1)]).standard_error.is_nan());
}

/// Groups of coordinates, each with seeds of its own.
const GROUPS: u64 = 32;

/// The shares that stall in the windows that end at the checkpoints, from zero.
fn simulated(simulation: &Simulation) -> Vec<Share> {
    let group = |group| {
        let mut simulation = Simulation { seed: simulation.seed + group, ..simulation.clone() };
        if let Rounding::Stochastic { seed } = &mut simulation.storage.rounding {
            *seed += group;
        }
        simulation.run().unwrap().checkpoints
    };
    let groups: Vec<_> = (0..GROUPS).map(group).collect();
    let window = |w: usize| Share::of(&groups.iter().map(|group| group[w].window).collect::<Vec<_>>());
    (0..simulation.checkpoints.len()).map(window).collect()
}

fn momentum(beta: f64, storage: Storage) -> Simulation {
    Simulation {
        role: Role::FirstMoment,
        beta,
        storage,
        variances: Variances::Binade(1.0),
        start: Start::Zero,
        coordinates: 256,
        seed: 7000,
        ..Simulation::default()
    }
}

/// Whether a share is this one, within 5 standard errors.
fn is(share: Share, expected: f64) -> bool {
    (share.value - expected).abs() <= 5.0 * share.standard_error
}

#[test]
fn bf16_is_simulated_as_the_closed_form_says() {
    for (beta, window, nine_more, nine_less) in
        [(0.9, 500, 0.99, 0.0), (0.99, 500, 0.999, 0.9), (0.999, 1000, 0.9999, 0.99)]
    {
        let settled = (4.0 / (1.0 - beta)) as u64;
        for (k, storage) in [Storage::nearest(Format::BF16), Storage::stochastic(Format::BF16, 3)].iter().enumerate() {
            let checkpoints = vec![settled, settled + window];
            let seen = simulated(&Simulation { checkpoints, ..momentum(beta, *storage) })[1];
            let formula = |format, beta| both(momentum_probability(format, beta).unwrap())[k];
            let expected = formula(Format::BF16, beta);
            assert!(is(seen, expected), "{beta} {k}: {seen:?} {expected}");
            // Another number of nines, another bit of the fraction, and the model of second moments would not do.
            let second = both(stall::average_probability(Format::BF16, beta).unwrap())[k];
            for wrong in [formula(Format::BF16, nine_more), formula(Format::BF16, nine_less), second] {
                assert!(!is(seen, wrong), "{beta} {k}: {seen:?} {wrong}");
            }
            assert!(!is(seen, formula(unlimited(8), beta)) && !is(seen, formula(unlimited(6), beta)));
        }
    }
}

#[test]
fn bf16_since_a_reset() {
    let beta = 0.99;
    for (k, storage) in [Storage::nearest(Format::BF16), Storage::stochastic(Format::BF16, 3)].iter().enumerate() {
        let checkpoints = vec![1, 10, 30, 60, 100, 200];
        let seen = simulated(&Simulation { checkpoints: checkpoints.clone(), ..momentum(beta, *storage) });
        assert_eq!(seen[0].value, 0.0);
        let stationary = both(momentum_probability(Format::BF16, beta).unwrap())[k];
        for (window, seen) in checkpoints.windows(2).zip(&seen[1..]) {
            let of_age = |age| both(momentum_probability_since_reset(Format::BF16, beta, age).unwrap())[k];
            // A step starts from the age before it.
            let expected = (window[0]..window[1]).map(of_age).sum::<f64>() / (window[1] - window[0]) as f64;
            assert!(is(*seen, expected), "{window:?} {k}: {seen:?} {expected}");
            assert!(window[1] > 60 || !is(*seen, stationary), "{window:?} {k}: {seen:?} {stationary}");
        }
    }
}

/// Where a typical step is shorter than a spacing, nearest rounding leaves the moment too small, and stochastic rounding
/// spreads it too wide: neither has the law of the formula, and both stall less often than it says.
#[test]
fn long_memories_in_few_bits_are_beyond_the_formula() {
    let beta = 0.9999;
    let exact = (1.0 - beta) / (1.0 + beta);
    let of = |storage| {
        let simulation = Simulation { checkpoints: vec![20_000, 30_000], coordinates: 2048, ..momentum(beta, storage) };
        let last = simulation.run().unwrap().checkpoints[1].clone();
        (last.variance / exact, last.window.share())
    };
    let [nearest, stochastic] = [of(Storage::nearest(unlimited(3))), of(Storage::stochastic(unlimited(3), 3))];
    let formula = both(momentum_probability(unlimited(3), beta).unwrap());
    assert!(nearest.0 < 0.3 && stochastic.0 > 4.0, "{nearest:?} {stochastic:?}");
    assert!(nearest.1 < formula[0] - 0.2 && stochastic.1 < formula[1] - 0.03, "{nearest:?} {stochastic:?} {formula:?}");
}

const ELEMENTS: usize = 1003;

/// The states that a rule stores are those simulated, step for step and bit for bit; those of another simulation are not.
fn stores<R: Rule>(
    config: R,
    states: R::States,
    rounding: Rounding,
    place: usize,
    right: &Simulation,
    wrong: &Simulation,
) {
    for (simulation, same) in [(right, true), (wrong, false)] {
        let mut optimizer = Optimizer::new(config, states, rounding).unwrap();
        let (mut params, mut differed) = (vec![1.0f32; ELEMENTS], false);
        let look = |step: Step<'_>| {
            optimizer.step(&mut params, step.gradients).unwrap();
            differed |= optimizer.stored(0).unwrap()[place].to_f32() != step.state.values();
        };
        simulation.observe(look).unwrap();
        assert_ne!(differed, same, "{} {rounding:?} {simulation:?}", R::NAME);
    }
}

#[test]
fn stores_what_the_optimizers_store() {
    let block = Scaling::PowerOfTwo { block: 128 };
    for (format, element, scaling) in [
        (StateFormat::F32, None, Scaling::Unscaled),
        (StateFormat::Bf16, Some(Format::BF16), Scaling::Unscaled),
        (StateFormat::E4M3, Some(Format::E4M3), block),
        (StateFormat::E5M2, Some(Format::E5M2), block),
        (StateFormat::E2M1, Some(Format::E2M1), block),
    ] {
        for rounding in [Rounding::Nearest, Rounding::stochastic(11)] {
            let variances = Variances::Listed((0..ELEMENTS).map(|i| 10f64.powi(i as i32 % 7 - 6)).collect());
            let storage = Storage { format: element, rounding, scaling };
            let base = Simulation { variances, coordinates: ELEMENTS, checkpoints: vec![40], ..momentum(0.9, storage) };
            let sgd = Simulation { gain: Some(1.0), ..base.clone() };
            stores(SgdConfig::default(), format, rounding, 0, &sgd, &base);
            let lion = Simulation { beta: 0.99, ..base.clone() };
            // Its other decay is in the update alone.
            stores(LionConfig::default(), format, rounding, 0, &lion, &base);
            let slow = Simulation { beta: 0.9999, role: Role::ThirdState, ..base.clone() };
            let nine_less = Simulation { beta: 0.999, ..slow.clone() };
            let states = MixStates { m: StateFormat::F32, v: StateFormat::F32, slow: format };
            stores(AdEMAMixConfig::default(), states, rounding, 2, &slow, &nine_less);
            let states = States { m: format, v: StateFormat::F32 };
            stores(LambConfig::default(), states, rounding, 0, &base, &sgd);
            stores(AdamConfig::default(), states, rounding, 0, &base, &sgd);
        }
    }
}

/// What the meter of an optimizer counts in one state over the steps of a window, in tensors with seeds of their own.
fn metered<R: Rule>(config: R, states: R::States, nearest: bool, place: usize, last: u64, window: u64) -> Share {
    let tensor = |group: u64| {
        let rounding = if nearest { Rounding::Nearest } else { Rounding::stochastic(900 + group) };
        let mut optimizer = Optimizer::new(config, states, rounding).unwrap().meter(true);
        let source = Simulation { seed: 100 + group, checkpoints: vec![last], ..decades(0.9, Storage::F32) };
        let (mut params, mut counts) = (vec![0.5f32; source.coordinates], StallCounts::default());
        let look = |step: Step<'_>| {
            optimizer.step(&mut params, step.gradients).unwrap();
            if step.number > last - window {
                counts += optimizer.stalls(0)[place];
            }
        };
        source.observe(look).unwrap();
        counts
    };
    Share::of(&(0..GROUPS).map(tensor).collect::<Vec<_>>())
}

/// Gradients over three decades in each block.
fn decades(beta: f64, storage: Storage) -> Simulation {
    let variances = (0..128).map(|i| 10f64.powf(-6.0 * f64::from(i * 79 % 128) / 128.0)).collect();
    Simulation { variances: Variances::Listed(variances), coordinates: 128, ..momentum(beta, storage) }
}

#[test]
fn the_meter_counts_what_is_simulated() {
    let (bf16, e2m1) = (StateFormat::Bf16, StateFormat::E2M1);
    let (last, window) = (500, 300);
    let mut nearest_for_stochastic = false;
    for format in [bf16, StateFormat::E4M3, StateFormat::E5M2, e2m1] {
        let two = States { m: format, v: bf16 };
        let three = MixStates { m: bf16, v: bf16, slow: format };
        // For each decay and gain: simulated to nearest and stochastically.
        let of = |beta, gain, role| {
            [true, false].map(|nearest| {
                let (element, scaling) = match format {
                    StateFormat::Blocks(blocks) => (blocks.element(), Scaling::PowerOfTwo { block: 128 }),
                    _ => (Format::BF16, Scaling::Unscaled),
                };
                let rounding = if nearest { Rounding::Nearest } else { Rounding::stochastic(500) };
                let storage = Storage { format: Some(element), rounding, scaling };
                let checkpoints = vec![last - window, last];
                simulated(&Simulation { gain, role, checkpoints, ..decades(beta, storage) })[1]
            })
        };
        let first = of(0.9, None, Role::FirstMoment);
        let sgd = of(0.9, Some(1.0), Role::FirstMoment);
        let lion = of(0.99, None, Role::FirstMoment);
        let slow = of(0.9999, None, Role::ThirdState);
        for (k, nearest) in [true, false].into_iter().enumerate() {
            let run = |name: &str, seen: Share, right: [Share; 2], wrong: Share| {
                let off =
                    |other: Share| (seen.value - other.value).abs() / seen.standard_error.hypot(other.standard_error);
                assert!(off(right[k]) <= 5.0, "{name} {format} {k}: {seen:?} {right:?}");
                assert!(off(wrong) > 5.0, "{name} {format} {k}, decay off by a nine: {seen:?} {wrong:?}");
                off(right[1 - k]) > 5.0
            };
            let seen = metered(AdamWConfig::default(), two, nearest, 0, last, window);
            let distinct = run("adamw", seen, first, lion[k]);
            // Of the four, E2M1 alone tells nearest from stochastic rounding by its stalls at a decay of 0.9.
            assert_eq!(distinct, format == e2m1);
            nearest_for_stochastic |= distinct;
            run("adam", metered(AdamConfig::default(), two, nearest, 0, last, window), first, lion[k]);
            run("lamb", metered(LambConfig::default(), two, nearest, 0, last, window), first, lion[k]);
            run("sgd", metered(SgdConfig::default(), format, nearest, 0, last, window), sgd, lion[k]);
            run("lion", metered(LionConfig::default(), format, nearest, 0, last, window), lion, first[k]);
            run("ademamix", metered(AdEMAMixConfig::default(), three, nearest, 2, last, window), slow, lion[k]);
        }
    }
    assert!(nearest_for_stochastic);
}

#[test]
fn signed_states_refuse_unsigned_formats() {
    let reason = "format: not supported: first moments have both signs, and the format has none";
    for format in [Format::UE5M3, Format::UE4M4, Format::UE2M2, Format::UE2M2NZ] {
        for role in [Role::FirstMoment, Role::ThirdState] {
            let storage = Storage::nearest(format).scaled(Scaling::PowerOfTwo { block: 128 });
            let refused = Simulation { role, ..momentum(0.9, storage) }.run().unwrap_err();
            assert_eq!(refused.to_string(), reason);
            assert_eq!(State::zeroed(storage, role, 4).unwrap_err().to_string(), reason);
        }
    }
    for format in [StateFormat::UE5M3, StateFormat::UE4M4, StateFormat::UE2M2NZ] {
        let refused = |error: OptimError, name: &str| {
            assert!(matches!(error, OptimError::State { argument, .. } if argument == name), "{error}");
        };
        let states = MixStates { m: StateFormat::Bf16, v: StateFormat::Bf16, slow: format };
        refused(Optimizer::new(AdEMAMixConfig::default(), states, Rounding::Nearest).unwrap_err(), "slow");
        refused(Optimizer::new(SgdConfig::default(), format, Rounding::Nearest).unwrap_err(), "m");
        refused(Optimizer::new(LionConfig::default(), format, Rounding::Nearest).unwrap_err(), "m");
    }
}

#[test]
fn gains() {
    for gain in [0.0, -1.0, 1001.0, f64::NAN] {
        let simulation = Simulation { gain: Some(gain), ..momentum(0.9, Storage::F32) };
        let refused = simulation.run().unwrap_err().to_string();
        assert_eq!(refused, format!("gain: expected a number above 0, up to 1000, got {gain}"));
    }
    // A momentum of gain 1 settles at ten times the gradient, and is that far from the start on if it starts there.
    for role in [Role::FirstMoment, Role::ThirdState, Role::SecondMoment] {
        let base = Simulation { role, gain: Some(1.0), law: Law::Constant, ..momentum(0.9, Storage::F32) };
        let settled = base.run().unwrap().checkpoints[0].clone();
        let kept = Simulation { start: Start::Exact, ..base }.run().unwrap().checkpoints[0].clone();
        assert!((settled.exact - 10.0).abs() < 1e-12 && settled.bias().abs() < 1e-4 && kept.bias().abs() < 1e-4);
    }
    // Powers of two change the exponent alone.
    let base = momentum(0.5, Storage::stochastic(Format::BF16, 3));
    let [average, sum] = [None, Some(1.0)].map(|gain| Simulation { gain, ..base.clone() }.run().unwrap());
    assert_eq!(average.checkpoints[0].window, sum.checkpoints[0].window);
}
