"""A reply as it grows: sampled ids in, numbered events out. The same ids always give the same events."""

from __future__ import annotations

from typing import Any

from gpu.plan import TokenLogprobs
from workers.engine.requests import Token
from workers.prompt.output import OutputText
from workers.prompt.tokenizer import Tokenizer
from workers.turns.events import EventKind, TurnEvent, TurnState


class Reply:
    """Text, ids and event numbers of one turn.

    stopped: a stop string was completed. output_ids: every id of the reply so far, held-back text included.
    next_number: number of the next event; 0 is `started`, or the terminal event of a turn that never started.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._output = OutputText(tokenizer, stop)
        self._held_ids: list[int] = []
        self._held_logprobs: list[dict[str, Any]] = []
        self._text: list[str] = []
        self._tail: str | None = None
        self.output_ids: list[int] = []
        self.stopped = False
        self.next_number = 0

    def started(self, info: dict[str, Any]) -> TurnEvent:
        """The first event."""
        self.next_number = 1
        return TurnEvent(0, EventKind.STARTED, info=info)

    def replay(self, token_ids: tuple[int, ...]) -> None:
        """Take over a stream that has started, with the ids of its deltas."""
        self.next_number = 1
        for token_id in token_ids:
            self.push(Token(token_id, None))

    def push(self, token: Token) -> TurnEvent | None:
        """Add one id; the delta that it completes, or None while its text is held back."""
        self.output_ids.append(token.token_id)
        self._held_ids.append(token.token_id)
        if token.logprobs is not None:
            self._held_logprobs.append(self._describe(token.logprobs))
        released = self._output.push(token.token_id)
        if released.stopped:
            # The id that completes a stop string travels with the terminal event, and so does the text before it.
            self.stopped = True
            self._tail = released.text
            return None
        if not released.text:
            return None
        return self._delta(released.text)

    def finish(
        self,
        state: TurnState,
        finish_reason: str | None,
        usage: dict[str, Any],
        info: dict[str, Any],
        error: dict[str, Any] | None = None,
    ) -> TurnEvent:
        """The terminal event, with ids and text that were still held back."""
        return TurnEvent(
            self.next_number,
            EventKind.TERMINAL,
            tuple(self._held_ids),
            self.close(),
            tuple(self._held_logprobs),
            state=state,
            finish_reason=finish_reason,
            usage=usage,
            error=error,
            info=info,
        )

    def close(self) -> str:
        """End the text: what was still held back, up to a stop string that its last character completes. Idempotent."""
        if self._tail is None:
            last = self._output.finish()
            self._tail, self.stopped = last.text, last.stopped
        return self._tail

    @property
    def text(self) -> str:
        """The reply's text, as released so far; whole after `close`."""
        return "".join(self._text) + (self._tail or "")

    def _delta(self, text: str) -> TurnEvent:
        event = TurnEvent(self.next_number, EventKind.DELTA, tuple(self._held_ids), text, tuple(self._held_logprobs))
        self.next_number += 1
        self._text.append(text)
        self._held_ids.clear()
        self._held_logprobs.clear()
        return event

    def _describe(self, report: TokenLogprobs) -> dict[str, Any]:
        return {
            "id": report.token_id,
            "token": self._tokenizer.token_text(report.token_id),
            "logprob": report.logprob,
            "top": [[i, self._tokenizer.token_text(i), p] for i, p in report.top],
        }
