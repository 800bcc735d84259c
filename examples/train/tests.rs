//! A training that stops and goes on is the training that never stopped.

use std::fs;
use std::path::Path;

use tempfile::TempDir;

use crate::error::TrainError;
use crate::log::{Log, Row};
use crate::options::{Options, Start};
use crate::run;

fn options(line: &str) -> Result<Options, TrainError> {
    Options::parse(line.split_whitespace().map(String::from))
}

/// Runs a line with `--out`; gives what is printed.
fn train(line: &str, out: &Path) -> Result<String, TrainError> {
    run(&Options { out: out.into(), ..options(line)? })
}

fn refused(line: &str) -> String {
    match options(line) {
        Err(error) => error.to_string(),
        Ok(_) => panic!("{line}: not refused"),
    }
}

#[test]
fn resumed_is_straight_through() {
    let temporary = TempDir::new().unwrap();
    let [straight, stopped, resumed] = ["straight", "stopped", "resumed"].map(|name| temporary.path().join(name));
    // The model resets after step 458, the measurement later.
    for resets in ["model", "adaptive", "off"] {
        let line = format!("--steps 700 --seed 3 --resets {resets}");
        let whole = train(&format!("{line} --every 1000"), &straight).unwrap();
        assert_eq!(whole.contains(" after step "), resets != "off", "{whole}");
        assert_eq!(train(&format!("{line} --every 250"), &stopped).unwrap(), whole, "{resets}: writing changed bits");
        for stop in ["step-250", "step-500"] {
            let at = stopped.join(stop);
            let resume = Options { start: Start::Resume(at), every: Some(77), out: resumed.clone() };
            assert_eq!(run(&resume).unwrap(), whole, "{resets}, {stop}");
            let files = ["log.csv", "curves.svg", "curves.png", "step-700/model.safetensors", "step-700/stalls.csv"];
            for file in files.into_iter().chain(["step-700/optimizer.safetensors"]) {
                let [expected, got] = [&straight, &resumed].map(|out| fs::read(out.join(file)).unwrap());
                assert!(expected == got, "{resets}, {stop}: {file}");
            }
        }
    }
}

#[test]
fn the_end_resumes_too() {
    let temporary = TempDir::new().unwrap();
    let out = temporary.path();
    let whole = train("--steps 20", out).unwrap();
    let at = out.join("step-20");
    assert_eq!(run(&Options { start: Start::Resume(at), every: None, out: out.into() }).unwrap(), whole);
    assert_ne!(train("--steps 20 --seed 1", out).unwrap(), whole);
}

#[test]
fn gradients_that_are_not_finite_leave_the_step_out() {
    let temporary = TempDir::new().unwrap();
    let error = train("--steps 40 --lr 1e38", temporary.path()).unwrap_err().to_string();
    assert!(error.contains("no finite gradients in 10 steps on end; try a smaller --lr"), "{error}");
}

#[test]
fn a_log_reads_back_as_it_was() {
    let executed = Row {
        lr: 1e-3 / 3.0,
        loss: 0.1,
        test: Some(2.0 / 3.0),
        norm: 1e-300,
        clip: Some(0.1),
        stalled: Some([1.0 / 3.0, 0.7]),
        resets: vec!["hidden1.weight", "output.bias"],
    };
    let left_out = Row { loss: f64::NAN, norm: f64::INFINITY, ..Row::default() };
    let log = Log { rows: vec![executed, left_out], ..Log::default() };
    let (csv, stalls) = (log.csv(), log.stalls.csv());
    let path = Path::new("");
    let again = Log::read([(path, &csv), (path, &stalls)]).unwrap();
    assert_eq!((again.csv(), again.stalls.csv()), (csv, stalls));
    assert_eq!([again.steps(), again.skipped(), again.skipped_on_end()], [2, 1, 1]);
}

#[test]
fn refusals_name_the_argument() {
    for (line, expected) in [
        ("--steps 1", "--steps: expected a number from 2 to 1000000, got 1"),
        ("--seed x", "--seed: expected a number below 2^64, got x"),
        ("--lr -1", "--lr: expected a learning rate, finite and not negative, got -1"),
        ("--clip nan", "--clip: expected a norm, finite and not negative, got nan"),
        ("--resets on", "--resets: expected off, model or adaptive, got on"),
        ("--every 0", "--every: expected a number of steps from 1 on, got 0"),
        ("--out", "--out: expected a value, got none"),
        ("--resume a --seed 1", "--seed: not with --resume, which goes on as the training began"),
        ("--resume a --quick", "--quick: not with --resume, which goes on as the training began"),
    ] {
        assert_eq!(refused(line), expected, "{line}");
    }
    assert!(refused("--fast").starts_with("--fast: unknown; usage: train "));
}

#[test]
fn broken_checkpoints_are_refused() {
    let temporary = TempDir::new().unwrap();
    let out = temporary.path();
    train("--steps 20 --every 10", out).unwrap();
    let at = out.join("step-10");
    let fails = || {
        let resume = Options { start: Start::Resume(at.clone()), every: None, out: out.join("resumed") };
        run(&resume).unwrap_err().to_string()
    };
    let model = fs::read(at.join("model.safetensors")).unwrap();
    for (file, change, expected) in [
        ("log.csv", &b"step\n"[..], "another first line"),
        ("stalls.csv", b"", "0 lines"),
        ("optimizer.safetensors", &model, "expected an optimizer's checkpoint"),
        ("model.safetensors", &model[..100], "expected a safetensors file"),
    ] {
        let path = at.join(file);
        let was = fs::read(&path).unwrap();
        fs::write(&path, change).unwrap();
        let error = fails();
        assert!(error.starts_with("--resume: ") && error.contains(file) && error.contains(expected), "{file}: {error}");
        fs::remove_file(&path).unwrap();
        let error = fails();
        assert!(error.starts_with("--resume: ") && error.contains(file), "{file}: {error}");
        fs::write(&path, was).unwrap();
    }
    // The optimizer of another step.
    fs::copy(out.join("step-20/optimizer.safetensors"), at.join("optimizer.safetensors")).unwrap();
    let error = fails();
    assert!(error.contains("expected 10 executed steps, as in log.csv, got 20"), "{error}");
}

#[test]
fn a_file_in_the_way_of_a_directory_is_an_error() {
    let temporary = TempDir::new().unwrap();
    let out = temporary.path().join("file");
    fs::write(&out, "").unwrap();
    let error = train("--steps 20", &out).unwrap_err().to_string();
    assert!(error.starts_with("--out: could not create ") && error.contains("file"), "{error}");
}
