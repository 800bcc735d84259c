//! Random words as pure functions of (seed, role, step, tensor, element): never of thread, lane, chunk or call order.
//!
//! Three streams, by name. [`Stream::V1`] is the default and frozen: four rounds of a Philox2x32 mixer over the element
//! group, with Weyl start and independent round keys that Philox4x32-10 derives from seed, step, tensor and role.
//! [`Stream::Philox`] is Philox4x32-10 itself (Salmon et al., SC 2011), slower and better studied. [`SrStates`] is the
//! 32-bit counter hash of the Python package `sr-states`, bit for bit, for comparison; it has the defects its page lists.
//!
//! A word serves one decision. Casts draw under role 0, a step under one role for each thing it rounds.

mod philox;
mod sr_states;
mod v1;

pub use philox::philox4x32_10;
pub use sr_states::{SrStates, sr_states_hash};
pub use v1::{Keys, tensor_id};

use philox::Philox;

/// What a draw is for. Roles never share a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Role {
    /// A cast.
    #[default]
    Cast,
    /// A parameter.
    Parameter,
    /// The first moment.
    FirstMoment,
    /// The second moment.
    SecondMoment,
    /// A third state.
    ThirdState,
}

impl Role {
    /// The number of the role in the key: 0 casts, 1 parameters, 2 first moments, 3 second moments, 4 a third state.
    #[must_use]
    pub const fn number(self) -> u32 {
        self as u32
    }
}

/// A named, frozen way of making random words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Stream {
    /// Stream 1: the default.
    #[default]
    V1,
    /// Philox4x32-10 over the element group, keyed by seed, tensor and role; about three times the work of `V1`.
    Philox,
}

/// Where random bits come from: seed, step and tensor, and the index of the first element.
///
/// Two arrays rounded under one `Draw` share their noise: give each array a [`tensor`](Self::tensor) or
/// [`name`](Self::named) of its own, and each moment in time a [`step`](Self::step). Everything else may be cut at
/// will: the draw of element `i` depends on `i` alone, so a chunk rounded [`at`](Self::at) its place in the whole gets the
/// bits of the whole.
///
/// ```
/// use halfulp::{Draw, sr_cast};
/// use half::bf16;
/// let x = vec![1.003f32; 1000];
/// let draw = Draw::seeded(7).step(1).named("layers.0.weight");
/// let whole: Vec<bf16> = sr_cast(&x, draw);
/// let tail: Vec<bf16> = sr_cast(&x[400..], draw.at(400));
/// assert_eq!(whole[400..], tail);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use]
pub struct Draw {
    stream: Stream,
    seed: u64,
    step: u64,
    tensor: u64,
    role: Role,
    first: u64,
}

impl Draw {
    /// Stream 1 with this seed; step 0, tensor 0, role [`Role::Cast`], first element 0.
    pub const fn seeded(seed: u64) -> Self {
        Self { stream: Stream::V1, seed, step: 0, tensor: 0, role: Role::Cast, first: 0 }
    }

    /// Another stream.
    pub const fn stream(self, stream: Stream) -> Self {
        Self { stream, ..self }
    }

    /// The step (or any other counter of moments in time).
    pub const fn step(self, step: u64) -> Self {
        Self { step, ..self }
    }

    /// The tensor, by number.
    pub const fn tensor(self, tensor: u64) -> Self {
        Self { tensor, ..self }
    }

    /// The tensor, by name: its [`tensor_id`].
    pub const fn named(self, name: &str) -> Self {
        Self { tensor: tensor_id(name), ..self }
    }

    /// What the draws are for.
    pub const fn role(self, role: Role) -> Self {
        Self { role, ..self }
    }

    /// The index, in its tensor, of the first element that is rounded.
    pub const fn at(self, first: u64) -> Self {
        Self { first, ..self }
    }
}

mod sealed {
    use super::Width;

    /// Makes the words of one tensor, keeping keys between calls.
    pub trait Generator {
        /// Words holding the draws of elements `index..index + count`, and how many draws of the first word precede
        /// element `index`. At most [`super::BLOCK`] elements.
        fn fill<'a>(&mut self, index: u64, count: usize, words: &'a mut super::Words) -> (&'a [u64], usize);
    }

    pub trait Sealed {
        type Generator: Generator;
        fn generator(&self, width: Width) -> Self::Generator;
        /// Seed, step, tensor and role (with the domain of the width), and the first element, if this is stream 1.
        fn stream_1(&self, _: Width) -> Option<((u64, u64, u64, u32), u64)> {
            None
        }
    }
}
pub(crate) use sealed::{Generator, Sealed};

/// Bits of a draw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum Width {
    Bits16,
    Bits32,
}

impl Width {
    /// log2 of the draws in a 64-bit word.
    const fn shift(self) -> u32 {
        match self {
            Self::Bits16 => 2,
            Self::Bits32 => 1,
        }
    }

    /// What is added to a role's number, so that draws of different width share no word.
    const fn domain(self) -> u32 {
        match self {
            Self::Bits16 => 0,
            Self::Bits32 => 32,
        }
    }
}

/// Elements whose draws are made at a time.
pub(crate) const BLOCK: usize = 512;

/// Room for the words of a block: 512 draws of 32 bits, and one word (two of Philox) more for an unaligned start.
#[doc(hidden)]
#[derive(Debug)]
#[repr(align(64))]
pub struct Words([u64; BLOCK / 2 + 8]);

impl Words {
    pub(crate) const fn new() -> Self {
        Self([0; BLOCK / 2 + 8])
    }
}

/// A source of random words for a run of elements: [`Draw`] or [`SrStates`]. Sealed.
///
/// Element indices are counted from the draw's first element and wrap at 2^64.
///
/// A call derives the keys anew: many draws at a time cost a nanosecond or less each, one at a time some fifty times that.
pub trait Draws: Sealed + Copy + Send + Sync {
    /// The 16-bit draw of element `i`.
    #[must_use]
    fn draw16(&self, i: u64) -> u16 {
        let mut words = Words::new();
        let (word, skip) = self.generator(Width::Bits16).fill(i, 1, &mut words);
        (word[0] >> (16 * skip)) as u16
    }

    /// The 32-bit draw of element `i`.
    #[must_use]
    fn draw32(&self, i: u64) -> u32 {
        let mut words = Words::new();
        let (word, skip) = self.generator(Width::Bits32).fill(i, 1, &mut words);
        (word[0] >> (32 * skip)) as u32
    }

    /// Writes the 16-bit draws of the elements from `first` on.
    fn fill16(&self, first: u64, out: &mut [u16]) {
        let mut generator = self.generator(Width::Bits16);
        let mut words = Words::new();
        for (block, out) in (0u64..).zip(out.chunks_mut(BLOCK)) {
            let index = first.wrapping_add(block * BLOCK as u64);
            let (filled, skip) = generator.fill(index, out.len(), &mut words);
            for (j, draw) in out.iter_mut().enumerate() {
                let k = skip + j;
                *draw = (filled[k / 4] >> (k % 4 * 16)) as u16;
            }
        }
    }

    /// Writes the 32-bit draws of the elements from `first` on.
    fn fill32(&self, first: u64, out: &mut [u32]) {
        let mut generator = self.generator(Width::Bits32);
        let mut words = Words::new();
        for (block, out) in (0u64..).zip(out.chunks_mut(BLOCK)) {
            let index = first.wrapping_add(block * BLOCK as u64);
            let (filled, skip) = generator.fill(index, out.len(), &mut words);
            for (j, draw) in out.iter_mut().enumerate() {
                let k = skip + j;
                *draw = (filled[k / 2] >> (k % 2 * 32)) as u32;
            }
        }
    }
}

impl Draws for Draw {}

impl Sealed for Draw {
    type Generator = DrawGenerator;

    #[inline(always)]
    fn generator(&self, width: Width) -> DrawGenerator {
        let Self { stream, seed, step, tensor, role, first } = *self;
        let role = role.number() + width.domain();
        let key = match stream {
            Stream::V1 => Kind::V1(Keys::new(seed, step, tensor, role, 0), 0),
            Stream::Philox => Kind::Philox(Philox::new(seed, step, tensor, role)),
        };
        DrawGenerator { kind: key, draw: (seed, step, tensor, role), first, shift: width.shift() }
    }

    fn stream_1(&self, width: Width) -> Option<((u64, u64, u64, u32), u64)> {
        let Self { stream, seed, step, tensor, role, first } = *self;
        (stream == Stream::V1).then_some(((seed, step, tensor, role.number() + width.domain()), first))
    }
}

/// The generator of a [`Draw`].
#[doc(hidden)]
#[derive(Clone, Debug)]
pub struct DrawGenerator {
    kind: Kind,
    /// Seed, step, tensor, and the role's number with the domain of the width.
    draw: (u64, u64, u64, u32),
    first: u64,
    shift: u32,
}

#[derive(Clone, Debug)]
enum Kind {
    /// The keys, and the 2^32 groups (high half of the group) that they serve.
    V1(Keys, u32),
    Philox(Philox),
}

impl Generator for DrawGenerator {
    #[inline(always)]
    fn fill<'a>(&mut self, index: u64, count: usize, words: &'a mut Words) -> (&'a [u64], usize) {
        let index = self.first.wrapping_add(index);
        let skip = (index & ((1 << self.shift) - 1)) as usize;
        let length = (skip + count).div_ceil(1 << self.shift);
        let words = &mut words.0[..length];
        // Groups wrap with the 64-bit index.
        let last_group = u64::MAX >> self.shift;
        let mut group = index >> self.shift;
        let mut rest = &mut *words;
        while !rest.is_empty() {
            // In 64 bits: a run may be as long as a usize has values where that has 32.
            let run = (rest.len() as u64).min((1 << 32) - u64::from(group as u32)) as usize;
            let (now, later) = rest.split_at_mut(run);
            match &mut self.kind {
                Kind::V1(keys, high) => {
                    if *high != (group >> 32) as u32 {
                        *high = (group >> 32) as u32;
                        let (seed, step, tensor, role) = self.draw;
                        *keys = Keys::new(seed, step, tensor, role, *high);
                    }
                    keys.fill(group as u32, now);
                }
                Kind::Philox(philox) => philox.fill(group, now),
            }
            group = (group + run as u64) & last_group;
            rest = later;
        }
        (words, skip)
    }
}
