// Attention of decode and verify rows over quantized planes (attention_decode.cuh says what it leaves). A CTA is one
// warp.
//
// Products are transposed, so that K and V fill the 16 rows of the left operand and queries the 8 columns of the right
// one: scores^T = K q^T, result^T = V^T P^T. Column n is query n of the tile; there are up to 8 QUERY_TILES of them.
// Lane 4 g + t holds
//     of scores   strip i (the columns 16 i .. of the block): its columns g and g + 8, queries 2 t and 2 t + 1
//     of results  two dimensions of each of HEAD_DIM / 16 tiles, the same queries
// so each code is converted once, by the warp that needs it, and blocks share nothing through shared memory.
//
// K and V arrive in two rings, each slot a block of one plane: codes [cell][..] | scales [cell][..]. A slot is filled
// again as soon as its block has been used: K while P V runs, V while the next scores do. VALUE_PADDING bytes after
// each piece of 16 cells let the four pieces that a warp reads V from together start in different banks, for one bulk
// copy each.
//
// Devices without bulk copies: all lanes copy 16 bytes at a time. Pieces beyond the tile's length are not read.
#include "attention_decode.cuh"

#define STRIPS (BLOCK_CELLS / 16)
static_assert(K_PLANE != PLANE_F16 && V_PLANE != PLANE_F16, "quantized planes");
static_assert(QUERY_TILES >= 1 && QUERY_TILES <= 2, "8 or 16 columns");
static_assert(REGISTER_FOLDS >= 0 && REGISTER_FOLDS <= 1, "registers for one fold");
static_assert(K_STAGES >= 1 && K_STAGES <= 4 && V_STAGES >= 1 && V_STAGES <= 4, "1 to 4 blocks of a plane");

// Codes or scales of one plane. ROW: bytes per cell. PAD: bytes after each piece. OFFSET: in the layer.
template <int ROW_, int PAD_, int OFFSET_>
struct SlotPart {
    static constexpr int ROW = ROW_, PIECE_BYTES = PIECE * ROW_, STRIDE = PIECE_BYTES + PAD_, BYTES = PIECES * STRIDE;
    static constexpr int OFFSET = OFFSET_;
};
typedef SlotPart<Offsets::K::CODE_BYTES, 0, Offsets::K_CODES> KeyCodes;
typedef SlotPart<Offsets::K::SCALE_BYTES, 0, Offsets::K_SCALES> KeyScales;
typedef SlotPart<Offsets::V::CODE_BYTES, VALUE_PADDING, Offsets::V_CODES> ValueCodes;
typedef SlotPart<Offsets::V::SCALE_BYTES, 0, Offsets::V_SCALES> ValueScales;
constexpr int KEY_SCALES = KeyCodes::BYTES, VALUE_SCALES = ValueCodes::BYTES;
constexpr int K_SLOT = KEY_SCALES + KeyScales::BYTES, V_SLOT = VALUE_SCALES + ValueScales::BYTES;
// Shared memory: slots of K, slots of V, the fold under way of the query tiles from REGISTER_FOLDS on (of those before
// it is in registers) [query tile][dimension tile][lane] float4, a barrier for each slot.
constexpr int V_SLOTS = K_STAGES * K_SLOT, FOLD = V_SLOTS + V_STAGES * V_SLOT;
constexpr int BARRIERS = FOLD + (QUERY_TILES - REGISTER_FOLDS) * STEPS * 32 * 16;
static_assert(K_SLOT % 16 == 0 && V_SLOT % 16 == 0, "copies are of 16 bytes");
static_assert(BARRIERS + 8 * (K_STAGES + V_STAGES) <= SHARED_BYTES, "the launch gives SHARED_BYTES of shared memory");

// ---- loading ------------------------------------------------------------
// Copies blocks of one plane in order, each into the next slot. block: the next one to copy; page: its page, read when
// the block before is copied; where blocks have several pages, that of the piece `lane % 4`.
template <typename Codes, typename Scales, int STAGES>
struct PlaneRing {
    static constexpr int SLOT_BYTES = Codes::BYTES + Scales::BYTES;
    u64 page;
    u32 slots, barriers, slot, phase;  // slot: of the block to use next, phase: parity of its barrier
    int block;

    DEVICE void start(const Chunk& chunk, u32 slots_, u32 barriers_) {
        slots = slots_, barriers = barriers_, block = chunk.first_block, slot = phase = 0;
        page = chunk.page_of(block, threadIdx.x & 3);
    }
    // The next block, if there is one, into a slot that all lanes have left.
    DEVICE void issue(const Chunk& chunk, u32 target_slot) {
        if (block < chunk.end_block) {
            const u32 target = slots + target_slot * SLOT_BYTES;
#if HAS_BULK
            issue_bulk(chunk, target, barriers + 8 * target_slot);
#else
            copy_part<Codes>(chunk, target);
            copy_part<Scales>(chunk, target + Codes::BYTES);
#endif
            block++;
            page = chunk.page_of(block, threadIdx.x & 3);
        }
#if !HAS_BULK
        async_commit();
#endif
    }
    // Until the block in `slot` is there. Other copies of this plane and of the other take turns, so that between a
    // block's copies and its use there are those of 2 STAGES - 1 others.
    DEVICE void wait() const {
#if HAS_BULK
        barrier_wait(barriers + 8 * slot, phase);
#else
        async_wait<2 * STAGES - 1>();
        __syncwarp();
#endif
    }
    DEVICE u32 base() const { return slots + slot * SLOT_BYTES; }
    // All lanes are done with the block in `slot`.
    DEVICE void release(const Chunk& chunk) {
        __syncwarp();
        issue(chunk, slot);
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }

#if HAS_BULK
    // One copy for all pieces where they follow each other in the slot too, else one by the lane of each piece.
    DEVICE void issue_bulk(const Chunk& chunk, u32 target, u32 barrier) {
        const int pieces = min(PIECES, (chunk.length - block * BLOCK_CELLS + PIECE - 1) / PIECE);
        if (threadIdx.x >= PIECES) return;
        if (threadIdx.x == 0) barrier_expect(barrier, pieces * (Codes::PIECE_BYTES + Scales::PIECE_BYTES));
        copy_bulk<Codes>(chunk, target, pieces, barrier);
        copy_bulk<Scales>(chunk, target + Codes::BYTES, pieces, barrier);
    }
    template <typename Part>
    DEVICE void copy_bulk(const Chunk& chunk, u32 target, int pieces, u32 barrier) const {
        const int lane = threadIdx.x, first = block * BLOCK_CELLS;
        if (WHOLE_BLOCKS && Part::STRIDE == Part::PIECE_BYTES) {
            if (lane == 0)
                bulk_copy(target, (const void*)chunk.source<Part>(page, first), pieces * Part::PIECE_BYTES, barrier,
                          EVICT_FIRST);
        } else if (lane < pieces) {
            bulk_copy(target + lane * Part::STRIDE, (const void*)chunk.source<Part>(page, first + lane * PIECE),
                      Part::PIECE_BYTES, barrier, EVICT_FIRST);
        }
    }
#else
    template <typename Part>
    DEVICE void copy_part(const Chunk& chunk, u32 target) const {
        constexpr int UNITS = Part::PIECE_BYTES / 16, ROUNDS = (PIECES * UNITS + 31) / 32;
        static_assert(Part::PIECE_BYTES % 16 == 0, "pieces are copied in units of 16 bytes");
#pragma unroll 2  // all of them would keep their addresses in registers
        for (int round = 0; round < ROUNDS; round++) {
            const int unit = round * 32 + threadIdx.x, piece = unit / UNITS, in_piece = unit - piece * UNITS;
            const int first = block * BLOCK_CELLS + piece * PIECE;
            const u64 from_page = WHOLE_BLOCKS ? page : __shfl_sync(FULL_WARP, page, piece & 3);
            if (piece < PIECES && first < chunk.length)
                async_copy16(target + piece * Part::STRIDE + in_piece * 16,
                             (const void*)(chunk.source<Part>(from_page, first) + in_piece * 16));
        }
    }
#endif
};

// Zeroes V of the cells from `left` on, as far as junk could matter: the scales.
DEVICE void clear_values(u32 slot_base, int left) {
    constexpr int HALVES = ValueScales::ROW / 2;
#pragma unroll 1
    for (int i = threadIdx.x; i < (BLOCK_CELLS - left) * HALVES; i += 32)
        store_shared16(slot_base + VALUE_SCALES + (left + i / HALVES) * ValueScales::ROW + i % HALVES * 2, 0);
    __syncwarp();
}

// ---- queries ------------------------------------------------------------
// Right fragments of all k16 steps: q[step][b0, b1], elements in the order of key_dimension.
// row: HEAD_DIM f16 of column g, or null for zeros.
template <int FORMAT>
DEVICE void load_query(u32 (&q)[STEPS][2], const u16* row) {
    const int t = threadIdx.x & 3;
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
            q[run * RUN_STEPS + step][0] = permute_bytes(words[first / 2], words[second / 2], 0x5410);
            q[run * RUN_STEPS + step][1] = permute_bytes(words[first / 2], words[second / 2], 0x7632);
        }
    }
}

// ---- products ------------------------------------------------------------
// c[tile] += a b[tile] for all query tiles.
DEVICE void multiply_tiles(float (&c)[QUERY_TILES][4], const u32 (&a)[4], const u32 (&b)[QUERY_TILES][2]) {
#pragma unroll
    for (int tile = 0; tile < QUERY_TILES; tile++)
        multiply_half(c[tile], a[0], a[1], a[2], a[3], b[tile][0], b[tile][1]);
}
// N neighbouring words of shared memory.
template <int N>
DEVICE void load_words(u32 (&words)[N], u32 address) {
    if constexpr (N == 4) {
        const uint4 all = load_shared128(address);
        words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
    } else if constexpr (N == 2) {
        const uint2 all = load_shared64(address);
        words[0] = all.x, words[1] = all.y;
    } else {
        words[0] = load_shared32(address);
    }
}

// Adds to the scores of a block. q: [step][query tile]. Two strips take turns, so that one's product can run while the
// other's codes are converted.
typedef u32 Queries[STEPS][QUERY_TILES][2];
typedef float Scores[STRIPS][QUERY_TILES][4];
template <int FORMAT>
struct KeyPlane;

template <>
struct KeyPlane<PLANE_INT8> {
    DEVICE static void scores(Scores& s, const Queries& q, u32 slot_base) {
        const int g = threadIdx.x >> 2, t = threadIdx.x & 3;
#pragma unroll
        for (int pair = 0; pair < STRIPS; pair += 2) {
            // [strip of the pair][columns g and g + 8]
            int cell[2][2];
            u32 scales[2][2];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                cell[i >> 1][i & 1] = cell_of_column<V_PLANE>(16 * pair + 8 * i + g);
                const u32 address = slot_base + KEY_SCALES + cell[i >> 1][i & 1] * KeyScales::ROW;
                scales[i >> 1][i & 1] = HEAD_DIM == 128 ? load_shared32(address) : load_shared16(address);
            }
#pragma unroll
            for (int group = 0; group < HEAD_DIM / 64; group++) {
                u32 words[2][2][4], scale[2][2];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    load_words<4>(words[i >> 1][i & 1],
                                  slot_base + cell[i >> 1][i & 1] * KeyCodes::ROW + group * 64 + t * 16);
                    scale[i >> 1][i & 1] =
                        permute_bytes(scales[i >> 1][i & 1], scales[i >> 1][i & 1], group ? 0x3232 : 0x1010);
                }
#pragma unroll
                for (int i = 0; i < 4; i++) {
#pragma unroll
                    for (int strip = 0; strip < 2; strip++) {
                        const u32 top = words[strip][0][i], low = words[strip][1][i];
                        const u32 a[4] = {multiply_half2(int8_pair(top), scale[strip][0]),
                                          multiply_half2(int8_pair(low), scale[strip][1]),
                                          multiply_half2(int8_pair(top >> 8), scale[strip][0]),
                                          multiply_half2(int8_pair(low >> 8), scale[strip][1])};
                        multiply_tiles(s[pair + strip], a, q[4 * group + i]);
                    }
                }
            }
        }
    }
};

template <>
struct KeyPlane<PLANE_Q4> {
    DEVICE static void scores(Scores& s, const Queries& q, u32 slot_base) {
        const int g = threadIdx.x >> 2, t = threadIdx.x & 3;
        constexpr int WORDS = HEAD_DIM / 32;
        const int group = t * (HEAD_DIM / 4) / PlaneTraits<PLANE_Q4>::GROUP;
#pragma unroll
        for (int pair = 0; pair < STRIPS; pair += 2) {
            u32 words[2][2][WORDS], scale[2][2];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int cell = cell_of_column<V_PLANE>(16 * pair + 8 * i + g);
                load_words<WORDS>(words[i >> 1][i & 1], slot_base + cell * KeyCodes::ROW + t * WORDS * 4);
                scale[i >> 1][i & 1] =
                    same_pair(load_shared16(slot_base + KEY_SCALES + cell * KeyScales::ROW + group * 2));
            }
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
#pragma unroll
                for (int strip = 0; strip < 2; strip++) {
                    const u32 top = words[strip][0][step >> 1] >> (8 * (step & 1));
                    const u32 low = words[strip][1][step >> 1] >> (8 * (step & 1));
                    const u32 a[4] = {multiply_half2(q4_pair(top), scale[strip][0]),
                                      multiply_half2(q4_pair(low), scale[strip][1]),
                                      multiply_half2(q4_next_pair(top), scale[strip][0]),
                                      multiply_half2(q4_next_pair(low), scale[strip][1])};
                    multiply_tiles(s[pair + strip], a, q[step]);
                }
            }
        }
    }
};

typedef float Results[STEPS][QUERY_TILES][4];
typedef u32 Weights[STRIPS][QUERY_TILES][2];
// Adds a block's P V. p: right fragments of P, [k16 step][query tile]. A lane reads, of 4 neighbouring cells of piece t, the codes of the CODES dimensions from CODES g on;
// codes 2 i and 2 i + 1 are the rows g and g + 8 of tile i.
template <int FORMAT>
struct ValuePlane {
    static constexpr int CODES = HEAD_DIM / 8, WORDS = CODES * PlaneTraits<FORMAT>::BITS / 32;

    // Code i of two cells as f16.
    DEVICE static u32 pair(const u32 (&low)[WORDS], const u32 (&high)[WORDS], int i) {
        if (FORMAT == PLANE_INT8) {
            const int byte = i & 3;
            return int8_pair(permute_bytes(low[i >> 2], high[i >> 2],
                                           byte | (byte << 4) | ((4 + byte) << 8) | ((4 + byte) << 12)));
        }
        const u32 joined = permute_bytes(low[i >> 3], high[i >> 3], i & 4 ? 0x7632 : 0x5410) >> (8 * ((i >> 1) & 1));
        return i & 1 ? q4_next_pair(joined) : q4_pair(joined);
    }

    DEVICE static void multiply(Results& c, u32 slot_base, const Weights& p) {
        const int g = threadIdx.x >> 2, t = threadIdx.x & 3;
        const int group = g * CODES / PlaneTraits<FORMAT>::GROUP;
        const u32 scales = slot_base + VALUE_SCALES + t * ValueScales::STRIDE + group * 2;
        const u32 codes = slot_base + t * ValueCodes::STRIDE + g * WORDS * 4;
#pragma unroll
        for (int step = 0; step < STRIPS; step++) {
            u32 cells[4][WORDS], scale[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                load_words<WORDS>(cells[i], codes + (4 * step + i) * ValueCodes::ROW);
                scale[i] = load_shared16(scales + (4 * step + i) * ValueScales::ROW);
            }
            const u32 first = join_halves(scale[0], scale[1]), second = join_halves(scale[2], scale[3]);
#pragma unroll
            for (int i = 0; i < STEPS; i++) {
                const u32 a[4] = {multiply_half2(pair(cells[0], cells[1], 2 * i), first),
                                  multiply_half2(pair(cells[0], cells[1], 2 * i + 1), first),
                                  multiply_half2(pair(cells[2], cells[3], 2 * i), second),
                                  multiply_half2(pair(cells[2], cells[3], 2 * i + 1), second)};
                multiply_tiles(c[i], a, p[step]);
            }
        }
    }
    // The values of query 2 t + second of a query tile: a lane's dimensions are CODES neighbours. row: HEAD_DIM f32.
    DEVICE static void store(float* row, const Results& c, int query_tile, int second) {
        float* target = row + (threadIdx.x >> 2) * CODES;
#pragma unroll
        for (int i = 0; i < STEPS; i += 2)
            *(float4*)(target + 2 * i) = make_float4(c[i][query_tile][second], c[i][query_tile][2 + second],
                                                     c[i + 1][query_tile][second], c[i + 1][query_tile][2 + second]);
    }
};

// ---- softmax ------------------------------------------------------------
// Lanes of a query are those of its t; the arithmetic is that of `exponentiate_block`, whose lane t' is here the pair
// of lanes with g = 2 t' and 2 t' + 1.
DEVICE float column_max(float x) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, lanes));
    return x;
}
// State of the queries 2 t and 2 t + 1. sum: of query 2 t + g % 2, the part of the columns 2 t', 2 t' + 1 with
// t' = g / 2.
struct QueryState {
    float maximum[2], sum;
    DEVICE void clear() {
        maximum[0] = maximum[1] = NEGATIVE_INFINITY;
        sum = 0.0f;
    }
};
// A block's softmax step of one query tile: scores to right fragments of P. factor: what the results are multiplied by.
DEVICE void softmax_tile(Scores& s, int tile, QueryState& state, float (&factor)[2], Weights& p) {
    const bool odd = threadIdx.x & 4;
#pragma unroll
    for (int query = 0; query < 2; query++) {
        float largest = NEGATIVE_INFINITY;
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++)
            largest = fmaxf(largest, fmaxf(s[strip][tile][query], s[strip][tile][2 + query]));
        const float maximum = fmaxf(state.maximum[query], column_max(largest));
        factor[query] = rescale_factor(state.maximum[query], maximum);
        state.maximum[query] = maximum;
    }
    const float base[2] = {exponent_base(state.maximum[0]), exponent_base(state.maximum[1])};
    float quarters[STRIPS];
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++) {
        float sums[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float first = exp2_fast(s[strip][tile][2 * half] - base[0]);
            const float second = exp2_fast(s[strip][tile][2 * half + 1] - base[1]);
            p[strip][tile][half] = transpose_matrix(pack_half(first, second));
            // Two columns of a query that this lane goes on with; the neighbour goes on with the other query.
            sums[half] = __fadd_rn(odd ? second : first, __shfl_xor_sync(FULL_WARP, odd ? first : second, 4));
        }
        quarters[strip] = __fadd_rn(sums[0], sums[1]);
    }
    state.sum = grow_sum(state.sum, odd ? factor[1] : factor[0], quarters[0], quarters[1], quarters[2], quarters[3]);
}
// Sum of query 2 t + g % 2.
DEVICE float column_sum(float x) {
    x = __fadd_rn(x, __shfl_xor_sync(FULL_WARP, x, 8));
    return __fadd_rn(x, __shfl_xor_sync(FULL_WARP, x, 16));
}

// ---- the kernel ------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(32, RESIDENT)
    attention_decode(const u16* queries, const u64* page_table, const AttentionTile* tiles, float* partials,
                     float2* statistics, i32 layer, i32 max_pages, i32 max_splits, i32 tile_stride, i32 unsettled) {
    extern __shared__ __align__(128) u8 shared[];
    allow_next_kernel();
    const int g = threadIdx.x >> 2, t = threadIdx.x & 3;
    const AttentionTile tile = tiles[blockIdx.z];
    const Chunk chunk(tile, page_table, layer, max_pages, unsettled);
    if (chunk.first_sub >= chunk.end_sub) {
        wait_previous_kernel();
        return;
    }
    const u32 memory = shared_address(shared);
    PlaneRing<KeyCodes, KeyScales, K_STAGES> keys;
    PlaneRing<ValueCodes, ValueScales, V_STAGES> values;
    keys.start(chunk, memory, memory + BARRIERS);
    values.start(chunk, memory + V_SLOTS, memory + BARRIERS + 8 * K_STAGES);
#if HAS_BULK
    if (threadIdx.x == 0) {
        for (int i = 0; i < K_STAGES + V_STAGES; i++) barrier_init(memory + BARRIERS + 8 * i, 1);
        barrier_init_fence();
    }
    __syncwarp();
#endif

    // The first blocks, in the order in which later ones follow.
    constexpr int MOST_STAGES = K_STAGES > V_STAGES ? K_STAGES : V_STAGES;
    bool waited = false;
#pragma unroll 1
    for (int turn = 0; turn < MOST_STAGES; turn++) {
        const int key_slot = turn - (MOST_STAGES - K_STAGES), value_slot = turn - (MOST_STAGES - V_STAGES);
        if (!waited && max(keys.block, values.block) >= chunk.settled) {
            wait_previous_kernel();
            waited = true;
        }
        // A plane with fewer slots begins later; its empty group keeps the count that `wait` relies on.
        if (key_slot >= 0)
            keys.issue(chunk, key_slot);
#if !HAS_BULK
        else
            async_commit();
#endif
        if (value_slot >= 0)
            values.issue(chunk, value_slot);
#if !HAS_BULK
        else
            async_commit();
#endif
    }
    if (!waited) wait_previous_kernel();

    Queries q;
#pragma unroll
    for (int i = 0; i < QUERY_TILES; i++) {
        const Query query(8 * i + g);
        const size_t place = (size_t)(tile.first_row + query.row) * NUM_HEADS + query.head;
        u32 fragments[STEPS][2];
        load_query<K_PLANE>(fragments, query.row < tile.rows ? queries + place * HEAD_DIM : nullptr);
#pragma unroll
        for (int step = 0; step < STEPS; step++) q[step][i][0] = fragments[step][0], q[step][i][1] = fragments[step][1];
    }

    const u32 fold = memory + FOLD + threadIdx.x * 16;
    float totals[STEPS][4];
    float total_maximum[QUERY_TILES][2], total_sum[QUERY_TILES];
    FoldRun run;
    int block = chunk.first_block;
    for (int sub = chunk.first_sub; sub < chunk.end_sub; sub++) {
        QueryState states[QUERY_TILES];
        Results c;
#pragma unroll
        for (int i = 0; i < QUERY_TILES; i++) {
            states[i].clear();
#pragma unroll
            for (int j = 0; j < STEPS; j++) c[j][i][0] = c[j][i][1] = c[j][i][2] = c[j][i][3] = 0.0f;
        }
        const int sub_end = min(sub_split_begin(sub + 1), chunk.blocks);
        for (; block < sub_end; block++) {
            const int first_cell = block * BLOCK_CELLS;
            Scores s = {};
            keys.wait();
            KeyPlane<K_PLANE>::scores(s, q, keys.base());
            keys.release(chunk);
            if (first_cell + BLOCK_CELLS > tile.first_position + 1) {
                // Columns that are not there never mask.
#pragma unroll
                for (int i = 0; i < QUERY_TILES * 2; i++) {
                    const int row = Query(8 * (i >> 1) + 2 * t + (i & 1)).row;
                    const int left = (row < tile.rows ? tile.first_position + row + 1 : chunk.length) - first_cell;
#pragma unroll
                    for (int j = 0; j < STRIPS * 2; j++)
                        if (cell_of_column<V_PLANE>(8 * j + g) >= left)
                            s[j >> 1][i >> 1][2 * (j & 1) + (i & 1)] = NEGATIVE_INFINITY;
                }
            }
            Weights p;
            bool rescale = false;
            float factors[QUERY_TILES][2];
#pragma unroll
            for (int i = 0; i < QUERY_TILES; i++) {
                softmax_tile(s, i, states[i], factors[i], p);
                rescale |= factors[i][0] != 1.0f || factors[i][1] != 1.0f;
            }
            if (__any_sync(FULL_WARP, rescale)) {
#pragma unroll
                for (int i = 0; i < QUERY_TILES * STEPS * 4; i++)
                    c[i / 4 % STEPS][i / 4 / STEPS][i % 4] *= factors[i / 4 / STEPS][i & 1];
            }
            values.wait();
            if (first_cell + BLOCK_CELLS > chunk.length) clear_values(values.base(), chunk.length - first_cell);
            ValuePlane<V_PLANE>::multiply(c, values.base(), p);
            values.release(chunk);
        }

        run.enter(sub, chunk.end_sub);
#pragma unroll
        for (int i = 0; i < QUERY_TILES; i++) {
            if (run.begins) {
                total_maximum[i][0] = total_maximum[i][1] = NEGATIVE_INFINITY;
                total_sum[i] = 0.0f;
            }
            const FoldStep steps[2] = {fold_step(total_maximum[i][0], states[i].maximum[0]),
                                       fold_step(total_maximum[i][1], states[i].maximum[1])};
            const float sum = column_sum(states[i].sum);
            total_sum[i] = fold_value(total_sum[i], sum, g & 1 ? steps[1] : steps[0]);
#pragma unroll
            for (int j = 0; j < STEPS; j++) {
                const u32 place = fold + ((i - REGISTER_FOLDS) * STEPS + j) * 32 * 16;
                float4 total = make_float4(0, 0, 0, 0);
                if (!run.begins)
                    total = i < REGISTER_FOLDS ? make_float4(totals[j][0], totals[j][1], totals[j][2], totals[j][3])
                                               : load_shared_float4(place);
                c[j][i][0] = fold_value(total.x, c[j][i][0], steps[0]);
                c[j][i][1] = fold_value(total.y, c[j][i][1], steps[1]);
                c[j][i][2] = fold_value(total.z, c[j][i][2], steps[0]);
                c[j][i][3] = fold_value(total.w, c[j][i][3], steps[1]);
                if (i >= REGISTER_FOLDS && run.continues) store_shared_float4(place, c[j][i]);
#pragma unroll
                for (int k = 0; k < 4; k++)
                    if (i < REGISTER_FOLDS) totals[j][k] = c[j][i][k];
            }
            if (run.continues) continue;
#pragma unroll
            for (int second = 0; second < 2; second++) {
                const Query query(8 * i + 2 * t + second);
                if (query.row >= tile.rows) continue;
                const int row = scratch_row(tile, blockIdx.z, query.row, tile_stride);
                const size_t entry = ((size_t)row * NUM_HEADS + query.head) * max_splits + sub;
                ValuePlane<V_PLANE>::store(partials + entry * HEAD_DIM, c, i, second);
                if (g == second) statistics[entry] = make_float2(total_maximum[i][second], total_sum[i]);
            }
        }
    }
}
