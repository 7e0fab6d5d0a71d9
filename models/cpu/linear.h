// Linear layers: weights packed once into the order the registers want, one routine for one row and for a thousand.
//
// Sixteen output rows form a block; a block's weights lie in the order they are read. Formats, for vector units:
//   F32    [in][16] float                              activations float
//   BF16   [in / 2][16][2] bfloat16                    activations bfloat16
//   W8     per group of 32 inputs: [8][16][4] uint8, then a header                             activations int8
//   W4     per group of 32 inputs: [4][16][4] bytes whose low nibbles are inputs 0-15 and high nibbles 16-31, then as W8
//          The header of an even group holds two groups' fp16 scales, [2][16]; that of the odd one (there always is one)
//          their minima, [16][2] int16, in multiples of 16 floats that end the block.
// and where the processor has tile registers, with the same sizes and the same arithmetic for the last three:
//   BF16   per group of 32 inputs: [16][32] bfloat16   activations bfloat16, in pairs of inputs by sixteen rows
//   W8     per group of 32 inputs: [16][32] uint8, then 16 fp16 scales and 16 fp16 minima
//   W4     per group of 32 inputs: [4][32] words, word k of row q holding input k of outputs 4 q .. 4 q + 3, lowest bits first
// A grouped weight is scale * code + minimum with an unsigned code. For vector units an activation row is int8 with a scale
// for each group of 32. Where four-bit weights read it that is a power of two below the row's largest: it is applied to the
// exact integer sum of a group by a shift, which costs nothing beside the dots. Groups are added in order; minima times the
// groups' sums are one more product of integers. For tiles a weight is rounded to bfloat16 on its way into a register, and a
// result is summed in the order of its inputs. Either way a row's bits depend neither on how many rows share the step nor on
// how the work was cut.
#pragma once
#include <algorithm>
#include "amx.h"
#include "pool.h"

namespace octavo {

constexpr int BLOCK = 16;  // output rows in a block
constexpr int GROUP = 32;  // inputs that share a scale
constexpr int ROWS = 8;    // activation rows that lie together, in lines of cache of their own

// How many rows a thread writes at a time: a line of cache that two write travels between their cores.
INLINE int rows_a_task(int count) { return count > ROWS ? ROWS : 1; }

enum Format : int32_t { F32 = 0, BF16 = 1, W8 = 2, W4 = 3 };

// One packed matrix [outs, ins]. `data` holds ceil(outs / 16) blocks; rows beyond `outs` are zero.
struct Matrix {
    int32_t format, outs, ins, reserved;
    const uint8_t* data;
    const float* bias;  // [outs] or null
};

INLINE int pairs_of(int ins) { return (ins / GROUP + 1) / 2; }
INLINE constexpr int group_bytes(int format) { return (format == W4 ? BLOCK * GROUP / 2 : BLOCK * GROUP) + 4 * BLOCK; }
INLINE size_t block_bytes(int format, int ins) {
    switch (format) {
        case F32: return (size_t)ins * BLOCK * 4;
        case BF16: return (size_t)ins * BLOCK * 2;
        default: return (size_t)pairs_of(ins) * 2 * group_bytes(format) + 4 * BLOCK;
    }
}

// Where a block keeps the scales of a group, sixteen side by side, and the minimum of one output.
INLINE size_t scales_at(int format, int g) {
    const int home = amx::available() ? g : g / 2 * 2;
    return (size_t)(home + 1) * group_bytes(format) - 4 * BLOCK + (g - home) * 2 * BLOCK;
}
INLINE size_t minimum_at(int format, int g, int lane) {
    if (amx::available()) return scales_at(format, g) + 2 * (BLOCK + lane);
    return (size_t)(g / 2 * 2 + 2) * group_bytes(format) - 4 * BLOCK + 2 * (2 * lane + g % 2);
}

// The form of activations that a format reads here.
enum Form : int { FLOAT_ROWS, BF16_ROWS, INT8_ROWS, EVEN_INT8_ROWS, TILED };
INLINE Form form_of(int format) {
    return format == F32 ? FLOAT_ROWS : amx::available() ? TILED : format == BF16 ? BF16_ROWS : format == W8 ? INT8_ROWS : EVEN_INT8_ROWS;
}
// That of matrices that share an input.
INLINE Form form_of(const Matrix* parts, int count) {
    Form form = form_of(parts[0].format);
    for (int i = 1; i < count; i++) form = std::max(form, form_of(parts[i].format));
    return form;
}

// Activation rows in one of the forms; only the arrays of that form are used.
struct Rows {
    int count, width;
    float* f32 = nullptr;   // [count, width]; for int8 too, while a row waits for its scale
    bf16* b16 = nullptr;    // [count, width], or tiled: [count / lanes][width / 2][lanes][2]
    int8_t* i8 = nullptr;   // [count / beside][width / 4][beside][4]
    int32_t* shift = nullptr;  // what brings group g's sum to the finest scale, at scale_at(r, g), where scales are even
    float* factor = nullptr;   // what does so in any case, likewise
    int32_t* sums = nullptr;   // two groups' sums of codes as a pair of int16, at pair_at(r, g / 2)
    float* finest = nullptr;   // [count] the finest scale of a row
    float* rest = nullptr;     // [count] what one in `sums` stands for, in multiples of that

    // Eight rows' numbers of a group lie together: the kernels step through groups with a tile of rows in registers.
    INLINE size_t scale_at(int r, int g) const { return ((size_t)(r / ROWS) * (width / GROUP) + g) * ROWS + r % ROWS; }
    INLINE size_t pair_at(int r, int p) const { return ((size_t)(r / ROWS) * pairs_of(width) + p) * ROWS + r % ROWS; }
    // Rows whose int8 numbers lie side by side: all of them while a tile of few takes them all.
    INLINE int beside() const { return count <= 4 ? count : ROWS; }
    INLINE size_t quad_at(int r, int k) const { return (((size_t)(r / beside()) * (width / 4) + k / 4) * beside() + r % beside()) * 4; }
    // Ask for all of it at once: half of it lies in other cores' caches, from where a line takes as long as from memory.
    INLINE void fetch(Form form) const {
        const size_t numbers = (size_t)count * width;
        const char* data = form == FLOAT_ROWS ? (const char*)f32 : form == BF16_ROWS || form == TILED ? (const char*)b16 : (const char*)i8;
        const size_t bytes = form == FLOAT_ROWS ? 4 * numbers : form == BF16_ROWS || form == TILED ? 2 * numbers : numbers;
        for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(data + at, 0, 2);
    }
    // Rows side by side in a tile: all of them while they are few.
    INLINE int lanes() const { return count < BLOCK ? count : BLOCK; }
};

// Row r, waiting in `f32`, to int8: a group's scale is max|x| / 127. `even` scales are the row's largest over powers of
// two: the largest group, whose rounding weighs most, has the one that fits it. Codes to nearest even. Sixteen groups at a
// time.
inline void quantise_row(const Rows& rows, int r, float top, bool even) {
    constexpr int FINEST = 10;                                 // halvings; 2^10 times a group's sum is below 2^31
    constexpr float LARGEST = 32767.0f, TOGETHER = 64000.0f;   // of int16 sums; of all in a row, times 32767 and rounded below 2^31
    const int groups = rows.width / GROUP;
    const float inverse = top > 0 ? 127.0f / top : 0.0f;
    float* x = rows.f32 + (size_t)r * rows.width;
    const int stride = 4 * rows.beside();
    int8_t* codes = rows.i8 + rows.quad_at(r, 0);
    const size_t at = rows.scale_at(r, 0);
    f32x16 largest = {}, together = {};
    for (int first = 0; first < groups; first += 16) {
        const int count = groups - first < 16 ? groups - first : 16;
        f32x16 tops[16] = {};
        for (int g = 0; g < count; g++) tops[g] = max(abs(load<f32x16>(x + GROUP * (first + g))), abs(load<f32x16>(x + GROUP * (first + g) + 16)));
        const f32x16 room = top / maxima<16>(tops);
        const i32x16 exponent = (i32x16)((u32x16)room >> 23) - 127, halvings = exponent < FINEST ? exponent : i32x16{} + FINEST;
        const f32x16 most = splat(1 << FINEST), power = even ? (f32x16)((halvings + 127) << 23) : room < most ? room : most;
        float finer[16], factor[16];
        int32_t shift[16];
        store(finer, power * inverse);
        store(shift, FINEST - halvings);
        store(factor, most / power);
        i32x16 both[16] = {};
        for (int g = 0; g < count; g++) {
            const float* from = x + GROUP * (first + g);
            const i32x16 a = __builtin_convertvector(round_even(load<f32x16>(from) * splat(finer[g])), i32x16);
            const i32x16 b = __builtin_convertvector(round_even(load<f32x16>(from + 16) * splat(finer[g])), i32x16);
            int32_t quads[8];
            store(quads, __builtin_convertvector(a, i8x16));
            store(quads + 4, __builtin_convertvector(b, i8x16));
#pragma GCC unroll 8
            for (int q = 0; q < 8; q++, codes += stride) std::memcpy(codes, quads + q, 4);
            both[g] = a + b;
            rows.shift[at + (first + g) * ROWS] = shift[g], rows.factor[at + (first + g) * ROWS] = factor[g];
        }
        const f32x16 sums = to_float(lanes_of(both, [](i32x16 a, i32x16 b) { return a + b; })) / power;
        store(x + first, sums);  // over groups that are done
        largest = max(largest, abs(sums)), together = together + abs(sums);
    }
    const float one = std::max(maximum(largest) / LARGEST, sum(together) / TOGETHER), per = one > 0 ? 1.0f / one : 0.0f;
    for (int first = 0; first < groups; first += 16) {
        int32_t sums[16];
        store(sums, __builtin_convertvector(round_even(load<f32x16>(x + first) * per), i32x16));
        for (int i = 0; i < 16 && first + i < groups; i += 2)
            rows.sums[rows.pair_at(r, (first + i) / 2)] = (int32_t)((uint32_t)sums[i + 1] << 16 | (uint16_t)sums[i]);
    }
    rows.finest[r] = top / (127.0f * (1 << FINEST));
    rows.rest[r] = one * (1 << FINEST);
}

// Write row r of `rows` from 16-lane pieces produced by piece(i), i counting sixteen floats.
template <class F>
INLINE void write_row(const Rows& rows, Form form, int r, const F& piece) {
    const int width = rows.width;
    if (form == FLOAT_ROWS) {
        for (int i = 0; i < width / 16; i++) store(rows.f32 + (size_t)r * width + 16 * i, piece(i));
    } else if (form == BF16_ROWS || (form == TILED && rows.count == 1)) {
        for (int i = 0; i < width / 16; i++) store(rows.b16 + (size_t)r * width + 16 * i, to_bf16(piece(i)));
    } else if (form == TILED) {
        const int lanes = rows.lanes();
        uint32_t* to = (uint32_t*)rows.b16 + (size_t)(r / lanes) * (width / 2) * lanes + r % lanes;
        for (int i = 0; i < width / 16; i++) {
            uint32_t pairs[8];
            store(pairs, to_bf16(piece(i)));
            for (int p = 0; p < 8; p++, to += lanes) *to = pairs[p];
        }
    } else {
        f32x16 most = {};
        for (int i = 0; i < width / 16; i++) {
            const f32x16 v = piece(i);
            store(rows.f32 + (size_t)r * width + 16 * i, v);
            most = max(most, abs(v));
        }
        quantise_row(rows, r, maximum(most), form == EVEN_INT8_ROWS);
    }
}

INLINE f32x16 silu(f32x16 x) {
    f32x16 e = exp2_nonpositive<6>(abs(x) * splat(-1.44269504f));  // exp(-|x|), which cannot overflow
    f32x16 s = x / (1.0f + e);
    return x >= 0.0f ? s : s * e;
}

// Where results go: out[row, column], added to what is there when `add` is set.
struct Target {
    float* out;
    size_t stride;
    bool add;
};

// out = x W^T + bias for the matrices that share an input (q, k and v; gate and up), each with its own columns of the
// target, one after the other.
void linear(const Team& team, const Matrix* parts, int count, const Rows& x, Target target);

// out = silu(x G^T) * (x U^T) as bfloat16 rows, without the two products ever lying in memory. Only where rows are TILED and
// both matrices have one format: see fuses().
void gated_linear(const Team& team, const Matrix* gate_up, const Rows& x, const Rows& out);
INLINE bool fuses(const Matrix* gate_up) {
    return form_of(gate_up[0].format) == TILED && gate_up[0].format == gate_up[1].format && gate_up[0].outs % GROUP == 0;
}

// Where input k of lane `lane` lies in a group of codes: the byte, and for four bits whether it is the upper half.
struct Place {
    int byte;
    bool upper;
};
INLINE Place code_at(bool four, int lane, int k) {
    if (!amx::available()) return {four ? 64 * (k % 16 / 4) + 4 * lane + k % 4 : 64 * (k / 4) + 4 * lane + k % 4, four && k >= 16};
    return four ? Place{64 * (lane / 4) + 2 * k + lane % 4 / 2, lane % 2 == 1} : Place{32 * lane + k, false};
}
// Where input k of a lane lies in a block of bfloat16.
INLINE size_t bf16_at(int lane, int k) {
    return amx::available() ? (size_t)(k / GROUP) * BLOCK * GROUP + lane * GROUP + k % GROUP : (size_t)(k / 2) * 2 * BLOCK + 2 * lane + k % 2;
}

// One weight row back to floats: the embedding table shares the LM head's packed matrix.
inline void unpack_row(const Matrix& w, int row, float* out) {
    const uint8_t* data = w.data + (row / BLOCK) * block_bytes(w.format, w.ins);
    const int lane = row % BLOCK;
    const bool four = w.format == W4;
    const float* unit = (const float*)(data + block_bytes(w.format, w.ins)) - BLOCK;
    for (int k = 0; k < w.ins; k++) {
        if (w.format == F32) {
            out[k] = ((const float*)data)[(size_t)k * BLOCK + lane];
        } else if (w.format == BF16) {
            out[k] = bf16_to_float(((const bf16*)data)[bf16_at(lane, k)]);
        } else {
            const int g = k / GROUP;
            const Place place = code_at(four, lane, k % GROUP);
            uint8_t code = data[(size_t)g * group_bytes(w.format) + place.byte];
            if (four) code = place.upper ? code >> 4 : code & 15;
            const uint16_t scale = load<uint16_t>(data + scales_at(w.format, g) + 2 * lane), minimum = load<uint16_t>(data + minimum_at(w.format, g, lane));
            out[k] = fp16_to_float(scale) * (float)code + (amx::available() ? fp16_to_float(minimum) : unit[lane] * (float)(int16_t)minimum);
        }
    }
}

}  // namespace octavo
