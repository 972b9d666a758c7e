"""Key names: a tenant in every key, and no id that could reach into another tenant's keys."""

from __future__ import annotations

import pytest

from snapshot_store import keys
from snapshot_store.chain import PageDigest
from snapshot_store.errors import BadKeyPart

DIGEST = PageDigest(bytes(range(16)))


def test_keys_are_those_of_the_schema() -> None:
    assert [
        keys.page_key("acme", DIGEST),
        keys.transcript_key("acme", "resp_1"),
        keys.snapshot_key("acme", "turn:resp_1"),
        keys.salt_key("acme"),
        keys.fingerprint_key(b"\x01\x02"),
    ] == [
        "kvalet:acme:page:000102030405060708090a0b0c0d0e0f",
        "kvalet:acme:transcript:resp_1",
        "kvalet:acme:snapshot:turn:resp_1",
        "kvalet:acme:salt",
        "kvalet:-:fingerprint:0102",
    ]


@pytest.mark.parametrize("tenant", ["", "-", "*", "a:b", "a b", "a{b}", "a\n", "ä", "[ab]", "a" * 129, "a?"])
def test_keys_of_a_tenant_that_cannot_be_a_part_are_refused(tenant: str) -> None:
    for build in (keys.salt_key, keys.page_pattern, keys.transcript_pattern, keys.snapshot_pattern):
        with pytest.raises(BadKeyPart) as caught:
            build(tenant)
        assert caught.value.field == "tenant"


@pytest.mark.parametrize("turn_id", ["", "a:salt", "*", "..", "x" * 129])
def test_transcript_key_of_a_bad_turn_id_is_refused(turn_id: str) -> None:
    with pytest.raises(BadKeyPart) as caught:
        keys.transcript_key("acme", turn_id)
    assert caught.value.field == "turn_id"


def test_parts_of_a_key_are_read_back() -> None:
    key = keys.snapshot_key("acme", "turn:resp_1")
    assert (keys.tenant_of(key), keys.last_part_of(key)) == ("acme", "turn:resp_1")


@pytest.mark.parametrize("key", ["", "kvalet:acme", "other:acme:page:00", "kvalet:acme:salt"])
def test_parts_of_another_key_are_refused(key: str) -> None:
    with pytest.raises(BadKeyPart):
        keys.tenant_of(key)
