// Linear layers: weights packed once into the order the registers want, one routine for one row and for a thousand.
//
// Sixteen output rows form a block; a block's weights lie in the order they are read. Formats, for vector units:
//   F32    [in][16] float                              activations float
//   BF16   [in / 2][16][2] bfloat16                    activations bfloat16
//   W8     per group of 32 inputs: [8][16][4] uint8,  then 16 fp16 scales and 16 fp16 minima     activations int8
//   W4     per group of 32 inputs: [4][16][4] bytes whose low nibbles are inputs 0-15 and high nibbles 16-31, then as W8
// and where the processor has tile registers, with the same sizes and the same arithmetic for the last three:
//   BF16   per group of 32 inputs: [16][32] bfloat16   activations bfloat16, in pairs of inputs by sixteen rows
//   W8     per group of 32 inputs: [16][32] uint8, then as above
//   W4     per group of 32 inputs: [4][32] words, word k of row q holding input k of outputs 4 q .. 4 q + 3, lowest bits first
// A grouped weight is scale * code + minimum with an unsigned code. For vector units an activation row is int8 with one
// scale and one sum per group of 32: the integer sum of a group is exact and groups are added in order. For tiles a weight
// is rounded to bfloat16 on its way into a register, and a result is summed in the order of its inputs. Either way a row's
// bits depend neither on how many rows share the step nor on how the work was cut.
#pragma once
#include "amx.h"
#include "pool.h"

namespace octavo {

constexpr int BLOCK = 16;  // output rows in a block
constexpr int GROUP = 32;  // inputs that share a scale

enum Format : int32_t { F32 = 0, BF16 = 1, W8 = 2, W4 = 3 };

// One packed matrix [outs, ins]. `data` holds ceil(outs / 16) blocks; rows beyond `outs` are zero.
struct Matrix {
    int32_t format, outs, ins, reserved;
    const uint8_t* data;
    const float* bias;  // [outs] or null
};

INLINE size_t block_bytes(int format, int ins) {
    switch (format) {
        case F32: return (size_t)ins * BLOCK * 4;
        case BF16: return (size_t)ins * BLOCK * 2;
        case W8: return (size_t)(ins / GROUP) * (BLOCK * GROUP + 4 * BLOCK);
        default: return (size_t)(ins / GROUP) * (BLOCK * GROUP / 2 + 4 * BLOCK);
    }
}

// The form of activations that a format reads here.
enum Form : int { FLOAT_ROWS, BF16_ROWS, INT8_ROWS, TILED };
INLINE Form form_of(int format) {
    return format == F32 ? FLOAT_ROWS : amx::available() ? TILED : format == BF16 ? BF16_ROWS : INT8_ROWS;
}

// Activation rows in one of the forms; only the arrays of that form are used.
struct Rows {
    int count, width;
    float* f32 = nullptr;   // [count, width]
    bf16* b16 = nullptr;    // [count, width], or tiled: [count / lanes][width / 2][lanes][2]
    int8_t* i8 = nullptr;   // [count, width]
    float* scale = nullptr; // of row r and group g at scale_at(r, g)
    float* total = nullptr; // scale * sum of the group's codes, likewise

    // Sixteen rows' scales of a group lie together: the kernels step through groups with a tile of rows in registers.
    INLINE size_t scale_at(int r, int g) const { return ((size_t)(r / BLOCK) * (width / GROUP) + g) * BLOCK + r % BLOCK; }
    // Rows side by side in a tile: all of them while they are few.
    INLINE int lanes() const { return count < BLOCK ? count : BLOCK; }
};

// One row of 32 floats to int8: scale = max|x| / 127, codes to nearest even.
INLINE void quantise_group(f32x16 lo, f32x16 hi, int8_t* codes, float& scale, float& total) {
    float top = maximum(max(abs(lo), abs(hi)));
    scale = top / 127.0f;
    f32x16 inverse = splat(top > 0 ? 127.0f / top : 0.0f);
    i32x16 a = __builtin_convertvector(round_even(lo * inverse), i32x16), b = __builtin_convertvector(round_even(hi * inverse), i32x16);
    typedef int8_t i8x16 __attribute__((vector_size(16)));
    store(codes, __builtin_convertvector(a, i8x16));
    store(codes + 16, __builtin_convertvector(b, i8x16));
    i32x16 both = a + b;
    int32_t t = 0;
    for (int i = 0; i < 16; i++) t += both[i];
    total = scale * (float)t;
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
        for (int g = 0; g < width / GROUP; g++)
            quantise_group(piece(2 * g), piece(2 * g + 1), rows.i8 + (size_t)r * width + g * GROUP,
                           rows.scale[rows.scale_at(r, g)], rows.total[rows.scale_at(r, g)]);
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
    const int codes = four ? BLOCK * GROUP / 2 : BLOCK * GROUP;
    for (int k = 0; k < w.ins; k++) {
        if (w.format == F32) {
            out[k] = ((const float*)data)[(size_t)k * BLOCK + lane];
        } else if (w.format == BF16) {
            out[k] = bf16_to_float(((const bf16*)data)[bf16_at(lane, k)]);
        } else {
            const uint8_t* group = data + (size_t)(k / GROUP) * (codes + 4 * BLOCK);
            const uint16_t* header = (const uint16_t*)(group + codes);
            const Place place = code_at(four, lane, k % GROUP);
            uint8_t code = group[place.byte];
            if (four) code = place.upper ? code >> 4 : code & 15;
            out[k] = fp16_to_float(header[lane]) * (float)code + fp16_to_float(header[BLOCK + lane]);
        }
    }
}

}  // namespace octavo
