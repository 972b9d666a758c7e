// Rows of the packed embedding matrix to the f32 residual stream.
//
// HIDDEN: width, a multiple of 64. STORAGE: of the matrix (weights.cuh).
#include "weights.cuh"

static_assert(HIDDEN % WEIGHT_UNIT_K == 0, "HIDDEN is a multiple of 64");
static_assert(STORAGE >= 0 && STORAGE <= 2, "STORAGE is 0, 1 or 2");
constexpr int EMBED_THREADS = 256;
constexpr int UNIT_BYTES = weight_unit_bytes<STORAGE>();
constexpr int SCALES_AT = STORAGE == WEIGHTS_INT8 ? 1024 : 512;

// Elements k, k + 1 (k even) of a row of a tile of 16 rows.
DEVICE float2 load_pair(const u8* tile, int row_in_tile, int k) {
    const int row_pair = row_in_tile & 7, low_row = row_in_tile >> 3;
    const int k16 = k >> 4 & 3, half = k >> 3 & 1, lane = 4 * row_pair + (k >> 1 & 3);
    const u8* unit = tile + (size_t)(k / WEIGHT_UNIT_K) * UNIT_BYTES;
    if (STORAGE == WEIGHTS_BF16) {
        const u32 pair = *(const u32*)(unit + k16 * 512 + lane * 16 + (2 * half + low_row) * 4);
        return make_float2(bf16_low(pair), bf16_high(pair));
    }
    const int group = STORAGE == WEIGHTS_INT4 ? k16 >> 1 : 0;
    const u16 stored = *(const u16*)(unit + SCALES_AT + group * 32 + row_pair * 4 + low_row * 2);
    const float scale = half_to_float(stored);
    if (STORAGE == WEIGHTS_INT8) {
        const u32 word = *(const u32*)(unit + (k16 >> 1) * 512 + lane * 16 + (2 * (k16 & 1) + half) * 4) >> 8 * low_row;
        return make_float2(__fmul_rn((float)(signed char)(word & 0xff), scale),
                           __fmul_rn((float)(signed char)(word >> 16 & 0xff), scale));
    }
    const u32 word = *(const u32*)(unit + lane * 16 + k16 * 4) >> 4 * (low_row + 2 * half);
    return make_float2(__fmul_rn((float)(int)(word & 15) - 8.0f, scale),
                       __fmul_rn((float)(int)(word >> 16 & 15) - 8.0f, scale));
}

// residual[r] = row token_ids[r] of the matrix; id -1 stands for last_tokens[slots[r]]. A padding row (slot -1) becomes
// zeros. Grid: rows; a CTA does one.
extern "C" __global__ void __launch_bounds__(EMBED_THREADS)
    embed_tokens(const u8* matrix, const i32* token_ids, const i32* slots, const i32* last_tokens, float* residual) {
    allow_next_kernel();
    const int row = blockIdx.x, slot = slots[row];
    int token = token_ids[row];
    wait_previous_kernel();
    if (slot >= 0 && token < 0) token = last_tokens[slot];
    const u8* tile = matrix + (size_t)(token / WEIGHT_TILE_ROWS) * (HIDDEN / WEIGHT_UNIT_K) * UNIT_BYTES;
    for (int k = 2 * threadIdx.x; k < HIDDEN; k += 2 * EMBED_THREADS) {
        const float2 pair = slot < 0 ? make_float2(0.0f, 0.0f) : load_pair(tile, token % WEIGHT_TILE_ROWS, k);
        *(float2*)(residual + (size_t)row * HIDDEN + k) = pair;
    }
}
