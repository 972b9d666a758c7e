"""A tracer model and the world it is run in, to show exactly which cells a row has attended to.

Weights are handmade. In layer 0, V is one-hot in the token (a conversation's tag); queries are zero, so a row's output
is the share of attended cells by tag: one foreign cell is one wrong non-zero. In layer 1, V is one-hot in the position
and K one-hot in the tag; the query is large against every other tag, so a missing, doubled, misplaced or foreign cell
changes the histogram of positions. One-hots are chosen to be exact in every plane format.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.cache import HoldKind, KVCache, SealedPage, Sequence
from gpu.errors import CapacityError
from gpu.formats import PlaneFormat
from gpu.kv_kernels import RopeTable
from gpu.layout import KVLayout
from gpu.plan import PlanEntry, RowKind, SamplingParams, StepPlan
from gpu.reference.codecs import hadamard
from gpu.sampling import Sampled, SampleRequest, TokenHistory
from gpu.step_cells import StepCells
from tests.kv_lab import Lab, LabConfig, chain, layout_of, make_lab

NUM_TAGS = 128
JUNK_TAG = NUM_TAGS - 1
REPULSION = 100.0
MAX_CELLS = 150


class ForeignCell(AssertionError):
    """A row attended to a cell that is not one of its own, or not to all of them."""


class TracerModel:
    """Implements `gpu.host_step.StepModel`; logits are (n, 256): shares by tag, by position % 64, by position // 64."""

    def __init__(self, layout: KVLayout) -> None:
        self.config: Any = LabConfig(4 * 64)
        self._layout = layout

    def run(
        self, token_ids: NDArray[np.int64], sampled_rows: NDArray[np.int64], cells: StepCells, cache: KVCache
    ) -> NDArray[np.float32]:
        positions = cells.rows.positions
        tags = _one_hot(token_ids // 64, token_ids % 64)
        places = np.zeros_like(tags)
        places[np.arange(len(positions)), 0, positions % 64] = 1
        places[np.arange(len(positions)), 1, positions // 64] = 1
        against = np.float32(REPULSION) * (1 - tags)
        shares = []
        for layer, (query, v) in enumerate(((np.zeros_like(tags), tags), (against, places))):
            k_format, v_format = self._layout.k_format, self._layout.v_format
            cache.append(cells.at(layer), _in_basis(k_format, tags), _in_basis(v_format, v))
            out = np.empty_like(tags)
            cache.attend(cells.at(layer), _in_basis(k_format, query), out)
            shares.append(_in_basis(v_format, out).reshape(len(token_ids), -1))
        return np.concatenate(shares, axis=1)[sampled_rows]


class TracerSampler:
    """Checks each sampled row: params.seed is its conversation's tag, output_index its position."""

    def __init__(self) -> None:
        self.num_checked = 0

    def sample(self, logits: NDArray[np.float32], requests: list[SampleRequest]) -> list[Sampled]:
        for row, request in zip(logits, requests, strict=True):
            if JUNK_TAG in request.drafted:
                continue  # this row follows a wrong draft: it must see junk, and is rolled back
            _check(row, request.params.seed, request.output_index)
            self.num_checked += 1
        return [Sampled(request.params.seed, None) for request in requests]


def _check(row: NDArray[np.float32], tag: int, position: int) -> None:
    foreign = [int(t) for t in np.flatnonzero(row[:NUM_TAGS]) if t != tag]
    if foreign or abs(row[tag] - 1) > 2e-3:
        raise ForeignCell(f"tag {tag} at position {position}: own share {row[tag]}, foreign tags {foreign}")
    attended = np.arange(position + 1)
    for start, places in ((NUM_TAGS, attended % 64), (NUM_TAGS + 64, attended // 64)):
        expected = np.bincount(places, minlength=64) / (position + 1)
        wrong = np.flatnonzero(np.abs(row[start : start + 64] - expected) > 2e-3 * expected + 1e-6)
        if len(wrong):
            raise ForeignCell(f"tag {tag} at position {position}: wrong shares of places {wrong.tolist()}")


def _one_hot(heads: NDArray[np.int64], dims: NDArray[np.int64]) -> NDArray[np.float32]:
    out = np.zeros((len(heads), 2, 64), np.float32)
    out[np.arange(len(heads)), heads, dims] = 1
    return out


def _in_basis(fmt: PlaneFormat, x: NDArray[np.float32]) -> NDArray[np.float32]:
    return hadamard(x) if fmt.rotated else x


@dataclass
class Conversation:
    """A tag, how many of its cells are final, and the sequence it is loaded in."""

    tag: int
    length: int = 0
    sequence: Sequence | None = None

    @property
    def tokens(self) -> list[int]:
        return [self.tag] * self.length


@dataclass
class TracerWorld:
    """One worker after another over one store: random work, cancels, evictions, restores and kills."""

    seed: int
    kv_format: str
    resident_cells: int | None
    attest: str = "always"
    num_pages: int = 28
    store: dict[bytes, bytes] = field(default_factory=dict)
    conversations: dict[int, Conversation] = field(default_factory=dict)
    uploads: list[SealedPage] = field(default_factory=list)
    on_start: Callable[[Lab], None] = lambda lab: None

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.sampler = TracerSampler()
        self.next_tag = 0
        self.num_restored = 0
        self.done: dict[str, int] = {}
        self.kill()

    def run(self, num_operations: int) -> None:
        """Do random operations. Raises ForeignCell, or what the cache's own alarms raise."""
        operations: list[tuple[Callable[[], None], int]] = [
            (self.decode, 30),
            (self.prefill, 12),
            (self.verify, 14),
            (self.start, 4),
            (self.unload, 10),
            (self.park, 10),
            (self.cancel, 5),
            (self.overshoot, 6),
            (self.forget_stored, 4),
            (self.drop_local, 3),
            (self.end_upload, 5),
            (self.poison_ahead, 8),
            (self.kill, 1),
        ]
        actions, weights = zip(*operations, strict=True)
        for action in self.random.choices(actions, weights, k=num_operations):
            action()
            self.done[action.__name__] = self.done.get(action.__name__, 0) + 1

    def start(self) -> None:
        """A new conversation; the oldest one is forgotten when there are many."""
        if len(self.conversations) >= 10:
            self._close(self.conversations.pop(next(iter(self.conversations))))
        self.conversations[self.next_tag] = Conversation(self.next_tag)
        self.next_tag = (self.next_tag + 1) % JUNK_TAG

    def decode(self) -> None:
        """One to four sequences decode together, a step or two ahead of what was read."""
        chosen = self._loaded(self.random.randint(1, 4))
        handles = []
        for _ in range(self.random.randint(1, 2)):
            entries = [self._entry(c, [c.tag], RowKind.DECODE) for c in chosen if self._fits(c, 1, chosen)]
            if entries:
                handles.append(self.backend.launch(StepPlan(tuple(entries))))
                for entry in entries:
                    self.conversations[entry.tokens[0]].length += 1
        for handle in handles:
            handle.wait()

    def prefill(self) -> None:
        """Chunks of several sequences in one step."""
        self._step([(c, self.random.randint(1, 30), 0) for c in self._loaded(self.random.randint(1, 2))])

    def verify(self) -> None:
        """Drafted rows, some of them wrong and rolled back."""
        self._step([(c, self.random.randint(1, 4), self.random.randint(0, 6)) for c in self._loaded(1)])

    def unload(self) -> None:
        """A conversation leaves the engine; its sealed pages stay cached."""
        for conversation in self._some(1):
            self._seal(conversation)
            self._close(conversation)

    def park(self) -> None:
        """Sealed pages go to the store; some uploads stay open for a while."""
        for conversation in self._some(1):
            for sealed in self._seal(conversation):
                self.cache.hold(sealed, HoldKind.UPLOAD)
                self.store[sealed.digest] = bytes(sealed.buffer)
                self.uploads.append(sealed)

    def end_upload(self) -> None:
        """An upload ends."""
        if self.uploads:
            self.cache.release(self.uploads.pop(self.random.randrange(len(self.uploads))), HoldKind.UPLOAD)

    def cancel(self) -> None:
        """A sequence is closed under its running step, and others take pages before the event."""
        for conversation in self._loaded(1):
            if not self._fits(conversation, 3, []):
                continue
            entry = self._entry(conversation, [conversation.tag] * 3, RowKind.PREFILL)
            handle = self.backend.launch(StepPlan((entry,)))
            self._close(conversation)
            taken = [self.cache.open() for _ in range(2)]
            for sequence in taken:
                if self.cache.free_pages:
                    self.cache.reserve(sequence, 1)
            handle.wait()
            for sequence in taken:
                self.cache.close(sequence)

    def overshoot(self) -> None:
        """The engine is a step ahead when an end token is read: the sequence is truncated under its running step."""
        for conversation in self._loaded(1):
            if not self._fits(conversation, 2, []):
                continue
            sequence = conversation.sequence
            handles = []
            for token in (conversation.tag, JUNK_TAG):
                entry = self._entry(conversation, [token], RowKind.DECODE)
                unsampled = replace(entry, kind=RowKind.PREFILL, sampling=None, history=None)
                handles.append(self.backend.launch(StepPlan((unsampled if token == JUNK_TAG else entry,))))
            conversation.length += 1
            assert sequence is not None
            self.cache.truncate(sequence, conversation.length)
            if self._fits(conversation, 1, [conversation]) and self.random.random() < 0.5:
                entry = self._entry(conversation, [conversation.tag], RowKind.DECODE)
                handles.append(self.backend.launch(StepPlan((entry,))))
                conversation.length += 1
            for handle in handles:
                handle.wait()

    def close_all(self) -> None:
        """Everything leaves the engine; uploads end."""
        for conversation in self.conversations.values():
            self._close(conversation)
        while self.uploads:
            self.end_upload()

    def forget_stored(self) -> None:
        """The store evicts a page."""
        if self.store:
            del self.store[self.random.choice(list(self.store))]

    def poison_ahead(self) -> None:
        """The worker has nothing to do for a moment."""
        self.cache.poison_ahead(2)

    def drop_local(self) -> None:
        """A page is found damaged and never handed out again."""
        for conversation in self._some(1):
            digests = chain(conversation.tokens, 16)
            sealed = self.cache.lookup(self.random.choice(digests)) if digests else None
            if sealed is not None:
                self.cache.drop(sealed)

    def kill(self) -> None:
        """The worker dies; another one starts with an empty arena and the same store."""
        layout = layout_of(self.kv_format)
        lab = make_lab(
            self.kv_format,
            kernels="numba",
            num_pages=self.num_pages,
            resident_cells=self.resident_cells,
            attest=self.attest,
            model=TracerModel(layout),
            sampler=self.sampler,
            rope=RopeTable(np.ones((4096, 32), np.float32), np.zeros((4096, 32), np.float32), "half"),
        )
        self.on_start(lab)
        self.lab, self.cache, self.backend = lab, lab.cache, lab.backend
        self.uploads.clear()
        for conversation in self.conversations.values():
            conversation.sequence = None

    def _step(self, wanted: list[tuple[Conversation, int, int]]) -> None:
        """Append right and wrong rows; wrong ones make the entry a verify window that is truncated."""
        entries = []
        for conversation, right, wrong in wanted:
            if self._fits(conversation, right + wrong, [c for c, _, _ in wanted]):
                kind = RowKind.VERIFY if wrong else RowKind.PREFILL
                tokens = [conversation.tag] * right + [JUNK_TAG] * wrong
                entries.append(self._entry(conversation, tokens, kind))
                conversation.length += right
        if not entries:
            return
        self.backend.launch(StepPlan(tuple(entries))).wait()
        for conversation, _, wrong in wanted:
            if wrong and conversation.sequence is not None and conversation.sequence.length > conversation.length:
                self.cache.truncate(conversation.sequence, conversation.length)
            if self.random.random() < 0.5:
                self._seal(conversation)

    def _entry(self, conversation: Conversation, tokens: list[int], kind: RowKind) -> PlanEntry:
        sequence = conversation.sequence
        assert sequence is not None
        last = sequence.length if kind is RowKind.VERIFY else sequence.length + len(tokens) - 1
        params = SamplingParams(temperature=0.0, seed=conversation.tag)
        return PlanEntry(sequence, kind, tuple(tokens), params, last, TokenHistory(()))

    def _loaded(self, count: int) -> list[Conversation]:
        """Random conversations, loaded: resolved from local pages and the store, the rest recomputed."""
        chosen = self._some(count)
        return [c for c in chosen if c.sequence is not None or self._load(c, chosen)]

    def _load(self, conversation: Conversation, keep: list[Conversation]) -> bool:
        sequence = conversation.sequence = self.cache.open()
        for digest in chain(conversation.tokens, 16):
            sealed = self.cache.lookup(digest) or self._restore(digest, keep)
            if sealed is None:
                break
            self.cache.attach(sequence, [sealed])
        while sequence.length < conversation.length:
            rows = min(self.random.randint(20, 120), conversation.length - sequence.length)
            if not self._reserve(sequence, sequence.length + rows, keep):
                self._close(conversation)
                return False
            entry = self._entry(conversation, [conversation.tag] * rows, RowKind.PREFILL)
            self.backend.launch(StepPlan((entry,))).wait()
        return True

    def _restore(self, digest: bytes, keep: list[Conversation]) -> SealedPage | None:
        if digest not in self.store:
            return None
        while True:
            try:
                filled = self.cache.begin_fill(1)[0]
                break
            except CapacityError:
                if not self._preempt(keep):
                    return None
        self.cache.prepare_fill(filled)
        filled.buffer[:] = self.store[digest]
        self.cache.prove_fill(filled)
        self.num_restored += 1
        return self.cache.fill(filled, digest)

    def _fits(self, conversation: Conversation, rows: int, keep: list[Conversation]) -> bool:
        sequence = conversation.sequence
        if sequence is None or conversation.length + rows > MAX_CELLS:
            return False
        return self._reserve(sequence, sequence.length + rows, [conversation, *keep])

    def _reserve(self, sequence: Sequence, num_cells: int, keep: list[Conversation]) -> bool:
        while True:
            try:
                self.cache.reserve(sequence, num_cells)
                return True
            except CapacityError:
                if not self._preempt(keep):
                    return False

    def _preempt(self, keep: list[Conversation]) -> bool:
        idle = [
            c
            for c in self.conversations.values()
            if c.sequence is not None and not c.sequence.num_launched and c not in keep
        ]
        if idle:
            self._close(self.random.choice(idle))
        elif self.uploads:
            self.end_upload()
        return bool(idle) or bool(self.uploads)

    def _seal(self, conversation: Conversation) -> list[SealedPage]:
        sequence = conversation.sequence
        if sequence is None:
            return []
        digests = chain(conversation.tokens, 16)
        for index in self.cache.sealable(sequence):
            self.cache.seal(sequence, index, digests[index])
        return [sealed for digest in digests[: sequence.num_sealed] if (sealed := self.cache.lookup(digest))]

    def _close(self, conversation: Conversation) -> None:
        if conversation.sequence is not None:
            self.cache.close(conversation.sequence)
            conversation.sequence = None

    def _some(self, count: int) -> list[Conversation]:
        if not self.conversations:
            self.start()
        return self.random.sample(list(self.conversations.values()), min(count, len(self.conversations)))
