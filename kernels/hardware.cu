// Casts of f32 to BF16, E4M3, E5M2 and packed E2M1 by the stochastic rounding of compute capability 10.0 and 10.3, `cvt.rs`.
//
// 4 bytes an element in, 2, 1, 1 or 1/2 out. Elements come in the quads of stream 1's 16-bit draws: a group's word has 16 bits
// for each of four. The instructions that convert four elements at once take one word of 32 bits and use each half for two of
// them (PTX ISA, `cvt`), so a quad is converted twice, under either half of its word, and each result gives the two elements
// that share no bit. `x` and `y` must not overlap. A launch covers elements whose groups share a high half. With `vector` set,
// `x` is aligned to 16 bytes, `y` to the codes of a quad, and element 0 starts a group; else, and in the last block, elements
// are taken one by one. Any n, in as many blocks of THREADS threads as cover it with EACH elements a thread and no more.
//
// The assembler knows these instructions for sm_100a and sm_103a alone. Assembled for both; never run.
#include "random.cuh"

#define THREADS 128
#define EACH 16

struct Hardware {
    const float *x;
    void *y;
    u64 n;
    u32 group;  // low half of the group of element 0
    u32 skip;   // draws of that group before element 0
    u32 vector; // whether memory is aligned and skip is 0
    Keys keys;
};

// The codes of a quad, element 0 in the lowest bits. Operands of the instructions come highest element first.
struct ToBf16 {
    static const int width = 16;
    FN_MEMBER u32 pair(float low, float high, u32 random) {
        u32 codes;
        asm("cvt.rs.bf16x2.f32 %0, %1, %2, %3;" : "=r"(codes) : "f"(high), "f"(low), "r"(random));
        return codes;
    }
    FN_MEMBER u64 quad(float a, float b, float c, float d, const Word &w) {
        return pair(a, b, w.x0) | (u64)pair(c, d, w.x1) << 32;
    }
};

#define OF_FOUR(Name, instruction, Codes, constraint, WIDTH, EVEN)                                                     \
    struct Name {                                                                                                      \
        static const int width = WIDTH;                                                                                \
        FN_MEMBER u32 four(float a, float b, float c, float d, u32 random) {                                           \
            Codes codes;                                                                                               \
            asm(instruction " %0, {%1, %2, %3, %4}, %5;"                                                               \
                : constraint(codes)                                                                                    \
                : "f"(d), "f"(c), "f"(b), "f"(a), "r"(random));                                                        \
            return codes;                                                                                              \
        }                                                                                                              \
        FN_MEMBER u64 quad(float a, float b, float c, float d, const Word &w) {                                        \
            return (four(a, b, c, d, w.x0) & EVEN) | (four(a, b, c, d, w.x1) & ~EVEN);                                 \
        }                                                                                                              \
    };
OF_FOUR(ToE4m3, "cvt.rs.satfinite.e4m3x4.f32", u32, "=r", 8, 0x00FF00FFu)
OF_FOUR(ToE5m2, "cvt.rs.satfinite.e5m2x4.f32", u32, "=r", 8, 0x00FF00FFu)
OF_FOUR(ToE2m1, "cvt.rs.satfinite.e2m1x4.f32", u16, "=h", 4, 0x0F0Fu)

// Stores the codes of a quad at once.
template <int WIDTH> FN void put(u8 *to, u64 codes) {
    if (WIDTH == 16) *(uint2 *)to = make_uint2((u32)codes, (u32)(codes >> 32));
    if (WIDTH == 8) *(u32 *)to = (u32)codes;
    if (WIDTH == 4) *(u16 *)to = (u16)codes;
}

// The code of element i, from a quad that has zeros beside it.
template <class R> FN u64 one(const Hardware &h, u64 i) {
    u32 j = h.skip + (u32)(i % 4);
    u32 lane = j % 4;
    float x = h.x[i];
    u64 codes = R::quad(lane == 0 ? x : 0, lane == 1 ? x : 0, lane == 2 ? x : 0, lane == 3 ? x : 0,
                        word(h.keys, h.group + (u32)(i / 4) + j / 4));
    return codes >> (R::width * lane) & ((1u << R::width) - 1);
}

template <class R> FN void cast(const Hardware &h) {
    const u64 tile = (u64)blockIdx.x * (THREADS * EACH);
    const u64 first = tile + threadIdx.x * 4;
    const u64 stride = THREADS * 4;
    if (h.vector && h.n - tile >= THREADS * EACH) {
        float4 x[EACH / 4];
        UNROLL for (int q = 0; q < EACH / 4; q++) x[q] = *(const float4 *)(h.x + first + q * stride);
        UNROLL for (int q = 0; q < EACH / 4; q++) {
            u64 at = first + q * stride;
            Word w = word(h.keys, h.group + (u32)(at / 4));
            put<R::width>((u8 *)h.y + at / 4 * (R::width / 2), R::quad(x[q].x, x[q].y, x[q].z, x[q].w, w));
        }
        return;
    }
    NO_UNROLL for (int q = 0; q < EACH / 4; q++) {
        u64 at = first + q * stride;
        u64 end = h.n < at + 4 ? h.n : at + 4;
        u64 codes = 0;
        u32 held = 0;
        NO_UNROLL for (u64 i = at; i < end; i++, held += R::width) codes |= one<R>(h, i) << held;
        u8 *to = (u8 *)h.y + at / 4 * (R::width / 2);
        NO_UNROLL for (u32 bit = 0; bit < held; bit += 8) *to++ = (u8)(codes >> bit);
    }
}

#define ENTRY(name, R)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ Hardware h) { cast<R>(h); }

ENTRY(hardware_bf16, ToBf16)
ENTRY(hardware_e4m3, ToE4m3)
ENTRY(hardware_e5m2, ToE5m2)
ENTRY(hardware_e2m1, ToE2m1)
