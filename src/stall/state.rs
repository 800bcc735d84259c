//! A moment as stored between steps.

use std::sync::Arc;

use super::error::check;
use super::meter::StateView;
use super::simulation::SimulationError;
use crate::cast::Cast;
use crate::format::{BlockScale, Format};
use crate::isa::{Isa, at_level};
use crate::optim::{BlockEncoder, Drawer, Noise, Rounding, StoreBlocks};
use crate::random::{Draw, Role};

/// How values share a scale: each block of this many elements (the last may be shorter) has its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Scaling {
    /// Values are stored as they are.
    Unscaled,
    /// [`BlockScale::Ceil`]: scaling never rounds, and the grid stands still for as long as the exponent does.
    PowerOfTwo {
        /// Elements of a block.
        block: usize,
    },
    /// [`BlockScale::Amax`]: the grid moves every step.
    Amax {
        /// Elements of a block.
        block: usize,
    },
}

impl Scaling {
    /// Elements that share a scale, if any do.
    #[must_use]
    pub const fn block(self) -> Option<usize> {
        match self {
            Self::Unscaled => None,
            Self::PowerOfTwo { block } | Self::Amax { block } => Some(block),
        }
    }

    /// The rule of block formats.
    const fn rule(self) -> BlockScale {
        match self {
            Self::Amax { .. } => BlockScale::Amax,
            Self::Unscaled | Self::PowerOfTwo { .. } => BlockScale::Ceil,
        }
    }
}

/// What a moment is stored as.
///
/// ```
/// use halfulp::{Format, stall::{Scaling, Storage}};
/// let paper = Storage::stochastic(Format::E4M3, 7).scaled(Scaling::PowerOfTwo { block: 128 });
/// assert_eq!(paper.format, Some(Format::E4M3));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Storage {
    /// The format; `None` is f32, where nothing is rounded.
    pub format: Option<Format>,
    /// To nearest, or stochastically by 16-bit draws of stream 1 under seed, step, tensor, role and element, as the
    /// optimizers draw. [`Rounding::SrStates`] is not supported.
    pub rounding: Rounding,
    /// How values are scaled.
    pub scaling: Scaling,
}

impl Storage {
    /// In f32: nothing is rounded.
    pub const F32: Self = Self { format: None, rounding: Rounding::Nearest, scaling: Scaling::Unscaled };

    /// Rounded to nearest, unscaled.
    #[must_use]
    pub const fn nearest(format: Format) -> Self {
        Self { format: Some(format), ..Self::F32 }
    }

    /// Rounded stochastically, unscaled.
    #[must_use]
    pub const fn stochastic(format: Format, seed: u64) -> Self {
        Self { format: Some(format), rounding: Rounding::stochastic(seed), scaling: Scaling::Unscaled }
    }

    /// Scaled so.
    #[must_use]
    pub const fn scaled(self, scaling: Scaling) -> Self {
        Self { scaling, ..self }
    }

    pub(crate) fn check(&self, role: Role) -> Result<(), SimulationError> {
        let unsupported = |argument, reason| Err(SimulationError::Unsupported { argument, reason });
        if !matches!(role, Role::FirstMoment | Role::SecondMoment | Role::ThirdState) {
            return unsupported("role", "a stored moment is a first or a second one");
        }
        if role != Role::SecondMoment && self.format.is_some_and(|format| !format.is_signed()) {
            return unsupported("format", "first moments have both signs, and the format has none");
        }
        if !matches!(self.rounding, Rounding::Nearest | Rounding::Stochastic { .. }) {
            return unsupported("rounding", "states are rounded to nearest or stochastically under stream 1");
        }
        if self.format.is_none() && self.scaling != Scaling::Unscaled {
            return unsupported("scaling", "values in f32 are not scaled");
        }
        Ok(check(self.scaling.block() != Some(0), "block", "1 element or more", 0.0)?)
    }
}

/// A moment as stored: codes, scales, and the values that they stand for.
///
/// Second moments stored with a scale keep above zero what was above zero: a positive value below the smallest positive
/// code is stored as that code, so that no step divides by zero. Scaled, it is an optimizer's own code that stores, and a
/// block with a NaN or an infinity reads NaN; unscaled, [`Cast`] stores.
///
/// ```
/// use halfulp::{Format, random::Role, stall::{Scaling, State, Storage}};
/// let storage = Storage::nearest(Format::E4M3).scaled(Scaling::PowerOfTwo { block: 2 });
/// let mut v = State::zeroed(storage, Role::SecondMoment, 4)?;
/// v.store(&[1.0, 1e-9, 0.3, 0.0], 1)?;
/// assert_eq!(v.values(), [1.0, 2f32.powi(-17), 0.3125, 0.0]);
/// # Ok::<(), halfulp::stall::SimulationError>(())
/// ```
#[derive(Clone, Debug)]
pub struct State {
    storage: Storage,
    role: Role,
    tensor: u64,
    first: u64,
    /// The value of every code. Of a format wider than f32, scales bring back into it what no f32 holds.
    decoded: Arc<[f64]>,
    codes: Vec<u16>,
    scales: Vec<f32>,
    values: Vec<f32>,
}

impl State {
    /// `n` zeros, or the smallest codes of a format that has no zero. `role` says which moment: the draws and the floor of
    /// second moments depend on it. Tensor 0, first element 0.
    ///
    /// # Errors
    /// [`SimulationError::Unsupported`] for another role than a moment's (the third state's is a first moment), an unsigned
    /// format for a first moment, scales in f32, or [`Rounding::SrStates`]; [`SimulationError::Range`] for blocks of no elements.
    pub fn zeroed(storage: Storage, role: Role, n: usize) -> Result<Self, SimulationError> {
        storage.check(role)?;
        let decoded = storage.format.map_or([].into(), |format| format.values().map(|(_, value)| value).collect());
        let (codes, scales, values) = (Vec::new(), Vec::new(), Vec::new());
        let empty = Self { storage, role, tensor: 0, first: 0, decoded, codes, scales, values };
        Ok(empty.restarted(&vec![0.0; n]))
    }

    /// The tensor whose draws it takes.
    #[must_use]
    pub fn tensor(self, tensor: u64) -> Self {
        Self { tensor, ..self }
    }

    /// The index, in its tensor, of its first element.
    #[must_use]
    pub fn at(self, first: u64) -> Self {
        Self { first, ..self }
    }

    /// The values: code times scale, rounded to f32 once. That is exact but under [`Scaling::Amax`] and beyond the range of
    /// f32.
    #[must_use]
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Codes and scales, for the [meter](super::Comparison).
    pub fn view(&self) -> StateView<'_> {
        let view = match self.storage.format {
            None => StateView::from(&self.values[..]),
            Some(format) => StateView::codes(&self.codes, format),
        };
        match self.storage.scaling.block() {
            Some(block) => view.scaled(&self.scales, block),
            None => view,
        }
    }

    /// Stores new values, rounded stochastically by the draws of this step.
    ///
    /// # Errors
    /// [`SimulationError::Length`] if there are not as many values as the state has; nothing is stored then.
    pub fn store(&mut self, new: &[f32], step: u64) -> Result<(), SimulationError> {
        let (expected, got) = (self.values.len(), new.len());
        if expected != got {
            return Err(SimulationError::Length { argument: "new", expected, got });
        }
        match self.storage.format {
            None => self.values.copy_from_slice(new),
            Some(format) => self.encode(new, format, step),
        }
        self.decode();
        Ok(())
    }

    fn encode(&mut self, new: &[f32], format: Format, step: u64) {
        let Self { storage: Storage { rounding, scaling, .. }, role, tensor, first, .. } = *self;
        let draw = match rounding {
            Rounding::Stochastic { seed } => Some(Draw::seeded(seed).step(step).tensor(tensor).role(role)),
            _ => None,
        };
        let Some(block) = scaling.block() else {
            let cast = match draw {
                Some(draw) => Cast::stochastic(draw.at(first)).draws_of_16_bits(),
                None => Cast::nearest(),
            };
            cast.into_codes(new, format, &mut self.codes).expect("as many codes as values, and no NaN is refused");
            return;
        };
        let encoder = BlockEncoder::new(format, scaling.rule(), role);
        let drawer = &mut Drawer::new(&draw.map_or(Noise::None, Noise::Draw));
        let (codes, scales) = (&mut self.codes[..], &mut self.scales[..]);
        at_level(Isa::best(), StoreBlocks { encoder: &encoder, drawer, first, block, new, codes, scales });
    }

    /// The same state with other elements, stored to nearest.
    pub(super) fn restarted(mut self, values: &[f32]) -> Self {
        let (n, rounding) = (values.len(), self.storage.rounding);
        self.values.resize(n, 0.0);
        self.codes.resize(if self.storage.format.is_some() { n } else { 0 }, 0);
        self.scales.resize(self.storage.scaling.block().map_or(0, |block| n.div_ceil(block)), 1.0);
        self.storage.rounding = Rounding::Nearest;
        self.store(values, 0).expect("resized to as many");
        self.storage.rounding = rounding;
        self
    }

    fn decode(&mut self) {
        let Some(format) = self.storage.format else { return };
        let mask = (format.code_count() - 1) as usize;
        let decoded = &self.decoded[..=mask];
        let block = self.storage.scaling.block().unwrap_or(self.codes.len()).max(1);
        for (b, (codes, values)) in self.codes.chunks(block).zip(self.values.chunks_mut(block)).enumerate() {
            let scale = self.scales.get(b).copied().map_or(1.0, f64::from);
            for (value, &code) in values.iter_mut().zip(codes) {
                *value = (decoded[usize::from(code) & mask] * scale) as f32;
            }
        }
    }
}
