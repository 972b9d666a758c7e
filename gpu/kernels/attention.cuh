// The arithmetic of attention, shared by every kernel that computes it (docs/cuda-kernels.md, section 2): a row's bits
// do not depend on which kernel, tile or batch it is in.
//
// Cells come in blocks of BLOCK_CELLS at absolute positions, sub-splits of 1, 2 or 4 blocks, groups of GROUP_BLOCKS
// blocks. A block's scores are 8 tiles of 8 columns; column c of a block is the cell `cell_of_column(c)`. In the
// fragments of m16n8k16 (and of a warpgroup product), lane 4 g + t holds of tile n the columns 8 n + 2 t and + 1 for
// the rows g and g + 8.
#pragma once
#include "plane_formats.cuh"

#define BLOCK_CELLS 64
#define BLOCK_TILES 8
#define GROUP_BLOCKS 64

// ---- sub-splits ------------------------------------------------------------
// Blocks 0-15 are one sub-split each, 16-63 two blocks each, from 64 on four.
DEVICE int sub_split_begin(int sub) {
    return sub < 16 ? sub : sub < 40 ? 16 + (sub - 16) * 2 : 64 + (sub - 40) * 4;
}
DEVICE int sub_split_of(int block) {
    return block < 16 ? block : block < 64 ? 16 + (block - 16) / 2 : 40 + (block - 64) / 4;
}
// First sub-split of a group of blocks; the group of a sub-split.
DEVICE int group_begin(int group) {
    return group == 0 ? 0 : 40 + (group - 1) * (GROUP_BLOCKS / 4);
}
DEVICE int group_of(int sub) {
    return sub < 40 ? 0 : 1 + (sub - 40) / (GROUP_BLOCKS / 4);
}
// Blocks, and sub-splits, that hold `length` > 0 cells.
DEVICE int blocks_of(int length) {
    return (length + BLOCK_CELLS - 1) / BLOCK_CELLS;
}
DEVICE int sub_splits_of(int length) {
    return sub_split_of(blocks_of(length) - 1) + 1;
}

// The decode kernel's division of a tile's blocks into `chunks` CTAs: a chunk has the sub-splits that begin within
// [blocks c / chunks, blocks (c + 1) / chunks). First sub-split of a chunk; of the chunk after the last, all of them.
DEVICE int chunk_begin(int chunk, int chunks, int blocks) {
    const int block = (int)((i64)chunk * blocks / chunks);
    return block == 0 ? 0 : sub_split_of(block - 1) + 1;
}
// The chunk that has the sub-split beginning at `block`.
DEVICE int chunk_of(int block, int chunks, int blocks) {
    return (int)(((i64)(block + 1) * chunks + blocks - 1) / blocks) - 1;
}

// ---- order of cells and of dimensions ------------------------------------------------------------
// Column to cell of a block, by the format of V. Quantized V: tile n has, for lane t, the cells 16 t + 2 n and + 1, so
// that one lane reads V of 16 neighbours only. f16: as they are.
template <int V_FORMAT>
constexpr DEVICE int cell_of_column(int column) {
    return V_FORMAT == PLANE_F16 ? column : ((column & 7) >> 1) * 16 + (column >> 3) * 2 + (column & 1);
}
template <int V_FORMAT>
constexpr DEVICE int column_of_cell(int cell) {
    return V_FORMAT == PLANE_F16 ? cell : ((cell & 15) >> 1) * 8 + (cell >> 4) * 2 + (cell & 1);
}

// Which dimensions a k16 step of the scores multiplies, by the format of K: element i of lane t, where i = 0, 1 are the
// fragment registers a0, a1 and b0 (k 2t, 2t + 1) and i = 2, 3 are a2, a3 and b1 (k 2t + 8, 2t + 9). The order of the
// 16 inside a step does not matter to the bits, the set does. Quantized K: a lane reads neighbouring codes.
//   int8  64 (step / 4) + 16 t + 4 (step % 4) + {0, 2, 1, 3}
//   q4    HEAD_DIM / 4 t + 8 (step / 2) + 2 (step % 2) + {0, 4, 1, 5}
template <int K_FORMAT, int HEAD_DIM_>
constexpr DEVICE int key_dimension(int step, int t, int i) {
    return K_FORMAT == PLANE_F16    ? 16 * step + 2 * t + (i & 1) + 8 * (i >> 1)
           : K_FORMAT == PLANE_INT8 ? 64 * (step >> 2) + 16 * t + 4 * (step & 3) + 2 * (i & 1) + (i >> 1)
                                    : HEAD_DIM_ / 4 * t + 8 * (step >> 1) + 2 * (step & 1) + 4 * (i & 1) + (i >> 1);
}

// ---- codes to f16 ---------------------------------------------------------------------------------------------------
// Two codes to a pair of f16, exact; times the pair's scales it is rounded once.
//   int8_pair  the bytes 0 and 2 of `codes` (shift by 8 for 1 and 3)
//   q4_pair    the nibbles 0 and 4 of `codes` (shift by 4 j for j and j + 4), minus 8
DEVICE u32 int8_pair(u32 codes) {
    return subtract_half2(and_xor(codes, 0x00ff00ffu, 0x64806480u), 0x64806480u);
}
DEVICE u32 q4_pair(u32 codes) {
    return subtract_half2(and_or(codes, 0x000f000fu, 0x64006400u), 0x64086408u);
}
// The nibbles 1 and 5: (1024 + 16 code) / 16 - 72, without a shift.
DEVICE u32 q4_next_pair(u32 codes) {
    return fma_half2(and_or(codes, 0x00f000f0u, 0x64006400u), 0x2c002c00u, 0xd480d480u);
}
DEVICE u32 same_pair(u32 half) {
    return permute_bytes(half, half, 0x1010);
}
DEVICE u32 join_halves(u32 low, u32 high) {
    return permute_bytes(low, high, 0x5410);
}

// ---- softmax over blocks ------------------------------------------------------------
// Largest value of a row, over the four lanes that share it.
DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
}
DEVICE float quad_sum(float x) {
    x = __fadd_rn(x, __shfl_xor_sync(FULL_WARP, x, 1));
    return __fadd_rn(x, __shfl_xor_sync(FULL_WARP, x, 2));
}
// What the sums so far are multiplied by when the maximum grows. Exactly 1 while it stays: skipping changes no bit.
DEVICE float rescale_factor(float old_max, float new_max) {
    return new_max == old_max ? 1.0f : exp2_fast(old_max - new_max);
}
// What is subtracted in the exponent: 0 while a row has no cell, so that -inf - -inf never occurs.
DEVICE float exponent_base(float maximum) {
    return maximum == NEGATIVE_INFINITY ? 0.0f : maximum;
}

// Two neighbouring tiles (16 columns) of a lane, scores s[tile][4] to P in place. sums: of the rows g and g + 8.
DEVICE void exponentiate_tiles(float (*s)[4], float base_top, float base_low, float (&sums)[2]) {
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
        s[tile][0] = exp2_fast(s[tile][0] - base_top);
        s[tile][1] = exp2_fast(s[tile][1] - base_top);
        s[tile][2] = exp2_fast(s[tile][2] - base_low);
        s[tile][3] = exp2_fast(s[tile][3] - base_low);
    }
    sums[0] = __fadd_rn(__fadd_rn(s[0][0], s[0][1]), __fadd_rn(s[1][0], s[1][1]));
    sums[1] = __fadd_rn(__fadd_rn(s[0][2], s[0][3]), __fadd_rn(s[1][2], s[1][3]));
}
// The same two tiles as the left fragment of a k16 step of P V.
DEVICE void pack_tiles(const float (*s)[4], u32 (&p)[4]) {
    p[0] = pack_half(s[0][0], s[0][1]);
    p[1] = pack_half(s[0][2], s[0][3]);
    p[2] = pack_half(s[1][0], s[1][1]);
    p[3] = pack_half(s[1][2], s[1][3]);
}
// A lane's part of a row sum after a block: quarters in this order.
DEVICE float grow_sum(float sum, float factor, float quarter0, float quarter1, float quarter2, float quarter3) {
    return fmaf(sum, factor, __fadd_rn(__fadd_rn(quarter0, quarter1), __fadd_rn(quarter2, quarter3)));
}

// State of the rows g and g + 8 of a lane within a sub-split; sums are the lane's part.
struct RowState {
    float maximum[2], sum[2];
    DEVICE void clear() {
        maximum[0] = maximum[1] = NEGATIVE_INFINITY;
        sum[0] = sum[1] = 0.0f;
    }
};

// Scores beyond a row's length to -inf. first_cell: of the block. length: of the rows g and g + 8.
// TILES tiles from FIRST_TILE on.
template <int V_FORMAT, int TILES>
DEVICE void mask_tiles(float (*s)[4], int first_tile, int first_cell, const int (&length)[2]) {
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        const int cell = first_cell + cell_of_column<V_FORMAT>(8 * (first_tile + i) + 2 * t);
        if (cell >= length[0]) s[i][0] = NEGATIVE_INFINITY;
        if (cell + 1 >= length[0]) s[i][1] = NEGATIVE_INFINITY;
        if (cell >= length[1]) s[i][2] = NEGATIVE_INFINITY;
        if (cell + 1 >= length[1]) s[i][3] = NEGATIVE_INFINITY;
    }
}

// Largest score of a lane in its first (PLACE 0) or second row (PLACE 2). A tree: no long chain of dependent steps.
template <int PLACE>
DEVICE float row_max(const float (&s)[BLOCK_TILES][4]) {
    float largest[BLOCK_TILES];
#pragma unroll
    for (int i = 0; i < BLOCK_TILES; i++) largest[i] = fmaxf(s[i][PLACE], s[i][PLACE + 1]);
#pragma unroll
    for (int half = BLOCK_TILES / 2; half > 0; half /= 2)
#pragma unroll
        for (int i = 0; i < half; i++) largest[i] = fmaxf(largest[i], largest[i + half]);
    return largest[0];
}

// A block's softmax step by one warp that holds all 8 tiles: scores to exponentials in place.
// factor: what the accumulators of the rows g and g + 8 are multiplied by. Returns whether any factor of the warp is
// not 1.
DEVICE bool exponentiate_block(float (&s)[BLOCK_TILES][4], RowState& rows, float (&factor)[2]) {
    const float top = row_max<0>(s), low = row_max<2>(s);
    const float maximum[2] = {fmaxf(rows.maximum[0], quad_max(top)), fmaxf(rows.maximum[1], quad_max(low))};
    const bool changed = maximum[0] != rows.maximum[0] || maximum[1] != rows.maximum[1];
    const bool any_changed = __any_sync(FULL_WARP, changed);
    float quarters[4][2];
#pragma unroll
    for (int i = 0; i < 4; i++)
        exponentiate_tiles(s + 2 * i, exponent_base(maximum[0]), exponent_base(maximum[1]), quarters[i]);
#pragma unroll
    for (int row = 0; row < 2; row++) {
        factor[row] = rescale_factor(rows.maximum[row], maximum[row]);
        rows.maximum[row] = maximum[row];
        rows.sum[row] = grow_sum(rows.sum[row], factor[row], quarters[0][row], quarters[1][row], quarters[2][row],
                                 quarters[3][row]);
    }
    return any_changed;
}
// The same, with the exponentials as the left fragments p of P V.
DEVICE bool softmax_block(float (&s)[BLOCK_TILES][4], RowState& rows, float (&factor)[2], u32 (&p)[4][4]) {
    const bool any_changed = exponentiate_block(s, rows, factor);
#pragma unroll
    for (int i = 0; i < 4; i++) pack_tiles(s + 2 * i, p[i]);
    return any_changed;
}

// ---- fold ------------------------------------------------------------
// One step of a left fold, of sub-splits within a group and of groups: total = total * keep + part * take.
struct FoldStep {
    float keep, take;
};
// maximum: of the total, which grows. A part without cells (maximum -inf, sum 0, values 0) changes nothing.
DEVICE FoldStep fold_step(float& maximum, float part_maximum) {
    const float grown = fmaxf(maximum, part_maximum);
    FoldStep step;
    step.keep = part_maximum == NEGATIVE_INFINITY ? 1.0f
                : maximum == NEGATIVE_INFINITY    ? 0.0f
                                                  : exp2_fast(maximum - grown);
    step.take = part_maximum == NEGATIVE_INFINITY ? 0.0f : exp2_fast(part_maximum - grown);
    maximum = grown;
    return step;
}
DEVICE float fold_value(float total, float part, FoldStep step) {
    return fmaf(part, step.take, __fmul_rn(total, step.keep));
}

// ---- tables ------------------------------------------------------------
// A row of the `tiles` table: rows of one sequence that attention takes together. rows 0: padding.
// Row r is at position first_position + r, is row first_row + r of the step and attends the cells 0 .. its position.
struct AttentionTile {
    i32 slot, first_row, rows, first_position;
};

// Row of the decode kernel's scratch for row r of tile `index`: that of the step, or tile_stride rows for each tile.
DEVICE int scratch_row(AttentionTile tile, int index, int r, int tile_stride) {
    return (tile_stride ? index * tile_stride : tile.first_row) + r;
}
