// Attention of decode and verify rows over paged KV: partial results of sub-splits (attention_fold.cu completes them).
//
// Grid (chunks, KV heads, tiles). A CTA of 4 warps takes a contiguous run of a tile's sub-splits for one KV head. The
// 16 rows of its products are query row r of the tile x query head h of the KV head, at r * GROUP_HEADS + h.
//
// All 4 warps work on the same block of 64 cells. Warp w computes the scores of columns 16 w .. (2 tiles) and their
// exponentials; maxima and P go through shared memory; then it adds P V for the quarter w of the dimensions. So a warp
// keeps a quarter of the accumulators, codes are converted once, and a block takes a quarter of one warp's time.
//
// Blocks arrive in a ring of STAGES. A stage holds, for a block,
//     K codes [cell][..] | K scales [cell][..] | V codes, 4 pieces of 16 cells, padded | V scales [cell][..]
// Padding makes the four pieces that a warp reads V from together start in different banks. f16 rows are not padded;
// their 16-byte unit u lies at u ^ (cell % 8).
//
// f16 planes and devices without bulk copies: all threads copy 16 bytes at a time. Else one lane of each warp issues
// bulk copies: of V codes and, where a block has several pages, of everything, one for each piece. Pieces of 16 cells
// never straddle a page; pieces and f16 rows beyond the tile's length are not read.
#include "attention.cuh"

#define WARPS 4
#define THREADS (32 * WARPS)
#define GROUP_HEADS (NUM_HEADS / NUM_KV_HEADS)
#define PIECE 16
#define PIECES (BLOCK_CELLS / PIECE)
static_assert(NUM_HEADS % NUM_KV_HEADS == 0 && GROUP_HEADS >= 1 && GROUP_HEADS <= 8, "1 to 8 query heads per KV head");

typedef LayerOffsets<K_PLANE, V_PLANE, HEAD_DIM, NUM_KV_HEADS, PAGE_SIZE> Offsets;
constexpr int STEPS = HEAD_DIM / 16;              // k16 steps of the scores
constexpr int WARP_TILES = HEAD_DIM / 8 / WARPS;  // 8-dimension tiles of a warp's accumulators
constexpr bool USE_BULK = HAS_BULK && K_PLANE != PLANE_F16 && V_PLANE != PLANE_F16;

constexpr bool WHOLE_BLOCKS = PAGE_SIZE % BLOCK_CELLS == 0;  // a block lies in one page
static_assert(STAGES >= (USE_BULK ? 2 : 1) && STAGES <= 4, "2 to 4 stages, or 1 without bulk copies");

// A part of a stage: codes or scales of one plane. ROW: bytes per cell. PAD: bytes after each piece. SWIZZLED: f16
// rows.
template <int ROW_, int PAD_, bool SWIZZLED_>
struct StagePart {
    static constexpr int ROW = ROW_, PIECE_BYTES = PIECE * ROW_, STRIDE = PIECE_BYTES + PAD_, BYTES = PIECES * STRIDE;
    static constexpr bool SWIZZLED = SWIZZLED_;
};
constexpr int VALUE_PADDING = V_PLANE == PLANE_F16 ? 0 : V_PLANE == PLANE_INT8 && HEAD_DIM == 128 ? 32 : 16;
typedef StagePart<Offsets::K::CODE_BYTES, 0, K_PLANE == PLANE_F16> KeyCodes;
typedef StagePart<Offsets::K::SCALE_BYTES, 0, false> KeyScales;
typedef StagePart<Offsets::V::CODE_BYTES, VALUE_PADDING, V_PLANE == PLANE_F16> ValueCodes;
typedef StagePart<Offsets::V::SCALE_BYTES, 0, false> ValueScales;
constexpr int KEY_SCALES = KeyCodes::BYTES;
constexpr int VALUE_CODES = KEY_SCALES + KeyScales::BYTES;
constexpr int VALUE_SCALES = VALUE_CODES + ValueCodes::BYTES;
constexpr int STAGE_BYTES = VALUE_SCALES + ValueScales::BYTES;
// After the ring: P [warp][lane] 16 bytes, sums of quarters [warp][lane] 8 bytes, maxima [row][warp] f32, of each row
// of the products its length and where its results go, barriers.
constexpr int FRAGMENTS = STAGES * STAGE_BYTES;
constexpr int QUARTERS = FRAGMENTS + WARPS * 32 * 16;
constexpr int MAXIMA = QUARTERS + WARPS * 32 * 8;
constexpr int ROWS = MAXIMA + 16 * WARPS * 4;
constexpr int BARRIERS = ROWS + 16 * 8;
static_assert(STAGE_BYTES % 16 == 0, "copies are of 16 bytes");
static_assert(BARRIERS + 8 * STAGES <= SHARED_BYTES, "the launch gives SHARED_BYTES of shared memory");

DEVICE u32 swizzled_unit(int cell, int unit) {
    return (u32)((unit & ~7) | ((unit ^ cell) & 7)) * 16;
}

// ---- loading ------------------------------------------------------------
// Copies blocks in order, each into the next stage. page: of the next block, read one block ahead; where blocks have
// several pages, that of the piece `warp` (bulk copies) or `lane % 4`.
struct BlockLoader {
    const u64* page_table;
    u64 page;
    u32 first_entry, layer_offset, ring, stage;  // first_entry: of the tile's sequence
    int head, length, block, end_block;

    DEVICE void start(int first_block, int end) {
        block = first_block, end_block = end, stage = 0;
        find_page();
    }
    DEVICE void find_page() {
        const int piece = WHOLE_BLOCKS ? 0 : USE_BULK ? threadIdx.x >> 5 : threadIdx.x & 3;
        const int cell = block * BLOCK_CELLS + piece * PIECE;
        page = cell < length ? load_global64(page_table + (first_entry + cell / PAGE_SIZE)) : 0;
    }
    // The next block, if there is one; `async_commit` follows where copies are not bulk copies.
    DEVICE void issue() {
        if (block < end_block) {
#if HAS_BULK
            if (USE_BULK) issue_bulk();
#endif
            if (!USE_BULK) issue_async();
            block++;
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            find_page();
        }
        if (!USE_BULK) async_commit();
    }
    // Bytes of a part in the page, for the piece of cells from `cell` on.
    template <typename Part>
    DEVICE u64 source(u64 from_page, int part_offset, int cell) const {
        return from_page + layer_offset + part_offset + (u32)(head * PAGE_SIZE + cell % PAGE_SIZE) * Part::ROW;
    }

#if HAS_BULK
    // Every warp: its piece of V codes and its share of the rest, by one lane. A barrier takes one arrival per warp.
    DEVICE void issue_bulk() {
        const int warp = threadIdx.x >> 5, first = block * BLOCK_CELLS;
        const int pieces = min(PIECES, (length - first + PIECE - 1) / PIECE);
        const u32 base = ring + stage * STAGE_BYTES, barrier = ring + BARRIERS + 8 * stage;
        if ((threadIdx.x & 31) != 0) return;
        if (WHOLE_BLOCKS) {
            // What one copy brings for all pieces: K codes by warp 0, scales by the warps 1 and 2.
            const u32 piece_bytes = warp == 0   ? KeyCodes::PIECE_BYTES
                                    : warp == 1 ? KeyScales::PIECE_BYTES
                                    : warp == 2 ? ValueScales::PIECE_BYTES
                                                : 0;
            const u32 from = warp == 0 ? Offsets::K_CODES : warp == 1 ? Offsets::K_SCALES : Offsets::V_SCALES;
            const u32 to = warp == 0 ? 0 : warp == 1 ? KEY_SCALES : VALUE_SCALES;
            const u32 first_piece = (head * PAGE_SIZE + first % PAGE_SIZE) / PIECE;
            barrier_expect(barrier, pieces * piece_bytes + (warp < pieces ? ValueCodes::PIECE_BYTES : 0));
            if (piece_bytes)
                bulk_copy(base + to, (const void*)(page + layer_offset + from + first_piece * piece_bytes),
                          pieces * piece_bytes, barrier, EVICT_FIRST);
            if (warp < pieces) copy_piece<ValueCodes>(base + VALUE_CODES, Offsets::V_CODES, barrier);
        } else if (warp < pieces) {
            barrier_expect(barrier, KeyCodes::PIECE_BYTES + KeyScales::PIECE_BYTES + ValueCodes::PIECE_BYTES +
                                        ValueScales::PIECE_BYTES);
            copy_piece<KeyCodes>(base, Offsets::K_CODES, barrier);
            copy_piece<KeyScales>(base + KEY_SCALES, Offsets::K_SCALES, barrier);
            copy_piece<ValueCodes>(base + VALUE_CODES, Offsets::V_CODES, barrier);
            copy_piece<ValueScales>(base + VALUE_SCALES, Offsets::V_SCALES, barrier);
        } else {
            barrier_arrive(barrier);
        }
    }
    template <typename Part>
    DEVICE void copy_piece(u32 target, int part_offset, u32 barrier) const {
        const int piece = threadIdx.x >> 5;
        const u64 from = source<Part>(page, part_offset, block * BLOCK_CELLS + piece * PIECE);
        bulk_copy(target + piece * Part::STRIDE, (const void*)from, Part::PIECE_BYTES, barrier, EVICT_FIRST);
    }
#endif

    // By all threads; complete after async_wait and a barrier of the CTA.
    DEVICE void issue_async() {
        const u32 base = ring + stage * STAGE_BYTES;
        copy_part<KeyCodes>(base, Offsets::K_CODES);
        copy_part<KeyScales>(base + KEY_SCALES, Offsets::K_SCALES);
        copy_part<ValueCodes>(base + VALUE_CODES, Offsets::V_CODES);
        copy_part<ValueScales>(base + VALUE_SCALES, Offsets::V_SCALES);
    }
    template <typename Part>
    DEVICE void copy_part(u32 target, int part_offset) const {
        constexpr int UNITS = Part::PIECE_BYTES / 16, ROUNDS = (PIECES * UNITS + THREADS - 1) / THREADS;
        static_assert(Part::PIECE_BYTES % 16 == 0, "pieces are copied in units of 16 bytes");
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
            constexpr int ROW_UNITS = Part::ROW / 16;
            const int unit = round * THREADS + threadIdx.x, piece = unit / (UNITS ? UNITS : 1);
            const int in_piece = unit - piece * UNITS, first = block * BLOCK_CELLS + piece * PIECE;
            const u64 from_page = WHOLE_BLOCKS ? page : __shfl_sync(FULL_WARP, page, piece & 3);
            const u64 from = source<Part>(from_page, part_offset, first) + in_piece * 16;
            if (Part::SWIZZLED) {
                // Beyond the length: zeros. UNITS * PIECES is a multiple of THREADS here.
                const int in_block = unit / (ROW_UNITS ? ROW_UNITS : 1), column = unit - in_block * ROW_UNITS;
                const bool exists = block * BLOCK_CELLS + in_block < length;
                async_copy16(target + in_block * Part::ROW + swizzled_unit(in_block, column),
                             (const void*)(exists ? from : (u64)page_table & ~15ull), exists ? 16 : 0);
            } else if (piece < PIECES && first < length) {
                async_copy16(target + piece * Part::STRIDE + in_piece * 16, (const void*)from);
            }
        }
    }
};

// Zeroes V of the cells from `left` on, as far as junk could matter: scales of quantized V (f16 came as zeros).
DEVICE void clear_values(u32 stage_base, int left) {
    if (V_PLANE == PLANE_F16) return;
    constexpr int HALVES = ValueScales::ROW / 2;
#pragma unroll 1
    for (int i = threadIdx.x; i < (BLOCK_CELLS - left) * HALVES; i += THREADS) {
        const int cell = left + i / (HALVES ? HALVES : 1), half = i % (HALVES ? HALVES : 1);
        store_shared16(stage_base + VALUE_SCALES + cell * ValueScales::ROW + half * 2, 0);
    }
}

// ---- queries ------------------------------------------------------------
// Left fragments of all k16 steps: q[step][a0 .. a3], elements in the order of key_dimension.
// row: HEAD_DIM f16, or null for a row of zeros. half: 0 for rows g (a0, a2), 1 for rows g + 8 (a1, a3).
template <int FORMAT>
DEVICE void load_query_row(u32 (&q)[STEPS][4], const u16* row, int half) {
    const int t = threadIdx.x & 3;
    if (FORMAT == PLANE_F16) {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const u32* words = (const u32*)row + 8 * step + t;
            q[step][half] = row ? words[0] : 0;
            q[step][half + 2] = row ? words[4] : 0;
        }
        return;
    }
    // A lane's dimensions are RUNS runs of RUN neighbours, which begin at key_dimension(.., t, 0).
    constexpr int RUN = FORMAT == PLANE_INT8 ? 16 : HEAD_DIM / 4, RUNS = HEAD_DIM / 4 / RUN, RUN_STEPS = RUN / 4;
#pragma unroll
    for (int run = 0; run < RUNS; run++) {
        u32 words[RUN / 2];
#pragma unroll
        for (int i = 0; i < RUN / 8; i++) {
            const uint4 part =
                row ? load_global128(row + key_dimension<FORMAT, HEAD_DIM>(run * RUN_STEPS, t, 0) + 8 * i)
                    : make_uint4(0, 0, 0, 0);
            words[4 * i] = part.x, words[4 * i + 1] = part.y, words[4 * i + 2] = part.z, words[4 * i + 3] = part.w;
        }
#pragma unroll
        for (int step = 0; step < RUN_STEPS; step++) {
            // Elements 0, 1 are even dimensions, 2, 3 the odd ones after them.
            const int first = key_dimension<FORMAT, HEAD_DIM>(step, 0, 0),
                      second = key_dimension<FORMAT, HEAD_DIM>(step, 0, 1);
            q[run * RUN_STEPS + step][half] = permute_bytes(words[first / 2], words[second / 2], 0x5410);
            q[run * RUN_STEPS + step][half + 2] = permute_bytes(words[first / 2], words[second / 2], 0x7632);
        }
    }
}

// ---- scores ------------------------------------------------------------
// Two neighbouring tiles of scores from `first_tile` on, for a block in shared memory.
template <int FORMAT>
struct KeyPlane;

template <>
struct KeyPlane<PLANE_F16> {
    DEVICE static void scores(float (*s)[4], const u32 (&q)[STEPS][4], u32 stage_base, int first_tile) {
        const int lane = threadIdx.x & 31;
        int cell[2];
        cell[0] = cell_of_column<V_PLANE>(8 * first_tile + (lane & 7));
        cell[1] = cell_of_column<V_PLANE>(8 * first_tile + 8 + (lane & 7));
#pragma unroll
        for (int pair = 0; pair < STEPS / 2; pair++) {
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                u32 b[4];
                load_matrices(
                    b, stage_base + cell[tile] * KeyCodes::ROW + swizzled_unit(cell[tile], 4 * pair + (lane >> 3)));
                multiply_half(s[tile], q[2 * pair][0], q[2 * pair][1], q[2 * pair][2], q[2 * pair][3], b[0], b[1]);
                multiply_half(s[tile], q[2 * pair + 1][0], q[2 * pair + 1][1], q[2 * pair + 1][2], q[2 * pair + 1][3],
                              b[2], b[3]);
            }
        }
    }
};

template <>
struct KeyPlane<PLANE_INT8> {
    DEVICE static void scores(float (*s)[4], const u32 (&q)[STEPS][4], u32 stage_base, int first_tile) {
        const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
        for (int group = 0; group < HEAD_DIM / 64; group++) {
            u32 words[2][4], scale[2];
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                const int cell = cell_of_column<V_PLANE>(8 * (first_tile + tile) + g);
                const uint4 codes = load_shared128(stage_base + cell * KeyCodes::ROW + group * 64 + t * 16);
                words[tile][0] = codes.x, words[tile][1] = codes.y, words[tile][2] = codes.z, words[tile][3] = codes.w;
                scale[tile] = same_pair(load_shared16(stage_base + KEY_SCALES + cell * KeyScales::ROW + group * 2));
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32* a = q[4 * group + i];
#pragma unroll
                for (int tile = 0; tile < 2; tile++)
                    multiply_half(s[tile], a[0], a[1], a[2], a[3],
                                  multiply_half2(int8_pair(words[tile][i]), scale[tile]),
                                  multiply_half2(int8_pair(words[tile][i] >> 8), scale[tile]));
            }
        }
    }
};

template <>
struct KeyPlane<PLANE_Q4> {
    DEVICE static void scores(float (*s)[4], const u32 (&q)[STEPS][4], u32 stage_base, int first_tile) {
        const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
        constexpr int LANE_BYTES = HEAD_DIM / 8;
        u32 words[2][LANE_BYTES / 4], scale[2];
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            const int cell = cell_of_column<V_PLANE>(8 * (first_tile + tile) + g);
            const u32 address = stage_base + cell * KeyCodes::ROW + t * LANE_BYTES;
            if (LANE_BYTES == 16) {
                const uint4 codes = load_shared128(address);
                words[tile][0] = codes.x, words[tile][1] = codes.y;
                words[tile][LANE_BYTES / 4 - 2] = codes.z, words[tile][LANE_BYTES / 4 - 1] = codes.w;
            } else {
                const uint2 codes = load_shared64(address);
                words[tile][0] = codes.x, words[tile][1] = codes.y;
            }
            const int group = t * (HEAD_DIM / 4) / PlaneTraits<PLANE_Q4>::GROUP;
            scale[tile] = same_pair(load_shared16(stage_base + KEY_SCALES + cell * KeyScales::ROW + group * 2));
        }
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                const u32 codes = words[tile][step >> 1] >> (8 * (step & 1));
                multiply_half(s[tile], q[step][0], q[step][1], q[step][2], q[step][3],
                              multiply_half2(q4_pair(codes), scale[tile]),
                              multiply_half2(q4_pair(codes >> 4), scale[tile]));
            }
        }
    }
};

// ---- P V ------------------------------------------------------------
// Adds a block's P V for the warp's quarter of the dimensions. fragments: P of all columns. store: a row's values of
// the quarter, row: HEAD_DIM f32; half: 0 for rows g, 1 for rows g + 8.
template <int FORMAT>
struct ValuePlane;

template <>
struct ValuePlane<PLANE_F16> {
    DEVICE static void multiply(float (&c)[WARP_TILES][4], u32 stage_base, u32 fragments, int warp) {
        const int lane = threadIdx.x & 31, matrix = lane >> 3;
#pragma unroll
        for (int step = 0; step < PIECES; step++) {
            const uint4 p = load_shared128(fragments + (step * 32 + lane) * 16);
            const int cell = step * 16 + (matrix & 1) * 8 + (lane & 7);
#pragma unroll
            for (int tile = 0; tile < WARP_TILES; tile += 2) {
                u32 b[4];
                const u32 unit = swizzled_unit(cell, warp * WARP_TILES + tile + (matrix >> 1));
                load_matrices_transposed(b, stage_base + VALUE_CODES + cell * ValueCodes::ROW + unit);
                multiply_half(c[tile], p.x, p.y, p.z, p.w, b[0], b[1]);
                multiply_half(c[tile + 1], p.x, p.y, p.z, p.w, b[2], b[3]);
            }
        }
    }
    // Tile n has the dimensions 8 n ..: a lane's are pairs.
    DEVICE static void store(float* row, const float (&c)[WARP_TILES][4], int half, int warp) {
        const int t = threadIdx.x & 3;
#pragma unroll
        for (int tile = 0; tile < WARP_TILES; tile++)
            *(float2*)(row + 8 * (warp * WARP_TILES + tile) + 2 * t) =
                make_float2(c[tile][2 * half], c[tile][2 * half + 1]);
    }
};

// Quantized V. A lane reads, of 4 neighbouring cells of piece t, the codes of the WARP_TILES dimensions from
// (HEAD_DIM / 4) warp + WARP_TILES g on; code i is column g of tile i.
template <int FORMAT>
struct QuantizedValues {
    static constexpr int CODE_BYTES = WARP_TILES * PlaneTraits<FORMAT>::BITS / 8;

    DEVICE static u32 load_codes(u32 address) {
        if (CODE_BYTES == 4) return load_shared32(address);
        if (CODE_BYTES == 2) return load_shared16(address);
        return load_shared8(address);
    }
    // Code i of two cells as f16.
    DEVICE static u32 pair(u32 low, u32 high, int i) {
        if (FORMAT == PLANE_INT8)
            return int8_pair(permute_bytes(low, high, i | (i << 4) | ((4 + i) << 8) | ((4 + i) << 12)));
        return q4_pair(join_halves(low, high) >> (4 * i));
    }

    DEVICE static void multiply(float (&c)[WARP_TILES][4], u32 stage_base, u32 fragments, int warp) {
        const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        const int group = warp * (HEAD_DIM / WARPS) / PlaneTraits<FORMAT>::GROUP;
        // Lane (g, t) fetches the scales of cells 2 g and 2 g + 1 of piece t; others take them from it.
        const u32 scales = stage_base + VALUE_SCALES + t * ValueScales::STRIDE + 2 * g * ValueScales::ROW + group * 2;
        const u32 own = join_halves(load_shared16(scales), load_shared16(scales + ValueScales::ROW));
        const u32 codes = stage_base + VALUE_CODES + t * ValueCodes::STRIDE + (warp * 8 + g) * CODE_BYTES;
#pragma unroll
        for (int step = 0; step < PIECES; step++) {
            const uint4 p = load_shared128(fragments + (step * 32 + lane) * 16);
            u32 cells[4];
#pragma unroll
            for (int i = 0; i < 4; i++) cells[i] = load_codes(codes + (4 * step + i) * ValueCodes::ROW);
            const u32 first = __shfl_sync(FULL_WARP, own, 8 * step + t);
            const u32 second = __shfl_sync(FULL_WARP, own, 8 * step + 4 + t);
#pragma unroll
            for (int i = 0; i < WARP_TILES; i++)
                multiply_half(c[i], p.x, p.y, p.z, p.w, multiply_half2(pair(cells[0], cells[1], i), first),
                              multiply_half2(pair(cells[2], cells[3], i), second));
        }
    }
    // A lane's dimensions are 2 WARP_TILES neighbours.
    DEVICE static void store(float* row, const float (&c)[WARP_TILES][4], int half, int warp) {
        float* target = row + warp * (HEAD_DIM / WARPS) + (threadIdx.x & 3) * 2 * WARP_TILES;
        float values[2 * WARP_TILES];
#pragma unroll
        for (int i = 0; i < WARP_TILES; i++) {
            values[i] = c[i][2 * half];
            values[WARP_TILES + i] = c[i][2 * half + 1];
        }
#pragma unroll
        for (int i = 0; i < 2 * WARP_TILES; i += 4)
            *(float4*)(target + i) = make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
    }
};
template <>
struct ValuePlane<PLANE_INT8> : QuantizedValues<PLANE_INT8> {};
template <>
struct ValuePlane<PLANE_Q4> : QuantizedValues<PLANE_Q4> {};

// ---- the kernel ------------------------------------------------------------
// queries: f16 [row][head][HEAD_DIM], rotated where K is. page_table: u64 [slot][max_pages]. tiles: AttentionTile.
// partials: f32 [row][head][max_splits][HEAD_DIM]; statistics: f32 pairs (maximum, sum) [row][head][max_splits]; rows
// as `scratch_row` says. A chunk that has the first sub-splits of a group folds them and stores the fold under the last
// one's index. unsettled: cells below a tile's first position that this step may still write (the most rows that one
// sequence has in the step, minus 1): older ones are fetched before the previous kernel has ended.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    attention_decode(const u16* queries, const u64* page_table, const AttentionTile* tiles, float* partials,
                     float2* statistics, i32 layer, i32 max_pages, i32 max_splits, i32 tile_stride, i32 unsettled) {
    extern __shared__ __align__(128) u8 shared[];
    allow_next_kernel();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, kv_head = blockIdx.y;
    const AttentionTile tile = tiles[blockIdx.z];
    const int length = tile.first_position + tile.rows, blocks = blocks_of(length);
    const int first_sub = tile.rows > 0 ? chunk_begin(blockIdx.x, gridDim.x, blocks) : 0;
    const int end_sub = tile.rows > 0 ? chunk_begin(blockIdx.x + 1, gridDim.x, blocks) : 0;
    if (first_sub >= end_sub) {
        wait_previous_kernel();
        return;
    }
    const int first_block = sub_split_begin(first_sub), end_block = min(sub_split_begin(end_sub), blocks);
    const u32 ring = shared_address(shared);
    BlockLoader loader;
    loader.page_table = page_table, loader.first_entry = tile.slot * max_pages;
    loader.layer_offset = (u32)layer * Offsets::LAYER_BYTES;  // pages are at most 8 MiB
    loader.head = kv_head, loader.length = length, loader.ring = ring;
    loader.start(first_block, end_block);

    // The first blocks.
    const int settled = (tile.first_position - unsettled) / BLOCK_CELLS;  // blocks below are complete
#if HAS_BULK
    if (USE_BULK && threadIdx.x == THREADS - 32) {
        for (int i = 0; i < STAGES; i++) barrier_init(ring + BARRIERS + 8 * i, WARPS);
        barrier_init_fence();
    }
#endif
    if (threadIdx.x < 16) {
        // Rows that are not there never mask, and their results go nowhere (-1).
        const int row = threadIdx.x / GROUP_HEADS, head = kv_head * GROUP_HEADS + threadIdx.x % GROUP_HEADS;
        const int place = scratch_row(tile, blockIdx.z, row, tile_stride) * NUM_HEADS + head;
        const bool exists = row < tile.rows;
        store_shared32(ring + ROWS + threadIdx.x * 8, exists ? tile.first_position + row + 1 : length);
        store_shared32(ring + ROWS + threadIdx.x * 8 + 4, exists ? place * max_splits : -1);
    }
    __syncthreads();
    int waiting = STAGES - 1;
    for (; waiting > 0 && loader.block < min(settled, end_block); waiting--) loader.issue();
    wait_previous_kernel();
    for (; waiting > 0; waiting--) loader.issue();

    u32 q[STEPS][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = (g + 8 * half) / GROUP_HEADS, head = kv_head * GROUP_HEADS + (g + 8 * half) % GROUP_HEADS;
        const size_t place = (size_t)(tile.first_row + row) * NUM_HEADS + head;
        load_query_row<K_PLANE>(q, row < tile.rows ? queries + place * HEAD_DIM : nullptr, half);
    }
    if (!USE_BULK && STAGES > 1) {
        async_wait<(STAGES > 1 ? STAGES - 2 : 0)>();
        __syncthreads();
    }

    const u32 fragments = ring + FRAGMENTS, quarters = ring + QUARTERS, maxima = ring + MAXIMA;
    const u32 table = ring + ROWS + g * 8;  // of row g; of row g + 8 64 bytes further
    float total[WARP_TILES][4], total_maximum[2], total_sum[2];
    bool folding = false;
    int block = first_block, stage = 0;
    u32 phase = 0;
    for (int sub = first_sub; sub < end_sub; sub++) {
        RowState rows;
        rows.clear();
        float c[WARP_TILES][4];
#pragma unroll
        for (int i = 0; i < WARP_TILES; i++) c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0.0f;
        const int sub_end = min(sub_split_begin(sub + 1), blocks);
        for (; block < sub_end; block++) {
            const u32 stage_base = ring + stage * STAGE_BYTES;
            const int first_cell = block * BLOCK_CELLS;
#if HAS_BULK
            if (USE_BULK) barrier_wait(ring + BARRIERS + 8 * stage, phase);
#endif
            if (STAGES == 1) {
                __syncthreads();
                loader.issue();
                async_wait<0>();
                __syncthreads();
            }
            if (first_cell + BLOCK_CELLS > length) clear_values(stage_base, length - first_cell);

            float s[2][4] = {};
            KeyPlane<K_PLANE>::scores(s, q, stage_base, 2 * warp);
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
            if (STAGES > 1) loader.issue();
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
            if (!USE_BULK && STAGES > 1) async_wait<(STAGES > 1 ? STAGES - 2 : 0)>();
            __syncthreads();

            if (__any_sync(FULL_WARP, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
                for (int i = 0; i < WARP_TILES; i++) {
                    c[i][0] *= factor[0], c[i][1] *= factor[0];
                    c[i][2] *= factor[1], c[i][3] *= factor[1];
                }
            }
            ValuePlane<V_PLANE>::multiply(c, stage_base, fragments, warp);
            if (warp == 0) {
                float2 quarter[WARPS];
#pragma unroll
                for (int i = 0; i < WARPS; i++) quarter[i] = load_shared_float2(quarters + (i * 32 + lane) * 8);
                rows.sum[0] = grow_sum(rows.sum[0], factor[0], quarter[0].x, quarter[1].x, quarter[2].x, quarter[3].x);
                rows.sum[1] = grow_sum(rows.sum[1], factor[1], quarter[0].y, quarter[1].y, quarter[2].y, quarter[3].y);
            }
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }

        // The sub-split joins the fold of its group's first ones, or stands alone.
        const bool begins_group = sub == group_begin(group_of(sub));
        folding |= begins_group;
        if (begins_group || !folding) {
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
        const bool continues = folding && sub + 1 < end_sub && sub + 1 != group_begin(group_of(sub + 1));
        if (continues) continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int first_entry = load_shared32(table + 8 * 8 * half + 4);
            if (first_entry < 0) continue;
            const size_t entry = first_entry + sub;
            ValuePlane<V_PLANE>::store(partials + entry * HEAD_DIM, total, half, warp);
            if (threadIdx.x < 32 && (lane & 3) == 0)
                statistics[entry] = make_float2(total_maximum[half], total_sum[half]);
        }
    }
}
