"""What a draw's table entry says: a `SampleRequest` as the kernels read it (`DrawRow` in gpu/kernels/draw_rows.cuh)."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpu.cuda.slot_words import CountedWords, SlotTables
from gpu.errors import PlanError
from gpu.plan import RowKind, SamplingParams
from gpu.sampling import SampleRequest, TokenHistory

MAX_LOGPROBS: Final = 20
_NO_SLOT: Final = -1


class DrawFlag(IntFlag):
    """What a row's draw consists of. REMEMBERED: the drawn id is counted in the slot's words."""

    PADDING = 1
    RANDOM = 2
    TOP_K = 4
    TOP_P = 8
    MIN_P = 16
    ADDITIVE_PENALTIES = 32
    REPETITION = 64
    SUPPRESSED_ENDS = 128
    REMEMBERED = 256
    LOGPROBS = 512


DRAW_ROW: Final = np.dtype(
    [
        ("temperature", np.float64),
        ("inverse_temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("repetition_penalty", np.float64),
        ("seed", np.uint64),
        ("words", np.uint64),
        ("biases", np.uint64),
        ("slot", np.int32),
        ("flags", np.uint32),
        ("top_k", np.int32),
        ("num_logprobs", np.int32),
        ("num_drafted", np.int32),
        ("drafted_id", np.int32),
        ("position", np.uint32),
        ("choice", np.uint32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("log_min_p", np.float32),
    ],
    align=True,
)
"""words, biases: addresses of the slot's tables, 0 for none. slot: whose last token the draw is, -1 for none.
num_drafted: how many drafted ids the row's penalties see; drafted_id: the last of them, earlier ones are those of the
rows before. log_min_p: an estimate of the logarithm, to 0.001."""


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """The sampled rows of a step. counted: the words of each slot that its draws look at."""

    requests: tuple[SampleRequest, ...]
    kinds: tuple[RowKind, ...]
    slots: tuple[int, ...]
    counted: dict[int, CountedWords] = field(default_factory=dict)

    def histories(self) -> list[TokenHistory]:
        """The histories that get a drawn id when the step is read."""
        rows = zip(self.requests, self.kinds, strict=True)
        return [request.history for request, kind in rows if kind is not RowKind.VERIFY]

    def counted_in(self, row: int) -> CountedWords | None:
        """The words that the row's draw is counted in."""
        words = None if self.kinds[row] is RowKind.VERIFY else self.counted.get(self.slots[row])
        return words if words is not None and words.counts else None


def needs_general(request: SampleRequest) -> bool:
    """Whether a row asks for more than its largest logit."""
    params = request.params
    return bool(
        params.temperature > 0.0
        or params.logprobs is not None
        or params.logit_bias
        or request.counts_ids
        or request.suppressed_ids
    )


def write_plain(table: NDArray[Any], draws: Draws) -> None:
    """Fill the entries of rows that need nothing but their largest logit."""
    count = len(draws.requests)
    table[:count] = np.zeros((), DRAW_ROW)
    table["slot"][:count] = [_own_slot(slot, kind) for slot, kind in zip(draws.slots, draws.kinds, strict=True)]


def write_general(
    table: NDArray[Any], draws: Draws, slots: SlotTables, vocab_size: int, unread: Items[TokenHistory]
) -> None:
    """Fill the entries of any rows; queues what of the slots' tables is not on the device yet.

    unread: histories with draws that the host has not read. Raises PlanError for more than MAX_LOGPROBS alternatives,
    and what `SlotTables.words` raises.
    """
    for index, (request, slot) in enumerate(zip(draws.requests, draws.slots, strict=True)):
        if (request.params.logprobs or 0) > MAX_LOGPROBS:
            raise PlanError("logprobs", request.params.logprobs, f"at most {MAX_LOGPROBS}")
        biases = slots.biases(slot, request.params.logit_bias)
        words = slots.words(slot, request, draws.counted, unread)
        remembered = draws.counted_in(index) is not None
        own_slot = _own_slot(slot, draws.kinds[index])
        table[index] = _entry(request, own_slot, vocab_size, biases, words, remembered=remembered)


def pad(table: NDArray[Any], count: int, padded: int) -> None:
    """Mark the entries from `count` to `padded` as no rows."""
    table["flags"][count:padded] = DrawFlag.PADDING


def _entry(
    request: SampleRequest, slot: int, vocab_size: int, biases: int, words: CountedWords | None, *, remembered: bool
) -> tuple[Any, ...]:
    params, drafted = request.params, request.drafted
    random = params.temperature > 0.0
    return (
        params.temperature,
        1.0 / params.temperature if random else 0.0,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.seed & 0xFFFFFFFFFFFFFFFF,
        words.address if words is not None else 0,
        biases,
        slot,
        _flags(request, vocab_size, remembered=remembered),
        params.top_k,
        min(params.logprobs or 0, vocab_size),
        len(drafted),
        drafted[-1] if drafted else 0,
        request.output_index,
        params.choice,
        params.presence_penalty,
        params.frequency_penalty,
        math.log(params.min_p) if params.min_p > 0.0 else 0.0,
    )


def _flags(request: SampleRequest, vocab_size: int, *, remembered: bool) -> int:
    params = request.params
    flags = _filters(params, vocab_size) if params.temperature > 0.0 else DrawFlag(0)
    if params.presence_penalty or params.frequency_penalty:
        flags |= DrawFlag.ADDITIVE_PENALTIES
    if params.repetition_penalty != 1.0:
        flags |= DrawFlag.REPETITION
    if request.suppressed_ids:
        flags |= DrawFlag.SUPPRESSED_ENDS
    if remembered:
        flags |= DrawFlag.REMEMBERED
    if params.logprobs is not None:
        flags |= DrawFlag.LOGPROBS
    return int(flags)


def _filters(params: SamplingParams, vocab_size: int) -> DrawFlag:
    flags = DrawFlag.RANDOM
    if 0 < params.top_k < vocab_size:
        flags |= DrawFlag.TOP_K
    if params.top_p < 1.0:
        flags |= DrawFlag.TOP_P
    if params.min_p > 0.0:
        flags |= DrawFlag.MIN_P
    return flags


def _own_slot(slot: int, kind: RowKind) -> int:
    """The slot whose last token a draw is: none for rows that a host still has to accept."""
    return _NO_SLOT if kind is RowKind.VERIFY else slot
