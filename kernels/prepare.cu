// What comes before a step: the records of all items, made of hyper-parameters, ages, step and seeds; then step and ages go on by one.
// With a gradient norm, its clip coefficient counts; where it, or the caller, has found a gradient that is not finite and the step is to
// be left out for it, records say so and nothing goes on.
#include "many.cuh"
#include "sums.cuh"

#define THREADS 128

struct Prepare {
    const Item *items;
    Record *records;
    u64 *ages; // MOST_STATES a slot
    const double *hyper; // HYPER a parameter group
    Clock *clock;
    const Norm *norm; // or null
    Counts *counts;   // COPIES a slot, or null
    u32 count;        // of items
    u32 skips;        // whether a norm that is not finite leaves the step out
};

template <class R> FN void prepare(const Prepare &a, bool &last) {
    const Clock &clock = *a.clock;
    const u32 stands = clock.found_inf || (a.norm && a.skips && a.norm->found_inf);
    const u64 step = clock.step + 1, seed_parameters = clock.seed_parameters, seed_states = clock.seed_states;
    const GradientFactors f = {clock.gradient_scale, a.norm ? a.norm->clip : clock.clip};
    const u32 thread = blockIdx.x * THREADS + threadIdx.x, threads = gridDim.x * THREADS;
    // Scalars of all items, then keys of all items' parameters, and so on, so that a warp does one of these.
    for (u32 job = thread; job < a.count * (2 + R::COUNT); job += threads) {
        const u32 kind = job / a.count, i = job % a.count;
        const Item &item = a.items[i];
        Record &record = a.records[i];
        if (kind == 0) {
            const double *hyper = a.hyper + item.hyper * HYPER;
            u64 ages[MOST_STATES];
            for (int s = 0; s < MOST_STATES; s++) ages[s] = a.ages[item.slot * MOST_STATES + s] + 1;
            if ((item.flags & ALONE) && !stands)
                for (int s = 0; s < R::COUNT; s++) a.ages[item.slot * MOST_STATES + s] = ages[s];
            *(typename R::Scalars *)record.scalars = R::scalars(hyper, ages, f);
            record.stands = stands;
            record.skip_zeros = hyper[R::SKIP_ZEROS] != 0.0;
        } else {
            const Keys keys = keys_of(kind == 1 ? seed_parameters : seed_states, step, item.id, kind, item.high);
            for (int i = 0; i < 5; i++) record.keys[kind - 1][i] = keys.k[i];
        }
    }
    for (u32 i = thread; a.counts && !stands && i < a.count * COPIES; i += threads) {
        const Item &item = a.items[i / COPIES];
        const Counts none = {};
        if (item.flags & (LEADS | ALONE)) a.counts[item.slot * COPIES + i % COPIES] = none;
    }
    // What all blocks read is changed by the last of them that comes here.
    __syncthreads();
    if (threadIdx.x == 0) {
        last = true;
        if (gridDim.x > 1) {
            __threadfence();
            last = atomicInc(&a.clock->arrived, gridDim.x - 1) == gridDim.x - 1;
            __threadfence();
        }
    }
    __syncthreads();
    if (!last) return;
    for (u32 i = threadIdx.x; i < a.count; i += THREADS) {
        const Item &item = a.items[i];
        if ((item.flags & (LEADS | ALONE)) != LEADS || stands) continue;
        for (int s = 0; s < R::COUNT; s++) a.ages[item.slot * MOST_STATES + s]++;
    }
    if (threadIdx.x == 0) {
        a.clock->step = step - stands;
        a.clock->skipped += stands;
    }
}

#define ENTRY(name, R)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) prepare_##name(const __grid_constant__ Prepare a) {        \
        __shared__ bool last;                                                                                          \
        prepare<R>(a, last);                                                                                           \
    }

ENTRY(adamw, AdamW)
ENTRY(adam, Adam)
ENTRY(sgd, Sgd)
ENTRY(lion, Lion)
ENTRY(ademamix, AdEMAMix)
ENTRY(lamb, Lamb)

// The norms of whole tensors that LAMB goes by, from sums of squares of chunks, and what follows of them for the record. One block a
// tensor.
struct Trust {
    const Item *items;
    Record *records;
    const double *hyper;
    const double *sums; // of parameters, one a chunk, and after `chunks` of them those of updates
    u64 chunks;
};

// Runs of 4096 sums that are summed at once, and most that a tensor of 2^34 elements has.
#define TEAMS 8
#define MOST_RUNS 1024

extern "C" __global__ void __launch_bounds__(TEAMS * CHUNK_THREADS) trust_lamb(const __grid_constant__ Trust a) {
    __shared__ double warps[TEAMS][CHUNK_THREADS / 32], runs[MOST_RUNS];
    const Item &item = a.items[blockIdx.x];
    Record &record = a.records[blockIdx.x];
    const u32 chunks = (u32)((item.n + CHUNK - 1) / CHUNK), count = (chunks + CHUNK - 1) / CHUNK;
    const u32 team = threadIdx.x / CHUNK_THREADS;
    const bool first = threadIdx.x % CHUNK_THREADS == 0;
    double norms[2];
    UNROLL for (int k = 0; k < 2; k++) {
        const double *sums = a.sums + k * a.chunks + item.chunk;
        for (u32 next = 0; next < count; next += TEAMS) {
            const u32 run = next + team, left = run < count ? chunks - run * CHUNK : 0;
            const double sum = run_sum(sums + (u64)run * CHUNK, left < CHUNK ? left : CHUNK, warps[team]);
            if (first && run < count) runs[run] = sum;
        }
        __syncthreads();
        norms[k] = sqrt(run_sum(runs, count, warps[team]));
        // All have read the runs.
        __syncthreads();
    }
    if (threadIdx.x == 0 && !record.stands) {
        ((Lamb::Scalars *)record.scalars)->minus_step = Lamb::minus_step(a.hyper + item.hyper * HYPER, norms[0], norms[1]);
    }
}

// Asks a device for its seeds: 1024 threads.
struct AskSeeds {
    u32 *failed; // 0 before; not after, if one fails
};
extern "C" __global__ void __launch_bounds__(128) ask_seeds(const __grid_constant__ AskSeeds a) {
    if (!seed_holds(blockIdx.x * 128 + threadIdx.x)) atomicOr(a.failed, 1u);
}

// What the host changes between steps, in the order of its calls.
struct SetControl {
    Clock *clock;
    float gradient_scale, clip;
    u32 found_inf;
    u32 unused;
};
extern "C" __global__ void __launch_bounds__(32) set_control(const __grid_constant__ SetControl a) {
    if (threadIdx.x != 0) return;
    a.clock->gradient_scale = a.gradient_scale;
    a.clock->clip = a.clip;
    a.clock->found_inf = a.found_inf;
}

struct SetHyper {
    double *hyper; // of one parameter group
    double values[HYPER];
};
extern "C" __global__ void __launch_bounds__(32) set_hyper(const __grid_constant__ SetHyper a) {
    if (threadIdx.x < HYPER) a.hyper[threadIdx.x] = a.values[threadIdx.x];
}
