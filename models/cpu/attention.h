// Attention over pages: online softmax, keys in blocks of 64 (in int8 128) from slot 0, partial results folded every 512 slots.
//
// Inside a page, K lies as [kv head][tile of 16 tokens][dim / 2][16 tokens][2] and V as [kv head][tile][8 token
// pairs][dim][2] in bfloat16, so that both products read whole registers with nothing to shuffle; in float32 the pairs
// are single numbers. A K or V tile is read once for all the query heads that share it and up to four rows at a time.
//
// In int8 they lie in fours instead of pairs, a tile's sixteen scales (one for each token, float) behind its codes. Keys and
// queries are rotated by a Hadamard matrix first, which leaves their products as they are and spreads the few large numbers
// that would coarsen a scale (Ashkboos et al., QuaRot, 2024): KL divergence 4.5e-3 -> 3.8e-3. Weights of the softmax are
// multiplied by the values' scales and become uint8, at a scale for each row and block; their sum is taken before that.
//
// NOTE: blocks and folds are counted from slot 0 whatever the number of query rows, and a masked block changes nothing
// (exp2(0) is exactly 1), so a row's bits do not depend on chunking, neighbours or the number of threads.
#pragma once
#include <type_traits>
#include "attention_plan.h"
#include "pool.h"

namespace octavo {

constexpr int TILE = 16;         // tokens in a tile
constexpr float MASKED = -1e30f; // score of a key that a row may not see
constexpr float LOWEST = -1e28f; // least top of a row: so far above MASKED that a masked weight is exactly 0
constexpr int MAX_DIM = 512;     // numbers in a head

template <class E>
struct Packed;
template <>
struct Packed<bf16> {
    typedef f32x16 Sum;
    static constexpr int pair = 2;
    static INLINE f32x16 dot(f32x16 acc, const bf16* w, const bf16* x) {
        uint32_t two;
        std::memcpy(&two, x, 4);
        return dot_bf16(acc, load<u32x16>(w), two);
    }
    static INLINE void put(bf16* p, f32x16 v) { store(p, to_bf16(v)); }
};
template <>
struct Packed<float> {
    typedef f32x16 Sum;
    static constexpr int pair = 1;
    static INLINE f32x16 dot(f32x16 acc, const float* w, const float* x) { return fma(load<f32x16>(w), splat(*x), acc); }
    static INLINE void put(float* p, f32x16 v) { store(p, v); }
};

template <>
struct Packed<int8_t> {
    typedef i32x16 Sum;
    static constexpr int pair = 4;
};
template <class E>
constexpr bool EIGHT = std::is_same_v<E, int8_t>;
template <class E>
constexpr int KEY_BLOCK = EIGHT<E> ? 128 : 64;  // keys between two rescalings, as measured

// Numbers of E in a tile of keys or values, and in a head of a query: codes, its scale and its sum times -128 (keys are
// stored as code + 128: the dot instruction wants one side unsigned).
template <class E>
INLINE size_t tile_size(int dim) { return (size_t)TILE * dim + (EIGHT<E> ? TILE * sizeof(float) : 0); }
template <class E>
INLINE size_t query_size(int dim) { return dim + (EIGHT<E> ? sizeof(float) + sizeof(int32_t) : 0); }

// The KV memory of one layer and the shape every attention routine needs.
template <class E>
struct KV {
    E *keys, *values;
    int heads, kv_heads, dim, page_size, window;  // window 0: all
    float scale = 1.44269504f / std::sqrt((float)dim);  // log2(e) / sqrt(dim): exponentials are powers of two
    size_t tile(int page, int kv_head, int slot) const {
        return (((size_t)page * kv_heads + kv_head) * (page_size / TILE) + slot / TILE) * tile_size<E>(dim);
    }
    size_t page_bytes() const { return tile(1, 0, 0) * sizeof(E); }
};

// Sixteen numbers at a time to int8: the codes of those from number d on are put(d, codes). Returns what a code of 1 stands for.
template <class F>
INLINE float quantise(const float* x, int count, const F& put) {
    f32x16 most = {};
    for (int d = 0; d < count; d += TILE) most = max(most, abs(load<f32x16>(x + d)));
    const float top = maximum(most), inverse = top > 0 ? 127.0f / top : 0.0f;
    for (int d = 0; d < count; d += TILE) put(d, __builtin_convertvector(round_even(load<f32x16>(x + d) * splat(inverse)), i32x16));
    return top / 127.0f;
}

// One head of a query as attention reads it: float [dim] to query_size(dim) numbers. Overwrites its input.
template <class E>
INLINE void write_query(float* head, int dim, E* to) {
    if constexpr (EIGHT<E>) {
        const int block = hadamard(head, dim);
        i32x16 sums = {};
        const float scale = quantise(head, dim, [&](int d, i32x16 codes) { store(to + d, __builtin_convertvector(codes, i8x16)), sums = sums + codes; });
        store(to + dim, scale / (float)block);
        store(to + dim + sizeof(float), -128 * sum(sums));
    } else {
        for (int d = 0; d < dim; d += TILE) Packed<E>::put(to + d, load<f32x16>(head + d));
    }
}

// Write one token's key and value (float, [dim]) at `slot` of `page`. Overwrites its key.
template <class E>
INLINE void write_kv(const KV<E>& kv, int page, int kv_head, int slot, float* key, const float* value) {
    constexpr int P = Packed<E>::pair;
    const int token = slot % TILE;
    const size_t tile = kv.tile(page, kv_head, slot), scales = tile + (size_t)TILE * kv.dim;
    E* k = kv.keys + tile + token * P;
    E* v = kv.values + tile + (size_t)(token / P) * kv.dim * P + token % P;
    if constexpr (EIGHT<E>) {
        hadamard(key, kv.dim);
        ((float*)(kv.keys + scales))[token] = quantise(key, kv.dim, [&](int d, i32x16 codes) {
            uint8_t narrow[TILE];
            store(narrow, __builtin_convertvector(codes + 128, i8x16));
            for (int i = 0; i < TILE; i += P) std::memcpy(k + (size_t)(d + i) * TILE, narrow + i, P);
        });
        ((float*)(kv.values + scales))[token] = quantise(value, kv.dim, [&](int d, i32x16 codes) {
            int8_t narrow[TILE];
            store(narrow, __builtin_convertvector(codes, i8x16));
            for (int i = 0; i < TILE; i++) v[(size_t)(d + i) * P] = narrow[i];
        });
    } else {
        E narrow[TILE];
        for (int d = 0; d < kv.dim; d += TILE) {
            Packed<E>::put(narrow, load<f32x16>(key + d));
            for (int i = 0; i < TILE; i += P) std::memcpy(k + (size_t)(d + i) * TILE, narrow + i, P * sizeof(E));
            Packed<E>::put(narrow, load<f32x16>(value + d));
            for (int i = 0; i < TILE; i++) v[(size_t)(d + i) * P] = narrow[i];
        }
    }
}

// Softmax state of rows, in sixteens: output not yet divided by the mass, relative to 2^top. The mass of a row is kept
// in sixteen lanes that are added up at the end of a split.
struct Partial {
    float *top, *mass, *out;  // [rows], [rows, 16], [rows, dim]; rows rounded up to sixteen
    void clear(int rows, int dim) const {
        for (int r = 0; r < rows; r++) top[r] = LOWEST;
        std::memset(mass, 0, (size_t)rows * 16 * sizeof(float));
        std::memset(out, 0, (size_t)rows * dim * sizeof(float));
    }
    Partial from(int row, int dim) const { return {top + row, mass + (size_t)row * 16, out + (size_t)row * dim}; }
};
INLINE size_t partial_floats(int rows, int dim) { return (size_t)((rows + TILE - 1) / TILE * TILE) * (dim + 17); }

template <class E>
struct QueryTile {
    const E* query[MAX_ROWS];  // query_size(dim) each
    int slot[MAX_ROWS];        // the row sees slots 0 .. slot[r]
    int first[MAX_ROWS / 4], last[MAX_ROWS / 4];  // least and largest slot of four rows
    int rows;
};

// Buffers of one thread, and the parts that several threads computed for one tile.
struct Scratch {
    std::vector<float> memory;
    Partial part(size_t at, int rows, int dim) {
        const size_t need = at + partial_floats(rows, dim), padded = (rows + TILE - 1) / TILE * TILE;
        if (memory.size() < need) memory.resize(need);
        float* p = memory.data() + at;
        return {p, p + padded, p + 17 * padded};
    }
};

// One step's attention: query rows [T, heads, query_size(dim)] to out [T, heads, dim].
template <class E>
struct AttentionStep {
    const int32_t *query_starts, *lengths, *table;
    int sequences, table_stride;
    const E* query;
    float* out;
};

// Called by every thread of a job. Instantiated for bf16, float and int8_t in attention.cpp.
template <class E>
void attention(Pool& pool, const KV<E>& kv, const AttentionStep<E>& step, const AttentionPlan& plan, Scratch& shared_scratch, std::vector<Scratch>& own, int thread);

}  // namespace octavo
