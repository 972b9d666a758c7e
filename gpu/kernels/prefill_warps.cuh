// Prefill attention by warps, for every architecture: a CTA of WARPS warps takes a work item, 16 query rows a warp. All
// threads bring a block's K and V into shared memory; the next block's K arrives while P V runs, its V during the
// scores.
#pragma once
#include "prefill_work.cuh"

#if !HAS_WGMMA
#define THREADS (32 * WARPS)
#define PART_TOKENS (16 / GROUP_HEADS)

static_assert(WARPS == 2 || WARPS == 4, "2 or 4 warps");

// Dynamic shared memory: K tile | V tile | queries of each warp | folds. Queries: [head_dim / 64][16 rows][128 bytes],
// swizzled as tiles are.
struct SharedLayout {
    static constexpr int FOLD_THREADS = THREADS;
    static constexpr int VALUES = TILE_BYTES, QUERIES = 2 * TILE_BYTES, WARP_QUERY_BYTES = 16 * HEAD_DIM * 2;
    static constexpr int FOLD = QUERIES + WARPS * WARP_QUERY_BYTES;
    static constexpr int BYTES = FOLD + Folds<SharedLayout>::bytes(THREADS);
    DEVICE static u32 base() {
        extern __shared__ __align__(128) u8 dynamic_shared[];
        return shared_address(dynamic_shared);
    }
    DEVICE static u32 fold_thread() { return not_kept(threadIdx.x); }
};
static_assert(SharedLayout::BYTES <= SHARED_BYTES, "shared memory");
DEVICE u32 warp_queries() {
    return SharedLayout::base() + SharedLayout::QUERIES + not_kept(threadIdx.x) / 32 * SharedLayout::WARP_QUERY_BYTES;
}
DEVICE u32 query_unit(int row, int unit) {
    return (unit >> 3) * 16 * TILE_ROW_BYTES + row * TILE_ROW_BYTES + (((unit & 7) ^ (row & 7)) << 4);
}

// Starts bringing K (V) of a block of the CTA's item into a tile.
template <int FORMAT, bool IS_V>
DEVICE void bring(u32 tile, const PrefillArguments& arguments, int block) {
    const WorkItem item = work_item(arguments, not_kept(blockIdx.x));
    const u64* pages = arguments.page_table + (size_t)item.tile.slot * arguments.max_pages;
    bring_plane<FORMAT, IS_V, THREADS>(tile, pages, arguments.layer, item.kv_head, block, item.length());
    async_commit();
}

DEVICE void store_queries(u32 queries, const u32 (&fragment)[KEY_STEPS][4]) {
    const int t = threadIdx.x & 3, row = (threadIdx.x & 31) >> 2;
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            store_shared32(queries + query_unit(row + 8 * (i & 1), 2 * step + (i >> 1)) + 4 * t, fragment[step][i]);
    __syncwarp();
}
// Units differ in bits that an address of a tile's first row group leaves clear: those move by exclusive or.
DEVICE void multiply_keys(float (&s)[BLOCK_TILES][4], u32 queries, u32 keys) {
    const int lane = not_kept(threadIdx.x) & 31;
    const u32 query = queries + query_unit(lane & 15, lane >> 4), key = keys + tile_unit(lane & 7, lane >> 3);
#pragma unroll
    for (int n = 0; n < BLOCK_TILES; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
    for (int pair = 0; pair < KEY_STEPS / 2; pair++) {
        const int half = pair >> 1;
        const u32 query_pair = (query ^ ((4 * pair & 7) << 4)) + half * 16 * TILE_ROW_BYTES;
        u32 first[4], second[4];
        load_matrices(first, query_pair);
        load_matrices(second, query_pair ^ (2 << 4));
#pragma unroll
        for (int n = 0; n < BLOCK_TILES; n++) {
            u32 b[4];
            load_matrices(b, (key ^ ((4 * pair & 7) << 4)) + half * TILE_HALF_BYTES + n * 8 * TILE_ROW_BYTES);
            multiply_half(s[n], first[0], first[1], first[2], first[3], b[0], b[1]);
            multiply_half(s[n], second[0], second[1], second[2], second[3], b[2], b[3]);
        }
    }
}
DEVICE void multiply_values(float (&acc)[LANE_VALUES], const u32 (&p)[4][4], u32 values) {
    const int lane = not_kept(threadIdx.x) & 31, matrix = lane >> 3;
    const u32 value = values + tile_unit(8 * (matrix & 1) + (lane & 7), matrix >> 1);
#pragma unroll
    for (int step = 0; step < 4; step++) {
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n += 2) {
            u32 b[4];
            load_matrices_transposed(
                b, (value ^ ((n & 7) << 4)) + (n >> 3) * TILE_HALF_BYTES + step * 16 * TILE_ROW_BYTES);
            multiply_half(acc + 4 * n, p[step][0], p[step][1], p[step][2], p[step][3], b[0], b[1]);
            multiply_half(acc + 4 * n + 4, p[step][0], p[step][1], p[step][2], p[step][3], b[2], b[3]);
        }
    }
}

// The warp's first token in the tile; the lane's first row of the warp's 16.
DEVICE int warp_token() {
    return not_kept(threadIdx.x) / 32 * PART_TOKENS;
}
DEVICE int warp_row() {
    return (not_kept(threadIdx.x) & 31) >> 2;
}

DEVICE void attend_by_warps(const PrefillArguments& arguments) {
    using Fold = Folds<SharedLayout>;
    const u32 keys = SharedLayout::base(), values = keys + SharedLayout::VALUES;
    wait_previous_kernel();
    int num_blocks, own_blocks, first_length;  // first_length: cells that the warp's first token attends
    {
        const WorkItem item = work_item(arguments, blockIdx.x);
        if (item.tile.rows <= 0) return;
        const int first_token = warp_token(), own_tokens = min(item.tile.rows - first_token, PART_TOKENS);
        num_blocks = blocks_of(item.length());
        first_length = item.tile.first_position + first_token + 1;
        own_blocks = own_tokens > 0 ? blocks_of(first_length + own_tokens - 1) : 0;
        bring<K_PLANE, false>(keys, arguments, 0);
        bring<V_PLANE, true>(values, arguments, 0);
        LaneRows rows;
        rows.place<PART_TOKENS>(item, first_token, warp_row());
        u32 fragment[KEY_STEPS][4];
        load_queries(fragment, arguments, item, rows);
        store_queries(warp_queries(), fragment);
    }

    float total[LANE_VALUES], acc[LANE_VALUES], s[BLOCK_TILES][4], factor[2];
    u32 p[4][4];
    RowState part;
    part.clear();
    Fold::begin(total);
    clear(acc);
    for (int block = 0; block < num_blocks; block++) {
        const bool takes_part = block < own_blocks, is_last = block + 1 == own_blocks;
        async_wait<1>();
        __syncthreads();
        if (takes_part) multiply_keys(s, warp_queries(), keys);
        __syncthreads();
        if (block + 1 < num_blocks)
            bring<K_PLANE, false>(keys, arguments, block + 1);
        else
            async_commit();
        if (takes_part) {
            if ((block + 1) * BLOCK_CELLS > first_length) {
                const int row = warp_row(),
                          length[2] = {first_length + row / GROUP_HEADS, first_length + (row + 8) / GROUP_HEADS};
                mask_tiles<V_PLANE, BLOCK_TILES>(s, 0, block * BLOCK_CELLS, length);
            }
            if (softmax_block(s, part, factor, p)) {
#pragma unroll
                for (int i = 0; i < LANE_VALUES; i++) acc[i] *= factor[(i >> 1) & 1];
            }
        }
        async_wait<1>();
        __syncthreads();
        if (takes_part) multiply_values(acc, p, values);
        __syncthreads();
        if (block + 1 < num_blocks)
            bring<V_PLANE, true>(values, arguments, block + 1);
        else
            async_commit();
        if (takes_part && (is_last || ends_sub_split(block))) {
            FoldStep step[2];
            Fold::close_sub_split(part, step);
            fold_values(total, acc, step);
            clear(acc);
            if (is_last)
                Fold::finish(total);
            else if (block % GROUP_BLOCKS == GROUP_BLOCKS - 1)
                Fold::close_group(total);
        }
    }
    const WorkItem item = work_item(arguments, not_kept(blockIdx.x));
    LaneRows rows;
    rows.place<PART_TOKENS>(item, warp_token(), warp_row());
    store_results(total, arguments, item, rows);
}
#endif
