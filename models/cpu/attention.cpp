// The attention of attention.h: blocks of keys against register tiles of rows, folds, and the units of a step.
#pragma GCC optimize("O3")  // elsewhere -O2 is as fast and compiles in half the time
#include "amx.h"
#include "attention.h"

namespace octavo {

// What the second product of a block reads: weights relative to the rows' new tops, what earlier output must be multiplied
// by, and in int8 what a weight of 1 stands for.
template <class E, int R>
struct Weights {
    std::conditional_t<EIGHT<E>, uint8_t, E> of[R][KEY_BLOCK<E>];
    float shrink[TILE], unit[TILE];
};

// The scores of up to R rows against one block, score[t][r] being those of row r against tile t, to weights. In int8 these
// are multiplied by the values' scales, [tile].
template <class E, int R>
INLINE void softmax_block(f32x16 (*score)[R], int rows, float scale, bool masked, const int* slots, int start, int window,
                          const Partial& state, const f32x16* scales, Weights<E, R>& weights) {
    constexpr int TILES = KEY_BLOCK<E> / TILE;
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    auto largest = [&](int r) {
        f32x16 most = score[0][r];
#pragma GCC unroll 8
        for (int t = 1; t < TILES; t++) most = max(most, score[t][r]);
        return most;
    };
    f32x16 highest[TILE] = {};
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        if (masked) {
            const int limit = slots[r] - start, from = window ? limit - window + 1 : -1;
#pragma GCC unroll 4
            for (int t = 0; t < TILES; t++) {
                const i32x16 key = lane + t * TILE;
                score[t][r] = (key <= limit) & (key >= from) ? score[t][r] : splat(MASKED);
            }
        }
        highest[r] = largest(r);
    }
    float tops[TILE] = {};
    std::memcpy(tops, state.top, rows * sizeof(float));
    const f32x16 old = load<f32x16>(tops), top = max(old, maxima<R>(highest) * splat(scale));
    store(tops, top);
    store(weights.shrink, exp2_nonpositive<4>(old - top));
    std::memcpy(state.top, tops, rows * sizeof(float));
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        const f32x16 minus = splat(-tops[r]);
        f32x16 p[TILES];
#pragma GCC unroll 4
        for (int t = 0; t < TILES; t++) {
            p[t] = exp2_nonpositive<EIGHT<E> ? 3 : 4>(fma(score[t][r], splat(scale), minus));
            if constexpr (EIGHT<E>) score[t][r] = p[t] * scales[t];
            else Packed<E>::put(weights.of[r] + t * TILE, p[t]);
        }
        float* mass = state.mass + (size_t)r * 16;
        f32x16 together = (p[0] + p[1]) + (p[2] + p[3]);
        if constexpr (TILES == 8) together = together + ((p[4] + p[5]) + (p[6] + p[7]));
        store(mass, fma(load<f32x16>(mass), splat(weights.shrink[r]), together));
        if constexpr (EIGHT<E>) highest[r] = largest(r);
    }
    if constexpr (EIGHT<E>) {
        typedef uint8_t u8x16 __attribute__((vector_size(16)));
        const f32x16 most = maxima<R>(highest);
        float finer[TILE];
        store(finer, most > 0.0f ? 255.0f / most : splat(0));
        store(weights.unit, most * splat(1 / 255.0f));
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int t = 0; t < TILES; t++)
                store(weights.of[r] + t * TILE, __builtin_convertvector(__builtin_convertvector(fma(score[t][r], splat(finer[r]), splat(0.5f)), i32x16), u8x16));
    }
}

// Where the tiles of a block of keys lie. Those past the last slot repeat the first; their scores are masked.
template <class E>
struct Block {
    size_t tile[KEY_BLOCK<E> / TILE];
    static INLINE Block at(const KV<E>& kv, const int32_t* table, int kv_head, int start, int last) {
        Block block;
        for (int t = 0; t < KEY_BLOCK<E> / TILE; t++) {
            const int slot = start + t * TILE <= last ? start + t * TILE : start;
            block.tile[t] = kv.tile(table[slot / kv.page_size], kv_head, slot % kv.page_size);
        }
        return block;
    }
    // Ask for `count` numbers of a tile from number `from` on.
    INLINE void fetch(const E* memory, int t, int from, int count) const {
        for (int i = 0; i < count; i += 64 / (int)sizeof(E)) __builtin_prefetch(memory + tile[t] + from + i, 0, 2);
    }
};

// R rows against one block of keys that starts at slot `start`. Pages lie anywhere, so nobody else would fetch the block
// that comes next in time.
template <class E, int R, int NV>
__attribute__((noinline)) void attend_block(const KV<E>& kv, const QueryTile<E>& q, int row, int start, const Block<E>& here, const Block<E>& ahead,
                                            const Partial& state) {
    typedef typename Packed<E>::Sum Sum;
    constexpr int P = Packed<E>::pair, TILES = KEY_BLOCK<E> / TILE;
    if (kv.dim < TILE) __builtin_unreachable();
    const int first = q.first[row / 4], last = q.last[row / 4];
    const int tiles = last - start >= KEY_BLOCK<E> - 1 ? TILES : (last - start) / TILE + 1;
    f32x16 score[TILES][R], scales[TILES];
    constexpr int TOGETHER = 4;  // tiles whose scores there are registers for
    for (int at = 0; at < TILES; at += TOGETHER) {
        if (at >= tiles) {
            for (int t = at; t < TILES; t++)
                for (int r = 0; r < R; r++) score[t][r] = splat(MASKED);
            break;
        }
        const size_t* tile = here.tile + at;
        Sum sums[TOGETHER][R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int t = 0; t < TOGETHER; t++) {
                sums[t][r] = Sum{};
                if constexpr (EIGHT<E>) sums[t][r] = sums[t][r] + load<int32_t>(q.query[row + r] + kv.dim + sizeof(float));
            }
        for (int d = 0; d < kv.dim; d += P) {
#pragma GCC unroll 4
            for (int t = 0; t < TOGETHER; t++) {
                const E* key = kv.keys + tile[t] + (size_t)d * TILE;
                ahead.fetch(kv.keys, at + t, d * TILE, P * TILE);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++)
                    if constexpr (EIGHT<E>) sums[t][r] = dot_u8(sums[t][r], load<u8x64>(key), q.query[row + r] + d);
                    else sums[t][r] = Packed<E>::dot(sums[t][r], key, q.query[row + r] + d);
            }
        }
#pragma GCC unroll 4
        for (int t = 0; t < TOGETHER; t++) {
            if constexpr (EIGHT<E>) {
                ahead.fetch(kv.keys, at + t, TILE * kv.dim, 1), ahead.fetch(kv.values, at + t, TILE * kv.dim, 1);
                const f32x16 units = load<f32x16>(kv.keys + tile[t] + TILE * kv.dim) * splat(kv.scale);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) score[at + t][r] = to_float(sums[t][r]) * (units * splat(load<float>(q.query[row + r] + kv.dim)));
            } else {
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) score[at + t][r] = sums[t][r];
            }
        }
    }
    if constexpr (EIGHT<E>)
#pragma GCC unroll 8
        for (int t = 0; t < TILES; t++) scales[t] = load<f32x16>(kv.values + here.tile[t] + TILE * kv.dim);
    const bool masked = first - start < KEY_BLOCK<E> - 1 || (kv.window && last - start >= kv.window);
    Weights<E, R> weights;
    softmax_block<E, R>(score, R, EIGHT<E> ? 1.0f : kv.scale, masked, q.slot + row, start, kv.window, state, scales, weights);
    for (int d = 0; d < kv.dim; d += 16 * NV) {
        Sum acc[R][NV];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++)
                if constexpr (EIGHT<E>) acc[r][v] = Sum{};
                else acc[r][v] = load<f32x16>(state.out + (size_t)r * kv.dim + d + 16 * v) * splat(weights.shrink[r]);
        for (int t = 0; t < tiles; t++)
            for (int k = 0; k < TILE; k += P) {
                const E* value = kv.values + here.tile[t] + (size_t)k * kv.dim + (size_t)d * P;
                ahead.fetch(kv.values, t, k * kv.dim + d * P, 16 * NV * P);
#pragma GCC unroll 4
                for (int v = 0; v < NV; v++)
#pragma GCC unroll 4
                    for (int r = 0; r < R; r++)
                        if constexpr (EIGHT<E>) acc[r][v] = dot_i8(acc[r][v], &weights.of[r][t * TILE + k], load<u8x64>(value + 16 * v * P));
                        else acc[r][v] = Packed<E>::dot(acc[r][v], value + 16 * v * P, &weights.of[r][t * TILE + k]);
            }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) {
                float* out = state.out + (size_t)r * kv.dim + d + 16 * v;
                if constexpr (EIGHT<E>) store(out, fma(to_float(acc[r][v]), splat(weights.unit[r]), load<f32x16>(out) * splat(weights.shrink[r])));
                else store(out, acc[r][v]);
            }
    }
}

// The next rows against one block, at most four. Each instance takes a sixth of a second to build: heads that are not a
// multiple of 64 numbers, and float32, have two and not four.
template <class E>
INLINE void attend_rows(const KV<E>& kv, const QueryTile<E>& q, int row, int start, const Block<E>& here, const Block<E>& ahead, const Partial& whole) {
    const Partial s = whole.from(row, kv.dim);
    const int rows = q.rows - row;
    if (sizeof(E) == 4 || kv.dim % 64) {
        if (rows >= 4) return attend_block<E, 4, 1>(kv, q, row, start, here, ahead, s);
        for (int r = 0; r < rows; r++) attend_block<E, 1, 1>(kv, q, row + r, start, here, ahead, whole.from(row + r, kv.dim));
        return;
    }
    if constexpr (sizeof(E) < 4) switch (rows) {
        case 1: return attend_block<E, 1, 4>(kv, q, row, start, here, ahead, s);
        case 2: return attend_block<E, 2, 4>(kv, q, row, start, here, ahead, s);
        case 3: return attend_block<E, 3, 4>(kv, q, row, start, here, ahead, s);
        default: return attend_block<E, 4, 4>(kv, q, row, start, here, ahead, s);
    }
}

#if OCTAVO_AMX

// The same block with tiles: up to sixteen rows at once, bfloat16, dims in multiples of 32. `query` is [16, dim].
void attend_block_amx(const KV<bf16>& kv, const int32_t* table, int kv_head, const bf16* query, const int* slots, int rows, int start,
                      const Block<bf16>& follower, const Partial& state) {
    constexpr int TILES = KEY_BLOCK<bf16> / TILE;
    alignas(64) f32x16 score[TILES][TILE];
    alignas(64) float product[TILE][TILE];
    alignas(64) Weights<bf16, TILE> weights;
    int last = 0, first = 1 << 30;
    for (int r = 0; r < rows; r++) last = slots[r] > last ? slots[r] : last, first = slots[r] < first ? slots[r] : first;
    const int tiles = last - start >= KEY_BLOCK<bf16> - 1 ? TILES : (last - start) / TILE + 1;
    const Block<bf16> here = Block<bf16>::at(kv, table, kv_head, start, last);
    const Block<bf16> ahead = start + KEY_BLOCK<bf16> <= last ? Block<bf16>::at(kv, table, kv_head, start + KEY_BLOCK<bf16>, last) : follower;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int d = 0; d < kv.dim; d += 32) {
        for (int t = 0; t < TILES; t++) ahead.fetch(kv.keys, t, d * TILE, 32 * TILE);
        TILE_LOAD(4, query + d, kv.dim * 2);
        TILE_LOAD(5, kv.keys + here.tile[0] + (size_t)d * TILE, 64);
        _tile_dpbf16ps(0, 4, 5);
        TILE_LOAD(5, kv.keys + here.tile[1] + (size_t)d * TILE, 64);
        _tile_dpbf16ps(1, 4, 5);
        TILE_LOAD(5, kv.keys + here.tile[2] + (size_t)d * TILE, 64);
        _tile_dpbf16ps(2, 4, 5);
        TILE_LOAD(5, kv.keys + here.tile[3] + (size_t)d * TILE, 64);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, score[0], 64);
    _tile_stored(1, score[1], 64);
    _tile_stored(2, score[2], 64);
    _tile_stored(3, score[3], 64);
    const bool masked = first - start < KEY_BLOCK<bf16> - 1 || (kv.window && last - start >= kv.window);
    softmax_block<bf16, TILE>(score, rows, kv.scale, masked, slots, start, kv.window, state, nullptr, weights);
    for (int d = 0; d < kv.dim; d += 16) {
        _tile_zero(0);
        for (int t = 0; t < tiles; t++) {
            ahead.fetch(kv.values, t, d * TILE, 16 * TILE);
            TILE_LOAD(6, weights.of[0] + t * TILE, KEY_BLOCK<bf16> * 2);
            TILE_LOAD(7, kv.values + here.tile[t] + (size_t)d * 2, kv.dim * 4);
            _tile_dpbf16ps(0, 6, 7);
        }
        _tile_stored(0, product, 64);
        for (int r = 0; r < rows; r++) {
            float* out = state.out + (size_t)r * kv.dim + d;
            store(out, fma(load<f32x16>(out), splat(weights.shrink[r]), load<f32x16>(product[r])));
        }
    }
}

#endif

// Whether this model's attention runs on tiles. All of it does or none: see amx.h.
template <class E>
bool on_tiles(const KV<E>& kv) {
    return std::is_same_v<E, bf16> && kv.dim % 32 == 0 && amx::available();
}

// Rows in sixteens, their queries gathered once; a row outside every key of a block is passed over as in attend_split.
template <class E>
void attend_split_amx([[maybe_unused]] const KV<E>& kv, [[maybe_unused]] const int32_t* table, [[maybe_unused]] int kv_head,
                      [[maybe_unused]] const QueryTile<E>& q, [[maybe_unused]] int split, [[maybe_unused]] const Block<E>& follower,
                      [[maybe_unused]] const Partial& state) {
#if OCTAVO_AMX
    if constexpr (std::is_same_v<E, bf16>) {
        alignas(64) thread_local bf16 query[TILE * MAX_DIM];
        amx::shape(amx::ATTENTION, q.rows < TILE ? q.rows : TILE);
        for (int row = 0; row < q.rows; row += TILE) {
            const int rows = q.rows - row < TILE ? q.rows - row : TILE;
            int last = 0, first = 1 << 30;
            for (int r = 0; r < rows; r++) {
                std::memcpy(query + (size_t)r * kv.dim, q.query[row + r], kv.dim * sizeof(bf16));
                last = q.slot[row + r] > last ? q.slot[row + r] : last, first = q.slot[row + r] < first ? q.slot[row + r] : first;
            }
            const Partial part = state.from(row, kv.dim);
            for (int start = split * SPLIT; start < (split + 1) * SPLIT && start <= last; start += KEY_BLOCK<bf16>)
                if (!kv.window || start + KEY_BLOCK<bf16> > first - kv.window + 1)
                    attend_block_amx(kv, table, kv_head, query, q.slot + row, rows, start, follower, part);
        }
    }
#endif
}

// All rows of a tile against the keys of one split.
template <class E>
inline void attend_split(const KV<E>& kv, const int32_t* table, int kv_head, const QueryTile<E>& q, int split,
                         const Block<E>& follower, const Partial& state) {
    state.clear(q.rows, kv.dim);
    if (on_tiles(kv)) return attend_split_amx(kv, table, kv_head, q, split, follower, state);
    int end = 0;
    for (int row = 0; row < q.rows; row += 4) end = std::max(end, q.last[row / 4]);
    for (int start = split * SPLIT; start < (split + 1) * SPLIT && start <= end; start += KEY_BLOCK<E>) {
        const Block<E> here = Block<E>::at(kv, table, kv_head, start, end);
        const Block<E> ahead = start + KEY_BLOCK<E> <= end ? Block<E>::at(kv, table, kv_head, start + KEY_BLOCK<E>, end) : follower;
        for (int row = 0; row < q.rows; row += 4) {
            if (start > q.last[row / 4] || (kv.window && start + KEY_BLOCK<E> <= q.first[row / 4] - kv.window + 1)) continue;
            attend_rows(kv, q, row, start, here, ahead, state);
        }
    }
}

// total <- total joined with part, both relative to their own tops.
INLINE void fold(const Partial& total, const Partial& part, int rows, int dim) {
    for (int r = 0; r < rows; r++) {
        const float top = part.top[r] > total.top[r] ? part.top[r] : total.top[r];
        const f32x16 a = splat(exp2_nonpositive<6>(splat(total.top[r] - top))[0]), b = splat(exp2_nonpositive<6>(splat(part.top[r] - top))[0]);
        auto join = [&](float* to, const float* from) { store(to, fma(load<f32x16>(from), b, load<f32x16>(to) * a)); };
        total.top[r] = top;
        join(total.mass + (size_t)r * 16, part.mass + (size_t)r * 16);
        for (int d = 0; d < dim; d += 16) join(total.out + (size_t)r * dim + d, part.out + (size_t)r * dim + d);
    }
}

template <class E>
inline void fill_tile(const KV<E>& kv, const AttentionStep<E>& step, const AttentionPlan& plan, const Unit& u, QueryTile<E>& q) {
    const int shared = kv.heads / kv.kv_heads;
    q.rows = 0;
    for (int m = u.mate; m < u.mate + u.mates; m++) {
        const int s = plan.mates[m], begin = step.query_starts[s], n = step.query_starts[s + 1] - begin;
        const int count = u.mates > 1 ? n : u.count;
        for (int i = u.first; i < u.first + count; i++)
            for (int g = 0; g < shared; g++, q.rows++) {
                const int slot = step.lengths[s] - n + i, four = q.rows / 4;
                q.query[q.rows] = step.query + ((size_t)(begin + i) * kv.heads + u.kv_head * shared + g) * query_size<E>(kv.dim);
                q.slot[q.rows] = slot;
                q.first[four] = q.rows % 4 ? std::min(q.first[four], slot) : slot;
                q.last[four] = q.rows % 4 ? std::max(q.last[four], slot) : slot;
            }
    }
}

template <class E>
inline void finish(const KV<E>& kv, const AttentionStep<E>& step, int sequence, const Unit& u, const Partial& total) {
    const int shared = kv.heads / kv.kv_heads, begin = step.query_starts[sequence];
    for (int i = 0, r = 0; i < u.count; i++)
        for (int g = 0; g < shared; g++, r++) {
            float* out = step.out + ((size_t)(begin + u.first + i) * kv.heads + u.kv_head * shared + g) * kv.dim;
            const f32x16 inverse = splat(1.0f / sum(load<f32x16>(total.mass + (size_t)r * 16)));
            for (int d = 0; d < kv.dim; d += 16) store(out + d, load<f32x16>(total.out + (size_t)r * kv.dim + d) * inverse);
        }
}

template <class E>
void attention(Pool& pool, const KV<E>& kv, const AttentionStep<E>& step, const AttentionPlan& plan, Scratch& shared_scratch, std::vector<Scratch>& own, int thread) {
    const int per = kv.heads / kv.kv_heads, units = (int)plan.units.size();
    pool.loop(units, 1, [&](int i) {
        const Unit& u = plan.units[i];
        QueryTile<E> q;
        fill_tile(kv, step, plan, u, q);
        const int sequence = plan.mates[u.mate];
        const int32_t* table = step.table + (size_t)sequence * step.table_stride;
        // What this thread most likely does next.
        const Unit& next = plan.units[i + pool.threads() < units ? i + pool.threads() : i];
        const int after = plan.mates[next.mate];
        const int32_t* next_table = step.table + (size_t)after * step.table_stride;
        const Block<E> follower = Block<E>::at(kv, next_table, next.kv_head, next.split * SPLIT, step.lengths[after] - 1);
        if (u.splits) return attend_split(kv, table, u.kv_head, q, u.split, follower, shared_scratch.part(u.at, q.rows, kv.dim));
        const size_t size = partial_floats(q.rows, kv.dim);
        own[thread].part(size, q.rows, kv.dim);  // grow before taking pointers
        Partial total = own[thread].part(0, q.rows, kv.dim), part = own[thread].part(size, q.rows, kv.dim);
        attend_split(kv, table, u.kv_head, q, 0, follower, total);
        for (int s = 1; s * SPLIT <= q.slot[q.rows - 1]; s++) {
            attend_split(kv, table, u.kv_head, q, s, follower, part);
            fold(total, part, q.rows, kv.dim);
        }
        finish(kv, step, sequence, u, total);
    });
    if (plan.folds.empty()) return;
    pool.loop((int)plan.folds.size(), 1, [&](int i) {
        const Unit& u = plan.folds[i];
        const int rows = u.count * per;
        auto part = [&](int s) {
            const Part& p = plan.parts[u.at + s];
            return shared_scratch.part(p.at, p.rows, kv.dim).from(p.row, kv.dim);
        };
        Partial total = own[thread].part(0, rows, kv.dim);
        const Partial first = part(0);
        std::memcpy(total.top, first.top, rows * sizeof(float));
        std::memcpy(total.mass, first.mass, (size_t)rows * 16 * sizeof(float));
        std::memcpy(total.out, first.out, (size_t)rows * kv.dim * sizeof(float));
        for (int s = 1; s < u.splits; s++) fold(total, part(s), rows, kv.dim);
        finish(kv, step, plan.mates[u.mate], u, total);
    });
}

template void attention<bf16>(Pool&, const KV<bf16>&, const AttentionStep<bf16>&, const AttentionPlan&, Scratch&, std::vector<Scratch>&, int);
template void attention<int8_t>(Pool&, const KV<int8_t>&, const AttentionStep<int8_t>&, const AttentionPlan&, Scratch&, std::vector<Scratch>&, int);
template void attention<float>(Pool&, const KV<float>&, const AttentionStep<float>&, const AttentionPlan&, Scratch&, std::vector<Scratch>&, int);

}  // namespace octavo
