// The CUDA execution model on the host: kernels compile as C++ and run, bit for bit what a GPU makes of them, checked.
//
//   g++ -shared -fPIC -O1 -std=c++17 -ffp-contract=off -fsanitize=thread,undefined -x c++ -include kernels/emulation/emulate.hpp
//       -DSOURCE_ADAM kernels/step.cu ...                                                          (src/cuda/emulated.rs)
//
// Blocks run one after another, in any order that is asked for; threads of a block are fibers, which run until they end or wait at a
// barrier or a collective of their warp. This file has what kernels call; emulate.cpp runs them, and sees every access of theirs to
// memory: the compiler's calls for a race detector (`-fsanitize=thread`) and for undefined behaviour are answered there. An access
// outside what a launch was given, a write to what is only read, a vector that is not aligned, two accesses that nothing orders, a
// barrier or collective that not all take part in, a shift too far: an error that names block and thread.
//
// Ordered are accesses of one block with a barrier between them, of one warp with a collective between them, and, after an
// atomic operation on global memory, those to what blocks wrote that came to a __threadfence, before it or after. Of the reads
// of a byte the last two are known. Shared memory starts as rubbish; it is that of kernels and plain functions, since a compiler
// puts that of templates elsewhere, where every access is an error. There is no dynamic shared memory, no second or third
// dimension, no `__device__` variable, and no waiting for another block.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

// `extern "C" __global__ void __launch_bounds__(128) kernel(const __grid_constant__ Arguments a)`: one struct, by value.
#define __global__ __attribute__((visibility("default")))
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static __attribute__((section("emulated_shared")))
#define __align__(n) __attribute__((aligned(n)))

struct uint2 { uint32_t x, y; } __attribute__((aligned(8)));
struct uint3 { uint32_t x, y, z; };
struct uint4 { uint32_t x, y, z, w; } __attribute__((aligned(16)));
struct float2 { float x, y; } __attribute__((aligned(8)));
struct float4 { float x, y, z, w; } __attribute__((aligned(16)));
struct double2 { double x, y; } __attribute__((aligned(16)));
static inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline double2 make_double2(double x, double y) { return {x, y}; }

// To a thread its own indices are constants; emulate.cpp sets them where threads take turns.
#ifndef EMULATION
#define EMULATED_INDEX extern const
#else
#define EMULATED_INDEX extern
#endif
EMULATED_INDEX uint3 threadIdx, blockIdx, blockDim, gridDim;
static const int warpSize = 32;

namespace emulated {
enum Collective : uint32_t {
    SYNC, SHUFFLE, SHUFFLE_UP, SHUFFLE_DOWN, SHUFFLE_XOR, BALLOT, SUM, MIN, MAX, SIGNED_MIN, SIGNED_MAX, AND, OR, XOR
};
// Waits for the lanes of the mask, and gives this lane's part.
uint64_t collective(Collective kind, uint32_t mask, uint64_t value, uint32_t argument = 0, uint32_t width = 32);
// Waits for all threads of the block; the number of them for which `vote` is set.
uint32_t barrier(uint32_t vote);
void fence();
// Before and after an atomic operation.
void atomic(const volatile void *at, uint32_t bytes);

template <class T> struct Same { typedef T Type; };
template <class T> uint64_t word(T x) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle takes 4 or 8 bytes");
    uint64_t word = 0;
    std::memcpy(&word, &x, sizeof x);
    return word;
}
template <class T> T shuffle(Collective kind, uint32_t mask, T x, uint32_t argument, int width) {
    uint64_t result = collective(kind, mask, word(x), argument, width);
    std::memcpy(&x, &result, sizeof x);
    return x;
}
template <class T, class F> __attribute__((no_sanitize("thread"), noinline)) T exchange(volatile T *at, F change) {
    atomic(at, sizeof(T));
    T old = *at;
    *at = change(old);
    return old;
}
} // namespace emulated

static inline void __syncthreads() { emulated::barrier(0); }
static inline int __syncthreads_count(int vote) { return emulated::barrier(vote != 0); }
static inline int __syncthreads_or(int vote) { return emulated::barrier(vote != 0) != 0; }
static inline int __syncthreads_and(int vote) { return emulated::barrier(vote != 0) == blockDim.x; }
static inline void __syncwarp(uint32_t mask = 0xFFFFFFFF) { emulated::collective(emulated::SYNC, mask, 0); }
static inline void __threadfence() { emulated::fence(); }
static inline void __threadfence_block() {}

template <class T> T __shfl_sync(uint32_t mask, T x, int lane, int width = 32) {
    return emulated::shuffle(emulated::SHUFFLE, mask, x, lane, width);
}
template <class T> T __shfl_up_sync(uint32_t mask, T x, uint32_t far, int width = 32) {
    return emulated::shuffle(emulated::SHUFFLE_UP, mask, x, far, width);
}
template <class T> T __shfl_down_sync(uint32_t mask, T x, uint32_t far, int width = 32) {
    return emulated::shuffle(emulated::SHUFFLE_DOWN, mask, x, far, width);
}
template <class T> T __shfl_xor_sync(uint32_t mask, T x, int far, int width = 32) {
    return emulated::shuffle(emulated::SHUFFLE_XOR, mask, x, far, width);
}
static inline uint32_t __ballot_sync(uint32_t mask, int vote) { return emulated::collective(emulated::BALLOT, mask, vote != 0); }
static inline int __all_sync(uint32_t mask, int vote) { return __ballot_sync(mask, vote) == mask; }
static inline int __any_sync(uint32_t mask, int vote) { return __ballot_sync(mask, vote) != 0; }
#define EMULATED_REDUCE(name, type, kind)                                                                              \
    static inline type name(uint32_t mask, type x) { return (type)emulated::collective(emulated::kind, mask, (uint32_t)x); }
EMULATED_REDUCE(__reduce_add_sync, uint32_t, SUM)
EMULATED_REDUCE(__reduce_add_sync, int, SUM)
EMULATED_REDUCE(__reduce_min_sync, uint32_t, MIN)
EMULATED_REDUCE(__reduce_min_sync, int, SIGNED_MIN)
EMULATED_REDUCE(__reduce_max_sync, uint32_t, MAX)
EMULATED_REDUCE(__reduce_max_sync, int, SIGNED_MAX)
EMULATED_REDUCE(__reduce_and_sync, uint32_t, AND)
EMULATED_REDUCE(__reduce_or_sync, uint32_t, OR)
EMULATED_REDUCE(__reduce_xor_sync, uint32_t, XOR)

#define EMULATED_ATOMIC(name, expression)                                                                              \
    template <class T> T name(T *at, typename emulated::Same<T>::Type x) {                                             \
        return emulated::exchange(at, [x](T old) -> T { return expression; });                                         \
    }
EMULATED_ATOMIC(atomicAdd, old + x)
EMULATED_ATOMIC(atomicSub, old - x)
EMULATED_ATOMIC(atomicOr, old | x)
EMULATED_ATOMIC(atomicAnd, old & x)
EMULATED_ATOMIC(atomicXor, old ^ x)
EMULATED_ATOMIC(atomicMin, x < old ? x : old)
EMULATED_ATOMIC(atomicMax, x > old ? x : old)
EMULATED_ATOMIC(atomicExch, ((void)old, x))
EMULATED_ATOMIC(atomicInc, old >= x ? 0 : old + 1)
template <class T> T atomicCAS(T *at, typename emulated::Same<T>::Type compare, typename emulated::Same<T>::Type x) {
    return emulated::exchange(at, [=](T old) -> T { return old == compare ? x : old; });
}

static inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint32_t)((uint64_t)a * b >> 32); }
static inline uint64_t __umul64hi(uint64_t a, uint64_t b) { return (uint64_t)((unsigned __int128)a * b >> 64); }
static inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t count) {
    return (uint32_t)(((uint64_t)high << 32 | low) << (count & 31) >> 32);
}
static inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t count) {
    return (uint32_t)(((uint64_t)high << 32 | low) >> (count & 31));
}
static inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
    const uint64_t bytes = (uint64_t)y << 32 | x;
    uint32_t result = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t pick = selector >> (4 * i) & 15;
        uint32_t byte = (uint32_t)(bytes >> (8 * (pick & 7))) & 0xFF;
        // With its highest bit set a selector takes a byte's sign alone.
        if (pick & 8) byte = byte & 0x80 ? 0xFF : 0;
        result |= byte << (8 * i);
    }
    return result;
}
static inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
    uint32_t low = (a & 0xFFFF) > (b & 0xFFFF) ? a & 0xFFFF : b & 0xFFFF, high = a >> 16 > b >> 16 ? a >> 16 : b >> 16;
    return high << 16 | low;
}
static inline uint32_t __vminu2(uint32_t a, uint32_t b) { return ~__vmaxu2(~a, ~b); }
static inline int __popc(uint32_t x) { return __builtin_popcount(x); }
static inline int __popcll(uint64_t x) { return __builtin_popcountll(x); }
static inline int __clz(uint32_t x) { return x ? __builtin_clz(x) : 32; }
static inline int __clzll(uint64_t x) { return x ? __builtin_clzll(x) : 64; }
static inline int __ffs(uint32_t x) { return __builtin_ffs((int)x); }

static inline float __uint_as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static inline uint32_t __float_as_uint(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }
static inline double __longlong_as_double(long long bits) { double x; std::memcpy(&x, &bits, 8); return x; }
static inline long long __double_as_longlong(double x) { long long bits; std::memcpy(&bits, &x, 8); return bits; }
template <class T> T __ldg(const T *at) { return *at; }
using std::max;
using std::min;

// Operations that name their rounding, to nearest.
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return std::sqrt(a); }
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dsub_rn(double a, double b) { return a - b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline double __dsqrt_rn(double a) { return std::sqrt(a); }
static inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
static inline float __double2float_rn(double a) { return (float)a; }
