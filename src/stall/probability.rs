//! The probability that a step leaves the stored value as it is.

use core::f64::consts::{FRAC_2_PI, LN_2};
use core::iter::once;

use libm::{erf, erfc, exp, expm1, log};

use super::error::{StallError, check};
use super::quadrature::integrate_pieces;
use crate::format::Format;

/// Spacing and decay: all that the model takes from a format and an optimizer.
#[derive(Clone, Copy)]
pub(super) struct Average {
    epsilon: f64,
    beta2: f64,
}

impl Average {
    pub(super) fn new(format: Format, beta2: f64) -> Result<Self, StallError> {
        check_beta2(beta2)?;
        Ok(Self { epsilon: format.epsilon(), beta2 })
    }

    /// `rho` at mantissa 1, its largest value.
    fn rho_at_one(self) -> f64 {
        self.epsilon / (2.0 * (1.0 - self.beta2))
    }

    /// `rho` at the typical mantissa `1/ln 2`.
    fn rho(self) -> f64 {
        self.rho_at_one() * LN_2
    }

    /// The probabilities at the typical mantissa.
    pub(super) fn stationary(self) -> Probability {
        Probability::of(self.rho(), 1.0)
    }

    /// The probabilities `age` steps after a reset.
    pub(super) fn since_reset(self, age: u64) -> Probability {
        Probability::of(self.rho(), self.filled(age))
    }

    /// `1 - beta2^age`.
    fn filled(self, age: u64) -> f64 {
        -expm1(age as f64 * log(self.beta2))
    }

    /// The probabilities averaged over a log-uniform mantissa, with `v = filled * s^2`.
    fn over_mantissas(self, filled: f64) -> Probability {
        let rho = self.rho_at_one();
        // In x = rho/m, dm/m = -dx/x. Where 1 - x or 1 - 2x reaches 0 the probability has a root's corner.
        let corners = [0.5, 1.0].into_iter().filter(|x| (rho / 2.0..rho).contains(x));
        let places: Vec<f64> = once(rho / 2.0).chain(corners).chain([rho]).collect();
        let mean =
            |share: fn(Probability) -> f64| integrate_pieces(&places, |x| share(Probability::of(x, filled)) / x) / LN_2;
        let [nearest_moves, stochastic_moves] = [mean(|p| p.nearest_moves), mean(|p| p.stochastic_moves)];
        Probability {
            nearest: 1.0 - nearest_moves,
            stochastic: 1.0 - stochastic_moves,
            nearest_moves,
            stochastic_moves,
        }
    }
}

pub(super) fn check_beta2(beta2: f64) -> Result<(), StallError> {
    check(beta2 > 0.0 && beta2 < 1.0, "beta2", "a decay above 0 and below 1", beta2)
}

/// `P(z < x)`, `z` chi-square with one degree of freedom.
fn below(x: f64) -> f64 {
    erf((x / 2.0).sqrt())
}

/// `P(z > x)`, without cancellation.
fn above(x: f64) -> f64 {
    erfc((x / 2.0).sqrt())
}

/// The share of steps that leave the stored value as it is, under either rounding, and the share of those that do not.
///
/// A share near 1 has lost the digits of its complement, so that is given for itself: E4M3 rounded to nearest at decay
/// 0.999 moves in 2.8e-11 of its steps. Absolute errors are below 1e-11, and complements below 1/2 keep 10 digits.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Probability {
    /// Stalled, rounding to nearest.
    pub nearest: f64,
    /// Stalled, rounding stochastically.
    pub stochastic: f64,
    /// Moved, rounding to nearest: `1 - nearest`.
    pub nearest_moves: f64,
    /// Moved, rounding stochastically: `1 - stochastic`.
    pub stochastic_moves: f64,
}

impl Probability {
    /// With `v = filled * s^2`, a step is `|y - 1|/(2 rho)` spacings long, `y = z/filled`: it stalls to nearest where
    /// `|y - 1| < rho`, and stochastically with probability `1 - |y - 1|/(2 rho)` where that is above 0.
    fn of(rho: f64, filled: f64) -> Self {
        // A state of zero moves with any gradient.
        if filled == 0.0 {
            return Self { nearest: 0.0, stochastic: 0.0, nearest_moves: 1.0, stochastic_moves: 1.0 };
        }
        let [near, far] = [rho, 2.0 * rho].map(|reach| Around { reach, filled });
        let stochastic_moves = far.outside() + far.mean_distance() / far.reach;
        Self {
            nearest: near.inside(),
            stochastic: 1.0 - stochastic_moves,
            nearest_moves: near.outside(),
            stochastic_moves,
        }
    }
}

/// The values of `y = z/filled`, which are positive, no farther than `reach` from 1.
#[derive(Clone, Copy)]
struct Around {
    reach: f64,
    filled: f64,
}

impl Around {
    fn low(self) -> f64 {
        (1.0 - self.reach).max(0.0)
    }

    fn high(self) -> f64 {
        1.0 + self.reach
    }

    fn inside(self) -> f64 {
        below(self.high() * self.filled) - below(self.low() * self.filled)
    }

    fn outside(self) -> f64 {
        below(self.low() * self.filled) + above(self.high() * self.filled)
    }

    /// `E[|y - 1|]` over them.
    fn mean_distance(self) -> f64 {
        2.0 * self.partial(1.0) - self.partial(self.low()) - self.partial(self.high())
    }

    /// `E[1 - y]` over `y < x`, from `E[z; z < t] = F(t) - sqrt(2t/pi) exp(-t/2)`.
    fn partial(self, x: f64) -> f64 {
        let t = x * self.filled;
        let root = (FRAC_2_PI * t).sqrt() * exp(-t / 2.0);
        below(t) + (root - below(t)) / self.filled
    }
}

/// `rho`, half a spacing in units of the step `(1 - beta2) v`: `eps ln 2 / (2 (1 - beta2))`, at the typical mantissa
/// `1/ln 2`, the mean of a log-uniform one.
///
/// # Errors
/// [`StallError::Range`] if `beta2` is not between 0 and 1.
pub fn rho(format: Format, beta2: f64) -> Result<f64, StallError> {
    Average::new(format, beta2).map(Average::rho)
}

/// The probability that a step leaves the stored value as it is, at the typical mantissa `1/ln 2` and `v = s^2`.
///
/// To nearest it is `F(1 + rho) - F(max(0, 1 - rho))` (arXiv:2603.16731). Stochastically, with `a = 2 rho`,
/// `low = max(0, 1 - a)`, `high = 1 + a` and `D(x) = sqrt(2x/pi) exp(-x/2)`,
///
/// ```text
/// 1 - P = E[min(1, |z - 1|/a)] = F(low) + 1 - F(high) + (2 D(1) - D(low) - D(high))/a
/// ```
///
/// since `E[z; z < x] = F(x) - D(x)`. For large `rho` the share that moves tends to `D(1)/rho = 0.48394/rho`.
///
/// In a simulation `v` is not at `s^2` but spread around it, which takes about 0.001 from the stochastic share.
///
/// ```
/// use halfulp::{Format, stall};
/// let p = stall::probability(Format::E4M3, 0.999)?;
/// assert_eq!(format!("{:.1e}", p.nearest_moves), "2.8e-11");
/// assert_eq!(format!("{:.6}", p.stochastic), "0.988829");
/// # Ok::<(), stall::StallError>(())
/// ```
///
/// # Errors
/// [`StallError::Range`] if `beta2` is not between 0 and 1.
pub fn probability(format: Format, beta2: f64) -> Result<Probability, StallError> {
    Average::new(format, beta2).map(Average::stationary)
}

/// [`probability`] at one mantissa in place of the typical one, `rho = eps/(2 (1 - beta2) mantissa)`.
///
/// # Errors
/// [`StallError::Range`] if `beta2` is not between 0 and 1, or `mantissa` is not at least 1 and below 2.
pub fn probability_at_mantissa(format: Format, beta2: f64, mantissa: f64) -> Result<Probability, StallError> {
    let average = Average::new(format, beta2)?;
    check((1.0..2.0).contains(&mantissa), "mantissa", "at least 1 and below 2", mantissa)?;
    Ok(Probability::of(average.rho_at_one() / mantissa, 1.0))
}

/// [`probability`] averaged over a log-uniform mantissa: by quadrature, to 1e-10.
///
/// Where updates are far below the spacing or far above it, the typical mantissa stands for all: at `beta2 = 0.999` BF16
/// differs by 0.0005. Around `rho = 1` the probability of nearest bends sharply, and the typical mantissa is off by up to
/// 13 points: E4M3 at 0.95 stalls in 0.609 of the steps on average, and in 0.543 at the typical mantissa.
///
/// # Errors
/// [`StallError::Range`] if `beta2` is not between 0 and 1.
pub fn average_probability(format: Format, beta2: f64) -> Result<Probability, StallError> {
    Average::new(format, beta2).map(|average| average.over_mantissas(1.0))
}

/// [`probability`] `age` steps after a reset to zero, where `v` is near `s^2 (1 - beta2^age)`.
///
/// With `filled = 1 - beta2^age` it is `F((1 + rho) filled) - F(max(0, 1 - rho) filled)` to nearest (arXiv:2603.16731), and
/// the same expectation as there under stochastic rounding. It grows with age, from 0 at age 0.
///
/// # Errors
/// [`StallError::Range`] if `beta2` is not between 0 and 1.
pub fn probability_since_reset(format: Format, beta2: f64, age: u64) -> Result<Probability, StallError> {
    Average::new(format, beta2).map(|average| average.since_reset(age))
}

/// [`probability_since_reset`] averaged over a log-uniform mantissa, as [`average_probability`] is.
///
/// # Errors
/// [`StallError::Range`] if `beta2` is not between 0 and 1.
pub fn average_probability_since_reset(format: Format, beta2: f64, age: u64) -> Result<Probability, StallError> {
    Average::new(format, beta2).map(|average| average.over_mantissas(average.filled(age)))
}

/// The average that a stalling state computes in effect.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct EffectiveDecay {
    /// `1 - (1 - beta2) moves`, in place of `beta2`.
    pub decay: f64,
    /// Steps of memory, `1/(1 - decay)`; infinite where nothing moves.
    pub time_constant: f64,
}

/// The decay of an average that takes only a share `moves` of its updates, at random: `1 - (1 - beta2) moves`, a memory of
/// `1/((1 - beta2) moves)` steps (arXiv:2603.16731).
///
/// `moves` is [`Probability::nearest_moves`], or a measured share. For rounding to nearest this is a way of speaking, for
/// what stalls there are the small updates; stochastic rounding makes up for every stall by a longer move, and its mean
/// keeps `beta2` exactly.
///
/// # Errors
/// [`StallError::Range`] if `beta2` is not between 0 and 1 or `moves` is no share.
pub fn effective_decay(beta2: f64, moves: f64) -> Result<EffectiveDecay, StallError> {
    check_beta2(beta2)?;
    check((0.0..=1.0).contains(&moves), "moves", "a share from 0 to 1", moves)?;
    let rate = (1.0 - beta2) * moves;
    Ok(EffectiveDecay { decay: 1.0 - rate, time_constant: 1.0 / rate })
}

/// The decay from which on, rounded to nearest, a second moment never decreases: `1 - eps/4`.
///
/// The largest step down, at gradient 0, is `(1 - beta2) v`, and half the spacing below `v` is at least `v eps/4`, which it is
/// below a power of two. So where `1 - beta2 <= eps/4` the old value stays the nearest one (at equality a power of two ties,
/// and it is the even one): large gradients alone move the state, and upward. BF16: 0.998046875; three fraction bits:
/// 0.96875. Values are taken as normal.
#[must_use]
pub fn ratchet_threshold(format: Format) -> f64 {
    1.0 - format.epsilon() / 4.0
}
