//! What `halfulp simulate` prints.

use halfulp::Format;
use halfulp::random::Role;
use halfulp::stall::{self, Checkpoint, Law, Scaling, Simulation, Start, Storage, Variances};
use serde_json::Value;
use tempfile::TempDir;

use super::{fails, succeeds};

fn json(line: &str) -> Value {
    let directory = TempDir::new().unwrap();
    serde_json::from_str(&succeeds(directory.path(), &format!("simulate --json {line}"))).unwrap()
}

#[test]
fn json_holds_what_the_library_says() {
    let base = Simulation { variances: Variances::Binade(1.0), coordinates: 300, ..Simulation::default() };
    let cases = [
        (
            "--format E4M3 --steps 5",
            Simulation {
                storage: Storage::stochastic(Format::E4M3, 0).scaled(Scaling::PowerOfTwo { block: 128 }),
                checkpoints: vec![1, 2, 3, 4, 5],
                ..base.clone()
            },
        ),
        (
            "--format bf16 --rounding nearest --beta2 0.99 --steps 23 --seed 9 --law change:10:0.25",
            Simulation {
                beta: 0.99,
                storage: Storage::nearest(Format::BF16),
                law: Law::VarianceChange { after: 10, factor: 0.25 },
                checkpoints: vec![3, 6, 9, 12, 15, 18, 21, 23],
                seed: 9,
                ..base.clone()
            },
        ),
        (
            "--format e5m2 --beta1 0.9 --steps 20 --seed 3 --start zero --law student-t:4.5 --scaling amax --block 32",
            Simulation {
                role: Role::FirstMoment,
                beta: 0.9,
                storage: Storage::stochastic(Format::E5M2, 3).scaled(Scaling::Amax { block: 32 }),
                law: Law::StudentT { freedom: 4.5 },
                start: Start::Zero,
                checkpoints: (1..=10).map(|k| 2 * k).collect(),
                seed: 3,
                ..base.clone()
            },
        ),
        (
            "--format f32 --law constant --steps 1",
            Simulation { storage: Storage::F32, law: Law::Constant, checkpoints: vec![1], ..base },
        ),
    ];
    for (line, simulation) in cases {
        let printed = json(&format!("{line} --coordinates 300"));
        let expected = simulation.run().unwrap().checkpoints;
        let checkpoints = printed["checkpoints"].as_array().unwrap();
        assert_eq!(checkpoints.len(), expected.len(), "{line}");
        for (printed, expected) in checkpoints.iter().zip(&expected) {
            let Checkpoint { step, stalls, window, never_moved, mean, variance, exact, correction, up, down, .. } =
                expected;
            assert_eq!(printed["step"], *step);
            let numbers = [
                ("/stalled", stalls.share()),
                ("/window/stalled", window.share()),
                ("/window/same_code", window.same_code_share()),
                ("/window/up/proposed", up.proposed),
                ("/window/up/delivered", up.delivered),
                ("/window/down/proposed", down.proposed),
                ("/window/down/delivered", down.delivered),
                ("/never_moved", *never_moved),
                ("/mean", *mean),
                ("/variance", *variance),
                ("/exact", *exact),
                ("/correction", *correction),
            ];
            for (name, number) in numbers {
                // JSON is read to the last digit or so.
                let printed = printed.pointer(name).and_then(Value::as_f64).unwrap();
                assert!((printed - number).abs() <= 1e-15 * number.abs(), "{line}: {name}: {printed} {number}");
            }
        }
    }
    let printed = json("--format E5M2 --beta1 0.5 --steps 1 --coordinates 1 --scaling amax");
    for (name, value) in
        [("/moment", "first"), ("/format", "E5M2"), ("/scaling/scale", "amax"), ("/gradients/law", "gaussian")]
    {
        assert_eq!(printed.pointer(name).and_then(Value::as_str), Some(value));
    }
    assert_eq!((&printed["beta"], &printed["scaling"]["block"]), (&0.5.into(), &128.into()));
}

/// The model beside the measurement, where it has something to say.
#[test]
fn predictions_stand_beside_measurements() {
    let near = |value: &Value, expected: f64| {
        let got = value.as_f64().unwrap();
        assert!((got - expected).abs() <= 1e-14, "{got} {expected}");
    };
    let stochastic = json("--format e4m3 --steps 200 --coordinates 300");
    let share = stall::average_probability(Format::E4M3, 0.999).unwrap().stochastic;
    near(&stochastic["predicted_variance"], stall::noise(Format::E4M3, 0.999).unwrap().still_grid);
    for checkpoint in stochastic["checkpoints"].as_array().unwrap() {
        near(&checkpoint["predicted"], share);
        // 20 steps of 300 coordinates: five standard errors are 0.007.
        assert!((checkpoint["window"]["stalled"].as_f64().unwrap() - share).abs() < 0.007, "{checkpoint}");
    }
    let nearest = json("--rounding nearest --start zero --steps 20 --coordinates 1");
    assert_eq!(nearest["predicted_variance"], Value::Null);
    for checkpoint in nearest["checkpoints"].as_array().unwrap() {
        let age = checkpoint["step"].as_u64().unwrap() - 1;
        let share = stall::average_probability_since_reset(Format::BF16, 0.999, age).unwrap().nearest;
        near(&checkpoint["predicted"], share);
    }
    for unknown in ["--beta1 0.9", "--beta2 0", "--format f32", "--law constant", "--format e4m3 --scaling amax"] {
        let printed = json(&format!("{unknown} --steps 1 --coordinates 1"));
        let predicted = [&printed["predicted_variance"], &printed["checkpoints"][0]["predicted"]];
        assert_eq!(predicted, [&Value::Null; 2], "{unknown}");
    }
}

#[test]
fn text_is_a_table_that_threads_do_not_change() {
    let directory = TempDir::new().unwrap();
    let on = |threads: u32| {
        let line =
            format!("simulate --format e4m3 --rounding nearest --steps 40 --coordinates 2000 --threads {threads}");
        succeeds(directory.path(), &line)
    };
    let text = on(1);
    assert_eq!(text, on(3));
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[4].split_whitespace().collect::<Vec<_>>().join(" "), "scaling block 128, scale power of two");
    let first: Vec<&str> = lines[11].split_whitespace().collect();
    // Of 8 bits rounded to nearest nearly nothing moves, and no decrease at all.
    assert_eq!((first.len(), first[0], first[3]), (10, "4", "1.00000"));
    assert!(first[1].parse::<f64>().unwrap() > 0.999 && first[9] == "0.00000", "{first:?}");
    assert_eq!(lines.iter().filter(|line| line.trim_start().starts_with(|c: char| c.is_ascii_digit())).count(), 10);
}

#[test]
fn errors() {
    let directory = TempDir::new().unwrap();
    let error = |line: &str| fails(directory.path(), &format!("simulate {line}"));
    let cases = [
        ("--format e9m9", "unknown format `e9m9`"),
        ("--beta2 1", "expected a number from 0 to below 1"),
        ("--beta2 -1", "expected a number from 0 to below 1"),
        ("--beta1 NaN", "expected a number from 0 to below 1"),
        ("--beta1 .9 --beta2 .9", "cannot be used with"),
        ("--steps 0", "0 is not in 1..=1000000000"),
        ("--coordinates 0", "0 is not in 1.."),
        ("--block 0", "0 is not in 1.."),
        ("--block 2000000", "2000000 is not in 1..=1048576"),
        ("--law cauchy", "expected constant, gaussian, change:AFTER:FACTOR or student-t:FREEDOM"),
        ("--law student-t", "expected constant, gaussian"),
        ("--law student-t:2", "freedom: expected a finite number above 2, got 2"),
        ("--law change:5:-1", "factor: expected a number from 1e-6 to 1e6, got -1"),
        ("--format ue4m4 --beta1 0.9", "format: not supported: first moments have both signs"),
        ("--format f32 --scaling amax", "scaling: not supported: values in f32 are not scaled"),
        ("--rounding up", "invalid value 'up'"),
    ];
    for (line, expected) in cases {
        let error = error(line);
        assert!(error.contains(expected), "{line}: {error}");
    }
}
