// Where the filters of a draw cut: first in which bins of a row, then at which of their ids.
#pragma once
#include "draw_rows.cuh"

// The numbers of this thread's bins, from memory that other CTAs have added to.
template <typename Number>
DEVICE void load_bins(u64 (&own)[BINS_OF_THREAD], const Number* bins) {
#pragma unroll
    for (int i = 0; i < BINS_OF_THREAD; i++)
        own[i] = *(const volatile Number*)(bins + BINS_OF_THREAD * threadIdx.x + i);
}
// Sum of the bins before `end`.
DEVICE u64 sum_before(const u64 (&own)[BINS_OF_THREAD], int end) {
    u64 sum = 0;
#pragma unroll
    for (int i = 0; i < BINS_OF_THREAD; i++)
        if (BINS_OF_THREAD * (int)threadIdx.x + i < end) sum += own[i];
    return sum_of_cta(sum);
}

// In which bins a row's filters cut: known for counts; with top_k, the share of top_p is known within the k bin only.
DEVICE void find_bins(const DrawRow& draw, RowState* state, const u32* counts, const u64* weights) {
    u64 own[BINS_OF_THREAD];
    RowState found = {};
    found.leader_bin = found.k_bin = found.last_p_bin = -1;
    load_bins(own, counts);
    if (draw.num_logprobs > 0) {
        const Crossing crossing = find_crossing(own, draw.num_logprobs);
        found.leader_bin = crossing.index, found.leader_rank = draw.num_logprobs - (int)crossing.before;
    }
    if (draw.flags & TOP_K) {
        const Crossing crossing = find_crossing(own, draw.top_k);
        found.k_bin = crossing.index, found.k_rank = draw.top_k - (int)crossing.before;
    }
    if (draw.flags & TOP_P) {
        load_bins(own, weights);
        const bool open = !(draw.flags & TOP_K);
        found.before_k = sum_before(own, open ? BINS : found.k_bin);
        const u64 most = open ? found.before_k : sum_before(own, found.k_bin + 1);
        found.first_p_bin = find_crossing(own, share_of(draw.top_p, found.before_k)).index;
        found.last_p_bin = find_crossing(own, share_of(draw.top_p, most)).index;
    }
    if (threadIdx.x != 0) return;
    state->leader_bin = found.leader_bin, state->leader_rank = found.leader_rank;
    state->k_bin = found.k_bin, state->k_rank = found.k_rank, state->before_k = found.before_k;
    state->first_p_bin = found.first_p_bin, state->last_p_bin = found.last_p_bin;
}

// A row's listed ids, in any order.
struct Listed {
    const volatile i32* ids;
    int count;
    const float* logits;
    float top;
};
// Calls visit(logit, id) for the listed ids of one bin, shared among the threads.
template <typename Visit>
DEVICE void visit_bin(const Listed& listed, int bin, Visit visit) {
    for (int i = threadIdx.x; i < listed.count; i += DRAW_THREADS) {
        const i32 id = listed.ids[i];
        const float x = number(listed.logits[id]);
        if (bin_of(listed.top, x) == bin) visit(x, id);
    }
}

// Room in shared memory: two words each for the digits of a radix selection, or standings and weights of a few ids.
struct Room {
    union {
        struct {
            u32 low[BINS], high[BINS];
        };
        struct {
            u64 standings[DRAW_THREADS], weights[DRAW_THREADS];
        };
    };
    u64 selected;
    int num_ids;
};

// The standing at which a running sum over one bin's ids, best first, reaches target: radix selection, from the upper
// digits down. weigh(logit): what an id adds.
template <typename Weigh>
DEVICE u64 select_by_digits(const Listed& listed, int bin, u64 target, Room& room, Weigh weigh) {
    constexpr int DIGIT_BITS = 11, ROUNDS = (32 + ID_BITS + DIGIT_BITS - 1) / DIGIT_BITS;
    static_assert(1 << DIGIT_BITS == BINS, "a digit has as many values as there are bins");
    u64 chosen = 0;
    for (int shift = (ROUNDS - 1) * DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
        for (int i = threadIdx.x; i < BINS; i += DRAW_THREADS) room.low[i] = room.high[i] = 0;
        __syncthreads();
        visit_bin(listed, bin, [&](float x, int id) {
            const u64 digits = standing(x, id) >> shift;
            if (digits >> DIGIT_BITS != chosen >> DIGIT_BITS) return;
            const int place = BINS - 1 - (int)(digits & (BINS - 1));  // the better digit first
            add_wide(room.low + place, room.high + place, weigh(x));
        });
        __syncthreads();
        u64 own[BINS_OF_THREAD];
#pragma unroll
        for (int i = 0; i < BINS_OF_THREAD; i++) {
            const int place = BINS_OF_THREAD * threadIdx.x + i;
            own[i] = (u64)room.high[place] << 32 | room.low[place];
        }
        const Crossing crossing = find_crossing(own, target);
        target -= crossing.before;
        chosen |= (u64)(BINS - 1 - crossing.index);
        if (shift) chosen <<= DIGIT_BITS;
    }
    return chosen;
}

// The same, by comparing all with all while there is a thread for each id.
template <typename Weigh>
DEVICE u64 select(const Listed& listed, int bin, u64 target, Room& room, Weigh weigh) {
    const int thread = threadIdx.x;
    if (thread == 0) room.num_ids = 0;
    __syncthreads();
    visit_bin(listed, bin, [&](float x, int id) {
        const int place = atomicAdd(&room.num_ids, 1);
        if (place < DRAW_THREADS) room.standings[place] = standing(x, id), room.weights[place] = weigh(x);
    });
    __syncthreads();
    const int num_ids = room.num_ids;
    if (num_ids > DRAW_THREADS) return select_by_digits(listed, bin, target, room, weigh);
    if (thread < num_ids) {
        const u64 own = room.standings[thread];
        u64 before = 0;
        for (int i = 0; i < num_ids; i++) before += room.standings[i] > own ? room.weights[i] : 0;
        if (before < target && target <= before + room.weights[thread]) room.selected = own;
    }
    __syncthreads();
    return room.selected;
}
