"""Guesses the next tokens of a turn from its own text: after the longest earlier occurrence of its last tokens.

A draft costs rows in the next step and changes nothing else: rows are verified, and what the model would not have
drawn is taken back. Whether it pays depends on text, backend and company, so it is measured while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Final

from gpu.plan import RowKind

_INDEXED_PER_CALL: Final = 4096
_CANDIDATES: Final = 8
_LONGEST_MATCH: Final = 64
_FIRST_PAUSE: Final = 16
_LONGEST_PAUSE: Final = 512
_SMOOTHING: Final = 0.2
_MIN_TRIALS: Final = 6
_MAX_MISSES: Final = 8
"""Look-ups without a guess before a pause, in which steps may be launched ahead again."""


class SuffixIndex:
    """Where each run of `min_match` tokens occurs in one turn's prompt and accepted output.

    Work per call is bounded: a long prompt is indexed over several calls, and drafts wait until that is done.
    """

    def __init__(self, min_match: int) -> None:
        self._min_match = min_match
        # By hash, which takes half the memory of the tokens themselves; a match is looked at token by token anyway.
        self._ends: dict[int, list[int]] = {}
        self._num_indexed = 0

    def draft(self, ids: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """Up to num_tokens ids that followed the longest earlier occurrence of the last ones; of two the later.

        ids: prompt and accepted output, of which calls only ever see more.
        """
        self._grow(ids)
        if num_tokens <= 0 or self._num_indexed < len(ids) or len(ids) < self._min_match:
            return ()
        best, best_end = self._min_match - 1, 0
        for end in reversed(self._ends[hash(tuple(ids[-self._min_match :]))]):
            if end < len(ids) and (length := _match_length(ids, end)) > best:
                best, best_end = length, end
        # What reaches the end of the text goes on with itself, as a list or a table does.
        period = len(ids) - best_end
        return tuple(ids[best_end + index % period] for index in range(num_tokens)) if best_end else ()

    def _grow(self, ids: Sequence[int]) -> None:
        width = self._min_match
        stop = min(len(ids), self._num_indexed + _INDEXED_PER_CALL)
        for end in range(max(width, self._num_indexed + 1), stop + 1):
            ends = self._ends.setdefault(hash(tuple(ids[end - width : end])), [])
            ends.append(end)
            if len(ends) > _CANDIDATES:
                del ends[0]
        self._num_indexed = stop


def _match_length(ids: Sequence[int], end: int) -> int:
    """How many tokens before `end` equal the last ones."""
    most = min(end, _LONGEST_MATCH)
    return next((back for back in range(most) if ids[end - 1 - back] != ids[-1 - back]), most)


class DraftCosts:
    """Seconds of steps, plain and with drafted rows, as they were measured last. One for an engine."""

    def __init__(self) -> None:
        self._plain_s: float | None = None
        self._drafting_s: float | None = None
        self._last_read_at = 0.0

    def note(self, kinds: Set[RowKind], launched_at: float, read_at: float) -> None:
        """A step with rows of these kinds was launched and read at these times; steps with prompt rows tell nothing."""
        seconds = read_at - max(launched_at, self._last_read_at)
        self._last_read_at = read_at
        if RowKind.PREFILL in kinds:
            return
        if RowKind.VERIFY in kinds:
            self._drafting_s = _smoothed(self._drafting_s, seconds)
        else:
            self._plain_s = _smoothed(self._plain_s, seconds)

    @property
    def ratio(self) -> float:
        """How much longer a step with drafted rows is than one without; 1 while one of them is unknown."""
        if not self._plain_s or not self._drafting_s:
            return 1.0
        return max(1.0, self._drafting_s / self._plain_s)


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """rows: drafted ones of a turn in a step. min_match: tokens that must occur again before a guess is made."""

    rows: int
    min_match: int


class Drafter:
    """Drafts of one turn, as long as they pay; pauses when they don't, longer each time, and tries again.

    While it does not pause, nothing may be launched ahead of what the host has read.
    """

    def __init__(self, settings: DraftSettings, costs: DraftCosts) -> None:
        self._index = SuffixIndex(settings.min_match)
        self._max_rows = settings.rows
        self._costs = costs
        self._misses = 0
        self._accepted: float = 0.0
        self._trials = 0
        self._pause = _FIRST_PAUSE
        self._resume_at = 0

    def is_paused(self, num_tokens: int) -> bool:
        """Whether nothing is drafted for a text of this many tokens."""
        return num_tokens < self._resume_at

    def draft(self, ids: Sequence[int], limit: int) -> tuple[int, ...]:
        """Guess up to `limit` tokens. ids: prompt and accepted output."""
        if self.is_paused(len(ids)):
            return ()
        drafted = self._index.draft(ids, min(limit, self._max_rows))
        self._misses = 0 if drafted else self._misses + 1
        if self._misses >= _MAX_MISSES:
            self._misses, self._resume_at = 0, len(ids) + _FIRST_PAUSE
        return drafted

    def note(self, num_accepted: int, num_tokens: int) -> None:
        """A draft was verified. num_tokens: of the text now."""
        self._accepted = float(num_accepted) if not self._trials else _smoothed(self._accepted, num_accepted)
        self._trials += 1
        if self._trials >= _MIN_TRIALS and 1.0 + self._accepted < self._costs.ratio:
            self._resume_at = num_tokens + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._trials = 0
        elif self._trials >= 4 * _MIN_TRIALS:
            self._pause = _FIRST_PAUSE


def num_agreeing(drafted: Sequence[int], drawn: Sequence[int]) -> int:
    """How many drafted ids the model has drawn itself, from the first on."""
    pairs = enumerate(zip(drafted, drawn, strict=False))
    return next((index for index, (guess, token_id) in pairs if guess != token_id), len(drafted))


def reply_part(drawn: tuple[int, ...], end_ids: frozenset[int], limit: int) -> tuple[int, ...]:
    """Of ids that were drawn in one step those up to the first end token, that included, at most `limit`."""
    last = next((index for index, token_id in enumerate(drawn) if token_id in end_ids), len(drawn) - 1)
    return drawn[: min(last + 1, limit)]


def _smoothed(old: float | None, new: float) -> float:
    return new if old is None else old + _SMOOTHING * (new - old)
