// What comes before a step, in one block: the records of all items, made of hyper-parameters, ages, step and seeds; then step and
// ages go on by one. With a gradient norm, its clip coefficient counts; where it, or the caller, has found a gradient that is not
// finite and the step is to be left out for it, records say so and nothing goes on.
#include "many.cuh"
#include "sums.cuh"

#define THREADS 512

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

template <class R> FN void prepare(const Prepare &a) {
    const Clock clock = *a.clock;
    const u32 stands = clock.found_inf || (a.norm && a.skips && a.norm->found_inf);
    const GradientFactors f = {clock.gradient_scale, a.norm ? a.norm->clip : clock.clip};
    // Scalars of all items, then keys of all items' parameters, and so on, so that a warp does one of these.
    for (u32 job = threadIdx.x; job < a.count * (2 + R::COUNT); job += THREADS) {
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
            const u64 seed = kind == 1 ? clock.seed_parameters : clock.seed_states;
            const Keys keys = keys_of(seed, clock.step + 1, item.id, kind, item.high);
            for (int i = 0; i < 5; i++) record.keys[kind - 1][i] = keys.k[i];
        }
    }
    // All have read.
    __syncthreads();
    for (u32 i = threadIdx.x; i < a.count; i += THREADS) {
        const Item &item = a.items[i];
        if (!(item.flags & (LEADS | ALONE)) || stands) continue;
        if (!(item.flags & ALONE))
            for (int s = 0; s < R::COUNT; s++) a.ages[item.slot * MOST_STATES + s]++;
        if (a.counts) {
            const Counts none = {};
            for (int copy = 0; copy < COPIES; copy++) a.counts[item.slot * COPIES + copy] = none;
        }
    }
    if (threadIdx.x == 0) {
        a.clock->step = clock.step + !stands;
        a.clock->skipped = clock.skipped + stands;
    }
}

#define ENTRY(name, R)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) prepare_##name(const __grid_constant__ Prepare a) { prepare<R>(a); }

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
    double *sums; // of parameters, one a chunk, and after `chunks` of them those of updates
    u64 chunks;
};

extern "C" __global__ void __launch_bounds__(CHUNK_THREADS) trust_lamb(const __grid_constant__ Trust a) {
    const Item &item = a.items[blockIdx.x];
    Record &record = a.records[blockIdx.x];
    const u64 chunks = (item.n + CHUNK - 1) / CHUNK;
    double norms[2];
    for (int k = 0; k < 2; k++) {
        __shared__ double warps[CHUNK_THREADS / 32];
        double *sums = a.sums + k * a.chunks + item.chunk;
        // Runs of 4096 sums take the places of the first of them, until one is left.
        u64 n = chunks;
        do {
            const u64 runs = (n + CHUNK - 1) / CHUNK;
            for (u64 r = 0; r < runs; r++) {
                double sum = run_sum(sums + r * CHUNK, n - r * CHUNK < CHUNK ? (u32)(n - r * CHUNK) : CHUNK, warps);
                if (threadIdx.x == 0) sums[r] = sum;
                __syncthreads();
            }
            n = runs;
        } while (n > 1);
        norms[k] = chunks == 0 ? 0 : sqrt(sums[0]);
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
