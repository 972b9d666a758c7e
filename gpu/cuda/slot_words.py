"""Tables over the vocabulary that penalties and biases look at, one of each for a sequence slot that needs it.

The device counts drawn ids itself, since the host is a step behind. It counts on from what the host last sent, and a
table is sent again unless it provably holds the history: what the history has gained since must be, id for id, what
was drawn with this table and read. So accepted drafts, another sequence in the slot, a reply that was moved and a draw
that failed all lead to a new table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from cuda.core import Event
from numpy.typing import NDArray

from gpu.cuda.device import CudaDevice, PinnedBuffer
from gpu.errors import PlanError
from gpu.sampling import SampleRequest, TokenHistory

IN_PROMPT: Final = 1 << 31
ENDS_REPLY: Final = 1 << 30
_NUM_STAGED: Final = 4
_WORD: Final = 4


@dataclass(frozen=True, slots=True)
class WordContents:
    """What a slot's words hold: counts of output ids, IN_PROMPT for ids of the prompt, ENDS_REPLY for end_ids."""

    counts: bool
    prompt: bool
    end_ids: tuple[int, ...]

    @classmethod
    def of(cls, request: SampleRequest) -> WordContents:
        """What the request and later ones of its reply look at."""
        params = request.params
        return cls(request.counts_ids, params.repetition_penalty != 1.0, params.end_ids if params.min_tokens else ())


@dataclass(slots=True, eq=False)
class CountedWords:
    """A slot's words on the device and what they have counted.

    Counted are the first num_seen output ids of the history, then read_ids, then draws that the host has not read.
    """

    address: int
    contents: WordContents
    history: TokenHistory
    num_seen: int
    read_ids: list[int] = field(default_factory=list)

    @property
    def counts(self) -> bool:
        """Whether draws are counted in these words."""
        return self.contents.counts

    def serves(self, request: SampleRequest) -> bool:
        """Whether the words hold what the request looks at."""
        if self.contents != WordContents.of(request):
            return False
        return not self.counts or (self.history is request.history and self._follow())

    def _follow(self) -> bool:
        gained = self.history.output_ids[self.num_seen :]
        if gained != self.read_ids:
            return False
        self.num_seen += len(gained)
        self.read_ids.clear()
        return True


class SlotTables:
    """The tables of all slots. Device memory is taken when a slot first needs it and kept.

    Words that a step uses are known again once `keep` is called, after the step has been queued.
    """

    def __init__(self, device: CudaDevice, vocab_size: int) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._staging = _Staging(device, _WORD * vocab_size)
        self._addresses: dict[tuple[str, int], int] = {}
        self._known: dict[int, CountedWords] = {}
        self._biases: dict[int, tuple[tuple[int, float], ...]] = {}

    def biases(self, slot: int, logit_bias: tuple[tuple[int, float], ...]) -> int:
        """Address of the slot's (vocab_size,) f32 biases, queued if they are new; 0 for none."""
        if not logit_bias:
            return 0
        address = self._address("biases", slot)
        if self._biases.get(slot) != logit_bias:
            table = self._staging.next().view(np.float32)
            table[:] = 0
            for token_id, bias in logit_bias:
                if 0 <= token_id < self._vocab_size:
                    table[token_id] += np.float32(bias)
            self._staging.send(address)
            self._biases[slot] = logit_bias
        return address

    def words(
        self, slot: int, request: SampleRequest, used: dict[int, CountedWords], unread: Iterable[TokenHistory]
    ) -> CountedWords | None:
        """The slot's words for a request, queued if the device does not hold them; None if it looks at none.

        used: words of the step that is built, by slot; grows. unread: histories with draws that the host has not read.
        Raises PlanError when the words would have to be sent and an unread draw is missing in them.
        """
        if not (request.counts_ids or request.suppressed_ids):
            return None
        words = used.get(slot) or self._known.pop(slot, None)
        if words is None or not words.serves(request):
            words = self._send_words(slot, request, unread)
        used[slot] = words
        return words

    def keep(self, used: dict[int, CountedWords]) -> None:
        """Know the words of a step again, which is queued."""
        self._known.update(used)

    def _send_words(self, slot: int, request: SampleRequest, unread: Iterable[TokenHistory]) -> CountedWords:
        contents, history = WordContents.of(request), request.history
        if contents.counts and any(history is other for other in unread):
            raise PlanError("history", history, "penalties cannot begin while a draw of the reply is unread")
        table = self._staging.next().view(np.uint32)
        table[:] = 0
        if contents.counts:
            counts = np.fromiter(history.output_counts.values(), np.uint32, len(history.output_counts))
            ids = np.fromiter(history.output_counts, np.int64, len(history.output_counts))
            table[ids] = counts
        if contents.prompt:
            self._mark(table, history.prompt_ids, IN_PROMPT)
        self._mark(table, contents.end_ids, ENDS_REPLY)
        address = self._address("words", slot)
        self._staging.send(address)
        return CountedWords(address, contents, history, len(history.output_ids))

    def _mark(self, table: NDArray[np.uint32], token_ids: Iterable[int], mark: int) -> None:
        ids = np.array([token_id for token_id in token_ids if token_id < self._vocab_size], np.int64)
        table[ids] |= np.uint32(mark)

    def _address(self, kind: str, slot: int) -> int:
        key = (kind, slot)
        if key not in self._addresses:
            self._addresses[key] = self._device.allocate(_WORD * self._vocab_size).address
        return self._addresses[key]


class _Staging:
    """Pinned buffers that are filled in turn and copied in the order of the compute stream."""

    def __init__(self, device: CudaDevice, num_bytes: int) -> None:
        self._device = device
        self._num_bytes = num_bytes
        self._buffers: list[tuple[PinnedBuffer, Event]] = []
        self._turn = -1

    def next(self) -> NDArray[Any]:
        """The next buffer's bytes, once the copy of what it held has ended."""
        self._turn = (self._turn + 1) % _NUM_STAGED
        if self._turn == len(self._buffers):
            self._buffers.append((self._device.pin(self._num_bytes), self._device.create_event()))
        else:
            self._buffers[self._turn][1].sync()
        return self._buffers[self._turn][0].array

    def send(self, target: int) -> None:
        """Queue the copy of the buffer that `next` gave last."""
        buffer, event = self._buffers[self._turn]
        self._device.copy_async(target, buffer.address, self._num_bytes, self._device.compute)
        self._device.compute.record(event)
