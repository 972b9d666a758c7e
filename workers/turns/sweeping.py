"""sweep: what no message, worker or client can lose."""

from __future__ import annotations

from workers.turns.outcomes import Dispatch
from workers.turns.replies import dispatches
from workers.turns.script import ScriptCall, load_script

MAX_SENDS_PER_SWEEP = 200
NAMED_WORKER_WAIT_S = 30.0


def sweep(
    limit: int = MAX_SENDS_PER_SWEEP, *, named_worker_wait_s: float = NAMED_WORKER_WAIT_S
) -> ScriptCall[tuple[Dispatch, ...]]:
    """End expired leases (a crash is counted) and passed deadlines; return the messages that are due.

    A runnable turn without a lease is due 10 s after its last message, then 20, 40, 60, 60 ... s, but 2 s after it
    while a worker that may take it reports an idle slot; one whose lease has just ended is due at once. Nothing is sent
    to a queue that holds a message for every turn that waits for it. Any number of sweepers may run.

    A turn that names a worker fails with `worker_gone` once that worker has not been there for `named_worker_wait_s`,
    the time it is given to start again.
    """
    return ScriptCall(load_script("sweep"), (), (limit, int(named_worker_wait_s * 1000)), dispatches)
