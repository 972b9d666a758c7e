"""`POST /v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.admission import admit_chat
from gateway.body import read_object
from gateway.chat_reply import ChatReply, ResumePoint
from gateway.chat_request import parse_chat
from gateway.delivery import Delivery, cancel_all, leave_running
from gateway.errors import ApiError
from gateway.feed import Arrival
from gateway.http import check_capacity, gateway_of, idempotency_of, principal_of
from gateway.sse import DONE, Frame, encode

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Run one chat completion, as one object or as a stream."""
    gateway = gateway_of(request)
    principal = principal_of(request)
    check_capacity(gateway)
    body, raw = await read_object(request, gateway.settings.max_body_bytes)
    chat = parse_chat(body, gateway.settings.max_choices, gateway.settings.max_messages)
    key = idempotency_of(request, raw)
    resume = ResumePoint(request.headers.get("last-event-id"), chat.num_choices)
    turn_ids, created_at = await admit_chat(gateway, principal, chat, key)
    reply = ChatReply(turn_ids, chat.body.model, int(created_at), chat.logprobs is not None, chat.include_usage)
    folder = ChatFolder(reply, resume)
    abandon = leave_running if key else cancel_all(gateway, principal.tenant, turn_ids)
    delivery = Delivery(gateway, principal.tenant, turn_ids, chat.body.model, folder, abandon)
    if chat.stream:
        return await delivery.stream(request)
    return await delivery.collect(request) or JSONResponse(reply.completion())


class ChatFolder:
    """Chunks that the client does not have yet, usage and [DONE]."""

    def __init__(self, reply: ChatReply, resume: ResumePoint) -> None:
        self._reply = reply
        self._resume = resume

    @property
    def is_done(self) -> bool:
        """Whether every choice has ended."""
        return self._reply.is_done

    def add(self, arrival: Arrival) -> list[Frame]:
        """New chunks of one event. Raises ApiError for a choice without a reply."""
        frames = self._reply.add(arrival.index, arrival.event)
        return [frame for frame in frames if self._resume.is_new(frame, arrival.index)]

    def closing(self) -> list[bytes]:
        """The usage chunk, if asked for, and [DONE]."""
        usage = self._reply.usage_chunk()
        return [encode(usage), DONE] if usage else [DONE]

    def fault(self, error: ApiError) -> list[bytes]:
        """One error frame and [DONE]."""
        return [encode(Frame(error.body())), DONE]
