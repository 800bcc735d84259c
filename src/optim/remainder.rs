//! An f32 as a BF16 number and 16 bits more.

use alloc::vec::Vec;

use half::bf16;

use crate::isa::{Isa, Kernel, at_level};
use crate::random::BLOCK;
use crate::threads::join as join_threads;

/// Splits an f32 into the BF16 number nearest to it and a remainder of 16 bits, from which [`join`] makes the f32 again, bit
/// for bit, whatever it was.
///
/// A parameter kept in BF16, with its remainder beside it, is a parameter in f32 to the step and one in BF16 to the model: an
/// FP32 master copy costs 4 bytes more, the remainder 2.
///
/// The number is the nearest, a tie going away from zero: with ties to even, the two values half way to an even code would have
/// one code and one remainder. Beyond the largest BF16 number by half a spacing it is infinity. Zeros and infinities keep
/// their sign, with a remainder of 0.
///
/// The remainder is the low half of the word of the f32. Its top bit says that the number was rounded away from zero, so that
/// the high half of the word is the code less this bit. NaN are not rounded: the code is the high half. That fails where the
/// code would then read as infinity, 0x7F80 of either sign: BF16 has 65,535 NaN of each sign too few for all of f32's. Of
/// these, signalling ones with no payload but in the low half, those with a remainder below 0x8000 have the code of infinity,
/// and the others the code of zero, which no number leaves with such a remainder. A step stores none of them: its NaN is
/// 0x7FC00000.
///
/// ```
/// use halfulp::{bf16, optim::remainder::{join, split}};
/// let x = 1.001f32;
/// let (number, rest) = split(x);
/// assert_eq!(number, bf16::ONE);
/// assert_eq!(join(number, rest), x);
/// ```
#[inline(always)]
#[must_use]
pub const fn split(x: f32) -> (bf16, u16) {
    let bits = x.to_bits();
    let magnitude = bits & 0x7FFF_FFFF;
    let high = (bits >> 16) as u16;
    let code = if magnitude >= FIRST_NAN_OF_BF16 {
        high
    } else if magnitude >= INFINITY + 0x8000 {
        high & 0x8000
    } else {
        high + (bits >> 15 & 1) as u16
    };
    (bf16::from_bits(code), bits as u16)
}

/// The f32 that [`split`] made these of. Each of the 2^32 pairs is made of one.
#[inline(always)]
#[must_use]
pub const fn join(number: bf16, remainder: u16) -> f32 {
    let code = number.to_bits();
    let magnitude = code & 0x7FFF;
    let away = remainder >> 15;
    let high = if magnitude > 0x7F80 {
        code
    } else if magnitude == 0 && away == 1 {
        code | 0x7F80
    } else {
        code - away
    };
    f32::from_bits((high as u32) << 16 | remainder as u32)
}

const INFINITY: u32 = 0x7F80_0000;
/// The smallest f32 word whose high half is a NaN of BF16.
const FIRST_NAN_OF_BF16: u32 = INFINITY + 0x1_0000;

/// Slices of different lengths. Nothing was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{argument}: expected {expected} elements, got {got}")]
pub struct LengthError {
    /// Which slice.
    pub argument: &'static str,
    /// Length of the first.
    pub expected: usize,
    /// What came.
    pub got: usize,
}

/// [`split`] over a slice, into new vectors: numbers and remainders.
#[must_use]
pub fn split_slice(x: &[f32]) -> (Vec<bf16>, Vec<u16>) {
    let (mut numbers, mut rest) =
        (bytemuck::allocation::zeroed_vec(x.len()), bytemuck::allocation::zeroed_vec(x.len()));
    spread(Isa::best(), Split { x, numbers: &mut numbers, rest: &mut rest });
    (numbers, rest)
}

/// [`split`] over a slice, into existing memory.
///
/// # Errors
/// [`LengthError`] if `numbers` or `remainders` are not as long as `x`.
pub fn split_into(x: &[f32], numbers: &mut [bf16], remainders: &mut [u16]) -> Result<(), LengthError> {
    check("numbers", x.len(), numbers.len())?;
    check("remainders", x.len(), remainders.len())?;
    spread(Isa::best(), Split { x, numbers, rest: remainders });
    Ok(())
}

/// [`join`] over slices, into a new vector.
///
/// # Errors
/// [`LengthError`] if there are not as many remainders as numbers.
pub fn join_slices(numbers: &[bf16], remainders: &[u16]) -> Result<Vec<f32>, LengthError> {
    let mut out = bytemuck::allocation::zeroed_vec(numbers.len());
    join_into(numbers, remainders, &mut out)?;
    Ok(out)
}

/// [`join`] over slices, into existing memory.
///
/// # Errors
/// [`LengthError`] if `remainders` or `out` are not as long as `numbers`.
pub fn join_into(numbers: &[bf16], remainders: &[u16], out: &mut [f32]) -> Result<(), LengthError> {
    check("remainders", numbers.len(), remainders.len())?;
    check("out", numbers.len(), out.len())?;
    spread(Isa::best(), Join { numbers, rest: remainders, out });
    Ok(())
}

fn check(argument: &'static str, expected: usize, got: usize) -> Result<(), LengthError> {
    if expected == got { Ok(()) } else { Err(LengthError { argument, expected, got }) }
}

/// Elements that a thread takes at a time.
const CHUNK: usize = 64 * BLOCK;

/// Work over slices that can be cut.
trait Work: Kernel<Output = ()> + Send + Sized {
    fn len(&self) -> usize;
    fn cut(self, at: usize) -> (Self, Self);
}

/// Halves the work until it is one chunk.
fn spread(isa: Isa, work: impl Work) {
    if work.len() <= CHUNK {
        return at_level(isa, work);
    }
    let middle = work.len() / 2;
    let (head, tail) = work.cut(middle);
    join_threads(|| spread(isa, head), || spread(isa, tail));
}

struct Split<'a> {
    x: &'a [f32],
    numbers: &'a mut [bf16],
    rest: &'a mut [u16],
}

impl Work for Split<'_> {
    fn len(&self) -> usize {
        self.x.len()
    }
    fn cut(self, at: usize) -> (Self, Self) {
        let (x, x1) = self.x.split_at(at);
        let (numbers, numbers1) = self.numbers.split_at_mut(at);
        let (rest, rest1) = self.rest.split_at_mut(at);
        (Self { x, numbers, rest }, Self { x: x1, numbers: numbers1, rest: rest1 })
    }
}

impl Kernel for Split<'_> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        for ((&x, number), rest) in self.x.iter().zip(self.numbers).zip(self.rest) {
            (*number, *rest) = split(x);
        }
    }
}

struct Join<'a> {
    numbers: &'a [bf16],
    rest: &'a [u16],
    out: &'a mut [f32],
}

impl Work for Join<'_> {
    fn len(&self) -> usize {
        self.numbers.len()
    }
    fn cut(self, at: usize) -> (Self, Self) {
        let (numbers, numbers1) = self.numbers.split_at(at);
        let (rest, rest1) = self.rest.split_at(at);
        let (out, out1) = self.out.split_at_mut(at);
        (Self { numbers, rest, out }, Self { numbers: numbers1, rest: rest1, out: out1 })
    }
}

impl Kernel for Join<'_> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        for ((&number, &rest), out) in self.numbers.iter().zip(self.rest).zip(self.out) {
            *out = join(number, rest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels() {
        let mut words = vec![0u32; 3 * CHUNK + 5];
        crate::random::Draws::fill32(&crate::Draw::seeded(4), 0, &mut words);
        let x: Vec<f32> = words.iter().map(|&word| f32::from_bits(word)).collect();
        let (expected, expected_rest): (Vec<bf16>, Vec<u16>) = x.iter().map(|&x| split(x)).unzip();
        for isa in Isa::available() {
            let (mut numbers, mut rest) = (vec![bf16::ZERO; x.len()], vec![0; x.len()]);
            spread(isa, Split { x: &x, numbers: &mut numbers, rest: &mut rest });
            assert!(bytemuck::cast_slice::<_, u16>(&numbers) == bytemuck::cast_slice::<_, u16>(&expected), "{isa}");
            assert!(rest == expected_rest);
            let mut back = vec![0f32; x.len()];
            spread(isa, Join { numbers: &numbers, rest: &rest, out: &mut back });
            assert!(bytemuck::cast_slice::<_, u32>(&back) == words, "{isa}");
        }
    }
}
