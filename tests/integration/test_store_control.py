"""What the store keeps on control: salts, fingerprints in clear, the fenced index, transcripts read back."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from snapshot_store.errors import (
    BadFingerprint,
    BadKeyPart,
    IndexEntryDamaged,
    StoreUnreachable,
    TranscriptDamaged,
    TranscriptMissing,
)
from snapshot_store.fingerprint import MIXED_DIGEST
from snapshot_store.index import SnapshotIndex, SnapshotIndexEntry
from snapshot_store.keys import fingerprint_key, salt_key, snapshot_key, transcript_key
from snapshot_store.published import publish_fingerprint, published_format, published_numerics
from snapshot_store.salts import existing_salt, tenant_salt
from snapshot_store.transcript_codec import encode_entry
from snapshot_store.transcript_reader import TranscriptReader
from tests.services import ValkeyServer
from tests.store_pages import FINGERPRINT
from tests.store_transcripts import make_entry

NUMERICS, OTHER_NUMERICS = b"n" * 32, b"m" * 32
ENTRY = SnapshotIndexEntry(
    tenant="local",
    branch="conv_1",
    head_turn_id="resp_1",
    root_id="resp_1",
    model="tiny",
    num_cells=64,
    num_pages=4,
    num_bytes=4096,
    page_size=16,
    format_digest=b"f" * 32,
    numerics_digest=NUMERICS,
    worker_id="worker-1",
    writer_boot_id=b"b" * 16,
    epoch=1,
    committed_at=1000.25,
    parked_at=1000.5,
)


@pytest.fixture
def control(control_server: ValkeyServer) -> redis.Redis:
    return control_server.client()


@pytest.fixture
def nowhere() -> redis.Redis:
    return redis.Redis(port=1, retry=Retry(NoBackoff(), 0))


def test_salt_drawn_once_stays(control: redis.Redis) -> None:
    assert tenant_salt(control, "local") == tenant_salt(control, "local")


def test_salts_of_two_tenants_differ(control: redis.Redis) -> None:
    assert tenant_salt(control, "local") != tenant_salt(control, "other")


def test_salt_drawn_by_many_at_once_is_one(control_server: ValkeyServer) -> None:
    salts: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: salts.append(tenant_salt(control_server.client(), "local"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(salts) == 8
    assert len(set(salts)) == 1


def test_salt_of_a_new_tenant_is_kept_on_a_server_without_memory(control: redis.Redis) -> None:
    control.config_set("maxmemory", 1)
    try:
        drawn = tenant_salt(control, "local")
        assert existing_salt(control, "local") == drawn
    finally:
        control.config_set("maxmemory", 0)


def test_existing_salt_of_a_new_tenant_draws_none(control: redis.Redis) -> None:
    assert existing_salt(control, "local") is None
    assert control.exists(salt_key("local")) == 0


def test_salt_of_another_length_is_refused(control: redis.Redis) -> None:
    control.set(salt_key("local"), b"short")
    with pytest.raises(BadKeyPart, match="32 bytes"):
        tenant_salt(control, "local")


def test_salt_on_a_server_that_is_away_is_unreachable(nowhere: redis.Redis) -> None:
    with pytest.raises(StoreUnreachable, match="control"):
        tenant_salt(nowhere, "local")


def test_published_fingerprint_is_read_back_by_digest(control: redis.Redis) -> None:
    publish_fingerprint(control, FINGERPRINT, 60)
    assert published_format(control, FINGERPRINT.format_digest) == FINGERPRINT.format
    assert published_numerics(control, FINGERPRINT.numerics_digest) == FINGERPRINT.numerics


def test_fingerprint_that_was_not_published_is_none(control: redis.Redis) -> None:
    assert published_format(control, FINGERPRINT.format_digest) is None


def test_published_fingerprint_that_was_changed_is_refused(control: redis.Redis) -> None:
    publish_fingerprint(control, FINGERPRINT, 60)
    key = fingerprint_key(FINGERPRINT.format_digest)
    control.set(key, control.get(key).replace(b"int8", b"int4"))  # type: ignore[union-attr]
    with pytest.raises(BadFingerprint, match="digest"):
        published_format(control, FINGERPRINT.format_digest)


def test_index_entry_read_back_is_equal(control: redis.Redis) -> None:
    index = SnapshotIndex(control)
    assert index.write(ENTRY, 60)
    assert index.read("local", "conv_1") == replace(ENTRY, numerics_cells={NUMERICS: 64})


def test_index_entry_of_an_unknown_branch_is_none(control: redis.Redis) -> None:
    assert SnapshotIndex(control).read("local", "conv_1") is None


def test_index_entry_of_an_earlier_commit_is_refused(control: redis.Redis) -> None:
    index = SnapshotIndex(control)
    index.write(ENTRY, 60)
    assert not index.write(replace(ENTRY, committed_at=1000.249, num_cells=0, worker_id="late"), 60)
    held = index.read("local", "conv_1")
    assert held is not None
    assert held.worker_id == "worker-1"


def test_index_entry_of_the_same_commit_is_replaced(control: redis.Redis) -> None:
    index = SnapshotIndex(control)
    index.write(ENTRY, 60)
    assert index.write(replace(ENTRY, num_cells=80), 60)
    held = index.read("local", "conv_1")
    assert held is not None
    assert held.num_cells == 80


def test_index_entry_lists_every_numerics_that_parked(control: redis.Redis) -> None:
    index = SnapshotIndex(control)
    index.write(ENTRY, 60)
    index.write(replace(ENTRY, committed_at=2000.0, numerics_digest=OTHER_NUMERICS, num_cells=96), 60)
    held = index.read("local", "conv_1")
    assert held is not None
    assert held.numerics_cells == {NUMERICS: 64, OTHER_NUMERICS: 96}


def test_index_entry_of_mixed_pages_counts_each_numerics(control: redis.Redis) -> None:
    index = SnapshotIndex(control)
    index.write(ENTRY, 60)
    mixed = replace(
        ENTRY, committed_at=2000.0, numerics_digest=MIXED_DIGEST, num_cells=96,
        numerics_cells={NUMERICS: 48, OTHER_NUMERICS: 16, MIXED_DIGEST: 32},
    )  # fmt: skip
    index.write(mixed, 60)
    held = index.read("local", "conv_1")
    assert held is not None
    assert held.num_cells == 96
    assert held.numerics_cells == {NUMERICS: 64, OTHER_NUMERICS: 16, MIXED_DIGEST: 32}, "reuse makes no count smaller"


def test_index_branches_of_a_tenant_are_its_own(control: redis.Redis) -> None:
    index = SnapshotIndex(control)
    for tenant, branch in (("local", "conv_1"), ("local", "turn:resp_9"), ("other", "conv_2")):
        index.write(replace(ENTRY, tenant=tenant, branch=branch), 60)
    assert set(index.branches("local")) == {("local", "conv_1"), ("local", "turn:resp_9")}


def test_index_entry_deleted_is_gone(control: redis.Redis) -> None:
    index = SnapshotIndex(control)
    index.write(ENTRY, 60)
    index.delete("local", "conv_1")
    assert index.read("local", "conv_1") is None


@pytest.mark.parametrize("raw", [b"", b"\x80", b"\x80\x04\x95\x00.", b"\xc1", bytes(70_000)])
def test_index_entry_that_cannot_be_read_is_damaged(control: redis.Redis, raw: bytes) -> None:
    control.hset(snapshot_key("local", "conv_1"), mapping={"committed": 1, "entry": raw})
    with pytest.raises(IndexEntryDamaged):
        SnapshotIndex(control).read("local", "conv_1")


def _commit(control: redis.Redis, *turn_ids: str) -> None:
    parents: list[str | None] = [None, *turn_ids]
    for number, (turn_id, parent) in enumerate(zip(turn_ids, parents, strict=False)):
        entry = make_entry(turn_id, parent_id=parent, shared_length=2 * number, input_ids=(number,), output_ids=(99,))
        control.set(transcript_key("local", turn_id), encode_entry(entry))


def test_transcript_path_leads_from_the_root(control: redis.Redis) -> None:
    _commit(control, "resp_1", "resp_2", "resp_3")
    reader = TranscriptReader(control, "local")
    assert [entry.turn_id for entry in reader.path("resp_3")] == ["resp_1", "resp_2", "resp_3"]


def test_transcript_token_ids_are_those_of_the_path(control: redis.Redis) -> None:
    _commit(control, "resp_1", "resp_2")
    assert TranscriptReader(control, "local").token_ids("resp_2") == (0, 99, 1, 99)


def test_transcript_of_another_tenant_is_missing(control: redis.Redis) -> None:
    _commit(control, "resp_1")
    with pytest.raises(TranscriptMissing):
        TranscriptReader(control, "other").entry("resp_1")


def test_transcript_with_a_lost_parent_is_missing_by_name(control: redis.Redis) -> None:
    _commit(control, "resp_1", "resp_2")
    control.delete(transcript_key("local", "resp_1"))
    with pytest.raises(TranscriptMissing, match="resp_1"):
        TranscriptReader(control, "local").path("resp_2")


def test_transcript_under_another_turns_key_is_damaged(control: redis.Redis) -> None:
    control.set(transcript_key("local", "resp_2"), encode_entry(make_entry("resp_1")))
    with pytest.raises(TranscriptDamaged, match="turn_id"):
        TranscriptReader(control, "local").entry("resp_2")


def test_transcript_of_the_other_tenant_copied_over_is_damaged(control: redis.Redis) -> None:
    control.set(transcript_key("local", "resp_1"), encode_entry(make_entry("resp_1", tenant="other")))
    with pytest.raises(TranscriptDamaged, match="other/resp_1"):
        TranscriptReader(control, "local").entry("resp_1")


def test_transcript_path_that_loops_is_damaged(control: redis.Redis) -> None:
    for turn_id, parent in (("resp_1", "resp_2"), ("resp_2", "resp_1")):
        control.set(transcript_key("local", turn_id), encode_entry(make_entry(turn_id, parent_id=parent)))
    with pytest.raises(TranscriptDamaged, match="own ancestor"):
        TranscriptReader(control, "local").path("resp_2")


def test_transcript_on_a_server_that_is_away_is_unreachable(nowhere: redis.Redis) -> None:
    with pytest.raises(StoreUnreachable):
        TranscriptReader(nowhere, "local").entry("resp_1")
