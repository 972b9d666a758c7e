"""Guesses from a turn's own text: which, how much work, and when they stop."""

from __future__ import annotations

import random

from gpu.plan import RowKind
from workers.engine.drafting import DraftCosts, Drafter, DraftSettings, SuffixIndex, num_agreeing, reply_part

PLAIN, DRAFTING = {RowKind.DECODE}, {RowKind.VERIFY, RowKind.DECODE}


def brute_draft(ids: list[int], min_match: int, num_tokens: int) -> tuple[int, ...]:
    """What follows the longest match of the last tokens among their latest occurrences, the later of equals."""
    last = ids[-min_match:]
    ends = [end for end in range(min_match, len(ids) + 1) if ids[end - min_match : end] == last][-8:]
    lengths = {
        end: next((n for n in range(end) if ids[end - 1 - n] != ids[-1 - n]), end) for end in ends if end < len(ids)
    }
    if len(ids) < min_match or not lengths:
        return ()
    best = max(lengths, key=lambda end: (lengths[end], end))
    copied = list(ids)
    for index in range(num_tokens):
        copied.append(copied[best + index])
    return tuple(copied[len(ids) :])


def test_draft_follows_the_longest_earlier_occurrence() -> None:
    num_drafts = 0
    for seed in range(500):
        rng = random.Random(seed)
        ids = [rng.randrange(1 + seed % 5) for _ in range(rng.randrange(1, 60))]
        min_match, num_tokens = rng.randrange(1, 5), rng.randrange(1, 9)
        expected = brute_draft(ids, min_match, num_tokens)
        assert SuffixIndex(min_match).draft(ids, num_tokens) == expected, (seed, ids)
        num_drafts += bool(expected)
    assert 200 < num_drafts < 500


def test_draft_of_a_copied_text_is_its_continuation() -> None:
    text = list(range(100, 140))
    index = SuffixIndex(3)
    assert index.draft(text, 4) == ()
    ids = [*text, 7, 8, *text[:5]]
    assert index.draft(ids, 4) == tuple(text[5:9])
    ids.extend(text[5:9])
    assert index.draft(ids, 8) == tuple(text[9:17])
    assert index.draft([*ids, 1], 8) == ()


def test_long_prompt_is_indexed_over_several_calls() -> None:
    ids = [*range(10_000), 1, 2, 3]
    index = SuffixIndex(3)
    calls = [index.draft(ids, 2) for _ in range(3)]
    assert calls == [(), (), (4, 5)]


def test_agreeing_ids_are_counted_from_the_first_on() -> None:
    assert num_agreeing((1, 2, 3), (1, 2, 4, 9)) == 2
    assert num_agreeing((1, 2), (1, 2, 3)) == 2
    assert num_agreeing((5,), (1, 2)) == 0


def test_reply_ends_with_an_end_token_or_its_limit() -> None:
    assert reply_part((1, 2, 3), frozenset({2}), 9) == (1, 2)
    assert reply_part((1, 2, 3), frozenset({7}), 2) == (1, 2)
    assert reply_part((1, 2, 3), frozenset(), 9) == (1, 2, 3)


def make_drafter(costs: DraftCosts) -> Drafter:
    return Drafter(DraftSettings(rows=4, min_match=2), costs)


def test_drafts_that_do_not_pay_stop_and_resume() -> None:
    costs = DraftCosts()
    costs.note(PLAIN, 0.0, 0.010)
    costs.note(DRAFTING, 0.010, 0.025)
    assert costs.ratio == 1.5
    drafter, ids = make_drafter(costs), [1, 2, 3] * 200
    for _ in range(6):
        assert drafter.draft(ids, 9) == (1, 2, 3, 1)
        drafter.note(0, len(ids))
    assert drafter.is_paused(len(ids))
    assert drafter.draft(ids, 9) == ()
    assert not drafter.is_paused(len(ids) + 16)
    for _ in range(6):
        drafter.note(0, len(ids) + 16)
    assert drafter.is_paused(len(ids) + 16 + 31)
    assert not drafter.is_paused(len(ids) + 16 + 32)


def test_drafts_that_pay_go_on() -> None:
    costs = DraftCosts()
    costs.note(PLAIN, 0.0, 0.010)
    costs.note(DRAFTING, 0.010, 0.025)
    drafter = make_drafter(costs)
    for num in range(50):
        drafter.note(1, num)
    assert not drafter.is_paused(0)


def test_steps_with_prompt_rows_tell_nothing_of_costs() -> None:
    costs = DraftCosts()
    costs.note(PLAIN, 0.0, 0.010)
    costs.note({RowKind.PREFILL, RowKind.VERIFY}, 0.010, 5.0)
    costs.note(DRAFTING, 0.010, 5.012)
    assert abs(costs.ratio - 1.2) < 1e-9


def test_text_without_repeats_lets_steps_be_launched_ahead_again() -> None:
    drafter = make_drafter(DraftCosts())
    ids = list(range(100))
    for _ in range(8):
        assert not drafter.is_paused(len(ids))
        assert drafter.draft(ids, 4) == ()
    assert drafter.is_paused(len(ids))
    assert not drafter.is_paused(len(ids) + 16)
