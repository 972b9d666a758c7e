"""Errors of the `workers` package.

WorkerError
|-- TurnFailed            the turn ends `failed` with a code the client sees
|   |-- ContextOverflow   prompt or prompt + max_tokens beyond the context or the arena (both numbers)
|   |-- EngineFault       the step that ran this turn alone raised
|   `-- IntegrityLost     cells that the reply was computed from proved wrong
|-- WorkerStartError      settings or servers that cannot work (ends the start)
|-- LeaseLost             another worker may own the turn: stop without writing anything (turn_runner)
|-- TurnCancelled         the client asked for the end of the turn (turn_runner finishes it)
|-- WorkerDraining        the worker stops: the turn is handed over (turn_runner)
`-- WorkerQuarantined     a rule of the cache was broken: leases are released, the process ends (service)
"""

from __future__ import annotations


class WorkerError(Exception):
    """Root of the package's errors."""


class TurnFailed(WorkerError):
    """The turn ends `failed`. `code` and the message reach the client; no class name, path or traceback does."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class ContextOverflow(TurnFailed):
    """The prompt does not fit. Names both counts."""

    def __init__(self, num_tokens: int, limit: int, what: str = "context length") -> None:
        super().__init__(
            "context_length_exceeded", f"the prompt has {num_tokens} tokens, more than the {what} of {limit} allows"
        )
        self.num_tokens = num_tokens
        self.limit = limit


class EngineFault(TurnFailed):
    """A step that held only this turn raised."""

    def __init__(self, message: str) -> None:
        super().__init__("engine_error", message)


class IntegrityLost(TurnFailed):
    """The turn has read a page in the mirror that proved wrong: its tokens are not carried to another worker."""

    def __init__(self) -> None:
        super().__init__("integrity", "cells that this reply was computed from proved wrong; send the request again")


class LeaseLost(WorkerError):
    """The lease is gone. The runner stops at once and writes nothing more."""


class TurnCancelled(WorkerError):
    """A cancel was seen in an event append's reply or on the worker's control stream."""


class WorkerQuarantined(WorkerError):
    """A rule of the cache was broken on this worker. Nothing it holds is trusted any more."""


class WorkerDraining(WorkerError):
    """The worker stops. Its turns are released voluntarily and go on elsewhere."""


CANNOT_START = "kvalet worker cannot start: "
"""Begins the last line of a worker that refuses to start. It ends with os.EX_CONFIG: trying again changes nothing."""


class WorkerStartError(WorkerError):
    """The worker cannot start. Names setting, value and reason."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}={value!r}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit
