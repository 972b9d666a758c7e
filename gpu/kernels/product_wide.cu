// Matrix products on warpgroups (sm_90a): output[row][n] = sum over k of weights[n][k] activations[row][k], for
// activations in TILE order. The bits are those of product.cu: a chain per K segment, folded from segment 0 on.
//
// A CTA walks over blocks of 64 WARPGROUPS weight rows x BLOCK_ROWS activation rows; consecutive CTAs take the row
// blocks of the same weights. Warp 0 copies one unit of 64 k a stage (weights of each tile, one piece of activations)
// and runs ahead into the next block; each of the other warpgroups multiplies 64 weight rows, taken to registers, by
// the stage's activations in shared memory.
//
// STORAGE            of the weights (weights.cuh)
// BLOCK_ROWS         activation rows of a block: 32, 64, 96, 192 (a divisor of TILE_ROWS); with scales at most 96
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
constexpr int EXCHANGE_BYTES = EPILOGUE == EPILOGUE_SWIGLU ? BLOCK_TILES * 32 * SUMS / 2 * 4 : 0;
constexpr int THREADS = 128 * (1 + WARPGROUPS), CTAS_PER_PROCESSOR = WARPGROUPS == 1 ? 2 : 1;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = WARPGROUPS == 1 ? 216 : 232;
static_assert(TILE_ROWS % BLOCK_ROWS == 0, "BLOCK_ROWS divides TILE_ROWS");
static_assert(STORAGE == WEIGHTS_BF16 || BLOCK_ROWS <= 96, "chain, segment and total must fit the registers");

struct Shape {
    int num_rows, num_outputs, width;
    DEVICE int units() const { return width / WEIGHT_UNIT_K; }
    DEVICE int num_tiles() const { return (num_outputs + WEIGHT_TILE_ROWS - 1) / WEIGHT_TILE_ROWS; }
    DEVICE int row_blocks() const { return (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS; }
    DEVICE int blocks() const { return row_blocks() * ((num_tiles() + BLOCK_TILES - 1) / BLOCK_TILES); }
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
    auto copy_weights = [&](int stage, int block, int unit) {
        const int first_tile = block / row_blocks * BLOCK_TILES, here = min(BLOCK_TILES, num_tiles - first_tile);
        if (lane == 0) barrier_expect(ring.full(stage), here * UNIT_BYTES + ACTIVATION_BYTES);
        __syncwarp();
        if (lane >= here) return;
        const u8* source = weights + (first_tile + lane) * tile_bytes + (size_t)unit * UNIT_BYTES;
        // Weights that no other row block needs don't push anything out of the second-level cache.
        if (row_blocks == 1)
            bulk_copy(ring.weights(stage, lane), source, UNIT_BYTES, ring.full(stage), policy);
        else
            bulk_copy(ring.weights(stage, lane), source, UNIT_BYTES, ring.full(stage));
    };
    auto copy_activations = [&](int stage, int block, int unit) {
        if (lane != 31) return;
        const int row = block % row_blocks * BLOCK_ROWS;
        const size_t tile_unit = (size_t)(row / TILE_ROWS) * units + unit;
        bulk_copy(ring.activations(stage), activations + (tile_unit * TILE_ROWS + row % TILE_ROWS) * 128,
                  ACTIVATION_BYTES, ring.full(stage));
    };
    const int first_block = blockIdx.x, ahead = min(STAGES, units);
    for (int unit = 0; unit < ahead; unit++) copy_weights(unit, first_block, unit);
    wait_previous_kernel();
    for (int unit = 0; unit < ahead; unit++) copy_activations(unit, first_block, unit);

    int stage = ahead % STAGES;
    u32 parity = ahead == STAGES ? 0 : 1;
    for (int block = first_block; block < shape.blocks(); block += gridDim.x) {
        for (int unit = block == first_block ? ahead : 0; unit < units; unit++) {
            barrier_wait(ring.empty(stage), parity);
            copy_weights(stage, block, unit);
            copy_activations(stage, block, unit);
            if (++stage == STAGES) stage = 0, parity ^= 1;
            if (EPILOGUE == EPILOGUE_ADD && unit == units - min(units, 8)) {
                // What the epilogue will add to, 128 bytes at a time.
                constexpr int LINES = BLOCK_TILES * WEIGHT_TILE_ROWS / 32;
                const int row = block % row_blocks * BLOCK_ROWS;
                const int n = block / row_blocks * BLOCK_TILES * WEIGHT_TILE_ROWS;
                for (int i = lane; i < BLOCK_ROWS * LINES; i += 32)
                    if (row + i / LINES < shape.num_rows && n + i % LINES * 32 < shape.num_outputs)
                        prefetch_line(residual + (size_t)(row + i / LINES) * shape.num_outputs + n + i % LINES * 32);
            }
        }
    }
}

// Sums of one block, from the stages in order.
DEVICE void multiply_block(const Stages& ring, int units, int tile, int lane, int& stage, u32& parity,
                           float (&total)[SUMS]) {
    constexpr bool SCALED = STORAGE != WEIGHTS_BF16;
    constexpr int CHAINS = STORAGE == WEIGHTS_INT4 ? 2 : 1;  // one for each scale of a unit
    float chain[CHAINS][SUMS], scaled[SCALED ? SUMS : 1];
#pragma unroll
    for (int i = 0; i < SUMS; i++) total[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < (SCALED ? SUMS : 1); i++) scaled[i] = 0.0f;
    int segment = 1, segment_end = segment_start(1, units), continues = 0;
    while (segment_end == 0) segment_end = segment_start(++segment, units);
    for (int unit = 0; unit < units; unit++) {
        barrier_wait(ring.full(stage), parity);
        const u32 weights = ring.weights(stage, tile);
        const u64 activations = descriptor_k_major(ring.activations(stage));
        u32 a[2][2][4];
        float2 scales[2];
#pragma unroll
        for (int c = 0; c < 2; c++) {
            load_fragments<STORAGE>(weights, c, lane, a[c]);
            if constexpr (SCALED) scales[c] = load_scales<STORAGE>(weights, c, lane);
        }
        warpgroup_fence();
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32(&k16)[4] = a[j / 2][j % 2];
            const int adds = SCALED ? j % (4 / CHAINS) != 0 : j != 0 || continues;
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
        if constexpr (SCALED) {
#pragma unroll
            for (int i = 0; i < SUMS; i++)
                scaled[i] = fmaf(i & 2 ? scales[1].y : scales[1].x, chain[CHAINS - 1][i], scaled[i]);
        }
        continues = 1;
        if (unit + 1 == segment_end) {
#pragma unroll
            for (int i = 0; i < SUMS; i++) {
                total[i] = __fadd_rn(total[i], SCALED ? scaled[SCALED ? i : 0] : chain[0][i]);
                if (SCALED) scaled[SCALED ? i : 0] = 0.0f;
            }
            continues = 0;
            while (segment_end == unit + 1 && segment < SEGMENTS) segment_end = segment_start(++segment, units);
        }
    }
}

// total[4j .. 4j + 3]: outputs g, g, g + 8, g + 8 of the tile at rows 8j + 2t, 8j + 2t + 1, and the same again.
// WHOLE: all rows and outputs of the block exist.
template <bool WHOLE>
DEVICE void put_block(const Shape& shape, int tile, int first_row, int lane, float* output, const float* bias,
                      const float (&total)[SUMS]) {
    constexpr int GROUPS = BLOCK_ROWS / 8;
    constexpr int BATCH = 4;  // groups whose loads come before their stores
    const int n = tile * WEIGHT_TILE_ROWS + (lane >> 2), row = first_row + (lane & 3) * 2;
    const int rows = shape.num_rows - row, stride = shape.num_outputs;
    const bool present[2] = {WHOLE || n < shape.num_outputs, WHOLE || n + 8 < shape.num_outputs};
    float offsets[2];
#pragma unroll
    for (int h = 0; h < 2; h++) offsets[h] = bias && present[h] ? bias[n + 8 * h] : 0.0f;
    float* target = output + (size_t)row * stride + n;
#pragma unroll
    for (int first = 0; first < GROUPS; first += BATCH) {
        float old[BATCH][4];
        if (EPILOGUE == EPILOGUE_ADD) {
            const float* source = target;
#pragma unroll
            for (int j = 0; j < BATCH; j++, source += 8 * (size_t)stride)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (WHOLE || ((first + j) * 8 + (i & 1) < rows && present[i / 2]))
                        old[j][i] = source[(i & 1) * stride + (i & 2) * 4];
            // Addresses are worked out again for the stores: kept, they would not fit the registers.
            asm volatile("" : "+l"(target));
        }
#pragma unroll
        for (int j = 0; j < BATCH; j++, target += 8 * (size_t)stride)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (!WHOLE && ((first + j) * 8 + (i & 1) >= rows || !present[i / 2])) continue;
                const float sum = total[(first + j) * 4 + i];
                float* place = target + (i & 1) * stride + (i & 2) * 4;
                if (EPILOGUE == EPILOGUE_ADD)
                    *place = __fadd_rn(old[j][i], sum);
                else
                    *place = bias ? __fadd_rn(sum, offsets[i / 2]) : sum;
            }
    }
}

// Even warps hold gate rows, odd warps the up rows of the same outputs. They swap halves of their sums, so that each
// finishes half of the activation rows.
DEVICE void put_activations(const Stages& ring, const Shape& shape, int warp, int tile, int first_row, int lane,
                            u16* output, const float (&total)[SUMS]) {
    constexpr int HALF = SUMS / 2;
    const bool is_gate = warp % 2 == 0;
    const u32 sent = ring.exchange + warp * HALF * 128 + lane * 16;
    const u32 received = ring.exchange + (warp ^ 1) * HALF * 128 + lane * 16;
#pragma unroll
    for (int i = 0; i < HALF; i += 4) {
        const float values[4] = {is_gate ? total[HALF + i] : total[i], is_gate ? total[HALF + i + 1] : total[i + 1],
                                 is_gate ? total[HALF + i + 2] : total[i + 2],
                                 is_gate ? total[HALF + i + 3] : total[i + 3]};
        store_shared_float4(sent + i * 128, values);
    }
    meet(1 + warp / 2, 64);
    const int row = first_row + (is_gate ? 0 : BLOCK_ROWS / 2) + (lane >> 2);
    const int k = tile / 2 * WEIGHT_TILE_ROWS + (lane & 3) * 2;
#pragma unroll
    for (int i = 0; i < HALF; i += 4) {
        const float4 other = load_shared_float4(received + i * 128);
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

// output: by EPILOGUE. bias: f32 [num_outputs] or 0. width: K. Grid: any number of CTAs up to the number of blocks.
// Shared memory: 1024 for alignment, the stages, the exchange of SwiGLU, 16 bytes of barriers a stage.
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
            multiply_block(ring, shape.units(), warp, lane, stage, parity, total);
            const int tile = block / shape.row_blocks() * BLOCK_TILES + warp;
            const int first_row = block % shape.row_blocks() * BLOCK_ROWS;
            if constexpr (EPILOGUE == EPILOGUE_SWIGLU)
                put_activations(ring, shape, warp, tile, first_row, lane, (u16*)output, total);
            else if (first_row + BLOCK_ROWS <= num_rows && (tile + 1) * WEIGHT_TILE_ROWS <= num_outputs)
                put_block<true>(shape, tile, first_row, lane, (float*)output, bias, total);
            else
                put_block<false>(shape, tile, first_row, lane, (float*)output, bias, total);
        }
    }
}
