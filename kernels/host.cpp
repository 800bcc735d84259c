// The element functions of the kernels as a program for the host, to be compared with Rust (src/cuda/host_tests.rs).
//
//   g++ -O2 -std=c++17 -ffp-contract=off -o host kernels/host.cpp
//
// Reads one request on standard input and writes the answer on standard output, all in 32-bit words:
//   0, keys (5), n, groups (n)                          words: x0, x1 of each group
//   1, decision, fraction bits, target (13), n, (bits, draw) n times
//                                                       codes: the code of each by `code`; then, if fraction bits is not 0,
//                                                       whether each four of them were done by `codes_plain`, and its codes
//   2, decision, beyond, n, (bits, draw) n times        codes by `code_bf16`, then by `code_fp16`
//   3, rule, scalars (14 words), n, (p, g, state, state, state) n times
//                                                       new p and states of a rule, canonical; states that it has not are 0
//   4, n, codes (n)                                     widened from BF16, then from FP16
//   5, element, decision, second, block, n, (bits, draw) n times
//                                                       moments in blocks: of each whole block, the code of its scale; if
//                                                       that is not NaN, whether it is near; if it is, word by word, the codes
//                                                       and the value of each
//   6, n, f32 bits (n), n at most 4096                  the sum of squares of a chunk, in two words
//   7, clip rule (3 f64), n, sums (n f64)               the clip factor of each
//   8, decision, width, encoder (18), global, block, n, (bits, draw) n times, n a multiple of 8
//                                                       casts into blocks: of each block, its scale as stored and the codes of
//                                                       each eight elements, in two words
//   9, decoder (8), rule, global, n, (code, scale) n times
//                                                       values of blocks
//   10, n, f32 bits (n)                                 the scale of a tensor in NVFP4 of each largest magnitude
//   11, moment (30), whether there are draws, block, n, (bits, draw) n times
//                                                       moments in blocks of any format: of each block, its scale as stored and
//                                                       code and value of each element
//   12, rule, hyper-parameters (12 f64), n, (ages (3 u64), gradient scale, clip) n times
//                                                       scalars of a step (14 words)
//   13, n, (seed, step, tensor (u64), role, high) n times
//                                                       keys (5)
//   14, hyper-parameters (12 f64), n, (norm of parameters, of update (f64)) n times
//                                                       LAMB's step
//   15, first significand, count                        roots of that and the following numbers, by every seed that is as near as
//                                                       the hardware's: how many seeds; and of each wrong root, the number
//   16, first significand, count                        inverses, likewise, of the significands in [1, 2): how many seeds; and of each
//                                                       wrong inverse, the number, the inverse, and how many quotients by it of
//                                                       the numerators in [1, 2) are wrong
//   17, n, (a, b) n times                               quotients a / b by the best seed, by the two next to it, and written
//   18, rule, scalars (14 words), n, (p, g, state, state, state) n times
//                                                       of each element, whether the seeded step covers it; if so new p and states
//   19, scalars (14 words), n, (scale of m, of v, p, g, value of a code of m, of v) n times
//                                                       whether Bounds covers the scalars; of each element, whether it covers the scales and
//                                                       new moments; if so whether those are the rule's, whether the parameter lies
//                                                       between bounds from any seeds, and by how many parts of 2^-24 its step is off
// A rule is 0 (AdamW), 1 (Adam), 2 (SGD), 3 (Lion), 4 (AdEMAMix), 5 (LAMB).
// An element is 0 (E4M3), 1 (E5M2), 2 (UE5M3), 3 (UE4M4), 4 (E2M1), 5 (UE2M2Nz). A decision is 0 (nearest), 16 or 32 (stochastic with so many bits).
#include <algorithm>
#include <cstdio>
#include <vector>

#include "blocks.cuh"
#include "bounds.cuh"
#include "norm.cuh"
#include "random.cuh"
#include "round.cuh"
#include "rules.cuh"
#include "scaled.cuh"

static u32 next() {
    u32 word;
    if (std::fread(&word, 4, 1, stdin) != 1) std::perror("input"), std::exit(1);
    return word;
}

template <class T> static T read() {
    T value;
    if (std::fread(&value, sizeof value, 1, stdin) != 1) std::perror("input"), std::exit(1);
    return value;
}

static std::vector<u32> out;

template <class D, int P> static void plain(const Target &t, const std::vector<u32> &in) {
    for (size_t i = 0; i + 8 <= in.size(); i += 8) {
        const u32 bits[4] = {in[i], in[i + 2], in[i + 4], in[i + 6]};
        const u32 draw[4] = {in[i + 1], in[i + 3], in[i + 5], in[i + 7]};
        u32 codes[4];
        out.push_back(codes_plain<D, P>(t, bits, draw, codes));
        for (u32 code : codes) out.push_back(code >> (23 - P));
    }
}

template <class D> static void codes(u32 p) {
    Target t = read<Target>();
    std::vector<u32> in(2 * (size_t)next());
    for (u32 &word : in) word = next();
    for (size_t i = 0; i < in.size(); i += 2) out.push_back(code<D>(t, in[i], in[i + 1]));
    switch (p) {
    case 1: plain<D, 1>(t, in); break;
    case 2: plain<D, 2>(t, in); break;
    case 3: plain<D, 3>(t, in); break;
    case 4: plain<D, 4>(t, in); break;
    case 7: plain<D, 7>(t, in); break;
    case 10: plain<D, 10>(t, in); break;
    }
}

template <class D> static void halves() {
    u32 beyond = next();
    std::vector<u32> in(2 * (size_t)next());
    for (u32 &word : in) word = next();
    for (size_t i = 0; i < in.size(); i += 2) out.push_back(code_bf16<D>(beyond, in[i], in[i + 1]));
    for (size_t i = 0; i < in.size(); i += 2) out.push_back(code_fp16<D>(in[i], in[i + 1]));
}

// What 128 threads of norm_chunks do.
static double chunk_sum(const std::vector<u32> &x) {
    double sums[CHUNK_THREADS];
    for (u32 t = 0; t < CHUNK_THREADS; t++) {
        double lane[4] = {0, 0, 0, 0};
        for (u32 i = 4 * t; i < x.size(); i += ROUND) {
            u32 bits[4];
            for (u32 j = 0; j < 4; j++) bits[j] = i + j < x.size() ? x[i + j] : 0;
            add_squares(lane, bits);
        }
        sums[t] = lanes_sum(lane);
    }
    for (int half = CHUNK_THREADS / 2; half > 0; half /= 2)
        for (int k = 0; k < half; k++) sums[k] = sums[2 * k] + sums[2 * k + 1];
    return canonical_sum(sums[0]);
}

template <class T, class D, bool SECOND> static void blocks() {
    const u32 block = next();
    std::vector<u32> in(2 * (size_t)next());
    for (u32 &word : in) word = next();
    const size_t each = 32 / T::BITS; // to a word
    for (size_t first = 0; first < in.size(); first += 2 * block) {
        u32 amax = 0;
        for (size_t i = 0; i < block; i++) amax = std::max(amax, in[first + 2 * i] & 0x7FFFFFFF);
        const u32 scale = scale_code<T>(amax);
        out.push_back(scale);
        if (scale == NAN_SCALE) continue;
        out.push_back(is_near<T>(scale));
        if (!is_near<T>(scale)) continue;
        const Near n = near_unit<T>(scale);
        for (size_t i = 0; i < block; i += each) {
            u32 c[32 / T::BITS];
            bool positive = true;
            for (size_t j = 0; j < each; j++) {
                const float x = float_of(in[first + 2 * (i + j)]);
                const u32 draw = in[first + 2 * (i + j) + 1];
                const Word w = {draw << 16 * (j % 2), draw << 16 * (j % 2)};
                c[j] = code_near<T, D>(x, n, Carried<D>::noise(w, j % 4, MIDDLE));
                positive &= x > 0;
                if (SECOND && T::ZERO && x > 0 && c[j] >> 24 == 0) c[j] = 1u << 24;
            }
            u32 codes = packed<T>(c);
            if (SECOND && T::ZERO && T::BITS == 8 && positive) {
                // The same by the word.
                for (size_t j = 0; j < each; j++) c[j] = c[j] >> 24 == 1 ? 0 : c[j];
                codes = above_zero(packed<T>(c));
            }
            out.push_back(codes);
            for (size_t j = 0; j < each; j++) out.push_back(bits_of(placed<T>(codes, j) * n.decode));
        }
    }
}

template <class T> static void blocks_of() {
    const u32 decision = next(), second = next();
    if (decision == 0) {
        second ? blocks<T, NearestEven, true>() : blocks<T, NearestEven, false>();
    } else {
        second ? blocks<T, Draws16, true>() : blocks<T, Draws16, false>();
    }
}

template <class D, int WIDTH> static void encode() {
    const Encoder e = read<Encoder>();
    const float global = read<float>();
    const u32 block = next();
    std::vector<u32> in(2 * (size_t)next());
    for (u32 &word : in) word = next();
    for (size_t first = 0; first < in.size(); first += 2 * block) {
        const size_t end = std::min(in.size(), first + 2 * block);
        u32 amax = 0;
        for (size_t i = first; i < end; i += 2) amax = std::max(amax, in[i] & 0x7FFFFFFF);
        const BlockScale scale = scale_of(e, amax, global);
        out.push_back(scale.stored);
        for (size_t i = first; i < end; i += 16) {
            u32 x[8], draw[8];
            for (int j = 0; j < 8; j++) x[j] = in[i + 2 * j], draw[j] = in[i + 2 * j + 1];
            u64 codes = eight_codes<D, WIDTH>(e, scale, x, draw);
            out.push_back((u32)codes), out.push_back((u32)(codes >> 32));
        }
    }
}

template <class D> static void encode_to(u32 width) {
    switch (width) {
    case 8: encode<D, 8>(); break;
    case 6: encode<D, 6>(); break;
    case 4: encode<D, 4>(); break;
    }
}

// What is asked of a rule.
template <class R, class A, class F> static void steps(F answer) {
    struct Given { u32 words[14]; }; Given scalars = read<Given>();
    typename R::Scalars s;
    std::memcpy(&s, &scalars, sizeof s);
    for (u32 n = next(); n > 0; n--) {
        float p = read<float>(), g = read<float>(), given[3] = {read<float>(), read<float>(), read<float>()};
        float x[R::COUNT];
        std::copy_n(given, R::COUNT, x);
        A arithmetic;
        const float now = R::step(arithmetic, s, p, g, x);
        answer(arithmetic, s, now);
        out.push_back(canonical(now));
        for (int k = 0; k < 3; k++) out.push_back(k < R::COUNT ? canonical(x[k]) : 0);
    }
}
template <class R> struct Steps {
    static void answer() { steps<R, Written>([](const Written &, const typename R::Scalars &, float) {}); }
};
template <class R> struct SeededSteps {
    static void answer() {
        steps<R, Seeded>([](const Seeded &seeded, const typename R::Scalars &s, float now) {
            // Of one element a zero is no doubt.
            const bool fair = seeded.smallest == 0 || !seeded.doubt();
            out.push_back(R::seeded(s) && now - now == 0 && fair);
        });
    }
};
template <class R> struct Scalings {
    static void answer() {
        struct Given { double words[12]; }; Given hyper = read<Given>();
        for (u32 n = next(); n > 0; n--) {
            struct Given { u64 ages[3]; GradientFactors factors; }; Given given = read<Given>();
            typename R::Scalars s = R::scalars(hyper.words, given.ages, given.factors);
            u32 words[14] = {};
            std::memcpy(words, &s, sizeof s);
            out.insert(out.end(), words, words + 14);
        }
    }
};
// Calls `with` for each f32 within `most` of `exact`, and counts them.
template <class F> static u32 seeds(double exact, double most, F with) {
    const u32 nearest = bits_of((float)exact);
    u32 n = 0;
    for (u32 bits = nearest - 8; bits <= nearest + 8; bits++)
        if (std::fabs((double)float_of(bits) - exact) <= most) with(float_of(bits)), n++;
    return n;
}

static void roots() {
    const u32 first = next(), count = next();
    u32 n = 0;
    out.push_back(0);
    for (u32 bits = first; bits < first + count; bits++) {
        const float x = float_of(bits), root = std::sqrt(x);
        const double inverse = 1 / std::sqrt((double)x);
        n += seeds(inverse, inverse * std::exp2(-22.9), [&](float seed) {
            if (root_from(x, seed) != root) out.push_back(bits);
        });
    }
    out[0] = n;
}

static void inverses() {
    const u32 first = next(), count = next();
    u32 n = 0;
    out.push_back(0);
    for (u32 bits = first; bits < first + count; bits++) {
        const float b = float_of(bits);
        n += seeds(1 / (double)b, 0x1p-23, [&](float seed) {
            // No f32 is in the middle of two: the quotient in f64 is rounded rightly.
            if (inverse_from(b, seed) == (float)(1 / (double)b)) return;
            u32 wrong = 0;
            for (u32 a = 0x3F800000; a < 0x40000000; a++) wrong += quotient_from(float_of(a), b, seed) != float_of(a) / b;
            out.push_back(bits), out.push_back(bits_of(inverse_from(b, seed))), out.push_back(wrong);
        });
    }
    out[0] = n;
}

// Seeds that are as far off as those of the hardware may be.
struct FarSeeds {
    int of_root, of_inverse; // -1, 0 or 1
    static float far(double exact, int side) {
        const double most = exact * (1 + side * 0x1p-23);
        float x = (float)most;
        if (std::fabs((double)x - exact) > exact * 0x1p-23) x = std::nextafter(x, (float)exact);
        return x;
    }
    float root(float x) const { return far(std::sqrt((double)x), of_root); }
    float inverse(float x) const { return far(1 / (double)x, of_inverse); }
};

static void between() {
    struct Given { u32 words[14]; }; Given given = read<Given>();
    AdamW::Scalars s;
    std::memcpy(&s, given.words, sizeof s);
    const bool covered = Bounds::covers(s);
    out.push_back(covered);
    for (u32 n = next(); n > 0; n--) {
        const u32 scale_m = next(), scale_v = next();
        const float p = read<float>(), g = read<float>(), m = read<float>(), v = read<float>();
        const double unit_m = std::exp2((double)scale_m - UNIT), unit_v = std::exp2((double)scale_v - UNIT), unit = std::exp2(127.0 - UNIT);
        float x[2] = {(float)(m / unit * unit_m), (float)(v / unit * unit_v)};
        Written written;
        const float now = AdamW::step(written, s, p, g, x);
        bool covers = covered && Bounds::covers(scale_m, scale_v), same = true, inside = true;
        double most = 0;
        for (int seed = 0; covers && seed < 9; seed++) {
            const Bounds bounds(s, scale_m, scale_v);
            const FarSeeds seeds = {seed % 3 - 1, seed / 3 - 1};
            float new_m = (float)(m / unit) * s.beta1, new_v = (float)(v / unit) * s.beta2, low, high;
            bounds.step(p, AdamW::scaled(s, g), new_m, new_v, low, high, seeds);
            covers = Bounds::covers_moments(std::fabs(new_m), bits_of(new_v)) && Bounds::covers_least(bits_of(new_v)) && Bounds::fair(p, new_m, AdamW::scaled(s, g));
            same = same && new_m * unit_m == x[0] && new_v * unit_v == x[1];
            inside = inside && std::min(low, high) <= now && now <= std::max(low, high);
            // Its step, and that of the rule.
            const double of_rule = (double)s.minus_step * (x[0] / fmaf(sqrtf(x[1]), s.root_correction, s.eps));
            const double near = (double)bounds.low * (new_m * seeds.inverse(fmaf(seeds.root(new_v), bounds.root, s.eps))) / (1 - 0x1p-20);
            if (of_rule != 0) most = std::max(most, std::fabs(near / of_rule - 1) * 0x1p24);
        }
        out.push_back(covers);
        if (covers) out.push_back(same), out.push_back(inside), out.push_back((u32)(most * 1000));
    }
}

template <template <class> class Ask> static void of_rule(u32 rule) {
    switch (rule) {
    case 0: Ask<AdamW>::answer(); break;
    case 1: Ask<Adam>::answer(); break;
    case 2: Ask<Sgd>::answer(); break;
    case 3: Ask<Lion>::answer(); break;
    case 4: Ask<AdEMAMix>::answer(); break;
    case 5: Ask<Lamb>::answer(); break;
    }
}

int main() {
    switch (next()) {
    case 0: {
        Keys keys = read<Keys>();
        for (u32 n = next(); n > 0; n--) {
            Word w = word(keys, next());
            out.push_back(w.x0), out.push_back(w.x1);
        }
        break;
    }
    case 1: {
        u32 decision = next(), p = next();
        decision == 0 ? codes<NearestEven>(p) : decision == 16 ? codes<Draws16>(p) : codes<Draws32>(p);
        break;
    }
    case 2: {
        u32 decision = next();
        decision == 0 ? halves<NearestEven>() : decision == 16 ? halves<Draws16>() : halves<Draws32>();
        break;
    }
    case 3: {
        of_rule<Steps>(next());
        break;
    }
    case 4: {
        std::vector<u32> in(next());
        for (u32 &word : in) word = next();
        for (u32 code : in) out.push_back(widen_bf16(code));
        for (u32 code : in) out.push_back(widen_fp16(code));
        break;
    }
    case 5: {
        switch (next()) {
        case 0: blocks_of<E4M3>(); break;
        case 1: blocks_of<E5M2>(); break;
        case 2: blocks_of<UE5M3>(); break;
        case 3: blocks_of<UE4M4>(); break;
        case 4: blocks_of<E2M1>(); break;
        case 5: blocks_of<UE2M2Nz>(); break;
        }
        break;
    }
    case 6: {
        std::vector<u32> in(next());
        for (u32 &word : in) word = next();
        double sum = chunk_sum(in);
        out.resize(2);
        std::memcpy(out.data(), &sum, 8);
        break;
    }
    case 7: {
        ClipRule rule = read<ClipRule>();
        for (u32 n = next(); n > 0; n--) out.push_back(bits_of(clip_factor(rule, read<double>())));
        break;
    }
    case 8: {
        u32 decision = next(), width = next();
        decision == 0 ? encode_to<NearestEven>(width) : encode_to<Draws32>(width);
        break;
    }
    case 9: {
        const Decoder d = read<Decoder>();
        const u32 rule = next();
        const float global = read<float>();
        for (u32 n = next(); n > 0; n--) {
            u32 code = next(), scale = next();
            out.push_back(decoded(d, code, factors(rule, scale, global)));
        }
        break;
    }
    case 10: {
        for (u32 n = next(); n > 0; n--) out.push_back(bits_of(nvfp4_global(next())));
        break;
    }
    case 11: {
        const Moment m = read<Moment>();
        const u32 draws = next(), block = next();
        std::vector<u32> in(2 * (size_t)next());
        for (u32 &word : in) word = next();
        for (size_t first = 0; first < in.size(); first += 2 * block) {
            u32 amax = 0;
            for (size_t i = 0; i < block; i++) amax = std::max(amax, in[first + 2 * i] & 0x7FFFFFFF);
            const u32 scale = any_scale<true>(m, amax);
            out.push_back(scale);
            for (size_t i = first; i < first + 2 * block; i += 2) {
                const u32 code = any_code<true>(m, scale, float_of(in[i]), draws, in[i + 1]);
                out.push_back(code), out.push_back(canonical(any_value<true>(m, scale, code)));
            }
        }
        break;
    }
    case 12: {
        of_rule<Scalings>(next());
        break;
    }
    case 13: {
        for (u32 n = next(); n > 0; n--) {
            struct Given { u64 seed, step, tensor; u32 role, high; }; Given key = read<Given>();
            Keys keys = keys_of(key.seed, key.step, key.tensor, key.role, key.high);
            out.insert(out.end(), keys.k, keys.k + 5);
        }
        break;
    }
    case 14: {
        struct Given { double words[12]; }; Given hyper = read<Given>();
        for (u32 n = next(); n > 0; n--) {
            struct Given { double p, u; }; Given norms = read<Given>();
            out.push_back(bits_of(Lamb::minus_step(hyper.words, norms.p, norms.u)));
        }
        break;
    }
    case 15: roots(); break;
    case 16: inverses(); break;
    case 17: {
        for (u32 n = next(); n > 0; n--) {
            const float a = read<float>(), b = read<float>(), best = 1 / b;
            for (int i = -1; i <= 1; i++) out.push_back(bits_of(quotient_from(a, b, float_of(bits_of(best) + i))));
            out.push_back(bits_of(a / b));
        }
        break;
    }
    case 18: of_rule<SeededSteps>(next()); break;
    case 19: between(); break;
    }
    std::fwrite(out.data(), 4, out.size(), stdout);
    return 0;
}
