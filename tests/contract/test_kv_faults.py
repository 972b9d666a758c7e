"""Planted faults: each raises its own alarm at its own place, and no other alarm before it."""

from __future__ import annotations

import pytest

from gpu.errors import (
    HoldViolation,
    MirrorDivergence,
    NonFiniteInput,
    PlanError,
    PoisonedPage,
    UnfilledPage,
    UnprovenAppend,
    WriteOutOfBounds,
)
from gpu.plan import RowKind, StepPlan
from gpu.simulated import Fault, SimulatedBackend, StoreFault
from tests.kv_lab import FORMATS, ChainModel, Lab, chain, layout_of, make_lab

TOKENS = tuple(range(1, 17))
KERNELS = ("reference", "numba")


def simulated(lab: Lab) -> SimulatedBackend:
    assert isinstance(lab.backend, SimulatedBackend)
    return lab.backend


def run_with_rollback(lab: Lab, fault: StoreFault) -> None:
    """Prefill, a verify window that is rolled back, then the fault in the window that follows, then decode and seal."""
    cache, sequence = lab.cache, lab.cache.open()
    lab.step(sequence, TOKENS[:6])
    lab.step(sequence, (*TOKENS[6:8], 99, 98, 97, 96), RowKind.VERIFY)
    cache.truncate(sequence, 8)
    simulated(lab).plant(fault)
    lab.step(sequence, (*TOKENS[8:11], 95), RowKind.VERIFY)
    cache.truncate(sequence, 11)
    for token in TOKENS[11:]:
        lab.step(sequence, [token], RowKind.DECODE)
    lab.seal_all(sequence, TOKENS)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("kind", [RowKind.VERIFY, RowKind.DECODE])
@pytest.mark.parametrize(("layer", "plane"), [(0, 0), (0, 1), (1, 0), (1, 1), (None, None)])
@pytest.mark.parametrize(
    ("fault", "alarm"),
    [
        (Fault.SKIP_STORE, UnprovenAppend),
        (Fault.STORE_WITHOUT_COUNT, UnprovenAppend),
        (Fault.COUNT_WITHOUT_STORE, PoisonedPage),
        (Fault.WRONG_BYTES, MirrorDivergence),
        (Fault.WRITE_PAST_LENGTH, WriteOutOfBounds),
    ],
)
def test_kv_store_fault_after_rollback_raises_its_alarm(
    fault: Fault,
    alarm: type[Exception],
    layer: int | None,
    plane: int | None,
    kind: RowKind,
    kv_format: str,
    kernels: str,
) -> None:
    lab = make_lab(kv_format, kernels=kernels)
    with pytest.raises(alarm) as raised:
        run_with_rollback(lab, StoreFault(fault, layer, plane, kind))
    assert type(raised.value) is alarm


@pytest.mark.parametrize("kv_format", FORMATS)
def test_kv_store_fault_of_another_row_kind_raises_nothing(kv_format: str) -> None:
    run_with_rollback(make_lab(kv_format), StoreFault(Fault.SKIP_STORE, kind=RowKind.PREFILL))


@pytest.mark.parametrize("kv_format", FORMATS)
def test_kv_page_handed_out_without_poison_raises_poisoned_page(kv_format: str) -> None:
    lab = make_lab(kv_format)
    sequence = lab.cache.open()
    lab.step(sequence, TOKENS)
    lab.cache.close(sequence)
    simulated(lab).plant(StoreFault(Fault.NO_POISON))
    with pytest.raises(PoisonedPage):
        lab.cache.reserve(lab.cache.open(), 16)
    assert lab.cache.free_pages == lab.cache.num_pages


@pytest.mark.parametrize("kv_format", FORMATS)
def test_kv_page_poisoned_ahead_without_poison_raises_poisoned_page(kv_format: str) -> None:
    lab = make_lab(kv_format)
    sequence = lab.cache.open()
    lab.step(sequence, TOKENS)
    lab.cache.close(sequence)
    simulated(lab).plant(StoreFault(Fault.NO_POISON))
    with pytest.raises(PoisonedPage):
        while lab.cache.poison_ahead(lab.cache.num_pages):
            pass


def test_kv_model_error_behind_a_launched_step_leaves_that_step_provable() -> None:
    model = ChainModel(layout_of("f16"))
    lab = make_lab(model=model)
    first, second = lab.cache.open(), lab.cache.open()
    lab.cache.reserve(first, 16)
    handle = lab.backend.launch(StepPlan((lab.entry(first, TOKENS),)))
    model.num_layers = 3
    with pytest.raises(IndexError):
        lab.step(second, TOKENS)
    handle.wait()
    assert lab.cache.sealable(first) == range(1)


def test_kv_page_freed_before_its_event_raises_hold_violation() -> None:
    lab = make_lab()
    cache, backend = lab.cache, simulated(lab)
    backend.plant(StoreFault(Fault.FREE_EARLY))
    first, second = cache.open(), cache.open()
    cache.reserve(first, 8)
    handle = backend.launch(StepPlan((lab.entry(first, TOKENS[:8]),)))
    cache.close(first)
    cache.reserve(second, 8)
    with pytest.raises(HoldViolation):
        handle.wait()


def test_kv_cancel_under_a_launched_step_frees_nothing_before_its_event() -> None:
    lab = make_lab(num_pages=2)
    cache, backend = lab.cache, simulated(lab)
    sequence = cache.open()
    cache.reserve(sequence, 20)
    handle = backend.launch(StepPlan((lab.entry(sequence, TOKENS),)))
    cache.close(sequence)
    assert cache.free_pages == 1, "the page behind the step's rows is free, the one under them is not"
    handle.wait()
    assert cache.free_pages == 2


def test_kv_mirror_before_the_event_still_holds_poison() -> None:
    lab = make_lab()
    cache, backend = lab.cache, simulated(lab)
    sequence = cache.open()
    cache.reserve(sequence, 16)
    handle = backend.launch(StepPlan((lab.entry(sequence, TOKENS),)))
    before = cache.memory.view(sequence.pages[0]).copy()
    assert not cache.sealable(sequence)
    handle.wait()
    assert cache.sealable(sequence) == range(1)
    assert (before != cache.memory.view(sequence.pages[0])).any()


@pytest.mark.parametrize("backend", ["cpu", "simulated"])
def test_kv_unproven_page_can_never_be_sealed(backend: str) -> None:
    lab = make_lab(backend=backend)
    sequence = lab.cache.open()
    lab.step(sequence, TOKENS[:8])
    with pytest.raises(UnprovenAppend):
        lab.cache.seal(sequence, 0, b"d" * 16)


@pytest.mark.parametrize("backend", ["cpu", "simulated"])
def test_kv_nan_row_fails_its_sequence_alone(backend: str) -> None:
    model = ChainModel(layout_of("f16"))
    lab = make_lab(backend=backend, model=model)
    cache = lab.cache
    good, bad = cache.open(), cache.open()
    cache.reserve(good, 16)
    cache.reserve(bad, 20)
    lab.step(bad, TOKENS[:2])
    model.spoil_position = 17
    entries = (lab.entry(good, TOKENS), lab.entry(bad, TOKENS))
    result = lab.backend.launch(StepPlan(entries)).wait()
    assert [type(entry.error) for entry in result.entries] == [type(None), NonFiniteInput]
    assert (good.failed, bad.failed) == (False, True)
    assert not cache.sealable(bad)
    with pytest.raises(PlanError):
        lab.step(bad, [1])


def test_kv_model_error_in_mid_step_frees_the_holds_and_fails_the_sequence() -> None:
    model = ChainModel(layout_of("f16"))
    lab = make_lab(model=model)
    sequence = lab.cache.open()
    model.num_layers = 3
    with pytest.raises(IndexError):
        lab.step(sequence, TOKENS)
    assert sequence.failed
    lab.cache.close(sequence)
    assert lab.cache.free_pages == lab.cache.num_pages


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("part", range(2))
def test_kv_restore_that_misses_a_part_raises_unfilled_page(kv_format: str, part: int) -> None:
    """A short read leaves poison in the cells that were not received."""
    lab = make_lab(kv_format)
    sequence = lab.cache.open()
    lab.step(sequence, TOKENS)
    stored = bytes(lab.seal_all(sequence, TOKENS)[0].buffer)
    other = make_lab(kv_format)
    [filled] = other.cache.begin_fill(1)
    other.cache.prepare_fill(filled)
    half = lab.layout.page_bytes // 2
    received = slice(0, half) if part == 0 else slice(half, None)
    filled.buffer[received] = stored[received]
    with pytest.raises(UnfilledPage):
        other.cache.prove_fill(filled)
    with pytest.raises(PoisonedPage):
        other.cache.fill(filled, chain(TOKENS, 16)[0])
    other.cache.abandon_fill(filled)
    assert other.cache.free_pages == other.cache.num_pages
