// Blocks of cells as f16 tiles in shared memory, whatever the plane's format: what the prefill kernels multiply.
//
//     tile = [head_dim / 64][64 rows][128 bytes], 16-byte unit u of row r at u ^ (r % 8)
//
// Row r is the cell `cell_of_column(r)` of the block. Along a row of K lie, for each k16 step, the elements 0..3 of
// lane 0, of lane 1, ... (`key_dimension`); along a row of V the dimensions as `value_dimension` says.
//
// A thread converts the quarter t of a row: t = lane % 4, and `converted_row` gives it a row so that neither its loads
// of codes nor its stores meet in a bank.
#pragma once
#include "attention.cuh"

#define TILE_ROW_BYTES 128
#define TILE_HALF_BYTES (BLOCK_CELLS * TILE_ROW_BYTES)

// Pages are looked up by block: whole pages per block, or blocks per page.
template <int PAGE_SIZE_>
struct BlockPages {
    static constexpr int CELLS = PAGE_SIZE_ < BLOCK_CELLS ? PAGE_SIZE_ : BLOCK_CELLS;  // of a block in one page
    static constexpr int COUNT = BLOCK_CELLS / CELLS;
    static_assert(PAGE_SIZE_ == 16 || PAGE_SIZE_ == 32 || PAGE_SIZE_ == 64 || PAGE_SIZE_ == 128, "page size");
    // Index of the page that holds a cell of the sequence; place in its page of the cell `in_block` of a block.
    DEVICE static int page(int cell) { return (u32)cell / PAGE_SIZE_; }
    DEVICE static int place(int block, int in_block) {
        if (PAGE_SIZE_ < BLOCK_CELLS) return in_block & (PAGE_SIZE_ - 1);
        return (block * BLOCK_CELLS & (PAGE_SIZE_ - 1)) + in_block;
    }
};

// Where 16-byte unit `unit` (of head_dim / 8) of a row lies in a tile.
DEVICE u32 tile_unit(int row, int unit) {
    return (unit >> 3) * TILE_HALF_BYTES + row * TILE_ROW_BYTES + (((unit & 7) ^ (row & 7)) << 4);
}
// Dimension at a position of a row of K.
template <int FORMAT, int HEAD_DIM_>
constexpr DEVICE int key_position_dimension(int position) {
    const int step = position >> 4, in_step = position & 15;
    return FORMAT == PLANE_F16 ? position : key_dimension<FORMAT, HEAD_DIM_>(step, in_step >> 2, in_step & 3);
}
// Dimension at a position of a row of V: q4 pairs are the nibbles j and j + 4 of a word.
template <int FORMAT>
constexpr DEVICE int value_position_dimension(int position) {
    return FORMAT == PLANE_Q4 ? (position & ~7) + ((position & 7) >> 1) + 4 * (position & 1) : position;
}

// Row (of 8) that a lane converts: pairs of neighbouring quads take an even and an odd row with different bits 1, half
// warps rows with four different values of row / 2.
DEVICE int converted_row(int lane) {
    const int quad = lane >> 2, place = quad & 3;
    return 2 * place + ((place ^ (quad >> 2)) & 1);
}

// Where the elements of lane t for the first of a half's four steps lie, and a store of those of any step: two pairs.
DEVICE u32 key_elements(u32 tile, int row, int half, int t) {
    return tile + tile_unit(row, 8 * half + (t >> 1)) + 8 * (t & 1);
}
DEVICE void store_key_elements(u32 first_step, int step_of_half, u32 first, u32 second) {
    store_shared64(first_step ^ (step_of_half << 5), first, second);
}

// Codes to f16, a quarter of a row per call; f16 planes are copied as they are. `codes` reads a cell's codes: load16(cell, byte), load8(cell, byte) and
// scale(cell, group), 0 for cells without one.
template <int FORMAT, int HEAD_DIM_>
struct TileWriter;

template <int HEAD_DIM_>
struct TileWriter<PLANE_INT8, HEAD_DIM_> {
    template <typename Codes>
    DEVICE static void keys(u32 tile, int row, int cell, int t, const Codes& codes) {
        const Quarter quarter(row, cell, t, codes);
#pragma unroll
        for (int i = 0; i < HALVES; i++) {
            const uint4 words = quarter.words[i];
            const u32 scale = quarter.scales[i], target = key_elements(tile, row, half_of(i, row), t);
            const u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
            for (int step = 0; step < 4; step++)
                store_key_elements(target, step, multiply_half2(int8_pair(word[step]), scale),
                                   multiply_half2(int8_pair(word[step] >> 8), scale));
        }
    }
    template <typename Codes>
    DEVICE static void values(u32 tile, int row, int cell, int t, const Codes& codes) {
        const Quarter quarter(row, cell, t, codes);
#pragma unroll
        for (int i = 0; i < HALVES; i++) {
            const uint4 words = quarter.words[i];
            const int unit = 8 * half_of(i, row) + 2 * t;
            store_shared128(tile + tile_unit(row, unit), neighbours(words.x, words.y, quarter.scales[i]));
            store_shared128(tile + tile_unit(row, unit + 1), neighbours(words.z, words.w, quarter.scales[i]));
        }
    }

  private:
    static constexpr int HALVES = HEAD_DIM_ / 64;
    // The half that a row takes as its i-th: even and odd rows take different ones at a time, for the banks.
    DEVICE static int half_of(int i, int row) { return (i ^ row) & (HALVES - 1); }
    struct Quarter {
        uint4 words[HALVES];
        u32 scales[HALVES];
        template <typename Codes>
        DEVICE Quarter(int row, int cell, int t, const Codes& codes) {
#pragma unroll
            for (int i = 0; i < HALVES; i++) {
                words[i] = codes.load16(cell, 64 * half_of(i, row) + 16 * t);
                scales[i] = same_pair(codes.scale(cell, half_of(i, row)));
            }
        }
    };
    // Eight codes in the order of their dimensions: the bytes c + 128 below the exponent of 1024.
    DEVICE static uint4 neighbours(u32 low, u32 high, u32 scale) {
        low ^= 0x80808080u, high ^= 0x80808080u;
        return make_uint4(pair(low, 0x4140, scale), pair(low, 0x4342, scale), pair(high, 0x4140, scale),
                          pair(high, 0x4342, scale));
    }
    DEVICE static u32 pair(u32 biased, u32 selector, u32 scale) {
        return multiply_half2(subtract_half2(permute_bytes(biased, 0x64646464u, selector), 0x64806480u), scale);
    }
};

template <int HEAD_DIM_>
struct TileWriter<PLANE_Q4, HEAD_DIM_> {
    static constexpr int WORDS = HEAD_DIM_ / 32;  // of 8 codes, in a quarter
    template <typename Codes>
    DEVICE static void keys(u32 tile, int row, int cell, int t, const Codes& codes) {
        u32 word[WORDS];
        const u32 scale = load(word, cell, t, codes);
#pragma unroll
        for (int step = 0; step < 2 * WORDS; step++) {
            const u32 pairs = word[step / 2] >> (8 * (step & 1));
            store_key_elements(key_elements(tile, row, step / 4, t), step & 3, multiply_half2(q4_pair(pairs), scale),
                               multiply_half2(q4_next_pair(pairs), scale));
        }
    }
    // The upper quarters of a row take their words in another order, for the banks.
    template <typename Codes>
    DEVICE static void values(u32 tile, int row, int cell, int t, const Codes& codes) {
        u32 word[WORDS];
        const u32 scale = load(word, cell, t, codes);
        const bool swapped = HEAD_DIM_ == 128 && t >= 2;
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            const u32 codes8 = swapped ? word[i ^ 1] : word[i];
            const uint4 eight = make_uint4(
                multiply_half2(q4_pair(codes8), scale), multiply_half2(q4_next_pair(codes8), scale),
                multiply_half2(q4_pair(codes8 >> 8), scale), multiply_half2(q4_next_pair(codes8 >> 8), scale));
            store_shared128(tile + tile_unit(row, WORDS * t + (swapped ? i ^ 1 : i)), eight);
        }
    }

  private:
    template <typename Codes>
    DEVICE static u32 load(u32 (&word)[WORDS], int cell, int t, const Codes& codes) {
        if constexpr (WORDS == 4) {
            const uint4 words = codes.load16(cell, 16 * t);
            word[0] = words.x, word[1] = words.y, word[2] = words.z, word[3] = words.w;
        } else {
            const uint2 words = codes.load8(cell, 8 * t);
            word[0] = words.x, word[1] = words.y;
        }
        return same_pair(codes.scale(cell, WORDS * t / 4));
    }
};
