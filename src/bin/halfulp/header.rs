//! The header of a safetensors file: read strictly, written with sorted keys.
//!
//! A file is the length of its header (8 bytes, little-endian), the header (JSON: name to dtype, shape and offsets, and
//! `__metadata__`, strings to strings), and the data, without gaps.

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use serde::ser::{Serialize, SerializeMap, Serializer};

/// The longest header that safetensors reads.
pub(crate) const MAX_HEADER: usize = 100_000_000;
/// Bytes of the header's length.
const LENGTH: usize = 8;

/// What a file says of itself.
pub(crate) struct Header {
    pub(crate) tensors: BTreeMap<String, TensorInfo>,
    pub(crate) metadata: BTreeMap<String, String>,
    /// Where the data begins, from which offsets count.
    pub(crate) data: usize,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum HeaderError {
    #[error("expected at least {LENGTH} bytes, got {0}")]
    Short(usize),
    #[error("expected a header of at most {MAX_HEADER} bytes, got a length of {0}")]
    TooLong(u64),
    #[error("expected a header of {expected} bytes, got {got} after its length: truncated, or no safetensors file")]
    TruncatedHeader { expected: usize, got: usize },
    #[error("header: {0}")]
    Json(#[from] serde_json::Error),
    #[error("expected {expected} bytes of data, as the header says, got {got}")]
    DataLength { expected: usize, got: usize },
}

impl Header {
    /// Reads the header of a whole file. The offsets of every tensor lie in the file, fit its dtype and shape, and leave
    /// neither holes nor overlaps.
    pub(crate) fn parse(file: &[u8]) -> Result<Self, HeaderError> {
        let (length, rest) = file.split_first_chunk::<LENGTH>().ok_or(HeaderError::Short(file.len()))?;
        let length = u64::from_le_bytes(*length);
        let expected = usize::try_from(length).ok().filter(|&n| n <= MAX_HEADER).ok_or(HeaderError::TooLong(length))?;
        let (json, data) =
            rest.split_at_checked(expected).ok_or(HeaderError::TruncatedHeader { expected, got: rest.len() })?;
        serde_json::from_slice::<DistinctNames>(json)?;
        let header: Metadata = serde_json::from_slice(json)?; // validates
        if header.data_len() != data.len() {
            return Err(HeaderError::DataLength { expected: header.data_len(), got: data.len() });
        }
        Ok(Self {
            tensors: header.tensors().into_iter().map(|(name, info)| (name, info.clone())).collect(),
            metadata: header.metadata().iter().flatten().map(|(key, value)| (key.clone(), value.clone())).collect(),
            data: LENGTH + expected,
        })
    }
}

/// A JSON object that names nothing twice: of two tensors with one name, parsers keep one or the other.
struct DistinctNames;

impl<'de> Deserialize<'de> for DistinctNames {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = DistinctNames;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<DistinctNames, A::Error> {
                let mut names = HashSet::new();
                while let Some(name) = map.next_key::<String>()? {
                    map.next_value::<IgnoredAny>()?;
                    if let Some(name) = names.replace(name) {
                        return Err(A::Error::custom(format_args!("expected each name once, got `{name}` twice")));
                    }
                }
                Ok(DistinctNames)
            }
        }
        deserializer.deserialize_map(Names)
    }
}

/// A tensor to be written: name, dtype, shape, bytes.
pub(crate) struct Entry<T> {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: usize,
    /// Where its data begins in the file.
    pub(crate) at: u64,
    /// What the data are to be made of.
    pub(crate) work: T,
}

impl<T> Entry<T> {
    pub(crate) fn new(name: String, dtype: Dtype, shape: Vec<usize>, bytes: usize, work: T) -> Self {
        Self { name, dtype, shape, bytes, at: 0, work }
    }
}

/// A header to be written, its entries sorted by name: no copy of it in memory but the text.
struct Tensors<'a, T> {
    entries: &'a [&'a Entry<T>],
    metadata: &'a BTreeMap<String, String>,
}

impl<T> Serialize for Tensors<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        const METADATA: &str = "__metadata__";
        let mut map = serializer.serialize_map(Some(self.entries.len() + 1))?;
        let (before, after) = self.entries.split_at(self.entries.partition_point(|entry| *entry.name < *METADATA));
        let write = |map: &mut S::SerializeMap, entries: &[&Entry<T>]| {
            entries.iter().try_for_each(|entry| map.serialize_entry(&entry.name, &Tensor(entry)))
        };
        write(&mut map, before)?;
        map.serialize_entry(METADATA, self.metadata)?;
        write(&mut map, after)?;
        map.end()
    }
}

/// What a header says of one tensor.
struct Tensor<'a, T>(&'a Entry<T>);

impl<T> Serialize for Tensor<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(3))?;
        map.serialize_entry("data_offsets", &[self.0.at, self.0.at + self.0.bytes as u64])?;
        map.serialize_entry("dtype", &self.0.dtype)?;
        map.serialize_entry("shape", &self.0.shape)?;
        map.end()
    }
}

/// Lays tensors out by descending alignment of the dtype, then by name, as safetensors does, without gaps. Gives the start
/// of the file up to the data, which begin at a multiple of 8, and the length of the whole file.
pub(crate) fn lay_out<T>(entries: &mut [Entry<T>], metadata: &BTreeMap<String, String>) -> (Vec<u8>, u64) {
    entries.sort_by(|a, b| b.dtype.cmp(&a.dtype).then_with(|| a.name.cmp(&b.name)));
    let mut end = 0;
    for entry in &mut *entries {
        entry.at = end as u64;
        end += entry.bytes;
    }
    let mut names: Vec<&Entry<T>> = entries.iter().collect();
    names.sort_by(|a, b| a.name.cmp(&b.name));
    let mut json = serde_json::to_vec(&Tensors { entries: &names, metadata }).expect("keys are strings");
    drop(names);
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut start = (json.len() as u64).to_le_bytes().to_vec();
    start.append(&mut json);
    for entry in entries {
        entry.at += start.len() as u64;
    }
    let length = (start.len() + end) as u64;
    (start, length)
}
