// A step of any rule with any types and formats, known at run time.
#pragma once
#include "blocks.cuh"
#include "many.cuh"

struct AnyLaunch {
    Launch launch;
    u32 p_type, g_type; // 0: f32, 1: BF16, 2: FP16
    u32 log_run;        // log2 of the elements of a block, for kernels that have formats built in
    u32 tiles;          // of all items, for kernels whose warps take one after another
    Moment states[MOST_STATES];
};

FN float value_at(u32 type, const void *memory, u64 i) {
    if (type == 0) return ((const float *)memory)[i];
    u32 bits = ((const u16 *)memory)[i];
    return float_of(type == 1 ? widen_bf16(bits) : widen_fp16(bits));
}

// Stores a value, and gives it as it is stored.
FN float store_at(u32 type, void *memory, u64 i, float x, bool draws, u32 draw) {
    u32 bits = canonical(x);
    if (type == 0) {
        ((u32 *)memory)[i] = bits;
        return float_of(bits);
    }
    u32 code = type == 1 ? (draws ? code_bf16<Draws16>(0x7F80, bits, draw) : code_bf16<NearestEven>(0x7F80, bits, 0))
                         : (draws ? code_fp16<Draws16>(bits, draw) : code_fp16<NearestEven>(bits, 0));
    ((u16 *)memory)[i] = (u16)code;
    return float_of(type == 1 ? widen_bf16(code) : widen_fp16(code));
}

// A BF16 number and 16 bits more, beside src/optim/remainder.rs.
FN float joined(u32 code, u32 rest) {
    const u32 magnitude = code & 0x7FFF, away = rest >> 15;
    u32 high = magnitude > 0x7F80 ? code : magnitude == 0 && away ? code | 0x7F80 : code - away;
    return float_of(high << 16 | rest);
}
FN u32 nearest_away(u32 bits) {
    const u32 magnitude = bits & 0x7FFFFFFF, high = bits >> 16;
    return magnitude >= F32_INFINITY + 0x10000 ? high : magnitude >= F32_INFINITY + 0x8000 ? high & 0x8000 : high + (bits >> 15 & 1);
}

// Four elements of a type from element i on, a multiple of 4, as f32; beyond n they are 0. `whole` says that all are there and that
// memory is aligned to four.
FN void values_at(u32 type, const void *memory, u64 i, u64 n, bool whole, float (&x)[4]) {
    u32 w[4] = {0, 0, 0, 0};
    if (type == 0) {
        if (whole) {
            load<4>(w, (const float *)memory + i);
        } else {
            UNROLL for (int j = 0; j < 4; j++) w[j] = i + j < n ? ((const u32 *)memory)[i + j] : 0;
        }
        UNROLL for (int j = 0; j < 4; j++) x[j] = float_of(w[j]);
        return;
    }
    u32 halves[2];
    if (whole) {
        load<2>(halves, (const u16 *)memory + i);
    } else {
        UNROLL for (int j = 0; j < 4; j++) w[j] = i + j < n ? ((const u16 *)memory)[i + j] : 0;
        halves[0] = w[0] | w[1] << 16, halves[1] = w[2] | w[3] << 16;
    }
    UNROLL for (int j = 0; j < 4; j++) {
        const u32 code = halves[j / 2] >> j % 2 * 16 & 0xFFFF;
        x[j] = float_of(type == 1 ? widen_bf16(code) : widen_fp16(code));
    }
}

// Parameters.
FN void parameters_at(const AnyLaunch &a, const Item &item, u64 i, bool whole, float (&p)[4]) {
    values_at(a.p_type, item.p, i, item.n, whole, p);
    if (!item.rest) return;
    UNROLL for (int j = 0; j < 4; j++) {
        if (i + j < item.n) p[j] = joined(((const u16 *)item.p)[i + j], item.rest[i + j]);
    }
}

// The scale of the block of element i.
FN u32 scale_at(const Moment &m, const void *scales, u64 i) {
    if (m.kind < 2) return 0;
    return m.kind == 3 ? ((const u32 *)scales)[i >> m.log_block] : ((const u8 *)scales)[i >> m.log_block];
}

// A state, from element i on. Codes of four elements are a word, or half of one.
FN void states_at(const Moment &m, const void *memory, u32 scale, u64 i, u64 n, bool whole, float (&x)[4]) {
    if (m.kind < 2) return values_at(m.kind, memory, i, n, whole, x);
    const bool bytes = m.target.sign_shift == 7;
    u32 codes = 0;
    if (whole) {
        codes = bytes ? ((const u32 *)memory)[i / 4] : ((const u16 *)memory)[i / 4];
    } else {
        UNROLL for (int j = 0; j < 4; j++) {
            if (i + j >= n) continue;
            codes |= bytes ? (u32)((const u8 *)memory)[i + j] << 8 * j : (((const u8 *)memory)[(i + j) / 2] >> j % 2 * 4 & 0xFu) << 4 * j;
        }
    }
    UNROLL for (int j = 0; j < 4; j++) x[j] = any_value<true>(m, scale, bytes ? codes >> 8 * j & 0xFF : codes >> 4 * j & 0xF);
}

// Whether all of four elements is there, and memory aligned to four.
FN bool is_whole(const Item &item, u64 i) { return (item.flags & VECTOR) && i + 4 <= item.n; }

// Four elements of a step.
template <class R> struct Quad {
    float p[4], g[4], old[R::COUNT][4], x[R::COUNT][4]; // new p, g, and states before and after, unrounded
    u32 scale[R::COUNT];                                // of the blocks, before
};

template <class R> FN Quad<R> any_quad(const AnyLaunch &a, const Record &r, const Item &item, u64 i) {
    Quad<R> q;
    const bool whole = is_whole(item, i);
    if (i >= item.n) {
        UNROLL for (int j = 0; j < 4; j++) {
            q.p[j] = q.g[j] = 0;
            UNROLL for (int k = 0; k < R::COUNT; k++) q.old[k][j] = q.x[k][j] = 0;
        }
        UNROLL for (int k = 0; k < R::COUNT; k++) q.scale[k] = 0;
        return q;
    }
    UNROLL for (int k = 0; k < R::COUNT; k++) {
        q.scale[k] = scale_at(a.states[k], item.scales[k], i);
        states_at(a.states[k], item.states[k], q.scale[k], i, item.n, whole, q.old[k]);
    }
    parameters_at(a, item, i, whole, q.p);
    values_at(a.g_type, item.g, i, item.n, whole, q.g);
    const typename R::Scalars scalars = scalars_of<R>(r);
    UNROLL for (int j = 0; j < 4; j++) {
        float x[R::COUNT];
        UNROLL for (int k = 0; k < R::COUNT; k++) x[k] = q.old[k][j];
        Written written;
        const float now = R::step(written, scalars, q.p[j], q.g[j], x);
        const bool still = (r.skip_zeros && q.g[j] == 0.0f) || i + j >= item.n;
        q.p[j] = still ? q.p[j] : now;
        UNROLL for (int k = 0; k < R::COUNT; k++) q.x[k][j] = still ? q.old[k][j] : x[k];
    }
    return q;
}

// Who stalled, as a thread has seen.
template <class R> struct AnySeen {
    u32 untouched, stalled[R::COUNT], nan[R::COUNT], same[R::COUNT];
};

// One of four, known at run time.
FN float pick(const float (&x)[4], int j) { return j & 2 ? (j & 1 ? x[3] : x[2]) : (j & 1 ? x[1] : x[0]); }

// Rounds and stores four elements under these new scales.
template <class R>
FN void store_quad(const AnyLaunch &a, const Record &r, const Item &item, u64 i, const Quad<R> &q, const u32 (&scale)[R::COUNT], AnySeen<R> &seen) {
    if (i >= item.n) return;
    const int left = item.n - i < 4 ? (int)(item.n - i) : 4;
    const u32 group = item.group + (u32)(i / 4);
    const bool metered = a.launch.counts;
    Word w = {0, 0};
    if (a.launch.p_draws) w = word(keys_of(r, 0), group);
    u32 idle = 0; // a bit for each element
    NO_UNROLL for (int j = 0; j < left; j++) {
        const float now = pick(q.p, j);
        if (item.rest) {
            u32 bits = canonical(now);
            ((u16 *)item.p)[i + j] = (u16)nearest_away(bits), item.rest[i + j] = (u16)bits;
        } else {
            store_at(a.p_type, item.p, i + j, now, a.launch.p_draws, draw16(w, j));
        }
        idle |= (u32)(pick(q.g, j) == 0.0f && pick(q.old[R::SECOND < 0 ? 0 : R::SECOND], j) == 0.0f) << j;
    }
    if (metered) seen.untouched += __popc(idle);
    UNROLL for (int k = 0; k < R::COUNT; k++) {
        const Moment &m = a.states[k];
        const bool bytes = m.target.sign_shift == 7;
        if (a.launch.s_draws) w = word(keys_of(r, 1 + k), group);
        u32 codes = 0;
        NO_UNROLL for (int j = 0; j < left; j++) {
            const u32 draw = draw16(w, j);
            const float x = pick(q.x[k], j), old = pick(q.old[k], j);
            float stored;
            if (m.kind < 2) {
                stored = store_at(m.kind, item.states[k], i + j, x, a.launch.s_draws, draw);
            } else {
                const u32 code = any_code<true>(m, scale[k], x, a.launch.s_draws, draw);
                codes |= code << (bytes ? 8 : 4) * j;
                stored = metered ? any_value<true>(m, scale[k], code) : 0;
            }
            if (!metered || idle >> j & 1) continue;
            seen.stalled[k] += old == stored;
            seen.nan[k] += old != old || stored != stored;
            // On a grid that moved, the code nearest to the old value.
            if (m.kind >= 2 && q.scale[k] != scale[k] && old == old && stored == stored && old != stored) {
                seen.same[k] += any_value<true>(m, scale[k], any_code<true>(m, scale[k], old, false, 0, false)) == stored;
            }
        }
        if (m.kind < 2) continue;
        if (is_whole(item, i)) {
            if (bytes) {
                ((u32 *)item.states[k])[i / 4] = codes;
            } else {
                ((u16 *)item.states[k])[i / 4] = (u16)codes;
            }
        } else {
            for (int j = 0; j < (bytes ? left : (left + 1) / 2); j++) ((u8 *)item.states[k])[(bytes ? i : i / 2) + j] = (u8)(codes >> 8 * j);
        }
    }
}

// The largest magnitude of a quad's state, and of all that share its block: those of a warp, or of fewer lanes.
FN u32 largest(const float (&x)[4], u32 log_block) {
    u32 amax = 0;
    UNROLL for (int j = 0; j < 4; j++) {
        const u32 magnitude = bits_of(x[j]) & 0x7FFFFFFF;
        amax = amax > magnitude ? amax : magnitude;
    }
    NO_UNROLL for (u32 far = log_block < 7 ? 1u << (log_block - 3) : 16; far > 0; far /= 2) {
        const u32 other = __shfl_xor_sync(0xFFFFFFFFu, amax, far);
        amax = amax > other ? amax : other;
    }
    return amax;
}

// A run of 256 elements by one warp, in halves of a quad to a lane. Blocks of 256 look at both halves first.
#define RUN 256

template <class R> FN void any_run(const AnyLaunch &a, const Record &r, const Item &item, u64 start, u32 lane) {
    u32 both[R::COUNT]; // the largest magnitude of a block of 256
    bool large = false;
    UNROLL for (int k = 0; k < R::COUNT; k++) both[k] = 0, large |= a.states[k].kind >= 2 && a.states[k].log_block == 8;
    AnySeen<R> seen = {};
    NO_UNROLL for (u32 pass = large ? 0 : 2; pass < 4; pass++) {
        const u64 i = start + (pass & 1) * (RUN / 2) + lane * 4;
        if (i - lane * 4 >= item.n) continue;
        const Quad<R> q = any_quad<R>(a, r, item, i);
        u32 scale[R::COUNT];
        UNROLL for (int k = 0; k < R::COUNT; k++) {
            const Moment &m = a.states[k];
            scale[k] = 0;
            if (m.kind < 2) continue;
            const u32 amax = largest(q.x[k], m.log_block);
            if (pass < 2) both[k] = both[k] > amax ? both[k] : amax;
            scale[k] = any_scale<true>(m, m.log_block == 8 ? both[k] : amax);
        }
        if (pass < 2) continue;
        store_quad<R>(a, r, item, i, q, scale, seen);
        // The old scales of these blocks were read by all, and those of 256 once they are through.
        __syncwarp();
        UNROLL for (int k = 0; k < R::COUNT; k++) {
            const Moment &m = a.states[k];
            const bool through = m.log_block < 8 || pass == 3 || start + RUN / 2 >= item.n;
            // By the lane with the first element.
            const u64 first = m.log_block == 8 ? start + lane * 4 : i;
            if (m.kind < 2 || !through || first >= item.n || (first & ((1u << m.log_block) - 1)) != 0) continue;
            if (m.kind == 2) {
                ((u8 *)item.scales[k])[first >> m.log_block] = (u8)scale[k];
            } else {
                ((u32 *)item.scales[k])[first >> m.log_block] = scale[k];
            }
        }
    }
    if (!a.launch.counts) return;
    Counts &to = a.launch.counts[item.slot * COPIES + (start / RUN) % COPIES];
    const u32 untouched = __reduce_add_sync(0xFFFFFFFFu, seen.untouched);
    if (lane == 0 && untouched) atomicAdd(&to.untouched, (u64)untouched);
    UNROLL for (int k = 0; k < R::COUNT; k++) {
        const u32 stalled = __reduce_add_sync(0xFFFFFFFFu, seen.stalled[k]);
        const u32 nan = __reduce_add_sync(0xFFFFFFFFu, seen.nan[k]), same = __reduce_add_sync(0xFFFFFFFFu, seen.same[k]);
        if (lane == 0 && stalled) atomicAdd(&to.stalled[k], (u64)stalled);
        if (lane == 0 && nan) atomicAdd(&to.nan[k], (u64)nan);
        if (lane == 0 && same) atomicAdd(&to.moved_to_same[k], (u64)same);
    }
}

// An element of a state in blocks under powers of two.
FN float code_at(const Moment &m, const void *memory, u32 scale, u64 i) {
    const u32 place = m.target.sign_shift == 7 ? 0 : i % 2 * 4;
    const u32 code = ((const u8 *)memory)[m.target.sign_shift == 7 ? i : i / 2] >> place & ((2u << m.target.sign_shift) - 1);
    return any_value<false>(m, scale, code);
}

FN float one_step(const AnyLaunch &a, const Record &r, const Item &item, u64 i, float (&x)[2]) {
    UNROLL for (int k = 0; k < 2; k++)
        x[k] = code_at(a.states[k], item.states[k], ((const u8 *)item.scales[k])[i >> a.log_run], i);
    Written written;
    return AdamW::step(written, scalars_of<AdamW>(r), value_at(a.p_type, item.p, i), value_at(a.g_type, item.g, i), x);
}

// One block of both moments of AdamW, under powers of two, by one warp: where a kernel that has their formats built in cannot.
FN void one_block(const AnyLaunch &a, const Record &r, const Item &item, u64 start, u32 lane) {
    const u64 end = item.n - start < 1u << a.log_run ? item.n : start + (1u << a.log_run);
    u32 scale[2] = {0, 0};
    // What is largest first, and then everything, made again from what is in memory still.
    NO_UNROLL for (u64 i = start + lane; i < end; i += WARP) {
        float x[2];
        one_step(a, r, item, i, x);
        UNROLL for (int k = 0; k < 2; k++) {
            const u32 magnitude = bits_of(x[k]) & 0x7FFFFFFF;
            scale[k] = scale[k] > magnitude ? scale[k] : magnitude;
        }
    }
    UNROLL for (int k = 0; k < 2; k++) scale[k] = any_scale<false>(a.states[k], __reduce_max_sync(0xFFFFFFFFu, scale[k]));
    // Every lane takes pairs of neighbours, 64 apart.
    NO_UNROLL for (u64 pair = start + 2 * lane; pair < end; pair += 2 * WARP) {
        u32 codes[2] = {0, 0}; // of a pair, in 4 bits each
        NO_UNROLL for (u64 i = pair; i < pair + 2 && i < end; i++) {
            const u32 j = (u32)(i % 4), group = item.group + (u32)(i / 4);
            float x[2];
            const float now = one_step(a, r, item, i, x);
            const bool draws = a.launch.p_draws;
            store_at(a.p_type, item.p, i, now, draws, draws ? draw16(word(keys_of(r, 0), group), j) : 0);
            UNROLL for (int k = 0; k < 2; k++) {
                const Moment &m = a.states[k];
                const u32 draw = a.launch.s_draws ? draw16(word(keys_of(r, 1 + k), group), j) : 0;
                const u32 code = any_code<false>(m, scale[k], x[k], a.launch.s_draws, draw);
                if (m.target.sign_shift == 7) ((u8 *)item.states[k])[i] = (u8)code;
                codes[k] |= code << (i & 1) * 4;
            }
        }
        UNROLL for (int k = 0; k < 2; k++)
            if (a.states[k].target.sign_shift == 3) ((u8 *)item.states[k])[pair / 2] = (u8)codes[k];
    }
    // The old scales were read by all.
    __syncwarp();
    UNROLL for (int k = 0; k < 2; k++)
        if (lane == 0) ((u8 *)item.scales[k])[start >> a.log_run] = (u8)scale[k];
}
