"""Draws on the device: the ids of the host's sampler on the same logits, whatever rows are drawn together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpu.cpu.sampling import HostSampler, _exp_array
from gpu.errors import PlanError
from gpu.plan import RowKind, SamplingParams
from gpu.sampling import Sampled, SampleRequest, TokenHistory
from tests.gpu.draw_lab import DrawLab, random_logits, request
from tests.gpu.lab import Lab

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0)
SMALL, ODD, LARGE = 4000, 4001, 128256
NAN, LOWEST = float("nan"), float("-inf")
EXACT = {
    "plain": SamplingParams(1.0, seed=3),
    "cool": SamplingParams(0.7, seed=2**63 + 5, choice=2),
    "cold": SamplingParams(1e-5, seed=4),
    "hot": SamplingParams(5.0, seed=2**64 - 1, choice=7),
    "top_k 1": SamplingParams(1.5, top_k=1, seed=6),
    "top_k 50": SamplingParams(2.0, top_k=50, seed=9),
    "top_k 3999": SamplingParams(2.0, top_k=3999, seed=9),
    "min_p": SamplingParams(1.0, min_p=0.05, seed=8),
    "min_p 1": SamplingParams(3.0, min_p=1.0, seed=8),
    "tiny min_p": SamplingParams(5.0, min_p=1e-9, seed=8),
    "top_k and min_p": SamplingParams(3.0, top_k=300, min_p=0.02, seed=10),
    "bias": SamplingParams(1.0, seed=1, logit_bias=((3, 9.5), (17, -100.0), (3999, 12.25))),
    "greedy bias": SamplingParams(0.0, logit_bias=((5, 20.5),)),
    "ends": SamplingParams(0.0, min_tokens=12, end_ids=(4, 7, 3999)),
}
NUCLEI = {
    "top_p": SamplingParams(1.0, top_p=0.9, seed=1),
    "cool top_p": SamplingParams(0.3, top_p=0.5, seed=2),
    "top_p 0": SamplingParams(1.0, top_p=0.0, seed=3),
    "top_p 0.9999": SamplingParams(5.0, top_p=0.9999, seed=11),
    "top_k and top_p": SamplingParams(1.3, top_k=200, top_p=0.8, seed=4),
    "all": SamplingParams(1.7, top_k=1000, top_p=0.95, min_p=0.01, seed=5),
    "many, then top_p": SamplingParams(4.0, top_k=3000, top_p=0.7, seed=6),
}


@pytest.fixture(scope="module")
def draw_labs(lab: Lab) -> Callable[[int], DrawLab]:
    made: dict[int, DrawLab] = {}

    def of(vocab_size: int) -> DrawLab:
        if vocab_size not in made:
            made[vocab_size] = DrawLab(lab, vocab_size)
        return made[vocab_size]

    return of


def host(logits: np.ndarray, requests: list[SampleRequest]) -> list[Sampled]:
    return HostSampler().sample(np.ascontiguousarray(logits, np.float32), requests)


def ids(sampled: list[Sampled]) -> list[int]:
    return [sample.token_id for sample in sampled]


def mass_margin(logits: np.ndarray, params: SamplingParams) -> float:
    """How near any running sum of probabilities comes to top_p: nearer than 1e-9, both nuclei are right."""
    ranked = np.sort(logits.astype(np.float64))[::-1]
    ranked = ranked[: params.top_k or None]
    weights = np.exp((ranked - ranked[0]) / params.temperature)
    return float(np.abs(np.cumsum(weights) / weights.sum() - params.top_p).min())


# ---- largest logit


@pytest.mark.parametrize("vocab_size", [1, 3, 128, SMALL, ODD, 50257, LARGE])
def test_greedy_rows_draw_the_first_largest_logit(draw_labs: Any, vocab_size: int) -> None:
    lab = draw_labs(vocab_size)
    for rows in (1, 2, 33, 64):
        logits = random_logits(rows, rows, vocab_size)
        logits[rows // 2] = np.round(logits[rows // 2])  # many ties
        for general in (False, True):
            drawn = lab.draw(logits, [request(GREEDY)] * rows, general=general)
            assert ids(drawn) == logits.argmax(axis=1).tolist()
            assert lab.last()[:rows].tolist() == ids(drawn)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0, top_k=3, top_p=0.5, seed=2), SamplingParams(1.0)])
@pytest.mark.parametrize("vocab_size", [SMALL, ODD])
def test_rows_without_a_finite_logit_draw_the_first_id(draw_labs: Any, vocab_size: int, params: SamplingParams) -> None:
    logits = np.full((5, vocab_size), NAN, np.float32)
    logits[1:3] = LOWEST
    logits[2, 9] = NAN
    logits[3, 11] = 0.0
    logits[4] = LOWEST
    logits[4, vocab_size - 1] = -3e38
    assert ids(draw_labs(vocab_size).draw(logits, [request(params)] * 5)) == [0, 0, 0, 11, vocab_size - 1]


def test_nan_logits_count_as_the_lowest(draw_labs: Any) -> None:
    logits = random_logits(4, 4, SMALL)
    logits[:, ::3] = NAN
    clean = np.where(np.isnan(logits), np.float32(LOWEST), logits)
    requests = [request(params) for params in (GREEDY, EXACT["plain"], EXACT["top_k 50"], NUCLEI["top_p"])]
    assert ids(draw_labs(SMALL).draw(logits, requests)) == ids(host(clean, requests))


def test_padding_rows_leave_no_trace(draw_labs: Any) -> None:
    lab = draw_labs(SMALL)
    logits = random_logits(8, 8, SMALL)
    lab.draw(logits, [request(GREEDY)] * 8)
    before = lab.last().copy()
    requests = [request(GREEDY), request(EXACT["plain"]), request(NUCLEI["top_p"])]
    drawn = ids(lab.draw(logits, requests, [90, 91, 92], padded=8))
    assert drawn == ids(host(logits[:3], requests))
    after = lab.last()
    assert after[90:93].tolist() == drawn
    before[90:93] = drawn
    assert np.array_equal(after, before)


# ---- filters and noise


@pytest.mark.parametrize("vocab_size", [SMALL, ODD])
@pytest.mark.parametrize("name", list(EXACT))
def test_draws_equal_those_of_the_host(draw_labs: Any, name: str, vocab_size: int) -> None:
    requests = [request(EXACT[name], index) for index in range(24)]
    logits = random_logits(17, 24, vocab_size)
    assert ids(draw_labs(vocab_size).draw(logits, requests)) == ids(host(logits, requests))


@pytest.mark.parametrize("vocab_size", [SMALL, ODD])
@pytest.mark.parametrize("name", list(NUCLEI))
def test_nucleus_draws_equal_those_of_the_host(draw_labs: Any, name: str, vocab_size: int) -> None:
    requests = [request(NUCLEI[name], index) for index in range(24)]
    logits = random_logits(19, 24, vocab_size)
    drawn, expected = ids(draw_labs(vocab_size).draw(logits, requests)), ids(host(logits, requests))
    differing = [row for row in range(24) if drawn[row] != expected[row]]
    assert all(mass_margin(logits[row], NUCLEI[name]) < 1e-9 for row in differing)
    assert len(differing) <= 1


@pytest.mark.parametrize("scale", [0.01, 3.0, 30.0])
def test_rows_of_a_large_vocabulary_equal_those_of_the_host(draw_labs: Any, scale: float) -> None:
    requests = [request(params, 5) for params in (*EXACT.values(), *NUCLEI.values())]
    logits = random_logits(23, len(requests), LARGE, scale)
    drawn, expected = ids(draw_labs(LARGE).draw(logits, requests)), ids(host(logits, requests))
    for row, asked in enumerate(requests):
        assert drawn[row] == expected[row] or mass_margin(logits[row], asked.params) < 1e-9, asked.params


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([1.25], id="all equal"),
        pytest.param([0.0, -0.0], id="two zeros"),
        pytest.param([2.0, 1.0, -5.0], id="three values"),
        pytest.param([3e38, -3e38, 1.0], id="huge"),
        pytest.param([1e-40, 2e-40, -1e-40], id="denormal"),
        pytest.param([0.5, LOWEST], id="half absent"),
    ],
)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1.0, seed=1),
        SamplingParams(1.0, top_k=700, seed=2),
        SamplingParams(1.0, top_p=0.3001, seed=3),
        SamplingParams(1.0, top_k=1501, top_p=0.4001, seed=4),
        SamplingParams(1.0, top_p=0.7777, min_p=0.3, seed=5),
    ],
)
def test_ties_go_to_the_lower_id(draw_labs: Any, params: SamplingParams, values: list[float]) -> None:
    chosen = np.random.default_rng(1).integers(0, len(values), (16, SMALL))
    chosen[:, 0] = 0
    logits = np.array(values, np.float32)[chosen]
    requests = [request(params, index) for index in range(16)]
    with np.errstate(over="ignore"):
        expected = ids(host(logits, requests))
    assert ids(draw_labs(SMALL).draw(logits, requests)) == expected


def test_the_last_id_of_a_nucleus_is_the_one_that_reaches_it(draw_labs: Any) -> None:
    """Of 16 equal ids, top_p = n / 16 keeps n; a little more keeps one more."""
    logits = np.full((32, SMALL), -80.0, np.float32)
    logits[:, 100:116] = 2.0
    shares = [n / 16 for n in range(1, 17)] + [n / 16 + 1e-7 for n in range(16)]
    kept = []
    for index in range(40):
        requests = [
            request(SamplingParams(50.0, top_k=16, top_p=share, seed=int(share * 1e9)), index) for share in shares
        ]
        drawn = ids(draw_labs(SMALL).draw(logits, requests))
        assert drawn == ids(host(logits, requests))
        kept.append(drawn)
    most = np.array(kept).max(axis=0) - 99
    assert (most <= [*range(1, 17), *range(1, 17)]).all()


@pytest.mark.parametrize("top_k", [0, 700])
@pytest.mark.parametrize("beyond", [-1e-8, 1e-8])
@pytest.mark.parametrize("count", [1, 2, 6])
def test_nuclei_end_where_the_sum_of_all_shares_says(draw_labs: Any, count: int, beyond: float, top_k: int) -> None:
    """Of a thousand likely ids, top_p takes the best few or one more: sums are exact to a hundred millionth."""
    logits = np.full((64, SMALL), -80.0, np.float32)
    logits[:, 1000:2000] = np.random.default_rng(count).permutation(np.linspace(1.5, 2.0, 1000))
    ranked = np.argsort(-logits[0])[: top_k or None]
    weights = np.exp(logits[0, ranked].astype(np.float64))
    top_p = float(np.cumsum(weights)[count - 1] / weights.sum()) + beyond
    params = SamplingParams(1.0, top_k=top_k, top_p=top_p, seed=count)
    drawn = ids(draw_labs(SMALL).draw(logits, [request(params, index) for index in range(64)]))
    assert set(drawn) == set(ranked[: count + (beyond > 0)].tolist())


def test_min_p_keeps_an_id_whose_share_equals_it(draw_labs: Any) -> None:
    logits = np.full((32, SMALL), -90.0, np.float32)
    logits[:, 7], logits[:, 8] = 3.0, 2.5
    share = float(_exp_array(np.array([(2.5 - 3.0) / 0.7]))[0])
    for min_p, both in ((share, True), (np.nextafter(share, 1.0), False), (share - 1e-5, True), (share + 1e-5, False)):
        params = SamplingParams(0.7, min_p=float(min_p), seed=5)
        requests = [request(params, index) for index in range(32)]
        drawn = ids(draw_labs(SMALL).draw(logits, requests))
        assert drawn == ids(host(logits, requests))
        assert set(drawn) == ({7, 8} if both else {7})


# ---- rows alone and together


def test_a_row_alone_equals_itself_among_others(draw_labs: Any) -> None:
    lab = draw_labs(LARGE)
    params = [*EXACT.values(), *NUCLEI.values(), SamplingParams(1.0, top_p=0.9, logprobs=20), GREEDY]
    logits = random_logits(29, 64, LARGE, 2.0)
    requests = [request(params[row % len(params)], row) for row in range(64)]
    requests[7] = request(SamplingParams(0.0, logprobs=20), 7)
    together = reports(lab, logits, requests)
    for rows in ([0, 1], list(range(5, 12)), list(range(20, 53))):
        assert reports(lab, logits[rows], [requests[row] for row in rows]) == [together[row] for row in rows]
    for row in range(0, 64, 3):
        assert reports(lab, logits[row : row + 1], [requests[row]]) == [together[row]]


def reports(lab: DrawLab, logits: np.ndarray, requests: list[SampleRequest]) -> list[tuple[int, bytes]]:
    """Ids and the bits of the report of each row."""
    drawn = lab.draw(logits, requests)
    return [(sample.token_id, np.array(_numbers(sample), np.float64).tobytes()) for sample in drawn]


def _numbers(sample: Sampled) -> list[float]:
    report = sample.logprobs
    return [] if report is None else [report.logprob, *(number for pair in report.top for number in pair)]


def test_a_captured_draw_follows_its_tables(lab: Lab, draw_labs: Any) -> None:
    own = draw_labs(SMALL)
    first = [request(NUCLEI["top_p"], index) for index in range(4)]
    own.draw(random_logits(1, 4, SMALL), first)
    graph = lab.graph(lambda stream: own.record(stream, 4, general=True))
    for index, params in enumerate([*NUCLEI.values(), *EXACT.values()]):
        logits = random_logits(100 + index, 4, SMALL)
        requests = [request(params, index), request(GREEDY), request(EXACT["plain"], index), first[index % 4]]
        lab.device.write(own.logits, logits)
        draws, _ = own.prepare(requests, None, None, 4)
        graph.launch(lab.stream)
        own.sampler.launched(draws)
        assert ids(own.read(draws, own.words(4))) == ids(host(logits, requests))


# ---- log probabilities


@pytest.mark.parametrize("vocab_size", [7, SMALL, LARGE])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_reports_agree_with_those_of_the_host(draw_labs: Any, vocab_size: int, temperature: float) -> None:
    asked = [SamplingParams(temperature, logprobs=count, top_p=0.9, seed=count) for count in (0, 1, 5, 20)]
    asked += [SamplingParams(temperature, seed=9), SamplingParams(temperature, logprobs=20, logit_bias=((2, 30.0),))]
    requests = [request(params, index) for index, params in enumerate(asked)]
    logits = random_logits(31, len(asked), vocab_size)
    logits[3] = np.round(logits[3])
    drawn, expected = draw_labs(vocab_size).draw(logits, requests), host(logits, requests)
    assert ids(drawn) == ids(expected)
    for own, other in zip(drawn, expected, strict=True):
        if other.logprobs is None:
            assert own.logprobs is None
            continue
        assert own.logprobs is not None
        assert own.logprobs.token_id == own.token_id
        assert [token_id for token_id, _ in own.logprobs.top] == [token_id for token_id, _ in other.logprobs.top]
        assert _numbers(own) == pytest.approx(_numbers(other), rel=1e-6, abs=1e-6)


def test_reports_of_what_cannot_be_drawn_are_finite(draw_labs: Any) -> None:
    params = SamplingParams(0.0, min_tokens=2, end_ids=(4,), logprobs=5)
    logits = np.full((1, SMALL), LOWEST, np.float32)
    logits[0, :5] = 0.0
    [drawn] = draw_labs(SMALL).draw(logits, [request(params)])
    assert drawn.logprobs is not None
    assert drawn.token_id == 0
    assert [token_id for token_id, _ in drawn.logprobs.top] == [0, 1, 2, 3, 4]
    assert drawn.logprobs.top[-1] == (4, -9999.0)
    assert drawn.logprobs.logprob == pytest.approx(np.log(0.25))


# ---- penalties, a step behind

PENALTIES = {
    "presence": SamplingParams(0.0, presence_penalty=1.7),
    "frequency": SamplingParams(0.0, frequency_penalty=0.37),
    "repetition": SamplingParams(0.0, repetition_penalty=1.31),
    "tiny repetition": SamplingParams(0.9, repetition_penalty=1e-300, seed=5),
    "reward": SamplingParams(1.0, presence_penalty=-1.1, frequency_penalty=-0.3, repetition_penalty=0.7, seed=6),
    "all": SamplingParams(
        1.0, seed=7, presence_penalty=0.4, frequency_penalty=0.2, repetition_penalty=1.1, top_p=0.9, logprobs=3,
        logit_bias=((3, 2.0), (9, -1.5)), min_tokens=6, end_ids=(1, 5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_penalties_see_draws_that_the_host_has_not_read(draw_labs: Any, ahead: int) -> None:
    lab, params = draw_labs(128), list(PENALTIES.values())
    prompts = [[3, 4, 5, 90, row] for row in range(len(params))]
    histories, known = ([TokenHistory(prompt) for prompt in prompts] for _ in range(2))
    unread: list[Any] = []
    for step in range(30):
        logits = random_logits(step, len(params), 128, 1.0)
        unread.append(lab.launch(logits, [request(*row) for row in zip(params, [step] * 6, histories, strict=True)]))
        expected = ids(host(logits, [request(*row) for row in zip(params, [step] * 6, known, strict=True)]))
        extend(known, expected)
        assert unread[-1][1][: len(params)].tolist() == expected
        if len(unread) > ahead:
            extend(histories, ids(lab.read(*unread.pop(0))))
    for handle in unread:
        lab.read(*handle)


def extend(histories: list[TokenHistory], token_ids: list[int]) -> None:
    for history, token_id in zip(histories, token_ids, strict=True):
        history.extend([token_id])


def test_penalties_that_begin_while_a_draw_is_unread_are_refused(draw_labs: Any) -> None:
    lab, history = draw_labs(128), TokenHistory([1])
    handle = lab.launch(random_logits(1, 1, 128), [request(GREEDY, 0, history)])
    with pytest.raises(PlanError, match="penalties cannot begin while a draw of the reply is unread"):
        lab.launch(random_logits(1, 1, 128), [request(PENALTIES["presence"], 1, history)])
    lab.read(*handle)


def test_verify_rows_see_the_ids_drafted_before_them(draw_labs: Any) -> None:
    lab = draw_labs(128)
    params = SamplingParams(0.8, seed=7, presence_penalty=3.0, frequency_penalty=1.5, repetition_penalty=1.2, top_p=0.9)
    history = TokenHistory([3, 4, 90], [7, 7, 8])
    for step in range(12):
        drafted = tuple(np.random.default_rng(step).integers(0, 128, 3).tolist())
        logits = random_logits(50 + step, 6, 128, 1.0)
        logits[:4, drafted] += np.float32(6.0)  # else penalties of drafted ids would hardly show
        rows = [SampleRequest(params, history, len(history.output_ids) + row, drafted[:row]) for row in range(4)]
        other = TokenHistory([1, 2], [9])
        plain = [request(params, 1, other), request(EXACT["plain"], step)]
        kinds = [RowKind.VERIFY] * 4 + [RowKind.PREFILL, RowKind.DECODE]
        drawn = ids(lab.draw(logits, [*rows, *plain], [11] * 4 + [12, 13], kinds))
        assert drawn == ids(host(logits, [*rows, *plain]))
        history.extend(drawn[: step % 4 + 1])


def test_slots_change_hands_and_replies_move(draw_labs: Any) -> None:
    """What a slot has counted serves only the reply that it was counted for, and only while nothing is missing."""
    lab = draw_labs(128)
    params = SamplingParams(0.0, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2)
    histories = [TokenHistory([index], [index, 50]) for index in range(3)]
    random = np.random.default_rng(8)
    for step in range(60):
        chosen = random.permutation(3)[: 1 + step % 3]
        slots = 20 + random.permutation(3)[: len(chosen)]
        logits = random_logits(step, len(chosen), 128, 0.7)
        requests = [request(params, step, histories[index]) for index in chosen]
        drawn = ids(lab.draw(logits, requests, slots.tolist()))
        assert drawn == ids(host(logits, requests))
        for index, token_id in zip(chosen, drawn, strict=True):
            if step % 7 != 3:  # else the turn failed, and the id that was drawn is not in the reply
                histories[index].extend([token_id])
            if step % 5 == 4:
                histories[index].extend([int(random.integers(128))])


def test_bias_of_a_slot_follows_the_request(draw_labs: Any) -> None:
    lab = draw_labs(SMALL)
    logits = random_logits(3, 1, SMALL)
    for token_id in (5, 9, 5):
        params = SamplingParams(0.0, logit_bias=((token_id, 100.0),))
        assert ids(lab.draw(logits, [request(params)], [30])) == [token_id]
    assert ids(lab.draw(logits, [request(GREEDY)], [30])) == [int(logits.argmax())]
