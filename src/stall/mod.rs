//! Stalling: how often the stored value of an exponential moving average does not change in a step, what its rounding adds
//! to its variance, and when to reset it.
//!
//! An optimizer's second moment moves by `(1 - beta2)(g^2 - v)` in a step. In a format of few fraction bits that is mostly a
//! small part of the spacing at `v`: rounding to nearest then stores the old value again, and stochastic rounding does so
//! with the probability that keeps the mean right. *Stalled* is a step after which the stored value is what it was.
//!
//! ```
//! use halfulp::{Format, stall};
//! let p = stall::probability(Format::BF16, 0.999)?;
//! assert!((p.nearest - 0.945835).abs() < 1e-6 && (p.stochastic - 0.825048).abs() < 1e-6);
//! assert_eq!(stall::reset_period(Format::BF16, 0.999)?, Some(1116));
//! # Ok::<(), stall::StallError>(())
//! ```
//!
//! # The model
//!
//! A gradient of one coordinate is Gaussian with mean 0 and variance `s^2`, independent from step to step, and the stored `v`
//! is near `s^2`, or near `s^2 (1 - beta2^j)` at age `j`. So `z = g^2/s^2` has the chi-square distribution with one degree
//! of freedom, `F(x) = erf(sqrt(x/2))`. The value is normal in its format, in no reach of its largest, and its mantissa `m`
//! in `[1, 2)` is log-uniform: it lies in each part of a binade as often as in proportion to the part's logarithm. With
//! `eps` = [`Format::epsilon`](crate::Format::epsilon) the spacing at `v` is `u = eps v/m`, and a step is
//!
//! ```text
//! |step|/u = |z - 1| m (1 - beta2)/eps = |z - 1|/(2 rho)      rho = eps/(2 (1 - beta2) m)
//! ```
//!
//! Rounding to nearest stalls where that is below 1/2, stochastic rounding with probability `max(0, 1 - |step|/u)`.
//! Mantissas are taken as a continuum, spacing as the same on both sides of `v`; both are rough for 0 or 1 fraction bits.
//!
//! The model of the one-step probability at the typical mantissa, the start-up window, the reset period and the effective
//! decay are those of K. Topollai and A. Choromanska, "Understanding Quantization of Optimizer States in LLM Pre-training",
//! arXiv:2603.16731. The probability of stochastic rounding in closed form, averages over the mantissa, both tails for
//! `rho < 1` and the law of the noise are derived here.
//!
//! # First moments
//!
//! A first moment moves by `(1 - beta1)(g - m)` around a mean that mostly is 0: it is normal with the variance that its memory
//! leaves it, and the ratio of the next gradient to it has Cauchy's distribution, from which [`momentum_probability`] follows in
//! closed form. At `beta1 = 0.9` it stalls in 0.4 % of the steps in BF16 and in 6 % in E4M3. Where values are seldom normal in
//! their format, as in E2M1 (about 37 %), and where nearly all steps are short of a spacing, there is no formula, and [`Simulation`]
//! estimates the share. It also has the momentum of SGD (a [`gain`](Simulation::gain) of 1), Lion's (`beta2` in place of
//! `beta1`) and the slow moment of AdEMAMix. `figures/table-3-stalling.md` has all of them in every format, as the meters of
//! six optimizers counted them.
//!
//! ```
//! use halfulp::{Format, random::Role, stall::{Scaling, Simulation, Storage}};
//! let storage = Storage::nearest(Format::E4M3).scaled(Scaling::PowerOfTwo { block: 128 });
//! let m = Simulation { role: Role::FirstMoment, beta: 0.9, storage, ..Simulation::default() };
//! let share = m.run()?.checkpoints[0].window.share();
//! assert!((share - 0.06).abs() < 0.005);
//! # Ok::<(), halfulp::stall::SimulationError>(())
//! ```
//!
//! # Beside the model
//!
//! [`Simulation`] feeds moments with random gradients of a known law, [`State`] is a moment stored in any
//! format with any scaling, and [`Comparison`] counts, in the states of a real step, who stalled and who moved.

mod error;
mod gradients;
mod meter;
mod momentum;
mod noise;
mod probability;
mod quadrature;
mod reset;
mod simulation;
mod state;

pub use error::StallError;
pub use gradients::{Law, Variances};
pub use meter::{Comparison, MeterError, Share, StallCounts, StateView};
pub use momentum::{momentum_probability, momentum_probability_at_mantissa, momentum_probability_since_reset};
pub use noise::{Noise, noise};
pub use probability::{
    EffectiveDecay, Probability, average_probability, average_probability_since_reset, effective_decay, probability,
    probability_at_mantissa, probability_since_reset, ratchet_threshold, rho,
};
pub use reset::{
    AdaptiveReset, RESET_THRESHOLD, reset_period, reset_period_with_threshold, startup_window,
    startup_window_with_floor,
};
pub use simulation::{Checkpoint, Report, Simulation, SimulationError, Start, Step, Update};
pub use state::{Scaling, State, Storage};
