"""Errors of turn control.

TurnControlError
|-- ControlUnavailable   control did not answer, is loading or is read-only (retried, then 503 or a lost lease)
|-- ControlFull          control has no memory left for this write (503 with Retry-After)
|-- DurabilityLost       written, but not on disk in time under durability=host (retried by the caller)
|-- BadTurnData          a request, event, record or id that cannot be stored or read (names field, value, limit)
|-- StaleLease           the lease is no longer the turn's (the runner stops and writes nothing more)
|-- TurnEnded            the turn has already ended otherwise (the runner stops and writes nothing more)
|-- StreamConflict       events that are neither the next ones nor a repeat (a bug of the runner)
`-- ParentMoved          the branch's head is no longer the parent this turn was built on (a bug of the runner)
"""

from __future__ import annotations


class TurnControlError(Exception):
    """Root of the package's errors."""


class ControlUnavailable(TurnControlError):
    """Control did not answer in time, is loading its data or refuses writes. Callers retry or answer 503."""


class ControlFull(TurnControlError):
    """Control refused a write for lack of memory. Callers answer 503 with Retry-After."""


class DurabilityLost(TurnControlError):
    """The write happened but was not confirmed on disk in time (durability=host). Repeating the call is safe."""


class BadTurnData(TurnControlError):
    """Something that cannot be stored or read. The edge that took it answers with a refusal."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}={value!r}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class StaleLease(TurnControlError):
    """Another claim, a release or an expiry took the lease. The runner stops and writes nothing more."""

    def __init__(self, turn_id: str, epoch: int) -> None:
        super().__init__(f"turn {turn_id}: the lease of epoch {epoch} is over")
        self.turn_id = turn_id
        self.epoch = epoch


class TurnEnded(TurnControlError):
    """The turn ended in another way first. The runner stops and writes nothing more."""

    def __init__(self, turn_id: str, state: str) -> None:
        super().__init__(f"turn {turn_id} has ended: {state}")
        self.turn_id = turn_id
        self.state = state


class StreamConflict(TurnControlError):
    """Events that are neither the next ones nor an identical repeat of stored ones."""

    def __init__(self, turn_id: str, number: int, expected: int) -> None:
        super().__init__(f"turn {turn_id}: event {number} was appended where {expected} is next")
        self.turn_id = turn_id
        self.number = number
        self.expected = expected


class ParentMoved(TurnControlError):
    """The branch's head is not the parent on which this turn was built."""

    def __init__(self, turn_id: str) -> None:
        super().__init__(f"turn {turn_id}: the head of its branch has moved")
        self.turn_id = turn_id
