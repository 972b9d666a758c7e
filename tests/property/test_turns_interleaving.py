"""Random interleavings of everybody who touches a turn, on a real server, against a small model.

Workers die, hang and come back with stale leases; clients accept, cancel and delete; sweepers sweep; each script is
sometimes run twice, as if its reply had been lost. What must hold at every moment and at the end:

    - a turn's epoch only grows, and a write with any lease but the newest is refused and changes nothing
    - a turn commits at most once, a conversation's turns commit in the order of acceptance, each on the head before it
    - events are gapless from 0, and nothing follows the terminal one
    - nothing is lost: once workers stop dying every accepted turn ends, and no queue or counter holds a trace of it
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from tests.services import ValkeyServer
from tests.turn_factory import LIMITS, complete, delta, entry, request, started, terminal, worker
from workers.turns import calls
from workers.turns.control import TurnControl, connect
from workers.turns.errors import StaleLease, TurnEnded
from workers.turns.events import TurnState
from workers.turns.leasing import Claimant
from workers.turns.outcomes import AcceptKind
from workers.turns.records import ClaimedTurn
from workers.turns.replies import stream_events
from workers.turns.script import ScriptCall

NUM_OPERATIONS = 400
WORKERS = ("w1", "w2", "w3")
CONVERSATIONS = ("c1", "c2")


class Story:
    """One random run: the actors' own view of what they hold, and what they have been told."""

    def __init__(self, control: TurnControl, seed: int) -> None:
        self.control = control
        self.random = random.Random(seed)
        self.accepted: list[str] = []
        self.in_conversation: dict[str, list[str]] = {c: [] for c in CONVERSATIONS}
        self.leases: list[ClaimedTurn] = []  # every lease ever given, stale ones included
        self.newest: dict[str, int] = {}
        self.commits: Counter[str] = Counter()

    def run(self, call: ScriptCall[Any]) -> Any:
        """Run a call; one time in four its reply is lost and it is run again."""
        if self.random.random() < 0.25:
            first = self.control.run(call)
            assert self.control.run(call) == first
            return first
        return self.control.run(call)

    def step(self) -> None:
        self.random.choices(
            [self.accept, self.claim, self.append, self.end, self.lose, self.give_back, self.cancel, self.sweep],
            weights=[4, 8, 8, 5, 2, 1, 1, 2],
        )[0]()

    def accept(self) -> None:
        turn_id = f"t{len(self.accepted)}"
        changes: dict[str, Any] = {"priority": self.random.randrange(-1, 2)}
        kind = self.random.choice(["conversation", "child", "stateless"])
        if kind == "conversation":
            changes["conversation_id"] = self.random.choice(CONVERSATIONS)
        elif kind == "child" and self.accepted:
            changes["parent_id"] = self.random.choice(self.accepted)
        outcome = self.run(calls.accept(request(turn_id, **changes), LIMITS))
        if outcome.kind is AcceptKind.ACCEPTED:
            self.accepted.append(turn_id)
            if "conversation_id" in changes:
                self.in_conversation[changes["conversation_id"]].append(turn_id)
        else:
            assert outcome.kind is AcceptKind.PARENT_FAILED

    def claim(self, who: Claimant | None = None) -> ClaimedTurn | None:
        claimant = who or worker(self.random.choice(WORKERS))
        turn: ClaimedTurn | None = self.run(calls.claim(self.some_turn(), claimant))
        if turn is not None:
            turn_id = turn.request.turn_id
            assert turn.lease.epoch > self.newest.get(turn_id, 0)
            self.newest[turn_id] = turn.lease.epoch
            self.leases.append(turn)
        return turn

    def append(self) -> None:
        if turn := self.some_lease():
            number = int(self.control.client.hget(f"kvalet:-:turn:{turn.request.turn_id}", "next") or 0)
            event = started() if number == 0 else delta(number)
            self.fenced(turn, calls.append_events(turn.lease, [event]))

    def end(self) -> None:
        if turn := self.some_lease():
            number = int(self.control.client.hget(f"kvalet:-:turn:{turn.request.turn_id}", "next") or 0)
            state = self.random.choice([TurnState.COMPLETED] * 4 + [TurnState.INCOMPLETE, TurnState.FAILED])
            if state is TurnState.FAILED:
                self.fenced(turn, calls.finish(turn.lease, [terminal(number, state)]))
            elif self.fenced(turn, calls.commit(turn.lease, entry(turn), [terminal(number, state)])):
                self.commits[turn.request.turn_id] += 1

    def lose(self) -> None:
        """A worker dies; or one only hangs until its leases run out. Either way it still believes in them."""
        worker_id = self.random.choice(WORKERS)
        if self.random.random() < 0.5:
            self.control.run(calls.end_worker_leases(worker_id))
            return
        for turn_id in self.control.client.smembers(f"kvalet:-:worker-leases:{worker_id}"):
            self.control.client.zadd("kvalet:-:leased", {turn_id: 1})
            self.control.client.hset(b"kvalet:-:turn:" + turn_id, "lease_until", 1)

    def give_back(self) -> None:
        if turn := self.some_lease():
            self.fenced(turn, calls.release(turn.lease))

    def cancel(self) -> None:
        self.run_once_equal(calls.cancel("local", self.some_turn()))

    def sweep(self) -> None:
        self.control.run(calls.sweep())

    def run_once_equal(self, call: ScriptCall[Any]) -> None:
        # A second cancel may find the end that the first one caused, so only the effect is compared, by the checks.
        self.control.run(call)

    def fenced(self, turn: ClaimedTurn, call: ScriptCall[Any]) -> bool:
        """Run a write; a stale one must be refused and leave no trace."""
        turn_id = turn.request.turn_id
        names = [f"kvalet:-:turn:{turn_id}", f"kvalet:-:stream:{turn_id}"]
        before = [self.control.client.dump(name) for name in names]
        is_newest = turn.lease.epoch == self.newest[turn_id]
        is_held = self.control.client.hget(names[0], "nonce") == turn.lease.nonce.encode()
        try:
            self.run(call)
        except (StaleLease, TurnEnded):
            assert not (is_newest and is_held)
            assert [self.control.client.dump(name) for name in names] == before
            return False
        repeated = call.script.name in ("finish", "release") and not is_held
        assert (is_newest and is_held) or repeated
        return not repeated

    def some_turn(self) -> str:
        return self.random.choice(self.accepted) if self.accepted else "none"

    def some_lease(self) -> ClaimedTurn | None:
        return self.random.choice(self.leases[-12:]) if self.leases else None

    def settle(self) -> None:
        """Healthy workers run what is left; nothing may stay behind."""
        for worker_id in WORKERS:
            self.control.run(calls.end_worker_leases(worker_id))
        for _ in range(4 * len(self.accepted) + 1):
            turn = self.claim(worker("healthy"))
            if turn is None:
                return
            complete(self.control, turn)
            self.commits[turn.request.turn_id] += 1
        raise AssertionError("turns are runnable without end")


@pytest.mark.parametrize("seed", range(6))
def test_turns_random_interleaving_commits_each_at_most_once_and_loses_none(
    control_server: ValkeyServer, seed: int
) -> None:
    story = Story(TurnControl(connect(control_server.url)), seed)
    for conversation in CONVERSATIONS:
        story.control.run(calls.create_conversation("local", conversation))
    for _ in range(NUM_OPERATIONS):
        story.step()
    story.settle()
    _check_turns(story)
    _check_conversations(story)
    _check_nothing_left(story)
    assert len(story.commits) > 20, "not exercised"
    assert max(story.newest.values()) > 2, "not exercised"


def _check_turns(story: Story) -> None:
    for turn_id in story.accepted:
        view = story.control.run(calls.get_turn("local", turn_id))
        assert view is not None and view.state.is_terminal, (turn_id, view)
        is_committed = view.state in (TurnState.COMPLETED, TurnState.INCOMPLETE)
        assert story.commits[turn_id] == is_committed, turn_id
        events = stream_events([
            [entry_id, [part for pair in fields.items() for part in pair]]
            for entry_id, fields in story.control.client.xrange(f"kvalet:-:stream:{turn_id}")
        ])  # fmt: skip
        assert [event.number for event in events] == list(range(len(events)))
        assert [event.kind for event in events].index("terminal") == len(events) - 1


def _check_conversations(story: Story) -> None:
    for conversation, turn_ids in story.in_conversation.items():
        entries = story.control.run(calls.conversation_entries("local", conversation))
        assert entries is not None
        assert [e.turn_id for e in entries] == [t for t in turn_ids if story.commits[t]]
        assert [e.parent_id for e in entries] == [None, *(e.turn_id for e in entries)][: len(entries)]


def _check_nothing_left(story: Story) -> None:
    client = story.control.client
    kept = ("turn:", "stream:", "claim:", "conversation", "control:", "open", "service-ms")
    left = [
        key for key in client.scan_iter("kvalet:-:*") if not key.decode().removeprefix("kvalet:-:").startswith(kept)
    ]
    assert left == []
    assert client.hgetall("kvalet:-:open") == {b"tiny": b"0"}
