// Square roots and quotients for element rules: those of the language, and the same values by a sequence without a branch.
//
// `Written` divides and takes roots as IEEE 754 has it. `Seeded` refines what the hardware approximates, so that many elements are
// under way at once, and says where that may not be the same: where `covers` and `doubt` allow it and the result is not NaN, it is the
// correctly rounded one for any seed within the errors below but where an operand has one of four significands. Whether the seeds
// of a device do for those, too, `seeds_hold` asks once (prepare.cu). Checked for every significand and every seed in
// src/cuda/host_tests.rs.
#pragma once
#include "common.cuh"

// Approximations of 1 / sqrt(x), to 2^-22.9 of it, and of 1 / x, to 2^-23 of the power of two below x inverted [PTX ISA, rsqrt and
// rcp]; and of sqrt(x), to 2^-23 of it, for bounds.cuh. Operand and result are normal numbers wherever they are used: there is nothing to flush.
#ifdef __CUDACC__
FN float inverse_root_seed(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
FN float inverse_seed(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
FN float root_seed(float x) {
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#else
// Every fourth one is a unit in the last place off, so that nothing relies on a good seed; the significands that `seed_holds` asks
// for are spared.
FN float off(float y, float x) { return float_of(bits_of(y) - (~bits_of(x) >> 4 & bits_of(y) >> 22 & 1)); }
FN float inverse_root_seed(float x) { return off((float)(1.0 / sqrt((double)x)), x); }
FN float inverse_seed(float x) { return off(1.0f / x, x); }
FN float root_seed(float x) { return off(sqrtf(x), x); }
#endif

// sqrt(x) from 1 / sqrt(x): one step of Newton's method, whose residual is exact from 2^-100 up.
FN float root_from(float x, float seed) {
    const float root = x * seed;
    return fmaf(fmaf(-root, root, x), 0.5f * seed, root);
}

// a / b from 1 / b. The inverse becomes the nearest f32, and with it one exact remainder makes the quotient the nearest one
// [Markstein, Computation of elementary functions on the IBM RISC System/6000 processor, theorem 7.1: the quotient before is one of the
// two f32 around a / b wherever that is near their middle]. The remainder has its sign turned: that is how zeros keep theirs.
FN float inverse_from(float b, float seed) { return fmaf(seed, fmaf(-b, seed, 1.0f), seed); }
FN float quotient_from(float a, float b, float seed) {
    const float inverse = inverse_from(b, seed);
    const float quotient = a * inverse;
    return fmaf(fmaf(b, quotient, -a), -inverse, quotient);
}

// What rules take roots and divide with: sqrt(x) * factor + addend, rounded twice, and a / b, where b is such a sum.
struct Written {
    FN_METHOD float root_scaled(float x, float factor, float addend) { return fmaf(sqrtf(x), factor, addend); }
    FN_METHOD float quotient(float a, float b) { return a / b; }
};

// The same where `covers` says so and nothing asked was in `doubt`. NaN, for which whoever asks looks, where a quotient overflows on the
// way, and where a root is asked of what it is not for: with ANY that is x that is negative, 2^64 or more, or NaN; without it, which
// takes less, x must lie from 2^-100 to 2^64, which is for the caller to see to.
template <bool ANY> struct SeededRoots {
    float smallest = 0x1p127f; // of the numerators' magnitudes

    FN_MEMBER bool covers(float factor, float addend) { return factor <= 0x1p10f && addend >= 0x1p-60f && addend <= 0x1p40f; }
    // Numerators from 2^-75 up, or 0: divisors are at most 2^43, so that quotients are normal numbers and remainders exact.
    FN_MEMBER bool fair(float a) { return a == 0 || fabsf(a) >= 0x1p-75f; }
    // Whether a numerator may not be fair: it is not, or it is 0.
    FN_METHOD bool doubt() const { return !(smallest >= 0x1p-75f); }

    FN_METHOD float root_scaled(float x, float factor, float addend) {
        // Subnormals become normal, and zero a number that the addend does not feel. What is added is nothing to others.
        const float placed = ANY ? fmaf(x, 0x1p64f, 0x1p-126f) : x;
        return fmaf(root_from(placed, inverse_root_seed(placed)), ANY ? factor * 0x1p-32f : factor, addend);
    }
    FN_METHOD float quotient(float a, float b) {
        smallest = fminf(smallest, fabsf(a));
        return quotient_from(a, b, inverse_seed(b));
    }
};
typedef SeededRoots<true> Seeded;
typedef SeededRoots<false> SeededNormal;
#define LEAST_NORMAL 0x1p-100f
#define BEYOND_NORMAL 0x1p64f

// Whether the seeds of this device do for the significands that not every seed does for, with any exponent: of sqrt(x) two, and of
// 1 / b two. i counts from 0 to 2^10.
FN bool seed_holds(u32 i) {
    const u32 exponent = i / 4 << 23;
    if (exponent == 0 || exponent >= 255u << 23) return true;
    const float x = float_of(exponent | (i % 2 ? 0x7C114Au : 0x6E9372u)), b = float_of(exponent | (i % 2 ? 0x7FFFFDu : 0x7FFFFFu));
    if (i % 4 < 2) return exponent < 27u << 23 || root_from(x, inverse_root_seed(x)) == sqrtf(x);
    return exponent < 60u << 23 || exponent > 180u << 23 || inverse_from(b, inverse_seed(b)) == 1.0f / b;
}
