"""The backend protocol, for every backend that runs without a device."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpu.errors import PlanError, UnprovenAppend
from gpu.plan import PlanEntry, RowKind, StepPlan
from gpu.sampling import Sampled, SampleRequest, TokenHistory
from gpu.simulated import Fault, SimulatedBackend, StoreFault
from tests.kv_lab import GREEDY, ChainModel, Lab, layout_of, make_lab

BACKENDS = ("cpu", "simulated")


@pytest.fixture(params=BACKENDS)
def lab(request: pytest.FixtureRequest) -> Lab:
    return make_lab(backend=request.param)


def simulated() -> tuple[Lab, SimulatedBackend]:
    lab = make_lab()
    assert isinstance(lab.backend, SimulatedBackend)
    return lab, lab.backend


class Recorder:
    """A sampler that draws 1, 2, 3, ... and keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[SampleRequest] = []
        self.num_rows = 0

    def sample(self, logits: NDArray[np.float32], requests: list[SampleRequest]) -> list[Sampled]:
        assert len(logits) == len(requests)
        self.requests += requests
        self.num_rows += len(logits)
        return [Sampled(len(self.requests) - len(requests) + i + 1, None) for i in range(len(requests))]


@pytest.mark.parametrize(
    ("kind", "tokens", "sampled"),
    [(RowKind.PREFILL, (1, 2, 3), 1), (RowKind.DECODE, (1,), 1), (RowKind.VERIFY, (1, 2, 3), 3)],
)
def test_kv_backend_samples_the_rows_that_the_kind_asks_for(
    lab: Lab, kind: RowKind, tokens: tuple[int, ...], sampled: int
) -> None:
    sequence = lab.cache.open()
    lab.cache.reserve(sequence, 3)
    result = lab.backend.launch(StepPlan((lab.entry(sequence, tokens, kind, sample=True),))).wait()
    assert len(result.entries[0].token_ids) == sampled


def test_kv_backend_prefill_without_sampling_returns_no_ids(lab: Lab) -> None:
    assert lab.step(lab.cache.open(), [1, 2]).entries[0].token_ids == ()


def test_kv_backend_decode_without_tokens_goes_on_with_the_last_sampled_one(lab: Lab) -> None:
    told, untold = lab.cache.open(), lab.cache.open()
    for sequence in (told, untold):
        lab.cache.reserve(sequence, 16)
        lab.backend.launch(StepPlan((lab.entry(sequence, (5, 6), sample=True),))).wait()
    assert told.last_sampled is not None
    results = [
        lab.backend.launch(StepPlan((lab.entry(sequence, tokens, RowKind.DECODE, sample=True),))).wait()
        for sequence, tokens in ((told, (told.last_sampled,)), (untold, ()))
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", list(RowKind))
def test_kv_backend_without_tokens_and_without_a_sample_raises_plan_error(lab: Lab, kind: RowKind) -> None:
    sequence = lab.cache.open()
    lab.cache.reserve(sequence, 16)
    with pytest.raises(PlanError, match="no last sampled token"):
        lab.backend.launch(StepPlan((lab.entry(sequence, (), kind, sample=True),)))


def test_kv_backend_decode_without_tokens_after_verify_raises_plan_error(lab: Lab) -> None:
    sequence = lab.cache.open()
    lab.step(sequence, (1,), RowKind.DECODE)
    lab.step(sequence, (1, 2), RowKind.VERIFY)
    with pytest.raises(PlanError):
        lab.step(sequence, (), RowKind.DECODE)


@pytest.mark.parametrize("token", [-1, 128])
def test_kv_backend_token_outside_the_vocabulary_raises_plan_error(lab: Lab, token: int) -> None:
    sequence = lab.cache.open()
    with pytest.raises(PlanError, match=f"tokens={token}"):
        lab.step(sequence, [1, token])
    assert sequence.length == 0


def test_kv_backend_more_rows_than_max_rows_raises_plan_error() -> None:
    lab = make_lab(num_pages=20)
    with pytest.raises(PlanError, match="num_rows=257"):
        lab.step(lab.cache.open(), [1] * 257)


def test_kv_backend_adds_samples_of_decode_to_the_history_and_not_of_verify() -> None:
    lab = make_lab(backend="cpu", sampler=Recorder())
    for kind, added in ((RowKind.DECODE, [1]), (RowKind.VERIFY, [])):
        sequence, history = lab.cache.open(), TokenHistory(())
        lab.cache.reserve(sequence, 2)
        lab.backend.launch(StepPlan((PlanEntry(sequence, kind, (4,), GREEDY, 0, history),))).wait()
        assert history.output_ids == added


def test_kv_backend_passes_row_kinds_to_the_sampler_in_row_order() -> None:
    recorder = Recorder()
    lab = make_lab(backend="cpu", sampler=recorder)
    first, second = lab.cache.open(), lab.cache.open()
    for sequence in (first, second):
        lab.cache.reserve(sequence, 3)
    entries = (
        PlanEntry(first, RowKind.VERIFY, (4, 5, 6), GREEDY, 10, TokenHistory(())),
        PlanEntry(second, RowKind.PREFILL, (7, 8), GREEDY, 0, TokenHistory(())),
    )
    result = lab.backend.launch(StepPlan(entries)).wait()
    assert [request.output_index for request in recorder.requests] == [10, 11, 12, 0]
    assert [entry.token_ids for entry in result.entries] == [(1, 2, 3), (4,)]


def test_kv_backend_row_that_is_not_finite_is_not_sampled() -> None:
    model, recorder = ChainModel(layout_of("f16")), Recorder()
    lab = make_lab(backend="cpu", model=model, sampler=recorder)
    good, bad = lab.cache.open(), lab.cache.open()
    lab.cache.reserve(good, 1)
    lab.cache.reserve(bad, 2)
    model.spoil_position = 1
    entries = (lab.entry(bad, (3, 4), sample=True), lab.entry(good, (5,), RowKind.DECODE, sample=True))
    result = lab.backend.launch(StepPlan(entries)).wait()
    assert recorder.num_rows == 1
    assert [entry.token_ids for entry in result.entries] == [(), (1,)]


def test_kv_backend_wait_twice_gives_the_same_result(lab: Lab) -> None:
    sequence = lab.cache.open()
    lab.cache.reserve(sequence, 1)
    handle = lab.backend.launch(StepPlan((lab.entry(sequence, (1,), RowKind.DECODE, sample=True),)))
    assert handle.wait() is handle.wait()


def test_kv_simulated_wait_for_the_newer_step_ends_the_older_one_first() -> None:
    lab, backend = simulated()
    sequence = lab.cache.open()
    lab.cache.reserve(sequence, 2)
    handles = [
        backend.launch(StepPlan((lab.entry(sequence, (token,), RowKind.DECODE, sample=True),))) for token in (1, 2)
    ]
    handles[1].wait()
    assert handles[0].outcome is not None
    assert sequence.accepted == 2


def test_kv_simulated_unproven_step_raises_at_its_own_wait_only() -> None:
    lab, backend = simulated()
    first, second = lab.cache.open(), lab.cache.open()
    lab.cache.reserve(first, 1)
    lab.cache.reserve(second, 1)
    good = backend.launch(StepPlan((lab.entry(first, (1,)),)))
    backend.plant(StoreFault(Fault.SKIP_STORE))
    bad = backend.launch(StepPlan((lab.entry(second, (1,)),)))
    for _ in range(2):
        with pytest.raises(UnprovenAppend):
            bad.wait()
    assert good.wait().entries[0].error is None


def test_kv_simulated_step_held_open_ends_when_the_gate_opens() -> None:
    lab, backend = simulated()
    sequence = lab.cache.open()
    lab.cache.reserve(sequence, 1)
    backend.hold_open()
    handle = backend.launch(StepPlan((lab.entry(sequence, (1,)),)))
    assert not handle.done()
    results: list[Any] = []
    waiter = threading.Thread(target=lambda: results.append(handle.wait()))
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    assert sequence.accepted == 0
    backend.open_gate()
    waiter.join(10)
    assert len(results) == 1
    assert handle.done()


def test_kv_simulated_close_ends_queued_steps() -> None:
    lab, backend = simulated()
    sequence = lab.cache.open()
    lab.cache.reserve(sequence, 1)
    backend.launch(StepPlan((lab.entry(sequence, (1,)),)))
    backend.hold_open()
    backend.close()
    assert sequence.accepted == 1
