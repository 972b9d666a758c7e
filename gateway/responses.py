"""`/v1/responses`: create, stream, run in the background, read, resume, cancel, delete."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.admission import admit_response
from gateway.auth import Principal
from gateway.body import read_object
from gateway.delivery import Delivery, cancel_all, leave_running
from gateway.errors import ApiError, InvalidValue
from gateway.feed import Arrival
from gateway.http import (
    Gateway,
    check_capacity,
    gateway_of,
    idempotency_of,
    no_such,
    path_id,
    principal_of,
    query_flag,
    query_int,
)
from gateway.items import input_items, item_list
from gateway.response_reply import ResponseStream, raise_if_failed, response_object
from gateway.responses_request import parse_responses
from gateway.sse import Frame, encode
from workers.turns.events import EventKind, TurnEvent
from workers.turns.outcomes import TurnView

router = APIRouter()

_CANCEL_WAIT_S = 3.0
_POLL_S = 0.05


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    """Run one response: as one object, as a stream, or in the background (202 and an object to poll)."""
    gateway = gateway_of(request)
    principal = principal_of(request)
    body, raw = await read_object(request, gateway.settings.max_body_bytes)
    asked = parse_responses(body, gateway.settings.max_messages)
    if asked.stream or not asked.background:
        check_capacity(gateway)
    key = idempotency_of(request, raw)
    after = _last_event_id(request)
    turn_id = await admit_response(gateway, principal, asked, key)
    turn = await _turn(gateway, principal, turn_id)
    if asked.background and not asked.stream:
        return JSONResponse(response_object(turn), status_code=202)
    if turn.state.is_terminal and not asked.stream:
        return JSONResponse(response_object(turn))
    keep = asked.store or key is not None
    abandon = leave_running if keep else cancel_all(gateway, principal.tenant, [turn_id])
    folder = ResponseFolder(turn, after)
    delivery = Delivery(gateway, principal.tenant, [turn_id], turn.model, folder, abandon)
    if asked.stream:
        return await delivery.stream(request)
    return await delivery.collect(request) or JSONResponse(folder.response())


@router.get("/v1/responses/{response_id}")
async def get_response(request: Request) -> Response:
    """A response as it stands, or (`stream=true`) its events after `starting_after`."""
    gateway = gateway_of(request)
    principal = principal_of(request)
    turn = await _turn(gateway, principal, path_id(request, "response_id", "resp_", "Response"))
    if not query_flag(request, "stream"):
        return JSONResponse(response_object(turn))
    check_capacity(gateway)
    after = query_int(request, "starting_after", 0, 10**9)
    if after is None:
        after = _last_event_id(request)
    folder = ResponseFolder(turn, after, may_refuse=False)
    delivery = Delivery(gateway, principal.tenant, [turn.turn_id], turn.model, folder, leave_running)
    return await delivery.stream(request)


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request) -> Response:
    """Ask for the end of a response; answers with the object once it has ended, or as it stands after a short wait."""
    gateway = gateway_of(request)
    principal = principal_of(request)
    turn_id = path_id(request, "response_id", "resp_", "Response")
    turn = await _turn(gateway, principal, turn_id)
    if not turn.state.is_terminal:
        await gateway.turns.cancel(principal.tenant, turn_id)
        give_up_at = asyncio.get_running_loop().time() + _CANCEL_WAIT_S
        turn = await _turn(gateway, principal, turn_id)
        while not turn.state.is_terminal and asyncio.get_running_loop().time() < give_up_at:
            await asyncio.sleep(_POLL_S)
            turn = await _turn(gateway, principal, turn_id)
    return JSONResponse(response_object(turn))


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request) -> Response:
    """Hide a response. Turns that continue it keep working."""
    gateway = gateway_of(request)
    principal = principal_of(request)
    turn_id = path_id(request, "response_id", "resp_", "Response")
    if not await gateway.turns.hide(principal.tenant, turn_id):
        raise no_such("Response", turn_id)
    return JSONResponse({"id": turn_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(request: Request) -> Response:
    """The messages that the request itself brought."""
    gateway = gateway_of(request)
    principal = principal_of(request)
    turn = await _turn(gateway, principal, path_id(request, "response_id", "resp_", "Response"))
    return JSONResponse(item_list(request, input_items(turn.turn_id, turn.request.messages), default_order="desc"))


class ResponseFolder:
    """Stream events after a sequence number, and the final object.

    may_refuse: a turn that fails before it said anything is an HTTP error (create), else the stream tells (resume).
    """

    def __init__(self, turn: TurnView, after: int | None, may_refuse: bool = True) -> None:
        self._stream = ResponseStream(turn)
        self._after = -1 if after is None else after
        self._may_refuse = may_refuse
        self._terminal: TurnEvent | None = None
        self._final: dict[str, Any] = {}

    @property
    def is_done(self) -> bool:
        """Whether the turn has ended."""
        return self._terminal is not None

    def add(self, arrival: Arrival) -> list[Frame]:
        """New stream events of one turn event. Raises ApiError for a turn that failed before it said anything."""
        event = arrival.event
        if event.kind is EventKind.TERMINAL and self._may_refuse:
            raise_if_failed(event)
        self._may_refuse = False
        frames = self._stream.add(event)
        if event.kind is EventKind.TERMINAL:
            self._terminal = event
            self._final = frames[-1].data["response"]
        return [frame for frame in frames if frame.data["sequence_number"] > self._after]

    def response(self) -> dict[str, Any]:
        """The response object of the ended turn. Raises the ApiError of one that failed."""
        if self._terminal is None:
            raise ApiError("the response is not complete", code="server_error")
        raise_if_failed(self._terminal)
        return self._final

    def closing(self) -> list[bytes]:
        """Nothing: the last event is the end."""
        return []

    def fault(self, error: ApiError) -> list[bytes]:
        """An error event."""
        return [encode(self._stream.fault(error.code, error.message))]


async def _turn(gateway: Gateway, principal: Principal, turn_id: str) -> TurnView:
    turn = await gateway.turns.view(principal.tenant, turn_id)
    if turn is None:
        raise no_such("Response", turn_id)
    return turn


def _last_event_id(request: Request) -> int | None:
    value = request.headers.get("last-event-id")
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 10):
        raise InvalidValue("Last-Event-ID", f"'Last-Event-ID' = {value[:80]!r} is no id of this stream")
    return int(value)
