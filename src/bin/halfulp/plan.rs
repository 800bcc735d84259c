//! What a cast writes: every tensor's dtype, shape and place, the metadata, before any data are read.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use halfulp::Format;
use halfulp::random::tensor_id;
use safetensors::Dtype;
use serde_json::{Value, json};

use crate::error::Error;
use crate::header::{Entry, Header, MAX_HEADER, lay_out};
use crate::options::Choices;

/// The dtype of safetensors that holds the codes of a format.
fn dtype_of(format: Format) -> Option<Dtype> {
    Some(match format {
        Format::BF16 => Dtype::BF16,
        Format::FP16 => Dtype::F16,
        Format::E5M2 => Dtype::F8_E5M2,
        Format::E4M3 => Dtype::F8_E4M3,
        Format::E8M0 => Dtype::F8_E8M0,
        Format::E3M2 => Dtype::F6_E3M2,
        Format::E2M3 => Dtype::F6_E2M3,
        Format::E2M1 => Dtype::F4,
        _ => return None,
    })
}

/// What is written, and from what.
pub(crate) struct Plan {
    /// The file up to its data.
    pub(crate) start: Vec<u8>,
    pub(crate) entries: Vec<Entry<Work>>,
    /// Length of the whole file.
    pub(crate) bytes: u64,
}

pub(crate) enum Work {
    Copy(Range<usize>),
    Cast {
        from: Range<usize>,
        dtype: Dtype,
    },
    /// The scale of the tensor of this name.
    Scale(String),
}

impl Plan {
    pub(crate) fn new(header: &Header, choices: &Choices) -> Result<Self, Error> {
        let mut entries = Vec::new();
        let mut metadata = header.metadata.clone();
        let mut ids = HashMap::new();
        for (name, info) in &header.tensors {
            let from = header.data + info.data_offsets.0..header.data + info.data_offsets.1;
            let (name, shape) = (name.clone(), info.shape.clone());
            if !casts(info.dtype, &name, choices)? {
                entries.push(Entry::new(name, info.dtype, shape, from.len(), Work::Copy(from)));
                continue;
            }
            if choices.seed.is_some()
                && let Some(other) = ids.insert(tensor_id(&name), name.clone())
            {
                return Err(Error::OneStream(other, name));
            }
            if choices.scaled {
                let scale = format!("{name}_scale");
                if header.tensors.contains_key(&scale) {
                    return Err(Error::ScaleName { name });
                }
                entries.push(Entry::new(scale, Dtype::F32, Vec::new(), size_of::<f32>(), Work::Scale(name.clone())));
            }
            let (dtype, stored, bytes) = stored(choices.format, &shape);
            let fact = format!("halfulp.tensor.{name}");
            if dtype == Dtype::U8 {
                let shape: Vec<String> = shape.iter().map(usize::to_string).collect();
                metadata.insert(fact, json!({ "format": choices.format.to_string(), "shape": shape }).to_string());
            } else {
                metadata.remove(&fact);
            }
            entries.push(Entry::new(name, dtype, stored, bytes, Work::Cast { from, dtype: info.dtype }));
        }
        add_recipe(&mut metadata, choices.recipe());
        let (start, bytes) = lay_out(&mut entries, &metadata);
        if start.len() > MAX_HEADER {
            return Err(Error::LongHeader { got: start.len() });
        }
        Ok(Self { start, entries, bytes })
    }
}

/// Whether a tensor is to be cast; an error where it should be and cannot.
fn casts(dtype: Dtype, name: &str, choices: &Choices) -> Result<bool, Error> {
    use Dtype::{BF16, BOOL, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64};
    match dtype {
        BOOL | U8 | I8 | U16 | I16 | U32 | I32 | U64 | I64 => Ok(false),
        _ if !choices.selects(name) => Ok(false),
        F32 | F64 | F16 | BF16 => Ok(true),
        _ => Err(Error::Source { name: name.into(), dtype }),
    }
}

/// Dtype, shape and bytes under which a tensor is stored.
fn stored(format: Format, shape: &[usize]) -> (Dtype, Vec<usize>, usize) {
    let elements: usize = shape.iter().product(); // fits: a wider type of this shape is in a file
    let bytes = format.bytes(elements);
    match dtype_of(format) {
        Some(dtype) if elements * dtype.bitsize() == bytes * 8 => (dtype, shape.into(), bytes),
        None if format.bits() == 8 => (Dtype::U8, shape.into(), bytes),
        _ => (Dtype::U8, vec![bytes], bytes),
    }
}

/// Adds a recipe to those that the file has: one alone, or a list, the oldest first.
fn add_recipe(metadata: &mut BTreeMap<String, String>, recipe: Value) {
    const KEY: &str = "halfulp.recipe";
    let recipes = match metadata.remove(KEY) {
        None => recipe,
        Some(before) => match serde_json::from_str(&before) {
            Ok(Value::Array(mut recipes)) => {
                recipes.push(recipe);
                recipes.into()
            }
            Ok(one) => json!([one, recipe]),
            Err(_) => json!([before, recipe]),
        },
    };
    metadata.insert(KEY.into(), recipes.to_string());
}
