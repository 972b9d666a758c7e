"""When a prompt is counted at accept, and what is refused then."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from gateway.errors import InvalidRequest, PromptTooLong
from gateway.prompt_size import PromptSizer
from gateway.turns import TurnService
from snapshot_store.transcript import CacheScope, TranscriptEntry
from tests.gateway_fleet import byte_bundle
from tests.turn_factory import request
from workers.prompt.history import INSTRUCTIONS
from workers.registry import ModelRecord
from workers.turns.events import TurnState
from workers.turns.outcomes import TurnView
from workers.turns.records import TurnRequest

CONTEXT = 4096
# <|im_start|> u s e r \n <|im_end|> \n around a user's text; <|im_start|> a s s i s t a n t \n before the reply
AROUND_USER, BEFORE_REPLY = 8, 11


class Turns:
    """Turn control in memory, as far as a sizer reads it."""

    def __init__(self, *entries: TranscriptEntry, has_bundle: bool = True) -> None:
        self._entries = {entry.turn_id: entry for entry in entries}
        self._has_bundle = has_bundle
        self.num_bundles_read = 0

    async def view(self, tenant: str, turn_id: str) -> TurnView | None:
        entry = self._entries.get(turn_id)
        asked = request(turn_id, tenant=tenant)
        return TurnView(
            turn_id,
            tenant,
            "tiny",
            TurnState.COMPLETED,
            asked,
            1.0,
            1.0,
            2.0,
            "w1",
            1,
            0,
            None,
            None,
            3,
            "",
            transcript=entry,
        )

    async def run(self, _: object) -> bytes | None:
        self.num_bundles_read += 1
        return byte_bundle().to_bytes() if self._has_bundle else None


def entry(turn_id: str, text: str, parent: TranscriptEntry | None = None, output: int = 10) -> TranscriptEntry:
    """A committed turn: a user's text and a reply of `output` tokens; its prompt is counted byte by byte."""
    before = parent.prompt_tokens + len(parent.output_ids) + 2 if parent else 0
    return TranscriptEntry(
        turn_id=turn_id, tenant="local", model="tiny", parent_id=parent.turn_id if parent else None, root_id="a",
        conversation_id=None, scope=CacheScope.TENANT, scope_id="", created_at=1.0, committed_at=2.0, template_time=1,
        shared_length=0, input_ids=(), output_ids=(65,) * output, messages=({"role": "user", "content": text},),
        output_text="A" * output, finish_reason="stop", format_digest=b"", numerics_digest=b"", worker_id="w1", epoch=1,
        cached_tokens=0, prompt_tokens=before + AROUND_USER + len(text) + BEFORE_REPLY,
    )  # fmt: skip


def asking(text: str, **fields: Any) -> TurnRequest:
    return request(messages=({"role": "user", "content": text},), **fields)


@pytest.fixture
def sizers() -> Iterator[list[PromptSizer]]:
    made: list[PromptSizer] = []
    yield made
    for sizer in made:
        sizer.close()


def check(sizers: list[PromptSizer], turns: Turns, asked: TurnRequest) -> None:
    sizers.append(PromptSizer(cast("TurnService", turns)))
    model = ModelRecord("tiny", byte_bundle().digest.hex(), CONTEXT, 1.0)
    asyncio.run(sizers[-1].check(asked, model, "input"))


def test_size_few_bytes_are_never_counted(sizers: list[PromptSizer]) -> None:
    turns = Turns()
    check(sizers, turns, asking("x" * 2000))
    assert turns.num_bundles_read == 0


def test_size_many_bytes_that_fit_are_counted_and_pass(sizers: list[PromptSizer]) -> None:
    turns = Turns()
    check(sizers, turns, asking("x" * (CONTEXT - 1 - AROUND_USER - BEFORE_REPLY)))
    assert turns.num_bundles_read == 1


def test_size_first_token_too_many_is_refused_with_both_numbers(sizers: list[PromptSizer]) -> None:
    with pytest.raises(PromptTooLong) as caught:
        check(sizers, Turns(), asking("x" * (CONTEXT - AROUND_USER - BEFORE_REPLY)))
    assert (caught.value.num_tokens, caught.value.limit) == (CONTEXT, CONTEXT)


def test_size_short_turn_after_a_long_path_is_refused_with_the_whole_count(sizers: list[PromptSizer]) -> None:
    first = entry("a", "x" * 2000)
    second = entry("b", "y" * 1990, first)
    asked = asking("z" * 60, parent_id="b")
    with pytest.raises(PromptTooLong) as caught:
        check(sizers, Turns(first, second), asked)
    turns_before = second.prompt_tokens + len(second.output_ids) + 2
    assert caught.value.num_tokens == turns_before + AROUND_USER + 60 + BEFORE_REPLY


def test_size_short_turn_after_a_short_path_is_not_counted(sizers: list[PromptSizer]) -> None:
    turns = Turns(entry("a", "x"))
    check(sizers, turns, asking("y", parent_id="a"))
    assert turns.num_bundles_read == 0


def test_size_turn_of_an_open_parent_is_left_to_the_worker(sizers: list[PromptSizer]) -> None:
    turns = Turns()
    check(sizers, turns, asking("x" * 10 * CONTEXT, parent_id="open"))
    assert turns.num_bundles_read == 0


def test_size_model_without_a_published_tokenizer_is_left_to_the_worker(sizers: list[PromptSizer]) -> None:
    check(sizers, Turns(has_bundle=False), asking("x" * 10 * CONTEXT))


def test_size_instructions_count_and_lead(sizers: list[PromptSizer]) -> None:
    asked = asking("x" * 10)
    leading = {"role": "system", "content": "y" * CONTEXT, INSTRUCTIONS: True}
    with pytest.raises(PromptTooLong):
        check(sizers, Turns(), replace(asked, messages=(leading, *asked.messages)))


def test_size_messages_that_the_template_refuses_are_a_bad_request(sizers: list[PromptSizer]) -> None:
    asked = replace(asking("x" * CONTEXT), messages=({"role": "wizard", "content": "x" * CONTEXT},))
    with pytest.raises(InvalidRequest) as caught:
        check(sizers, Turns(), asked)
    assert caught.value.code == "invalid_prompt"
