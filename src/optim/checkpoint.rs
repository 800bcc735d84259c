//! Checkpoints of an optimizer: one safetensors file, version 1.
//!
//! [`save`] writes the states as they are stored, the counters that key noise and correct bias, seeds, hyper-parameters and
//! the reset schedule; [`load`] gives an optimizer that goes on as the saved one would have, bit for bit. Saving only reads, is
//! valid before the first step, and puts the file in place whole: it is written beside its final name, flushed to the disk
//! and then renamed, so that whenever the process or the machine stops, the file of that name is the old or the new one. (A
//! process that is killed leaves the unfinished file, `.halfulp-*.part`, which may be deleted.)
//!
//! ```
//! use halfulp::optim::{AdamW, AdamWConfig, Rounding, StateFormat, checkpoint};
//! # let path = std::env::temp_dir().join(format!("halfulp-doc-{}.safetensors", std::process::id()));
//! let mut opt = AdamW::new(AdamWConfig::default(), StateFormat::Bf16, Rounding::stochastic(7))?;
//! let mut w = [1.0f32; 100];
//! opt.step(&mut w, &[0.1; 100])?;
//! checkpoint::save(&path, &opt, None)?;
//!
//! let mut resumed: AdamW = checkpoint::load(&path)?.optimizer;
//! let mut copy = w;
//! opt.step(&mut w, &[0.2; 100])?;
//! resumed.step(&mut copy, &[0.2; 100])?;
//! assert_eq!((w, opt.moments(0)), (copy, resumed.moments(0)));
//! # std::fs::remove_file(path)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # The file
//! Of each tensor known by name, its moments `NAME::m` and `NAME::v`; of one known by number, `#NUMBER::m` and `#NUMBER::v`.
//! SGD and Lion have an `m` alone, AdEMAMix a `slow` besides. `NAME::rest`, `U16`, are the low halves of parameters, where kept.
//! Each has the dtype of its format, and the shape `[elements]`. Of moments in blocks these are the codes: `F8_E4M3`, `F8_E5M2`
//! and, where an even number of them fills whole bytes, `F4` for E2M1. Other codes are `U8`, packed as in
//! [`PackedVec`](crate::PackedVec), of shape `[bytes]`. The scales are tensors of their own, `NAME::m.scale` and `NAME::v.scale`,
//! of shape `[blocks]`: `F8_E8M0` for powers of two, else `F32`.
//!
//! The metadata, strings to strings; integers are decimal strings, other numbers the shortest decimal strings that read as the
//! same f64:
//!
//! | key | value |
//! |---|---|
//! | `halfulp` | `optimizer`: what the file is |
//! | `version`, `stream`, `arithmetic` | `1` each |
//! | `optimizer` | `adamw`, `adam`, `sgd`, `lion`, `ademamix` or `lamb` |
//! | `step` | steps executed |
//! | `offset` | counters used under `sr-states` rounding |
//! | `rounding`, `parameter_rounding` | `nearest`, `stochastic` or `sr-states` |
//! | `seed`, `parameter_seed` | their seeds, where they have one |
//! | `groups` | JSON: a list of parameter groups, each with `m`, `v` (formats; or the states that the optimizer has), `remainder` (true or false) and `hyper_parameters` |
//! | `resets` | JSON: the reset schedule and its progress, if there is one |
//! | `tensor.NAME` | JSON: `id`, `named`, `ages` (of each state), `first` (element of the tensor, if this is a part of one), `shape`, `m`, `v` (formats), `remainder`, `group` |
//!
//! A format is `F32`, `BF16`, or an object: `element`, the [name](crate::Format::name) of the elements' format; `block`, how
//! many of them share a scale; `scale`, `ceil` or `amax`, the rule for it, as in [`BlockScale`].

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::{Map, Value, json};

use super::hyper::{Formats, MOST, Visit};
use super::optimizer::TensorState;
use super::{
    AdamWConfig, Moment, OptimError, Optimizer, ParameterGroup, ResetError, ResetMoments, ResetProgress, ResetSchedule,
    ResetScope, Resets, Rounding, Rule, StateFormat,
};
use crate::format::{BlockScale, Format};
use crate::random::tensor_id;

/// What a checkpoint holds.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Checkpoint<R: Rule = AdamWConfig> {
    /// The optimizer, at the best instruction-set level of this CPU.
    pub optimizer: Optimizer<R>,
    /// The reset schedule, if one was saved, without its log.
    pub resets: Option<Resets>,
}

/// Why a checkpoint was not written or read. A file that was there is as it was, and so is an optimizer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The file system refused.
    #[error("{path}: could not {action}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// Not a safetensors file.
    #[error("expected a safetensors file, got one whose header does not parse: {reason}")]
    NotSafetensors {
        /// What is wrong.
        reason: String,
    },
    /// A file that is longer or shorter than its header says.
    #[error(
        "expected a file of {expected} bytes, as its header says, got {got}: truncated, or written by another program"
    )]
    FileLength {
        /// What the header says.
        expected: u64,
        /// What came.
        got: u64,
    },
    /// A safetensors file that is no checkpoint of an optimizer of this crate.
    #[error("expected an optimizer's checkpoint (metadata `halfulp`: `optimizer`), got a file with {got}")]
    OtherFormat {
        /// What there is instead.
        got: String,
    },
    /// A number or name that this version of the crate does not know.
    #[error("{argument}: expected {expected}, got {got}: written by a later version, or by something else")]
    Unknown {
        /// Which.
        argument: &'static str,
        /// What this version knows.
        expected: &'static str,
        /// What came.
        got: String,
    },
    /// Metadata that do not say what they should.
    #[error("metadata `{key}`: expected {expected}, got {got}")]
    Metadata {
        /// The key, and the field in it.
        key: String,
        /// What belongs there.
        expected: &'static str,
        /// What came.
        got: String,
    },
    /// States that the metadata name and the file does not have.
    #[error("tensor `{name}`: expected in the file, got none")]
    MissingTensor {
        /// Name of the tensor in the file.
        name: String,
    },
    /// A tensor in the file that no metadata name.
    #[error("tensor `{name}`: expected one of those in the metadata, got another")]
    UnknownTensor {
        /// Its name.
        name: String,
    },
    /// States of another dtype than their format's.
    #[error("tensor `{name}`: expected dtype {expected}, got {got}")]
    Dtype {
        /// Name of the tensor in the file.
        name: String,
        /// By its metadata.
        expected: Dtype,
        /// What came.
        got: Dtype,
    },
    /// States of another shape than that of their tensor.
    #[error("tensor `{name}`: expected shape {expected:?}, got {got:?}")]
    Shape {
        /// Name of the tensor, or of its state in the file.
        name: String,
        /// By its metadata, or by the optimizer that was to be restored.
        expected: Vec<usize>,
        /// What came.
        got: Vec<usize>,
    },
    /// An optimizer to be restored that holds another part of a tensor.
    #[error("part of tensor `{name}`: expected element {expected} first, as in the optimizer, got {got}")]
    Part {
        /// The tensor.
        name: String,
        /// First element of the optimizer's part.
        expected: u64,
        /// In the file.
        got: u64,
    },
    /// An optimizer to be restored whose states have another format.
    #[error("states of tensor `{name}`: expected {expected}, as in the optimizer, got {got}")]
    Format {
        /// The tensor.
        name: String,
        /// Of the optimizer.
        expected: String,
        /// In the file.
        got: String,
    },
    /// Two tensors that would be stored under one name.
    #[error("tensors {first:#018x} and {second:#018x}: expected different names, got `{name}` for both")]
    SameName {
        /// The name.
        name: String,
        /// Id of the one.
        first: u64,
        /// Id of the other.
        second: u64,
    },
    /// Something that a file of this version cannot hold.
    #[error("{argument}: not supported in a checkpoint: {reason}")]
    Unsupported {
        /// What.
        argument: &'static str,
        /// Why.
        reason: &'static str,
    },
    /// Hyper-parameters out of their range.
    #[error(transparent)]
    Optim(#[from] OptimError),
    /// A reset schedule that is none.
    #[error(transparent)]
    Reset(#[from] ResetError),
}

/// A tensor of the file that holds a moment, or its scales: what follows the moment's name, dtype, and length.
type Part = (&'static str, Dtype, usize);

/// The tensors that hold a moment of `n` elements.
fn parts(format: StateFormat, n: usize) -> Vec<Part> {
    match format {
        StateFormat::F32 => alloc::vec![("", Dtype::F32, n)],
        StateFormat::Bf16 => alloc::vec![("", Dtype::BF16, n)],
        StateFormat::Blocks(format) => {
            let (dtype, length) = match format.element() {
                Format::E4M3 => (Dtype::F8_E4M3, n),
                Format::E5M2 => (Dtype::F8_E5M2, n),
                Format::E2M1 if n.is_multiple_of(2) => (Dtype::F4, n),
                packed => (Dtype::U8, packed.bytes(n)),
            };
            let scales = if format.scale() == BlockScale::Amax { Dtype::F32 } else { Dtype::F8_E8M0 };
            alloc::vec![("", dtype, length), (".scale", scales, format.blocks(n))]
        }
    }
}

fn format_json(format: StateFormat) -> Value {
    match format {
        StateFormat::F32 | StateFormat::Bf16 => json!(format.to_string()),
        StateFormat::Blocks(format) => json!({
            "element": format.element().to_string(),
            "block": format.block().to_string(),
            "scale": if format.scale() == BlockScale::Amax { "amax" } else { "ceil" },
        }),
    }
}

/// Saves an optimizer, and its reset schedule if it has one, under `path`: the file there is replaced at once, or not at all.
/// The directory of `path` must be there.
///
/// # Errors
/// [`CheckpointError::Io`] if the file could not be written; [`CheckpointError::SameName`] if a tensor is named as another
/// would be for its number (`#5`); [`CheckpointError::Unsupported`] for a schedule from the model of a format without a name.
pub fn save<R: Rule>(
    path: impl AsRef<Path>,
    optimizer: &Optimizer<R>,
    resets: Option<&Resets>,
) -> Result<(), CheckpointError> {
    let path = path.as_ref();
    let (header, data) = lay_out(optimizer, resets)?;
    let directory = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let failed = |action, source| CheckpointError::Io { action, path: path.into(), source };
    let mut builder = tempfile::Builder::new();
    builder.prefix(".halfulp-").suffix(".part");
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666)); // less the umask
    let mut file = builder.tempfile_in(directory).map_err(|error| failed("create a file beside it", error))?;
    file.write_all(&header).map_err(|error| failed("write", error))?;
    for bytes in data {
        file.write_all(bytes).map_err(|error| failed("write", error))?;
    }
    file.as_file().sync_all().map_err(|error| failed("write it to the disk", error))?;
    file.persist(path).map_err(|error| failed("rename", error.error))?;
    // The name too is on the disk only when its directory is.
    #[cfg(unix)]
    File::open(directory)
        .and_then(|directory| directory.sync_all())
        .map_err(|error| failed("write its name", error))?;
    Ok(())
}

/// The start of the file up to the data, which begin at a multiple of 8, and the data: wider elements first, as
/// safetensors orders them, without gaps.
fn lay_out<'a, R: Rule>(
    optimizer: &'a Optimizer<R>,
    resets: Option<&Resets>,
) -> Result<(Vec<u8>, Vec<&'a [u8]>), CheckpointError> {
    let mut metadata = optimizer_metadata(optimizer);
    if let Some(resets) = resets {
        metadata.insert("resets".into(), resets_json(resets)?.to_string());
    }
    let mut entries = Vec::new();
    let mut ids = BTreeMap::new();
    for (&id, state) in &optimizer.tensors {
        let name = state.name.clone().unwrap_or_else(|| format!("#{id}"));
        if let Some(first) = ids.insert(name.clone(), id) {
            return Err(CheckpointError::SameName { name, first, second: id });
        }
        metadata.insert(format!("tensor.{name}"), tensor_json::<R>(id, state).to_string());
        if let Some(rest) = &state.rest {
            entries.push((Dtype::U16, format!("{name}::{REST}"), rest.len(), bytemuck::cast_slice(rest)));
        }
        for (kind, moment) in R::STATES.iter().zip(&state.states) {
            let which = kind.name;
            for ((suffix, dtype, n), bytes) in parts(moment.format(), moment.len()).into_iter().zip(moment.parts()) {
                entries.push((dtype, format!("{name}::{which}{suffix}"), n, bytes));
            }
        }
    }
    entries.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
    // A map with sorted keys, so that one state gives one file.
    let mut header: BTreeMap<&str, Value> = BTreeMap::new();
    header.insert("__metadata__", json!(metadata));
    let mut end = 0;
    for (dtype, name, n, bytes) in &entries {
        let start = end;
        end += bytes.len();
        header.insert(name, json!({ "dtype": dtype.to_string(), "shape": [n], "data_offsets": [start, end] }));
    }
    let mut json = json!(header).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let start = [&(json.len() as u64).to_le_bytes()[..], &json].concat();
    let data = entries.iter().map(|(_, _, _, bytes)| *bytes).collect();
    Ok((start, data))
}

fn optimizer_metadata<R: Rule>(optimizer: &Optimizer<R>) -> BTreeMap<String, String> {
    let mut metadata: BTreeMap<String, String> = KNOWN.iter().map(|&(key, known)| (key.into(), known.into())).collect();
    let mut put = |key: &str, value: String| metadata.insert(key.into(), value);
    put("halfulp", "optimizer".into());
    put("optimizer", R::NAME.into());
    put("step", optimizer.step.to_string());
    put("offset", optimizer.offset.to_string());
    let groups: Vec<Value> = optimizer.groups.iter().map(group_json::<R>).collect();
    put("groups", json!(groups).to_string());
    for (prefix, rounding) in [("", optimizer.rounding), ("parameter_", optimizer.parameters)] {
        let (name, seed) = match rounding {
            Rounding::Nearest => ("nearest", None),
            Rounding::Stochastic { seed } => ("stochastic", Some(seed)),
            Rounding::SrStates { seed } => ("sr-states", Some(seed)),
        };
        put(&format!("{prefix}rounding"), name.into());
        if let Some(seed) = seed {
            put(&format!("{prefix}seed"), seed.to_string());
        }
    }
    metadata
}

/// What this version writes, and all that it reads.
const KNOWN: [(&str, &str); 3] = [("version", "1"), ("stream", "1"), ("arithmetic", "1")];

/// What follows a tensor's name where the low halves of its parameters are.
const REST: &str = "rest";

/// Writes hyper-parameters.
struct Written(Map<String, Value>);

impl Visit for Written {
    type Error = core::convert::Infallible;

    fn number(&mut self, name: &'static str, value: &mut f64) -> Result<(), Self::Error> {
        self.0.insert(name.into(), json!(value.to_string()));
        Ok(())
    }

    fn flag(&mut self, name: &'static str, value: &mut bool) -> Result<(), Self::Error> {
        self.0.insert(name.into(), json!(*value));
        Ok(())
    }

    fn integer(&mut self, name: &'static str, value: &mut u64) -> Result<(), Self::Error> {
        self.0.insert(name.into(), json!(value.to_string()));
        Ok(())
    }

    fn option(&mut self, name: &'static str, value: &mut Option<f64>) -> Result<(), Self::Error> {
        self.0.insert(name.into(), json!(value.map(|value| value.to_string())));
        Ok(())
    }
}

fn group_json<R: Rule>(group: &ParameterGroup<R>) -> Value {
    let mut fields = Written(Map::new());
    let Ok(()) = group.config.clone().fields(&mut fields);
    let mut json = json!({ "hyper_parameters": fields.0, "remainder": group.remainder });
    for (kind, format) in R::STATES.iter().zip(group.states.formats()) {
        json[kind.name] = format_json(format);
    }
    json
}

fn tensor_json<R: Rule>(id: u64, state: &TensorState) -> Value {
    let mut json = json!({
        "id": id.to_string(),
        "named": state.name.is_some(),
        "first": state.first.to_string(),
        "shape": [state.n.to_string()],
        "group": state.group.to_string(),
        "remainder": state.rest.is_some(),
        "ages": Value::Array(state.ages.iter().zip(R::STATES).map(|(age, _)| json!(age.to_string())).collect()),
    });
    for (kind, stored) in R::STATES.iter().zip(&state.states) {
        json[kind.name] = format_json(stored.format());
    }
    json
}

fn resets_json(resets: &Resets) -> Result<Value, CheckpointError> {
    let schedule = match resets.schedule() {
        ResetSchedule::Off => json!({ "kind": "off" }),
        ResetSchedule::Every { steps } => json!({ "kind": "every", "steps": steps.to_string() }),
        ResetSchedule::Model { format, beta2, threshold } => {
            let name = format.name().ok_or(CheckpointError::Unsupported {
                argument: "resets",
                reason: "a schedule from the model of a format without a name; use its period",
            })?;
            json!({ "kind": "model", "format": name, "beta2": beta2.to_string(), "threshold": threshold.to_string() })
        }
        ResetSchedule::Adaptive { beta2, threshold } => {
            json!({ "kind": "adaptive", "beta2": beta2.to_string(), "threshold": threshold.to_string() })
        }
    };
    let progress = |progress: ResetProgress| {
        json!({
            "tensor": progress.tensor.map(|id| id.to_string()),
            "steps": progress.steps.to_string(),
            "loss": progress.loss.to_string(),
        })
    };
    Ok(json!({
        "schedule": schedule,
        "moments": match resets.moments() {
            ResetMoments::All => "all",
            ResetMoments::Second => "second",
        },
        "scope": match resets.scope() {
            ResetScope::Tensor => "tensor",
            ResetScope::All => "all",
        },
        "progress": resets.progress().into_iter().map(progress).collect::<Vec<_>>(),
    }))
}

/// Loads a checkpoint.
///
/// # Errors
/// [`CheckpointError::NotSafetensors`], [`CheckpointError::FileLength`] and [`CheckpointError::OtherFormat`] for files that are
/// no checkpoint or not a whole one; [`CheckpointError::Unknown`] for another version, stream, arithmetic or optimizer;
/// [`CheckpointError::Metadata`], [`CheckpointError::MissingTensor`], [`CheckpointError::UnknownTensor`],
/// [`CheckpointError::Dtype`] and [`CheckpointError::Shape`] for metadata and states that do not fit together.
pub fn load<R: Rule>(path: impl AsRef<Path>) -> Result<Checkpoint<R>, CheckpointError> {
    let path = path.as_ref();
    let mut source = Source::open(path)?;
    let metadata = &source.metadata;
    check_known(metadata, R::NAME)?;
    let top = Top(metadata);
    let groups = groups_of::<R>(&top.json("groups")?)?;
    let optimizer =
        Optimizer::with_group(groups[0], top.rounding("")?)?.parameter_rounding(top.rounding("parameter_")?)?;
    let step = top.integer("step")?;
    if step > MOST_STEPS {
        let (key, expected) = ("step".into(), "fewer than 2^63 steps");
        return Err(CheckpointError::Metadata { key, expected, got: format!("{step}") });
    }
    let mut optimizer = Optimizer { step, offset: top.integer("offset")?, ..optimizer };
    for &group in &groups[1..] {
        optimizer.add_group(group)?;
    }
    let resets = metadata.get("resets").map(|_| resets_of(&top.json("resets")?)).transpose()?;
    let names: Vec<String> =
        metadata.keys().filter_map(|key| key.strip_prefix("tensor.")).map(ToString::to_string).collect();
    for name in &names {
        let key = format!("tensor.{name}");
        let described = Top(&source.metadata).json(&key)?;
        let (id, state) = source.state(name, &Fields::of(&key, &described)?, &optimizer.groups)?;
        if state.ages.iter().any(|&age| age > step) {
            let got = format!("{:?} at step {step}", &state.ages[..R::STATES.len()]);
            return Err(Fields::of(&key, &described)?.refuse("ages", "ages of no more than the step", &got));
        }
        if optimizer.tensors.insert(id, state).is_some() {
            return Err(Fields::of(&key, &described)?.refuse("id", "an id of its own", &id.to_string()));
        }
    }
    match source.tensors.into_keys().next() {
        Some(name) => Err(CheckpointError::UnknownTensor { name }),
        None => Ok(Checkpoint { optimizer, resets }),
    }
}

/// Loads a checkpoint into an optimizer that has been stepped, or not, in place of all that it holds; its instruction-set level
/// stays. Gives the reset schedule.
///
/// # Errors
/// As [`load`]; [`CheckpointError::MissingTensor`], [`CheckpointError::Shape`], [`CheckpointError::Part`] and
/// [`CheckpointError::Format`] if a tensor of the optimizer is not in the file, or another part of it, or in another format.
/// The optimizer is as it was then.
pub fn restore<R: Rule>(
    path: impl AsRef<Path>,
    optimizer: &mut Optimizer<R>,
) -> Result<Option<Resets>, CheckpointError> {
    let loaded = load::<R>(path)?;
    for (id, state) in &optimizer.tensors {
        let name = || state.name.clone().unwrap_or_else(|| format!("#{id}"));
        let there = loaded.optimizer.tensors.get(id).ok_or_else(|| CheckpointError::MissingTensor { name: name() })?;
        let (expected, got) = (state.n, there.n);
        if expected != got {
            return Err(CheckpointError::Shape { name: name(), expected: [expected].into(), got: [got].into() });
        }
        if state.first != there.first {
            return Err(CheckpointError::Part { name: name(), expected: state.first, got: there.first });
        }
        let [expected, got] = [state, there].map(|state| describe::<R>(state));
        if expected != got {
            return Err(CheckpointError::Format { name: name(), expected, got });
        }
    }
    *optimizer = Optimizer { isa: optimizer.isa, meter: optimizer.meter, ..loaded.optimizer };
    Ok(loaded.resets)
}

/// How a tensor's states are stored, for a message.
fn describe<R: Rule>(state: &TensorState) -> String {
    let formats = state.formats::<R>();
    if state.rest.is_some() { format!("{formats}, and a remainder") } else { formats.to_string() }
}

/// An open file whose header was read: offsets of tensors lie in it and fit dtype and shape, without holes or overlaps.
struct Source<'a> {
    path: &'a Path,
    file: File,
    /// Where the data begin.
    data: u64,
    /// Tensors that were not read yet.
    tensors: BTreeMap<String, TensorInfo>,
    metadata: BTreeMap<String, String>,
}

/// Steps that a file can have: counting on from them does not overflow.
const MOST_STEPS: u64 = i64::MAX as u64;

/// The longest header that safetensors allows.
const MAX_HEADER: u64 = 100_000_000;

impl<'a> Source<'a> {
    fn open(path: &'a Path) -> Result<Self, CheckpointError> {
        let failed = |action| move |source| CheckpointError::Io { action, path: path.into(), source };
        let mut file = File::open(path).map_err(failed("open"))?;
        let size = file.metadata().map_err(failed("read"))?.len();
        let mut length = [0; 8];
        if size < 8 {
            return Err(CheckpointError::FileLength { expected: 8, got: size });
        }
        file.read_exact(&mut length).map_err(failed("read"))?;
        let length = u64::from_le_bytes(length);
        let malformed = |reason: String| CheckpointError::NotSafetensors { reason };
        if length > MAX_HEADER {
            return Err(malformed(format!("a length of {length} bytes, where {MAX_HEADER} are allowed")));
        }
        let data = 8 + length;
        if size < data {
            return Err(CheckpointError::FileLength { expected: data, got: size });
        }
        let mut header = alloc::vec![0; length as usize];
        file.read_exact(&mut header).map_err(failed("read"))?;
        let header: Metadata = serde_json::from_slice(&header).map_err(|error| malformed(error.to_string()))?;
        let expected = data + header.data_len() as u64;
        if size != expected {
            return Err(CheckpointError::FileLength { expected, got: size });
        }
        let tensors = header.tensors().into_iter().map(|(name, info)| (name, info.clone())).collect();
        let metadata = header.metadata().iter().flatten().map(|(key, value)| (key.clone(), value.clone())).collect();
        Ok(Self { path, file, data, tensors, metadata })
    }

    /// The states of one tensor, as `described` by its metadata.
    fn state<R: Rule>(
        &mut self,
        name: &str,
        described: &Fields<'_>,
        groups: &[ParameterGroup<R>],
    ) -> Result<(u64, TensorState), CheckpointError> {
        let id = described.integer("id")?;
        let named = described.boolean("named")?;
        let expected = if named { tensor_id(name) } else { id };
        if id != expected || !named && name != format!("#{id}") {
            return Err(described.refuse("id", "the id that goes with the name", &id.to_string()));
        }
        let n = described.shape()?;
        let mut states = Vec::new();
        for kind in R::STATES {
            states.push(self.moment(&format!("{name}::{}", kind.name), described.format(kind.name)?, n)?);
        }
        let rest = if described.boolean("remainder")? {
            let (start, end) = self.offsets(format!("{name}::{REST}"), Dtype::U16, n)?;
            Some(bytemuck::pod_collect_to_vec(&self.bytes(&[(start, end)])?))
        } else {
            None
        };
        let ages = described.ages(R::STATES.len())?;
        let (first, group) = (described.integer("first")?, described.integer("group")?);
        let state = TensorState { name: named.then(|| name.into()), states, ages, rest, n, first, group: 0 };
        let fits = |group: usize| {
            groups
                .get(group)
                .is_some_and(|group| group.states == state.formats::<R>() && group.remainder == state.rest.is_some())
        };
        let group = usize::try_from(group).ok().filter(|&group| fits(group)).ok_or_else(|| {
            described.refuse("group", "the number of a group that stores states in these formats", &group.to_string())
        })?;
        Ok((id, TensorState { group, ..state }))
    }

    /// A moment of `n` elements.
    fn moment(&mut self, name: &str, format: StateFormat, n: usize) -> Result<Moment, CheckpointError> {
        // All are looked at before memory is taken for any.
        let mut offsets = Vec::new();
        for (suffix, dtype, length) in parts(format, n) {
            offsets.push(self.offsets(format!("{name}{suffix}"), dtype, length)?);
        }
        let bytes = self.bytes(&offsets)?;
        Ok(Moment::from_bytes(format, n, &bytes).expect("as many bytes as the dtypes and lengths say"))
    }

    /// The bytes of these ranges of the data, one after another.
    fn bytes(&mut self, offsets: &[(usize, usize)]) -> Result<Vec<u8>, CheckpointError> {
        let mut bytes = Vec::new();
        for &(start, end) in offsets {
            let begun = bytes.len();
            bytes.resize(begun + (end - start), 0);
            let at = SeekFrom::Start(self.data + start as u64);
            let read = self.file.seek(at).and_then(|_| self.file.read_exact(&mut bytes[begun..]));
            read.map_err(|source| CheckpointError::Io { action: "read", path: self.path.into(), source })?;
        }
        Ok(bytes)
    }

    /// Where the data of a tensor are.
    fn offsets(&mut self, name: String, dtype: Dtype, length: usize) -> Result<(usize, usize), CheckpointError> {
        let Some(info) = self.tensors.remove(&name) else { return Err(CheckpointError::MissingTensor { name }) };
        if info.dtype != dtype {
            return Err(CheckpointError::Dtype { name, expected: dtype, got: info.dtype });
        }
        if info.shape != [length] {
            return Err(CheckpointError::Shape { name, expected: [length].into(), got: info.shape });
        }
        Ok(info.data_offsets)
    }
}

/// Refuses files that are something else, and versions, streams, rules and optimizers that this version does not know.
fn check_known(metadata: &BTreeMap<String, String>, optimizer: &'static str) -> Result<(), CheckpointError> {
    match metadata.get("halfulp").map(String::as_str) {
        Some("optimizer") => {}
        Some(other) => return Err(CheckpointError::OtherFormat { got: format!("`halfulp`: `{other}`") }),
        None => return Err(CheckpointError::OtherFormat { got: "no `halfulp` in its metadata".into() }),
    }
    for (argument, expected) in KNOWN.into_iter().chain([("optimizer", optimizer)]) {
        let got = metadata.get(argument).map_or("nothing", String::as_str);
        if got != expected {
            return Err(CheckpointError::Unknown { argument, expected, got: got.into() });
        }
    }
    Ok(())
}

/// The metadata of a file.
struct Top<'a>(&'a BTreeMap<String, String>);

impl<'a> Top<'a> {
    fn text(&self, key: &str) -> Result<&'a str, CheckpointError> {
        self.0.get(key).map(String::as_str).ok_or_else(|| CheckpointError::Metadata {
            key: key.into(),
            expected: "a value",
            got: "nothing".into(),
        })
    }

    fn integer(&self, key: &str) -> Result<u64, CheckpointError> {
        integer(key, self.text(key)?)
    }

    fn json(&self, key: &str) -> Result<Value, CheckpointError> {
        let text = self.text(key)?;
        serde_json::from_str(text).map_err(|error| CheckpointError::Metadata {
            key: key.into(),
            expected: "JSON",
            got: format!("an error in it: {error}"),
        })
    }

    fn rounding(&self, prefix: &str) -> Result<Rounding, CheckpointError> {
        let key = format!("{prefix}rounding");
        let seed = || self.integer(&format!("{prefix}seed"));
        match self.text(&key)? {
            "nearest" => Ok(Rounding::Nearest),
            "stochastic" => Ok(Rounding::Stochastic { seed: seed()? }),
            "sr-states" => Ok(Rounding::SrStates { seed: seed()? }),
            other => {
                let expected = "`nearest`, `stochastic` or `sr-states`";
                Err(CheckpointError::Metadata { key, expected, got: format!("`{other}`") })
            }
        }
    }
}

/// A decimal string as this crate writes it, without sign, space or leading zeros.
fn integer(key: &str, text: &str) -> Result<u64, CheckpointError> {
    text.parse().ok().filter(|value: &u64| value.to_string() == text).ok_or_else(|| CheckpointError::Metadata {
        key: key.into(),
        expected: "an integer of 64 bits as a decimal string",
        got: format!("`{text}`"),
    })
}

/// A JSON object somewhere in the metadata.
struct Fields<'a> {
    key: &'a str,
    fields: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    fn of(key: &'a str, value: &'a Value) -> Result<Self, CheckpointError> {
        let refused = || CheckpointError::Metadata { key: key.into(), expected: "an object", got: value.to_string() };
        Ok(Self { key, fields: value.as_object().ok_or_else(refused)? })
    }

    fn refuse(&self, field: &str, expected: &'static str, got: &str) -> CheckpointError {
        CheckpointError::Metadata { key: format!("{}: {field}", self.key), expected, got: got.into() }
    }

    fn value(&self, field: &str) -> Result<&'a Value, CheckpointError> {
        self.fields.get(field).ok_or_else(|| self.refuse(field, "a value", "nothing"))
    }

    fn text(&self, field: &str) -> Result<&'a str, CheckpointError> {
        let value = self.value(field)?;
        value.as_str().ok_or_else(|| self.refuse(field, "a string", &value.to_string()))
    }

    fn boolean(&self, field: &str) -> Result<bool, CheckpointError> {
        let value = self.value(field)?;
        value.as_bool().ok_or_else(|| self.refuse(field, "true or false", &value.to_string()))
    }

    fn integer(&self, field: &str) -> Result<u64, CheckpointError> {
        integer(&format!("{}: {field}", self.key), self.text(field)?)
    }

    fn number(&self, field: &str) -> Result<f64, CheckpointError> {
        let text = self.text(field)?;
        text.parse().map_err(|_| self.refuse(field, "a number as a decimal string", text))
    }

    /// Ages of so many states.
    fn ages(&self, count: usize) -> Result<[u64; MOST], CheckpointError> {
        let value = self.value("ages")?;
        let refused = || self.refuse("ages", "a decimal string for each state", &value.to_string());
        let list = value.as_array().filter(|list| list.len() == count).ok_or_else(refused)?;
        let mut ages = [0; MOST];
        for (age, value) in ages.iter_mut().zip(list) {
            *age = integer(self.key, value.as_str().ok_or_else(refused)?)?;
        }
        Ok(ages)
    }

    /// A format of states.
    fn format(&self, field: &str) -> Result<StateFormat, CheckpointError> {
        let value = self.value(field)?;
        let key = format!("{}: {field}", self.key);
        if value.is_object() {
            return Fields::of(&key, value)?.blocks();
        }
        let unscaled = [StateFormat::F32, StateFormat::Bf16];
        let known = unscaled.into_iter().find(|format| value.as_str() == Some(&format.to_string()));
        known.ok_or_else(|| self.refuse(field, "a format of states that this version knows", &value.to_string()))
    }

    /// This object as a format of states in blocks.
    fn blocks(&self) -> Result<StateFormat, CheckpointError> {
        let name = self.text("element")?;
        let scaled = |format: &StateFormat| matches!(format, StateFormat::Blocks(_)) && format.to_string() == name;
        let format = name.parse().ok().filter(scaled);
        let format = format.ok_or_else(|| self.refuse("element", "a format of 8 or 4 bits for states", name))?;
        let block = self.integer("block")?;
        let sized = usize::try_from(block).ok().and_then(|block| format.block(block).ok());
        let format = sized.ok_or_else(|| self.refuse("block", "32, 64, 128 or 256", &block.to_string()))?;
        match self.text("scale")? {
            "ceil" => Ok(format),
            "amax" => Ok(format.amax()),
            other => Err(self.refuse("scale", "`ceil` or `amax`", other)),
        }
    }

    /// The only length of `shape`.
    fn shape(&self) -> Result<usize, CheckpointError> {
        let value = self.value("shape")?;
        let refused = || self.refuse("shape", "one length, as a decimal string", &value.to_string());
        let [length] = value.as_array().map_or(&[][..], Vec::as_slice) else { return Err(refused()) };
        let length = integer(self.key, length.as_str().ok_or_else(refused)?)?;
        usize::try_from(length).map_err(|_| refused())
    }
}

/// At least one.
fn groups_of<R: Rule>(value: &Value) -> Result<Vec<ParameterGroup<R>>, CheckpointError> {
    match value.as_array().map(Vec::as_slice) {
        None | Some([]) => Err(CheckpointError::Metadata {
            key: "groups".into(),
            expected: "a list of one or more",
            got: value.to_string(),
        }),
        Some(groups) => groups.iter().map(group_of).collect(),
    }
}

fn group_of<R: Rule>(value: &Value) -> Result<ParameterGroup<R>, CheckpointError> {
    let group = Fields::of("groups", value)?;
    let mut formats = [StateFormat::F32; MOST];
    for (kind, format) in R::STATES.iter().zip(&mut formats) {
        *format = group.format(kind.name)?;
    }
    let mut fields = Fields::of("groups: hyper_parameters", group.value("hyper_parameters")?)?;
    let mut config = R::default();
    config.fields(&mut fields)?;
    Ok(ParameterGroup { config, states: R::States::of_formats(formats), remainder: group.boolean("remainder")? })
}

impl Visit for Fields<'_> {
    type Error = CheckpointError;

    fn number(&mut self, name: &'static str, value: &mut f64) -> Result<(), CheckpointError> {
        *value = Fields::number(self, name)?;
        Ok(())
    }

    fn flag(&mut self, name: &'static str, value: &mut bool) -> Result<(), CheckpointError> {
        *value = self.boolean(name)?;
        Ok(())
    }

    fn integer(&mut self, name: &'static str, value: &mut u64) -> Result<(), CheckpointError> {
        *value = Fields::integer(self, name)?;
        Ok(())
    }

    fn option(&mut self, name: &'static str, value: &mut Option<f64>) -> Result<(), CheckpointError> {
        *value = if self.value(name)?.is_null() { None } else { Some(Fields::number(self, name)?) };
        Ok(())
    }
}

fn resets_of(value: &Value) -> Result<Resets, CheckpointError> {
    let fields = Fields::of("resets", value)?;
    let schedule = Fields::of("resets: schedule", fields.value("schedule")?)?;
    let schedule = match schedule.text("kind")? {
        "off" => ResetSchedule::Off,
        "every" => ResetSchedule::Every { steps: schedule.integer("steps")? },
        "model" => {
            let name = schedule.text("format")?;
            let format: Format = name.parse().map_err(|_| schedule.refuse("format", "the name of a format", name))?;
            ResetSchedule::Model { format, beta2: schedule.number("beta2")?, threshold: schedule.number("threshold")? }
        }
        "adaptive" => {
            ResetSchedule::Adaptive { beta2: schedule.number("beta2")?, threshold: schedule.number("threshold")? }
        }
        other => return Err(schedule.refuse("kind", "`off`, `every`, `model` or `adaptive`", other)),
    };
    let moments = match fields.text("moments")? {
        "all" => ResetMoments::All,
        "second" => ResetMoments::Second,
        other => return Err(fields.refuse("moments", "`all` or `second`", other)),
    };
    let scope = match fields.text("scope")? {
        "tensor" => ResetScope::Tensor,
        "all" => ResetScope::All,
        other => return Err(fields.refuse("scope", "`tensor` or `all`", other)),
    };
    let list = fields.value("progress")?;
    let list = list.as_array().ok_or_else(|| fields.refuse("progress", "a list", &list.to_string()))?;
    let progress = list.iter().map(|value| {
        let fields = Fields::of("resets: progress", value)?;
        let tensor = if fields.value("tensor")?.is_null() { None } else { Some(fields.integer("tensor")?) };
        Ok(ResetProgress { tensor, steps: fields.integer("steps")?, loss: fields.number("loss")? })
    });
    let progress = progress.collect::<Result<Vec<_>, CheckpointError>>()?;
    Ok(Resets::new(schedule, moments, scope)?.resume(&progress)?)
}
