//! The command `halfulp` as a user runs it: its files, its lines, its errors.
#![cfg(feature = "cli")]

mod casts;
mod errors;
mod predict;
mod simulations;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use halfulp::{bf16, f16};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use tempfile::TempDir;

const HALFULP: &str = env!("CARGO_BIN_EXE_halfulp");

fn halfulp(directory: &Path, line: &str) -> Output {
    let arguments = line.split_whitespace();
    Command::new(HALFULP).args(arguments).current_dir(directory).output().unwrap()
}

/// Runs a line that must succeed without a word on stderr; gives stdout.
fn succeeds(directory: &Path, line: &str) -> String {
    let output = halfulp(directory, line);
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), ""), "{line}");
    text(&output.stdout).into()
}

/// Runs a line that must fail as every error does: nothing on stdout, one line on stderr, exit code 2, the directory as it
/// was.
fn fails(directory: &Path, line: &str) -> String {
    let before = listing(directory);
    let output = halfulp(directory, line);
    let error = failed(&output, line);
    assert_eq!(listing(directory), before, "{line}");
    error
}

fn failed(output: &Output, line: &str) -> String {
    let error = text(&output.stderr);
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(2), ""), "{line}: {error}");
    assert!(error.starts_with("halfulp: ") && error.ends_with('\n') && error.lines().count() == 1, "{line}: {error}");
    error.into()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// Names and contents.
fn listing(directory: &Path) -> BTreeMap<String, Option<Vec<u8>>> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| {
        let entry = entry.unwrap();
        let content = entry.file_type().unwrap().is_file().then(|| fs::read(entry.path()).unwrap());
        (entry.file_name().into_string().unwrap(), content)
    });
    entries.collect()
}

/// Tensors in file order, as (name, dtype, shape, data); `pad` spaces end the header.
fn write(path: &Path, tensors: &[(&str, &str, &[usize], Vec<u8>)], metadata: Value, pad: usize) {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert((*name).into(), json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets }));
        data.extend(bytes);
    }
    if !metadata.is_null() {
        header.insert("__metadata__".into(), metadata);
    }
    let header = Value::from(header).to_string() + &" ".repeat(pad);
    fs::write(path, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()).unwrap();
}

struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

/// Reads a file through safetensors: tensors and metadata.
fn read(path: &Path) -> (BTreeMap<String, Tensor>, BTreeMap<String, String>) {
    let bytes = fs::read(path).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        (name, Tensor { dtype: view.dtype(), shape: view.shape().into(), data: view.data().into() })
    };
    (
        tensors.tensors().into_iter().map(tensor).collect(),
        header.metadata().clone().unwrap_or_default().into_iter().collect(),
    )
}

/// Bell-shaped enough, with both signs and zeros.
fn numbers(n: usize, salt: u32) -> Vec<f32> {
    let number = |i: u32| {
        let hash = halfulp::random::sr_states_hash(i ^ salt << 24);
        ((hash & 0xFFFF) as f32 - (hash >> 16) as f32) / 65_536.0 * 0.3
    };
    (0..n as u32).map(number).collect()
}

fn bytes<T: bytemuck::Pod>(x: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(x).to_vec()
}

/// A file with every castable type, some that are copied, a scalar, an empty tensor, and data at odd places.
fn model(directory: &Path, pad: usize) -> [Vec<f32>; 3] {
    let x = [numbers(3000, 1), numbers(77, 2), numbers(64, 3)];
    let wide: Vec<f64> = x[1].iter().map(|&x| f64::from(x) + 1e-12).collect();
    let half: Vec<f16> = x[2].iter().map(|&x| f16::from_f32(x)).collect();
    let brain: Vec<bf16> = x[2].iter().map(|&x| bf16::from_f32(x)).collect();
    let tensors: [(&str, &str, &[usize], Vec<u8>); 9] = [
        ("flag", "BOOL", &[3], vec![1, 0, 1]),
        ("layer.0.weight", "F32", &[30, 100], bytes(&x[0])),
        ("layer.0.bias", "F32", &[77], bytes(&x[1])),
        ("wide", "F64", &[7, 11], bytes(&wide)),
        ("half", "F16", &[64], bytes(&half)),
        ("brain", "BF16", &[8, 8], bytes(&brain)),
        ("scalar", "F32", &[], bytes(&[0.7f32])),
        ("none", "F32", &[4, 0, 2], vec![]),
        ("ids", "I64", &[2], bytes(&[-5i64, 1 << 40])),
    ];
    write(&directory.join("in.safetensors"), &tensors, json!({ "format": "pt", "note": "kept \u{2713}" }), pad);
    x
}

/// A directory with [`model`] as `in.safetensors`.
fn workplace() -> TempDir {
    let directory = TempDir::new().unwrap();
    model(directory.path(), 0);
    directory
}
