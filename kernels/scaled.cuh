// Tensors in blocks that share a scale, of any element format and any rule for scales, beside src/format/block.rs and
// src/cast/blocks.rs: the scale of a block, encoding and decoding.
#pragma once
#include "round.cuh"

// A format and overflow policy, for quotients in f64. At most 19 fraction bits.
struct Wide {
    u32 fraction_bits;
    u32 max_code;
    u32 beyond;     // the code, without sign, of what is too large
    u32 sign_shift; // position of the sign in a code
    u32 is_unsigned;
    u32 negative;  // the code of a value below zero in an unsigned format
    double normal; // the smallest normal value
    double code_1; // the value of code 1, below which a format without zero halves its spacing; 0 elsewhere
};

// To the larger neighbour: for scales, which are not negative.
struct Upward {
    static const int bits = 0;
};

// What is added to the dropped bits so that a carry out of them is "up".
template <class D> struct Addend {
    // The draw, and below it the middle of what it leaves open.
    FN_MEMBER u64 of(u32 draw, u32 drop, u32) { return (2ull * draw + 1) << (drop - 1 - D::bits); }
};
template <> struct Addend<NearestEven> {
    FN_MEMBER u64 of(u32, u32 drop, u32 odd) { return (1ull << (drop - 1)) - 1 + odd; }
};
template <> struct Addend<Upward> {
    FN_MEMBER u64 of(u32, u32 drop, u32) { return (1ull << drop) - 1; }
};

// The code of a finite value.
template <class D> FN u32 wide_code(const Wide &t, double x, u32 draw) {
    double magnitude = fabs(x);
    if (magnitude < t.code_1) {
        // A ulp is half as long there, and begins at code 0; what lies below that is code 0. Exact.
        double below = 2 * magnitude - t.code_1;
        magnitude = below > 0 ? below : 0;
    }
    // Subnormals go up to the binade of the smallest normal value, whose ulp is theirs. What is cut off there tells nothing
    // to a draw, and to the others by an odd last bit.
    bool subnormal = magnitude < t.normal;
    double placed = sum_down(magnitude, subnormal ? t.normal : 0);
    u64 bits = bits_of(placed);
    if (D::bits == 0) bits |= subnormal && placed - t.normal != magnitude;
    u32 drop = 52 - t.fraction_bits;
    u32 base = (u32)(bits_of(t.normal) >> drop) - (subnormal ? 0 : 1u << t.fraction_bits);
    u32 odd = ((u32)(bits >> drop) - base) & 1;
    u32 result = (u32)((bits + Addend<D>::of(draw, drop, odd)) >> drop) - base;

    result = result > t.max_code ? t.beyond : result;
    u32 sign = (u32)(bits_of(x) >> 63);
    result |= (sign & (t.is_unsigned ^ 1)) << t.sign_shift;
    return t.is_unsigned && x < 0 ? t.negative : result;
}

// 2^k, for k from -127 to 127.
FN float two_to(int k) { return float_of(k > -127 ? (u32)(k + 127) << 23 : 1u << 22); }

// amax / max rounded up in f32, a positive finite f32 in any case.
FN float quotient_up(double amax, double max) {
    float nearest = (float)(amax / max);
    // Exact: 24 bits times those of `max`.
    u32 bits = bits_of(nearest) + (u32)((double)nearest * max < amax);
    bits = bits > 1 ? bits : 1;
    return float_of(bits < F32_INFINITY ? bits : F32_INFINITY - 1);
}

// The f32 of NVFP4: the scale of all of a tensor.
FN float nvfp4_global(u32 amax) { return quotient_up((double)float_of(amax), 448.0 * 6.0); }

FN float e4m3_value(u32 code) {
    float magnitude = float_of((code & 0x7F) << 20) * float_of((254u - 7) << 23);
    magnitude = (code & 0x7F) == 0x7F ? float_of(CANONICAL_NAN) : magnitude;
    return code & 0x80 ? -magnitude : magnitude;
}

// Rules for scales: `BlockScale` of src/format/block.rs, in its order.
#define RULE_CEIL 0
#define RULE_FLOOR 1
#define RULE_AMAX 2
#define RULE_NVFP4 3

// How blocks are encoded, as constants.
struct Encoder {
    u32 rule;
    u32 plain;     // whether f32 arithmetic serves under a power of two, as `Plain` has it
    float unit;    // what takes the smallest normal value to that of f32,
    float from_unit; // and back
    u32 largest;   // the largest sum of `Plain` that stands for a code; what is above saturates if that is the policy
    u32 saturates;
    double max; // the largest value of the elements' format
    Wide wide;
};

struct BlockScale {
    u32 stored;     // the code of E8M0 or E4M3, or the bits of an f32
    float inverse;  // of a power of two
    double divisor; // 1 where the scale is 0
};

// The scale of a block whose largest magnitude has these f32 bits: NaN if not all of it is finite.
FN BlockScale scale_of(const Encoder &e, u32 amax, float global) {
    BlockScale s = {0, 1, 1};
    bool finite = amax < F32_INFINITY;
    double largest = (double)float_of(finite ? amax : 0);
    if (e.rule == RULE_AMAX) {
        float scale = quotient_up(largest, e.max);
        s.stored = finite ? bits_of(scale) : CANONICAL_NAN;
        s.divisor = (double)scale;
    } else if (e.rule == RULE_NVFP4) {
        const Wide e4m3 = {3, 0x7E, 0x7E, 7, 0, 0, 1.0 / 64, 0};
        // The quotient lies apart from every E4M3 value that it does not equal by far more than f64 rounds.
        u32 code = wide_code<Upward>(e4m3, largest / (6.0 * (double)global), 0);
        s.stored = finite ? code : 0x7F;
        s.divisor = code == 0 ? 1 : (double)e4m3_value(code) * (double)global;
    } else {
        // floor(log2), of zero below all; and the carry of a fraction that is larger than that of `max`.
        u64 bits = bits_of(largest), max = bits_of(e.max), fraction = (1ull << 52) - 1;
        int k = (int)(bits >> 52) - (int)(max >> 52);
        if (e.rule == RULE_CEIL) k += (bits & fraction) > (max & fraction);
        int least = e.rule == RULE_CEIL ? -126 : -127;
        k = k < least ? least : k > 127 ? 127 : k;
        s.stored = finite ? (u32)(k + 127) : 0xFF;
        s.inverse = two_to(-k);
        s.divisor = (double)two_to(k);
    }
    return s;
}

FN bool is_nan_scale(const Encoder &e, u32 stored) {
    return stored == (e.rule == RULE_AMAX ? CANONICAL_NAN : e.rule == RULE_NVFP4 ? 0x7Fu : 0xFFu);
}

// |y| in units in which the target's subnormals are those of f32, the code above 23 - P bits, with what goes up carried into it:
// `scaled_sum` of round.cuh with P known at run time, and to nearest what does as much without its exponents.
template <class D> struct Plain;
template <> struct Plain<Draws32> {
    FN_MEMBER u32 sum(const Encoder &e, float y, u32 draw, u32 &doubt) {
        u32 sum = bits_of(product_down(fabsf(y), e.unit)) + (draw >> (9 + e.wide.fraction_bits));
        doubt |= sum ^ (sum + 1);
        return sum;
    }
};
template <> struct Plain<NearestEven> {
    FN_MEMBER u32 sum(const Encoder &e, float y, u32, u32 &) {
        float placed = product_down(fabsf(y), e.unit);
        // What is cut off is told by an odd last bit.
        u32 bits = bits_of(placed) | (u32)(placed * e.from_unit != fabsf(y));
        u32 drop = 23 - e.wide.fraction_bits;
        return bits + (1u << (drop - 1)) - 1 + (bits >> drop & 1);
    }
};

// The codes of eight elements of a block, WIDTH bits each, the first lowest. All 0 under a scale that is NaN.
template <class D, int WIDTH> FN u64 eight_codes(const Encoder &e, const BlockScale &s, const u32 (&x)[8], const u32 (&draw)[8]) {
    u64 codes = 0;
    if (is_nan_scale(e, s.stored)) return codes;
    if (e.rule <= RULE_FLOOR && e.plain) {
        u32 drop = 23 - e.wide.fraction_bits, doubt = 0, most = 0;
        UNROLL for (int i = 0; i < 8; i++) {
            // Exact, but for what is too far below the smallest value to be rounded up.
            u32 sum = Plain<D>::sum(e, float_of(x[i]) * s.inverse, draw[i], doubt);
            most = most > sum ? most : sum;
            if (e.saturates) sum = sum < e.largest ? sum : e.largest;
            u32 sign = x[i] >> 31;
            u32 code = sum >> drop | (sign & (e.wide.is_unsigned ^ 1)) << e.wide.sign_shift;
            code = sign & e.wide.is_unsigned ? 0 : code;
            codes |= (u64)code << WIDTH * i;
        }
        if (doubt >> drop == 0 && (e.saturates || most >> drop <= e.wide.max_code)) return codes;
        codes = 0;
    }
    UNROLL for (int i = 0; i < 8; i++) {
        codes |= (u64)wide_code<D>(e.wide, (double)float_of(x[i]) / s.divisor, draw[i]) << WIDTH * i;
    }
    return codes;
}

// How codes are read, as constants. All values of the format are f32.
struct Decoder {
    u32 fraction_bits;
    u32 max_code;
    u32 infinity; // its code, without sign; above all codes in a format that has none
    u32 sign_shift;
    u32 is_unsigned;
    u32 half_ulp; // what code 0 of a format without zero stands for, in the units of code 1's word; 0 elsewhere
    float first, second; // 2^(127 - bias) in two factors
};

// The value of a code; NaN has any payload.
FN float code_value(const Decoder &d, u32 code) {
    u32 sign = d.is_unsigned ? 0 : code >> d.sign_shift & 1;
    u32 magnitude = code & ((2u << d.sign_shift) - 1) & ~((d.is_unsigned ^ 1) << d.sign_shift);
    // The f32 whose exponent and fraction are those of the code.
    u32 bits = magnitude << (23 - d.fraction_bits);
    bits = bits > d.half_ulp ? bits : d.half_ulp;
    float value = float_of(bits) * d.first * d.second;
    value = magnitude > d.max_code ? float_of(magnitude == d.infinity ? F32_INFINITY : CANONICAL_NAN) : value;
    return sign ? -value : value;
}

// What values of a block are multiplied by, one after the other: the first product is exact wherever there are two.
struct Factors {
    float block, global;
};
FN Factors factors(u32 rule, u32 stored, float global) {
    Factors f = {1, 1};
    if (rule == RULE_AMAX) {
        f.block = float_of(stored);
    } else if (rule == RULE_NVFP4) {
        f.block = e4m3_value(stored), f.global = global;
    } else {
        f.block = stored == 0xFF ? float_of(CANONICAL_NAN) : two_to((int)stored - 127);
    }
    return f;
}

// f32 bits of an element: rounded once, and one NaN.
FN u32 decoded(const Decoder &d, u32 code, Factors f) {
    float x = code_value(d, code) * f.block * f.global;
    return x != x ? CANONICAL_NAN : bits_of(x);
}
