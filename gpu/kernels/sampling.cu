// Draws of sampled rows: one token id for each.
//
// VOCABULARY: logits of a row. The draw of a row depends on its logits and its table entries only.
#include "primitives.cuh"

constexpr int SAMPLE_THREADS = 256, SAMPLE_WARPS = SAMPLE_THREADS / 32, PARTS = 32;
constexpr int PART = (VOCABULARY + PARTS - 1) / PARTS;

// A token and its score; the better one has the higher score, or at equal scores the lower id.
struct Candidate {
    float score;
    i32 id;
};
DEVICE bool better(Candidate a, Candidate b) { return a.score > b.score || (a.score == b.score && a.id < b.id); }
DEVICE Candidate best_of_warp(Candidate own) {
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) {
        const Candidate other{__shfl_xor_sync(FULL_WARP, own.score, lanes), __shfl_xor_sync(FULL_WARP, own.id, lanes)};
        if (better(other, own)) own = other;
    }
    return own;
}

// ids[r] = the first largest logit of row r; also last_tokens[slots[r]] where slots[r] >= 0. NaN counts as -inf; a row
// without a finite logit gives id 0. parts: PARTS candidates a row. arrived: a counter a row, 0 before and after.
// Grid: (PARTS, rows).
extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS)
    draw_largest(const float* logits, const i32* slots, Candidate* parts, u32* arrived, i32* ids, i32* last_tokens) {
    __shared__ Candidate warps[SAMPLE_WARPS];
    __shared__ bool is_last;
    allow_next_kernel();
    const int row = blockIdx.y, thread = threadIdx.x, lane = thread & 31;
    const int first = blockIdx.x * PART, end = min(first + PART, VOCABULARY), slot = slots[row];
    wait_previous_kernel();
    Candidate best{NEGATIVE_INFINITY, 0x7fffffff};
    for (int id = first + thread; id < end; id += SAMPLE_THREADS) {
        const float logit = logits[(size_t)row * VOCABULARY + id];
        if (logit > best.score) best = {logit, id};
    }
    best = best_of_warp(best);
    if (lane == 0) warps[thread >> 5] = best;
    __syncthreads();
    if (thread < 32) {
        best = best_of_warp(lane < SAMPLE_WARPS ? warps[lane] : Candidate{NEGATIVE_INFINITY, 0x7fffffff});
        if (lane == 0) {
            parts[row * PARTS + blockIdx.x] = best;
            __threadfence();
            is_last = atomicAdd(arrived + row, 1u) == PARTS - 1;
        }
    }
    __syncthreads();
    if (!is_last || thread >= 32) return;
    __threadfence();
    volatile const Candidate* own = parts + row * PARTS + lane;
    best = best_of_warp({own->score, own->id});
    if (lane == 0) {
        const i32 id = best.id == 0x7fffffff ? 0 : best.id;
        arrived[row] = 0;
        ids[row] = id;
        if (slot >= 0) last_tokens[slot] = id;
    }
}
