// AdamW where parameters are rounded to BF16 at last: moments as they are, and two bounds between which the parameter lies, from a root
// and an inverse that the hardware approximates. Rounding keeps order: where both bounds are rounded to the same number, so is the
// parameter, whatever the errors of the approximations were within what is allowed for; where they are not, nothing is decided, and
// the rule is asked [the rounding test of Ziv, Fast evaluation of elementary mathematical functions with correctly rounded last bit].
//
// Moments are held in a unit of their block's own, 2^(scale - UNIT): what a code is multiplied by is the same for every block then, and
// factors that a step has anyway take the scales. A moment is that of the rule, divided by its unit, to the bit, as long as both are normal
// numbers. A first moment that is not, which is less than 2^-106 as units are at most 2^20, or whose quotient is not, moves a parameter by
// less than 2^-65, which one that is 2^-37 or more then does not feel; for smaller ones, and those that are not numbers, `fair` asks.
//
// Of the bounds, in parts of 2^-24: the approximate root is off by 2, the rule's own by 1, the factor of the root by 1.3, the two sums with eps by
// 1 each, the approximate inverse by 2 (by 4 at most, as exact.cuh has it), quotients by 1 each, the factor of a bound by 1: 11.3 in all
// (13.3), and 16 are allowed.
#pragma once
#include "blocks.cuh"
#include "rules.cuh"

// What is approximated, for whoever checks what becomes of errors.
struct OfHardware {
    FN_METHOD float root(float x) const { return root_seed(x); }
    FN_METHOD float inverse(float x) const { return inverse_seed(x); }
};

struct Bounds {
    // What a gradient and its square are multiplied by, and sqrt(v); -step, less and more.
    float gain_m, gain_v, root, low, high;
    float eps, minus_decay;

    FN_MEMBER bool covers(const AdamW::Scalars &s) {
        const float step = fabsf(s.minus_step);
        return s.eps >= 0x1p-40f && s.eps <= 0x1p40f && s.root_correction <= 0x1p10f && step >= 0x1p-60f && step <= 0x1p10f && step <= s.eps * 0x1p40f &&
               fabsf(s.minus_decay) <= 0.5f && (s.beta1 == 0 || s.beta1 >= 0x1p-20f) && s.beta2 >= 0.25f;
    }
    // Whether these are scales of blocks for which all of the above holds.
    FN_MEMBER bool covers(u32 scale_m, u32 scale_v) { return scale_m - 67 <= 127 - 67 && scale_v - 27 < 142 - 27; }
    // Of what becomes of them: moments that are normal numbers, but for first moments that are less than 2^-17 of any code's ulp.
    FN_MEMBER bool covers_new(u32 unit_m, u32 scale_m) { return unit_m == UNIT || scale_m >= 54; }
    FN_MEMBER bool covers_moments(float most_m, u32 most_v) { return most_m < 0x1p60f && most_v < bits_of(0x1p20f); }
    FN_MEMBER bool covers_least(u32 least_v) { return least_v >= bits_of(0x1p-40f); }
    // Of what a parameter was and its moment is, which is that of the rule if it is zero, unless a gradient was lost on the way.
    FN_MEMBER bool fair(float p, float m, float g) {
        return fabsf(p) <= 0x1.fffffep127f && (m == 0 ? g == 0 || fabsf(g) >= 0x1p-60f : fabsf(m) >= 0x1p-45f);
    }
    // Of new parameters, in BF16, two magnitudes in a word; that of a NaN may be one, or that of zero where a draw was added to it.
    FN_MEMBER bool covers_least_parameters(u32 least) {
        const u32 first = 0x2D00, last = 0x7F80;
        return (least & 0xFFFF) - first <= last - first && (least >> 16) - first <= last - first;
    }

    // What codes are multiplied by: beta in units of a block.
    template <class T> FN_MEMBER float kept(float beta) { return beta * float_of((127u + UNIT - T::BIAS) << 23); }

    FN_METHOD Bounds(const AdamW::Scalars &s, u32 scale_m, u32 scale_v) {
        gain_m = s.one_minus_beta1 * float_of((127 + UNIT - scale_m) << 23);
        gain_v = s.one_minus_beta2 * float_of((127 + UNIT - scale_v) << 23);
        // The root of a unit is a power of two, or that times the root of two, whose fraction is here what 0.5 is but for a little.
        const u32 twice = scale_v - UNIT + 2 * 127, odd = twice % 2;
        root = s.root_correction * float_of((twice << 22) - odd * (0x400000u - 0x3504F3u));
        const u32 unit_m = scale_m - UNIT + 127;
        // Times 1 - 2^-20 and 1 + 2^-20.
        low = s.minus_step * float_of((unit_m - 1) << 23 | 0x7FFFF0);
        high = s.minus_step * float_of(unit_m << 23 | 8);
        eps = s.eps, minus_decay = s.minus_decay;
    }

    // From moments that are decayed already.
    template <class Seeds = OfHardware> FN_METHOD void step(float p, float g, float &m, float &v, float &low, float &high, const Seeds &seeds = Seeds()) const {
        m = fmaf(gain_m, g, m);
        v = fmaf(gain_v, g * g, v);
        const float quotient = m * seeds.inverse(fmaf(seeds.root(v), root, eps));
        const float decayed = fmaf(minus_decay, p, p);
        low = fmaf(this->low, quotient, decayed), high = fmaf(this->high, quotient, decayed);
    }
};
