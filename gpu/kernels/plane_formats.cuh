// The plane formats of gpu/formats.py and where their parts lie in a page. A kernel is a template over the format of
// one plane, never over a pair.
//
//     plane = codes [head][cell][CODE_BYTES] | scales [head][cell][SCALE_BYTES]
//
// Both parts are multiples of 16 bytes for every shape that KVLayout allows, since pages hold multiples of 16 cells.
#pragma once
#include "primitives.cuh"

enum PlaneFormat { PLANE_F16 = 0, PLANE_INT8 = 1, PLANE_Q4 = 2 };

// BITS: of a code. GROUP: values that share an fp16 scale, 0 for none. ROTATED: a Hadamard rotation comes first.
template <int FORMAT>
struct PlaneTraits;
template <>
struct PlaneTraits<PLANE_F16> {
    static constexpr int BITS = 16, GROUP = 0;
    static constexpr bool ROTATED = false;
};
template <>
struct PlaneTraits<PLANE_INT8> {
    static constexpr int BITS = 8, GROUP = 64;
    static constexpr bool ROTATED = false;
};
template <>
struct PlaneTraits<PLANE_Q4> {
    static constexpr int BITS = 4, GROUP = 32;
    static constexpr bool ROTATED = true;
};

// Bytes of one vector of HEAD_DIM_ values.
template <int FORMAT, int HEAD_DIM_>
struct PlaneShape : PlaneTraits<FORMAT> {
    using Traits = PlaneTraits<FORMAT>;
    static constexpr int CODE_BYTES = HEAD_DIM_ * Traits::BITS / 8;
    static constexpr int SCALE_BYTES = Traits::GROUP ? 2 * HEAD_DIM_ / (Traits::GROUP ? Traits::GROUP : 1) : 0;
    static_assert(HEAD_DIM_ == 64 || HEAD_DIM_ == 128, "head_dim is 64 or 128");
};

// Offsets inside one layer of a page; layers follow each other. Mirrors gpu/layout.py.
template <int K_FORMAT_, int V_FORMAT_, int HEAD_DIM_, int NUM_KV_HEADS_, int PAGE_SIZE_>
struct LayerOffsets {
    static_assert(PAGE_SIZE_ % 16 == 0 && PAGE_SIZE_ > 0 && PAGE_SIZE_ <= 128, "pages hold 16, 32, ... 128 cells");
    using K = PlaneShape<K_FORMAT_, HEAD_DIM_>;
    using V = PlaneShape<V_FORMAT_, HEAD_DIM_>;
    static constexpr int CELLS = NUM_KV_HEADS_ * PAGE_SIZE_;
    static constexpr int K_CODES = 0;
    static constexpr int K_SCALES = K_CODES + CELLS * K::CODE_BYTES;
    static constexpr int V_CODES = K_SCALES + CELLS * K::SCALE_BYTES;
    static constexpr int V_SCALES = V_CODES + CELLS * V::CODE_BYTES;
    static constexpr int LAYER_BYTES = V_SCALES + CELLS * V::SCALE_BYTES;
};
