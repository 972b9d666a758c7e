"""Stop strings over a stream of text: cut right before the match, and never show a part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from workers.prompt.errors import PromptError

MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 1024


@dataclass(frozen=True, slots=True)
class StopResult:
    """text: what may be shown now. stop: the stop string that matched, after which nothing follows."""

    text: str
    stop: str | None


class StopMatcher:
    """Finds the stop string that is completed first; of several that end together, the longest.

    That choice depends on the characters alone, not on how they are cut into pieces. Only a tail that may still
    become a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises PromptError for an empty or too long stop string, or too many."""
        if len(stops) > MAX_STOPS:
            raise PromptError("stop", len(stops), f"at most {MAX_STOPS} strings")
        for stop in stops:
            if not 0 < len(stop) <= MAX_STOP_CHARS:
                raise PromptError("stop", stop[:64], f"1 to {MAX_STOP_CHARS} characters")
        self._patterns = [_Pattern(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> StopResult:
        """Add text. After a match further text is dropped."""
        if self._stopped:
            return StopResult("", None)
        for index, char in enumerate(text):
            matches = [pattern.stop for pattern in self._patterns if pattern.step(char)]
            if matches:
                self._stopped = True
                seen = self._held + text[: index + 1]
                self._held = ""
                return StopResult(seen[: len(seen) - len(matches[0])], matches[0])
        seen = self._held + text
        num_held = max((pattern.matched for pattern in self._patterns), default=0)
        self._held = seen[len(seen) - num_held :]
        return StopResult(seen[: len(seen) - num_held], None)

    def finish(self) -> str:
        """The reply ended: return the tail that was held back."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """One stop string as a Knuth-Morris-Pratt automaton; `matched` is how much of it the text's tail equals."""

    __slots__ = ("_fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = [0] * len(stop)
        length = 0
        for index in range(1, len(stop)):
            while length and stop[index] != stop[length]:
                length = self._fallback[length - 1]
            length += stop[index] == stop[length]
            self._fallback[index] = length

    def step(self, char: str) -> bool:
        """Add a character; True when the string is complete."""
        while self.matched and self.stop[self.matched] != char:
            self.matched = self._fallback[self.matched - 1]
        self.matched += self.stop[self.matched] == char
        return self.matched == len(self.stop)
