"""Scripts and keys as data: every name is spelled once, every script says which keys it touches."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from snapshot_store.keys import transcript_key
from snapshot_store.transcript import CacheScope
from workers.dispatch import broker_url
from workers.turns.history import history_digests
from workers.turns.keys import LUA_KEYS, tenant_key
from workers.turns.script import load_script

FOLDER = files("workers.turns") / "lua"
SCRIPTS = sorted(path.name.removesuffix(".lua") for path in FOLDER.iterdir() if path.name != "library.lua")


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_names_its_keys_on_top_and_spells_none(name: str) -> None:
    source = (FOLDER / f"{name}.lua").read_text("utf-8")
    comment = re.match(r"(?:--.*\n)+", source)
    assert comment is not None and re.search(r"Keys:|KEYS", comment.group())
    assert "kvalet" not in source


def test_scripts_use_only_known_key_names() -> None:
    sources = "".join((FOLDER / f"{name}.lua").read_text("utf-8") for name in [*SCRIPTS, "library"])
    assert set(re.findall(r"\bK\.(\w+)", sources)) == set(LUA_KEYS)


def test_script_is_loaded_with_flags_library_and_constants() -> None:
    lines = load_script("claim").source.decode().splitlines()
    assert (lines[0], lines[1][:9], lines[2][:14]) == ("#!lua flags=allow-oom", "local K =", "local ENDINGS ")


def test_transcript_key_of_scripts_is_the_stores() -> None:
    assert f"{LUA_KEYS['tenant']}t1{LUA_KEYS['transcript']}x1" == transcript_key("t1", "x1")


def test_tenant_key_of_unknown_kind_raises() -> None:
    with pytest.raises(ValueError, match="kind"):
        tenant_key("local", "other", "x")


@pytest.mark.parametrize(
    ("control", "broker"),
    [
        ("redis://h:1/2", "redis://h:1/2"),
        ("rediss://u:p@h:1/0", "rediss://u:p@h:1/0"),
        ("unix:///run/s.sock", "redis+socket:///run/s.sock?virtual_host=0"),
        ("unix:///run/s.sock?db=3", "redis+socket:///run/s.sock?virtual_host=3"),
        ("unix://u:p@/run/s.sock", "redis+socket://u:p@/run/s.sock?virtual_host=0"),
    ],
)
def test_broker_url_spells_a_redis_url_as_celery_does(control: str, broker: str) -> None:
    assert broker_url(control) == broker


OWNER = {"tenant": "t", "model": "m", "scope": CacheScope.KEY, "key_id": "k"}


def test_history_digests_of_a_longer_history_begin_with_those_of_the_shorter() -> None:
    chat = [{"role": "user", "content": str(n)} for n in range(3)]
    assert history_digests(chat, **OWNER)[:3] == history_digests(chat[:2], **OWNER)


@pytest.mark.parametrize(
    "change",
    [{"content": "b"}, {"role": "system"}, {"name": "x"}, {"content": ["a"]}],
    ids=["content", "role", "extra", "type"],
)
def test_history_digest_of_other_message_differs(change: dict[str, object]) -> None:
    message = {"role": "user", "content": "a"}
    assert history_digests([message], **OWNER)[-1] != history_digests([{**message, **change}], **OWNER)[-1]


def test_history_digest_ignores_stored_token_ids() -> None:
    message = {"role": "assistant", "content": "a"}
    with_ids = {**message, "token_ids": (1, 2)}
    assert history_digests([message], **OWNER) == history_digests([with_ids], **OWNER)


def test_history_digest_with_key_scope_depends_on_the_api_key_and_with_tenant_scope_not() -> None:
    chat = [{"role": "user", "content": "a"}]

    def digest(scope: CacheScope, key_id: str) -> bytes:
        return history_digests(chat, tenant="t", model="m", scope=scope, key_id=key_id)[-1]

    assert digest(CacheScope.KEY, "k1") != digest(CacheScope.KEY, "k2")
    assert digest(CacheScope.TENANT, "k1") == digest(CacheScope.TENANT, "k2")
