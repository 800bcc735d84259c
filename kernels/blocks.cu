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
// With f32 parameters memory is what takes the time: a warp has one tile. In BF16 it is instructions: a warp takes several tiles, so
// that what it does once for all of them is little, and has the next one copied to shared memory while it works on this one.
#include "any.cuh"
#include "bounds.cuh"

#define THREADS 128
// Where an item in shared memory has a field.
#define AT(field) (u32)__builtin_offsetof(Taken, item.field)
static_assert(__builtin_offsetof(Taken, record) == 0, "a record is where its item is");

// How four parameters of type P are stored in words, and whether all that were are numbers, in BF16 finite ones, for which `seen` is 0 before.
template <class P, class D> struct Parameters;
template <class D> struct Parameters<F32, D> {
    static const bool draws = false;
    FN_MEMBER void put(u32 *w, const float *x, const Word &, u32 &seen) {
        UNROLL for (int i = 0; i < 4; i++) w[i] = bits_of_result(x[i]);
        // The largest one as an integer, two at a time: NaN if there is one.
        UNROLL for (int i = 0; i < 4; i += 2) seen = larger_signed(seen, larger_signed(w[i], w[i + 1]));
    }
    FN_MEMBER bool numbers(u32 seen) { return seen <= F32_INFINITY; }
};
template <> struct Parameters<BF16, NearestEven> {
    static const bool draws = false;
    FN_MEMBER void put(u32 *w, const float *x, const Word &, u32 &seen) {
        UNROLL for (int i = 0; i < 2; i++) {
            w[i] = bf16_pair(x[2 * i], x[2 * i + 1]);
            seen = times_zero(w[i], seen);
        }
    }
    // What lies between two bounds, and in `apart` a bit where that is not one number.
    FN_MEMBER void put_between(u32 *w, const float *low, const float *high, const Word &, u32 &apart) {
        UNROLL for (int i = 0; i < 2; i++) {
            w[i] = bf16_pair(low[2 * i], low[2 * i + 1]);
            apart |= w[i] ^ bf16_pair(high[2 * i], high[2 * i + 1]);
        }
    }
    FN_MEMBER bool numbers(u32 seen) { return (seen & 0x7FFF7FFF) == 0; }
};
template <> struct Parameters<BF16, Draws16> {
    static const bool draws = true;
    FN_MEMBER void put(u32 *w, const float *x, const Word &draws, u32 &seen) {
        UNROLL for (int i = 0; i < 4; i++) seen = bits_of(fmaf(x[i], 0.0f, float_of(seen)));
        round(w, x, draws);
    }
    FN_MEMBER bool numbers(u32 seen) { return float_of(seen) == 0.0f; }
    FN_MEMBER void put_between(u32 *w, const float *low, const float *high, const Word &draws, u32 &apart) {
        u32 other[2];
        round(w, low, draws), round(other, high, draws);
        UNROLL for (int i = 0; i < 2; i++) apart |= w[i] ^ other[i];
    }
    FN_MEMBER void round(u32 *w, const float *x, const Word &draws) {
        u32 sum[4];
        UNROLL for (int i = 0; i < 4; i++) sum[i] = bits_of(x[i]) + draw16(draws, i);
        UNROLL for (int i = 0; i < 2; i++) w[i] = byte_perm(sum[2 * i], sum[2 * i + 1], 0x7632);
    }
};

// Codes of a moment from a thread's first group on.
template <class T, class D, int EACH> FN void encode(u32 (&codes)[EACH * T::BITS / 32], const float (&x)[EACH], Near n, const Keys &keys, u32 group, u32 middle) {
    const int per = 32 / T::BITS;
    Word w[EACH / 4] = {};
    if (D::bits) words<EACH / 4>(w, keys, group);
    UNROLL for (int i = 0; i < EACH / per; i++) {
        u32 c[per];
        UNROLL for (int j = 0; j < per; j++) c[j] = code_near<T, D>(x[i * per + j], n, Carried<D>::noise(w[(i * per + j) / 4], j % 4, middle));
        codes[i] = packed<T>(c);
    }
}

// Of both moments, the values of codes of 4 bits, placed, times a factor: made by a warp, and looked up by its lanes all at once, as each bank
// of shared memory has one of them.
struct alignas(256) Values {
    float of_m[16], of_v[16];

    // By operations that the compiler does not look into, which keep their order: it would take a store that nothing reads for none.
#ifdef __CUDACC__
    FN_MEMBER void put(SharedAddress values, u32 i, float x) { asm volatile("st.shared.f32 [%0], %1;" :: "r"(values + 4 * i), "f"(x)); }
    template <int FIRST> FN_MEMBER float get(SharedAddress values, u32 word, u32 byte) {
        float x;
        // The address and the offset in it are one operation, as the lowest byte of the former is 0.
        asm volatile("ld.shared.f32 %0, [%1+%2];" : "=f"(x) : "r"(byte_perm(word, values, 0x7650 + byte)), "n"(4 * FIRST));
        return x;
    }
#else
    FN_MEMBER void put(SharedAddress values, u32 i, float x) { ((float *)values)[i] = x; }
    template <int FIRST> FN_MEMBER float get(SharedAddress values, u32 word, u32 byte) { return ((float *)values)[FIRST + (word >> 8 * byte & 0xFF) / 4]; }
#endif
};
template <class M, class V> FN void make_values(SharedAddress values, float factor_m, float factor_v) {
    const u32 lane = threadIdx.x % WARP;
    Values::put(values, lane, lane < 16 ? placed<M>(lane, 0) * factor_m : placed<V>(lane % 16, 0) * factor_v);
}
// Values of the codes of a word: FIRST is 0 for those of m and 16 for those of v.
template <int FIRST> FN void values_of(float (&x)[8], SharedAddress values, u32 word) {
    const u32 even = word << 2 & 0x3C3C3C3C, odd = word >> 2 & 0x3C3C3C3C;
    UNROLL for (u32 i = 0; i < 4; i++) x[2 * i] = Values::get<FIRST>(values, even, i), x[2 * i + 1] = Values::get<FIRST>(values, odd, i);
}

// What a warp is to work on, in shared memory, in the order of global memory but for pairs of 16 bytes that are turned about, so that
// lanes that read every other one do it at once. Copies of lanes lie side by side: L2 would be asked for a sector twice by two.
template <class P, class G, class M, class V, int EACH> struct alignas(32) Stage {
    u32 p[EACH * P::bytes / 16 * WARP][4], g[EACH * G::bytes / 16 * WARP][4];
    u32 m[WARP][EACH * M::BITS / 32], v[WARP][EACH * V::BITS / 32];
    FN_MEMBER u32 place(u32 i) { return i ^ (i >> 3 & 1); }
};

// The tiles of a warp, or its only one.
template <class P, class DP, class G, class M, class V, class D, int EACH, bool MANY> struct Tiles {
    static const u32 TILE = WARP * EACH;
    static const int LOG_EACH = EACH == 16 ? 4 : 3;
    static_assert(1 << LOG_EACH == EACH, "elements of a thread");

    // Codes of 4 bits are looked up, where a warp has tiles enough for a table.
    static const bool TABLE = MANY && M::BITS == 4;
    static_assert(M::BITS == V::BITS, "moments of one width");
    static const int WORDS = EACH * M::BITS / 32; // of codes
    typedef ::Stage<P, G, M, V, EACH> Stage;

    const AnyLaunch &a;
    Taken *taken; // where items are: of the tile that is worked on, and of the one that is coming
    SharedAddress here; // of the one that is worked on
    // Of several tiles. In shared memory, for this lane: where it copies its part of a tile to, of p, and of g behind it, and of m and v;
    // where what it is to work on is, of p and g, and of m and v, as before; values of codes, times
    SharedAddress to_part, to_codes, from_part, values;
    float kept_m, kept_v; // these.
    // Of the tile that is coming: its item's place among two, and its own, as an offset; of its item, the tiles before it, those until its end,
    // and those of its own that can be done all at once; its number there, and its scales.
    SharedAddress there;
    u32 lane, slot, turn, before, until, whole_tiles, tile, next_scale_m, next_scale_v;
    // Whether a lane's elements are the first of a block: as a word, which the compiler does not make anew.
    u32 leads;
    // Of the one that is worked on: its number, its place, whether Bounds covers its scalars, with gradients as they are (2) or times a
    // factor (1), and its scales.
    u32 now, at_work, bounded, scale_m, scale_v;
    // Of an only one.
    u32 p[EACH * P::bytes / 4], g[EACH * G::bytes / 4], m[WORDS], v[WORDS];

    // What a thread makes of it: parameters, rounded, and moments, not; the largest magnitudes of those, of second moments as bits,
    // whose order is that of values, as nothing is negative, with NaN above all.
    struct Made {
        u32 p[EACH * P::bytes / 4];
        float m[EACH], v[EACH];
        float most_m;
        u32 least_v, most_v;
        u32 unit_m, unit_v; // of moments
        bool numbers; // whether parameters are, where bounds do not tell: where a moment is NaN, so is the parameter

        FN_METHOD void begin(u32 of_m, u32 of_v) { most_m = 0, least_v = 0xFFFFFFFF, most_v = 0, unit_m = of_m, unit_v = of_v; }
        // A quad's second moments, two at a time: an H200 compares three numbers at once.
        FN_METHOD void compare(int first) {
            UNROLL for (int j = first; j < first + 4; j += 2) {
                const u32 one = bits_of(v[j]), other = bits_of(v[j + 1]);
                most_v = larger(most_v, larger(one, other));
                if (V::ZERO) least_v = smaller(least_v, smaller(one, other));
            }
        }
    };

    FN_METHOD Tiles(const AnyLaunch &a, Taken *taken) : a(a), taken(taken), here(address_of(taken)) {}
    FN_METHOD Tiles(const AnyLaunch &a, Taken *taken, Stage *stages, Values *values) : a(a), taken(taken), here(address_of(taken)) {
        slot = 0, turn = 0, until = 0; // the first tile is of another item, at another place
        lane = kept(threadIdx.x % WARP);
        leads = kept(lane % block_lanes() == 0 ? 1u : 0u);
        to_part = kept(address_of(stages->p[Stage::place(lane)])), to_codes = kept(address_of(stages->m[lane]));
        from_part = kept(address_of(stages->p[Stage::place(lane * (EACH / 8))]));
        this->values = kept(address_of(values));
        kept_m = 0, kept_v = 0; // no factors: nothing is in the table
    }

    // What is in shared memory of an item.
    template <class T> FN_METHOD T *pointer(SharedAddress taken, u32 offset) const { return (T *)double_word_at(taken + offset); }
    // Of an item.
    FN_MEMBER u32 whole_tiles_of(const Item &it) { return it.flags & VECTOR ? (u32)(it.n / TILE) : 0; }
    // The only tile, made anew from what is in shared memory rather than kept.
    FN_METHOD u32 only_tile() const { return (blockIdx.x - word_in(taken->item.tile)) * (THREADS / WARP) + threadIdx.x / WARP; }
    // The thread's elements, of its item, in units of EACH.
    FN_METHOD u32 place(u32 tile) const { return tile * WARP + (MANY ? lane : threadIdx.x % WARP); }
    FN_METHOD u32 place() const { return place(MANY ? now : only_tile()); }
    // Lanes to a block.
    FN_METHOD u32 block_lanes() const { return 1u << (a.log_run - LOG_EACH); }
    // The first group of those elements.
    FN_METHOD u32 group(u32 place) const { return word_at(here + AT(group)) + place * (EACH / 4); }

    // Begins to copy tile t of all, the first one or the next; behind the last one, nothing.
    FN_METHOD void begin(u32 t) {
        if (t >= until) {
            if (t < a.tiles) {
                const u32 item = item_by_steps(a.launch, t);
                slot ^= 1;
                take_by_warp(taken[slot], a.launch, item);
                const Item &it = taken[slot].item;
                there = kept(address_of(&taken[slot]));
                before = it.tile, until = it.tile + it.tiles, whole_tiles = whole_tiles_of(it);
            } else {
                whole_tiles = 0;
            }
        }
        tile = t - before, turn ^= (u32)sizeof(Stage);
        next_scale_m = anything(), next_scale_v = anything();
        if (tile < whole_tiles) {
            static_assert(P::bytes == G::bytes, "p and g alike");
            const u32 parts = TILE * P::bytes / 16, part = tile * parts + lane, place = tile * WARP + lane;
            const uint4 *p = pointer<const uint4>(there, AT(p)), *g = pointer<const uint4>(there, AT(g));
            const u32(*m)[WORDS] = pointer<const u32[WORDS]>(there, AT(states[0])), (*v)[WORDS] = pointer<const u32[WORDS]>(there, AT(states[1]));
            const u8 *of_m = pointer<const u8>(there, AT(scales[0])), *of_v = pointer<const u8>(there, AT(scales[1]));
            p += part, g += part;
            UNROLL for (u32 i = 0; i < parts; i += WARP) {
                begin_copy<16>(to_part + turn + 16 * i, p + i);
                begin_copy<16>(to_part + turn + (16 * i + sizeof(Stage::p)), g + i);
            }
            begin_copy<4 * WORDS>(to_codes + turn, m + place);
            begin_copy<4 * WORDS>(to_codes + turn + sizeof(Stage::m), v + place);
            const u32 b = place >> (a.log_run - LOG_EACH);
            next_scale_m = load_byte(of_m + b), next_scale_v = load_byte(of_v + b);
        }
        end_group();
    }

    FN_METHOD void load_only(const Item &it, u32 place) {
        const u64 at = place;
        const u32 b = place >> (a.log_run - LOG_EACH);
        scale_m = load_byte((const u8 *)it.scales[0] + b), scale_v = load_byte((const u8 *)it.scales[1] + b);
        load<WORDS>(m, (const char *)it.states[0] + at * (4 * WORDS));
        load<WORDS>(v, (const char *)it.states[1] + at * (4 * WORDS));
        load<EACH * P::bytes / 4>(p, (const char *)it.p + at * (EACH * P::bytes));
        load<EACH * G::bytes / 4>(g, (const char *)it.g + at * (EACH * G::bytes));
    }

    // What the thread has of the tile: eight parameters and gradients at a time, and codes of moments.
    FN_METHOD void eight(u32 (&p8)[2 * P::bytes], u32 (&g8)[2 * G::bytes], int i) const {
        if constexpr (MANY) {
            // The other one of a pair is 16 bytes before or behind.
            const SharedAddress at = from_part + at_work;
            from_shared(p8, beside(at, 16 * i)), from_shared(g8, beside(at, 16 * i) + sizeof(Stage::p));
        } else {
            UNROLL for (int k = 0; k < 2 * P::bytes; k++) p8[k] = p[2 * P::bytes * i + k];
            UNROLL for (int k = 0; k < 2 * G::bytes; k++) g8[k] = g[2 * G::bytes * i + k];
        }
    }
    FN_METHOD void codes(u32 (&of_m)[WORDS], u32 (&of_v)[WORDS]) const {
        if constexpr (MANY) {
            from_shared(of_m, to_codes + at_work), from_shared(of_v, to_codes + at_work + sizeof(Stage::m));
        } else {
            UNROLL for (int i = 0; i < WORDS; i++) of_m[i] = m[i], of_v[i] = v[i];
        }
    }

    // Four values of a moment, placed, times a factor.
    template <class T> FN_METHOD void decode(float (&x)[4], const u32 (&w)[WORDS], int q, float factor) const {
        const int per = 32 / T::BITS;
        UNROLL for (int j = 0; j < 4; j++) x[j] = placed<T>(w[(4 * q + j) / per], (4 * q + j) % per) * factor;
    }

    // Of the two factors of a gradient, as many as there are to multiply by.
    template <int FACTORS, class A> FN_METHOD void make(Made &made, A &arithmetic) {
        const AdamW::Scalars s = scalars_of<AdamW>(here);
        // Powers of two times the betas, so that decoding and decay are one multiplication.
        const float decay_m = s.beta1 * near_unit<M>(scale_m).decode, decay_v = s.beta2 * near_unit<V>(scale_v).decode;
        const float factor = AdamW::factor(s);
        u32 seen = 0, m[WORDS], v[WORDS], p[2 * P::bytes], g[2 * G::bytes];
        made.begin(UNIT, UNIT);
        codes(m, v);
        UNROLL for (int q = 0; q < EACH / 4; q++) {
            if (q % 2 == 0) eight(p, g, q / 2);
            float now[4], old_m[4], old_v[4];
            decode<M>(old_m, m, q, decay_m);
            decode<V>(old_v, v, q, decay_v);
            UNROLL for (int j = 0; j < 4; j++) {
                const int i = 4 * q + j;
                float x[2] = {old_m[j], old_v[j]};
                float gradient = float_of(G::widen(element<G>(g, i % 8)));
                if (FACTORS > 0) gradient = FACTORS == 1 ? gradient * factor : AdamW::scaled(s, gradient);
                now[j] = AdamW::decayed(arithmetic, s, float_of(P::widen(element<P>(p, i % 8))), gradient, x);
                made.m[i] = x[0], made.v[i] = x[1];
                made.most_m = fmaxf(made.most_m, fabsf(x[0]));
            }
            made.compare(4 * q);
            Word w = {0, 0};
            if (Parameters<P, DP>::draws) w = word(keys_of(here, 0), group(place()) + q);
            Parameters<P, DP>::put(made.p + q * P::bytes, now, w, seen);
        }
        made.numbers = Parameters<P, DP>::numbers(seen);
    }

    // The same by Bounds, and whether that is sure. ONE: a gradient's factor is 1.
    template <bool ONE> FN_METHOD bool make_between(Made &made) const {
        const AdamW::Scalars s = scalars_of<AdamW>(here);
        const Bounds bounds(s, scale_m, scale_v);
        u32 apart = 0, least = 0x7F7F7F7F, m[WORDS], v[WORDS], p[2 * P::bytes], g[2 * G::bytes];
        float eight_m[8], eight_v[8];
        made.begin(scale_m, scale_v);
        codes(m, v);
        UNROLL for (int q = 0; q < EACH / 4; q++) {
            if (q % 2 == 0) eight(p, g, q / 2);
            float low[4], high[4], x_m[4], x_v[4];
            if constexpr (TABLE) {
                if (q % 2 == 0) values_of<0>(eight_m, values, m[q / 2]), values_of<16>(eight_v, values, v[q / 2]);
                UNROLL for (int j = 0; j < 4; j++) x_m[j] = eight_m[q % 2 * 4 + j], x_v[j] = eight_v[q % 2 * 4 + j];
            } else {
                decode<M>(x_m, m, q, Bounds::kept<M>(s.beta1)), decode<V>(x_v, v, q, Bounds::kept<V>(s.beta2));
            }
            UNROLL for (int j = 0; j < 4; j++) {
                const int i = 4 * q + j;
                float gradient = float_of(G::widen(element<G>(g, i % 8)));
                if (!ONE) gradient = AdamW::scaled(s, gradient);
                bounds.step(float_of(P::widen(element<P>(p, i % 8))), gradient, x_m[j], x_v[j], low[j], high[j]);
                made.m[i] = x_m[j], made.v[i] = x_v[j];
                made.most_m = fmaxf(made.most_m, fabsf(x_m[j]));
            }
            made.compare(4 * q);
            Word w = {0, 0};
            if (Parameters<P, DP>::draws) w = word(keys_of(here, 0), group(place()) + q);
            Parameters<P, DP>::put_between(made.p + 2 * q, low, high, w, apart);
            UNROLL for (int i = 2 * q; i < 2 * q + 2; i++) least = smaller_halves(made.p[i], least);
        }
        bool sure = apart == 0 && Bounds::covers_moments(made.most_m, made.most_v);
        if (V::ZERO) sure = sure && Bounds::covers_least(made.least_v);
        if (!Bounds::covers_least_parameters(least)) {
            UNROLL for (int i = 0; i < EACH; i++) {
                if (i % 8 == 0) eight(p, g, i / 8);
                float gradient = float_of(G::widen(element<G>(g, i % 8)));
                if (!ONE) gradient = AdamW::scaled(s, gradient);
                sure &= Bounds::fair(float_of(P::widen(element<P>(p, i % 8))), made.m[i], gradient);
            }
        }
        return sure;
    }

    // Whether all is what IEEE 754 has it.
    template <bool ANY> FN_METHOD bool sure(const Made &made, const SeededRoots<ANY> &seeded) const {
        bool sure = made.numbers;
        if (!ANY) sure = sure && made.most_v < bits_of(BEYOND_NORMAL) && (!V::ZERO || made.least_v >= bits_of(LEAST_NORMAL));
        if (seeded.doubt()) {
            UNROLL for (int i = 0; i < EACH; i++) sure &= Seeded::fair(made.m[i]);
        }
        return sure;
    }

    // A word of second moments' codes: where all of it is 0 they are likely to be.
    FN_METHOD u32 first_codes() const {
        if constexpr (MANY) {
            u32 words[2];
            from_shared(words, to_codes + at_work + sizeof(Stage::m));
            return words[0];
        } else {
            return v[0];
        }
    }
    // Whether a thread has second moments that are likely to become too small for SeededNormal, or, where nothing looks at what they
    // become, that may: in a format without zero none falls below beta2 times the value of code 0.
    FN_METHOD bool small(float beta2) const {
        return V::ZERO ? first_codes() == 0 : !(near_unit<V>(scale_v).decode * float_of(V::ONE / 2) * beta2 >= LEAST_NORMAL);
    }

    // The largest scale code of a block's threads, of two moments in half a word each.
    FN_METHOD u32 of_block(u32 scales) const {
        const u32 lanes = block_lanes();
        if (lanes == 128 / EACH) {
            UNROLL for (u32 other = 64 / EACH; other > 0; other /= 2)
                scales = larger_halves(scales, __shfl_xor_sync(0xFFFFFFFF, scales, other));
            return scales;
        }
        NO_UNROLL for (u32 other = lanes / 2; other > 0; other /= 2)
            scales = larger_halves(scales, __shfl_xor_sync(0xFFFFFFFF, scales, other));
        return scales;
    }

    // Whether all of a warp is what is common, so that the short way is tried first.
    FN_METHOD bool takes_short_way() const {
        if constexpr (MANY) {
            return __all_sync(0xFFFFFFFF, bounded && Bounds::covers(scale_m, scale_v) && !(V::ZERO && first_codes() == 0));
        } else {
            const AdamW::Scalars s = scalars_of<AdamW>(here);
            return a.launch.seeded && AdamW::seeded(s) && AdamW::one_factor(s) && __all_sync(0xFFFFFFFF, !small(s.beta2));
        }
    }
    // What a thread makes that way, and whether it is what IEEE 754 has.
    FN_METHOD bool make_short_way(Made &made) {
        if constexpr (MANY) {
            return bounded == 2 ? make_between<true>(made) : make_between<false>(made);
        } else {
            SeededNormal arithmetic;
            if (AdamW::factor(scalars_of<AdamW>(here)) == 1.0f) {
                make<0>(made, arithmetic);
            } else {
                make<1>(made, arithmetic);
            }
            return sure(made, arithmetic) && is_near();
        }
    }
    // The long way, and whether that can be stored as it is. What was loaded is not kept for what is rare: where a way was taken before, it is
    // loaded again.
    FN_METHOD bool make_long_way(Made &made, bool again) {
        if (!is_near()) {
            made.begin(UNIT, UNIT);
            return false;
        }
        const AdamW::Scalars s = scalars_of<AdamW>(here);
        bool sure = false;
        if (a.launch.seeded && AdamW::seeded(s)) {
            if (!MANY && again) load_only(taken->item, place());
            Seeded arithmetic;
            make<2>(made, arithmetic);
            sure = this->sure(made, arithmetic);
        }
        if (!sure) {
            if (!MANY) load_only(taken->item, place());
            Written arithmetic;
            make<2>(made, arithmetic);
        }
        return made.numbers && bits_of(made.most_m) < F32_INFINITY && made.most_v < F32_INFINITY;
    }
    FN_METHOD bool is_near() const { return ::is_near<M>(scale_m) && ::is_near<V>(scale_v); }

    // A step of a tile. False, and nothing new, where this is not how it is done.
    FN_METHOD bool step() {
        Made made;
        const bool short_way = takes_short_way(), sure = short_way && make_short_way(made);
        bool near = sure || make_long_way(made, short_way);
        // Of scale codes, as of magnitudes, the largest is that of the block.
        const u32 scales = of_block(scale_code<M, true>(bits_of(made.most_m), made.unit_m) | scale_code<V, true>(made.most_v, made.unit_v) << 16);
        const u32 to_scale_m = scales & 0xFFFF, to_scale_v = scales >> 16;
        near = near && ::is_near<M>(to_scale_m, made.unit_m) && ::is_near<V>(to_scale_v, made.unit_v) && Bounds::covers_new(made.unit_m, to_scale_m);
        // All of a warp or nothing: nobody writes before all have read.
        if (!__all_sync(0xFFFFFFFF, near)) return false;
        const u32 at = place(), group = this->group(at), middle = word_at(here + (u32)__builtin_offsetof(Taken, middle));
        // Parameters at once: it is registers that codes are short of.
        store<EACH * P::bytes / 4>(pointer<char>(here, AT(p)) + at * (u64)(EACH * P::bytes), made.p);
        if (MANY) __syncwarp();
        const Near near_m = near_unit<M>(to_scale_m, made.unit_m), near_v = near_unit<V>(to_scale_v, made.unit_v);
        u32 to_m[WORDS], to_v[WORDS];
        encode<M, D, EACH>(to_m, made.m, near_m, keys_of(here, 1), group, middle);
        store<WORDS>(pointer<char>(here, AT(states[0])) + at * (u64)(4 * WORDS), to_m);
        encode<V, D, EACH>(to_v, made.v, near_v, keys_of(here, 2), group, middle);
        // Where none of a thread's second moments lies below code 1, none has code 0.
        if (V::ZERO && bits_of(product_down(float_of(made.least_v), near_v.encode)) < V::ONE) {
            static_assert(!V::ZERO || V::BITS == 8, "codes to a word");
            if (made.least_v > 0) {
                UNROLL for (int i = 0; i < WORDS; i++) to_v[i] = above_zero(to_v[i]);
            } else {
                UNROLL for (int i = 0; i < EACH; i++) {
                    if (made.v[i] > 0.0f && (to_v[i / 4] >> i % 4 * 8 & 0xFF) == 0) to_v[i / 4] |= 1u << i % 4 * 8;
                }
            }
        }
        store<WORDS>(pointer<char>(here, AT(states[1])) + at * (u64)(4 * WORDS), to_v);
        if (MANY ? leads != 0 : at % block_lanes() == 0) {
            const u32 b = at >> (a.log_run - LOG_EACH);
            store_byte(pointer<u8>(here, AT(scales[0])) + b, to_scale_m);
            store_byte(pointer<u8>(here, AT(scales[1])) + b, to_scale_v);
        }
        return true;
    }

    // One tile of a warp, its block's tiles being of one item.
    FN_METHOD void once() {
        const There there_is = item_there(a.launch, blockIdx.x);
        const Item &there = there_is.item;
        const u32 tile = (blockIdx.x - there.tile) * (THREADS / WARP) + threadIdx.x / WARP, whole_tiles = whole_tiles_of(there);
        const bool whole = tile < whole_tiles;
        begin_copying(taken[0], a.launch, there_is.number);
        if (whole) load_only(there, place(tile));
        prefetch_next(a.launch, there_is.number, blockIdx.x);
        end_copying(taken[0], a.launch, there_is.number, there.hyper);
        if (taken[0].record.stands) return;
        if (!whole || !step()) one_by_one(taken[0], only_tile());
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
    FN_METHOD void run() {
        const u32 by = kept(gridDim.x * (THREADS / WARP));
        u32 t = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
        if (a.launch.direct && blockIdx.x == 0) advance(a.launch);
        make_ahead(a.launch);
        if (t >= a.tiles) return;
        begin(t);
        if (taken[slot].record.stands) t = a.tiles;
        NO_UNROLL while (t < a.tiles) {
            const Taken &of = taken[slot];
            const bool whole = tile < whole_tiles;
            now = tile, scale_m = next_scale_m, scale_v = next_scale_v, at_work = turn;
            // Not known to be equal then: what is one register would be two.
            if (here != kept(there)) take_scalars();
            t = kept(t + by);
            begin(t);
            wait_for_groups<1>();
            __syncwarp();
            if (!whole || !step()) one_by_one(of, now);
        }
        wait_for_groups<0>();
    }

    // Of another item than before.
    FN_METHOD void take_scalars() {
        here = there;
        const AdamW::Scalars s = scalars_of<AdamW>(here);
        bounded = !a.launch.seeded || !Bounds::covers(s) ? 0 : s.gradient_scale == 1.0f && s.clip == 1.0f ? 2 : 1;
        if constexpr (TABLE) {
            const float now_m = Bounds::kept<M>(s.beta1), now_v = Bounds::kept<V>(s.beta2);
            if (now_m != kept_m || now_v != kept_v) {
                kept_m = now_m, kept_v = now_v;
                // All have read what was there.
                __syncwarp();
                make_values<M, V>(values, kept_m, kept_v);
                __syncwarp();
            }
        }
    }
};

// Blocks to a multiprocessor: 64 registers a thread leave 8, 128 leave 4. More warps are slower, on an H200, and so are blocks of one.
#define ENTRY(name, P, DP, G, M, V, D)                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, P::bytes == 4 ? 8 : 4) name(                                 \
        const __grid_constant__ AnyLaunch a) {                                                                         \
        typedef Tiles<P, DP, G, M, V, D, P::bytes == 4 ? 8 : 16, P::bytes == 2> Tiles;                                 \
        if constexpr (P::bytes == 4) {                                                                                 \
            __shared__ Taken taken;                                                                                    \
            Tiles(a, &taken).once();                                                                                   \
        } else {                                                                                                       \
            __shared__ Taken taken[THREADS / WARP][2];                                                                 \
            __shared__ Tiles::Stage stages[THREADS / WARP][2];                                                         \
            __shared__ Values values[THREADS / WARP];                                                                  \
            const u32 warp = threadIdx.x / WARP;                                                                       \
            Tiles(a, taken[warp], stages[warp], &values[warp]).run();                                                  \
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
