// Rotations of a head vector that a warp holds, VALUES consecutive values a lane (head_dim = 32 VALUES). Every product
// and every sum is rounded on its own, as in gpu/reference/codecs.py.
#pragma once
#include "primitives.cuh"

DEVICE void load_values(float (&x)[2], const float* source) {
    const float2 v = *(const float2*)source;
    x[0] = v.x, x[1] = v.y;
}
DEVICE void load_values(float (&x)[4], const float* source) {
    const float4 v = *(const float4*)source;
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}

template <int VALUES>
struct HeadScale {
    // f32(1 / sqrt(head_dim)), and the factor of queries f32(log2(e) / sqrt(head_dim)).
    static constexpr double ROOT = VALUES == 2 ? 0.125 : 0.08838834764831845;
    static constexpr float HADAMARD = (float)ROOT;
    static constexpr float QUERY = (float)(1.4426950408889634 * ROOT);
    static_assert(VALUES == 2 || VALUES == 4, "head_dim is 64 or 128");
};

// Orthonormal Hadamard rotation, its own inverse: butterflies of stride 1, 2, 4, ..., then one product.
template <int VALUES>
DEVICE void rotate_hadamard(float (&x)[VALUES]) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int stride = 1; stride < VALUES; stride *= 2) {
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            if (i & stride) continue;
            const float low = x[i], high = x[i + stride];
            x[i] = __fadd_rn(low, high);
            x[i + stride] = __fsub_rn(low, high);
        }
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            const float other = __shfl_xor_sync(FULL_WARP, x[i], lanes);
            x[i] = lane & lanes ? __fsub_rn(other, x[i]) : __fadd_rn(x[i], other);
        }
    }
#pragma unroll
    for (int i = 0; i < VALUES; i++) x[i] = __fmul_rn(x[i], HeadScale<VALUES>::HADAMARD);
}

// RoPE, pairs (i, i + ROPE_DIM / 2); values from ROPE_DIM_ on stay. One lane's factors:
template <int VALUES, int ROPE_DIM_>
struct RopeFactors {
    static constexpr int HALF = ROPE_DIM_ / 2, HALF_LANES = HALF / VALUES;
    static_assert(ROPE_DIM_ > 0 && ROPE_DIM_ <= 32 * VALUES, "rope_dim is at most head_dim");
    static_assert(HALF % VALUES == 0, "rope_dim is a multiple of head_dim / 16");
    float cosine[VALUES], sine[VALUES];

    // cosines, sines: [position][HALF] f32.
    DEVICE void load(const float* cosines, const float* sines, int position) {
        const int lane = threadIdx.x & 31;
        if (lane >= 2 * HALF_LANES) return;
        const size_t first = (size_t)position * HALF + (lane % HALF_LANES) * VALUES;
        load_values(cosine, cosines + first);
        load_values(sine, sines + first);
    }
    DEVICE void rotate(float (&x)[VALUES]) const {
        const int lane = threadIdx.x & 31;
        const bool is_first = lane < HALF_LANES, rotates = lane < 2 * HALF_LANES;
        const int partner = rotates ? (is_first ? lane + HALF_LANES : lane - HALF_LANES) : lane;
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            const float other = __shfl_sync(FULL_WARP, x[i], partner);
            if (!rotates) continue;
            const float own = __fmul_rn(x[i], cosine[i]), crossed = __fmul_rn(other, sine[i]);
            x[i] = is_first ? __fsub_rn(own, crossed) : __fadd_rn(own, crossed);
        }
    }
};
