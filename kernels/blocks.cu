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

// How four parameters of type P are stored in words, and whether all that were are finite, for which `seen` is 0 before.
template <class P, class D> struct Parameters;
template <class D> struct Parameters<F32, D> {
    static const bool draws = false;
    FN_MEMBER void put(u32 *w, const float *x, const Word &, u32 &seen) {
        UNROLL for (int i = 0; i < 4; i++) {
            w[i] = bits_of(x[i]);
            seen = bits_of(fmaf(x[i], 0.0f, float_of(seen)));
        }
    }
    FN_MEMBER bool finite(u32 seen) { return float_of(seen) == 0.0f; }
};
template <> struct Parameters<BF16, NearestEven> {
    static const bool draws = false;
    FN_MEMBER void put(u32 *w, const float *x, const Word &, u32 &seen) {
        UNROLL for (int i = 0; i < 2; i++) {
            w[i] = bf16_pair(x[2 * i], x[2 * i + 1]);
            seen = times_zero(w[i], seen);
        }
    }
    FN_MEMBER bool finite(u32 seen) { return (seen & 0x7FFF7FFF) == 0; }
};
template <> struct Parameters<BF16, Draws16> : Parameters<F32, Draws16> {
    static const bool draws = true;
    FN_MEMBER void put(u32 *w, const float *x, const Word &draws, u32 &seen) {
        u32 sum[4];
        Parameters<F32, Draws16>::put(sum, x, draws, seen);
        UNROLL for (int i = 0; i < 4; i++) sum[i] += draw16(draws, i);
        UNROLL for (int i = 0; i < 2; i++) w[i] = __byte_perm(sum[2 * i], sum[2 * i + 1], 0x7632);
    }
};

// Codes of a moment from a thread's first group on.
template <class T, class D, int EACH> FN void encode(u32 (&codes)[EACH * T::BITS / 32], const float (&x)[EACH], Near n, const Keys &keys, u32 group, u32 middle) {
    const int per = 32 / T::BITS;
    UNROLL for (int i = 0; i < EACH / per; i++) {
        u32 c[per];
        UNROLL for (int q = 0; q < per / 4; q++) {
            Word w = {0, 0};
            if (D::bits) w = word(keys, group + i * (per / 4) + q);
            UNROLL for (int j = 0; j < 4; j++)
                c[4 * q + j] = code_near<T, D>(x[i * per + 4 * q + j], n, Carried<D>::noise(w, j, middle));
        }
        codes[i] = packed<T>(c);
    }
}

// The tiles of a warp, or its only one.
template <class P, class DP, class G, class M, class V, class D, int EACH, bool MANY> struct Tiles {
    static const u32 TILE = WARP * EACH;
    static const int LOG_EACH = EACH == 16 ? 4 : 3;
    static_assert(1 << LOG_EACH == EACH, "elements of a thread");

    // Codes of 4 bits are looked up by two, where a warp has tiles enough for a table.
    static const bool PAIRS_M = MANY && M::BITS == 4, PAIRS_V = MANY && V::BITS == 4;

    const AnyLaunch &a;
    const Pairs *pairs; // of m and of v
    Taken *taken; // of the tile that is worked on and of the one that is coming
    u32 slot;     // which of them is that of the latter
    u32 before, whole_tiles; // of its item: tiles before it, and those of its own that can be done all at once
    // What is coming: which tile of its item, and then what a thread has of it.
    u32 tile;
    u32 p[EACH * P::bytes / 4], g[EACH * G::bytes / 4], m[EACH * M::BITS / 32], v[EACH * V::BITS / 32];
    u32 scale_m, scale_v;

    // What a thread makes of it: parameters, rounded, and moments, not; the largest magnitudes of those, of second moments as bits,
    // whose order is that of values, as nothing is negative, with NaN above all.
    struct Made {
        u32 p[EACH * P::bytes / 4];
        float m[EACH], v[EACH];
        float most_m;
        u32 least_v, most_v;
        bool finite; // whether all of it is: where a moment is not, neither is the parameter
    };

    FN_METHOD Tiles(const AnyLaunch &a, Taken *taken, const Pairs *pairs) : a(a), pairs(pairs), taken(taken), slot(0) {}

    // Of an item.
    FN_MEMBER u32 whole_tiles_of(const Item &it) { return it.flags & VECTOR ? (u32)(it.n / TILE) : 0; }
    FN_METHOD bool whole() const { return tile < whole_tiles; }
    // The only tile, made anew from what is in shared memory rather than kept.
    FN_METHOD u32 only_tile() const { return (blockIdx.x - word_in(taken->item.tile)) * (THREADS / WARP) + threadIdx.x / WARP; }
    // The thread's elements, of its item, in units of EACH.
    FN_METHOD u32 place(u32 tile) const { return tile * WARP + threadIdx.x % WARP; }
    FN_METHOD u32 place() const { return place(MANY ? tile : only_tile()); }
    // The first group of those elements.
    FN_METHOD u32 group(const Item &it, u32 place) const { return word_in(it.group) + place * (EACH / 4); }

    // Begins to load tile t of all, the first one or the next.
    FN_METHOD void load_tile(u32 t, bool first) {
        if (first || t - before >= word_in(taken[slot].item.tiles)) {
            const u32 item = item_by_steps(a.launch, t);
            slot ^= 1;
            take_by_warp(taken[slot], a.launch, item);
            const Item &it = taken[slot].item;
            before = it.tile, whole_tiles = whole_tiles_of(it);
        }
        tile = t - before;
        if (whole()) load_from(taken[slot].item, place());
    }

    FN_METHOD void load_from(const Item &it, u32 place) {
        const u64 at = place;
        const u32 b = place >> (a.log_run - LOG_EACH);
        scale_m = ((const u8 *)it.scales[0])[b], scale_v = ((const u8 *)it.scales[1])[b];
        load<EACH * M::BITS / 32>(m, (const char *)it.states[0] + at * (EACH * M::BITS / 8));
        load<EACH * V::BITS / 32>(v, (const char *)it.states[1] + at * (EACH * V::BITS / 8));
        load<EACH * P::bytes / 4>(p, (const char *)it.p + at * (EACH * P::bytes));
        load<EACH * G::bytes / 4>(g, (const char *)it.g + at * (EACH * G::bytes));
    }

    // Has a whole tile brought into the L2 cache, 64 bytes a lane: what is loaded while codes are made would be late from memory.
    FN_METHOD void fetch(const Item &it, u32 tile) const {
        const u32 lane = threadIdx.x % WARP;
        static_assert(P::bytes == G::bytes, "p and g side by side");
        const u32 of_p = TILE * P::bytes / 64, of_m = TILE * M::BITS / 8 / 64, of_v = TILE * V::BITS / 8 / 64;
        UNROLL for (u32 first = 0; first < 2 * of_p; first += WARP) {
            const u32 i = first + lane;
            const u64 base = double_word_in((&(const u64 &)it.p)[i / of_p]);
            prefetch((const char *)base + (u64)tile * (TILE * P::bytes) + i % of_p * 64);
        }
        if (lane < of_m + of_v) {
            static_assert(of_m == of_v, "moments of one width");
            const u64 base = double_word_in((&(const u64 &)it.states[0])[lane / of_m]);
            prefetch((const char *)base + (u64)tile * (TILE * M::BITS / 8) + lane % of_m * 64);
        }
    }

    // Four values of a moment, placed.
    template <class T, bool PAIRS, int WORDS> FN_METHOD void decode(float (&x)[4], const u32 (&w)[WORDS], int q, const Pairs *pairs) const {
        const int per = 32 / T::BITS;
        if constexpr (PAIRS) {
            UNROLL for (int j = 0; j < 4; j += 2) {
                float pair[2];
                pair_of(*pairs, w[4 * q / per], (4 * q + j) % per / 2, pair);
                x[j] = pair[0], x[j + 1] = pair[1];
            }
        } else {
            UNROLL for (int j = 0; j < 4; j++) x[j] = placed<T>(w[(4 * q + j) / per], (4 * q + j) % per);
        }
    }

    // ONE: the two factors of a gradient are one.
    template <bool ONE, class A> FN_METHOD void make(Made &made, A &arithmetic, const Taken &of) {
        const AdamW::Scalars s = scalars_of<AdamW>(of.record);
        // Powers of two times the betas, so that decoding and decay are one multiplication.
        const float decay_m = s.beta1 * near_unit<M>(scale_m).decode, decay_v = s.beta2 * near_unit<V>(scale_v).decode;
        const float factor = AdamW::factor(s);
        u32 seen = 0;
        made.most_m = 0, made.least_v = 0xFFFFFFFF, made.most_v = 0;
        UNROLL for (int q = 0; q < EACH / 4; q++) {
            float now[4], old_m[4], old_v[4];
            decode<M, PAIRS_M>(old_m, m, q, pairs);
            decode<V, PAIRS_V>(old_v, v, q, PAIRS_V ? pairs + 1 : 0);
            UNROLL for (int j = 0; j < 4; j++) {
                const int i = 4 * q + j;
                float x[2] = {old_m[j] * decay_m, old_v[j] * decay_v};
                float gradient = float_of(G::widen(element<G>(g, i)));
                gradient = ONE ? gradient * factor : AdamW::scaled(s, gradient);
                now[j] = AdamW::decayed(arithmetic, s, float_of(P::widen(element<P>(p, i))), gradient, x);
                made.m[i] = x[0], made.v[i] = x[1];
                made.most_m = fmaxf(made.most_m, fabsf(x[0]));
            }
            // Two at a time: an H200 compares three numbers at once.
            UNROLL for (int j = 4 * q; j < 4 * q + 4; j += 2) {
                const u32 one = bits_of(made.v[j]), other = bits_of(made.v[j + 1]);
                made.most_v = larger(made.most_v, larger(one, other));
                if (V::ZERO) made.least_v = smaller(made.least_v, smaller(one, other));
            }
            Word w = {0, 0};
            if (Parameters<P, DP>::draws) w = word(keys_of(of.record, 0), group(of.item, place()) + q);
            Parameters<P, DP>::put(made.p + q * P::bytes, now, w, seen);
        }
        made.finite = Parameters<P, DP>::finite(seen);
    }

    // Whether all is what IEEE 754 has it.
    template <bool ANY> FN_METHOD bool sure(const Made &made, const SeededRoots<ANY> &seeded) const {
        bool sure = made.finite;
        if (!ANY) sure = sure && made.most_v < bits_of(BEYOND_NORMAL) && (!V::ZERO || made.least_v >= bits_of(LEAST_NORMAL));
        if (seeded.doubt()) {
            UNROLL for (int i = 0; i < EACH; i++) sure &= Seeded::fair(made.m[i]);
        }
        return sure;
    }

    // Whether a thread has second moments that are likely to become too small for SeededNormal, or, where nothing looks at what they
    // become, that may: in a format without zero none falls below beta2 times the value of code 0.
    FN_METHOD bool small(float beta2) const {
        return V::ZERO ? v[0] == 0 : !(near_unit<V>(scale_v).decode * float_of(V::ONE / 2) * beta2 >= LEAST_NORMAL);
    }

    // The largest scale code of a block's threads, of two moments in half a word each.
    FN_METHOD u32 of_block(u32 scales, u32 lanes) const {
        if (lanes == 128 / EACH) {
            UNROLL for (u32 other = 64 / EACH; other > 0; other /= 2)
                scales = larger_halves(scales, __shfl_xor_sync(0xFFFFFFFF, scales, other));
            return scales;
        }
        NO_UNROLL for (u32 other = lanes / 2; other > 0; other /= 2)
            scales = larger_halves(scales, __shfl_xor_sync(0xFFFFFFFF, scales, other));
        return scales;
    }

    // A step of the tile that was coming, while the next one does if there is one. False, and nothing new, where this is not how it
    // is done.
    FN_METHOD bool step(bool more, u32 next) {
        const u32 lanes = 1u << (a.log_run - LOG_EACH); // to a block
        const Taken &of = taken[slot];
        const Item &item = of.item;
        bool near = is_near<M>(scale_m) && is_near<V>(scale_v);
        // With 4 bits it is instructions that take the time.
        if (MANY && M::BITS == 8 && more && next - before < whole_tiles) fetch(item, next - before);
        Made made;
        bool sure = false;
        const AdamW::Scalars s = scalars_of<AdamW>(of.record);
        const bool seeded = a.launch.seeded && AdamW::seeded(s);
        const bool normal = seeded && AdamW::one_factor(s) && __all_sync(0xFFFFFFFF, !small(s.beta2));
        if (normal) {
            SeededNormal arithmetic;
            make<true>(made, arithmetic, of);
            sure = this->sure(made, arithmetic);
        }
        // What was loaded is not kept for what is rare.
        if (near && seeded && !sure) {
            if (normal) load_from(item, place());
            Seeded arithmetic;
            make<false>(made, arithmetic, of);
            sure = this->sure(made, arithmetic);
        }
        if (near && !sure) {
            load_from(item, place());
            Written arithmetic;
            make<false>(made, arithmetic, of);
        }
        const u32 of_many = place();
        if (more) load_tile(next, false);
        near = near && made.finite;
        // Of scale codes, as of magnitudes, the largest is that of the block.
        const u32 scales = of_block(scale_code<M>(bits_of(made.most_m)) | scale_code<V>(made.most_v) << 16, lanes);
        const u32 to_scale_m = scales & 0xFFFF, to_scale_v = scales >> 16;
        near = near && is_near<M>(to_scale_m) && is_near<V>(to_scale_v);
        // All of a warp or nothing: nobody writes before all have read.
        if (!__all_sync(0xFFFFFFFF, near)) return false;
        const u32 at = MANY ? of_many : place(), group = this->group(item, at), middle = word_in(of.middle);
        const Near near_m = near_unit<M>(to_scale_m), near_v = near_unit<V>(to_scale_v);
        u32 to_m[EACH * M::BITS / 32], to_v[EACH * V::BITS / 32];
        encode<M, D, EACH>(to_m, made.m, near_m, keys_of(of.record, 1), group, middle);
        encode<V, D, EACH>(to_v, made.v, near_v, keys_of(of.record, 2), group, middle);
        // Where none of a thread's second moments lies below code 1, none has code 0.
        if (V::ZERO && bits_of(product_down(float_of(made.least_v), near_v.encode)) < V::ONE) {
            static_assert(!V::ZERO || V::BITS == 8, "codes to a word");
            if (made.least_v > 0) {
                UNROLL for (int i = 0; i < EACH * V::BITS / 32; i++) to_v[i] = above_zero(to_v[i]);
            } else {
                UNROLL for (int i = 0; i < EACH; i++) {
                    if (made.v[i] > 0.0f && (to_v[i / 4] >> i % 4 * 8 & 0xFF) == 0) to_v[i / 4] |= 1u << i % 4 * 8;
                }
            }
        }
        store<EACH * P::bytes / 4>((char *)pointer_in(item.p) + at * (u64)(EACH * P::bytes), made.p);
        store<EACH * M::BITS / 32>((char *)pointer_in(item.states[0]) + at * (u64)(EACH * M::BITS / 8), to_m);
        store<EACH * V::BITS / 32>((char *)pointer_in(item.states[1]) + at * (u64)(EACH * V::BITS / 8), to_v);
        if ((at & (lanes - 1)) == 0) {
            const u32 b = at >> (a.log_run - LOG_EACH);
            ((u8 *)pointer_in(item.scales[0]))[b] = (u8)to_scale_m;
            ((u8 *)pointer_in(item.scales[1]))[b] = (u8)to_scale_v;
        }
        return true;
    }

    // One tile of a warp, its block's tiles being of one item.
    FN_METHOD void once() {
        const There there_is = item_there(a.launch, blockIdx.x);
        const Item &there = there_is.item;
        const u32 tile = (blockIdx.x - there.tile) * (THREADS / WARP) + threadIdx.x / WARP, whole_tiles = whole_tiles_of(there);
        const bool whole = tile < whole_tiles;
        if (whole) load_from(there, place(tile));
        const u32 far = tile + a.launch.ahead * (THREADS / WARP);
        if (a.launch.ahead && far < whole_tiles) {
            const u64 at = place(far);
            prefetch((const char *)there.p + at * (EACH * P::bytes));
            prefetch((const char *)there.g + at * (EACH * G::bytes));
            if (threadIdx.x % 2 == 0 || M::BITS * EACH > 64) prefetch((const char *)there.states[0] + at * (EACH * M::BITS / 8));
            if (threadIdx.x % 2 == 0 || V::BITS * EACH > 64) prefetch((const char *)there.states[1] + at * (EACH * V::BITS / 8));
        }
        prefetch_next(a.launch, there_is.number, blockIdx.x);
        end_taking(taken[0], a.launch, there_is.number, there.hyper, begin_taking(a.launch, there_is.number));
        if (taken[0].record.stands) return;
        if (!whole || !step(false, 0)) one_by_one(taken[0], only_tile());
        make_ahead(a.launch);
    }

    // The blocks of a tile.
    FN_METHOD void one_by_one(const Taken &of, u32 tile) {
        NO_UNROLL for (u32 at = 0; at < TILE; at += 1u << a.log_run) {
            const u64 i = (u64)tile * TILE + at;
            if (i < double_word_in(of.item.n)) one_block(a, of.record, of.item, i, threadIdx.x % WARP);
        }
    }

    // The tiles of a warp, one after another, all warps side by side.
    FN_METHOD void run(Pairs *pairs) {
        if (PAIRS_M || PAIRS_V) {
            if (PAIRS_M) make_pairs<M>(pairs[0], threadIdx.x, THREADS);
            if (PAIRS_V) make_pairs<V>(pairs[1], threadIdx.x, THREADS);
            __syncthreads();
        }
        const u32 by = gridDim.x * (THREADS / WARP);
        u32 t = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
        if (a.launch.direct && blockIdx.x == 0) advance(a.launch);
        make_ahead(a.launch);
        if (t >= a.tiles) return;
        load_tile(t, true);
        if (taken[slot].record.stands) return;
        NO_UNROLL while (t < a.tiles) {
            const Taken &of = taken[slot];
            const u32 now = tile;
            bool done = false;
            t += by;
            if (whole()) {
                done = step(t < a.tiles, t);
            } else if (t < a.tiles) {
                load_tile(t, false);
            }
            if (!done) one_by_one(of, now);
        }
    }
};

// Blocks to a multiprocessor: 64 registers a thread leave 8, 128 leave 4.
#define ENTRY(name, P, DP, G, M, V, D)                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, P::bytes == 4 ? 8 : 4) name(                                 \
        const __grid_constant__ AnyLaunch a) {                                                                         \
        if constexpr (P::bytes == 4) {                                                                                 \
            __shared__ Taken taken;                                                                                    \
            Tiles<P, DP, G, M, V, D, 8, false>(a, &taken, 0).once();                                                          \
        } else {                                                                                                       \
            __shared__ Taken taken[THREADS / WARP][2];                                                                 \
            __shared__ Pairs pairs[M::BITS == 4 || V::BITS == 4 ? 2 : 1];                                              \
            Tiles<P, DP, G, M, V, D, 16, true>(a, taken[threadIdx.x / WARP], pairs).run(pairs);                        \
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
