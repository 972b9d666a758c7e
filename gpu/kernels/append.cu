// Append of one layer: head norms, rotations, queries to f16, K and V to the rows' pages.
//
// Reads   qkv f32 [row][NUM_HEADS + 2 NUM_KV_HEADS][HEAD_DIM], the rows' tables, cosines and sines f32
//         [position][ROPE_DIM / 2]
// Writes  queries f16 [row][NUM_HEADS][HEAD_DIM]; a cell of this layer in each row's pages; counts [entry][2] of this
//         layer, nonfinite [entry]
// Grid    (heads of all kinds / APPEND_WARPS, rows). A warp does one (row, head): a query, K or V vector.
//
// K_PLANE, V_PLANE: formats. MIRROR_IN_KERNEL 0: only the device page is written, and `mirror_cells` (pages.cu) copies
// and counts. HEAD_NORM 1: RMSNorm of each query and key head before RoPE.
#include "planes.cuh"

#define APPEND_WARPS 8
using Layer = LayerOffsets<K_PLANE, V_PLANE, HEAD_DIM, NUM_KV_HEADS, PAGE_SIZE>;
constexpr int VALUES = HEAD_DIM / 32;
constexpr int ALL_HEADS = NUM_HEADS + 2 * NUM_KV_HEADS;
static_assert(NUM_HEADS % NUM_KV_HEADS == 0, "NUM_HEADS is a multiple of NUM_KV_HEADS");

// x = x / sqrt(mean(x^2) + eps) * weight: a lane sums its own values in order, then lanes by xor 16, 8, 4, 2, 1.
DEVICE void normalize_head(float (&x)[VALUES], const float* weight, float eps) {
    float gain[VALUES], sum = 0.0f;
    load_values(gain, weight + (threadIdx.x & 31) * VALUES);
#pragma unroll
    for (int i = 0; i < VALUES; i++) sum = __fadd_rn(sum, __fmul_rn(x[i], x[i]));
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(FULL_WARP, sum, lanes));
    const float scale = __frsqrt_rn(__fadd_rn(__fmul_rn(sum, 1.0f / HEAD_DIM), eps));
#pragma unroll
    for (int i = 0; i < VALUES; i++) x[i] = __fmul_rn(__fmul_rn(x[i], scale), gain[i]);
}

DEVICE void store_query(float (&x)[VALUES], u16* query) {
    if (PlaneTraits<K_PLANE>::ROTATED) rotate_hadamard(x);
    u32* pairs = (u32*)query + (threadIdx.x & 31) * (VALUES / 2);
#pragma unroll
    for (int i = 0; i < VALUES / 2; i++)
        pairs[i] = pack_half(__fmul_rn(x[2 * i], HeadScale<VALUES>::QUERY),
                             __fmul_rn(x[2 * i + 1], HeadScale<VALUES>::QUERY));
}

extern "C" __global__ void __launch_bounds__(32 * APPEND_WARPS)
    append_cells(const float* qkv, const float* cosines, const float* sines, const float* q_norm, const float* k_norm,
                 float eps, const i32* slots, const i32* positions, const i32* entries, const u64* mirror_pages,
                 const u64* device_pages, u64 layer_offset, u16* queries, i32* counts, i32* nonfinite) {
    allow_next_kernel();
    const int row = blockIdx.y, head = blockIdx.x * APPEND_WARPS + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    const bool skipped = head >= ALL_HEADS || slots[row] < 0;
    const bool is_query = head < NUM_HEADS, is_v = head >= NUM_HEADS + NUM_KV_HEADS;
    const int position = positions[row], entry = entries[row];
    const u64 mirror = MIRROR_IN_KERNEL ? mirror_pages[row] : 0, device = device_pages[row];
    RopeFactors<VALUES, ROPE_DIM> rope;
    if (!skipped && !is_v) rope.load(cosines, sines, position);
    wait_previous_kernel();
    if (skipped) return;

    float x[VALUES];
    load_values(x, qkv + ((size_t)row * ALL_HEADS + head) * HEAD_DIM + lane * VALUES);
    if (!is_v) {
        if (HEAD_NORM) normalize_head(x, is_query ? q_norm : k_norm, eps);
        rope.rotate(x);
    }
    if (is_query) {
        store_query(x, queries + ((size_t)row * NUM_HEADS + head) * HEAD_DIM);
        return;
    }
    const u64 plane = layer_offset + (is_v ? Layer::V_CODES : Layer::K_CODES);
    const int scales = is_v ? Layer::V_SCALES - Layer::V_CODES : Layer::K_SCALES;
    const int kv_head = head - NUM_HEADS - (is_v ? NUM_KV_HEADS : 0);
    const CellPlace cell{mirror ? mirror + plane : 0, device ? device + plane : 0,
                         (u32)(kv_head * PAGE_SIZE + position % PAGE_SIZE), (u32)scales};
    if (is_v)
        store_vector<V_PLANE>(x, cell, counts + 2 * entry + 1, nonfinite + entry);
    else
        store_vector<K_PLANE>(x, cell, counts + 2 * entry, nonfinite + entry);
}
