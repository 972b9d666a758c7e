"""Messages of turns as items, and pages of item lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request

from gateway.errors import InvalidValue, UnsupportedField
from gateway.http import no_such, query_int
from gateway.response_reply import item_id
from workers.prompt.history import is_marked

_DEFAULT_LIMIT = 20
_MAX_LIMIT = 100


def input_items(owner_id: str, messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as items, oldest first; instructions are none. owner_id: the turn or conversation that brought them."""
    stem = item_id(owner_id)
    shown = [message for message in messages if not is_marked(message)]
    return [message_item(f"{stem}_{index}", message) for index, message in enumerate(shown)]


def message_item(message_id: str, message: dict[str, Any]) -> dict[str, Any]:
    """One message as an item."""
    role, text = str(message["role"]), str(message["content"])
    if role == "assistant":
        content = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    else:
        content = {"type": "input_text", "text": text}
    return {"type": "message", "id": message_id, "status": "completed", "role": role, "content": [content]}


def item_list(request: Request, items: Sequence[dict[str, Any]], default_order: str) -> dict[str, Any]:
    """The page of `items` (oldest first) that the query asks for with `order`, `after` and `limit`.

    Raises InvalidRequest for a malformed parameter, NotFound for an `after` that is not in the list.
    """
    limit = query_int(request, "limit", 1, _MAX_LIMIT) or _DEFAULT_LIMIT
    order = request.query_params.get("order", default_order)
    if order not in ("asc", "desc"):
        raise InvalidValue("order", f"'order' = {order[:40]!r} is neither asc nor desc")
    include = request.query_params.getlist("include") or request.query_params.getlist("include[]")
    if include:
        raise UnsupportedField("include", include, "leave it out")
    ordered = list(items) if order == "asc" else list(items)[::-1]
    after = request.query_params.get("after")
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise no_such("Item", after, "after")
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > limit,
    }
