// The global norm of gradients of many tensors: norm_chunks reads every gradient once and writes one f64 a chunk of 4096,
// norm_combine takes 4096 of those to one, as often as it takes until one is left, and then says what becomes of it.
//
// norm_chunks: one block of CHUNK_THREADS threads a chunk, whose place in memory a table says; 4 or 2 bytes an element. Memory
// that is not aligned to four elements, and chunks of fewer than 4096, are read element by element, in the same order.
// norm_combine: one block a run of 4096 sums. Neither has memory that overlaps what it writes.
#include "memory.cuh"
#include "sums.cuh"

struct Chunk {
    u64 at;   // address of its first element
    u32 n;    // elements, 1 to 4096
    u32 type; // 0 f32, 1 BF16, 2 FP16
};

struct Chunks {
    const Chunk *chunks;
    double *sums; // one a chunk
};

struct Combine {
    const double *sums;
    u64 n;
    double *out; // one a run of 4096 sums
    Norm *norm;  // null unless one run is left
    ClipRule clip;
};

// Widened by the instruction for it.
struct FP16Converted : FP16 {
    FN_MEMBER u32 widen(u32 code) { return value_fp16(code); }
};

template <class T> FN void squares(const Chunk &c, double (&lane)[4]) {
    const u32 first = threadIdx.x * 4;
    if (c.n == CHUNK && c.at % (4 * T::bytes) == 0) {
        u32 w[CHUNK / ROUND][T::bytes];
        UNROLL for (int r = 0; r < CHUNK / ROUND; r++)
            load<T::bytes>(w[r], (const char *)c.at + (r * ROUND + first) * T::bytes);
        UNROLL for (int r = 0; r < CHUNK / ROUND; r++) {
            u32 bits[4];
            UNROLL for (int j = 0; j < 4; j++) bits[j] = T::widen(element<T>(w[r], j));
            add_squares(lane, bits);
        }
        return;
    }
    const typename T::Memory *x = (const typename T::Memory *)c.at;
    NO_UNROLL for (u32 i = first; i < c.n; i += ROUND) {
        u32 bits[4];
        UNROLL for (int j = 0; j < 4; j++) bits[j] = i + j < c.n ? T::widen(x[i + j]) : 0;
        add_squares(lane, bits);
    }
}

extern "C" __global__ void __launch_bounds__(CHUNK_THREADS) norm_chunks(const __grid_constant__ Chunks a) {
    const Chunk c = a.chunks[blockIdx.x];
    double lane[4] = {0, 0, 0, 0};
    if (c.type == 0) {
        squares<F32>(c, lane);
    } else if (c.type == 1) {
        squares<BF16>(c, lane);
    } else {
        squares<FP16Converted>(c, lane);
    }
    __shared__ double warps[CHUNK_THREADS / 32];
    double sum = block_sum(lanes_sum(lane), warps);
    if (threadIdx.x == 0) a.sums[blockIdx.x] = canonical_sum(sum);
}

extern "C" __global__ void __launch_bounds__(CHUNK_THREADS) norm_combine(const __grid_constant__ Combine a) {
    const u64 start = (u64)blockIdx.x * CHUNK;
    const u64 left = a.n - start;
    const u32 n = left < CHUNK ? (u32)left : CHUNK;
    __shared__ double warps[CHUNK_THREADS / 32];
    double sum = run_sum(a.sums + start, n, warps);
    if (threadIdx.x != 0) return;
    a.out[blockIdx.x] = sum;
    if (!a.norm) return;
    a.norm->sum_of_squares = sum;
    a.norm->clip = clip_factor(a.clip, sum);
    a.norm->found_inf = !(sum < double_of(0x7FF0000000000000ull));
}
