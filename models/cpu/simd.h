// Sixteen-lane arithmetic: the few vector operations every kernel is written in.
//
// Written with the compiler's vector extensions, so one source serves AVX-512, AVX2 and plain C++; the three operations
// that decide speed (integer dot, bfloat16 dot, conversions) use the machine's own instructions where it has them.
// NOTE: compiled with -ffp-contract=off. A multiply-add is fused only where fma() says so: otherwise two instances of one
// template could round differently, and a row's bits would depend on how many rows share its step.
#pragma once
#include <cstdint>
#include <cstring>
#include <cmath>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace octavo {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x64 __attribute__((vector_size(64)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint16_t bf16;  // the upper half of a float's bits

template <class V>
INLINE V load(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class V>
INLINE void store(void* p, const V& v) {
    std::memcpy(p, &v, sizeof v);
}
INLINE f32x16 splat(float x) { return x - f32x16{}; }

INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    f32x16 r;
    for (int i = 0; i < 16; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#endif
}
INLINE f32x16 max(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}
INLINE f32x16 abs(f32x16 a) { return (f32x16)((u32x16)a & 0x7fffffffu); }
INLINE f32x16 to_float(i32x16 a) { return __builtin_convertvector(a, f32x16); }
// Nearest integer, ties to even, for |x| < 2^22: adding 1.5 * 2^23 leaves no room for a fraction.
INLINE f32x16 round_even(f32x16 x) { return (x + 12582912.0f) - 12582912.0f; }

// Horizontal folds. A sum always goes by halves, so that its order is fixed.
INLINE float sum(f32x16 v) {
    typedef float f32x8 __attribute__((vector_size(32)));
    typedef float f32x4 __attribute__((vector_size(16)));
    f32x8 h[2];
    std::memcpy(h, &v, 64);
    h[0] = h[0] + h[1];
    f32x4 q[2];
    std::memcpy(q, h, 32);
    q[0] = q[0] + q[1];
    return (q[0][0] + q[0][2]) + (q[0][1] + q[0][3]);
}
INLINE int32_t sum(i32x16 v) {
    int32_t n[16];
    typedef int32_t i32x4 __attribute__((vector_size(16)));
    store(n, v);
    const i32x4 q = (load<i32x4>(n) + load<i32x4>(n + 4)) + (load<i32x4>(n + 8) + load<i32x4>(n + 12));
    return (q[0] + q[2]) + (q[1] + q[3]);
}
// Sixteen vectors, each folded to one number, as the lanes of one.
template <class V, class F>
INLINE V lanes_of(const V* rows, const F& join) {
    V lanes;
#if defined(__AVX512F__)
    V a[8], b[8];
    auto unpacked = [&](V x, V y) { return join((V)_mm512_unpacklo_ps((__m512)x, (__m512)y), (V)_mm512_unpackhi_ps((__m512)x, (__m512)y)); };
    auto shuffled = [&](V x, V y) { return join((V)_mm512_shuffle_f32x4((__m512)x, (__m512)y, 0x88), (V)_mm512_shuffle_f32x4((__m512)x, (__m512)y, 0xdd)); };
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) a[i] = unpacked(rows[i], rows[i + 8]);
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) b[i] = unpacked(a[i], a[i + 4]);
#pragma GCC unroll 8
    for (int i = 0; i < 2; i++) a[i] = shuffled(b[i], b[i + 2]);
    lanes = shuffled(a[0], a[1]);
    // Where the pairings above left the rows 0, 1, 2, ...
    const __m512i order = _mm512_setr_epi32(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15);
    return (V)_mm512_permutexvar_epi32(order, (__m512i)lanes);
#else
    for (int r = 0; r < 16; r++) {
        V v = rows[r];
        for (int n = 8; n > 0; n /= 2) {
            V half = v;
            for (int i = 0; i < n; i++) half[i] = v[i + n];
            v = join(v, half);
        }
        lanes[r] = v[0];
    }
    return lanes;
#endif
}
// The largest of each of `ROWS` vectors, in lane r; of at most four, rows[0 .. 3] are read, and lanes 4 and on repeat them.
template <int ROWS>
INLINE f32x16 maxima(const f32x16* rows) {
#if defined(__AVX512F__)
    if constexpr (ROWS <= 4) {
        auto unpacked = [](f32x16 x, f32x16 y) { return max((f32x16)_mm512_unpacklo_ps((__m512)x, (__m512)y), (f32x16)_mm512_unpackhi_ps((__m512)x, (__m512)y)); };
        f32x16 v = unpacked(unpacked(rows[0], rows[2]), unpacked(rows[1], rows[3]));
        v = max(v, (f32x16)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0x4e));
        return max(v, (f32x16)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0xb1));
    }
#endif
    return lanes_of(rows, [](f32x16 a, f32x16 b) { return max(a, b); });
}
INLINE float maximum(f32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float m = v[0];
    for (int i = 1; i < 16; i++) m = v[i] > m ? v[i] : m;
    return m;
#endif
}

// 2^x for x <= 0: the integer part goes to the exponent, the fraction to a polynomial (minimax on [-1/2, 1/2], relative
// error below 8e-05 with degree 3, 3e-6 with degree 4, 2e-7 with degree 6). 0 below about -126.
template <int DEGREE>
INLINE f32x16 exp2_nonpositive(f32x16 x) {
    static_assert(DEGREE == 3 || DEGREE == 4 || DEGREE == 6);
#if defined(__AVX512F__)
    const f32x16 whole = (f32x16)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = x - whole;
#else
    const f32x16 whole = round_even(max(x, splat(-127.0f))), f = max(x, splat(-127.0f)) - whole;
#endif
    f32x16 p;
    if constexpr (DEGREE == 3) {
        p = splat(5.5171669e-02f);
        p = fma(p, f, splat(2.4261112e-01f));
        p = fma(p, f, splat(6.9326099e-01f));
        p = fma(p, f, splat(9.9992807e-01f));
    } else if constexpr (DEGREE == 4) {
        p = splat(9.58279e-3f);
        p = fma(p, f, splat(5.590628e-2f));
        p = fma(p, f, splat(2.4024099e-1f));
        p = fma(p, f, splat(6.9312421e-1f));
        p = fma(p, f, splat(1.0f));
    } else {
        p = splat(1.5353362e-4f);
        p = fma(p, f, splat(1.3398874e-3f));
        p = fma(p, f, splat(9.6184374e-3f));
        p = fma(p, f, splat(5.5503324e-2f));
        p = fma(p, f, splat(2.4022648e-1f));
        p = fma(p, f, splat(6.9314720e-1f));
        p = fma(p, f, splat(1.0f));
    }
#if defined(__AVX512F__)
    return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
    const f32x16 r = p * (f32x16)((__builtin_convertvector(whole, i32x16) + 127) << 23);
    return x < -126.0f ? f32x16{} : r;
#endif
}

INLINE float bf16_to_float(bf16 x) {
    uint32_t u = (uint32_t)x << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}
INLINE bf16 float_to_bf16(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return (bf16)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
INLINE u16x16 to_bf16(f32x16 x) {  // round to nearest even; NaN is not expected here
#if defined(__AVX512BF16__)
    return (u16x16)_mm512_cvtneps_pbh((__m512)x);
#else
    u32x16 u = (u32x16)x;
    return __builtin_convertvector((u + 0x7fffu + ((u >> 16) & 1u)) >> 16, u16x16);
#endif
}
INLINE f32x16 from_bf16(u16x16 x) { return (f32x16)(__builtin_convertvector(x, u32x16) << 16); }

INLINE f32x16 from_fp16(const uint16_t* p) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    __m256 lo = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), hi = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)));
    f32x16 r;
    std::memcpy(&r, &lo, 32);
    std::memcpy((char*)&r + 32, &hi, 32);
    return r;
#else
    // Shifting the bits into place and multiplying by 2^112 is right for normal and subnormal numbers alike.
    u32x16 u = __builtin_convertvector(load<u16x16>(p), u32x16);
    f32x16 magnitude = (f32x16)((u & 0x7fffu) << 13) * 0x1p112f;
    return (f32x16)((u32x16)magnitude | ((u & 0x8000u) << 16));
#endif
}
INLINE float fp16_to_float(uint16_t h) {
    uint32_t u = (uint32_t)(h & 0x7fff) << 13;
    float f;
    std::memcpy(&f, &u, 4);
    f *= 0x1p112f;
    return h & 0x8000 ? -f : f;
}
INLINE uint16_t float_to_fp16(float x) {
    return __builtin_bit_cast(uint16_t, (_Float16)x);
}

// acc[lane] += sum over j < 4 of w[4 lane + j] * a[j]: unsigned weights, four signed activations shared by all lanes.
INLINE i32x16 dot_u8(i32x16 acc, u8x64 w, const int8_t* a) {
    int32_t quad;
    std::memcpy(&quad, a, 4);
#if defined(__AVX512VNNI__)
    return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(quad));
#elif defined(__AVX2__)
    // Even and odd bytes apart, as 16-bit numbers, so that no pair sum can saturate.
    const __m256i q = _mm256_set1_epi32(quad), even = _mm256_srai_epi16(_mm256_slli_epi16(q, 8), 8), odd = _mm256_srai_epi16(q, 8);
    __m256i half[2], out[2];
    std::memcpy(half, &w, 64);
    std::memcpy(out, &acc, 64);
    for (int i = 0; i < 2; i++) {
        __m256i lo = _mm256_and_si256(half[i], _mm256_set1_epi16(0xff)), hi = _mm256_srli_epi16(half[i], 8);
        out[i] = _mm256_add_epi32(out[i], _mm256_add_epi32(_mm256_madd_epi16(lo, even), _mm256_madd_epi16(hi, odd)));
    }
    std::memcpy(&acc, out, 64);
    return acc;
#else
    for (int lane = 0; lane < 16; lane++)
        for (int j = 0; j < 4; j++) acc[lane] += (int32_t)w[4 * lane + j] * (int32_t)a[j];
    return acc;
#endif
}

// acc[lane] += sum over j < 4 of a[j] * v[4 lane + j]: four unsigned numbers shared by all lanes, signed ones of each.
INLINE i32x16 dot_i8(i32x16 acc, const uint8_t* a, u8x64 v) {
    int32_t quad;
    std::memcpy(&quad, a, 4);
#if defined(__AVX512VNNI__)
    return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, _mm512_set1_epi32(quad), (__m512i)v);
#elif defined(__AVX2__)
    const __m256i q = _mm256_set1_epi32(quad), even = _mm256_and_si256(q, _mm256_set1_epi16(0xff)), odd = _mm256_srli_epi16(q, 8);
    __m256i half[2], out[2];
    std::memcpy(half, &v, 64);
    std::memcpy(out, &acc, 64);
    for (int i = 0; i < 2; i++) {
        __m256i lo = _mm256_srai_epi16(_mm256_slli_epi16(half[i], 8), 8), hi = _mm256_srai_epi16(half[i], 8);
        out[i] = _mm256_add_epi32(out[i], _mm256_add_epi32(_mm256_madd_epi16(lo, even), _mm256_madd_epi16(hi, odd)));
    }
    std::memcpy(&acc, out, 64);
    return acc;
#else
    for (int lane = 0; lane < 16; lane++)
        for (int j = 0; j < 4; j++) acc[lane] += (int32_t)a[j] * (int32_t)(int8_t)v[4 * lane + j];
    return acc;
#endif
}

// Every lane times 2^count. (Left to itself the compiler moves the count through two registers.)
INLINE i32x16 shift_left(i32x16 v, int32_t count) {
#if defined(__AVX512F__)
    return (i32x16)_mm512_sllv_epi32((__m512i)v, _mm512_set1_epi32(count));
#else
    return v << count;
#endif
}

// acc[lane] += w[2 lane] * pair[0] + w[2 lane + 1] * pair[1] in int16.
INLINE i32x16 dot_i16(i32x16 acc, u32x16 w, int32_t pair) {
#if defined(__AVX512VNNI__)
    return (i32x16)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(pair));
#else
    const i32x16 lo = (i32x16)(w << 16) >> 16, hi = (i32x16)w >> 16;
    return acc + lo * (int32_t)(int16_t)pair + hi * (pair >> 16);
#endif
}

// The same in bfloat16.
INLINE f32x16 dot_bf16(f32x16 acc, u32x16 w, uint32_t pair) {
#if defined(__AVX512BF16__)
    return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32((int)pair));
#else
    f32x16 lo = (f32x16)(w << 16), hi = (f32x16)(w & 0xffff0000u);
    acc = fma(lo, splat(bf16_to_float((bf16)pair)), acc);
    return fma(hi, splat(bf16_to_float((bf16)(pair >> 16))), acc);
#endif
}

// x H over blocks of the largest power of two that divides `count` (a multiple of sixteen), H being that Hadamard matrix of
// ones and minus ones: scaled by the root of the block it is a rotation, which spreads what one number holds over all.
// Returns the block.
INLINE int hadamard(float* x, int count) {
    const int block = count & -count;
    auto pieces = [&]<int N>() {  // of N vectors, in registers
        for (int i = 0; i < count; i += 16 * N) {
            const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            f32x16 v[N];
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) {
                v[n] = load<f32x16>(x + i + 16 * n);
#pragma GCC unroll 4
                for (int h = 1; h < 16; h *= 2) v[n] = fma(v[n], (lane & h) ? splat(-1.0f) : splat(1.0f), __builtin_shuffle(v[n], lane ^ h));
            }
#pragma GCC unroll 4
            for (int h = 1; h < N; h *= 2)
#pragma GCC unroll 8
                for (int n = 0; n < N; n++)
                    if (!(n & h)) {
                        const f32x16 a = v[n], b = v[n + h];
                        v[n] = a + b, v[n + h] = a - b;
                    }
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) store(x + i + 16 * n, v[n]);
        }
    };
    if (block == 16) pieces.template operator()<1>();
    else if (block == 32) pieces.template operator()<2>();
    else pieces.template operator()<4>();
    for (int h = 64; h < block; h *= 2)
        for (int i = 0; i < count; i += 2 * h)
            for (int j = i; j < i + h; j += 16) {
                const f32x16 a = load<f32x16>(x + j), b = load<f32x16>(x + j + h);
                store(x + j, a + b), store(x + j + h, a - b);
            }
    return block;
}

}  // namespace octavo
