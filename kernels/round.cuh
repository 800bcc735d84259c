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
    u32 hidden;   // the hidden bit of an f32
};

#define F32_INFINITY 0x7F800000u
#define CANONICAL_NAN 0x7FC00000u

// How a value between two neighbours picks one.
struct NearestEven {
    static const int bits = 0;
    // Whether frac/2^32 goes up; `tiny` is floor(d 2^33) where more than 32 bits are dropped. `r` is the draw.
    FN_MEMBER bool up(u32 r, u32 frac, u32 tiny, u32 odd) { return frac + odd > 1u << 31; }
    // What is added to the bits of an f32 so that a carry out of the low 16 is "up".
    FN_MEMBER u32 addend(u32 r, u32 odd) { return 0x7FFF + odd; }
    // What is added to a significand so that a carry out of its low `shift` bits, at most 31, is "up".
    FN_MEMBER u32 below(u32 r, u32 significand, u32 shift) {
        return (1u << ((shift - 1) & 31)) - 1 + ((significand >> (shift & 31)) & 1);
    }
};
struct Draws16 {
    static const int bits = 16;
    FN_MEMBER bool up(u32 r, u32 frac, u32 tiny, u32 odd) { return (r ^ 0xFFFF) < ((frac >> 15 | tiny >> 16) + 1) >> 1; }
    FN_MEMBER u32 addend(u32 r, u32 odd) { return r; }
    FN_MEMBER u32 below(u32 r, u32 significand, u32 shift) { return high_shift(r << 16 | 0x8000, shift); }
};
struct Draws32 {
    static const int bits = 32;
    FN_MEMBER bool up(u32 r, u32 frac, u32 tiny, u32 odd) { return ~r < (frac | (tiny + 1) >> 1); }
    FN_MEMBER u32 addend(u32 r, u32 odd) { return r >> 16; }
    FN_MEMBER u32 below(u32 r, u32 significand, u32 shift) { return high_shift(r, shift); }
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

// Codes, without sign, of four elements for a target with a zero, P > 0 fraction bits, and a normal range that begins at
// 2^-103 or above and ends below that of f32. A draw as wide as the dropped bits is added below the significand and the sum
// cut, which is the rule of `code`; the few elements that drop more than 31 bits are decided by `up` itself. False, and no
// codes, where an element is too large or not finite: `code` is for those.
template <class D, int P> FN bool codes_plain(const Target &t, const u32 (&bits)[4], const u32 (&draw)[4], u32 (&result)[4]) {
    u32 most_dropped = 0, room = 0;
    u32 start = t.min_exponent << 23;
    u32 offset = t.min_exponent << P;
    u32 end = t.max_code + offset;
    u32 hidden = t.hidden; // a constant that is not one, so that it sits in a register and one instruction does both masks
    u32 shift[4], significand[4];
    UNROLL for (int i = 0; i < 4; i++) {
        u32 exponent = bits[i] & F32_INFINITY;
        u32 above = exponent > start ? exponent : start;
        shift[i] = 23 - P + ((above - exponent) >> 23);
        significand[i] = (bits[i] & 0x007FFFFF) | hidden;
        u32 sum = significand[i] + D::below(draw[i], significand[i], shift[i]);
        u32 code = (above >> (23 - P)) + (sum >> (shift[i] & 31));
        most_dropped |= shift[i];
        room |= end - code;
        result[i] = code - offset;
    }
    if (most_dropped > 31) {
        UNROLL for (int i = 0; i < 4; i++) {
            u32 frac = shift[i] == 32 ? significand[i] : 0;
            u32 tiny = shift_right(significand[i], shift[i] - 33);
            if (shift[i] > 31) result[i] = D::up(draw[i], frac, tiny, 0);
        }
        // Their codes, wrongly cut, may have looked too large.
        room = 0;
        UNROLL for (int i = 0; i < 4; i++) room |= t.max_code - result[i];
    }
    return room >> 31 == 0;
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
    const Target fp16 = {10, 13, 113, 0x7BFF, 0x7C00, 15, 0, 0, 0, 0x7E00, 1, 0x3FF, 0x00800000};
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
