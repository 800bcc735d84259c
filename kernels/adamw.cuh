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

// New moments, unrounded.
FN Element moments(const Scalars &s, float g, float m, float v) {
    g = g * s.gradient_scale * s.clip;
    Element e;
    e.m = fmaf(s.one_minus_beta1, g, s.beta1 * m);
    e.v = fmaf(s.one_minus_beta2, g * g, s.beta2 * v);
    return e;
}

// The decay acts on the old parameter, and the parameter uses the unrounded moments.
FN Element adamw(const Scalars &s, float p, float g, float m, float v) {
    Element e = moments(s, g, m, v);
    float d = fmaf(sqrtf(e.v), s.root_correction, s.eps);
    e.p = fmaf(s.minus_step, e.m / d, fmaf(s.minus_decay, p, p));
    return e;
}

// sqrt(x), correctly rounded, for x = 0 and 2^-85 <= x < 2^128: two Newton steps, the second on the root to full precision.
// Every seed within three ulp gives it: all 2^24 significands (of two binades) times seven seeds are tried on the host. Below
// 2^-85 the addend would be felt and the last residual not be exact.
FN float root(float x) {
    float y = near_reciprocal_root(x + 0x1p-120f); // finite at 0
    float r = x * y, half = 0.5f * y;
    float e = fmaf(-r, half, 0.5f);
    r = fmaf(r, e, r);
    half = fmaf(half, e, half);
    return fmaf(fmaf(-r, r, x), half, r);
}

// What became of some elements: whether `adamw_quick` gave what `adamw` gives.
struct Range {
    float poison; // 0, or NaN once p is not finite or v is out of range
    float worst;  // largest relative error of a reciprocal
    u32 least;    // least 2 |q| - 1 of the quotients as integers, without zeros
};
FN Range fresh() {
    Range range = {0, 0, 0xFFFFFFFF};
    return range;
}
FN bool in_range(const Range &range) {
    return range.poison == 0 && range.worst < 0x0.fffffp-24f && range.least >= 2 * 0x20800000u - 1;
}

// a / b, correctly rounded, where `in_range`, for 2^-60 <= b < 2^60 and a = 0 (of either sign) or 2^-85 <= |a|; infinite or NaN
// where a is, or where the quotient is infinite. Out of range are quotients below 2^-62, and in range nearly all others.
//
// Let a / b and b be in [1, 2), and the reciprocal within E = 2^-24 (1 - 2^-20) of itself, as `worst` says of it, whatever the
// seed was. The first quotient is within 1.5 ulp, so its residual is exact to 2^-24 of itself, and the second quotient within
// 2^-24 + 2^-45. Its residual is exact. So the third is, before it is rounded, within (2^-24 + 2^-45) E < 2^-48. The middle
// between two floats, an odd multiple of 2^-24, is 2^-47 / b > 2^-48 or more away from a / b, so that both round alike.
FN float quotient(float a, float b, Range &range) {
    float y = near_reciprocal(b);
    y = fmaf(fmaf(-b, y, 1.0f), y, y);
    range.worst = fmaxf(range.worst, fabsf(fmaf(-b, y, 1.0f)));
    float q = a * y;
    // Residuals b q - a, not a - b q: a quotient of zero keeps its sign.
    q = fmaf(fmaf(b, q, -a), -y, q);
    q = fmaf(fmaf(b, q, -a), -y, q);
    u32 shifted = bits_of(q) * 2 - 1;
    range.least = range.least < shifted ? range.least : shifted;
    return q;
}

// `adamw` where `in_range`, and where |minus_step| (if not 0) and eps are in [2^-60, 2^60): the moments are scaled by 2^64, so
// that none is subnormal, and the quotient with them.
FN Element adamw_quick(const Scalars &s, float p, float g, float m, float v, Range &range) {
    Element e = moments(s, g, m, v);
    float x = e.v * 0x1p64f;
    float d = fmaf(root(x), s.root_correction * 0x1p-32f, s.eps);
    float q = quotient(e.m * 0x1p64f, d, range);
    e.p = fmaf(s.minus_step * 0x1p-64f, q, fmaf(s.minus_decay, p, p));
    // A first moment that is not finite makes p the same.
    range.poison = fmaf(e.p, 0.0f, range.poison);
    range.poison = fmaf(x, 0.0f, range.poison);
    return e;
}

// The bits to store: whichever NaN a step makes or reads becomes one.
FN u32 canonical(float x) { return x != x ? 0x7FC00000u : bits_of(x); }
