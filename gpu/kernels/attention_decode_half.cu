// Attention of decode and verify rows over f16 planes (attention_decode.cuh says what it leaves). A CTA is four warps;
// the 16 rows of its products are the queries of the tile.
//
// All 4 warps work on the same block of 64 cells. Warp w computes the scores of columns 16 w .. (2 tiles) and their
// exponentials; maxima and P go through shared memory; then it adds P V for the quarter w of the dimensions. So a warp
// keeps a quarter of the accumulators, and a block takes a quarter of one warp's time: f16 blocks are large, few fit
// into shared memory, and one warp for each would not keep up with the memory.
//
// Blocks arrive in a ring of STAGES, each K [cell][dimension] | V [cell][dimension], the 16-byte unit u of a cell at
// u ^ (cell % 8). All threads copy 16 bytes at a time. Cells beyond the tile's length arrive as zeros and are not read.
#include "attention_decode.cuh"

#define WARPS 4
#define THREADS (32 * WARPS)
static_assert(K_PLANE == PLANE_F16 && V_PLANE == PLANE_F16, "f16 planes");
static_assert(STAGES >= 1 && STAGES <= 4, "1 to 4 blocks");

constexpr int WARP_TILES = HEAD_DIM / 8 / WARPS;  // 8-dimension tiles of a warp's accumulators
// Codes of one plane. ROW: bytes per cell. OFFSET: in the layer.
template <int OFFSET_>
struct StagePart {
    static constexpr int ROW = HEAD_DIM * 2, BYTES = BLOCK_CELLS * ROW, OFFSET = OFFSET_;
};
typedef StagePart<Offsets::K_CODES> Keys;
typedef StagePart<Offsets::V_CODES> Values;
constexpr int VALUES = Keys::BYTES, STAGE_BYTES = VALUES + Values::BYTES;
// After the ring: P [warp][lane] 16 bytes, sums of quarters [warp][lane] 8 bytes, maxima [query][warp] f32, of each
// query the number of its cells and where its results go.
constexpr int FRAGMENTS = STAGES * STAGE_BYTES;
constexpr int QUARTERS = FRAGMENTS + WARPS * 32 * 16;
constexpr int MAXIMA = QUARTERS + WARPS * 32 * 8;
constexpr int ROWS = MAXIMA + 16 * WARPS * 4;
static_assert(ROWS + 16 * 8 <= SHARED_BYTES, "the launch gives SHARED_BYTES of shared memory");

DEVICE u32 swizzled_unit(int cell, int unit) {
    return (u32)((unit & ~7) | ((unit ^ cell) & 7)) * 16;
}

// ---- loading ------------------------------------------------------------
// Copies blocks in order, each into the next stage. page: of the next block, read one block ahead; where blocks have
// several pages, that of the piece `lane % 4`.
struct BlockLoader {
    u64 page;
    u32 ring, stage;
    int block;

    DEVICE void start(const Chunk& chunk, u32 ring_) {
        ring = ring_, stage = 0, block = chunk.first_block;
        page = chunk.page_of(block, threadIdx.x & 3);
    }
    // The next block, if there is one. Complete after async_wait and a barrier of the CTA.
    DEVICE void issue(const Chunk& chunk) {
        if (block < chunk.end_block) {
            const u32 base = ring + stage * STAGE_BYTES;
            copy_part<Keys>(chunk, base);
            copy_part<Values>(chunk, base + VALUES);
            block++;
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            page = chunk.page_of(block, threadIdx.x & 3);
        }
        async_commit();
    }
    template <typename Part>
    DEVICE void copy_part(const Chunk& chunk, u32 target) const {
        constexpr int UNITS = Part::ROW / 16, ROUNDS = BLOCK_CELLS * UNITS / THREADS;
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
            const int index = round * THREADS + threadIdx.x, cell = index / UNITS, unit = index % UNITS;
            const u64 from_page = WHOLE_BLOCKS ? page : __shfl_sync(FULL_WARP, page, cell / PIECE);
            const bool exists = block * BLOCK_CELLS + cell < chunk.length;
            const u64 from = chunk.source<Part>(from_page, block * BLOCK_CELLS + cell) + unit * 16;
            async_copy16(target + cell * Part::ROW + swizzled_unit(cell, unit),
                         (const void*)(exists ? from : (u64)chunk.pages & ~15ull), exists ? 16 : 0);
        }
    }
};

// ---- products ------------------------------------------------------------
// Left fragments of all k16 steps: q[step][a0 .. a3]. row: HEAD_DIM f16, or null for a row of zeros. half: 0 for the
// queries g (a0, a2), 1 for g + 8 (a1, a3).
DEVICE void load_query(u32 (&q)[STEPS][4], const u16* row, int half) {
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const u32* words = (const u32*)row + 8 * step + (threadIdx.x & 3);
        q[step][half] = row ? words[0] : 0;
        q[step][half + 2] = row ? words[4] : 0;
    }
}

// Two neighbouring tiles of scores from `first_tile` on, for a block in shared memory.
DEVICE void multiply_keys(float (&s)[2][4], const u32 (&q)[STEPS][4], u32 stage_base, int first_tile) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int pair = 0; pair < STEPS / 2; pair++) {
        const u32* first = q[2 * pair];
        const u32* second = q[2 * pair + 1];
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            const int cell = cell_of_column<V_PLANE>(8 * (first_tile + tile) + (lane & 7));
            u32 b[4];
            load_matrices(b, stage_base + cell * Keys::ROW + swizzled_unit(cell, 4 * pair + (lane >> 3)));
            multiply_half(s[tile], first[0], first[1], first[2], first[3], b[0], b[1]);
            multiply_half(s[tile], second[0], second[1], second[2], second[3], b[2], b[3]);
        }
    }
}

// Adds a block's P V for the warp's quarter of the dimensions. fragments: P of all columns.
typedef float Results[WARP_TILES][4];
DEVICE void multiply_values(Results& c, u32 stage_base, u32 fragments, int warp) {
    const int lane = threadIdx.x & 31, matrix = lane >> 3;
#pragma unroll
    for (int step = 0; step < PIECES; step++) {
        const uint4 p = load_shared128(fragments + (step * 32 + lane) * 16);
        const int cell = step * 16 + (matrix & 1) * 8 + (lane & 7);
#pragma unroll
        for (int tile = 0; tile < WARP_TILES; tile += 2) {
            u32 b[4];
            const u32 unit = swizzled_unit(cell, warp * WARP_TILES + tile + (matrix >> 1));
            load_matrices_transposed(b, stage_base + VALUES + cell * Values::ROW + unit);
            multiply_half(c[tile], p.x, p.y, p.z, p.w, b[0], b[1]);
            multiply_half(c[tile + 1], p.x, p.y, p.z, p.w, b[2], b[3]);
        }
    }
}
// A query's values of the warp's quarter: tile n has the dimensions 8 n .., a lane's are pairs. row: HEAD_DIM f32.
// half: 0 for the queries g, 1 for g + 8.
DEVICE void store_results(float* row, const Results& c, int half, int warp) {
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int tile = 0; tile < WARP_TILES; tile++)
        *(float2*)(row + 8 * (warp * WARP_TILES + tile) + 2 * t) = make_float2(c[tile][2 * half], c[tile][2 * half + 1]);
}

// ---- the kernel ------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    attention_decode_half(const u16* queries, const u64* page_table, const AttentionTile* tiles, float* partials,
                          float2* statistics, i32 layer, i32 max_pages, i32 max_splits, i32 tile_stride,
                          i32 unsettled) {
    extern __shared__ __align__(128) u8 shared[];
    allow_next_kernel();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2;
    const AttentionTile tile = tiles[blockIdx.z];
    const Chunk chunk(tile, page_table, layer, max_pages, unsettled);
    if (chunk.first_sub >= chunk.end_sub) {
        wait_previous_kernel();
        return;
    }
    const u32 ring = shared_address(shared);
    BlockLoader loader;
    loader.start(chunk, ring);

    // The first blocks.
    if (threadIdx.x < 16) {
        // Rows that are not there never mask, and their results go nowhere (-1).
        const Query query(threadIdx.x);
        const int place = scratch_row(tile, blockIdx.z, query.row, tile_stride) * NUM_HEADS + query.head;
        const bool exists = query.row < tile.rows;
        store_shared32(ring + ROWS + threadIdx.x * 8, exists ? tile.first_position + query.row + 1 : chunk.length);
        store_shared32(ring + ROWS + threadIdx.x * 8 + 4, exists ? place * max_splits : -1);
    }
    __syncthreads();
    int waiting = STAGES - 1;
    for (; waiting > 0 && loader.block < min(chunk.settled, chunk.end_block); waiting--) loader.issue(chunk);
    wait_previous_kernel();
    for (; waiting > 0; waiting--) loader.issue(chunk);

    u32 q[STEPS][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const Query query(g + 8 * half);
        const size_t place = (size_t)(tile.first_row + query.row) * NUM_HEADS + query.head;
        load_query(q, query.row < tile.rows ? queries + place * HEAD_DIM : nullptr, half);
    }
    if (STAGES > 1) {
        async_wait<(STAGES > 1 ? STAGES - 2 : 0)>();
        __syncthreads();
    }

    const u32 fragments = ring + FRAGMENTS, quarters = ring + QUARTERS, maxima = ring + MAXIMA;
    const u32 table = ring + ROWS + g * 8;  // of query g; of query g + 8 64 bytes further
    Results total;
    float total_maximum[2], total_sum[2];
    FoldRun run;
    int block = chunk.first_block, stage = 0;
    for (int sub = chunk.first_sub; sub < chunk.end_sub; sub++) {
        RowState rows;
        rows.clear();
        Results c;
#pragma unroll
        for (int i = 0; i < WARP_TILES; i++) c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0.0f;
        const int sub_end = min(sub_split_begin(sub + 1), chunk.blocks);
        for (; block < sub_end; block++) {
            const u32 stage_base = ring + stage * STAGE_BYTES;
            const int first_cell = block * BLOCK_CELLS;
            if (STAGES == 1) {
                __syncthreads();
                loader.issue(chunk);
                async_wait<0>();
                __syncthreads();
            }

            float s[2][4] = {};
            multiply_keys(s, q, stage_base, 2 * warp);
            if (first_cell + BLOCK_CELLS > tile.first_position + 1) {
                const int lengths[2] = {(int)load_shared32(table), (int)load_shared32(table + 8 * 8)};
                mask_tiles<V_PLANE, 2>(s, 2 * warp, first_cell, lengths);
            }
            const float top = quad_max(fmaxf(fmaxf(s[0][0], s[0][1]), fmaxf(s[1][0], s[1][1])));
            const float low = quad_max(fmaxf(fmaxf(s[0][2], s[0][3]), fmaxf(s[1][2], s[1][3])));
            if ((lane & 3) == 0) {
                store_shared_float(maxima + (g * WARPS + warp) * 4, top);
                store_shared_float(maxima + ((g + 8) * WARPS + warp) * 4, low);
            }
            __syncthreads();

            // Everybody has left the block before: its stage takes the next one.
            if (STAGES > 1) loader.issue(chunk);
            float factor[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float4 of_warps = load_shared_float4(maxima + (g + 8 * half) * WARPS * 4);
                const float maximum =
                    fmaxf(rows.maximum[half], fmaxf(fmaxf(of_warps.x, of_warps.y), fmaxf(of_warps.z, of_warps.w)));
                factor[half] = rescale_factor(rows.maximum[half], maximum);
                rows.maximum[half] = maximum;
            }
            float sums[2];
            u32 p[4];
            exponentiate_tiles(s, exponent_base(rows.maximum[0]), exponent_base(rows.maximum[1]), sums);
            pack_tiles(s, p);
            store_shared128(fragments + (warp * 32 + lane) * 16, make_uint4(p[0], p[1], p[2], p[3]));
            store_shared_float2(quarters + (warp * 32 + lane) * 8, sums[0], sums[1]);
            if (STAGES > 1) async_wait<(STAGES > 1 ? STAGES - 2 : 0)>();
            __syncthreads();

            if (__any_sync(FULL_WARP, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
                for (int i = 0; i < WARP_TILES; i++) {
                    c[i][0] *= factor[0], c[i][1] *= factor[0];
                    c[i][2] *= factor[1], c[i][3] *= factor[1];
                }
            }
            multiply_values(c, stage_base, fragments, warp);
            if (warp == 0) {
                float2 quarter[WARPS];
#pragma unroll
                for (int i = 0; i < WARPS; i++) quarter[i] = load_shared_float2(quarters + (i * 32 + lane) * 8);
                rows.sum[0] = grow_sum(rows.sum[0], factor[0], quarter[0].x, quarter[1].x, quarter[2].x, quarter[3].x);
                rows.sum[1] = grow_sum(rows.sum[1], factor[1], quarter[0].y, quarter[1].y, quarter[2].y, quarter[3].y);
            }
            if (++stage == STAGES) stage = 0;
        }

        run.enter(sub, chunk.end_sub);
        if (run.begins) {
#pragma unroll
            for (int i = 0; i < WARP_TILES; i++) total[i][0] = total[i][1] = total[i][2] = total[i][3] = 0.0f;
            total_maximum[0] = total_maximum[1] = NEGATIVE_INFINITY;
            total_sum[0] = total_sum[1] = 0.0f;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const FoldStep step = fold_step(total_maximum[half], rows.maximum[half]);
            if (warp == 0) total_sum[half] = fold_value(total_sum[half], quad_sum(rows.sum[half]), step);
#pragma unroll
            for (int i = 0; i < WARP_TILES; i++) {
                total[i][2 * half] = fold_value(total[i][2 * half], c[i][2 * half], step);
                total[i][2 * half + 1] = fold_value(total[i][2 * half + 1], c[i][2 * half + 1], step);
            }
        }
        if (run.continues) continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int first_entry = load_shared32(table + 8 * 8 * half + 4);
            if (first_entry < 0) continue;
            const size_t entry = first_entry + sub;
            store_results(partials + entry * HEAD_DIM, total, half, warp);
            if (warp == 0 && (lane & 3) == 0) statistics[entry] = make_float2(total_maximum[half], total_sum[half]);
        }
    }
}
