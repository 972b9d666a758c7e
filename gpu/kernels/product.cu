// Matrix products for up to 64 activation rows a CTA: output[row][n] = sum over k of weights[n][k] activations[row][k].
//
// A CTA owns TILES tiles of 16 weight rows (grid x) and 8 ROW_GROUPS activation rows (grid y, in FRAGMENT order). Its
// eight warps are the eight K segments: each streams its own part of the weights through a private ring in shared
// memory, without any CTA barrier, and keeps one chain of sums for each output. At the end the eight partial sums of an
// output meet in shared memory and are added from segment 0 on.
//
// With bulk copies, lane 0 fills the ring; without, every lane copies 16 bytes at a time.
//
// STORAGE            of the weights (weights.cuh)
// ROW_GROUPS         groups of 8 activation rows, 1 to 8
// TILES              weight tiles of a CTA: 1, 2, 4
// UNITS_PER_STAGE    units of 64 k in a stage of the ring
// STAGES             of the ring
// PREFETCH           32-k chunks of activations held in registers ahead of their use
// WHOLE_STAGES       1 if every segment is a multiple of UNITS_PER_STAGE
// EPILOGUE           product_epilogue.cuh; SwiGLU writes ACTIVATION_LAYOUT
// CTAS_PER_PROCESSOR bounds the registers
// NORM_WIDTH         0, or K: there is one row, of the residual stream, and every CTA norms it for itself (norm.cuh)
#include "norm.cuh"
#include "product_epilogue.cuh"
#include "weights.cuh"

constexpr int WARPS = SEGMENTS;
constexpr int UNIT_BYTES = weight_unit_bytes<STORAGE>(), TILE_STAGE_BYTES = UNITS_PER_STAGE * UNIT_BYTES;
constexpr int STAGE_BYTES = TILES * TILE_STAGE_BYTES, RING_BYTES = STAGES * STAGE_BYTES;
// Unrolled further, dequantization would be spread over more registers than there are.
constexpr int UNROLLED_UNITS = STORAGE == WEIGHTS_BF16 || PREFETCH > 2 ? UNITS_PER_STAGE : 1;
static_assert(2 * UNITS_PER_STAGE % PREFETCH == 0, "prefetched chunks keep their registers from stage to stage");
static_assert(EPILOGUE != EPILOGUE_SWIGLU || TILES % 2 == 0, "a CTA holds gate and up tiles in pairs");

#if NORM_WIDTH
static_assert(ROW_GROUPS == 1, "one row is normed");
typedef RowNorm<NORM_WIDTH, WARPS * 32> Norm;
// Bytes to elements k, k + 1 (k even) of the normed row: row 0 of FRAGMENT, without the others.
DEVICE u32 normed_place(int k) {
    return (k >> 5) * 64 + ((k & 7) >> 1) * 16 + (k >> 4 & 1) * 8 + (k >> 3 & 1) * 4;
}
#endif

// c = a b: multiply_bf16 from zero, without registers set to it.
DEVICE void begin_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if HAS_MMA
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
#else
    c[0] = c[1] = c[2] = c[3] = 0.0f;
    multiply_bf16(c, a0, a1, a2, a3, b0, b1);
#endif
}

// A warp's stages in shared memory and the weights that go through them.
struct WeightRing {
    const u8* source;   // first unit of the segment, first tile
    size_t tile_bytes;  // from one tile to the next
    int num_tiles;      // fewer than TILES at the end of the matrix
    int units;          // of the segment
    u32 stages, barriers;
    u64 policy;

    DEVICE int units_of(int step) const {
        return WHOLE_STAGES ? UNITS_PER_STAGE : min(UNITS_PER_STAGE, units - step * UNITS_PER_STAGE);
    }
#if HAS_BULK
    DEVICE void open(int lane) {
        policy = evict_first_policy();
        if (lane) return;
#pragma unroll
        for (int i = 0; i < STAGES; i++) barrier_init(barriers + 8 * i, 1);
        barrier_init_fence();
    }
    DEVICE void fill(int step, int stage, int num_steps, int lane) {
        if (lane || step >= num_steps) return;
        const u32 bytes = units_of(step) * UNIT_BYTES, barrier = barriers + 8 * stage;
        barrier_expect(barrier, num_tiles * bytes);
#pragma unroll
        for (int r = 0; r < TILES; r++)
            if (r < num_tiles)
                bulk_copy(stages + stage * STAGE_BYTES + r * TILE_STAGE_BYTES,
                          source + r * tile_bytes + (size_t)step * TILE_STAGE_BYTES, bytes, barrier, policy);
    }
    DEVICE void wait(int stage, u32 parity) { barrier_wait(barriers + 8 * stage, parity); }
#else
    DEVICE void open(int) {}
    // One group of copies per step, empty beyond the last, so that `wait` knows which groups are done.
    DEVICE void fill(int step, int stage, int num_steps, int lane) {
        if (step < num_steps) {
            const int bytes = units_of(step) * UNIT_BYTES;
#pragma unroll
            for (int r = 0; r < TILES; r++)
                for (int offset = lane * 16; r < num_tiles && offset < bytes; offset += 512)
                    async_copy16(stages + stage * STAGE_BYTES + r * TILE_STAGE_BYTES + offset,
                                 source + r * tile_bytes + (size_t)step * TILE_STAGE_BYTES + offset);
        }
        async_commit();
    }
    DEVICE void wait(int, u32) {
        async_wait<STAGES - 1>();
        __syncwarp();
    }
#endif
};

// Calls `put` for each output of a fragment: rows 2t, 2t + 1 of a group, outputs g, g + 8 of a tile. A function, since
// older NVRTC compiles no lambda with a parameter of any type.
template <typename Put>
DEVICE void for_outputs(int fragment, int first_row, int first_tile, int num_rows, int num_outputs, Put put) {
    const int tile = fragment / (ROW_GROUPS * 32), within = fragment % (ROW_GROUPS * 32);
    const int row = first_row + within / 32 * 8 + (within & 3) * 2;
    const int n = (first_tile + tile) * WEIGHT_TILE_ROWS + ((within & 31) >> 2);
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (row + j < num_rows && n + 8 * h < num_outputs) put(row + j, n + 8 * h, j, h);
}

// activations: bf16 in FRAGMENT; with NORM_WIDTH f32 [K], and norm_weight f32 [K] and eps of the norm.
// output: by EPILOGUE. bias: f32 [num_outputs] or 0. width: K. Block: 256 threads. Shared memory: the eight rings with
// 8 bytes of barrier a stage, or the eight partial sums, whichever is more.
extern "C" __global__ void __launch_bounds__(WARPS * 32, CTAS_PER_PROCESSOR)
    product(const u8* weights, const void* activations, void* output, const float* bias, i32 num_rows,
            i32 num_outputs, i32 width, const float* norm_weight, float eps) {
    extern __shared__ __align__(128) u8 shared[];
    allow_next_kernel();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int units = width / WEIGHT_UNIT_K, first_unit = segment_start(warp, units);
    const int segment_units = segment_start(warp + 1, units) - first_unit;
    const int steps = (segment_units + UNITS_PER_STAGE - 1) / UNITS_PER_STAGE;
    const int num_tiles = (num_outputs + WEIGHT_TILE_ROWS - 1) / WEIGHT_TILE_ROWS, first_tile = blockIdx.x * TILES;
    const int first_row = blockIdx.y * ROW_GROUPS * 8;

    WeightRing ring;
    ring.tile_bytes = (size_t)units * UNIT_BYTES;
    ring.source = weights + first_tile * ring.tile_bytes + (size_t)first_unit * UNIT_BYTES;
    ring.num_tiles = min(TILES, num_tiles - first_tile);
    ring.units = segment_units;
    ring.stages = shared_address(shared) + warp * RING_BYTES;
    ring.barriers = shared_address(shared) + WARPS * RING_BYTES + warp * STAGES * 8;
    ring.open(lane);
#pragma unroll
    for (int i = 0; i < STAGES; i++) ring.fill(i, i, steps, lane);
    __syncwarp();
#if NORM_WIDTH
    __shared__ float warp_sums[Norm::ROW_WARPS];
    __shared__ __align__(16) u8 normed[2 * NORM_WIDTH];
    Norm norm;
    norm.load_weight(norm_weight);
    wait_previous_kernel();
    norm.load_row((const float*)activations);
    const float scale = norm.scale(eps, warp_sums);
    norm.for_units(scale, [&](int k, const u32(&pairs)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) store_shared32(shared_address(normed) + normed_place(k + 2 * i), pairs[i]);
    });
    __syncthreads();
    const u32 source = shared_address(normed) + (lane & 3) * 16;
#else
    wait_previous_kernel();
    const size_t group_stride = (size_t)(width / 32) * 32;
    const uint4* const source = (const uint4*)activations + (size_t)(first_row / 8) * group_stride + lane;
#endif

    // Chunks of 32 k: the next one to load, never beyond the segment.
    const int last_chunk = 2 * (first_unit + max(segment_units, 1)) - 1;
    int next_chunk = 2 * first_unit;
    bool present[ROW_GROUPS];
#pragma unroll
    for (int m = 0; m < ROW_GROUPS; m++) present[m] = first_row + m * 8 + (lane >> 2) < num_rows;
    uint4 ahead[PREFETCH][ROW_GROUPS];
    auto load_chunk = [&](uint4(&chunk)[ROW_GROUPS]) {
#if NORM_WIDTH
        chunk[0] = present[0] ? load_shared128(source + next_chunk * 64) : make_uint4(0, 0, 0, 0);
#else
        const uint4* place = source + next_chunk * 32;
#pragma unroll
        for (int m = 0; m < ROW_GROUPS; m++)
            chunk[m] = present[m] ? load_global128(place + m * group_stride) : make_uint4(0, 0, 0, 0);
#endif
        next_chunk = min(next_chunk + 1, last_chunk);
    };
#pragma unroll
    for (int i = 0; i < PREFETCH; i++) load_chunk(ahead[i]);

    float sums[TILES][ROW_GROUPS][4] = {};
    int stage = 0;
    u32 parity = 0;
    for (int step = 0; step < steps; step++) {
        ring.wait(stage, parity);
        const int units_here = ring.units_of(step);
#pragma unroll UNROLLED_UNITS
        for (int u = 0; u < (UNROLLED_UNITS == 1 ? units_here : UNITS_PER_STAGE); u++) {
            if (!WHOLE_STAGES && u >= units_here) continue;
            float chain[TILES][ROW_GROUPS][4];  // unscaled sums of a scale's chunks
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const int place = (PREFETCH > 2 ? 2 * u + c : c) % PREFETCH;
                uint4 x[ROW_GROUPS];
#pragma unroll
                for (int m = 0; m < ROW_GROUPS; m++) x[m] = ahead[place][m];
                load_chunk(ahead[place]);
#pragma unroll
                for (int r = 0; r < TILES; r++) {
                    const u32 unit = ring.stages + stage * STAGE_BYTES + r * TILE_STAGE_BYTES + u * UNIT_BYTES;
                    u32 a[2][4];
                    load_fragments<STORAGE>(unit, c, lane, a);
                    float(&target)[ROW_GROUPS][4] = STORAGE == WEIGHTS_BF16 ? sums[r] : chain[r];
                    const bool begins = STORAGE != WEIGHTS_BF16 && c % chunks_per_scale<STORAGE>() == 0;
#pragma unroll
                    for (int m = 0; m < ROW_GROUPS; m++)
                        if (begins)
                            begin_bf16(target[m], a[0][0], a[0][1], a[0][2], a[0][3], x[m].x, x[m].y);
                        else
                            multiply_bf16(target[m], a[0][0], a[0][1], a[0][2], a[0][3], x[m].x, x[m].y);
#pragma unroll
                    for (int m = 0; m < ROW_GROUPS; m++)
                        multiply_bf16(target[m], a[1][0], a[1][1], a[1][2], a[1][3], x[m].z, x[m].w);
                    if constexpr (STORAGE != WEIGHTS_BF16) {
                        if ((c + 1) % chunks_per_scale<STORAGE>() == 0) {
                            const float2 scale = load_scales<STORAGE>(unit, c, lane);
#pragma unroll
                            for (int m = 0; m < ROW_GROUPS; m++)
#pragma unroll
                                for (int i = 0; i < 4; i++)
                                    sums[r][m][i] = fmaf(i < 2 ? scale.x : scale.y, target[m][i], sums[r][m][i]);
                        }
                    }
                }
            }
        }
        __syncwarp();
        ring.fill(step + STAGES, stage, steps, lane);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }

    // Partial sums: [segment][tile][group][lane] float4, over the rings, which are empty now.
    constexpr int FRAGMENTS = TILES * ROW_GROUPS * 32;
    const u32 partials = shared_address(shared);
    // What the sums are added to is on its way while they meet.
    constexpr bool READS_EARLY = EPILOGUE == EPILOGUE_ADD && FRAGMENTS <= WARPS * 32;
    float old[2][2] = {};
    if (READS_EARLY && threadIdx.x < FRAGMENTS)
        for_outputs(threadIdx.x, first_row, first_tile, num_rows, num_outputs, [&](int row, int n, int j, int h) {
            old[j][h] = ((const float*)output)[(size_t)row * num_outputs + n];
        });
    __syncthreads();
#pragma unroll
    for (int r = 0; r < TILES; r++)
#pragma unroll
        for (int m = 0; m < ROW_GROUPS; m++)
            store_shared_float4(partials + (warp * FRAGMENTS + (r * ROW_GROUPS + m) * 32 + lane) * 16, sums[r][m]);
    __syncthreads();
    // Rows 2t (x, z) and 2t + 1 (y, w) of a group; outputs g (x, y) and g + 8 (z, w) of a tile.
    auto total = [&](int fragment) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int s = 0; s < SEGMENTS; s++) {
            const float4 part = load_shared_float4(partials + (s * FRAGMENTS + fragment) * 16);
            sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
        return sum;
    };
    if constexpr (EPILOGUE == EPILOGUE_SWIGLU) {
        u16* const target = (u16*)output;
        for (int i = threadIdx.x; i < FRAGMENTS / 2; i += WARPS * 32) {
            const int pair = i / (ROW_GROUPS * 32), within = i % (ROW_GROUPS * 32);
            if (2 * pair >= ring.num_tiles) continue;
            const float4 gate = total(2 * pair * ROW_GROUPS * 32 + within);
            const float4 up = total((2 * pair + 1) * ROW_GROUPS * 32 + within);
            const int row = first_row + within / 32 * 8 + (within & 3) * 2;
            const int k = (first_tile / 2 + pair) * 16 + ((within & 31) >> 2);
            const u32 first = pack_bf16(swiglu(gate.x, up.x), swiglu(gate.y, up.y));
            const u32 second = pack_bf16(swiglu(gate.z, up.z), swiglu(gate.w, up.w));
#pragma unroll
            for (int j = 0; j < 2; j++) {
                if (row + j >= num_rows) continue;
                target[activation_index<ACTIVATION_LAYOUT>(row + j, k, num_outputs / 2)] = (u16)(first >> (16 * j));
                target[activation_index<ACTIVATION_LAYOUT>(row + j, k + 8, num_outputs / 2)] =
                    (u16)(second >> (16 * j));
            }
        }
    } else {
        float* const target = (float*)output;
        for (int i = threadIdx.x; i < FRAGMENTS; i += WARPS * 32) {
            const float4 sum = total(i);
            const float values[2][2] = {{sum.x, sum.z}, {sum.y, sum.w}};
            for_outputs(i, first_row, first_tile, num_rows, num_outputs, [&](int row, int n, int j, int h) {
                if constexpr (READS_EARLY)
                    target[(size_t)row * num_outputs + n] = __fadd_rn(old[j][h], values[j][h]);
                else
                    put_output<EPILOGUE>(target, bias, row, n, num_outputs, values[j][h]);
            });
        }
    }
}
