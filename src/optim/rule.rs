//! The element rules, side by side: the one place where the arithmetic of the optimizers stands, beside `kernels/rules.cuh`.
//!
//! A rule is the type of an optimizer's hyper-parameters (`hyper.rs`): it makes, in f64, the scalars of a step, and rounds them
//! to f32 once; the scalars here take one element a step forward, in f32, in the order written.

/// `base^t` by binary exponentiation: squares from the lowest bit of `t` up, multiplied in that order.
pub(crate) fn power(base: f64, mut t: u64) -> f64 {
    let (mut result, mut square) = (1.0, base);
    while t > 0 {
        if t & 1 == 1 {
            result *= square;
        }
        square *= square;
        t >>= 1;
    }
    result
}

/// ln 2 in two parts, of which the first has 32 bits: `k` times it is exact.
const LN_2: [f64; 2] = [f64::from_bits(0x3FE6_2E42_FEE0_0000), f64::from_bits(0x3DEA_39EF_3579_3C76)];

/// `e^x` of `x <= 0`, by a series in one written order: the same bits on every machine, a GPU too. Below the normal
/// numbers it is 0.
pub(crate) fn exponential(x: f64) -> f64 {
    if x < -708.0 {
        return 0.0;
    }
    let k = (x * core::f64::consts::LOG2_E).round_ties_even();
    let r = (-k).mul_add(LN_2[1], (-k).mul_add(LN_2[0], x));
    // The sum of r^n/n! up to n = 14, from the last term on.
    let mut sum = 1.0f64;
    for n in (1..15).rev() {
        sum = sum.mul_add(r / f64::from(n), 1.0);
    }
    sum * f64::from_bits(((k as i64 + 1023) as u64) << 52)
}

/// `ln x` of `0 <= x < 1`: five steps of Halley's method from the exponent.
pub(crate) fn logarithm(x: f64) -> f64 {
    if x < f64::MIN_POSITIVE {
        return f64::NEG_INFINITY;
    }
    let exponent = (x.to_bits() >> 52) as i64 - 1022;
    let mut y = (exponent as f64 * core::f64::consts::LN_2).min(0.0);
    for _ in 0..5 {
        let e = exponential(y);
        y = (y + 2.0 * (x - e) / (x + e)).min(0.0);
    }
    y
}

/// The gradient that a rule sees. A factor of 1 changes no bit.
#[inline(always)]
fn scaled(g: f32, gradient_scale: f32, clip: f32) -> f32 {
    g * gradient_scale * clip
}

/// A moving average, unrounded: `fma(1 - beta, x, beta * average)`.
#[inline(always)]
fn average(beta: f32, one_minus_beta: f32, x: f32, average: f32) -> f32 {
    one_minus_beta.mul_add(x, beta * average)
}

/// What a moment's step is divided by: `fma(sqrt(v), 1 / sqrt(1 - b2^t), eps)`.
#[inline(always)]
fn denominator(v: f32, root_correction: f32, eps: f32) -> f32 {
    v.sqrt().mul_add(root_correction, eps)
}

/// The scalars of one step of one tensor under AdamW, computed in f64 and rounded to f32 once.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
#[non_exhaustive]
pub struct Scalars {
    /// First-moment decay.
    pub beta1: f32,
    /// `1 - beta1`, from f64.
    pub one_minus_beta1: f32,
    /// Second-moment decay.
    pub beta2: f32,
    /// `1 - beta2`, from f64.
    pub one_minus_beta2: f32,
    /// `lr / (1 - beta1^t)`, negated.
    pub minus_step: f32,
    /// `1 / sqrt(1 - beta2^t)`.
    pub root_correction: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// `lr * weight_decay`, negated.
    pub minus_decay: f32,
    /// What gradients are multiplied by: 1 over the loss scale, negative to maximise.
    pub gradient_scale: f32,
    /// What they are multiplied by next: the clip coefficient.
    pub clip: f32,
}

impl Scalars {
    /// One step of AdamW (Loshchilov, Hutter: Decoupled weight decay regularization, ICLR 2019) for one element: the new
    /// parameter and moments, unrounded.
    ///
    /// ```text
    /// g  = (g * gradient_scale) * clip
    /// m' = fma(1 - b1, g, b1 * m)
    /// v' = fma(1 - b2, g * g, b2 * v)
    /// d  = fma(sqrt(v'), 1 / sqrt(1 - b2^t), eps)
    /// p' = fma(-lr / (1 - b1^t), m' / d, fma(-(lr * wd), p, p))
    /// ```
    ///
    /// The decay acts on the old parameter, and the parameter uses the unrounded moments.
    #[inline(always)]
    #[must_use]
    pub fn step(&self, p: f32, g: f32, m: f32, v: f32) -> [f32; 3] {
        let g = scaled(g, self.gradient_scale, self.clip);
        let (m, v) = (self.first_moment(g, m), self.second_moment(g, v));
        let d = denominator(v, self.root_correction, self.eps);
        let p = self.minus_step.mul_add(m / d, self.minus_decay.mul_add(p, p));
        [p, m, v]
    }

    /// The new first moment, unrounded.
    #[inline(always)]
    pub(crate) fn first_moment(&self, g: f32, m: f32) -> f32 {
        average(self.beta1, self.one_minus_beta1, g, m)
    }

    /// The new second moment, unrounded.
    #[inline(always)]
    pub(crate) fn second_moment(&self, g: f32, v: f32) -> f32 {
        average(self.beta2, self.one_minus_beta2, g * g, v)
    }
}

/// The scalars of one step of one tensor under Adam.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
#[non_exhaustive]
pub struct AdamScalars {
    /// First-moment decay.
    pub beta1: f32,
    /// `1 - beta1`, from f64.
    pub one_minus_beta1: f32,
    /// Second-moment decay.
    pub beta2: f32,
    /// `1 - beta2`, from f64.
    pub one_minus_beta2: f32,
    /// `lr / (1 - beta1^t)`, negated.
    pub minus_step: f32,
    /// `1 / sqrt(1 - beta2^t)`.
    pub root_correction: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// How much of the parameter is added to its gradient.
    pub weight_decay: f32,
    /// What gradients are multiplied by.
    pub gradient_scale: f32,
    /// What they are multiplied by next: the clip coefficient.
    pub clip: f32,
}

impl AdamScalars {
    /// One step of Adam (Kingma, Ba: Adam, a method for stochastic optimization, ICLR 2015) with L2 regularisation for one
    /// element: the new parameter and moments, unrounded.
    ///
    /// ```text
    /// g  = fma(wd, p, (g * gradient_scale) * clip)
    /// m' = fma(1 - b1, g, b1 * m)
    /// v' = fma(1 - b2, g * g, b2 * v)
    /// d  = fma(sqrt(v'), 1 / sqrt(1 - b2^t), eps)
    /// p' = fma(-lr / (1 - b1^t), m' / d, p)
    /// ```
    #[inline(always)]
    #[must_use]
    pub fn step(&self, p: f32, g: f32, m: f32, v: f32) -> [f32; 3] {
        let g = self.weight_decay.mul_add(p, scaled(g, self.gradient_scale, self.clip));
        let m = average(self.beta1, self.one_minus_beta1, g, m);
        let v = average(self.beta2, self.one_minus_beta2, g * g, v);
        let d = denominator(v, self.root_correction, self.eps);
        [self.minus_step.mul_add(m / d, p), m, v]
    }
}

/// The scalars of one step of one tensor under SGD with momentum.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
#[non_exhaustive]
pub struct SgdScalars {
    /// Decay of the momentum.
    pub momentum: f32,
    /// What gradients enter it with: 1 at age 1, `1 - dampening` later.
    pub gain: f32,
    /// The learning rate, negated.
    pub minus_lr: f32,
    /// Coupled decay: how much of the parameter is added to its gradient.
    pub weight_decay: f32,
    /// Decoupled decay: `lr * weight_decay`, negated.
    pub minus_decay: f32,
    /// 1 for Nesterov's momentum, else 0.
    pub nesterov: u32,
    /// What gradients are multiplied by.
    pub gradient_scale: f32,
    /// What they are multiplied by next: the clip coefficient.
    pub clip: f32,
}

impl SgdScalars {
    /// One step of stochastic gradient descent with momentum, in the form of PyTorch's `SGD`, for one element: the new
    /// parameter and momentum, unrounded.
    ///
    /// ```text
    /// g  = fma(coupled wd, p, (g * gradient_scale) * clip)
    /// m' = fma(gain, g, momentum * m)
    /// u  = m', or fma(momentum, m', g) under Nesterov
    /// p' = fma(-lr, u, fma(-(lr * decoupled wd), p, p))
    /// ```
    #[inline(always)]
    #[must_use]
    pub fn step(&self, p: f32, g: f32, m: f32) -> [f32; 2] {
        let g = self.weight_decay.mul_add(p, scaled(g, self.gradient_scale, self.clip));
        let m = self.gain.mul_add(g, self.momentum * m);
        let ahead = self.momentum.mul_add(m, g);
        let u = if self.nesterov != 0 { ahead } else { m };
        [self.minus_lr.mul_add(u, self.minus_decay.mul_add(p, p)), m]
    }
}

/// The scalars of one step of one tensor under Lion.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
#[non_exhaustive]
pub struct LionScalars {
    /// How much of the momentum the update is made of.
    pub beta1: f32,
    /// `1 - beta1`, from f64.
    pub one_minus_beta1: f32,
    /// Decay of the momentum.
    pub beta2: f32,
    /// `1 - beta2`, from f64.
    pub one_minus_beta2: f32,
    /// The learning rate, negated.
    pub minus_lr: f32,
    /// `lr * weight_decay`, negated.
    pub minus_decay: f32,
    /// What gradients are multiplied by.
    pub gradient_scale: f32,
    /// What they are multiplied by next: the clip coefficient.
    pub clip: f32,
}

impl LionScalars {
    /// One step of Lion (Chen et al.: Symbolic discovery of optimization algorithms, arXiv:2302.06675) for one element: the
    /// new parameter and momentum, unrounded.
    ///
    /// ```text
    /// g  = (g * gradient_scale) * clip
    /// c  = fma(1 - b1, g, b1 * m)
    /// p' = fma(-lr, sign(c), fma(-(lr * wd), p, p))
    /// m' = fma(1 - b2, g, b2 * m)
    /// ```
    ///
    /// The sign of zero is zero, and that of NaN is NaN.
    #[inline(always)]
    #[must_use]
    pub fn step(&self, p: f32, g: f32, m: f32) -> [f32; 2] {
        let g = scaled(g, self.gradient_scale, self.clip);
        let c = average(self.beta1, self.one_minus_beta1, g, m);
        let below = if c < 0.0 { -1.0 } else { c };
        let sign = if c > 0.0 { 1.0 } else { below };
        let p = self.minus_lr.mul_add(sign, self.minus_decay.mul_add(p, p));
        [p, average(self.beta2, self.one_minus_beta2, g, m)]
    }
}

/// The scalars of one step of one tensor under AdEMAMix.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
#[non_exhaustive]
pub struct AdEMAMixScalars {
    /// Decay of the fast first moment.
    pub beta1: f32,
    /// `1 - beta1`, from f64.
    pub one_minus_beta1: f32,
    /// Second-moment decay.
    pub beta2: f32,
    /// `1 - beta2`, from f64.
    pub one_minus_beta2: f32,
    /// Decay of the slow first moment at this age.
    pub beta3: f32,
    /// `1 - beta3`, from f64.
    pub one_minus_beta3: f32,
    /// Weight of the slow first moment at this age.
    pub alpha: f32,
    /// `1 / (1 - beta1^t)`.
    pub first_correction: f32,
    /// `1 / sqrt(1 - beta2^t)`.
    pub root_correction: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// The learning rate, negated.
    pub minus_lr: f32,
    /// `lr * weight_decay`, negated.
    pub minus_decay: f32,
    /// What gradients are multiplied by.
    pub gradient_scale: f32,
    /// What they are multiplied by next: the clip coefficient.
    pub clip: f32,
}

impl AdEMAMixScalars {
    /// One step of AdEMAMix (Pagliardini, Ablin, Grangier: The AdEMAMix optimizer, arXiv:2409.03137) for one element: the new
    /// parameter, fast first moment, second moment and slow first moment, unrounded.
    ///
    /// ```text
    /// g  = (g * gradient_scale) * clip
    /// m' = fma(1 - b1, g, b1 * m)
    /// v' = fma(1 - b2, g * g, b2 * v)
    /// s' = fma(1 - b3, g, b3 * s)
    /// d  = fma(sqrt(v'), 1 / sqrt(1 - b2^t), eps)
    /// u  = fma(alpha, s', m' * (1 / (1 - b1^t))) / d
    /// p' = fma(-lr, u, fma(-(lr * wd), p, p))
    /// ```
    #[inline(always)]
    #[must_use]
    pub fn step(&self, p: f32, g: f32, m: f32, v: f32, slow: f32) -> [f32; 4] {
        let g = scaled(g, self.gradient_scale, self.clip);
        let m = average(self.beta1, self.one_minus_beta1, g, m);
        let v = average(self.beta2, self.one_minus_beta2, g * g, v);
        let slow = average(self.beta3, self.one_minus_beta3, g, slow);
        let d = denominator(v, self.root_correction, self.eps);
        let u = self.alpha.mul_add(slow, m * self.first_correction) / d;
        [self.minus_lr.mul_add(u, self.minus_decay.mul_add(p, p)), m, v, slow]
    }
}

/// The scalars of one step of one tensor under LAMB.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
#[non_exhaustive]
pub struct LambScalars {
    /// First-moment decay.
    pub beta1: f32,
    /// `1 - beta1`, from f64.
    pub one_minus_beta1: f32,
    /// Second-moment decay.
    pub beta2: f32,
    /// `1 - beta2`, from f64.
    pub one_minus_beta2: f32,
    /// `1 / (1 - beta1^t)`.
    pub first_correction: f32,
    /// `1 / sqrt(1 - beta2^t)`.
    pub root_correction: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// How much of the parameter is added to its update.
    pub weight_decay: f32,
    /// The learning rate times the trust ratio, negated.
    pub minus_step: f32,
    /// What gradients are multiplied by.
    pub gradient_scale: f32,
    /// What they are multiplied by next: the clip coefficient.
    pub clip: f32,
}

impl LambScalars {
    /// The update of one element under LAMB (You et al.: Large batch optimization for deep learning, arXiv:1904.00962), whose
    /// norm over the tensor the trust ratio is made of, and the new moments, unrounded.
    ///
    /// ```text
    /// g  = (g * gradient_scale) * clip
    /// m' = fma(1 - b1, g, b1 * m)
    /// v' = fma(1 - b2, g * g, b2 * v)
    /// d  = fma(sqrt(v'), 1 / sqrt(1 - b2^t), eps)
    /// u  = fma(wd, p, (m' * (1 / (1 - b1^t))) / d)
    /// ```
    #[inline(always)]
    #[must_use]
    pub fn update(&self, p: f32, g: f32, m: f32, v: f32) -> [f32; 3] {
        let g = scaled(g, self.gradient_scale, self.clip);
        let m = average(self.beta1, self.one_minus_beta1, g, m);
        let v = average(self.beta2, self.one_minus_beta2, g * g, v);
        let d = denominator(v, self.root_correction, self.eps);
        [self.weight_decay.mul_add(p, m * self.first_correction / d), m, v]
    }

    /// One step: `p' = fma(-(lr * trust ratio), u, p)`.
    #[inline(always)]
    #[must_use]
    pub fn step(&self, p: f32, g: f32, m: f32, v: f32) -> [f32; 3] {
        let [u, m, v] = self.update(p, g, m, v);
        [self.minus_step.mul_add(u, p), m, v]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponential_and_logarithm() {
        for i in 0..20_000 {
            let x = -f64::from(i) * f64::from(i) * 1.7e-6;
            let (got, expected) = (exponential(x), x.exp());
            assert!((got - expected).abs() <= 4e-16 * expected, "{x}: {got:e}, {expected:e}");
        }
        assert_eq!((exponential(0.0), exponential(-709.0), exponential(f64::NEG_INFINITY)), (1.0, 0.0, 0.0));
        for x in [0.5, 0.9, 0.99, 0.999, 0.9999, 0.999_999, 0.1, 1e-5, 1e-300, 1.0 - f64::EPSILON] {
            let (got, expected) = (logarithm(x), f64::ln(x));
            assert!((got - expected).abs() <= 1e-15 * expected.abs() + 2e-16, "{x}: {got:e}, {expected:e}");
        }
        assert_eq!(logarithm(0.0), f64::NEG_INFINITY);
    }
}
