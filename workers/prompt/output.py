"""The text of a reply as its tokens come: detokenized, UTF-8 safe, stop strings honoured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.prompt.detokenizer import Detokenizer
from workers.prompt.stops import StopMatcher, StopResult
from workers.prompt.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Released:
    """text: what may be shown now. stopped: a stop string is complete and the reply ends. stop: that string."""

    text: str
    stopped: bool
    stop: str | None = None


class OutputText:
    """A pure function of the pushed ids: pushed again, they release the same pieces."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        """Raises PromptError for stop strings that cannot be used."""
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopMatcher(stops)

    def push(self, token_id: int) -> Released:
        """Add a sampled token."""
        return _released(self._stops.push(self._detokenizer.push(token_id)))

    def finish(self) -> Released:
        """The reply ended: release what is held back. An unfinished character may still complete a stop string."""
        last = self._stops.push(self._detokenizer.finish())
        return _released(StopResult(last.text + self._stops.finish(), last.stop))


def _released(result: StopResult) -> Released:
    return Released(result.text, result.stop is not None, result.stop)
