// Values of blocks that share a scale, as f32, each rounded once.
//
// 1, 3/4 or 1/2 bytes an element in, and the scales; 4 out. Each thread takes eight consecutive elements. With `vector` set, the
// codes are aligned to those of a thread (2 bytes at 6 bits) and `y` to 16 bytes; else, and at the end, memory goes byte by byte
// and element by element. Element 0 starts a block. Any n.
#include "memory.cuh"
#include "scaled.cuh"

#define THREADS 128
#define EACH 8

struct Decode {
    const u8 *codes;
    const void *scales;
    const float *global;
    float *y;
    u64 n;
    u32 vector;
    u32 log_block;
    u32 rule;
    Decoder decoder;
};

template <int WIDTH> FN void decode(const Decode &d) {
    const u64 at = ((u64)blockIdx.x * THREADS + threadIdx.x) * EACH;
    if (at >= d.n) return;
    const bool whole = d.vector && at + EACH <= d.n;
    const u32 count = d.n - at < EACH ? (u32)(d.n - at) : EACH;
    const u8 *from = d.codes + at / 8 * WIDTH;
    u64 codes = 0;
    if (whole) {
        if (WIDTH == 8) {
            uint2 w = *(const uint2 *)from;
            codes = (u64)w.y << 32 | w.x;
        } else if (WIDTH == 4) {
            codes = *(const u32 *)from;
        } else {
            UNROLL for (int i = 0; i < 3; i++) codes |= (u64)((const u16 *)from)[i] << 16 * i;
        }
    } else {
        NO_UNROLL for (u32 i = 0; i < (count * WIDTH + 7) / 8; i++) codes |= (u64)from[i] << 8 * i;
    }
    const u64 b = at >> d.log_block;
    u32 stored = d.rule == RULE_AMAX ? ((const u32 *)d.scales)[b] : ((const u8 *)d.scales)[b];
    Factors f = factors(d.rule, stored, d.rule == RULE_NVFP4 ? *d.global : 1);
    u32 y[EACH];
    UNROLL for (int i = 0; i < EACH; i++) y[i] = decoded(d.decoder, (u32)(codes >> WIDTH * i) & ((1u << WIDTH) - 1), f);
    if (whole) {
        store<EACH>(d.y + at, y);
    } else {
        UNROLL for (int i = 0; i < EACH; i++) {
            if ((u32)i < count) ((u32 *)d.y)[at + i] = y[i];
        }
    }
}

#define ENTRY(WIDTH)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) decode_##WIDTH(const __grid_constant__ Decode d) { decode<WIDTH>(d); }
ENTRY(8)
ENTRY(6)
ENTRY(4)
