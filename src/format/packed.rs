//! Slices of 4-bit and 6-bit codes without gaps.
//!
//! Code `j` of width `w` occupies bits `w*j .. w*j + w` of the little-endian bit stream. At 4 bits that puts the even
//! index in the low nibble; at 6 bits four codes fill three bytes. Bits past the last code are zero and never read as a
//! value.

use alloc::{vec, vec::Vec};
use core::fmt;
use core::marker::PhantomData;

use super::{Format, SubByte};

/// A vector of 4-bit or 6-bit values, packed.
///
/// ```
/// use halfulp::{E2M1, format::PackedVec};
/// let v: PackedVec<E2M1> = [0.5, 6.0, 1.0].into_iter().map(E2M1::from_f32).collect();
/// assert_eq!(v.as_bytes(), [0x71, 0x02]); // even index in the low nibble, the last high nibble 0
/// assert_eq!(v.len(), 3);
/// assert_eq!(v.get(1), Some(E2M1::MAX));
/// assert_eq!(v.get(3), None);
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct PackedVec<T> {
    bytes: Vec<u8>,
    len: usize,
    element: PhantomData<T>,
}

/// A byte slice that cannot hold the elements it is said to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PackedError {
    /// Wrong number of bytes.
    #[error("bytes: expected {expected} for {len} elements of {format}, got {got}")]
    Length {
        /// The format.
        format: Format,
        /// Number of elements.
        len: usize,
        /// Bytes that they take.
        expected: usize,
        /// Bytes that came.
        got: usize,
    },
    /// A bit past the last element is set.
    #[error("bytes: expected zero bits past element {len} of {format}, got {got:#04x} in the last byte")]
    Padding {
        /// The format.
        format: Format,
        /// Number of elements.
        len: usize,
        /// The last byte.
        got: u8,
    },
}

impl<T: SubByte> PackedVec<T> {
    const WIDTH: usize = T::FORMAT.bits() as usize;

    /// `len` elements of code 0.
    #[must_use]
    pub fn zeroed(len: usize) -> Self {
        Self { bytes: vec![0; T::FORMAT.bytes(len)], len, element: PhantomData }
    }

    /// Takes packed bytes.
    ///
    /// # Errors
    /// [`PackedError`] if `bytes` is not of the length that `len` elements take, or has a bit set past the last.
    pub fn from_bytes(bytes: Vec<u8>, len: usize) -> Result<Self, PackedError> {
        let format = T::FORMAT;
        let expected = format.bytes(len);
        if bytes.len() != expected {
            return Err(PackedError::Length { format, len, expected, got: bytes.len() });
        }
        let used = Self::WIDTH * (len % 4) % 8;
        match bytes.last() {
            Some(&got) if used != 0 && got >> used != 0 => Err(PackedError::Padding { format, len, got }),
            _ => Ok(Self { bytes, len, element: PhantomData }),
        }
    }

    /// The packed bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The packed bytes, to write.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// Gives the packed bytes away.
    #[must_use]
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Element `i`, or `None` past the end.
    #[must_use]
    pub fn get(&self, i: usize) -> Option<T> {
        (i < self.len).then(|| T::from_code(u16::from(read(&self.bytes, Self::WIDTH, i))))
    }

    /// Replaces element `i`.
    ///
    /// # Panics
    /// If `i` is not below [`len`](Self::len).
    pub fn set(&mut self, i: usize, value: T) {
        assert!(i < self.len, "index: expected below {}, got {i}", self.len);
        write(&mut self.bytes, Self::WIDTH, i, value.code() as u8);
    }

    /// The values in order, exactly.
    #[must_use]
    pub fn decode(&self) -> Vec<f32> {
        self.iter().map(T::value).collect()
    }

    /// The elements in order.
    #[must_use]
    pub fn iter(&self) -> impl ExactSizeIterator<Item = T> + '_ {
        (0..self.len).map(|i| T::from_code(u16::from(read(&self.bytes, Self::WIDTH, i))))
    }
}

impl<T: SubByte> FromIterator<T> for PackedVec<T> {
    fn from_iter<I: IntoIterator<Item = T>>(values: I) -> Self {
        let codes: Vec<u8> = values.into_iter().map(|value| value.code() as u8).collect();
        let mut packed = Self::zeroed(codes.len());
        pack(Self::WIDTH, &codes, &mut packed.bytes);
        packed
    }
}

impl<T: SubByte> fmt::Debug for PackedVec<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// Code `i`. A code of 4 or 6 bits spans at most two bytes.
pub(super) fn read(bytes: &[u8], width: usize, i: usize) -> u8 {
    // `width * i` could overflow near the top of the address space: split off the whole groups of four codes first.
    let (byte, bit) = place(width, i);
    let next = bytes.get(byte + 1).copied().unwrap_or(0);
    (u16::from_le_bytes([bytes[byte], next]) >> bit) as u8 & mask(width)
}

fn write(bytes: &mut [u8], width: usize, i: usize, code: u8) {
    let (byte, bit) = place(width, i);
    let hole = !(u16::from(mask(width)) << bit);
    let put = u16::from(code) << bit;
    bytes[byte] = bytes[byte] & hole as u8 | put as u8;
    if bit + width > 8 {
        bytes[byte + 1] = bytes[byte + 1] & (hole >> 8) as u8 | (put >> 8) as u8;
    }
}

fn place(width: usize, i: usize) -> (usize, usize) {
    let bit = i % 4 * width;
    (i / 4 * (width / 2) + bit / 8, bit % 8)
}

const fn mask(width: usize) -> u8 {
    (1 << width) - 1
}

/// Packs whole codes (one a byte, high bits zero) from the start of `bytes`; the last byte is filled up with zeros.
#[inline(always)]
pub(crate) fn pack(width: usize, codes: &[u8], bytes: &mut [u8]) {
    if width == 4 {
        let (pairs, last) = codes.as_chunks::<2>();
        for (byte, &[low, high]) in bytes.iter_mut().zip(pairs) {
            *byte = low | high << 4;
        }
        if let &[low] = last {
            bytes[pairs.len()] = low;
        }
    } else {
        let (quads, last) = codes.as_chunks::<4>();
        let (whole, tail) = bytes.split_at_mut(3 * quads.len());
        for (triple, quad) in whole.as_chunks_mut::<3>().0.iter_mut().zip(quads) {
            *triple = triple_of(*quad);
        }
        if !last.is_empty() {
            let mut quad = [0; 4];
            quad[..last.len()].copy_from_slice(last);
            let rest = &triple_of(quad)[..tail.len()];
            tail.copy_from_slice(rest);
        }
    }
}

/// Reads codes from the start of bytes laid out as [`Format::bytes`] counts them, packed or not.
#[inline(always)]
pub(crate) fn unpack(format: Format, bytes: &[u8], codes: &mut [u16]) {
    let n = codes.len();
    match format.bits() {
        4 => {
            let (pairs, last) = codes.as_chunks_mut::<2>();
            for (pair, &byte) in pairs.iter_mut().zip(bytes) {
                *pair = [byte & 0xF, byte >> 4].map(u16::from);
            }
            if let [last] = last {
                *last = (bytes[n / 2] & 0xF).into();
            }
        }
        6 => {
            let (quads, last) = codes.as_chunks_mut::<4>();
            let (triples, _) = bytes.as_chunks::<3>();
            for (quad, &[x, y, z]) in quads.iter_mut().zip(triples) {
                let bits = u32::from_le_bytes([x, y, z, 0]);
                *quad = [0, 6, 12, 18].map(|shift| (bits >> shift & 0x3F) as u16);
            }
            for (i, code) in (n - last.len()..n).zip(last) {
                *code = read(bytes, 6, i).into();
            }
        }
        ..=8 => {
            for (code, &byte) in codes.iter_mut().zip(bytes) {
                *code = byte.into();
            }
        }
        _ => {
            for (code, &pair) in codes.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *code = u16::from_le_bytes(pair);
            }
        }
    }
}

#[inline(always)]
fn triple_of(quad: [u8; 4]) -> [u8; 3] {
    let [a, b, c, d] = quad.map(u32::from);
    let [x, y, z, _] = (a | b << 6 | c << 12 | d << 18).to_le_bytes();
    [x, y, z]
}
