//! Random gradients of a known law: one stream a coordinate.

use core::f64::consts::TAU;
use core::ops::Range;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::error::{StallError, check};

/// The law of a coordinate's gradients, for a coordinate of variance 1; those of others are scaled. One draw a step,
/// independent of all others.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Law {
    /// The same value each step: the standard deviation.
    Constant,
    /// Normal with mean 0.
    Gaussian,
    /// Normal with mean 0, whose variance changes.
    VarianceChange {
        /// The last step at the old variance.
        after: u64,
        /// The new variance over the old one.
        factor: f64,
    },
    /// Student's t with mean 0, scaled to variance 1: a heavy tail.
    StudentT {
        /// Degrees of freedom, above 2.
        freedom: f64,
    },
}

/// The variance of each coordinate's gradients, from 1e-15 to 1e15.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Variances {
    /// The same for all.
    Equal(f64),
    /// Spread log-uniformly over the binade that begins here, so that a mean over coordinates is one over mantissas. The
    /// places are those of a golden-ratio sequence: even for any number of coordinates.
    Binade(f64),
    /// These, in turn and again.
    Listed(Vec<f64>),
}

impl Variances {
    /// The variance of coordinate `i`; NaN of an empty list.
    pub(super) fn of(&self, i: usize) -> f64 {
        match self {
            Self::Equal(variance) => *variance,
            Self::Binade(low) => {
                // 2^64 over the golden ratio; from half a place on, so that no coordinate sits on the edge.
                let place = (2 * i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15 >> 1);
                low * libm::exp2(unit(place))
            }
            Self::Listed(list) => list.get(i % list.len().max(1)).copied().unwrap_or(f64::NAN),
        }
    }

    pub(super) fn check(&self) -> Result<(), StallError> {
        // No square of a gradient, the rarest of a heavy tail included, overflows f32.
        let variance = |variance: f64| {
            check((1e-15..=1e15).contains(&variance), "variances", "numbers from 1e-15 to 1e15", variance)
        };
        match self {
            Self::Equal(low) | Self::Binade(low) => variance(*low),
            Self::Listed(list) => {
                check(!list.is_empty(), "variances", "a list of 1 or more", 0.0)?;
                list.iter().try_for_each(|&listed| variance(listed))
            }
        }
    }
}

impl Law {
    pub(super) fn check(self) -> Result<(), StallError> {
        match self {
            Self::VarianceChange { factor, .. } => {
                check((1e-6..=1e6).contains(&factor), "factor", "a number from 1e-6 to 1e6", factor)
            }
            Self::StudentT { freedom } => {
                check(freedom > 2.0 && freedom.is_finite(), "freedom", "a finite number above 2", freedom)
            }
            _ => Ok(()),
        }
    }
}

/// Steps whose gradients are drawn at a time: even, for normals come in pairs.
const TILE: u64 = 32;

/// The gradients of a run of coordinates, [`TILE`] steps at a time.
pub(super) struct Gradients {
    law: Law,
    deviations: Vec<f64>,
    streams: Vec<ChaCha8Rng>,
    /// Step by step.
    tile: Vec<f32>,
}

impl Gradients {
    pub(super) fn new(law: Law, variances: &Variances, seed: u64, coordinates: Range<usize>) -> Self {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        let stream = |i| {
            let mut stream = ChaCha8Rng::from_seed(key);
            stream.set_stream(i as u64);
            stream
        };
        Self {
            law,
            deviations: coordinates.clone().map(|i| variances.of(i).sqrt()).collect(),
            tile: vec![0.0; coordinates.len() * TILE as usize],
            streams: coordinates.map(stream).collect(),
        }
    }

    /// Makes the gradients of `step` at hand; steps come in order.
    pub(super) fn draw(&mut self, step: u64) {
        if !(step - 1).is_multiple_of(TILE) {
            return;
        }
        let n = self.streams.len();
        for (i, (stream, deviation)) in self.streams.iter_mut().zip(&self.deviations).enumerate() {
            for row in (0..TILE as usize).step_by(2) {
                let pair = self.law.pair(stream);
                for (row, draw) in (row..).zip(pair) {
                    let factor = self.law.deviation(step + row as u64);
                    self.tile[row * n + i] = (draw * factor * deviation) as f32;
                }
            }
        }
    }

    pub(super) fn row(&self, step: u64) -> &[f32] {
        let n = self.streams.len();
        &self.tile[((step - 1) % TILE) as usize * n..][..n]
    }
}

impl Law {
    /// Two draws of variance 1.
    fn pair(self, stream: &mut ChaCha8Rng) -> [f64; 2] {
        match self {
            Self::Constant => [1.0; 2],
            Self::Gaussian | Self::VarianceChange { .. } => {
                let radius = (-2.0 * libm::log(positive_unit(stream))).sqrt();
                let (sin, cos) = libm::sincos(TAU * unit(stream.next_u64()));
                [radius * cos, radius * sin]
            }
            Self::StudentT { freedom } => [(); 2].map(|()| {
                // U^(-2/freedom) - 1, which would be lost against 1 for many degrees of freedom.
                let radius = libm::expm1(-2.0 / freedom * libm::log(positive_unit(stream))).sqrt();
                // The variance of Student's t is freedom / (freedom - 2).
                (freedom - 2.0).sqrt() * radius * libm::cos(TAU * unit(stream.next_u64()))
            }),
        }
    }

    /// The standard deviation at a step.
    fn deviation(self, step: u64) -> f64 {
        match self {
            Self::VarianceChange { after, factor } if step > after => factor.sqrt(),
            _ => 1.0,
        }
    }
}

/// Uniform in [0, 1), from 53 of 64 bits.
fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// Uniform in (0, 1].
fn positive_unit(stream: &mut ChaCha8Rng) -> f64 {
    1.0 - unit(stream.next_u64())
}
