// Packs row-major weights into tiles and units (weights.cuh), quantizing where the storage asks for it.
//
// A warp makes one unit: 16 rows x 64 k. Lane 4 g + t holds rows g and g + 8, of each k16 the columns 2t, 2t + 1,
// 2t + 8 and 2t + 9: its own fragments. A quad therefore holds whole rows, over which scales are found.
//
// STORAGE  of the result
// SOURCE   0: f32, 1: bf16
#include "weights.cuh"

constexpr int PACK_WARPS = 8;
constexpr int UNIT_BYTES = weight_unit_bytes<STORAGE>();

// Elements index and index + 1; index is even.
DEVICE float2 load_pair(const void* source, size_t index) {
    if (SOURCE == 0) return *(const float2*)((const float*)source + index);
    const u32 pair = *(const u32*)((const u16*)source + index);
    return make_float2(bf16_low(pair), bf16_high(pair));
}

// Maximum over the four lanes that hold a row.
DEVICE float quad_maximum(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
}

// x / scale, to nearest, within +-127; 0 where the scale is 0.
DEVICE u32 int8_code(float x, float scale) {
    if (scale == 0.0f) return 0;
    return (u32)(i32)fminf(fmaxf(rintf(__fdiv_rn(x, scale)), -127.0f), 127.0f) & 0xff;
}
// x / scale + 8.5, towards zero, within 0..15; 8, the code of zero, where the scale is 0.
DEVICE u32 int4_code(float x, float scale) {
    if (scale == 0.0f) return 8;
    return (u32)fminf(fmaxf(truncf(__fadd_rn(__fdiv_rn(x, scale), 8.5f)), 0.0f), 15.0f);
}

// source: num_rows x width row-major. Its tile i becomes tile first_tile + i tile_stride of `packed`; rows beyond
// num_rows are zero. Grid: (tiles of the source, units / 8 rounded up). Block: 256 threads.
extern "C" __global__ void __launch_bounds__(PACK_WARPS * 32)
    pack_weights(const void* source, u8* packed, i32 num_rows, i32 width, i32 first_tile, i32 tile_stride) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int units = width / WEIGHT_UNIT_K, unit = blockIdx.y * PACK_WARPS + (threadIdx.x >> 5);
    wait_previous_kernel();
    if (unit >= units) return;
    // values[h][j][i]: row g + 8 h, k16 j, columns 2t, 2t + 1, 2t + 8, 2t + 9.
    float values[2][4][4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = blockIdx.x * WEIGHT_TILE_ROWS + g + 8 * h;
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int k = unit * WEIGHT_UNIT_K + j * 16 + i * 8 + 2 * t;
                const float2 pair =
                    row < num_rows ? load_pair(source, (size_t)row * width + k) : make_float2(0.0f, 0.0f);
                values[h][j][2 * i] = pair.x, values[h][j][2 * i + 1] = pair.y;
            }
    }
    const size_t tile = (size_t)first_tile + (size_t)blockIdx.x * tile_stride;
    u8* const target = packed + (tile * units + unit) * UNIT_BYTES;
    if constexpr (STORAGE == WEIGHTS_BF16) {
#pragma unroll
        for (int j = 0; j < 4; j++)
            ((uint4*)target)[j * 32 + lane] = make_uint4(
                pack_bf16(values[0][j][0], values[0][j][1]), pack_bf16(values[1][j][0], values[1][j][1]),
                pack_bf16(values[0][j][2], values[0][j][3]), pack_bf16(values[1][j][2], values[1][j][3]));
    } else if constexpr (STORAGE == WEIGHTS_INT8) {
        float scales[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float largest = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) largest = fmaxf(largest, fabsf(values[h][j][i]));
            const u16 half = float_to_half(__fdiv_rn(quad_maximum(largest), 127.0f));
            if (t == 0) ((u16*)(target + 1024))[2 * g + h] = half;
            scales[h] = half_to_float(half);
        }
        u32 words[4][2];  // [k16][half of it]: bytes (row g, 2t), (row g + 8, 2t), (row g, 2t + 1), (row g + 8, 2t + 1)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                words[j][i] = 0;
#pragma unroll
                for (int byte = 0; byte < 4; byte++)
                    words[j][i] |= int8_code(values[byte & 1][j][2 * i + byte / 2], scales[byte & 1]) << (8 * byte);
            }
#pragma unroll
        for (int c = 0; c < 2; c++)
            ((uint4*)target)[c * 32 + lane] =
                make_uint4(words[2 * c][0], words[2 * c][1], words[2 * c + 1][0], words[2 * c + 1][1]);
    } else {
        float scales[2][2];
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float highest = values[h][2 * c][0], lowest = highest;
#pragma unroll
                for (int j = 2 * c; j < 2 * c + 2; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        highest = fmaxf(highest, values[h][j][i]);
                        lowest = fminf(lowest, values[h][j][i]);
                    }
                highest = quad_maximum(highest);
                lowest = -quad_maximum(-lowest);
                u16 half = float_to_half(__fdiv_rn(highest >= -lowest ? highest : lowest, -8.0f));
                if (half == 0x8000) half = 0;
                if (t == 0) ((u16*)(target + 512 + c * 32))[2 * g + h] = half;
                scales[c][h] = half_to_float(half);
            }
        u32 words[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            words[j] = 0;
            // Nibble 2 e + h of half-word p: row g + 8 h, half e of the k16, column 2t + p.
#pragma unroll
            for (int nibble = 0; nibble < 8; nibble++) {
                const int p = nibble >> 2, e = (nibble >> 1) & 1, h = nibble & 1;
                words[j] |= int4_code(values[h][j][2 * e + p], scales[j / 2][h]) << (4 * nibble);
            }
        }
        ((uint4*)target)[lane] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}
