"""Draws on the device: what a step's tables say of each sampled row, and the kernels that draw."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpu.cuda.device import CudaDevice
from gpu.cuda.draw_tables import DRAW_ROW, MAX_LOGPROBS, Draws, needs_general, pad, write_general, write_plain
from gpu.cuda.kernel_table import Arg, KernelEntry, KernelSource
from gpu.cuda.slot_words import SlotTables
from gpu.cuda.step_tables import TableBlock, TableField
from gpu.errors import LayoutError
from gpu.plan import RowKind, TokenLogprobs
from gpu.sampling import Sampled, SampleRequest

MAX_VOCAB_SIZE: Final = 1 << 18
_MAX_PARTS: Final = 32
_MIN_PARTS: Final = 4
_RESIDENT_CTAS: Final = 3
"""CTAs that a processor holds at once: a launch over many rows has no more; with few rows each has _MAX_PARTS."""
_THREADS: Final = 256
_BINS: Final = 2048
_STATE_BYTES: Final = 64
_PART_BYTES: Final = 16
_WORDS_OF_ROW: Final = 2 + 2 * MAX_LOGPROBS

_P: Final = Arg.POINTER
SAMPLING: Final = KernelSource(
    "sampling.cu",
    (
        KernelEntry("adjust_logits", (_P,) * 8),
        KernelEntry("rank_logits", (_P,) * 5),
        KernelEntry("cut_candidates", (_P,) * 6),
        KernelEntry("draw_tokens", (_P,) * 6),
    ),
    parameters=("VOCABULARY",),
    samples=({"VOCABULARY": 50257}, {"VOCABULARY": 262144}),
)
SOURCES: Final = (SAMPLING,)


class DeviceSampler:
    """Draws one token per sampled row, as `HostSampler` would, on the device.

    Of a step: `write` fills its table and queues what slots need, `record` queues its kernels, `launched` tells that
    they are queued, `read` takes the results. Raises LayoutError for more than MAX_VOCAB_SIZE ids.
    """

    def __init__(self, device: CudaDevice, vocab_size: int, max_sampled: int) -> None:
        if not 0 < vocab_size <= MAX_VOCAB_SIZE:
            raise LayoutError("vocab_size", vocab_size, f"must be 1 to {MAX_VOCAB_SIZE} on CUDA")
        self._library = device.kernels
        self._num_ctas = _RESIDENT_CTAS * device.num_processors
        self._vocab_size = vocab_size
        self._slots = SlotTables(device, vocab_size)
        self._in_flight: list[Draws] = []
        self._states = device.allocate(_STATE_BYTES * max_sampled).address
        self._parts = device.allocate(_PART_BYTES * _MAX_PARTS * max_sampled).address
        self._counts = device.allocate(4 * _BINS * max_sampled).address
        self._weights = device.allocate(8 * _BINS * max_sampled).address
        self._lists = device.allocate(4 * vocab_size * max_sampled).address
        device.clear_async(self._states, _STATE_BYTES * max_sampled, device.compute)

    def fields(self, sampled: int) -> tuple[TableField, ...]:
        """Tables of a block for up to `sampled` rows."""
        return (TableField("draws", DRAW_ROW, sampled),)

    def num_result_words(self, sampled: int) -> int:
        """Words that `record` leaves for `read`."""
        return _WORDS_OF_ROW * sampled

    def needs_general(self, requests: Items[SampleRequest]) -> bool:
        """Whether a row asks for more than its largest logit."""
        return any(needs_general(request) for request in requests)

    def write(
        self,
        views: dict[str, NDArray[Any]],
        requests: Items[SampleRequest],
        slots: NDArray[np.int32],
        kinds: Items[RowKind],
        padded: int,
        *,
        general: bool,
    ) -> Draws:
        """Fill the table of a step's sampled rows and queue the slots' tables that it needs.

        slots, kinds: of each row's entry; the rows of an entry follow each other. Raises PlanError for more than
        MAX_LOGPROBS alternatives, and where penalties begin while a draw of the reply is unread.
        """
        draws = Draws(tuple(requests), tuple(kinds), tuple(slots.tolist()))
        table = views["draws"]
        if general:
            unread = [history for other in self._in_flight for history in other.histories()]
            write_general(table, draws, self._slots, self._vocab_size, unread)
        else:
            write_plain(table, draws)
        pad(table, len(requests), padded)
        return draws

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
        """Queue the draws of `sampled` rows.

        logits: (sampled, vocab_size) f32; biases and penalties are added in place. last_tokens: (slots,) i32.
        results: num_result_words words.
        """
        rows = tables.address("draws")
        grid = (min(_MAX_PARTS, max(_MIN_PARTS, self._num_ctas // sampled)), sampled)
        launches: list[tuple[str, tuple[int, ...]]] = [
            ("adjust_logits", (self._parts, self._counts, self._weights, results, last_tokens))
        ]
        if general:
            launches += [
                ("rank_logits", (self._counts, self._weights)),
                ("cut_candidates", (self._weights, self._lists, results)),
                ("draw_tokens", (self._parts, results, last_tokens)),
            ]
        for name, more in launches:
            kernel = self._library.get(SAMPLING, name, {"VOCABULARY": self._vocab_size})
            kernel.launch(stream, grid, _THREADS, (logits, rows, self._states, *more))

    def launched(self, draws: Draws) -> None:
        """The step of these draws is queued; without this call its counts are not relied on."""
        self._slots.keep(draws.counted)
        self._in_flight.append(draws)

    def read(self, words: NDArray[np.uint32], draws: Draws) -> list[Sampled]:
        """The draws out of a step's result words; once for each launched step, in order."""
        self._in_flight.remove(draws)
        padded = len(words) // _WORDS_OF_ROW
        ids = words[:padded].view(np.int32).tolist()
        for row in range(len(draws.requests)):
            if words_of_slot := draws.counted_in(row):
                words_of_slot.read_ids.append(ids[row])
        return [
            Sampled(ids[row], _logprobs(words, padded, row, min(request.params.logprobs, self._vocab_size)))
            if request.params.logprobs is not None
            else Sampled(ids[row], None)
            for row, request in enumerate(draws.requests)
        ]


def _logprobs(words: NDArray[np.uint32], padded: int, row: int, num_top: int) -> TokenLogprobs:
    """A row's report: ids, log probabilities, then for each row MAX_LOGPROBS alternatives and theirs."""
    ids, values = words.view(np.int32), words.view(np.float32)
    first = 2 * padded + MAX_LOGPROBS * row
    alternatives = ids[first : first + num_top].tolist()
    first += MAX_LOGPROBS * padded
    logprobs = values[first : first + num_top].tolist()
    return TokenLogprobs(int(ids[row]), float(values[padded + row]), tuple(zip(alternatives, logprobs, strict=True)))
