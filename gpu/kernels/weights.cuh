// Packed weights: tiles of 16 rows x units of 64 k, in the order of mma.sync left fragments (docs/cuda-kernels.md).
//
//   WEIGHTS_BF16  2048 B  [4 k16][lane][8 bf16]
//   WEIGHTS_INT8  1056 B  [2 k32][lane][16 codes], then 16 fp16 scales, one a row: pairs (row g, row g + 8)
//   WEIGHTS_INT4   576 B  [lane][32 codes], then 2 x 16 fp16 scales, one per row and k32: pairs (row g, row g + 8)
//
// Codes become bf16 without rounding: 128 + n is a bf16 with n in its seven mantissa bits, and subtracting 128, 136 or
// 256 from it is exact.
#pragma once
#include "primitives.cuh"

enum WeightStorage { WEIGHTS_BF16 = 0, WEIGHTS_INT8 = 1, WEIGHTS_INT4 = 2 };
constexpr int WEIGHT_TILE_ROWS = 16, WEIGHT_UNIT_K = 64;

template <int KIND>
DEVICE constexpr int weight_unit_bytes() {
    return KIND == WEIGHTS_BF16 ? 2048 : KIND == WEIGHTS_INT8 ? 1056 : 576;
}
// Chunks of 32 k that share a scale; bf16 has none and runs on through its segment.
template <int KIND>
DEVICE constexpr int chunks_per_scale() {
    return KIND == WEIGHTS_INT4 ? 1 : 2;
}

// Units [segment_start(i, n), segment_start(i + 1, n)) of n are segment i of the 8 that a product sums one by one.
constexpr int SEGMENTS = 8;
DEVICE int segment_start(int segment, int units) { return segment * units / SEGMENTS; }

// Signed bytes 0 and 2 of a word as bf16: low seven bits, minus 128 where the sign is set.
DEVICE u32 signed_bytes_to_bf16(u32 word) {
    return subtract_bf16x2(and_or(word, 0x007f007fu, 0x43004300u), and_or(word, 0x00800080u, 0x43004300u));
}
// Low nibbles of both half-words as bf16, minus 8.
DEVICE u32 nibbles_to_bf16(u32 word) { return subtract_bf16x2(and_or(word, 0x000f000fu, 0x43004300u), 0x43084308u); }

// Left fragments of the two k16 of a 32-k chunk (0 or 1) of a unit in shared memory. Codes come unscaled.
template <int KIND>
DEVICE void load_fragments(u32 unit, int chunk, int lane, u32 (&a)[2][4]) {
    if constexpr (KIND == WEIGHTS_BF16) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const uint4 v = load_shared128(unit + (chunk * 2 + j) * 512 + lane * 16);
            a[j][0] = v.x, a[j][1] = v.y, a[j][2] = v.z, a[j][3] = v.w;
        }
    } else if constexpr (KIND == WEIGHTS_INT8) {
        const uint4 v = load_shared128(unit + chunk * 512 + lane * 16);
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            a[i >> 1][(i & 1) * 2] = signed_bytes_to_bf16(words[i]);
            a[i >> 1][(i & 1) * 2 + 1] = signed_bytes_to_bf16(words[i] >> 8);
        }
    } else {
        const uint2 v = load_shared64(unit + lane * 16 + chunk * 8);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            a[0][i] = nibbles_to_bf16(v.x >> (4 * i));
            a[1][i] = nibbles_to_bf16(v.y >> (4 * i));
        }
    }
}

// Scales of rows g (x) and g + 8 (y) for a chunk of a unit in shared memory.
template <int KIND>
DEVICE float2 load_scales(u32 unit, int chunk, int lane) {
    static_assert(KIND != WEIGHTS_BF16, "bf16 weights have no scales");
    const u32 offset = KIND == WEIGHTS_INT8 ? 1024 : 512 + chunk * 32;
    return unpack_half(load_shared32(unit + offset + (lane >> 2) * 4));
}
