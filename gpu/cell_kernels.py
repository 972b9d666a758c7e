"""The seam between the cache and what computes on cells, whatever memory the rows are in."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gpu.errors import PlanError
from gpu.kv_kernels import KVKernels, RopeTable
from gpu.layout import KVLayout
from gpu.step_cells import StepCells


class CellKernels(Protocol):
    """Stores and attends the rows of a step. Tensors are the backend's own: NumPy arrays, or addresses on a device.

    stores_per_row: by how much a mirror-store count grows for one row of one plane. max_position: positions
    0 .. max_position - 1 have a rotation.
    """

    stores_per_row: int
    max_position: int

    def store(self, cells: StepCells, layer: int, k: Any, v: Any) -> None:
        """Quantize and store one layer's rows; see `gpu.kv_kernels.KVKernels.store_rows`.

        k, v: (num_rows, num_kv_heads, head_dim) f32, K before RoPE. Raises PlanError for other shapes.
        """
        ...

    def attend(self, cells: StepCells, layer: int, q: Any, out: Any) -> None:
        """Attend one layer's rows; see `gpu.kv_kernels.KVKernels.attend`. Raises PlanError for other shapes."""
        ...


class HostCellKernels:
    """`CellKernels` over arrays in host memory. device: the arena of `DeviceMemory`, (m,) u8."""

    stores_per_row = 1

    def __init__(
        self,
        layout: KVLayout,
        kernels: KVKernels,
        rope: RopeTable,
        mirror: NDArray[np.uint8],
        device: NDArray[np.uint8],
    ) -> None:
        self.max_position = rope.max_position
        self._layout = layout
        self._kernels = kernels
        self._rope = rope
        self._mirror = mirror
        self._device = device

    def store(self, cells: StepCells, layer: int, k: NDArray[np.float32], v: NDArray[np.float32]) -> None:
        """See `CellKernels.store`."""
        shape = (cells.num_rows, self._layout.num_kv_heads, self._layout.head_dim)
        _check_array("k", k, shape)
        _check_array("v", v, shape)
        target, device = cells.store_target, self._device
        self._kernels.store_rows(
            self._layout, layer, k, v, self._rope, cells.rows, target, device, cells.counts, cells.nonfinite
        )

    def attend(self, cells: StepCells, layer: int, q: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        """See `CellKernels.attend`."""
        layout = self._layout
        num_heads = q.shape[1] if q.ndim == 3 else 0
        if num_heads == 0 or num_heads % layout.num_kv_heads:
            raise PlanError("q", q.shape, f"(rows, a multiple of {layout.num_kv_heads} heads, head_dim)")
        shape = (cells.num_rows, num_heads, layout.head_dim)
        _check_array("q", q, shape)
        _check_array("out", out, shape)
        self._kernels.attend(layout, layer, q, self._rope, cells.rows, cells.tables, self._mirror, self._device, out)


def _check_array(name: str, array: NDArray[np.float32], shape: tuple[int, int, int]) -> None:
    if array.shape != shape or array.dtype != np.float32 or not array.flags.c_contiguous:
        raise PlanError(name, (array.shape, str(array.dtype)), f"C-contiguous f32 of shape {shape}")
