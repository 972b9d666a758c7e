"""Turn events as chat completion objects: chunks of a stream, or one whole reply.

A chunk's id within the stream is the number of chunks that each choice has given so far ("7", or "7,4" for two
choices). It depends on the turns' events alone, so a stream resumes after it on any gateway process.
"""

from __future__ import annotations

from typing import Any

from gateway.errors import ApiError, InvalidValue, error_of_turn
from gateway.logprobs import chat_logprobs
from gateway.sse import Frame
from gateway.usage import chat_usage, extension_of
from workers.turns.events import EventKind, TurnEvent, TurnState

_REPLIED = (TurnState.COMPLETED, TurnState.INCOMPLETE)


class ChatReply:
    """Folds the events of a request's choices into chunks and into the whole reply.

    turn_ids: one per choice; the first is the completion's id. created: unix seconds.
    """

    def __init__(
        self, turn_ids: tuple[str, ...], model: str, created: int, wants_logprobs: bool, include_usage: bool
    ) -> None:
        self._turn_ids = turn_ids
        self._model = model
        self._created = created
        self._wants_logprobs = wants_logprobs
        self._include_usage = include_usage
        self._counts = [0] * len(turn_ids)
        self._texts: list[list[str]] = [[] for _ in turn_ids]
        self._logprobs: list[list[dict[str, Any]]] = [[] for _ in turn_ids]
        self._terminals: list[TurnEvent | None] = [None] * len(turn_ids)

    def add(self, index: int, event: TurnEvent) -> list[Frame]:
        """Take one event of choice `index`; returns its chunks.

        Raises ApiError when the turn ended without a reply.
        """
        frames: list[Frame] = []
        if self._counts[index] == 0 and (event.kind is not EventKind.TERMINAL or event.state in _REPLIED):
            frames.append(self._chunk(index, {"role": "assistant", "content": ""}))
        if event.text or event.logprobs:
            self._texts[index].append(event.text)
            self._logprobs[index].extend(event.logprobs)
            frames.append(self._chunk(index, {"content": event.text}, logprobs=event.logprobs))
        if event.kind is EventKind.TERMINAL:
            frames.append(self._finish(index, event))
        return frames

    @property
    def is_done(self) -> bool:
        """Whether every choice has ended."""
        return all(terminal is not None for terminal in self._terminals)

    def usage_chunk(self) -> Frame | None:
        """The last chunk of a stream that asked for usage: no choices, the counts."""
        if not self._include_usage:
            return None
        return Frame({**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()})

    def completion(self) -> dict[str, Any]:
        """The whole reply, once every choice has ended."""
        choices = [self._choice(index) for index in range(len(self._turn_ids))]
        reply = {**self._head("chat.completion"), "choices": choices, "usage": self._usage()}
        if len(choices) == 1:
            reply["kvalet"] = choices[0].pop("kvalet")
        return reply

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._turn_ids[0],
            "object": kind,
            "created": self._created,
            "model": self._model,
            "service_tier": "default",
            "system_fingerprint": None,
        }

    def _chunk(
        self, index: int, delta: dict[str, Any], *, logprobs: tuple[dict[str, Any], ...] = (), finish: str | None = None
    ) -> Frame:
        self._counts[index] += 1
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": chat_logprobs(logprobs) if self._wants_logprobs and logprobs else None,
            "finish_reason": finish,
        }
        data = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self._include_usage:
            data["usage"] = None
        return Frame(data, frame_id=",".join(str(count) for count in self._counts))

    def _finish(self, index: int, event: TurnEvent) -> Frame:
        if event.state not in _REPLIED:
            raise error_of_turn(event.error, str(event.state))
        self._terminals[index] = event
        frame = self._chunk(index, {}, finish=event.finish_reason or "stop")
        frame.data["kvalet"] = extension_of(self._turn_ids[index], event)
        return frame

    def _choice(self, index: int) -> dict[str, Any]:
        terminal = self._terminals[index]
        if terminal is None:
            raise ApiError("the reply is not complete", code="server_error")
        return {
            "index": index,
            "message": {
                "role": "assistant",
                "content": "".join(self._texts[index]),
                "refusal": None,
                "annotations": [],
            },
            "logprobs": chat_logprobs(self._logprobs[index]) if self._wants_logprobs else None,
            "finish_reason": terminal.finish_reason or "stop",
            "kvalet": extension_of(self._turn_ids[index], terminal),
        }

    def _usage(self) -> dict[str, Any]:
        return chat_usage([terminal.usage for terminal in self._terminals if terminal is not None])


class ResumePoint:
    """Which chunks a client has already: those up to a `Last-Event-ID`, per choice."""

    def __init__(self, last_event_id: str | None, num_choices: int) -> None:
        """Raises InvalidRequest for an id that this stream cannot have given."""
        self._seen = [0] * num_choices
        if last_event_id is None:
            return
        parts = last_event_id.split(",")
        if len(parts) != num_choices or not all(part.isascii() and part.isdigit() and len(part) <= 9 for part in parts):
            raise InvalidValue("Last-Event-ID", f"'Last-Event-ID' = {last_event_id[:80]!r} is no id of this stream")
        self._seen = [int(part) for part in parts]

    def is_new(self, frame: Frame, index: int) -> bool:
        """Whether a chunk of choice `index` comes after the point."""
        counts = (frame.frame_id or "").split(",")
        return int(counts[index]) > self._seen[index]
