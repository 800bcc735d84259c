// Sums of squares by blocks of CHUNK_THREADS threads, in the order of norm.cuh.
#pragma once
#include "memory.cuh"
#include "norm.cuh"

// What the host and the step read of a norm.
struct Norm {
    double sum_of_squares;
    float clip;
    u32 found_inf; // whether a gradient is NaN or infinite
};

// The sum of what CHUNK_THREADS threads have, neighbours first, in each of them; all threads of the block come here, those with other
// `warps` for another sum. The kernel's own shared memory: that of a function has a
// name that depends on where it is compiled.
FN double block_sum(double x, double (&warps)[CHUNK_THREADS / 32]) {
    UNROLL for (int far = 1; far < 32; far *= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, far);
    // Nobody is still reading the last one.
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32 % (CHUNK_THREADS / 32)] = x;
    __syncthreads();
    return (warps[0] + warps[1]) + (warps[2] + warps[3]);
}

// The sum of a run of up to 4096 sums, likewise.
FN double run_sum(const double *sums, u32 n, double (&warps)[CHUNK_THREADS / 32]) {
    const u32 thread = threadIdx.x % CHUNK_THREADS;
    double lane[4] = {0, 0, 0, 0};
    if (n == CHUNK) {
        // All on their way at once.
        u32 all[CHUNK / ROUND][4][2];
        UNROLL for (u32 r = 0; r < CHUNK / ROUND; r++) {
            UNROLL for (int j = 0; j < 4; j++) load<2>(all[r][j], &sums[r * ROUND + thread * 4 + j]);
        }
        UNROLL for (u32 r = 0; r < CHUNK / ROUND; r++) {
            UNROLL for (int j = 0; j < 4; j++) lane[j] += double_of((u64)all[r][j][1] << 32 | all[r][j][0]);
        }
    } else {
        NO_UNROLL for (u32 i = thread * 4; i < n; i += ROUND) {
            UNROLL for (int j = 0; j < 4; j++) lane[j] += i + j < n ? sums[i + j] : 0.0;
        }
    }
    return canonical_sum(block_sum(lanes_sum(lane), warps));
}
