// Draws of sampled rows: one token id for each, a function of its logits and its table entry alone.
//
// VOCABULARY: logits of a row. Grids are (parts, rows) with up to MAX_PARTS parts; their number changes no bit.
//
//   adjust_logits   bias and penalties, in place; the largest logit, which is the draw of a greedy row
//   rank_logits     how many ids, and what sums of weights, lie how far below it: in which bins the filters cut
//   cut_candidates  the ids of those bins alone: where exactly they cut; the likeliest ids
//   draw_tokens     arg max of logit / temperature + noise among what is left; the draw's log probability
//
// A step whose rows are all greedy and plain needs the first alone. Sums are of whole numbers and maxima have one
// order, so it does not matter which thread is first.
#include "draw_cuts.cuh"

constexpr int MAX_LOGPROBS = 20;
constexpr float LOWEST_LOGPROB = -9999.0f;

// Draws and reports of a step, for the host; arrays of one element a row.
struct Results {
    i32* ids;
    float* logprobs;
    i32* top_ids;         // (rows, MAX_LOGPROBS)
    float* top_logprobs;  // the same
};
DEVICE Results results_at(u32* words) {
    const int rows = gridDim.y;
    i32* ids = (i32*)words;
    float* logprobs = (float*)(words + rows);
    return {ids, logprobs, ids + 2 * rows, logprobs + (1 + MAX_LOGPROBS) * rows};
}

// ---- largest logit -------------------------------------------------------------------------------------------------
// Bias, then penalties, in the host's order and rounding.
DEVICE float adjusted(float x, int id, const DrawRow& draw, const DrawRow* entry) {
    if (draw.biases) x = __fadd_rn(x, draw.biases[id]);
    if (!draw.words) return x;
    const u32 word = draw.words[id];
    u32 count = word & COUNT_MASK;
    for (int i = 0; i < draw.num_drafted; i++) count += (entry - i)->drafted_id == id;
    if (draw.flags & REPETITION && (count || word & IN_PROMPT)) {
        const double wide = x, penalty = draw.repetition_penalty, limit = 3.4028234663852886e38;
        const double scaled = wide > 0.0 ? __ddiv_rn(wide, penalty) : __dmul_rn(wide, penalty);
        x = (float)(scaled > limit ? limit : scaled < -limit ? -limit : scaled);
    }
    if (draw.flags & ADDITIVE_PENALTIES && count)
        x = __fsub_rn(x, __fadd_rn(__fmul_rn(draw.frequency_penalty, (float)count), draw.presence_penalty));
    return draw.flags & SUPPRESSED_ENDS && word & ENDS_REPLY ? NEGATIVE_INFINITY : x;
}

// The draw of a row: to the host, to the next step, to the counts that penalties look at.
DEVICE void emit(const DrawRow& draw, i32 id, i32* ids, i32* last_tokens) {
    ids[blockIdx.y] = id;
    if (draw.slot >= 0) last_tokens[draw.slot] = id;
    if (draw.flags & REMEMBERED) draw.words[id]++;
}

// NaN counts as -inf; without a finite logit the draw is id 0. Clears the row's bins if the next kernels use them.
extern "C" __global__ void __launch_bounds__(DRAW_THREADS, MIN_CTAS)
    adjust_logits(float* logits, const DrawRow* rows, RowState* states, Candidate<float>* parts, u32* counts,
                  u64* weights, u32* results, i32* last_tokens) {
    allow_next_kernel();
    const int row = blockIdx.y, thread = threadIdx.x;
    const DrawRow draw = rows[row];
    wait_previous_kernel();
    if (draw.flags & PADDING) return;
    RowState* state = states + row;
    if (draw.flags & (TOP_K | TOP_P | LOGPROBS)) {
        for (int bin = blockIdx.x * DRAW_THREADS + thread; bin < BINS; bin += gridDim.x * DRAW_THREADS) {
            counts[row * BINS + bin] = 0;
            weights[row * BINS + bin] = 0;
        }
    }
    float* own = logits + (size_t)row * VOCABULARY;
    const Part part = own_part();
    Candidate<float> best = no_candidate<float>();
    visit_quads<4>(own, part, [&](int id, float(&x)[4]) {
        if ((draw.words || draw.biases) && id < part.end) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (is_token(id + i)) x[i] = number(adjusted(x[i], id + i, draw, rows + row));
            store_quad(own, id, x);
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (x[i] > best.score) best = {x[i], id + i};
    });
    best = best_of_cta(best);
    if (thread == 0) parts[row * MAX_PARTS + blockIdx.x] = best;
    if (!is_last_of_row(state) || thread >= 32) return;
    best = best_of_parts(parts + row * MAX_PARTS);
    if (thread != 0) return;
    if (best.id == NO_ID) best.id = 0;
    *state = {};
    state->top = best.score;
    state->top_id = best.id;
    if (!(draw.flags & (RANDOM | LOGPROBS))) emit(draw, best.id, (i32*)results, last_tokens);
}

// ---- bins ----------------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(DRAW_THREADS, MIN_CTAS)
    rank_logits(const float* logits, const DrawRow* rows, RowState* states, u32* counts, u64* weights) {
    __shared__ u32 own_counts[BINS], low[BINS], high[BINS];
    allow_next_kernel();
    const int row = blockIdx.y, thread = threadIdx.x;
    const DrawRow draw = rows[row];
    wait_previous_kernel();
    if (!(draw.flags & (TOP_K | TOP_P | LOGPROBS))) return;
    for (int bin = thread; bin < BINS; bin += DRAW_THREADS) own_counts[bin] = low[bin] = high[bin] = 0;
    __syncthreads();
    RowState* state = states + row;
    const float* own = logits + (size_t)row * VOCABULARY;
    const float top = state->top;
    const Part part = own_part();
    const bool counted = draw.flags & TOP_K || draw.num_logprobs > 0;
    u64 total = 0;
    visit_quads<2>(own, part, [&](int id, const float(&x)[4]) {
        if (id >= part.end) return;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (!is_token(id + i)) break;
            const int bin = bin_of(top, x[i]);
            if (counted) atomicAdd(own_counts + bin, 1u);
            if (draw.flags & TOP_P) {
                const u64 weight = weight_of(top, x[i], draw.inverse_temperature);
                if (weight) add_wide(low + bin, high + bin, weight);
            }
            if (draw.flags & LOGPROBS) total += weight_of(top, x[i], 1.0);
        }
    });
    if (draw.flags & LOGPROBS) {
        total = sum_of_warp(total);
        if ((thread & 31) == 0) atomicAdd(&state->total, total);
    }
    __syncthreads();
    counts += row * BINS, weights += row * BINS;
    for (int bin = thread; bin < BINS; bin += DRAW_THREADS) {
        const u64 weight = (u64)high[bin] << 32 | low[bin];
        if (own_counts[bin]) atomicAdd(counts + bin, own_counts[bin]);
        if (weight) atomicAdd(weights + bin, weight);
    }
    if (is_last_of_row(state)) find_bins(draw, state, counts, weights);
}

// ---- cuts ----------------------------------------------------------------------------------------------------------
DEVICE float logprob_of(float x, const RowState* state) {
    const double log_total = __dadd_rn(log_exact(__ull2double_rn(state->total) / 35184372088832.0), (double)state->top);
    const double logprob = __dadd_rn((double)x, -log_total);
    return logprob > LOWEST_LOGPROB ? (float)logprob : LOWEST_LOGPROB;
}

// The num_logprobs listed ids from `lowest` on, best first.
DEVICE void report_leaders(const Listed& listed, u64 lowest, const RowState* state, Results results) {
    __shared__ u64 leaders[MAX_LOGPROBS];
    __shared__ int num_leaders;
    if (threadIdx.x == 0) num_leaders = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < listed.count; i += DRAW_THREADS) {
        const i32 id = listed.ids[i];
        const u64 own = standing(number(listed.logits[id]), id);
        if (own >= lowest) leaders[atomicAdd(&num_leaders, 1)] = own;
    }
    __syncthreads();
    if ((int)threadIdx.x >= num_leaders) return;
    const u64 own = leaders[threadIdx.x];
    int place = MAX_LOGPROBS * blockIdx.y;
    for (int i = 0; i < num_leaders; i++) place += leaders[i] > own;
    const i32 id = (1 << ID_BITS) - 1 - (i32)(own & ((1 << ID_BITS) - 1));
    results.top_ids[place] = id;
    results.top_logprobs[place] = logprob_of(number(listed.logits[id]), state);
}

extern "C" __global__ void __launch_bounds__(DRAW_THREADS, MIN_CTAS)
    cut_candidates(const float* logits, const DrawRow* rows, RowState* states, const u64* weights, i32* lists,
                   u32* results) {
    __shared__ Room room;
    allow_next_kernel();
    const int row = blockIdx.y, thread = threadIdx.x, lane = thread & 31;
    const DrawRow draw = rows[row];
    wait_previous_kernel();
    if (!(draw.flags & (TOP_K | TOP_P)) && draw.num_logprobs <= 0) return;
    RowState* state = states + row;
    const float* own = logits + (size_t)row * VOCABULARY;
    const float top = state->top;
    const int leader_bin = state->leader_bin, k_bin = state->k_bin;
    const int first_p_bin = state->first_p_bin, last_p_bin = state->last_p_bin;
    i32* list = lists + (size_t)row * VOCABULARY;
    const Part part = own_part();
    visit_quads<4>(own, part, [&](int id, const float(&x)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int bin = bin_of(top, x[i]);
            const bool cut = bin <= leader_bin || bin == k_bin || (bin >= first_p_bin && bin <= last_p_bin);
            const bool listed = cut && id < part.end && is_token(id + i);
            const u32 lanes = __ballot_sync(FULL_WARP, listed);
            if (!lanes) continue;
            int place = 0;
            if (lane == 0) place = (int)atomicAdd(&state->num_listed, (u32)__popc(lanes));
            place = __shfl_sync(FULL_WARP, place, 0) + __popc(lanes & ((1u << lane) - 1));
            if (listed) list[place] = id + i;
        }
    });
    if (!is_last_of_row(state)) return;
    const Listed listed{list, (int)*(volatile u32*)&state->num_listed, own, top};
    const auto one = [](float) { return 1ull; };
    if (draw.num_logprobs > 0) {
        const u64 lowest = select(listed, leader_bin, state->leader_rank, room, one);
        report_leaders(listed, lowest, state, results_at(results));
    }
    u64 cut = 0, total = state->before_k;
    if (draw.flags & TOP_K) cut = select(listed, k_bin, state->k_rank, room, one);
    if (draw.flags & TOP_P) {
        const auto weight = [&](float x) { return weight_of(top, x, draw.inverse_temperature); };
        if (draw.flags & TOP_K) {
            u64 in_bin = 0;
            visit_bin(listed, k_bin, [&](float x, int id) { in_bin += standing(x, id) >= cut ? weight(x) : 0; });
            total += sum_of_cta(in_bin);
        }
        u64 sums[BINS_OF_THREAD];
        load_bins(sums, weights + row * BINS);
        const u64 target = share_of(draw.top_p, total);
        const Crossing crossing = find_crossing(sums, target);
        cut = select(listed, crossing.index, target - crossing.before, room, weight);
    }
    if (thread == 0) state->cut = cut;
}

// ---- draws ---------------------------------------------------------------------------------------------------------
// Whether min_p leaves a logit; exact where the rounding of a quick estimate could matter.
DEVICE bool is_likely(float top, float x, const DrawRow& draw) {
    const float power = -distance(top, x) * (float)draw.inverse_temperature;
    if (power > draw.log_min_p + 0.001f) return true;
    if (power < draw.log_min_p - 0.001f) return false;
    const double gap = x == top ? 0.0 : __dadd_rn((double)x, -(double)top);
    return exp_exact(__ddiv_rn(gap, draw.temperature)) >= draw.min_p;
}

// Arg max of logit / temperature + noise over the ids of this part that the filters leave. Most ids need no noise: an
// upper bound of their score is below a score already seen. `seen`: such a score, less that of the top logit without
// noise; -3.2 is below what the least noise leaves of the top logit itself.
DEVICE Candidate<double> draw_of_part(const float* logits, const DrawRow& draw, const RowState& state) {
    const float top = state.top, scale = (float)draw.inverse_temperature;
    const double top_score = __dmul_rn((double)top, draw.inverse_temperature);
    const float slack = 0.004f + fabsf((float)top_score) * 1e-6f;
    float seen = -3.2f;
    const u64 cut = state.cut;
    const Part part = own_part();
    Candidate<double> best = no_candidate<double>();
    visit_quads<2>(logits, part, [&](int id, const float(&x)[4]) {
        u32 open = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool kept = id < part.end && is_token(id + i) && standing(x[i], id + i) >= cut;
            if (kept && (!(draw.flags & MIN_P) || is_likely(top, x[i], draw))) open |= 1u << i;
        }
        if (!__any_sync(FULL_WARP, open != 0)) return;
        const uint4 noise = philox(draw.seed, draw.position, draw.choice, (u32)id / 4);
        const u32 words[4] = {noise.x, noise.y, noise.z, noise.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float bound = noise_bound(words[i]) - distance(top, x[i]) * scale;
            if (bound + slack < seen) open &= ~(1u << i);
        }
        if (!__any_sync(FULL_WARP, open != 0)) return;
        while (open) {
            const int i = __ffs(open) - 1;
            open &= open - 1;
            const float logit = i == 0 ? x[0] : i == 1 ? x[1] : i == 2 ? x[2] : x[3];
            const u32 word = i == 0 ? words[0] : i == 1 ? words[1] : i == 2 ? words[2] : words[3];
            const double score = __dadd_rn(__dmul_rn((double)logit, draw.inverse_temperature), gumbel_noise(word));
            if (score > best.score) best = {score, id + i};
            seen = fmaxf(seen, (float)(score - top_score));
        }
        __syncwarp();
#pragma unroll
        for (int lanes = 16; lanes; lanes /= 2) seen = fmaxf(seen, __shfl_xor_sync(FULL_WARP, seen, lanes));
    });
    return best;
}

extern "C" __global__ void __launch_bounds__(DRAW_THREADS, MIN_CTAS)
    draw_tokens(const float* logits, const DrawRow* rows, RowState* states, Candidate<double>* parts, u32* results,
                i32* last_tokens) {
    allow_next_kernel();
    const int row = blockIdx.y, thread = threadIdx.x;
    const DrawRow draw = rows[row];
    wait_previous_kernel();
    if (draw.flags & PADDING || !(draw.flags & (RANDOM | LOGPROBS))) return;
    RowState* state = states + row;
    const float* own = logits + (size_t)row * VOCABULARY;
    i32 id = state->top_id;
    if (draw.flags & RANDOM) {
        const Candidate<double> best = best_of_cta(draw_of_part(own, draw, *state));
        if (thread == 0) parts[row * MAX_PARTS + blockIdx.x] = best;
    }
    if (!is_last_of_row(state) || thread >= 32) return;
    if (draw.flags & RANDOM) {
        const Candidate<double> best = best_of_parts(parts + row * MAX_PARTS);
        if (best.id != NO_ID) id = best.id;
    }
    if (thread != 0) return;
    const Results host = results_at(results);
    if (draw.flags & LOGPROBS) {
        host.logprobs[row] = logprob_of(number(own[id]), state);
    }
    emit(draw, id, host.ids, last_tokens);
}
