// Matrix products on warpgroups (sm_90a): output[row][n] = sum over k of weights[n][k] activations[row][k], for
// activations in TILE order. The bits are those of product.cu: a chain per K segment, folded from segment 0 on.
//
// A CTA walks over blocks of 64 WARPGROUPS weight rows x BLOCK_ROWS activation rows, panel by panel of rows (Shape).
// Warp 0 copies one unit of 64 k a stage (weights of each tile, activations) and runs ahead into the next block; each
// of the other warpgroups multiplies 64 weight rows, taken to registers, by the stage's activations in shared memory.
//
// STORAGE            of the weights (weights.cuh)
// BLOCK_ROWS         activation rows of a block: 32, 64, 96, 192; with scales at most 96
// WARPGROUPS         that multiply: 1 (two CTAs on a processor) or 2
// STAGES             of the ring
// EPILOGUE           product_epilogue.cuh; SwiGLU writes ACTIVATION_LAYOUT
#define KVALET_UNBOUNDED_WAIT
#include "product_epilogue.cuh"
#include "warpgroup.cuh"
#include "weights.cuh"

constexpr int UNIT_BYTES = weight_unit_bytes<STORAGE>(), BLOCK_TILES = 4 * WARPGROUPS;
constexpr int ACTIVATION_BYTES = BLOCK_ROWS * 128;  // first in a stage, for its alignment of 1024 bytes
constexpr int STAGE_BYTES = (ACTIVATION_BYTES + BLOCK_TILES * UNIT_BYTES + 1023) / 1024 * 1024;
constexpr int SUMS = BLOCK_ROWS / 2;  // a lane's outputs: 64 weight rows x BLOCK_ROWS over 128 threads
// SwiGLU: a lane sends half of its sums, EXCHANGED at a time.
constexpr int HALF = SUMS / 2, EXCHANGED = HALF < 24 ? HALF : 24;
// Other epilogues: PART_ROWS rows of a warpgroup's outputs, twice, so that they leave in their order in memory.
constexpr int PART_ROWS = 16, PART_STRIDE = 64 * 4 + 16, PART_BYTES = PART_ROWS * PART_STRIDE;
constexpr int EXCHANGE_BYTES =
    EPILOGUE == EPILOGUE_SWIGLU ? BLOCK_TILES * 32 * EXCHANGED * 4 : WARPGROUPS * 2 * PART_BYTES;
constexpr int THREADS = 128 * (1 + WARPGROUPS), CTAS_PER_PROCESSOR = WARPGROUPS == 1 ? 2 : 1;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = WARPGROUPS == 1 ? 216 : 232;
static_assert(BLOCK_ROWS % 16 == 0 && BLOCK_ROWS <= TILE_ROWS, "a block touches two tiles of activations at most");
static_assert(STAGES >= 2, "a stage is given back when the next one has arrived");
static_assert(STORAGE == WEIGHTS_BF16 || BLOCK_ROWS <= 96, "chain, segment and total must fit the registers");

// Blocks are numbered panel by panel of at most MAX_PANEL row blocks, whose activations stay in the second-level cache
// while the weights pass; within a panel the row blocks of the same weights follow each other.
constexpr int MAX_PANEL = 12;

struct Shape {
    int num_rows, num_outputs, width;
    DEVICE int units() const { return width / WEIGHT_UNIT_K; }
    DEVICE int num_tiles() const { return (num_outputs + WEIGHT_TILE_ROWS - 1) / WEIGHT_TILE_ROWS; }
    DEVICE int row_blocks() const { return (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS; }
    DEVICE int weight_blocks() const { return (num_tiles() + BLOCK_TILES - 1) / BLOCK_TILES; }
    DEVICE int blocks() const { return row_blocks() * weight_blocks(); }
    DEVICE int panel() const {
        const int panels = (row_blocks() + MAX_PANEL - 1) / MAX_PANEL;
        return (row_blocks() + panels - 1) / panels;
    }
};

// Where a block lies.
struct Place {
    int tile, row;
    DEVICE Place(const Shape& shape, int block) {
        const int panel = shape.panel(), panel_blocks = panel * shape.weight_blocks();
        const int first = block / panel_blocks * panel, within = block % panel_blocks;
        const int rows = min(panel, shape.row_blocks() - first);
        tile = within / rows * BLOCK_TILES;
        row = (first + within % rows) * BLOCK_ROWS;
    }
};

// The ring: `full` counts the copies of a stage, `empty` one arrival of each multiplying warp.
struct Stages {
    u32 base, exchange;
    DEVICE u32 full(int stage) const { return exchange + EXCHANGE_BYTES + 8 * stage; }
    DEVICE u32 empty(int stage) const { return full(STAGES + stage); }
    DEVICE u32 activations(int stage) const { return base + stage * STAGE_BYTES; }
    DEVICE u32 weights(int stage, int tile) const { return activations(stage) + ACTIVATION_BYTES + tile * UNIT_BYTES; }
};

DEVICE void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
// The 8 x 8 transpose: lane 4 g + t gives (g, 2t), (g, 2t + 1) of the matrix and gets them of its transpose.
DEVICE u32 transpose_pairs(u32 pair) {
    u32 r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
    return r;
}
DEVICE void meet(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Warp 0: weights of the first stages before the wait for the previous kernel, activations after it.
DEVICE void copy_stages(const Stages& ring, const Shape& shape, const u8* weights, const u8* activations,
                        const float* residual, int lane) {
    const int units = shape.units(), num_tiles = shape.num_tiles(), row_blocks = shape.row_blocks();
    const size_t tile_bytes = (size_t)units * UNIT_BYTES;
    const u64 policy = evict_first_policy();
    auto copy_weights = [&](int stage, const Place& place, int unit) {
        const int here = min(BLOCK_TILES, num_tiles - place.tile);
        if (lane == 0) barrier_expect(ring.full(stage), here * UNIT_BYTES + ACTIVATION_BYTES);
        __syncwarp();
        if (lane >= here) return;
        const u8* source = weights + (place.tile + lane) * tile_bytes + (size_t)unit * UNIT_BYTES;
        // Weights that no other row block needs don't push anything out of the second-level cache.
        if (row_blocks == 1)
            bulk_copy(ring.weights(stage, lane), source, UNIT_BYTES, ring.full(stage), policy);
        else
            bulk_copy(ring.weights(stage, lane), source, UNIT_BYTES, ring.full(stage));
    };
    // A block that ends in the next tile has its last rows from there; beyond the last tile, any rows do.
    const int last_tile = (shape.num_rows - 1) / TILE_ROWS;
    auto copy_activations = [&](int stage, const Place& place, int unit) {
        constexpr bool DIVIDES = TILE_ROWS % BLOCK_ROWS == 0;
        const int tile = place.row / TILE_ROWS, row = place.row % TILE_ROWS;
        const int here = DIVIDES ? BLOCK_ROWS : min(BLOCK_ROWS, TILE_ROWS - row);
        auto copy = [&](int first, int count, int from_tile, int from_row) {
            const size_t tile_unit = (size_t)from_tile * units + unit;
            bulk_copy(ring.activations(stage) + first * 128, activations + (tile_unit * TILE_ROWS + from_row) * 128,
                      count * 128, ring.full(stage));
        };
        if (lane == 31) copy(0, here, tile, row);
        if (!DIVIDES && lane == 30 && here < BLOCK_ROWS) copy(here, BLOCK_ROWS - here, min(tile + 1, last_tile), 0);
    };
    const int ahead = min(STAGES, units);
    Place place(shape, blockIdx.x);
    for (int unit = 0; unit < ahead; unit++) copy_weights(unit, place, unit);
    wait_previous_kernel();
    for (int unit = 0; unit < ahead; unit++) copy_activations(unit, place, unit);

    int stage = ahead % STAGES, unit = ahead;
    u32 parity = ahead == STAGES ? 0 : 1;
    for (int block = blockIdx.x; block < shape.blocks(); block += gridDim.x, unit = 0) {
        place = Place(shape, block);
        for (; unit < units; unit++) {
            barrier_wait(ring.empty(stage), parity);
            copy_weights(stage, place, unit);
            copy_activations(stage, place, unit);
            if (++stage == STAGES) stage = 0, parity ^= 1;
            if (EPILOGUE == EPILOGUE_ADD && unit == units - min(units, 8)) {
                // What the epilogue will add to, 128 bytes at a time.
                constexpr int LINES = BLOCK_TILES * WEIGHT_TILE_ROWS / 32;
                const int n = place.tile * WEIGHT_TILE_ROWS;
                for (int i = lane; i < BLOCK_ROWS * LINES; i += 32) {
                    const int row = place.row + i / LINES, column = n + i % LINES * 32;
                    if (row < shape.num_rows && column < shape.num_outputs)
                        prefetch_line(residual + (size_t)row * shape.num_outputs + column);
                }
            }
        }
    }
}

// Sums of one block of bf16 weights, from the stages in order. Products of one half of a unit run while the next half
// is taken to registers: they only come to rest at the end of a segment. (Folding inside the loop over units, under a
// condition, would make the assembler wait for them in every unit.)
DEVICE void multiply_unscaled(const Stages& ring, int units, int tile, int lane, int& stage, u32& parity,
                              float (&total)[SUMS]) {
    float chain[SUMS];  // set here, or it would keep its registers from block to block
#pragma unroll
    for (int i = 0; i < SUMS; i++) total[i] = chain[i] = 0.0f;
    u32 a[2][2][4];
    int unit = 0;
    for (int segment = 0; segment < SEGMENTS; segment++) {
        const int end = segment_start(segment + 1, units);
        if (unit == end) continue;
        int continues = 0, previous = 0;
        do {
            barrier_wait(ring.full(stage), parity);
            const u32 weights = ring.weights(stage, tile);
            const u64 activations = descriptor_k_major(ring.activations(stage));
#pragma unroll
            for (int c = 0; c < 2; c++) {
                warpgroup_wait<1>();  // what still read a[c]
                if (c == 1 && continues && lane == 0) barrier_arrive(ring.empty(previous));
                load_fragments<STORAGE>(weights, c, lane, a[c]);
                warpgroup_fence();
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const u32(&k16)[4] = a[c][j];
                    const int adds = c != 0 || j != 0 || continues;
                    warpgroup_multiply_bf16(chain, k16[0], k16[1], k16[2], k16[3], activations + 4 * c + 2 * j, adds);
                }
                warpgroup_commit();
            }
            previous = stage;
            continues = 1;
            if (++stage == STAGES) stage = 0, parity ^= 1;
        } while (++unit < end);
        warpgroup_wait<0>();
        if (lane == 0) barrier_arrive(ring.empty(previous));
#pragma unroll
        for (int i = 0; i < SUMS; i++) total[i] = __fadd_rn(total[i], chain[i]);
    }
}

// The same for weights with scales: the sums of each scale are added to those of the segment.
template <int KIND>
DEVICE void multiply_scaled(const Stages& ring, int units, int tile, int lane, int& stage, u32& parity,
                            float (&total)[SUMS]) {
    constexpr int CHAINS = KIND == WEIGHTS_INT4 ? 2 : 1;  // one for each scale of a unit
    float chain[CHAINS][SUMS], scaled[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; i++) total[i] = scaled[i] = 0.0f;
    int segment = 1, segment_end = segment_start(1, units);
    while (segment_end == 0) segment_end = segment_start(++segment, units);
    for (int unit = 0; unit < units; unit++) {
        barrier_wait(ring.full(stage), parity);
        const u32 weights = ring.weights(stage, tile);
        const u64 activations = descriptor_k_major(ring.activations(stage));
        u32 a[2][2][4];
        float2 scales[2];
#pragma unroll
        for (int c = 0; c < 2; c++) {
            load_fragments<KIND>(weights, c, lane, a[c]);
            scales[c] = load_scales<KIND>(weights, c, lane);
        }
        warpgroup_fence();
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32(&k16)[4] = a[j / 2][j % 2];
            const int adds = j % (4 / CHAINS) != 0;
            warpgroup_multiply_bf16(chain[j * CHAINS / 4], k16[0], k16[1], k16[2], k16[3], activations + 2 * j, adds);
            if (j % (4 / CHAINS) == 4 / CHAINS - 1) warpgroup_commit();
        }
        if constexpr (CHAINS == 2) {
            warpgroup_wait<1>();
#pragma unroll
            for (int i = 0; i < SUMS; i++)
                scaled[i] = fmaf(i & 2 ? scales[0].y : scales[0].x, chain[0][i], scaled[i]);
        }
        warpgroup_wait<0>();
        if (lane == 0) barrier_arrive(ring.empty(stage));
        if (++stage == STAGES) stage = 0, parity ^= 1;
#pragma unroll
        for (int i = 0; i < SUMS; i++)
            scaled[i] = fmaf(i & 2 ? scales[1].y : scales[1].x, chain[CHAINS - 1][i], scaled[i]);
        if (unit + 1 == segment_end) {
#pragma unroll
            for (int i = 0; i < SUMS; i++) total[i] = __fadd_rn(total[i], scaled[i]), scaled[i] = 0.0f;
            while (segment_end == unit + 1 && segment < SEGMENTS) segment_end = segment_start(++segment, units);
        }
    }
}

template <int KIND>
DEVICE void multiply_block(const Stages& ring, int units, int tile, int lane, int& stage, u32& parity,
                           float (&total)[SUMS]) {
    if constexpr (KIND == WEIGHTS_BF16)
        multiply_unscaled(ring, units, tile, lane, stage, parity, total);
    else
        multiply_scaled<KIND>(ring, units, tile, lane, stage, parity, total);
}

// total[4j .. 4j + 3]: outputs g, g, g + 8, g + 8 of the tile at rows 8j + 2t, 8j + 2t + 1, and the same again. They go
// part by part through shared memory: sixteen threads then have the 64 outputs of a row.
// WHOLE: all rows and outputs exist, four outputs are 16 aligned bytes, and what is added to has been on its way since
// AHEAD parts before.
template <bool WHOLE>
DEVICE void put_block(const Stages& ring, const Shape& shape, int tile, int first_row, float* output,
                      const float* bias, const float (&total)[SUMS]) {
    constexpr bool ADDS = EPILOGUE == EPILOGUE_ADD;
    constexpr int PARTS = BLOCK_ROWS / PART_ROWS, AHEAD = PARTS < 4 ? PARTS : 4;
    // Asked for again: derived from what the kernel knows, addresses would be kept through the products.
    int id;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(id));
    const int thread = id % 128, in_group = thread / 32, lane = id % 32, warp = id / 32 - 4;
    const u32 parts = ring.exchange + warp / 4 * 2 * PART_BYTES;
    const u32 sent = parts + (lane & 3) * 2 * PART_STRIDE + (in_group * WEIGHT_TILE_ROWS + (lane >> 2)) * 4;
    const u32 received = parts + thread / 16 * PART_STRIDE + thread % 16 * 16;
    const int n = (tile - in_group) * WEIGHT_TILE_ROWS + thread % 16 * 4;
    const size_t half = 8 * (size_t)shape.num_outputs;
    float* target = output + (size_t)(first_row + thread / 16) * shape.num_outputs + n;
    const float* source = target;
    float4 old[AHEAD][2];
    auto load = [&](float4(&part)[2]) {
        part[0] = *(const float4*)source, part[1] = *(const float4*)(source + half);
        source += 2 * half;
        asm volatile("" : "+l"(source));  // one address after the other: together they would not fit the registers
    };
    if (WHOLE && ADDS) {
#pragma unroll
        for (int part = 0; part < AHEAD; part++) load(old[part]);
    }
    float4 offsets = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (WHOLE && !ADDS && bias) offsets = make_float4(bias[n], bias[n + 1], bias[n + 2], bias[n + 3]);
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const u32 buffer = part % 2 * PART_BYTES;
#pragma unroll
        for (int i = 0; i < 8; i++)
            store_shared_float(sent + buffer + (i / 4 * 8 + (i & 1)) * PART_STRIDE + (i & 2) * 16, total[part * 8 + i]);
        meet(1 + warp / 4, 128);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float4 sum = load_shared_float4(received + buffer + h * 8 * PART_STRIDE);
            if constexpr (WHOLE) {
                const float4 other = ADDS ? old[part % AHEAD][h] : offsets;
                if (ADDS || bias)
                    sum = make_float4(__fadd_rn(other.x, sum.x), __fadd_rn(other.y, sum.y), __fadd_rn(other.z, sum.z),
                                      __fadd_rn(other.w, sum.w));
                *(float4*)target = sum;
                target += half;
            } else {
                const int row = first_row + thread / 16 + part * PART_ROWS + h * 8;
                const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (row < shape.num_rows && n + i < shape.num_outputs)
                        put_output<EPILOGUE>(output, bias, row, n + i, shape.num_outputs, values[i]);
            }
        }
        asm volatile("" : "+l"(target));
        if (WHOLE && ADDS && part + AHEAD < PARTS) load(old[part % AHEAD]);
    }
    meet(1 + warp / 4, 128);
}

// Even warps hold gate rows, odd warps the up rows of the same outputs. They swap halves of their sums, so that each
// finishes half of the activation rows.
DEVICE void put_activations(const Stages& ring, const Shape& shape, int warp, int tile, int first_row, int lane,
                            u16* output, const float (&total)[SUMS]) {
    const bool is_gate = warp % 2 == 0;
    const u32 sent = ring.exchange + warp * EXCHANGED * 128 + lane * 16;
    const u32 received = ring.exchange + (warp ^ 1) * EXCHANGED * 128 + lane * 16;
    const int row = first_row + (is_gate ? 0 : BLOCK_ROWS / 2) + (lane >> 2);
    const int k = tile / 2 * WEIGHT_TILE_ROWS + (lane & 3) * 2;
#pragma unroll
    for (int part = 0; part < HALF; part += EXCHANGED) {
#pragma unroll
        for (int i = part; i < min(part + EXCHANGED, HALF); i += 4) {
            const float values[4] = {is_gate ? total[HALF + i] : total[i], is_gate ? total[HALF + i + 1] : total[i + 1],
                                     is_gate ? total[HALF + i + 2] : total[i + 2],
                                     is_gate ? total[HALF + i + 3] : total[i + 3]};
            store_shared_float4(sent + (i - part) * 128, values);
        }
        meet(1 + warp / 2, 64);
#pragma unroll
        for (int i = part; i < min(part + EXCHANGED, HALF); i += 4) {
            const float4 other = load_shared_float4(received + (i - part) * 128);
            const float others[4] = {other.x, other.y, other.z, other.w};
            float values[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float mine = is_gate ? total[i + e] : total[HALF + i + e];
                values[e] = swiglu(is_gate ? mine : others[e], is_gate ? others[e] : mine);
            }
            // Now a lane has row g and outputs 2t, 2t + 1 of both halves of the tile.
            const u32 first = transpose_pairs(pack_bf16(values[0], values[1]));
            const u32 second = transpose_pairs(pack_bf16(values[2], values[3]));
            const int m = row + i / 4 * 8;
            if (m >= shape.num_rows || tile >= shape.num_tiles()) continue;
            *(u32*)(output + activation_index<ACTIVATION_LAYOUT>(m, k, shape.num_outputs / 2)) = first;
            *(u32*)(output + activation_index<ACTIVATION_LAYOUT>(m, k + 8, shape.num_outputs / 2)) = second;
        }
        meet(1 + warp / 2, 64);
    }
}

// output: by EPILOGUE. bias: f32 [num_outputs] or 0. width: K. Grid: any number of CTAs up to the number of blocks.
// Shared memory: 1024 for alignment, the stages, the exchange of the epilogue, 16 bytes of barriers a stage.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_PROCESSOR)
    product_wide(const u8* weights, const u8* activations, void* output, const float* bias, i32 num_rows,
                 i32 num_outputs, i32 width) {
    extern __shared__ __align__(1024) u8 shared[];
    allow_next_kernel();
    const int group = __shfl_sync(FULL_WARP, threadIdx.x >> 7, 0), lane = threadIdx.x & 31;
    const Shape shape{num_rows, num_outputs, width};
    Stages ring;
    ring.base = (shared_address(shared) + 1023) & ~1023u;
    ring.exchange = ring.base + STAGES * STAGE_BYTES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(ring.full(i), 1);
            barrier_init(ring.empty(i), 4 * WARPGROUPS);
        }
        barrier_init_fence();
        shared_to_async_fence();
    }
    __syncthreads();
    if (group == 0) {
        lower_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x < 32) copy_stages(ring, shape, weights, activations, (const float*)output, lane);
    } else {
        raise_registers<CONSUMER_REGISTERS>();
        wait_previous_kernel();
        const int warp = (threadIdx.x >> 5) - 4;
        int stage = 0;
        u32 parity = 0;
        for (int block = blockIdx.x; block < shape.blocks(); block += gridDim.x) {
            float total[SUMS];
            multiply_block<STORAGE>(ring, shape.units(), warp, lane, stage, parity, total);
            const Place place(shape, block);
            const int tile = place.tile + warp, first_row = place.row;
            const int last_output = (place.tile + warp / 4 * 4 + 4) * WEIGHT_TILE_ROWS;
            if constexpr (EPILOGUE == EPILOGUE_SWIGLU)
                put_activations(ring, shape, warp, tile, first_row, lane, (u16*)output, total);
            else if (num_outputs % 4 == 0 && ((u64)output & 15) == 0 && first_row + BLOCK_ROWS <= num_rows &&
                     last_output <= num_outputs)
                put_block<true>(ring, shape, tile, first_row, (float*)output, bias, total);
            else
                put_block<false>(ring, shape, tile, first_row, (float*)output, bias, total);
        }
    }
}
