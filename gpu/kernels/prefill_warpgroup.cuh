// Prefill attention of sm_90a: three warpgroups. The first fills a ring of stages with K and V tiles of one block each,
// which attention_tiles.cu has prepared; the other two take 64 query rows each and walk over the blocks.
//
// A walker keeps one block's P V running while it computes the next block's softmax:
//
//     scores(b + 1) and P(b) V(b) are started together; scores are waited for, turned into exponentials, then P V is
//     waited for, the accumulators are folded (b ends a sub-split) or rescaled, and the exponentials become P(b + 1).
#pragma once
#include "prefill_work.cuh"
#include "warpgroup.cuh"

#if HAS_WGMMA
// STAGES: of the tile ring. SHARED_QUERY_STEPS: k16 steps, a multiple of 4, whose queries stay in shared memory instead
// of registers. ALTERNATE: walkers start their products in turn. Registers of a filling and of a walking thread:
// f + 2 w <= 504.
#define FILLER_REGISTERS 24
#define WALKER_REGISTERS ((504 - FILLER_REGISTERS) / 2 / 8 * 8)

#define WALKERS 2
#define PART_TOKENS (64 / GROUP_HEADS)
#define REGISTER_QUERY_STEPS (KEY_STEPS - SHARED_QUERY_STEPS)

// Dynamic shared memory, from a multiple of 1024 bytes on:
//     stages of [K tile | V tile] | queries of each walker | folds | barriers
struct SharedLayout {
    static constexpr int FOLD_THREADS = WALKERS * 128;
    static constexpr int QUERIES = STAGES * 2 * TILE_BYTES;
    static constexpr int WALKER_QUERY_BYTES = SHARED_QUERY_STEPS * 64 * 32;
    static constexpr int FOLD = QUERIES + WALKERS * WALKER_QUERY_BYTES;
    static constexpr int FULL = FOLD + Folds<SharedLayout>::bytes(FOLD_THREADS);
    static constexpr int EMPTY = FULL + 8 * STAGES;
    static constexpr int BYTES = EMPTY + 8 * STAGES;
    DEVICE static u32 base() {
        extern __shared__ u8 dynamic_shared[];
        return (shared_address(dynamic_shared) + 1023) & ~1023u;
    }
    DEVICE static u32 fold_thread() { return not_kept(threadIdx.x) - 128; }
};
static_assert(SharedLayout::BYTES + 1024 <= SHARED_BYTES, "shared memory");
static_assert(SHARED_QUERY_STEPS % 4 == 0 && SHARED_QUERY_STEPS <= KEY_STEPS, "queries move by halves of head_dim");
static_assert(STAGES >= 2, "a stage is given back when the next one has arrived");

// ---- filling ----------------------------------------------------------------------------------------------------
// One thread brings the blocks of the CTA's items, one after the other, as soon as a stage is free. Bulk copies read
// what the kernel before stored in the usual way: the wait for that kernel's end orders them too, so no proxy fence is
// needed.
DEVICE void fill(const PrefillArguments& arguments) {
    const u32 shared = SharedLayout::base();
    u32 count = 0;
    for (int index = blockIdx.x; has_work(arguments, index); index = next_work(index)) {
        const WorkItem item = work_item(arguments, index);
        if (item.tile.rows <= 0) continue;
        const BlockSequence* sequence = arguments.sequences;
        while (sequence->slot != item.tile.slot) sequence++;
        const size_t first =
            (size_t)(item.kv_head - arguments.first_head) * arguments.num_blocks + sequence->first_block;
        const u8* source = arguments.blocks + first * (2 * TILE_BYTES);
        const int num_blocks = blocks_of(item.length());
        for (int block = 0; block < num_blocks; block++, count++, source += 2 * TILE_BYTES) {
            const u32 stage = count % STAGES, full = shared + SharedLayout::FULL + 8 * stage;
            barrier_wait(shared + SharedLayout::EMPTY + 8 * stage, count / STAGES & 1 ^ 1);
            barrier_expect(full, 2 * TILE_BYTES);
            bulk_copy(shared + stage * 2 * TILE_BYTES, source, 2 * TILE_BYTES, full);
        }
    }
}

// ---- walking ----------------------------------------------------------------------------------------------------
// What decides the way of a walker is the same in all of its lanes. Told by a shuffle, the compiler keeps it in uniform
// registers, and so all that follows from it: addresses, barriers and the descriptors of products.
DEVICE int uniform(int value) {
    return __shfl_sync(FULL_WARP, value, 0);
}

// Queries of a warpgroup: the first steps in registers, the others in its part of shared memory.
struct Queries {
    u32 fragment[REGISTER_QUERY_STEPS > 0 ? REGISTER_QUERY_STEPS : 1][4];
    DEVICE static u32 shared(int walker) {
        return SharedLayout::base() + SharedLayout::QUERIES + walker * SharedLayout::WALKER_QUERY_BYTES;
    }
    // All warps of the warpgroup have come here.
    DEVICE static void meet(int walker) {
        asm volatile("bar.sync %0, 128;" ::"r"(2 + walker) : "memory");
    }

    DEVICE void load(const PrefillArguments& arguments, const WorkItem& item, const LaneRows& rows, int walker) {
        u32 all[KEY_STEPS][4];
        load_queries(all, arguments, item, rows);
#pragma unroll
        for (int step = 0; step < REGISTER_QUERY_STEPS; step++)
#pragma unroll
            for (int i = 0; i < 4; i++) fragment[step][i] = all[step][i];
        if constexpr (SHARED_QUERY_STEPS > 0) {
            const int t = threadIdx.x & 3, row = (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x & 31) / 4;
            const u32 target = shared(walker) + 4 * t;
            meet(walker);  // the products of the item before have read theirs
#pragma unroll
            for (int step = REGISTER_QUERY_STEPS; step < KEY_STEPS; step++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int unit = 2 * (step - REGISTER_QUERY_STEPS) + (i >> 1);
                    store_shared32(target + tile_unit(row + 8 * (i & 1), unit), all[step][i]);
                }
            shared_to_async_fence();
            meet(walker);
        }
    }
    // Starts scores = queries keys.
    DEVICE void multiply(float (&scores)[32], u32 keys, int walker) const {
        const u64 b = descriptor_k_major(keys), a = descriptor_k_major(shared(walker));
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

// Blocks of the sub-split that begins with this one.
DEVICE int sub_split_blocks(int block) {
    return block < 16 ? 1 : block < 64 ? 2 : 4;
}

// A walker: its number, the stage of the ring that it is at, and the parity of the stage's use.
struct Walker {
    using Fold = Folds<SharedLayout>;
    int walker, stage;
    u32 parity;

    // The lane's first row of its warpgroup's 64.
    DEVICE static int row() {
        const int thread = not_kept(threadIdx.x);
        return (thread >> 5 & 3) * 16 + (thread & 31) / 4;
    }
    DEVICE int first_token() const { return walker * PART_TOKENS; }
    // Cells that the walker's tokens attend, 0 if it has none.
    DEVICE int own_length(const WorkItem& item) const {
        const int tokens = min(item.tile.rows - first_token(), PART_TOKENS);
        return tokens > 0 ? item.tile.first_position + first_token() + tokens : 0;
    }
    DEVICE LaneRows rows(const WorkItem& item) const {
        LaneRows rows;
        rows.place<PART_TOKENS>(item, first_token(), row());
        return rows;
    }

    DEVICE static u32 keys(int stage) { return SharedLayout::base() + stage * (2 * TILE_BYTES); }
    DEVICE int stage_before() const { return (stage == 0 ? STAGES : stage) - 1; }
    DEVICE void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    DEVICE void wait_full() const { barrier_wait(SharedLayout::base() + SharedLayout::FULL + 8 * stage, parity); }
    // Gives a stage back.
    DEVICE static void release(int stage) {
        if ((threadIdx.x & 31) == 0) barrier_arrive(SharedLayout::base() + SharedLayout::EMPTY + 8 * stage);
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

    // The walkers start their products in turn: while one's run, the other works on its exponentials. Both take a turn
    // for every block of an item, also of blocks that only one of them attends.
    DEVICE void begin_turns() const {
        if (ALTERNATE && walker == 1) asm volatile("bar.arrive 4, 256;" ::: "memory");
    }
    DEVICE void take_turn() const {
        if (ALTERNATE) asm volatile("bar.sync %0, 256;" ::"r"(4 + walker) : "memory");
    }
    DEVICE void pass_turn() const {
        if (ALTERNATE) asm volatile("bar.arrive %0, 256;" ::"r"(5 - walker) : "memory");
    }

    // Item `index`. The item itself is looked up again where it is needed: kept, it would cost registers.
    DEVICE void attend(const PrefillArguments& arguments, int index) {
        int num_blocks, first_length;
        Queries queries;
        {
            const WorkItem item = work_item(arguments, index);
            num_blocks = uniform(blocks_of(own_length(item)));
            first_length = uniform(item.tile.first_position + first_token() + 1);
            queries.load(arguments, item, rows(item), walker);
        }
        float total[LANE_VALUES], acc[LANE_VALUES], scores[32], factor[2];
        u32 p[4][4];
        RowState part;
        part.clear();
        Fold::begin(total);
        clear(acc);

        wait_full();
        take_turn();
        warpgroup_fence();
        queries.multiply(scores, keys(stage), walker);
        warpgroup_commit();
        pass_turn();
        warpgroup_wait<0>();
        pin_registers(scores);
        bool changed = softmax(scores, 0, num_blocks, first_length, part, factor);
        bool ended = false, accumulate = false;
        int last = 0;  // block of the sub-split under way
        FoldStep step[2];
        // Here `scores` are the exponentials of `block`, and P V of the block before is under way. That wait stands at
        // the top of the loop: within a run of instructions the compiler would put it before the exponentials.
#pragma unroll 1
        for (int block = 0;; block++) {
            warpgroup_wait<0>();
            pin_registers(acc);
            if (block > 0) release(stage_before());
            if (ended) {
                fold_values(total, acc, step);
                if (block % GROUP_BLOCKS == 0) Fold::close_group(total);
            } else if (changed) {
#pragma unroll
                for (int i = 0; i < LANE_VALUES; i++) acc[i] *= factor[(i >> 1) & 1];
            }
            accumulate = block > 0 && !ended;
            pack(scores, p);
            const bool is_last = block + 1 == num_blocks;
            ended = is_last || block == last;
            if (ended) {
                Fold::close_sub_split(part, step);
                last = block + sub_split_blocks(block + 1);
            }
            if (is_last) break;
            advance();
            wait_full();
            take_turn();
            warpgroup_fence();
            queries.multiply(scores, keys(stage), walker);
            warpgroup_commit();
            multiply_values(acc, p, keys(stage_before()) + TILE_BYTES, accumulate);
            warpgroup_commit();
            pass_turn();
            warpgroup_wait<1>();
            pin_registers(scores);
            changed = softmax(scores, block + 1, num_blocks, first_length, part, factor);
            pin_registers(scores);
        }
        warpgroup_fence();
        multiply_values(acc, p, keys(stage) + TILE_BYTES, accumulate);
        warpgroup_commit();
        warpgroup_wait<0>();
        pin_registers(acc);
        release(stage);
        advance();
        fold_values(total, acc, step);
        Fold::finish(total);
        const WorkItem item = work_item(arguments, not_kept(index));
        store_results(total, arguments, item, rows(item));
    }

    DEVICE void walk(const PrefillArguments& arguments) {
        begin_turns();
        for (int index = blockIdx.x; has_work(arguments, index); index = next_work(index)) {
            WorkItem item = work_item(arguments, index);
            if (uniform(item.tile.rows) <= 0) continue;
            if (uniform(own_length(item)) > 0) attend(arguments, index);
            // Blocks that only the other walker needs.
            item = work_item(arguments, not_kept(index));
            const int others = uniform(blocks_of(item.length()) - blocks_of(own_length(item)));
            for (int i = 0; i < others; i++) {
                wait_full();
                take_turn();
                pass_turn();
                release(stage);
                advance();
            }
        }
    }
};

DEVICE void attend_by_warpgroups(const PrefillArguments& arguments) {
    const u32 shared = SharedLayout::base();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared + SharedLayout::FULL + 8 * i, 1);
            barrier_init(shared + SharedLayout::EMPTY + 8 * i, WALKERS * 4);
        }
        barrier_init_fence();
        shared_to_async_fence();
    }
    __syncthreads();
    wait_previous_kernel();
    const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x >> 7, 0);
    if (warpgroup == 0) {
        lower_registers<FILLER_REGISTERS>();
        if (threadIdx.x == 0) fill(arguments);
    } else {
        raise_registers<WALKER_REGISTERS>();
        Walker{warpgroup - 1, 0, 0}.walk(arguments);
    }
}
#endif
