//! Headers, and files with any of their bytes changed, in process: an answer or an error, never a panic.

use std::io::Cursor;
use std::sync::atomic::AtomicBool;

use clap::Parser;
use indicatif::ProgressBar;
use proptest::prelude::*;
use proptest::sample::Index;

use crate::Command;
use crate::cast::Job;
use crate::header::{Header, HeaderError};
use crate::options::Choices;
use crate::plan::Plan;

fn file(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// A small file with a tensor of every kind.
fn small() -> Vec<u8> {
    let header = r#"{"__metadata__":{"format":"pt","halfulp.recipe":"{}"},
        "a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"F64","shape":[],"data_offsets":[24,32]},
        "c":{"dtype":"F16","shape":[3],"data_offsets":[32,38]},"d":{"dtype":"BF16","shape":[0,7],"data_offsets":[38,38]},
        "e":{"dtype":"I64","shape":[1],"data_offsets":[38,46]},"f":{"dtype":"BOOL","shape":[2],"data_offsets":[46,48]}}"#;
    let data: Vec<u8> = (0..48u8).map(|i| i.wrapping_mul(37) ^ 0x3F).collect();
    file(header, &data)
}

fn choices(options: &str) -> Choices {
    let arguments = ["halfulp", "cast", "IN", "OUT", "--seed", "7"].into_iter().chain(options.split_whitespace());
    match Command::try_parse_from(arguments) {
        Ok(Command::Cast(args)) => Choices::new(&args).expect("valid options"),
        _ => panic!("{options}"),
    }
}

/// The whole way from the bytes of a file to those of a file.
fn cast(file: &[u8], choices: &Choices) -> Result<Vec<u8>, String> {
    let header = Header::parse(file).map_err(|error| error.to_string())?;
    let plan = Plan::new(&header, choices).map_err(|error| error.to_string())?;
    let mut out = Cursor::new(Vec::new());
    let interrupted = AtomicBool::new(false);
    let progress = ProgressBar::hidden();
    let totals = Job { choices, input: file, out: &mut out, interrupted: &interrupted, progress }.run(&plan);
    totals.map_err(|error| error.to_string())?;
    assert_eq!(out.get_ref().len() as u64, plan.bytes);
    Ok(out.into_inner())
}

#[test]
fn lying_headers() {
    let parse = |file: &[u8]| Header::parse(file).err().map(|error| error.to_string()).unwrap_or_default();
    let tensor = |header: &str, data: usize| parse(&file(header, &vec![0; data]));
    assert_eq!(parse(&small()), "");
    assert_eq!(parse(b"1234567"), "expected at least 8 bytes, got 7");
    assert_eq!(parse(&[0xFF; 9]), "expected a header of at most 100000000 bytes, got a length of 18446744073709551615");
    assert_eq!(
        parse(b"\x40\0\0\0\0\0\0\0{}"),
        "expected a header of 64 bytes, got 2 after its length: truncated, or no safetensors file"
    );
    assert_eq!(parse(&small()[..small().len() - 1]), "expected 48 bytes of data, as the header says, got 47");
    assert_eq!(tensor("{}", 1), "expected 0 bytes of data, as the header says, got 1");
    let cases = [
        (r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#, 8, "invalid offset for tensor `a`"),
        (r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#, 8, "invalid offset for tensor `a`"),
        (r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#, 4, "invalid shape, data type, or offset"),
        (r#"{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}"#, 2, "byte boundary"),
        (r#"{"a":{"dtype":"F128","shape":[1],"data_offsets":[0,16]}}"#, 16, "unknown variant `F128`"),
        (r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#, 4, "invalid value"),
        (r#"{"a":{"dtype":"F32","data_offsets":[0,4]}}"#, 4, "missing field `shape`"),
        (r#"{"a":1}"#, 0, "invalid type"),
        (r#"[1]"#, 0, "expected an object of tensors"),
        (r#"{"a""#, 0, "EOF"),
        ("", 0, "EOF"),
        (r#"{"__metadata__":{"a":1}}"#, 0, "expected a string"),
    ];
    for (header, data, expected) in cases {
        let error = tensor(header, data);
        assert!(error.contains(expected), "{header}: {error}");
    }
    let overlap =
        r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#;
    assert!(tensor(overlap, 3).contains("invalid offset for tensor `b`"));
    let hole =
        r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}}"#;
    assert!(tensor(hole, 3).contains("invalid offset for tensor `b`"));
    let twice =
        r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}"#;
    assert!(tensor(twice, 1).contains("expected each name once, got `a` twice"));
    // Sizes that only fit after they wrap around.
    for shape in ["[4294967296,4294967296]", "[18446744073709551615,2]", "[2305843009213693952]"] {
        let header = format!(r#"{{"a":{{"dtype":"F64","shape":{shape},"data_offsets":[0,0]}}}}"#);
        assert!(tensor(&header, 0).contains("overflow"), "{shape}");
    }
    let far = r#"{"a":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,18446744073709551615]}}"#;
    assert!(tensor(far, 0).contains("overflow"));
    assert!(matches!(Header::parse(&file("\u{7f}\u{0}", &[])), Err(HeaderError::Json(_))));
}

/// A change of one place of a file.
#[derive(Clone, Debug)]
enum Change {
    Byte(Index, u8),
    Bit(Index, u8),
    Cut(Index),
    Insert(Index, Vec<u8>),
    Remove(Index, usize),
    Length(u64),
    /// A piece of the header in another place.
    Copy(Index, Index, usize),
    Digit(Index, u8),
}

impl Change {
    fn apply(&self, file: &mut Vec<u8>) {
        if file.is_empty() {
            return;
        }
        let n = file.len();
        match self {
            Self::Byte(at, byte) => file[at.index(n)] = *byte,
            Self::Bit(at, bit) => file[at.index(n)] ^= 1 << bit,
            Self::Cut(at) => file.truncate(at.index(n)),
            Self::Insert(at, bytes) => drop(file.splice(at.index(n)..at.index(n), bytes.iter().copied())),
            Self::Remove(at, count) => drop(file.drain(at.index(n)..n.min(at.index(n) + count))),
            Self::Length(length) => file.splice(..n.min(8), length.to_le_bytes()).for_each(drop),
            Self::Copy(from, to, count) => {
                let piece = file[from.index(n)..n.min(from.index(n) + count)].to_vec();
                let to = to.index(n);
                file.splice(to..n.min(to + count), piece);
            }
            Self::Digit(at, digit) => {
                let digits: Vec<usize> = (8..n).filter(|&i| file[i].is_ascii_digit()).collect();
                if !digits.is_empty() {
                    file[digits[at.index(digits.len())]] = b'0' + digit;
                }
            }
        }
    }
}

fn change() -> impl Strategy<Value = Change> {
    let at = any::<Index>;
    prop_oneof![
        (at(), any::<u8>()).prop_map(|(at, byte)| Change::Byte(at, byte)),
        (at(), 0..8u8).prop_map(|(at, bit)| Change::Bit(at, bit)),
        at().prop_map(Change::Cut),
        (at(), prop::collection::vec(any::<u8>(), 1..9)).prop_map(|(at, bytes)| Change::Insert(at, bytes)),
        (at(), 1..40usize).prop_map(|(at, count)| Change::Remove(at, count)),
        prop_oneof![any::<u64>(), 0..1000u64].prop_map(Change::Length),
        (at(), at(), 1..80usize).prop_map(|(from, to, count)| Change::Copy(from, to, count)),
        (at(), 0..10u8).prop_map(|(at, digit)| Change::Digit(at, digit)),
    ]
}

fn cases() -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(64);
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases())]

    /// Whatever became of the file: an error on one line, or a file that is valid itself.
    #[test]
    fn changed_files(changes in prop::collection::vec(change(), 1..4), to in 0..halfulp::Format::NAMED.len()) {
        let choices = choices(&format!("--to {}", halfulp::Format::NAMED[to].0));
        let mut file = small();
        for change in &changes {
            change.apply(&mut file);
            // Changes of the header's length leave most files short: let half of them say the truth again.
            if matches!(change, Change::Insert(..) | Change::Remove(..)) && file.len() > 56 {
                let header = (file.len() - 56) as u64;
                Change::Length(header).apply(&mut file);
            }
        }
        if let Ok(out) = cast(&file, &choices) {
            prop_assert!(Header::parse(&out).is_ok());
            prop_assert!(safetensors::SafeTensors::deserialize(&out).is_ok());
        }
    }

    /// Every length of header and any bytes in it.
    #[test]
    fn any_header(header in ".{0,200}", data in prop::collection::vec(any::<u8>(), 0..64)) {
        let _ = cast(&file(&header, &data), &choices("--to e4m3"));
    }

    /// Headers of the right form with any numbers and names, for all that a plan does with them.
    #[test]
    fn any_tensors(
        tensors in prop::collection::vec((".{0,12}", prop::sample::select(vec!["F32", "F64", "F16", "BF16", "I8"]),
            prop::collection::vec(0..5usize, 0..4)), 0..6),
        to in 0..halfulp::Format::NAMED.len(),
        seed in any::<u64>(),
    ) {
        let (mut header, mut end) = (serde_json::Map::new(), 0);
        for (name, dtype, shape) in tensors {
            let width = match dtype { "F64" => 8, "F32" => 4, "I8" => 1, _ => 2 };
            if header.contains_key(&name) { continue; }
            let bytes = width * shape.iter().product::<usize>();
            header.insert(name, serde_json::json!({ "dtype": dtype, "shape": shape, "data_offsets": [end, end + bytes] }));
            end += bytes;
        }
        let data: Vec<u8> = (0..end as u64).map(|i| (seed ^ i).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes()[7]).collect();
        let file = file(&serde_json::Value::from(header).to_string(), &data);
        let choices = choices(&format!("--to {}", halfulp::Format::NAMED[to].0));
        let out = cast(&file, &choices);
        // A name may be that of another's scale.
        prop_assert!(out.as_ref().is_ok_and(|out| Header::parse(out).is_ok())
            || out.as_ref().is_err_and(|error| error.contains("_scale")), "{:?}", out.err());
    }
}
