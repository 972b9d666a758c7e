"""C15: an entry trimmed to a shared prefix keeps the old tail reachable; parallel chats answer each other's questions.

Reported for vllm-mlx (PR #385) and claude-code-local (PR #47). Right: each reply equals the one of a fresh server, in
every round, and shared pages are really shared.
"""

from __future__ import annotations

import pytest

from tests.fleet_fixtures import MakeFleet

SYSTEM = "You keep the register of city codes and answer with the code alone, never with anything else. " * 4
CITIES = tuple(f"City{index:02d}" for index in range(16))


def _messages(index: int) -> list[dict[str, str]]:
    question = f"City code for {CITIES[index]} is A{index}. City code?"
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


@pytest.mark.timeout(120)
def test_sixteen_parallel_chats_over_one_prefix_equal_the_first_round(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(slots=16)
    asked = {"stateless": True, "max_tokens": 24}
    reference = []
    for index in range(16):
        turn_id = fleet.accept(_messages(index), **asked)
        fleet.run("fresh", turn_id)
        reference.append(fleet.path(turn_id)[-1].output_ids)
    for _ in range(5):
        turn_ids = [fleet.accept(_messages(index), **asked) for index in range(16)]
        threads = [fleet.start("busy", turn_id) for turn_id in turn_ids]
        for thread in threads:
            thread.join(60)
        assert [fleet.path(turn_id)[-1].output_ids for turn_id in turn_ids] == reference
    assert fleet.view(turn_ids[-1]).usage["cached_tokens"] > 0, "not exercised: nothing was shared"
