// Whole pages: the mirror half of large appends, poison, comparison of device pages with mirror pages.
//
// K_PLANE, V_PLANE: formats of the planes.
#include "plane_formats.cuh"

using Layer = LayerOffsets<K_PLANE, V_PLANE, HEAD_DIM, NUM_KV_HEADS, PAGE_SIZE>;
constexpr int PAGE_WARPS = 8, PAGE_THREADS = 32 * PAGE_WARPS;

// ---- mirror_cells --------------------------------------------------------------------------------------------------
template <int BYTES>
struct ScaleWord;
template <>
struct ScaleWord<2> {
    using Type = u16;
};
template <>
struct ScaleWord<4> {
    using Type = u32;
};
template <>
struct ScaleWord<8> {
    using Type = uint2;
};

// Copies codes and scales of 32 rows' cells in one plane of one head; each lane brings the plane's addresses in the
// pages of its row, 0 for a row to leave out. Rows of neighbouring cells make long runs of bytes.
template <typename Shape>
DEVICE void copy_cells(u64 source, u64 target, u32 place, u32 scales) {
    constexpr int PIECES = Shape::CODE_BYTES / 16, BATCH = PIECES < 4 ? PIECES : 4;
    const int lane = threadIdx.x & 31;
    const u64 own_source = source ? source + place * (u32)Shape::CODE_BYTES : 0;
    const u64 own_target = target + place * (u32)Shape::CODE_BYTES;
#pragma unroll 1
    for (int first = 0; first < PIECES; first += BATCH) {
        uint4 piece[BATCH];
        u64 to[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int index = (first + i) * 32 + lane, owner = index / PIECES, offset = index % PIECES * 16;
            const u64 from = __shfl_sync(FULL_WARP, own_source, owner);
            to[i] = __shfl_sync(FULL_WARP, own_target, owner) + offset;
            if (from)
                piece[i] = load_global128((const void*)(from + offset));
            else
                to[i] = 0;
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (to[i]) *(uint4*)to[i] = piece[i];
    }
    if constexpr (Shape::SCALE_BYTES != 0) {
        using Word = typename ScaleWord<Shape::SCALE_BYTES>::Type;
        const u64 offset = scales + place * (u32)Shape::SCALE_BYTES;
        if (source) *(Word*)(target + offset) = *(const Word*)(source + offset);
    }
}

// The mirror half of an append whose kernel wrote device pages only: copies the rows' cells of one layer from device
// to mirror pages and counts them, counts[entry][plane] of this layer. A row without either page is not counted.
// Grid: any number of CTAs; a warp takes 32 rows of one plane and head at a time.
extern "C" __global__ void __launch_bounds__(PAGE_THREADS)
    mirror_cells(const i32* slots, const i32* positions, const i32* entries, const u64* mirror_pages,
                 const u64* device_pages, u64 layer_offset, i32 num_rows, i32* counts) {
    allow_next_kernel();
    wait_previous_kernel();
    const int lane = threadIdx.x & 31, num_items = (num_rows + 31) / 32 * (2 * NUM_KV_HEADS);
    for (int item = blockIdx.x * PAGE_WARPS + (threadIdx.x >> 5); item < num_items; item += gridDim.x * PAGE_WARPS) {
        const int row = item / (2 * NUM_KV_HEADS) * 32 + lane, plane = item / NUM_KV_HEADS % 2;
        const int head = item % NUM_KV_HEADS;
        u64 source = 0, target = 0;
        u32 place = 0;
        int entry = -1;
        if (row < num_rows && slots[row] >= 0 && device_pages[row] && mirror_pages[row]) {
            const u64 offset = layer_offset + (plane ? Layer::V_CODES : Layer::K_CODES);
            source = device_pages[row] + offset;
            target = mirror_pages[row] + offset;
            place = head * PAGE_SIZE + positions[row] % PAGE_SIZE;
            entry = entries[row];
        }
        if (plane)
            copy_cells<Layer::V>(source, target, place, Layer::V_SCALES - Layer::V_CODES);
        else
            copy_cells<Layer::K>(source, target, place, Layer::K_SCALES);
        const u32 peers = __match_any_sync(FULL_WARP, entry);
        if (entry >= 0 && lane == __ffs(peers) - 1) atomicAdd(counts + 2 * entry + plane, __popc(peers));
    }
}

// ---- poison_pages --------------------------------------------------------------------------------------------------
// fp16 -0 in every scale of a plane, or in the first code of every cell and head where there are no scales.
template <typename Shape>
DEVICE void poison_plane(u64 plane, u32 scales) {
    if constexpr (Shape::SCALE_BYTES != 0) {
        const uint4 marks = make_uint4(0x80008000u, 0x80008000u, 0x80008000u, 0x80008000u);
        for (u32 i = threadIdx.x; i < Layer::CELLS * Shape::SCALE_BYTES / 16; i += PAGE_THREADS)
            *(uint4*)(plane + scales + i * 16) = marks;
    } else {
        for (u32 i = threadIdx.x; i < Layer::CELLS; i += PAGE_THREADS) *(u16*)(plane + i * Shape::CODE_BYTES) = 0x8000;
    }
}

// Poisons whole pages, as gpu.proof.Poison.set. pages: their addresses. Grid: (layers, pages).
extern "C" __global__ void __launch_bounds__(PAGE_THREADS) poison_pages(const u64* pages) {
    allow_next_kernel();
    wait_previous_kernel();
    const u64 layer = pages[blockIdx.y] + (u64)blockIdx.x * Layer::LAYER_BYTES;
    poison_plane<Layer::K>(layer, Layer::K_SCALES);
    poison_plane<Layer::V>(layer + Layer::V_CODES, Layer::V_SCALES - Layer::V_CODES);
}

// ---- compare_pages -------------------------------------------------------------------------------------------------
DEVICE bool differ(uint4 a, uint4 b) { return ((a.x ^ b.x) | (a.y ^ b.y) | (a.z ^ b.z) | (a.w ^ b.w)) != 0; }

// The first `bytes` (1..16) of 16.
DEVICE bool differ(uint4 a, uint4 b, int bytes) {
    const u32 words[4] = {a.x ^ b.x, a.y ^ b.y, a.z ^ b.z, a.w ^ b.w};
    u32 changed = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int rest = bytes - 4 * i;
        changed |= rest >= 4 ? words[i] : rest > 0 ? words[i] & ((1u << 8 * rest) - 1) : 0;
    }
    return changed != 0;
}

// Pieces of 16 bytes that differ, of this thread's share of a whole page.
DEVICE int compare_whole(const uint4* device, const uint4* mirror, int num_layers) {
    constexpr int IN_FLIGHT = 4;
    const int num_pieces = num_layers * (Layer::LAYER_BYTES / 16);
    const int stride = gridDim.x * PAGE_THREADS;
    int different = 0, index = blockIdx.x * PAGE_THREADS + threadIdx.x;
    for (; index + (IN_FLIGHT - 1) * stride < num_pieces; index += IN_FLIGHT * stride) {
        uint4 a[IN_FLIGHT], b[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) b[i] = load_streaming(mirror + index + i * stride);
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) a[i] = load_streaming(device + index + i * stride);
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) different += differ(a[i], b[i]);
    }
    for (; index < num_pieces; index += stride)
        different += differ(load_streaming(device + index), load_streaming(mirror + index));
    return different;
}

// The same of cells 0 .. num_cells - 1: a warp takes one (layer, part, head) at a time, parts being codes and scales.
DEVICE int compare_first_cells(u64 device, u64 mirror, int num_layers, int num_cells) {
    const int num_spans = num_layers * 4 * NUM_KV_HEADS;
    int different = 0;
    for (int span = blockIdx.x * PAGE_WARPS + (threadIdx.x >> 5); span < num_spans; span += gridDim.x * PAGE_WARPS) {
        const int head = span % NUM_KV_HEADS, part = span / NUM_KV_HEADS % 4, layer = span / NUM_KV_HEADS / 4;
        const u32 starts[4] = {Layer::K_CODES, Layer::K_SCALES, Layer::V_CODES, Layer::V_SCALES};
        const int cell_bytes[4] = {Layer::K::CODE_BYTES, Layer::K::SCALE_BYTES, Layer::V::CODE_BYTES,
                                   Layer::V::SCALE_BYTES};
        u32 start = starts[0];
        int per_cell = cell_bytes[0];
#pragma unroll
        for (int i = 1; i < 4; i++) {
            if (part == i) start = starts[i], per_cell = cell_bytes[i];
        }
        const u64 offset = (u64)layer * Layer::LAYER_BYTES + start + (u32)(head * PAGE_SIZE * per_cell);
        const int num_bytes = num_cells * per_cell;
        for (int first = (threadIdx.x & 31) * 16; first < num_bytes; first += 32 * 16)
            different += differ(load_streaming((const void*)(device + offset + first)),
                                load_streaming((const void*)(mirror + offset + first)), min(16, num_bytes - first));
    }
    return different;
}

// Compares device pages with mirror pages byte for byte: differing[page] grows by the number of 16-byte pieces that
// differ. num_cells: how many cells of each page count, PAGE_SIZE for all bytes. Grid: any number of CTAs; few, so that
// reading the bus does not slow steps (docs/cuda-kernels.md, section 3).
extern "C" __global__ void __launch_bounds__(PAGE_THREADS)
    compare_pages(const u64* device_pages, const u64* mirror_pages, const i32* num_cells, i32 num_pages,
                  i32 num_layers, i32* differing) {
    allow_next_kernel();
    wait_previous_kernel();
    for (int page = 0; page < num_pages; page++) {
        const u64 device = device_pages[page], mirror = mirror_pages[page];
        const int cells = num_cells[page];
        const int different = cells == PAGE_SIZE
                                  ? compare_whole((const uint4*)device, (const uint4*)mirror, num_layers)
                                  : compare_first_cells(device, mirror, num_layers, cells);
        if (different) atomicAdd(differing + page, different);
    }
}
