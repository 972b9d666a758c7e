"""On the default model: a secret told in one conversation comes back there, and never in another.

Two conversations over one long system text, on two workers, restored from the store at every turn; a third, fresh one
over the same text is asked for a code that it was never told.
"""

from __future__ import annotations

import pytest

from deploy.model_fetch import default_model_path
from tests.fleet_fixtures import MakeFleet

SYSTEM = "You are the keeper of a harbour ledger. You answer in one short sentence and repeat codes exactly. " * 8
SECRETS = {"amber-17": "slate-52", "slate-52": "amber-17"}


def _told(secret: str) -> list[dict[str, str]]:
    question = f"The code is {secret}. Repeat the code."
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_default_model_repeats_its_own_secret_and_no_other(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(default_model_path(), kv_format="k8v4", mirror_mib=128)
    asked = {"max_tokens": 24, "ignore_eos": False}
    conversations = {secret: fleet.conversation() for secret in SECRETS}
    for number in range(3):
        for index, (secret, other) in enumerate(SECRETS.items()):
            question = _told(secret) if number == 0 else "Repeat the code."
            worker = "ab"[(number + index) % 2]
            view = fleet.say(worker, question, conversation_id=conversations[secret], **asked)
            fleet.settle()
            assert view.error is None
            assert secret in view.output_text, f"turn {number}: {view.output_text!r}"
            assert other not in view.output_text
            assert number == 0 or view.usage["cached_tokens"] > 0, "not exercised"
    fresh = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Was a code given in this chat?"}]
    view = fleet.say("a", fresh, stateless=True, **asked)
    assert view.usage["cached_tokens"] > 0, "not exercised"
    assert not any(secret in view.output_text for secret in SECRETS)
