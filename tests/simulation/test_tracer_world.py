"""P1 by simulation: under random cancels, evictions, restores and kills no row ever attends to a foreign cell.

Two faults that no alarm of the cache can see are planted as well: the tracer itself must find them.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from gpu.plan import RowKind
from gpu.proof import Poison
from gpu.simulated import Fault, StoreFault
from tests.kv_lab import FORMATS, Lab
from tests.tracer import ForeignCell, TracerWorld

SEEDS = range(20)
RESIDENT = (None, 0, 64, 160)


@pytest.mark.parametrize("seed", SEEDS)
def test_tracer_random_work_attends_to_no_foreign_cell(seed: int) -> None:
    world = TracerWorld(seed, FORMATS[seed % 4], RESIDENT[seed // 4 % 4])
    world.run(2000)
    assert world.sampler.num_checked > 2000
    world.close_all()
    stats = world.cache.stats()
    assert (stats.free + stats.cached, sum(stats.held.values())) == (stats.num_pages, 0)


def test_tracer_world_meets_every_event() -> None:
    """The simulation would prove nothing if its arena were large enough to avoid evictions."""
    world = TracerWorld(1, "int8", 64)
    seen = {"evictions": 0, "device_evictions": 0, "promotions": 0, "streamed_bytes": 0}
    kill = world.kill

    def count_then_kill() -> None:
        stats = world.cache.stats()
        for name in seen:
            seen[name] += getattr(stats, name)
        kill()

    world.kill = count_then_kill  # type: ignore[method-assign]
    count_then_kill.__name__ = "kill"
    world.run(600)
    count_then_kill()
    assert min(seen.values()) > 0, seen
    assert min(world.done.get(name, 0) for name in ("kill", "cancel", "forget_stored", "drop_local", "overshoot")) > 0
    assert world.num_restored > 0


@pytest.mark.parametrize("kv_format", FORMATS)
def test_tracer_foreign_page_in_the_store_is_seen(kv_format: str) -> None:
    """Two stored pages swap their bytes, and no check of the store is there to notice."""
    world = TracerWorld(2, kv_format, None, attest="off")
    with pytest.raises(ForeignCell):
        for _ in range(200):
            world.run(20)
            if len(world.store) > 1:
                first, second = world.random.sample(list(world.store), 2)
                world.store[first], world.store[second] = world.store[second], world.store[first]
                world.kill()


class BlindPoison(Poison):
    """Poison that is never missed: the cache as it would be without that check."""

    def set(self, page: NDArray[np.uint8], first_cell: int = 0) -> None:
        """Leave what the last user of the page left."""

    def intact(self, page: NDArray[np.uint8], first_cell: int = 0) -> bool:
        return True

    def present(self, page: NDArray[np.uint8]) -> bool:
        return False


@pytest.mark.parametrize("plane", [0, 1])
@pytest.mark.parametrize("kind", [RowKind.VERIFY, RowKind.DECODE])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_tracer_stale_tail_in_the_mirror_is_seen(kv_format: str, kind: RowKind, plane: int) -> None:
    """The field report: one way to append leaves the mirror out, and full pages are read from there later."""

    def blind(lab: Lab) -> None:
        lab.backend.plant(StoreFault(Fault.COUNT_WITHOUT_STORE, plane=plane, kind=kind))  # type: ignore[union-attr]
        lab.cache.memory._poison = BlindPoison(lab.layout)

    world = TracerWorld(3, kv_format, 0, attest="off", on_start=blind)
    with pytest.raises(ForeignCell):
        world.run(2000)
