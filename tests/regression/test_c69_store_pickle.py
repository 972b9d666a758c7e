"""C69 (LazyAGI/LazyLLM#1154, ekzhu/datasketch#320, featureform/enrichmcp#169), the store's part: pickle in Redis.

Whoever can write a key must not get code run. A pickle that would create a file is put under every kind of key that
the store reads; nothing is created, each reader raises its typed error, and the next sound value is read right.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from typer.testing import CliRunner

from snapshot_store.cli import app
from snapshot_store.errors import BadFingerprint, BadKeyPart, BadMagic, IndexEntryDamaged, TranscriptDamaged
from snapshot_store.index import SnapshotIndex
from snapshot_store.keys import fingerprint_key, salt_key, snapshot_key, transcript_key
from snapshot_store.published import published_format
from snapshot_store.redis_store import RedisPageStore
from snapshot_store.salts import tenant_salt
from snapshot_store.store import PageDamaged, PagePresent
from snapshot_store.transcript_reader import TranscriptReader
from snapshot_store.wire_pool import WireSettings
from tests.services import ValkeyServer
from tests.store_fleet import ParkedFleet
from tests.store_pages import FINGERPRINT, PAGE_BYTES, make_pages


class Probe:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self.path), "w")


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    return tmp_path / "probe"


@pytest.fixture
def payload(probe: Path) -> bytes:
    raw = pickle.dumps(Probe(probe))
    pickle.loads(raw).close()
    assert probe.exists(), "the payload is harmless, so the test would prove nothing"
    probe.unlink()
    return raw


@pytest.fixture
def control(control_server: ValkeyServer) -> redis.Redis:
    return control_server.client()


def test_c69_pickle_as_a_page_is_bad_magic_and_the_next_page_is_read(
    pages_server: ValkeyServer, payload: bytes, probe: Path
) -> None:
    first, second = make_pages(list(range(32)))
    store = RedisPageStore(WireSettings(pages_server.url))
    pages_server.client().set(first.key, payload + bytes(4096))
    second.put(store)
    bad, good = store.fetch([page.request(bytearray(PAGE_BYTES)) for page in (first, second)])
    assert isinstance(bad, PageDamaged)
    assert isinstance(bad.error, BadMagic)
    assert isinstance(good, PagePresent)
    assert not probe.exists()


def test_c69_pickle_as_a_transcript_is_damaged(control: redis.Redis, payload: bytes, probe: Path) -> None:
    control.set(transcript_key("local", "resp_1"), payload)
    with pytest.raises(TranscriptDamaged):
        TranscriptReader(control, "local").entry("resp_1")
    assert not probe.exists()


def test_c69_pickle_as_an_index_entry_is_damaged(control: redis.Redis, payload: bytes, probe: Path) -> None:
    control.hset(snapshot_key("local", "conv_1"), mapping={"committed": 1, "entry": payload})
    with pytest.raises(IndexEntryDamaged):
        SnapshotIndex(control).read("local", "conv_1")
    assert not probe.exists()


def test_c69_pickle_as_a_fingerprint_is_refused(control: redis.Redis, payload: bytes, probe: Path) -> None:
    control.set(fingerprint_key(FINGERPRINT.format_digest), payload)
    with pytest.raises(BadFingerprint):
        published_format(control, FINGERPRINT.format_digest)
    assert not probe.exists()


def test_c69_pickle_as_a_salt_is_refused(control: redis.Redis, payload: bytes, probe: Path) -> None:
    control.set(salt_key("local"), payload)
    with pytest.raises(BadKeyPart):
        tenant_salt(control, "local")
    assert not probe.exists()


def test_c69_pickles_everywhere_do_not_run_in_the_inspector(
    control_server: ValkeyServer, pages_server: ValkeyServer, payload: bytes, probe: Path
) -> None:
    fleet = ParkedFleet(control_server, pages_server)
    (page,) = fleet.park(fleet.commit("resp_1", input_ids=tuple(range(16))))
    fleet.pages.set(page.key, payload)
    fleet.control.set(transcript_key("local", "resp_2"), payload)
    fleet.control.hset(snapshot_key("local", "resp_1"), mapping={"committed": 1, "entry": payload})
    fleet.control.set(fingerprint_key(FINGERPRINT.format_digest), payload)
    urls = ["--control", control_server.url, "--pages", pages_server.url]
    codes = [CliRunner().invoke(app, [*command, *urls]).exit_code for command in (["ls"], ["verify"])]
    assert codes == [0, 3]
    assert not probe.exists()
