//! Values in blocks that share a scale: `value = code * scale`.

use alloc::vec;
use alloc::vec::Vec;

use super::packed::read;
use super::scale::{ceil_exponent, floor_exponent, power_of_two};
use super::types::value_f32;
use super::{Format, unpack};

/// How the scale of a block follows from `amax`, the largest magnitude in it, and `max`, the largest value of its elements'
/// format.
///
/// Whatever the rule, a block that holds a NaN or an infinity has a NaN for its scale, and all of it reads NaN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BlockScale {
    /// A power of two in E8M0: `2^k` with `k` the smallest integer for which `amax <= max * 2^k`, clamped to [-126, 127].
    /// Nothing clips, scaling never rounds, and the grid stands still for as long as `k` does. A block of zeros has the
    /// smallest scale, `2^-126`.
    #[default]
    Ceil,
    /// A power of two in E8M0 by the rule of OCP microscaling (MX 1.0): `k = floor(log2(amax)) - floor(log2(max))`, clamped
    /// to [-127, 127]; a block of zeros has `2^-127`. Other MX software reads and makes the same. Magnitudes above
    /// `max * 2^k` clip, so that no rounding is unbiased there.
    Floor,
    /// An f32: `amax / max` rounded up, a positive finite f32 in any case. Nothing clips; the grid moves with every
    /// change of `amax`, and values on it are rounded again each time.
    Amax,
    /// NVFP4: an E4M3 for each block under one f32 for the whole. The f32 is the largest finite magnitude of all blocks over
    /// `448 * 6`, rounded up; the E4M3 is the block's `amax / 6` over that, rounded up, and 0 for a block of zeros.
    Nvfp4,
}

/// What is not a block format, or not its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BlockError {
    /// Elements that do not pack into bytes.
    #[error("element: expected a format of 4, 6 or 8 bits, got {element} of {} bits", element.bits())]
    Element {
        /// What came.
        element: Format,
    },
    /// A block of another size.
    #[error("block: expected 16, 32, 64, 128 or 256 elements, got {got}")]
    Size {
        /// What came.
        got: usize,
    },
    /// [`BlockScale::Nvfp4`] with other elements or blocks.
    #[error("scale: expected E2M1 in blocks of 16 under Nvfp4, got {element} in blocks of {block}")]
    Nvfp4 {
        /// The element format.
        element: Format,
        /// Elements of a block.
        block: usize,
    },
    /// Memory of another length than the elements take.
    #[error("{argument}: expected {expected}, as {len} elements take, got {got}")]
    Length {
        /// What has the wrong length: `codes` (in bytes) or `scales`.
        argument: &'static str,
        /// Number of elements.
        len: usize,
        /// What they take.
        expected: usize,
        /// What came.
        got: usize,
    },
    /// Scales of another kind than the format has.
    #[error("scales: expected those of {scale:?}, got others")]
    Scales {
        /// The format's rule.
        scale: BlockScale,
    },
}

/// A block-scaled format: the format of elements, how many of them share a scale, and the rule for the scale.
///
/// ```
/// use halfulp::{Format, format::{BlockFormat, BlockScale}};
/// let format = BlockFormat::new(Format::E4M3, 128, BlockScale::Ceil)?;
/// assert_eq!(format.bytes(1000), 1000 + 8); // eight blocks, the last of 104
/// assert_eq!(BlockFormat::MXFP4.bytes(64), 32 + 2);
/// # Ok::<(), halfulp::format::BlockError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockFormat {
    element: Format,
    block: u16,
    scale: BlockScale,
}

impl BlockFormat {
    /// OCP MXFP8 with E4M3 elements: blocks of 32, scales by [`BlockScale::Floor`].
    pub const MXFP8_E4M3: Self = Self::mx(Format::E4M3);
    /// OCP MXFP8 with E5M2 elements.
    pub const MXFP8_E5M2: Self = Self::mx(Format::E5M2);
    /// OCP MXFP6 with E3M2 elements.
    pub const MXFP6_E3M2: Self = Self::mx(Format::E3M2);
    /// OCP MXFP6 with E2M3 elements.
    pub const MXFP6_E2M3: Self = Self::mx(Format::E2M3);
    /// OCP MXFP4: E2M1 elements.
    pub const MXFP4: Self = Self::mx(Format::E2M1);
    /// NVFP4: E2M1 in blocks of 16, scales by [`BlockScale::Nvfp4`].
    pub const NVFP4: Self = Self { element: Format::E2M1, block: 16, scale: BlockScale::Nvfp4 };

    const fn mx(element: Format) -> Self {
        Self { element, block: 32, scale: BlockScale::Floor }
    }

    /// A format of one's own: elements of 4, 6 or 8 bits in blocks of 16, 32, 64, 128 or 256.
    ///
    /// # Errors
    /// [`BlockError`] names the argument that does not fit.
    pub const fn new(element: Format, block: usize, scale: BlockScale) -> Result<Self, BlockError> {
        if !matches!(element.bits(), 4 | 6 | 8) {
            return Err(BlockError::Element { element });
        }
        if !matches!(block, 16 | 32 | 64 | 128 | 256) {
            return Err(BlockError::Size { got: block });
        }
        match scale {
            BlockScale::Nvfp4 if !(element.is_e2m1() && block == 16) => Err(BlockError::Nvfp4 { element, block }),
            _ => Ok(Self { element, block: block as u16, scale }),
        }
    }

    /// The format of elements.
    #[must_use]
    pub const fn element(self) -> Format {
        self.element
    }

    /// How many elements share a scale; the last block may have fewer.
    #[must_use]
    pub const fn block(self) -> usize {
        self.block as usize
    }

    /// The rule for scales.
    #[must_use]
    pub const fn scale(self) -> BlockScale {
        self.scale
    }

    /// Number of blocks of `n` elements.
    #[must_use]
    pub const fn blocks(self, n: usize) -> usize {
        n.div_ceil(self.block())
    }

    /// Bytes of `n` elements: packed codes, and the scales (one byte a block, four under [`BlockScale::Amax`], one and four
    /// more in all under [`BlockScale::Nvfp4`]).
    #[must_use]
    pub const fn bytes(self, n: usize) -> usize {
        let scales = match self.scale {
            BlockScale::Ceil | BlockScale::Floor => self.blocks(n),
            BlockScale::Amax => 4 * self.blocks(n),
            BlockScale::Nvfp4 => self.blocks(n) + 4,
        };
        self.element.bytes(n) + scales
    }

    /// The scale of a block with this largest magnitude, by the rules that look at the block alone.
    #[inline(always)]
    pub(crate) fn scale_of(element: Format, scale: BlockScale, amax: f64) -> f32 {
        match scale {
            BlockScale::Floor => power_of_two(floor_exponent(element, amax)),
            BlockScale::Amax => quotient_up(amax, element.max()),
            _ => power_of_two(ceil_exponent(element, amax)),
        }
    }

    /// The f32 of [`BlockScale::Nvfp4`].
    pub(crate) fn nvfp4_global(amax: f64) -> f32 {
        quotient_up(amax, Format::E4M3.max() * Format::E2M1.max())
    }

    /// The E4M3 code of a block under it.
    pub(crate) fn nvfp4_block(amax: f64, global: f32) -> u8 {
        use crate::round::{Mode, Overflow, round};
        // The quotient lies apart from every E4M3 value that it does not equal by far more than f64 rounds.
        let quotient = amax / (Format::E2M1.max() * f64::from(global));
        round(quotient, Format::E4M3, Mode::Up, Overflow::Saturate) as u8
    }
}

/// `amax / max` rounded up in f32, the smallest positive f32 at least.
fn quotient_up(amax: f64, max: f64) -> f32 {
    let nearest = (amax / max) as f32;
    // Exact: 24 bits times those of `max`.
    let up = if f64::from(nearest) * max < amax { nearest.next_up() } else { nearest };
    up.clamp(f32::from_bits(1), f32::MAX)
}

/// The scales of blocks, as stored.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Scales {
    /// Codes of E8M0, one a block.
    E8M0(Vec<u8>),
    /// One f32 a block.
    F32(Vec<f32>),
    /// Codes of E4M3, one a block, and what they are multiplied by.
    Nvfp4 {
        /// Codes of E4M3.
        blocks: Vec<u8>,
        /// The factor of all.
        global: f32,
    },
}

impl Scales {
    fn zeroed(scale: BlockScale, blocks: usize) -> Self {
        match scale {
            BlockScale::Ceil => Self::E8M0(vec![1; blocks]),
            BlockScale::Floor => Self::E8M0(vec![0; blocks]),
            BlockScale::Amax => Self::F32(vec![f32::from_bits(1); blocks]),
            BlockScale::Nvfp4 => Self::Nvfp4 { blocks: vec![0; blocks], global: f32::from_bits(1) },
        }
    }

    fn is_of(&self, scale: BlockScale) -> bool {
        match scale {
            BlockScale::Ceil | BlockScale::Floor => matches!(self, Self::E8M0(_)),
            BlockScale::Amax => matches!(self, Self::F32(_)),
            BlockScale::Nvfp4 => matches!(self, Self::Nvfp4 { .. }),
        }
    }

    /// Number of blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::E8M0(codes) | Self::Nvfp4 { blocks: codes, .. } => codes.len(),
            Self::F32(scales) => scales.len(),
        }
    }

    /// Whether there are no blocks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The scale of block `b`, exactly.
    ///
    /// # Panics
    /// If there is no such block.
    #[must_use]
    pub fn get(&self, b: usize) -> f64 {
        match self {
            Self::E8M0(codes) => Format::E8M0.value(codes[b].into()),
            Self::F32(scales) => scales[b].into(),
            Self::Nvfp4 { blocks, global } => Format::E4M3.value(blocks[b].into()) * f64::from(*global),
        }
    }
}

/// A vector of block-scaled values: packed codes, and a scale for each block.
///
/// Codes lie as in [`PackedVec`](super::PackedVec) (one a byte at 8 bits), and blocks follow one another without gaps: at 4
/// and 6 bits too a block starts with a byte.
///
/// ```
/// use halfulp::{Format, cast::Cast, format::{BlockFormat, BlockScale}};
/// let x: Vec<f32> = (0..100).map(|i| i as f32).collect();
/// let y = Cast::nearest().to_blocks(&x, BlockFormat::new(Format::E4M3, 32, BlockScale::Ceil)?)?;
/// assert_eq!((y.codes().len(), y.scales().len()), (100, 4));
/// assert!(y.decode().iter().zip(&x).all(|(y, x)| (y - x).abs() <= x / 16.0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct BlockVec {
    format: BlockFormat,
    len: usize,
    pub(crate) codes: Vec<u8>,
    pub(crate) scales: Scales,
}

impl BlockVec {
    /// What `len` zeros are stored as: codes 0 and the smallest scales. A format without a zero reads its smallest value.
    #[must_use]
    pub fn zeroed(format: BlockFormat, len: usize) -> Self {
        let scales = Scales::zeroed(format.scale, format.blocks(len));
        Self { format, len, codes: vec![0; format.element.bytes(len)], scales }
    }

    /// Takes codes and scales.
    ///
    /// # Errors
    /// [`BlockError::Length`] if there are not as many of either as `len` elements take, [`BlockError::Scales`] for scales of
    /// another kind than the format's.
    pub fn from_parts(format: BlockFormat, len: usize, codes: Vec<u8>, scales: Scales) -> Result<Self, BlockError> {
        let length = |argument, expected, got| {
            if expected == got { Ok(()) } else { Err(BlockError::Length { argument, len, expected, got }) }
        };
        length("codes", format.element.bytes(len), codes.len())?;
        if !scales.is_of(format.scale) {
            return Err(BlockError::Scales { scale: format.scale });
        }
        length("scales", format.blocks(len), scales.len())?;
        Ok(Self { format, len, codes, scales })
    }

    /// The format.
    #[must_use]
    pub const fn format(&self) -> BlockFormat {
        self.format
    }

    /// Number of elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The packed codes.
    #[must_use]
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// The scales.
    #[must_use]
    pub const fn scales(&self) -> &Scales {
        &self.scales
    }

    /// Bytes of memory.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.format.bytes(self.len)
    }

    /// Number of blocks that read NaN.
    #[must_use]
    pub fn nan_blocks(&self) -> usize {
        (0..self.scales.len()).filter(|&b| self.scales.get(b).is_nan()).count()
    }

    /// Element `i`, exactly: the product of its code's value and its block's scale.
    ///
    /// # Panics
    /// If `i` is not below [`len`](Self::len).
    #[must_use]
    pub fn value(&self, i: usize) -> f64 {
        self.format.element.value(self.code(i)) * self.scales.get(i / self.format.block())
    }

    /// The code of element `i`.
    ///
    /// # Panics
    /// If `i` is not below [`len`](Self::len).
    #[must_use]
    pub fn code(&self, i: usize) -> u16 {
        assert!(i < self.len, "index: expected below {}, got {i}", self.len);
        match self.format.element.bits() {
            8 => self.codes[i].into(),
            width => read(&self.codes, width as usize, i).into(),
        }
    }

    /// The values, each rounded to f32 once: exact under a power of two, unless the product is beyond f32 (infinity then).
    #[must_use]
    pub fn decode(&self) -> Vec<f32> {
        let (element, block) = (self.format.element, self.format.block());
        let values: Vec<f64> =
            (0..=element.code_count() as u16 - 1).map(|code| value_f32(element, code).into()).collect();
        let mut codes = vec![0; self.len];
        unpack(element, &self.codes, &mut codes);
        let blocks = codes.chunks(block).enumerate().map(|(b, codes)| (self.scales.get(b), codes));
        blocks
            .flat_map(|(scale, codes)| codes.iter().map(move |&code| (code, scale)))
            // Exact in f64: at most 8 bits times 28.
            .map(|(code, scale)| canonical((values[usize::from(code)] * scale) as f32))
            .collect()
    }
}

/// A NaN has one payload, whichever product it came from.
fn canonical(x: f32) -> f32 {
    if x.is_nan() { f32::from_bits(0x7FC0_0000) } else { x }
}
