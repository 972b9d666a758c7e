"""State of one turn inside the engine. Touched by the engine thread only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gpu.cache import Sequence
from gpu.errors import HoldViolation
from gpu.sampling import TokenHistory
from workers.engine.drafting import Drafter
from workers.engine.requests import EngineTurn


class Phase(StrEnum):
    """Where a turn stands in the engine."""

    WAITING = "waiting"
    RESOLVING = "resolving"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class RunningTurn:
    """One turn: its sequence, the ids known so far and how many of its pages are sealed.

    solo: its next step holds nothing else.
    ids: prompt, forced and sampled ids. unread: launched draws whose id the host has not read. num_sealed: leading
    pages of the sequence that are sealed (shared, restored or ours). drafter: guesses rows, if that is asked for.
    """

    turn: EngineTurn
    ids: list[int]
    history: TokenHistory
    sequence: Sequence | None = None
    phase: Phase = Phase.WAITING
    unread: int = 0
    num_sealed: int = 0
    solo: bool = False
    drafter: Drafter | None = None

    @classmethod
    def of(cls, turn: EngineTurn, drafter: Drafter | None = None) -> RunningTurn:
        """A turn that waits for admission."""
        request = turn.request
        history = TokenHistory(request.prompt_ids, request.forced_ids)
        return cls(turn, list(request.known_ids), history, solo=request.solo or request.wary, drafter=drafter)

    @property
    def loaded(self) -> Sequence:
        """The sequence of an admitted turn."""
        if self.sequence is None:
            raise HoldViolation(f"turn {self.turn.request.turn_id} has no sequence yet")
        return self.sequence

    @property
    def age(self) -> tuple[int, int]:
        """Sort key: important and old first."""
        return (-self.turn.request.priority, self.turn.request.order)

    @property
    def num_output(self) -> int:
        """Output ids known to the host."""
        return len(self.ids) - len(self.turn.request.prompt_ids)

    @property
    def num_launched_output(self) -> int:
        """Output ids known or being drawn."""
        return self.num_output + self.unread

    @property
    def num_pending(self) -> int:
        """Known ids whose cells have not been launched."""
        return 0 if self.sequence is None else max(0, len(self.ids) - self.sequence.length)

    @property
    def waits_for_host(self) -> bool:
        """Whether the next step needs the ids of the last one: they decide what is drafted."""
        return self.drafter is not None and not self.drafter.is_paused(len(self.ids))

    @property
    def wants_more(self) -> bool:
        """Whether another draw is allowed: max_tokens counts launched draws."""
        return self.num_launched_output < self.turn.request.max_tokens
