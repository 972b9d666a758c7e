"""Device slots on the simulated device."""

from __future__ import annotations

import pytest

from gpu.cache import HoldKind, Sequence
from gpu.errors import CapacityError, MirrorDivergence, UnprovenAppend
from gpu.plan import StepPlan
from gpu.proof import Poison
from tests.kv_lab import FORMATS, Lab, chain, make_lab, park

TOKENS = tuple(range(1, 101))


def resident_depths(lab: Lab, sequence: Sequence) -> list[int]:
    residency = lab.cache.memory.residency
    return [depth for depth, page in enumerate(sequence.pages) if residency.slot(page) >= 0]


def filled(lab: Lab, num_cells: int, first: int = 0) -> Sequence:
    sequence = lab.cache.open()
    tokens = TOKENS[first : first + num_cells]
    lab.step(sequence, tokens)
    lab.seal_all(sequence, tokens)
    return sequence


def test_kv_residency_bound_evicts_the_deepest_full_pages_and_keeps_the_tail() -> None:
    lab = make_lab(resident_cells=32)
    assert resident_depths(lab, filled(lab, 70)) == [0, 1, 4]


def test_kv_residency_without_bound_keeps_all() -> None:
    lab = make_lab()
    assert resident_depths(lab, filled(lab, 70)) == [0, 1, 2, 3, 4]


def test_kv_residency_promotes_restored_pages_while_slots_are_free() -> None:
    lab = make_lab(resident_cells=64)
    first = filled(lab, 32)
    lab.cache.close(first)
    lab.cache.memory.residency._vacate(0)
    second = lab.cache.open()
    lab.cache.attach(second, [sealed for d in chain(TOKENS[:32], 16) if (sealed := lab.cache.lookup(d))])
    lab.step(second, TOKENS[32:33])
    assert resident_depths(lab, second) == [0, 1, 2]
    assert lab.cache.stats().promotions == 1


def test_kv_residency_promotion_takes_the_slots_of_pages_that_nothing_holds() -> None:
    lab = make_lab(resident_cells=32)
    idle = filled(lab, 32)
    lab.cache.close(idle)
    busy = filled(lab, 32, first=50)
    lab.step(busy, [7])
    assert resident_depths(lab, busy) == [0, 1, 2]


def test_kv_residency_streamed_bytes_count_non_resident_pages_per_step() -> None:
    lab = make_lab(resident_cells=0)
    sequence = filled(lab, 40)
    before = lab.cache.stats().streamed_bytes
    lab.step(sequence, [7])
    assert lab.cache.stats().streamed_bytes - before == 2 * lab.layout.page_bytes


def test_kv_residency_page_under_a_launched_step_keeps_its_slot() -> None:
    lab = make_lab(resident_cells=16)
    sequence = filled(lab, 16)
    lab.cache.reserve(sequence, 17)
    handle = lab.backend.launch(StepPlan((lab.entry(sequence, [7]),)))
    lab.cache.fill(lab.filled(), b"d")
    lab.cache.memory.residency._max_sealed = 0
    lab.cache.memory.residency.trim(lab.cache.memory.pool)
    assert resident_depths(lab, sequence) == [0, 1]
    handle.wait()
    assert resident_depths(lab, sequence) == [1]


@pytest.mark.parametrize("kv_format", FORMATS)
def test_kv_residency_slot_of_a_new_page_is_poisoned(kv_format: str) -> None:
    lab = make_lab(kv_format)
    sequence = filled(lab, 16)
    slot = lab.cache.memory.residency.slot(sequence.pages[0])
    lab.cache.close(sequence)
    reused = lab.cache.open()
    lab.cache.reserve(reused, 16 * 16)
    slots = [lab.cache.memory.residency.slot(page) for page in reused.pages]
    assert slot in slots
    pages = lab.cache.memory.device.arena.reshape(-1, lab.layout.page_bytes)
    assert all(Poison(lab.layout).intact(pages[index]) for index in slots)


def test_kv_residency_open_pages_evict_full_ones_when_slots_run_out() -> None:
    lab = make_lab(num_slots=3)
    first = filled(lab, 32)
    second = lab.cache.open()
    lab.cache.reserve(second, 32)
    assert resident_depths(lab, first) == [0]
    assert resident_depths(lab, second) == [0, 1]


def test_kv_residency_without_slots_for_open_pages_raises_capacity_error_and_takes_none() -> None:
    lab = make_lab(num_slots=3)
    lab.cache.reserve(lab.cache.open(), 32)
    with pytest.raises(CapacityError, match="device slots: 2 needed, 1 free"):
        lab.cache.reserve(lab.cache.open(), 32)
    assert lab.cache.stats().held[HoldKind.SEQUENCE] == 2


def test_kv_residency_open_page_without_device_copy_is_never_read_from_the_mirror() -> None:
    lab = make_lab()
    sequence = lab.cache.open()
    lab.step(sequence, TOKENS[:5])
    lab.cache.memory.residency._vacate(sequence.pages[0].index)
    with pytest.raises(UnprovenAppend):
        lab.step(sequence, [1])


@pytest.mark.parametrize("num_cells", [16, 20])
def test_kv_attest_of_a_changed_device_byte_raises_mirror_divergence(num_cells: int) -> None:
    lab = make_lab("k8v4")
    sequence = filled(lab, num_cells)
    assert lab.cache.attest(sequence) == -(-num_cells // 16)
    lab.cache.memory.device.arena[lab.layout.page_bytes * (num_cells // 17) + 3] ^= 1
    with pytest.raises(MirrorDivergence):
        lab.cache.attest(sequence)


def test_kv_pages_read_in_the_mirror_are_told_from_those_read_on_the_device() -> None:
    def read(lab: Lab, sequence: Sequence, *indices: int) -> bool:
        return lab.cache.memory.may_have_read(sequence, indices)

    lab = make_lab("k8v4", resident_cells=0)
    sequence = filled(lab, 32)
    first, second = (page.index for page in sequence.pages)
    assert not read(lab, sequence, first, second)
    lab.seal_all(sequence, TOKENS)
    lab.step(sequence, [1])
    assert [read(lab, sequence, first), read(lab, sequence, second), read(lab, sequence)] == [True, True, True]
    assert not read(lab, sequence, sequence.pages[2].index)
    other = lab.cache.open()
    lab.cache.attach(other, [lab.cache.lookup(digest) for digest in chain(TOKENS[:32], 16)])
    assert not read(lab, other, first), "attached, and no step yet"
    lab.step(other, [1])
    assert read(lab, other, first)
    assert lab.cache.memory.is_from_mirror((first,))
    assert not lab.cache.memory.is_from_mirror((other.pages[2].index,))


def test_kv_restored_page_with_a_device_copy_counts_as_read_in_the_mirror() -> None:
    origin = make_lab("k8v4")
    stored = park(origin, filled(origin, 32), TOKENS[:32])
    lab = make_lab("k8v4")
    sequence = lab.cache.open()
    lab.cache.attach(sequence, lab.restore(stored, chain(TOKENS[:32], 16)))
    lab.step(sequence, [1])
    assert lab.cache.memory.residency.slot(sequence.pages[0]) >= 0
    assert lab.cache.memory.may_have_read(sequence, (sequence.pages[0].index,))


@pytest.mark.parametrize(("resident_cells", "resident"), [(None, [0, 1]), (16, [0]), (0, [])])
def test_kv_residency_restored_pages_get_device_copies_while_slots_last(
    resident_cells: int | None, resident: list[int]
) -> None:
    origin = make_lab("k8v4")
    stored = park(origin, filled(origin, 32), TOKENS[:32])
    lab = make_lab("k8v4", resident_cells=resident_cells)
    sequence = lab.cache.open()
    lab.cache.attach(sequence, lab.restore(stored, list(stored)))
    assert resident_depths(lab, sequence) == resident
    assert lab.cache.attest(sequence) == len(resident)
