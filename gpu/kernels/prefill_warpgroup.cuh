// Prefill attention of sm_90a: three warpgroups. The first fills a ring of stages with K and V tiles of one block each;
// the other two take 64 query rows each and walk over the blocks.
//
// A walker keeps one block's P V running while it computes the next block's softmax:
//
//     scores(b + 1) and P(b) V(b) are started together; scores are waited for, turned into exponentials, then P V is
//     waited for, the accumulators are folded (b ends a sub-split) or rescaled, and the exponentials become P(b + 1).
//
// Quantized planes arrive as codes by bulk copies in a ring of their own and are converted once for both walkers.
#pragma once
#include "prefill_work.cuh"
#include "warpgroup.cuh"

#if HAS_WGMMA
// STAGES, CODE_STAGES: of the tile ring and of the ring of codes. SHARED_QUERY_STEPS: k16 steps, a multiple of 4, whose
// queries stay in shared memory instead of registers. Registers of a filling and of a walking thread: f + 2 w <= 504.
#define FILLER_REGISTERS 40
#define WALKER_REGISTERS ((504 - FILLER_REGISTERS) / 2 / 8 * 8)

#define QUANTIZED (K_PLANE != PLANE_F16 || V_PLANE != PLANE_F16)
#define WALKERS 2
#define PART_TOKENS (64 / GROUP_HEADS)
#define TILE_BYTES (HEAD_DIM / 64 * TILE_HALF_BYTES)
#define REGISTER_QUERY_STEPS (KEY_STEPS - SHARED_QUERY_STEPS)

// Dynamic shared memory, from a multiple of 1024 bytes on:
//     stages of [K tile | V tile] | queries of each walker | codes | folds | barriers
struct CodeLayout {
    template <int FORMAT>
    DEVICE static constexpr int bytes() {
        return FORMAT == PLANE_F16 ? 0
                                   : BLOCK_CELLS * (PlaneShape<FORMAT, HEAD_DIM>::CODE_BYTES +
                                                    PlaneShape<FORMAT, HEAD_DIM>::SCALE_BYTES);
    }
    static constexpr int K_CODES = 0, K_SCALES = BLOCK_CELLS * PlaneShape<K_PLANE, HEAD_DIM>::CODE_BYTES;
    static constexpr int V_CODES = bytes<K_PLANE>();
    static constexpr int V_SCALES = V_CODES + BLOCK_CELLS * PlaneShape<V_PLANE, HEAD_DIM>::CODE_BYTES;
    static constexpr int BYTES = bytes<K_PLANE>() + bytes<V_PLANE>();
};
struct SharedLayout {
    static constexpr int FOLD_THREADS = WALKERS * 128;
    static constexpr int QUERIES = STAGES * 2 * TILE_BYTES;
    static constexpr int WALKER_QUERY_BYTES = SHARED_QUERY_STEPS * 64 * 32;
    static constexpr int CODES = QUERIES + WALKERS * WALKER_QUERY_BYTES;
    static constexpr int FOLD = CODES + CODE_STAGES * CodeLayout::BYTES;
    static constexpr int FULL = FOLD + Folds<SharedLayout>::bytes(FOLD_THREADS);
    static constexpr int EMPTY = FULL + 8 * STAGES;
    static constexpr int CODES_FULL = EMPTY + 8 * STAGES;
    static constexpr int BYTES = CODES_FULL + 8 * CODE_STAGES;
    DEVICE static u32 base() {
        extern __shared__ u8 dynamic_shared[];
        return (shared_address(dynamic_shared) + 1023) & ~1023u;
    }
    DEVICE static u32 fold_thread() { return not_kept(threadIdx.x) - 128; }
};
static_assert(SharedLayout::BYTES + 1024 <= SHARED_BYTES, "shared memory");
static_assert(SHARED_QUERY_STEPS % 4 == 0 && SHARED_QUERY_STEPS <= KEY_STEPS, "queries move by halves of head_dim");
static_assert(STAGES >= 3, "copies are announced one block late");

// Stage of a ring that the block number `count` of a CTA takes, and the parity of that use.
template <int COUNT>
DEVICE u32 stage_of(u32 count) {
    return count % COUNT;
}
template <int COUNT>
DEVICE u32 parity_of(u32 count) {
    return count / COUNT & 1;
}

// ---- filling
// ----------------------------------------------------------------------------------------------------------- Codes of
// one plane of a block in shared memory. length: cells from here on have scale 0, so that their values are 0.
template <int FORMAT>
struct SharedCodes {
    u32 codes, scales;
    int length;
    DEVICE uint4 load16(int cell, int byte) const {
        return load_shared128(codes + cell * PlaneShape<FORMAT, HEAD_DIM>::CODE_BYTES + byte);
    }
    DEVICE uint2 load8(int cell, int byte) const {
        return load_shared64(codes + cell * PlaneShape<FORMAT, HEAD_DIM>::CODE_BYTES + byte);
    }
    DEVICE u32 scale(int cell, int group) const {
        const u32 bits = load_shared16(scales + cell * PlaneShape<FORMAT, HEAD_DIM>::SCALE_BYTES + 2 * group);
        return cell < length ? bits : 0;
    }
};

// The lanes of a warp copy the codes and scales of a block: four parts of each page.
DEVICE void fetch_codes(u32 target, u32 barrier, const u64* pages, u64 layer, int kv_head, int block, int length) {
    using K = PlaneShape<K_PLANE, HEAD_DIM>;
    using V = PlaneShape<V_PLANE, HEAD_DIM>;
    const int lane = not_kept(threadIdx.x) & 31, part = lane & 3, page = lane >> 2;
    const int first_cell = block * BLOCK_CELLS, cells = min(length - first_cell, BLOCK_CELLS);
    const int num_pages = (cells + Pages::CELLS - 1) / Pages::CELLS;
    if (lane == 0) barrier_expect(barrier, num_pages * (CodeLayout::BYTES / Pages::COUNT));
    __syncwarp();
    if (page >= num_pages) return;
    const bool values = part >= 2, scales = part & 1;
    const int cell_bytes =
        values ? (scales ? V::SCALE_BYTES : V::CODE_BYTES) : (scales ? K::SCALE_BYTES : K::CODE_BYTES);
    const int offset =
        values ? (scales ? Offsets::V_SCALES : Offsets::V_CODES) : (scales ? Offsets::K_SCALES : Offsets::K_CODES);
    const int place = values ? (scales ? CodeLayout::V_SCALES : CodeLayout::V_CODES)
                             : (scales ? CodeLayout::K_SCALES : CodeLayout::K_CODES);
    if ((values ? V_PLANE : K_PLANE) == PLANE_F16) return;
    const int cell = first_cell + page * Pages::CELLS;
    const int place_in_page = Pages::place(block, page * Pages::CELLS);
    const u64 source =
        pages[Pages::page(cell)] + layer + offset + (u32)((kv_head * PAGE_SIZE + place_in_page) * cell_bytes);
    bulk_copy(target + place + page * Pages::CELLS * cell_bytes, (const void*)source, Pages::CELLS * cell_bytes,
              barrier);
}

// Converts a quantized plane of a block into its tile. codes, scales: of the plane in shared memory; cells: of the
// block that exist, for V.
template <int FORMAT, bool IS_V>
DEVICE void convert_plane(u32 tile, u32 codes, u32 scales, int cells) {
    const int thread = not_kept(threadIdx.x), lane = thread & 31, t = lane & 3;
    const SharedCodes<FORMAT> source{codes, scales, IS_V ? cells : BLOCK_CELLS};
#pragma unroll 1
    for (int row = thread / 32 * 8 + converted_row(lane); row < BLOCK_CELLS; row += 32) {
        const int cell = cell_of_column<V_PLANE>(row);
        if constexpr (IS_V)
            TileWriter<FORMAT, HEAD_DIM>::values(tile, row, cell, t, source);
        else
            TileWriter<FORMAT, HEAD_DIM>::keys(tile, row, cell, t, source);
    }
}

// A block of a CTA's work: the blocks of its items, one after the other.
struct WorkBlock {
    WorkItem item;
    int index, block;
    // The block that comes `block` blocks after the first one of item `index`. False when there is none.
    DEVICE bool find(const PrefillArguments& arguments) {
        for (; has_work(arguments, index); index = next_work(index)) {
            item = work_item(arguments, not_kept(index));
            const int num_blocks = item.tile.rows > 0 ? blocks_of(item.length()) : 0;
            if (block < num_blocks) return true;
            block -= num_blocks;
        }
        return false;
    }
};

// Fetches the codes of the block that comes `ahead` blocks after (index, block) into a place of the ring of codes.
DEVICE void fetch_ahead(const PrefillArguments& arguments, u32 stage, int index, int block, int ahead) {
    WorkBlock next;
    next.index = index;
    next.block = block + ahead;
    if (!next.find(arguments)) return;
    const u32 shared = SharedLayout::base();
    fetch_codes(shared + SharedLayout::CODES + stage * CodeLayout::BYTES, shared + SharedLayout::CODES_FULL + 8 * stage,
                pages_of(arguments, next.item), (u64)arguments.layer * Offsets::LAYER_BYTES, next.item.kv_head,
                next.block, next.item.length());
}

DEVICE void announce(u32 count) {
    shared_to_async_fence();
    barrier_arrive(SharedLayout::base() + SharedLayout::FULL + 8 * stage_of<STAGES>(count));
}

DEVICE void fill(const PrefillArguments& arguments) {
    const bool fetches = QUANTIZED && threadIdx.x < 32;
    if (fetches)
        for (int i = 0; i < CODE_STAGES; i++) fetch_ahead(arguments, i, blockIdx.x, 0, i);
    WorkBlock work;
    work.index = blockIdx.x;
    work.block = 0;
    u32 count = 0;
    for (; work.find(arguments); work.block++, count++) {
        const u32 shared = SharedLayout::base(), stage = stage_of<STAGES>(count),
                  keys = shared + stage * 2 * TILE_BYTES, values = keys + TILE_BYTES;
        const int length = work.item.length();
        barrier_wait(shared + SharedLayout::EMPTY + 8 * stage, parity_of<STAGES>(count) ^ 1);
        if constexpr (K_PLANE == PLANE_F16 || V_PLANE == PLANE_F16) {
            const u64* pages = pages_of(arguments, work.item);
            const u64 head = (u64)arguments.layer * Offsets::LAYER_BYTES + work.item.kv_head * PAGE_SIZE * HEAD_DIM * 2;
            copy_plane<K_PLANE, 128>(keys, pages, head + Offsets::K_CODES, work.block, length);
            copy_plane<V_PLANE, 128>(values, pages, head + Offsets::V_CODES, work.block, length);
            async_commit();
        }
        if constexpr (QUANTIZED) {
            const u32 code_stage = stage_of<CODE_STAGES>(count);
            barrier_wait(shared + SharedLayout::CODES_FULL + 8 * code_stage, parity_of<CODE_STAGES>(count));
            const u32 codes = shared + SharedLayout::CODES + code_stage * CodeLayout::BYTES;
            convert_plane<K_PLANE, false>(keys, codes + CodeLayout::K_CODES, codes + CodeLayout::K_SCALES, BLOCK_CELLS);
            convert_plane<V_PLANE, true>(values, codes + CodeLayout::V_CODES, codes + CodeLayout::V_SCALES,
                                         length - work.block * BLOCK_CELLS);
            async_wait<0>();
            announce(not_kept(count));
            asm volatile("bar.sync 1, 128;" ::: "memory");
            if (fetches) fetch_ahead(arguments, code_stage, work.index, work.block, CODE_STAGES);
        } else {
            // Copies of this block are under way while those of the one before arrive.
            async_wait<1>();
            if (count > 0) announce(count - 1);
        }
    }
    if (!QUANTIZED && count > 0) {
        async_wait<0>();
        announce(count - 1);
    }
}

// ---- walking
// -----------------------------------------------------------------------------------------------------------

// Queries of a warpgroup: the first steps in registers, the others in its part of shared memory.
struct Queries {
    u32 fragment[REGISTER_QUERY_STEPS > 0 ? REGISTER_QUERY_STEPS : 1][4];
    DEVICE static u32 shared() {
        return SharedLayout::base() + SharedLayout::QUERIES +
               ((threadIdx.x >> 7) - 1) * SharedLayout::WALKER_QUERY_BYTES;
    }
    // All warps of the warpgroup have come here.
    DEVICE static void meet() {
        if (threadIdx.x < 256)
            asm volatile("bar.sync 2, 128;" ::: "memory");
        else
            asm volatile("bar.sync 3, 128;" ::: "memory");
    }

    DEVICE void load(const PrefillArguments& arguments, const WorkItem& item, const LaneRows& rows) {
        u32 all[KEY_STEPS][4];
        load_queries(all, arguments, item, rows);
#pragma unroll
        for (int step = 0; step < REGISTER_QUERY_STEPS; step++)
#pragma unroll
            for (int i = 0; i < 4; i++) fragment[step][i] = all[step][i];
        if constexpr (SHARED_QUERY_STEPS > 0) {
            const int t = threadIdx.x & 3, row = (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x & 31) / 4;
            const u32 target = shared() + 4 * t;
            meet();  // the products of the item before have read theirs
#pragma unroll
            for (int step = REGISTER_QUERY_STEPS; step < KEY_STEPS; step++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int unit = 2 * (step - REGISTER_QUERY_STEPS) + (i >> 1);
                    store_shared32(target + tile_unit(row + 8 * (i & 1), unit), all[step][i]);
                }
            shared_to_async_fence();
            meet();
        }
    }
    // Starts scores = queries keys.
    DEVICE void multiply(float (&scores)[32], u32 keys) const {
        const u64 b = descriptor_k_major(keys), a = descriptor_k_major(not_kept(shared()));
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++) {
            const u64 b_step = descriptor_at(b, (step >> 2) * TILE_HALF_BYTES + (step & 3) * 32);
            if (step < REGISTER_QUERY_STEPS) {
                const u32(&left)[4] = fragment[step];
                warpgroup_multiply_half(scores, left[0], left[1], left[2], left[3], b_step, step > 0);
            } else {
                const int in_shared = step - REGISTER_QUERY_STEPS;
                const u64 a_step = descriptor_at(a, (in_shared >> 2) * TILE_HALF_BYTES + (in_shared & 3) * 32);
                warpgroup_multiply_half(scores, a_step, b_step, step > 0);
            }
        }
    }
};

// Starts acc = P values, or acc += P values when `accumulate`.
DEVICE void multiply_values(float (&acc)[LANE_VALUES], const u32 (&p)[4][4], u32 values, bool accumulate) {
    const u64 b = descriptor_column_major(values, TILE_HALF_BYTES);
#pragma unroll
    for (int step = 0; step < 4; step++)
        warpgroup_multiply_half_columns(acc, p[step][0], p[step][1], p[step][2], p[step][3],
                                        descriptor_at(b, step * 16 * TILE_ROW_BYTES), step > 0 || accumulate);
}

// A walker: its place in the ring is the address of a stage's K tile, with the parity of the stage's use in bit 0.
struct Walker {
    using Fold = Folds<SharedLayout>;
    static constexpr u32 STAGE_BYTES = 2 * TILE_BYTES;
    u32 place = SharedLayout::base();

    DEVICE static int index() { return (not_kept(threadIdx.x) >> 7) - 1; }
    // The lane's first row of its warpgroup's 64.
    DEVICE static int row() {
        const int thread = not_kept(threadIdx.x);
        return (thread >> 5 & 3) * 16 + (thread & 31) / 4;
    }
    DEVICE static int first_token() { return index() * PART_TOKENS; }
    // Cells that the walker's tokens attend, 0 if it has none.
    DEVICE static int own_length(const WorkItem& item) {
        const int tokens = min(item.tile.rows - first_token(), PART_TOKENS);
        return tokens > 0 ? item.tile.first_position + first_token() + tokens : 0;
    }
    DEVICE static LaneRows rows(const WorkItem& item) {
        LaneRows rows;
        rows.place<PART_TOKENS>(item, first_token(), row());
        return rows;
    }

    DEVICE u32 keys() const { return place & ~1u; }
    // K tile of the stage before.
    DEVICE u32 keys_before() const {
        return (keys() == SharedLayout::base() ? SharedLayout::base() + STAGES * STAGE_BYTES : keys()) - STAGE_BYTES;
    }
    DEVICE void advance() {
        place += STAGE_BYTES;
        if (keys() == SharedLayout::base() + STAGES * STAGE_BYTES) place = (place - STAGES * STAGE_BYTES) ^ 1;
    }
    // Barrier at `barriers` of the stage with this K tile.
    DEVICE static u32 barrier(int barriers, u32 stage_keys) {
        const u32 shared = SharedLayout::base();
        return shared + barriers + (stage_keys - shared) / STAGE_BYTES * 8;
    }
    DEVICE void wait_full() const { barrier_wait(barrier(SharedLayout::FULL, keys()), place & 1); }
    // Gives the stage with this K tile back.
    DEVICE static void release(u32 stage_keys) {
        if ((threadIdx.x & 31) == 0) barrier_arrive(barrier(SharedLayout::EMPTY, stage_keys));
    }

    // Masks a block, if rows may end in it, and makes its scores exponentials. first_length: cells that the walker's
    // first token attends. PART_TOKENS <= BLOCK_CELLS tokens end in the last two of their blocks.
    DEVICE static bool softmax(float (&scores)[32], int block, int num_blocks, int first_length, RowState& part,
                               float (&factor)[2]) {
        float (&s)[BLOCK_TILES][4] = reinterpret_cast<float (&)[BLOCK_TILES][4]>(scores);
        if (block + 2 >= num_blocks) {
            const int top = row(),
                      length[2] = {first_length + top / GROUP_HEADS, first_length + (top + 8) / GROUP_HEADS};
            mask_tiles<V_PLANE, BLOCK_TILES>(s, 0, block * BLOCK_CELLS, length);
        }
        return exponentiate_block(s, part, factor);
    }
    DEVICE static void pack(const float (&scores)[32], u32 (&p)[4][4]) {
        const float (&s)[BLOCK_TILES][4] = reinterpret_cast<const float (&)[BLOCK_TILES][4]>(scores);
#pragma unroll
        for (int i = 0; i < 4; i++) pack_tiles(s + 2 * i, p[i]);
    }

    // Item `index`. The item itself is looked up again where it is needed: kept, it would cost registers.
    DEVICE void attend(const PrefillArguments& arguments, int index) {
        int num_blocks, first_length;
        Queries queries;
        {
            const WorkItem item = work_item(arguments, index);
            num_blocks = blocks_of(own_length(item));
            first_length = item.tile.first_position + first_token() + 1;
            queries.load(arguments, item, rows(item));
        }
        float total[LANE_VALUES], acc[LANE_VALUES], scores[32], factor[2];
        u32 p[4][4];
        RowState part;
        part.clear();
        Fold::begin(total);
        clear(acc);

        wait_full();
        warpgroup_fence();
        queries.multiply(scores, keys());
        warpgroup_commit();
        warpgroup_wait<0>();
        pin_registers(scores);
        bool changed = softmax(scores, 0, num_blocks, first_length, part, factor);
        bool ended = not_kept(0), accumulate = false;
        FoldStep step[2];
        // Here `scores` are the exponentials of `block`, and P V of the block before is under way. That wait stands at
        // the top of the loop: within a run of instructions the compiler would put it before the exponentials.
#pragma unroll 1
        for (int block = 0;; block++) {
            warpgroup_wait<0>();
            pin_registers(acc);
            if (block > 0) release(keys_before());
            if (ended) {
                fold_values(total, acc, step);
                if (block % GROUP_BLOCKS == 0) Fold::close_group(total);
            } else if (changed) {
#pragma unroll
                for (int i = 0; i < LANE_VALUES; i++) acc[i] *= factor[(i >> 1) & 1];
            }
            accumulate = block > 0 && !ended;
            pack(scores, p);
            ended = block + 1 == num_blocks || ends_sub_split(block);
            if (ended) Fold::close_sub_split(part, step);
            if (block + 1 == num_blocks) break;
            advance();
            wait_full();
            warpgroup_fence();
            queries.multiply(scores, keys());
            warpgroup_commit();
            multiply_values(acc, p, keys_before() + TILE_BYTES, accumulate);
            warpgroup_commit();
            warpgroup_wait<1>();
            pin_registers(scores);
            changed = softmax(scores, block + 1, num_blocks, first_length, part, factor);
            pin_registers(scores);
        }
        warpgroup_fence();
        multiply_values(acc, p, keys() + TILE_BYTES, accumulate);
        warpgroup_commit();
        warpgroup_wait<0>();
        pin_registers(acc);
        release(keys());
        advance();
        fold_values(total, acc, step);
        Fold::finish(total);
        const WorkItem item = work_item(arguments, not_kept(index));
        store_results(total, arguments, item, rows(item));
    }

    DEVICE void walk(const PrefillArguments& arguments) {
        for (int index = blockIdx.x; has_work(arguments, index); index = next_work(index)) {
            WorkItem item = work_item(arguments, index);
            if (item.tile.rows <= 0) continue;
            if (own_length(item) > 0) attend(arguments, index);
            // Blocks that only the other walker needs.
            item = work_item(arguments, not_kept(index));
            for (int block = blocks_of(own_length(item)); block < blocks_of(item.length()); block++) {
                wait_full();
                release(keys());
                advance();
            }
        }
    }
};

DEVICE void attend_by_warpgroups(const PrefillArguments& arguments) {
    const u32 shared = SharedLayout::base();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared + SharedLayout::FULL + 8 * i, 128);
            barrier_init(shared + SharedLayout::EMPTY + 8 * i, WALKERS * 4);
        }
        for (int i = 0; i < CODE_STAGES; i++) barrier_init(shared + SharedLayout::CODES_FULL + 8 * i, 1);
        barrier_init_fence();
        shared_to_async_fence();
    }
    __syncthreads();
    wait_previous_kernel();
    const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x >> 7, 0);
    if (warpgroup == 0) {
        lower_registers<FILLER_REGISTERS>();
        fill(arguments);
    } else {
        raise_registers<WALKER_REGISTERS>();
        Walker().walk(arguments);
    }
}
#endif
