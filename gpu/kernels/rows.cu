// RMSNorm of residual rows to bf16 activations.
//
// HIDDEN: width, a multiple of 64 up to 16384. ACTIVATION_LAYOUT: of the output (activation.cuh). The arithmetic is the
// same in every layout and for every row (norm.cuh).
#include "activation.cuh"
#include "norm.cuh"

constexpr int UNITS = HIDDEN / 8;
constexpr int ROW_THREADS = UNITS < 512 ? (UNITS + 31) / 32 * 32 : 512;
typedef RowNorm<HIDDEN, ROW_THREADS> Norm;

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

// activations[r] = norm of residual[row_indices[r]], or of residual[r] when row_indices is 0; a negative index leaves
// its row as it was. Grid: output rows; a CTA does one.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    rms_norm(const float* residual, const float* weight, float eps, const i32* row_indices, u16* activations) {
    __shared__ float warp_sums[Norm::ROW_WARPS];
    allow_next_kernel();
    const int row = row_indices ? row_indices[blockIdx.x] : blockIdx.x;
    Norm norm;
    norm.load_weight(weight);
    wait_previous_kernel();
    if (row < 0) return;
    norm.load_row(residual + (size_t)row * HIDDEN);
    const float scale = norm.scale(eps, warp_sums);
    norm.for_units(scale, [&](int k, const u32(&pairs)[4]) { store_unit(activations, blockIdx.x, k, pairs); });
}
