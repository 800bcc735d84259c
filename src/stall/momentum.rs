//! The probability that a step leaves a first moment, or a momentum, as it is.

use core::f64::consts::{LN_2, PI};

use libm::{atan, atan2, expm1, log, log1p};

use super::error::{StallError, check};
use super::probability::Probability;
use super::quadrature::integrate;
use crate::format::Format;

/// A signed average of Gaussian gradients, in the units in which its own standard deviation is `spread`.
#[derive(Clone, Copy)]
struct Momentum {
    /// The standard deviation of the average over that of a gradient.
    spread: f64,
    /// Half a spacing over what a gradient of one standard deviation adds, at mantissa 1 and an average of one of its own.
    half: f64,
}

impl Momentum {
    /// After so many steps from zero.
    fn new(format: Format, beta: f64, steps: f64) -> Result<Self, StallError> {
        check((0.0..1.0).contains(&beta), "beta", "0 <= beta < 1", beta)?;
        // 1 - beta^(2 steps); without a past, a decay of 0 is there at the first step.
        let filled = if steps > 0.0 { -expm1(2.0 * steps * log(beta)) } else { 0.0 };
        let spread = ((1.0 - beta) / (1.0 + beta) * filled).sqrt();
        Ok(Self { spread, half: format.epsilon() / 2.0 * spread / (1.0 - beta) })
    }

    fn at_mantissa(self, mantissa: f64) -> Probability {
        // A state of zero moves with any gradient.
        if self.spread == 0.0 {
            return Probability { nearest: 0.0, stochastic: 0.0, nearest_moves: 1.0, stochastic_moves: 1.0 };
        }
        let half = self.half / mantissa;
        let [near, far] = [half, 2.0 * half].map(|reach| Around { middle: self.spread, reach });
        let stochastic_moves = far.outside() + far.mean_distance() / far.reach;
        let nearest_moves = near.outside();
        Probability { nearest: near.inside(), stochastic: 1.0 - stochastic_moves, nearest_moves, stochastic_moves }
    }

    /// Averaged over a log-uniform mantissa.
    fn over_mantissas(self) -> Probability {
        // In x = 1/m, dm/m = -dx/x.
        let mean = |share: fn(Probability) -> f64| integrate(0.5, 1.0, |x| share(self.at_mantissa(1.0 / x)) / x) / LN_2;
        Probability {
            nearest: mean(|p| p.nearest),
            stochastic: mean(|p| p.stochastic),
            nearest_moves: mean(|p| p.nearest_moves),
            stochastic_moves: mean(|p| p.stochastic_moves),
        }
    }
}

/// The values of a variable with Cauchy's distribution that are no farther than `reach` from `middle`.
#[derive(Clone, Copy)]
struct Around {
    middle: f64,
    reach: f64,
}

impl Around {
    fn inside(self) -> f64 {
        // atan(high) - atan(low), without cancellation.
        let (low, high) = (self.middle - self.reach, self.middle + self.reach);
        atan2(2.0 * self.reach, 1.0 + low * high) / PI
    }

    fn outside(self) -> f64 {
        (atan2(1.0, self.middle + self.reach) + atan2(1.0, self.reach - self.middle)) / PI
    }

    /// `E[|t - middle|]` over them.
    fn mean_distance(self) -> f64 {
        // The antiderivative of (t - middle)/(1 + t^2).
        let at = |t: f64| log1p(t * t) / 2.0 - self.middle * atan(t);
        (at(self.middle + self.reach) + at(self.middle - self.reach) - 2.0 * at(self.middle)) / PI
    }
}

/// The probability that a step leaves a first moment, or the momentum of SGD, as it is: stationary, of Gaussian gradients
/// with mean 0, averaged over a log-uniform mantissa.
///
/// Let a gradient be `s y` with a standard normal `y`. The moment `m' = beta m + (1 - beta) g` is `s r x` with a standard
/// normal `x`, which is independent of the next `y`, and `r = sqrt((1 - beta)/(1 + beta))`. A step is
///
/// ```text
/// |step| = (1 - beta) |g - m| = (1 - beta) s |y - r x|        half a spacing at m: eps |m|/(2 mantissa) = eps s r |x|/(2 mantissa)
/// ```
///
/// so that with `t = y/x`, which has Cauchy's distribution, and
///
/// ```text
/// k = eps r/(2 (1 - beta) mantissa) = eps/(2 sqrt(1 - beta^2) mantissa)
/// ```
///
/// rounding to nearest stalls where `|t - r| < k`, and stochastic rounding with probability `1 - |t - r|/(2k)` where that is
/// above 0. At one mantissa, with `a = 2k` and `B(t) = ln(1 + t^2)/2 - r atan(t)`,
///
/// ```text
/// nearest         P = (atan(r + k) - atan(r - k))/pi
/// stochastic  1 - P = 1 - (atan(r + a) - atan(r - a))/pi + (B(r + a) + B(r - a) - 2 B(r))/(pi a)
/// ```
///
/// For small `k` both are `2k/(pi (1 + r^2))`. The mean over the mantissa is a quadrature, to 1e-11.
///
/// What a gradient enters with cancels: `m' = beta m + g`, SGD's momentum, stalls as often. The one moment of Lion decays by its
/// `beta2`, and its `beta1` is in no state; the slow moment of AdEMAMix decays by `beta3`.
///
/// # Where it holds
/// The law of `m` is taken from exact arithmetic, spacing as the same on both sides of `m`, and `m` as normal in its format.
/// Simulated, BF16 agrees up to `beta = 0.9999`, to the standard errors of 1 or 2 %. Of three fraction bits the simulated share
/// is 2 % lower at 0.9, at 0.99 4 % to nearest and 1 % stochastically. Where a typical step is shorter than a spacing
/// (three fraction bits at 0.9999) the law is another one: nearest rounding leaves 0.2 of the variance of `m`, stochastic
/// rounding adds five times as much, and the shares are 0.57 and 0.65 in place of 0.80 and 0.71. Block scales that are powers
/// of two change nothing while values are normal under them: hardly ever in E2M1, for which there is [`Simulation`] alone.
///
/// [`Simulation`]: super::Simulation
///
/// ```
/// use halfulp::{Format, stall};
/// let p = stall::momentum_probability(Format::BF16, 0.9)?;
/// assert_eq!(format!("{:.5} {:.5}", p.nearest, p.stochastic), "0.00391 0.00391");
/// # Ok::<(), stall::StallError>(())
/// ```
///
/// # Errors
/// [`StallError::Range`] if `beta` is not in [0, 1).
pub fn momentum_probability(format: Format, beta: f64) -> Result<Probability, StallError> {
    Momentum::new(format, beta, f64::INFINITY).map(Momentum::over_mantissas)
}

/// [`momentum_probability`] at one mantissa, in closed form.
///
/// # Errors
/// [`StallError::Range`] if `beta` is not in [0, 1), or `mantissa` is not at least 1 and below 2.
pub fn momentum_probability_at_mantissa(format: Format, beta: f64, mantissa: f64) -> Result<Probability, StallError> {
    let momentum = Momentum::new(format, beta, f64::INFINITY)?;
    check((1.0..2.0).contains(&mantissa), "mantissa", "at least 1 and below 2", mantissa)?;
    Ok(momentum.at_mantissa(mantissa))
}

/// [`momentum_probability`] in the step after `age` others from zero: the moment's variance is then the stationary one times
/// `1 - beta^(2 age)`, which multiplies `r` and `k` by its root. It grows with age, from 0 at age 0.
///
/// # Errors
/// [`StallError::Range`] if `beta` is not in [0, 1).
pub fn momentum_probability_since_reset(format: Format, beta: f64, age: u64) -> Result<Probability, StallError> {
    Momentum::new(format, beta, age as f64).map(Momentum::over_mantissas)
}
