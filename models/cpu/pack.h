// Packing: weight rows as a checkpoint stores them, into the blocks of linear.h.
//
// GGUF kinds whose weights are scale * code + minimum over 32 inputs keep their codes exactly; Q6_K (groups of 16) is
// requantised to eight bits a group. Block layouts: github.com/ggml-org/ggml, ggml-common.h.
#pragma once
#include <algorithm>
#include <vector>
#include "linear.h"

namespace octavo {

// Kinds a row can be stored in. The numbers of GGUF kinds are ggml's own type numbers.
enum Kind : int32_t { KIND_F32 = 0, KIND_F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, KIND_BF16 = 30 };

struct Grouped {
    uint8_t codes[GROUP];
    float scale, minimum;
};

// Least-squares-free min/max quantisation of 32 floats to `levels` unsigned codes.
inline void quantise_weights(const float* x, int levels, Grouped& g) {
    float low = x[0], high = x[0];
    for (int i = 1; i < GROUP; i++) low = x[i] < low ? x[i] : low, high = x[i] > high ? x[i] : high;
    // Scale and minimum are stored as fp16: round them first, so that the codes fit what will be read.
    g.scale = fp16_to_float(float_to_fp16((high - low) / (float)(levels - 1)));
    g.minimum = fp16_to_float(float_to_fp16(low));
    for (int i = 0; i < GROUP; i++) {
        float code = g.scale > 0 ? std::nearbyint((x[i] - g.minimum) / g.scale) : 0;
        g.codes[i] = (uint8_t)(code < 0 ? 0 : code > levels - 1 ? levels - 1 : code);
    }
}

INLINE uint16_t half_at(const uint8_t* p) {
    uint16_t h;
    std::memcpy(&h, p, 2);
    return h;
}

// Six-bit scale and minimum number j of a Q4_K or Q5_K superblock.
INLINE void k_scale(const uint8_t* s, int j, int& scale, int& minimum) {
    if (j < 4) scale = s[j] & 63, minimum = s[j + 4] & 63;
    else scale = (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4), minimum = (s[j + 4] >> 4) | ((s[j] >> 6) << 4);
}

// Group g of a stored row to codes, scale and minimum. `levels` is 16 or 256, for kinds that must be requantised.
inline void read_group(int kind, const uint8_t* row, int g, int levels, Grouped& out) {
    float plain[GROUP];
    switch (kind) {
        case Q4_0: case Q4_1: {
            const uint8_t* b = row + (size_t)g * (kind == Q4_0 ? 18 : 20);
            out.scale = fp16_to_float(half_at(b));
            out.minimum = kind == Q4_0 ? -8 * out.scale : fp16_to_float(half_at(b + 2));
            const uint8_t* q = b + (kind == Q4_0 ? 2 : 4);
            for (int i = 0; i < 16; i++) out.codes[i] = q[i] & 15, out.codes[16 + i] = q[i] >> 4;
            return;
        }
        case Q5_0: case Q5_1: {
            const uint8_t* b = row + (size_t)g * (kind == Q5_0 ? 22 : 24);
            out.scale = fp16_to_float(half_at(b));
            out.minimum = kind == Q5_0 ? -16 * out.scale : fp16_to_float(half_at(b + 2));
            b += kind == Q5_0 ? 2 : 4;
            uint32_t high;
            std::memcpy(&high, b, 4);
            for (int i = 0; i < 16; i++) {
                out.codes[i] = (uint8_t)((b[4 + i] & 15) | ((high >> i & 1) << 4));
                out.codes[16 + i] = (uint8_t)((b[4 + i] >> 4) | ((high >> (16 + i) & 1) << 4));
            }
            return;
        }
        case Q8_0: {
            const uint8_t* b = row + (size_t)g * 34;
            out.scale = fp16_to_float(half_at(b));
            out.minimum = -128 * out.scale;
            for (int i = 0; i < GROUP; i++) out.codes[i] = (uint8_t)(b[2 + i] + 128);
            return;
        }
        case Q4_K: case Q5_K: {
            const uint8_t* b = row + (size_t)(g / 8) * (kind == Q4_K ? 144 : 176);
            const int j = g % 8;
            int scale, minimum;
            k_scale(b + 4, j, scale, minimum);
            out.scale = fp16_to_float(half_at(b)) * (float)scale;
            out.minimum = -fp16_to_float(half_at(b + 2)) * (float)minimum;
            const uint8_t* q = b + (kind == Q4_K ? 16 : 48) + 32 * (j / 2);
            for (int i = 0; i < GROUP; i++) {
                out.codes[i] = j % 2 ? q[i] >> 4 : q[i] & 15;
                if (kind == Q5_K) out.codes[i] |= (uint8_t)((b[16 + i] >> j & 1) << 4);
            }
            return;
        }
        case Q6_K: {
            const uint8_t* b = row + (size_t)(g / 8) * 210;
            const float d = fp16_to_float(half_at(b + 208));
            const int half = (g % 8) / 4, part = g % 4;  // 128 weights a half, 32 a part
            const uint8_t* low = b + 64 * half + 32 * (part % 2);
            const uint8_t* high = b + 128 + 32 * half;
            const int8_t* scales = (const int8_t*)(b + 192) + 8 * half + 2 * part;
            for (int i = 0; i < GROUP; i++) {
                int code = (part < 2 ? low[i] & 15 : low[i] >> 4) | ((high[i] >> (2 * part) & 3) << 4);
                plain[i] = d * (float)scales[i / 16] * (float)(code - 32);
            }
            return quantise_weights(plain, levels, out);
        }
        case KIND_F32: std::memcpy(plain, row + (size_t)g * GROUP * 4, sizeof plain); break;
        case KIND_F16: for (int i = 0; i < GROUP; i++) plain[i] = fp16_to_float(half_at(row + ((size_t)g * GROUP + i) * 2)); break;
        default: for (int i = 0; i < GROUP; i++) plain[i] = bf16_to_float(half_at(row + ((size_t)g * GROUP + i) * 2));
    }
    quantise_weights(plain, levels, out);
}

// Input k of a stored row as a float, for the unquantised formats.
INLINE float read_float(int kind, const uint8_t* row, int k) {
    if (kind == KIND_F32) {
        float f;
        std::memcpy(&f, row + (size_t)k * 4, 4);
        return f;
    }
    uint16_t h = half_at(row + (size_t)k * 2);
    return kind == KIND_F16 ? fp16_to_float(h) : bf16_to_float(h);
}

// One block of packed weights. rows[lane] is a stored row, or null past the end of the matrix. Quantised kinds go only
// into W4 and W8; float kinds go anywhere.
inline void pack_block(int kind, const uint8_t* const rows[BLOCK], int format, int ins, uint8_t* out) {
    std::memset(out, 0, block_bytes(format, ins));
    for (int lane = 0; lane < BLOCK; lane++) {
        const uint8_t* row = rows[lane];
        if (!row) continue;
        if (format == F32) {
            for (int k = 0; k < ins; k++) ((float*)out)[(size_t)k * BLOCK + lane] = read_float(kind, row, k);
        } else if (format == BF16) {
            for (int k = 0; k < ins; k++)
                ((bf16*)out)[bf16_at(lane, k)] = kind == KIND_BF16 ? half_at(row + (size_t)k * 2) : float_to_bf16(read_float(kind, row, k));
        } else {
            float largest = 0;
            std::vector<Grouped> groups(ins / GROUP);
            for (int g = 0; g < ins / GROUP; g++) {
                read_group(kind, row, g, format == W4 ? 16 : 256, groups[g]);
                largest = std::max(largest, std::fabs(groups[g].minimum));
            }
            const float unit = largest / 32767.0f;
            ((float*)(out + block_bytes(format, ins)))[lane - BLOCK] = unit;
            for (int g = 0; g < ins / GROUP; g++) {
                const Grouped& w = groups[g];
                for (int i = 0; i < GROUP; i++) {
                    const Place place = code_at(format == W4, lane, i);
                    out[(size_t)g * group_bytes(format) + place.byte] |= (uint8_t)(place.upper ? w.codes[i] << 4 : w.codes[i]);
                }
                const uint16_t scale = float_to_fp16(w.scale), exact = float_to_fp16(w.minimum);
                const int16_t nearest = largest > 0 ? (int16_t)std::nearbyint(w.minimum / unit) : 0;
                std::memcpy(out + scales_at(format, g) + 2 * lane, &scale, 2);
                std::memcpy(out + minimum_at(format, g, lane), amx::available() ? (const void*)&exact : &nearest, 2);
            }
        }
    }
}

}  // namespace octavo
