"""How a GGUF file's `tokenizer.ggml.pre` splits text before merging.

A wrong split still gives plausible text, only more tokens and a worse model, so an unknown name is refused.
Patterns are those of the models' own tokenizer.json files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from workers.prompt.errors import TokenizerError

_WORDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES: Final = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
# Mistral's later vocabularies: a word is cut where lower case turns into upper case, digits stand alone.
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS: Final = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Parts of a tokenizer.json: splitting steps, normalizer, and whether a whole known word skips merging.

    add_bos: whether prompts start with BOS when the file does not say.
    """

    steps: tuple[dict[str, Any], ...]
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False
    add_bos: bool = False


def pre_tokenizer(name: object) -> PreTokenizer:
    """Look a `tokenizer.ggml.pre` name up. Raises TokenizerError that lists the known ones."""
    known = _BY_NAME.get(name) if isinstance(name, str) else None
    if known is None:
        raise TokenizerError("tokenizer.ggml.pre", name, f"unsupported, served: {', '.join(sorted(_BY_NAME))}")
    return known


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> tuple[dict[str, Any], ...]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return split, _byte_level(False)


_GPT2: Final = PreTokenizer((_byte_level(True),))
_SMOLLM: Final = PreTokenizer(({"type": "Digits", "individual_digits": True}, _byte_level(True)))
_LLAMA3: Final = PreTokenizer(_split(_WORDS + r"|\p{N}{1,3}|" + _REST), ignore_merges=True, add_bos=True)
_TEKKEN: Final = PreTokenizer(
    _split(_CASED_WORDS + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES), ignore_merges=True, add_bos=True
)
_QWEN2: Final = PreTokenizer(_split(_WORDS + r"|\p{N}|" + _REST), normalizer={"type": "NFC"})

_BY_NAME: Final[dict[str, PreTokenizer]] = {
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
