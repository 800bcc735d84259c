// Memory of one thread: N consecutive elements of 32 or 16 bits in 16-byte words, or one element at a time.
#pragma once
#include "round.cuh"

// Copies 4 * WORDS bytes between aligned memory and registers.
template <int WORDS> FN void load(u32 (&w)[WORDS], const void *from) {
    const uint4 *p = (const uint4 *)from;
#pragma unroll
    for (int i = 0; i < WORDS / 4; i++) {
        uint4 q = p[i];
        w[4 * i] = q.x, w[4 * i + 1] = q.y, w[4 * i + 2] = q.z, w[4 * i + 3] = q.w;
    }
}

template <int WORDS> FN void store(void *to, const u32 (&w)[WORDS]) {
    if (WORDS % 4 == 0) {
        uint4 *p = (uint4 *)to;
#pragma unroll
        for (int i = 0; i < WORDS / 4; i++) p[i] = make_uint4(w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]);
    } else if (WORDS % 2 == 0) {
        uint2 *p = (uint2 *)to;
#pragma unroll
        for (int i = 0; i < WORDS / 2; i++) p[i] = make_uint2(w[2 * i], w[2 * i + 1]);
    } else {
        u32 *p = (u32 *)to;
#pragma unroll
        for (int i = 0; i < WORDS; i++) p[i] = w[i];
    }
}

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
