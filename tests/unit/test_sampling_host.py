"""The host sampler against plain NumPy and the published generator."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from gpu.cpu import sampling
from gpu.cpu.sampling import HostSampler
from gpu.plan import PlanEntry, RowKind, SamplingParams
from gpu.sampling import SampleRequest, TokenHistory, requests_of

VOCAB = 4000


def _logits(seed: int, rows: int = 1, vocab: int = VOCAB) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(rows, vocab)) * 4).astype(np.float32)


def _draw(logits: np.ndarray, params: SamplingParams, index: int = 0, history: TokenHistory | None = None) -> int:
    request = SampleRequest(params, history or TokenHistory(()), index)
    return HostSampler().sample(logits, [request])[0].token_id


def _words(seed: int, position: int, choice: int, vocab: int) -> np.ndarray:
    """Philox4x32-10 written down again in NumPy."""
    mask = np.uint64(0xFFFFFFFF)
    x = [np.full(vocab // 4, v, np.uint64) for v in (position, choice, 0, 0)]
    x[2] = np.arange(vocab // 4, dtype=np.uint64)
    k0, k1 = np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * x[0], np.uint64(0xCD9E8D57) * x[2]
        x = [(p1 >> np.uint64(32)) ^ x[1] ^ k0, p1 & mask, (p0 >> np.uint64(32)) ^ x[3] ^ k1, p0 & mask]
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
    return np.stack(x, 1).reshape(-1).astype(np.float64)


def _oracle(logits: np.ndarray, params: SamplingParams, index: int) -> int:
    scaled = logits.astype(np.float64) / params.temperature
    keep = np.ones(len(logits), bool)
    order = np.lexsort((np.arange(len(logits)), -logits))
    if params.top_k:
        keep[order[params.top_k :]] = False
    if params.top_p < 1:
        weights = np.where(keep[order], np.exp(scaled[order] - scaled.max()), 0)
        reached = np.cumsum(weights) / weights.sum()
        keep[order[int(np.searchsorted(reached, params.top_p)) + 1 :]] = False
    if params.min_p > 0:
        keep &= np.exp(scaled - scaled[keep].max()) >= params.min_p
    u = (_words(params.seed, index, params.choice, len(logits)) + 0.5) / 2**32
    return int(np.argmax(np.where(keep, scaled - np.log(-np.log(u)), -np.inf)))


def test_philox_zero_counter_and_key_equals_published_vector() -> None:
    words = [int(sampling._philox_word(np.uint64(0), np.uint32(0), np.uint32(0), i)) for i in range(4)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1.0, seed=3),
        SamplingParams(0.7, seed=2**63 + 5, choice=2),
        SamplingParams(2.0, top_k=50, seed=9),
        SamplingParams(1.0, top_p=0.9, seed=1),
        SamplingParams(1.3, top_k=200, top_p=0.8, seed=4),
        SamplingParams(1.0, min_p=0.05, seed=8),
        SamplingParams(5.0, top_p=0.999, seed=11),
    ],
)
def test_draw_with_each_filter_equals_numpy_oracle(params: SamplingParams) -> None:
    for index in range(25):
        logits = _logits(100 + index)
        assert _draw(logits, params, index) == _oracle(logits[0], params, index)


def test_draw_depends_on_row_alone() -> None:
    logits = _logits(5, rows=6)
    params = SamplingParams(1.0, top_p=0.95, seed=21)
    together = HostSampler().sample(logits, [SampleRequest(params, TokenHistory(()), i) for i in range(6)])
    assert [s.token_id for s in together] == [_draw(logits[i : i + 1], params, i) for i in range(6)]


def test_draw_frequencies_follow_probabilities() -> None:
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    logits = np.log(probabilities, dtype=np.float64).astype(np.float32)[None]
    drawn = [_draw(logits, SamplingParams(1.0, seed=77), i) for i in range(8000)]
    assert np.abs(np.bincount(drawn, minlength=4) / 8000 - probabilities).max() < 0.02


def test_greedy_with_tied_logits_takes_lower_id() -> None:
    logits = np.zeros((1, 64), np.float32)
    logits[0, [9, 30]] = 2.0
    assert _draw(logits, SamplingParams(0.0)) == 9


def test_tiny_temperature_equals_greedy() -> None:
    for seed in range(20):
        logits = _logits(seed)
        assert _draw(logits, SamplingParams(1e-5, seed=seed)) == int(np.argmax(logits[0]))


def test_penalties_lower_counted_ids_only() -> None:
    logits = np.zeros((1, 8), np.float32)
    logits[0, 1], logits[0, 2] = 3.0, 2.5
    history = TokenHistory([5], [1, 1])
    assert _draw(logits, SamplingParams(0.0, frequency_penalty=0.3), 2, history) == 2
    assert _draw(logits, SamplingParams(0.0, presence_penalty=0.4), 2, history) == 1
    assert _draw(logits, SamplingParams(0.0, repetition_penalty=1.5), 2, history) == 2


def test_verify_rows_see_the_ids_drafted_before_them() -> None:
    sequence, params = SimpleNamespace(), SamplingParams(0.0, presence_penalty=1.0)
    entry = PlanEntry(sequence, RowKind.VERIFY, (9, 1, 2), params, 4, TokenHistory([9], [3]))  # type: ignore[arg-type]
    logits = np.zeros((3, 8), np.float32)
    logits[:, :5] = (0.5, 0.9, 0.8, 1.0, 0.7)
    drawn = HostSampler().sample(logits, requests_of(entry))
    assert [sample.token_id for sample in drawn] == [1, 2, 4]


def test_logit_bias_moves_one_id() -> None:
    logits = _logits(3)
    assert _draw(logits, SamplingParams(0.0, logit_bias=((17, 100.0),))) == 17


def test_end_ids_before_min_tokens_are_never_drawn() -> None:
    logits = np.zeros((1, 8), np.float32)
    logits[0, 4] = 50.0
    params = SamplingParams(0.0, min_tokens=2, end_ids=(4,))
    assert [_draw(logits, params, i) == 4 for i in range(4)] == [False, False, True, True]


def test_logprobs_equal_log_softmax_and_list_best_first() -> None:
    logits = _logits(8)
    request = SampleRequest(SamplingParams(0.0, logprobs=5), TokenHistory(()), 0)
    report = HostSampler().sample(logits, [request])[0].logprobs
    assert report is not None
    expected = logits[0].astype(np.float64) - np.log(np.exp(logits[0].astype(np.float64)).sum())
    best = np.argsort(-logits[0], kind="stable")[:5]
    assert [i for i, _ in report.top] == best.tolist()
    assert np.allclose([p for _, p in report.top], expected[best], atol=1e-6)
    assert report.logprob == report.top[0][1]


def test_sample_leaves_logits_unchanged() -> None:
    logits = _logits(2)
    before = logits.copy()
    _draw(logits, SamplingParams(0.0, logit_bias=((1, 9.0),), repetition_penalty=2.0), 0, TokenHistory([1, 2, 3]))
    assert np.array_equal(before, logits)


@pytest.mark.parametrize("penalty", [1e-300, 1e-38, 1e30])
@pytest.mark.parametrize("filters", [{"min_p": 0.5}, {"top_p": 0.5}, {"top_k": 3}, {}])
def test_extreme_repetition_penalty_draws_an_id_of_the_vocabulary_and_reports_finite_logprobs(
    penalty: float, filters: dict[str, float]
) -> None:
    params = SamplingParams(1.0, seed=3, repetition_penalty=penalty, logprobs=5, **filters)  # type: ignore[arg-type]
    for index in range(5):
        request = SampleRequest(params, TokenHistory(range(40)), index)
        [sampled] = HostSampler().sample(_logits(index), [request])
        assert 0 <= sampled.token_id < VOCAB
        assert sampled.logprobs is not None
        assert np.isfinite([sampled.logprobs.logprob, *(p for _, p in sampled.logprobs.top)]).all()


def test_logprobs_of_suppressed_end_ids_are_finite() -> None:
    request = SampleRequest(SamplingParams(0.0, min_tokens=2, end_ids=(4,), logprobs=8), TokenHistory(()), 0)
    report = HostSampler().sample(np.zeros((1, 8), np.float32), [request])[0].logprobs
    assert report is not None
    assert min(p for _, p in report.top) == -9999.0
