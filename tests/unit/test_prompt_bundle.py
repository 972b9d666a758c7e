"""Tokenizer bundles: they travel unchanged, refuse what is damaged, and read what files offer."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from tokenizers import Tokenizer as LibraryTokenizer

from gpu.errors import ModelFileError
from gpu.model.load import open_source
from tests.model_files import (
    byte_vocabulary,
    qwen2_merges,
    random_tensors,
    tiny_config,
    tokenizer_json,
    write_gguf,
    write_safetensors,
    write_tokenizer_files,
)
from tests.prompt_lab import qwen2, smollm
from workers.model_source import open_model
from workers.prompt.bundle import MAX_PLAIN_BYTES, PieceStyle, TokenizerBundle
from workers.prompt.errors import TokenizerError
from workers.prompt.gguf_vocabulary import bundle_from_gguf
from workers.prompt.tokenizer import Tokenizer
from workers.prompt.tokenizer_files import bundle_from_files


def sentence_pieces(**more: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary: control tokens, bytes, letters, and a few scored pieces."""
    pieces = ["▁", *"abcdehlnortuw", "he", "ll", "hell", "hello", "▁hello", "▁w", "or", "▁wor", "ld", "▁world", "▁a"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    scores = [0.0] * 259 + [float(len(piece)) for piece in pieces]  # longer pieces first
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ bos_token }}[{{ messages[0].content }}]",
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def test_bundle_travels_unchanged() -> None:
    bundle = smollm().bundle
    assert TokenizerBundle.from_bytes(bundle.to_bytes()) == bundle


@pytest.mark.parametrize(
    "change",
    [{"add_bos": True}, {"chat_template": "x"}, {"end_ids": (1,)}, {"space_prefix": True}, {"bos_id": 3}],
    ids=lambda change: next(iter(change)),
)
def test_digest_changes_with_every_field(change: dict[str, Any]) -> None:
    bundle = qwen2().bundle
    assert replace(bundle, **change).digest != bundle.digest


def packed(**changes: Any) -> bytes:
    plain = msgpack.unpackb(zlib.decompress(qwen2().bundle.to_bytes()))
    return zlib.compress(msgpack.packb({key: value for key, value in (plain | changes).items() if value is not ...}))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (b"", "bundle"),
        (b"nonsense", "zlib over msgpack"),
        (zlib.compress(b"\xc1"), "zlib over msgpack"),
        (zlib.compress(msgpack.packb([1])), "bundle keys"),
        (qwen2().bundle.to_bytes()[:-9], "bundle size"),
        (zlib.compress(bytes(MAX_PLAIN_BYTES + 1), 1), "bundle size"),
        (packed(version=2), "bundle version"),
        (packed(surprise=1), "bundle keys"),
        (packed(add_bos=...), "bundle keys"),
        (packed(add_bos=1), "bundle add_bos"),
        (packed(end_ids=["x"]), "bundle end_ids"),
        (packed(style="morse"), "bundle style"),
    ],
    ids=["empty", "text", "not_msgpack", "list", "cut", "bomb", "version", "more", "less", "type", "ids", "style"],
)
def test_bundle_that_is_damaged_is_refused(block: bytes, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        TokenizerBundle.from_bytes(block)


@pytest.mark.parametrize("field", ["bos_id", "eos_id"])
def test_named_id_outside_the_vocabulary_is_refused(field: str) -> None:
    with pytest.raises(TokenizerError, match=field):
        Tokenizer(replace(qwen2().bundle, **{field: 1_000_000}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, r"tokenizer\.ggml\.model"),
        ({"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens"),
        ({"tokenizer.ggml.tokens": ["a"] * 512}, "occurs twice"),
        ({"tokenizer.ggml.token_type": [1]}, r"tokenizer\.ggml\.token_type"),
        ({"tokenizer.ggml.merges": ["a b c"]}, r"tokenizer\.ggml\.merges"),
        ({"tokenizer.ggml.merges": ["a zzz"]}, r"tokenizer\.ggml\.merges"),
        ({"tokenizer.ggml.eos_token_id": 512}, r"tokenizer\.ggml\.eos_token_id"),
        ({"tokenizer.ggml.eos_token_id": -1}, r"tokenizer\.ggml\.eos_token_id"),
        ({"tokenizer.ggml.bos_token_id": "1"}, r"tokenizer\.ggml\.bos_token_id"),
    ],
)
def test_vocabulary_that_cannot_be_used_is_refused_by_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        bundle_from_gguf(byte_vocabulary() | change)


def test_end_ids_hold_the_named_and_the_known_end_tokens() -> None:
    assert smollm().bundle.end_ids == (0, 2)


def test_control_tokens_are_invisible_in_text_and_named_alone() -> None:
    assert (smollm().decode([1, 2]), smollm().token_text(2)) == ("", "<|im_end|>")


def test_id_without_a_piece_adds_no_text() -> None:
    """Embeddings are often padded beyond the vocabulary, and random weights sample there."""
    assert smollm().decode([1_000_000]) == ""


def test_sentence_pieces_merge_by_score() -> None:
    tokenizer = Tokenizer(bundle_from_gguf(sentence_pieces()))
    ids = tokenizer.encode_text(" hello world")
    assert [tokenizer.token_text(token_id) for token_id in ids] == [" hello", " world"]


@pytest.mark.parametrize("score", ["x", float("nan"), float("inf"), None])
def test_sentence_piece_scores_that_cannot_rank_are_refused(score: object) -> None:
    vocabulary = sentence_pieces()
    vocabulary["tokenizer.ggml.scores"][-1] = score
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.scores"):
        bundle_from_gguf(vocabulary)


def test_sentence_pieces_fall_back_to_bytes() -> None:
    tokenizer = Tokenizer(bundle_from_gguf(sentence_pieces()))
    ids = tokenizer.encode_text("é")
    assert [tokenizer.token_bytes(token_id) for token_id in ids] == [b"\xc3", b"\xa9"]
    assert tokenizer.decode(ids) == "é"


def test_sentence_piece_completion_gets_bos_and_a_leading_space() -> None:
    tokenizer = Tokenizer(bundle_from_gguf(sentence_pieces()))
    ids = tokenizer.encode_completion("hello")
    assert (ids[0], tokenizer.decode(ids)) == (1, "hello")
    assert tokenizer.token_bytes(ids[1]) == b" hello"


def test_sentence_piece_text_never_becomes_a_control_token() -> None:
    tokenizer = Tokenizer(bundle_from_gguf(sentence_pieces()))
    assert not {0, 1, 2} & set(tokenizer.encode_text("</s><s> hello"))


def test_sentence_piece_tokenizer_json_gives_the_gguf_ids(tmp_path: Path) -> None:
    vocabulary = sentence_pieces()
    published = json.loads(bundle_from_gguf(vocabulary).tokenizer_json)
    published["normalizer"] = {
        "type": "Sequence",
        "normalizers": [{"type": "Prepend", "prepend": "▁"}, published["normalizer"]],
    }
    published["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(published))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": True}))
    bundle = bundle_from_files(tmp_path)
    assert (bundle.style, bundle.space_prefix, bundle.add_bos) == (PieceStyle.SENTENCE_PIECE, True, True)
    ours = Tokenizer(bundle).encode_completion("hello world")
    assert ours[1:] == LibraryTokenizer.from_str(json.dumps(published)).encode("hello world").ids


def test_template_file_goes_before_the_configuration(tmp_path: Path) -> None:
    folder = write_tokenizer_files(tmp_path, byte_vocabulary(), chat_template="old")
    (folder / "chat_template.jinja").write_text("new")
    assert bundle_from_files(folder).chat_template == "new"


def test_default_template_is_taken_from_a_list_of_named_ones(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    folder = write_tokenizer_files(tmp_path, byte_vocabulary(), chat_template=templates)
    assert bundle_from_files(folder).chat_template == "d"


def test_generation_configuration_adds_end_ids(tmp_path: Path) -> None:
    folder = write_tokenizer_files(tmp_path, byte_vocabulary(), eos_token={"content": "<|im_end|>"})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [510, 7]}))
    assert bundle_from_files(folder).end_ids == (7, 509, 510, 511)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "must be JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "decoder"),
        ('{"decoder": {"type": "WordPiece"}}', "WordPiece"),
        ('{"decoder": {"type": "ByteLevel"}}', "model"),
        ('{"decoder": 7}', "decoder"),
        ('{"decoder": {"decoders": [1]}}', "decoders"),
        ('{"decoder": {"type": "ByteLevel"}, "normalizer": ["x"]}', "normalizer"),
        ('{"decoder": {"type": "ByteLevel"}, "pre_tokenizer": {"pretokenizers": 1}}', "pretokenizers"),
        ('{"decoder": {"type": "ByteLevel"}, "model": {"vocab": {"a": "b"}}}', "vocabulary"),
        ('{"decoder": {"type": "ByteLevel"}, "model": {"vocab": {"a": 0}}, "added_tokens": [1]}', "added_tokens"),
        ('{"decoder": {"type": "ByteLevel"}, "model": {"vocab": {"a": 0}}, "added_tokens": [{}]}', "added_tokens"),
    ],
)
def test_tokenizer_json_that_cannot_be_used_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=message):
        bundle_from_files(tmp_path)


def test_tokenizer_json_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        bundle_from_files(tmp_path)


def test_gguf_model_opens_with_its_tokenizer(tmp_path: Path) -> None:
    config = tiny_config()
    model = open_model(write_gguf(tmp_path / "tiny-model.gguf", config, random_tensors(config)), tmp_path)
    assert (model.name, model.tokenizer.vocab_size, model.config.vocab_size) == ("tiny-model", 512, 512)
    assert len(model.load_weights().layers) == 2


def test_safetensors_directory_opens_with_its_tokenizer(tmp_path: Path) -> None:
    config = tiny_config("qwen3")
    folder = write_safetensors(tmp_path / "tiny", config, random_tensors(config))
    write_tokenizer_files(folder, byte_vocabulary())
    model = open_model(folder, tmp_path)
    assert (model.name, model.config.qk_norm, model.bundle.end_ids) == ("tiny", True, (509, 511))


def test_vocabulary_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    config = tiny_config(vocab_size=500)
    folder = write_safetensors(tmp_path / "m", config, random_tensors(config))
    write_tokenizer_files(folder, byte_vocabulary())
    with pytest.raises(TokenizerError, match="embeds 500"):
        open_model(folder, tmp_path)


def test_published_layout_and_ours_tokenize_alike_with_template_tokens() -> None:
    vocabulary = byte_vocabulary(qwen2_merges())
    text = "<|im_start|>user\nhi 12<|im_end|>"
    library = LibraryTokenizer.from_str(json.dumps(tokenizer_json(vocabulary)))
    ours = Tokenizer(bundle_from_gguf(vocabulary)).encode_template(text, at_start=True)
    assert ours == library.encode(text, add_special_tokens=False).ids


def test_model_file_opens_by_its_content_not_by_its_ending(tmp_path: Path) -> None:
    config = tiny_config()
    assert open_source(write_gguf(tmp_path / "model.bin", config, random_tensors(config))).config.num_layers == 2


def test_added_token_whose_id_the_library_would_change_is_refused(tmp_path: Path) -> None:
    """The library numbers added tokens on from the vocabulary and does not say so when the file disagrees."""
    vocabulary = byte_vocabulary()
    published = tokenizer_json(vocabulary)
    published["added_tokens"][-1]["id"] += 5
    (tmp_path / "tokenizer.json").write_text(json.dumps(published))
    with pytest.raises(TokenizerError, match="control_ids=516"):
        Tokenizer(bundle_from_files(tmp_path))


def test_model_that_cannot_be_opened_names_its_path_in_a_note(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError) as caught:
        open_model(tmp_path / "bad.gguf", tmp_path)
    assert caught.value.__notes__ == [f"model: {tmp_path / 'bad.gguf'}"]
