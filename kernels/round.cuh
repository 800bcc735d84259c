// Rounding of one f32 to a code, in the shape of src/round/lanes.rs: the same steps in the same order.
#pragma once
#include "common.cuh"

// A format, scale and overflow policy as constants: `Target32` of src/round/lanes.rs.
struct Target {
    u32 fraction_bits; // of the target
    u32 drop;          // dropped bits of a normal value
    u32 min_exponent;  // biased source exponent of the target's smallest normal value
    u32 max_code;
    u32 beyond;     // the code, without sign, of what is too large
    u32 sign_shift; // position of the sign in a code
    u32 is_unsigned;
    u32 negative; // the code of a value below zero in an unsigned format
    u32 code_1;   // the source word of code 1, below which a format without zero halves its spacing; 0 elsewhere
    u32 nan;
    u32 nan_sign; // whether NaN has a sign
    u32 payload;  // mask of the NaN payload that is kept
    u32 unit;     // f32 bits of what takes the smallest normal value to that of f32, 2^(1 - min_exponent)
};

#define F32_INFINITY 0x7F800000u
#define CANONICAL_NAN 0x7FC00000u

// |x| in units where the target's subnormals are those of f32: then every value has its code above 23 - P dropped bits, and
// noise of as many bits, the top ones of `r`, is added to them. Subnormals lose what lies below them, and `r` its low bits:
// together less than two units, so that only a sum of ones throughout is in doubt.
template <int P> FN u32 scaled_sum(const Target &t, float x, u32 r, u32 &doubt) {
    u32 sum = bits_of(product_down(fabsf(x), float_of(t.unit))) + (r >> (9 + P));
    doubt |= sum ^ (sum + 1);
    return sum;
}

// How a value between two neighbours picks one.
struct NearestEven {
    static const int bits = 0;
    // Whether frac/2^32 goes up; `tiny` is floor(d 2^33) where more than 32 bits are dropped. `r` is the draw.
    FN_MEMBER bool up(u32 r, u32 frac, u32 tiny, u32 odd) { return frac + odd > 1u << 31; }
    // What is added to the bits of an f32 so that a carry out of the low 16 is "up".
    FN_MEMBER u32 addend(u32 r, u32 odd) { return 0x7FFF + odd; }
    // |x| in units where the target's subnormals are those of f32, on the target's grid.
    template <int P> FN_MEMBER u32 scaled(const Target &t, float x, u32 r, u32 &doubt) {
        // 2^(23 - P) times the power of two below |x| has the grid of |x| as its ulp, and so has its sum with |x|.
        u32 above = bits_of(x) & F32_INFINITY;
        u32 start = t.min_exponent << 23;
        float power = float_of(above > start ? above : start) * (float)(1 << (23 - P));
        return bits_of(((fabsf(x) + power) - power) * float_of(t.unit));
    }
};
struct Draws16 {
    static const int bits = 16;
    FN_MEMBER bool up(u32 r, u32 frac, u32 tiny, u32 odd) { return (r ^ 0xFFFF) < ((frac >> 15 | tiny >> 16) + 1) >> 1; }
    FN_MEMBER u32 addend(u32 r, u32 odd) { return r; }
    template <int P> FN_MEMBER u32 scaled(const Target &t, float x, u32 r, u32 &doubt) {
        return scaled_sum<P>(t, x, r << 16 | 0x8000, doubt);
    }
};
struct Draws32 {
    static const int bits = 32;
    FN_MEMBER bool up(u32 r, u32 frac, u32 tiny, u32 odd) { return ~r < (frac | (tiny + 1) >> 1); }
    FN_MEMBER u32 addend(u32 r, u32 odd) { return r >> 16; }
    template <int P> FN_MEMBER u32 scaled(const Target &t, float x, u32 r, u32 &doubt) {
        return scaled_sum<P>(t, x, r, doubt);
    }
};

// Shifts of which a count of 32 or more leaves nothing.
FN u32 shift_left(u32 x, u32 count) { return count < 32 ? x << count : 0; }
FN u32 shift_right(u32 x, u32 count) { return count < 32 ? x >> count : 0; }

// The code of the f32 with these bits.
template <class D> FN u32 code(const Target &t, u32 bits, u32 draw) {
    u32 magnitude = bits & 0x7FFFFFFF;
    u32 sign = bits >> 31;

    // |x| = significand * 2^(exponent - 150), subnormals with exponent 1 and no hidden bit.
    u32 field = magnitude >> 23;
    u32 exponent = field > 1 ? field : 1;
    u32 significand = magnitude - ((exponent - 1) << 23);

    // Dropped bits grow below the target's normal range, and shrink by one below code 1 without a zero.
    u32 below_code_1 = magnitude < t.code_1;
    u32 above = exponent > t.min_exponent ? exponent : t.min_exponent;
    u32 shift = t.drop + (above - exponent) - below_code_1;
    u32 whole = shift_right(significand, shift);
    u32 outer = whole > below_code_1 ? whole : below_code_1;
    u32 floor = ((above - t.min_exponent) << t.fraction_bits) + outer - below_code_1;
    u32 frac = shift_left(significand, 32 - shift);
    u32 tiny = shift_right(significand, shift - 33);
    u32 up = D::up(draw, frac, tiny, floor & 1) && whole >= below_code_1;
    u32 result = floor + up;

    bool too_large = result > t.max_code || magnitude >= F32_INFINITY;
    result = too_large ? t.beyond : result;
    u32 below_zero = sign & t.is_unsigned & (u32)(magnitude != 0);
    result |= (sign & (t.is_unsigned ^ 1)) << t.sign_shift;
    result = below_zero ? t.negative : result;
    u32 nan = t.nan | ((magnitude >> t.drop) & t.payload) | (sign & t.nan_sign) << t.sign_shift;
    return magnitude > F32_INFINITY ? nan : result;
}

// Codes, without sign and with 23 - P dropped bits still below them, of four elements for a target with a zero, P > 0 fraction
// bits and negatives that become 0, if it is unsigned. False, and no codes, where an element is too large or not finite, or
// its decision in doubt: `code` is for those.
template <class D, int P> FN bool codes_plain(const Target &t, const u32 (&bits)[4], const u32 (&draw)[4], u32 (&result)[4]) {
    u32 doubt = 0, largest = 0;
    UNROLL for (int i = 0; i < 4; i++) {
        result[i] = D::template scaled<P>(t, float_of(bits[i]), draw[i], doubt);
        largest = largest > result[i] ? largest : result[i];
    }
    return doubt >> (23 - P) == 0 && largest < (t.max_code + 1) << (23 - P);
}

// BF16, unscaled: at every exponent the dropped bits are the low 16 of the word.
template <class D> FN u32 code_bf16(u32 beyond, u32 bits, u32 draw) {
    u32 magnitude = bits & 0x7FFFFFFF;
    u32 sign = (bits >> 16) & 0x8000;
    u32 result = (magnitude + D::addend(draw, (bits >> 16) & 1)) >> 16;
    result = result >= 0x7F80 ? beyond : result;
    result = magnitude > F32_INFINITY ? (magnitude >> 16 | 0x40) : result;
    return result | sign;
}

// FP16 with infinities, as a step stores it.
template <class D> FN u32 code_fp16(u32 bits, u32 draw) {
    const Target fp16 = {10, 13, 113, 0x7BFF, 0x7C00, 15, 0, 0, 0, 0x7E00, 1, 0x3FF, 0x07800000};
    return code<D>(fp16, bits, draw);
}

// Exact f32 bits of stored values; a NaN keeps sign and payload.
FN u32 widen_bf16(u32 half) { return half << 16; }
FN u32 widen_fp16(u32 half) {
    u32 magnitude = half & 0x7FFF;
    u32 bits;
    if (magnitude >= 0x7C00) {
        bits = magnitude << 13 | F32_INFINITY;
    } else if (magnitude >= 0x0400) {
        bits = (magnitude << 13) + (112u << 23);
    } else {
        // Subnormal: its magnitude in units of 2^-24, exactly.
        bits = bits_of((float)magnitude * float_of(103u << 23));
    }
    return bits | (half & 0x8000) << 16;
}
