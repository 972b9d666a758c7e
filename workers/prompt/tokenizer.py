"""Text to token ids and back. Text of messages and template text take different ways on purpose."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import cached_property, partial
from typing import Final

from tokenizers import Tokenizer as LibraryTokenizer

from workers.prompt.bundle import PieceStyle, TokenizerBundle
from workers.prompt.errors import ReservedText, TokenizerError
from workers.prompt.memo import EncodingMemo

# A batch of one text needs no threads of its own.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A bundle made ready. Safe to share between threads: nothing that one of them can see changes."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        """Raises TokenizerError when the bundle's JSON or ids cannot be used."""
        self.bundle = bundle
        self._template = _load(bundle.tokenizer_json)
        self._text = _for_text(self._template)
        self._encode_text = EncodingMemo(partial(_encode, self._text))
        self._encode_template = EncodingMemo(partial(_encode, self._template))
        self.vocab_size: int = self._text.get_vocab_size(with_added_tokens=True)
        self._control = frozenset(bundle.control_ids)
        named = {"control_ids": bundle.control_ids, "end_ids": bundle.end_ids}
        named |= {"bos_id": _known(bundle.bos_id), "eos_id": _known(bundle.eos_id)}
        for field, ids in named.items():
            for token_id in ids:
                if self._text.id_to_token(token_id) is None:
                    raise TokenizerError(field, token_id, "is not in the vocabulary")

    def encode_text(self, text: str) -> list[int]:
        """Token ids of plain text; never a control token, whatever the text spells.

        Raises ReservedText if the vocabulary's merges themselves lead to a control token.
        """
        ids = self._encode_text(text)
        if not self._control.isdisjoint(ids):
            raise ReservedText("text", text[:64], "its tokens include a control token")
        return list(ids)

    def encode_template(self, text: str, *, at_start: bool) -> list[int]:
        """Token ids of template text, control tokens included. at_start: the prompt begins here."""
        bundle = self.bundle
        if bundle.space_prefix:
            text = _with_space_prefix(text, self.bos_text, at_start)
        return list(self._encode_template(text))

    def encode_completion(self, text: str) -> list[int]:
        """Token ids of a raw prompt: BOS where the model wants one, then the plain text."""
        prefix = " " if self.bundle.space_prefix and text else ""
        return [*self.bos_prefix([]), *self.encode_text(prefix + text)]

    def bos_prefix(self, ids: list[int]) -> list[int]:
        """[BOS] if the model wants one and `ids` does not start with it, else []."""
        bos_id = self.bundle.bos_id
        return [bos_id] if self.bundle.add_bos and bos_id is not None and ids[:1] != [bos_id] else []

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids without control tokens; each maximal invalid byte run reads as one U+FFFD."""
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")
        return text[1:] if self.bundle.space_prefix and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token adds to a reply; empty for control tokens and ids without a piece."""
        if token_id in self._control:
            return b""
        piece = self._text.id_to_token(token_id)
        if piece is None:
            return b""
        if self.bundle.style is PieceStyle.BYTE_LEVEL:
            return _byte_level(piece)
        if (match := _BYTE_PIECE.fullmatch(piece)) is not None:
            return bytes.fromhex(match.group(1))
        return piece.replace("\u2581", " ").encode()

    def token_text(self, token_id: int) -> str:
        """A token alone, for log probabilities; control tokens show their name."""
        if token_id in self._control:
            return self._text.id_to_token(token_id) or ""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_control(self, token_id: int) -> bool:
        """Whether a reply never shows this token."""
        return token_id in self._control

    @cached_property
    def bos_text(self) -> str:
        """The BOS token's text, empty without one."""
        return self._piece(self.bundle.bos_id)

    @cached_property
    def eos_text(self) -> str:
        """The EOS token's text, empty without one."""
        return self._piece(self.bundle.eos_id)

    @cached_property
    def control_texts(self) -> tuple[str, ...]:
        """Texts of all control tokens."""
        return tuple(text for token_id in self.bundle.control_ids if (text := self._piece(token_id)))

    def find_control_text(self, text: str) -> str | None:
        """The first control token whose text occurs in `text`, or None."""
        match = self._control_pattern.search(text)
        return None if match is None else match.group()

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.control_texts, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")

    def _piece(self, token_id: int | None) -> str:
        return "" if token_id is None else self._text.id_to_token(token_id) or ""


def _known(token_id: int | None) -> tuple[int, ...]:
    return () if token_id is None else (token_id,)


def _load(tokenizer_json: str) -> LibraryTokenizer:
    try:
        return LibraryTokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise TokenizerError("tokenizer_json", tokenizer_json[:64], f"cannot be loaded ({error})") from None


def _for_text(template: LibraryTokenizer) -> LibraryTokenizer:
    """A second tokenizer that takes control tokens' texts for plain text. Both share one vocabulary in memory.

    Raises TokenizerError when the added tokens don't keep their ids.
    """
    text = LibraryTokenizer(template.model)
    text.normalizer, text.pre_tokenizer = template.normalizer, template.pre_tokenizer
    added = template.get_added_tokens_decoder()
    for token_id in sorted(added):
        token = added[token_id]
        (text.add_special_tokens if token.special else text.add_tokens)([token])
    if text.get_added_tokens_decoder() != added:
        raise TokenizerError("added_tokens", len(added), "ids must follow the vocabulary without a gap")
    text.encode_special_tokens = True
    return text


def _encode(tokenizer: LibraryTokenizer, text: str) -> list[int]:
    """The library holds the interpreter lock in `encode`, for a second on a long prompt, but not for a batch."""
    [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = encoding.ids
    return ids


def _with_space_prefix(text: str, bos: str, at_start: bool) -> str:
    pieces = text.split(bos) if bos else [text]
    first = " " + pieces[0] if at_start and pieces[0] else pieces[0]
    return bos.join([first, *(" " + piece if piece else piece for piece in pieces[1:])])


def _byte_level(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in piece])
    except KeyError:
        return piece.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes (github.com/openai/gpt-2, encoder.py): printable ones are themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(rest)}


_BYTE_OF: Final = _byte_alphabet()
