"""A pages server that hangs costs a turn no more than computing what it would have delivered."""

from __future__ import annotations

import threading
import time

from snapshot_store.deadline import Deadline
from snapshot_store.redis_store import RedisPageStore
from snapshot_store.store import PagePresent, PageUnreachable
from snapshot_store.wire_pool import WireSettings
from tests.fleet_fixtures import MakeFleet
from tests.services import ValkeyServer
from tests.store_pages import PAGE_BYTES, make_pages

STORY = "The salt ships of the north came in at dawn, one after another, and their crews sang. " * 4


def test_turn_recomputes_in_time_when_the_pages_server_hangs(make_fleet: MakeFleet, pages_server: ValkeyServer) -> None:
    fleet = make_fleet(restore="auto")
    conversation = fleet.conversation()
    first = fleet.say("a", STORY, conversation_id=conversation)
    fleet.settle()
    fleet.worker("b")
    pages_server.pause()
    lifted = threading.Timer(12.0, pages_server.resume)
    lifted.start()
    try:
        asked = fleet.accept("And then?", conversation_id=conversation)
        begun = time.monotonic()
        second = fleet.run("b", asked)
        took_s = time.monotonic() - begun
    finally:
        lifted.cancel()
        pages_server.resume()
    assert list(second.usage["recompute"]) == ["late"]
    assert second.usage["recompute"]["late"] >= len(fleet.token_ids(first.turn_id)) // 64
    assert (second.usage["restored_pages"], took_s < 6.0) == (0, True), took_s
    assert 200 < second.usage["restore_ms"] < 4000


def test_fetch_and_look_up_end_with_their_deadline_on_new_and_old_connections(pages_server: ValkeyServer) -> None:
    pages = make_pages(list(range(64)))
    for is_old in (False, True):
        store = RedisPageStore(WireSettings(pages_server.url, max_connections=4))
        if is_old:
            for page in pages:
                page.put(store)
            requests = [page.request(bytearray(PAGE_BYTES)) for page in pages]
            assert all(isinstance(outcome, PagePresent) for outcome in store.fetch(requests))
        pages_server.pause()
        try:
            begun = time.monotonic()
            requests = [page.request(bytearray(PAGE_BYTES)) for page in pages]
            outcomes = list(store.fetch(requests, deadline=Deadline(0.3)))
            took_s = time.monotonic() - begun
        finally:
            pages_server.resume()
        store.close()
        assert [type(outcome) for outcome in outcomes] == [PageUnreachable] * len(pages)
        assert took_s < 1.5, (is_old, took_s)
