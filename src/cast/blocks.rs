//! Casts into blocks that share a scale.

use super::{CHUNK, Cast, CastError, Packed, Plan, Report, Whole};
use crate::format::{BlockFormat, BlockScale, BlockVec, Scales};
use crate::measure::amax;
use crate::random::Draws;
use crate::round::lanes::Word;
use crate::round::{Overflow, Source};
use crate::threads::join;

impl<D: Draws> Cast<D> {
    /// Casts into a new vector of blocks; see [`into_blocks`](Self::into_blocks).
    ///
    /// ```
    /// use halfulp::{Draw, cast::Cast, format::BlockFormat};
    /// let x = vec![0.3f32; 1000];
    /// let y = Cast::stochastic(Draw::seeded(7)).to_blocks(&x, BlockFormat::NVFP4)?;
    /// assert_eq!((y.codes().len(), y.scales().len()), (500, 63));
    /// # Ok::<(), halfulp::cast::CastError>(())
    /// ```
    ///
    /// # Errors
    /// As [`into_blocks`](Self::into_blocks).
    pub fn to_blocks(&self, x: &[impl Source], format: BlockFormat) -> Result<BlockVec, CastError> {
        let mut out = BlockVec::zeroed(format, x.len());
        self.into_blocks(x, &mut out)?;
        Ok(out)
    }

    /// Casts into blocks: each gets the scale that its [`BlockScale`] gives it, and each element is `x / scale` rounded once
    /// (the quotient, not exact unless the scale is a power of two, is that of f64). What is too large, as may be under
    /// [`BlockScale::Floor`], saturates unless an [`overflow`](Self::overflow) is named.
    ///
    /// A block with a NaN or an infinity reads NaN: its scale is NaN, and its codes are 0. The report counts those sources, NaN
    /// and infinite ones apart.
    ///
    /// # Errors
    /// [`CastError::Length`] if the lengths differ, [`CastError::Nan`] as in [`to_vec`](Self::to_vec), [`CastError::Scale`] for a
    /// [`scale`](Self::scale) beside those of the blocks.
    pub fn into_blocks<S: Source>(&self, x: &[S], out: &mut BlockVec) -> Result<Report, CastError> {
        let format = out.format();
        self.check(format.element(), x, x.len(), out.len(), "elements")?;
        if self.scale != 0 {
            return Err(CastError::Scale { got: self.scale });
        }
        set_scales(x, format, &mut out.scales);
        let plan = Plan { overflow: self.overflow.unwrap_or(Overflow::Saturate), ..self.plan(format.element()) };
        let blocks = Blocks { plan, format, scales: &out.scales };
        Ok(blocks.spread(0, x, &mut out.codes))
    }
}

/// The largest magnitude of up to 256 values; `None` if one is not finite.
fn finite_amax<S: Source>(x: &[S]) -> Option<f64> {
    let mut room = [S::Word::default(); 256];
    let mut magnitudes = S::words(x, &mut room)[..x.len()].iter().map(|word| word.float().abs());
    magnitudes.try_fold(0.0f64, |largest, x| x.is_finite().then(|| largest.max(x)))
}

fn set_scales<S: Source>(x: &[S], format: BlockFormat, scales: &mut Scales) {
    let (element, block, rule) = (format.element(), format.block(), format.scale());
    match scales {
        Scales::E8M0(codes) => fill(x, block, codes, &|x| {
            // The exponent of an f32, of which 2^-127 is the one subnormal.
            let scale = finite_amax(x).map(|amax| BlockFormat::scale_of(element, rule, amax));
            scale.map_or(0xFF, |scale| (scale.to_bits() >> 23) as u8)
        }),
        Scales::F32(scales) => fill(x, block, scales, &|x| {
            finite_amax(x).map_or(f32::NAN, |amax| BlockFormat::scale_of(element, rule, amax))
        }),
        Scales::Nvfp4 { blocks, global } => {
            *global = BlockFormat::nvfp4_global(amax(x));
            fill(x, block, blocks, &|x| finite_amax(x).map_or(0x7F, |amax| BlockFormat::nvfp4_block(amax, *global)));
        }
    }
}

/// One value for each block, over the threads of the pool.
fn fill<S: Source, T: Send>(x: &[S], block: usize, out: &mut [T], of: &(impl Fn(&[S]) -> T + Sync)) {
    if x.len() > CHUNK {
        let middle = x.len().div_ceil(CHUNK) / 2 * CHUNK;
        let (x, more_x) = x.split_at(middle);
        let (out, more_out) = out.split_at_mut(middle / block);
        join(|| fill(x, block, out, of), || fill(more_x, block, more_out, of));
        return;
    }
    for (out, x) in out.iter_mut().zip(x.chunks(block)) {
        *out = of(x);
    }
}

/// A cast into blocks whose scales are known.
struct Blocks<'a, D> {
    plan: Plan<D>,
    format: BlockFormat,
    scales: &'a Scales,
}

impl<D: Draws> Blocks<'_, D> {
    /// Halves the work at multiples of [`CHUNK`]. `first` is the index of the first element.
    fn spread<S: Source>(&self, first: usize, x: &[S], codes: &mut [u8]) -> Report {
        if x.len() > CHUNK {
            let middle = x.len().div_ceil(CHUNK) / 2 * CHUNK;
            let (x, more_x) = x.split_at(middle);
            let (codes, more_codes) = codes.split_at_mut(self.format.element().bytes(middle));
            let (mut report, more) =
                join(|| self.spread(first, x, codes), || self.spread(first + middle, more_x, more_codes));
            report += more;
            return report;
        }
        let block = self.format.block();
        let mut report = Report::default();
        for (b, (x, codes)) in x.chunks(block).zip(codes.chunks_mut(self.format.element().bytes(block))).enumerate() {
            report += self.block(first + b * block, x, codes);
        }
        report
    }

    fn block<S: Source>(&self, first: usize, x: &[S], codes: &mut [u8]) -> Report {
        let scale = self.scales.get(first / self.format.block());
        if scale.is_nan() {
            codes.fill(0);
            return lost(x);
        }
        if let BlockScale::Ceil | BlockScale::Floor = self.format.scale() {
            let k = (scale.to_bits() >> 52) as i32 - 1023;
            return self.encode(k, first, x, codes);
        }
        // A block of zeros may have a scale of zero.
        let divisor = if scale == 0.0 { 1.0 } else { scale };
        let (mut words, mut quotients) = ([S::Word::default(); 256], [0.0; 256]);
        let quotients = &mut quotients[..x.len()];
        for (quotient, word) in quotients.iter_mut().zip(S::words(x, &mut words)) {
            *quotient = word.float() / divisor;
        }
        self.encode(0, first, quotients, codes)
    }

    fn encode<S: Source>(&self, scale: i32, first: usize, x: &[S], codes: &mut [u8]) -> Report {
        let plan = Plan { scale, ..self.plan };
        match self.format.element().bits() {
            8 => plan.chunk(first as u64, x, Whole(codes)),
            width => plan.chunk(first as u64, x, Packed { width: width as usize, bytes: codes }),
        }
    }
}

/// The report of a block that became NaN.
fn lost<S: Source>(x: &[S]) -> Report {
    let nan = x.iter().filter(|x| x.is_nan()).count() as u64;
    let mut room = [S::Word::default(); 256];
    let overflow = S::words(x, &mut room)[..x.len()].iter().filter(|word| word.float().is_infinite()).count() as u64;
    Report { elements: x.len() as u64, nan, overflow, negative: 0 }
}
