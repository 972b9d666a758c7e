"""A stored page whose checks all hold but whose cells were never written: a writer's fault, met by other workers.

It is no reason to stop a worker, nor to fail a turn: the chain ends in front of it and the rest is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpu.layout import KVLayout
from gpu.proof import Poison
from snapshot_store.memory import MemoryPageStore
from snapshot_store.record import build_header, parse_header
from snapshot_store.store import PutOutcome
from tests.fleet import Fleet

TEXT = "The lamp at the end of the pier is lit at six and put out at five. " * 6


class PoisoningStore(MemoryPageStore):
    """Poisons one cell of the second page of each chain before it is stored, with a header that fits."""

    layout: KVLayout | None = None

    def put(self, key: str, header: bytes, body: memoryview, ttl_s: int) -> PutOutcome:
        parsed = parse_header(key, memoryview(header))
        if parsed.identity.page_index == 1 and self.layout is not None:
            page = np.frombuffer(bytes(body), np.uint8).copy()
            cells = page.copy()
            Poison(self.layout).set(page, self.layout.page_size - 1)
            assert (page != cells).any()
            body = memoryview(page.tobytes())
            header = build_header(key, parsed.identity, body, parsed.segment_lengths)
        return super().put(key, header, body, ttl_s)


def test_kv_poisoned_record_ends_the_restored_prefix_and_the_turn_is_right(make_fleet: Callable[..., Fleet]) -> None:
    store = PoisoningStore()
    fleet = make_fleet(make_store=lambda url: store, page_size=16)
    store.layout = fleet.worker("a").engine.cache.layout
    kept, moved = fleet.conversation(), fleet.conversation()
    for conversation in (kept, moved):
        fleet.say("a", TEXT, conversation_id=conversation)
    fleet.settle()
    stayed = fleet.say("a", "And who lights it?", conversation_id=kept)
    restored = fleet.say("b", "And who lights it?", conversation_id=moved)
    assert fleet.token_ids(restored.turn_id) == fleet.token_ids(stayed.turn_id)
    assert restored.usage["cached_tokens"] == 16
