"""Sampling on the host: Numba for the passes over the vocabulary, NumPy for the few candidates left.

The noise is Gumbel(Philox4x32-10) with key = seed and counter = (output position, choice, id // 4, 0); word id % 4
belongs to the id. exp and log are polynomials of our own in f64 and a fixed order, so that a draw does not depend on
the C library.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from gpu.plan import SamplingParams, TokenLogprobs
from gpu.sampling import Sampled, SampleRequest, TokenHistory

_LN2 = 0.6931471805599453
_LOG2E = 1.4426950408889634
_FIRST_CUT = 1024
_MAX_NOISE = 22.9
_LARGEST = float(np.finfo(np.float32).max)
_NO_LOGPROB = -9999.0
_TAYLOR = tuple(1.0 / math.factorial(n) for n in range(13, -1, -1))
_ATANH = tuple(1.0 / n for n in range(23, 0, -2))


class HostSampler:
    """Draws one token per row. Holds no state: equal arguments give equal draws in any process."""

    def sample(self, logits: NDArray[np.float32], requests: list[SampleRequest]) -> list[Sampled]:
        """Draw one token for each row of logits: (num_rows, vocab_size) f32."""
        return [_sample_row(row, request) for row, request in zip(logits, requests, strict=True)]


def _sample_row(logits: NDArray[np.float32], request: SampleRequest) -> Sampled:
    params = request.params
    adjusted = _adjust(logits, request)
    if params.temperature <= 0.0:
        token_id = int(np.argmax(adjusted))
    else:
        candidates = _candidates(adjusted, params)
        token_id = _draw(adjusted, candidates, params, request.output_index)
    report = None if params.logprobs is None else _logprobs(adjusted, token_id, params.logprobs)
    return Sampled(token_id, report)


def _adjust(logits: NDArray[np.float32], request: SampleRequest) -> NDArray[np.float32]:
    """Bias and penalties, on a copy only if there are any."""
    params, history, ends = request.params, request.history, request.suppressed_ids
    if not (params.logit_bias or ends or request.counts_ids):
        return logits
    if request.drafted and request.counts_ids:
        history = history.with_drafted(request.drafted)
    adjusted = logits.copy()
    for token_id, bias in params.logit_bias:
        adjusted[token_id] += np.float32(bias)
    if params.repetition_penalty != 1.0:
        _divide_repeated(adjusted, params.repetition_penalty, history)
    if (params.presence_penalty or params.frequency_penalty) and history.output_counts:
        ids = np.fromiter(history.output_counts.keys(), np.int64)
        counts = np.fromiter(history.output_counts.values(), np.float32)
        adjusted[ids] -= np.float32(params.frequency_penalty) * counts + np.float32(params.presence_penalty)
    for token_id in ends:
        adjusted[token_id] = -np.inf
    return adjusted


def _divide_repeated(adjusted: NDArray[np.float32], penalty: float, history: TokenHistory) -> None:
    seen = sorted(history.prompt_ids | history.output_counts.keys())
    ids = np.array([token_id for token_id in seen if token_id < len(adjusted)], np.int64)
    values = adjusted[ids]
    # In f64 and clipped: a tiny penalty must not make infinities, whose differences are no numbers.
    wide = values.astype(np.float64)
    scaled = np.where(wide > 0, wide / penalty, wide * penalty)
    adjusted[ids] = np.clip(scaled, -_LARGEST, _LARGEST).astype(np.float32)


def _candidates(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.int64] | None:
    """Ids that top_k, top_p and min_p leave, in no particular order; None for all of them."""
    ids: NDArray[np.int64] | None = None
    if 0 < params.top_k < len(logits):
        ids = _largest(logits, params.top_k)
    if params.top_p < 1.0:
        ids = _nucleus(logits, ids, params.top_p, params.temperature)
    if params.min_p > 0.0:
        pool = np.arange(len(logits)) if ids is None else ids
        top = float(logits[pool].max())
        weights = _exp_array((logits[pool].astype(np.float64) - top) / params.temperature)
        ids = pool[weights >= params.min_p]
    return ids


def _largest(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The `count` ids of the largest logits, best first; ties go to the lower id."""
    count = min(count, len(logits))
    threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
    pool = np.flatnonzero(logits >= threshold)
    order = np.lexsort((pool, -logits[pool]))
    return np.asarray(pool[order][:count], np.int64)


def _nucleus(
    logits: NDArray[np.float32], ids: NDArray[np.int64] | None, top_p: float, temperature: float
) -> NDArray[np.int64]:
    """The smallest set of most likely ids whose probability reaches top_p; always at least one."""
    if ids is None:
        top = float(logits.max())
        total = _sum_exp(logits, top, temperature)
        ranked = _largest(logits, _FIRST_CUT)
        kept = _reach(logits, ranked, top, temperature, top_p * total)
        if kept == len(ranked) and kept < len(logits):
            ranked = _largest(logits, len(logits))
            kept = _reach(logits, ranked, top, temperature, top_p * total)
        return ranked[:kept]
    top = float(logits[ids[0]])
    weights = _exp_array((logits[ids].astype(np.float64) - top) / temperature)
    total = float(_running_sum(weights)[-1])
    return ids[: _reach(logits, ids, top, temperature, top_p * total)]


def _reach(logits: NDArray[np.float32], ranked: NDArray[np.int64], top: float, temperature: float, mass: float) -> int:
    """How many of the ranked ids it takes to reach `mass`; all if they do not."""
    sums = _running_sum(_exp_array((logits[ranked].astype(np.float64) - top) / temperature))
    return min(int(np.searchsorted(sums, mass, side="left")) + 1, len(ranked))


def _draw(logits: NDArray[np.float32], ids: NDArray[np.int64] | None, params: SamplingParams, output_index: int) -> int:
    seed = np.uint64(params.seed & 0xFFFFFFFFFFFFFFFF)
    position, choice = np.uint32(output_index), np.uint32(params.choice)
    pool = np.arange(len(logits), dtype=np.int64) if ids is None else np.sort(ids)
    return int(_gumbel_argmax(logits, pool, 1.0 / params.temperature, seed, position, choice))


def _logprobs(logits: NDArray[np.float32], token_id: int, num_top: int) -> TokenLogprobs:
    top = float(logits.max())
    log_total = _log_scalar(_sum_exp(logits, top, 1.0)) + top
    ranked = _largest(logits, num_top) if num_top else np.empty(0, np.int64)
    alternatives = tuple((int(i), max(_NO_LOGPROB, float(logits[i]) - log_total)) for i in ranked)
    return TokenLogprobs(token_id, max(_NO_LOGPROB, float(logits[token_id]) - log_total), alternatives)


_jit: Any = numba.njit(cache=True, nogil=True, boundscheck=False)


@_jit
def _exp(x: float) -> float:
    """exp of x <= 0 in f64: 2^k times a Taylor polynomial of degree 13 on |r| <= ln2 / 2."""
    if x < -700.0:
        return 0.0
    k = np.floor(x * _LOG2E + 0.5)
    r = x - k * _LN2
    p = _TAYLOR[0]
    for n in range(1, 14):
        p = p * r + _TAYLOR[n]
    return math.ldexp(p, int(k))


@_jit
def _log(x: float) -> float:
    """Natural logarithm of x > 0 in f64: mantissa in [sqrt(1/2), sqrt(2)), then 2 atanh((m-1)/(m+1)) as a series."""
    m, k = math.frexp(x)
    if m < 0.7071067811865476:
        m *= 2.0
        k -= 1
    s = (m - 1.0) / (m + 1.0)
    s2 = s * s
    p = 0.0
    for n in range(12):
        p = p * s2 + _ATANH[n]
    return k * _LN2 + 2.0 * s * p


@_jit
def _log_scalar(x: float) -> float:
    return float(_log(x))


@_jit
def _exp_array(values: NDArray[np.float64]) -> NDArray[np.float64]:
    out = np.empty_like(values)
    for i in range(len(values)):
        out[i] = _exp(values[i])
    return out


@_jit
def _running_sum(values: NDArray[np.float64]) -> NDArray[np.float64]:
    out = np.empty_like(values)
    total = 0.0
    for i in range(len(values)):
        total += values[i]
        out[i] = total
    return out


@_jit
def _sum_exp(logits: NDArray[np.float32], top: float, temperature: float) -> float:
    """Sum of exp((logit - top) / temperature) in id order."""
    total = 0.0
    for i in range(len(logits)):
        total += _exp((np.float64(logits[i]) - top) / temperature)
    return total


@_jit
def _philox_word(seed: np.uint64, c0: np.uint32, c1: np.uint32, token_id: int) -> np.uint32:
    """Word token_id % 4 of Philox4x32-10 at counter (c0, c1, token_id // 4, 0). Salmon et al., SC11."""
    mask = np.uint64(0xFFFFFFFF)
    k0 = seed & mask
    k1 = (seed >> np.uint64(32)) & mask
    x0 = np.uint64(c0)
    x1 = np.uint64(c1)
    x2 = np.uint64(token_id // 4)
    x3 = np.uint64(0)
    for _ in range(10):
        p0 = np.uint64(0xD2511F53) * x0
        p1 = np.uint64(0xCD9E8D57) * x2
        y0 = (p1 >> np.uint64(32)) ^ x1 ^ k0
        y2 = (p0 >> np.uint64(32)) ^ x3 ^ k1
        x1 = p1 & mask
        x3 = p0 & mask
        x0 = y0 & mask
        x2 = y2 & mask
        k0 = (k0 + np.uint64(0x9E3779B9)) & mask
        k1 = (k1 + np.uint64(0xBB67AE85)) & mask
    lane = token_id % 4
    if lane == 0:
        return np.uint32(x0)
    if lane == 1:
        return np.uint32(x1)
    if lane == 2:
        return np.uint32(x2)
    return np.uint32(x3)


@_jit
def _gumbel_argmax(
    logits: NDArray[np.float32],
    pool: NDArray[np.int64],
    inverse_temperature: float,
    seed: np.uint64,
    position: np.uint32,
    choice: np.uint32,
) -> int:
    """Arg max over pool (ascending ids) of logit / T + Gumbel noise; ties go to the lower id.

    The noise is below 22.9 for any 32-bit word, so most ids need none; skipping them changes no result.
    """
    best = -np.inf
    best_id = pool[0]
    for i in range(len(pool)):
        token_id = pool[i]
        if np.float64(logits[token_id]) * inverse_temperature + _MAX_NOISE < best:
            continue
        word = _philox_word(seed, position, choice, token_id)
        u = (np.float64(word) + 0.5) * 2.3283064365386963e-10
        score = np.float64(logits[token_id]) * inverse_temperature - _log(-_log(u))
        if score > best:
            best = score
            best_id = token_id
    return int(best_id)
