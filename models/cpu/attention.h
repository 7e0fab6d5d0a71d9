// Attention over pages: online softmax, keys in blocks of 64 from slot 0, partial results folded every 512 slots.
//
// Inside a page, K lies as [kv head][tile of 16 tokens][dim / 2][16 tokens][2] and V as [kv head][tile][8 token
// pairs][dim][2] in bfloat16, so that both products read whole registers with nothing to shuffle; in float32 the pairs
// are single numbers. A K or V tile is read once for all the query heads that share it and up to four rows at a time.
//
// NOTE: blocks and folds are counted from slot 0 whatever the number of query rows, and a masked block changes nothing
// (exp2(0) is exactly 1), so a row's bits do not depend on chunking, neighbours or the number of threads.
#pragma once
#include <type_traits>
#include "pool.h"

namespace octavo {

constexpr int TILE = 16;         // tokens in a tile
constexpr int KEY_BLOCK = 64;    // keys between two rescalings
constexpr int SPLIT = 512;       // keys between two folds
constexpr float MASKED = -1e30f; // score of a key that a row may not see
constexpr float LOWEST = -1e28f; // least top of a row: so far above MASKED that a masked weight is exactly 0
constexpr int MAX_DIM = 512;     // numbers in a head

template <class E>
struct Packed;
template <>
struct Packed<bf16> {
    static constexpr int pair = 2;
    static INLINE f32x16 dot(f32x16 acc, const bf16* w, const bf16* x) {
        uint32_t two;
        std::memcpy(&two, x, 4);
        return dot_bf16(acc, load<u32x16>(w), two);
    }
    static INLINE void put(bf16* p, f32x16 v) { store(p, to_bf16(v)); }
    static INLINE bf16 one(float x) { return float_to_bf16(x); }
};
template <>
struct Packed<float> {
    static constexpr int pair = 1;
    static INLINE f32x16 dot(f32x16 acc, const float* w, const float* x) { return fma(load<f32x16>(w), splat(*x), acc); }
    static INLINE void put(float* p, f32x16 v) { store(p, v); }
    static INLINE float one(float x) { return x; }
};

// The KV memory of one layer and the shape every attention routine needs.
template <class E>
struct KV {
    E *keys, *values;
    int heads, kv_heads, dim, page_size, window;  // window 0: all
    size_t tile(int page, int kv_head, int slot) const {
        return (((size_t)page * kv_heads + kv_head) * page_size + slot / TILE * TILE) * dim;
    }
};

// Write one token's key and value (float, [dim]) at `slot` of `page`.
template <class E>
INLINE void write_kv(const KV<E>& kv, int page, int kv_head, int slot, const float* key, const float* value) {
    constexpr int P = Packed<E>::pair;
    const int token = slot % TILE;
    E* k = kv.keys + kv.tile(page, kv_head, slot) + token * P;
    E* v = kv.values + kv.tile(page, kv_head, slot) + (size_t)(token / P) * kv.dim * P + token % P;
    E narrow[TILE];
    for (int d = 0; d < kv.dim; d += TILE) {
        Packed<E>::put(narrow, load<f32x16>(key + d));
        for (int i = 0; i < TILE; i += P) std::memcpy(k + (size_t)(d + i) * TILE, narrow + i, P * sizeof(E));
        Packed<E>::put(narrow, load<f32x16>(value + d));
        for (int i = 0; i < TILE; i++) v[(size_t)(d + i) * P] = narrow[i];
    }
}

// Softmax state of rows, in sixteens: output not yet divided by the mass, relative to 2^top. The mass of a row is kept
// in sixteen lanes that are added up at the end of a split.
constexpr int MAX_ROWS = 64;
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
    const E* query[MAX_ROWS];  // [dim] each
    int slot[MAX_ROWS];        // the row sees slots 0 .. slot[r]
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

// One step's attention: query rows [T, heads, dim] to out [T, heads, dim].
template <class E>
struct AttentionStep {
    const int32_t *query_starts, *lengths, *table;
    int sequences, table_stride;
    const E* query;
    float* out;
};

// A unit of work: rows of one sequence and kv head; `splits` > 0 when its splits are units of their own.
struct Unit {
    int sequence, kv_head, first, count, split, splits;
    size_t at;  // where its partials lie
};

// The units of a step, the same for every layer. Decode rows over long contexts are cut by split, so that one long
// sequence keeps all threads busy; the fold afterwards gives the same bits as the uncut walk.
inline void plan_attention(const int32_t* query_starts, const int32_t* lengths, int sequences, int heads, int kv_heads, int dim,
                           int threads, std::vector<Unit>& units, std::vector<Unit>& folds, size_t& scratch) {
    const int shared = heads / kv_heads, tile = MAX_ROWS / shared > 0 ? MAX_ROWS / shared : 1;
    units.clear(), folds.clear(), scratch = 0;
    for (int s = 0; s < sequences; s++) {
        const int rows = query_starts[s + 1] - query_starts[s], splits = (lengths[s] + SPLIT - 1) / SPLIT;
        const bool cut = rows * shared <= 16 && splits > 1 && threads > 1;
        for (int h = 0; h < kv_heads; h++)
            for (int first = 0; first < rows; first += tile) {
                const int count = rows - first < tile ? rows - first : tile;
                if (!cut) {
                    units.push_back({s, h, first, count, 0, 0, 0});
                    continue;
                }
                folds.push_back({s, h, first, count, 0, splits, scratch});
                for (int i = 0; i < splits; i++, scratch += partial_floats(count * shared, dim)) units.push_back({s, h, first, count, i, splits, scratch});
            }
    }
}

// Called by every thread of a job. Instantiated for bf16 and float in attention.cpp.
template <class E>
void attention(Pool& pool, const KV<E>& kv, const AttentionStep<E>& step, const std::vector<Unit>& units, const std::vector<Unit>& folds,
               Scratch& shared_scratch, std::vector<Scratch>& own, int thread);

}  // namespace octavo
