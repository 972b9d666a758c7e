// Draws of sampled rows: one token id for each, a function of its logits and its table entry alone.
//
// VOCABULARY: logits of a row. Grids are (parts, rows) with up to MAX_PARTS parts; their number changes no bit.
//
//   adjust_logits   bias and penalties, in place; the largest logit, which is the draw of a greedy row
//   rank_logits     how many ids, and what sums of weights, lie how far below it: in which bins the filters cut
//   cut_candidates  the ids of those bins alone: where exactly they cut; the likeliest ids
//   draw_tokens     arg max of logit / temperature + noise among what is left; the draw's log probability
//
// A step whose rows are all greedy and plain needs the first alone. Sums are of whole numbers and maxima have one order,
// so it does not matter which thread is first.
#include "draw_rows.cuh"

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
    for (int id = part.first + 4 * thread; id < part.end; id += STRIDE) {
        float x[4];
        load_quad(x, own, id);
        if (draw.words || draw.biases) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (is_token(id + i)) x[i] = adjusted(x[i], id + i, draw, rows + row);
            store_quad(own, id, x);
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (x[i] > best.score) best = {x[i], id + i};
    }
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
// The numbers of this thread's bins, from memory that other CTAs have added to.
template <typename Number>
DEVICE void load_bins(u64 (&own)[BINS_OF_THREAD], const Number* bins) {
#pragma unroll
    for (int i = 0; i < BINS_OF_THREAD; i++) own[i] = *(const volatile Number*)(bins + BINS_OF_THREAD * threadIdx.x + i);
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
    for (int id = part.first + 4 * thread; id < part.end; id += STRIDE) {
        float x[4];
        load_quad(x, own, id);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (!is_token(id + i)) continue;
            const int bin = bin_of(top, x[i]);
            if (counted) atomicAdd(own_counts + bin, 1u);
            if (draw.flags & TOP_P) {
                const u64 weight = weight_of(top, x[i], draw.inverse_temperature);
                if (weight) add_wide(low + bin, high + bin, weight);
            }
            if (draw.flags & LOGPROBS) total += weight_of(top, x[i], 1.0);
        }
    }
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
        const float logit = listed.logits[id], x = logit == logit ? logit : NEGATIVE_INFINITY;
        if (bin_of(listed.top, x) == bin) visit(x, id);
    }
}

// The standing at which a running sum over one bin's ids, best first, reaches target: radix selection, from the upper
// digits down. number_of(logit): what an id adds.
template <typename Number>
DEVICE u64 select(const Listed& listed, int bin, u64 target, u32* low, u32* high, Number number_of) {
    constexpr int DIGIT_BITS = 11, ROUNDS = (32 + ID_BITS + DIGIT_BITS - 1) / DIGIT_BITS;
    static_assert(1 << DIGIT_BITS == BINS, "a digit has as many values as there are bins");
    u64 chosen = 0;
    for (int shift = (ROUNDS - 1) * DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
        for (int i = threadIdx.x; i < BINS; i += DRAW_THREADS) low[i] = high[i] = 0;
        __syncthreads();
        visit_bin(listed, bin, [&](float x, int id) {
            const u64 digits = standing(x, id) >> shift;
            if (digits >> DIGIT_BITS != chosen >> DIGIT_BITS) return;
            const int place = BINS - 1 - (int)(digits & (BINS - 1));  // the better digit first
            add_wide(low + place, high + place, number_of(x));
        });
        __syncthreads();
        u64 own[BINS_OF_THREAD];
#pragma unroll
        for (int i = 0; i < BINS_OF_THREAD; i++) {
            const int place = BINS_OF_THREAD * threadIdx.x + i;
            own[i] = (u64)high[place] << 32 | low[place];
        }
        const Crossing crossing = find_crossing(own, target);
        target -= crossing.before;
        chosen |= (u64)(BINS - 1 - crossing.index);
        if (shift) chosen <<= DIGIT_BITS;
    }
    return chosen;
}

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
        const float logit = listed.logits[id], x = logit == logit ? logit : NEGATIVE_INFINITY;
        if (standing(x, id) >= lowest) leaders[atomicAdd(&num_leaders, 1)] = standing(x, id);
    }
    __syncthreads();
    if ((int)threadIdx.x >= num_leaders) return;
    const u64 own = leaders[threadIdx.x];
    int place = MAX_LOGPROBS * blockIdx.y;
    for (int i = 0; i < num_leaders; i++) place += leaders[i] > own;
    const i32 id = (1 << ID_BITS) - 1 - (i32)(own & ((1 << ID_BITS) - 1));
    const float logit = listed.logits[id], x = logit == logit ? logit : NEGATIVE_INFINITY;
    results.top_ids[place] = id;
    results.top_logprobs[place] = logprob_of(x, state);
}

extern "C" __global__ void __launch_bounds__(DRAW_THREADS, MIN_CTAS)
    cut_candidates(const float* logits, const DrawRow* rows, RowState* states, const u64* weights, i32* lists,
                   u32* results) {
    __shared__ u32 low[BINS], high[BINS];
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
    for (int base = part.first; base < part.end; base += STRIDE) {
        const int id = base + 4 * thread;
        float x[4] = {};
        if (id < part.end) load_quad(x, own, id);
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
    }
    if (!is_last_of_row(state)) return;
    const Listed listed{list, (int)*(volatile u32*)&state->num_listed, own, top};
    if (draw.num_logprobs > 0) {
        const u64 lowest = select(listed, leader_bin, state->leader_rank, low, high, [](float) { return 1ull; });
        report_leaders(listed, lowest, state, results_at(results));
    }
    u64 cut = 0, total = state->before_k;
    if (draw.flags & TOP_K) cut = select(listed, k_bin, state->k_rank, low, high, [](float) { return 1ull; });
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
        cut = select(listed, crossing.index, target - crossing.before, low, high, weight);
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
    const Part part = own_part();
    Candidate<double> best = no_candidate<double>();
    for (int base = part.first; base < part.end; base += STRIDE) {
        const int id = base + 4 * (int)threadIdx.x;
        float x[4] = {};
        u32 open = 0;
        if (id < part.end) {
            load_quad(x, logits, id);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const bool kept = is_token(id + i) && standing(x[i], id + i) >= state.cut;
                if (kept && (!(draw.flags & MIN_P) || is_likely(top, x[i], draw))) open |= 1u << i;
            }
        }
        const float before = seen;
        if (open) {
            const uint4 noise = philox(draw.seed, draw.position, draw.choice, (u32)id / 4);
            const u32 words[4] = {noise.x, noise.y, noise.z, noise.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (!(open >> i & 1)) continue;
                const float bound = noise_bound(words[i]) - distance(top, x[i]) * scale;
                if (bound + slack < seen) continue;
                const double score =
                    __dadd_rn(__dmul_rn((double)x[i], draw.inverse_temperature), gumbel_noise(words[i]));
                if (score > best.score) best = {score, id + i};
                seen = fmaxf(seen, (float)(score - top_score));
            }
        }
        if (__any_sync(FULL_WARP, seen > before)) {
#pragma unroll
            for (int lanes = 16; lanes; lanes /= 2) seen = fmaxf(seen, __shfl_xor_sync(FULL_WARP, seen, lanes));
        }
    }
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
        const float logit = own[id];
        host.logprobs[row] = logprob_of(logit == logit ? logit : NEGATIVE_INFINITY, state);
    }
    emit(draw, id, host.ids, last_tokens);
}
