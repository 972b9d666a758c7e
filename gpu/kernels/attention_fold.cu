// Completes decode attention: folds a row's sub-splits (docs/cuda-kernels.md, section 2), undoes the rotation of V and
// writes the activation of the output product.
//
// Grid (rows of a tile, query heads, tiles). A warp folds one group of 64 blocks at a time, HEAD_DIM / 32 dimensions a
// lane; of FOLD_GROUPS at once, warp w takes the groups w, w + FOLD_WARPS, ... They meet in shared memory, and warp 0
// folds them in order.
//
// The decode kernel has already folded the first sub-splits of a group as far as one chunk has them; their fold lies at
// the last one's index (`chunks` is that kernel's gridDim.x).
#include "activation.cuh"
#include "attention.cuh"
#include "rotations.cuh"

#define VALUES (HEAD_DIM / 32)
#define LOADS_IN_FLIGHT 16
#define FOLD_GROUPS (2 * FOLD_WARPS)
static_assert(FOLD_WARPS >= 1 && FOLD_WARPS <= 16, "up to 32 groups at once");

// A fold under way: a lane's values, and the row's maximum and sum, the same in all lanes.
struct Fold {
    float values[VALUES], maximum, sum;
    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < VALUES; i++) values[i] = 0.0f;
        maximum = NEGATIVE_INFINITY;
        sum = 0.0f;
    }
    DEVICE void add(const float (&part)[VALUES], float part_sum, FoldStep step) {
#pragma unroll
        for (int i = 0; i < VALUES; i++) values[i] = fold_value(values[i], part[i], step);
        sum = fold_value(sum, part_sum, step);
    }
};

// Steps of up to 32 sub-splits at once: lane i has the maximum of sub-split i and gets its step. maximum: of the fold
// before them, grows to that after them.
DEVICE FoldStep scan_steps(float own, float& maximum) {
    const int lane = threadIdx.x & 31;
    float grown = own;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const float other = __shfl_up_sync(FULL_WARP, grown, lanes);
        if (lane >= lanes) grown = fmaxf(grown, other);
    }
    grown = fmaxf(grown, maximum);
    float before = __shfl_up_sync(FULL_WARP, grown, 1);
    if (lane == 0) before = maximum;
    maximum = __shfl_sync(FULL_WARP, grown, 31);
    return fold_step(before, own);
}

// Folds the sub-splits first .. end - 1 of a row. partials, statistics: of the row. steps: 32 float4 of this warp in
// shared memory.
DEVICE void fold_range(Fold& fold, const float* partials, const float2* statistics, int first, int end, float4* steps) {
    const int lane = threadIdx.x & 31;
    for (int batch = first; batch < end; batch += 32) {
        const int count = min(32, end - batch);
        const float2 own = lane < count ? statistics[batch + lane] : make_float2(NEGATIVE_INFINITY, 0.0f);
        float parts[LOADS_IN_FLIGHT][VALUES];
        const float* source = partials + (size_t)batch * HEAD_DIM + lane * VALUES;
#pragma unroll
        for (int i = 0; i < LOADS_IN_FLIGHT; i++)
            if (i < count) load_values(parts[i], source + i * HEAD_DIM);
        const FoldStep step = scan_steps(own.x, fold.maximum);
        __syncwarp();
        steps[lane] = make_float4(step.keep, step.take, own.y, 0.0f);
        __syncwarp();
        for (int start = 0; start < count; start += LOADS_IN_FLIGHT) {
#pragma unroll
            for (int i = 0; i < LOADS_IN_FLIGHT; i++) {
                const int index = start + i, next = index + LOADS_IN_FLIGHT;
                if (index < count) {
                    const float4 applied = steps[index];
                    fold.add(parts[i], applied.z, FoldStep{applied.x, applied.y});
                }
                if (next < count) load_values(parts[i], source + next * HEAD_DIM);
            }
        }
    }
}

// Folds `count` groups, up to 32, that lie in shared memory.
DEVICE void fold_groups(Fold& fold, const float (*values)[HEAD_DIM], const float2* statistics, int count) {
    const int lane = threadIdx.x & 31;
    const float2 own = lane < count ? statistics[lane] : make_float2(NEGATIVE_INFINITY, 0.0f);
    const FoldStep step = scan_steps(own.x, fold.maximum);
#pragma unroll 4
    for (int i = 0; i < count; i++) {
        float part[VALUES];
        load_values(part, values[i] + lane * VALUES);
        const float keep = __shfl_sync(FULL_WARP, step.keep, i), take = __shfl_sync(FULL_WARP, step.take, i);
        fold.add(part, __shfl_sync(FULL_WARP, own.y, i), FoldStep{keep, take});
    }
}

// partials, statistics: as the decode kernel leaves them.
// activation: bf16 of width NUM_HEADS * HEAD_DIM in ACTIVATION_LAYOUT.
extern "C" __global__ void __launch_bounds__(32 * FOLD_WARPS, 1)
    attention_fold(const AttentionTile* tiles, const float* partials, const float2* statistics, u16* activation,
                   i32 chunks, i32 max_splits, i32 tile_stride) {
    __shared__ float4 steps[FOLD_WARPS][32];
    __shared__ __align__(16) float group_values[FOLD_GROUPS][HEAD_DIM];
    __shared__ float2 group_statistics[FOLD_GROUPS];
    allow_next_kernel();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, head = blockIdx.y;
    const int4 entry = *(const int4*)(tiles + blockIdx.z);
    const AttentionTile tile{entry.x, entry.y, entry.z, entry.w};
    wait_previous_kernel();
    if ((int)blockIdx.x >= tile.rows) return;

    const int row = tile.first_row + blockIdx.x, tile_blocks = blocks_of(tile.first_position + tile.rows);
    const int num_splits = sub_splits_of(tile.first_position + blockIdx.x + 1);
    const size_t first_entry =
        ((size_t)scratch_row(tile, blockIdx.z, blockIdx.x, tile_stride) * NUM_HEADS + head) * max_splits;
    const int num_groups = group_of(num_splits - 1) + 1;
    Fold total;
    total.clear();
    for (int first_group = 0; first_group < num_groups; first_group += FOLD_GROUPS) {
        const int count = min(FOLD_GROUPS, num_groups - first_group);
        if (first_group > 0) __syncthreads();
#pragma unroll 1
        for (int i = warp; i < count; i += FOLD_WARPS) {
            // The sub-splits that the decode kernel folded end where a chunk or the group ends; they may reach beyond
            // this row's own, where they changed nothing.
            const int group = first_group + i, first = group_begin(group), group_end = group_begin(group + 1);
            const int owner = chunk_of(group * GROUP_BLOCKS, chunks, tile_blocks);
            const int folded_end = min(chunk_begin(owner + 1, chunks, tile_blocks), group_end);
            const int begin = max(first, folded_end - 1);
            Fold fold;
            fold.clear();
            fold_range(fold, partials + first_entry * HEAD_DIM, statistics + first_entry, begin,
                       max(begin + 1, min(num_splits, group_end)), steps[warp]);
#pragma unroll
            for (int j = 0; j < VALUES; j++) group_values[i][lane * VALUES + j] = fold.values[j];
            if (lane == 0) group_statistics[i] = make_float2(fold.maximum, fold.sum);
        }
        __syncthreads();
        if (warp == 0) fold_groups(total, group_values, group_statistics, count);
    }
    if (warp != 0) return;

    const float reciprocal = __frcp_rn(total.sum);
#pragma unroll
    for (int i = 0; i < VALUES; i++) total.values[i] = __fmul_rn(total.values[i], reciprocal);
    if (PlaneTraits<V_PLANE>::ROTATED) rotate_hadamard(total.values);
#pragma unroll
    for (int i = 0; i < VALUES; i += 2) {
        const size_t index =
            activation_index<ACTIVATION_LAYOUT>(row, head * HEAD_DIM + lane * VALUES + i, NUM_HEADS * HEAD_DIM);
        *(u32*)(activation + index) = pack_bf16(total.values[i], total.values[i + 1]);
    }
}
