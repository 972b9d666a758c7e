// Blocks of sequences as the tiles that prefill attention by warpgroups multiplies, in device memory. Each block of a KV
// head is read once from its page, on the device or in the mirror, and converted once, however many rows attend it.
//
//     blocks = [KV head of the launch][block][K tile | V tile]
//
// Grid: (num_blocks, KV heads). Shared memory: one block's tiles.
#include "prefill_blocks.cuh"

#define THREADS 128

// sequences: in the order of their blocks, the first at block 0.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_tiles(const u64* page_table, const BlockSequence* sequences, u8* blocks, int layer, int max_pages,
                    int num_sequences, int first_head) {
    extern __shared__ __align__(128) u8 dynamic_shared[];
    const u32 keys = shared_address(dynamic_shared);
    allow_next_kernel();
    wait_previous_kernel();
    int index = num_sequences - 1;
    while (sequences[index].first_block > (int)blockIdx.x) index--;
    const BlockSequence sequence = sequences[index];
    const u64* pages = page_table + (size_t)sequence.slot * max_pages;
    const int block = blockIdx.x - sequence.first_block, kv_head = first_head + blockIdx.y;
    bring_plane<K_PLANE, false, THREADS>(keys, pages, layer, kv_head, block, sequence.length);
    bring_plane<V_PLANE, true, THREADS>(keys + TILE_BYTES, pages, layer, kv_head, block, sequence.length);
    async_commit();
    async_wait<0>();
    __syncthreads();
    u8* target = blocks + ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * (2 * TILE_BYTES);
#pragma unroll 4
    for (u32 place = threadIdx.x * 16; place < 2 * TILE_BYTES; place += THREADS * 16)
        *(uint4*)(target + place) = load_shared128(keys + place);
}
