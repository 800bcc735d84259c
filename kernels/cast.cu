// Casts of f32, BF16 and FP16 to the codes of any format.
//
// 4 or 2 bytes an element in, 2, 1, 3/4 or 1/2 out. Each thread takes EACH (16, or 8 of 16 bits) in runs of four (eight for 4-bit
// codes), the runs of a block side by side, so that every access of a warp is contiguous. `x` and `y` must not overlap. A
// launch covers elements whose groups share a high half, so that five keys serve it; the host cuts longer ones. With
// `vector` set, `x` is aligned to four elements (to 16 bytes for 4-bit codes), `y` to the codes of a run (6-bit codes to nothing), and element 0 starts a
// group; else, in the last block, and where a run needs it, elements are taken one by one. Any n, in as many
// blocks of at most THREADS threads as cover it with EACH elements a thread and no more.
#include "memory.cuh"
#include "random.cuh"

// The most threads of a block; the host says how many.
#define THREADS(width) (width == 16 ? 512 : 128)

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

// Ways of rounding: four elements at once, to codes of WIDTH bits at the top of a word each, which may decline, and one,
// which never does.
template <int WIDTH> struct Any {
    template <class D> FN_MEMBER bool four(const Target &t, const u32 (&bits)[4], const u32 (&draw)[4], u32 (&codes)[4]) {
        UNROLL for (int i = 0; i < 4; i++) codes[i] = one<D>(t, bits[i], draw[i]) << (32 - WIDTH);
        return true;
    }
    template <class D> FN_MEMBER u32 one(const Target &t, u32 bits, u32 draw) { return code<D>(t, bits, draw); }
};
// Signed and unsigned formats of WIDTH bits, P of them fraction; the unsigned ones give 0 for what is below zero.
template <int WIDTH, int P> struct Signed : Any<WIDTH> {
    template <class D> FN_MEMBER bool four(const Target &t, const u32 (&bits)[4], const u32 (&draw)[4], u32 (&codes)[4]) {
        bool done = codes_plain<D, P>(t, bits, draw, codes);
        UNROLL for (int i = 0; i < 4; i++) codes[i] = codes[i] << (9 + P - WIDTH) | (bits[i] & 0x80000000);
        return done;
    }
};
template <int WIDTH, int P> struct Unsigned : Any<WIDTH> {
    template <class D> FN_MEMBER bool four(const Target &t, const u32 (&bits)[4], const u32 (&draw)[4], u32 (&codes)[4]) {
        bool done = codes_plain<D, P>(t, bits, draw, codes);
        UNROLL for (int i = 0; i < 4; i++) codes[i] = bits[i] >> 31 ? 0 : codes[i] << (9 + P - WIDTH);
        return done;
    }
};
struct ToBf16 {
    template <class D> FN_MEMBER bool four(const Target &t, const u32 (&bits)[4], const u32 (&draw)[4], u32 (&codes)[4]) {
        UNROLL for (int i = 0; i < 4; i++) codes[i] = one<D>(t, bits[i], draw[i]) << 16;
        return true;
    }
    template <class D> FN_MEMBER u32 one(const Target &t, u32 bits, u32 draw) { return code_bf16<D>(t.beyond, bits, draw); }
};

template <class D> FN u32 draw(const Word &w, u32 j) { return D::bits == 16 ? draw16(w, j) : draw32(w, j); }

// Codes at the top of a word each, stored without gaps: four of them, or eight of 4 bits.
template <int WIDTH, int QUADS> FN void put(void *y, const u32 (&c)[QUADS][4]) {
    if (WIDTH == 16) {
        *(uint2 *)y = make_uint2(__byte_perm(c[0][0], c[0][1], 0x7632), __byte_perm(c[0][2], c[0][3], 0x7632));
    } else if (WIDTH == 8) {
        *(u32 *)y = __byte_perm(__byte_perm(c[0][0], c[0][1], 0x73), __byte_perm(c[0][2], c[0][3], 0x73), 0x5410);
    } else {
        u32 w = 0;
        UNROLL for (int i = 4 * QUADS - 1; i >= 0; i--) w = __funnelshift_l(c[i / 4][i % 4], w, WIDTH);
        if (WIDTH == 6) {
            ((u8 *)y)[0] = (u8)w, ((u8 *)y)[1] = (u8)(w >> 8), ((u8 *)y)[2] = (u8)(w >> 16);
        } else {
            *(u32 *)y = w;
        }
    }
}

template <class S, class R, class D, int WIDTH> FN void cast(const Cast &c) {
    const int EACH = WIDTH == 16 ? 8 : 16;
    const int draws = D::bits == 16 ? 4 : 2; // in a group
    const int quads = WIDTH == 4 ? 2 : 1;    // in a run: enough for a store of 4 bytes
    const int runs = EACH / (4 * quads);
    const u64 tile = (u64)blockIdx.x * (blockDim.x * EACH);
    const u64 first = tile + threadIdx.x * (4 * quads);
    const u64 stride = blockDim.x * 4 * quads;
    u32 left = (1u << runs) - 1; // runs to be taken element by element
    if (c.vector && c.n - tile >= blockDim.x * EACH) {
        left = 0;
        u32 x[runs][quads][S::bytes];
        UNROLL for (int r = 0; r < runs; r++) load<quads * S::bytes>(x[r][0], (const char *)c.x + (first + r * stride) * S::bytes);
        UNROLL for (int r = 0; r < runs; r++) {
            u64 at = first + r * stride;
            u32 codes[quads][4];
            bool done = true;
            UNROLL for (int q = 0; q < quads; q++) {
                u32 group = c.group + (u32)((at + q * 4) / draws);
                u32 bits[4], random[4];
                Word w = {0, 0};
                UNROLL for (int i = 0; i < 4; i++) {
                    if (D::bits && i % draws == 0) w = word(c.keys, group + i / draws);
                    bits[i] = S::widen(element<S>(x[r][q], i));
                    random[i] = draw<D>(w, i);
                }
                done &= R::template four<D>(c.target, bits, random, codes[q]);
            }
            if (done) {
                put<WIDTH>((char *)c.y + at / 4 * (WIDTH / 2), codes);
            } else {
                left |= 1u << r;
            }
        }
    }
    NO_UNROLL for (u64 at = first; left; left >>= 1, at += stride) {
        if (at >= c.n || (left & 1) == 0) continue;
        u64 end = c.n - at < 4 * quads ? c.n : at + 4 * quads;
        u8 *bytes = (u8 *)c.y + at / 4 * (WIDTH / 2);
        u32 pending = 0, held = 0;
        NO_UNROLL for (u64 i = at; i < end; i++) {
            u32 j = c.skip + (u32)(i % draws);
            Word w = {0, 0};
            if (D::bits) w = word(c.keys, c.group + (u32)(i / draws) + j / draws);
            u32 code = R::template one<D>(c.target, S::widen(((const typename S::Memory *)c.x)[i]), draw<D>(w, j));
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
}

#define ENTRY(name, S, R, D, WIDTH)                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS(WIDTH)) name(const __grid_constant__ Cast c) { cast<S, R, D, WIDTH>(c); }

#define ROUNDINGS(name, S, R, DRAWS, WIDTH)                                                                            \
    ENTRY(name##_nearest, S, R, NearestEven, WIDTH)                                                                    \
    ENTRY(name##_stochastic, S, R, DRAWS, WIDTH)

// cast_<source>_<width or bf16>_<rounding>, and for targets that `codes_plain` serves <width><s or u><fraction bits>.
#define SOURCE(name, S)                                                                                                \
    ROUNDINGS(name##_bf16, S, ToBf16, Draws16, 16)                                                                     \
    ROUNDINGS(name##_16, S, Any<16>, Draws32, 16)                                                                          \
    ROUNDINGS(name##_8, S, Any<8>, Draws32, 8)                                                                            \
    ROUNDINGS(name##_6, S, Any<6>, Draws32, 6)                                                                            \
    ROUNDINGS(name##_4, S, Any<4>, Draws32, 4)

typedef Signed<16, 10> Signed16m10;
typedef Signed<8, 3> Signed8m3;
typedef Signed<8, 2> Signed8m2;
typedef Signed<6, 2> Signed6m2;
typedef Signed<6, 3> Signed6m3;
typedef Signed<4, 1> Signed4m1;
typedef Unsigned<8, 3> Unsigned8m3;
typedef Unsigned<8, 4> Unsigned8m4;
typedef Unsigned<4, 2> Unsigned4m2;

#define PLAIN(name, S)                                                                                                 \
    ROUNDINGS(name##_16s10, S, Signed16m10, Draws32, 16)                                                               \
    ROUNDINGS(name##_8s3, S, Signed8m3, Draws32, 8)                                                                    \
    ROUNDINGS(name##_8s2, S, Signed8m2, Draws32, 8)                                                                    \
    ROUNDINGS(name##_8u3, S, Unsigned8m3, Draws32, 8)                                                                  \
    ROUNDINGS(name##_8u4, S, Unsigned8m4, Draws32, 8)                                                                  \
    ROUNDINGS(name##_6s2, S, Signed6m2, Draws32, 6)                                                                    \
    ROUNDINGS(name##_6s3, S, Signed6m3, Draws32, 6)                                                                    \
    ROUNDINGS(name##_4s1, S, Signed4m1, Draws32, 4)                                                                    \
    ROUNDINGS(name##_4u2, S, Unsigned4m2, Draws32, 4)

#if defined(SOURCE_F32)
SOURCE(cast_f32, F32)
PLAIN(cast_f32, F32)
#elif defined(SOURCE_BF16)
SOURCE(cast_bf16, BF16)
PLAIN(cast_bf16, BF16)
#elif defined(SOURCE_FP16)
SOURCE(cast_fp16, FP16)
#else
#error "define the source: SOURCE_F32, SOURCE_BF16 or SOURCE_FP16"
#endif
