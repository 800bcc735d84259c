//! Hyper-parameters of every optimizer: their ranges, and the scalars that a step makes of them.
//!
//! # To add an optimizer
//! 1. In `rule.rs`, its scalars and, in a method of theirs, one element's step.
//! 2. Here, its hyper-parameters: a struct with defaults, `check`, and an `impl` of [`Rule`] that names its states, lists its
//!    fields, makes the scalars in f64 and hands elements to step 1.
//! 3. In `mod.rs`, a name: `pub type Adam = Optimizer<AdamConfig>`.
//! 4. In `kernels/rules.cuh`, the same step, with its roots and quotients of the arithmetic that it is given, what it divides
//!    (`numerator`) and when that may be done by seeds (`seeded`); its name in the list of kernels.
//! 5. A row in the macro of `tests/optimizers.rs`, and vectors in `tests/golden/optimizers.tsv`.
//!
//! States, rounding, groups, clipping, resets, the meter, checkpoints and shards are the [`Optimizer`](super::Optimizer)'s.

use core::fmt;

use super::rule::{
    AdEMAMixScalars, AdamScalars, LambScalars, LionScalars, Scalars, SgdScalars, exponential, logarithm, power,
};
use super::{MixStates, OptimError, StateFormat, States, StepControl};
use crate::format::Format;
use crate::random::Role;

/// The rule of an optimizer, told by the type of its hyper-parameters: [`AdamWConfig`] and its like. Sealed.
pub trait Rule: sealed::Rule + Copy + Default + PartialEq + fmt::Debug + Send + Sync {
    /// Its name, in lower case, as in checkpoints.
    const NAME: &'static str;
    /// What its states are stored as: [`States`] for two moments, [`StateFormat`] for one, [`MixStates`] for three.
    type States: StateSet;

    /// Checks every hyper-parameter.
    ///
    /// # Errors
    /// [`OptimError::Config`] names the first that is out of its range, [`OptimError::Unsupported`] an option that there
    /// is not.
    fn check(&self) -> Result<(), OptimError>;
}

/// What all states of a tensor are stored as. Sealed.
pub trait StateSet: Formats + Copy + PartialEq + fmt::Debug + fmt::Display + Send + Sync {
    /// Bytes of all states of `n` parameters, scales included.
    #[must_use]
    fn bytes(&self, n: usize) -> usize;
}

/// The most states of any rule.
pub(crate) const MOST: usize = 3;

pub(crate) const FIRST_MOMENT: StateKind = StateKind { name: "m", role: Role::FirstMoment };
pub(crate) const SECOND_MOMENT: StateKind = StateKind { name: "v", role: Role::SecondMoment };
pub(crate) const SLOW_MOMENT: StateKind = StateKind { name: "slow", role: Role::ThirdState };

impl StateKind {
    /// Refuses a format that this state can't have.
    pub(crate) fn check(self, got: StateFormat) -> Result<(), OptimError> {
        let (elements, expected): (&[Format], _) = if self.role == Role::SecondMoment {
            let expected = "F32, BF16, E4M3, E5M2, UE5M3, UE4M4 or UE2M2Nz";
            (&[Format::E4M3, Format::E5M2, Format::UE5M3, Format::UE4M4, Format::UE2M2NZ], expected)
        } else {
            (&[Format::E4M3, Format::E5M2, Format::E2M1], "F32, BF16, E4M3, E5M2 or E2M1")
        };
        if got.is_one_of(elements) { Ok(()) } else { Err(OptimError::State { argument: self.name, expected, got }) }
    }
}

/// Refuses formats that the states of a rule can't have.
pub(crate) fn check_states<R: Rule>(states: &R::States) -> Result<(), OptimError> {
    R::STATES.iter().zip(states.formats()).try_for_each(|(kind, format)| kind.check(format))
}

pub(crate) mod sealed {
    use super::{MOST, Role, StateFormat, StepControl};

    /// A state of a rule.
    #[derive(Clone, Copy, Debug)]
    pub struct StateKind {
        /// As in messages and checkpoints.
        pub(crate) name: &'static str,
        /// Which draws round it. A second moment is never negative, and has a floor.
        pub(crate) role: Role,
    }

    pub trait Rule: Sized {
        /// Of one step of one tensor, in f32.
        type Scalars: Copy + Send + Sync + core::fmt::Debug;
        /// Its states, [`MOST`] at most.
        const STATES: &'static [StateKind];
        /// Whether a step needs the norms of parameters and update, over the whole tensor, first.
        const NORMS: bool = false;

        /// Names every hyper-parameter to `visit`, in the order of checkpoints.
        fn fields<V: Visit>(&mut self, visit: &mut V) -> Result<(), V::Error>;
        /// Whether elements whose gradient is zero stand still.
        fn skips_zeros(&self) -> bool;
        /// Decay of the second moment, if there is one.
        fn second_decay(&self) -> Option<f64> {
            None
        }
        /// The scalars of a tensor whose states have these ages, each 1 or more in this step.
        fn scalars(&self, ages: [u64; MOST], control: &StepControl) -> Self::Scalars;
        /// One element: the new parameter and states, unrounded. States that there are not stay 0.
        fn step(scalars: &Self::Scalars, p: f32, g: f32, states: [f32; MOST]) -> (f32, [f32; MOST]);
        /// Under [`NORMS`](Self::NORMS), the update, whose norm counts.
        fn update(scalars: &Self::Scalars, p: f32, g: f32, states: [f32; MOST]) -> f32 {
            Self::step(scalars, p, g, states).0
        }
        /// Under [`NORMS`](Self::NORMS), the same scalars with what follows from these norms of parameters and update.
        fn with_norms(&self, scalars: Self::Scalars, params: f64, update: f64) -> Self::Scalars {
            let _ = (params, update);
            scalars
        }
    }

    pub trait Formats: From<StateFormat> {
        /// One for each state; those beyond do not count.
        fn formats(&self) -> [StateFormat; MOST];
        fn of_formats(formats: [StateFormat; MOST]) -> Self;
    }

    /// Reads or writes hyper-parameters by name.
    pub trait Visit {
        type Error;
        fn number(&mut self, name: &'static str, value: &mut f64) -> Result<(), Self::Error>;
        fn flag(&mut self, name: &'static str, value: &mut bool) -> Result<(), Self::Error>;
        fn integer(&mut self, name: &'static str, value: &mut u64) -> Result<(), Self::Error>;
        fn option(&mut self, name: &'static str, value: &mut Option<f64>) -> Result<(), Self::Error>;
    }
}
pub(crate) use sealed::{Formats, StateKind, Visit};

/// A range and what came.
fn within(argument: &'static str, expected: &'static str, got: f64, fits: bool) -> Result<(), OptimError> {
    if fits { Ok(()) } else { Err(OptimError::Config { argument, expected, got }) }
}

fn not_negative(argument: &'static str, got: f64) -> Result<(), OptimError> {
    within(argument, "a finite f32, 0 or more", got, got >= 0.0 && (got as f32).is_finite())
}

fn decay(argument: &'static str, expected: &'static str, got: f64) -> Result<(), OptimError> {
    within(argument, expected, got, (0.0..1.0).contains(&got))
}

fn positive(argument: &'static str, got: f64) -> Result<(), OptimError> {
    within(argument, "positive and finite as f32", got, got as f32 > 0.0 && (got as f32).is_finite())
}

fn product(lr: f64, weight_decay: f64) -> Result<(), OptimError> {
    let got = lr * weight_decay;
    within("lr * weight_decay", "a finite f32", got, got >= 0.0 && (got as f32).is_finite())
}

fn sign(maximize: bool, control: &StepControl) -> f32 {
    if maximize { -control.gradient_scale } else { control.gradient_scale }
}

/// `1 / (1 - beta^t)`.
fn correction(beta: f64, t: u64) -> f64 {
    1.0 / (1.0 - power(beta, t))
}

/// `1 / sqrt(1 - beta^t)`.
fn root_correction(beta: f64, t: u64) -> f64 {
    1.0 / (1.0 - power(beta, t)).sqrt()
}

/// Hyper-parameters of AdamW, with the field's usual defaults. The update: [`Scalars::step`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWConfig {
    /// Learning rate, finite and not negative. 1e-3.
    pub lr: f64,
    /// Decay of the first moment, in [0, 1). 0.9.
    pub beta1: f64,
    /// Decay of the second moment, in [0, 1). 0.999.
    pub beta2: f64,
    /// Added to the root of the second moment; positive as f32. 1e-8.
    pub eps: f64,
    /// Decoupled weight decay, finite and not negative: the old parameter shrinks by `lr * weight_decay` of itself. 1e-2.
    pub weight_decay: f64,
    /// Climb instead of descend. False.
    pub maximize: bool,
    /// Not supported: refused when true.
    pub amsgrad: bool,
    /// Elements whose gradient is zero stand still: parameter, decay included, and moments. (In blocks, whose scale may change
    /// around them, moments are rounded once more.) False.
    pub skip_zeros: bool,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 1e-2,
            maximize: false,
            amsgrad: false,
            skip_zeros: false,
        }
    }
}

const BETA1: &str = "0 <= beta1 < 1";
const BETA2: &str = "0 <= beta2 < 1";

fn no_amsgrad(amsgrad: bool) -> Result<(), OptimError> {
    let reason = "a running maximum of the second moment would need a third state";
    if amsgrad { Err(OptimError::Unsupported { argument: "amsgrad", reason }) } else { Ok(()) }
}

impl AdamWConfig {
    /// Checks every hyper-parameter.
    ///
    /// # Errors
    /// [`OptimError::Config`] names the first that is out of its range, [`OptimError::Unsupported`] an option that there
    /// is not.
    pub fn check(&self) -> Result<(), OptimError> {
        not_negative("lr", self.lr)?;
        decay("beta1", BETA1, self.beta1)?;
        decay("beta2", BETA2, self.beta2)?;
        positive("eps", self.eps)?;
        not_negative("weight_decay", self.weight_decay)?;
        product(self.lr, self.weight_decay)?;
        no_amsgrad(self.amsgrad)
    }

    /// The scalars of a tensor at age `t`, counted from 1.
    ///
    /// # Errors
    /// [`OptimError::Config`] for `t = 0`, where the bias corrections divide by zero.
    pub fn scalars(&self, t: u64) -> Result<Scalars, OptimError> {
        self.scalars_of_ages(t, t)
    }

    /// [`scalars`](Self::scalars) where the moments differ in age, the second having been reset alone.
    ///
    /// # Errors
    /// [`OptimError::Config`] if either is 0.
    pub fn scalars_of_ages(&self, first: u64, second: u64) -> Result<Scalars, OptimError> {
        if first == 0 || second == 0 {
            return Err(OptimError::Config { argument: "t", expected: "an age of 1 or more", got: 0.0 });
        }
        Ok(sealed::Rule::scalars(self, [first, second, 0], &StepControl::default()))
    }
}

impl Rule for AdamWConfig {
    const NAME: &'static str = "adamw";
    type States = States;

    fn check(&self) -> Result<(), OptimError> {
        self.check()
    }
}

impl sealed::Rule for AdamWConfig {
    type Scalars = Scalars;
    const STATES: &'static [StateKind] = &[FIRST_MOMENT, SECOND_MOMENT];

    fn fields<V: Visit>(&mut self, visit: &mut V) -> Result<(), V::Error> {
        visit.number("lr", &mut self.lr)?;
        visit.number("beta1", &mut self.beta1)?;
        visit.number("beta2", &mut self.beta2)?;
        visit.number("eps", &mut self.eps)?;
        visit.number("weight_decay", &mut self.weight_decay)?;
        visit.flag("maximize", &mut self.maximize)?;
        visit.flag("skip_zeros", &mut self.skip_zeros)
    }

    fn second_decay(&self) -> Option<f64> {
        Some(self.beta2)
    }

    fn skips_zeros(&self) -> bool {
        self.skip_zeros
    }

    fn scalars(&self, ages: [u64; MOST], control: &StepControl) -> Scalars {
        Scalars {
            beta1: self.beta1 as f32,
            one_minus_beta1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            one_minus_beta2: (1.0 - self.beta2) as f32,
            minus_step: -(self.lr / (1.0 - power(self.beta1, ages[0]))) as f32,
            root_correction: root_correction(self.beta2, ages[1]) as f32,
            eps: self.eps as f32,
            minus_decay: -(self.lr * self.weight_decay) as f32,
            gradient_scale: sign(self.maximize, control),
            clip: control.clip,
        }
    }

    #[inline(always)]
    fn step(scalars: &Scalars, p: f32, g: f32, [m, v, _]: [f32; MOST]) -> (f32, [f32; MOST]) {
        let [p, m, v] = scalars.step(p, g, m, v);
        (p, [m, v, 0.0])
    }
}

/// Hyper-parameters of Adam with L2 regularisation: decay is part of the gradient, and goes through the moments. The update:
/// [`AdamScalars::step`].
///
/// Bytes an element: those of [`AdamWConfig`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamConfig {
    /// Learning rate, finite and not negative. 1e-3.
    pub lr: f64,
    /// Decay of the first moment, in [0, 1). 0.9.
    pub beta1: f64,
    /// Decay of the second moment, in [0, 1). 0.999.
    pub beta2: f64,
    /// Added to the root of the second moment; positive as f32. 1e-8.
    pub eps: f64,
    /// How much of the parameter is added to its gradient, finite and not negative. 0.
    pub weight_decay: f64,
    /// Climb instead of descend. False.
    pub maximize: bool,
    /// Not supported: refused when true.
    pub amsgrad: bool,
    /// As [`AdamWConfig::skip_zeros`].
    pub skip_zeros: bool,
}

impl Default for AdamConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            maximize: false,
            amsgrad: false,
            skip_zeros: false,
        }
    }
}

impl Rule for AdamConfig {
    const NAME: &'static str = "adam";
    type States = States;

    fn check(&self) -> Result<(), OptimError> {
        not_negative("lr", self.lr)?;
        decay("beta1", BETA1, self.beta1)?;
        decay("beta2", BETA2, self.beta2)?;
        positive("eps", self.eps)?;
        not_negative("weight_decay", self.weight_decay)?;
        no_amsgrad(self.amsgrad)
    }
}

impl sealed::Rule for AdamConfig {
    type Scalars = AdamScalars;
    const STATES: &'static [StateKind] = &[FIRST_MOMENT, SECOND_MOMENT];

    fn fields<V: Visit>(&mut self, visit: &mut V) -> Result<(), V::Error> {
        visit.number("lr", &mut self.lr)?;
        visit.number("beta1", &mut self.beta1)?;
        visit.number("beta2", &mut self.beta2)?;
        visit.number("eps", &mut self.eps)?;
        visit.number("weight_decay", &mut self.weight_decay)?;
        visit.flag("maximize", &mut self.maximize)?;
        visit.flag("skip_zeros", &mut self.skip_zeros)
    }

    fn second_decay(&self) -> Option<f64> {
        Some(self.beta2)
    }

    fn skips_zeros(&self) -> bool {
        self.skip_zeros
    }

    fn scalars(&self, ages: [u64; MOST], control: &StepControl) -> AdamScalars {
        AdamScalars {
            beta1: self.beta1 as f32,
            one_minus_beta1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            one_minus_beta2: (1.0 - self.beta2) as f32,
            minus_step: -(self.lr / (1.0 - power(self.beta1, ages[0]))) as f32,
            root_correction: root_correction(self.beta2, ages[1]) as f32,
            eps: self.eps as f32,
            weight_decay: self.weight_decay as f32,
            gradient_scale: sign(self.maximize, control),
            clip: control.clip,
        }
    }

    #[inline(always)]
    fn step(scalars: &AdamScalars, p: f32, g: f32, [m, v, _]: [f32; MOST]) -> (f32, [f32; MOST]) {
        let [p, m, v] = scalars.step(p, g, m, v);
        (p, [m, v, 0.0])
    }
}

/// Hyper-parameters of SGD with momentum. The update: [`SgdScalars::step`].
///
/// Bytes an element: 16 with parameters and gradients in f32 and a momentum in BF16.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdConfig {
    /// Learning rate, finite and not negative. 1e-3.
    pub lr: f64,
    /// Decay of the momentum, in [0, 1). 0.9.
    pub momentum: f64,
    /// What is kept from gradients that enter the momentum, in [0, 1]; the first enters whole. 0.
    pub dampening: f64,
    /// Weight decay, finite and not negative. 0.
    pub weight_decay: f64,
    /// Whether the decay acts on the parameter itself (the old one, which shrinks by `lr * weight_decay` of itself), in place
    /// of its gradient. False.
    pub decoupled: bool,
    /// Nesterov's momentum, without dampening alone. False.
    pub nesterov: bool,
    /// Climb instead of descend. False.
    pub maximize: bool,
    /// As [`AdamWConfig::skip_zeros`].
    pub skip_zeros: bool,
}

impl Default for SgdConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            momentum: 0.9,
            dampening: 0.0,
            weight_decay: 0.0,
            decoupled: false,
            nesterov: false,
            maximize: false,
            skip_zeros: false,
        }
    }
}

impl Rule for SgdConfig {
    const NAME: &'static str = "sgd";
    type States = StateFormat;

    fn check(&self) -> Result<(), OptimError> {
        not_negative("lr", self.lr)?;
        decay("momentum", "0 <= momentum < 1", self.momentum)?;
        within("dampening", "0 <= dampening <= 1", self.dampening, (0.0..=1.0).contains(&self.dampening))?;
        not_negative("weight_decay", self.weight_decay)?;
        product(self.lr, self.weight_decay)?;
        let without = |argument, reason| Err(OptimError::Unsupported { argument, reason });
        if self.nesterov && (self.momentum == 0.0 || self.dampening != 0.0) {
            return without("nesterov", "Nesterov's momentum is one above 0 and without dampening");
        }
        if self.dampening != 0.0 && self.momentum == 0.0 {
            return without("dampening", "there is no momentum that it could dampen");
        }
        Ok(())
    }
}

impl sealed::Rule for SgdConfig {
    type Scalars = SgdScalars;
    const STATES: &'static [StateKind] = &[FIRST_MOMENT];

    fn fields<V: Visit>(&mut self, visit: &mut V) -> Result<(), V::Error> {
        visit.number("lr", &mut self.lr)?;
        visit.number("momentum", &mut self.momentum)?;
        visit.number("dampening", &mut self.dampening)?;
        visit.number("weight_decay", &mut self.weight_decay)?;
        visit.flag("decoupled", &mut self.decoupled)?;
        visit.flag("nesterov", &mut self.nesterov)?;
        visit.flag("maximize", &mut self.maximize)?;
        visit.flag("skip_zeros", &mut self.skip_zeros)
    }

    fn skips_zeros(&self) -> bool {
        self.skip_zeros
    }

    fn scalars(&self, ages: [u64; MOST], control: &StepControl) -> SgdScalars {
        let (coupled, decoupled) = if self.decoupled { (0.0, self.weight_decay) } else { (self.weight_decay, 0.0) };
        SgdScalars {
            momentum: self.momentum as f32,
            gain: if ages[0] == 1 { 1.0 } else { (1.0 - self.dampening) as f32 },
            minus_lr: -self.lr as f32,
            weight_decay: coupled as f32,
            minus_decay: -(self.lr * decoupled) as f32,
            nesterov: self.nesterov.into(),
            gradient_scale: sign(self.maximize, control),
            clip: control.clip,
        }
    }

    #[inline(always)]
    fn step(scalars: &SgdScalars, p: f32, g: f32, [m, ..]: [f32; MOST]) -> (f32, [f32; MOST]) {
        let [p, m] = scalars.step(p, g, m);
        (p, [m, 0.0, 0.0])
    }
}

/// Hyper-parameters of Lion. The update: [`LionScalars::step`].
///
/// Bytes an element: 16 with parameters and gradients in f32 and a momentum in BF16, 10 in BF16 throughout.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LionConfig {
    /// Learning rate, finite and not negative: every element moves by it. 1e-4.
    pub lr: f64,
    /// How much of the momentum the update is made of, in [0, 1). 0.9.
    pub beta1: f64,
    /// Decay of the momentum, in [0, 1). 0.99.
    pub beta2: f64,
    /// Decoupled weight decay, finite and not negative: the old parameter shrinks by `lr * weight_decay` of itself. 0.
    pub weight_decay: f64,
    /// Climb instead of descend. False.
    pub maximize: bool,
    /// As [`AdamWConfig::skip_zeros`].
    pub skip_zeros: bool,
}

impl Default for LionConfig {
    fn default() -> Self {
        Self { lr: 1e-4, beta1: 0.9, beta2: 0.99, weight_decay: 0.0, maximize: false, skip_zeros: false }
    }
}

impl Rule for LionConfig {
    const NAME: &'static str = "lion";
    type States = StateFormat;

    fn check(&self) -> Result<(), OptimError> {
        not_negative("lr", self.lr)?;
        decay("beta1", BETA1, self.beta1)?;
        decay("beta2", BETA2, self.beta2)?;
        not_negative("weight_decay", self.weight_decay)?;
        product(self.lr, self.weight_decay)
    }
}

impl sealed::Rule for LionConfig {
    type Scalars = LionScalars;
    const STATES: &'static [StateKind] = &[FIRST_MOMENT];

    fn fields<V: Visit>(&mut self, visit: &mut V) -> Result<(), V::Error> {
        visit.number("lr", &mut self.lr)?;
        visit.number("beta1", &mut self.beta1)?;
        visit.number("beta2", &mut self.beta2)?;
        visit.number("weight_decay", &mut self.weight_decay)?;
        visit.flag("maximize", &mut self.maximize)?;
        visit.flag("skip_zeros", &mut self.skip_zeros)
    }

    fn skips_zeros(&self) -> bool {
        self.skip_zeros
    }

    fn scalars(&self, _: [u64; MOST], control: &StepControl) -> LionScalars {
        LionScalars {
            beta1: self.beta1 as f32,
            one_minus_beta1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            one_minus_beta2: (1.0 - self.beta2) as f32,
            minus_lr: -self.lr as f32,
            minus_decay: -(self.lr * self.weight_decay) as f32,
            gradient_scale: sign(self.maximize, control),
            clip: control.clip,
        }
    }

    #[inline(always)]
    fn step(scalars: &LionScalars, p: f32, g: f32, [m, ..]: [f32; MOST]) -> (f32, [f32; MOST]) {
        let [p, m] = scalars.step(p, g, m);
        (p, [m, 0.0, 0.0])
    }
}

/// Hyper-parameters of AdEMAMix. The update: [`AdEMAMixScalars::step`].
///
/// Weight and decay of the slow first moment grow over the first steps of a tensor, by its age `t`:
///
/// ```text
/// alpha(t) = min(t alpha / alpha_steps, alpha)
/// beta3(t) = min(exp(1 / ((1 - x) / ln beta1 + x / ln beta3)), beta3)      x = t / beta3_steps
/// ```
///
/// so that the half-life of the slow moment grows evenly.
///
/// Bytes an element: 24 with parameters and gradients in f32 and three states in BF16, 18 in BF16 throughout.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdEMAMixConfig {
    /// Learning rate, finite and not negative. 1e-3.
    pub lr: f64,
    /// Decay of the fast first moment, in [0, 1). 0.9.
    pub beta1: f64,
    /// Decay of the second moment, in [0, 1). 0.999.
    pub beta2: f64,
    /// Decay of the slow first moment, in [0, 1). 0.9999.
    pub beta3: f64,
    /// Weight of the slow first moment beside the fast one, finite and not negative. 5.
    pub alpha: f64,
    /// Steps over which `alpha` grows from 0; 0 to begin with it. 0.
    pub alpha_steps: u64,
    /// Steps over which `beta3` grows from `beta1`; 0 to begin with it. 0.
    pub beta3_steps: u64,
    /// Added to the root of the second moment; positive as f32. 1e-8.
    pub eps: f64,
    /// Decoupled weight decay, finite and not negative: the old parameter shrinks by `lr * weight_decay` of itself. 1e-2.
    pub weight_decay: f64,
    /// Climb instead of descend. False.
    pub maximize: bool,
    /// As [`AdamWConfig::skip_zeros`].
    pub skip_zeros: bool,
}

impl Default for AdEMAMixConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            beta3: 0.9999,
            alpha: 5.0,
            alpha_steps: 0,
            beta3_steps: 0,
            eps: 1e-8,
            weight_decay: 1e-2,
            maximize: false,
            skip_zeros: false,
        }
    }
}

impl AdEMAMixConfig {
    /// The weight of the slow first moment at age `t`.
    #[must_use]
    pub fn alpha_at(&self, t: u64) -> f64 {
        if t >= self.alpha_steps { self.alpha } else { t as f64 * self.alpha / self.alpha_steps as f64 }
    }

    /// The decay of the slow first moment at age `t`.
    #[must_use]
    pub fn beta3_at(&self, t: u64) -> f64 {
        if t >= self.beta3_steps {
            return self.beta3;
        }
        let x = t as f64 / self.beta3_steps as f64;
        let [inverse1, inverse3] = [self.beta1, self.beta3].map(|beta| 1.0 / logarithm(beta));
        exponential(1.0 / ((1.0 - x) * inverse1 + x * inverse3)).min(self.beta3)
    }
}

impl Rule for AdEMAMixConfig {
    const NAME: &'static str = "ademamix";
    type States = MixStates;

    fn check(&self) -> Result<(), OptimError> {
        not_negative("lr", self.lr)?;
        decay("beta1", BETA1, self.beta1)?;
        decay("beta2", BETA2, self.beta2)?;
        decay("beta3", "0 <= beta3 < 1", self.beta3)?;
        not_negative("alpha", self.alpha)?;
        positive("eps", self.eps)?;
        not_negative("weight_decay", self.weight_decay)?;
        product(self.lr, self.weight_decay)
    }
}

impl sealed::Rule for AdEMAMixConfig {
    type Scalars = AdEMAMixScalars;
    const STATES: &'static [StateKind] = &[FIRST_MOMENT, SECOND_MOMENT, SLOW_MOMENT];

    fn fields<V: Visit>(&mut self, visit: &mut V) -> Result<(), V::Error> {
        visit.number("lr", &mut self.lr)?;
        visit.number("beta1", &mut self.beta1)?;
        visit.number("beta2", &mut self.beta2)?;
        visit.number("beta3", &mut self.beta3)?;
        visit.number("alpha", &mut self.alpha)?;
        visit.integer("alpha_steps", &mut self.alpha_steps)?;
        visit.integer("beta3_steps", &mut self.beta3_steps)?;
        visit.number("eps", &mut self.eps)?;
        visit.number("weight_decay", &mut self.weight_decay)?;
        visit.flag("maximize", &mut self.maximize)?;
        visit.flag("skip_zeros", &mut self.skip_zeros)
    }

    fn second_decay(&self) -> Option<f64> {
        Some(self.beta2)
    }

    fn skips_zeros(&self) -> bool {
        self.skip_zeros
    }

    fn scalars(&self, ages: [u64; MOST], control: &StepControl) -> AdEMAMixScalars {
        let beta3 = self.beta3_at(ages[2]);
        AdEMAMixScalars {
            beta1: self.beta1 as f32,
            one_minus_beta1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            one_minus_beta2: (1.0 - self.beta2) as f32,
            beta3: beta3 as f32,
            one_minus_beta3: (1.0 - beta3) as f32,
            alpha: self.alpha_at(ages[2]) as f32,
            first_correction: correction(self.beta1, ages[0]) as f32,
            root_correction: root_correction(self.beta2, ages[1]) as f32,
            eps: self.eps as f32,
            minus_lr: -self.lr as f32,
            minus_decay: -(self.lr * self.weight_decay) as f32,
            gradient_scale: sign(self.maximize, control),
            clip: control.clip,
        }
    }

    #[inline(always)]
    fn step(scalars: &AdEMAMixScalars, p: f32, g: f32, [m, v, slow]: [f32; MOST]) -> (f32, [f32; MOST]) {
        let [p, m, v, slow] = scalars.step(p, g, m, v, slow);
        (p, [m, v, slow])
    }
}

/// Hyper-parameters of LAMB. The update: [`LambScalars::step`].
///
/// The trust ratio of a tensor is `|p| / |u|`, the norms of its old parameters and of its update, at most `max_trust`; 1 where
/// either is 0 or not a number. With `max_unorm` it is `max_unorm |p| / |u|`, at most 1, instead. Norms are sums in the fixed order
/// of [`ChunkSums`](super::ChunkSums), so that they have the same bits in every run.
///
/// Bytes an element: twice the reads of [`AdamWConfig`], 32 with parameters and gradients in f32 and two moments in BF16.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LambConfig {
    /// Learning rate, finite and not negative. 1e-3.
    pub lr: f64,
    /// Decay of the first moment, in [0, 1). 0.9.
    pub beta1: f64,
    /// Decay of the second moment, in [0, 1). 0.999.
    pub beta2: f64,
    /// Added to the root of the second moment; positive as f32. 1e-6.
    pub eps: f64,
    /// Weight decay, finite and not negative: so much of the old parameter is added to the update. 1e-2.
    pub weight_decay: f64,
    /// The largest trust ratio, positive and finite. 10.
    pub max_trust: f64,
    /// In place of a trust ratio, the largest norm of an update in norms of the parameters, positive and finite. None.
    pub max_unorm: Option<f64>,
    /// Climb instead of descend. False.
    pub maximize: bool,
    /// As [`AdamWConfig::skip_zeros`]. Elements that stand still count in the norms with an update of zero.
    pub skip_zeros: bool,
}

impl Default for LambConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-6,
            weight_decay: 1e-2,
            max_trust: 10.0,
            max_unorm: None,
            maximize: false,
            skip_zeros: false,
        }
    }
}

impl LambConfig {
    /// The trust ratio for these norms.
    #[must_use]
    pub fn trust_ratio(&self, params: f64, update: f64) -> f64 {
        if !(params > 0.0 && update > 0.0) {
            return 1.0;
        }
        match self.max_unorm {
            Some(most) => (most * params / update).min(1.0),
            None => (params / update).min(self.max_trust),
        }
    }
}

impl Rule for LambConfig {
    const NAME: &'static str = "lamb";
    type States = States;

    fn check(&self) -> Result<(), OptimError> {
        not_negative("lr", self.lr)?;
        decay("beta1", BETA1, self.beta1)?;
        decay("beta2", BETA2, self.beta2)?;
        positive("eps", self.eps)?;
        not_negative("weight_decay", self.weight_decay)?;
        positive("max_trust", self.max_trust)?;
        let step = self.lr * self.max_trust;
        within("lr * max_trust", "a finite f32", step, (step as f32).is_finite())?;
        self.max_unorm.map_or(Ok(()), |max_unorm| positive("max_unorm", max_unorm))
    }
}

impl sealed::Rule for LambConfig {
    type Scalars = LambScalars;
    const STATES: &'static [StateKind] = &[FIRST_MOMENT, SECOND_MOMENT];
    const NORMS: bool = true;

    fn fields<V: Visit>(&mut self, visit: &mut V) -> Result<(), V::Error> {
        visit.number("lr", &mut self.lr)?;
        visit.number("beta1", &mut self.beta1)?;
        visit.number("beta2", &mut self.beta2)?;
        visit.number("eps", &mut self.eps)?;
        visit.number("weight_decay", &mut self.weight_decay)?;
        visit.number("max_trust", &mut self.max_trust)?;
        visit.option("max_unorm", &mut self.max_unorm)?;
        visit.flag("maximize", &mut self.maximize)?;
        visit.flag("skip_zeros", &mut self.skip_zeros)
    }

    fn second_decay(&self) -> Option<f64> {
        Some(self.beta2)
    }

    fn skips_zeros(&self) -> bool {
        self.skip_zeros
    }

    fn scalars(&self, ages: [u64; MOST], control: &StepControl) -> LambScalars {
        LambScalars {
            beta1: self.beta1 as f32,
            one_minus_beta1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            one_minus_beta2: (1.0 - self.beta2) as f32,
            first_correction: correction(self.beta1, ages[0]) as f32,
            root_correction: root_correction(self.beta2, ages[1]) as f32,
            eps: self.eps as f32,
            weight_decay: self.weight_decay as f32,
            minus_step: -self.lr as f32,
            gradient_scale: sign(self.maximize, control),
            clip: control.clip,
        }
    }

    #[inline(always)]
    fn step(scalars: &LambScalars, p: f32, g: f32, [m, v, _]: [f32; MOST]) -> (f32, [f32; MOST]) {
        let [p, m, v] = scalars.step(p, g, m, v);
        (p, [m, v, 0.0])
    }

    #[inline(always)]
    fn update(scalars: &LambScalars, p: f32, g: f32, [m, v, _]: [f32; MOST]) -> f32 {
        scalars.update(p, g, m, v)[0]
    }

    fn with_norms(&self, scalars: LambScalars, params: f64, update: f64) -> LambScalars {
        LambScalars { minus_step: -(self.lr * self.trust_ratio(params, update)) as f32, ..scalars }
    }
}
