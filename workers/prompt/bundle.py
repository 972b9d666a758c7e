"""Everything that turns text into token ids and back, as data that travels: workers publish it, gateways load it."""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Final

import msgpack

from workers.prompt.errors import TokenizerError

BUNDLE_VERSION: Final = 1
MAX_BUNDLE_BYTES: Final = 1 << 25
MAX_PLAIN_BYTES: Final = 1 << 26
DIGEST_BYTES: Final = 32


class PieceStyle(StrEnum):
    """How vocabulary pieces spell bytes: GPT-2's printable alphabet, or SentencePiece's U+2581 and <0xHH>."""

    BYTE_LEVEL = "byte_level"
    SENTENCE_PIECE = "sentence_piece"


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """A tokenizer with its special ids and chat template. Immutable; `digest` is its identity.

    tokenizer_json: of the `tokenizers` library, without post-processor and without any automatic leading space.
    space_prefix: text at a prompt's start and after BOS gets a leading space (SentencePiece). control_ids: ids that
    text never becomes and that replies don't show, sorted. end_ids: ids that end a reply. add_bos: prompts start with
    bos_id; a template that writes it itself does not get a second one.
    """

    tokenizer_json: str
    style: PieceStyle
    space_prefix: bool
    control_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    chat_template: str | None

    @property
    def digest(self) -> bytes:
        """BLAKE2b-256 of the canonical form."""
        return hashlib.blake2b(self._plain(), digest_size=DIGEST_BYTES, person=b"kvalet tokenizer").digest()

    def to_bytes(self) -> bytes:
        """Serialize: zlib over msgpack, canonical."""
        return zlib.compress(self._plain(), 6)

    @classmethod
    def from_bytes(cls, block: bytes) -> TokenizerBundle:
        """Read what `to_bytes` wrote. Raises TokenizerError for anything else; sizes are limited."""
        if len(block) > MAX_BUNDLE_BYTES:
            raise TokenizerError("bundle size", len(block), f"at most {MAX_BUNDLE_BYTES} bytes")
        try:
            inflate = zlib.decompressobj()
            plain = inflate.decompress(block, MAX_PLAIN_BYTES)
            if not inflate.eof:
                raise TokenizerError("bundle size", len(block), f"inflates to at most {MAX_PLAIN_BYTES} bytes")
            parsed = msgpack.unpackb(plain, use_list=False, strict_map_key=True)
        except (zlib.error, ValueError, msgpack.UnpackException) as error:
            raise TokenizerError("bundle", block[:16], f"must be zlib over msgpack ({error})") from None
        return cls._from_plain(parsed)

    def _plain(self) -> bytes:
        packed: bytes = msgpack.packb({"version": BUNDLE_VERSION, **asdict(self), "style": str(self.style)})
        return packed

    @classmethod
    def _from_plain(cls, parsed: Any) -> TokenizerBundle:
        names = {field.name for field in fields(cls)}
        if not isinstance(parsed, dict) or parsed.keys() != names | {"version"}:
            keys = sorted(parsed) if isinstance(parsed, dict) else type(parsed).__name__
            raise TokenizerError("bundle keys", keys, f"must be version and {', '.join(sorted(names))}")
        if (version := parsed.pop("version")) != BUNDLE_VERSION:
            raise TokenizerError("bundle version", version, f"must be {BUNDLE_VERSION}")
        for name, kind in _FIELD_TYPES.items():
            if not isinstance(parsed[name], kind):
                raise TokenizerError(f"bundle {name}", parsed[name], "has the wrong type")
        for name in ("control_ids", "end_ids"):
            if not all(type(token_id) is int for token_id in parsed[name]):
                raise TokenizerError(f"bundle {name}", parsed[name], "must hold ids")
        try:
            return cls(**{**parsed, "style": PieceStyle(parsed["style"])})
        except ValueError:
            raise TokenizerError("bundle style", parsed["style"], f"one of {', '.join(PieceStyle)}") from None


_FIELD_TYPES: Final[dict[str, Any]] = {
    "tokenizer_json": str,
    "style": str,
    "space_prefix": bool,
    "control_ids": tuple,
    "end_ids": tuple,
    "bos_id": int | None,
    "eos_id": int | None,
    "add_bos": bool,
    "chat_template": str | None,
}
