"""Detokenizing and stop strings: the same text however it is cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.prompt_lab import qwen2, smollm
from workers.prompt.detokenizer import Detokenizer
from workers.prompt.output import OutputText
from workers.prompt.stops import StopMatcher

IDS = st.lists(st.integers(0, 49_151), max_size=40)
BYTE_IDS = st.lists(st.integers(0, 4_900), max_size=60)
LETTERS = st.text("ab", min_size=1, max_size=5)


@settings(deadline=None)
@given(ids=IDS)
def test_pieces_of_any_smollm_ids_add_up_to_their_decode(ids: list[int]) -> None:
    detokenizer = Detokenizer(smollm())
    text = "".join([*map(detokenizer.push, ids), detokenizer.finish()])
    assert text == smollm().decode(ids)


@settings(deadline=None)
@given(ids=BYTE_IDS)
def test_pieces_of_any_byte_garbage_add_up_to_one_lossy_decode(ids: list[int]) -> None:
    detokenizer = Detokenizer(qwen2())
    text = "".join([*map(detokenizer.push, ids), detokenizer.finish()])
    assert text == b"".join(map(qwen2().token_bytes, ids)).decode("utf-8", "replace")


@given(text=st.text("abc", max_size=40), stops=st.lists(LETTERS, max_size=4), cuts=st.lists(st.integers(0, 40)))
def test_stop_matching_does_not_depend_on_where_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    bounds = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    parts = [text[start:end] for start, end in pairwise(bounds)]
    assert run_stops(parts, stops) == run_stops(list(text), stops)


@given(text=st.text("abc", max_size=40), stops=st.lists(LETTERS, max_size=4))
def test_stop_matching_cuts_before_the_first_completed_stop(text: str, stops: list[str]) -> None:
    ends = [(text.index(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    expected = text if not ends else text[: min(ends)[0] + min(ends)[1]]
    assert run_stops(list(text), stops)[0] == expected


@given(text=st.text("ab", max_size=30), stops=st.lists(LETTERS, min_size=1, max_size=3))
def test_stop_matching_holds_back_only_what_may_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for index, char in enumerate(text):
        result = matcher.push(char)
        shown += result.text
        if result.stop is not None:
            return
        held = text[len(shown) : index + 1]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@settings(deadline=None)
@given(ids=IDS, split=st.integers(0, 40), stops=st.lists(st.sampled_from(["a", "the", "\n", "é"]), max_size=2))
def test_replayed_output_releases_the_same_pieces(ids: list[int], split: int, stops: list[str]) -> None:
    whole, resumed = OutputText(smollm(), stops), OutputText(smollm(), stops)
    expected = [whole.push(token_id) for token_id in ids]
    for token_id in ids[:split]:
        resumed.push(token_id)
    assert [resumed.push(token_id) for token_id in ids[split:]] == expected[split:]


def run_stops(parts: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = ""
    for part in parts:
        result = matcher.push(part)
        shown += result.text
        if result.stop is not None:
            return shown, result.stop
    return shown + matcher.finish(), None
