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
