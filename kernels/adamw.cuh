// The element rule of AdamW, beside src/optim/rule.rs.
#pragma once
#include "common.cuh"

// The scalars of one step of one tensor: `Scalars` of src/optim/rule.rs.
struct Scalars {
    float beta1, one_minus_beta1;
    float beta2, one_minus_beta2;
    float minus_step;      // -lr / (1 - beta1^t)
    float root_correction; // 1 / sqrt(1 - beta2^t)
    float eps;
    float minus_decay; // -lr * weight_decay
    float gradient_scale, clip;
};

struct Element {
    float p, m, v;
};

// New moments, unrounded, from decayed ones: beta1 * m and beta2 * v.
FN Element moments(const Scalars &s, float g, float m, float v) {
    g = g * s.gradient_scale * s.clip;
    Element e;
    e.m = fmaf(s.one_minus_beta1, g, m);
    e.v = fmaf(s.one_minus_beta2, g * g, v);
    return e;
}

// A step from decayed moments. The decay of the parameter acts on the old one, which uses the unrounded moments.
FN Element adamw_decayed(const Scalars &s, float p, float g, float m, float v) {
    Element e = moments(s, g, m, v);
    float d = fmaf(sqrtf(e.v), s.root_correction, s.eps);
    e.p = fmaf(s.minus_step, e.m / d, fmaf(s.minus_decay, p, p));
    return e;
}
FN Element adamw(const Scalars &s, float p, float g, float m, float v) {
    return adamw_decayed(s, p, g, s.beta1 * m, s.beta2 * v);
}

// The bits to store: whichever NaN a step makes or reads becomes one.
FN u32 canonical(float x) { return x != x ? 0x7FC00000u : bits_of(x); }
