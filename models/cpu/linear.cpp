// The matrix products of linear.h: register tiles for each format, and how they are shared among the threads.
#include "amx.h"
#include "linear.h"

namespace octavo {

// Bytes of weights asked for ahead: the processor's own prefetcher stops at a page's end. As measured on Zen 4.
constexpr int FETCH = 12288;

// MR activation rows times NB adjacent blocks of grouped weights.
template <int MR, int NB, int FORMAT>
INLINE void grouped_tile(const uint8_t* w, size_t stride, const Rows& x, int row, f32x16 (&acc)[NB][MR]) {
    constexpr int step = group_bytes(FORMAT), codes = step - 4 * BLOCK;
    const int groups = x.width / GROUP, pairs = pairs_of(x.width);
    const uint8_t* const first = w;
    const int quad = MR == ROWS ? 4 * ROWS : 4 * x.beside();  // bytes from four inputs of a row to the next four
    const int8_t* a = x.i8 + x.quad_at(row, 0);
    const float* factor = x.factor + x.scale_at(row, 0);
    const int32_t *shift = x.shift + x.scale_at(row, 0), *sums = x.sums + x.pair_at(row, 0);
    for (int g = 0; g < groups; g++, w += step, a += 8 * quad) {
        i32x16 whole[MR][NB] = {};
#pragma GCC unroll 4
        for (int b = 0; b < NB; b++)
#pragma GCC unroll 9
            for (int line = 0; line < step; line += 64) __builtin_prefetch(w + b * stride + line + FETCH, 0, 2);
        if constexpr (FORMAT == W4) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++)
#pragma GCC unroll 4
                for (int b = 0; b < NB; b++) {
                    u8x64 both = load<u8x64>(w + b * stride + 64 * j);
                    u8x64 low = both & 0x0f, high = (u8x64)((u32x16)both >> 4) & 0x0f;
#pragma GCC unroll 8
                    for (int r = 0; r < MR; r++) {
                        whole[r][b] = dot_u8(whole[r][b], low, a + j * quad + 4 * r);
                        whole[r][b] = dot_u8(whole[r][b], high, a + (4 + j) * quad + 4 * r);
                    }
                }
        } else {
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++)
#pragma GCC unroll 4
                for (int b = 0; b < NB; b++) {
                    u8x64 v = load<u8x64>(w + b * stride + 64 * j);
#pragma GCC unroll 8
                    for (int r = 0; r < MR; r++) whole[r][b] = dot_u8(whole[r][b], v, a + j * quad + 4 * r);
                }
        }
        const int odd = g % 2;
#pragma GCC unroll 4
        for (int b = 0; b < NB; b++) {
            const f32x16 scale = from_fp16((const uint16_t*)(w + b * stride + codes - odd * (step - 2 * BLOCK)));
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++) {
                // Scales of rows for four bits are even; eight bits are read by the LM head, where any rounding shows.
                const f32x16 sum = FORMAT == W4 ? to_float(shift_left(whole[r][b], shift[g * ROWS + r])) : to_float(whole[r][b]) * splat(factor[g * ROWS + r]);
                acc[b][r] = fma(sum, scale, acc[b][r]);
            }
        }
    }
    i32x16 rest[NB][MR] = {};
    for (int p = 0; p < pairs; p++)
#pragma GCC unroll 4
        for (int b = 0; b < NB; b++) {
            const u32x16 minima = load<u32x16>(first + b * stride + (size_t)(2 * p + 1) * step + codes);
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++) rest[b][r] = dot_i16(rest[b][r], minima, sums[p * ROWS + r]);
        }
#pragma GCC unroll 4
    for (int b = 0; b < NB; b++) {
        const uint8_t* unit = first + b * stride + (size_t)2 * pairs * step;
        __builtin_prefetch(unit + FETCH, 0, 2);
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++) acc[b][r] = fma(to_float(rest[b][r]), load<f32x16>(unit) * splat(x.rest[row + r]), acc[b][r]) * splat(x.finest[row + r]);
    }
}

template <int MR, int NB>
INLINE void bf16_tile(const uint8_t* w, size_t stride, const Rows& x, int row, f32x16 (&acc)[NB][MR]) {
    const bf16* a = x.b16 + (size_t)row * x.width;
    for (int k = 0; k < x.width; k += 2, w += 64) {
        u32x16 v[NB];
#pragma GCC unroll 4
        for (int b = 0; b < NB; b++) v[b] = load<u32x16>(w + b * stride), __builtin_prefetch(w + b * stride + FETCH, 0, 2);
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++) {
            uint32_t pair;
            std::memcpy(&pair, a + (size_t)r * x.width + k, 4);
#pragma GCC unroll 4
            for (int b = 0; b < NB; b++) acc[b][r] = dot_bf16(acc[b][r], v[b], pair);
        }
    }
}

template <int MR, int NB>
INLINE void f32_tile(const uint8_t* w, size_t stride, const Rows& x, int row, f32x16 (&acc)[NB][MR]) {
    const float* a = x.f32 + (size_t)row * x.width;
    for (int k = 0; k < x.width; k++, w += 64) {
#pragma GCC unroll 4
        for (int b = 0; b < NB; b++) {
            f32x16 v = load<f32x16>(w + b * stride);
            __builtin_prefetch(w + b * stride + FETCH, 0, 2);
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++) acc[b][r] = fma(v, splat(a[(size_t)r * x.width + k]), acc[b][r]);
        }
    }
}

// R rows of one block to the target. Lanes past the matrix's last output are dropped.
template <int R>
INLINE void write_tile(const Matrix& w, int block, const f32x16* acc, int row, int rows, const Target& target) {
    const int column = block * BLOCK, lanes = w.outs - column < BLOCK ? w.outs - column : BLOCK;
    if (rows == R && lanes == BLOCK && !w.bias) {
        float* out = target.out + (size_t)row * target.stride + column;
#pragma GCC unroll 16
        for (int r = 0; r < R; r++, out += target.stride) store(out, target.add ? load<f32x16>(out) + acc[r] : acc[r]);
        return;
    }
    for (int r = 0; r < rows; r++) {
        float* out = target.out + (size_t)(row + r) * target.stride + column;
        f32x16 v = acc[r];
        if (lanes == BLOCK) {
            if (w.bias) v = v + load<f32x16>(w.bias + column);
            store(out, target.add ? load<f32x16>(out) + v : v);
        } else {
            for (int i = 0; i < lanes; i++) {
                float one = w.bias ? v[i] + w.bias[column + i] : v[i];
                out[i] = target.add ? out[i] + one : one;
            }
        }
    }
}

// MR rows times NB blocks, of which `rows` and `blocks` are wanted: what is beyond is computed and dropped, so that few
// instances do for every size. The workspace has room for the rows that are read past the last.
template <int FORMAT, int MR, int NB>
__attribute__((noinline)) void linear_tile(const Matrix& w, int block, int blocks, const Rows& x, int row, int rows, const Target& target) {
    const size_t bytes = block_bytes(FORMAT, w.ins);
    const uint8_t* data = w.data + block * bytes;
    const size_t stride = blocks < NB ? 0 : bytes;
    f32x16 acc[NB][MR] = {};
    if constexpr (FORMAT == F32) f32_tile<MR, NB>(data, stride, x, row, acc);
    else if constexpr (FORMAT == BF16) bf16_tile<MR, NB>(data, stride, x, row, acc);
    else grouped_tile<MR, NB, FORMAT>(data, stride, x, row, acc);
    for (int b = 0; b < blocks; b++) write_tile<MR>(w, block + b, acc[b], row, rows, target);
}

// All rows of x times one or two adjacent blocks. Few rows take both blocks at once, to have enough sums in flight.
template <int FORMAT>
void linear_range(const Matrix& w, int block, int blocks, const Rows& x, const Target& target) {
    int row = 0;
    for (; x.count - row > 4; row += 8)
        for (int b = block; b < block + blocks; b++) linear_tile<FORMAT, 8, 1>(w, b, 1, x, row, x.count - row < 8 ? x.count - row : 8, target);
    const int rows = x.count - row;
    if (rows > 2) return linear_tile<FORMAT, 4, 2>(w, block, blocks, x, row, rows, target);
    if (rows == 2) return linear_tile<FORMAT, 2, 2>(w, block, blocks, x, row, rows, target);
    if (rows == 1) return linear_tile<FORMAT, 1, 2>(w, block, blocks, x, row, rows, target);
}

#if OCTAVO_AMX

constexpr int AHEAD = 20480;  // bytes of weights fetched before they are widened: tile work hides them from the prefetcher

// Group g of a block's weights as bfloat16 [16 outputs][32 inputs].
template <int FORMAT>
__attribute__((noinline)) void widen(const uint8_t* block, int g, bf16* out) {
    constexpr int codes = FORMAT == W4 ? BLOCK * GROUP / 2 : BLOCK * GROUP;
    const uint8_t* group = block + (size_t)g * (codes + 4 * BLOCK);
    alignas(64) float scale[BLOCK], minimum[BLOCK];
    for (int line = 0; line < codes + 4 * BLOCK; line += 64) _mm_prefetch((const char*)group + AHEAD + line, _MM_HINT_T1);
    store(scale, from_fp16((const uint16_t*)(group + codes)));
    store(minimum, from_fp16((const uint16_t*)(group + codes) + BLOCK));
    if constexpr (FORMAT == W4) {
        // Two outputs at a time: the sixteen values that the codes of each can mean, side by side in one register, and
        // each code, with a bit for which output, as the place of its value. A word of codes holds four outputs' nibbles.
        const f32x16 level = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const __m512i nibble = _mm512_set1_epi16(15), second = _mm512_set1_epi16(16);
#pragma GCC unroll 4
        for (int q = 0; q < 4; q++) {
            const __m512i words = _mm512_loadu_si512(group + 64 * q);
#pragma GCC unroll 2
            for (int o = 4 * q; o < 4 * q + 4; o += 2) {
                const f32x16 one = fma(level, splat(scale[o]), splat(minimum[o])), two = fma(level, splat(scale[o + 1]), splat(minimum[o + 1]));
                const __m512i table = (__m512i)_mm512_cvtne2ps_pbh((__m512)two, (__m512)one);
                const __m512i left = _mm512_srli_epi16(words, 4 * (o % 4)), right = _mm512_srli_epi16(words, 4 * (o % 4) + 4);
                _mm512_store_si512(out + GROUP * o, _mm512_permutexvar_epi16(_mm512_and_si512(left, nibble), table));
                // (right & nibble) | second
                _mm512_store_si512(out + GROUP * (o + 1), _mm512_permutexvar_epi16(_mm512_ternarylogic_epi32(right, nibble, second, 0xea), table));
            }
        }
        return;
    }
#pragma GCC unroll 16
    for (int o = 0; o < BLOCK; o++) {
        const f32x16 d = splat(scale[o]), m = splat(minimum[o]);
        const __m128i* bytes = (const __m128i*)(group + GROUP * o);
        const f32x16 low = to_float((i32x16)_mm512_cvtepu8_epi32(_mm_loadu_si128(bytes))), high = to_float((i32x16)_mm512_cvtepu8_epi32(_mm_loadu_si128(bytes + 1)));
        _mm512_store_si512(out + GROUP * o, (__m512i)_mm512_cvtne2ps_pbh((__m512)fma(high, d, m), (__m512)fma(low, d, m)));
    }
}

// Add to the result tiles: B blocks of weights (tiles 4, 5) times T tiles of rows (6, 7), over `groups` groups.
template <int B, int T>
INLINE void multiply(const bf16* first, const bf16* second, const bf16* left, const bf16* right, int groups, int lanes) {
    for (int g = 0; g < groups; g++) {
        TILE_LOAD(4, first + (size_t)g * BLOCK * GROUP, 64);
        TILE_LOAD(6, left + (size_t)g * GROUP * lanes, 4 * lanes);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (T == 2) {
            TILE_LOAD(7, right + (size_t)g * GROUP * lanes, 4 * lanes);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (B == 2) {
            TILE_LOAD(5, second + (size_t)g * BLOCK * GROUP, 64);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (T == 2) _tile_dpbf16ps(3, 5, 7);
        }
    }
}

INLINE void clear_tiles() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// Sixteen vectors, transposed.
INLINE void transpose(const float (*in)[BLOCK], f32x16* out) {
    __m512 a[16], b[16];
    for (int i = 0; i < 8; i++) {
        const __m512 x = _mm512_load_ps(in[2 * i]), y = _mm512_load_ps(in[2 * i + 1]);
        a[2 * i] = _mm512_unpacklo_ps(x, y), a[2 * i + 1] = _mm512_unpackhi_ps(x, y);
    }
    for (int i = 0; i < 4; i++)
        for (int h = 0; h < 2; h++) {
            const __m512d x = (__m512d)a[4 * i + h], y = (__m512d)a[4 * i + 2 + h];
            b[4 * i + 2 * h] = (__m512)_mm512_unpacklo_pd(x, y), b[4 * i + 2 * h + 1] = (__m512)_mm512_unpackhi_pd(x, y);
        }
    for (int i = 0; i < 4; i++) {
        a[i] = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88), a[i + 4] = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
        a[i + 8] = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88), a[i + 12] = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        const int from = i;
        out[i] = (f32x16)_mm512_shuffle_f32x4(a[from], a[from + 8], 0x88), out[i + 8] = (f32x16)_mm512_shuffle_f32x4(a[from], a[from + 8], 0xdd);
    }
}

// What becomes of the result tiles [16 outputs][lanes] of one or two blocks.

// Rows of the target. A tile lies transposed.
struct ToRows {
    const Matrix& w;
    int block;
    const Target& target;
    template <int B>
    __attribute__((noinline)) void take(const float (*result)[BLOCK][BLOCK], int tiles, int row, int rows) const {
        f32x16 acc[BLOCK];
        for (int b = 0; b < B; b++)
            for (int t = 0; t < tiles; t++) {
                const int left = rows - row - BLOCK * t;
                transpose(result[2 * b + t], acc);
                write_tile<BLOCK>(w, block + b, acc, row + BLOCK * t, left < BLOCK ? left : BLOCK, target);
            }
    }
};

// Activations of the next matrix: the first block's results gate the second's. They already lie as tiles want them.
struct ToGated {
    const Matrix* gate_up;
    int block;
    const Rows& out;
    template <int B>
    __attribute__((noinline)) void take(const float (*result)[BLOCK][BLOCK], int tiles, int row, int) const {
        const int lanes = out.lanes();
        const __mmask16 mask = (__mmask16)((1u << lanes) - 1);
        auto half = [&](const float (*gate)[BLOCK], const float (*up)[BLOCK], int o) {
            // Lanes past the last row hold anything; as numbers they could be subnormal, and those are slow.
            f32x16 g = (f32x16)_mm512_maskz_load_ps(mask, gate[o]), u = (f32x16)_mm512_maskz_load_ps(mask, up[o]);
            if (gate_up[0].bias) g = g + splat(gate_up[0].bias[block * BLOCK + o]);
            if (gate_up[1].bias) u = u + splat(gate_up[1].bias[block * BLOCK + o]);
            return _mm512_cvtepu16_epi32((__m256i)to_bf16(silu(g) * u));
        };
        for (int t = 0; t < tiles; t++) {
            uint32_t* to = (uint32_t*)out.b16 + ((size_t)((row + BLOCK * t) / lanes) * (out.width / 2) + block * (BLOCK / 2)) * lanes;
            for (int p = 0; p < BLOCK / 2; p++) {
                const __m512i low = half(result[t], result[2 + t], 2 * p), high = half(result[t], result[2 + t], 2 * p + 1);
                _mm512_mask_storeu_epi32(to + p * lanes, mask, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
            }
        }
    }
};

// One or two blocks (at `data`) times all rows. Few rows widen a stretch of weights while the tiles work on the one before;
// many rows widen the blocks whole, once.
template <int FORMAT, int B, class Out>
__attribute__((noinline)) void linear_tiles(const uint8_t* const (&data)[2], int ins, const Rows& x, const Out& out) {
    constexpr int STRETCH = 4;  // groups
    thread_local std::vector<bf16> memory;
    alignas(64) float result[4][BLOCK][BLOCK];
    const int groups = ins / GROUP, lanes = x.lanes();
    const size_t whole = (size_t)groups * BLOCK * GROUP;
    if (memory.size() < 2 * whole + 32) memory.resize(2 * whole + 32);
    bf16* space = (bf16*)(((uintptr_t)memory.data() + 63) / 64 * 64);
    bf16* wide[2] = {space, space + (B - 1) * whole};
    amx::shape(amx::LINEAR, lanes);
    auto widen_groups = [&](int from, int to) {
        if constexpr (FORMAT != BF16)
            for (int b = 0; b < B; b++)
                for (int g = from; g < to; g++) widen<FORMAT>(data[b], g, wide[b] + (size_t)g * BLOCK * GROUP);
    };
    if constexpr (FORMAT == BF16) wide[0] = (bf16*)data[0], wide[1] = (bf16*)data[1];
    auto finish = [&](int row, int tiles) {
        _tile_stored(0, result[0], 64);
        if (tiles == 2) _tile_stored(1, result[1], 64);
        if constexpr (B == 2) _tile_stored(2, result[2], 64);
        if (B == 2 && tiles == 2) _tile_stored(3, result[3], 64);
        out.template take<B>(result, tiles, row, x.count);
    };
    if (x.count <= BLOCK) {
        clear_tiles();
        widen_groups(0, STRETCH < groups ? STRETCH : groups);
        for (int g = 0; g < groups; g += STRETCH) {
            const int end = g + STRETCH < groups ? g + STRETCH : groups;
            widen_groups(end, end + STRETCH < groups ? end + STRETCH : groups);
            multiply<B, 1>(wide[0] + (size_t)g * BLOCK * GROUP, wide[1] + (size_t)g * BLOCK * GROUP, x.b16 + (size_t)g * GROUP * lanes, nullptr, end - g, lanes);
        }
        return finish(0, 1);
    }
    widen_groups(0, groups);
    for (int row = 0; row < x.count; row += 2 * BLOCK) {
        const bf16 *left = x.b16 + (size_t)row * ins, *right = left + (size_t)BLOCK * ins;
        const bool both = x.count - row > BLOCK;
        clear_tiles();
        if (both) multiply<B, 2>(wide[0], wide[1], left, right, groups, BLOCK);
        else multiply<B, 1>(wide[0], wide[1], left, nullptr, groups, BLOCK);
        finish(row, both ? 2 : 1);
    }
}

template <int FORMAT>
void tiles_to_rows(const Matrix& w, int block, int blocks, const Rows& x, const Target& target) {
    const size_t bytes = block_bytes(FORMAT, w.ins);
    const uint8_t* const data[2] = {w.data + block * bytes, w.data + (block + blocks - 1) * bytes};
    if (blocks == 2) linear_tiles<FORMAT, 2>(data, w.ins, x, ToRows{w, block, target});
    else linear_tiles<FORMAT, 1>(data, w.ins, x, ToRows{w, block, target});
}

template <int FORMAT>
void tiles_to_gated(const Matrix* gate_up, int block, const Rows& x, const Rows& out) {
    const size_t bytes = block_bytes(FORMAT, x.width);
    const uint8_t* const data[2] = {gate_up[0].data + block * bytes, gate_up[1].data + block * bytes};
    linear_tiles<FORMAT, 2>(data, x.width, x, ToGated{gate_up, block, out});
}

#endif

bool on_tiles([[maybe_unused]] const Matrix& w, [[maybe_unused]] int block, [[maybe_unused]] int blocks, [[maybe_unused]] const Rows& x,
              [[maybe_unused]] const Target& target) {
#if OCTAVO_AMX
    if (form_of(w.format) != TILED) return false;
    if (w.format == BF16) tiles_to_rows<BF16>(w, block, blocks, x, target);
    if (w.format == W8) tiles_to_rows<W8>(w, block, blocks, x, target);
    if (w.format == W4) tiles_to_rows<W4>(w, block, blocks, x, target);
    return true;
#else
    return false;
#endif
}

// How many tasks a thread takes at a time. Few rows are a matter of reading weights: a thread should read on where it was.
INLINE int stretch(const Team& team, int tasks, const Rows& x) {
    const int share = team.pool ? tasks / (2 * team.pool->threads()) : 1;
    return x.count > BLOCK || share < 1 ? 1 : share;
}

// out = x W^T + bias for the matrices that share an input (q, k and v; gate and up), each with its own columns of the
// target, one after the other.
void linear(const Team& team, const Matrix* parts, int count, const Rows& x, Target target) {
    int tasks = 0;
    for (int p = 0; p < count; p++) tasks += (parts[p].outs + 2 * BLOCK - 1) / (2 * BLOCK);
    if (team.pool) x.fetch(form_of(parts, count));
    team.loop(tasks, stretch(team, tasks, x), [&](int task) {
        Target t = target;
        const Matrix* w = parts;
        for (int n; task >= (n = (w->outs + 2 * BLOCK - 1) / (2 * BLOCK)); w++) {
            task -= n;
            t.out += w->outs;
        }
        const int block = 2 * task, left = (w->outs + BLOCK - 1) / BLOCK - block, blocks = left < 2 ? left : 2;
        if (on_tiles(*w, block, blocks, x, t)) return;
        switch (w->format) {
            case F32: return linear_range<F32>(*w, block, blocks, x, t);
            case BF16: return linear_range<BF16>(*w, block, blocks, x, t);
            case W8: return linear_range<W8>(*w, block, blocks, x, t);
            default: return linear_range<W4>(*w, block, blocks, x, t);
        }
    });
}

void gated_linear([[maybe_unused]] const Team& team, [[maybe_unused]] const Matrix* gate_up, [[maybe_unused]] const Rows& x, [[maybe_unused]] const Rows& out) {
#if OCTAVO_AMX
    const int blocks = gate_up[0].outs / BLOCK;
    team.loop(blocks, stretch(team, blocks, x), [&](int block) {
        switch (gate_up[0].format) {
            case BF16: return tiles_to_gated<BF16>(gate_up, block, x, out);
            case W8: return tiles_to_gated<W8>(gate_up, block, x, out);
            default: return tiles_to_gated<W4>(gate_up, block, x, out);
        }
    });
#endif
}

}  // namespace octavo
