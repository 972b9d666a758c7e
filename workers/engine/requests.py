"""What a turn's thread asks of the engine and what it gets back."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from gpu.cache import SealedPage
from gpu.plan import SamplingParams, TokenLogprobs
from workers.parking.turn_pages import TurnPages


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One turn as the engine sees it.

    forced_ids: output ids that are already in the stream (a take-over or a preempted run): computed, never sampled.
    end_ids: ids that end the reply; empty when they are ignored. order: arrival, for preemption of the youngest.
    solo: nothing else runs in the same steps. wary: the same, until the turn has survived one step.
    """

    turn_id: str
    prompt_ids: tuple[int, ...]
    forced_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    end_ids: frozenset[int]
    priority: int
    order: int
    solo: bool = False
    wary: bool = False

    @property
    def known_ids(self) -> tuple[int, ...]:
        """Prompt and forced ids: what is computed before anything is sampled."""
        return self.prompt_ids + self.forced_ids


@dataclass(frozen=True, slots=True)
class Token:
    """A sampled id. It is part of the reply unless it is an end token, which is not delivered."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Finished:
    """The engine's end of the reply: `stop` for an end token, `length` for max_tokens."""

    reason: str


@dataclass(frozen=True, slots=True)
class Preempted:
    """The pages were needed for an older turn, or the step failed among others. Resolve and submit again."""

    solo: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """This turn cannot go on."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Not from the engine: the turn was cancelled, its lease was lost, or the worker drains."""


EngineOutput = Token | Finished | Preempted | Failed | Interrupted


@dataclass(frozen=True, slots=True)
class SealedEvent:
    """A page was sealed while a turn ran: what parking needs to store it. The page carries an UPLOAD hold."""

    page: SealedPage
    page_index: int


@dataclass(slots=True)
class EngineTurn:
    """A turn's handle, shared by its own thread and the engine thread.

    outputs: what the engine delivers, in order. admitted: pages are promised, the prefix may be resolved.
    cancelled: set by the turn's thread; the engine drops the turn.
    """

    request: EngineRequest
    pages: TurnPages
    on_sealed: Callable[[SealedEvent], None]
    outputs: queue.SimpleQueue[EngineOutput] = field(default_factory=queue.SimpleQueue)
    admitted: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
