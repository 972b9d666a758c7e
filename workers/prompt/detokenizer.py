"""Token ids to text, one at a time, without ever cutting a character."""

from __future__ import annotations

import codecs

from workers.prompt.tokenizer import Tokenizer


class Detokenizer:
    """Turns a reply's ids into text; the pieces it releases add up to `Tokenizer.decode` of all ids.

    Bytes that may still become a character are held back. A pure function of the ids pushed so far, so feeding them
    again after a take-over releases the same pieces.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_space = tokenizer.bundle.space_prefix

    def push(self, token_id: int) -> str:
        """Add a token and return the text that it completes, maybe none."""
        return self._without_space_prefix(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """Return what is held back: an unfinished character reads as U+FFFD."""
        return self._without_space_prefix(self._decoder.decode(b"", final=True))

    def _without_space_prefix(self, text: str) -> str:
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text
