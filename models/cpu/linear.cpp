// The matrix products of linear.h: register tiles for each format, and how they are shared among the threads.
#include "linear.h"

namespace octavo {

// MR activation rows times NB adjacent blocks of grouped weights.
template <int MR, int NB, bool FOUR>
INLINE void grouped_tile(const uint8_t* w, size_t stride, const Rows& x, int row, f32x16 (&acc)[MR][NB]) {
    const int groups = x.width / GROUP;
    const int8_t* a = x.i8 + (size_t)row * x.width;
    const float* scale = x.scale + (size_t)row * groups;
    const float* total = x.total + (size_t)row * groups;
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
                f32x16 product = to_float(whole[r][b]) * splat(scale[(size_t)r * groups + g]);
                acc[r][b] = fma(product, d, acc[r][b]);
                acc[r][b] = fma(splat(total[(size_t)r * groups + g]), m, acc[r][b]);
            }
        }
    }
}

template <int MR, int NB>
INLINE void bf16_tile(const uint8_t* w, size_t stride, const Rows& x, int row, f32x16 (&acc)[MR][NB]) {
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
            for (int b = 0; b < NB; b++) acc[r][b] = dot_bf16(acc[r][b], v[b], pair);
        }
    }
}

template <int MR, int NB>
INLINE void f32_tile(const uint8_t* w, size_t stride, const Rows& x, int row, f32x16 (&acc)[MR][NB]) {
    const float* a = x.f32 + (size_t)row * x.width;
    for (int k = 0; k < x.width; k++, w += 64) {
#pragma GCC unroll 4
        for (int b = 0; b < NB; b++) {
            f32x16 v = load<f32x16>(w + b * stride);
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++) acc[r][b] = fma(v, splat(a[(size_t)r * x.width + k]), acc[r][b]);
        }
    }
}

template <int FORMAT, int MR, int NB>
__attribute__((noinline)) void linear_tile(const Matrix& w, int block, const Rows& x, int row, const Target& target) {
    const size_t stride = block_bytes(FORMAT, w.ins);
    const uint8_t* data = w.data + block * stride;
    f32x16 acc[MR][NB] = {};
    if constexpr (FORMAT == F32) f32_tile<MR, NB>(data, stride, x, row, acc);
    else if constexpr (FORMAT == BF16) bf16_tile<MR, NB>(data, stride, x, row, acc);
    else grouped_tile<MR, NB, FORMAT == W4>(data, stride, x, row, acc);
    for (int b = 0; b < NB; b++) {
        const int column = (block + b) * BLOCK, lanes = w.outs - column < BLOCK ? w.outs - column : BLOCK;
        for (int r = 0; r < MR; r++) {
            float* out = target.out + (size_t)(row + r) * target.stride + column;
            f32x16 v = acc[r][b];
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
}

// All rows of x times blocks [block, block + NB). Full tiles of eight rows, then one tile of what is left.
template <int FORMAT, int NB>
void linear_blocks(const Matrix& w, int block, const Rows& x, int first, int last, const Target& target) {
    int row = first;
    if constexpr (NB == 2) {
        if (last - row == 1) return linear_tile<FORMAT, 1, 2>(w, block, x, row, target);
        if (last - row == 2) return linear_tile<FORMAT, 2, 2>(w, block, x, row, target);
        if (last - row == 3) return linear_tile<FORMAT, 3, 2>(w, block, x, row, target);
        if (last - row == 4) return linear_tile<FORMAT, 4, 2>(w, block, x, row, target);
        linear_blocks<FORMAT, 1>(w, block, x, first, last, target);
        linear_blocks<FORMAT, 1>(w, block + 1, x, first, last, target);
    } else {
        for (; last - row >= 8; row += 8) linear_tile<FORMAT, 8, 1>(w, block, x, row, target);
        switch (last - row) {
            case 7: return linear_tile<FORMAT, 7, 1>(w, block, x, row, target);
            case 6: return linear_tile<FORMAT, 6, 1>(w, block, x, row, target);
            case 5: return linear_tile<FORMAT, 5, 1>(w, block, x, row, target);
            case 4: return linear_tile<FORMAT, 4, 1>(w, block, x, row, target);
            case 3: return linear_tile<FORMAT, 3, 1>(w, block, x, row, target);
            case 2: return linear_tile<FORMAT, 2, 1>(w, block, x, row, target);
            case 1: return linear_tile<FORMAT, 1, 1>(w, block, x, row, target);
        }
    }
}

template <int FORMAT>
void linear_range(const Matrix& w, int block, int blocks, const Rows& x, const Target& target) {
    if (blocks == 2) linear_blocks<FORMAT, 2>(w, block, x, 0, x.count, target);
    else linear_blocks<FORMAT, 1>(w, block, x, 0, x.count, target);
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
        switch (w->format) {
            case F32: return linear_range<F32>(*w, block, blocks, x, t);
            case BF16: return linear_range<BF16>(*w, block, blocks, x, t);
            case W8: return linear_range<W8>(*w, block, blocks, x, t);
            default: return linear_range<W4>(*w, block, blocks, x, t);
        }
    });
}

}  // namespace octavo
