// What the kernels of a draw share: a row's table entry, its state between kernels, order among its ids, sums.
//
// VOCABULARY: logits of a row.
#pragma once
#include "draw_noise.cuh"

constexpr int DRAW_THREADS = 256, DRAW_WARPS = DRAW_THREADS / 32, MAX_PARTS = 32;
constexpr int MIN_CTAS = 2;  // at once on a processor: enough, and registers for all
constexpr int ID_BITS = 18, NO_ID = 0x7fffffff;
static_assert(VOCABULARY >= 1 && VOCABULARY <= 1 << ID_BITS, "an id has 18 bits");

// ---- tables ------------------------------------------------------------------------------------------------------
// gpu/cuda/draw_tables.py writes the entries and says what their fields mean.
constexpr u32 PADDING = 1, RANDOM = 2, TOP_K = 4, TOP_P = 8, MIN_P = 16, ADDITIVE_PENALTIES = 32, REPETITION = 64,
              SUPPRESSED_ENDS = 128, REMEMBERED = 256, LOGPROBS = 512;
struct DrawRow {
    double temperature, inverse_temperature, top_p, min_p, repetition_penalty;
    u64 seed;
    u32* words;
    const float* biases;
    i32 slot;
    u32 flags;
    i32 top_k, num_logprobs, num_drafted, drafted_id;
    u32 position, choice;
    float presence_penalty, frequency_penalty, log_min_p;
};
static_assert(sizeof(DrawRow) == 112, "DRAW_ROW of gpu/cuda/draw_tables.py");

// An id's word in a slot's table.
constexpr u32 IN_PROMPT = 1u << 31, ENDS_REPLY = 1u << 30, COUNT_MASK = ENDS_REPLY - 1;

// What one kernel of a draw leaves for the next.
struct RowState {
    u64 total;     // of exp(logit - top), fixed point
    u64 cut;       // the lowest standing that may be drawn
    u64 before_k;  // weights of the bins better than k_bin
    float top;
    i32 top_id;
    u32 num_listed;
    u32 arrived;  // CTAs of the kernel at hand; 0 before and after
    i32 leader_bin, leader_rank;  // bin of the last reported alternative, its place in that bin from 1; or -1
    i32 k_bin, k_rank;            // the same of the last id of top_k
    i32 first_p_bin, last_p_bin;  // bins, one of which holds the last id of top_p; empty: first > last
};
static_assert(sizeof(RowState) == 64, "STATE_BYTES of gpu/cuda/sampling.py");

// ---- passes over a row -------------------------------------------------------------------------------------------
// CTA x of gridDim.x has the ids from first to before end; in each step of STRIDE a thread has a quad of neighbours.
constexpr int STRIDE = 4 * DRAW_THREADS;
struct Part {
    int first, end;
};
DEVICE Part own_part() {
    const int size = ((VOCABULARY + (int)gridDim.x - 1) / (int)gridDim.x + 3) & ~3;
    const int first = blockIdx.x * size;
    return {first, min(first + size, VOCABULARY)};
}
DEVICE bool is_token(int id) { return VOCABULARY % 4 == 0 || id < VOCABULARY; }

// NaN counts as -inf.
DEVICE float number(float logit) { return logit == logit ? logit : NEGATIVE_INFINITY; }
// Four logits from id on, a multiple of 4; -inf for what lies beyond the part or the row.
DEVICE void load_quad(float (&x)[4], const float* logits, int id, int end) {
    if (id >= end) {
        x[0] = x[1] = x[2] = x[3] = NEGATIVE_INFINITY;
    } else if constexpr (VOCABULARY % 4 == 0) {
        const float4 quad = *(const float4*)(logits + id);
        x[0] = quad.x, x[1] = quad.y, x[2] = quad.z, x[3] = quad.w;
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = id + i < VOCABULARY ? logits[id + i] : NEGATIVE_INFINITY;
    }
}
DEVICE void store_quad(float* logits, int id, const float (&x)[4]) {
    if constexpr (VOCABULARY % 4 == 0) {
        *(float4*)(logits + id) = {x[0], x[1], x[2], x[3]};
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (id + i < VOCABULARY) logits[id + i] = x[i];
    }
}

// Calls visit(id, logits) for the quads of a part, by whole CTAs: the last ones of a step may lie beyond its end. The
// logits of QUADS steps are loaded before the first of them is visited.
template <int QUADS, typename Visit>
DEVICE void visit_quads(const float* logits, Part part, Visit visit) {
    for (int base = part.first; base < part.end; base += QUADS * STRIDE) {
        const int id = base + 4 * (int)threadIdx.x;
        float x[QUADS][4];
#pragma unroll
        for (int quad = 0; quad < QUADS; quad++) load_quad(x[quad], logits, id + quad * STRIDE, part.end);
#pragma unroll
        for (int quad = 0; quad < QUADS; quad++) {
            if (base + quad * STRIDE >= part.end) break;
#pragma unroll
            for (int i = 0; i < 4; i++) x[quad][i] = number(x[quad][i]);
            visit(id + quad * STRIDE, x[quad]);
        }
    }
}

// ---- order among ids -----------------------------------------------------------------------------------------------
// The better one of two has the higher score, or at equal scores the lower id.
template <typename Score>
struct Candidate {
    Score score;
    i32 id;
};
template <typename Score>
DEVICE Candidate<Score> no_candidate() {
    return {(Score)NEGATIVE_INFINITY, NO_ID};
}
template <typename Score>
DEVICE Candidate<Score> best_of_warp(Candidate<Score> own) {
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) {
        const Score score = __shfl_xor_sync(FULL_WARP, own.score, lanes);
        const i32 id = __shfl_xor_sync(FULL_WARP, own.id, lanes);
        if (score > own.score || (score == own.score && id < own.id)) own = {score, id};
    }
    return own;
}
// The best of a CTA, for warp 0.
template <typename Score>
DEVICE Candidate<Score> best_of_cta(Candidate<Score> own) {
    __shared__ Score scores[DRAW_WARPS];
    __shared__ i32 ids[DRAW_WARPS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    own = best_of_warp(own);
    if (lane == 0) scores[warp] = own.score, ids[warp] = own.id;
    __syncthreads();
    own = lane < DRAW_WARPS ? Candidate<Score>{scores[lane], ids[lane]} : no_candidate<Score>();
    return best_of_warp(own);
}
// The best of all parts, for warp 0 of the CTA that arrived last.
template <typename Score>
DEVICE Candidate<Score> best_of_parts(const Candidate<Score>* parts) {
    const int lane = threadIdx.x & 31;
    if (lane >= (int)gridDim.x) return best_of_warp(no_candidate<Score>());
    const volatile Candidate<Score>* own = parts + lane;
    return best_of_warp(Candidate<Score>{own->score, own->id});
}

// A place in the order of a row's ids; the better id has the greater standing, and no two are equal.
DEVICE u64 standing(float x, int id) {
    const u32 bits = __float_as_uint(__fadd_rn(x, 0.0f));  // -0 counts as 0
    const u32 key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (u64)key << ID_BITS | (u32)((1 << ID_BITS) - 1 - id);
}

// Bins of the distance from the largest logit, from 2^-8 to 2^8, 128 for each doubling: a worse id has no lower bin.
constexpr int BINS = 2048, BINS_OF_THREAD = BINS / DRAW_THREADS;
DEVICE float distance(float top, float x) { return x == top ? 0.0f : top - x; }
DEVICE int bin_of(float top, float x) {
    const int step = (int)(__float_as_uint(distance(top, x)) >> 16) - (119 << 7);
    return min(max(step, 0), BINS - 1);
}

// ---- sums: whole numbers, so their order does not matter -----------------------------------------------------------
// exp((x - top) inverse_temperature) in units of 2^-45; a row's sum stays below 2^64.
DEVICE u64 weight_of(float top, float x, double inverse_temperature) {
    if (x == top) return 1ull << 45;
    const double power = ((double)x - (double)top) * inverse_temperature;
    return power < -40.0 ? 0 : __double2ull_rn(exp_fused(power) * 35184372088832.0);
}
// The share of a sum that top_p asks for, at least one unit.
DEVICE u64 share_of(double top_p, u64 total) {
    const u64 share = __double2ull_ru(top_p * __ull2double_rn(total));
    return max(1ull, min(share, total));
}
DEVICE u64 sum_of_warp(u64 own) {
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) own += __shfl_xor_sync(FULL_WARP, own, lanes);
    return own;
}
DEVICE u64 sum_of_cta(u64 own) {
    __shared__ u64 sums[DRAW_WARPS];
    own = sum_of_warp(own);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = own;
    __syncthreads();
    own = 0;
    for (int warp = 0; warp < DRAW_WARPS; warp++) own += sums[warp];
    return own;
}
// Adds to a 64-bit number in shared memory that is kept as two words, for which the hardware has an addition.
DEVICE void add_wide(u32* low, u32* high, u64 value) {
    const u32 added = (u32)value, before = atomicAdd(low, added);
    const u32 carry = before + added < before;
    if (const u32 upper = (u32)(value >> 32) + carry) atomicAdd(high, upper);
}

// Where a running sum over BINS numbers reaches a target between 1 and their total: the index, and the sum before it.
// A thread has the numbers BINS_OF_THREAD threadIdx.x ...
struct Crossing {
    int index;
    u64 before;
};
DEVICE Crossing find_crossing(const u64 (&own)[BINS_OF_THREAD], u64 target) {
    __shared__ u64 sums[DRAW_WARPS];
    __shared__ Crossing found;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u64 total = 0;
#pragma unroll
    for (int i = 0; i < BINS_OF_THREAD; i++) total += own[i];
    u64 until = total;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const u64 lower = __shfl_up_sync(FULL_WARP, until, lanes);
        if (lane >= lanes) until += lower;
    }
    if (lane == 31) sums[warp] = until;
    if (threadIdx.x == 0) found = {BINS - 1, 0};
    __syncthreads();
    for (int i = 0; i < warp; i++) until += sums[i];
    u64 before = until - total;
    if (before < target && target <= until) {
        int i = 0;
#pragma unroll
        for (int step = 0; step < BINS_OF_THREAD - 1; step++) {
            const bool beyond = i == step && before + own[step] < target;
            if (beyond) before += own[step], i++;
        }
        found = {BINS_OF_THREAD * (int)threadIdx.x + i, before};
    }
    __syncthreads();
    const Crossing crossing = found;
    __syncthreads();
    return crossing;
}

// Whether this CTA is the last one of its row to get here; it then sees what the others wrote before.
DEVICE bool is_last_of_row(RowState* state) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(&state->arrived, 1u) == gridDim.x - 1;
        if (last) state->arrived = 0;
    }
    __syncthreads();
    if (last) __threadfence();
    return last;
}
