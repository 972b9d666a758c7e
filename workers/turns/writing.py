"""What a lease holder writes: frozen prompt, events, and the end. Every script checks epoch and nonce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from snapshot_store.keys import transcript_key
from snapshot_store.transcript import TranscriptEntry
from snapshot_store.transcript_codec import encode_entry
from workers.turns.codec import pack_events, pack_ids, unpack_ids
from workers.turns.errors import BadTurnData
from workers.turns.events import EventKind, TurnEvent, TurnState
from workers.turns.keys import tenant_key
from workers.turns.outcomes import AppendReply, EndReply, FrozenPrompt
from workers.turns.records import Lease
from workers.turns.replies import dispatches, maybe_text, raise_refusal, text
from workers.turns.script import ScriptCall, load_script

COMMITTED_STATES = (TurnState.COMPLETED, TurnState.INCOMPLETE)


def freeze_prompt(
    lease: Lease, prompt_ids: Sequence[int], *, parent_id: str | None, root_id: str, template_time: int
) -> ScriptCall[FrozenPrompt]:
    """Fix the prompt unless an earlier run has; returns the one that is fixed.

    parent_id, root_id and template_time are those of the claim, or for a stateless turn what its history found.
    Raises StaleLease, TurnEnded.
    """

    def parse(reply: Any) -> FrozenPrompt:
        status, detail = text(reply[0]), reply[1]
        if status != "ok":
            raise_refusal(lease, status, detail)
        ids, parent, root, time = detail
        return FrozenPrompt(unpack_ids(ids), maybe_text(parent), text(root), int(time))

    args = (*_fence(lease), pack_ids(prompt_ids), parent_id or "", root_id, template_time)
    return ScriptCall(load_script("freeze_prompt"), (), args, parse)


def append_events(lease: Lease, events: Sequence[TurnEvent]) -> ScriptCall[AppendReply]:
    """Append consecutive events as one stream entry; only the next number is accepted.

    An identical repeat (same events in the same call) is answered as the first time. Terminal events go with commit
    or finish. Raises StaleLease, TurnEnded, StreamConflict, BadTurnData.
    """
    packed = pack_events(events)
    if any(event.kind is EventKind.TERMINAL for event in events):
        raise BadTurnData("events", "terminal", "no terminal event (commit and finish carry it)")

    def parse(reply: Any) -> AppendReply:
        status, detail = text(reply[0]), reply[1]
        if status != "ok":
            raise_refusal(lease, status, detail)
        stop = maybe_text(detail[1])
        return AppendReply(int(detail[0]), TurnState(stop) if stop else None)

    args = (*_fence(lease), events[0].number, len(events), packed)
    return ScriptCall(load_script("append_events"), (), args, parse)


def commit(
    lease: Lease,
    entry: TranscriptEntry,
    events: Sequence[TurnEvent],
    *,
    served_tokens: int = 0,
    history_digest: bytes | None = None,
    ancestors: Sequence[str] = (),
    durable: bool = False,
) -> ScriptCall[EndReply]:
    """Commit the turn: transcript entry, head, terminal event and closed record in one step.

    events: the last deltas, if any, then the terminal event, whose state is completed or incomplete. served_tokens:
    what fairness counts for the tenant. history_digest: of the whole history including this reply (`history.digest`),
    for stateless turns. ancestors: earlier turns of the path, whose transcripts then live at least as long as this
    one. A repeat by the same lease is answered as the first time.
    Raises StaleLease, TurnEnded, StreamConflict, ParentMoved, BadTurnData.
    """
    state = _terminal_state(events)
    if state not in COMMITTED_STATES:
        raise BadTurnData("state", str(state), "completed or incomplete")
    if entry.turn_id != lease.turn_id:
        raise BadTurnData("entry.turn_id", entry.turn_id, f"the lease's turn {lease.turn_id}")
    history = tenant_key(entry.tenant, "history", history_digest.hex()) if history_digest else ""
    keys = tuple(transcript_key(entry.tenant, turn_id) for turn_id in (lease.turn_id, *ancestors))
    args = (
        *_fence(lease), events[0].number, len(events), pack_events(events), str(state), served_tokens,
        encode_entry(entry), entry.parent_id or "", entry.root_id, entry.template_time, history,
    )  # fmt: skip
    return ScriptCall(load_script("finish"), keys, args, _parse_end(lease), durable)


def finish(lease: Lease, events: Sequence[TurnEvent], *, served_tokens: int = 0) -> ScriptCall[EndReply]:
    """End the turn as failed, cancelled or expired (the terminal event says which); the head stays.

    A repeat by the same lease is answered as the first time. Raises StaleLease, TurnEnded, StreamConflict, BadTurnData.
    """
    state = _terminal_state(events)
    if state in COMMITTED_STATES or not state.is_terminal:
        raise BadTurnData("state", str(state), "failed, cancelled or expired")
    args = (
        *_fence(lease), events[0].number, len(events), pack_events(events), str(state), served_tokens,
        b"", "", "", 0, "",
    )  # fmt: skip
    return ScriptCall(load_script("finish"), (), args, _parse_end(lease))


def _fence(lease: Lease) -> tuple[str, int, str]:
    return lease.turn_id, lease.epoch, lease.nonce


def _terminal_state(events: Sequence[TurnEvent]) -> TurnState:
    kinds = [event.kind for event in events]
    if kinds.count(EventKind.TERMINAL) != 1 or kinds[-1] is not EventKind.TERMINAL or events[-1].state is None:
        raise BadTurnData("events", [str(kind) for kind in kinds], "one terminal event with a state, at the end")
    return events[-1].state


def _parse_end(lease: Lease) -> Any:
    def parse(reply: Any) -> EndReply:
        status, detail = text(reply[0]), reply[1]
        if status != "ok":
            raise_refusal(lease, status, detail)
        return EndReply(dispatches(detail))

    return parse
