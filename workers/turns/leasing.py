"""claim, renew, release and the end of a dead worker's leases."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from snapshot_store.transcript import CacheScope
from workers.turns.codec import unpack_ids, unpack_messages, unpack_request
from workers.turns.events import EventKind, TurnEvent, TurnState
from workers.turns.outcomes import Dispatch, EndReply, RenewReply
from workers.turns.records import ClaimedTurn, Lease
from workers.turns.replies import (
    dispatches,
    emitted_ids,
    fields_of,
    maybe_text,
    raise_refusal,
    stream_events,
    text,
)
from workers.turns.script import ScriptCall, load_script


@dataclass(frozen=True, slots=True)
class Claimant:
    """The worker that asks for a turn.

    models: names it serves. hot_branches: branches whose cells it holds, preferred within `affinity_wait_s`.
    lease_s: life of a lease that is not renewed. numerics: id of the numerics that it computes in.
    """

    worker_id: str
    boot_id: str
    models: tuple[str, ...]
    hot_branches: tuple[str, ...] = ()
    lease_s: float = 15.0
    affinity_wait_s: float = 0.5
    numerics: str = ""


def claim(turn_id: str, claimant: Claimant, *, nonce: str | None = None) -> ScriptCall[ClaimedTurn | None]:
    """Take the lease of this turn, or of another runnable one that goes before it; None when nothing is runnable.

    Order: priority (a turn that has waited a minute counts as the highest), the tenant served fewest tokens,
    affinity, deadline, age. A turn that names a worker is given to that worker only. `nonce` identifies the claim
    when it is repeated; drawn if not given.
    """
    nonce = nonce or secrets.token_hex(12)
    return ScriptCall(
        script=load_script("claim"),
        keys=(),
        args=(
            turn_id, nonce, claimant.worker_id, claimant.boot_id, int(claimant.lease_s * 1000),
            int(claimant.affinity_wait_s * 1000), claimant.numerics, len(claimant.models),
            *claimant.models, *claimant.hot_branches,
        ),
        parse=_parse_claim,
    )  # fmt: skip


def renew(leases: Sequence[Lease]) -> ScriptCall[RenewReply]:
    """Extend leases, by Redis time. Lost ones are named, not raised."""
    args: list[str | int] = []
    for lease in leases:
        args += (lease.turn_id, lease.epoch, lease.nonce)

    def parse(reply: Any) -> RenewReply:
        kept, lost, stops = reply
        return RenewReply(
            kept=frozenset(map(text, kept)),
            lost=frozenset(map(text, lost)),
            stop={text(turn): TurnState(text(state)) for turn, state in zip(stops[::2], stops[1::2], strict=True)},
        )

    return ScriptCall(load_script("renew"), (), tuple(args), parse)


def release(lease: Lease) -> ScriptCall[EndReply]:
    """Give a turn back voluntarily: it becomes runnable at once and no crash is counted.

    Repeating it is answered as the first time. Raises StaleLease, TurnEnded.
    """

    def parse(reply: Any) -> EndReply:
        status, detail = text(reply[0]), reply[1]
        if status != "ok":
            raise_refusal(lease, status, detail)
        return EndReply(dispatches(detail))

    return ScriptCall(load_script("release"), (), (lease.turn_id, lease.epoch, lease.nonce), parse)


def end_worker_leases(
    worker_id: str, *, boot_id: str | None = None, except_boot_id: str | None = None
) -> ScriptCall[tuple[Dispatch, ...]]:
    """End the leases of a worker process that has died (a crash is counted for each); returns messages to send.

    boot_id: only those of that process. except_boot_id: only those of earlier processes of that worker id.
    """
    return ScriptCall(
        load_script("end_worker_leases"), (), (worker_id, boot_id or "", except_boot_id or ""), dispatches
    )


def _parse_claim(reply: Any) -> ClaimedTurn | None:
    if reply is None:
        return None
    flat, entries = reply
    record = fields_of(flat)
    events = stream_events(entries)
    request = unpack_request(record["request"])
    pending = unpack_messages(record["pending"])
    runs = [
        (int(first), numerics) for first, _, numerics in (run.partition(":") for run in text(record["runs"]).split())
    ]
    request = replace(request, messages=(*pending, *request.messages), scope=CacheScope(text(record["scope"])))
    return ClaimedTurn(
        lease=Lease(
            turn_id=request.turn_id,
            branch=text(record["branch"]),
            epoch=int(record["epoch"]),
            nonce=text(record["nonce"]),
            worker_id=text(record["lease_worker"]),
        ),
        request=request,
        parent_id=maybe_text(record["parent"]),
        root_id=text(record["root"]),
        template_time=int(record["template_time"]),
        crashes=int(record["crashes"]),
        solo=record["lease_solo"] == b"1",
        prompt_ids=unpack_ids(record["prompt_ids"]) if record["prompt_ids"] else None,
        next_number=int(record["next"]),
        emitted_ids=emitted_ids(events),
        started=any(event.kind is EventKind.STARTED for event in events),
        earlier_numerics=tuple(dict.fromkeys(numerics for _, numerics in runs[:-1] if numerics)),
        emitted_numerics=_emitted_numerics(runs, events),
    )


def _emitted_numerics(runs: Sequence[tuple[int, str]], events: Sequence[TurnEvent]) -> tuple[str, ...]:
    """Numerics whose runs have put tokens into the stream. runs: first event number and numerics, in order."""
    ends = [first for first, _ in runs[1:]] + [math.inf]
    emitted = [
        numerics
        for (first, numerics), end in zip(runs, ends, strict=True)
        if numerics and any(event.token_ids and first <= event.number < end for event in events)
    ]
    return tuple(dict.fromkeys(emitted))
