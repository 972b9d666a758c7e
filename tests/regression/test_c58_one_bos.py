"""C58 (InfiniTensor/InfiniLM#388, abetlen/llama-cpp-python#1501, #1537).

The template wrote BOS and the tokenizer added another: every position shifted by one and greedy text differed; or BOS
was missing. A model that wants BOS gets exactly one, whoever writes it; one that does not want it gets none.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.model_files import byte_vocabulary, qwen2_merges, write_tokenizer_files
from tests.prompt_lab import (
    LLAMA3,
    LLAMA3_CONTROLS,
    TIME,
    assistant,
    builder,
    llama3,
    qwen2,
    smollm,
    tokenizer_with,
    user,
)
from workers.prompt.tokenizer import Tokenizer
from workers.prompt.tokenizer_files import bundle_from_files

WITHOUT_BOS = LLAMA3.replace("{% set content = bos_token + content %}", "")
BOS = 256 + 4600


def llama(template: str = LLAMA3, **more: object) -> Tokenizer:
    return tokenizer_with(template, "llama-bpe", LLAMA3_CONTROLS, bos_token_id=BOS, **more)


@pytest.mark.parametrize("template", [LLAMA3, WITHOUT_BOS], ids=["in_template", "not_in_template"])
def test_llama_type_prompt_starts_with_exactly_one_bos(template: str) -> None:
    ids = builder(llama(template)).build([user("hello")], template_time=TIME).ids
    assert (ids[0], ids.count(BOS)) == (BOS, 1)


def test_template_that_writes_bos_and_one_that_does_not_give_the_same_prompt() -> None:
    first, second = (
        builder(llama(template)).build([user("hello")], template_time=TIME).ids for template in (LLAMA3, WITHOUT_BOS)
    )
    assert first == second


def test_model_that_wants_no_bos_gets_none_from_us() -> None:
    ids = builder(llama(WITHOUT_BOS, add_bos_token=False)).build([user("hello")], template_time=TIME).ids
    assert BOS not in ids


def test_qwen_prompt_has_no_bos_although_a_bos_id_is_named() -> None:
    tokenizer = tokenizer_with(qwen2().bundle.chat_template or "", add_bos_token=False, bos_token_id=256 + 4600)
    ids = builder(tokenizer).build([user("hello")], template_time=TIME).ids
    assert 256 + 4600 not in ids


def test_smollm_prompt_starts_as_its_template_says() -> None:
    """Its BOS id is <|im_start|>, which opens every message; nothing is added in front."""
    ids = builder(smollm()).build([user("hello")], template_time=TIME).ids
    assert ids[:3] == (1, *smollm().encode_text("system\n"))


@pytest.mark.parametrize(
    ("tokenizer", "expected"), [(llama3, [BOS]), (qwen2, []), (smollm, [])], ids=["llama3", "qwen2", "smollm"]
)
def test_completion_prompt_follows_the_add_bos_rule(tokenizer: object, expected: list[int]) -> None:
    ready: Tokenizer = tokenizer()  # type: ignore[operator]
    ids = builder(ready).build_completion("hello").ids
    assert list(ids) == expected + ready.encode_text("hello")


@pytest.mark.parametrize("add_bos", [True, False])
def test_gguf_and_tokenizer_json_give_one_prompt(tmp_path: Path, add_bos: bool) -> None:
    vocabulary = byte_vocabulary(qwen2_merges(), "llama-bpe", LLAMA3_CONTROLS)
    folder = write_tokenizer_files(
        tmp_path, vocabulary, bos_token=LLAMA3_CONTROLS[0], eos_token=LLAMA3_CONTROLS[-1],
        chat_template=WITHOUT_BOS, add_bos_token=add_bos,
    )  # fmt: skip
    from_files = builder(Tokenizer(bundle_from_files(folder))).build([user("hello")], template_time=TIME).ids
    from_gguf = builder(llama(WITHOUT_BOS, add_bos_token=add_bos)).build([user("hello")], template_time=TIME).ids
    assert from_files == from_gguf


def test_follow_up_turn_does_not_gain_a_second_bos() -> None:
    ids = builder(llama3()).build([user("a"), assistant("b", [1, 2]), user("c")], template_time=TIME).ids
    assert ids.count(BOS) == 1


def test_post_processor_that_adds_bos_is_honoured_without_a_setting(tmp_path: Path) -> None:
    vocabulary = byte_vocabulary(qwen2_merges(), "llama-bpe", LLAMA3_CONTROLS)
    folder = write_tokenizer_files(tmp_path, vocabulary, bos_token=LLAMA3_CONTROLS[0])
    file = folder / "tokenizer.json"
    bos = {"id": LLAMA3_CONTROLS[0], "ids": [BOS], "tokens": [LLAMA3_CONTROLS[0]]}
    processor = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos["id"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {bos["id"]: bos},
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": processor}))
    assert bundle_from_files(folder).add_bos
