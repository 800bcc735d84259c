//! Memory of parameters, gradients and moments, read as f32 and rounded when stored.

use alloc::vec::Vec;

use half::{bf16, f16};

use crate::format::Format;
use crate::round::lanes::{Decide, Target, Target32};
use crate::round::{Overflow, Source};

/// What a moment is stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StateFormat {
    /// f32: nothing is rounded.
    F32,
    /// BF16, 16 bits, unscaled.
    Bf16,
}

impl StateFormat {
    /// Bytes of `n` elements.
    #[must_use]
    pub const fn bytes(self, n: usize) -> usize {
        match self {
            Self::F32 => 4 * n,
            Self::Bf16 => 2 * n,
        }
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
}

impl Moment {
    pub(crate) fn zeroed(format: StateFormat, n: usize) -> Self {
        match format {
            StateFormat::F32 => Self::F32(bytemuck::allocation::zeroed_vec(n)),
            StateFormat::Bf16 => Self::Bf16(bytemuck::allocation::zeroed_vec(n)),
        }
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn from_bytes(format: StateFormat, bytes: &[u8]) -> Self {
        match format {
            StateFormat::F32 => Self::F32(bytemuck::pod_collect_to_vec(bytes)),
            StateFormat::Bf16 => Self::Bf16(bytemuck::pod_collect_to_vec(bytes)),
        }
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::F32(x) => x.len(),
            Self::Bf16(x) => x.len(),
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
        }
    }

    /// The values.
    #[must_use]
    pub fn to_f32(&self) -> Vec<f32> {
        match self {
            Self::F32(x) => x.clone(),
            Self::Bf16(x) => crate::cast::decode(x),
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
}

impl Real for f32 {}
impl Real for bf16 {}
impl Real for f16 {}
