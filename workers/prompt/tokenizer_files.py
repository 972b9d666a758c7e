"""A tokenizer bundle from a model directory: tokenizer.json, tokenizer_config.json and their companions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer as LibraryTokenizer

from workers.prompt.bundle import PieceStyle, TokenizerBundle
from workers.prompt.end_tokens import end_ids
from workers.prompt.errors import TokenizerError

MAX_TOKENIZER_BYTES: Final = 1 << 26
MAX_CONFIG_BYTES: Final = 1 << 24


def bundle_from_files(directory: Path) -> TokenizerBundle:
    """Read the bundle of a model directory. Raises TokenizerError that names the file."""
    tokenizer = _read_object(directory / "tokenizer.json", MAX_TOKENIZER_BYTES)
    config = _read_optional(directory / "tokenizer_config.json")
    generation = _read_optional(directory / "generation_config.json")
    post_processor = tokenizer.get("post_processor")
    style = _piece_style(tokenizer)
    space_prefix = _remove_space_prefix(tokenizer)
    for key in ("post_processor", "truncation", "padding"):
        tokenizer[key] = None
    ids = _token_ids(tokenizer)
    control = {token["content"]: token["id"] for token in _added_tokens(tokenizer) if token.get("special")}
    bos_id, eos_id = (ids.get(_token_text(config.get(f"{name}_token"))) for name in ("bos", "eos"))
    return TokenizerBundle(
        tokenizer_json=json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")),
        style=style,
        space_prefix=space_prefix,
        control_ids=tuple(sorted(control.values())),
        end_ids=end_ids([eos_id, *_generation_ends(generation)], control),
        bos_id=bos_id,
        eos_id=eos_id,
        add_bos=_adds_bos(config, tokenizer, post_processor, bos_id),
        chat_template=_chat_template(directory, config),
    )


def _piece_style(tokenizer: dict[str, Any]) -> PieceStyle:
    kinds = {step.get("type") for step in _steps(tokenizer, "decoder", "decoders")}
    if "ByteLevel" in kinds:
        return PieceStyle.BYTE_LEVEL
    if kinds & {"ByteFallback", "Metaspace"}:
        return PieceStyle.SENTENCE_PIECE
    raise TokenizerError("tokenizer.json decoder", sorted(map(str, kinds)), "ByteLevel, ByteFallback or Metaspace")


def _remove_space_prefix(tokenizer: dict[str, Any]) -> bool:
    """Take automatic leading spaces out, since `Tokenizer` adds them where they belong; True if there were any."""
    steps = _steps(tokenizer, "normalizer", "normalizers")
    kept = [step for step in steps if step.get("type") != "Prepend"]
    found = len(kept) != len(steps)
    if found:
        tokenizer["normalizer"] = {"type": "Sequence", "normalizers": kept}
    for step in _steps(tokenizer, "pre_tokenizer", "pretokenizers"):
        if step.get("type") == "Metaspace":
            found = found or step.get("prepend_scheme", "always") != "never"
            step["prepend_scheme"] = "never"
        if step.get("type") == "ByteLevel" and step.get("add_prefix_space"):
            found, step["add_prefix_space"] = True, False
    return found


def _token_ids(tokenizer: dict[str, Any]) -> dict[str | None, int]:
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):
        pieces = [entry[0] for entry in vocabulary if isinstance(entry, list) and entry]
        vocabulary = {str(piece): index for index, piece in enumerate(pieces)}
    if not isinstance(vocabulary, dict) or not all(type(token_id) is int for token_id in vocabulary.values()):
        raise TokenizerError("tokenizer.json model", type(model).__name__, "must hold a vocabulary")
    return vocabulary | {token["content"]: token["id"] for token in _added_tokens(tokenizer)}


def _added_tokens(tokenizer: dict[str, Any]) -> list[dict[str, Any]]:
    tokens = _objects(tokenizer.get("added_tokens") or [], "added_tokens")
    for token in tokens:
        if not isinstance(token.get("content"), str) or type(token.get("id")) is not int:
            raise TokenizerError("tokenizer.json added_tokens", token, "needs content and id")
    return tokens


def _steps(tokenizer: dict[str, Any], part: str, nested: str) -> list[dict[str, Any]]:
    """A processing part as a list of steps: a part is one step, a sequence of steps, or null."""
    whole = _objects([tokenizer.get(part) or {}], part)[0]
    return _objects(whole.get(nested, [whole]), f"{part}.{nested}")


def _objects(value: object, field: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise TokenizerError(f"tokenizer.json {field}", type(value).__name__, "must hold objects")
    return value


def _token_text(value: object) -> str | None:
    """A token in tokenizer_config.json is its text or an object with `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _generation_ends(generation: dict[str, Any]) -> list[int]:
    value = generation.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    return [token_id for token_id in ids if type(token_id) is int]


def _adds_bos(config: dict[str, Any], tokenizer: dict[str, Any], post_processor: object, bos_id: int | None) -> bool:
    """What the configuration says, else what the file's own post-processor does to a text."""
    if bos_id is None:
        return False
    if isinstance(said := config.get("add_bos_token"), bool):
        return said
    try:
        probe = LibraryTokenizer.from_str(json.dumps({**tokenizer, "post_processor": post_processor}))
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise TokenizerError("tokenizer.json", "", f"cannot be loaded ({error})") from None
    ids: list[int] = probe.encode("a").ids
    return ids[:1] == [bos_id]


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.exists():
        return _read_text(file, MAX_CONFIG_BYTES)
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in _objects(value, "chat_template")}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _read_optional(path: Path) -> dict[str, Any]:
    return _read_object(path, MAX_CONFIG_BYTES) if path.exists() else {}


def _read_object(path: Path, limit: int) -> dict[str, Any]:
    try:
        parsed = json.loads(_read_text(path, limit))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(path.name, str(path), f"must be JSON ({error})") from None
    if not isinstance(parsed, dict):
        raise TokenizerError(path.name, type(parsed).__name__, "must be a JSON object")
    return parsed


def _read_text(path: Path, limit: int) -> str:
    try:
        size = path.stat().st_size
        if size > limit:
            raise TokenizerError(path.name, size, f"at most {limit} bytes")
        return path.read_text("utf-8")
    except OSError as error:
        raise TokenizerError(path.name, str(path), error.strerror or "cannot be read") from error
