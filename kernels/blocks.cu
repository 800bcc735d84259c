// One step of AdamW for many tensors whose moments are stored in blocks that share a power of two: reads p, g, codes and scales once
// and writes p, codes and scales once.
//
// Bytes an element: 2 (p) + 1 (g) times their widths, and for each moment 2 times 1, or 1/2 for 4-bit codes, and 2 for each
// block: with blocks of 128 and two moments of 8 bits 16.03 with f32 p and g and 10.03 in BF16, with two of 4 bits 8.03.
// The arrays must not overlap. Element 0 of an item starts a block, and the group of its draws. Both moments have blocks of one
// size: 32, 64, 128 or 256 elements, any n; the last block may be shorter.
//
// EACH consecutive elements to a thread, so that some threads of a warp share a block; a warp at the end, or with a block whose
// scale is too large for `code_near` or that is not finite, does its blocks by one_block.
#include "any.cuh"

#define THREADS 128

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
        UNROLL for (int i = 0; i < 2; i++) w[i] = bf16_pair(x[2 * i], x[2 * i + 1]);
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

template <class P, class DP, class G, class M, class V, class D, int EACH>
FN void blocks(const AnyLaunch &a, Taken &taken) {
    const u32 lane = threadIdx.x % WARP;
    const u32 lanes = (1u << a.log_run) / EACH; // to a block
    const u32 t = blockIdx.x, at_item = item_ahead(a.launch, t, taken);
    const Item &there = a.launch.items[at_item];
    const u64 warp = (u64)(t - there.tile) * (THREADS / WARP) + threadIdx.x / WARP;
    const u64 tile = warp * (WARP * EACH), at = tile + lane * EACH;
    const u64 b = at >> a.log_run;
    const bool whole = (there.flags & VECTOR) && there.n >= tile + WARP * EACH;
    u32 p[EACH * P::bytes / 4], g[EACH * G::bytes / 4], m[EACH * M::BITS / 32], v[EACH * V::BITS / 32];
    u32 scale_m = 0, scale_v = 0;
    if (whole) {
        scale_m = ((const u8 *)there.scales[0])[b], scale_v = ((const u8 *)there.scales[1])[b];
        load<EACH * M::BITS / 32>(m, (const char *)there.states[0] + at * M::BITS / 8);
        load<EACH * V::BITS / 32>(v, (const char *)there.states[1] + at * V::BITS / 8);
        load<EACH * P::bytes / 4>(p, (const char *)there.p + at * P::bytes);
        load<EACH * G::bytes / 4>(g, (const char *)there.g + at * G::bytes);
    }
    // In the meantime:
    take(taken, a.launch, at_item);
    const Item &item = taken.item;
    const Record &record = taken.record;
    if (record.stands) return;
    bool done = false;
    if (whole) {
        const AdamW::Scalars betas = scalars_of<AdamW>(record);
        bool near = is_near<M>(scale_m) && is_near<V>(scale_v);
        // Powers of two times the betas, so that decoding and decay are one multiplication.
        float decay_m = betas.beta1 * unit<M>(scale_m).first, decay_v = betas.beta2 * unit<V>(scale_v).first;
        float new_m[EACH], new_v[EACH];
        u32 amax_m = 0, amax_v = 0;
        float poison = 0;
        UNROLL for (int q = 0; q < EACH / 4; q++) {
            const int per_m = 32 / M::BITS, per_v = 32 / V::BITS;
            float new_p[4];
            const AdamW::Scalars s = scalars_of<AdamW>(record);
            UNROLL for (int j = 0; j < 4; j++) {
                const int i = 4 * q + j;
                float x[2] = {placed<M>(m[i / per_m], i % per_m) * decay_m, placed<V>(v[i / per_v], i % per_v) * decay_v};
                new_p[j] = AdamW::decayed(s, float_of(P::widen(element<P>(p, i))), float_of(G::widen(element<G>(g, i))), x);
                new_m[i] = x[0], new_v[i] = x[1];
                poison = fmaf(new_p[j], 0.0f, poison);
                // Without sign. A NaN is larger than all.
                u32 magnitude_m = bits_of(x[0]) * 2, magnitude_v = bits_of(x[1]) * 2;
                amax_m = amax_m > magnitude_m ? amax_m : magnitude_m;
                amax_v = amax_v > magnitude_v ? amax_v : magnitude_v;
            }
            Word w = {0, 0};
            if (Parameters<P, DP>::draws) w = word(keys_of(record, 0), word_in(item.group) + (u32)(at / 4) + q);
            Parameters<P, DP>::put(p + q * P::bytes, new_p, w);
        }
        // Of scale codes, as of magnitudes, the largest is that of the block.
        u32 scales = scale_code<M>(amax_m / 2) | scale_code<V>(amax_v / 2) << 16;
        NO_UNROLL for (u32 other = lanes / 2; other > 0; other /= 2)
            scales = __vmaxu2(scales, __shfl_xor_sync(0xFFFFFFFF, scales, other));
        scale_m = scales & 0xFFFF, scale_v = scales >> 16;
        near = near && is_near<M>(scale_m) && is_near<V>(scale_v) && poison == 0;
        Near near_m = near_unit<M>(scale_m), near_v = near_unit<V>(scale_v);
        UNROLL for (int q = 0; q < EACH / 4; q++) {
            u32 group = word_in(item.group) + (u32)(at / 4) + q;
            Word wm = {0, 0}, wv = {0, 0};
            if (D::bits) wm = word(keys_of(record, 1), group), wv = word(keys_of(record, 2), group);
            put_codes<M, EACH>(m, q, four_codes<M, D, false>(new_m + q * 4, near_m, wm));
            put_codes<V, EACH>(v, q, four_codes<V, D, true>(new_v + q * 4, near_v, wv));
        }
        // All of a warp or nothing: nobody writes before all have read.
        done = __all_sync(0xFFFFFFFF, near);
        if (done) {
            store<EACH * P::bytes / 4>((char *)pointer_in(item.p) + at * P::bytes, p);
            store<EACH * M::BITS / 32>((char *)pointer_in(item.states[0]) + at * M::BITS / 8, m);
            store<EACH * V::BITS / 32>((char *)pointer_in(item.states[1]) + at * V::BITS / 8, v);
            if ((lane & (lanes - 1)) == 0) {
                ((u8 *)pointer_in(item.scales[0]))[b] = (u8)scale_m;
                ((u8 *)pointer_in(item.scales[1]))[b] = (u8)scale_v;
            }
        }
    }
    if (done) return;
    const u64 n = item.n, end = tile + WARP * EACH < n ? tile + WARP * EACH : n;
    NO_UNROLL for (u64 start = tile; start < end; start += 1u << a.log_run) one_block(a, record, item, start, lane);
}

#define ENTRY(name, P, DP, G, M, V, D, EACH)                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS, EACH == 8 ? 8 : 5) name(                                  \
        const __grid_constant__ AnyLaunch a) {                                                                         \
        __shared__ Taken taken;                                                                                        \
        blocks<P, DP, G, M, V, D, EACH>(a, taken);                                                                             \
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

#if defined(SOURCE_F32)
PAIRS(blocks_f32_f32, F32, NearestEven, F32, 8)
#elif defined(SOURCE_BF16)
PAIRS(blocks_bf16n_bf16, BF16, NearestEven, BF16, 16)
PAIRS(blocks_bf16s_bf16, BF16, Draws16, BF16, 16)
#else
#error "define the parameters: SOURCE_F32 or SOURCE_BF16"
#endif
