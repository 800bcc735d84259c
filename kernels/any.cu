// A step of any rule with any types and formats, and what LAMB asks first: norms of parameters and update.
//
// The types and formats are arguments. Runs of 256 elements, whole blocks of every size, to a warp, and four to a tile; memory
// at any address that its type allows. Element 0 of an item starts a block of every state that has blocks.
#include "any.cuh"
#include "sums.cuh"

#define THREADS 128

template <class R> FN void any(const AnyLaunch &a, Taken &taken) {
    take(taken, a.launch, item_of(a.launch, blockIdx.x));
    if (taken.record.stands) return;
    const Item &item = taken.item;
    const u64 run = (u64)(blockIdx.x - item.tile) * (THREADS / WARP) + threadIdx.x / WARP;
    const u64 start = run * RUN;
    if (start < item.n) any_run<R>(a, taken.record, item, start, threadIdx.x % WARP);
    make_ahead(a.launch);
}

#define ENTRY(name, R)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, 4) any_##name(const __grid_constant__ AnyLaunch a) {            \
        __shared__ Taken taken;                                                                                        \
        any<R>(a, taken);                                                                                              \
    }

ENTRY(adamw, AdamW)
ENTRY(adam, Adam)
ENTRY(sgd, Sgd)
ENTRY(lion, Lion)
ENTRY(ademamix, AdEMAMix)
ENTRY(lamb, Lamb)

struct AnyNorms {
    AnyLaunch a; // with a tile a chunk
    double *sums; // of parameters, one a tile, and after `chunks` of them those of updates
    u64 chunks;
};

extern "C" __global__ void __launch_bounds__(CHUNK_THREADS) norms_lamb_any(const __grid_constant__ AnyNorms s) {
    __shared__ Taken taken;
    const AnyLaunch &a = s.a;
    take(taken, a.launch, item_of<OfNorms>(a.launch, blockIdx.x));
    const Record &record = taken.record;
    const Item &item = taken.item;
    const u64 start = (u64)(blockIdx.x - item.norm_tile) * CHUNK;
    const u64 end = item.n - start < CHUNK ? item.n : start + CHUNK;
    double lane_p[4] = {0, 0, 0, 0}, lane_u[4] = {0, 0, 0, 0};
    NO_UNROLL for (u64 first = start + threadIdx.x * 4; first < end; first += ROUND) {
        float p[4], g[4], x[Lamb::COUNT][4];
        const bool whole = is_whole(item, first);
        UNROLL for (int k = 0; k < Lamb::COUNT; k++)
            states_at(a.states[k], item.states[k], scale_at(a.states[k], item.scales[k], first), first, item.n, whole, x[k]);
        parameters_at(a, item, first, whole, p);
        values_at(a.g_type, item.g, first, item.n, whole, g);
        u32 squares_p[4], squares_u[4];
        UNROLL for (int j = 0; j < 4; j++) {
            float states[Lamb::COUNT];
            UNROLL for (int k = 0; k < Lamb::COUNT; k++) states[k] = x[k][j];
            Written written;
            const float update = Lamb::update(written, scalars_of<Lamb>(record), p[j], g[j], states);
            const bool there = first + j < end;
            squares_p[j] = there ? bits_of(p[j]) : 0;
            squares_u[j] = there && !(record.skip_zeros && g[j] == 0.0f) ? bits_of(update) : 0;
        }
        add_squares(lane_p, squares_p);
        add_squares(lane_u, squares_u);
    }
    __shared__ double warps[CHUNK_THREADS / 32];
    double sum_p = canonical_sum(block_sum(lanes_sum(lane_p), warps));
    double sum_u = canonical_sum(block_sum(lanes_sum(lane_u), warps));
    if (threadIdx.x == 0) s.sums[blockIdx.x] = sum_p, s.sums[s.chunks + blockIdx.x] = sum_u;
}
