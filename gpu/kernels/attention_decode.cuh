// What both kernels of decode attention share: attention_decode.cu for quantized planes, attention_decode_half.cu for
// f16. Both leave partial results of sub-splits, which attention_fold.cu completes.
//
// Grid (chunks, KV heads, tiles). A CTA takes a contiguous run of a tile's sub-splits for one KV head.
//
// Arguments of both:
//   queries     f16 [row][head][HEAD_DIM], rotated where K is
//   page_table  u64 [slot][max_pages]
//   tiles       AttentionTile
//   partials    f32 [row][head][max_splits][HEAD_DIM]; rows as `scratch_row` says
//   statistics  f32 pairs (maximum, sum) [row][head][max_splits]
//   unsettled   cells below a tile's first position that this step may still write (the most rows that one sequence has
//               in the step, minus 1): older ones are fetched before the previous kernel has ended
// A chunk that has the first sub-splits of a group folds them and stores the fold under the last one's index.
#pragma once
#include "attention.cuh"

#define GROUP_HEADS (NUM_HEADS / NUM_KV_HEADS)
#define PIECE 16
#define PIECES (BLOCK_CELLS / PIECE)
static_assert(NUM_HEADS % NUM_KV_HEADS == 0 && GROUP_HEADS >= 1 && GROUP_HEADS <= 8, "1 to 8 query heads per KV head");

typedef LayerOffsets<K_PLANE, V_PLANE, HEAD_DIM, NUM_KV_HEADS, PAGE_SIZE> Offsets;
constexpr int STEPS = HEAD_DIM / 16;                         // k16 steps of the scores
constexpr bool WHOLE_BLOCKS = PAGE_SIZE % BLOCK_CELLS == 0;  // a block lies in one page

// Query n of a tile: query row n / GROUP_HEADS of the tile x query head n % GROUP_HEADS of the KV head.
struct Query {
    int row, head;
    DEVICE Query(int n) : row(n / GROUP_HEADS), head(blockIdx.y * GROUP_HEADS + n % GROUP_HEADS) {}
};

// What a CTA attends. length: cells of the tile. pages: of its sequence. settled: blocks below are complete already.
struct Chunk {
    const u64* pages;
    u32 layer_offset;
    int head, length, blocks, settled, first_sub, end_sub, first_block, end_block;

    DEVICE Chunk(const AttentionTile& tile, const u64* page_table, int layer, int max_pages, int unsettled) {
        pages = page_table + (size_t)tile.slot * max_pages;
        layer_offset = (u32)layer * Offsets::LAYER_BYTES;  // pages are at most 8 MiB
        head = blockIdx.y;
        length = tile.first_position + tile.rows, blocks = blocks_of(length);
        settled = (tile.first_position - unsettled) / BLOCK_CELLS;
        first_sub = tile.rows > 0 ? chunk_begin(blockIdx.x, gridDim.x, blocks) : 0;
        end_sub = tile.rows > 0 ? chunk_begin(blockIdx.x + 1, gridDim.x, blocks) : 0;
        first_block = sub_split_begin(first_sub), end_block = min(sub_split_begin(end_sub), blocks);
    }
    // Page of a block; where blocks have several, of one of its pieces of 16 cells, which never straddle a page.
    DEVICE u64 page_of(int block, int piece) const {
        const int cell = block * BLOCK_CELLS + (WHOLE_BLOCKS ? 0 : piece * PIECE);
        return cell < length ? load_global64(pages + cell / PAGE_SIZE) : 0;
    }
    // Address of a cell's part of a plane. Part::OFFSET: in the layer, Part::ROW: bytes per cell.
    template <typename Part>
    DEVICE u64 source(u64 page, int cell) const {
        const u32 place = head * PAGE_SIZE + cell % PAGE_SIZE;
        return page + layer_offset + Part::OFFSET + place * Part::ROW;
    }
};

// How the sub-splits of a chunk follow each other: each joins the fold of its group's first ones or stands alone.
struct FoldRun {
    bool folding = false;
    bool begins, continues;  // nothing was folded before this one; the next one joins
    DEVICE void enter(int sub, int end_sub) {
        const bool begins_group = sub == group_begin(group_of(sub));
        folding |= begins_group;
        begins = begins_group || !folding;
        continues = folding && sub + 1 < end_sub && sub + 1 != group_begin(group_of(sub + 1));
    }
};
