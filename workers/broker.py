"""kombu's Redis transport, made to outlive queue entries that are no messages.

kombu parses an entry before any consumer sees it, and what cannot be parsed ends the process. Here such an entry
becomes a message of a content type that nobody accepts, so that it is kept as a dead letter like any other.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import json
import uuid
from typing import Any

from kombu.transport import TRANSPORT_ALIASES
from kombu.transport.redis import Transport

UNREADABLE = "application/x-kvalet-unreadable"
_redis_transport: Any = importlib.import_module(Transport.__module__)
_parse: Any = _redis_transport.loads


class TolerantTransport(Transport):
    """kombu's transport; entries that are no message envelopes arrive as unreadable ones."""

    def _deliver(self, message: Any, queue: str) -> None:
        deliver: Any = super()._deliver
        deliver(message if is_envelope(message) else unreadable(message, queue), queue)


def install() -> None:
    """Use this transport for redis URLs in this process. Idempotent."""
    _redis_transport.loads = _parse_or_keep
    for scheme in ("redis", "rediss"):
        TRANSPORT_ALIASES[scheme] = f"{__name__}:{TolerantTransport.__name__}"


def is_envelope(message: object) -> bool:
    """Whether kombu can make a message of it: a map with properties that name tag and route, and a readable body."""
    if not isinstance(message, dict):
        return False
    properties, body = message.get("properties"), message.get("body")
    if not isinstance(properties, dict) or not isinstance(properties.get("delivery_tag"), str):
        return False
    headers = message.get("headers")
    if not isinstance(properties.get("delivery_info"), dict) or not isinstance(headers, dict | None):
        return False
    return isinstance(body, str) and _is_readable(body, properties.get("body_encoding"))


def unreadable(entry: object, queue: str) -> dict[str, Any]:
    """An envelope around an entry that is none."""
    raw = entry if isinstance(entry, str) else json.dumps(entry, default=repr)
    return {
        "body": base64.b64encode(raw.encode("utf-8", "replace")).decode(),
        "content-type": UNREADABLE,
        "content-encoding": "binary",
        "headers": {},
        "properties": {
            "body_encoding": "base64",
            "delivery_tag": str(uuid.uuid4()),
            "delivery_info": {"exchange": "", "routing_key": queue},
            "delivery_mode": 2,
            "priority": 0,
        },
    }


def _parse_or_keep(text: str, **options: Any) -> Any:
    """kombu's parser; a text that is no JSON is returned as it is, and `_deliver` wraps it."""
    try:
        return _parse(text, **options)
    except (ValueError, RecursionError):
        return text


def _is_readable(body: str, encoding: object) -> bool:
    if encoding is None:
        return True
    try:
        base64.b64decode(body, validate=False)
    except (binascii.Error, ValueError):
        return False
    return encoding == "base64"
