// Kernels that are wrong in one way each, and one that is right: what emulate.hpp has to tell apart.
#include "common.cuh"

struct Words {
    u32 *x; // n words
    const u32 *y; // n, and one more where something goes wrong
    u32 n;
};

#define WRONG(name) extern "C" __global__ void __launch_bounds__(64) wrong_##name(const __grid_constant__ Words a)

WRONG(read) { a.x[threadIdx.x] = a.y[a.n - 62 + threadIdx.x]; }
WRONG(end) { *(u64 *)a.x = ((const u64 *)a.y)[a.n / 2]; }
WRONG(write) { const_cast<u32 *>(a.y)[threadIdx.x] = 0; }
WRONG(vector) {
    if (threadIdx.x == 5) *(uint4 *)(a.x + 1) = make_uint4(0, 0, 0, 0);
}
WRONG(barrier) {
    if (threadIdx.x < 40) __syncthreads();
}
WRONG(lanes) {
    if (threadIdx.x % 32 < 16) __syncthreads();
    a.x[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFF, threadIdx.x, 1);
}
WRONG(end_of_lane) {
    if (threadIdx.x == 33) return;
    a.x[threadIdx.x] = __reduce_max_sync(0xFFFFFFFF, threadIdx.x);
}
WRONG(collective) {
    if (threadIdx.x < 16) a.x[threadIdx.x] = __ballot_sync(0xFFFFFFFF, 1);
    else a.x[threadIdx.x] = __reduce_max_sync(0xFFFFFFFF, threadIdx.x);
}
WRONG(mask) { a.x[threadIdx.x] = __ballot_sync(0xFFFF, 1); }
WRONG(source) {
    if (threadIdx.x < 16) a.x[threadIdx.x] = __shfl_xor_sync(0xFFFF, threadIdx.x, 16);
}
WRONG(shared) {
    __shared__ u32 shared[64];
    shared[threadIdx.x] = threadIdx.x;
    a.x[threadIdx.x] = shared[threadIdx.x ^ 32];
}
WRONG(again) {
    __shared__ u32 shared[64];
    for (u32 i = 0; i < 2; i++) {
        shared[threadIdx.x] = i;
        __syncthreads();
        a.x[threadIdx.x] = shared[threadIdx.x ^ 32];
    }
}
WRONG(byte) { ((u8 *)a.x)[threadIdx.x / 2] = 0; }
WRONG(blocks) { a.x[threadIdx.x] = blockIdx.x; }
WRONG(blocks_read) {
    volatile u32 seen = a.x[threadIdx.x ^ 1];
    __syncthreads();
    if (blockIdx.x == 1) a.x[threadIdx.x] = seen;
}
WRONG(counter) {
    if (threadIdx.x == 0) a.x[1 + blockIdx.x] = 1;
    __syncthreads();
    // No fence between.
    if (threadIdx.x == 0 && atomicAdd(a.x, 1u) == gridDim.x - 1) a.x[0] = a.x[1] + a.x[2];
}
WRONG(counter_of_block) {
    __shared__ u32 counter;
    if (threadIdx.x > 0) return;
    counter = 0;
    atomicAdd(&counter, 1u);
    a.x[1 + blockIdx.x] = blockIdx.x == 1 ? a.x[1] : 1;
    __threadfence();
}
WRONG(shift) { a.x[threadIdx.x] = a.n << (threadIdx.x + 1); }
WRONG(index) {
    u32 room[4] = {1, 2, 3, 4};
    a.x[threadIdx.x] = room[a.y[threadIdx.x]];
}
WRONG(loop) {
    while (*(volatile u32 *)a.x == 0) {}
}

// The sum of all words: shuffles, shared memory, barriers, and the block that is last by a counter in x[0]; partial sums follow.
extern "C" __global__ void __launch_bounds__(64) right(const __grid_constant__ Words a) {
    __shared__ u32 warps[2];
    __shared__ bool last;
    u32 sum = 0;
    for (u32 i = blockIdx.x * 64 + threadIdx.x; i < a.n; i += gridDim.x * 64) sum += a.y[i];
    for (int far = 16; far > 0; far /= 2) sum += __shfl_down_sync(0xFFFFFFFF, sum, far);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        a.x[2 + blockIdx.x] = warps[0] + warps[1];
        __threadfence();
        last = atomicAdd(a.x, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last || threadIdx.x >= 32) return;
    __threadfence();
    sum = 0;
    for (u32 i = threadIdx.x; i < gridDim.x; i += 32) sum += a.x[2 + i];
    sum = __reduce_add_sync(0xFFFFFFFF, sum);
    if (threadIdx.x == 0) a.x[0] = 0, a.x[1] = sum;
}

// Every collective and intrinsic once, in x[64 k + thread]: the test has what they give.
extern "C" __global__ void __launch_bounds__(64) intrinsics(const __grid_constant__ Words a) {
    const u32 lane = threadIdx.x % 32, y = a.y[threadIdx.x];
    u32 *x = a.x + threadIdx.x;
    x[0] = __shfl_sync(0xFFFFFFFF, y, lane * 5, 16);
    x[64] = __shfl_up_sync(0xFFFFFFFF, y, 3);
    x[128] = __shfl_down_sync(0xFFFFFFFF, y, 3, 8);
    x[192] = __shfl_xor_sync(0xFFFFFFFF, y, 21);
    x[256] = __ballot_sync(0xFFFFFFFF, y & 1);
    x[320] = (u32)__all_sync(0xFFFFFFFF, y != 0) | (u32)__any_sync(0xFFFFFFFF, y == 0) << 1;
    x[384] = lane < 8 ? __reduce_add_sync(0xFF, y) : __reduce_max_sync(0xFFFFFF00, y);
    x[448] = (u32)__reduce_min_sync(0xFFFFFFFF, (int)y);
    x[512] = __syncthreads_count(y & 1);
    x[576] = __byte_perm(y, ~y, 0x92D4);
    x[640] = __funnelshift_l(y, ~y, lane + 1);
    x[704] = __vmaxu2(y, ~y * 3);
    x[768] = __umulhi(y, 0xD256D193);
    x[832] = __popc(y) << 16 | __clz(y) << 8 | __ffs(y);
}

// Every atomic operation, by two blocks: what is left does not depend on the order.
extern "C" __global__ void __launch_bounds__(64) atomics(const __grid_constant__ Words a) {
    const u32 y = a.y[threadIdx.x] + blockIdx.x;
    atomicAdd(a.x, y);
    atomicSub(a.x + 1, y);
    atomicMax(a.x + 2, y);
    atomicMin(a.x + 3, y);
    atomicMax((int *)a.x + 4, (int)y);
    atomicOr(a.x + 5, y & y << 3);
    atomicAnd(a.x + 6, y | y << 3);
    atomicXor(a.x + 7, y);
    atomicInc(a.x + 8, 6);
    atomicAdd((u64 *)a.x + 5, (u64)y << 20);
    // A maximum from compare-and-swap.
    for (u32 seen = 0, old; seen < y; seen = old)
        if ((old = atomicCAS(a.x + 12, seen, y)) == seen) break;
    if (threadIdx.x == 0 && blockIdx.x == 0) atomicExch(a.x + 13, y);
}
