// One step of AdamW: reads p, g, m, v once and writes p, m, v once.
//
// Each thread steps quads of consecutive elements in place: one where parameters are f32, and two, THREADS quads apart, where
// they are 16 bits wide. Every access of a warp is contiguous. Bytes an element: 2 (p) + 1 (g) + 2 + 2 (m, v) times their
// widths: 28 in f32 throughout, 20 with f32 p and g and BF16 moments, 14 in BF16 throughout. The four arrays must not overlap.
// A launch covers elements whose groups share a high half, so that one set of keys serves it; the host cuts longer ones. With
// `vector` set all four are aligned to four elements and element 0 starts a group; else, in the last block, and where a quad
// needs it, elements are taken one by one. Any n, in as many blocks of THREADS threads as cover it and no more.
#include "adamw.cuh"
#include "memory.cuh"
#include "random.cuh"

#define THREADS 128

struct Step {
    void *p;
    const void *g;
    void *m;
    void *v;
    u64 n;
    u32 group;  // low half of the group of element 0
    u32 skip;   // draws of that group before element 0
    u32 vector; // whether memory is aligned and skip is 0
    Keys keys_p, keys_m, keys_v;
    Scalars scalars;
};

// Storing values in element type T: `of` for any value, `finite` for one that is finite (or infinite), which needs no look
// at NaN.
template <class T, class D> struct Stored;
template <class D> struct Stored<F32, D> {
    static const bool draws = false;
    FN_MEMBER u32 of(u32 bits, u32 draw) { return bits; }
    FN_MEMBER u32 finite(u32 bits, u32 draw) { return bits; }
};
template <class D> struct Stored<BF16, D> {
    static const bool draws = D::bits != 0;
    FN_MEMBER u32 of(u32 bits, u32 draw) { return code_bf16<D>(0x7F80, bits, draw); }
    // The sign bit is out of reach of the carry: the largest magnitude becomes infinity.
    FN_MEMBER u32 finite(u32 bits, u32 draw) { return (bits + D::addend(draw, (bits >> 16) & 1)) >> 16; }
};
template <class D> struct Stored<FP16, D> {
    static const bool draws = D::bits != 0;
    FN_MEMBER u32 of(u32 bits, u32 draw) { return code_fp16<D>(bits, draw); }
    FN_MEMBER u32 finite(u32 bits, u32 draw) { return code_fp16<D>(bits, draw); }
};

// One quad: four elements whose draws are the words of one group. False, and nothing new, where a value may be NaN.
template <class P, class G, class M, class SP, class SM> FN bool quad(const Step &s, u64 at, u32 (&p)[P::bytes],
    const u32 (&g)[G::bytes], u32 (&m)[M::bytes], u32 (&v)[M::bytes]) {
    u32 group = s.group + (u32)(at / 4);
    Word wp = {0, 0}, wm = {0, 0}, wv = {0, 0};
    if (SP::draws) wp = word(s.keys_p, group);
    if (SM::draws) wm = word(s.keys_m, group), wv = word(s.keys_v, group);
    Element e[4];
    float poison = 0;
    UNROLL for (int i = 0; i < 4; i++) {
        e[i] = adamw(s.scalars, float_of(P::widen(element<P>(p, i))), float_of(G::widen(element<G>(g, i))),
                     float_of(M::widen(element<M>(m, i))), float_of(M::widen(element<M>(v, i))));
        // NaN if p or v is NaN or infinite; a first moment that is one of the two makes p one of the two.
        poison = fmaf(e[i].p, 0.0f, poison);
        poison = fmaf(e[i].v, 0.0f, poison);
    }
    if (poison != 0.0f) return false;
    UNROLL for (int i = 0; i < 4; i++) {
        replace<P>(p, i, SP::finite(bits_of(e[i].p), draw16(wp, i)));
        replace<M>(m, i, SM::finite(bits_of(e[i].m), draw16(wm, i)));
        replace<M>(v, i, SM::finite(bits_of(e[i].v), draw16(wv, i)));
    }
    return true;
}

template <class P, class G, class M, class SP, class SM> FN void step(const Step &s) {
    const int quads = P::bytes == 4 ? 1 : 2;
    const int each = THREADS * 4 * quads; // to a block
    const u64 tile = (u64)blockIdx.x * each;
    const u64 first = tile + threadIdx.x * 4;
    u32 left = (1u << quads) - 1; // quads to be taken element by element
    if (s.vector && s.n - tile >= each) {
        left = 0;
        u32 p[quads][P::bytes], g[quads][G::bytes], m[quads][M::bytes], v[quads][M::bytes];
        UNROLL for (int q = 0; q < quads; q++) {
            u64 at = first + q * (THREADS * 4);
            load<P::bytes>(p[q], (const char *)s.p + at * P::bytes);
            load<G::bytes>(g[q], (const char *)s.g + at * G::bytes);
            load<M::bytes>(m[q], (const char *)s.m + at * M::bytes);
            load<M::bytes>(v[q], (const char *)s.v + at * M::bytes);
        }
        UNROLL for (int q = 0; q < quads; q++) {
            u64 at = first + q * (THREADS * 4);
            if (quad<P, G, M, SP, SM>(s, at, p[q], g[q], m[q], v[q])) {
                store<P::bytes>((char *)s.p + at * P::bytes, p[q]);
                store<M::bytes>((char *)s.m + at * M::bytes, m[q]);
                store<M::bytes>((char *)s.v + at * M::bytes, v[q]);
            } else {
                left |= 1u << q;
            }
        }
    }
#pragma unroll 1
    for (u64 at = first; left; left >>= 1, at += THREADS * 4) {
        if (at >= s.n || (left & 1) == 0) continue;
        u64 end = s.n - at < 4 ? s.n : at + 4;
#pragma unroll 1
        for (u64 i = at; i < end; i++) {
            typename P::Memory *p = (typename P::Memory *)s.p + i;
            typename M::Memory *m = (typename M::Memory *)s.m + i, *v = (typename M::Memory *)s.v + i;
            u32 g = ((const typename G::Memory *)s.g)[i];
            u32 j = s.skip + (u32)(i % 4);
            u32 group = s.group + (u32)(i / 4) + j / 4;
            Element e = adamw(s.scalars, float_of(P::widen(*p)), float_of(G::widen(g)), float_of(M::widen(*m)),
                              float_of(M::widen(*v)));
            *p = (typename P::Memory)SP::of(canonical(e.p), SP::draws ? draw16(word(s.keys_p, group), j) : 0);
            *m = (typename M::Memory)SM::of(canonical(e.m), SM::draws ? draw16(word(s.keys_m, group), j) : 0);
            *v = (typename M::Memory)SM::of(canonical(e.v), SM::draws ? draw16(word(s.keys_v, group), j) : 0);
        }
    }
}

#define ENTRY(name, P, DP, G, M, DM)                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS, 8) name(const __grid_constant__ Step s) {                    \
        step<P, G, M, Stored<P, DP>, Stored<M, DM>>(s);                                                                \
    }

// adamw_<parameters>_<gradients>_<moments>, with n (nearest) or s (stochastic) behind what is rounded.
#define MOMENTS(name, P, DP, G)                                                                                        \
    ENTRY(name##_f32, P, DP, G, F32, NearestEven)                                                                      \
    ENTRY(name##_bf16n, P, DP, G, BF16, NearestEven)                                                                   \
    ENTRY(name##_bf16s, P, DP, G, BF16, Draws16)

#define GRADIENTS(name, P, DP)                                                                                         \
    MOMENTS(name##_f32, P, DP, F32)                                                                                    \
    MOMENTS(name##_bf16, P, DP, BF16)                                                                                  \
    MOMENTS(name##_fp16, P, DP, FP16)

#if defined(SOURCE_F32)
GRADIENTS(adamw_f32, F32, NearestEven)
#elif defined(SOURCE_BF16)
GRADIENTS(adamw_bf16n, BF16, NearestEven)
GRADIENTS(adamw_bf16s, BF16, Draws16)
#elif defined(SOURCE_FP16)
GRADIENTS(adamw_fp16n, FP16, NearestEven)
GRADIENTS(adamw_fp16s, FP16, Draws16)
#else
#error "define the parameters: SOURCE_F32, SOURCE_BF16 or SOURCE_FP16"
#endif
