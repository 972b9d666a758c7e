"""Planted faults on a device: each raises its own alarm and no other.

A fault is queued in the step's own stream behind the append of a layer: the step goes on as if the kernel had done it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from gpu.cuda.cell_kernels import QkvRows, StepCellKernels
from gpu.errors import (
    HoldViolation,
    MirrorDivergence,
    NonFiniteInput,
    PoisonedPage,
    UnprovenAppend,
    WriteOutOfBounds,
)
from gpu.plan import RowKind, StepPlan
from gpu.proof import POISON
from gpu.step_cells import StepCells
from tests.gpu.backend_lab import cuda_lab, layout_of, tensors_of
from tests.gpu.lab import device_missing
from tests.kv_lab import FORMATS, Lab
from tests.model_files import tiny_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(device_missing()), reason=device_missing() or "a device")]
TOKENS = tuple(range(1, 17))
Damage = Callable[["Saboteur", StepCells, int], None]


class Saboteur:
    """Stands before the store of a backend; `damage` is queued behind the store of one layer of the armed step."""

    def __init__(self, lab: Lab) -> None:
        self.backend: Any = lab.backend
        self.device = self.backend.device
        self.kernels: StepCellKernels = self.backend._kernels
        self.layout = lab.layout
        self.mirror = lab.cache.memory.mirror.array
        self.scratch = self.device.pin(lab.layout.page_bytes)
        self.damage: Damage | None = None
        self.before: Damage | None = None
        self.layer = 0
        self._store = self.kernels.store
        self.kernels.store = self.store  # type: ignore[method-assign]
        self.backend.graphs.launch = lambda shape, record: record(self.device.compute)

    def store(self, cells: StepCells, layer: int, k: QkvRows, v: QkvRows) -> None:
        if self.before is not None and layer == self.layer:
            self.before(self, cells, layer)
        self._store(cells, layer, k, v)
        if self.damage is not None and layer == self.layer:
            self.damage(self, cells, layer)

    def page(self, cells: StepCells) -> int:
        """Address of the mirror page of the step's first row."""
        return int(self.mirror.ctypes.data + cells.rows.mirror_offset[0])

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self.device.copy_async(target, source, num_bytes, self.device.compute)

    def layer_offset(self, layer: int) -> int:
        return layer * self.layout.layer_bytes


def drop_counts(saboteur: Saboteur, cells: StepCells, layer: int) -> None:
    entries = saboteur.backend._kernels._launch.entries
    saboteur.device.clear_async(saboteur.kernels.counts_address(layer, entries), 8 * entries, saboteur.device.compute)


def keep_page(saboteur: Saboteur, cells: StepCells, layer: int) -> None:
    offset = saboteur.layer_offset(layer)
    saboteur.copy(saboteur.scratch.address, saboteur.page(cells) + offset, saboteur.layout.layer_bytes)


def undo_store(saboteur: Saboteur, cells: StepCells, layer: int) -> None:
    offset = saboteur.layer_offset(layer)
    saboteur.copy(saboteur.page(cells) + offset, saboteur.scratch.address, saboteur.layout.layer_bytes)


def mark(saboteur: Saboteur, cells: StepCells, layer: int, cell: int, value: int) -> None:
    """Write one mark (first K scale, or first K code, of a cell of head 0)."""
    layout, fmt = saboteur.layout, saboteur.layout.k_format
    plane = layout.plane(layer, 0)
    stride = fmt.scale_bytes(layout.head_dim) or fmt.code_bytes(layout.head_dim)
    start = plane.scales_offset if fmt.group_size else plane.codes_offset
    saboteur.scratch.array[:2].view(np.uint16)[0] = value
    saboteur.copy(saboteur.page(cells) + start + cell * stride, saboteur.scratch.address, 2)


def other_bytes(saboteur: Saboteur, cells: StepCells, layer: int) -> None:
    mark(saboteur, cells, layer, int(cells.rows.cell[0]), 0x1234)


def write_past(saboteur: Saboteur, cells: StepCells, layer: int) -> None:
    mark(saboteur, cells, layer, int(cells.rows.cell[-1]) + 1, 0x1234)


@pytest.fixture
def labs() -> Iterator[list[Lab]]:
    made: list[Lab] = []
    yield made
    for lab in made:
        lab.backend.close()


def run_with_rollback(lab: Lab, saboteur: Saboteur, damage: Damage, before: Damage | None, layer: int) -> None:
    """Prefill, a verify window that is rolled back, then the fault in the window that follows, then decode and seal."""
    cache, sequence = lab.cache, lab.cache.open()
    lab.step(sequence, TOKENS[:6])
    lab.step(sequence, (*TOKENS[6:8], 99, 98, 97, 96), RowKind.VERIFY)
    cache.truncate(sequence, 8)
    saboteur.damage, saboteur.before, saboteur.layer = damage, before, layer
    lab.step(sequence, (*TOKENS[8:11], 95), RowKind.VERIFY)
    saboteur.damage = saboteur.before = None
    cache.truncate(sequence, 11)
    for token in TOKENS[11:]:
        lab.step(sequence, [token], RowKind.DECODE)
    lab.seal_all(sequence, TOKENS)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    ("damage", "before", "alarm"),
    [
        (drop_counts, None, UnprovenAppend),
        (undo_store, keep_page, PoisonedPage),
        (other_bytes, None, MirrorDivergence),
        (write_past, None, WriteOutOfBounds),
    ],
)
def test_store_fault_after_rollback_raises_its_alarm(
    damage: Damage, before: Damage | None, alarm: type[Exception], layer: int, kv_format: str, labs: list[Lab]
) -> None:
    labs.append(cuda_lab(kv_format=kv_format))
    with pytest.raises(alarm) as raised:
        run_with_rollback(labs[-1], Saboteur(labs[-1]), damage, before, layer)
    assert type(raised.value) is alarm


def test_the_saboteur_without_a_fault_raises_nothing(labs: list[Lab]) -> None:
    labs.append(cuda_lab())
    run_with_rollback(labs[-1], Saboteur(labs[-1]), lambda *_: None, None, 0)


def test_page_freed_before_its_steps_event_raises_hold_violation(labs: list[Lab]) -> None:
    lab = cuda_lab()
    labs.append(lab)
    sequence = lab.cache.open()
    lab.cache.reserve(sequence, 4)
    handle: Any = lab.backend.launch(StepPlan((lab.entry(sequence, TOKENS[:4]),)))
    lab.cache.memory.pool.release_step(handle.cells.held, handle.cells.generations)
    with pytest.raises(HoldViolation):
        handle.wait()


@pytest.mark.parametrize("kv_format", FORMATS)
def test_device_copy_with_one_other_byte_is_found(kv_format: str, labs: list[Lab]) -> None:
    lab = cuda_lab(kv_format=kv_format)
    labs.append(lab)
    sequence = lab.cache.open()
    lab.step(sequence, TOKENS)
    assert lab.cache.attest(sequence) == 1
    lab.cache.memory.mirror.array[sequence.pages[0].index * lab.layout.page_bytes + 77] ^= 1
    with pytest.raises(MirrorDivergence):
        lab.cache.attest(sequence)


def test_values_that_are_not_finite_fail_their_turn_alone(labs: list[Lab]) -> None:
    config = tiny_config()
    tensors = {name: values.copy() for name, values in tensors_of(config).items()}
    tensors["token_embd.weight"][7, 3] = np.nan
    from tests.gpu.backend_lab import TensorSource

    lab = cuda_lab(config, source=TensorSource(tensors))
    labs.append(lab)
    good, bad = lab.cache.open(), lab.cache.open()
    for sequence in (good, bad):
        lab.cache.reserve(sequence, 3)
    plan = StepPlan((lab.entry(bad, (6, 7), sample=True), lab.entry(good, (5, 6), sample=True)))
    first, second = lab.backend.launch(plan).wait().entries
    assert isinstance(first.error, NonFiniteInput)
    assert second.error is None
    assert len(second.token_ids) == 1
    assert (bad.failed, good.failed) == (True, False)


def test_poison_is_what_the_host_calls_poison(labs: list[Lab]) -> None:
    """A slot that was handed out holds poison in every mark, as its mirror page does."""
    lab = cuda_lab(kv_format="k8v4")
    labs.append(lab)
    sequence = lab.cache.open()
    lab.cache.reserve(sequence, 16)
    slot = lab.cache.memory.residency.slot(sequence.pages[0])
    backend: Any = lab.backend
    address = lab.cache.memory.device.slots.address + slot * lab.layout.page_bytes  # type: ignore[attr-defined]
    lab.cache.memory.device.order_before_step()  # type: ignore[attr-defined]
    page = backend.device.download(address, (lab.layout.page_bytes,), np.uint8)
    plane = layout_of(tiny_config(), "k8v4", 16).plane(1, 1)
    marks = page[plane.scales_offset : plane.scales_offset + plane.scales_bytes].view(np.uint16)
    assert (marks == POISON).all()
