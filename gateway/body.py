"""Request bodies: bounded, JSON in the strict sense, one meaning for every reader."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import Request

from gateway.errors import BodyTooLarge, BodyTooSlow, InvalidRequest, WrongMediaType

_IN_THREAD_BYTES = 256 << 10
_MAX_DEPTH = 64
_BODY_TIMEOUT_S = 60.0


async def read_object(request: Request, limit: int) -> tuple[dict[str, Any], bytes]:
    """Read a JSON object of at most `limit` bytes; also returns the raw bytes (the idempotency key binds to them).

    Raises WrongMediaType, BodyTooLarge, BodyTooSlow, InvalidRequest.
    """
    _check_media_type(request.headers.get("content-type"))
    raw = await _read_bounded(request, limit)
    if len(raw) > _IN_THREAD_BYTES:
        return await asyncio.to_thread(parse_object, raw), raw
    return parse_object(raw), raw


async def read_optional_object(request: Request, limit: int) -> dict[str, Any]:
    """Like `read_object`, for endpoints whose body may be left out."""
    raw = await _read_bounded(request, limit)
    if not raw:
        return {}
    _check_media_type(request.headers.get("content-type"))
    return parse_object(raw)


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse one JSON object; duplicate keys, NaN and Infinity, lone surrogates and deep nesting are refused."""
    try:
        value = json.loads(raw, object_pairs_hook=_unique_pairs, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InvalidRequest("the body is not UTF-8", code="invalid_json") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from error
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {_short(error)}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    _check_values(value)
    return value


def _check_media_type(content_type: str | None) -> None:
    media_type = (content_type or "").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise WrongMediaType(
            f"Content-Type {media_type or '(none)'} is not supported; send application/json",
            code="unsupported_media_type",
        )


async def _read_bounded(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise BodyTooLarge(limit)
    parts: list[bytes] = []
    total = 0
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for part in request.stream():
                total += len(part)
                if total > limit:
                    raise BodyTooLarge(limit)
                parts.append(part)
    except TimeoutError as error:
        raise BodyTooSlow(_BODY_TIMEOUT_S) from error
    return b"".join(parts)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InvalidRequest(
            f"the key {twice[:80]!r} occurs twice in one object", code="duplicate_key", param=twice[:80]
        )
    return result


def _refuse_constant(name: str) -> Any:
    raise InvalidRequest(f"{name} is not a JSON number", code="invalid_json")


def _check_values(root: dict[str, Any]) -> None:
    stack: list[tuple[Any, int]] = [(root, 1)]
    while stack:
        value, depth = stack.pop()
        if depth > _MAX_DEPTH:
            raise InvalidRequest(f"the body is nested deeper than {_MAX_DEPTH} levels", code="invalid_json")
        if isinstance(value, str):
            _check_text(value)
        elif isinstance(value, float) and value in (float("inf"), float("-inf")):
            raise InvalidRequest("a number in the body is too large", code="invalid_json")
        elif isinstance(value, dict):
            for key in value:
                _check_text(key)
            stack.extend((item, depth + 1) for item in value.values())
        elif isinstance(value, list):
            stack.extend((item, depth + 1) for item in value)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("a string in the body holds half a surrogate pair", code="invalid_json") from error


def _short(error: ValueError) -> str:
    text = str(error)
    return text if len(text) <= 160 else text[:157] + "..."
