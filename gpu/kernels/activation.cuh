// bf16 activations between kernels, in the order that the product kernels read them. K: width, a multiple of 64.
//
// FRAGMENT  for the products of `product.cu`: [row / 8][k / 32][lane][8], where lane = 4 (row % 8) + t holds
//           k32 = 2t, 2t+1, 2t+8, 2t+9, 2t+16, ... : the B fragments of two m16n8k16 products in one 16-byte load.
// TILE      any number of rows, for the wide products: [row / TILE_ROWS][k / 64][row % TILE_ROWS][128 bytes], the 16-byte
//           unit u of a row at u ^ (row % 8): what warpgroup products read from shared memory.
//
// Buffers hold whole groups of rows (8, TILE_ROWS). Rows beyond the step's are never looked at in a result: a row of a
// product depends on its own activations only.
#pragma once
#include "primitives.cuh"

enum ActivationLayout { FRAGMENT = 0, TILE = 1 };
#ifndef TILE_ROWS
#define TILE_ROWS 192
#endif

// Element index of (row, k). Elements k and k + 1 are adjacent in both layouts when k is even.
template <int LAYOUT>
DEVICE size_t activation_index(int row, int k, int K) {
    if (LAYOUT == FRAGMENT) {
        const int k32 = k & 31, k16 = k32 & 15;
        const size_t group = (size_t)(row >> 3) * (K >> 5) + (k >> 5);
        return group * 256 + ((row & 7) * 4 + ((k16 & 7) >> 1)) * 8 + (k32 >> 4) * 4 + (k16 >> 3) * 2 + (k16 & 1);
    }
    const int tile = row / TILE_ROWS, in_tile = row % TILE_ROWS, unit = (k & 63) >> 3;
    const size_t block = (size_t)tile * (K >> 6) + (k >> 6);
    return (block * TILE_ROWS + in_tile) * 64 + ((unit ^ (in_tile & 7)) << 3) + (k & 7);
}
