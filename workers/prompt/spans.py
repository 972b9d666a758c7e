"""Finds message contents in a rendered template, by rendering it once with contents and once with placeholders."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Literal:
    """Text that the template wrote."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """The content of message `index` as the template wrote it: unchanged or stripped."""

    index: int
    text: str


Span = Literal | Content

_PLACEHOLDER: Final = re.compile("KV[0-9a-f]{24}N[0-9]+X")


def placeholders(contents: Sequence[str]) -> list[str]:
    """One word per content that occurs in none of them; a function of the contents alone.

    Letters and digits only, so that no filter of a template changes them.
    """
    state = hashlib.blake2b(digest_size=12)
    for content in contents:
        encoded = content.encode("utf-8", "surrogatepass")
        state.update(len(encoded).to_bytes(8, "little") + encoded)
    return [f"KV{state.hexdigest()}N{index}X" for index in range(len(contents))]


def find_spans(
    with_placeholders: str, words: Sequence[str], rendered: str, contents: Sequence[str]
) -> list[Span] | None:
    """Split `rendered` into template text and contents, or None when a span is neither its content nor its strip().

    words: the placeholder of each content. The whole of `rendered` must be explained; where both forms of a content
    would do, the unchanged one is taken.
    """
    pieces = _pieces(with_placeholders, words)
    # For each piece the end positions that explain everything before, with the position and text they came from.
    reached: list[dict[int, tuple[int, str]]] = [{0: (0, "")}]
    for piece in pieces:
        choices = [piece] if isinstance(piece, str) else _forms(contents[piece])
        ends: dict[int, tuple[int, str]] = {}
        for start in reached[-1]:
            for choice in choices:
                if rendered.startswith(choice, start):
                    ends.setdefault(start + len(choice), (start, choice))
        if not ends:
            return None
        reached.append(ends)
    if len(rendered) not in reached[-1]:
        return None
    return _trace(pieces, reached, len(rendered))


def _pieces(text: str, words: Sequence[str]) -> list[str | int]:
    """Literal texts and content indices in the order of `text`."""
    index_of = {word: index for index, word in enumerate(words)}
    pieces: list[str | int] = []
    start = 0
    for match in _PLACEHOLDER.finditer(text):
        # What looks like a placeholder and is none of ours stays part of the template's text.
        if (index := index_of.get(match[0])) is not None:
            pieces += [text[start : match.start()], index]
            start = match.end()
    return [piece for piece in (*pieces, text[start:]) if piece != ""]


def _forms(content: str) -> list[str]:
    stripped = content.strip()
    return [content] if stripped == content else [content, stripped]


def _trace(pieces: list[str | int], reached: list[dict[int, tuple[int, str]]], end: int) -> list[Span]:
    spans: list[Span] = []
    for piece, ends in zip(reversed(pieces), reversed(reached[1:]), strict=True):
        end, text = ends[end]
        spans.append(Literal(text) if isinstance(piece, str) else Content(piece, text))
    return spans[::-1]
