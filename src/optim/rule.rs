//! The element rule of AdamW: the one place where its arithmetic stands, beside `kernels/adamw.cuh`.

/// The scalars of one step of one tensor, computed in f64 and rounded to f32 once.
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
        // A factor of 1 changes no bit.
        let g = g * self.gradient_scale * self.clip;
        let (m, v) = (self.first_moment(g, m), self.second_moment(g, v));
        let d = v.sqrt().mul_add(self.root_correction, self.eps);
        let p = self.minus_step.mul_add(m / d, self.minus_decay.mul_add(p, p));
        [p, m, v]
    }

    /// The new first moment, unrounded.
    #[inline(always)]
    pub(crate) fn first_moment(&self, g: f32, m: f32) -> f32 {
        self.one_minus_beta1.mul_add(g, self.beta1 * m)
    }

    /// The new second moment, unrounded.
    #[inline(always)]
    pub(crate) fn second_moment(&self, g: f32, v: f32) -> f32 {
        self.one_minus_beta2.mul_add(g * g, self.beta2 * v)
    }
}
