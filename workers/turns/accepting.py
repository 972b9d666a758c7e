"""accept: one call writes the turn, its idempotency key and its place in its branch, or refuses and writes nothing."""

from __future__ import annotations

import hashlib
from typing import Any

from snapshot_store.keys import transcript_key
from workers.turns.codec import pack_request
from workers.turns.keys import tenant_key
from workers.turns.outcomes import AcceptKind, AcceptLimits, AcceptOutcome
from workers.turns.records import QueueMessage, TurnRequest
from workers.turns.replies import dispatch, text
from workers.turns.script import ScriptCall, load_script


def accept(
    request: TurnRequest,
    limits: AcceptLimits,
    *,
    idempotency_key: str | None = None,
    body_digest: bytes = b"",
    message: QueueMessage | None = None,
) -> ScriptCall[AcceptOutcome]:
    """Accept a turn into its branch.

    The branch is the conversation, or one that this turn opens. A turn whose parent (parent_id) is open waits for it;
    in a conversation a turn waits for those accepted before it. idempotency_key is the client's own, bound to
    `body_digest` (any hash of the body) and to the API key of the request; while its turn is open or has completed it
    answers EXISTING, another body KEY_CONFLICT; after failed, cancelled or expired a new turn starts.
    message: pushed to the turn's queue in the same step if the turn is runnable; without it the caller sends the
    outcome's dispatch.
    Repeating the call with the same turn_id answers as the first time. Raises BadTurnData, BadKeyPart.
    """
    idempotency = ""
    if idempotency_key is not None:
        scoped = f"{request.key_id}\0{idempotency_key}".encode()
        idempotency = tenant_key(request.tenant, "idempotency", hashlib.sha256(scoped).hexdigest())
    transcript_key(request.tenant, request.turn_id)  # the commit's key must be possible before the turn is accepted
    return ScriptCall(
        script=load_script("accept"),
        keys=(),
        args=(
            request.turn_id, request.tenant, request.model, pack_request(request),
            request.parent_id or "", request.conversation_id or "",
            int(request.created_at), _milliseconds(request.deadline), request.priority, request.worker or "",
            int(request.store), str(request.scope), idempotency, body_digest,
            limits.max_open_per_model, limits.max_open_per_tenant, str(limits.memory_fraction),
            limits.idempotency_ttl_s, limits.stream_ttl_s, limits.retention_s,
            message.head if message else b"", message.tail if message else b"",
        ),
        parse=_parse,
        durable=request.durability == "host",
    )  # fmt: skip


def _milliseconds(seconds: float | None) -> int:
    return 0 if seconds is None else int(seconds * 1000)


def _parse(reply: Any) -> AcceptOutcome:
    kind, turn_id, sends, retry_after_s = reply
    return AcceptOutcome(
        kind=AcceptKind(text(kind)),
        turn_id=text(turn_id),
        dispatch=dispatch(sends[0]) if sends else None,
        retry_after_s=int(retry_after_s),
    )
