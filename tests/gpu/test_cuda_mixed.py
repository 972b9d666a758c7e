"""A conversation goes from a host worker to a GPU worker and back: reused where that is accepted, else recomputed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fleet_fixtures import MakeFleet
from tests.gpu.lab import device_missing
from workers.turns.events import TurnState
from workers.turns.outcomes import TurnView

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(device_missing()), reason=device_missing() or "a device")]
PAGE_SIZE = 16
STORY = "The tide table of the harbour names each hour at which the bar can be crossed, and the depth. " * 3
ASKED = ("And at noon?", "And at dusk?")


def hold(make_fleet: MakeFleet, model: Path, **settings: object) -> tuple[list[TurnView], list[int]]:
    """Host, device, host; the turns, and the pages that the turns before each had sealed."""
    fleet = make_fleet(model, page_size=PAGE_SIZE, kv_format="k8v4", **settings)
    fleet.worker("host", backend="cpu")
    fleet.worker("device", backend="cuda", device_kv_mib=64)
    conversation = fleet.conversation()
    views = []
    for worker, text in zip(("host", "device", "host"), (STORY, *ASKED), strict=True):
        views.append(fleet.say(worker, text, conversation_id=conversation))
        assert views[-1].state in (TurnState.COMPLETED, TurnState.INCOMPLETE), views[-1].error
        fleet.settle()
    sealed = [(fleet.path(view.turn_id)[-1].shared_length - 1) // PAGE_SIZE for view in views]
    return views, sealed


def test_with_any_pages_go_from_host_to_device_and_back(make_fleet: MakeFleet, fp16_gguf: Path) -> None:
    (first, second, third), sealed = hold(make_fleet, fp16_gguf, accept_numerics="any")
    for view, pages in ((second, sealed[1]), (third, sealed[2])):
        assert view.usage["cached_tokens"] == pages * PAGE_SIZE, view.usage
        assert view.usage["numerics"] == "mixed"
    assert second.usage["foreign_pages"] == {first.usage["numerics"]: sealed[1]}


def test_without_it_each_recomputes(make_fleet: MakeFleet, fp16_gguf: Path) -> None:
    (first, second, third), sealed = hold(make_fleet, fp16_gguf)
    assert second.usage["cached_tokens"] == 0
    assert second.usage["recompute"] == {"numerics": sealed[1]}
    assert third.usage["cached_tokens"] == sealed[1] * PAGE_SIZE, "its own pages of turn 1"
    assert first.usage["numerics"] == third.usage["numerics"] != second.usage["numerics"]
