"""`/v1/conversations`: named heads of branches, and the items in them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.auth import Principal
from gateway.body import read_object, read_optional_object
from gateway.errors import InvalidValue
from gateway.fields import Metadata, RequestModel, check_metadata, parse
from gateway.http import Gateway, gateway_of, new_id, no_such, path_id, principal_of
from gateway.items import input_items, item_list, message_item
from gateway.response_reply import item_id
from gateway.responses_request import InputItem, plain_item
from workers.turns.outcomes import ConversationView

router = APIRouter()

_MAX_NEW_ITEMS = 20


class ConversationBody(RequestModel):
    """Body of create and update."""

    metadata: Metadata | None = None
    items: list[InputItem] | None = None


class ItemsBody(RequestModel):
    """Body of adding items."""

    items: list[InputItem]


@router.post("/v1/conversations")
async def create_conversation(request: Request) -> Response:
    """Create a conversation, empty or with messages that its first turn takes up."""
    gateway = gateway_of(request)
    principal = principal_of(request)
    body = parse(ConversationBody, await read_optional_object(request, gateway.settings.max_body_bytes), {})
    check_metadata(body.metadata)
    messages = _messages(body.items or [])
    conversation_id = new_id("conv_")
    await gateway.turns.create_conversation(principal.tenant, conversation_id, dict(body.metadata or {}), messages)
    return JSONResponse(_object(await _conversation(gateway, principal, conversation_id)))


@router.get("/v1/conversations/{conversation_id}")
async def get_conversation(request: Request) -> Response:
    """A conversation's name and metadata."""
    return JSONResponse(_object(await _named(request)))


@router.post("/v1/conversations/{conversation_id}")
async def update_conversation(request: Request) -> Response:
    """Replace the metadata."""
    gateway = gateway_of(request)
    principal = principal_of(request)
    body, _ = await read_object(request, gateway.settings.max_body_bytes)
    parsed = parse(ConversationBody, body, {})
    if parsed.items is not None:
        raise InvalidValue("items", "'items' are added under /items")
    check_metadata(parsed.metadata)
    conversation = await _named(request)
    metadata = dict(parsed.metadata or {})
    if not await gateway.turns.update_conversation(principal.tenant, conversation.conversation_id, metadata):
        raise no_such("Conversation", conversation.conversation_id)
    return JSONResponse({**_object(conversation), "metadata": metadata})


@router.delete("/v1/conversations/{conversation_id}")
async def delete_conversation(request: Request) -> Response:
    """Delete the name; responses in it stay."""
    gateway = gateway_of(request)
    principal = principal_of(request)
    conversation_id = path_id(request, "conversation_id", "conv_", "Conversation")
    if not await gateway.turns.delete_conversation(principal.tenant, conversation_id):
        raise no_such("Conversation", conversation_id)
    return JSONResponse({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@router.get("/v1/conversations/{conversation_id}/items")
async def list_items(request: Request) -> Response:
    """Messages of the committed turns and those that wait for the next one."""
    conversation = await _named(request)
    return JSONResponse(item_list(request, await _items(request, conversation), default_order="desc"))


@router.post("/v1/conversations/{conversation_id}/items")
async def add_items(request: Request) -> Response:
    """Add messages by hand; the next turn takes them up."""
    gateway = gateway_of(request)
    principal = principal_of(request)
    body, _ = await read_object(request, gateway.settings.max_body_bytes)
    messages = _messages(parse(ItemsBody, body, {}).items)
    if not messages:
        raise InvalidValue("items", "'items' is empty")
    conversation = await _named(request)
    pending = await gateway.turns.add_messages(principal.tenant, conversation.conversation_id, messages)
    if pending is None:
        raise no_such("Conversation", conversation.conversation_id)
    added = _pending_items(conversation, pending)[-len(messages) :]
    return JSONResponse(item_list(request, added, default_order="asc"))


@router.get("/v1/conversations/{conversation_id}/items/{item_id}")
async def get_item(request: Request) -> Response:
    """One item."""
    wanted = path_id(request, "item_id", "msg_", "Item")
    for item in await _items(request, await _named(request)):
        if item["id"] == wanted:
            return JSONResponse(item)
    raise no_such("Item", wanted)


async def _named(request: Request) -> ConversationView:
    conversation_id = path_id(request, "conversation_id", "conv_", "Conversation")
    return await _conversation(gateway_of(request), principal_of(request), conversation_id)


async def _conversation(gateway: Gateway, principal: Principal, conversation_id: str) -> ConversationView:
    conversation = await gateway.turns.conversation(principal.tenant, conversation_id)
    if conversation is None:
        raise no_such("Conversation", conversation_id)
    return conversation


async def _items(request: Request, conversation: ConversationView) -> list[dict[str, Any]]:
    entries = await gateway_of(request).turns.conversation_entries(conversation.tenant, conversation.conversation_id)
    items: list[dict[str, Any]] = []
    for entry in entries:
        items.extend(input_items(entry.turn_id, entry.messages))
        items.append(message_item(item_id(entry.turn_id), {"role": "assistant", "content": entry.output_text}))
    return items + _pending_items(conversation, conversation.pending)


def _pending_items(conversation: ConversationView, pending: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    return input_items(f"{conversation.conversation_id}-{conversation.num_turns}", pending)


def _messages(items: list[InputItem]) -> tuple[dict[str, Any], ...]:
    if len(items) > _MAX_NEW_ITEMS:
        raise InvalidValue("items", f"'items' has {len(items)} entries, the limit is {_MAX_NEW_ITEMS}")
    return tuple(plain_item(item, f"items[{index}]") for index, item in enumerate(items))


def _object(conversation: ConversationView) -> dict[str, Any]:
    return {
        "id": conversation.conversation_id,
        "object": "conversation",
        "created_at": int(conversation.created_at),
        "metadata": conversation.metadata,
    }
