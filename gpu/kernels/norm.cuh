// RMSNorm of one row by a CTA: x / sqrt(mean(x^2) + eps) * weight, as bf16.
//
// The arithmetic is that of ROW_THREADS threads, of which thread i owns elements 8 (j ROW_THREADS + i) .. + 7 for
// j = 0, 1, ...: squares are added in order in a thread, by butterfly in a warp, then over the warps. A CTA of fewer
// THREADS does the work of several of those threads in turn, to the same bits.
#pragma once
#include "primitives.cuh"

template <int WIDTH, int THREADS>
struct RowNorm {
    static constexpr int UNITS = WIDTH / 8;
    static constexpr int ROW_THREADS = UNITS < 512 ? (UNITS + 31) / 32 * 32 : 512, ROW_WARPS = ROW_THREADS / 32;
    static constexpr int UNITS_PER_THREAD = (UNITS + ROW_THREADS - 1) / ROW_THREADS;
    static constexpr int PASSES = (ROW_THREADS + THREADS - 1) / THREADS;
    static_assert(WIDTH % 64 == 0 && WIDTH <= 16384, "a multiple of 64 up to 16384");
    static_assert(THREADS % 32 == 0, "whole warps");

    float gain[PASSES][UNITS_PER_THREAD][8], x[PASSES][UNITS_PER_THREAD][8];

    // Unit j of the thread that this one stands for in a pass; UNITS or more where there is none.
    DEVICE static int unit_of(int pass, int j) {
        const int thread = pass * THREADS + threadIdx.x;
        return thread < ROW_THREADS ? j * ROW_THREADS + thread : UNITS;
    }
    DEVICE static void load(float (&values)[PASSES][UNITS_PER_THREAD][8], const float* source) {
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++)
#pragma unroll
            for (int j = 0; j < UNITS_PER_THREAD; j++) {
                const int unit = unit_of(pass, j);
                if (unit >= UNITS) continue;
                const float4 low = *(const float4*)(source + unit * 8), high = *(const float4*)(source + unit * 8 + 4);
                float(&v)[8] = values[pass][j];
                v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
                v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
            }
    }
    DEVICE void load_weight(const float* weight) { load(gain, weight); }
    DEVICE void load_row(const float* row) { load(x, row); }

    // warp_sums: ROW_WARPS floats in shared memory. All threads of the CTA.
    DEVICE float scale(float eps, float* warp_sums) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            const int warp = (pass * THREADS + threadIdx.x) / 32;
            if (warp >= ROW_WARPS) continue;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < UNITS_PER_THREAD; j++) {
                if (unit_of(pass, j) >= UNITS) continue;
#pragma unroll
                for (int i = 0; i < 8; i++) sum = __fadd_rn(sum, __fmul_rn(x[pass][j][i], x[pass][j][i]));
            }
#pragma unroll
            for (int lanes = 16; lanes; lanes /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(FULL_WARP, sum, lanes));
            if (lane == 0) warp_sums[warp] = sum;
        }
        __syncthreads();
        float sum = lane < ROW_WARPS ? warp_sums[lane] : 0.0f;
#pragma unroll
        for (int lanes = 16; lanes; lanes /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(FULL_WARP, sum, lanes));
        return __frsqrt_rn(__fadd_rn(__fmul_rn(sum, 1.0f / WIDTH), eps));
    }

    // Calls `put` with k and elements k .. k + 7 in pairs, for each unit of this thread.
    template <typename Put>
    DEVICE void for_units(float scale, Put put) const {
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++)
#pragma unroll
            for (int j = 0; j < UNITS_PER_THREAD; j++) {
                const int unit = unit_of(pass, j);
                if (unit >= UNITS) continue;
                const float(&v)[8] = x[pass][j], (&w)[8] = gain[pass][j];
                u32 pairs[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    pairs[i] = pack_bf16(__fmul_rn(__fmul_rn(v[2 * i], scale), w[2 * i]),
                                         __fmul_rn(__fmul_rn(v[2 * i + 1], scale), w[2 * i + 1]));
                put(unit * 8, pairs);
            }
    }
};
