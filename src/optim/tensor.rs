//! Whose parameters a step's memory holds, and the check of a step's list, the same on the CPU and on a GPU.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;

use super::{OptimError, Shard};
use crate::random::tensor_id;

/// A tensor, by name or number, whole or in part.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tensor<'a> {
    pub(crate) id: u64,
    label: Label<'a>,
    /// Index of the first element in its tensor, and the number of elements of all of it.
    part: Option<(u64, u64)>,
}

#[derive(Clone, Copy, Debug)]
enum Label<'a> {
    Name(&'a str),
    Number(u64),
}

impl<'a> Tensor<'a> {
    pub(crate) const fn named(name: &'a str) -> Self {
        Self { id: tensor_id(name), label: Label::Name(name), part: None }
    }

    pub(crate) const fn numbered(id: u64) -> Self {
        Self { id, label: Label::Number(id), part: None }
    }

    pub(crate) const fn part(self, first: u64, whole: u64) -> Self {
        Self { part: Some((first, whole)), ..self }
    }

    /// Index of the first element and number of elements of the whole, of a part.
    #[cfg(feature = "cuda")]
    pub(crate) fn of(&self) -> Option<(u64, u64)> {
        self.part
    }

    /// Index of the first element.
    pub(crate) fn first(&self) -> u64 {
        self.part.map_or(0, |(first, _)| first)
    }

    /// Number of elements of the whole tensor, `n` of which are here.
    pub(crate) fn whole(&self, n: u64) -> u64 {
        self.part.map_or(n, |(_, whole)| whole)
    }

    /// Its name, if it is known by one.
    pub(crate) fn name(&self) -> Option<String> {
        match self.label {
            Label::Name(name) => Some(name.into()),
            Label::Number(_) => None,
        }
    }

    /// Name or number, for a message.
    pub(crate) fn text(&self) -> String {
        match self.label {
            Label::Name(name) => format!("`{name}`"),
            Label::Number(number) => format!("{number}"),
        }
    }

    /// Refuses a part of `n` elements that is not cut where parts are.
    fn check_cuts(&self, n: u64) -> Result<(), OptimError> {
        let range = self.first()..self.first().saturating_add(n);
        let shard = Shard::new(range, self.whole(n));
        shard.map(drop).map_err(|source| OptimError::Cut { tensor: self.text(), source })
    }
}

/// A tensor of a step's list.
pub(crate) struct Entry<'a> {
    pub(crate) tensor: Tensor<'a>,
    pub(crate) params: usize,
    pub(crate) grads: usize,
    /// First element and length of its state, if it was stepped before.
    pub(crate) state: Option<(u64, usize)>,
}

/// Refuses lengths that differ, parts that are not cut where they may be or other ones than before, and two tensors with one
/// id.
pub(crate) fn check<'a>(list: impl Iterator<Item = Entry<'a>>) -> Result<(), OptimError> {
    let mut seen: BTreeMap<u64, Tensor<'_>> = BTreeMap::new();
    for Entry { tensor, params, grads, state } in list {
        let length = |argument, got| OptimError::Length { argument, tensor: tensor.text(), expected: params, got };
        if grads != params {
            return Err(length("grads", grads));
        }
        tensor.check_cuts(params as u64)?;
        if let Some((first, n)) = state {
            if n != params {
                return Err(length("state", n));
            }
            if first != tensor.first() {
                return Err(OptimError::Part { tensor: tensor.text(), expected: first, got: tensor.first() });
            }
        }
        if let Some(first) = seen.insert(tensor.id, tensor) {
            return Err(OptimError::SameTensor { first: first.text(), second: tensor.text(), id: tensor.id });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts() {
        let of =
            |first, n, whole| Tensor::named("w").part(first, whole).check_cuts(n).map_err(|error| error.to_string());
        assert!(
            [(0, 10_000, 10_000), (0, 4096, 10_000), (4096, 5904, 10_000), (8192, 0, 10_000), (10_000, 0, 10_000)]
                .iter()
                .all(|&(first, n, whole)| of(first, n, whole).is_ok())
        );
        let wrong = |argument: &str, below: u64, above: u64, got: u64| {
            Err(format!(
                "part of tensor `w`: {argument}: expected a multiple of 4096 or the tensor's end, of which {below} and {above} are nearest, got {got}"
            ))
        };
        assert_eq!(of(100, 4096, 10_000), wrong("start", 0, 4096, 100));
        assert_eq!(of(4096, 100, 10_000), wrong("end", 4096, 8192, 4196));
        assert_eq!(of(8192, 1000, 10_000), wrong("end", 8192, 10_000, 9192));
        let beyond = "part of tensor `w`: range: expected start <= end <= 10000, the tensor's length, got 8192..12288";
        assert_eq!(of(8192, 4096, 10_000), Err(beyond.into()));
        assert!(Tensor::numbered(1).check_cuts(77).is_ok());
    }
}
