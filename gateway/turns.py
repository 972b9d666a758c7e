"""Turn control as the gateway uses it: one asyncio client and one event hub per process.

Maps every outcome and fault of `workers.turns` to the HTTP errors of this package.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from redis.exceptions import RedisError

from gateway.errors import ApiError, Conflict, InvalidRequest, NotFound, Overloaded, TurnFault, Unavailable
from gateway.settings import GatewaySettings
from snapshot_store.transcript import TranscriptEntry
from workers.dispatch import TurnMessages, dispatch_app, queue_of
from workers.turns import calls
from workers.turns.control import AsyncTurnControl, Patience, connect_async
from workers.turns.errors import BadTurnData, ControlFull, ControlUnavailable, DurabilityLost, TurnControlError
from workers.turns.events import EventKind, TurnEvent
from workers.turns.hub import AsyncEventHub
from workers.turns.keys import stream_key
from workers.turns.outcomes import (
    AcceptKind,
    AcceptLimits,
    AcceptOutcome,
    CancelKind,
    ConversationView,
    Dispatch,
    TurnView,
)
from workers.turns.records import TurnRequest
from workers.turns.script import ScriptCall

logger = logging.getLogger(__name__)
T = TypeVar("T")

_QUIET_S = 2.0
_FULL_RETRY_S = 5


@dataclass(frozen=True, slots=True)
class Idempotency:
    """A client's key and the digest of the body that it is bound to."""

    key: str
    body_digest: bytes


@dataclass(frozen=True, slots=True)
class Submitted:
    """The turn that a request became, or the one that its idempotency key already named. Unix seconds."""

    turn_id: str
    created_at: float


class TurnService:
    """Accepts, reads, follows and ends turns. Every operation raises Unavailable when control does not answer."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._limits = AcceptLimits(
            max_open_per_model=settings.max_queued,
            max_open_per_tenant=settings.max_queued_per_tenant,
            stream_ttl_s=settings.stream_ttl_s,
            retention_s=settings.retention_s,
        )
        self._client = connect_async(settings.control_url, timeout_s=settings.control_timeout_s)
        self._control = AsyncTurnControl(self._client, Patience(outage_s=settings.control_timeout_s))
        self._hub = AsyncEventHub(settings.control_url)
        self._messages = TurnMessages(dispatch_app(settings.control_url))
        self._background: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Start the event reader. Returns even when control is out of reach; readiness tells."""
        await self._hub.__aenter__()

    async def close(self) -> None:
        """Finish pending sends and cancels, end the reader, close connections."""
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._hub.__aexit__(None, None, None)
        await self._client.aclose()

    @property
    def control(self) -> AsyncTurnControl:
        """The control client, for other readers of this process."""
        return self._control

    @property
    def num_followed(self) -> int:
        """Turns whose events are read now."""
        return self._hub.num_subscriptions

    async def submit(self, request: TurnRequest, idempotency: Idempotency | None) -> Submitted:
        """Accept a turn once, together with its message; the sweeper covers a message that is lost.

        Raises Overloaded (queue full), Conflict (the key was used with another body), NotFound (no such
        parent or conversation in the tenant), InvalidRequest (a parent that failed, a worker that is not there),
        Unavailable.
        """
        outcome = await self.run(self._accept(request, idempotency))
        _raise_refusal(outcome, request)
        if outcome.kind is AcceptKind.EXISTING and outcome.turn_id != request.turn_id:
            return await self._existing(request.tenant, outcome.turn_id)
        return Submitted(outcome.turn_id, request.created_at)

    async def view(self, tenant: str, turn_id: str) -> TurnView | None:
        """The turn, None for an unknown, hidden, expired or foreign id."""
        return await self.run(calls.get_turn(tenant, turn_id))

    async def cancel(self, tenant: str, turn_id: str) -> None:
        """Ask for the end of a turn; no effect on one that has ended or is unknown."""
        outcome = await self.run(calls.cancel(tenant, turn_id))
        for dispatch in outcome.dispatches:
            self._send(dispatch)

    def cancel_soon(self, tenant: str, turn_id: str) -> None:
        """Cancel in the background, best effort: of a turn that nobody waits for any more."""
        self._spawn(self._cancel_quietly(tenant, turn_id))

    async def hide(self, tenant: str, turn_id: str) -> bool:
        """Delete a turn as far as the tenant sees, ending it when it is open; False when there is none."""
        outcome = await self.run(calls.delete_response(tenant, turn_id))
        for dispatch in outcome.dispatches:
            self._send(dispatch)
        return outcome.kind is not CancelKind.NOT_FOUND

    async def events(self, tenant: str, turn_id: str) -> AsyncIterator[TurnEvent]:
        """All events of a turn from number 0 through the terminal one, waiting for those to come.

        Raises NotFound when the stream has expired, Unavailable after an outage of some seconds.
        """
        async with self._hub.subscribe(turn_id) as subscription:
            has_events = False
            while True:
                try:
                    events = await subscription.next(_QUIET_S)
                except TurnControlError as error:
                    raise _api_error(error) from error
                for event in events:
                    yield event
                    if event.kind is EventKind.TERMINAL:
                        return
                has_events = has_events or bool(events)
                if not has_events:
                    await self._check_stream(tenant, turn_id)

    async def create_conversation(
        self, tenant: str, conversation_id: str, metadata: dict[str, str], messages: Sequence[dict[str, Any]]
    ) -> None:
        """Write a new conversation. messages: what its first turn takes up."""
        await self.run(
            calls.create_conversation(
                tenant,
                conversation_id,
                metadata=metadata,
                messages=messages,
                retention_s=self._settings.retention_s,
            )
        )

    async def conversation(self, tenant: str, conversation_id: str) -> ConversationView | None:
        """The conversation, None for an unknown, deleted or foreign id."""
        return await self.run(calls.get_conversation(tenant, conversation_id))

    async def update_conversation(self, tenant: str, conversation_id: str, metadata: dict[str, str]) -> bool:
        """Replace the metadata; False when there is no such conversation."""
        return await self.run(calls.update_conversation(tenant, conversation_id, metadata)) is not None

    async def add_messages(
        self, tenant: str, conversation_id: str, messages: Sequence[dict[str, Any]]
    ) -> tuple[dict[str, Any], ...] | None:
        """Add messages that the next turn takes up; all that wait now, None when there is no such conversation."""
        call = calls.add_messages(tenant, conversation_id, messages, change_id=secrets.token_hex(12))
        view = await self.run(call)
        return None if view is None else view.pending

    async def delete_conversation(self, tenant: str, conversation_id: str) -> bool:
        """Delete the name; its turns stay. False when there is none."""
        return await self.run(calls.delete_conversation(tenant, conversation_id))

    async def conversation_entries(self, tenant: str, conversation_id: str) -> tuple[TranscriptEntry, ...]:
        """Committed turns of a conversation, oldest first."""
        return await self.run(calls.conversation_entries(tenant, conversation_id)) or ()

    async def run(self, call: ScriptCall[T]) -> T:
        """Run one operation of turn control. Raises ApiError for every fault."""
        try:
            return await self._control.run(call)
        except TurnControlError as error:
            raise _api_error(error) from error

    def _accept(self, request: TurnRequest, idempotency: Idempotency | None) -> ScriptCall[AcceptOutcome]:
        try:
            return calls.accept(
                request,
                self._limits,
                idempotency_key=idempotency.key if idempotency else None,
                body_digest=idempotency.body_digest if idempotency else b"",
                message=self._messages.of(request.turn_id),
            )
        except BadTurnData as error:
            raise InvalidRequest(f"this request cannot be stored: {error.limit}", code="invalid_value") from error

    async def _existing(self, tenant: str, turn_id: str) -> Submitted:
        turn = await self.view(tenant, turn_id)
        if turn is None:
            raise Conflict(
                "the result under this idempotency key has expired; use another key", code="idempotency_result_expired"
            )
        return Submitted(turn_id, turn.created_at)

    async def _check_stream(self, tenant: str, turn_id: str) -> None:
        """Raise NotFound for an ended turn whose stream is gone: no event will come."""
        state = await self.run(calls.get_turn_state(tenant, turn_id))
        if state is not None and not state.is_terminal:
            return
        try:
            is_there = await self._client.exists(stream_key(turn_id))
        except RedisError as error:
            raise Unavailable("turn control is out of reach for now", code="control_unavailable") from error
        if not is_there:
            raise NotFound("the event stream of this response has expired", code="stream_expired")

    def _send(self, dispatch: Dispatch) -> None:
        self._spawn(self._send_quietly(dispatch))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _cancel_quietly(self, tenant: str, turn_id: str) -> None:
        try:
            await self.cancel(tenant, turn_id)
        except ApiError as error:
            logger.warning("turn %s was not cancelled after its client left: %s", turn_id, error)

    async def _send_quietly(self, dispatch: Dispatch) -> None:
        queue = queue_of(dispatch)
        try:
            await self._control.run(calls.push_message(queue, self._messages.of(dispatch.turn_id).to(queue)))
        except (TurnControlError, OSError) as error:
            logger.warning("the message of turn %s was not sent, a worker's sweep will: %s", dispatch.turn_id, error)


def _raise_refusal(outcome: AcceptOutcome, request: TurnRequest) -> None:
    kind = outcome.kind
    if kind is AcceptKind.QUEUE_FULL:
        raise Overloaded("the queue is full; try again later", outcome.retry_after_s, code="queue_full")
    if kind is AcceptKind.MEMORY_FULL:
        raise _control_full(outcome.retry_after_s)
    if kind is AcceptKind.KEY_CONFLICT:
        raise Conflict(
            "this idempotency key was used with another request body",
            code="idempotency_key_conflict",
            param="Idempotency-Key",
        )
    if kind is AcceptKind.PARENT_NOT_FOUND:
        raise NotFound(
            f"Previous response with id '{(request.parent_id or '')[:80]}' not found",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    if kind is AcceptKind.PARENT_FAILED:
        raise InvalidRequest(
            f"Previous response with id '{(request.parent_id or '')[:80]}' did not complete",
            code="parent_failed",
            param="previous_response_id",
        )
    if kind is AcceptKind.WORKER_NOT_FOUND:
        raise InvalidRequest(
            f"'kvalet.worker' = '{request.worker}' names no live worker of model '{request.model[:80]}'; "
            "GET /v1/workers lists them",
            code="worker_not_found",
            param="kvalet.worker",
        )
    if kind is AcceptKind.CONVERSATION_NOT_FOUND:
        raise NotFound(
            f"Conversation with id '{(request.conversation_id or '')[:80]}' not found",
            code="conversation_not_found",
            param="conversation",
        )


def _control_full(retry_after_s: int) -> Unavailable:
    return Unavailable("control is short of memory; try again later", code="control_full", retry_after_s=retry_after_s)


def _api_error(error: TurnControlError) -> ApiError:
    if isinstance(error, ControlFull):
        return _control_full(_FULL_RETRY_S)
    if isinstance(error, ControlUnavailable | DurabilityLost):
        return Unavailable("turn control is out of reach for now", code="control_unavailable")
    if isinstance(error, BadTurnData):
        logger.error("damaged data on control: %s", error)
        return TurnFault("what control holds of this turn is damaged", code="turn_damaged")
    logger.error("turn control refused an operation: %s", error)
    return ApiError("internal error", code="server_error")
