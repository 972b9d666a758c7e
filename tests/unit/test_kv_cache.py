"""What sequences may do in a cache, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from gpu.cache import HoldKind, MirrorArena
from gpu.errors import (
    CapacityError,
    HoldViolation,
    LayoutError,
    MirrorDivergence,
    PlanError,
    PoisonedPage,
    UnprovenAppend,
    WriteOutOfBounds,
)
from gpu.plan import RowKind, StepPlan
from gpu.simulated import Fault, StoreFault
from tests.kv_lab import ChainModel, Lab, chain, make_lab, park

TOKENS = tuple(range(1, 51))


@pytest.fixture(params=["cpu", "simulated"])
def lab(request: pytest.FixtureRequest) -> Lab:
    return make_lab(backend=request.param, num_pages=6)


def test_kv_reserve_beyond_the_arena_names_both_numbers_and_changes_nothing(lab: Lab) -> None:
    sequence = lab.cache.open()
    with pytest.raises(CapacityError) as raised:
        lab.cache.reserve(sequence, 7 * 16)
    assert (raised.value.needed, raised.value.free) == (7, 6)
    assert (len(sequence.pages), lab.cache.free_pages) == (0, 6)


def test_kv_reserve_evicts_cached_pages_of_closed_sequences(lab: Lab) -> None:
    first = lab.cache.open()
    lab.step(first, TOKENS[:48])
    lab.seal_all(first, TOKENS)
    lab.cache.close(first)
    lab.cache.reserve(lab.cache.open(), 5 * 16)
    deepest_first = [lab.cache.lookup(digest) is not None for digest in chain(TOKENS, 16)]
    assert deepest_first == [True, False, False]


def test_kv_page_poisoned_ahead_is_handed_out_as_it_is(lab: Lab) -> None:
    cache = lab.cache
    assert [cache.poison_ahead(2) for _ in range(3)] == [True, True, False]
    assert (cache.free_pages, cache.stats().poisoned) == (6, 2)
    sequence = cache.open()
    lab.step(sequence, TOKENS[:40])
    lab.seal_all(sequence, TOKENS)
    assert cache.stats().poisoned == 3
    cache.close(sequence)
    assert [cache.poison_ahead(9) for _ in range(5)] == [True] * 4 + [False], "cached pages keep what they hold"


@pytest.mark.parametrize("kv_format", ["f16", "k8v4"])
def test_kv_page_written_to_after_it_was_poisoned_ahead_is_seen_when_it_is_handed_out(kv_format: str) -> None:
    lab = make_lab(kv_format, num_pages=2, attest="always")
    assert lab.cache.poison_ahead(1)
    (page,) = lab.cache.memory.pool._clean
    lab.cache.memory.view(page)[:] = 1
    with pytest.raises(PoisonedPage, match="handed out without poison"):
        lab.cache.reserve(lab.cache.open(), 16)


def test_kv_begin_step_without_reserved_cells_raises_write_out_of_bounds(lab: Lab) -> None:
    sequence = lab.cache.open()
    lab.cache.reserve(sequence, 16)
    with pytest.raises(WriteOutOfBounds):
        lab.backend.launch(StepPlan((lab.entry(sequence, TOKENS[:17]),)))
    assert (sequence.length, lab.cache.stats().held[HoldKind.STEP]) == (0, 0)


def test_kv_begin_step_with_one_sequence_twice_raises_plan_error(lab: Lab) -> None:
    sequence = lab.cache.open()
    lab.cache.reserve(sequence, 16)
    entry = lab.entry(sequence, TOKENS[:2])
    with pytest.raises(PlanError, match="at most once"):
        lab.cache.begin_step(StepPlan((entry, entry)))


def test_kv_begin_step_without_entries_raises_plan_error(lab: Lab) -> None:
    with pytest.raises(PlanError):
        lab.cache.begin_step(StepPlan(()))


def test_kv_begin_step_of_a_closed_sequence_raises_plan_error(lab: Lab) -> None:
    sequence = lab.cache.open()
    lab.cache.close(sequence)
    with pytest.raises(PlanError, match="closed"):
        lab.cache.begin_step(StepPlan((lab.entry(sequence, [1]),)))


def test_kv_begin_step_beyond_the_rope_table_raises_plan_error() -> None:
    lab = make_lab(num_pages=300)
    sequence = lab.cache.open()
    lab.cache.reserve(sequence, 4097)
    with pytest.raises(PlanError, match="position=4096"):
        lab.cache.begin_step(StepPlan((lab.entry(sequence, [1] * 4097),)))


def test_kv_append_after_the_event_raises_write_out_of_bounds(lab: Lab) -> None:
    sequence = lab.cache.open()
    lab.cache.reserve(sequence, 1)
    cells = lab.cache.begin_step(StepPlan((lab.entry(sequence, [1]),)))
    lab.cache.abandon_step(cells)
    rows = np.zeros((1, 2, 64), np.float32)
    with pytest.raises(WriteOutOfBounds):
        lab.cache.append(cells.at(0), rows, rows)


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((2, 2, 64), np.float32),
        np.zeros((1, 2, 64), np.float64),
        np.zeros((1, 64, 2), np.float32).transpose(0, 2, 1),
    ],
    ids=["row count", "type", "strides"],
)
def test_kv_append_of_a_wrong_array_raises_plan_error(lab: Lab, rows: np.ndarray) -> None:
    sequence = lab.cache.open()
    lab.cache.reserve(sequence, 1)
    cells = lab.cache.begin_step(StepPlan((lab.entry(sequence, [1]),)))
    with pytest.raises(PlanError, match="v="):
        lab.cache.append(cells.at(0), np.zeros((1, 2, 64), np.float32), rows)


def test_kv_finish_twice_raises_hold_violation(lab: Lab) -> None:
    sequence = lab.cache.open()
    lab.cache.reserve(sequence, 1)
    cells = lab.cache.begin_step(StepPlan((lab.entry(sequence, [1]),)))
    lab.cache.abandon_step(cells)
    with pytest.raises(HoldViolation):
        lab.cache.finish_step(cells)


def test_kv_verify_accepts_one_row_until_truncate_accepts_more(lab: Lab) -> None:
    sequence = lab.cache.open()
    lab.step(sequence, TOKENS[:4], RowKind.VERIFY)
    assert (sequence.length, sequence.accepted) == (4, 1)
    lab.cache.truncate(sequence, 4)
    assert (sequence.length, sequence.accepted) == (4, 4)


def test_kv_page_with_rejected_rows_is_not_sealable(lab: Lab) -> None:
    sequence = lab.cache.open()
    lab.step(sequence, TOKENS[:16], RowKind.VERIFY)
    lab.cache.truncate(sequence, 15)
    assert not lab.cache.sealable(sequence)


def test_kv_truncate_releases_whole_pages_beyond(lab: Lab) -> None:
    sequence = lab.cache.open()
    lab.step(sequence, TOKENS[:40], RowKind.VERIFY)
    lab.cache.truncate(sequence, 17)
    assert (len(sequence.pages), lab.cache.free_pages) == (2, 4)


@pytest.mark.parametrize("length", [-1, 49, 5])
def test_kv_truncate_outside_or_inside_a_sealed_page_raises_plan_error(lab: Lab, length: int) -> None:
    sequence = lab.cache.open()
    lab.step(sequence, TOKENS[:48])
    lab.seal_all(sequence, TOKENS)
    with pytest.raises(PlanError):
        lab.cache.truncate(sequence, length)


def test_kv_truncate_to_a_sealed_page_end_keeps_the_shared_page_readable(lab: Lab) -> None:
    sequence = lab.cache.open()
    lab.step(sequence, TOKENS[:48])
    sealed = lab.seal_all(sequence, TOKENS)
    lab.cache.truncate(sequence, 16)
    lab.step(sequence, TOKENS[16:48])
    assert [page.digest for page in lab.seal_all(sequence, TOKENS)] == [page.digest for page in sealed[1:]]


def test_kv_truncate_under_a_launched_step_leaves_no_junk_behind() -> None:
    """The engine runs a step ahead of an end token: the overshot row lands after the truncation."""
    lab = make_lab()
    sequence = lab.cache.open()
    lab.step(sequence, TOKENS[:6])
    lab.cache.reserve(sequence, 7)
    handle = lab.backend.launch(StepPlan((lab.entry(sequence, [99], RowKind.DECODE, sample=True),)))
    lab.cache.truncate(sequence, 6)
    handle.wait()
    assert (sequence.length, sequence.accepted, sequence.num_stale) == (6, 6, 0)
    lab.step(sequence, TOKENS[6:16])
    assert park(lab, sequence, TOKENS[:16]) == whole_page()


def test_kv_truncate_under_launched_steps_sees_no_stray_write_in_their_early_stores() -> None:
    """Mirror stores of a running step may be visible before its event; those behind a truncation are no alarm."""
    lab = make_lab(backend="cpu")
    sequence, model = lab.cache.open(), ChainModel(lab.layout)
    lab.cache.reserve(sequence, 16)
    steps = []
    for token in (5, 99):
        cells = lab.cache.begin_step(StepPlan((lab.entry(sequence, [token]),)))
        model.run(np.array([token]), np.zeros(0, np.int64), cells, lab.cache)
        steps.append(cells)
    lab.cache.truncate(sequence, 1)
    for cells in steps:
        lab.cache.finish_step(cells)
    assert (sequence.length, sequence.accepted) == (1, 1)


def test_kv_page_accepted_under_its_running_step_is_not_sealable_before_the_event() -> None:
    lab = make_lab()
    sequence = lab.cache.open()
    lab.cache.reserve(sequence, 16)
    handle = lab.backend.launch(StepPlan((lab.entry(sequence, TOKENS[:16]),)))
    lab.cache.truncate(sequence, 16)
    assert not lab.cache.sealable(sequence)
    handle.wait()
    assert lab.cache.sealable(sequence) == range(1)


def test_kv_page_accepted_under_a_step_that_fails_its_proof_is_never_sealable() -> None:
    lab = make_lab()
    sequence = lab.cache.open()
    lab.cache.reserve(sequence, 16)
    lab.backend.plant(StoreFault(Fault.SKIP_STORE))  # type: ignore[union-attr]
    handle = lab.backend.launch(StepPlan((lab.entry(sequence, TOKENS[:16]),)))
    lab.cache.truncate(sequence, 16)
    with pytest.raises(UnprovenAppend):
        handle.wait()
    assert not lab.cache.sealable(sequence)


def whole_page() -> dict[bytes, bytes]:
    lab = make_lab()
    sequence = lab.cache.open()
    lab.step(sequence, TOKENS[:16])
    return park(lab, sequence, TOKENS[:16])


def test_kv_attach_shares_pages_of_an_equal_prefix(lab: Lab) -> None:
    first, second = lab.cache.open(), lab.cache.open()
    lab.step(first, TOKENS[:40])
    lab.cache.attach(second, lab.seal_all(first, TOKENS))
    assert (second.length, second.accepted, second.num_sealed) == (32, 32, 2)
    assert [page.index for page in second.pages] == [page.index for page in first.pages[:2]]
    lab.cache.close(first)
    assert lab.cache.free_pages == 4


def test_kv_attach_of_an_evicted_page_raises_hold_violation_and_takes_none(lab: Lab) -> None:
    first = lab.cache.open()
    lab.step(first, TOKENS[:32])
    pages = lab.seal_all(first, TOKENS)
    lab.cache.close(first)
    lab.cache.reserve(lab.cache.open(), 5 * 16)
    second = lab.cache.open()
    with pytest.raises(HoldViolation):
        lab.cache.attach(second, pages)
    assert not second.pages
    assert lab.cache.cached_pages == 1


def test_kv_attach_behind_a_tail_raises_plan_error(lab: Lab) -> None:
    first, second = lab.cache.open(), lab.cache.open()
    lab.step(first, TOKENS[:16])
    lab.step(second, TOKENS[:3])
    with pytest.raises(PlanError):
        lab.cache.attach(second, lab.seal_all(first, TOKENS))


def test_kv_shared_page_is_never_written(lab: Lab) -> None:
    """A step whose rows would fall into a sealed page is refused, whoever asks for it."""
    sequence = lab.cache.open()
    lab.step(sequence, TOKENS[:16])
    lab.seal_all(sequence, TOKENS)
    sequence.length = 15
    with pytest.raises(WriteOutOfBounds):
        lab.cache.begin_step(StepPlan((lab.entry(sequence, [1]),)))


def test_kv_seal_of_a_known_digest_goes_on_with_the_known_page(lab: Lab) -> None:
    first, second = lab.cache.open(), lab.cache.open()
    lab.step(first, TOKENS[:20])
    lab.step(second, TOKENS[:20])
    lab.seal_all(first, TOKENS)
    lab.seal_all(second, TOKENS)
    assert first.pages[0] is second.pages[0]
    assert lab.cache.free_pages == 3


def test_kv_seal_of_a_known_digest_with_other_bytes_raises_mirror_divergence(lab: Lab) -> None:
    first, second = lab.cache.open(), lab.cache.open()
    lab.step(first, TOKENS[:16])
    lab.step(second, TOKENS[1:17])
    lab.cache.seal(first, 0, b"d")
    with pytest.raises(MirrorDivergence):
        lab.cache.seal(second, 0, b"d")
    assert not lab.cache.sealable(second)


def test_kv_seal_that_goes_on_with_a_foreign_page_makes_the_sequence_foreign(lab: Lab) -> None:
    filled = lab.filled()
    lab.cache.fill(filled, b"d", own_numerics=False)
    sequence = lab.cache.open()
    lab.step(sequence, TOKENS[:32])
    lab.cache.seal(sequence, 0, b"d")
    assert not sequence.own_numerics
    assert not lab.cache.seal(sequence, 1, b"e").page.own_numerics


def test_kv_seal_behind_a_foreign_numerics_page_may_have_other_bytes(lab: Lab) -> None:
    first = lab.cache.open()
    lab.step(first, TOKENS[:16])
    lab.cache.seal(first, 0, b"d")
    filled = lab.filled()
    second = lab.cache.open()
    lab.cache.attach(second, [lab.cache.fill(filled, b"foreign", own_numerics=False)])
    lab.step(second, TOKENS[16:32])
    lab.cache.seal(second, 1, b"d")
    assert not second.own_numerics


def test_kv_fill_of_a_known_digest_returns_the_known_page(lab: Lab) -> None:
    sequence = lab.cache.open()
    lab.step(sequence, TOKENS[:16])
    stored = park(lab, sequence, TOKENS[:16])
    restored = lab.restore(stored, list(stored))
    assert restored[0].page is sequence.pages[0]
    assert lab.cache.free_pages == 5


def test_kv_fill_twice_raises_hold_violation(lab: Lab) -> None:
    filled = lab.filled()
    lab.cache.fill(filled, b"d")
    with pytest.raises(HoldViolation):
        lab.cache.fill(filled, b"e")


def test_kv_fill_that_was_received_into_without_poison_is_an_alarm(lab: Lab) -> None:
    [filled] = lab.cache.begin_fill(1)
    filled.buffer[:] = bytes(filled.buffer.nbytes)
    with pytest.raises(PoisonedPage, match="received into without poison"):
        lab.cache.prove_fill(filled)
    lab.cache.prepare_fill(filled)
    filled.buffer[:] = bytes(filled.buffer.nbytes)
    with pytest.raises(PoisonedPage, match="published without its proof"):
        lab.cache.fill(filled, b"d")


def test_kv_proof_of_a_fill_ends_with_the_fill(lab: Lab) -> None:
    filled = lab.filled()
    lab.cache.abandon_fill(filled)
    for action in (lab.cache.prepare_fill, lab.cache.prove_fill):
        with pytest.raises(HoldViolation, match="no longer a fill"):
            action(filled)
    [again] = lab.cache.begin_fill(1)
    assert again.page is filled.page
    with pytest.raises(PoisonedPage):
        lab.cache.fill(again, b"d")


def test_kv_filled_page_is_cached_until_it_is_attached(lab: Lab) -> None:
    filled = lab.filled()
    lab.cache.fill(filled, b"d")
    assert (lab.cache.cached_pages, lab.cache.stats().held[HoldKind.FILL]) == (1, 0)


def test_kv_dropped_page_is_not_looked_up_again(lab: Lab) -> None:
    sequence = lab.cache.open()
    lab.step(sequence, TOKENS[:16])
    sealed = lab.seal_all(sequence, TOKENS)[0]
    lab.cache.drop(sealed)
    assert lab.cache.lookup(sealed.digest) is None
    lab.cache.close(sequence)
    assert lab.cache.free_pages == 6


def test_kv_sealed_buffer_is_read_only(lab: Lab) -> None:
    sequence = lab.cache.open()
    lab.step(sequence, TOKENS[:16])
    assert lab.seal_all(sequence, TOKENS)[0].buffer.readonly


def test_kv_uploaded_page_outlives_its_sequence(lab: Lab) -> None:
    sequence = lab.cache.open()
    lab.step(sequence, TOKENS[:16])
    sealed = lab.seal_all(sequence, TOKENS)[0]
    lab.cache.hold(sealed, HoldKind.UPLOAD)
    before = bytes(sealed.buffer)
    lab.cache.close(sequence)
    with pytest.raises(CapacityError):
        lab.cache.reserve(lab.cache.open(), 6 * 16)
    assert bytes(sealed.buffer) == before
    lab.cache.release(sealed, HoldKind.UPLOAD)
    assert lab.cache.evictable_pages == 1


def test_kv_close_twice_raises_hold_violation(lab: Lab) -> None:
    sequence = lab.cache.open()
    lab.cache.close(sequence)
    with pytest.raises(HoldViolation):
        lab.cache.close(sequence)


@pytest.mark.parametrize(("num_bytes", "field"), [(0, "mirror_bytes"), (4096, "mirror_bytes")])
def test_kv_arena_without_room_for_a_page_is_refused_at_load(num_bytes: int, field: str) -> None:
    with pytest.raises(LayoutError, match=field):
        lab = make_lab(num_pages=1)
        mirror = MirrorArena.allocate(num_bytes)
        type(lab.cache)(lab.layout, mirror, lab.cache.memory.device, lab.cache._kernels)


@pytest.mark.parametrize(("option", "value"), [("attest", "often"), ("resident_cells", -1)])
def test_kv_cache_with_a_wrong_option_is_refused_at_load(option: str, value: object) -> None:
    with pytest.raises(LayoutError, match=option):
        make_lab(**{option: value})  # type: ignore[arg-type]
