//! Stochastic rounding for low-precision formats: which numbers exist, how one element is rounded, where the random bits
//! come from, and casts over slices at the speed of memory.
//!
//! A value that lies a fraction `d` of the way from one representable neighbour to the next is stored, under stochastic
//! rounding, as the next with probability `d`: the mean is the value itself, and updates far below half a ulp, which
//! nearest rounding loses every time, arrive on average.
//!
//! ```
//! use halfulp::{Draw, E4M3, bf16, nearest_cast, sr_cast};
//!
//! let x = vec![1.001f32; 10_000]; // BF16 has 1 and 1.0078125, and nothing between
//! let nearest: Vec<bf16> = nearest_cast(&x);
//! let stochastic: Vec<bf16> = sr_cast(&x, Draw::seeded(7));
//! let mean = |y: &[bf16]| y.iter().map(|v| f64::from(v.to_f32())).sum::<f64>() / y.len() as f64;
//! assert_eq!(mean(&nearest), 1.0);
//! assert!((mean(&stochastic) - 1.001).abs() < 2e-4);
//!
//! let q: Vec<E4M3> = nearest_cast(&x); // any format
//! ```
//!
//! The same inputs, seed and step give the same bits on every path: scalar or SIMD, one thread or many, whole or in
//! chunks. A random word is a pure function of seed, step, tensor, role and element index ([`random`]), so chunks only say
//! where they begin:
//!
//! ```
//! use halfulp::{Draw, bf16, sr_cast};
//! # let x = vec![1.003f32; 1000];
//! let draw = Draw::seeded(7).step(12).named("layers.0.mlp.weight");
//! let whole: Vec<bf16> = sr_cast(&x, draw);
//! assert_eq!(whole[300..], sr_cast::<bf16>(&x[300..], draw.at(300)));
//! ```
//!
//! A format is data, so questions about it have answers, and so has a format of one's own:
//!
//! ```
//! use halfulp::{Draw, Format, cast::Cast};
//! assert_eq!(Format::BF16.neighbours(1.001), (Some(1.0), Some(1.0078125)));
//! let e3m4 = Format::builder(3, 4).build()?;
//! let mut codes = [0; 2];
//! Cast::nearest().into_codes(&[1.0f32, 1.04], e3m4, &mut codes)?;
//! assert_eq!(codes.map(|code| e3m4.value(code)), [1.0, 1.0625]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The rooms: [`format`](mod@format) (descriptors, storage types, packed slices), [`round`] (one element), [`random`] (the
//! streams), [`cast`] (slices), [`measure`] (what a cast lost), `optim` (steps whose states are stored in few bits; feature
//! `std`), `stall` (how often such a state stands still and when to reset it: a model, a simulation, and a meter for real
//! states; feature `stall`), and `cuda` (casts and steps on a GPU; feature `cuda`).
#![cfg_attr(not(feature = "std"), no_std)]

extern crate alloc;

#[cfg(target_endian = "big")]
compile_error!("codes and random words are laid out little-endian");

/// The README's code runs with the tests.
#[cfg(all(doctest, feature = "std"))]
#[doc = include_str!("../README.md")]
pub struct Readme;

pub mod cast;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod format;
mod isa;
pub mod measure;
#[cfg(feature = "std")]
pub mod optim;
pub mod random;
pub mod round;
#[cfg(feature = "stall")]
pub mod stall;
mod threads;

pub use cast::{decode, nearest_cast, sr_cast};
pub use format::{E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, Element, Format, PackedVec, UE2M2, UE2M2Nz, UE4M4, UE5M3};
pub use half::{bf16, f16};
pub use isa::Isa;
pub use random::Draw;
