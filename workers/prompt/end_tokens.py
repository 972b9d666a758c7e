"""Which ids end a reply. Files name one, but chat models end their turns with others of their control tokens too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

_END_TEXTS: Final = (
    "<|endoftext|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "</s>",
)


def end_ids(named: Iterable[int | None], controls: Mapping[str, int]) -> tuple[int, ...]:
    """Sorted ids of the named tokens and of the control tokens (text -> id) that are known to end a turn."""
    known = (controls.get(text) for text in _END_TEXTS)
    return tuple(sorted({token_id for token_id in (*named, *known) if token_id is not None}))
