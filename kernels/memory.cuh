// Memory of one thread: consecutive elements of 32 or 16 bits in words, or one element at a time.
#pragma once
#include "round.cuh"

// Word i of quads.
template <int QUADS, int WORDS> FN u32 &at(u32 (&w)[QUADS][WORDS], int i) { return w[i / WORDS][i % WORDS]; }
template <int QUADS, int WORDS> FN u32 at(const u32 (&w)[QUADS][WORDS], int i) { return w[i / WORDS][i % WORDS]; }

// Copies QUADS * WORDS words, 16 or 8 bytes at a time, between memory aligned to that and registers.
template <int QUADS, int WORDS> FN void load(u32 (&w)[QUADS][WORDS], const void *from) {
    const int n = QUADS * WORDS;
    UNROLL for (int i = 0; i < n; i += 4) {
        if (n % 4 == 0) {
            uint4 q = ((const uint4 *)from)[i / 4];
            at(w, i) = q.x, at(w, i + 1) = q.y, at(w, i + 2) = q.z, at(w, i + 3) = q.w;
        } else {
            uint2 q = *(const uint2 *)from;
            at(w, i) = q.x, at(w, i + 1) = q.y;
        }
    }
}

template <int QUADS, int WORDS> FN void store(void *to, const u32 (&w)[QUADS][WORDS]) {
    const int n = QUADS * WORDS;
    UNROLL for (int i = 0; i < n; i += 4) {
        if (n % 4 == 0) {
            ((uint4 *)to)[i / 4] = make_uint4(at(w, i), at(w, i + 1), at(w, i + 2), at(w, i + 3));
        } else {
            *(uint2 *)to = make_uint2(at(w, i), at(w, i + 1));
        }
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
