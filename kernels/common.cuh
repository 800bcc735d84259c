// What every kernel file needs: integer types and function qualifiers, for the device and for the host.
//
// No header is included on the device, so that nvcc and NVRTC compile these files with no include path. On the host the
// same functions compile as plain C++ (with -ffp-contract=off), which is how they are tested without a GPU.
#pragma once

// `high_product` is the high half of a * b, `product_down` is a * b rounded toward zero, `sum_down` a + b of two that are not
// negative, `bit` 1 << count, which leaves nothing where the count is beyond a word, `byte_perm` four bytes of y:x by their numbers,
// the last first, `saturated` x within 0 and 1, NaN to 0.
#ifdef __CUDACC__
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define FN static __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")
#define FN_MEMBER static __device__ __forceinline__
#define FN_METHOD __device__ __forceinline__
FN float float_of(u32 bits) { return __uint_as_float(bits); }
FN u32 bits_of(float x) { return __float_as_uint(x); }
FN double double_of(u64 bits) { return __longlong_as_double((long long)bits); }
FN u64 bits_of(double x) { return (u64)__double_as_longlong(x); }
FN double sum_down(double a, double b) { return __dadd_rz(a, b); }
FN u32 high_product(u32 a, u32 b) { return __umulhi(a, b); }
FN float product_down(float a, float b) { return __fmul_rz(a, b); }
FN u32 bit(u32 count) { return 1u << count; }
FN u32 byte_perm(u32 x, u32 y, u32 selector) { return __byte_perm(x, y, selector); }
FN float saturated(float x) { return __saturatef(x); }
#else
#include <cmath>
#include <cstdlib>
#include <cstdint>
#include <cstring>
typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
#define FN static inline
#define UNROLL
#define NO_UNROLL
#define FN_MEMBER static inline
#define FN_METHOD inline
FN float float_of(u32 bits) { float x; std::memcpy(&x, &bits, 4); return x; }
FN u32 bits_of(float x) { u32 bits; std::memcpy(&bits, &x, 4); return bits; }
FN double double_of(u64 bits) { double x; std::memcpy(&x, &bits, 8); return x; }
FN u64 bits_of(double x) { u64 bits; std::memcpy(&bits, &x, 8); return bits; }
FN double sum_down(double a, double b) {
    double near = a + b, of_b = near - a;
    // Exactly what the sum lost.
    double lost = (a - (near - of_b)) + (b - of_b);
    return lost < 0 ? double_of(bits_of(near) - 1) : near;
}
FN u32 high_product(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
FN u32 bit(u32 count) { return count < 32 ? 1u << count : 0; }
FN u32 byte_perm(u32 x, u32 y, u32 selector) {
    const u64 bytes = (u64)y << 32 | x;
    u32 result = 0;
    for (int i = 0; i < 4; i++) result |= (u32)(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
    return result;
}
FN float saturated(float x) { return x > 0 ? x < 1 ? x : 1 : 0; }
FN float product_down(float a, float b) {
    // The product is exact in f64; a neighbour of it in f32 is one code away.
    double exact = (double)a * b;
    float near = (float)exact;
    return std::fabs((double)near) > std::fabs(exact) ? float_of(bits_of(near) - 1) : near;
}
#endif

FN u32 larger(u32 a, u32 b) { return a > b ? a : b; }
FN u32 smaller(u32 a, u32 b) { return a < b ? a : b; }
FN u32 larger_signed(u32 a, u32 b) { return (int)a > (int)b ? a : b; }
// Of what an operation gave: a GPU has one NaN, without a sign.
FN u32 bits_of_result(float x) {
#ifdef __CUDACC__
    return bits_of(x);
#else
    return x != x ? 0x7FFFFFFF : bits_of(x);
#endif
}
