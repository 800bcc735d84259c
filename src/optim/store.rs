//! Moments between steps: read as f32, rounded and stored.

use core::ops::Range;

use half::bf16;

use super::state::{Moment, Real, StateFormat};
use crate::cast::Code;
use crate::format::{BlockFormat, BlockScale, Decoder, Format, Scales, pack};
use crate::isa::{Isa, Kernel, at_level};
use crate::random::{BLOCK, Draw, Generator, Role, Sealed, SrStates, Width, Words};
use crate::round::lanes::{Decide, Draws16, NearestEven, Target, Target32, Target64};
use crate::round::{Mode, Overflow, encode};

/// Where the draws of one stored value come from.
#[derive(Clone, Copy)]
pub(crate) enum Noise {
    /// Nowhere: to nearest.
    None,
    Draw(Draw),
    SrStates(SrStates),
}

/// Makes the 16-bit draws of a run of elements.
pub(crate) struct Drawer {
    generator: Generators,
    words: Words,
}

enum Generators {
    None,
    Draw(<Draw as Sealed>::Generator),
    SrStates(<SrStates as Sealed>::Generator),
}

impl Drawer {
    pub(crate) fn new(noise: &Noise) -> Self {
        let generator = match noise {
            Noise::None => Generators::None,
            Noise::Draw(draw) => Generators::Draw(draw.generator(Width::Bits16)),
            Noise::SrStates(draw) => Generators::SrStates(draw.generator(Width::Bits16)),
        };
        Self { generator, words: Words::new() }
    }

    /// The draws of `n <= BLOCK` elements from `index` on; `None` to nearest.
    #[inline(always)]
    pub(crate) fn draws(&mut self, index: u64, n: usize) -> Option<&[u16]> {
        let (words, skip) = match &mut self.generator {
            Generators::None => return None,
            Generators::Draw(generator) => generator.fill(index, n, &mut self.words),
            Generators::SrStates(generator) => generator.fill(index, n, &mut self.words),
        };
        Some(&bytemuck::cast_slice(words)[skip..][..n])
    }

    /// Rounds and stores up to [`BLOCK`] unscaled values. An f32 takes no draw.
    #[inline(always)]
    pub(crate) fn write<T: Real>(&mut self, index: u64, new: &[f32], out: &mut [T]) {
        let draws = if size_of::<T>() < 4 { self.draws(index, new.len()) } else { None };
        match draws {
            Some(draws) => store::<T, Draws16>(new, draws, out),
            None => store::<T, NearestEven>(new, &[(); BLOCK][..new.len()], out),
        }
    }
}

#[inline(always)]
fn store<T: Real, D: Decide>(new: &[f32], draws: &[D::Draw], out: &mut [T]) {
    let n = out.len();
    let (new, draws, target) = (&new[..n], &draws[..n], T::target());
    for i in 0..n {
        out[i] = T::store::<D>(&target, new[i], draws[i]);
    }
}

/// How the values of blocks become codes, as constants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockEncoder {
    element: Format,
    scale: BlockScale,
    /// The smallest code of what is above zero.
    floor: u32,
    /// For values over the scale that are exact in f32: the scale is a power of two, the element within f32.
    of_f32: Option<Target32<false>>,
    of_f64: Target64<false>,
}

impl BlockEncoder {
    pub(crate) fn new(element: Format, scale: BlockScale, role: Role) -> Self {
        let of_f32 = Target32::new(element, 0, Overflow::Saturate)
            .filter(|_| scale != BlockScale::Amax && element.max() <= f32::MAX.into());
        let of_f64 = Target64::new(element, 0, Overflow::Saturate).expect("the values of formats are normal in f64");
        let floor = (role == Role::SecondMoment && element.has_zero()).into();
        Self { element, scale, floor, of_f32, of_f64 }
    }

    /// The scale of a block: NaN if not all of it is finite.
    #[inline(always)]
    pub(crate) fn scale(&self, new: &[f32]) -> f32 {
        let amax = new.iter().fold(0, |largest: u32, x| largest.max(x.to_bits() & 0x7FFF_FFFF));
        if amax < 0x7F80_0000 {
            BlockFormat::scale_of(self.element, self.scale, f32::from_bits(amax).into())
        } else {
            f32::NAN
        }
    }

    /// Codes of up to [`BLOCK`] values under a scale.
    #[inline(always)]
    pub(crate) fn codes<D: Decide, C: Code>(&self, scale: f32, new: &[f32], draws: &[D::Draw], codes: &mut [C]) {
        let n = new.len();
        let (draws, codes) = (&draws[..n], &mut codes[..n]);
        let Self { floor, of_f32, of_f64, .. } = *self;
        if let Some(of_f32) = of_f32 {
            // Exact, but for what is too far below the smallest value to be rounded up.
            let unscale = 1.0 / scale;
            for i in 0..n {
                let code = of_f32.code::<D>((new[i] * unscale).to_bits(), draws[i]).code;
                codes[i] = C::of(code.max(floor & u32::from(new[i] > 0.0)));
            }
        } else {
            // The quotient in f64 lies in the same of the 2^17 parts of a ulp as the exact one: of up to 10 fraction bits, no
            // border of them times the scale has more than 53 bits, and the exact one is on it or farther than f64 rounds.
            let scale = f64::from(scale);
            for i in 0..n {
                let code = of_f64.code::<D>((f64::from(new[i]) / scale).to_bits(), draws[i]).code;
                codes[i] = C::of(code.max(floor & u32::from(new[i] > 0.0)));
            }
        }
    }
}

/// Stores a run of whole blocks: a code for each value, and the scale of each block. Returns how many are NaN.
pub(crate) struct StoreBlocks<'a, C> {
    pub(crate) encoder: &'a BlockEncoder,
    pub(crate) drawer: &'a mut Drawer,
    /// Index of the first value in its tensor.
    pub(crate) first: u64,
    pub(crate) block: usize,
    pub(crate) new: &'a [f32],
    pub(crate) codes: &'a mut [C],
    pub(crate) scales: &'a mut [f32],
}

impl<C: Code> Kernel for StoreBlocks<'_, C> {
    type Output = u64;
    #[inline(always)]
    fn run(self) -> u64 {
        let Self { encoder, drawer, mut first, block, new, codes, scales } = self;
        let mut nan_blocks = 0;
        for ((new, codes), scale) in new.chunks(block).zip(codes.chunks_mut(block)).zip(scales) {
            *scale = encoder.scale(new);
            nan_blocks += u64::from(scale.is_nan());
            for (new, codes) in new.chunks(BLOCK).zip(codes.chunks_mut(BLOCK)) {
                match drawer.draws(first, new.len()) {
                    _ if scale.is_nan() => codes.fill(C::of(0)),
                    Some(draws) => encoder.codes::<Draws16, C>(*scale, new, draws, codes),
                    None => encoder.codes::<NearestEven, C>(*scale, new, &[(); BLOCK], codes),
                }
                first = first.wrapping_add(new.len() as u64);
            }
        }
        nan_blocks
    }
}

/// A run of a moment's memory.
pub(crate) enum MomentMut<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [bf16]),
    Blocks(BlocksMut<'a>),
}

pub(crate) struct BlocksMut<'a> {
    format: BlockFormat,
    encoder: &'a BlockEncoder,
    len: usize,
    codes: &'a mut [u8],
    scales: ScalesMut<'a>,
}

enum ScalesMut<'a> {
    E8M0(&'a mut [u8]),
    F32(&'a mut [f32]),
}

impl StateFormat {
    /// How a state is encoded, if it is in blocks.
    pub(crate) fn encoder(self, role: Role) -> Option<BlockEncoder> {
        match self {
            Self::Blocks(format) => Some(BlockEncoder::new(format.element(), format.scale(), role)),
            Self::F32 | Self::Bf16 => None,
        }
    }
}

impl Moment {
    /// The memory of a moment, with the encoder of its format.
    pub(crate) fn memory<'a>(&'a mut self, encoder: Option<&'a BlockEncoder>) -> MomentMut<'a> {
        match (self, encoder) {
            (Self::F32(x), _) => MomentMut::F32(x),
            (Self::Bf16(x), _) => MomentMut::Bf16(x),
            (Self::Blocks(x), Some(encoder)) => {
                let (format, len) = (x.format(), x.len());
                let scales = match &mut x.scales {
                    Scales::E8M0(codes) => ScalesMut::E8M0(codes),
                    Scales::F32(scales) => ScalesMut::F32(scales),
                    Scales::Nvfp4 { .. } => unreachable!("`States` refuses NVFP4"),
                };
                MomentMut::Blocks(BlocksMut { format, encoder, len, codes: &mut x.codes, scales })
            }
            (Self::Blocks(_), None) => unreachable!("blocks have an encoder"),
        }
    }
}

impl<'a> MomentMut<'a> {
    /// Cuts after `elements`, a multiple of [`BLOCK`].
    pub(crate) fn split(self, elements: usize) -> (Self, Self) {
        match self {
            Self::F32(x) => {
                let (head, tail) = x.split_at_mut(elements);
                (Self::F32(head), Self::F32(tail))
            }
            Self::Bf16(x) => {
                let (head, tail) = x.split_at_mut(elements);
                (Self::Bf16(head), Self::Bf16(tail))
            }
            Self::Blocks(blocks) => {
                let BlocksMut { format, encoder, len, codes, scales } = blocks;
                let (codes, more_codes) = codes.split_at_mut(format.element().bytes(elements));
                let (scales, more_scales) = scales.split(format.blocks(elements));
                let of = |len, codes, scales| Self::Blocks(BlocksMut { format, encoder, len, codes, scales });
                (of(elements, codes, scales), of(len - elements, more_codes, more_scales))
            }
        }
    }

    /// The elements of a range that begins at a multiple of [`BLOCK`], and is no longer.
    pub(crate) fn piece(&mut self, range: Range<usize>) -> MomentMut<'_> {
        match self {
            Self::F32(x) => MomentMut::F32(&mut x[range]),
            Self::Bf16(x) => MomentMut::Bf16(&mut x[range]),
            Self::Blocks(BlocksMut { format, encoder, codes, scales, .. }) => {
                let (element, blocks) = (format.element(), format.blocks(range.start)..format.blocks(range.end));
                MomentMut::Blocks(BlocksMut {
                    format: *format,
                    encoder,
                    len: range.len(),
                    codes: &mut codes[element.bytes(range.start)..element.bytes(range.end)],
                    scales: match scales {
                        ScalesMut::E8M0(scales) => ScalesMut::E8M0(&mut scales[blocks]),
                        ScalesMut::F32(scales) => ScalesMut::F32(&mut scales[blocks]),
                    },
                })
            }
        }
    }

    /// The values of a piece, read in place or made in `room`.
    pub(crate) fn values<'b>(&'b self, isa: Isa, room: &'b mut [f32; BLOCK]) -> &'b [f32] {
        match self {
            Self::F32(x) => x,
            Self::Bf16(x) => {
                let values = &mut room[..x.len()];
                at_level(isa, Widen { x, values: &mut *values });
                values
            }
            Self::Blocks(blocks) => {
                let values = &mut room[..blocks.len];
                at_level(isa, Load { blocks, values: &mut *values });
                values
            }
        }
    }

    /// Rounds and stores new values of a piece whose first element has this index. Returns how many blocks are NaN.
    pub(crate) fn store(self, isa: Isa, drawer: &mut Drawer, first: u64, new: &[f32]) -> u64 {
        match self {
            Self::F32(out) => at_level(isa, Write { drawer, first, new, out }),
            Self::Bf16(out) => at_level(isa, Write { drawer, first, new, out }),
            Self::Blocks(blocks) => return blocks.store(isa, drawer, first, new),
        }
        0
    }
}

impl MomentMut<'_> {
    /// The scales of a piece in blocks.
    pub(crate) fn scales(&self, out: &mut [f32; BLOCK / SMALLEST]) {
        if let Self::Blocks(BlocksMut { format, len, scales, .. }) = self {
            for (b, out) in out.iter_mut().enumerate().take(format.blocks(*len)) {
                *out = scales.get(b);
            }
        }
    }

    /// How many values of a piece changed and have the code, on a grid that moved, that is nearest to the old value.
    pub(crate) fn moved_to_same(
        &self,
        old_scales: &[f32; BLOCK / SMALLEST],
        old: &[f32],
        new: &[f32],
        left_out: &[bool],
    ) -> u64 {
        let Self::Blocks(BlocksMut { format, codes, scales, .. }) = self else { return 0 };
        let element = format.element();
        let mut same = 0;
        for (i, ((&old, &new), _)) in old.iter().zip(new).zip(left_out).enumerate().filter(|(_, (_, out))| !**out) {
            let b = i / format.block();
            let scale = scales.get(b);
            if scale == old_scales[b] || old == new || old.is_nan() || new.is_nan() {
                continue;
            }
            let code = if element.bits() == 8 { codes[i] } else { codes[i / 2] >> (i % 2 * 4) & 0xF };
            let value = f64::from(old) / f64::from(scale);
            let (nearest, _) = encode(value, 0, element, Mode::NearestEven, Overflow::Saturate);
            same += u64::from(element.value(nearest) == element.value(code.into()));
        }
        same
    }
}

impl<'a> ScalesMut<'a> {
    fn split(self, blocks: usize) -> (Self, Self) {
        match self {
            Self::E8M0(scales) => {
                let (head, tail) = scales.split_at_mut(blocks);
                (Self::E8M0(head), Self::E8M0(tail))
            }
            Self::F32(scales) => {
                let (head, tail) = scales.split_at_mut(blocks);
                (Self::F32(head), Self::F32(tail))
            }
        }
    }

    fn get(&self, b: usize) -> f32 {
        match self {
            Self::E8M0(codes) => crate::E8M0::from_bits(codes[b]).to_f32(),
            Self::F32(scales) => scales[b],
        }
    }

    fn set(&mut self, new: &[f32]) {
        match self {
            // The scales that are made here are normal, or NaN: their code is the exponent.
            Self::E8M0(codes) => codes.iter_mut().zip(new).for_each(|(code, x)| *code = (x.to_bits() >> 23) as u8),
            Self::F32(scales) => scales.copy_from_slice(new),
        }
    }
}

/// The smallest block of a state.
const SMALLEST: usize = 32;

impl BlocksMut<'_> {
    fn store(mut self, isa: Isa, drawer: &mut Drawer, first: u64, new: &[f32]) -> u64 {
        let Self { format, encoder, ref mut codes, ref mut scales, .. } = self;
        let (block, n) = (format.block(), new.len());
        let mut room = [0.0; BLOCK / SMALLEST];
        let new_scales = &mut room[..format.blocks(n)];
        let nan_blocks = if format.element().bits() == 8 {
            at_level(isa, StoreBlocks { encoder, drawer, first, block, new, codes, scales: &mut *new_scales })
        } else {
            let mut room = [0u8; BLOCK];
            let whole = &mut room[..n];
            let work = StoreBlocks { encoder, drawer, first, block, new, codes: &mut *whole, scales: &mut *new_scales };
            let nan_blocks = at_level(isa, work);
            at_level(isa, Pack { codes: whole, bytes: codes });
            nan_blocks
        };
        scales.set(new_scales);
        nan_blocks
    }
}

/// Packs 4-bit codes.
struct Pack<'a> {
    codes: &'a [u8],
    bytes: &'a mut [u8],
}

impl Kernel for Pack<'_> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        pack(4, self.codes, self.bytes);
    }
}

/// Reads a piece of blocks.
struct Load<'a, 'b> {
    blocks: &'a BlocksMut<'b>,
    values: &'a mut [f32],
}

impl Kernel for Load<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { blocks: BlocksMut { format, codes, scales, .. }, values } = self;
        let decoder = Decoder::new(format.element());
        let mut whole = [0u8; BLOCK];
        let codes = if format.element().bits() == 8 {
            &**codes
        } else {
            for (pair, &byte) in whole.as_chunks_mut::<2>().0.iter_mut().zip(&**codes) {
                *pair = [byte & 0xF, byte >> 4];
            }
            &whole
        };
        for (b, (values, codes)) in values.chunks_mut(format.block()).zip(codes.chunks(format.block())).enumerate() {
            let scale = scales.get(b);
            for (value, &code) in values.iter_mut().zip(codes) {
                *value = decoder.value(code) * scale;
            }
        }
    }
}

/// Reads an unscaled piece of fewer than 32 bits.
struct Widen<'a, T> {
    x: &'a [T],
    values: &'a mut [f32],
}

impl<T: Real> Kernel for Widen<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        T::words(self.x, bytemuck::cast_slice_mut(self.values));
    }
}

/// Stores an unscaled piece.
struct Write<'a, T> {
    drawer: &'a mut Drawer,
    first: u64,
    new: &'a [f32],
    out: &'a mut [T],
}

impl<T: Real> Kernel for Write<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        self.drawer.write(self.first, self.new, self.out);
    }
}
