//! What stochastic rounding adds to the variance of an average.

use core::f64::consts::{LN_2, PI};
use core::iter::once;

use libm::{cosh, exp};

use super::error::StallError;
use super::probability::check_beta2;
use super::quadrature::integrate_pieces;
use crate::format::Format;

/// The variance of a stored second moment, relative to the square of its mean `s^2`. Its root is the relative standard
/// deviation.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Noise {
    /// Of the average itself, in exact arithmetic: `2 (1 - beta2)/(1 + beta2)`.
    pub exact: f64,
    /// Stored by stochastic rounding on a grid that stands still: no scale, or a scale that is a power of two.
    pub still_grid: f64,
    /// Stored by stochastic rounding under a block scale that follows the block's largest value in every step.
    pub moving_grid: f64,
}

/// The variance of a second moment stored by stochastic rounding, where `v` stays near `s^2`.
///
/// The stored value is the average of all `g^2` and of the errors of all roundings, each with mean 0. With `u = eps/m` the
/// relative spacing, `q = w m (1 - beta2)/eps` the distance in spacings from a new value to where the old one lies on the
/// grid, and `f` the fraction of `q`, the variance of one rounding is `u^2 f (1 - f)`, and
///
/// ```text
/// variance = 2 (1 - beta2)/(1 + beta2) + E[u^2 f (1 - f)]/(1 - beta2^2)
/// ```
///
/// On a still grid `w = |z - 1|`. Under a scale that is the block's largest value over the format's, the grid grows in each
/// step by the factor of that value, `1 + (1 - beta2)(y - 1)` with `y` its own `g^2/s^2`, so that `w = |z - y|`: also what
/// would have stalled is rounded anew. That takes one coordinate for the largest of its block all along, well above the
/// others. Where several compete for that place the grid moves less, and the variance lies between the two.
///
/// Where `q < 1` throughout, that is for `1 - beta2` far below `eps`, the expectations are elementary, with
/// `E|z - 1| = 4 phi(1)` and `E|z - y| = 4/pi`. The still grid gives `0.698 eps/(1 + beta2)`, so `0.349 eps` whatever `beta2`,
/// the variance of the average itself included; the moving one `(0.918 eps - 2 (1 - beta2))/(1 + beta2)`. Elsewhere this is a
/// quadrature, to 1e-5 of its value. The mantissa is log-uniform: at one mantissa the still grid gives 0.24 to 0.48 `eps`.
/// Averages simulated with either grid lie within 3 % of it.
///
/// ```
/// use halfulp::{Format, stall};
/// let noise = stall::noise(Format::E4M3, 0.999)?;
/// assert_eq!(format!("{:.4} {:.4}", noise.exact, noise.still_grid), "0.0010 0.0437");
/// # Ok::<(), stall::StallError>(())
/// ```
///
/// # Errors
/// [`StallError::Range`] if `beta2` is not between 0 and 1.
pub fn noise(format: Format, beta2: f64) -> Result<Noise, StallError> {
    check_beta2(beta2)?;
    let (epsilon, rate) = (format.epsilon(), 1.0 - beta2);
    let exact = 2.0 * rate / (1.0 + beta2);
    let roundings = |variance: f64| epsilon * epsilon * variance / (rate * (1.0 + beta2));
    let [still, moving] = rounding_variances(rate / epsilon);
    Ok(Noise { exact, still_grid: exact + roundings(still), moving_grid: exact + roundings(moving) })
}

/// Where the densities below are lost against 1.
const FARTHEST: f64 = 80.0;

/// `E[f (1 - f)/m^2]` for `w = |z - 1|` and `w = |z - y|`, with `q = w m per_step`.
fn rounding_variances(per_step: f64) -> [f64; 2] {
    // The corners of `mean_variance`, in w.
    let corners = (1..=2 * CELLS).map(|k| f64::from(k) / (2.0 * per_step));
    let up: Vec<f64> = once(0.0).chain(corners.take_while(|&w| w < FARTHEST)).chain([FARTHEST]).collect();
    // Below 1, z = x^2 with a Gaussian x, whose density has no pole.
    let down: Vec<f64> = once(0.0).chain(up.iter().rev().filter(|&&w| w < 1.0).map(|w| (1.0 - w).sqrt())).collect();

    let variance = |w: f64| mean_variance(w * per_step);
    let gaussian = |square: f64| exp(-square / 2.0) / (2.0 * PI).sqrt();
    let above_one = integrate_pieces(&up, |w| gaussian(1.0 + w) / (1.0 + w).sqrt() * variance(w));
    let below_one = integrate_pieces(&down, |x| 2.0 * gaussian(x * x) * variance(1.0 - x * x));
    let difference = integrate_pieces(&up, |w| bessel_k0(w / 2.0) / PI * variance(w));
    [above_one + below_one, difference]
}

/// Distances, in spacings at mantissa 1, up to which [`mean_variance`] is exact. Beyond, `f` is as good as uniform.
const CELLS: u32 = 32;

/// The mean of `f (1 - f)/m^2` over a log-uniform mantissa `m`, `f` the fraction of `d m`.
///
/// In `q = d m` it is `d^2/ln 2` times the integral of `f (1 - f)/q^3` from `d` to `2d`. In the cell above the integer `n`,
/// `f (1 - f) = -q^2 + (2n + 1) q - n (n + 1)`; the antiderivatives of two cells differ by `1/k` at the `k` between them.
fn mean_variance(d: f64) -> f64 {
    if d >= f64::from(CELLS) {
        return 1.0 / 6.0 * 3.0 / (8.0 * LN_2); // E[f (1 - f)] E[1/m^2]
    }
    if d <= 0.5 {
        return d / (2.0 * LN_2) - d * d; // one cell; the sum below is undefined at 0
    }
    let antiderivative = |q: f64| {
        let n = q.floor();
        (n * (n + 1.0) / (2.0 * q) - (2.0 * n + 1.0)) / q
    };
    let between = (d as u32 + 1..=(2.0 * d) as u32).map(|k| 1.0 / f64::from(k)).sum::<f64>();
    d * d / LN_2 * (antiderivative(2.0 * d) - antiderivative(d) + between - LN_2)
}

/// The modified Bessel function of the second kind and order 0, as the integral of `exp(-x cosh t)` over `t > 0` by the
/// trapezoidal rule, which converges here exponentially. `|z - y|` has the density `K0(w/2)/pi`.
fn bessel_k0(x: f64) -> f64 {
    const STEP: f64 = 1.0 / 8.0;
    let terms = (1..).map(|k| exp(-x * cosh(STEP * f64::from(k))));
    STEP * (exp(-x) / 2.0 + terms.take_while(|&term| term > 1e-18).sum::<f64>())
}
