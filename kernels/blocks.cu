// One step of AdamW whose moments, one or both, are stored in blocks that share a scale: reads p, g, codes and
// scales once and writes p, codes and scales once.
//
// Bytes an element: 2 (p) + 1 (g) times their widths, and for each moment 2 times 1, or 1/2 for 4-bit codes, and 2 for each
// block: with blocks of 128 and two moments of 8 bits 16.03 with f32 p and g and 10.03 in BF16, with two of 4 bits 8.03.
// The arrays must not overlap. Element 0 starts a block, and the group of its draws; the host cuts launches so that one set of
// keys serves each. Blocks of 32, 64, 128 or 256 elements, any n; the last block may be shorter.
//
// Kernels of three kinds. `blocks_any` takes every combination of types and formats under powers of two in blocks of one size, a
// block to a warp. `blocks_mixed` takes f32 scales and two sizes as well, the larger block to a warp. The others are for one
// combination each, EACH consecutive elements to a thread, so that some threads of a warp share a block; a warp at the end, or
// with a block whose scale is too large for `code_near` or that is not finite, does its blocks as `blocks_any` does.
#include "adamw.cuh"
#include "blocks.cuh"
#include "memory.cuh"
#include "random.cuh"

#define THREADS 128
#define WARP 32

struct Step {
    void *p;
    const void *g;
    void *m;
    void *v;
    u8 *m_scales;
    u8 *v_scales;
    u64 n;
    u32 group; // low half of the group of element 0
    u32 log_block; // log2 of the elements of a block, of the larger one
    u32 vector; // whether memory is aligned to what a thread takes
    u32 p_type, g_type; // 0: f32, 1: BF16, 2: FP16
    u32 p_draws, m_draws; // whether parameters and moments are rounded stochastically
    Keys keys_p, keys_m, keys_v;
    Scalars scalars;
    Moment moment_m, moment_v;
};

FN float value_at(u32 type, const void *memory, u64 i) {
    if (type == 0) return ((const float *)memory)[i];
    u32 bits = ((const u16 *)memory)[i];
    return float_of(type == 1 ? widen_bf16(bits) : widen_fp16(bits));
}

FN void store_at(u32 type, void *memory, u64 i, float x, bool draws, u32 draw) {
    u32 bits = canonical(x);
    if (type == 0) {
        ((u32 *)memory)[i] = bits;
    } else if (type == 1) {
        ((u16 *)memory)[i] = (u16)(draws ? code_bf16<Draws16>(0x7F80, bits, draw) : code_bf16<NearestEven>(0x7F80, bits, 0));
    } else {
        ((u16 *)memory)[i] = (u16)(draws ? code_fp16<Draws16>(bits, draw) : code_fp16<NearestEven>(bits, 0));
    }
}

// Element i of a moment.
template <bool MIXED> FN float moment_at(const Moment &m, const void *memory, u32 scale, u64 i) {
    if (m.kind < 2) return value_at(m.kind, memory, i);
    u32 place = m.target.sign_shift == 7 ? 0 : i % 2 * 4;
    u32 code = ((const u8 *)memory)[place == 0 && m.target.sign_shift == 7 ? i : i / 2] >> place & (2u << m.target.sign_shift) - 1;
    return any_value<MIXED>(m, scale, code);
}

// The scale of block b as it is stored.
template <bool MIXED> FN u32 scale_at(const Moment &m, const void *scales, u64 b) {
    if (MIXED && m.kind == 3) return ((const u32 *)scales)[b];
    return m.kind == 2 ? ((const u8 *)scales)[b] : 0;
}
template <bool MIXED> FN void store_scale(const Moment &m, void *scales, u64 b, u32 scale) {
    if (m.kind == 2) ((u8 *)scales)[b] = (u8)scale;
    if (MIXED && m.kind == 3) ((u32 *)scales)[b] = scale;
}

// The new scale of a block that ends where a warp has come to, if one does: lane k keeps that of block k.
FN void end_block(const Moment &m, u32 log_block, u32 done, bool last, u32 lane, u32 &amax, u32 &scale) {
    if (!last && (done & ((1u << log_block) - 1)) != 0) return;
    u32 largest = any_scale<true>(m, __reduce_max_sync(0xFFFFFFFF, amax));
    if (lane == (done - 1) >> log_block) scale = largest;
    amax = 0;
}

// One block by one warp: parameters and largest magnitudes, then moments, made again from what is in memory still. Where MIXED,
// the block is that of the moment whose blocks are larger, and all lanes stay in a loop as long as one does, to share what they
// have. For every combination, so short rather than fast.
template <bool MIXED> FN void any_block(const Step &s, u64 b, u32 lane) {
    const u64 start = b << s.log_block;
    const u64 end = s.n - start < 1u << s.log_block ? s.n : start + (1u << s.log_block);
    const u32 log_m = s.moment_m.log_block, log_v = s.moment_v.log_block;
    u32 scale_m = MIXED ? 0 : scale_at<MIXED>(s.moment_m, s.m_scales, b);
    u32 scale_v = MIXED ? 0 : scale_at<MIXED>(s.moment_v, s.v_scales, b);
    u32 amax_m = 0, amax_v = 0, new_scale_m = 0, new_scale_v = 0;
#pragma unroll 1
    for (u64 i = start + lane; (MIXED ? i - lane : i) < end; i += WARP) {
        if (!MIXED || i < end) {
            if (MIXED) scale_m = scale_at<MIXED>(s.moment_m, s.m_scales, i >> log_m);
            if (MIXED) scale_v = scale_at<MIXED>(s.moment_v, s.v_scales, i >> log_v);
            Element e = adamw(s.scalars, value_at(s.p_type, s.p, i), value_at(s.g_type, s.g, i),
                              moment_at<MIXED>(s.moment_m, s.m, scale_m, i), moment_at<MIXED>(s.moment_v, s.v, scale_v, i));
            store_at(s.p_type, s.p, i, e.p, s.p_draws, s.p_draws ? draw16(word(s.keys_p, s.group + (u32)(i / 4)), i & 3) : 0);
            u32 magnitude_m = bits_of(e.m) & 0x7FFFFFFF, magnitude_v = bits_of(e.v) & 0x7FFFFFFF;
            amax_m = amax_m > magnitude_m ? amax_m : magnitude_m;
            amax_v = amax_v > magnitude_v ? amax_v : magnitude_v;
        }
        if (MIXED) {
            const u32 done = (u32)(i - lane - start) + WARP;
            const bool last = start + done >= end;
            end_block(s.moment_m, log_m, done, last, lane, amax_m, new_scale_m);
            end_block(s.moment_v, log_v, done, last, lane, amax_v, new_scale_v);
        }
    }
    if (!MIXED) {
        new_scale_m = any_scale<false>(s.moment_m, __reduce_max_sync(0xFFFFFFFF, amax_m));
        new_scale_v = any_scale<false>(s.moment_v, __reduce_max_sync(0xFFFFFFFF, amax_v));
    }
    // Every lane takes pairs of neighbours, 64 apart.
#pragma unroll 1
    for (u64 pair = start + 2 * lane; (MIXED ? pair - 2 * lane : pair) < end; pair += 2 * WARP) {
        u32 new_m = new_scale_m, new_v = new_scale_v;
        if (MIXED) {
            new_m = __shfl_sync(0xFFFFFFFF, new_scale_m, (u32)(pair - start) >> log_m);
            new_v = __shfl_sync(0xFFFFFFFF, new_scale_v, (u32)(pair - start) >> log_v);
            if (pair >= end) continue;
            scale_m = scale_at<MIXED>(s.moment_m, s.m_scales, pair >> log_m);
            scale_v = scale_at<MIXED>(s.moment_v, s.v_scales, pair >> log_v);
        }
        u32 codes_m = 0, codes_v = 0; // of a pair, in 4 bits each
#pragma unroll 1
        for (u64 i = pair; i < pair + 2 && i < end; i++) {
            Element e = moments(s.scalars, value_at(s.g_type, s.g, i),
                                s.scalars.beta1 * moment_at<MIXED>(s.moment_m, s.m, scale_m, i),
                                s.scalars.beta2 * moment_at<MIXED>(s.moment_v, s.v, scale_v, i));
            u32 draw_m = 0, draw_v = 0, group = s.group + (u32)(i / 4);
            if (s.m_draws) draw_m = draw16(word(s.keys_m, group), i & 3), draw_v = draw16(word(s.keys_v, group), i & 3);
            if (s.moment_m.kind < 2) {
                store_at(s.moment_m.kind, s.m, i, e.m, s.m_draws, draw_m);
            } else {
                u32 code = any_code<MIXED>(s.moment_m, new_m, e.m, s.m_draws, draw_m);
                if (s.moment_m.target.sign_shift == 7) ((u8 *)s.m)[i] = (u8)code;
                codes_m |= code << (i & 1) * 4;
            }
            if (s.moment_v.kind < 2) {
                store_at(s.moment_v.kind, s.v, i, e.v, s.m_draws, draw_v);
            } else {
                u32 code = any_code<MIXED>(s.moment_v, new_v, e.v, s.m_draws, draw_v);
                if (s.moment_v.target.sign_shift == 7) ((u8 *)s.v)[i] = (u8)code;
                codes_v |= code << (i & 1) * 4;
            }
        }
        if (s.moment_m.kind >= 2 && s.moment_m.target.sign_shift == 3) ((u8 *)s.m)[pair / 2] = (u8)codes_m;
        if (s.moment_v.kind >= 2 && s.moment_v.target.sign_shift == 3) ((u8 *)s.v)[pair / 2] = (u8)codes_v;
    }
    if (MIXED) {
        // The old scales were read by all.
        __syncwarp();
        const u64 block_m = (start >> log_m) + lane, block_v = (start >> log_v) + lane;
        if (block_m << log_m < end) store_scale<MIXED>(s.moment_m, s.m_scales, block_m, new_scale_m);
        if (block_v << log_v < end) store_scale<MIXED>(s.moment_v, s.v_scales, block_v, new_scale_v);
    } else if (lane == 0) {
        store_scale<MIXED>(s.moment_m, s.m_scales, b, new_scale_m);
        store_scale<MIXED>(s.moment_v, s.v_scales, b, new_scale_v);
    }
}

// How four parameters of type P are stored in words.
template <class P, class D> struct Parameters;
template <class D> struct Parameters<F32, D> {
    static const bool draws = false;
    FN_MEMBER void put(u32 *w, const float *x, const Word &) {
        UNROLL for (int i = 0; i < 4; i++) w[i] = bits_of(x[i]);
    }
};
template <> struct Parameters<BF16, NearestEven> {
    static const bool draws = false;
    FN_MEMBER void put(u32 *w, const float *x, const Word &) {
        UNROLL for (int i = 0; i < 2; i++) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
    }
};
template <> struct Parameters<BF16, Draws16> {
    static const bool draws = true;
    FN_MEMBER void put(u32 *w, const float *x, const Word &draws) {
        u32 sum[4];
        UNROLL for (int i = 0; i < 4; i++) sum[i] = bits_of(x[i]) + draw16(draws, i);
        UNROLL for (int i = 0; i < 2; i++) w[i] = __byte_perm(sum[2 * i], sum[2 * i + 1], 0x7632);
    }
};

// Four codes as a word, or half of one, the first lowest.
template <class T, class D, bool SECOND> FN u32 four_codes(const float *x, Near n, const Word &w) {
    u32 c[4], codes = 0;
    UNROLL for (int i = 0; i < 4; i++) c[i] = code_near<T, D, SECOND>(x[i], n, draw16(w, i));
    if (T::BITS == 8) {
        codes = __byte_perm(__byte_perm(c[0], c[1], 0x73), __byte_perm(c[2], c[3], 0x73), 0x5410);
    } else {
        UNROLL for (int i = 3; i >= 0; i--) codes = pushed<T>(codes, c[i]);
    }
    return codes;
}
template <class T, int EACH> FN void put_codes(u32 (&w)[EACH * T::BITS / 32], int quad, u32 codes) {
    if (T::BITS == 8) {
        w[quad] = codes;
    } else {
        w[quad / 2] = quad % 2 == 0 ? codes : w[quad / 2] | codes << 16;
    }
}

template <class P, class DP, class G, class M, class V, class D, int EACH> FN void blocks(const Step &s) {
    const u64 warp = ((u64)blockIdx.x * THREADS + threadIdx.x) / WARP;
    const u32 lane = threadIdx.x % WARP;
    const u64 tile = warp * (WARP * EACH), at = tile + lane * EACH;
    const u32 lanes = (1u << s.log_block) / EACH; // to a block
    bool done = false;
    if (s.vector && s.n >= tile + WARP * EACH) {
        const u64 b = at >> s.log_block;
        u32 p[EACH * P::bytes / 4], g[EACH * G::bytes / 4], m[EACH * M::BITS / 32], v[EACH * V::BITS / 32];
        u32 scale_m = s.m_scales[b], scale_v = s.v_scales[b];
        load<EACH * M::BITS / 32>(m, (const char *)s.m + at * M::BITS / 8);
        load<EACH * V::BITS / 32>(v, (const char *)s.v + at * V::BITS / 8);
        load<EACH * P::bytes / 4>(p, (const char *)s.p + at * P::bytes);
        load<EACH * G::bytes / 4>(g, (const char *)s.g + at * G::bytes);
        bool near = is_near<M>(scale_m) && is_near<V>(scale_v);
        // Powers of two times the betas, so that decoding and decay are one multiplication.
        float decay_m = s.scalars.beta1 * unit<M>(scale_m).first, decay_v = s.scalars.beta2 * unit<V>(scale_v).first;
        float new_m[EACH], new_v[EACH];
        u32 amax_m = 0, amax_v = 0;
        float poison = 0;
        UNROLL for (int q = 0; q < EACH / 4; q++) {
            const int per_m = 32 / M::BITS, per_v = 32 / V::BITS;
            float new_p[4];
            UNROLL for (int j = 0; j < 4; j++) {
                const int i = 4 * q + j;
                Element e = adamw_decayed(s.scalars, float_of(P::widen(element<P>(p, i))), float_of(G::widen(element<G>(g, i))),
                                          placed<M>(m[i / per_m], i % per_m) * decay_m, placed<V>(v[i / per_v], i % per_v) * decay_v);
                new_p[j] = e.p, new_m[i] = e.m, new_v[i] = e.v;
                poison = fmaf(e.p, 0.0f, poison);
                // Without sign. A NaN is larger than all.
                u32 magnitude_m = bits_of(e.m) * 2, magnitude_v = bits_of(e.v) * 2;
                amax_m = amax_m > magnitude_m ? amax_m : magnitude_m;
                amax_v = amax_v > magnitude_v ? amax_v : magnitude_v;
            }
            Word w = {0, 0};
            if (Parameters<P, DP>::draws) w = word(s.keys_p, s.group + (u32)(at / 4) + q);
            Parameters<P, DP>::put(p + q * P::bytes, new_p, w);
        }
        // Of scale codes, as of magnitudes, the largest is that of the block.
        u32 scales = scale_code<M>(amax_m / 2) | scale_code<V>(amax_v / 2) << 16;
#pragma unroll 1
        for (u32 other = lanes / 2; other > 0; other /= 2)
            scales = __vmaxu2(scales, __shfl_xor_sync(0xFFFFFFFF, scales, other));
        scale_m = scales & 0xFFFF, scale_v = scales >> 16;
        near = near && is_near<M>(scale_m) && is_near<V>(scale_v) && poison == 0;
        Near near_m = near_unit<M>(scale_m), near_v = near_unit<V>(scale_v);
        UNROLL for (int q = 0; q < EACH / 4; q++) {
            u32 group = s.group + (u32)(at / 4) + q;
            Word wm = {0, 0}, wv = {0, 0};
            if (D::bits) wm = word(s.keys_m, group), wv = word(s.keys_v, group);
            put_codes<M, EACH>(m, q, four_codes<M, D, false>(new_m + q * 4, near_m, wm));
            put_codes<V, EACH>(v, q, four_codes<V, D, true>(new_v + q * 4, near_v, wv));
        }
        // All of a warp or nothing: nobody writes before all have read.
        done = __all_sync(0xFFFFFFFF, near);
        if (done) {
            store<EACH * P::bytes / 4>((char *)s.p + at * P::bytes, p);
            store<EACH * M::BITS / 32>((char *)s.m + at * M::BITS / 8, m);
            store<EACH * V::BITS / 32>((char *)s.v + at * V::BITS / 8, v);
            if ((lane & (lanes - 1)) == 0) s.m_scales[b] = (u8)scale_m, s.v_scales[b] = (u8)scale_v;
        }
    }
    if (done) return;
    u64 end = tile + WARP * EACH < s.n ? tile + WARP * EACH : s.n;
#pragma unroll 1
    for (u64 b = tile >> s.log_block; b << s.log_block < end; b++) any_block<false>(s, b, lane);
}

#define ENTRY(name, P, DP, G, M, V, D, EACH)                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS, EACH == 8 ? 8 : 6) name(const __grid_constant__ Step s) {    \
        blocks<P, DP, G, M, V, D, EACH>(s);                                                                            \
    }

// blocks_<parameters>_<gradients>_<m>_<v>_<moments' rounding>, with n (nearest) or s (stochastic) behind what is rounded.
#define FORMATS(name, P, DP, G, M, V, EACH)                                                                            \
    ENTRY(name##_n, P, DP, G, M, V, NearestEven, EACH)                                                                 \
    ENTRY(name##_s, P, DP, G, M, V, Draws16, EACH)

#define PAIRS(name, P, DP, G, EACH)                                                                                    \
    FORMATS(name##_e4m3_ue4m4, P, DP, G, E4M3, UE4M4, EACH)                                                            \
    FORMATS(name##_e4m3_e4m3, P, DP, G, E4M3, E4M3, EACH)                                                              \
    FORMATS(name##_e5m2_ue5m3, P, DP, G, E5M2, UE5M3, EACH)                                                            \
    FORMATS(name##_e2m1_ue2m2nz, P, DP, G, E2M1, UE2M2Nz, EACH)

#if defined(SOURCE_ANY)
template <bool MIXED> FN void any(const Step &s) {
    u64 b = (u64)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (b << s.log_block < s.n) any_block<MIXED>(s, b, threadIdx.x % WARP);
}
extern "C" __global__ void __launch_bounds__(THREADS) blocks_any(const __grid_constant__ Step s) { any<false>(s); }
extern "C" __global__ void __launch_bounds__(THREADS, 8) blocks_mixed(const __grid_constant__ Step s) { any<true>(s); }
#elif defined(SOURCE_F32)
PAIRS(blocks_f32_f32, F32, NearestEven, F32, 8)
#elif defined(SOURCE_BF16)
PAIRS(blocks_bf16n_bf16, BF16, NearestEven, BF16, 16)
PAIRS(blocks_bf16s_bf16, BF16, Draws16, BF16, 16)
#else
#error "define the parameters: SOURCE_F32, SOURCE_BF16 or SOURCE_ANY"
#endif
