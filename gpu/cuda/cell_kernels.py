"""The cache's kernels on the device: implements `gpu.cell_kernels.CellKernels` for steps that are queued or captured.

What a step stores and reads is in its tables, uploaded before; so a captured step serves every later one of its shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpu.cuda.activations import ActivationLayout
from gpu.cuda.attention import AttentionTables, DecodeAttention, DecodePlan
from gpu.cuda.device import CudaDevice
from gpu.cuda.prefill_attention import PrefillAttention, PrefillPlan
from gpu.cuda.rows import DeviceRope, HeadNorm, PageKernels, RowTables
from gpu.cuda.step_tables import SequenceSlots, TableBlock
from gpu.errors import PlanError
from gpu.layout import KVLayout
from gpu.step_cells import StepCells


@dataclass(frozen=True, slots=True)
class QkvRows:
    """Rows of the merged projection: (num_rows, num_heads + 2 num_kv_heads, head_dim) f32, before norms and RoPE.

    Stands for K, V and the queries alike: one kernel takes all three. head_norm: applied to queries and keys first.
    """

    address: int
    num_rows: int
    head_norm: HeadNorm | None


@dataclass(frozen=True, slots=True)
class AttendedRows:
    """Where attention's result goes: bf16 activations of width num_heads * head_dim in a layout."""

    address: int
    num_rows: int
    layout: ActivationLayout


@dataclass(slots=True)
class StepLaunch:
    """What the launches of a step share. stream: a stream or a capture. rows, entries: of the (padded) shape.

    mirror_stream: where the mirror half of large appends goes; None keeps it in the append kernel. decode, prefill: the
    attention of each kind of tile, None without any.
    """

    stream: Any
    tables: TableBlock
    rows: int
    entries: int
    decode: DecodePlan | None
    prefill: PrefillPlan | None
    mirror_stream: Any | None = None


class StepCellKernels:
    """Launches append and attention of the step that `begin` announced."""

    def __init__(
        self,
        device: CudaDevice,
        layout: KVLayout,
        num_heads: int,
        rope: DeviceRope,
        max_position: int,
        slots: SequenceSlots,
        kernels: PageKernels,
        *,
        max_rows: int,
        proofs: int,
    ) -> None:
        self.stores_per_row = layout.num_kv_heads
        self.max_position = max_position
        self.decode = DecodeAttention(device.kernels, layout, num_heads, device.num_processors)
        self.prefill = PrefillAttention(device.kernels, layout, num_heads, device.num_processors, max_position)
        self._device = device
        self._layout = layout
        self._num_heads = num_heads
        self._rope = rope
        self._slots = slots
        self._kernels = kernels
        self._queries = device.allocate(max_rows * num_heads * layout.head_dim * 2).address
        self._proofs = proofs
        self._scratch = device.allocate(16)
        self._blocks = device.allocate(self.prefill.scratch_bytes).address
        self._launch: StepLaunch | None = None
        self._rotated_layer = -1

    def begin(self, launch: StepLaunch) -> None:
        """Announce the step whose layers `store` and `attend` launch next."""
        self._launch = launch
        self._rotated_layer = -1
        if launch.decode is not None:
            self._grow(self.decode.scratch_bytes(launch.decode))

    def counts_address(self, layer: int, entries: int) -> int:
        """Mirror-store counts of a layer: (entries, 2) i32 in the step's proofs."""
        return self._proofs + 8 * entries * layer

    def nonfinite_address(self, entries: int) -> int:
        """Non-finite vectors of each entry: (entries,) i32, behind the counts."""
        return self.counts_address(self._layout.num_layers, entries)

    def store(self, cells: StepCells, layer: int, k: QkvRows, v: QkvRows) -> None:
        """See `gpu.cell_kernels.CellKernels.store`. Rotates the rows' queries too, for `attend` of this layer."""
        launch = self._owned(cells, k.num_rows)
        if v is not k:
            raise PlanError("v", v, "the merged rows that k are")
        tables, entries = _row_tables(launch.tables), launch.entries
        counts = self.counts_address(layer, entries)
        self._kernels.append(
            launch.stream, layer, launch.rows, tables, num_heads=self._num_heads, rope=self._rope, qkv=k.address,
            queries=self._queries, counts=counts, nonfinite=self.nonfinite_address(entries), head_norm=k.head_norm,
            mirror_in_kernel=launch.mirror_stream is None,
        )  # fmt: skip
        if launch.mirror_stream is not None:
            launch.mirror_stream.wait(launch.stream.record())
            self._kernels.mirror(launch.mirror_stream, layer, launch.rows, tables, counts)
        self._rotated_layer = layer

    def attend(self, cells: StepCells, layer: int, q: QkvRows, out: AttendedRows) -> None:
        """See `gpu.cell_kernels.CellKernels.attend`. Raises PlanError before the layer's `store`."""
        launch = self._owned(cells, q.num_rows)
        if self._rotated_layer != layer:
            raise PlanError("layer", layer, f"stored before it is attended; last stored: {self._rotated_layer}")
        common: Any = {"queries": self._queries, "activations": out.address, "activation_layout": out.layout}
        if launch.decode is not None:
            tables = self._attention_tables(launch, "tiles")
            scratch = self._scratch.address
            self.decode.launch(launch.stream, layer, launch.decode, tables, scratch=scratch, **common)
        if launch.prefill is not None:
            tables = self._attention_tables(launch, "wide_tiles")
            self.prefill.launch(launch.stream, layer, launch.prefill, tables, scratch=self._blocks, **common)

    def _attention_tables(self, launch: StepLaunch, tiles: str) -> AttentionTables:
        slots, sequences = self._slots, launch.tables.address("wide_sequences")
        return AttentionTables(launch.tables.address(tiles), slots.page_table.address, slots.max_pages, sequences)

    def _owned(self, cells: StepCells, num_rows: int) -> StepLaunch:
        launch = self._launch
        if launch is None or cells.num_rows > launch.rows or num_rows != launch.rows:
            raise PlanError("num_rows", num_rows, f"the rows of the step that was begun ({cells.num_rows} in use)")
        return launch

    def _grow(self, num_bytes: int) -> None:
        """Scratch only grows, and what a captured step uses stays: older scratch is kept until the device closes."""
        if num_bytes > self._scratch.num_bytes:
            self._scratch = self._device.allocate(num_bytes)


def _row_tables(tables: TableBlock) -> RowTables:
    return RowTables(
        slots=tables.address("slots"),
        positions=tables.address("positions"),
        entries=tables.address("entries"),
        mirror_pages=tables.address("mirror_pages"),
        device_pages=tables.address("device_pages"),
    )
