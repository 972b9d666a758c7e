// Attention of prompt rows over paged KV on tensor cores, equal bit for bit to decode attention and its fold.
//
// Work items are (tile, KV head), longest tiles first. By warpgroups (sm_90a): any number of CTAs of 384 threads, each
// takes items in turn. By warps: one CTA of WARPS warps per item.
#define KVALET_UNBOUNDED_WAIT  // a bound in the wait would make ptxas run warpgroup products one by one
#include "prefill_warpgroup.cuh"
#include "prefill_warps.cuh"
#if HAS_WGMMA
#define BLOCK_THREADS 384
#define attend attend_by_warpgroups
#else
#define BLOCK_THREADS (32 * WARPS)
#define attend attend_by_warps
#endif

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
    attention_prefill(const u16* queries, const u64* page_table, const AttentionTile* tiles, u16* activation,
                      const u8* blocks, const BlockSequence* sequences, int layer, int max_pages, int num_tiles,
                      int num_blocks, int first_head, int num_heads) {
    allow_next_kernel();
    attend({queries, page_table, tiles, activation, blocks, sequences, layer, max_pages, num_tiles, num_blocks,
            first_head, num_heads});
}
