// Stream 1: the word of an element group under five keys (src/random/v1.rs).
#pragma once
#include "common.cuh"

struct Keys {
    u32 k[5];
};

// A group's word: `x0` holds its first two 16-bit draws or its first 32-bit draw, `x1` the others.
struct Word {
    u32 x0, x1;
};

// Words of several groups from one on: their rounds side by side, so that no round waits for the one before it.
template <int N> FN void words(Word (&w)[N], const Keys &keys, u32 group) {
    UNROLL for (int i = 0; i < N; i++) w[i].x0 = (group + i) * 0x9E3779B1u + keys.k[0], w[i].x1 = group + i;
    UNROLL for (int round = 1; round <= 4; round++) {
        UNROLL for (int i = 0; i < N; i++) {
            u32 high = high_product(w[i].x0, 0xD256D193u);
            u32 low = w[i].x0 * 0xD256D193u;
            w[i].x0 = high ^ w[i].x1 ^ keys.k[round];
            w[i].x1 = low;
        }
    }
}
FN Word word(const Keys &keys, u32 group) {
    Word w[1];
    words<1>(w, keys, group);
    return w[0];
}

// The middle of what a draw of 16 bits leaves open, where one more byte lies below it.
#define MIDDLE 0x80u

// Draw `j & 3` of a group's four 16-bit draws.
FN u32 draw16(const Word &w, u32 j) {
    u32 half = (j & 2) ? w.x1 : w.x0;
    return (j & 1) ? half >> 16 : half & 0xFFFF;
}

// Draw `j & 1` of a group's two 32-bit draws.
FN u32 draw32(const Word &w, u32 j) { return (j & 1) ? w.x1 : w.x0; }

// Keys from the start, where a step derives its own (src/random/philox.rs, v1.rs).
struct Four {
    u32 w[4];
};
FN Four philox4x32_10(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
    NO_UNROLL for (int round = 0; round < 10; round++) {
        u32 h0 = high_product(0xD2511F53u, c0), l0 = 0xD2511F53u * c0;
        u32 h1 = high_product(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
        c0 = h1 ^ c1 ^ k0, c1 = l1, c2 = h0 ^ c3 ^ k1, c3 = l0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    Four x = {{c0, c1, c2, c3}};
    return x;
}
// What keys of a tensor are made of, and of these the first four (part 0) or the last one (1).
FN Four key_of_tensor(u64 seed, u64 tensor) {
    return philox4x32_10((u32)tensor, (u32)(tensor >> 32), 0, 0, (u32)seed, (u32)(seed >> 32));
}
FN Four part_of_keys(const Four &t, u64 step, u32 role, u32 high, u32 part) {
    return philox4x32_10((u32)step, (u32)(step >> 32), high, role << 1 | part, t.w[0], t.w[1]);
}
FN Keys keys_of(u64 seed, u64 step, u64 tensor, u32 role, u32 high) {
    Four t = key_of_tensor(seed, tensor);
    Four a = part_of_keys(t, step, role, high, 0), b = part_of_keys(t, step, role, high, 1);
    Keys keys = {{a.w[0], a.w[1], a.w[2], a.w[3], b.w[0]}};
    return keys;
}
