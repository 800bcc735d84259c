//! What can go wrong, one line each: the argument, what was expected, what came.

use std::io;
use std::path::PathBuf;

use halfulp::Format;
use halfulp::stall::SimulationError;
use safetensors::Dtype;

use crate::header::HeaderError;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("--seed: expected a number, for stochastic rounding takes explicit seeds only, got none")]
    NoSeed,
    #[error("{argument}: expected a regular expression, got `{pattern}`: {reason}")]
    Regex { argument: &'static str, pattern: String, reason: String },
    #[error("--overflow: expected saturate, for {0} has neither infinity nor NaN, got ieee")]
    OnlySaturates(Format),
    #[error("--scale: expected none, for {0} holds scales itself, got tensor")]
    ScaleOfScales(Format),
    #[error("--threads: expected a number of threads that can be started, got {threads}: {source}")]
    Threads { threads: usize, source: rayon::ThreadPoolBuildError },
    #[error("--{0}")]
    Stall(#[from] halfulp::stall::StallError),

    #[error(transparent)]
    Simulation(#[from] SimulationError),

    #[error("IN: expected to make `{0}`, which is there already and another file: move it, or give IN and OUT")]
    DemoExists(PathBuf),
    #[error("IN: expected a file to read, got `{path}`: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{argument}: expected a file, got `{path}`, which is {kind}")]
    NotAFile { argument: &'static str, path: PathBuf, kind: &'static str },
    #[error("IN: expected a safetensors file, got `{path}`: {source}")]
    Header { path: PathBuf, source: HeaderError },
    #[error("OUT: expected another file than IN, got the same one, `{0}`")]
    SameFile(PathBuf),
    #[error("OUT: expected an existing directory to write in, got `{path}`: {source}")]
    Directory { path: PathBuf, source: io::Error },
    #[error("OUT: expected room for {bytes} bytes, writing `{path}`: {source}")]
    Write { path: PathBuf, bytes: u64, source: io::Error },
    #[error("OUT: expected a header of at most {limit} bytes, got {got}", limit = crate::header::MAX_HEADER)]
    LongHeader { got: usize },
    #[error("standard output: {0}")]
    Print(io::Error),
    #[error("interrupted; OUT is as it was")]
    Interrupted,
    #[error("signals: {0}")]
    Signals(io::Error),

    #[error("tensor `{name}`: expected F32, F64, F16 or BF16 to cast, got {dtype}; --skip leaves a tensor as it is")]
    Source { name: String, dtype: Dtype },
    #[error("tensor `{name}`: expected no tensor `{name}_scale` beside it, for its scale takes that name, got one")]
    ScaleName { name: String },
    #[error(
        "tensors `{0}` and `{1}`: expected names with different stream ids, got one id: cast one of them with --skip"
    )]
    OneStream(String, String),
}
