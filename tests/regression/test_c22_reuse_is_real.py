"""C22: a restore reports the full token count, yet the next request recomputes everything; only the clock tells.

Reported for llama.cpp (#26676, #25913). Right: after a restart of every worker a conversation of 1100 tokens computes
at most 100 rows for its next turn, on either worker.
"""

from __future__ import annotations

import pytest

from tests.fleet import Fleet

LONG = "The ledger lists salt, copper, figs and the day of sailing for each of the ships in port. " * 24


@pytest.mark.parametrize("restarted", ["a", "b"])
def test_long_conversation_after_restart_computes_only_the_new_tokens(local_fleet: Fleet, restarted: str) -> None:
    conversation = local_fleet.conversation()
    first = local_fleet.say("a", LONG, conversation_id=conversation)
    assert first.usage["prompt_tokens"] >= 1100
    local_fleet.settle()
    local_fleet.stop()
    before = local_fleet.worker(restarted).engine.counters.prefill_rows
    second = local_fleet.say(restarted, "And the last ship?", conversation_id=conversation)
    rows = local_fleet.worker(restarted).engine.counters.prefill_rows - before
    assert second.usage["cached_tokens"] >= 1000
    assert rows <= 100
