// Vectors as wide as the machine's registers, and the few operations the sampler makes of them.
//
// simd.h always has sixteen lanes. Here the width is the machine's own (16, 8 or 4 floats), because the compiler keeps
// wider vectors in memory, which costs the sampler's long compare and exp loops a factor of several on AVX2.
// What depends on the width: the order in which a row's weights are added, that is, the last bits of a logprob.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LANES_INLINE inline __attribute__((always_inline))

namespace octavo::lanes {

#if defined(__AVX512F__) && defined(__AVX512DQ__)
constexpr int BYTES = 64;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif
constexpr int WIDTH = BYTES / 4;  // floats in a vector

typedef float Floats __attribute__((vector_size(BYTES)));
typedef int32_t Ints __attribute__((vector_size(BYTES)));
typedef uint32_t Words __attribute__((vector_size(BYTES)));
typedef uint64_t Longs __attribute__((vector_size(BYTES)));

LANES_INLINE Floats splat(float x) { return x - Floats{}; }
LANES_INLINE Floats load(const float* p) {
    Floats v;
    std::memcpy(&v, p, BYTES);
    return v;
}
LANES_INLINE Ints load(const int32_t* p) {
    Ints v;
    std::memcpy(&v, p, BYTES);
    return v;
}
// The first n < WIDTH floats of p, `rest` in the other lanes.
LANES_INLINE Floats load_part(const float* p, int n, float rest) {
    float t[WIDTH];
    for (int i = 0; i < WIDTH; i++) t[i] = i < n ? p[i] : rest;
    return load(t);
}
LANES_INLINE void store(float* p, Floats v) { std::memcpy(p, &v, BYTES); }
LANES_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }  // b where either is NaN

// a * b + c, fused where the machine can.
LANES_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// Bit i is set when a[i] >= b[i].
LANES_INLINE uint32_t at_least(Floats a, Floats b) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ);
#elif defined(__AVX2__) && defined(__FMA__)
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GE_OQ));
#elif defined(__x86_64__)
    return (uint32_t)_mm_movemask_ps(_mm_cmpge_ps((__m128)a, (__m128)b));
#else
    uint32_t bits = 0;
    for (int i = 0; i < WIDTH; i++) bits |= (uint32_t)(a[i] >= b[i]) << i;
    return bits;
#endif
}

// The 64-bit products of the low 32 bits of each lane.
LANES_INLINE Longs multiply_low(Longs a, Longs b) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    return (Longs)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Longs)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
    return (Longs)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
    return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

// Added lane by lane in a fixed order.
LANES_INLINE double sum(Floats v) {
    double total = 0;
    for (int i = 0; i < WIDTH; i++) total += v[i];
    return total;
}

// e^x for x <= 0, within 1.5 units in the last place; 0 below -87.7, -inf included.
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r is its Taylor sum up to r^7 (what is left out is below 6e-9), and 2^n is
// made by putting n + 127 where a float's exponent goes: at n = -127 that is 0.
LANES_INLINE Floats exp_nonpositive(Floats x) {
    const Floats rounder = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves no room for a fraction
    const Floats clamped = larger(x, splat(-88.0f));
    const Floats shifted = multiply_add(clamped, splat(1.44269504f), rounder);
    const Floats n = shifted - rounder;
    Floats r = multiply_add(n, splat(-0.693145752f), clamped);  // ln 2 in two parts; the first has 16 bits
    r = multiply_add(n, splat(-1.42860677e-6f), r);
    Floats p = splat(1.0f / 5040);
    p = multiply_add(p, r, splat(1.0f / 720));
    p = multiply_add(p, r, splat(1.0f / 120));
    p = multiply_add(p, r, splat(1.0f / 24));
    p = multiply_add(p, r, splat(1.0f / 6));
    p = multiply_add(p, r, splat(0.5f));
    p = multiply_add(p, r, splat(1.0f));
    p = multiply_add(p, r, splat(1.0f));
    return p * (Floats)(((Ints)shifted - 0x4b400000 + 127) << 23);
}

}  // namespace octavo::lanes
