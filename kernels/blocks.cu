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
//
// With f32 parameters memory is what takes the time: a warp has one tile, and has tiles that come later brought to the L2 cache. In
// BF16 it is instructions: a warp takes several tiles, so that what it does once for all of them is little, and loads the next one
// while it makes codes of this one.
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

// Four codes of a quad as a word, or half of one.
template <class T, int EACH> FN void put_codes(u32 (&w)[EACH * T::BITS / 32], int quad, const u32 (&c)[4]) {
    const u32 codes = four_codes<T>(c);
    if (T::BITS == 8) {
        w[quad] = codes;
    } else {
        w[quad / 2] = quad % 2 == 0 ? codes : w[quad / 2] | codes << 16;
    }
}

// Four codes of a moment.
template <class T, class D> FN void encode(u32 (&c)[4], const float *x, Near n, const Keys &keys, u32 group) {
    Word w = {0, 0};
    if (D::bits) w = word(keys, group);
    UNROLL for (int j = 0; j < 4; j++) c[j] = code_near<T, D>(x[j], n, Carried<D>::noise(w, j));
}

// The tiles of a warp.
template <class P, class DP, class G, class M, class V, class D, int EACH> struct Tiles {
    static const u32 TILE = WARP * EACH, NONE = 0xFFFFFFFFu;

    const AnyLaunch &a;
    Taken *taken; // of the tile that is worked on and of the one that is coming
    u32 slot;     // which of them is that of the latter
    u32 item;     // and the number of its item
    // What is coming: where in its item, whether it is to be done all at once, and then what a thread has of it.
    u64 start;
    bool whole;
    u32 p[EACH * P::bytes / 4], g[EACH * G::bytes / 4], m[EACH * M::BITS / 32], v[EACH * V::BITS / 32];
    u32 scale_m, scale_v;

    FN_METHOD Tiles(const AnyLaunch &a, Taken *taken) : a(a), taken(taken), slot(0), item(NONE) {}

    // Begins to load tile t.
    FN_METHOD void load_tile(u32 t) {
        const bool many = a.launch.count > 1;
        if (item == NONE || (many && t - a.launch.items[item].tile >= a.launch.items[item].tiles)) {
            item = many ? item_of(a.launch.first, a.launch.count, t) : 0;
            slot ^= 1;
            take_by_warp(taken[slot], a.launch, item);
        }
        const Item &it = taken[slot].item;
        start = (u64)(t - word_in(it.tile)) * TILE;
        whole = (word_in(it.flags) & VECTOR) && double_word_in(it.n) >= start + TILE;
        if (whole) load_from(it);
    }

    FN_METHOD void load_from(const Item &it) {
        const u64 at = start + threadIdx.x % WARP * EACH, b = at >> a.log_run;
        scale_m = ((const u8 *)it.scales[0])[b], scale_v = ((const u8 *)it.scales[1])[b];
        load<EACH * M::BITS / 32>(m, (const char *)it.states[0] + at * M::BITS / 8);
        load<EACH * V::BITS / 32>(v, (const char *)it.states[1] + at * V::BITS / 8);
        load<EACH * P::bytes / 4>(p, (const char *)it.p + at * P::bytes);
        load<EACH * G::bytes / 4>(g, (const char *)it.g + at * G::bytes);
    }

    // New values of what a thread has, unrounded, and the parameters, rounded; the largest magnitudes of the moments, of second moments
    // as bits, whose order is that of values, as nothing is negative, with NaN above all. Not 0 if one of them is NaN or infinite.
    template <class A>
    FN_METHOD float values(A &arithmetic, const AdamW::Scalars &s, const Record &record, u32 group, u32 (&to_p)[EACH * P::bytes / 4],
                           float (&new_m)[EACH], float (&new_v)[EACH], float &amax_m, u32 &amax_v) {
        // Powers of two times the betas, so that decoding and decay are one multiplication.
        const float decay_m = s.beta1 * near_unit<M>(scale_m).decode, decay_v = s.beta2 * near_unit<V>(scale_v).decode;
        const int per_m = 32 / M::BITS, per_v = 32 / V::BITS;
        float poison = 0;
        amax_m = 0, amax_v = 0;
        UNROLL for (int q = 0; q < EACH / 4; q++) {
            float new_p[4];
            UNROLL for (int j = 0; j < 4; j++) {
                const int i = 4 * q + j;
                float x[2] = {placed<M>(m[i / per_m], i % per_m) * decay_m, placed<V>(v[i / per_v], i % per_v) * decay_v};
                new_p[j] = AdamW::decayed(arithmetic, s, float_of(P::widen(element<P>(p, i))), float_of(G::widen(element<G>(g, i))), x);
                new_m[i] = x[0], new_v[i] = x[1];
                // Where a moment is one of the two, so is the parameter.
                poison = fmaf(new_p[j], 0.0f, poison);
                amax_m = fmaxf(amax_m, fabsf(x[0]));
                const u32 bits_v = bits_of(x[1]);
                amax_v = amax_v > bits_v ? amax_v : bits_v;
            }
            Word w = {0, 0};
            if (Parameters<P, DP>::draws) w = word(keys_of(record, 0), group + q);
            Parameters<P, DP>::put(to_p + q * P::bytes, new_p, w);
        }
        return poison;
    }

    // A step of the tile that was coming, while the next one does if there is one. False, and nothing new, where this is not how it
    // is done.
    FN_METHOD bool step(bool more, u32 next) {
        const u32 lane = threadIdx.x % WARP;
        const u32 lanes = (1u << a.log_run) / EACH; // to a block
        const Item &item = taken[slot].item;
        const Record &record = taken[slot].record;
        const u64 at = start + lane * EACH;
        const AdamW::Scalars s = scalars_of<AdamW>(record);
        const u32 group = word_in(item.group) + (u32)(at / 4);
        bool near = is_near<M>(scale_m) && is_near<V>(scale_v);
        Seeded arithmetic;
        u32 to_p[EACH * P::bytes / 4], amax_v;
        float new_m[EACH], new_v[EACH], amax_m;
        float poison = values(arithmetic, s, record, group, to_p, new_m, new_v, amax_m, amax_v);
        bool sure = poison == 0 && a.launch.seeded && AdamW::seeded(s);
        if (arithmetic.doubt()) {
            UNROLL for (int i = 0; i < EACH; i++) sure &= Seeded::fair(new_m[i]);
        }
        bool zero = arithmetic.rooted_zero();
        if (near && !sure) {
            Written written;
            poison = values(written, s, record, group, to_p, new_m, new_v, amax_m, amax_v);
            zero = true;
        }
        if (more) load_tile(next);
        near = near && poison == 0;
        // Of scale codes, as of magnitudes, the largest is that of the block.
        u32 scales = scale_code<M>(bits_of(amax_m)) | scale_code<V>(amax_v) << 16;
        NO_UNROLL for (u32 other = lanes / 2; other > 0; other /= 2)
            scales = __vmaxu2(scales, __shfl_xor_sync(0xFFFFFFFF, scales, other));
        const u32 to_scale_m = scales & 0xFFFF, to_scale_v = scales >> 16;
        near = near && is_near<M>(to_scale_m) && is_near<V>(to_scale_v);
        // All of a warp or nothing: nobody writes before all have read.
        if (!__all_sync(0xFFFFFFFF, near)) return false;
        const Near near_m = near_unit<M>(to_scale_m), near_v = near_unit<V>(to_scale_v);
        const Keys keys_m = keys_of(record, 1), keys_v = keys_of(record, 2);
        // What second moments above zero are stored as at least, which all of them are unless one may be zero.
        const u32 least = zero ? 0 : LEAST_CODE;
        u32 to_m[EACH * M::BITS / 32], to_v[EACH * V::BITS / 32];
        UNROLL for (int q = 0; q < EACH / 4; q++) {
            u32 c[4];
            encode<M, D>(c, new_m + q * 4, near_m, keys_m, group + q);
            put_codes<M, EACH>(to_m, q, c);
            encode<V, D>(c, new_v + q * 4, near_v, keys_v, group + q);
            if (V::ZERO) {
                UNROLL for (int j = 0; j < 4; j++) c[j] = c[j] > least ? c[j] : least;
            }
            put_codes<V, EACH>(to_v, q, c);
        }
        if (V::ZERO && least == 0) {
            UNROLL for (int i = 0; i < EACH; i++) {
                const int per_v = 32 / V::BITS, place = i % per_v * V::BITS;
                const u32 code = to_v[i / per_v] >> place & ((1u << V::BITS) - 1);
                if (code == 0 && new_v[i] > 0.0f) to_v[i / per_v] |= 1u << place;
            }
        }
        store<EACH * P::bytes / 4>((char *)pointer_in(item.p) + at * P::bytes, to_p);
        store<EACH * M::BITS / 32>((char *)pointer_in(item.states[0]) + at * M::BITS / 8, to_m);
        store<EACH * V::BITS / 32>((char *)pointer_in(item.states[1]) + at * V::BITS / 8, to_v);
        if ((lane & (lanes - 1)) == 0) {
            const u64 b = at >> a.log_run;
            ((u8 *)pointer_in(item.scales[0]))[b] = (u8)to_scale_m;
            ((u8 *)pointer_in(item.scales[1]))[b] = (u8)to_scale_v;
        }
        return true;
    }

    // One tile of a warp, its block's tiles being of one item.
    FN_METHOD void once() {
        const u32 block = blockIdx.x, at_item = item_ahead(a.launch, block, taken[0]);
        const Item &there = a.launch.items[at_item];
        start = ((u64)(block - there.tile) * (THREADS / WARP) + threadIdx.x / WARP) * TILE;
        whole = (there.flags & VECTOR) && there.n >= start + TILE;
        if (whole) load_from(there);
        const u64 far = start + (u64)a.launch.ahead * (THREADS / WARP * TILE);
        if (a.launch.ahead && (there.flags & VECTOR) && there.n >= far + TILE) {
            const u64 at = far + threadIdx.x % WARP * EACH;
            prefetch((const char *)there.p + at * P::bytes);
            prefetch((const char *)there.g + at * G::bytes);
            if (threadIdx.x % 2 == 0 || M::BITS * EACH > 64) prefetch((const char *)there.states[0] + at * M::BITS / 8);
            if (threadIdx.x % 2 == 0 || V::BITS * EACH > 64) prefetch((const char *)there.states[1] + at * V::BITS / 8);
        }
        take(taken[0], a.launch, at_item);
        if (taken[0].record.stands) return;
        if (!whole || !step(false, 0)) one_by_one(taken[0], start);
    }

    // The blocks of a tile.
    FN_METHOD void one_by_one(const Taken &of, u64 from) {
        const u64 n = of.item.n, to = from + TILE < n ? from + TILE : n;
        NO_UNROLL for (u64 i = from; i < to; i += 1u << a.log_run) one_block(a, of.record, of.item, i, threadIdx.x % WARP);
    }

    // The tiles of a warp, one after another, all warps side by side.
    FN_METHOD void run() {
        const u32 by = gridDim.x * (THREADS / WARP);
        u32 t = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
        if (a.launch.direct && blockIdx.x == 0) advance(a.launch);
        if (t >= a.tiles) return;
        load_tile(t);
        if (taken[slot].record.stands) return;
        NO_UNROLL while (t < a.tiles) {
            const Taken &of = taken[slot];
            const u64 from = start;
            bool done = false;
            t += by;
            if (whole) {
                done = step(t < a.tiles, t);
            } else if (t < a.tiles) {
                load_tile(t);
            }
            if (!done) one_by_one(of, from);
        }
    }
};

// Blocks to a multiprocessor: 64 registers a thread leave 8, 128 leave 4.
#define ENTRY(name, P, DP, G, M, V, D)                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, P::bytes == 4 ? 8 : 4) name(                                 \
        const __grid_constant__ AnyLaunch a) {                                                                         \
        if constexpr (P::bytes == 4) {                                                                                 \
            __shared__ Taken taken;                                                                                    \
            Tiles<P, DP, G, M, V, D, 8>(a, &taken).once();                                                             \
        } else {                                                                                                       \
            __shared__ Taken taken[THREADS / WARP][2];                                                                 \
            Tiles<P, DP, G, M, V, D, 16>(a, taken[threadIdx.x / WARP]).run();                                          \
        }                                                                                                              \
    }

// blocks_<parameters>_<gradients>_<m>_<v>_<moments' rounding>, with n (nearest) or s (stochastic) behind what is rounded.
#define FORMATS(name, P, DP, G, M, V)                                                                                  \
    ENTRY(name##_n, P, DP, G, M, V, NearestEven)                                                                       \
    ENTRY(name##_s, P, DP, G, M, V, Draws16)

#define PAIRS(name, P, DP, G)                                                                                          \
    FORMATS(name##_e4m3_ue4m4, P, DP, G, E4M3, UE4M4)                                                                  \
    FORMATS(name##_e4m3_e4m3, P, DP, G, E4M3, E4M3)                                                                    \
    FORMATS(name##_e5m2_ue5m3, P, DP, G, E5M2, UE5M3)                                                                  \
    FORMATS(name##_e2m1_ue2m2nz, P, DP, G, E2M1, UE2M2Nz)

#if defined(SOURCE_F32)
PAIRS(blocks_f32_f32, F32, NearestEven, F32)
#elif defined(SOURCE_BF16)
PAIRS(blocks_bf16n_bf16, BF16, NearestEven, BF16)
PAIRS(blocks_bf16s_bf16, BF16, Draws16, BF16)
#else
#error "define the parameters: SOURCE_F32 or SOURCE_BF16"
#endif
