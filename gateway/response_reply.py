"""Turn events as a response object and as its stream events.

`sequence_number` counts the stream events that a turn's events give, from 0. It depends on those events alone, so a
stream resumes after any number on any gateway process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from gateway.errors import error_of_turn
from gateway.logprobs import token_logprobs
from gateway.sse import Frame
from gateway.usage import extension, response_usage
from workers.turns.events import EventKind, TurnEvent, TurnState
from workers.turns.outcomes import TurnView

_STATUS = {TurnState.EXPIRED: "failed"}
_STREAM_END = {
    TurnState.COMPLETED: "response.completed",
    TurnState.INCOMPLETE: "response.incomplete",
}


def response_object(
    turn: TurnView, logprobs: Sequence[dict[str, Any]] = (), info: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """A response as clients see it. logprobs and info are those of the events, where they are at hand."""
    request, state = turn.request, turn.state
    echo = request.display
    error = None
    if state in (TurnState.FAILED, TurnState.EXPIRED):
        fault = error_of_turn(turn.error, str(state))
        error = {"code": fault.code or "server_error", "message": fault.message}
    reason = "max_output_tokens" if state is TurnState.INCOMPLETE else None
    return {
        "id": request.turn_id,
        "object": "response",
        "created_at": int(request.created_at),
        "completed_at": int(turn.ended_at) if turn.ended_at and state is TurnState.COMPLETED else None,
        "status": _STATUS.get(state, str(state)),
        "background": bool(echo.get("background")),
        "error": error,
        "incomplete_details": {"reason": reason} if reason else None,
        "instructions": echo.get("instructions"),
        "max_output_tokens": request.max_tokens,
        "max_tool_calls": None,
        "model": request.model,
        "output": _output(turn, logprobs),
        "parallel_tool_calls": True,
        "previous_response_id": request.parent_id,
        "conversation": {"id": request.conversation_id} if request.conversation_id else None,
        "prompt_cache_key": echo.get("prompt_cache_key"),
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": echo.get("safety_identifier"),
        "service_tier": "default",
        "store": request.store,
        "temperature": echo.get("temperature", 1.0),
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": request.sampling.get("logprobs") or 0,
        "top_p": request.sampling.get("top_p", 1.0),
        "truncation": "disabled",
        "usage": response_usage(turn.usage) if state.is_terminal and turn.usage else None,
        "user": echo.get("user"),
        "metadata": echo.get("metadata") or {},
        "kvalet": extension(request.turn_id, turn.usage, dict(info))
        if state.is_terminal
        else {"turn_id": request.turn_id},
    }


def raise_if_failed(event: TurnEvent) -> None:
    """Raise the ApiError of a terminal event that tells a failure."""
    if event.state in (TurnState.FAILED, TurnState.EXPIRED):
        raise error_of_turn(event.error, str(event.state))


def item_id(turn_id: str) -> str:
    """The id of a turn's output message."""
    return "msg_" + turn_id.rpartition("_")[2]


class ResponseStream:
    """Folds a turn's events into stream events, each with the next sequence number."""

    def __init__(self, turn: TurnView) -> None:
        self._turn = turn
        self._item_id = item_id(turn.turn_id)
        self._number = 0
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._has_item = False

    def add(self, event: TurnEvent) -> list[Frame]:
        """Take one event; returns its stream events."""
        frames: list[Frame] = []
        if self._number == 0:
            frames.append(self._lifecycle("response.created", TurnState.IN_PROGRESS))
        if not self._has_item and (event.kind is not EventKind.TERMINAL or event.state in _STREAM_END):
            frames.extend(self._open_item())
        if event.text or event.logprobs:
            frames.append(self._delta(event))
        if event.kind is EventKind.TERMINAL:
            frames.extend(self._end(event))
        return frames

    def fault(self, code: str | None, message: str) -> Frame:
        """The stream event for a fault of the service itself; the turn may still end later."""
        return self._frame("error", code=code, message=message, param=None)

    def _open_item(self) -> list[Frame]:
        self._has_item = True
        item = {"id": self._item_id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        return [
            self._lifecycle("response.in_progress", TurnState.IN_PROGRESS),
            self._frame("response.output_item.added", output_index=0, item=item),
            self._part("response.content_part.added", "", []),
        ]

    def _delta(self, event: TurnEvent) -> Frame:
        self._text.append(event.text)
        self._logprobs.extend(event.logprobs)
        return self._frame(
            "response.output_text.delta", **self._place(), delta=event.text, logprobs=token_logprobs(event.logprobs)
        )

    def _end(self, event: TurnEvent) -> list[Frame]:
        frames: list[Frame] = []
        state = event.state or TurnState.FAILED
        if self._has_item:
            text, logprobs = "".join(self._text), token_logprobs(self._logprobs)
            frames = [
                self._frame("response.output_text.done", **self._place(), text=text, logprobs=logprobs),
                self._part("response.content_part.done", text, logprobs),
                self._frame(
                    "response.output_item.done",
                    output_index=0,
                    item=_message(
                        self._item_id, text, logprobs, "completed" if state is TurnState.COMPLETED else "incomplete"
                    ),
                ),
            ]
        frames.append(self._lifecycle(_STREAM_END.get(state, "response.failed"), state, event))
        return frames

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _part(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> Frame:
        return self._frame(kind, **self._place(), part=_text_part(text, logprobs))

    def _lifecycle(self, kind: str, state: TurnState, terminal: TurnEvent | None = None) -> Frame:
        turn = replace(
            self._turn,
            state=state,
            ended_at=(self._turn.ended_at or time.time()) if terminal else None,
            finish_reason=terminal.finish_reason if terminal else None,
            output_text="".join(self._text),
            usage=terminal.usage if terminal else {},
            error=terminal.error if terminal else None,
        )
        return self._frame(
            kind, response=response_object(turn, tuple(self._logprobs), terminal.info if terminal else {})
        )

    def _frame(self, kind: str, **fields: Any) -> Frame:
        number = self._number
        self._number += 1
        return Frame({"type": kind, "sequence_number": number, **fields}, event=kind, frame_id=str(number))


def _output(turn: TurnView, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    if turn.state not in _STREAM_END:
        return []
    status = "completed" if turn.state is TurnState.COMPLETED else "incomplete"
    logprobs = token_logprobs(entries)
    return [_message(item_id(turn.request.turn_id), turn.output_text, logprobs, status)]


def _message(message_id: str, text: str, logprobs: list[dict[str, Any]], status: str) -> dict[str, Any]:
    return {
        "id": message_id,
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [_text_part(text, logprobs)],
    }


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
