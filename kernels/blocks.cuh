// Moments in blocks that share a scale, beside src/optim/store.rs: decoding, the scale of a block, encoding. For one format at a
// time under powers of two, and then for any.
//
// A code is handled as the f32 whose exponent and fraction are its own: it stands for the value in units in which the
// smallest normal value of the element format is that of f32. Between a value and that lies one multiplication by a power
// of two, and codes are cut off above 23 - P dropped bits, after noise was added to those.
#pragma once
#include "random.cuh"
#include "round.cuh"
#include "scaled.cuh"

// An element format: exponent and fraction bits, bias, whether it has a sign and a zero, the code of its largest value.
template <int E_, int P_, int BIAS_, bool SIGNED_, bool ZERO_, u32 MAX_> struct BlockElement {
    static const int E = E_, P = P_, BIAS = BIAS_, BITS = E_ + P_ + SIGNED_;
    static const bool SIGNED = SIGNED_, ZERO = ZERO_;
    static const u32 MAX = MAX_;
    static const u32 MAGNITUDE = (1u << (E_ + P_)) - 1;
    // Exponent and fraction of the largest value, as of an f32.
    static const int MAX_EXPONENT = (int)(MAX_ >> P_) - BIAS_;
    static const u32 MAX_FRACTION = (MAX_ & ((1u << P_) - 1)) << (23 - P_);
    // Code 1 as the f32 of its exponent and fraction.
    static const u32 ONE = 1u << (23 - P_);
};
typedef BlockElement<4, 3, 7, true, true, 0x7E> E4M3;
typedef BlockElement<5, 2, 15, true, true, 0x7B> E5M2;
typedef BlockElement<5, 3, 15, false, true, 0xFE> UE5M3;
typedef BlockElement<4, 4, 7, false, true, 0xFE> UE4M4;
typedef BlockElement<2, 1, 1, true, true, 7> E2M1;
typedef BlockElement<2, 2, 1, false, false, 15> UE2M2Nz;

#define NAN_SCALE 0xFFu

// Moments may be held in units of a block's own, 2^(unit - UNIT), as far as they are normal numbers then; in that of UNIT they are themselves.
#define UNIT 107u

// The E8M0 code of the scale of a block whose largest magnitude has these f32 bits: 2^k with k the smallest integer with
// amax <= max 2^k, at least -126; NaN if not all of the block is finite, where that is not known to be.
template <class T, bool FINITE = false> FN u32 scale_code(u32 amax, u32 unit = UNIT) {
    // The sum carries into the exponent where the fraction is above that of max.
    int code = (int)((amax + (0x7FFFFF - T::MAX_FRACTION)) >> 23) + ((int)unit - (int)UNIT - T::MAX_EXPONENT);
    code = code > 1 ? code : 1;
    return FINITE || amax < F32_INFINITY ? (u32)code : NAN_SCALE;
}

// 2^k of k + 127 from -22 to 254: subnormal from 0 down; 0 below.
FN float power_of_two(int exponent) { return float_of(exponent > 0 ? (u32)exponent << 23 : bit(22 + exponent)); }

// Code i of a word, as the f32 of its exponent and fraction.
template <class T> FN float placed(u32 word, int i) {
    u32 bits;
    if (T::SIGNED) {
        bits = (u32)((int)(word << (32 - T::BITS * (i + 1))) >> (8 - T::E)) & (0x80000000u | T::MAGNITUDE << (23 - T::P));
    } else {
        const u32 there = word & T::MAGNITUDE << T::BITS * i;
        const int left = 23 - T::P - T::BITS * i;
        bits = left > 0 ? there << left : there >> -left;
    }
    // Code 0 of a format without zero is half of code 1.
    return float_of(T::ZERO || bits > T::ONE / 2 ? bits : T::ONE / 2);
}

// Blocks less than BIAS beyond the scale 1 are near: one factor, a normal number as its inverse is, takes codes to values, and its
// inverse takes values to codes. In other units others are.
template <class T> FN bool is_near(u32 scale, u32 unit = UNIT) { return scale < 127u + T::BIAS + unit - UNIT; }
struct Near {
    float encode, decode;
};
template <class T> FN Near near_unit(u32 scale, u32 unit = UNIT) {
    const u32 up = 127u + T::BIAS + unit - UNIT - scale;
    Near n = {float_of(up << 23), float_of((254 - up) << 23)};
    return n;
}

// Below code 1 of a format without zero a ulp is half as long, and begins at code 0; what lies below that is code 0. f32 has a
// subnormal number for each multiple of its ulp there, so that both differences are exact.
template <class T> FN float folded(float x) { return T::ZERO ? x : saturated(x - saturated(float_of(T::ONE) - x)); }

// |x| as a word whose highest byte is its code, with what is dropped below and what goes up carried into it. What of the word lies
// above the code is zero.
template <class D> struct Carried;
template <> struct Carried<Draws16> {
    // Where a word's draw belongs, and below it MIDDLE.
    FN_MEMBER u32 noise(const Word &w, int i, u32 middle) { return byte_perm(i & 2 ? w.x1 : w.x0, middle, i & 1 ? 0x5324 : 0x5104); }
    template <class T> FN_MEMBER u32 bits(float x, Near n, u32 noise) {
        // Cut off toward zero, the product lies in the same of the 2^17 parts of a ulp: 23 - P bits are more than 17.
        return (bits_of(folded<T>(product_down(fabsf(x), n.encode))) << (1 + T::P)) + noise;
    }
};
template <> struct Carried<NearestEven> {
    FN_MEMBER u32 noise(const Word &, int, u32) { return 0; }
    template <class T> FN_MEMBER u32 bits(float x, Near n, u32) {
        // What is cut off is told by an odd last bit.
        float y = product_down(fabsf(x), n.encode);
        u32 bits = bits_of(folded<T>(y)) | (u32)(y * n.decode != fabsf(x));
        return (bits + (T::ONE / 2 - 1) + (bits >> (23 - T::P) & 1)) << (1 + T::P);
    }
};

// The magnitude's code of x in the highest byte, with anything below it, and in its highest bit the sign.
template <class T, class D> FN u32 code_near(float x, Near n, u32 noise) {
    u32 bits = Carried<D>::template bits<T>(x, n, noise);
    // No carry reaches the sign: |x| is at most the largest value.
    if (T::SIGNED) bits |= bits_of(x) & 0x80000000u;
    return bits;
}

// A word of codes from the highest bytes of words, the first lowest.
template <int STRIDE> FN u32 highest_bytes(const u32 *c) {
    return byte_perm(byte_perm(c[0], c[STRIDE], 0x73), byte_perm(c[2 * STRIDE], c[3 * STRIDE], 0x73), 0x5410);
}
FN u32 select(u32 a, u32 b, u32 bits_of_a) { return (a & bits_of_a) | (b & ~bits_of_a); }
template <class T> FN u32 packed(const u32 (&c)[32 / T::BITS]) {
    if constexpr (T::BITS == 8) {
        return highest_bytes<1>(c);
    } else {
        const u32 even = highest_bytes<2>(c), odd = highest_bytes<2>(c + 1);
        if (!T::SIGNED) return even + (odd << 4);
        // Signs of even codes go down to their nibble, magnitudes of odd ones up.
        return select(select(even >> 4, even, 0x08080808), select(odd << 4, odd, 0x70707070), 0x0F0F0F0F);
    }
}

// Codes of second moments above zero, 8 bits each, with 1 for every 0: a borrow reaches nothing but a 1.
FN u32 above_zero(u32 codes) { return codes | ((codes - 0x01010101u) & ~codes & 0x80808080u) >> 7; }

// How a moment is stored, for code that takes any format.
struct Moment {
    u32 kind;          // 0: f32, 1: BF16, 2: blocks under a power of two, 3: blocks under an f32
    u32 fraction_bits; // of an element
    u32 bias;
    u32 floor; // the smallest code of what is above zero
    u32 log_block; // log2 of the elements of a block; of the larger one if there are none
    Target target;
    double max; // the largest value of an element
    Wide wide;
};

// For any scale; and, where MIXED, for f32 scales. First, the value of a code.
template <bool MIXED> FN float any_value(const Moment &m, u32 scale, u32 code) {
    u32 sign = m.target.is_unsigned ? 0 : code >> m.target.sign_shift;
    u32 bits = (code & ~(sign << m.target.sign_shift)) << (23 - m.fraction_bits);
    u32 half = 1u << (22 - m.fraction_bits);
    // Code 0 of a format without zero is half of code 1.
    bits = m.target.code_1 && bits < half ? half : bits;
    float placed = float_of(bits | sign << 31);
    // The first product is exact.
    if (MIXED && m.kind == 3) return placed * two_to(127 - (int)m.bias) * float_of(scale);
    int exponent = (int)scale + 127 - (int)m.bias;
    int beyond = exponent > 254 ? exponent - 254 : 0;
    float value = placed * power_of_two(exponent - beyond) * power_of_two(127 + beyond);
    return scale == NAN_SCALE ? float_of(CANONICAL_NAN) : value;
}

// The scale of a block as it is stored.
template <bool MIXED> FN u32 any_scale(const Moment &m, u32 amax) {
    bool finite = amax < F32_INFINITY;
    if (MIXED && m.kind == 3) return finite ? bits_of(quotient_up((double)float_of(amax), m.max)) : CANONICAL_NAN;
    u32 max = m.target.max_code;
    u32 max_fraction = (max & ((1u << m.fraction_bits) - 1)) << (23 - m.fraction_bits);
    int code = (int)((amax + (0x7FFFFF - max_fraction)) >> 23) - ((int)(max >> m.fraction_bits) - (int)m.bias);
    code = code > 1 ? code : 1;
    return finite ? (u32)code : NAN_SCALE;
}

template <bool MIXED> FN u32 any_code(const Moment &m, u32 scale, float x, bool draws, u32 draw, bool floored = true) {
    u32 result;
    if (MIXED && m.kind == 3) {
        if (scale == CANONICAL_NAN) return 0;
        double quotient = (double)x / (double)float_of(scale);
        result = draws ? wide_code<Draws16>(m.wide, quotient, draw) : wide_code<NearestEven>(m.wide, quotient, 0);
    } else {
        // Exact, but for what is too far below the smallest value to be rounded up.
        u32 bits = bits_of(x * power_of_two(254 - (int)scale));
        result = draws ? code<Draws16>(m.target, bits, draw) : code<NearestEven>(m.target, bits, 0);
    }
    result = floored && x > 0.0f && result < m.floor ? m.floor : result;
    return (!MIXED || m.kind == 2) && scale == NAN_SCALE ? 0 : result;
}
