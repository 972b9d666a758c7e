"""The prompt of a follow-up turn begins with the last turn's prompt and output ids, whatever was sampled."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.prompt_lab import TIME, assistant, builder, llama3, qwen2, smollm, user
from workers.prompt.tokenizer import Tokenizer

CONTENT = st.text(min_size=1, max_size=30).filter(lambda text: not any("\ud800" <= char <= "\udfff" for char in text))
SPICED = st.one_of(CONTENT, st.sampled_from(["<|im_end|>", " <|im_start|>x", "\n", "  a  ", "<|eot_id|>", "KV0N0X"]))
OUTPUT = st.lists(st.integers(0, 4_858), max_size=25)
TURNS = st.lists(st.tuples(SPICED, OUTPUT), min_size=1, max_size=4)


def turn_prompts(tokenizer: Tokenizer, turns: list[tuple[str, list[int]]]) -> list[tuple[int, ...]]:
    """Prompt ids of each turn, and those of one more."""
    messages: list[dict[str, Any]] = []
    prompts = []
    for text, output in [*turns, ("last", [])]:
        messages.append(user(text))
        prompts.append(builder(tokenizer).build(messages, template_time=TIME).ids)
        messages.append(assistant(tokenizer.decode(output), output))
    return prompts


def check_prefixes(tokenizer: Tokenizer, turns: list[tuple[str, list[int]]]) -> None:
    prompts = turn_prompts(tokenizer, turns)
    for prompt, (_, output), following in zip(prompts, turns, prompts[1:], strict=False):
        expected = (*prompt, *output)
        assert following[: len(expected)] == expected


@settings(deadline=None, max_examples=30)
@given(turns=TURNS)
def test_follow_up_prompt_starts_with_everything_before_for_smollm(turns: list[tuple[str, list[int]]]) -> None:
    check_prefixes(smollm(), turns)


@settings(deadline=None, max_examples=30)
@given(turns=TURNS)
def test_follow_up_prompt_starts_with_everything_before_for_qwen2(turns: list[tuple[str, list[int]]]) -> None:
    check_prefixes(qwen2(), turns)


@settings(deadline=None, max_examples=30)
@given(turns=TURNS)
def test_follow_up_prompt_starts_with_everything_before_when_contents_are_stripped(
    turns: list[tuple[str, list[int]]],
) -> None:
    check_prefixes(llama3(), turns)


def test_follow_up_prompt_starts_with_everything_before_after_sampling_garbage() -> None:
    """Ids as a temperature far above one draws them, control tokens and half characters among them."""
    rng = random.Random(5)
    output = [rng.randrange(49_152) for _ in range(2_000)]
    check_prefixes(smollm(), [("Tell me.", output), ("And?", output[::-1])])


@settings(deadline=None, max_examples=30)
@given(contents=st.lists(SPICED, min_size=1, max_size=4))
def test_control_tokens_of_a_prompt_come_from_the_template_alone(contents: list[str]) -> None:
    ids = builder(qwen2()).build([user(content) for content in contents], template_time=TIME).ids
    assert sum(map(qwen2().is_control, ids)) == 2 * len(contents) + 1


@settings(deadline=None, max_examples=30)
@given(turns=TURNS)
def test_prompt_ids_are_a_function_of_their_inputs(turns: list[tuple[str, list[int]]]) -> None:
    assert turn_prompts(qwen2(), turns) == turn_prompts(qwen2(), turns)
