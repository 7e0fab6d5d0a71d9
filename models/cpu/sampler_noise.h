// Keyed noise, as models/noise.py defines it: the bits of many tokens at once, the logarithms of one at a time.
//
// NOTE: the integers are the contract: they equal the reference bit for bit on every machine. The logarithms are taken
// in double and rounded once, so that floats agree too, save where a double lands on the edge between two floats.
#pragma once
#include <cmath>
#include "sampler_lanes.h"

namespace octavo {

constexpr int PHILOX_ROUNDS = 10;
constexpr uint32_t PHILOX_MULTIPLIER[2] = {0xD2511F53u, 0xCD9E8D57u}, PHILOX_WEYL[2] = {0x9E3779B9u, 0xBB67AE85u};
constexpr float LARGEST_UNIFORM = 1.0f - 0x1p-24f;
constexpr float LARGEST_NOISE = 22.9f;  // -ln(2^-33), rounded up

// Philox4x32-10 of one counter, in place.
inline void philox(uint32_t c[4], uint32_t k0, uint32_t k1) {
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        const uint64_t first = (uint64_t)PHILOX_MULTIPLIER[0] * c[0], second = (uint64_t)PHILOX_MULTIPLIER[1] * c[2];
        c[0] = (uint32_t)(second >> 32) ^ c[1] ^ k0, c[1] = (uint32_t)second;
        c[2] = (uint32_t)(first >> 32) ^ c[3] ^ k1, c[3] = (uint32_t)first;
        k0 += PHILOX_WEYL[0], k1 += PHILOX_WEYL[1];
    }
}

// The noise of one row's tokens.
struct Noise {
    uint32_t k0, k1, position;

    Noise(int64_t seed, int32_t position_) : k0((uint32_t)seed), k1((uint32_t)((uint64_t)seed >> 32)), position((uint32_t)position_) {}

    uint32_t bits(int32_t token) const {
        uint32_t c[4] = {(uint32_t)token / 4, position, 0, 0};
        philox(c, k0, k1);
        return c[token % 4];
    }

    // The bits of tokens first .. first + 2 WIDTH - 1; `first` is a multiple of 4. One counter per 64-bit lane, whose
    // low half is the word: what the products leave in the high halves is never read.
    LANES_INLINE void bits(int32_t first, lanes::Words out[2]) const {
        using lanes::Longs;
        constexpr int N = lanes::WIDTH / 2;
        Longs c0, c1 = Longs{} + position, c2 = {}, c3 = {};
        for (int i = 0; i < N; i++) c0[i] = (uint32_t)first / 4 + i;
        uint32_t key0 = k0, key1 = k1;
        const Longs m0 = Longs{} + PHILOX_MULTIPLIER[0], m1 = Longs{} + PHILOX_MULTIPLIER[1];
#pragma GCC unroll 10
        for (int round = 0; round < PHILOX_ROUNDS; round++) {
            const Longs a = lanes::multiply_low(c0, m0), b = lanes::multiply_low(c2, m1);
            c0 = (b >> 32) ^ c1 ^ (uint64_t)key0, c1 = b;
            c2 = (a >> 32) ^ c3 ^ (uint64_t)key1, c3 = a;
            key0 += PHILOX_WEYL[0], key1 += PHILOX_WEYL[1];
        }
        const Longs low = {}, mask = low + 0xffffffffu;
        interleave((c0 & mask) | (c1 << 32), (c2 & mask) | (c3 << 32), out);
    }

    static float uniform(uint32_t bits) {
        const float v = ((float)bits + 0.5f) * 0x1p-32f;
        return v < LARGEST_UNIFORM ? v : LARGEST_UNIFORM;
    }
    static LANES_INLINE lanes::Floats uniform(lanes::Words bits) {
        const lanes::Floats v = (__builtin_convertvector(bits, lanes::Floats) + 0.5f) * 0x1p-32f;
        const lanes::Floats top = lanes::splat(LARGEST_UNIFORM);
        return v < top ? v : top;
    }

    // -log(-log1p(-v))
    static float gumbel(uint32_t bits) { return (float)-std::log(-std::log1p(-(double)uniform(bits))); }

    // Never less than the gumbel of the same v, nor more than it by over 0.07 where v is small. -log1p(-v) >= v, so
    // gumbel(v) <= -ln v; and log2(v) is at least what a float's bits read as an integer say (a chord under the curve).
    static LANES_INLINE lanes::Floats gumbel_bound(lanes::Floats v) {
        const lanes::Floats as_integer = __builtin_convertvector((lanes::Ints)v, lanes::Floats);
        return lanes::multiply_add(as_integer, lanes::splat(-0.6931472f * 0x1p-23f), lanes::splat(127 * 0.6931472f + 1e-3f));
    }

  private:
    // a0 b0 a1 b1 ... of 64-bit lanes: words 0 and 1 of each counter are in a, 2 and 3 in b.
    static LANES_INLINE void interleave(lanes::Longs a, lanes::Longs b, lanes::Words out[2]) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
        out[0] = (lanes::Words)__builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
        out[1] = (lanes::Words)__builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#elif defined(__AVX2__) && defined(__FMA__)
        out[0] = (lanes::Words)__builtin_shufflevector(a, b, 0, 4, 1, 5);
        out[1] = (lanes::Words)__builtin_shufflevector(a, b, 2, 6, 3, 7);
#else
        out[0] = (lanes::Words)__builtin_shufflevector(a, b, 0, 2);
        out[1] = (lanes::Words)__builtin_shufflevector(a, b, 1, 3);
#endif
    }
};

}  // namespace octavo
