"""A conversation goes between workers whose kernels round differently: one keeps weights as f32, one as bf16.

With `accept_numerics` their pages are reused, and every turn says so; without it each worker recomputes. Ids may differ
by rounding then, contents may not: each reused page was computed from the very tokens that stand before it, and its
cells are those of one computation but for rounding. Nobody who has not asked for it reads a page with a foreign part.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from gpu.plan import PlanEntry, RowKind, StepPlan
from snapshot_store.cli import app
from snapshot_store.deadline import Deadline
from snapshot_store.fingerprint import MIXED_DIGEST
from snapshot_store.index import SnapshotIndex
from snapshot_store.memory import MemoryPageStore
from snapshot_store.record import parse_header
from snapshot_store.store import FetchRequest, IsQuarantined, PutOutcome, nobody_quarantined
from tests.fleet import Fleet, StackClient
from tests.fleet_fixtures import MakeFleet
from tests.services import ValkeyServer
from tests.teacher import teacher
from tests.worker_process import CeleryWorker, real_worker_settings
from workers.turns.events import TurnState
from workers.turns.outcomes import TurnView

PAGE_SIZE = 16
STORY = "The tide table of the harbour names each hour at which the bar can be crossed, and the depth. " * 3
ASKED = ("And at noon?", "And at dusk?", "And at night?")
EXACT, ROUNDED = {"weights": "f32"}, {"weights": "bf16"}


class WatchedStore(MemoryPageStore):
    """Remembers who wrote which page under which numerics, and which keys were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.numerics: dict[str, bytes] = {}
        self.bodies: dict[str, bytes] = {}
        self.page_ids: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.puts: list[tuple[bytes, bytes]] = []
        self.asked: set[str] = set()

    def put(self, key: str, header: bytes, body: memoryview, ttl_s: int) -> PutOutcome:
        identity = parse_header(key, memoryview(header)).identity
        self.puts.append((identity.writer_boot_id, identity.numerics_digest))
        self.numerics.setdefault(key, identity.numerics_digest)
        self.bodies.setdefault(key, bytes(body))
        self.page_ids.setdefault(key, (identity.page_index, identity.token_ids))
        return super().put(key, header, body, ttl_s)

    def touch(self, keys: Sequence[str], ttl_s: int | Sequence[int], deadline: Deadline | None = None) -> list[bool]:
        self.asked.update(keys)
        return super().touch(keys, ttl_s, deadline)

    def fetch(
        self,
        requests: Sequence[FetchRequest],
        is_quarantined: IsQuarantined = nobody_quarantined,
        deadline: Deadline | None = None,
    ) -> Any:
        self.asked.update(request.key for request in requests)
        return super().fetch(requests, is_quarantined, deadline)

    def keys_of(self, numerics: bytes) -> set[str]:
        return {key for key, written in self.numerics.items() if written == numerics}

    def written(self, numerics: bytes) -> dict[int, bytes]:
        """Page bytes by page index, of one conversation."""
        return {self.page_ids[key][0]: self.bodies[key] for key in self.keys_of(numerics)}

    def forget(self, numerics: bytes) -> None:
        for key in self.keys_of(numerics):
            self._records.pop(key, None)


class Harbour:
    """A fleet of workers `exact`, `rounded` and others over one watched store, and one conversation."""

    def __init__(self, make_fleet: MakeFleet, model: Path, **settings: Any) -> None:
        self.store = WatchedStore()
        common = {"page_size": PAGE_SIZE, "kv_format": "f16", **settings}
        self.fleet: Fleet = make_fleet(model, make_store=lambda url: self.store, **common)
        for name, weights in (("exact", EXACT), ("rounded", ROUNDED)):
            self.fleet.worker(name, **weights)
        self.exact, self.rounded = (self.fleet.workers[name].identity.numerics_digest for name in ("exact", "rounded"))
        assert self.exact != self.rounded
        self.conversation = self.fleet.conversation()

    def say(self, worker: str, text: str, **changes: Any) -> TurnView:
        view = self.fleet.say(worker, text, conversation_id=self.conversation, **changes)
        assert view.state is TurnState.INCOMPLETE, view.error
        self.fleet.settle()
        return view

    def hold(self, workers: Sequence[str]) -> list[TurnView]:
        """One turn on each worker in turn; what they reuse is counted from then on."""
        return [self.say(worker, text) for worker, text in zip(workers, (STORY, *ASKED), strict=False)]

    def sealed_before(self, view: TurnView) -> int:
        """Full pages that the turns before this one have sealed."""
        entry = self.fleet.path(view.turn_id)[-1]
        return (entry.shared_length - 1) // PAGE_SIZE


def _cells(body: bytes) -> NDArray[np.float32]:
    return np.frombuffer(body, np.float16).astype(np.float32)


def _computed_at_once(model: Path, token_ids: Sequence[int], **settings: Any) -> list[bytes]:
    """Bytes of all full pages of a token list, computed in one sequence that has met no other numerics."""
    runtime = teacher(model, page_size=PAGE_SIZE, kv_format="f16", threads=1, **settings)
    cache = runtime.backend.cache
    sequence = cache.open()
    try:
        cache.reserve(sequence, len(token_ids))
        while sequence.length < len(token_ids):
            chunk = tuple(token_ids[sequence.length : sequence.length + runtime.backend.max_rows])
            runtime.backend.launch(StepPlan((PlanEntry(sequence, RowKind.PREFILL, chunk),))).wait()
        return [
            bytes(cache.seal(sequence, index, bytes([index]) * 16).buffer)
            for index in range(len(token_ids) // PAGE_SIZE)
        ]
    finally:
        cache.close(sequence)
        runtime.close()


def test_with_any_each_worker_reuses_all_pages_of_the_others_and_every_turn_says_so(
    make_fleet: MakeFleet, fp16_gguf: Path
) -> None:
    harbour = Harbour(make_fleet, fp16_gguf, accept_numerics="any")
    first, second, third, fourth = harbour.hold(["exact", "rounded", "exact", "rounded"])
    exact = harbour.exact.hex()
    assert (first.usage["numerics"], "foreign_pages" in first.usage) == (exact, False)
    for view in (second, third, fourth):
        assert view.usage["cached_tokens"] == harbour.sealed_before(view) * PAGE_SIZE, view.usage
        assert view.usage["numerics"] == "mixed"
        assert "recompute" not in view.usage
    num_first = harbour.sealed_before(second)
    assert second.usage["foreign_pages"] == {exact: num_first}
    assert third.usage["foreign_pages"] == {"mixed": harbour.sealed_before(third) - num_first}
    assert third.usage["cached"]["mirror"] == num_first * PAGE_SIZE, "what it computed itself"
    assert fourth.usage["foreign_pages"] == {exact: num_first, "mixed": harbour.sealed_before(fourth) - num_first}
    marks = [(entry.numerics_digest, entry.extra.get("foreign_pages")) for entry in harbour.fleet.path(fourth.turn_id)]
    assert marks[0] == (harbour.exact, None)
    assert marks[1:] == [(MIXED_DIGEST, view.usage["foreign_pages"]) for view in (second, third, fourth)]
    assert set(harbour.store.numerics.values()) == {harbour.exact, MIXED_DIGEST}


def test_without_it_each_worker_recomputes_what_the_other_has_added(make_fleet: MakeFleet, fp16_gguf: Path) -> None:
    harbour = Harbour(make_fleet, fp16_gguf)
    first, second, third = harbour.hold(["exact", "rounded", "exact"])
    num_first, num_second = harbour.sealed_before(second), harbour.sealed_before(third)
    assert second.usage["cached_tokens"] == 0
    assert second.usage["recompute"] == {"numerics": num_first}
    assert third.usage["cached_tokens"] == num_first * PAGE_SIZE, "its own pages of turn 1"
    assert third.usage["recompute"] == {"numerics": num_second - num_first}
    own = [harbour.exact, harbour.rounded, harbour.exact]
    assert [view.usage["numerics"] for view in (first, second, third)] == [numerics.hex() for numerics in own]
    assert not any("foreign_pages" in view.usage for view in (first, second, third))
    assert set(harbour.store.numerics.values()) == {harbour.exact, harbour.rounded}


def test_strict_worker_behind_mixed_turns_reads_no_mixed_page_and_writes_what_one_computation_gives(
    make_fleet: MakeFleet, fp16_gguf: Path
) -> None:
    harbour = Harbour(make_fleet, fp16_gguf, accept_numerics="any")
    first, second, _ = harbour.hold(["exact", "rounded", "exact"])
    harbour.fleet.worker("strict", **EXACT, accept_numerics="own")
    harbour.store.asked.clear()
    last = harbour.say("strict", ASKED[2])
    num_first = harbour.sealed_before(second)
    assert last.usage["cached_tokens"] == num_first * PAGE_SIZE, "pages of turn 1, which are of its numerics"
    assert last.usage["recompute"] == {"numerics": harbour.sealed_before(last) - num_first}
    mixed = harbour.store.keys_of(MIXED_DIGEST)
    assert mixed
    assert not harbour.store.asked & mixed
    assert first.usage["numerics"] == last.usage["numerics"] == harbour.exact.hex()
    pages = _computed_at_once(fp16_gguf, harbour.fleet.token_ids(last.turn_id)[:-1], **EXACT)
    written = {
        harbour.store.page_ids[key][0]: harbour.store.bodies[key] for key in harbour.store.keys_of(harbour.exact)
    }
    assert written == dict(enumerate(pages)), "byte for byte"


def test_mixed_pages_hold_the_cells_of_their_tokens_but_for_rounding(make_fleet: MakeFleet, fp16_gguf: Path) -> None:
    harbour = Harbour(make_fleet, fp16_gguf, accept_numerics="any")
    *_, last = harbour.hold(["exact", "rounded", "exact", "rounded"])
    ids = harbour.fleet.token_ids(last.turn_id)[:-1]
    pages = _computed_at_once(fp16_gguf, ids, **EXACT)
    rounded = _computed_at_once(fp16_gguf, ids, **ROUNDED)
    noise = max(np.abs(_cells(a) - _cells(b)).max() for a, b in zip(pages, rounded, strict=True))
    others = min(np.abs(_cells(a) - _cells(b)).max() for a, b in pairwise(pages))
    assert 0 < 4 * noise < others, "not exercised: rounding must be small beside other contents"
    mixed = harbour.store.keys_of(MIXED_DIGEST)
    num_same = 0
    for key in mixed:
        index, page_ids = harbour.store.page_ids[key]
        assert page_ids == ids[index * PAGE_SIZE : (index + 1) * PAGE_SIZE]
        assert np.abs(_cells(harbour.store.bodies[key]) - _cells(pages[index])).max() <= 2 * noise
        num_same += harbour.store.bodies[key] in (pages[index], rounded[index])
    assert num_same < len(mixed), "not exercised: mixed pages are of no single numerics"


def test_turn_taken_over_by_other_numerics_goes_on_with_the_stream_and_is_marked(
    make_fleet: MakeFleet, fp16_gguf: Path
) -> None:
    for accept in ("any", "own"):
        harbour = Harbour(make_fleet, fp16_gguf, accept_numerics=accept, mirror_mib=16)
        fleet = harbour.fleet
        turn_id = fleet.accept(STORY, max_tokens=300, conversation_id=harbour.conversation, scope="conversation")
        thread = fleet.start("exact", turn_id)
        deadline = time.monotonic() + 30
        while fleet.view(turn_id).next_number < 60:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        fleet.worker("exact").drain(0.0)
        thread.join(10)
        emitted = fleet.streamed_ids(turn_id)
        assert 40 < len(emitted) < 300, "not exercised"
        done = fleet.run("rounded", turn_id)
        fleet.settle()
        usage = done.usage
        entry = fleet.path(turn_id)[-1]
        assert (done.state, done.epoch) == (TurnState.INCOMPLETE, 2)
        assert fleet.streamed_ids(turn_id) == entry.output_ids
        assert entry.output_ids[: len(emitted)] == emitted
        assert usage["forced_numerics"] == entry.extra["forced_numerics"] == [harbour.exact.hex()]
        num_sealed = (usage["prompt_tokens"] + len(emitted) - 1) // PAGE_SIZE
        if accept == "any":
            assert usage["numerics"] == "mixed"
            assert usage["foreign_pages"][harbour.exact.hex()] >= num_sealed - 2, usage
        else:
            assert (usage["numerics"], usage.get("foreign_pages")) == (harbour.rounded.hex(), None)
            assert usage["recompute"]["numerics"] >= num_sealed
            pages = _computed_at_once(fp16_gguf, fleet.token_ids(turn_id)[:-1], **ROUNDED)
            assert harbour.store.written(harbour.rounded) == dict(enumerate(pages)), "forced ids leave no trace"
        fleet.stop()


def test_foreign_pages_in_the_mirror_serve_and_are_never_written_in_their_name(
    make_fleet: MakeFleet, fp16_gguf: Path
) -> None:
    harbour = Harbour(make_fleet, fp16_gguf, accept_numerics="any")
    first, second = harbour.hold(["exact", "rounded"])
    harbour.store.forget(harbour.exact)
    third = harbour.say("rounded", ASKED[1])
    assert third.usage["cached"] == {"mirror": harbour.sealed_before(third) * PAGE_SIZE, "store": 0}
    assert third.usage["foreign_pages"][harbour.exact.hex()] == harbour.sealed_before(second)
    boot_id = harbour.fleet.workers["rounded"].boot_id
    assert Counter(numerics for writer, numerics in harbour.store.puts if writer == boot_id).keys() == {MIXED_DIGEST}
    assert first.usage["numerics"] == harbour.exact.hex()


def test_listed_numerics_are_reused_and_mixed_ones_only_if_listed(make_fleet: MakeFleet, fp16_gguf: Path) -> None:
    harbour = Harbour(make_fleet, fp16_gguf)
    exact = harbour.exact.hex()
    harbour.fleet.worker("picky", **ROUNDED, accept_numerics=exact)
    harbour.fleet.worker("open", **ROUNDED, accept_numerics=f"{exact},mixed")
    harbour.hold(["exact"])
    second = harbour.say("picky", ASKED[0])
    num_first = harbour.sealed_before(second)
    assert second.usage["foreign_pages"] == {exact: num_first}
    third = harbour.say("picky", ASKED[1])
    assert third.usage["foreign_pages"] == {exact: num_first}
    assert third.usage["recompute"] == {"numerics": harbour.sealed_before(third) - num_first}
    fourth = harbour.say("open", ASKED[2])
    assert fourth.usage["foreign_pages"] == {exact: num_first, "mixed": harbour.sealed_before(fourth) - num_first}


def test_damaged_mixed_page_ends_the_prefix_and_is_recomputed(make_fleet: MakeFleet, fp16_gguf: Path) -> None:
    harbour = Harbour(make_fleet, fp16_gguf, accept_numerics="any")
    first, second = harbour.hold(["exact", "rounded"])
    key = min(harbour.store.keys_of(MIXED_DIGEST), key=lambda key: harbour.store.page_ids[key][0])
    record = harbour.store._records[key]
    record.value = record.value[:-100] + bytes([record.value[-100] ^ 1]) + record.value[-99:]
    third = harbour.say("exact", ASKED[1])
    assert third.usage["recompute"] == {"damaged:SegmentMismatch": 1}
    assert third.usage["cached_tokens"] == harbour.sealed_before(second) * PAGE_SIZE
    assert third.usage["numerics"] == first.usage["numerics"] == harbour.exact.hex(), "nothing foreign was left of it"


def test_show_lists_every_numerics_of_a_mixed_conversation(
    make_fleet: MakeFleet, fp16_gguf: Path, control_server: ValkeyServer, pages_server: ValkeyServer
) -> None:
    fleet = make_fleet(fp16_gguf, page_size=PAGE_SIZE, accept_numerics="any")
    fleet.worker("exact", **EXACT)
    fleet.worker("rounded", **ROUNDED)
    conversation = fleet.conversation()
    views = []
    for worker, text in (("exact", STORY), ("rounded", ASKED[0]), ("exact", ASKED[1])):
        views.append(fleet.say(worker, text, conversation_id=conversation))
        fleet.settle()
    urls = ["--control", control_server.url, "--pages", pages_server.url]

    def show(*options: str) -> str:
        result = CliRunner().invoke(app, ["show", conversation, *urls, *options], env={"COLUMNS": "250"})
        assert result.exit_code == 0, result.output
        return result.output

    [view] = json.loads(show("--json"))["conversations"]
    exact = fleet.workers["exact"].identity.numerics_digest
    chains = {chain["numerics_digest"]: chain for chain in view["chains"]}
    assert chains.keys() == {exact.hex(), MIXED_DIGEST.hex()}
    assert chains[MIXED_DIGEST.hex()]["numerics"] == {"numerics": "mixed"}
    states = {name: [page["state"] for page in chain["pages"]] for name, chain in chains.items()}
    num_first = views[1].usage["foreign_pages"][exact.hex()]
    num_pages = (len(fleet.token_ids(views[2].turn_id)) - 1) // PAGE_SIZE
    assert states[exact.hex()][:num_pages] == ["parked"] * num_first + ["missing"] * (num_pages - num_first)
    assert states[MIXED_DIGEST.hex()][:num_pages] == ["missing"] * num_first + ["parked"] * (num_pages - num_first)
    assert [turn["foreign_pages"] for turn in view["turns"]] == [None, *(v.usage["foreign_pages"] for v in views[1:])]
    assert view["differences"] == []
    assert f"reused pages of other numerics: {json.dumps(views[1].usage['foreign_pages'])}" in show()
    entry = SnapshotIndex(control_server.client()).read("local", conversation)
    assert entry is not None
    assert (entry.num_pages, entry.numerics_digest) == (num_pages, MIXED_DIGEST)
    assert entry.numerics_cells == {
        exact: num_first * PAGE_SIZE, MIXED_DIGEST: (num_pages - num_first) * PAGE_SIZE
    }  # fmt: skip
    figures = fleet.workers["rounded"].presence.figures()
    assert (figures["foreign_pages"], figures["marked_turns"]) == (views[1].usage["foreign_pages"], 1)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("accept", ["any", "own"])
def test_worker_processes_of_two_numerics_pass_a_conversation_to_and_fro(
    control_server: ValkeyServer,
    pages_server: ValkeyServer,
    fp16_gguf: Path,
    start_worker: Callable[..., CeleryWorker],
    accept: str,
) -> None:
    settings = real_worker_settings(pages_server, fp16_gguf, lease_s=15, page_size=PAGE_SIZE, accept_numerics=accept)
    for name, weights in (("exact", EXACT), ("rounded", ROUNDED)):
        start_worker(name, app="workers.celery_app", **settings, **weights).wait_ready(120)
    client = StackClient(control_server.url, "test")
    conversation = client.conversation()
    usages = []
    for worker, text in (("exact", STORY), ("rounded", ASKED[0]), ("exact", ASKED[1])):
        turn_id = client.send(text, worker=worker, conversation_id=conversation)
        view = client.wait(turn_id)
        assert (view.state, view.worker_id) == (TurnState.INCOMPLETE, worker), view.error
        client.wait_parked(turn_id)
        usages.append(view.usage)
    first, second, third = usages
    if accept == "any":
        assert second["restored_pages"] == second["foreign_pages"][first["numerics"]] > 0
        assert third["restored_pages"] == third["foreign_pages"]["mixed"] > 0
        assert [usage["numerics"] for usage in usages] == [first["numerics"], "mixed", "mixed"]
        assert not any("recompute" in usage for usage in usages)
    else:
        assert (second["restored_pages"], third["restored_pages"]) == (0, 0)
        assert [list(usage.get("recompute", ())) for usage in usages] == [[], ["numerics"], ["numerics"]]
        assert third["numerics"] == first["numerics"] != second["numerics"]
