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
    const u32 *places; // the item of every 2^place_shift-th tile, and the last one that has tiles
    const Item *items;
    const Record *records;
    Counts *counts; // COPIES a slot
    u32 count;      // of items
    u32 place_shift;
    u16 p_draws, s_draws; // whether parameters and states are rounded stochastically, for kernels that take any
    u32 ahead; // tiles, or chunks of norms, by which memory is brought into the cache ahead of its use; 0: not at all
    // Where the host knows step, ages and control, nothing prepares the launch, which brings the device to the same state as if
    // something had: by the record of one item (1); by scalars of groups, and keys that every block makes (2), or that an earlier step
    // has made (3).
    u32 direct;
    u32 seeded; // whether roots and quotients may be those of seeds: `seed_holds`
    Record record;
    u32 scalars[MOST_GROUPS][16]; // of each parameter group; in the last one, whether it skips zeros
    u64 seed_parameters, seed_states;
    Clock *clock;
    u64 *ages; // MOST_STATES a slot, of which `states` are of states that there are
    u64 step;
    u32 states, unused;
    Record *next_records; // where keys are made ahead, for a step that comes, or null
    u64 next_step;
};

static_assert(sizeof(Launch) == 888, "src/cuda/plan.rs");
#ifndef __CUDACC__
static_assert(__builtin_offsetof(Launch, seeded) == 52 && __builtin_offsetof(Launch, record) == 56 && __builtin_offsetof(Launch, scalars) == 312 &&
                  __builtin_offsetof(Launch, seed_states) == 832 && __builtin_offsetof(Launch, clock) == 840 &&
                  __builtin_offsetof(Launch, ages) == 848 && __builtin_offsetof(Launch, step) == 856 &&
                  __builtin_offsetof(Launch, states) == 864 && __builtin_offsetof(Launch, next_step) == 880,
              "src/cuda/plan.rs");
#endif

// Copies words of a record that lies in shared memory to registers, four at a time, whenever it is asked: the compiler would keep
// them in registers for good, and be short of those.
#ifdef __CUDACC__
template <int N> FN void from_shared(u32 (&w)[N], SharedAddress address) {
    if (N == 2) asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(address));
    UNROLL for (int i = 0; i < N / 4 * 4; i += 4)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[i]), "=r"(w[i + 1]), "=r"(w[i + 2]), "=r"(w[i + 3]) : "r"(address + 4 * i));
}
#else
template <int N> FN void from_shared(u32 (&w)[N], SharedAddress at) { load<N>(w, at); }
#endif

// What a block has of its item in shared memory.
struct alignas(16) Taken {
    Record record;
    Item item;
    u32 middle; // MIDDLE, which a compiler that does not know it keeps in a register: a constant would ask for a move at each use
};

// Pointers and words, likewise.
#ifdef __CUDACC__
FN u64 double_word_at(SharedAddress at) {
    u64 word;
    asm volatile("ld.shared.u64 %0, [%1];" : "=l"(word) : "r"(at));
    return word;
}
FN u32 word_at(SharedAddress at) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at));
    return word;
}
#else
FN u64 double_word_at(SharedAddress at) { return *(const u64 *)at; }
FN u32 word_at(SharedAddress at) { return *(const u32 *)at; }
#endif
FN u64 double_word_in(const u64 &at) { return double_word_at(address_of(&at)); }
FN u32 word_in(const u32 &at) { return word_at(address_of(&at)); }
template <class T> FN T *pointer_in(T *const &at) { return (T *)double_word_at(address_of(&at)); }

template <class R> FN typename R::Scalars scalars_of(SharedAddress record) {
    typedef typename R::Scalars Scalars;
    const int words = sizeof(Scalars) / 4;
    static_assert(words < 16, "scalars outgrow a record");
    union {
        u32 w[(words + 3) / 4 * 4];
        Scalars scalars;
    } s;
    from_shared(s.w, record + __builtin_offsetof(Record, scalars));
    return s.scalars;
}
template <class R> FN typename R::Scalars scalars_of(const Record &r) { return scalars_of<R>(address_of(&r)); }

// Keys of parameters (0) and of states from 1 on.
FN Keys keys_of(SharedAddress record, int role) {
    u32 w[8];
    from_shared(w, record + (u32)(__builtin_offsetof(Record, keys) + role * sizeof w));
    Keys keys = {{w[0], w[1], w[2], w[3], w[4]}};
    return keys;
}
FN Keys keys_of(const Record &r, int role) { return keys_of(address_of(&r), role); }

// The item of a tile, of its step or of its norms: between the places of the stretch that the tile is in and of the next one, which are
// the same mostly.
struct OfStep {
    FN_MEMBER u32 first(const Item &item) { return item.tile; }
};
struct OfNorms {
    FN_MEMBER u32 first(const Item &item) { return item.norm_tile; }
};
template <class Of = OfStep> FN u32 item_of(const Launch &a, u32 tile) {
    if (a.count == 1) return 0;
    const u32 *place = a.places + (tile >> a.place_shift);
    u32 low = place[0], high = place[1];
    NO_UNROLL while (low < high) {
        const u32 middle = (low + high + 1) / 2;
        if (Of::first(a.items[middle]) <= tile) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

// The same, one item after another: a search in a loop over tiles makes code of that loop that takes 7 % longer, on an H200.
FN u32 item_by_steps(const Launch &a, u32 tile) {
    u32 item = a.count == 1 ? 0 : a.places[tile >> a.place_shift];
    NO_UNROLL while (tile - a.items[item].tile >= a.items[item].tiles) item++;
    return item;
}

// What of an item a block goes by before it has it in shared memory: all at once, not one after another.
struct There {
    Item item; // but id, group and high
    u32 number;
};
FN There item_there(const Launch &a, u32 tile) {
    union {
        u32 w[32];
        Item item;
    } there;
    const u32 number = item_of(a, tile), *at = (const u32 *)&a.items[number];
    load<4>(there.w, at), load<4>(there.w + 4, at + 4), load<4>(there.w + 8, at + 8), load<4>(there.w + 12, at + 12);
    load<4>(there.w + 16, at + 16), load<4>(there.w + 24, at + 24), load<4>(there.w + 28, at + 28);
    There result = {there.item, number};
    return result;
}
// Whether a tile that lies ahead is one of an item's, too.
FN bool is_of(const Item &item, u32 tile) { return tile - item.tile < item.tiles; }

// Now and then sees to it that the items that come next, and their records, are in the L2 cache by when they are come to: a step streams
// through it many times over, and all blocks of an item would wait for memory at once.
FN void prefetch_next(const Launch &a, u32 item, u32 tile) {
    if (a.count == 1 || threadIdx.x >= WARP || tile % 16 != 0) return;
    const u32 next = item + 1 + threadIdx.x / 4, line = threadIdx.x % 4;
    if (next >= a.count || line == 3) return;
    const char *at = line == 0 ? (const char *)&a.items[next] : (const char *)&a.records[next] + (line - 1) * 128;
    prefetch(at);
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

// What eight threads, which count from 0 on, make: the keys of all roles.
FN void make_keys(Record &to, const Launch &a, const Item &of, u64 step, u32 thread) {
    static_assert(MOST_STATES == 3, "roles");
    const u32 role = thread % 4, part = thread / 4;
    const Four t = key_of_tensor(role == 0 ? a.seed_parameters : a.seed_states, of.id);
    const Four x = part_of_keys(t, step, role + 1, of.high, part);
    UNROLL for (int i = 0; i < 4; i++) {
        if (part == 0 || i == 0) to.keys[role][4 * part + i] = x.w[i];
    }
}

// The keys of a step that comes, made by some blocks of this one when they are done.
FN void make_ahead(const Launch &a) {
    if (!a.next_records || threadIdx.x >= 8) return;
    for (u32 i = blockIdx.x; i < a.count; i += gridDim.x) make_keys(a.next_records[i], a, a.items[i], a.next_step, threadIdx.x);
}

// Words of a record: what a launch is told has no more than scalars.
#define KEY_WORDS 32
#define RECORD_WORDS 56

// Whether word i of a record is in memory; and that word, if it is.
FN bool is_stored(const Launch &a, u32 i) { return i < (a.direct == 0 ? RECORD_WORDS : a.direct == 3 ? KEY_WORDS : 0); }
FN bool stored_word(const Launch &a, u32 item, u32 i, u32 &word) {
    const bool stored = is_stored(a, i);
    if (stored) load<1>(&word, (const u32 *)&a.records[item] + i);
    return stored;
}
// And as it is in shared memory then.
FN void put_word(Record &to, const Launch &a, u32 hyper, u32 i, bool stored, u32 word) {
    if (i >= RECORD_WORDS) return;
    if (a.direct == 1) word = ((const u32 *)&a.record)[i];
    if (a.direct >= 2 && i >= KEY_WORDS) {
        word = i < KEY_WORDS + 16 ? a.scalars[hyper][i - KEY_WORDS] : i == KEY_WORDS + 17 ? a.scalars[hyper][15] : 0;
        stored = true;
    }
    if (stored || a.direct == 1) ((u32 *)&to)[i] = word;
}

// What a block's threads, 128, have of an item and its record: loaded before what is large, as loads of a multiprocessor end in their
// order, and put into shared memory after that is on its way.
struct Taking {
    u32 word;
    bool stored;
};
FN Taking begin_taking(const Launch &a, u32 item) {
    const u32 i = threadIdx.x;
    Taking taking = {0, false};
    if (i < 64) taking.stored = stored_word(a, item, i, taking.word);
    if (i >= 64 && i < 64 + 32) load<1>(&taking.word, (const u32 *)&a.items[item] + (i - 64));
    return taking;
}
FN void end_taking(Taken &to, const Launch &a, u32 item, u32 hyper, const Taking &taking) {
    const u32 i = threadIdx.x;
    put_word(to.record, a, hyper, i, taking.stored, taking.word);
    if (i >= 64 && i < 64 + 32) ((u32 *)&to.item)[i - 64] = taking.word;
    if (a.direct == 2 && i >= 96 && i < 96 + 8) make_keys(to.record, a, a.items[item], a.step, i - 96);
    if (i == 96) to.middle = MIDDLE;
    if (a.direct && blockIdx.x == 0) advance(a);
    __syncthreads();
}
FN void take(Taken &to, const Launch &a, u32 item) { end_taking(to, a, item, a.items[item].hyper, begin_taking(a, item)); }

// The same by copies, begun before what is large is loaded, which take no registers and none of the six counters by which loads are waited
// for: where threads load much in the meantime, a kernel would wait for all of it where it waits for a word. Half of the threads copy, the
// others put what a launch is told.
FN void begin_copying(Taken &to, const Launch &a, u32 item) {
    const u32 i = threadIdx.x;
    if (i < 32) {
        if (is_stored(a, 2 * i)) begin_copy<8>(address_of((u32 *)&to.record + 2 * i), (const u32 *)&a.records[item] + 2 * i);
    } else if (i < 32 + 16) {
        begin_copy<8>(address_of((u32 *)&to.item + 2 * (i - 32)), (const u32 *)&a.items[item] + 2 * (i - 32));
    }
    end_group();
}
FN void end_copying(Taken &to, const Launch &a, u32 item, u32 hyper) {
    const u32 i = threadIdx.x;
    if (i >= 64) {
        if (a.direct) put_word(to.record, a, hyper, i - 64, false, 0);
    } else if (i >= 32) {
        if (a.direct == 2 && i < 32 + 8) make_keys(to.record, a, a.items[item], a.step, i - 32);
        if (i == 32) to.middle = MIDDLE;
    }
    if (a.direct && blockIdx.x == 0) advance(a);
    wait_for_groups<0>();
    __syncthreads();
}

// And for one warp. What it loads is used where it is loaded: a processor has six counters to wait for loads by, and where one may be
// under way behind a branch, a loop waits for its next use of that counter, too, for whatever else is counted there.
FN void take_by_warp(Taken &to, const Launch &a, u32 item) {
    const u32 lane = threadIdx.x % WARP;
    // All have read what was there.
    __syncwarp();
    ((u32 *)&to.item)[lane] = ((const u32 *)&a.items[item])[lane];
    if (lane == 0) to.middle = MIDDLE;
    __syncwarp();
    UNROLL for (u32 i = lane; i < 64; i += WARP) {
        u32 word;
        if (stored_word(a, item, i, word)) {
            ((u32 *)&to.record)[i] = word;
        } else {
            put_word(to.record, a, word_in(to.item.hyper), i, false, 0);
        }
    }
    if (a.direct == 2 && lane < 8) make_keys(to.record, a, to.item, a.step, lane);
    __syncwarp();
}
