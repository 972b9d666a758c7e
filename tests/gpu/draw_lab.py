"""Steps that consist of draws alone: given logits in, ids and reports out."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from gpu.cuda.draw_tables import Draws
from gpu.cuda.sampling import DeviceSampler
from gpu.cuda.step_tables import TableBlock
from gpu.plan import RowKind, SamplingParams
from gpu.sampling import Sampled, SampleRequest, TokenHistory
from tests.gpu.lab import Lab

NUM_SLOTS = 96
DEPTH = 3


class DrawLab:
    """A sampler with the tables and buffers of a backend.

    `draw` is a whole step. `launch` and `read` are its halves: what lies between them, the host has not read.
    """

    def __init__(self, lab: Lab, vocab_size: int, max_rows: int = 64) -> None:
        self.lab, self.vocab_size, self.max_rows = lab, vocab_size, max_rows
        device = lab.device
        self.sampler = DeviceSampler(device, vocab_size, max_rows)
        self.tables = TableBlock(device, self.sampler.fields(max_rows), DEPTH)
        self.logits = device.allocate(4 * vocab_size * max_rows)
        self.last_tokens = device.upload(np.full(NUM_SLOTS, -7, np.int32))
        self.results = device.allocate(4 * self.sampler.num_result_words(max_rows))

    def draw(
        self,
        logits: np.ndarray,
        requests: Items[SampleRequest],
        slots: Items[int] | None = None,
        kinds: Items[RowKind] | None = None,
        *,
        padded: int | None = None,
        general: bool | None = None,
    ) -> list[Sampled]:
        """Draw one step and wait for it."""
        return self.read(*self.launch(logits, requests, slots, kinds, padded=padded, general=general))

    def launch(
        self,
        logits: np.ndarray,
        requests: Items[SampleRequest],
        slots: Items[int] | None = None,
        kinds: Items[RowKind] | None = None,
        *,
        padded: int | None = None,
        general: bool | None = None,
    ) -> tuple[Draws, np.ndarray]:
        """Draw one step that the sampler takes for unread. padded: rows of the launch. Gives what `read` takes."""
        rows = padded or len(requests)
        self.lab.device.write(self.logits, np.ascontiguousarray(logits, np.float32))
        draws, general = self.prepare(requests, slots, kinds, rows, general=general)
        self.record(self.lab.stream, rows, general=general)
        self.sampler.launched(draws)
        return draws, self.words(rows)

    def prepare(
        self,
        requests: Items[SampleRequest],
        slots: Items[int] | None,
        kinds: Items[RowKind] | None,
        rows: int,
        *,
        general: bool | None = None,
    ) -> tuple[Draws, bool]:
        """Write and upload the tables."""
        chosen = np.array(slots if slots is not None else range(len(requests)), np.int32)
        kinds = kinds or [RowKind.DECODE] * len(requests)
        general = self.sampler.needs_general(requests) if general is None else general
        views = self.tables.next_views()
        draws = self.sampler.write(views, requests, chosen, kinds, rows, general=general)
        self.tables.upload(self.lab.stream)
        return draws, general

    def record(self, stream: object, rows: int, *, general: bool, logits: int = 0) -> None:
        """Queue the kernels, on a stream or into a capture. logits: address, of the lab's own by default."""
        self.sampler.record(
            stream, self.tables, rows, general=general, logits=logits or self.logits.address,
            last_tokens=self.last_tokens.address, results=self.results.address,
        )  # fmt: skip

    def words(self, rows: int) -> np.ndarray:
        """The result words of a launch over `rows` rows."""
        return self.lab.device.download(self.results.address, (self.sampler.num_result_words(rows),), np.uint32)

    def read(self, draws: Draws, words: np.ndarray) -> list[Sampled]:
        """The draws of a launched step."""
        return self.sampler.read(words, draws)

    def last(self) -> np.ndarray:
        """Last tokens of the slots."""
        return self.lab.get(self.last_tokens, np.int32)


def request(params: SamplingParams, index: int = 0, history: TokenHistory | None = None) -> SampleRequest:
    """A row of a reply without a past, unless it is given."""
    return SampleRequest(params, history if history is not None else TokenHistory(()), index)


def random_logits(seed: int, rows: int, vocab_size: int, scale: float = 4.0) -> np.ndarray:
    """(rows, vocab_size) f32, normal."""
    return (np.random.default_rng(seed).normal(size=(rows, vocab_size)) * scale).astype(np.float32)
