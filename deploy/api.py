"""A small client of the service's own HTTP API, for `chat`, `demo` and `status`: JSON calls and server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from deploy.errors import ServiceError

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event: its name and its JSON data."""

    name: str
    data: Json


class Api:
    """Calls below one base URL (`http://host:port/v1`). Raises ServiceError for every fault."""

    def __init__(self, base_url: str, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # A proxy of the environment has nothing to do between us and a worker on this host.
        self._client = httpx.Client(headers=headers, timeout=timeout_s, trust_env=False)
        self._base_url = base_url.rstrip("/")

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def call(self, method: str, path: str, body: Json | None = None) -> Json:
        """One JSON request below the base URL and its answer."""
        try:
            answer = self._client.request(method, f"{self._base_url}{path}", json=body)
        except httpx.HTTPError as error:
            raise ServiceError(f"{self._base_url}: {error or type(error).__name__}") from error
        _raise_for(answer)
        result: Json = answer.json()
        return result

    def stream(self, path: str, body: Json) -> Iterator[Event]:
        """Post `body` and yield the events of the answer until it ends."""
        with self._opened(path, body) as answer:
            yield from parse_events(answer.iter_lines())

    @contextmanager
    def _opened(self, path: str, body: Json) -> Iterator[httpx.Response]:
        try:
            with self._client.stream("POST", f"{self._base_url}{path}", json=body) as answer:
                if answer.status_code >= 400:
                    answer.read()
                _raise_for(answer)
                yield answer
        except httpx.HTTPError as error:
            raise ServiceError(f"{self._base_url}: {error or type(error).__name__}") from error


def parse_events(lines: Iterator[str]) -> Iterator[Event]:
    """Events of a text/event-stream; comments, ids and the closing [DONE] are skipped. Raises ServiceError."""
    name, data = "message", ""
    for line in lines:
        if line.startswith("event:"):
            name = line[6:].strip()
        elif line.startswith("data:"):
            data += line[5:].removeprefix(" ")
        elif not line and data:
            if data != "[DONE]":
                yield Event(name, _decoded(data))
            name, data = "message", ""


def _decoded(data: str) -> Json:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ServiceError(f"event data is no JSON: {data[:80]!r}") from error
    if not isinstance(value, dict):
        raise ServiceError(f"event data is no object: {data[:80]!r}")
    if "error" in value and isinstance(value["error"], dict):
        raise ServiceError(str(value["error"].get("message", value["error"])))
    return value


def _raise_for(answer: httpx.Response) -> None:
    if answer.status_code < 400:
        return
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = answer.text[:200]
    raise ServiceError(str(message), answer.status_code)
