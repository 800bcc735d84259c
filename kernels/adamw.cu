// One step of AdamW: reads p, g, m, v once and writes p, m, v once.
//
// Each thread steps 8 consecutive elements in place. Bytes an element: 2 (p) + 1 (g) + 2 + 2 (m, v) times their widths: 28
// in f32 throughout, 20 with f32 p and g and BF16 moments, 14 in BF16 throughout. The four arrays must not overlap. A launch
// covers elements whose groups share a high half, so that one set of keys serves it; the host cuts longer ones. With
// `vector` set all four are 16-byte aligned and element 0 starts a group; else elements are taken one by one. Any n, any grid
// of blocks of THREADS threads that covers it.
#include "adamw.cuh"
#include "memory.cuh"
#include "random.cuh"

#define THREADS 128
#define EACH 8

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

// The code of a value in element type T.
template <class T, class D> struct Stored;
template <class D> struct Stored<F32, D> {
    static const bool draws = false;
    FN_MEMBER u32 of(u32 bits, u32 draw) { return bits; }
};
template <class D> struct Stored<BF16, D> {
    static const bool draws = D::bits != 0;
    FN_MEMBER u32 of(u32 bits, u32 draw) { return code_bf16<D>(0x7F80, bits, draw); }
};
template <class D> struct Stored<FP16, D> {
    static const bool draws = D::bits != 0;
    FN_MEMBER u32 of(u32 bits, u32 draw) { return code_fp16<D>(bits, draw); }
};

template <class P, class G, class M, class SP, class SM> FN void step(const Step &s) {
    u64 first = ((u64)blockIdx.x * THREADS + threadIdx.x) * EACH;
    if (first >= s.n) return;
    if (s.vector && s.n - first >= EACH) {
        u32 p[EACH * P::bytes / 4], g[EACH * G::bytes / 4], m[EACH * M::bytes / 4], v[EACH * M::bytes / 4];
        char *at_p = (char *)s.p + first * P::bytes, *at_m = (char *)s.m + first * M::bytes;
        char *at_v = (char *)s.v + first * M::bytes;
        load(p, at_p);
        load(g, (const char *)s.g + first * G::bytes);
        load(m, at_m);
        load(v, at_v);
        u32 group = s.group + (u32)(first / 4);
        Word wp = {0, 0}, wm = {0, 0}, wv = {0, 0};
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (i % 4 == 0) {
                if (SP::draws) wp = word(s.keys_p, group + i / 4);
                if (SM::draws) wm = word(s.keys_m, group + i / 4);
                if (SM::draws) wv = word(s.keys_v, group + i / 4);
            }
            Element e = adamw(s.scalars, float_of(P::widen(element<P>(p, i))), float_of(G::widen(element<G>(g, i))),
                              float_of(M::widen(element<M>(m, i))), float_of(M::widen(element<M>(v, i))));
            // Element i has been read, and the elements that share its word are read from it or not yet written.
            u32 np = SP::of(canonical(e.p), draw16(wp, i));
            u32 nm = SM::of(canonical(e.m), draw16(wm, i));
            u32 nv = SM::of(canonical(e.v), draw16(wv, i));
            replace<P>(p, i, np);
            replace<M>(m, i, nm);
            replace<M>(v, i, nv);
        }
        store(at_p, p);
        store(at_m, m);
        store(at_v, v);
        return;
    }
    u64 end = s.n - first < EACH ? s.n : first + EACH;
    for (u64 i = first; i < end; i++) {
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

#define ENTRY(name, P, DP, G, M, DM)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ Step s) {                           \
        step<P, G, M, Stored<P, DP>, Stored<M, DM>>(s);                                                                    \
    }

// adamw_<parameters>_<gradients>_<moments>, with n (nearest) or s (stochastic) behind what is rounded.
#define MOMENTS(name, P, DP, G)                                                                                            \
    ENTRY(name##_f32, P, DP, G, F32, NearestEven)                                                                          \
    ENTRY(name##_bf16n, P, DP, G, BF16, NearestEven)                                                                       \
    ENTRY(name##_bf16s, P, DP, G, BF16, Draws16)

#define GRADIENTS(name, P, DP)                                                                                             \
    MOMENTS(name##_f32, P, DP, F32)                                                                                        \
    MOMENTS(name##_bf16, P, DP, BF16)                                                                                      \
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
