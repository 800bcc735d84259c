// Casts of f32, BF16 and FP16 into blocks that share a scale: a code for each element, a scale for each block.
//
// 4 or 2 bytes an element in, 1, 3/4 or 1/2 out, and the scales. Each thread takes eight consecutive elements, so that 2 to 32
// neighbours in a warp share a block of 16 to 256, whose largest magnitude they find among them. `x` and what is written must
// not overlap. Element 0 starts a block, and a launch covers elements whose groups share a high half, so that five keys serve
// it. With `vector` set, `x` is aligned to 16 bytes, the codes to those of a thread (2 bytes at 6 bits), and element 0 starts a
// group; else, and where the tensor ends within eight elements, memory goes element by element and byte by byte. Any n.
//
// NVFP4 has a scale for the whole tensor too, from its largest finite magnitude: `amax` finds it (in any order, for a maximum
// has none), `global` makes the scale of it.
#include "memory.cuh"
#include "random.cuh"
#include "scaled.cuh"

#define THREADS 128
#define WARP 32
#define EACH 8

struct Encode {
    const void *x;
    u8 *codes;
    void *scales;        // u8 or, under amax scales, f32
    const float *global; // of NVFP4
    u64 n;
    u32 group;  // low half of the group of element 0
    u32 skip;   // draws of that group before element 0
    u32 vector; // whether memory is aligned and skip is 0
    u32 log_block;
    Keys keys;
    Encoder encoder;
};

// The f32 bits of up to EACH elements from `at` on, and zeros where there are none.
template <class S> FN void read(u32 (&bits)[EACH], const void *x, u64 at, u64 n, bool whole) {
    if (whole) {
        u32 words[EACH * S::bytes / 4];
        load<EACH * S::bytes / 4>(words, (const char *)x + at * S::bytes);
        UNROLL for (int i = 0; i < EACH; i++) bits[i] = S::widen(element<S>(words, i));
    } else {
        UNROLL for (int i = 0; i < EACH; i++) bits[i] = at + i < n ? S::widen(((const typename S::Memory *)x)[at + i]) : 0;
    }
}

template <class S, class D, int WIDTH> FN void encode(const Encode &e) {
    const u64 at = ((u64)blockIdx.x * THREADS + threadIdx.x) * EACH;
    const bool whole = e.vector && at + EACH <= e.n;
    u32 x[EACH], draw[EACH];
    read<S>(x, e.x, at, e.n, whole);

    u32 amax = 0;
    UNROLL for (int i = 0; i < EACH; i++) amax = amax > (x[i] & 0x7FFFFFFF) ? amax : x[i] & 0x7FFFFFFF;
    const u32 lanes = (1u << e.log_block) / EACH; // to a block
    NO_UNROLL for (u32 other = lanes / 2; other > 0; other /= 2) {
        u32 theirs = __shfl_xor_sync(0xFFFFFFFF, amax, other);
        amax = amax > theirs ? amax : theirs;
    }
    if (at >= e.n) return;
    BlockScale scale = scale_of(e.encoder, amax, e.encoder.rule == RULE_NVFP4 ? *e.global : 1);

    const u32 group = e.group + (u32)(at / 2);
    UNROLL for (int i = 0; i < EACH; i += 2) {
        Word w = {0, 0};
        if (D::bits) w = word(e.keys, group + i / 2);
        draw[i] = w.x0, draw[i + 1] = w.x1;
    }
    if (D::bits && e.skip) {
        UNROLL for (int i = 0; i < EACH - 1; i++) draw[i] = draw[i + 1];
        draw[EACH - 1] = word(e.keys, group + EACH / 2).x0;
    }
    u64 codes = eight_codes<D, WIDTH>(e.encoder, scale, x, draw);

    u8 *to = e.codes + at / 8 * WIDTH;
    if (whole) {
        if (WIDTH == 8) {
            *(uint2 *)to = make_uint2((u32)codes, (u32)(codes >> 32));
        } else if (WIDTH == 4) {
            *(u32 *)to = (u32)codes;
        } else {
            UNROLL for (int i = 0; i < 3; i++) ((u16 *)to)[i] = (u16)(codes >> 16 * i);
        }
    } else {
        u32 count = e.n - at < EACH ? (u32)(e.n - at) : EACH;
        NO_UNROLL for (u32 i = 0; i < (count * WIDTH + 7) / 8; i++) to[i] = (u8)(codes >> 8 * i);
    }
    if ((at & ((1u << e.log_block) - 1)) == 0) {
        u64 b = at >> e.log_block;
        if (e.encoder.rule == RULE_AMAX) {
            ((u32 *)e.scales)[b] = scale.stored;
        } else {
            ((u8 *)e.scales)[b] = (u8)scale.stored;
        }
    }
}

struct Largest {
    const void *x;
    u32 *largest; // f32 bits; 0 before
    u64 n;
    u32 vector; // whether `x` is aligned to 16 bytes
};

// Any grid.
template <class S> FN void amax(const Largest &a) {
    const u64 stride = (u64)gridDim.x * THREADS * EACH;
    u32 largest = 0;
    NO_UNROLL for (u64 at = ((u64)blockIdx.x * THREADS + threadIdx.x) * EACH; at < a.n; at += stride) {
        u32 x[EACH];
        read<S>(x, a.x, at, a.n, a.vector && at + EACH <= a.n);
        UNROLL for (int i = 0; i < EACH; i++) {
            u32 magnitude = x[i] & 0x7FFFFFFF;
            if (magnitude < F32_INFINITY && magnitude > largest) largest = magnitude;
        }
    }
    largest = __reduce_max_sync(0xFFFFFFFF, largest);
    if (threadIdx.x % WARP == 0) atomicMax(a.largest, largest);
}

struct Global {
    float *global; // f32 bits of the largest finite magnitude before, the scale of the whole after
};
FN void make_global(const Global &g) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *g.global = nvfp4_global(bits_of(*g.global));
}

// encode_<source>_<width>_<rounding>
#define ENTRY(name, S, D, WIDTH)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ Encode e) { encode<S, D, WIDTH>(e); }
#define ROUNDINGS(name, S, WIDTH)                                                                                      \
    ENTRY(name##_nearest, S, NearestEven, WIDTH)                                                                       \
    ENTRY(name##_stochastic, S, Draws32, WIDTH)
#define SOURCE(name, S)                                                                                                \
    ROUNDINGS(name##_8, S, 8)                                                                                          \
    ROUNDINGS(name##_6, S, 6)                                                                                          \
    ROUNDINGS(name##_4, S, 4)                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) name##_amax(const __grid_constant__ Largest a) { amax<S>(a); }   \
    extern "C" __global__ void __launch_bounds__(THREADS) name##_global(const __grid_constant__ Global g) { make_global(g); }

#if defined(SOURCE_F32)
SOURCE(encode_f32, F32)
#elif defined(SOURCE_BF16)
SOURCE(encode_bf16, BF16)
#elif defined(SOURCE_FP16)
SOURCE(encode_fp16, FP16)
#else
#error "define the source: SOURCE_F32, SOURCE_BF16 or SOURCE_FP16"
#endif
