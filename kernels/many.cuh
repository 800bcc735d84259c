// Many tensors in one launch: what stays while the set of tensors does (Item), what every step makes anew on the device (Record),
// and what a caller changes between steps (Clock and hyper-parameters).
//
// A launch has a block, or a warp for several, for the tiles of all its items, which finds the item that a tile is of. Nothing here is read by the host
// within a step, so that a captured graph replays with new randomness, ages and learning rates.
#pragma once
#include "memory.cuh"
#include "norm.cuh"
#include "random.cuh"
#include "rules.cuh"

#define WARP 32
#define MOST_STATES 3
#define HYPER 12
#define MOST_GROUPS 8 // whose scalars a launch is told
// Flags of an item: memory is aligned to what a thread takes; it is the first, or the only one, of its tensor.
#define VECTOR 1
#define LEADS 2
#define ALONE 4

// A run of a tensor whose groups share a high half.
struct Item {
    u64 n;
    void *p;
    const void *g;
    u16 *rest; // low halves of parameters, or null
    void *states[MOST_STATES];
    void *scales[MOST_STATES];
    u64 id;
    u32 group; // low half of the group that element 0 starts
    u32 high;  // high half of its groups
    u32 flags; // as above
    u32 slot;  // of its tensor: in ages and counts
    u32 tiles; // of its step
    u32 hyper; // its parameter group
    u32 chunk; // under NORMS, chunks of the plan before it
    u32 tile, norm_tile; // tiles of the launch before it, of its step and of its norms
    u32 unused;
}; // 128 bytes: a line of the cache

// Of one item, for one step: two lines of the cache.
struct Record {
    u32 keys[1 + MOST_STATES][8]; // of parameters and states, five words each
    u32 scalars[16];
    u32 stands; // whether the step is left out
    u32 skip_zeros;
    u32 unused[14];
};

// Of an optimizer.
struct Clock {
    u64 step;    // executed
    u64 skipped; // left out
    u64 seed_parameters, seed_states;
    float gradient_scale, clip;
    u32 found_inf;
    u32 arrived; // blocks that have prepared their part of a step; 0 between steps
};

// What a meter counts in one tensor, in one step: the sum of COPIES, so that not all warps add to one place. `counted` is what is
// left of all.
#define COPIES 32
struct Counts {
    u64 untouched;
    u64 stalled[MOST_STATES], nan[MOST_STATES], moved_to_same[MOST_STATES];
};

static_assert(sizeof(Item) == 128 && sizeof(Record) == 256 && sizeof(Clock) == 48 && sizeof(Counts) == 80, "src/cuda/plan.rs");

// What steps are launched with.
struct Launch {
    const u32 *places; // the item of every 2^place_shift-th tile
    const Item *items;
    const Record *records;
    Counts *counts; // COPIES a slot
    u32 count;      // of items
    u32 place_shift;
    u16 p_draws, s_draws; // whether parameters and states are rounded stochastically, for kernels that take any
    u32 ahead; // tiles, or chunks of norms, by which memory is brought into the cache ahead of its use; 0: not at all
    // Where the host knows step, ages and control, nothing prepares the launch, which brings the device to the same state as if
    // something had: by the record of one item (1), or by what a launch over several makes their records of (2).
    u32 direct;
    u32 seeded; // whether roots and quotients may be those of seeds: `seed_holds`
    Record record;
    u32 scalars[MOST_GROUPS][16]; // of each parameter group; in the last one, whether it skips zeros
    u64 seed_parameters, seed_states;
    Clock *clock;
    u64 *ages; // MOST_STATES a slot, of which `states` are of states that there are
    u64 step;
    u32 states, unused;
};

static_assert(sizeof(Launch) == 872, "src/cuda/plan.rs");
#ifndef __CUDACC__
static_assert(__builtin_offsetof(Launch, seeded) == 52 && __builtin_offsetof(Launch, record) == 56 && __builtin_offsetof(Launch, scalars) == 312 &&
                  __builtin_offsetof(Launch, seed_states) == 832 && __builtin_offsetof(Launch, clock) == 840 &&
                  __builtin_offsetof(Launch, ages) == 848 && __builtin_offsetof(Launch, step) == 856 &&
                  __builtin_offsetof(Launch, states) == 864,
              "src/cuda/plan.rs");
#endif

// Copies words of a record that lies in shared memory to registers, four at a time, whenever it is asked: the compiler would keep
// them in registers for good, and be short of those.
#ifdef __CUDACC__
template <int N> FN void from_shared(u32 (&w)[N], const u32 *at) {
    const u32 address = (u32)__cvta_generic_to_shared(at);
    UNROLL for (int i = 0; i < N; i += 4)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[i]), "=r"(w[i + 1]), "=r"(w[i + 2]), "=r"(w[i + 3]) : "r"(address + 4 * i));
}
#else
template <int N> FN void from_shared(u32 (&w)[N], const u32 *at) { load<N>(w, at); }
#endif

// What a block has of its item in shared memory.
struct alignas(16) Taken {
    Record record;
    Item item;
    u32 middle; // MIDDLE, which a compiler that does not know it keeps in a register: a constant would ask for a move at each use
};

// Pointers and words of the item, likewise.
#ifdef __CUDACC__
FN u64 double_word_in(const u64 &at) {
    u64 word;
    asm volatile("ld.shared.u64 %0, [%1];" : "=l"(word) : "r"((u32)__cvta_generic_to_shared(&at)));
    return word;
}
template <class T> FN T *pointer_in(T *const &at) { return (T *)double_word_in((const u64 &)at); }
FN u32 word_in(const u32 &at) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"((u32)__cvta_generic_to_shared(&at)));
    return word;
}
#else
FN u64 double_word_in(const u64 &at) { return at; }
template <class T> FN T *pointer_in(T *const &at) { return at; }
FN u32 word_in(const u32 &at) { return at; }
#endif

template <class R> FN typename R::Scalars scalars_of(const Record &r) {
    typedef typename R::Scalars Scalars;
    const int words = sizeof(Scalars) / 4;
    static_assert(words < 16, "scalars outgrow a record");
    union {
        u32 w[(words + 3) / 4 * 4];
        Scalars scalars;
    } s;
    from_shared(s.w, r.scalars);
    return s.scalars;
}

// Keys of parameters (0) and of states from 1 on.
FN Keys keys_of(const Record &r, int role) {
    u32 w[8];
    from_shared(w, r.keys[role]);
    Keys keys = {{w[0], w[1], w[2], w[3], w[4]}};
    return keys;
}

// The item of a tile, of its step or of its norms. Items without a tile come last, so that few steps lead from the place that a table
// tells to where it is, mostly none.
struct OfStep {
    FN_MEMBER bool before(const Item &item, u32 tile) { return tile - item.tile >= item.tiles; }
};
struct OfNorms {
    FN_MEMBER bool before(const Item &item, u32 tile) { return tile - item.norm_tile >= (item.n + CHUNK - 1) / CHUNK; }
};
template <class Of = OfStep> FN u32 item_of(const Launch &a, u32 tile) {
    if (a.count == 1) return 0;
    u32 item = a.places[tile >> a.place_shift];
    NO_UNROLL while (Of::before(a.items[item], tile)) item++;
    return item;
}

// The same for all threads of a block. Now and then it sees to it that the items ahead are in the cache by when they are come to: a step
// streams through the cache many times over, and all blocks of an item would wait for memory at once.
template <class Of = OfStep> FN u32 item_ahead(const Launch &a, u32 tile) {
    const u32 item = item_of<Of>(a, tile);
    if (threadIdx.x < 32 && tile % 16 == 0) {
        const u32 next = item + 1 + threadIdx.x / 4, line = threadIdx.x % 4;
        if (next < a.count && line < 3) prefetch(line == 0 ? (const char *)&a.items[next] : (const char *)&a.records[next] + (line - 1) * 128);
    }
    return item;
}

// The item of a tile that lies ahead, where it is the same item or the next one.
FN const Item *item_of_ahead(const Launch &a, u32 item, u32 tile) {
    const Item *of = &a.items[item];
    if (tile - of->tile >= of->tiles && item + 1 < a.count) of++;
    return tile - of->tile < of->tiles ? of : 0;
}

// Brings the device to where a step that nothing prepares leaves it; one block comes here.
FN void advance(const Launch &a) {
    for (u32 i = threadIdx.x; i < a.count; i += blockDim.x) {
        const Item &item = a.items[i];
        if (!(item.flags & (LEADS | ALONE))) continue;
        for (u32 s = 0; s < a.states; s++) a.ages[item.slot * MOST_STATES + s]++;
    }
    if (threadIdx.x == 0) a.clock->step = a.step;
}

// Takes a record to shared memory, as far as it is used, by some threads of 32 or more that count from 0 on. Of those after `keys`
// eight make the keys of parameters and states, where the launch is told what records are made of.
FN void take_record(Record &to, const Launch &a, u32 item, u32 thread, u32 threads, u32 keys) {
    if (a.direct != 2) {
        for (u32 i = thread; i < 56; i += threads) ((u32 *)&to)[i] = a.direct ? ((const u32 *)&a.record)[i] : ((const u32 *)&a.records[item])[i];
        return;
    }
    const Item &of = a.items[item];
    if (thread < 16) to.scalars[thread] = a.scalars[of.hyper][thread];
    if (thread == 0) to.stands = 0, to.skip_zeros = a.scalars[of.hyper][15];
    const u32 role = (thread - keys) % 4, part = (thread - keys) / 4;
    if (part < 2) {
        static_assert(MOST_STATES == 3, "roles");
        const Four t = key_of_tensor(role == 0 ? a.seed_parameters : a.seed_states, of.id);
        const Four x = part_of_keys(t, a.step, role + 1, of.high, part);
        UNROLL for (int i = 0; i < 4; i++) {
            if (part == 0 || i == 0) to.keys[role][4 * part + i] = x.w[i];
        }
    }
}

// Takes an item and its record to shared memory; every thread of the block, of 128, comes here.
FN void take(Taken &to, const Launch &a, u32 item) {
    const u32 i = threadIdx.x;
    take_record(to.record, a, item, i, 128, 96);
    if (i >= 64 && i < 64 + 32) ((u32 *)&to.item)[i - 64] = ((const u32 *)&a.items[item])[i - 64];
    if (i == 0) to.middle = MIDDLE;
    if (a.direct && blockIdx.x == 0) advance(a);
    __syncthreads();
}

// The same for one warp.
FN void take_by_warp(Taken &to, const Launch &a, u32 item) {
    const u32 lane = threadIdx.x % WARP;
    // All have read what was there.
    __syncwarp();
    take_record(to.record, a, item, lane, WARP, 0);
    ((u32 *)&to.item)[lane] = ((const u32 *)&a.items[item])[lane];
    if (lane == 0) to.middle = MIDDLE;
    __syncwarp();
}
