// Sums of squares in the fixed order of src/optim/norm.rs, and the clip coefficient.
//
// A chunk of 4096 places has 512 lanes; lane l adds places l, l + 512, ..., l + 3584 in this order. A thread of 128 has lanes
// 4t..4t + 3. Neighbours among the lanes, then among those sums, are added until one is left.
#pragma once
#include "round.cuh"

#define CHUNK 4096
#define ROUND 512
#define CHUNK_THREADS 128

// Four lanes of one thread take one round each: f64 holds the square of an f32 exactly, so that nothing hangs on the fusion.
FN void add_squares(double (&lane)[4], const u32 (&bits)[4]) {
    UNROLL for (int j = 0; j < 4; j++) {
        double x = (double)float_of(bits[j]);
        lane[j] = fma(x, x, lane[j]);
    }
}

// The sum of a thread's lanes, neighbours first.
FN double lanes_sum(const double (&lane)[4]) { return (lane[0] + lane[1]) + (lane[2] + lane[3]); }

// One NaN: payloads differ between machines.
FN double canonical_sum(double x) { return x != x ? double_of(0x7FF8000000000000ull) : x; }

// What becomes of a norm: beside `Clip` of src/optim/norm.rs.
struct ClipRule {
    double max_norm, eps;
    double gradient_scale; // absolute
};

FN float clip_factor(const ClipRule &c, double sum_of_squares) {
    double scaled = sqrt(sum_of_squares) * c.gradient_scale;
    double factor = c.max_norm / (scaled + c.eps);
    // A comparison that NaN fails, so that it stays.
    return factor > 1.0 ? 1.0f : (float)factor;
}
