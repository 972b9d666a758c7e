// The store side of the plane formats: one warp encodes one vector of HEAD_DIM values, VALUES consecutive values a
// lane, and stores it to the mirror page and to the device page. Bytes equal gpu/reference/codecs.py for every input.
#pragma once
#include "plane_formats.cuh"
#include "rotations.cuh"

#define MAX_HALF 65504.0f
#define MAX_FLOAT_BITS 0x7f7fffffu

// fp16 bits: nearest even, saturating, every zero as +0 (-0 is poison).
DEVICE u32 stored_half(float x) {
    const u32 bits = float_to_half(fminf(fmaxf(x, -MAX_HALF), MAX_HALF));
    return bits & 0x7fff ? bits : 0;
}

// The largest value of LANES neighbouring lanes.
template <int LANES>
DEVICE u32 group_max(u32 value) {
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2) value = max(value, __shfl_xor_sync(FULL_WARP, value, lanes));
    return value;
}

// What a lane stores of an encoded vector: codes of its VALUES values, the first in the lowest bits; scale: of the
// lane's group, the same in all its lanes.
struct LaneCodes {
    u64 codes;
    u32 scale;
};

template <int FORMAT>
struct PlaneEncoder;

template <>
struct PlaneEncoder<PLANE_F16> {
    template <int VALUES>
    DEVICE static LaneCodes encode(const float (&x)[VALUES]) {
        LaneCodes lane{0, 0};
#pragma unroll
        for (int i = 0; i < VALUES; i++) lane.codes |= (u64)stored_half(x[i]) << (16 * i);
        return lane;
    }
};

// scale = max|x| / 127, code = x / scale to nearest even, within +-127.
template <>
struct PlaneEncoder<PLANE_INT8> {
    template <int VALUES>
    DEVICE static LaneCodes encode(const float (&x)[VALUES]) {
        u32 largest = 0;
#pragma unroll
        for (int i = 0; i < VALUES; i++) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
        largest = group_max<PlaneTraits<PLANE_INT8>::GROUP / VALUES>(largest);
        LaneCodes lane{0, stored_half(__fdiv_rn(__uint_as_float(largest), 127.0f))};
        const float scale = half_to_float((u16)lane.scale);
        u32 codes = 0;
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            const int code = __float2int_rn(fminf(fmaxf(__fdiv_rn(x[i], scale), -127.0f), 127.0f));
            codes |= ((u32)code & 0xff) << (8 * i);
        }
        lane.codes = lane.scale ? codes : 0;
        return lane;
    }
};

// scale d = (signed value of largest magnitude, the positive one of two) / -8, code = trunc(x / d + 8.5) within 0..15.
template <>
struct PlaneEncoder<PLANE_Q4> {
    template <int VALUES>
    DEVICE static LaneCodes encode(const float (&x)[VALUES]) {
        // Magnitude bits, then 1 for a positive value: the largest key is the value that d comes from.
        u32 key = 0;
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            const u32 bits = __float_as_uint(x[i]);
            key = max(key, (bits << 1) | ((bits >> 31) ^ 1));
        }
        key = group_max<PlaneTraits<PLANE_Q4>::GROUP / VALUES>(key);
        const float largest = __uint_as_float((key >> 1) | (~key << 31));
        LaneCodes lane{0, stored_half(__fdiv_rn(largest, -8.0f))};
        const float scale = half_to_float((u16)lane.scale);
        u32 codes = 0;
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            const float shifted = __fadd_rn(__fdiv_rn(x[i], scale), 8.5f);
            const int code = __float2int_rz(fminf(fmaxf(shifted, 0.0f), 15.0f));
            codes |= (u32)(lane.scale ? code : 8) << (4 * i);
        }
        lane.codes = codes;
        return lane;
    }
};

// The same bytes at both addresses; 0 means no device page.
template <typename T>
DEVICE void store_twice(u64 mirror, u64 device, T value) {
    if (mirror) *(T*)mirror = value;
    if (device) *(T*)device = value;
}
template <int BYTES>
DEVICE void store_codes(u64 mirror, u64 device, u64 codes) {
    if (BYTES == 8) store_twice<uint2>(mirror, device, make_uint2((u32)codes, (u32)(codes >> 32)));
    if (BYTES == 4) store_twice<u32>(mirror, device, (u32)codes);
    if (BYTES == 2) store_twice<u16>(mirror, device, (u16)codes);
    if (BYTES == 1) store_twice<u8>(mirror, device, (u8)codes);
}

// Where the vector of one (row, KV head) goes. mirror, device: addresses of the plane in the row's pages, 0 for none.
// place: head * page_size + cell. scales: offset of the plane's scales.
struct CellPlace {
    u64 mirror, device;
    u32 place, scales;
};

// Encodes and stores a vector: the only function that writes cells. Counts the mirror store at `stored`, and a vector
// that is not finite, which is stored as zeros, at `nonfinite`. x is changed.
template <int FORMAT, int VALUES>
DEVICE void store_vector(float (&x)[VALUES], CellPlace cell, i32* stored, i32* nonfinite) {
    using Shape = PlaneShape<FORMAT, 32 * VALUES>;
    const int lane = threadIdx.x & 31;
    if (Shape::ROTATED) rotate_hadamard(x);
    bool finite = true;
#pragma unroll
    for (int i = 0; i < VALUES; i++) finite &= (__float_as_uint(x[i]) & 0x7fffffffu) <= MAX_FLOAT_BITS;
    if (!__all_sync(FULL_WARP, finite)) {
#pragma unroll
        for (int i = 0; i < VALUES; i++) x[i] = 0.0f;
        if (lane == 0) atomicAdd(nonfinite, 1);
    }
    const LaneCodes codes = PlaneEncoder<FORMAT>::encode(x);
    constexpr int LANE_BYTES = Shape::CODE_BYTES / 32;
    const u64 code_offset = cell.place * (u32)Shape::CODE_BYTES + lane * LANE_BYTES;
    store_codes<LANE_BYTES>(cell.mirror ? cell.mirror + code_offset : 0, cell.device ? cell.device + code_offset : 0,
                            codes.codes);
    if constexpr (Shape::GROUP != 0) {
        constexpr int GROUP_LANES = Shape::GROUP / VALUES;
        const u64 scale_offset = cell.scales + cell.place * (u32)Shape::SCALE_BYTES + lane / GROUP_LANES * 2;
        if (lane % GROUP_LANES == 0)
            store_twice<u16>(cell.mirror ? cell.mirror + scale_offset : 0,
                             cell.device ? cell.device + scale_offset : 0, (u16)codes.scale);
    }
    if (cell.mirror && lane == 0) atomicAdd(stored, 1);
}
