"""A page is spoiled between two turns: the other worker's turn is right all the same and says why it recomputed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from snapshot_store.chain import PageDigest
from snapshot_store.cli import app
from snapshot_store.faults import Fault, FaultKind, FaultyPageStore
from snapshot_store.redis_store import RedisPageStore
from snapshot_store.store import PageStore
from snapshot_store.transcript import CacheScope
from snapshot_store.wire_pool import WireSettings
from tests.fleet import Fleet
from tests.services import ValkeyServer

FIRST = "The ledger of the harbour lists each ship, its cargo of salt, copper and figs, and the day it sailed."
NEXT = "Which ship came in?"
SCOPE = CacheScope.CONVERSATION
Spoil = Callable[[ValkeyServer, list[bytes]], None]


@pytest.fixture(scope="module")
def fleet(_control_process: ValkeyServer, _pages_process: ValkeyServer, tiny_gguf: Path) -> Iterator[Fleet]:
    made = Fleet(_control_process.start().url, _pages_process.start().url, tiny_gguf, page_size=16)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def kept_ids(fleet: Fleet) -> tuple[int, ...]:
    """Ids of the same conversation kept on one worker."""
    conversation = fleet.conversation()
    for text in (FIRST, NEXT):
        view = fleet.say("a", text, conversation_id=conversation, scope=SCOPE)
    return fleet.token_ids(view.turn_id)


def _chain(fleet: Fleet, conversation: str) -> list[bytes]:
    """Keys of a conversation's parked pages, first page first."""
    result = CliRunner().invoke(app, ["show", conversation, "--json", *_urls(fleet)])
    assert result.exit_code == 0, result.output
    (view,) = json.loads(result.output)["conversations"]
    (chain,) = view["chains"]
    digests = [PageDigest.parse(page["digest"]) for page in chain["pages"] if page["state"] == "parked"]
    return [f"kvalet:local:page:{digest.hex()}".encode() for digest in digests]


def _urls(fleet: Fleet) -> list[str]:
    settings = fleet.worker("a").settings
    return ["--control", settings.control_url, "--pages", settings.pages_url]


def _flip(server: ValkeyServer, keys: list[bytes]) -> None:
    with server.client() as pages:
        (last,) = pages.getrange(keys[2], -1, -1)  # type: ignore[misc]
        pages.setrange(keys[2], pages.strlen(keys[2]) - 1, bytes([last ^ 1]))  # type: ignore[operator]


def _cut(server: ValkeyServer, keys: list[bytes]) -> None:
    with server.client() as pages:
        pages.set(keys[2], pages.get(keys[2])[:-100])  # type: ignore[index]


def _evict(server: ValkeyServer, keys: list[bytes]) -> None:
    with server.client() as pages:
        pages.delete(keys[2])


def _swap(server: ValkeyServer, keys: list[bytes]) -> None:
    with server.client() as pages:
        records = [pages.get(key) for key in keys[2:4]]
        for key, record in zip(keys[2:4], reversed(records), strict=True):
            pages.set(key, record)  # type: ignore[arg-type]


def _garbage(server: ValkeyServer, keys: list[bytes]) -> None:
    with server.client() as pages:
        pages.set(keys[2], b"\x80\x04" + bytes(5000))


def _later_version(server: ValkeyServer, keys: list[bytes]) -> None:
    with server.client() as pages:
        pages.setrange(keys[2], 8, b"\x02")


SPOILS: dict[str, tuple[Spoil, str]] = {
    "flipped bit": (_flip, "damaged:SegmentMismatch"),
    "cut short": (_cut, "damaged:TruncatedRecord"),
    "evicted": (_evict, "missing"),
    "swapped with its neighbour": (_swap, "damaged:HeaderMismatch"),
    "other bytes": (_garbage, "damaged:BadMagic"),
    "later version": (_later_version, "damaged:BadVersion"),
}


@pytest.mark.parametrize(("spoil", "reason"), SPOILS.values(), ids=SPOILS.keys())
def test_turn_behind_a_spoiled_page_is_right_and_says_why_it_recomputed(
    fleet: Fleet, kept_ids: tuple[int, ...], _pages_process: ValkeyServer, spoil: Spoil, reason: str
) -> None:
    conversation = fleet.conversation()
    fleet.say("a", FIRST, conversation_id=conversation, scope=SCOPE)
    fleet.settle()
    keys = _chain(fleet, conversation)
    assert len(keys) > 4, "not exercised"
    spoil(_pages_process, keys)
    view = fleet.say("b", NEXT, conversation_id=conversation, scope=SCOPE)
    assert fleet.token_ids(view.turn_id) == kept_ids
    assert view.usage["restored_pages"] == 2
    assert list(view.usage["recompute"]) == [reason]
    shown = CliRunner().invoke(app, ["show", conversation, *_urls(fleet)], env={"COLUMNS": "200"})
    assert f'{view.turn_id} recomputed: {{"{reason}":' in shown.output


def test_spoiled_page_is_stored_anew_by_the_turn_that_recomputed_it(
    fleet: Fleet, kept_ids: tuple[int, ...], _pages_process: ValkeyServer
) -> None:
    conversation = fleet.conversation()
    fleet.say("a", FIRST, conversation_id=conversation, scope=SCOPE)
    fleet.settle()
    _flip(_pages_process, _chain(fleet, conversation))
    assert CliRunner().invoke(app, ["verify", conversation, *_urls(fleet)]).exit_code == 3
    fleet.say("b", NEXT, conversation_id=conversation, scope=SCOPE)
    fleet.settle()
    assert CliRunner().invoke(app, ["verify", conversation, *_urls(fleet)]).exit_code == 0


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (FaultKind.DROP, "missing"),
        (FaultKind.OUT_OF_MEMORY, "missing"),
        (FaultKind.EVICT, "missing"),
        (FaultKind.FLIP, "damaged:SegmentMismatch"),
        (FaultKind.TRUNCATE, "damaged:TruncatedRecord"),
        (FaultKind.SWAP, "damaged:HeaderMismatch"),
    ],
)
def test_turn_on_a_faulty_page_server_is_right(
    fleet: Fleet,
    kept_ids: tuple[int, ...],
    tiny_gguf: Path,
    kind: FaultKind,
    reason: str,
) -> None:
    stores: list[FaultyPageStore] = []

    def make_store(url: str) -> PageStore:
        stores.append(
            FaultyPageStore(
                RedisPageStore(WireSettings(url)), [Fault(kind, amount=-1 if kind is FaultKind.FLIP else 7)]
            )
        )
        return stores[-1]

    settings = fleet.worker("a").settings
    faulty = Fleet(settings.control_url, settings.pages_url, tiny_gguf, make_store, page_size=16)
    try:
        conversation = faulty.conversation()
        faulty.say("faulty-a", FIRST, conversation_id=conversation, scope=SCOPE)
        faulty.settle()
        view = faulty.say("faulty-b", NEXT, conversation_id=conversation, scope=SCOPE)
        assert stores[0].times_struck(kind) > 0, "not exercised"
        assert faulty.token_ids(view.turn_id) == kept_ids
        assert list(view.usage["recompute"]) == [reason]
    finally:
        faulty.stop()
