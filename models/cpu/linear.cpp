// The matrix products of linear.h: register tiles for each format, and how they are shared among the threads.
#include "amx.h"
#include "linear.h"

namespace octavo {

// MR activation rows times NB adjacent blocks of grouped weights.
template <int MR, int NB, bool FOUR>
INLINE void grouped_tile(const uint8_t* w, size_t stride, const Rows& x, int row, f32x16 (&acc)[NB][MR]) {
    const int groups = x.width / GROUP;
    const int8_t* a = x.i8 + (size_t)row * x.width;
    const float *scale = x.scale + x.scale_at(row, 0), *total = x.total + x.scale_at(row, 0);
    constexpr int codes = FOUR ? BLOCK * GROUP / 2 : BLOCK * GROUP, step = codes + 4 * BLOCK;
    for (int g = 0; g < groups; g++, w += step, a += GROUP) {
        i32x16 whole[MR][NB] = {};
        if constexpr (FOUR) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++)
#pragma GCC unroll 4
                for (int b = 0; b < NB; b++) {
                    u8x64 both = load<u8x64>(w + b * stride + 64 * j);
                    u8x64 low = both & 0x0f, high = (u8x64)((u32x16)both >> 4) & 0x0f;
#pragma GCC unroll 8
                    for (int r = 0; r < MR; r++) {
                        whole[r][b] = dot_u8(whole[r][b], low, a + (size_t)r * x.width + 4 * j);
                        whole[r][b] = dot_u8(whole[r][b], high, a + (size_t)r * x.width + 16 + 4 * j);
                    }
                }
        } else {
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++)
#pragma GCC unroll 4
                for (int b = 0; b < NB; b++) {
                    u8x64 v = load<u8x64>(w + b * stride + 64 * j);
#pragma GCC unroll 8
                    for (int r = 0; r < MR; r++) whole[r][b] = dot_u8(whole[r][b], v, a + (size_t)r * x.width + 4 * j);
                }
        }
#pragma GCC unroll 4
        for (int b = 0; b < NB; b++) {
            const uint16_t* header = (const uint16_t*)(w + b * stride + codes);
            f32x16 d = from_fp16(header), m = from_fp16(header + BLOCK);
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++) {
                f32x16 product = to_float(whole[r][b]) * splat(scale[g * BLOCK + r]);
                acc[b][r] = fma(product, d, acc[b][r]);
                acc[b][r] = fma(splat(total[g * BLOCK + r]), m, acc[b][r]);
            }
        }
    }
}

template <int MR, int NB>
INLINE void bf16_tile(const uint8_t* w, size_t stride, const Rows& x, int row, f32x16 (&acc)[NB][MR]) {
    const bf16* a = x.b16 + (size_t)row * x.width;
    for (int k = 0; k < x.width; k += 2, w += 64) {
        u32x16 v[NB];
#pragma GCC unroll 4
        for (int b = 0; b < NB; b++) v[b] = load<u32x16>(w + b * stride);
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
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++) acc[b][r] = fma(v, splat(a[(size_t)r * x.width + k]), acc[b][r]);
        }
    }
}

// R rows of one block to the target. Lanes past the matrix's last output are dropped.
template <int R>
INLINE void write_tile(const Matrix& w, int block, const f32x16* acc, int row, int rows, const Target& target) {
    const int column = block * BLOCK, lanes = w.outs - column < BLOCK ? w.outs - column : BLOCK;
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        if (r >= rows) break;
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
    else grouped_tile<MR, NB, FORMAT == W4>(data, stride, x, row, acc);
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

// Codes of a W4 block as a W8 block holds them.
void widen_block(const uint8_t* w, int groups, uint8_t* out) {
    for (int g = 0; g < groups; g++, w += 5 * 64, out += 9 * 64) {
        for (int j = 0; j < 4; j++) {
            u8x64 both = load<u8x64>(w + 64 * j);
            store(out + 64 * j, both & 0x0f);
            store(out + 64 * (j + 4), (u8x64)((u32x16)both >> 4) & 0x0f);
        }
        store(out + 8 * 64, load<u8x64>(w + 4 * 64));
    }
}

// R rows times one block of eight-bit codes: a tile product a group, then the same sums in the same order as
// grouped_tile. The product of the next group runs while the vector unit scales this one.
template <int R>
__attribute__((noinline)) void grouped_amx(const Matrix& w, int block, const uint8_t* codes, const Rows& x, int row, int rows, const Target& target) {
    alignas(64) int32_t whole[2][BLOCK * BLOCK];
    const int groups = x.width / GROUP;
    const int8_t* a = x.i8 + (size_t)row * x.width;
    const float *scale = x.scale + x.scale_at(row, 0), *total = x.total + x.scale_at(row, 0);
    f32x16 acc[R] = {};
    _tile_zero(0);
    TILE_LOAD(4, a, x.width);
    TILE_LOAD(5, codes, 64);
    _tile_dpbsud(0, 4, 5);
    _tile_stored(0, whole[0], 64);
    for (int g = 0; g < groups; g++, codes += 9 * 64) {
        if (g + 1 < groups) {
            _tile_zero(0);
            TILE_LOAD(4, a + (size_t)(g + 1) * GROUP, x.width);
            TILE_LOAD(5, codes + 9 * 64, 64);
            _tile_dpbsud(0, 4, 5);
            _tile_stored(0, whole[(g + 1) & 1], 64);
        }
        const uint16_t* header = (const uint16_t*)(codes + 8 * 64);
        const f32x16 d = from_fp16(header), m = from_fp16(header + BLOCK);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            f32x16 product = to_float(load<i32x16>(whole[g & 1] + BLOCK * r)) * splat(scale[g * BLOCK + r]);
            acc[r] = fma(product, d, acc[r]);
            acc[r] = fma(splat(total[g * BLOCK + r]), m, acc[r]);
        }
    }
    write_tile<R>(w, block, acc, row, rows, target);
}

// Rows past the last one of x are read and dropped: the workspace has room for a tile more than the step needs.
template <bool FOUR>
void grouped_blocks_amx(const Matrix& w, int block, int blocks, const Rows& x, const Target& target) {
    thread_local std::vector<uint8_t> wide;
    const int groups = w.ins / GROUP, most = x.count < BLOCK ? (x.count + 3) / 4 * 4 : BLOCK;
    if (FOUR && wide.size() < (size_t)groups * 9 * 64 + 64) wide.resize((size_t)groups * 9 * 64 + 64);
    amx::shape(amx::INT8_GROUP, most);
    for (int b = block; b < block + blocks; b++) {
        const uint8_t* codes = w.data + b * block_bytes(w.format, w.ins);
        if (FOUR) {
            uint8_t* aligned = (uint8_t*)(((uintptr_t)wide.data() + 63) / 64 * 64);
            widen_block(codes, groups, aligned);
            codes = aligned;
        }
        for (int row = 0; row < x.count; row += most) {
            const int rows = x.count - row < most ? x.count - row : most;
            switch (most) {
                case 8: grouped_amx<8>(w, b, codes, x, row, rows, target); break;
                case 12: grouped_amx<12>(w, b, codes, x, row, rows, target); break;
                default: grouped_amx<16>(w, b, codes, x, row, rows, target); break;
            }
        }
    }
}

// R rows times two adjacent blocks of bfloat16 weights (or one).
__attribute__((noinline)) void bf16_amx(const Matrix& w, int block, int blocks, const Rows& x, int row, int rows, const Target& target) {
    alignas(64) float out[2][BLOCK * BLOCK];
    const size_t stride = block_bytes(BF16, w.ins);
    const uint8_t *first = w.data + block * stride, *second = first + (blocks - 1) * stride;
    const bf16* a = x.b16 + (size_t)row * x.width;
    _tile_zero(0);
    _tile_zero(1);
    for (int k = 0; k < x.width; k += 32) {
        TILE_LOAD(4, a + k, x.width * 2);
        TILE_LOAD(5, first + (size_t)k * 32, 64);
        _tile_dpbf16ps(0, 4, 5);
        TILE_LOAD(6, second + (size_t)k * 32, 64);
        _tile_dpbf16ps(1, 4, 6);
    }
    _tile_stored(0, out[0], 64);
    _tile_stored(1, out[1], 64);
    for (int b = 0; b < blocks; b++)
        for (int r = 0; r < rows; r++) {
            const f32x16 v = load<f32x16>(out[b] + BLOCK * r);
            write_tile<1>(w, block + b, &v, row + r, 1, target);
        }
}

void bf16_blocks_amx(const Matrix& w, int block, int blocks, const Rows& x, const Target& target) {
    const int most = x.count < BLOCK ? x.count : BLOCK;
    amx::shape(amx::BF16, most);
    for (int row = 0; row < x.count; row += most) bf16_amx(w, block, blocks, x, row, x.count - row < most ? x.count - row : most, target);
}

#endif

// Tiles pay for int8 from about six rows; below, the vector unit keeps up with memory.
constexpr int INT8_TILE_ROWS = 5;

bool tiles(const Matrix& w, int block, int blocks, const Rows& x, const Target& target) {
#if OCTAVO_AMX
    if (!amx::available()) return false;
    if (w.format == BF16 && w.ins % 32 == 0) return bf16_blocks_amx(w, block, blocks, x, target), true;
    if (x.count < INT8_TILE_ROWS) return false;
    if (w.format == W4) return grouped_blocks_amx<true>(w, block, blocks, x, target), true;
    if (w.format == W8) return grouped_blocks_amx<false>(w, block, blocks, x, target), true;
#endif
    return false;
}

// out = x W^T + bias for the matrices that share an input (q, k and v; gate and up), each with its own columns of the
// target, one after the other. Called by every thread of a job.
void linear(Pool& pool, const Matrix* parts, int count, const Rows& x, Target target) {
    int tasks = 0;
    for (int p = 0; p < count; p++) tasks += (parts[p].outs + 2 * BLOCK - 1) / (2 * BLOCK);
    const int grain = x.count <= 2 && tasks > 64 ? 4 : 1;
    pool.loop(tasks, grain, [&](int task) {
        Target t = target;
        const Matrix* w = parts;
        for (int n; task >= (n = (w->outs + 2 * BLOCK - 1) / (2 * BLOCK)); w++) {
            task -= n;
            t.out += w->outs;
        }
        const int block = 2 * task, left = (w->outs + BLOCK - 1) / BLOCK - block, blocks = left < 2 ? left : 2;
        if (tiles(*w, block, blocks, x, t)) return;
        switch (w->format) {
            case F32: return linear_range<F32>(*w, block, blocks, x, t);
            case BF16: return linear_range<BF16>(*w, block, blocks, x, t);
            case W8: return linear_range<W8>(*w, block, blocks, x, t);
            default: return linear_range<W4>(*w, block, blocks, x, t);
        }
    });
}

}  // namespace octavo
