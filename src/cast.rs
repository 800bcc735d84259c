//! Casts over slices: nearest and stochastic, into storage types, packed slices or the codes of a format of one's own.
//!
//! [`sr_cast`] and [`nearest_cast`] are the short form. [`Cast`] has the choices: overflow, a power-of-two scale, what to do
//! with NaN where the format has none, existing memory. Every element is rounded once from its source, as
//! [`round`](mod@crate::round) says. Work is spread over the current rayon pool (feature `parallel`) and runs at the best
//! instruction-set level of the CPU; neither changes a bit, and [`Draw::at`](crate::Draw::at) makes the chunks of a tensor
//! agree with the whole.
//!
//! Stochastic casts to BF16 take 16-bit draws, which are exact for f32 sources; all other targets take 32-bit draws:
//! P(up) is the exact fraction where at most 32 bits are dropped, and within 2^-33 of it elsewhere.

mod blocks;

use alloc::vec::Vec;
use core::ops::AddAssign;

use crate::format::{Element, Format, PackedVec, SubByte, pack};
use crate::isa::{Isa, Kernel, at_level};
use crate::random::{BLOCK, Draw, Draws, Generator, Width, Words};
use crate::round::lanes::{Decide, Draws16, Draws32, Lost, NearestEven, Target, WithTarget, Word};
use crate::round::{Mode, Overflow, RandomBits, Source, encode};
use crate::threads::join;

/// Casts stochastically into a new vector, with the default overflow of the target.
///
/// ```
/// use halfulp::{Draw, bf16, sr_cast};
/// let x = [1.25f32 + 0.3 / 128.0; 1000];
/// let y: Vec<bf16> = sr_cast(&x, Draw::seeded(7));
/// let up = y.iter().filter(|v| v.to_f32() > 1.25).count();
/// assert!((250..350).contains(&up)); // three in ten
/// ```
#[must_use]
pub fn sr_cast<T: Element>(x: &[impl Source], draw: impl Draws) -> Vec<T> {
    Cast::stochastic(draw).infallible(x)
}

/// Casts to nearest, ties to even, into a new vector, with the default overflow of the target.
///
/// ```
/// use halfulp::{E4M3, nearest_cast};
/// let y: Vec<E4M3> = nearest_cast(&[1.0f32, 1.0625, 1e9]);
/// assert_eq!(y, [1.0, 1.0, 448.0].map(E4M3::from_f32));
/// ```
#[must_use]
pub fn nearest_cast<T: Element>(x: &[impl Source]) -> Vec<T> {
    Cast::nearest().infallible(x)
}

/// Casts stochastically into existing memory; see [`Cast::into_slice`].
///
/// # Errors
/// [`CastError::Length`] if the lengths differ; nothing is written then.
pub fn sr_cast_into<T: Element>(x: &[impl Source], draw: impl Draws, out: &mut [T]) -> Result<Report, CastError> {
    Cast::stochastic(draw).into_slice(x, out)
}

/// Casts to nearest into existing memory; see [`Cast::into_slice`].
///
/// # Errors
/// [`CastError::Length`] if the lengths differ; nothing is written then.
pub fn nearest_cast_into<T: Element>(x: &[impl Source], out: &mut [T]) -> Result<Report, CastError> {
    Cast::nearest().into_slice(x, out)
}

/// What a cast lost besides precision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Elements cast.
    pub elements: u64,
    /// NaN among the sources. A format without NaN stored its largest value for each.
    pub nan: u64,
    /// Sources, infinities included, beyond the largest finite value after rounding: saturated, or stored as infinity or
    /// NaN under [`Overflow::Ieee`].
    pub overflow: u64,
    /// Sources below zero that an unsigned format could not hold.
    pub negative: u64,
}

impl AddAssign for Report {
    fn add_assign(&mut self, other: Self) {
        self.elements += other.elements;
        self.nan += other.nan;
        self.overflow += other.overflow;
        self.negative += other.negative;
    }
}

/// What a cast does with NaN where the format has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MissingNan {
    /// Stores the largest value and counts it in the [`Report`].
    #[default]
    Largest,
    /// Refuses the whole cast with [`CastError::Nan`] before anything is written.
    Refuse,
}

/// Why a cast was refused. Nothing was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CastError {
    /// The output is not as long as the input.
    #[error("out: expected {expected} {unit}, got {got}")]
    Length {
        /// Length that the input asks for.
        expected: usize,
        /// Length that came.
        got: usize,
        /// What is counted: elements or bytes.
        unit: &'static str,
    },
    /// A NaN, [`MissingNan::Refuse`], and a format without NaN.
    #[error("x: expected no NaN, for {format} has none, got one at index {index}")]
    Nan {
        /// The target.
        format: Format,
        /// The first NaN.
        index: usize,
    },
    /// A scale for all of a cast into blocks, which have scales of their own.
    #[error("scale: expected 0, for blocks have scales of their own, got {got}")]
    Scale {
        /// The exponent that came.
        got: i32,
    },
}

/// A cast with all its choices.
///
/// ```
/// use halfulp::{Draw, E2M1, cast::Cast, round::Overflow};
/// let x = [0.3f32, 100.0, f32::NAN];
/// let mut bytes = [0; 2];
/// let cast = Cast::stochastic(Draw::seeded(7).named("w")).overflow(Overflow::Saturate);
/// let report = cast.into_packed::<E2M1>(&x, &mut bytes)?;
/// assert_eq!((report.elements, report.overflow, report.nan), (3, 1, 1));
/// assert_eq!(bytes[1], 0x7); // NaN: E2M1 has none, so its largest value
/// # Ok::<(), halfulp::cast::CastError>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Cast<D = Draw> {
    rounding: Rounding<D>,
    overflow: Option<Overflow>,
    missing_nan: MissingNan,
    scale: i32,
    isa: Option<Isa>,
    width: Option<Width>,
}

#[derive(Clone, Copy, Debug)]
enum Rounding<D> {
    NearestEven,
    Stochastic(D),
    /// A mode that takes no random bits, element by element.
    Other(Mode),
}

impl Cast {
    const fn of(rounding: Rounding<Draw>) -> Self {
        Self { rounding, overflow: None, missing_nan: MissingNan::Largest, scale: 0, isa: None, width: None }
    }

    /// To nearest, ties to the even code.
    pub const fn nearest() -> Self {
        Self::of(Rounding::NearestEven)
    }

    /// To nearest, ties away from zero.
    pub const fn nearest_away() -> Self {
        Self::of(Rounding::Other(Mode::NearestAway))
    }

    /// To the neighbour of smaller magnitude.
    pub const fn toward_zero() -> Self {
        Self::of(Rounding::Other(Mode::TowardZero))
    }

    /// To the larger neighbour.
    pub const fn up() -> Self {
        Self::of(Rounding::Other(Mode::Up))
    }

    /// To the smaller neighbour.
    pub const fn down() -> Self {
        Self::of(Rounding::Other(Mode::Down))
    }
}

impl<D: Draws> Cast<D> {
    /// Stochastically, with these draws.
    pub const fn stochastic(draw: D) -> Self {
        Self {
            rounding: Rounding::Stochastic(draw),
            overflow: None,
            missing_nan: MissingNan::Largest,
            scale: 0,
            isa: None,
            width: None,
        }
    }

    /// What becomes of too large values, in place of [`Overflow::of`] the target.
    pub const fn overflow(self, overflow: Overflow) -> Self {
        Self { overflow: Some(overflow), ..self }
    }

    /// What becomes of NaN where the target has none.
    pub const fn missing_nan(self, missing_nan: MissingNan) -> Self {
        Self { missing_nan, ..self }
    }

    /// Stores `x / 2^k`. The scale acts on exponents and never rounds; to decode, multiply by `2^k`.
    pub const fn scale(self, k: i32) -> Self {
        Self { scale: k, ..self }
    }

    /// Runs at this level instead of the best one.
    pub const fn isa(self, isa: Isa) -> Self {
        Self { isa: Some(isa), ..self }
    }

    /// Takes 16-bit draws whatever the target, as the states of an optimizer do.
    #[cfg(feature = "stall")]
    pub(crate) const fn draws_of_16_bits(self) -> Self {
        Self { width: Some(Width::Bits16), ..self }
    }

    /// Casts into a new vector.
    ///
    /// # Errors
    /// [`CastError::Nan`] if NaN is to be refused, the target has none, and there is one.
    pub fn to_vec<T: Element>(&self, x: &[impl Source]) -> Result<Vec<T>, CastError> {
        let mut out = bytemuck::allocation::zeroed_vec(x.len());
        self.into_slice(x, &mut out)?;
        Ok(out)
    }

    fn infallible<T: Element>(&self, x: &[impl Source]) -> Vec<T> {
        let mut out: Vec<T> = bytemuck::allocation::zeroed_vec(x.len());
        self.run(T::FORMAT, x, Whole(bytemuck::cast_slice_mut::<T, T::Code>(&mut out)));
        out
    }

    /// Casts into existing memory.
    ///
    /// # Errors
    /// [`CastError::Length`] if the lengths differ, [`CastError::Nan`] as in [`to_vec`](Self::to_vec).
    pub fn into_slice<T: Element>(&self, x: &[impl Source], out: &mut [T]) -> Result<Report, CastError> {
        self.check(T::FORMAT, x, x.len(), out.len(), "elements")?;
        Ok(self.run(T::FORMAT, x, Whole(bytemuck::cast_slice_mut::<T, T::Code>(out))))
    }

    /// Casts into a new packed vector.
    ///
    /// # Errors
    /// [`CastError::Nan`] as in [`to_vec`](Self::to_vec).
    pub fn to_packed<T: SubByte>(&self, x: &[impl Source]) -> Result<PackedVec<T>, CastError> {
        let mut out = PackedVec::zeroed(x.len());
        self.into_packed::<T>(x, out.bytes_mut())?;
        Ok(out)
    }

    /// Casts into packed bytes, in the layout of [`PackedVec`]; the last byte is filled up with zero bits.
    ///
    /// # Errors
    /// [`CastError::Length`] if `out` is not of the `T::FORMAT.bytes(x.len())` bytes that the codes take,
    /// [`CastError::Nan`] as in [`to_vec`](Self::to_vec).
    pub fn into_packed<T: SubByte>(&self, x: &[impl Source], out: &mut [u8]) -> Result<Report, CastError> {
        self.check(T::FORMAT, x, T::FORMAT.bytes(x.len()), out.len(), "bytes")?;
        Ok(self.run(T::FORMAT, x, Packed { width: T::FORMAT.bits() as usize, bytes: out }))
    }

    /// Casts into the codes of any format, one in each `u16`.
    ///
    /// # Errors
    /// As [`into_slice`](Self::into_slice).
    pub fn into_codes(&self, x: &[impl Source], format: Format, out: &mut [u16]) -> Result<Report, CastError> {
        self.check(format, x, x.len(), out.len(), "elements")?;
        Ok(self.run(format, x, Whole(out)))
    }

    /// Casts into the bytes of any format as [`Format::bytes`] counts them: little-endian above 8 bits, packed at 6 and 4.
    ///
    /// # Errors
    /// As [`into_packed`](Self::into_packed).
    pub fn into_bytes(&self, x: &[impl Source], format: Format, out: &mut [u8]) -> Result<Report, CastError> {
        self.check(format, x, format.bytes(x.len()), out.len(), "bytes")?;
        Ok(match format.bits() {
            width @ (4 | 6) => self.run(format, x, Packed { width: width as usize, bytes: out }),
            ..=8 => self.run(format, x, Whole(out)),
            // The allocator aligns bytes as it likes; a view of `[u8; 2]` asks for no alignment.
            _ => self.run(format, x, Whole(bytemuck::cast_slice_mut::<u8, [u8; 2]>(out))),
        })
    }

    fn check<S: Source>(
        &self,
        format: Format,
        x: &[S],
        expected: usize,
        got: usize,
        unit: &'static str,
    ) -> Result<(), CastError> {
        if expected != got {
            return Err(CastError::Length { expected, got, unit });
        }
        let refuses = self.missing_nan == MissingNan::Refuse && !format.has_nan();
        if let Some(index) = if refuses { x.iter().position(|x| x.is_nan()) } else { None } {
            return Err(CastError::Nan { format, index });
        }
        Ok(())
    }

    /// Scale, overflow (this one unless another was named) and rounding for kernels, if they have them.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_gpu(
        &self,
        format: Format,
        overflow: Overflow,
    ) -> Result<(i32, Overflow, GpuRounding), crate::cuda::CudaError> {
        let unsupported = |argument, reason| crate::cuda::CudaError::Unsupported { argument, reason };
        if self.missing_nan == MissingNan::Refuse && !format.has_nan() {
            return Err(unsupported("missing_nan", "refusing a NaN would wait for the device"));
        }
        let rounding = match self.rounding {
            Rounding::NearestEven => GpuRounding::Nearest,
            Rounding::Stochastic(draw) => {
                let (key, first) = draw
                    .stream_1(if format == Format::BF16 { Width::Bits16 } else { Width::Bits32 })
                    .ok_or_else(|| unsupported("draw", "kernels draw from stream 1"))?;
                GpuRounding::Stochastic { key, first }
            }
            Rounding::Other(_) => {
                return Err(unsupported("rounding", "kernels round to nearest even or stochastically"));
            }
        };
        Ok((self.scale, self.overflow.unwrap_or(overflow), rounding))
    }

    /// Cuts the work into chunks for the threads of the pool. `out` fits `x`.
    fn run<S: Source>(&self, format: Format, x: &[S], out: impl Output) -> Report {
        spread(&self.plan(format), 0, x, out)
    }

    /// Fills in the defaults for a target.
    fn plan(&self, format: Format) -> Plan<D> {
        Plan {
            format,
            scale: self.scale,
            overflow: self.overflow.unwrap_or(Overflow::of(format)),
            width: self.width.unwrap_or(if format == Format::BF16 { Width::Bits16 } else { Width::Bits32 }),
            rounding: self.rounding,
            isa: self.isa.unwrap_or_else(Isa::best),
        }
    }
}

/// A rounding that kernels have.
#[cfg(feature = "cuda")]
pub(crate) enum GpuRounding {
    Nearest,
    /// Stream 1 under (seed, step, tensor, role with the domain of the width), from element `first` on.
    Stochastic {
        key: (u64, u64, u64, u32),
        first: u64,
    },
}

/// Elements that a thread takes at a time: a multiple of [`BLOCK`], small enough for a second-level cache.
pub(crate) const CHUNK: usize = 64 * BLOCK;

/// Halves the work at multiples of [`CHUNK`] until it is one chunk.
fn spread<S: Source, D: Draws>(plan: &Plan<D>, first: u64, x: &[S], out: impl Output) -> Report {
    if x.len() <= CHUNK {
        return plan.chunk(first, x, out);
    }
    let middle = x.len().div_ceil(CHUNK) / 2 * CHUNK;
    let (x0, x1) = x.split_at(middle);
    let (out0, out1) = out.split(middle);
    let (mut report, more) = join(|| spread(plan, first, x0, out0), || spread(plan, first + middle as u64, x1, out1));
    report += more;
    report
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for u8 {}
    impl Sealed for u16 {}
    impl Sealed for [u8; 2] {}
}

/// Memory of one code: `u8`, `u16`, or two little-endian bytes. Sealed.
pub trait Code: sealed::Sealed + bytemuck::Pod + Send + Sync {
    /// The low bits of a word.
    #[doc(hidden)]
    fn of(code: u32) -> Self;
}

impl Code for u8 {
    #[inline(always)]
    fn of(code: u32) -> Self {
        code as Self
    }
}

impl Code for u16 {
    #[inline(always)]
    fn of(code: u32) -> Self {
        code as Self
    }
}

impl Code for [u8; 2] {
    #[inline(always)]
    fn of(code: u32) -> Self {
        (code as u16).to_le_bytes()
    }
}

/// Where codes go.
trait Output: Send + Sized {
    /// Memory in which the codes of a block are made.
    type Code: Code;
    /// Cuts after `elements`, a multiple of [`BLOCK`].
    fn split(self, elements: usize) -> (Self, Self);
    /// Where the codes of block `block`, of `count` elements, are to be made: in place, or in `room` to be packed.
    fn place<'a>(&'a mut self, block: usize, count: usize, room: &'a mut [Self::Code; BLOCK]) -> &'a mut [Self::Code];
    /// Stores the codes of the block if they were made in `room`.
    fn store(&mut self, block: usize, count: usize, room: &[Self::Code; BLOCK]);
}

/// One code to a place.
struct Whole<'a, C>(&'a mut [C]);

impl<C: Code> Output for Whole<'_, C> {
    type Code = C;
    fn split(self, elements: usize) -> (Self, Self) {
        let (head, tail) = self.0.split_at_mut(elements);
        (Self(head), Self(tail))
    }
    #[inline(always)]
    fn place<'a>(&'a mut self, block: usize, count: usize, _: &'a mut [C; BLOCK]) -> &'a mut [C] {
        &mut self.0[block * BLOCK..][..count]
    }
    #[inline(always)]
    fn store(&mut self, _: usize, _: usize, _: &[C; BLOCK]) {}
}

/// 4-bit or 6-bit codes without gaps.
struct Packed<'a> {
    width: usize,
    bytes: &'a mut [u8],
}

impl Output for Packed<'_> {
    type Code = u8;
    fn split(self, elements: usize) -> (Self, Self) {
        let Self { width, bytes } = self;
        let (head, tail) = bytes.split_at_mut(elements / 8 * width);
        (Self { width, bytes: head }, Self { width, bytes: tail })
    }
    #[inline(always)]
    fn place<'a>(&'a mut self, _: usize, count: usize, room: &'a mut [u8; BLOCK]) -> &'a mut [u8] {
        &mut room[..count]
    }
    #[inline(always)]
    fn store(&mut self, block: usize, count: usize, room: &[u8; BLOCK]) {
        let bytes = &mut self.bytes[block * (BLOCK / 8 * self.width)..][..(count * self.width).div_ceil(8)];
        pack(self.width, &room[..count], bytes);
    }
}

/// A cast with its defaults filled in.
#[derive(Clone, Copy)]
struct Plan<D> {
    format: Format,
    scale: i32,
    overflow: Overflow,
    width: Width,
    rounding: Rounding<D>,
    isa: Isa,
}

impl<D: Draws> Plan<D> {
    /// Casts a run of elements, of which `first` is the index of the first, at most 2^32 at a time.
    fn chunk<S: Source>(&self, first: u64, x: &[S], mut out: impl Output) -> Report {
        let out = &mut out;
        let lanes = Lanes { plan: self, first, x, out: &mut *out };
        let lost = S::Word::with_target(self.format, self.scale, self.overflow, lanes).flatten();
        let lost = lost.unwrap_or_else(|| self.element_by_element(first, x, out));
        Report {
            elements: x.len() as u64,
            nan: lost.nan.into(),
            overflow: lost.overflow.into(),
            negative: lost.negative.into(),
        }
    }

    /// The definition itself, for modes and formats that have no lanes.
    fn element_by_element<S: Source>(&self, first: u64, x: &[S], out: &mut impl Output) -> Lost {
        let mut lost = Lost::default();
        let mut room = [Code::of(0); BLOCK];
        for (b, x) in x.chunks(BLOCK).enumerate() {
            let codes = out.place(b, x.len(), &mut room);
            for ((code, &x), i) in codes.iter_mut().zip(x).zip(first + (b * BLOCK) as u64..) {
                let mode = match self.rounding {
                    Rounding::NearestEven => Mode::NearestEven,
                    Rounding::Other(mode) => mode,
                    Rounding::Stochastic(draw) => Mode::Stochastic(match self.width {
                        Width::Bits16 => RandomBits::of16(draw.draw16(i)),
                        Width::Bits32 => RandomBits::of32(draw.draw32(i)),
                    }),
                };
                let (rounded, loss) = encode(x, self.scale, self.format, mode, self.overflow);
                lost.count(loss);
                *code = Code::of(rounded.into());
            }
            out.store(b, x.len(), &room);
        }
        lost
    }
}

/// A run of elements in the branch-free form, for the modes that have one.
struct Lanes<'a, D, S, O> {
    plan: &'a Plan<D>,
    first: u64,
    x: &'a [S],
    out: &'a mut O,
}

impl<D: Draws, S: Source, O: Output> WithTarget<S::Word> for Lanes<'_, D, S, O> {
    type Output = Option<Lost>;
    fn run(self, target: impl Target<Word = S::Word>) -> Option<Lost> {
        let Self { plan, first, x, out } = self;
        match plan.rounding {
            Rounding::NearestEven => Some(at_level(plan.isa, Nearest { target, x, out })),
            Rounding::Stochastic(draw) => {
                let generator = draw.generator(plan.width);
                Some(at_level(plan.isa, Stochastic { target, width: plan.width, generator, first, x, out }))
            }
            Rounding::Other(_) => None,
        }
    }
}

/// A run of nearest rounding.
struct Nearest<'a, T, S, O> {
    target: T,
    x: &'a [S],
    out: &'a mut O,
}

impl<T: Target, S: Source<Word = T::Word>, O: Output> Kernel for Nearest<'_, T, S, O> {
    type Output = Lost;
    #[inline(always)]
    fn run(self) -> Lost {
        let mut lost = Lost::default();
        let mut room = [Code::of(0); BLOCK];
        for (b, x) in self.x.chunks(BLOCK).enumerate() {
            let codes = self.out.place(b, x.len(), &mut room);
            lanes::<_, _, NearestEven, _>(&self.target, x, &[(); BLOCK], codes, &mut lost);
            self.out.store(b, x.len(), &room);
        }
        lost
    }
}

/// A run of stochastic rounding, from element `first` on.
struct Stochastic<'a, T, S, O, G> {
    target: T,
    width: Width,
    generator: G,
    first: u64,
    x: &'a [S],
    out: &'a mut O,
}

impl<T: Target, S: Source<Word = T::Word>, O: Output, G: Generator> Kernel for Stochastic<'_, T, S, O, G> {
    type Output = Lost;
    #[inline(always)]
    fn run(mut self) -> Lost {
        let mut lost = Lost::default();
        let mut words = Words::new();
        let mut room = [Code::of(0); BLOCK];
        for (b, x) in self.x.chunks(BLOCK).enumerate() {
            let index = self.first + (b * BLOCK) as u64;
            let (words, skip) = self.generator.fill(index, x.len(), &mut words);
            let codes = self.out.place(b, x.len(), &mut room);
            match self.width {
                Width::Bits16 => {
                    let draws = &bytemuck::cast_slice::<u64, u16>(words)[skip..];
                    lanes::<_, _, Draws16, _>(&self.target, x, draws, codes, &mut lost);
                }
                Width::Bits32 => {
                    let draws = &bytemuck::cast_slice::<u64, u32>(words)[skip..];
                    lanes::<_, _, Draws32, _>(&self.target, x, draws, codes, &mut lost);
                }
            }
            self.out.store(b, x.len(), &room);
        }
        lost
    }
}

/// Codes of one block, of at most [`BLOCK`] elements.
#[inline(always)]
fn lanes<T: Target, S: Source<Word = T::Word>, D: Decide, C: Code>(
    target: &T,
    x: &[S],
    draws: &[D::Draw],
    codes: &mut [C],
    lost: &mut Lost,
) {
    let n = x.len();
    let mut room = [Default::default(); BLOCK];
    let (words, draws, codes) = (&S::words(x, &mut room)[..n], &draws[..n], &mut codes[..n]);
    let target = *target;
    let mut any = 0;
    for i in 0..n {
        let coded = target.code::<D>(words[i], draws[i]);
        codes[i] = C::of(coded.code);
        any |= coded.lost();
    }
    if any != 0 {
        let mut here = Lost::default();
        for i in 0..n {
            let coded = target.certain::<D>(words[i], draws[i]);
            codes[i] = C::of(coded.code);
            here += coded;
        }
        *lost += here;
    }
}

/// Decodes to f32, exactly.
#[must_use]
pub fn decode<T: Element>(codes: &[T]) -> Vec<f32> {
    let mut out = bytemuck::allocation::zeroed_vec(codes.len());
    decode_slices(codes, &mut out);
    out
}

/// Decodes to f32 into existing memory, exactly.
///
/// # Errors
/// [`CastError::Length`] if the lengths differ; nothing is written then.
pub fn decode_into<T: Element>(codes: &[T], out: &mut [f32]) -> Result<(), CastError> {
    if codes.len() != out.len() {
        return Err(CastError::Length { expected: codes.len(), got: out.len(), unit: "elements" });
    }
    decode_slices(codes, out);
    Ok(())
}

fn decode_slices<T: Element>(codes: &[T], out: &mut [f32]) {
    if codes.len() > CHUNK {
        let middle = codes.len() / 2;
        let (codes, more_codes) = codes.split_at(middle);
        let (out, more_out) = out.split_at_mut(middle);
        join(|| decode_slices(codes, out), || decode_slices(more_codes, more_out));
        return;
    }
    for (x, code) in out.iter_mut().zip(codes) {
        *x = code.value();
    }
}
