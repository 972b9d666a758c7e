"""C54 (vllm-project/vllm#3574, SharpAI/SwiftLM#126, ggml-org/llama.cpp#11538, mzau/mlx-knife#68).

Stop strings that span tokens were missed or partly sent, and a match inside a token leaked the rest. The text is cut
right before the first match, however the characters fall into tokens, and no character of the stop is ever sent.
"""

from __future__ import annotations

import pytest

from tests.prompt_lab import smollm
from workers.prompt.errors import PromptError
from workers.prompt.output import OutputText
from workers.prompt.stops import MAX_STOP_CHARS, MAX_STOPS, StopMatcher

REPLY = "Once upon a time, in a café near Tromsø 🇳🇴, abcd and more."


def streamed(stops: list[str], ids: list[int] | None = None) -> tuple[str, str | None]:
    """What a client sees of a reply, and the stop that ended it."""
    output = OutputText(smollm(), stops)
    text = ""
    for token_id in smollm().encode_text(REPLY) if ids is None else ids:
        released = output.push(token_id)
        text += released.text
        if released.stopped:
            return text, released.stop
    last = output.finish()
    return text + last.text, last.stop


@pytest.mark.parametrize(
    "stop",
    ["on a ti", "pon a time, in", ",", "café", "é near Troms", "🇳🇴", REPLY, "e.", "Once", " "],
)
def test_reply_is_cut_right_before_the_stop(stop: str) -> None:
    assert streamed([stop]) == (REPLY[: REPLY.index(stop)], stop)


@pytest.mark.parametrize("stop", ["not in there", "abcde", "more.."])
def test_stop_that_does_not_occur_changes_nothing(stop: str) -> None:
    assert streamed([stop]) == (REPLY, None)


@pytest.mark.parametrize("stops", [["abc", "bcd"], ["bcd", "abc"]])
def test_of_overlapping_stops_the_one_completed_first_wins(stops: list[str]) -> None:
    assert streamed(stops) == (REPLY[: REPLY.index("abc")], "abc")


def test_of_stops_that_end_together_the_longest_wins() -> None:
    assert streamed(["time", "a time"]) == (REPLY[: REPLY.index("a time")], "a time")


def test_stop_that_occurs_only_in_the_prompt_does_not_stop() -> None:
    """The matcher sees output ids only; the prompt never passes through it."""
    assert streamed(["<|im_start|>", "assistant"]) == (REPLY, None)


def test_no_part_of_a_stop_is_released_before_the_match_is_decided() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push(char).text for char in "aENxENDz"] == ["a", "", "", "ENx", "", "", "", ""]


def test_text_held_back_is_released_at_the_end() -> None:
    matcher = StopMatcher(["END"])
    assert (matcher.push("the EN").text, matcher.finish()) == ("the ", "EN")


def test_rest_of_the_token_after_a_stop_is_dropped() -> None:
    matcher = StopMatcher(["b"])
    assert (matcher.push("abc").text, matcher.push("d").text, matcher.finish()) == ("a", "", "")


def test_unfinished_character_can_complete_a_stop_at_the_end() -> None:
    ids = smollm().encode_text("x漢")
    output = OutputText(smollm(), ["\ufffd"])
    for token_id in ids[:-1]:
        output.push(token_id)
    assert output.finish().stop == "\ufffd"


@pytest.mark.parametrize(
    "stops", [[""], ["ok", ""], ["x" * (MAX_STOP_CHARS + 1)], [str(index) for index in range(MAX_STOPS + 1)]]
)
def test_stop_that_cannot_be_served_is_refused(stops: list[str]) -> None:
    with pytest.raises(PromptError, match="stop"):
        StopMatcher(stops)
