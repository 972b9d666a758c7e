// What the prefill kernels share: their arguments, the order of work, queries and results in registers.
//
// A work item is a tile (rows of one sequence) and a KV head. Its query rows, GROUP_HEADS per token, fill the rows of
// the products: row r of a part is token r / GROUP_HEADS, query head r % GROUP_HEADS of the KV head.
#pragma once
#include "activation.cuh"
#include "prefill_blocks.cuh"
#include "rotations.cuh"

#define GROUP_HEADS (NUM_HEADS / NUM_KV_HEADS)
#define KEY_STEPS (HEAD_DIM / 16)
#define LANE_VALUES (HEAD_DIM / 2)  // of the result, in a lane: two rows
static_assert(NUM_HEADS % NUM_KV_HEADS == 0 && GROUP_HEADS >= 1 && GROUP_HEADS <= 8, "1 to 8 query heads per KV head");

// queries: (rows, NUM_HEADS, HEAD_DIM) f16, rotated and scaled. page_table: (slots, max_pages) addresses.
// tiles: (num_tiles) AttentionTile. activation: bf16, K = NUM_HEADS * HEAD_DIM. first_head, num_heads: KV heads that
// are attended. By warpgroups, blocks: what attention_tiles.cu wrote of `sequences` for these heads, num_blocks a head.
struct PrefillArguments {
    const u16* queries;
    const u64* page_table;
    const AttentionTile* tiles;
    u16* activation;
    const u8* blocks;
    const BlockSequence* sequences;
    int layer, max_pages, num_tiles, num_blocks, first_head, num_heads;
    // By warps, the KV heads are always all: known, they cost no registers.
    DEVICE int heads() const { return HAS_WGMMA ? num_heads : NUM_KV_HEADS; }
    DEVICE int head(int index) const { return HAS_WGMMA ? first_head + index : index; }
};

struct WorkItem {
    AttentionTile tile;
    int kv_head;
    DEVICE int length() const { return tile.first_position + tile.rows; }
};

// Work items of a CTA by index: blockIdx.x, then one of each further gridDim.x. Items come longest first; every other
// time they are taken in reverse, so that CTAs with long items get short ones next.
DEVICE int next_work(int index) {
    const int turn = index / (int)gridDim.x;
    return (2 * turn + 2) * (int)gridDim.x - 1 - index;
}
DEVICE bool has_work(const PrefillArguments& arguments, int index) {
    return index < arguments.num_tiles * arguments.heads();
}
DEVICE WorkItem work_item(const PrefillArguments& arguments, int index) {
    const int4 entry = *(const int4*)(arguments.tiles + index / arguments.heads());
    return {{entry.x, entry.y, entry.z, entry.w}, arguments.head(index % arguments.heads())};
}

// The two rows of a lane in a part of the products that begins with token `first_token` of the tile.
struct LaneRows {
    int token[2], head[2];
    bool valid[2];
    // row: of the part, for the lane's first row. PART_TOKENS: tokens of the part.
    template <int PART_TOKENS>
    DEVICE void place(const WorkItem& item, int first_token, int row) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int in_part = (row + 8 * i) / GROUP_HEADS;
            token[i] = first_token + in_part;
            head[i] = item.kv_head * GROUP_HEADS + (row + 8 * i) % GROUP_HEADS;
            valid[i] = in_part < PART_TOKENS && token[i] < item.tile.rows;
        }
    }
};

// ---- folds ----------------------------------------------------------------------------------------------------------
DEVICE bool ends_sub_split(int block) {
    return block < 16 || (block < 64 ? (block & 1) == 1 : (block & 3) == 3);
}

DEVICE void clear(float (&values)[LANE_VALUES]) {
#pragma unroll
    for (int i = 0; i < LANE_VALUES; i++) values[i] = 0.0f;
}
DEVICE void fold_values(float (&total)[LANE_VALUES], const float (&part)[LANE_VALUES], const FoldStep (&step)[2]) {
#pragma unroll
    for (int i = 0; i < LANE_VALUES; i++) total[i] = fold_value(total[i], part[i], step[(i >> 1) & 1]);
}

// The two folds of a lane's rows: sub-splits into a group's, whose values are in registers (`total`), and groups into
// those before them. Shared memory keeps all maxima and sums, which a quad's lanes read and write together, and the
// values of the groups before, each lane's at places of its own:
//     values [LANE_VALUES / 4][thread][16 bytes] | rows of the group [row][maximum, sum] | rows of the groups before
// Shared: where this is (base() + FOLD) and the number of the calling thread (fold_thread()) among FOLD_THREADS.
template <typename Shared>
struct Folds {
    DEVICE static constexpr int rows_bytes(int threads) { return threads / 32 * 16 * 8; }
    DEVICE static constexpr int bytes(int threads) { return LANE_VALUES * 4 * threads + 2 * rows_bytes(threads); }

    // Nothing folded yet.
    DEVICE static void begin(float (&total)[LANE_VALUES]) {
        RowState none;
        none.clear();
        store(group(), none);
        store(outer(), none);
        clear(total);
    }
    // The end of a sub-split: its maxima and sums go to the group's, `step` says how its values will (`fold_values`),
    // and the next one begins.
    DEVICE static void close_sub_split(RowState& part, FoldStep (&step)[2]) {
        RowState rows = load(group());
        part.sum[0] = quad_sum(part.sum[0]);
        part.sum[1] = quad_sum(part.sum[1]);
        fold_rows(rows, part, step);
        store(group(), rows);
        part.clear();
    }
    // The end of a group: it goes to those before it, and the next one begins.
    DEVICE static void close_group(float (&total)[LANE_VALUES]) {
        store(outer(), add_group(total));
#pragma unroll
        for (int i = 0; i < LANE_VALUES; i += 4)
            store_shared_float4(values() + i * 4 * Shared::FOLD_THREADS, total + i);
        RowState none;
        none.clear();
        store(group(), none);
        clear(total);
    }
    // The end of the last group: total becomes the result.
    DEVICE static void finish(float (&total)[LANE_VALUES]) {
        const RowState rows = add_group(total);
        const float inverse[2] = {__frcp_rn(rows.sum[0]), __frcp_rn(rows.sum[1])};
#pragma unroll
        for (int i = 0; i < LANE_VALUES; i++) total[i] = __fmul_rn(total[i], inverse[(i >> 1) & 1]);
    }

  private:
    DEVICE static u32 values() { return Shared::base() + Shared::FOLD + Shared::fold_thread() * 16; }
    DEVICE static u32 group() {
        const u32 thread = Shared::fold_thread(), row = thread / 32 * 16 + thread % 32 / 4;
        return Shared::base() + Shared::FOLD + LANE_VALUES * 4 * Shared::FOLD_THREADS + row * 8;
    }
    DEVICE static u32 outer() { return group() + rows_bytes(Shared::FOLD_THREADS); }

    DEVICE static RowState load(u32 place) {
        RowState rows;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float2 kept = load_shared_float2(place + 64 * i);
            rows.maximum[i] = kept.x;
            rows.sum[i] = kept.y;
        }
        return rows;
    }
    DEVICE static void store(u32 place, const RowState& rows) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; i++) store_shared_float2(place + 64 * i, rows.maximum[i], rows.sum[i]);
        __syncwarp();
    }
    DEVICE static void fold_rows(RowState& total, const RowState& part, FoldStep (&step)[2]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            step[i] = fold_step(total.maximum[i], part.maximum[i]);
            total.sum[i] = fold_value(total.sum[i], part.sum[i], step[i]);
        }
    }
    // Groups before and the group in `total`, put together in total. Returns maxima and sums.
    DEVICE static RowState add_group(float (&total)[LANE_VALUES]) {
        RowState rows = load(outer());
        const bool is_first = rows.maximum[0] == NEGATIVE_INFINITY && rows.maximum[1] == NEGATIVE_INFINITY;
        FoldStep step[2];
        fold_rows(rows, load(group()), step);
#pragma unroll
        for (int i = 0; i < LANE_VALUES; i += 4) {
            const float4 before = is_first ? make_float4(0.0f, 0.0f, 0.0f, 0.0f)
                                           : load_shared_float4(values() + i * 4 * Shared::FOLD_THREADS);
            total[i] = fold_value(before.x, total[i], step[0]);
            total[i + 1] = fold_value(before.y, total[i + 1], step[0]);
            total[i + 2] = fold_value(before.z, total[i + 2], step[1]);
            total[i + 3] = fold_value(before.w, total[i + 3], step[1]);
        }
        return rows;
    }
};

// ---- queries and results
// ---------------------------------------------------------------------------------------------- Positions `position`
// and + 1 of a query, in the order of K's rows.
DEVICE u32 query_pair(const u16* query, int position) {
    const int first = key_position_dimension<K_PLANE, HEAD_DIM>(position);
    if (K_PLANE == PLANE_F16) return *(const u32*)(query + first);
    return (u32)query[first] | ((u32)query[key_position_dimension<K_PLANE, HEAD_DIM>(position + 1)] << 16);
}
// Left fragments of a lane's rows; zeros for rows that do not exist.
DEVICE void load_queries(u32 (&fragment)[KEY_STEPS][4], const PrefillArguments& arguments, const WorkItem& item,
                         const LaneRows& rows) {
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const size_t row = (size_t)(item.tile.first_row + rows.token[i]) * NUM_HEADS + rows.head[i];
        const u16* query = arguments.queries + row * HEAD_DIM;
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++) {
            fragment[step][i] = rows.valid[i] ? query_pair(query, 16 * step + 2 * t) : 0;
            fragment[step][2 + i] = rows.valid[i] ? query_pair(query, 16 * step + 2 * t + 8) : 0;
        }
    }
}

// values[4 n + 2 i + e]: row i of a lane, position 8 n + 2 t + e of a row of V. Undoes the rotation of a rotated format
// (q4: lane t holds the dimensions 8 n + t and 8 n + t + 4).
DEVICE void rotate_back(float (&values)[LANE_VALUES]) {
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
#pragma unroll
        for (int i = 0; i < LANE_VALUES; i++) {
            const float other = __shfl_xor_sync(FULL_WARP, values[i], lanes);
            values[i] = t & lanes ? __fsub_rn(other, values[i]) : __fadd_rn(values[i], other);
        }
    }
    // Strides of the index: 1 is dimension stride 4, 4 is 8, 8 is 16, ...; 2 is the other row.
#pragma unroll
    for (int stride = 1; stride < LANE_VALUES; stride *= stride == 1 ? 4 : 2) {
#pragma unroll
        for (int i = 0; i < LANE_VALUES; i++) {
            if (i & stride) continue;
            const float low = values[i], high = values[i + stride];
            values[i] = __fadd_rn(low, high);
            values[i + stride] = __fsub_rn(low, high);
        }
    }
#pragma unroll
    for (int i = 0; i < LANE_VALUES; i++) values[i] = __fmul_rn(values[i], HeadScale<HEAD_DIM / 32>::HADAMARD);
}

// Writes the results of a lane's rows, values as in `rotate_back`, as activations of the output product.
DEVICE void store_results(float (&values)[LANE_VALUES], const PrefillArguments& arguments, const WorkItem& item,
                          const LaneRows& rows) {
    const int t = threadIdx.x & 3, quad = threadIdx.x & 28;
    if constexpr (PlaneTraits<V_PLANE>::ROTATED) rotate_back(values);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = item.tile.first_row + rows.token[i];
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++) {
            u32 pair = pack_bf16(values[4 * n + 2 * i], values[4 * n + 2 * i + 1]);
            if constexpr (V_PLANE == PLANE_Q4) {  // lane t has t and t + 4, and takes 2 t and 2 t + 1
                const u32 first = __shfl_sync(FULL_WARP, pair, quad + (2 * t & 3));
                const u32 second = __shfl_sync(FULL_WARP, pair, quad + (2 * t & 3) + 1);
                pair = permute_bytes(first, second, t < 2 ? 0x5410 : 0x7632);
            }
            const int k = rows.head[i] * HEAD_DIM + 8 * n + 2 * t;
            if (rows.valid[i])
                *(u32*)(arguments.activation + activation_index<ACTIVATION_LAYOUT>(row, k, NUM_HEADS * HEAD_DIM)) =
                    pair;
        }
    }
}
