//! When a state that fills from zero begins to stall, and when to empty it again.

use libm::{exp, log};

use super::error::{StallError, check};
use super::probability::{Average, check_beta2};
use crate::format::Format;

/// The default threshold of the reset rules: the part of the stationary stalling that costs nothing.
pub const RESET_THRESHOLD: f64 = 0.6;

/// Steps after a reset to zero until a share `level` of coordinates stalls, rounding to nearest: the first age at which
/// [`probability_since_reset`](super::probability_since_reset) reaches it. `None` where it never does, for the stationary
/// probability is no higher.
///
/// For `rho >= 1` that is `ceil(ln(1 - filled)/ln beta2)` with `filled = F^-1(level)/(1 + rho)` (arXiv:2603.16731); below, the
/// lower tail counts too.
///
/// ```
/// use halfulp::{Format, stall};
/// assert_eq!(stall::startup_window(Format::BF16, 0.999, 0.5)?, Some(131));
/// assert_eq!(stall::startup_window(Format::BF16, 0.999, 0.95)?, None); // stationary: 0.9458
/// # Ok::<(), stall::StallError>(())
/// ```
///
/// # Errors
/// [`StallError::Range`] if `beta2` is not between 0 and 1 or `level` is no share.
pub fn startup_window(format: Format, beta2: f64, level: f64) -> Result<Option<u64>, StallError> {
    startup_window_with_floor(format, beta2, level, 0.0)
}

/// [`startup_window`] where a share `floor` of coordinates stalls from the first step on, whatever the model says: those
/// without a gradient, or too small for the format. The model then holds for the rest, so that the level to be reached there
/// is `(level - floor)/(1 - floor)`; 0 steps where `level <= floor`.
///
/// # Errors
/// [`StallError::Range`] if `beta2` is not between 0 and 1, `level` is no share, or `floor` is not at least 0 and below 1.
pub fn startup_window_with_floor(
    format: Format,
    beta2: f64,
    level: f64,
    floor: f64,
) -> Result<Option<u64>, StallError> {
    let average = Average::new(format, beta2)?;
    check((0.0..=1.0).contains(&level), "level", "a share from 0 to 1", level)?;
    check((0.0..1.0).contains(&floor), "floor", "a share of at least 0 and below 1", floor)?;
    let level = (level - floor) / (1.0 - floor);
    if level <= 0.0 {
        return Ok(Some(0));
    }
    // Above the level by however little, the probability gets there: beta2^age is lost against 1 before age overflows.
    let reached = average.stationary().nearest > level;
    Ok(reached.then(|| first(|age| average.since_reset(age).nearest >= level)))
}

/// The first age from 1 on at which `holds`, which stays true once it is.
fn first(holds: impl Fn(u64) -> bool) -> u64 {
    let mut above = 1;
    while !holds(above) {
        above *= 2;
    }
    let mut below = above / 2;
    while above - below > 1 {
        let middle = below + (above - below) / 2;
        if holds(middle) { above = middle } else { below = middle }
    }
    above
}

/// Steps between resets of a state rounded to nearest, at the default threshold [`RESET_THRESHOLD`]. `None` where the
/// stationary probability of stalling is below it: there is nothing to reset for.
///
/// ```
/// use halfulp::{Format, stall};
/// assert_eq!(stall::reset_period(Format::E4M3, 0.999)?, Some(320));
/// assert_eq!(stall::reset_period(Format::BF16, 0.99)?, None); // stalls in 13 % of the steps
/// # Ok::<(), stall::StallError>(())
/// ```
///
/// # Errors
/// [`StallError::Range`] if `beta2` is not between 0 and 1.
pub fn reset_period(format: Format, beta2: f64) -> Result<Option<u64>, StallError> {
    reset_period_with_threshold(format, beta2, RESET_THRESHOLD)
}

/// [`reset_period`] at a threshold `s0` of one's own, of which a higher one resets later.
///
/// A reset frees the state from stalling and pays for it with an average over too few gradients. The period is the first `K`
/// at which the loss through stalling, averaged since the reset, has grown to what a reset at `K` costs (arXiv:2603.16731):
///
/// ```text
/// mean over j = 1..K of max(0, (S(j) - s0)/(1 - s0))  >=  2 beta2^K/(1 + beta2^K)
/// ```
///
/// `S(j)` is the probability of stalling at age `j` over the stationary one, both tails of each counted where `rho < 1`. A
/// reset zeroes both moments and restarts the age that bias correction reads.
///
/// Takes time proportional to `2^fraction_bits` at most, whatever `beta2`.
///
/// # Errors
/// [`StallError::Range`] if `beta2` is not between 0 and 1 or `threshold` is not at least 0 and below 1.
pub fn reset_period_with_threshold(format: Format, beta2: f64, threshold: f64) -> Result<Option<u64>, StallError> {
    let average = Average::new(format, beta2)?;
    let mut rule = AdaptiveReset::with_threshold(beta2, threshold)?;
    let stationary = average.stationary().nearest;
    if stationary < threshold {
        return Ok(None);
    }
    loop {
        let relative = average.since_reset(rule.age + 1).nearest / stationary;
        if rule.add(relative) {
            return Ok(Some(rule.age));
        }
        if relative >= 1.0 {
            // So are all that follow, and each adds 1 to the sum.
            let AdaptiveReset { age, sum, .. } = rule;
            return Ok(Some(age + first(|more| due(beta2, age + more, sum + more as f64))));
        }
    }
}

/// The reset rule fed by what is measured: the share of stored values that a step left equal, in place of the model's `S(j)`
/// of [`reset_period_with_threshold`].
///
/// [`StallCounts::share`](super::StallCounts::share) measures it, or
/// [`same_code_share`](super::StallCounts::same_code_share) under scales that move every step, where no value compares equal.
/// The share is taken as it comes, not relative to a stationary one. A state that never stalls in more than the threshold is
/// never reset.
///
/// ```
/// use halfulp::stall::AdaptiveReset;
/// let mut rule = AdaptiveReset::new(0.999)?;
/// let mut resets = 0;
/// for step in 0..1000 {
///     let stalled = 0.95; // measured between the states before and after the step
///     if rule.observe(stalled)? {
///         // zero both moments, restart the age of bias correction
///         rule.restart();
///         resets += 1;
///     }
/// }
/// assert_eq!(resets, 3);
/// # Ok::<(), halfulp::stall::StallError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdaptiveReset {
    beta2: f64,
    threshold: f64,
    age: u64,
    /// See [`sum`](Self::sum).
    sum: f64,
}

impl AdaptiveReset {
    /// A rule at age 0 with the default threshold [`RESET_THRESHOLD`].
    ///
    /// # Errors
    /// [`StallError::Range`] if `beta2` is not between 0 and 1.
    pub fn new(beta2: f64) -> Result<Self, StallError> {
        Self::with_threshold(beta2, RESET_THRESHOLD)
    }

    /// A rule at age 0 with a threshold of one's own.
    ///
    /// # Errors
    /// [`StallError::Range`] if `beta2` is not between 0 and 1 or `threshold` is not at least 0 and below 1.
    pub fn with_threshold(beta2: f64, threshold: f64) -> Result<Self, StallError> {
        check_beta2(beta2)?;
        check((0.0..1.0).contains(&threshold), "threshold", "a share of at least 0 and below 1", threshold)?;
        Ok(Self { beta2, threshold, age: 0, sum: 0.0 })
    }

    /// The rule as it stood at an age: what its getters gave, say before a checkpoint. It goes on as if nothing had happened.
    ///
    /// ```
    /// use halfulp::stall::AdaptiveReset;
    /// let mut rule = AdaptiveReset::new(0.999)?;
    /// rule.observe(0.95)?;
    /// let (beta2, threshold, age, sum) = (rule.beta2(), rule.threshold(), rule.age(), rule.sum());
    /// assert_eq!(AdaptiveReset::restored(beta2, threshold, age, sum)?, rule);
    /// # Ok::<(), halfulp::stall::StallError>(())
    /// ```
    ///
    /// # Errors
    /// As [`with_threshold`](Self::with_threshold), and if `sum` is not at least 0 and at most `age`: each step adds at most 1.
    pub fn restored(beta2: f64, threshold: f64, age: u64, sum: f64) -> Result<Self, StallError> {
        let rule = Self::with_threshold(beta2, threshold)?;
        check((0.0..=age as f64).contains(&sum), "sum", "at least 0 and at most the age", sum)?;
        Ok(Self { age, sum, ..rule })
    }

    /// Takes in the stalled share of one more step; whether the state is now to be reset.
    ///
    /// # Errors
    /// [`StallError::Range`] if `stalled` is no share; nothing has changed then.
    pub fn observe(&mut self, stalled: f64) -> Result<bool, StallError> {
        check((0.0..=1.0).contains(&stalled), "stalled", "a share from 0 to 1", stalled)?;
        Ok(self.add(stalled))
    }

    /// Starts again at age 0, as the state does.
    pub fn restart(&mut self) {
        (self.age, self.sum) = (0, 0.0);
    }

    /// The decay of the second moment.
    #[must_use]
    pub const fn beta2(&self) -> f64 {
        self.beta2
    }

    /// The part of stalling that costs nothing.
    #[must_use]
    pub const fn threshold(&self) -> f64 {
        self.threshold
    }

    /// Steps taken in since the start or the last restart.
    #[must_use]
    pub const fn age(&self) -> u64 {
        self.age
    }

    /// The loss through stalling, summed over these steps: `max(0, (stalled - threshold)/(1 - threshold))` of each.
    #[must_use]
    pub const fn sum(&self) -> f64 {
        self.sum
    }

    fn add(&mut self, stalled: f64) -> bool {
        self.age = self.age.saturating_add(1);
        self.sum += ((stalled - self.threshold) / (1.0 - self.threshold)).max(0.0);
        due(self.beta2, self.age, self.sum)
    }
}

/// Whether the mean loss `sum/age` has reached the cost of a reset at this age. Without any loss it has not, even where the
/// cost has gone to 0.
fn due(beta2: f64, age: u64, sum: f64) -> bool {
    let left = exp(age as f64 * log(beta2)); // beta2^age
    sum > 0.0 && sum >= age as f64 * 2.0 * left / (1.0 + left)
}
