"""C53 (exo-explore/exo PR#1691, ggml-org/llama.cpp PR#28926, abetlen/llama-cpp-python#372).

Characters that are split over tokens became replacement marks in the stream, or vanished. The pieces that a reply
releases add up to the decode of all its ids, each piece is whole characters, and a byte that can never be valid gives
one U+FFFD and nothing else.
"""

from __future__ import annotations

import pytest

from tests.prompt_lab import qwen2, smollm
from workers.prompt.detokenizer import Detokenizer
from workers.prompt.output import OutputText
from workers.prompt.tokenizer import Tokenizer

TEXT = "é 漢字 👩‍👩‍👧 🇳🇴 e\u0301 \ufffd end"
TOKENIZERS = {"smollm": smollm, "qwen2": qwen2}


def byte_ids(tokenizer: Tokenizer, block: bytes) -> list[int]:
    """One token per byte."""
    by_byte = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    return [by_byte[bytes([byte])] for byte in block]


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_of_a_reply_add_up_to_its_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    text = TEXT.replace("e\u0301", "") if name == "qwen2" else TEXT  # Qwen2 normalizes what it reads
    assert "".join(pieces(tokenizer, tokenizer.encode_text(text))) == text


def test_single_byte_tokens_release_whole_characters_only() -> None:
    released = pieces(smollm(), byte_ids(smollm(), "a漢👧é".encode()))
    assert [piece for piece in released if piece] == ["a", "漢", "👧", "é"]


def test_replacement_character_in_the_text_itself_is_kept() -> None:
    assert "".join(pieces(smollm(), byte_ids(smollm(), "x\ufffdy".encode()))) == "x\ufffdy"


def test_byte_that_is_never_valid_gives_one_mark_and_the_stream_goes_on() -> None:
    ids = byte_ids(qwen2(), "é".encode() + b"\xff" + b"ok")
    assert "".join(pieces(qwen2(), ids)) == "é\ufffdok"


def test_invalid_byte_inside_a_character_gives_a_mark_for_each_maximal_run() -> None:
    ids = byte_ids(qwen2(), "漢".encode()[:2] + b"\xff!")
    assert "".join(pieces(qwen2(), ids)) == "\ufffd\ufffd!" == qwen2().decode(ids)


def test_unfinished_character_at_the_end_is_one_mark() -> None:
    assert pieces(smollm(), byte_ids(smollm(), "a👧".encode()[:-1]))[-1] == "\ufffd"


def test_control_token_inside_a_character_does_not_break_it() -> None:
    ids = byte_ids(smollm(), "漢".encode())
    assert "".join(pieces(smollm(), [ids[0], 2, ids[1], ids[2]])) == "漢"


def test_fed_again_after_a_take_over_the_pieces_are_the_same() -> None:
    ids = byte_ids(smollm(), TEXT.encode())
    first, second = OutputText(smollm()), OutputText(smollm())
    expected = [first.push(token_id) for token_id in ids]
    for token_id in ids[:20]:
        second.push(token_id)
    assert [second.push(token_id) for token_id in ids[20:]] == expected[20:]
