"""C56 (kekzl/imp PR#660, mattn/tensai PR#37).

A generic GPT-2 split was used for Qwen2: symbols cut one by one, digits by threes, a fifth more tokens. Ids from GGUF
metadata must equal those of the `tokenizers` library with the model's own tokenizer.json, and the ids that were quoted
from the real vocabularies.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as LibraryTokenizer

from tests.model_files import byte_vocabulary, qwen2_merges, tokenizer_json, write_tokenizer_files
from tests.prompt_lab import LLAMA3_CONTROLS, qwen2, smollm_metadata
from workers.prompt.errors import TokenizerError
from workers.prompt.gguf_vocabulary import bundle_from_gguf
from workers.prompt.tokenizer import Tokenizer
from workers.prompt.tokenizer_files import bundle_from_files

TEXTS = [
    "->", "(x):\n", "12345 67", "I'LL don't", " \n\n  x", "a\u00a0b", "ｆｕｌｌ", "\u00e9", "e\u0301", "", " ",
    " " * 200, "\t\t", "a\r\n\r\nb", "👩‍👩‍👧 🇳🇴", "<0x0A>", "▁", "x = [i**2 for i in range(10)]  # ok\n\n\treturn",
]  # fmt: skip

# From the full vocabulary; every id lies within the merges that we keep.
QWEN2_IDS = {
    "->": [405],
    "(x):\n": [2075, 982],
    "12345 67": [16, 17, 18, 19, 20, 220, 21, 22],
    "I'LL don't": [40, 6, 4086, 1513, 944],
    " \n\n  x": [4710, 220, 856],
    "a\u00a0b": [64, 4102, 65],
    "\u00e9": [963],
    "e\u0301": [963],
    "\t\t": [298],
    "<0x0A>": [27, 15, 87, 15, 32, 29],
}


def vocabularies() -> dict[str, dict[str, Any]]:
    return {
        "smollm": smollm_metadata(),
        "qwen2": byte_vocabulary(qwen2_merges(), user_defined=("<tool_call>",)),
        "llama3": byte_vocabulary(qwen2_merges(), "llama-bpe", LLAMA3_CONTROLS),
    }


NAMES = ("smollm", "qwen2", "llama3")


@pytest.fixture(scope="module", params=NAMES)
def trio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One vocabulary three ways: the library with a published layout, our GGUF reader, our tokenizer.json reader."""
    vocabulary = vocabularies()[request.param]
    published = tokenizer_json(vocabulary)
    library = LibraryTokenizer.from_str(json.dumps(published))
    library.encode_special_tokens = True
    folder: Path = write_tokenizer_files(tmp_path_factory.mktemp("files"), vocabulary)
    return {
        "name": request.param,
        "library": library,
        "gguf": Tokenizer(bundle_from_gguf(vocabulary)),
        "files": Tokenizer(bundle_from_files(folder)),
    }


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("way", ["gguf", "files"])
def test_ids_equal_those_of_the_library(trio: dict[str, Any], way: str, text: str) -> None:
    assert trio[way].encode_text(text) == trio["library"].encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_after_the_models_own_normalizer(trio: dict[str, Any], text: str) -> None:
    normalizer = trio["library"].normalizer
    expected = text if normalizer is None else normalizer.normalize_str(text)
    assert trio["gguf"].decode(trio["gguf"].encode_text(text)) == expected


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_equals_that_of_the_library(trio: dict[str, Any], text: str) -> None:
    ids = trio["gguf"].encode_text(text)
    assert trio["gguf"].decode(ids) == trio["library"].decode(ids)


@pytest.mark.parametrize("text", QWEN2_IDS)
def test_qwen2_ids_are_those_of_the_real_vocabulary(text: str) -> None:
    assert qwen2().encode_text(text) == QWEN2_IDS[text]


def test_llama3_cuts_digits_by_threes_and_qwen2_one_by_one() -> None:
    llama = Tokenizer(bundle_from_gguf(byte_vocabulary(("1 2", "12 3"), "llama-bpe")))
    qwen = Tokenizer(bundle_from_gguf(byte_vocabulary(("1 2", "12 3"), "qwen2")))
    assert [llama.token_text(token_id) for token_id in llama.encode_text("123123")] == ["123", "123"]
    assert [qwen.token_text(token_id) for token_id in qwen.encode_text("123")] == ["1", "2", "3"]


def test_llama3_takes_a_known_word_whole_without_merges_that_lead_there() -> None:
    vocabulary = byte_vocabulary(("h e",), "llama-bpe")
    vocabulary["tokenizer.ggml.tokens"].append("hey")
    vocabulary["tokenizer.ggml.token_type"].append(1)
    tokenizer = Tokenizer(bundle_from_gguf(vocabulary))
    assert [tokenizer.token_text(token_id) for token_id in tokenizer.encode_text("hey")] == ["hey"]


def test_tekken_cuts_at_case_changes_and_keeps_no_contractions_apart() -> None:
    library = LibraryTokenizer.from_str(bundle_from_gguf(byte_vocabulary(pre="tekken")).tokenizer_json)
    pieces = library.pre_tokenizer.pre_tokenize_str("don't stopNow 2024 a//\nb")
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in pieces] == [
        "don", "'t", " stop", "Now", " ", "2", "0", "2", "4", " a", "//\n", "b",
    ]  # fmt: skip


@pytest.mark.parametrize("name", [None, "default", "deepseek-llm", 7])
def test_unknown_split_is_refused_instead_of_guessed(name: object) -> None:
    vocabulary = byte_vocabulary() | {"tokenizer.ggml.pre": name}
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.pre"):
        bundle_from_gguf(vocabulary)


def test_user_defined_token_is_one_token_in_text() -> None:
    vocabulary = byte_vocabulary(user_defined=("<tool_call>",))
    tokenizer = Tokenizer(bundle_from_gguf(vocabulary))
    assert tokenizer.encode_text("a<tool_call>")[-1] == len(vocabulary["tokenizer.ggml.tokens"]) - 1
