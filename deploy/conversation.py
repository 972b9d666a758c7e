"""One conversation held over the service's API: sends a message, yields the reply's text, ends with who ran it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deploy.api import Api, Json
from deploy.errors import ServiceError


@dataclass(frozen=True, slots=True)
class TurnReport:
    """What the service says about a turn, and what the client saw. Times in milliseconds."""

    text: str
    worker: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    restored_pages: int
    restored_bytes: int
    restore_ms: float
    first_token_ms: float
    token_ms: float


class Conversation:
    """A named conversation. `options`: fields laid over each request (sampling, `kvalet` extension)."""

    def __init__(self, api: Api, model: str, options: Json) -> None:
        self._api = api
        self._model = model
        self._options = dict(options)
        self.conversation_id = str(api.call("POST", "/conversations", {})["id"])
        self.report: TurnReport | None = None

    def say(self, message: str, **fields: Any) -> Iterator[str]:
        """Send one message and yield the reply's text as it comes; `report` is set at the end.

        `fields` are laid over the request. Raises ServiceError when the turn does not end well.
        """
        body = {
            "model": self._model,
            "input": message,
            "conversation": self.conversation_id,
            "stream": True,
            **self._options,
            **fields,
        }
        clock = _Clock()
        parts: list[str] = []
        final: Json | None = None
        response_id = ""
        try:
            for event in self._api.stream("/responses", body):
                response_id = response_id or str(event.data.get("response", {}).get("id", ""))
                if event.name == "response.output_text.delta":
                    clock.tick()
                    parts.append(event.data["delta"])
                    yield event.data["delta"]
                elif event.name in ("response.completed", "response.incomplete"):
                    final = event.data["response"]
                elif event.name in ("response.failed", "error"):
                    raise ServiceError(_reason(event.data))
        except (GeneratorExit, KeyboardInterrupt, SystemExit):
            # A stored response would go on without its reader.
            self._cancel(response_id)
            raise
        if final is None:
            raise ServiceError("the stream ended before the turn did")
        self.report = _report("".join(parts), final, clock)

    def _cancel(self, response_id: str) -> None:
        if response_id:
            with contextlib.suppress(ServiceError):
                self._api.call("POST", f"/responses/{response_id}/cancel", {})


def default_model(api: Api) -> str:
    """The first model that the service offers. Raises ServiceError when there is none."""
    models = served_models(api)
    if not models:
        raise ServiceError("the service offers no model yet")
    return models[0]


def served_models(api: Api) -> list[str]:
    """Models that the service offers."""
    return [str(model["id"]) for model in api.call("GET", "/models")["data"]]


class _Clock:
    """Times of the first and the last text."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._first = self._last = 0.0

    def tick(self) -> None:
        self._last = time.perf_counter()
        self._first = self._first or self._last

    def first_ms(self) -> float:
        return max(0.0, self._first - self._start) * 1e3

    def token_ms(self, num_tokens: int) -> float:
        return (self._last - self._first) * 1e3 / max(1, num_tokens - 1)


def _report(text: str, response: Json, clock: _Clock) -> TurnReport:
    usage = response["usage"]
    details = response.get("kvalet") or {}
    return TurnReport(
        text=text,
        worker=str(details.get("worker_id", "?")),
        prompt_tokens=usage["input_tokens"],
        cached_tokens=usage["input_tokens_details"]["cached_tokens"],
        output_tokens=usage["output_tokens"],
        restored_pages=int(details.get("restored_pages", 0)),
        restored_bytes=int(details.get("restored_bytes", 0)),
        restore_ms=float(details.get("restore_ms", 0.0)),
        first_token_ms=clock.first_ms(),
        token_ms=clock.token_ms(usage["output_tokens"]),
    )


def _reason(data: Json) -> str:
    error = data.get("response", data).get("error") or data
    return str(error.get("message", error))
