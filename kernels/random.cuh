// Stream 1: the word of an element group under five keys, which the host derives (src/random/v1.rs).
#pragma once
#include "common.cuh"

struct Keys {
    u32 k[5];
};

// A group's word: `x0` holds its first two 16-bit draws or its first 32-bit draw, `x1` the others.
struct Word {
    u32 x0, x1;
};

FN Word word(const Keys &keys, u32 group) {
    u32 x0 = group * 0x9E3779B1u + keys.k[0];
    u32 x1 = group;
    UNROLL for (int round = 1; round <= 4; round++) {
        u32 high = high_product(x0, 0xD256D193u);
        u32 low = x0 * 0xD256D193u;
        x0 = high ^ x1 ^ keys.k[round];
        x1 = low;
    }
    Word w = {x0, x1};
    return w;
}

// Draw `j & 3` of a group's four 16-bit draws.
FN u32 draw16(const Word &w, u32 j) {
    u32 half = (j & 2) ? w.x1 : w.x0;
    return (j & 1) ? half >> 16 : half & 0xFFFF;
}

// Draw `j & 1` of a group's two 32-bit draws.
FN u32 draw32(const Word &w, u32 j) { return (j & 1) ? w.x1 : w.x0; }
