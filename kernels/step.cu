// One step of many tensors whose states are f32 or BF16: reads p, g and states once and writes p and states once.
//
// Each thread steps two quads of consecutive elements in place, THREADS quads apart. Every access of a warp is contiguous.
// Bytes an element: 2 (p) + 1 (g) + 2 a state, times their widths: AdamW has 28 in f32 throughout, 20 with f32 p and g and BF16
// moments, 14 in BF16 throughout. The arrays must not overlap.
// A block has one tile of an item, whose element 0 starts a group. Where memory is aligned to four elements whole tiles go by
// quads; else, in the last tile, and where a quad needs it, elements are taken one by one.
#include "many.cuh"
#include "sums.cuh"

#define THREADS 128

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

// Who stalled, of a thread's elements: of the first two states in 16 bits each, in which those of a block fit, and of the third.
struct Seen {
    u32 stalled[2], nan[2], untouched;
};

template <class R> FN void see(Seen &seen, float g, const float (&old)[R::COUNT], const float (&now)[R::COUNT]) {
    const int witness = R::SECOND < 0 ? 0 : R::SECOND;
    const bool untouched = g == 0.0f && old[witness] == 0.0f;
    seen.untouched += untouched;
    UNROLL for (int k = 0; k < R::COUNT; k++) {
        seen.stalled[k / 2] += (u32)(!untouched && old[k] == now[k]) << 16 * (k % 2);
        seen.nan[k / 2] += (u32)(!untouched && (old[k] != old[k] || now[k] != now[k])) << 16 * (k % 2);
    }
}

// Element i, known at run time, of four.
template <int N> FN u32 word_of(const u32 (&w)[N], int i) { return i & 2 ? (i & 1 ? w[3 % N] : w[2 % N]) : (i & 1 ? w[1] : w[0]); }
template <int N> FN u32 half_of(const u32 (&w)[N], int i) { return (i & 2 ? w[1] : w[0]) >> (i & 1) * 16 & 0xFFFF; }

// The top bits of the halves of a word that are not zero but for their sign.
FN u32 not_zero(u32 halves) { return (halves & 0x7FFF7FFF) + 0x7FFF7FFF & 0x80008000; }

// The same for four elements in BF16 and none of them NaN, by words of two, where no state is a zero before.
template <class R> FN bool see_words(Seen &seen, const u32 (&old)[R::COUNT][2], const u32 (&now)[R::COUNT][2]) {
    u32 all = 0x80008000;
    UNROLL for (int k = 0; k < R::COUNT; k++) all &= not_zero(old[k][0]) & not_zero(old[k][1]);
    if (all != 0x80008000) return false;
    UNROLL for (int k = 0; k < R::COUNT; k++) {
        // A sign that changes is a change.
        const u32 changed0 = old[k][0] ^ now[k][0], changed1 = old[k][1] ^ now[k][1];
        const u32 moved = (not_zero(changed0) | changed0) & 0x80008000, more = (not_zero(changed1) | changed1) & 0x80008000;
        seen.stalled[k / 2] += (4 - __popc(moved >> 1 | more)) << 16 * (k % 2);
    }
    return true;
}

// One quad: four elements whose draws are the words of one group. False, and nothing new, where a value may be NaN, or where it may not
// be what is written.
template <class R, class P, class G, class M, class SP, class SM, bool METER>
FN bool quad(const Record &s, bool seeded, u32 group, u32 (&p)[P::bytes], const u32 (&g)[G::bytes], u32 (&m)[R::COUNT][M::bytes], Seen &seen) {
    const typename R::Scalars scalars = scalars_of<R>(s);
    Seeded arithmetic;
    float x[4][R::COUNT], now[4];
    float poison = 0;
    UNROLL for (int i = 0; i < 4; i++) {
        UNROLL for (int k = 0; k < R::COUNT; k++) x[i][k] = float_of(M::widen(element<M>(m[k], i)));
        now[i] = R::step(arithmetic, scalars, float_of(P::widen(element<P>(p, i))), float_of(G::widen(element<G>(g, i))), x[i]);
        // NaN if one of them is NaN or infinite; what else is makes the parameter one of the two.
        poison = fmaf(now[i], 0.0f, poison);
        UNROLL for (int k = 0; k < R::COUNT; k++)
            if (R::WATCH >> k & 1) poison = fmaf(x[i][k], 0.0f, poison);
    }
    if (poison != 0.0f || !seeded || !R::seeded(scalars)) return false;
    if (arithmetic.doubt()) {
        bool fair = true;
        UNROLL for (int i = 0; i < 4; i++) fair &= Seeded::fair(R::numerator(scalars, x[i]));
        if (!fair) return false;
    }
    u32 before[R::COUNT][M::bytes];
    if constexpr (METER) {
        UNROLL for (int k = 0; k < R::COUNT; k++) {
            UNROLL for (int i = 0; i < M::bytes; i++) before[k][i] = m[k][i];
        }
    }
    Word w = {0, 0};
    if (SP::draws) w = word(keys_of(s, 0), group);
    UNROLL for (int i = 0; i < 4; i++) replace<P>(p, i, SP::finite(bits_of(now[i]), draw16(w, i)));
    UNROLL for (int k = 0; k < R::COUNT; k++) {
        if (SM::draws) w = word(keys_of(s, 1 + k), group);
        UNROLL for (int i = 0; i < 4; i++) {
            replace<M>(m[k], i, SM::finite(bits_of(x[i][k]), draw16(w, i)));
        }
    }
    if constexpr (METER) {
        if (see_words<R>(seen, before, m)) return true;
        NO_UNROLL for (int i = 0; i < 4; i++) {
            float old[R::COUNT], stored[R::COUNT];
            UNROLL for (int k = 0; k < R::COUNT; k++) {
                old[k] = float_of(M::widen(half_of(before[k], i))), stored[k] = float_of(M::widen(half_of(m[k], i)));
            }
            see<R>(seen, float_of(G::widen(G::bytes == 4 ? word_of(g, i) : half_of(g, i))), old, stored);
        }
    }
    return true;
}

// One element.
template <class R, class P, class G, class M, class SP, class SM, bool METER>
FN void single(const Record &s, const Item &item, u64 i, Seen &seen) {
    const typename R::Scalars scalars = scalars_of<R>(s);
    typename P::Memory *p = (typename P::Memory *)item.p + i;
    const float g = float_of(G::widen(((const typename G::Memory *)item.g)[i]));
    const u32 j = (u32)(i % 4), group = item.group + (u32)(i / 4);
    float x[R::COUNT], old[R::COUNT];
    UNROLL for (int k = 0; k < R::COUNT; k++) x[k] = old[k] = float_of(M::widen(((const typename M::Memory *)item.states[k])[i]));
    Written arithmetic;
    const float now = R::step(arithmetic, scalars, float_of(P::widen(*p)), g, x);
    *p = (typename P::Memory)SP::of(canonical(now), SP::draws ? draw16(word(keys_of(s, 0), group), j) : 0);
    UNROLL for (int k = 0; k < R::COUNT; k++) {
        const u32 code = SM::of(canonical(x[k]), SM::draws ? draw16(word(keys_of(s, 1 + k), group), j) : 0);
        ((typename M::Memory *)item.states[k])[i] = (typename M::Memory)code;
        x[k] = float_of(M::widen(code));
    }
    if (METER) see<R>(seen, g, old, x);
}

// What the warps of a block have counted, and how many have: in the first word of stalled elements, whose halves do not need their
// highest bits.
struct Tally {
    u32 stalled[2];
};
#define ARRIVED (1u << 28)

// Adds what the threads of a block have seen to the counts of a tensor, and waits for nothing: the last warp does.
template <int COUNT> FN void count(Tally &tally, Counts &to, const Seen &seen) {
    static_assert(THREADS / WARP < 8 && THREADS * 8 < 1 << 12, "a tally outgrows its halves");
    const u32 lane = threadIdx.x % WARP;
    u32 sums[2] = {__reduce_add_sync(0xFFFFFFFFu, seen.stalled[0]), 0};
    if (COUNT > 2) sums[1] = __reduce_add_sync(0xFFFFFFFFu, seen.stalled[1]);
    u32 all[2] = {0, 0};
    if (lane == 0) {
        if (COUNT > 2) {
            atomicAdd(&tally.stalled[1], sums[1]);
            __threadfence_block();
        }
        all[0] = atomicAdd(&tally.stalled[0], sums[0] + ARRIVED) + sums[0];
        if (COUNT > 2) {
            __threadfence_block();
            all[1] = atomicAdd(&tally.stalled[1], 0);
        }
    }
    UNROLL for (int k = 0; k < COUNT; k += 2) all[k / 2] = __shfl_sync(0xFFFFFFFFu, all[k / 2], 0);
    if (all[0] / ARRIVED == THREADS / WARP - 1 && lane < COUNT) {
        const u32 of = (lane < 2 ? all[0] : all[1]) >> 16 * (lane % 2) & 0xFFF;
        if (of) atomicAdd(&to.stalled[lane], (u64)of);
    }
    if (!__any_sync(0xFFFFFFFFu, seen.nan[0] || seen.nan[1] || seen.untouched)) return;
    UNROLL for (int k = 0; k < COUNT; k += 2) sums[k / 2] = __reduce_add_sync(0xFFFFFFFFu, seen.nan[k / 2]);
    if (lane < COUNT) {
        const u32 of = (lane < 2 ? sums[0] : sums[1]) >> 16 * (lane % 2) & 0xFFFF;
        if (of) atomicAdd(&to.nan[lane], (u64)of);
    }
    const u32 untouched = __reduce_add_sync(0xFFFFFFFFu, seen.untouched);
    if (lane == 0 && untouched) atomicAdd(&to.untouched, (u64)untouched);
}

// Has what a block of threads will read from an element on, all of it in whole tiles, brought into the L2 cache, 64 bytes at a time: so
// that memory is at work for blocks that are not there yet.
template <class R, class P, class G, class M, int quads> FN void fetch_ahead(const Item &item, u64 at) {
    if (at + THREADS * 4 * quads > item.n) return;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Of a quad of each thread of a warp, twice as many pieces as an element has bytes.
    const u32 of_p = 2 * P::bytes, of_g = of_p + 2 * G::bytes, of_m = of_g + 2 * R::COUNT * M::bytes;
    UNROLL for (u32 first = 0; first < quads * of_m; first += 32) {
        const u32 i = first + lane, q = quads > 1 && i >= of_m, j = i - q * of_m;
        if (first + 32 > quads * of_m && i >= quads * of_m) continue;
        const u64 from = at + q * (THREADS * 4) + warp * 128;
        const u32 k = (j - of_g) / (2 * M::bytes);
        // Chosen, not looked up: the item may lie in registers.
        const void *state = R::COUNT == 1 || k == 0 ? item.states[0] : R::COUNT == 2 || k == 1 ? item.states[1] : item.states[2];
        const char *piece = j < of_p ? (const char *)item.p + from * P::bytes + j * 64
                          : j < of_g ? (const char *)item.g + from * G::bytes + (j - of_p) * 64
                                     : (const char *)state + from * M::bytes + (j - of_g - k * 2 * M::bytes) * 64;
        prefetch(piece);
    }
}

template <class R, class P, class G, class M, class SP, class SM, bool METER>
FN void step(const Launch &a, Taken &taken, Tally &tally) {
    const int quads = 2, each = THREADS * 4 * quads; // to a block
    const u32 t = blockIdx.x;
    const There there_is = item_there(a, t);
    const Item &there = there_is.item;
    const u64 tile = (u64)(t - there.tile) * each, first = tile + threadIdx.x * 4;
    const bool whole = (there.flags & VECTOR) && there.n - tile >= each;
    u32 p[quads][P::bytes], g[quads][G::bytes], m[quads][R::COUNT][M::bytes];
    // With 16-bit parameters it takes longer before than behind what is large, on an H200.
    const bool before = P::bytes == 4;
    Taking taking = {0, false};
    if (before) taking = begin_taking(a, there_is.number);
    if (whole) {
        UNROLL for (int q = 0; q < quads; q++) {
            u64 at = first + q * (THREADS * 4);
            load<P::bytes>(p[q], (const char *)there.p + at * P::bytes);
            load<G::bytes>(g[q], (const char *)there.g + at * G::bytes);
            UNROLL for (int k = 0; k < R::COUNT; k++) load<M::bytes>(m[q][k], (const char *)there.states[k] + at * M::bytes);
        }
        const u32 ahead = t + a.ahead;
        if (a.ahead && is_of(there, ahead)) {
            fetch_ahead<R, P, G, M, quads>(there, tile + (u64)a.ahead * each);
        } else if (a.ahead && there_is.number + 1 < a.count) {
            // Of the next item, if not beyond it.
            const Item &next = a.items[there_is.number + 1];
            if (is_of(next, ahead)) fetch_ahead<R, P, G, M, quads>(next, (u64)(ahead - next.tile) * each);
        }
    }
    // In the meantime:
    prefetch_next(a, there_is.number, t);
    if (METER && threadIdx.x < 2) tally.stalled[threadIdx.x] = 0;
    if (!before) taking = begin_taking(a, there_is.number);
    end_taking(taken, a, there_is.number, there.hyper, taking);
    const Item &item = taken.item;
    Seen seen = {};
    const Record &record = taken.record;
    if (record.stands) return;
    u32 left = (1u << quads) - 1; // quads to be taken element by element
    if (whole) {
        left = 0;
        UNROLL for (int q = 0; q < quads; q++) {
            u64 at = first + q * (THREADS * 4);
            if (quad<R, P, G, M, SP, SM, METER>(record, a.seeded, word_in(item.group) + (u32)(at / 4), p[q], g[q], m[q], seen)) {
                store<P::bytes>((char *)pointer_in(item.p) + at * P::bytes, p[q]);
                UNROLL for (int k = 0; k < R::COUNT; k++) store<M::bytes>((char *)pointer_in(item.states[k]) + at * M::bytes, m[q][k]);
            } else {
                left |= 1u << q;
            }
        }
    }
    const u64 n = left ? item.n : 0;
    NO_UNROLL for (u64 at = first; left; left >>= 1, at += THREADS * 4) {
        if (at >= n || (left & 1) == 0) continue;
        u64 end = n - at < 4 ? n : at + 4;
        NO_UNROLL for (u64 i = at; i < end; i++) single<R, P, G, M, SP, SM, METER>(record, item, i, seen);
    }
    if (!METER) make_ahead(a);
    if (METER) count<R::COUNT>(tally, a.counts[item.slot * COPIES + blockIdx.x % COPIES], seen);
}

// Blocks to a multiprocessor: 64 registers a thread leave 8, 72 leave 7, 80 leave 6, 96 leave 5.
template <class R, class P, class M, bool METER> struct Blocks {
    static const bool MANY = R::COUNT > 2 || METER || M::bytes == 4;
    static const int OF = P::bytes == 2 ? (R::COUNT > 2 && M::bytes == 4 ? 5 : MANY ? 6 : 8) : R::COUNT > 2 ? 5 : MANY ? 7 : 8;
};

// Shared memory is the kernel's own: that of a function has a name that depends on where it is compiled.
#define ENTRY(name, R, P, DP, G, M, DM, METER)                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, Blocks<R, P, M, METER>::OF)                                  \
        name(const __grid_constant__ Launch a) {                                                                       \
        __shared__ Taken taken;                                                                                        \
        __shared__ Tally tally;                                                                                        \
        step<R, P, G, M, Stored<P, DP>, Stored<M, DM>, METER>(a, taken, tally);                                        \
    }

// RULE_<parameters>_<gradients>_<states>, with n (nearest) or s (stochastic) behind what is rounded, and _meter.
#define STATES(name, R, P, DP, G)                                                                                      \
    ENTRY(name##_f32, R, P, DP, G, F32, NearestEven, false)                                                            \
    ENTRY(name##_bf16n, R, P, DP, G, BF16, NearestEven, false)                                                         \
    ENTRY(name##_bf16s, R, P, DP, G, BF16, Draws16, false)                                                             \
    ENTRY(name##_bf16s_meter, R, P, DP, G, BF16, Draws16, true)

// Of every rule: f32 and BF16 throughout, but for states.
#define COMMON(name, R)                                                                                                \
    STATES(name##_f32_f32, R, F32, NearestEven, F32)                                                                   \
    STATES(name##_bf16n_bf16, R, BF16, NearestEven, BF16)                                                              \
    STATES(name##_bf16s_bf16, R, BF16, Draws16, BF16)

// What LAMB asks first: sums of squares of parameters and updates, a chunk to a block.
struct Norms {
    Launch launch; // with a tile a chunk
    double *sums;  // of parameters, one a tile, and after `chunks` of them those of updates
    u64 chunks;
};

// The update of element j, and whether its numerator is fair.
template <class R, class P, class G, class M, class A>
FN float update(A &arithmetic, const typename R::Scalars &scalars, const u32 (&p)[P::bytes], const u32 (&g)[G::bytes],
                const u32 (&m)[R::COUNT][M::bytes], int j, bool &fair) {
    float x[R::COUNT];
    UNROLL for (int k = 0; k < R::COUNT; k++) x[k] = float_of(M::widen(element<M>(m[k], j)));
    const float u = R::update(arithmetic, scalars, float_of(P::widen(element<P>(p, j))), float_of(G::widen(element<G>(g, j))), x);
    fair &= Seeded::fair(R::numerator(scalars, x));
    return u;
}

template <class R, class P, class G, class M>
FN void norms(const Norms &a, Taken &taken, double (&warps)[CHUNK_THREADS / 32]) {
    const u32 at_item = item_of<OfNorms>(a.launch, blockIdx.x);
    const Item &item = a.launch.items[at_item];
    const u64 start = (u64)(blockIdx.x - item.norm_tile) * CHUNK;
    const u32 n = item.n - start < CHUNK ? (u32)(item.n - start) : CHUNK;
    take(taken, a.launch, at_item);
    double lane_p[4] = {0, 0, 0, 0}, lane_u[4] = {0, 0, 0, 0};
    const bool whole = (item.flags & VECTOR) && n == CHUNK;
    const int rounds = 2; // at once
    NO_UNROLL for (u32 first = threadIdx.x * 4; first < n; first += rounds * ROUND) {
        u32 p[rounds][P::bytes], g[rounds][G::bytes], m[rounds][R::COUNT][M::bytes];
        if (whole) {
            UNROLL for (int r = 0; r < rounds; r++) {
                const u64 at = start + first + r * ROUND;
                load<P::bytes>(p[r], (const char *)item.p + at * P::bytes);
                load<G::bytes>(g[r], (const char *)item.g + at * G::bytes);
                UNROLL for (int k = 0; k < R::COUNT; k++) load<M::bytes>(m[r][k], (const char *)item.states[k] + at * M::bytes);
            }
            const u64 ahead = start + (u64)a.launch.ahead * CHUNK + first - threadIdx.x * 4;
            if (a.launch.ahead) fetch_ahead<R, P, G, M, rounds>(item, ahead);
        } else {
            UNROLL for (int r = 0; r < rounds; r++) {
                UNROLL for (int j = 0; j < 4; j++) {
                    // Zeros where there is nothing: their squares, and those of their updates, are not added.
                    const u64 at = start + first + r * ROUND + j;
                    const bool there = at < start + n;
                    replace<P>(p[r], j, there ? ((const typename P::Memory *)item.p)[at] : 0);
                    replace<G>(g[r], j, there ? ((const typename G::Memory *)item.g)[at] : 0);
                    UNROLL for (int k = 0; k < R::COUNT; k++)
                        replace<M>(m[r][k], j, there ? ((const typename M::Memory *)item.states[k])[at] : 0);
                }
            }
        }
        const typename R::Scalars scalars = scalars_of<R>(taken.record);
        UNROLL for (int r = 0; r < rounds; r++) {
            u32 ps[4], us[4];
            Seeded seeded;
            float poison = 0;
            bool fair = a.launch.seeded && R::seeded(scalars);
            UNROLL for (int j = 0; j < 4; j++) {
                const float u = update<R, P, G, M>(seeded, scalars, p[r], g[r], m[r], j, fair);
                poison = fmaf(u, 0.0f, poison);
                us[j] = bits_of(u), ps[j] = P::widen(element<P>(p[r], j));
            }
            if (poison != 0.0f || !fair) {
                Written written;
                bool ignored = true;
                UNROLL for (int j = 0; j < 4; j++) us[j] = bits_of(update<R, P, G, M>(written, scalars, p[r], g[r], m[r], j, ignored));
            }
            UNROLL for (int j = 0; j < 4; j++) {
                if (first + r * ROUND + j >= n) ps[j] = 0, us[j] = 0;
            }
            add_squares(lane_p, ps);
            add_squares(lane_u, us);
        }
    }
    double sum_p = canonical_sum(block_sum(lanes_sum(lane_p), warps));
    double sum_u = canonical_sum(block_sum(lanes_sum(lane_u), warps));
    if (threadIdx.x == 0) a.sums[blockIdx.x] = sum_p, a.sums[a.chunks + blockIdx.x] = sum_u;
}

#define NORMS(name, R, P, G, M)                                                                                        \
    extern "C" __global__ void __launch_bounds__(CHUNK_THREADS, M::bytes == 4 ? 4 : 5) norms_##name(const __grid_constant__ Norms a) {\
        __shared__ Taken taken;                                                                                        \
        __shared__ double warps[CHUNK_THREADS / 32];                                                                   \
        norms<R, P, G, M>(a, taken, warps);                                                                            \
    }

#define GRADIENTS(name, R, P, DP)                                                                                      \
    STATES(name##_f32, R, P, DP, F32)                                                                                  \
    STATES(name##_bf16, R, P, DP, BF16)                                                                                \
    STATES(name##_fp16, R, P, DP, FP16)

#if defined(SOURCE_ADAMW_F32)
GRADIENTS(adamw_f32, AdamW, F32, NearestEven)
#elif defined(SOURCE_ADAMW_BF16)
GRADIENTS(adamw_bf16n, AdamW, BF16, NearestEven)
GRADIENTS(adamw_bf16s, AdamW, BF16, Draws16)
#elif defined(SOURCE_ADAMW_FP16)
GRADIENTS(adamw_fp16n, AdamW, FP16, NearestEven)
GRADIENTS(adamw_fp16s, AdamW, FP16, Draws16)
#elif defined(SOURCE_ADAM)
COMMON(adam, Adam)
#elif defined(SOURCE_SGD)
COMMON(sgd, Sgd)
#elif defined(SOURCE_LION)
COMMON(lion, Lion)
#elif defined(SOURCE_ADEMAMIX)
COMMON(ademamix, AdEMAMix)
#elif defined(SOURCE_LAMB)
COMMON(lamb, Lamb)
NORMS(lamb_f32_f32_f32, Lamb, F32, F32, F32)
NORMS(lamb_f32_f32_bf16, Lamb, F32, F32, BF16)
NORMS(lamb_bf16_bf16_f32, Lamb, BF16, BF16, F32)
NORMS(lamb_bf16_bf16_bf16, Lamb, BF16, BF16, BF16)
#else
#error "define the rule: SOURCE_ADAMW_F32, SOURCE_ADAMW_BF16, SOURCE_ADAMW_FP16, SOURCE_ADAM, ..."
#endif
