//! What moments are stored as, and memory of parameters and gradients, read as f32 and rounded when stored.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::str::FromStr;

use half::{bf16, f16};

use super::hyper::{Formats, MOST, StateSet};
#[cfg(any(feature = "checkpoint", feature = "cuda"))]
use crate::format::Scales;
use crate::format::{BlockError, BlockFormat, BlockScale, BlockVec, Format};
use crate::round::lanes::{Decide, Target, Target32};
use crate::round::{Overflow, Source};

/// What a moment is stored as.
///
/// Constants name the block-scaled formats with their defaults, blocks of 128 and power-of-two scales:
///
/// ```
/// use halfulp::optim::StateFormat;
/// assert_eq!(StateFormat::E4M3.bytes(1 << 20), (1 << 20) + (1 << 13));
/// let fine = StateFormat::E4M3.block(32)?;
/// assert_eq!(fine.bytes(1 << 20), (1 << 20) + (1 << 15));
/// assert_eq!("e4m3".parse(), Ok(StateFormat::E4M3));
/// # Ok::<(), halfulp::format::BlockError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StateFormat {
    /// f32: nothing is rounded.
    F32,
    /// BF16, 16 bits, unscaled.
    Bf16,
    /// 8 or 4 bits, each block with its scale.
    Blocks(BlockFormat),
}

/// Elements of a block, unless told otherwise.
const BLOCK: usize = 128;

const fn blocks(element: Format) -> StateFormat {
    match BlockFormat::new(element, BLOCK, BlockScale::Ceil) {
        Ok(format) => StateFormat::Blocks(format),
        Err(_) => panic!("element: expected 4 or 8 bits"),
    }
}

/// Formats with a constant.
const NAMED: [(&str, StateFormat); 8] = [
    ("F32", StateFormat::F32),
    ("BF16", StateFormat::Bf16),
    ("E4M3", StateFormat::E4M3),
    ("E5M2", StateFormat::E5M2),
    ("UE5M3", StateFormat::UE5M3),
    ("UE4M4", StateFormat::UE4M4),
    ("E2M1", StateFormat::E2M1),
    ("UE2M2Nz", StateFormat::UE2M2NZ),
];

impl StateFormat {
    /// E4M3: either moment.
    pub const E4M3: Self = blocks(Format::E4M3);
    /// E5M2: either moment.
    pub const E5M2: Self = blocks(Format::E5M2);
    /// E2M1, 4 bits: first moments.
    pub const E2M1: Self = blocks(Format::E2M1);
    /// UE5M3: second moments, with E5M2's range and one more fraction bit.
    pub const UE5M3: Self = blocks(Format::UE5M3);
    /// UE4M4: second moments, with E4M3's range and one more fraction bit, which halves the variance of rounding.
    pub const UE4M4: Self = blocks(Format::UE4M4);
    /// UE2M2 without a zero, 4 bits: second moments.
    pub const UE2M2NZ: Self = blocks(Format::UE2M2NZ);

    /// Blocks of another size: 32, 64, 128 or 256. F32 and BF16 have none, and stay as they are.
    ///
    /// # Errors
    /// [`BlockError::Size`].
    pub const fn block(self, elements: usize) -> Result<Self, BlockError> {
        match self {
            Self::Blocks(_) if elements < 32 => Err(BlockError::Size { got: elements }),
            Self::Blocks(format) => match BlockFormat::new(format.element(), elements, format.scale()) {
                Ok(format) => Ok(Self::Blocks(format)),
                Err(error) => Err(error),
            },
            unscaled => Ok(unscaled),
        }
    }

    /// With f32 scales, the largest magnitude over the largest value, in place of powers of two: for comparison, since their
    /// grid moves every step, and rounding adds a fifth to the variance of a second moment.
    #[must_use]
    pub const fn amax(self) -> Self {
        match self {
            Self::Blocks(format) => match BlockFormat::new(format.element(), format.block(), BlockScale::Amax) {
                Ok(format) => Self::Blocks(format),
                Err(_) => self,
            },
            unscaled => unscaled,
        }
    }

    /// Bytes of `n` elements, scales included.
    #[must_use]
    pub const fn bytes(self, n: usize) -> usize {
        match self {
            Self::F32 => 4 * n,
            Self::Bf16 => 2 * n,
            Self::Blocks(format) => format.bytes(n),
        }
    }

    /// Whether an optimizer stores moments so, with one of these elements if scaled.
    pub(crate) fn is_one_of(self, elements: &[Format]) -> bool {
        match self {
            Self::F32 | Self::Bf16 => true,
            Self::Blocks(format) => {
                elements.contains(&format.element())
                    && format.block() >= 32
                    && matches!(format.scale(), BlockScale::Ceil | BlockScale::Amax)
            }
        }
    }
}

impl fmt::Display for StateFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (NAMED.iter().find(|(_, format)| format == self), self) {
            (Some((name, _)), _) => f.pad(name),
            (None, Self::Blocks(format)) => {
                write!(f, "{} in blocks of {} ({:?} scales)", format.element(), format.block(), format.scale())
            }
            (None, unscaled) => fmt::Debug::fmt(unscaled, f),
        }
    }
}

impl FromStr for StateFormat {
    type Err = ParseStateFormatError;

    /// Reads the name of a constant, of F32 or of BF16, in any case.
    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let found = NAMED.iter().find(|(named, _)| named.eq_ignore_ascii_case(name));
        found.map(|(_, format)| *format).ok_or_else(|| ParseStateFormatError(name.into()))
    }
}

/// Error of reading the name of a state format.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown state format `{0}`, expected one of f32, bf16, e4m3, e5m2, ue5m3, ue4m4, e2m1, ue2m2nz")]
pub struct ParseStateFormatError(String);

/// What the two moments are stored as. A [`StateFormat`] alone stands for both.
///
/// A first moment that is coarser than the root of the second rounds some elements up to where exact AdamW would not go:
/// where the gradients of a block differ by orders of magnitude, updates of E2M1 beside an 8-bit second moment, or of E4M3
/// beside one of 16 or 32 bits, reach ten to a thousand learning rates, where those of the other pairs stay below four.
///
/// ```
/// use halfulp::optim::{AdamW, AdamWConfig, Rounding, StateFormat, States};
/// let states = States { m: StateFormat::E4M3, v: StateFormat::UE4M4 };
/// let opt = AdamW::new(AdamWConfig::default(), states, Rounding::stochastic(7))?;
/// // A first moment has both signs.
/// let wrong = AdamW::new(AdamWConfig::default(), StateFormat::UE4M4, Rounding::stochastic(7));
/// assert_eq!(wrong.unwrap_err().to_string(), "m: expected F32, BF16, E4M3, E5M2 or E2M1, got UE4M4");
/// # Ok::<(), halfulp::optim::OptimError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct States {
    /// The first: F32, BF16, E4M3, E5M2 or E2M1.
    pub m: StateFormat,
    /// The second: F32, BF16, E4M3, E5M2, UE5M3, UE4M4 or UE2M2Nz.
    pub v: StateFormat,
}

impl States {
    /// 4 bits each, as in Topollai and Choromanska (arXiv:2603.16731): E2M1 and UE2M2Nz.
    pub const FP4: Self = Self { m: StateFormat::E2M1, v: StateFormat::UE2M2NZ };

    /// Bytes of both moments of `n` parameters, scales included.
    #[must_use]
    pub const fn bytes(self, n: usize) -> usize {
        self.m.bytes(n) + self.v.bytes(n)
    }

    /// Whether a moment is stored in blocks.
    #[must_use]
    pub const fn has_blocks(self) -> bool {
        matches!(self.m, StateFormat::Blocks(_)) || matches!(self.v, StateFormat::Blocks(_))
    }
}

impl fmt::Display for States {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} and {}", self.m, self.v)
    }
}

impl From<StateFormat> for States {
    fn from(both: StateFormat) -> Self {
        Self { m: both, v: both }
    }
}

impl Formats for States {
    fn formats(&self) -> [StateFormat; MOST] {
        [self.m, self.v, StateFormat::F32]
    }

    fn of_formats([m, v, _]: [StateFormat; MOST]) -> Self {
        Self { m, v }
    }
}

impl StateSet for States {
    fn bytes(&self, n: usize) -> usize {
        (*self).bytes(n)
    }
}

impl Formats for StateFormat {
    fn formats(&self) -> [StateFormat; MOST] {
        [*self; MOST]
    }

    fn of_formats([only, ..]: [StateFormat; MOST]) -> Self {
        only
    }
}

impl StateSet for StateFormat {
    fn bytes(&self, n: usize) -> usize {
        (*self).bytes(n)
    }
}

/// What the three moments of AdEMAMix are stored as. A [`StateFormat`] alone stands for all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MixStates {
    /// The fast first moment: as [`States::m`].
    pub m: StateFormat,
    /// The second moment: as [`States::v`].
    pub v: StateFormat,
    /// The slow first moment: as [`States::m`].
    pub slow: StateFormat,
}

impl fmt::Display for MixStates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} and {}", self.m, self.v, self.slow)
    }
}

impl From<StateFormat> for MixStates {
    fn from(all: StateFormat) -> Self {
        Self { m: all, v: all, slow: all }
    }
}

impl From<States> for MixStates {
    /// The slow first moment as the fast one.
    fn from(States { m, v }: States) -> Self {
        Self { m, v, slow: m }
    }
}

impl Formats for MixStates {
    fn formats(&self) -> [StateFormat; MOST] {
        [self.m, self.v, self.slow]
    }

    fn of_formats([m, v, slow]: [StateFormat; MOST]) -> Self {
        Self { m, v, slow }
    }
}

impl StateSet for MixStates {
    fn bytes(&self, n: usize) -> usize {
        self.formats().iter().map(|format| format.bytes(n)).sum()
    }
}

/// A moment as stored.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Moment {
    /// In f32.
    F32(Vec<f32>),
    /// In BF16.
    Bf16(Vec<bf16>),
    /// In blocks.
    Blocks(BlockVec),
}

impl Moment {
    pub(crate) fn zeroed(format: StateFormat, n: usize) -> Self {
        match format {
            StateFormat::F32 => Self::F32(bytemuck::allocation::zeroed_vec(n)),
            StateFormat::Bf16 => Self::Bf16(bytemuck::allocation::zeroed_vec(n)),
            StateFormat::Blocks(format) => Self::Blocks(BlockVec::zeroed(format, n)),
        }
    }

    /// `n` elements from bytes: codes, and then the scales of blocks. `None` if there are not as many as they take.
    #[cfg(any(feature = "checkpoint", feature = "cuda"))]
    pub(crate) fn from_bytes(format: StateFormat, n: usize, bytes: &[u8]) -> Option<Self> {
        Some(match format {
            _ if bytes.len() != format.bytes(n) => return None,
            StateFormat::F32 => Self::F32(bytemuck::pod_collect_to_vec(bytes)),
            StateFormat::Bf16 => Self::Bf16(bytemuck::pod_collect_to_vec(bytes)),
            StateFormat::Blocks(format) => {
                let (codes, scales) = bytes.split_at(format.element().bytes(n));
                let scales = match format.scale() {
                    BlockScale::Amax => Scales::F32(bytemuck::pod_collect_to_vec(scales)),
                    _ => Scales::E8M0(scales.to_vec()),
                };
                Self::Blocks(BlockVec::from_parts(format, n, codes.to_vec(), scales).ok()?)
            }
        })
    }

    /// Its bytes, which [`from_bytes`](Self::from_bytes) takes together: codes, and then the scales of blocks.
    #[cfg(any(feature = "checkpoint", feature = "cuda"))]
    pub(crate) fn parts(&self) -> Vec<&[u8]> {
        match self {
            Self::F32(x) => alloc::vec![bytemuck::cast_slice(x)],
            Self::Bf16(x) => alloc::vec![bytemuck::cast_slice(x)],
            Self::Blocks(x) => {
                let scales = match x.scales() {
                    Scales::F32(scales) => bytemuck::cast_slice(scales),
                    Scales::E8M0(scales) => scales,
                    Scales::Nvfp4 { .. } => unreachable!("`States` refuses NVFP4"),
                };
                alloc::vec![x.codes(), scales]
            }
        }
    }

    /// What it is stored as.
    #[must_use]
    pub fn format(&self) -> StateFormat {
        match self {
            Self::F32(_) => StateFormat::F32,
            Self::Bf16(_) => StateFormat::Bf16,
            Self::Blocks(x) => StateFormat::Blocks(x.format()),
        }
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::F32(x) => x.len(),
            Self::Bf16(x) => x.len(),
            Self::Blocks(x) => x.len(),
        }
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self {
            Self::F32(x) => 4 * x.len(),
            Self::Bf16(x) => 2 * x.len(),
            Self::Blocks(x) => x.bytes(),
        }
    }

    /// The values.
    #[must_use]
    pub fn to_f32(&self) -> Vec<f32> {
        match self {
            Self::F32(x) => x.clone(),
            Self::Bf16(x) => crate::cast::decode(x),
            Self::Blocks(x) => x.decode(),
        }
    }
}

/// The canonical NaN that a step stores, whichever NaN it made or read: its payload would differ between machines.
const NAN: u32 = 0x7FC0_0000;

#[inline(always)]
fn canonical(x: f32) -> u32 {
    if x.is_nan() { NAN } else { x.to_bits() }
}

mod sealed {
    use super::Decide;

    pub trait Store: Sized {
        type Target: Copy + Send + Sync;
        fn target() -> Self::Target;
        fn store<D: Decide>(target: &Self::Target, x: f32, draw: D::Draw) -> Self;
        /// The f32 of it, where that is a move of bits.
        fn widen(self) -> Option<f32>;
    }
}
pub(crate) use sealed::Store;

/// A type of parameters and gradients: `f32`, `bf16`, `f16`. Sealed.
pub trait Real: Source<Word = u32> + Store + bytemuck::Pod {}

impl Store for f32 {
    type Target = ();
    fn target() {}
    #[inline(always)]
    fn store<D: Decide>((): &(), x: f32, _: D::Draw) -> Self {
        Self::from_bits(canonical(x))
    }
    #[inline(always)]
    fn widen(self) -> Option<f32> {
        Some(self)
    }
}

impl Store for bf16 {
    type Target = ();
    fn target() {}
    #[inline(always)]
    fn store<D: Decide>((): &(), x: f32, draw: D::Draw) -> Self {
        // A carry takes the largest magnitude to infinity, and cannot reach the sign; infinities and the canonical NaN have
        // nothing below the cut and stay.
        let bits = canonical(x);
        Self::from_bits((bits.wrapping_add(D::addend(draw, bits >> 16 & 1)) >> 16) as u16)
    }
    #[inline(always)]
    fn widen(self) -> Option<f32> {
        Some(f32::from_bits(u32::from(self.to_bits()) << 16))
    }
}

impl Store for f16 {
    type Target = Target32<false>;
    fn target() -> Target32<false> {
        Target32::new(Format::FP16, 0, Overflow::Ieee).expect("every normal FP16 number is a normal f32")
    }
    #[inline(always)]
    fn store<D: Decide>(target: &Target32<false>, x: f32, draw: D::Draw) -> Self {
        Self::from_bits(target.code::<D>(canonical(x), draw).code as u16)
    }
    #[inline(always)]
    fn widen(self) -> Option<f32> {
        None
    }
}

impl Real for f32 {}
impl Real for bf16 {}
impl Real for f16 {}
