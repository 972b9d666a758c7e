// RMSNorm of residual rows to bf16 activations.
//
// HIDDEN: width, a multiple of 64 up to 16384. ACTIVATION_LAYOUT: of the output (activation.cuh). The arithmetic is the
// same in every layout and for every row: thread i owns elements 8 (j ROW_THREADS + i) .. + 7 for j = 0, 1, ...
#include "activation.cuh"

static_assert(HIDDEN % 64 == 0 && HIDDEN <= 16384, "HIDDEN is a multiple of 64 up to 16384");
constexpr int UNITS = HIDDEN / 8;
constexpr int ROW_THREADS = UNITS < 512 ? (UNITS + 31) / 32 * 32 : 512, ROW_WARPS = ROW_THREADS / 32;
constexpr int UNITS_PER_THREAD = (UNITS + ROW_THREADS - 1) / ROW_THREADS;

DEVICE void load_unit(float (&x)[8], const float* source) {
    const float4 low = *(const float4*)source, high = *(const float4*)(source + 4);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

// Elements k .. k + 7 of a row. In TILE they are one 16-byte unit; in FRAGMENT four lanes hold a pair each.
DEVICE void store_unit(u16* activations, int row, int k, const u32 (&pairs)[4]) {
    if (ACTIVATION_LAYOUT == TILE) {
        *(uint4*)(activations + activation_index<TILE>(row, k, HIDDEN)) =
            make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
            *(u32*)(activations + activation_index<FRAGMENT>(row, k + 2 * i, HIDDEN)) = pairs[i];
    }
}

// activations[r] = bf16(x / sqrt(mean(x^2) + eps) * weight), x = residual[row_indices[r]], or residual[r] when
// row_indices is 0; a negative index leaves its row as it was. Grid: output rows; a CTA does one.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    rms_norm(const float* residual, const float* weight, float eps, const i32* row_indices, u16* activations) {
    __shared__ float warp_sums[ROW_WARPS];
    allow_next_kernel();
    const int thread = threadIdx.x, lane = thread & 31;
    const int row = row_indices ? row_indices[blockIdx.x] : blockIdx.x;
    float gain[UNITS_PER_THREAD][8], x[UNITS_PER_THREAD][8];
#pragma unroll
    for (int j = 0; j < UNITS_PER_THREAD; j++) {
        const int unit = j * ROW_THREADS + thread;
        if (unit < UNITS) load_unit(gain[j], weight + unit * 8);
    }
    wait_previous_kernel();
    if (row < 0) return;

    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < UNITS_PER_THREAD; j++) {
        const int unit = j * ROW_THREADS + thread;
        if (unit >= UNITS) continue;
        load_unit(x[j], residual + (size_t)row * HIDDEN + unit * 8);
    }
#pragma unroll
    for (int j = 0; j < UNITS_PER_THREAD; j++) {
        if (j * ROW_THREADS + thread >= UNITS) continue;
#pragma unroll
        for (int i = 0; i < 8; i++) sum = __fadd_rn(sum, __fmul_rn(x[j][i], x[j][i]));
    }
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(FULL_WARP, sum, lanes));
    if (lane == 0) warp_sums[thread >> 5] = sum;
    __syncthreads();
    sum = lane < ROW_WARPS ? warp_sums[lane] : 0.0f;
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(FULL_WARP, sum, lanes));
    const float scale = __frsqrt_rn(__fadd_rn(__fmul_rn(sum, 1.0f / HIDDEN), eps));

#pragma unroll
    for (int j = 0; j < UNITS_PER_THREAD; j++) {
        const int unit = j * ROW_THREADS + thread;
        if (unit >= UNITS) continue;
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            pairs[i] = pack_bf16(__fmul_rn(__fmul_rn(x[j][2 * i], scale), gain[j][2 * i]),
                                 __fmul_rn(__fmul_rn(x[j][2 * i + 1], scale), gain[j][2 * i + 1]));
        store_unit(activations, blockIdx.x, unit * 8, pairs);
    }
}
