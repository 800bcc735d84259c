// Memory of one thread: consecutive elements of 32 or 16 bits in words, or one element at a time.
#pragma once
#include "round.cuh"

// Copies N words, 16, 8 or 4 bytes at a time, between memory aligned to that and registers. No hint of streaming: on an H200 a
// step whose loads and stores are all evict-first takes 3.5 % longer, unless calls of another kernel lie between its own.
// Loads are where they are written: the compiler would sink them to their first use, one wait after another.
//
// All that is PTX in kernels is here, beside what stands for it on the host.
#ifdef __CUDACC__
template <int N> FN void load(u32 *w, const void *from) {
    UNROLL for (int i = 0; i < N; i += 4) {
        if (N % 4 == 0) {
            asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(w[i]), "=r"(w[i + 1]), "=r"(w[i + 2]), "=r"(w[i + 3])
                         : "l"((const uint4 *)from + i / 4));
        } else if (N == 2) {
            asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(w[i]), "=r"(w[i + 1]) : "l"(from));
        } else {
            asm volatile("ld.global.u32 %0, [%1];" : "=r"(w[i]) : "l"(from));
        }
    }
}
// A pointer that was read from memory could be one to shared memory, for all that the compiler knows: these write to global memory.
template <int N> FN void store(void *to, const u32 *w) {
    UNROLL for (int i = 0; i < N; i += 4) {
        if (N % 4 == 0) {
            asm volatile("st.global.v4.u32 [%4], {%0, %1, %2, %3};"
                         :: "r"(w[i]), "r"(w[i + 1]), "r"(w[i + 2]), "r"(w[i + 3]), "l"((uint4 *)to + i / 4));
        } else if (N == 2) {
            asm volatile("st.global.v2.u32 [%2], {%0, %1};" :: "r"(w[i]), "r"(w[i + 1]), "l"(to));
        } else {
            asm volatile("st.global.u32 [%1], %0;" :: "r"(w[i]), "l"(to));
        }
    }
}
FN u32 load_byte(const void *from) {
    u32 x;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(x) : "l"(from));
    return x;
}
FN void store_byte(void *to, u32 x) { asm volatile("st.global.u8 [%1], %0;" :: "r"(x), "l"(to)); }
// Into the L2 cache.
FN void prefetch(const void *at) { asm volatile("prefetch.global.L2 [%0];" :: "l"(at)); }
// Where shared memory is: one word.
typedef u32 SharedAddress;
FN SharedAddress address_of(const void *at) { return (u32)__cvta_generic_to_shared(at); }
// The same, kept in a register: the compiler would make it anew at each use.
FN SharedAddress kept(SharedAddress address) {
    asm volatile("" : "+r"(address));
    return address;
}
// A word that nobody looks at, so that a register need not keep the one before it.
FN u32 anything() {
    u32 x;
    asm("" : "=r"(x));
    return x;
}
// The other one of two neighbours of so many bytes, or for 0 bytes the same one.
FN SharedAddress beside(SharedAddress address, u32 bytes) { return address ^ bytes; }
// Begins to copy 8 or 16 bytes from global to shared memory. Copies that were begun are a group when that is said, and there when no more
// groups than so many are under way, for the thread that began them.
template <int BYTES> FN void begin_copy(SharedAddress address, const void *from) {
    if (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(address), "l"(from));
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" :: "r"(address), "l"(from));
    }
}
FN void end_group() { asm volatile("cp.async.commit_group;"); }
template <int GROUPS> FN void wait_for_groups() { asm volatile("cp.async.wait_group %0;" :: "n"(GROUPS)); }
// The two as one word, `low` in its lower half.
FN u32 bf16_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
// Of each half of the words: the larger one, of numbers below 0x7C00; and, in BF16, x times zero added to `sum`, which is a zero, or NaN.
FN u32 larger_halves(u32 a, u32 b) {
    u32 larger;
    asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}
FN u32 times_zero(u32 x, u32 sum) {
    u32 result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(0), "r"(sum));
    return result;
}
// Of each half of the words, as BF16: the smaller one of a magnitude and `least`, or NaN if one is.
FN u32 smaller_halves(u32 x, u32 least) {
    u32 result;
    asm("{.reg .b32 magnitude; abs.bf16x2 magnitude, %1; min.NaN.bf16x2 %0, magnitude, %2;}" : "=r"(result) : "r"(x), "r"(least));
    return result;
}
// Exact, and a NaN stays one.
FN u32 value_fp16(u32 code) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)code));
    return bits_of(x);
}
#else
template <int N> FN void load(u32 *w, const void *from) {
    for (int i = 0; i < N; i += 4) {
        if (N % 4 == 0) {
            uint4 x = ((const uint4 *)from)[i / 4];
            w[i] = x.x, w[i + 1] = x.y, w[i + 2] = x.z, w[i + 3] = x.w;
        } else if (N == 2) {
            uint2 x = *(const uint2 *)from;
            w[i] = x.x, w[i + 1] = x.y;
        } else {
            w[i] = *(const u32 *)from;
        }
    }
}
template <int N> FN void store(void *to, const u32 *w) {
    for (int i = 0; i < N; i += 4) {
        if (N % 4 == 0) {
            ((uint4 *)to)[i / 4] = make_uint4(w[i], w[i + 1], w[i + 2], w[i + 3]);
        } else if (N == 2) {
            *(uint2 *)to = make_uint2(w[i], w[i + 1]);
        } else {
            *(u32 *)to = w[i];
        }
    }
}
FN u32 load_byte(const void *from) { return *(const u8 *)from; }
FN void store_byte(void *to, u32 x) { *(u8 *)to = (u8)x; }
FN void prefetch(const void *) {}
typedef char *SharedAddress;
FN SharedAddress address_of(const void *at) { return (char *)at; }
template <class T> FN T kept(T x) { return x; }
FN u32 anything() { return 0; }
FN SharedAddress beside(SharedAddress address, u32 bytes) { return (SharedAddress)((size_t)address ^ bytes); }
template <int BYTES> FN void begin_copy(SharedAddress to, const void *from) {
    u32 w[BYTES / 4];
    load<BYTES / 4>(w, from), store<BYTES / 4>(to, w);
}
FN void end_group() {}
template <int GROUPS> FN void wait_for_groups() {}
FN u32 bf16_pair(float low, float high) {
    const u32 codes[2] = {code_bf16<NearestEven>(0x7F80, bits_of(low), 0), code_bf16<NearestEven>(0x7F80, bits_of(high), 0)};
    return (low != low ? 0x7FFF : codes[0]) | (high != high ? 0x7FFF : codes[1]) << 16;
}
FN u32 of_halves(u32 low, u32 high) { return low | high << 16; }
FN u32 larger_halves(u32 a, u32 b) { return of_halves(larger(a & 0xFFFF, b & 0xFFFF), larger(a >> 16, b >> 16)); }
FN u32 times_zero(u32 x, u32 sum) {
    const bool low = (x & 0x7F80) == 0x7F80, high = (x & 0x7F800000) == 0x7F800000;
    return sum | of_halves(low ? 0x7FFF : 0, high ? 0x7FFF : 0);
}
FN u32 smaller_half(u32 x, u32 least) { return x > 0x7F80 || least > 0x7F80 ? 0x7FFF : smaller(x, least); }
FN u32 smaller_halves(u32 x, u32 least) { return of_halves(smaller_half(x & 0x7FFF, least & 0xFFFF), smaller_half(x >> 16 & 0x7FFF, least >> 16)); }
FN u32 value_fp16(u32 code) { return widen_fp16(code); }
#endif

// Element types: their width, and their value as f32 bits.
struct F32 {
    static const int bytes = 4;
    typedef u32 Memory;
    FN_MEMBER u32 widen(u32 code) { return code; }
};
struct BF16 {
    static const int bytes = 2;
    typedef u16 Memory;
    FN_MEMBER u32 widen(u32 code) { return widen_bf16(code); }
};
struct FP16 {
    static const int bytes = 2;
    typedef u16 Memory;
    FN_MEMBER u32 widen(u32 code) { return widen_fp16(code); }
};

// Element i of words in registers, i known at compile time.
template <class T, int WORDS> FN u32 element(const u32 (&w)[WORDS], int i) {
    return T::bytes == 4 ? w[i] : (i & 1) ? w[i / 2] >> 16 : w[i / 2] & 0xFFFF;
}

// Replaces it.
template <class T, int WORDS> FN void replace(u32 (&w)[WORDS], int i, u32 code) {
    if (T::bytes == 4) {
        w[i] = code;
    } else {
        w[i / 2] = (i & 1) ? (w[i / 2] & 0xFFFF) | code << 16 : (w[i / 2] & 0xFFFF0000u) | code;
    }
}
