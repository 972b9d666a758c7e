"""Remembers the ids of recent texts: each turn of a conversation tokenizes all of its messages again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

MAX_CHARS: Final = 1 << 23
# Characters that an entry counts for beside its text.
_ENTRY_CHARS: Final = 100


class EncodingMemo:
    """A bounded memory in front of a pure function from text to ids; the least recently used texts go first.

    Safe to share between threads.
    """

    def __init__(self, encode: Callable[[str], list[int]], max_chars: int = MAX_CHARS) -> None:
        self._encode = encode
        self._max_chars = max_chars
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._num_chars = 0

    def __call__(self, text: str) -> tuple[int, ...]:
        """Ids of `text`."""
        with self._lock:
            if (known := self._known.get(text)) is not None:
                self._known.move_to_end(text)
                return known
        ids = tuple(self._encode(text))
        with self._lock:
            self._remember(text, ids)
        return ids

    def _remember(self, text: str, ids: tuple[int, ...]) -> None:
        if text in self._known:
            return
        self._known[text] = ids
        self._num_chars += len(text) + _ENTRY_CHARS
        while self._num_chars > self._max_chars:
            dropped, _ = self._known.popitem(last=False)
            self._num_chars -= len(dropped) + _ENTRY_CHARS
