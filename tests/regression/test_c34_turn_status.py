"""C34: an unknown or expired id shows PENDING for ever.

Reported of Celery's result backends (celery/celery#4450, #3596, suitenumerique/messages#91, galaxyproject/galaxy
PR#18551). A turn is known by its record or not at all; the gateway makes a 404 of None.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from tests.services import ValkeyServer
from tests.turn_factory import LIMITS, claimed, complete, request
from workers.turns import calls
from workers.turns.control import TurnControl, connect


@pytest.mark.parametrize("turn_id", ["086c5e57-5258-4809-b1cc-78977cbed0f5", "x"])
def test_status_of_unknown_id_is_none(control_server: ValkeyServer, turn_id: str) -> None:
    control = TurnControl(connect(control_server.url))
    assert control.run(calls.get_turn("local", turn_id)) is None
    assert control.run(calls.get_turn_state("local", turn_id)) is None


def test_status_of_a_path_is_none(control_server: ValkeyServer) -> None:
    control = TurnControl(connect(control_server.url))
    assert control.run(calls.get_turn("local", "../x")) is None


def test_status_of_an_expired_turn_is_none(control_server: ValkeyServer) -> None:
    control = TurnControl(connect(control_server.url))
    control.run(calls.accept(request("a", store=False), replace(LIMITS, stream_ttl_s=1)))
    complete(control, claimed(control, "a"))
    assert control.run(calls.get_turn("local", "a")) is not None
    time.sleep(1.1)
    assert control.run(calls.get_turn("local", "a")) is None
