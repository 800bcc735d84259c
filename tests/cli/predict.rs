//! The predictions of the stalling model, as a table and as JSON.

use halfulp::{Format, stall};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{fails, succeeds};

/// The cells of a line; single spaces belong to a cell.
fn cells(line: &str) -> Vec<&str> {
    line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect()
}

#[test]
fn table_of_predictions() {
    let directory = TempDir::new().unwrap();
    let table = succeeds(directory.path(), "predict --format bf16,E4M3,ue2m2 --beta2 0.999");
    let lines: Vec<Vec<&str>> = table.lines().map(cells).collect();
    let titles = "format rho nearest stochastic decay memory noise moving reset";
    assert_eq!(lines[0][..9].join(" "), titles);
    assert_eq!(lines[0][9..], ["50 %", "80 %", "90 %", "95 %"]);
    let expected = [
        "BF16|2.7076|0.945835|0.825048|1 - 5.4e-5|18462|5.3 %|5.4 %|1116|131|585|1308|never",
        "E4M3|43.32|1 - 2.8e-11|0.988829|1 - 2.8e-14|3.5892e13|20.9 %|23.8 %|320|11|38|63|91",
        "UE2M2|86.64|1 - 7.8e-21|0.994415|1 - 7.8e-24|1.2757e23|29.5 %|33.7 %|224|6|19|32|45",
    ];
    for (line, expected) in lines[1..].iter().zip(expected) {
        assert_eq!(line.join("|"), expected);
    }
    assert_eq!(lines.len(), 4);
    // Two options are as good as one list, and the default decay is 0.999.
    assert_eq!(succeeds(directory.path(), "predict --format bf16 --format e4m3 --format ue2m2"), table);

    let all = succeeds(directory.path(), "predict --beta2 0.95");
    let names: Vec<&str> = all.lines().skip(1).map(|line| cells(line)[0]).collect();
    let expected = Format::NAMED.iter().map(|(name, _)| *name).filter(|name| *name != "E8M0");
    assert_eq!(names, expected.collect::<Vec<_>>());
    let bf16 = all.lines().nth(1).unwrap();
    assert_eq!(cells(bf16)[8..], ["none", "never", "never", "never", "never"]);
}

#[test]
fn json_of_predictions() {
    let directory = TempDir::new().unwrap();
    let parse = |line: &str| serde_json::from_str::<Value>(&succeeds(directory.path(), line)).unwrap();
    let got = parse("predict --format bf16,e4m3 --beta2 0.99 --json");
    assert_eq!(got["beta2"], 0.99);
    for (got, format) in got["formats"].as_array().unwrap().iter().zip([Format::BF16, Format::E4M3]) {
        let p = stall::probability(format, 0.99).unwrap();
        let effective = stall::effective_decay(0.99, p.nearest_moves).unwrap();
        let noise = stall::noise(format, 0.99).unwrap();
        let window = |level: f64| json!({ "level": level, "age": stall::startup_window(format, 0.99, level).unwrap() });
        let expected = json!({
            "format": format.to_string(),
            "epsilon": format.epsilon(),
            "rho": stall::rho(format, 0.99).unwrap(),
            "nearest": { "stalled": p.nearest, "moves": p.nearest_moves },
            "stochastic": { "stalled": p.stochastic, "moves": p.stochastic_moves },
            "effective_decay": effective.decay,
            "effective_time_constant": effective.time_constant,
            "variance": { "exact": noise.exact, "still_grid": noise.still_grid, "moving_grid": noise.moving_grid },
            "reset_period": stall::reset_period(format, 0.99).unwrap(),
            "startup_windows": [window(0.5), window(0.8), window(0.9), window(0.95)],
        });
        // Numbers as read from text may differ in their last digit.
        assert_eq!(rounded(got), rounded(&expected));
    }
    assert_eq!(got["formats"].as_array().unwrap().len(), 2);
    assert_eq!((&got["formats"][0]["reset_period"], &got["formats"][1]["reset_period"]), (&Value::Null, &json!(97)));
    let endless = parse("predict --format e2m1 --beta2 0.9999999 --json");
    assert_eq!(endless["formats"][0]["effective_time_constant"], Value::Null);
    assert_eq!(endless["formats"][0]["effective_decay"], 1.0);
}

/// The same with every number as text of 12 digits.
fn rounded(value: &Value) -> Value {
    match value {
        Value::Number(number) => format!("{:.11e}", number.as_f64().unwrap()).into(),
        Value::Array(values) => values.iter().map(rounded).collect(),
        Value::Object(values) => values.iter().map(|(key, value)| (key.clone(), rounded(value))).collect(),
        other => other.clone(),
    }
}

#[test]
fn errors_of_predictions() {
    let directory = TempDir::new().unwrap();
    let fails = |line: &str| fails(directory.path(), line);
    for beta2 in ["0", "1", "-0.5", "1.5", "NaN", "inf"] {
        let error = fails(&format!("predict --beta2 {beta2}"));
        assert_eq!(error, format!("halfulp: --beta2: expected a decay above 0 and below 1, got {beta2}\n"));
    }
    let cases = [
        ("--beta2 much", "invalid value 'much' for '--beta2 <BETA2>': invalid float literal; see --help"),
        ("--format bf16,e5m3", "unknown format `e5m3`, expected one of bf16, fp16 (f16), e5m2"),
        ("--format", "a value is required for '--format <FORMAT,...>"),
        ("--json yes", "unexpected argument 'yes' found"),
    ];
    for (options, expected) in cases {
        let error = fails(&format!("predict {options}"));
        assert!(error.contains(expected), "{options}: {error}");
    }
}
