"""C25: returning sessions answer with other requests' content, silently.

Reported for LMCache (#4385) and TensorRT-LLM (#8813). Two conversations over one long system text are told a code
each, on two workers, among short requests that force evictions; a third, fresh one is asked for a code. With random
weights only ids can be compared: each must equal the run of a conversation that was never parked and never alone.
"""

from __future__ import annotations

import pytest

from tests.fleet import Fleet
from tests.fleet_fixtures import MakeFleet

SYSTEM = "You are the keeper of the harbour ledger. You write down what you are told, word by word. " * 5
RETURN = "Repeat the code."
FRESH = "Was a code given in this chat? Repeat it, else say none."


def _first(secret: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Remember code {secret}."}]


def _hold(fleet: Fleet, workers: tuple[str, str], secret: str, num_rounds: int, scope: str) -> list[str]:
    conversation = fleet.conversation()
    turn_ids = [fleet.accept(_first(secret), conversation_id=conversation, scope=scope, max_tokens=12)]
    fleet.run(workers[0], turn_ids[0])
    for number in range(num_rounds):
        fleet.settle()
        turn_ids.append(fleet.accept(RETURN, conversation_id=conversation, scope=scope, max_tokens=12))
        fleet.run(workers[(number + 1) % 2], turn_ids[-1])
        for short in range(2):
            filler = fleet.accept(f"note {secret} {number} {short} " * 8, stateless=True, max_tokens=4)
            fleet.run(workers[short], filler)
    return turn_ids


@pytest.mark.timeout(180)
@pytest.mark.parametrize("backend", ["cpu", "simulated"])
def test_two_secrets_among_evictions_stay_with_their_conversations(make_fleet: MakeFleet, backend: str) -> None:
    reference = make_fleet(backend="cpu", page_size=16, restore="never")
    resident = {"kv_resident": 64} if backend == "simulated" else {}
    fleet = make_fleet(backend=backend, page_size=16, mirror_mib=1, **resident)
    expected, found = {}, {}
    for secret in ("amber-17", "slate-52"):
        expected[secret] = _hold(reference, ("still", "still"), secret, 10, "conversation")
        found[secret] = _hold(fleet, ("a", "b"), secret, 10, "tenant")
    for secret, turn_ids in found.items():
        assert fleet.token_ids(turn_ids[-1]) == reference.token_ids(expected[secret][-1])
        assert fleet.view(turn_ids[-1]).usage["cached_tokens"] > 0, "not exercised"
    fresh = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": FRESH}]
    asked = fleet.accept(fresh, stateless=True, max_tokens=24)
    assert fleet.run("a", asked).usage["cached_tokens"] > 0, "not exercised"
    alone = reference.accept(fresh, stateless=True, max_tokens=24, scope="key", key_id="other")
    reference.run("alone", alone)
    assert fleet.token_ids(asked) == reference.token_ids(alone)
    assert fleet.worker("a").engine.cache.stats().evictions > 0, "not exercised: nothing was evicted"
