// The element rules, side by side: beside src/optim/rule.rs, which gives each as a formula with its source, and the scalars of
// src/optim/hyper.rs.
//
// A rule has COUNT states, of which SECOND is the second moment (-1: none), and hyper-parameters in f64, in the order in which
// hyper.rs lists its fields: flags are 0 or 1, an option that is not there is 0. `scalars` makes the scalars of a step for states
// of these ages, 1 or more; `step` takes one element forward: the states are replaced and the new parameter is returned,
// unrounded, with roots and quotients of `a`, Written or Seeded; `seeded` says whether these scalars are for the latter, and `numerator`
// what is divided, from the new states. WATCH has a bit for each state whose infinities and NaN leave the parameter finite.
#pragma once
#include "exact.cuh"

// base^t from the lowest bit of t up.
FN double power(double base, u64 t) {
    double result = 1, square = base;
    while (t > 0) {
        if (t & 1) result *= square;
        square *= square;
        t >>= 1;
    }
    return result;
}

// e^x of x <= 0.
FN double exponential(double x) {
    if (x < -708.0) return 0;
    double k = rint(x * 1.44269504088896340736);
    double r = fma(-k, double_of(0x3DEA39EF35793C76ull), fma(-k, double_of(0x3FE62E42FEE00000ull), x));
    double sum = 1;
    NO_UNROLL for (int n = 14; n >= 1; n--) sum = fma(sum, r / (double)n, 1.0);
    return sum * double_of((u64)((long long)k + 1023) << 52);
}

// ln x of 0 <= x < 1.
FN double logarithm(double x) {
    if (x < double_of(0x0010000000000000ull)) return double_of(0xFFF0000000000000ull);
    double y = (double)((long long)(bits_of(x) >> 52) - 1022) * 0.693147180559945309417;
    y = y < 0.0 ? y : 0.0;
    NO_UNROLL for (int i = 0; i < 5; i++) {
        double e = exponential(y);
        y = y + 2.0 * (x - e) / (x + e);
        y = y < 0.0 ? y : 0.0;
    }
    return y;
}

FN double correction(double beta, u64 t) { return 1.0 / (1.0 - power(beta, t)); }
FN double root_correction(double beta, u64 t) { return 1.0 / sqrt(1.0 - power(beta, t)); }

// What a step is told beside its hyper-parameters.
struct GradientFactors {
    float gradient_scale, clip;
};
FN float signed_scale(double maximize, GradientFactors f) { return maximize != 0.0 ? -f.gradient_scale : f.gradient_scale; }

FN float average(float beta, float one_minus_beta, float x, float old) { return fmaf(one_minus_beta, x, beta * old); }

struct AdamW {
    static const int COUNT = 2, SECOND = 1, SKIP_ZEROS = 6;
    static const u32 WATCH = 2;
    static const bool NORMS = false;
    struct Scalars {
        float beta1, one_minus_beta1;
        float beta2, one_minus_beta2;
        float minus_step;      // -lr / (1 - beta1^t)
        float root_correction; // 1 / sqrt(1 - beta2^t)
        float eps;
        float minus_decay; // -lr * weight_decay
        float gradient_scale, clip;
    };
    // lr, beta1, beta2, eps, weight_decay, maximize, skip_zeros
    FN_MEMBER Scalars scalars(const double *c, const u64 *ages, GradientFactors f) {
        Scalars s;
        s.beta1 = (float)c[1], s.one_minus_beta1 = (float)(1.0 - c[1]);
        s.beta2 = (float)c[2], s.one_minus_beta2 = (float)(1.0 - c[2]);
        s.minus_step = (float)-(c[0] / (1.0 - power(c[1], ages[0])));
        s.root_correction = (float)root_correction(c[2], ages[1]);
        s.eps = (float)c[3];
        s.minus_decay = (float)-(c[0] * c[4]);
        s.gradient_scale = signed_scale(c[5], f), s.clip = f.clip;
        return s;
    }
    FN_MEMBER float numerator(const Scalars &, const float (&x)[COUNT]) { return x[0]; }
    FN_MEMBER bool seeded(const Scalars &s) { return Seeded::covers(s.root_correction, s.eps); }
    FN_MEMBER float scaled(const Scalars &s, float g) { return g * s.gradient_scale * s.clip; }
    // Where a factor is 1 the other one does.
    FN_MEMBER bool one_factor(const Scalars &s) { return s.gradient_scale == 1.0f || s.clip == 1.0f; }
    FN_MEMBER float factor(const Scalars &s) { return s.gradient_scale == 1.0f ? s.clip : s.gradient_scale; }
    // From a scaled gradient and moments that are decayed already: beta1 * m and beta2 * v.
    template <class A> FN_MEMBER float decayed(A &a, const Scalars &s, float p, float g, float (&x)[COUNT]) {
        x[0] = fmaf(s.one_minus_beta1, g, x[0]);
        x[1] = fmaf(s.one_minus_beta2, g * g, x[1]);
        float d = a.root_scaled(x[1], s.root_correction, s.eps);
        return fmaf(s.minus_step, a.quotient(numerator(s, x), d), fmaf(s.minus_decay, p, p));
    }
    template <class A> FN_MEMBER float step(A &a, const Scalars &s, float p, float g, float (&x)[COUNT]) {
        x[0] *= s.beta1, x[1] *= s.beta2;
        return decayed(a, s, p, scaled(s, g), x);
    }
};

struct Adam {
    static const int COUNT = 2, SECOND = 1, SKIP_ZEROS = 6;
    static const u32 WATCH = 2;
    static const bool NORMS = false;
    struct Scalars {
        float beta1, one_minus_beta1;
        float beta2, one_minus_beta2;
        float minus_step, root_correction, eps;
        float weight_decay;
        float gradient_scale, clip;
    };
    // lr, beta1, beta2, eps, weight_decay, maximize, skip_zeros
    FN_MEMBER Scalars scalars(const double *c, const u64 *ages, GradientFactors f) {
        Scalars s;
        s.beta1 = (float)c[1], s.one_minus_beta1 = (float)(1.0 - c[1]);
        s.beta2 = (float)c[2], s.one_minus_beta2 = (float)(1.0 - c[2]);
        s.minus_step = (float)-(c[0] / (1.0 - power(c[1], ages[0])));
        s.root_correction = (float)root_correction(c[2], ages[1]);
        s.eps = (float)c[3];
        s.weight_decay = (float)c[4];
        s.gradient_scale = signed_scale(c[5], f), s.clip = f.clip;
        return s;
    }
    FN_MEMBER float numerator(const Scalars &, const float (&x)[COUNT]) { return x[0]; }
    FN_MEMBER bool seeded(const Scalars &s) { return Seeded::covers(s.root_correction, s.eps); }
    template <class A> FN_MEMBER float step(A &a, const Scalars &s, float p, float g, float (&x)[COUNT]) {
        g = fmaf(s.weight_decay, p, g * s.gradient_scale * s.clip);
        x[0] = average(s.beta1, s.one_minus_beta1, g, x[0]);
        x[1] = average(s.beta2, s.one_minus_beta2, g * g, x[1]);
        float d = a.root_scaled(x[1], s.root_correction, s.eps);
        return fmaf(s.minus_step, a.quotient(numerator(s, x), d), p);
    }
};

struct Sgd {
    static const int COUNT = 1, SECOND = -1, SKIP_ZEROS = 7;
    static const u32 WATCH = 1;
    static const bool NORMS = false;
    struct Scalars {
        float momentum, gain, minus_lr;
        float weight_decay; // coupled
        float minus_decay;  // decoupled: -lr * weight_decay
        u32 nesterov;
        float gradient_scale, clip;
    };
    // lr, momentum, dampening, weight_decay, decoupled, nesterov, maximize, skip_zeros
    FN_MEMBER Scalars scalars(const double *c, const u64 *ages, GradientFactors f) {
        Scalars s;
        s.momentum = (float)c[1];
        s.gain = ages[0] == 1 ? 1.0f : (float)(1.0 - c[2]);
        s.minus_lr = (float)-c[0];
        s.weight_decay = c[4] != 0.0 ? 0.0f : (float)c[3];
        s.minus_decay = (float)-(c[0] * (c[4] != 0.0 ? c[3] : 0.0));
        s.nesterov = c[5] != 0.0;
        s.gradient_scale = signed_scale(c[6], f), s.clip = f.clip;
        return s;
    }
    FN_MEMBER float numerator(const Scalars &, const float (&)[COUNT]) { return 0; }
    FN_MEMBER bool seeded(const Scalars &) { return true; }
    template <class A> FN_MEMBER float step(A &, const Scalars &s, float p, float g, float (&x)[COUNT]) {
        g = fmaf(s.weight_decay, p, g * s.gradient_scale * s.clip);
        x[0] = fmaf(s.gain, g, s.momentum * x[0]);
        float ahead = fmaf(s.momentum, x[0], g);
        return fmaf(s.minus_lr, s.nesterov ? ahead : x[0], fmaf(s.minus_decay, p, p));
    }
};

struct Lion {
    static const int COUNT = 1, SECOND = -1, SKIP_ZEROS = 5;
    static const u32 WATCH = 1;
    static const bool NORMS = false;
    struct Scalars {
        float beta1, one_minus_beta1;
        float beta2, one_minus_beta2;
        float minus_lr, minus_decay;
        float gradient_scale, clip;
    };
    // lr, beta1, beta2, weight_decay, maximize, skip_zeros
    FN_MEMBER Scalars scalars(const double *c, const u64 *, GradientFactors f) {
        Scalars s;
        s.beta1 = (float)c[1], s.one_minus_beta1 = (float)(1.0 - c[1]);
        s.beta2 = (float)c[2], s.one_minus_beta2 = (float)(1.0 - c[2]);
        s.minus_lr = (float)-c[0];
        s.minus_decay = (float)-(c[0] * c[3]);
        s.gradient_scale = signed_scale(c[4], f), s.clip = f.clip;
        return s;
    }
    FN_MEMBER float numerator(const Scalars &, const float (&)[COUNT]) { return 0; }
    FN_MEMBER bool seeded(const Scalars &) { return true; }
    template <class A> FN_MEMBER float step(A &, const Scalars &s, float p, float g, float (&x)[COUNT]) {
        g = g * s.gradient_scale * s.clip;
        float c = average(s.beta1, s.one_minus_beta1, g, x[0]);
        x[0] = average(s.beta2, s.one_minus_beta2, g, x[0]);
        // The sign of zero is zero, and that of NaN is NaN.
        float sign = c > 0.0f ? 1.0f : c < 0.0f ? -1.0f : c;
        return fmaf(s.minus_lr, sign, fmaf(s.minus_decay, p, p));
    }
};

struct AdEMAMix {
    static const int COUNT = 3, SECOND = 1, SKIP_ZEROS = 10;
    static const u32 WATCH = 6;
    static const bool NORMS = false;
    struct Scalars {
        float beta1, one_minus_beta1;
        float beta2, one_minus_beta2;
        float beta3, one_minus_beta3;
        float alpha, first_correction, root_correction, eps;
        float minus_lr, minus_decay;
        float gradient_scale, clip;
    };
    // lr, beta1, beta2, beta3, alpha, alpha_steps, beta3_steps, eps, weight_decay, maximize, skip_zeros
    FN_MEMBER double beta3_at(const double *c, double t) {
        if (t >= c[6]) return c[3];
        double x = t / c[6];
        double inverse1 = 1.0 / logarithm(c[1]), inverse3 = 1.0 / logarithm(c[3]);
        double beta3 = exponential(1.0 / ((1.0 - x) * inverse1 + x * inverse3));
        // As the minimum of Rust: the other one where one is NaN.
        return beta3 < c[3] ? beta3 : c[3];
    }
    FN_MEMBER Scalars scalars(const double *c, const u64 *ages, GradientFactors f) {
        Scalars s;
        double t = (double)ages[2], beta3 = beta3_at(c, t);
        s.beta1 = (float)c[1], s.one_minus_beta1 = (float)(1.0 - c[1]);
        s.beta2 = (float)c[2], s.one_minus_beta2 = (float)(1.0 - c[2]);
        s.beta3 = (float)beta3, s.one_minus_beta3 = (float)(1.0 - beta3);
        s.alpha = (float)(t >= c[5] ? c[4] : t * c[4] / c[5]);
        s.first_correction = (float)correction(c[1], ages[0]);
        s.root_correction = (float)root_correction(c[2], ages[1]);
        s.eps = (float)c[7];
        s.minus_lr = (float)-c[0];
        s.minus_decay = (float)-(c[0] * c[8]);
        s.gradient_scale = signed_scale(c[9], f), s.clip = f.clip;
        return s;
    }
    FN_MEMBER float numerator(const Scalars &s, const float (&x)[COUNT]) { return fmaf(s.alpha, x[2], x[0] * s.first_correction); }
    FN_MEMBER bool seeded(const Scalars &s) { return Seeded::covers(s.root_correction, s.eps); }
    template <class A> FN_MEMBER float step(A &a, const Scalars &s, float p, float g, float (&x)[COUNT]) {
        g = g * s.gradient_scale * s.clip;
        x[0] = average(s.beta1, s.one_minus_beta1, g, x[0]);
        x[1] = average(s.beta2, s.one_minus_beta2, g * g, x[1]);
        x[2] = average(s.beta3, s.one_minus_beta3, g, x[2]);
        float d = a.root_scaled(x[1], s.root_correction, s.eps);
        float u = a.quotient(numerator(s, x), d);
        return fmaf(s.minus_lr, u, fmaf(s.minus_decay, p, p));
    }
};

struct Lamb {
    static const int COUNT = 2, SECOND = 1, SKIP_ZEROS = 8;
    static const u32 WATCH = 2;
    static const bool NORMS = true;
    struct Scalars {
        float beta1, one_minus_beta1;
        float beta2, one_minus_beta2;
        float first_correction, root_correction, eps;
        float weight_decay;
        float minus_step; // -lr * trust ratio
        float gradient_scale, clip;
    };
    // lr, beta1, beta2, eps, weight_decay, max_trust, max_unorm, maximize, skip_zeros
    FN_MEMBER Scalars scalars(const double *c, const u64 *ages, GradientFactors f) {
        Scalars s;
        s.beta1 = (float)c[1], s.one_minus_beta1 = (float)(1.0 - c[1]);
        s.beta2 = (float)c[2], s.one_minus_beta2 = (float)(1.0 - c[2]);
        s.first_correction = (float)correction(c[1], ages[0]);
        s.root_correction = (float)root_correction(c[2], ages[1]);
        s.eps = (float)c[3];
        s.weight_decay = (float)c[4];
        s.minus_step = (float)-c[0];
        s.gradient_scale = signed_scale(c[7], f), s.clip = f.clip;
        return s;
    }
    // What the trust ratio makes of the learning rate, from the norms of parameters and update.
    FN_MEMBER float minus_step(const double *c, double params, double update) {
        double ratio = 1;
        if (params > 0.0 && update > 0.0) {
            ratio = c[6] != 0.0 ? c[6] * params / update : params / update;
            double most = c[6] != 0.0 ? 1.0 : c[5];
            // As the minimum of Rust: the other one where one is NaN.
            ratio = ratio < most ? ratio : most;
        }
        return (float)-(c[0] * ratio);
    }
    FN_MEMBER float numerator(const Scalars &s, const float (&x)[COUNT]) { return x[0] * s.first_correction; }
    FN_MEMBER bool seeded(const Scalars &s) { return Seeded::covers(s.root_correction, s.eps); }
    template <class A> FN_MEMBER float update(A &a, const Scalars &s, float p, float g, float (&x)[COUNT]) {
        g = g * s.gradient_scale * s.clip;
        x[0] = average(s.beta1, s.one_minus_beta1, g, x[0]);
        x[1] = average(s.beta2, s.one_minus_beta2, g * g, x[1]);
        float d = a.root_scaled(x[1], s.root_correction, s.eps);
        return fmaf(s.weight_decay, p, a.quotient(numerator(s, x), d));
    }
    template <class A> FN_MEMBER float step(A &a, const Scalars &s, float p, float g, float (&x)[COUNT]) {
        return fmaf(s.minus_step, update(a, s, p, g, x), p);
    }
};

// The bits to store: whichever NaN a step makes or reads becomes one.
FN u32 canonical(float x) { return x != x ? 0x7FC00000u : bits_of(x); }
