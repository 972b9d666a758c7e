// Blocks of a sequence from its pages, on the device or in the mirror, to tiles in shared memory.
#pragma once
#include "prefill_planes.cuh"

using Offsets = LayerOffsets<K_PLANE, V_PLANE, HEAD_DIM, NUM_KV_HEADS, PAGE_SIZE>;
using Pages = BlockPages<PAGE_SIZE>;

#define TILE_BYTES (HEAD_DIM / 64 * TILE_HALF_BYTES)

// A sequence whose blocks are converted for the whole of a step: its slot in the page table, its cells, and the place
// of its first block among all of them.
struct BlockSequence {
    i32 slot, length, first_block, unused;
};

// The same value; what follows from it is worked out anew in every turn of a loop, since kept it would cost registers.
DEVICE u32 not_kept(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

// Copies an f16 plane of a block into its tile; cells from `length` on become zeros. codes: offset of the head's codes.
template <int COPY_THREADS>
DEVICE void copy_plane(u32 tile, const u64* pages, u64 codes, int block, int length) {
    constexpr int UNITS = HEAD_DIM / 8, ROWS = COPY_THREADS / UNITS;
    const int thread = not_kept(threadIdx.x) & (COPY_THREADS - 1), unit = thread % UNITS, first = thread / UNITS;
#pragma unroll 2
    for (int pass = 0; pass < BLOCK_CELLS / ROWS; pass++) {
        const int row = pass * ROWS + first, in_block = cell_of_column<V_PLANE>(row);
        const int cell = block * BLOCK_CELLS + in_block;
        const u64 page = pages[Pages::page(PAGE_SIZE < BLOCK_CELLS ? min(cell, length - 1) : block * BLOCK_CELLS)];
        const u64 source = page + codes + (u32)(Pages::place(block, in_block) * HEAD_DIM * 2 + unit * 16);
        async_copy16(tile + tile_unit(row, unit), (const void*)source, cell < length ? 16 : 0);
    }
}

// Codes of one plane of a block in the pages; cells from `length` of the sequence on read as zeros. codes, scales:
// offsets of the head's parts.
template <int FORMAT>
struct PagedCodes {
    using Shape = PlaneShape<FORMAT, HEAD_DIM>;
    const u64* pages;
    u64 codes, scales;
    int block, length;

    DEVICE uint4 load16(int cell, int byte) const {
        if (!exists(cell)) return make_uint4(0, 0, 0, 0);
        return *(const uint4*)(page(cell) + codes + (u32)(Pages::place(block, cell) * Shape::CODE_BYTES + byte));
    }
    DEVICE uint2 load8(int cell, int byte) const {
        if (!exists(cell)) return make_uint2(0, 0);
        return *(const uint2*)(page(cell) + codes + (u32)(Pages::place(block, cell) * Shape::CODE_BYTES + byte));
    }
    DEVICE u32 scale(int cell, int group) const {
        if (!exists(cell)) return 0;
        return *(const u16*)(page(cell) + scales + (u32)(Pages::place(block, cell) * Shape::SCALE_BYTES + 2 * group));
    }

  private:
    DEVICE bool exists(int cell) const { return block * BLOCK_CELLS + cell < length; }
    DEVICE u64 page(int cell) const { return pages[Pages::page(block * BLOCK_CELLS + cell)]; }
};

// Starts bringing K (V) of a block and KV head into a tile. pages: of the sequence. length: its cells.
template <int FORMAT, bool IS_V, int THREADS>
DEVICE void bring_plane(u32 tile, const u64* pages, int layer, int kv_head, int block, int length) {
    using Shape = PlaneShape<FORMAT, HEAD_DIM>;
    const u64 start = (u64)layer * Offsets::LAYER_BYTES;
    const int head_cells = kv_head * PAGE_SIZE;
    const u64 codes = start + (IS_V ? Offsets::V_CODES : Offsets::K_CODES) + head_cells * Shape::CODE_BYTES;
    const u64 scales = start + (IS_V ? Offsets::V_SCALES : Offsets::K_SCALES) + head_cells * Shape::SCALE_BYTES;
    if constexpr (FORMAT == PLANE_F16) {
        copy_plane<THREADS>(tile, pages, codes, block, length);
    } else {
        const PagedCodes<FORMAT> source{pages, codes, scales, block, length};
        const int thread = not_kept(threadIdx.x), lane = thread & 31, first_row = thread / 32 * 8 + converted_row(lane);
#pragma unroll 1
        for (int row = first_row; row < BLOCK_CELLS; row += THREADS / 4) {
            const int cell = cell_of_column<V_PLANE>(row);
            if constexpr (IS_V)
                TileWriter<FORMAT, HEAD_DIM>::values(tile, row, cell, lane & 3, source);
            else
                TileWriter<FORMAT, HEAD_DIM>::keys(tile, row, cell, lane & 3, source);
        }
    }
}
