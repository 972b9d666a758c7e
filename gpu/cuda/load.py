"""Opens a GPU and puts a model and its cache on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from gpu.cache import KVCache
from gpu.cuda.backend import STEPS_IN_FLIGHT, CudaBackend
from gpu.cuda.cell_kernels import StepCellKernels
from gpu.cuda.device import CudaDevice
from gpu.cuda.memory import CudaMemory
from gpu.cuda.model import DeviceModel
from gpu.cuda.rows import DeviceRope, PageKernels
from gpu.cuda.sampling import DeviceSampler
from gpu.cuda.step_builder import StepBuilder
from gpu.cuda.step_shape import MAX_SKINNY_ROWS
from gpu.cuda.step_tables import SequenceSlots
from gpu.cuda.weight_packing import PackedStorage
from gpu.cuda.weights import RowSource, WeightLoader
from gpu.errors import CapacityError, LayoutError
from gpu.kv_kernels import RopeTable
from gpu.layout import KVLayout
from gpu.model.config import ModelConfig

_MAX_SAMPLED: Final = 256
"""Rows of a step that may be sampled, if there are not more sequences."""

_KEPT_FREE: Final = 512 << 20
"""Device memory left for kernels, captured steps and scratch that grows."""


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """How a model is put on a device.

    device: number or UUID. storage: of the weights. mirror_bytes: pinned memory for pages. device_kv_bytes: device
    memory for pages, None for what is free, at most the mirror's. max_sequences: that may be open at once. step_rows:
    most rows of a step. attest, resident_cells: see `KVCache`.
    """

    device: str = "0"
    storage: PackedStorage = PackedStorage.BF16
    mirror_bytes: int = 512 << 20
    device_kv_bytes: int | None = None
    max_sequences: int = 64
    step_rows: int = 2048
    attest: str = "sampled"
    resident_cells: int | None = None


def load_cuda_backend(
    source: RowSource, config: ModelConfig, layout: KVLayout, rope: RopeTable, options: CudaOptions
) -> CudaBackend:
    """Open the device, pack the weights, pin the mirror. Closes everything again when it fails.

    Raises DeviceUnavailable, CapacityError, LayoutError or ModelFileError that names what is missing or too large.
    """
    device = CudaDevice.open(options.device)
    try:
        return _load(device, source, config, layout, rope, options)
    except BaseException:
        device.close()
        raise


def _load(
    device: CudaDevice,
    source: RowSource,
    config: ModelConfig,
    layout: KVLayout,
    rope: RopeTable,
    options: CudaOptions,
) -> CudaBackend:
    DeviceRope.check(rope, layout.head_dim)
    max_rows = max(options.step_rows, MAX_SKINNY_ROWS)
    num_sequences = max(options.max_sequences, 2)
    max_sampled = max(num_sequences, min(max_rows, _MAX_SAMPLED))
    weights = WeightLoader(device, config, source, options.storage).load()
    max_pages = -(-rope.max_position // layout.page_size)
    slots = SequenceSlots(device, num_sequences, max_pages, STEPS_IN_FLIGHT)
    sampler = DeviceSampler(device, config.vocab_size, max_sampled)
    model = DeviceModel(
        device, config, weights, sampler, slots, max_rows=max_rows,
        max_entries=max(num_sequences, MAX_SKINNY_ROWS), max_sampled=max_sampled,
    )  # fmt: skip
    page_kernels = PageKernels(device.kernels, layout)
    kernels = StepCellKernels(
        device, layout, config.num_heads, _upload_rope(device, rope), rope.max_position, slots, page_kernels,
        max_rows=max_rows, proofs=model.proofs,
    )  # fmt: skip
    mirror_bytes = options.mirror_bytes // layout.page_bytes * layout.page_bytes
    if mirror_bytes < 2 * layout.page_bytes:
        raise LayoutError("mirror_bytes", options.mirror_bytes, f"two pages of {layout.page_bytes} bytes must fit")
    num_slots = _num_slots(device, layout, mirror_bytes, options.device_kv_bytes)
    memory = CudaMemory(device, layout, page_kernels, mirror_bytes, num_slots)
    builder = StepBuilder(
        device, memory, slots, sampler, tile_rows=kernels.decode.tile_rows, prefill=kernels.prefill,
        max_rows=max_rows, max_sampled=max_sampled, depth=STEPS_IN_FLIGHT,
    )  # fmt: skip
    cache = KVCache(
        layout, memory.mirror, memory, kernels, attest=options.attest, resident_cells=options.resident_cells
    )
    return CudaBackend(device, model, kernels, cache, memory, builder, sampler, max_rows, max_sampled)


def _upload_rope(device: CudaDevice, rope: RopeTable) -> DeviceRope:
    cosines, sines = (device.upload(np.ascontiguousarray(part)).address for part in (rope.cos, rope.sin))
    return DeviceRope(cosines, sines, rope.rope_dim)


def _num_slots(device: CudaDevice, layout: KVLayout, mirror_bytes: int, asked: int | None) -> int:
    """Device slots: as asked, else what is free, never more than the mirror has pages."""
    free = max(0, device.memory_info()[0] - _KEPT_FREE)
    if asked is not None and asked > free:
        raise CapacityError("bytes of device memory for pages", asked, free)
    num_slots = min(free if asked is None else asked, mirror_bytes) // layout.page_bytes
    if num_slots < 2:
        raise CapacityError("bytes of device memory for pages", 2 * layout.page_bytes, free if asked is None else asked)
    return num_slots
