"""A tokenizer bundle from the `tokenizer.*` metadata of a GGUF file, given as plain Python values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Final

from workers.prompt.bundle import PieceStyle, TokenizerBundle
from workers.prompt.end_tokens import end_ids
from workers.prompt.errors import TokenizerError
from workers.prompt.pre_tokenizers import pre_tokenizer

MAX_VOCABULARY: Final = 1 << 20


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def bundle_from_gguf(metadata: Mapping[str, Any]) -> TokenizerBundle:
    """Build the bundle. Raises TokenizerError that names the metadata key."""
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        raise TokenizerError("tokenizer.ggml.tokens", len(tokens), "a piece occurs twice")
    types = metadata.get("tokenizer.ggml.token_type", [TokenType.NORMAL] * len(tokens))
    if not isinstance(types, Sequence) or len(types) != len(tokens):
        raise TokenizerError("tokenizer.ggml.token_type", type(types).__name__, f"one for each of {len(tokens)} tokens")
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return _byte_pair(metadata, tokens, types)
    if kind == "llama":
        return _sentence_piece(metadata, tokens, types)
    raise TokenizerError("tokenizer.ggml.model", kind, "unsupported, served: gpt2, llama")


def _byte_pair(metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int]) -> TokenizerBundle:
    split = pre_tokenizer(metadata.get("tokenizer.ggml.pre"))
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [_merge(line, vocabulary) for line in _strings(metadata, "tokenizer.ggml.merges")]
    tokenizer = {
        "version": "1.0",
        "added_tokens": _added_tokens(tokens, types),
        "normalizer": split.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(split.steps)},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges, "ignore_merges": split.ignore_merges},
    }
    return _bundle(metadata, tokens, types, tokenizer, PieceStyle.BYTE_LEVEL, False, split.add_bos)


def _sentence_piece(metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int]) -> TokenizerBundle:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, Sequence) or len(scores) != len(tokens):
        raise TokenizerError("tokenizer.ggml.scores", type(scores).__name__, f"one for each of {len(tokens)} tokens")
    if not all(isinstance(score, int | float) and math.isfinite(score) for score in scores):
        raise TokenizerError("tokenizer.ggml.scores", scores[:3], "must be finite numbers")
    unknown = next((tokens[index] for index, kind in enumerate(types) if kind == TokenType.UNKNOWN), None)
    tokenizer = {
        "version": "1.0",
        "added_tokens": _added_tokens(tokens, types),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": None,
        "decoder": {"type": "ByteFallback"},
        "model": {
            "type": "BPE",
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": _merges_by_score(tokens, types, scores),
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    return _bundle(metadata, tokens, types, tokenizer, PieceStyle.SENTENCE_PIECE, prefix, True)


def _bundle(
    metadata: Mapping[str, Any],
    tokens: list[str],
    types: Sequence[int],
    tokenizer: dict[str, Any],
    style: PieceStyle,
    space_prefix: bool,
    add_bos: bool,
) -> TokenizerBundle:
    control = [index for index, kind in enumerate(types) if kind in (TokenType.CONTROL, TokenType.UNKNOWN)]
    eos_id = _token_id(metadata, "eos", len(tokens))
    named = [eos_id, *(_token_id(metadata, name, len(tokens)) for name in ("eot", "eom"))]
    template = metadata.get("tokenizer.chat_template")
    return TokenizerBundle(
        tokenizer_json=json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")),
        style=style,
        space_prefix=space_prefix,
        control_ids=tuple(control),
        end_ids=end_ids(named, {tokens[index]: index for index in control}),
        bos_id=_token_id(metadata, "bos", len(tokens)),
        eos_id=eos_id,
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)),
        chat_template=template if isinstance(template, str) else None,
    )


def _added_tokens(tokens: list[str], types: Sequence[int]) -> list[dict[str, Any]]:
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": index, "content": tokens[index], **plain, "special": kind in special}
        for index, kind in enumerate(types)
        if kind in (*special, TokenType.USER_DEFINED) and tokens[index]
    ]


def _merge(line: str, vocabulary: Mapping[str, int]) -> list[str]:
    parts = line.split(" ")
    if len(parts) != 2 or "".join(parts) not in vocabulary:
        raise TokenizerError("tokenizer.ggml.merges", line, "two pieces whose union is in the vocabulary")
    return parts


def _merges_by_score(tokens: list[str], types: Sequence[int], scores: Sequence[float]) -> list[list[str]]:
    """SentencePiece merges the pair whose union scores best; as a merge list, that is all splits, best union first."""
    pieces = {token: index for index, token in enumerate(tokens) if types[index] == TokenType.NORMAL}
    ranked: list[tuple[float, int, int, list[str]]] = []
    for token, index in pieces.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in pieces and right in pieces:
                ranked.append((-scores[index], index, cut, [left, right]))
    ranked.sort(key=lambda entry: entry[:3])
    return [pair for *_, pair in ranked]


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TokenizerError(key, type(values).__name__, "must be a list of strings")
    if len(values) > MAX_VOCABULARY:
        raise TokenizerError(key, len(values), f"at most {MAX_VOCABULARY} entries")
    return values


def _token_id(metadata: Mapping[str, Any], name: str, vocab_size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise TokenizerError(key, value, f"an id from 0 to {vocab_size - 1}")
    return value
