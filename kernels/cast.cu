// Casts of f32, BF16 and FP16 to the codes of any format.
//
// Each thread reads 16 consecutive elements and writes their codes: 4 or 2 bytes an element in, 2, 1, 3/4 or 1/2 out.
// `x` and `y` must not overlap. A launch covers elements whose groups share a high half, so that five keys serve it; the
// host cuts longer ones. With `vector` set, `x` is 16-byte aligned, `y` is aligned to the bytes a thread writes (at most
// 16; 4 for 6-bit codes) and element 0 starts a group; else elements are taken one by one. Any n, any grid of blocks of
// THREADS threads that covers it.
#include "memory.cuh"
#include "random.cuh"

#define THREADS 128
#define EACH 16

struct Cast {
    const void *x;
    void *y;
    u64 n;
    u32 group;  // low half of the group of element 0
    u32 skip;   // draws of that group before element 0
    u32 vector; // whether memory is aligned and skip is 0
    Keys keys;
    Target target;
};

// Ways of rounding: one element, and four at a time.
struct Any {
    template <class D> FN_MEMBER u32 of(const Target &t, u32 bits, u32 draw) { return code<D, false>(t, bits, draw); }
    template <class D> FN_MEMBER void of4(const Target &t, const u32 (&bits)[4], const u32 (&draw)[4], u32 (&codes)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) codes[i] = of<D>(t, bits[i], draw[i]);
    }
};
struct Plain {
    template <class D> FN_MEMBER u32 of(const Target &t, u32 bits, u32 draw) { return code<D, true>(t, bits, draw); }
    template <class D> FN_MEMBER void of4(const Target &t, const u32 (&bits)[4], const u32 (&draw)[4], u32 (&codes)[4]) {
        codes_plain<D>(t, bits, draw, codes);
    }
};
struct ToBf16 {
    template <class D> FN_MEMBER u32 of(const Target &t, u32 bits, u32 draw) { return code_bf16<D>(t.beyond, bits, draw); }
    template <class D> FN_MEMBER void of4(const Target &t, const u32 (&bits)[4], const u32 (&draw)[4], u32 (&codes)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) codes[i] = of<D>(t, bits[i], draw[i]);
    }
};

template <class D> FN u32 draw(const Word &w, u32 j) { return D::bits == 16 ? draw16(w, j) : draw32(w, j); }

// Codes of WIDTH bits without gaps, 16 of them in WIDTH / 2 words.
template <int WIDTH> FN void put(u32 (&w)[WIDTH / 2], int i, u32 code) {
    int bit = i * WIDTH;
    if (bit % 32 == 0) {
        w[bit / 32] = code;
    } else {
        w[bit / 32] |= code << bit % 32;
        if (bit % 32 + WIDTH > 32) w[bit / 32 + 1] = code >> (32 - bit % 32);
    }
}

template <class S, class R, class D, int WIDTH> FN void cast(const Cast &c) {
    u64 first = ((u64)blockIdx.x * THREADS + threadIdx.x) * EACH;
    if (first >= c.n) return;
    const int draws = D::bits == 16 ? 4 : 2; // in a group
    if (c.vector && c.n - first >= EACH) {
        u32 x[EACH * S::bytes / 4];
        load(x, (const char *)c.x + first * S::bytes);
        u32 y[WIDTH / 2];
        u32 group = c.group + (u32)(first / draws);
        Word w = {0, 0};
#pragma unroll
        for (int i = 0; i < EACH; i += 4) {
            u32 bits[4], random[4], codes[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (D::bits && j % draws == 0) w = word(c.keys, group + (i + j) / draws);
                bits[j] = S::widen(element<S>(x, i + j));
                random[j] = draw<D>(w, j);
            }
            R::template of4<D>(c.target, bits, random, codes);
#pragma unroll
            for (int j = 0; j < 4; j++) put<WIDTH>(y, i + j, codes[j]);
        }
        store((char *)c.y + first / 8 * WIDTH, y);
        return;
    }
    // One by one: a byte is whole after two codes of 4 bits, after 4 codes of 6 bits come 3 bytes.
    u32 pending = 0;
    int held = 0;
    u8 *bytes = (u8 *)c.y + first / 8 * WIDTH;
    u64 end = c.n - first < EACH ? c.n : first + EACH;
    for (u64 i = first; i < end; i++) {
        u32 j = c.skip + (u32)(i % draws);
        Word w = {0, 0};
        if (D::bits) w = word(c.keys, c.group + (u32)(i / draws) + j / draws);
        u32 bits = S::widen(((const typename S::Memory *)c.x)[i]);
        u32 code = R::template of<D>(c.target, bits, draw<D>(w, j));
        if (WIDTH == 16) {
            ((u16 *)c.y)[i] = (u16)code;
        } else {
            pending |= code << held;
            held += WIDTH;
            for (; held >= 8; held -= 8, pending >>= 8) *bytes++ = (u8)pending;
        }
    }
    if (held > 0) *bytes = (u8)pending;
}

#define ENTRY(name, S, R, D, WIDTH)                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ Cast c) { cast<S, R, D, WIDTH>(c); }

#define ROUNDINGS(name, S, R, DRAWS, WIDTH)                                                                                \
    ENTRY(name##_nearest, S, R, NearestEven, WIDTH)                                                                        \
    ENTRY(name##_stochastic, S, R, DRAWS, WIDTH)

// cast_<source>_<width or bf16>_<rounding>; with `plain` for formats that have no special cases.
#define SOURCE(name, S)                                                                                                    \
    ROUNDINGS(name##_bf16, S, ToBf16, Draws16, 16)                                                                         \
    ROUNDINGS(name##_16, S, Any, Draws32, 16)                                                                              \
    ROUNDINGS(name##_8, S, Any, Draws32, 8)                                                                                \
    ROUNDINGS(name##_6, S, Any, Draws32, 6)                                                                                \
    ROUNDINGS(name##_4, S, Any, Draws32, 4)                                                                                \
    ROUNDINGS(name##_plain8, S, Plain, Draws32, 8)                                                                         \
    ROUNDINGS(name##_plain6, S, Plain, Draws32, 6)                                                                         \
    ROUNDINGS(name##_plain4, S, Plain, Draws32, 4)

#if defined(SOURCE_F32)
SOURCE(cast_f32, F32)
#elif defined(SOURCE_BF16)
SOURCE(cast_bf16, BF16)
#elif defined(SOURCE_FP16)
SOURCE(cast_fp16, FP16)
#else
#error "define the source: SOURCE_F32, SOURCE_BF16 or SOURCE_FP16"
#endif
