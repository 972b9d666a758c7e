"""Draws on the device: what a step's tables say of each sampled row, and the kernels that draw."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpu.cuda.device import CudaDevice
from gpu.cuda.kernel_table import Arg, KernelEntry, KernelSource
from gpu.cuda.step_tables import TableBlock, TableField
from gpu.plan import RowKind
from gpu.sampling import Sampled, SampleRequest

_PARTS: Final = 32
_THREADS: Final = 256
_NO_SLOT: Final = -1

SAMPLING: Final = KernelSource(
    "sampling.cu",
    (KernelEntry("draw_largest", (Arg.POINTER,) * 6),),
    parameters=("VOCABULARY",),
    samples=({"VOCABULARY": 128256},),
)
SOURCES: Final = (SAMPLING,)


class DeviceSampler:
    """Draws one token per sampled row, on the device."""

    def __init__(self, device: CudaDevice, vocab_size: int, num_slots: int, max_sampled: int) -> None:
        self._library = device.kernels
        self._vocab_size = vocab_size
        self._parts = device.allocate(8 * _PARTS * max_sampled).address
        self._arrived = device.allocate(4 * max_sampled).address
        device.clear_async(self._arrived, 4 * max_sampled, device.compute)

    def fields(self, sampled: int) -> tuple[TableField, ...]:
        """Tables of a block for up to `sampled` rows."""
        return (TableField("draw_slots", np.int32, sampled),)

    def num_result_words(self, sampled: int) -> int:
        """Words that `record` leaves for `read`."""
        return sampled

    def needs_general(self, requests: Items[SampleRequest]) -> bool:
        """Whether a row asks for more than its largest logit."""
        return False

    def write(
        self,
        views: dict[str, NDArray[Any]],
        requests: Items[SampleRequest],
        slots: NDArray[np.int32],
        kinds: Items[RowKind],
        padded: int,
        *,
        general: bool,
    ) -> None:
        """Fill the tables of a step's sampled rows. slots, kinds: of each row's entry."""
        remembered = [kind is not RowKind.VERIFY for kind in kinds]
        views["draw_slots"][: len(requests)] = np.where(remembered, slots, _NO_SLOT) if requests else 0
        views["draw_slots"][len(requests) : padded] = _NO_SLOT

    def record(
        self,
        stream: Any,
        tables: TableBlock,
        sampled: int,
        *,
        general: bool,
        logits: int,
        last_tokens: int,
        results: int,
    ) -> None:
        """Queue the draws of `sampled` rows. logits: (sampled, vocab_size) f32. results: num_result_words words."""
        kernel = self._library.get(SAMPLING, "draw_largest", {"VOCABULARY": self._vocab_size})
        arguments = (logits, tables.address("draw_slots"), self._parts, self._arrived, results, last_tokens)
        kernel.launch(stream, (_PARTS, sampled), _THREADS, arguments)

    def read(self, words: NDArray[np.uint32], requests: Items[SampleRequest]) -> list[Sampled]:
        """The draws out of a step's result words."""
        return [Sampled(int(word), None) for word in words[: len(requests)]]
