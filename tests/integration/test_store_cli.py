"""`kvalet snapshot ls | show | verify` over real servers: what it tells, what it finds, how it exits."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from snapshot_store.cli import app
from snapshot_store.fingerprint import Fingerprint, FormatRecord
from snapshot_store.index import SnapshotIndex, SnapshotIndexEntry
from snapshot_store.keys import transcript_key
from snapshot_store.transcript import CacheScope
from tests.services import ValkeyServer
from tests.store_fleet import ParkedFleet
from tests.store_pages import FINGERPRINT, PAGE_BYTES, SEGMENTS, make_pages

Command = Callable[..., tuple[int, str]]
SYSTEM = tuple(range(500, 532))


@pytest.fixture
def fleet(control_server: ValkeyServer, pages_server: ValkeyServer) -> ParkedFleet:
    return ParkedFleet(control_server, pages_server)


@pytest.fixture
def command(fleet: ParkedFleet) -> Command:
    def run(*arguments: str) -> tuple[int, str]:
        urls = ["--control", fleet.control_server.url, "--pages", fleet.pages_server.url]
        result = CliRunner().invoke(app, [*arguments, *urls], env={"COLUMNS": "80"})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output

    return run


def _json(command: Command, *arguments: str) -> Any:
    code, output = command(*arguments, "--json")
    assert code in (0, 3), output
    return json.loads(output)


def _two_conversations(fleet: ParkedFleet) -> None:
    """conv_a of two turns and conv_b of one share a system text of two pages."""
    first = fleet.commit("resp_a1", conversation_id="conv_a", input_ids=SYSTEM + (1,) * 8, output_ids=(2,) * 10)
    second = fleet.commit(
        "resp_a2", conversation_id="conv_a", parent_id="resp_a1", root_id="resp_a1", shared_length=50,
        input_ids=(3,) * 8, output_ids=(4,) * 14, cached_tokens=48, prompt_tokens=58, worker_id="worker-2", epoch=2,
        output_text="a secret word", committed_at=2000.0,
        extra={"recompute": {"damaged:SegmentMismatch": 1}},
    )  # fmt: skip
    other = fleet.commit("resp_b1", conversation_id="conv_b", input_ids=SYSTEM + (9,) * 16, output_ids=(8,) * 3)
    assert first.turn_id == second.parent_id
    fleet.park(second)
    fleet.park(other)


def _finding(report: Any) -> Any:
    (finding,) = report["damaged"]
    return finding


def test_ls_of_an_empty_fleet_lists_nothing(command: Command) -> None:
    assert _json(command, "ls") == {"conversations": []}


def test_ls_lists_each_conversation_with_what_is_parked(fleet: ParkedFleet, command: Command) -> None:
    _two_conversations(fleet)
    rows = {row["name"]: row for row in _json(command, "ls")["conversations"]}
    assert sorted(rows) == ["conv_a", "conv_b"]
    counts = ("num_turns", "num_tokens", "num_full_pages", "num_parked_pages", "num_shared_pages")
    assert [rows["conv_a"][name] for name in counts] == [2, 72, 4, 4, 2]
    assert [rows["conv_b"][name] for name in counts] == [1, 51, 3, 3, 2]


def test_ls_counts_whole_records_as_bytes(fleet: ParkedFleet, command: Command) -> None:
    _two_conversations(fleet)
    rows = {row["name"]: row for row in _json(command, "ls")["conversations"]}
    (page,) = make_pages(list(range(16)))
    assert rows["conv_b"]["parked_bytes"] == 3 * len(page.record)


def test_ls_as_text_names_conversation_and_sizes(fleet: ParkedFleet, command: Command) -> None:
    _two_conversations(fleet)
    code, output = command("ls")
    assert code == 0
    assert "conv_a" in output
    assert "worker-2" in output


def test_ls_of_one_tenant_leaves_the_others_out(fleet: ParkedFleet, command: Command) -> None:
    fleet.commit("resp_1", tenant="acme", scope_id="acme", input_ids=SYSTEM)
    fleet.commit("resp_2", input_ids=SYSTEM)
    rows = _json(command, "ls", "--tenant", "acme")["conversations"]
    assert [row["head_turn_id"] for row in rows] == ["resp_1"]


def test_ls_of_two_tenants_with_equal_tokens_shares_nothing(fleet: ParkedFleet, command: Command) -> None:
    fleet.park(fleet.commit("resp_1", tenant="acme", scope_id="acme", input_ids=SYSTEM))
    fleet.park(fleet.commit("resp_2", input_ids=SYSTEM))
    rows = _json(command, "ls")["conversations"]
    assert [(row["num_parked_pages"], row["num_shared_pages"]) for row in rows] == [(2, 0), (2, 0)]


def test_ls_lists_branches_of_one_root_by_their_last_turn(fleet: ParkedFleet, command: Command) -> None:
    fleet.commit("resp_1", input_ids=SYSTEM)
    for turn_id in ("resp_2", "resp_3"):
        fleet.commit(turn_id, parent_id="resp_1", shared_length=32, input_ids=(1,))
    rows = _json(command, "ls")["conversations"]
    assert sorted(row["name"] for row in rows) == ["resp_2", "resp_3"]


def test_show_tells_turns_pages_and_fingerprint_in_clear(fleet: ParkedFleet, command: Command) -> None:
    _two_conversations(fleet)
    (view,) = _json(command, "show", "conv_a")["conversations"]
    assert [turn["turn_id"] for turn in view["turns"]] == ["resp_a1", "resp_a2"]
    (chain,) = view["chains"]
    assert chain["format"]["k_format"] == "int8"
    assert [page["state"] for page in chain["pages"]] == ["parked"] * 4
    assert [page["shared_by"] for page in chain["pages"]] == [2, 2, 1, 1]


def test_show_tells_why_pages_were_recomputed(fleet: ParkedFleet, command: Command) -> None:
    _two_conversations(fleet)
    code, output = command("show", "conv_a")
    assert code == 0
    assert 'resp_a2 recomputed: {"damaged:SegmentMismatch": 1}' in output


def test_show_prints_no_text_unless_asked(fleet: ParkedFleet, command: Command) -> None:
    _two_conversations(fleet)
    assert "a secret word" not in command("show", "conv_a")[1]
    assert "a secret word" not in command("show", "conv_a", "--json")[1]
    assert "a secret word" in command("show", "conv_a", "--text")[1]


def test_show_never_prints_the_salt(fleet: ParkedFleet, command: Command) -> None:
    _two_conversations(fleet)
    salt = fleet.control.get("kvalet:local:salt")
    assert isinstance(salt, bytes)
    assert salt.hex() not in command("show", "conv_a", "--json")[1]


def test_show_of_a_turn_inside_a_branch_ends_there(fleet: ParkedFleet, command: Command) -> None:
    _two_conversations(fleet)
    (view,) = _json(command, "show", "resp_a1")["conversations"]
    assert [turn["turn_id"] for turn in view["turns"]] == ["resp_a1"]
    assert view["row"]["num_full_pages"] == 3


def test_show_of_an_evicted_page_says_missing(fleet: ParkedFleet, command: Command) -> None:
    pages = fleet.park(fleet.commit("resp_1", input_ids=SYSTEM + SYSTEM))
    fleet.pages.delete(pages[1].key)
    code, output = command("show", "resp_1")
    assert code == 0
    assert "pages 1-1: missing" in output


def test_show_of_a_damaged_header_exits_3(fleet: ParkedFleet, command: Command) -> None:
    (page, _) = fleet.park(fleet.commit("resp_1", input_ids=SYSTEM))
    fleet.pages.setrange(page.key, 60, b"\xff")
    code, output = command("show", "resp_1")
    assert code == 3
    assert "page 0" in output
    assert "HeaderMismatch" in output


def test_show_of_a_conversation_that_changed_its_format_names_the_fields(fleet: ParkedFleet, command: Command) -> None:
    changed = FormatRecord.of(FINGERPRINT.format.as_dict() | {"k_format": "q4", "page_size": 32})
    fleet.commit("resp_1", input_ids=SYSTEM)
    later = ParkedFleet(fleet.control_server, fleet.pages_server, Fingerprint(changed, FINGERPRINT.numerics))
    later.commit("resp_2", parent_id="resp_1", shared_length=32, input_ids=(1,))
    _, output = command("show", "resp_2")
    assert "fingerprints differ in format.k_format: 'int8' != 'q4'" in output
    assert "fingerprints differ in format.page_size: 16 != 32" in output


def test_show_without_a_published_fingerprint_finds_the_page_size_by_looking(
    fleet: ParkedFleet, command: Command
) -> None:
    fleet.park(fleet.commit("resp_1", input_ids=SYSTEM))
    for key in fleet.control.keys("kvalet:-:*"):
        fleet.control.delete(key)
    (view,) = _json(command, "show", "resp_1")["conversations"]
    assert [(chain["page_size"], chain["format"]) for chain in view["chains"]] == [(16, None)]


def test_show_of_pages_under_other_numerics_of_the_index_lists_them(fleet: ParkedFleet, command: Command) -> None:
    entry = fleet.commit("resp_1", input_ids=SYSTEM)
    SnapshotIndex(fleet.control).write(
        SnapshotIndexEntry(
            "local", "resp_1", "resp_1", "resp_1", "tiny", 32, 2, 100, 16, entry.format_digest, b"m" * 32,
            "worker-1", b"b" * 16, 1, 1.0, 1.0,
        ),
        60,
    )  # fmt: skip
    (view,) = _json(command, "show", "resp_1")["conversations"]
    assert [chain["numerics_digest"] for chain in view["chains"]] == [
        FINGERPRINT.numerics_digest.hex(), (b"m" * 32).hex()
    ]  # fmt: skip


@pytest.mark.parametrize("arguments", [("show", "resp_none"), ("verify", "resp_none")])
def test_command_on_an_unknown_id_exits_4(command: Command, arguments: tuple[str, ...]) -> None:
    code, output = command(*arguments)
    assert code == 4
    assert "resp_none" in output


@pytest.mark.parametrize("name", ["ls", "verify"])
def test_command_on_a_server_that_is_away_exits_1(fleet: ParkedFleet, name: str) -> None:
    result = CliRunner().invoke(app, [name, "--control", "redis://127.0.0.1:1", "--pages", fleet.pages_server.url])
    assert result.exit_code == 1
    assert "control" in result.output


def test_command_with_a_bad_url_exits_1(command: Command) -> None:
    result = CliRunner().invoke(app, ["ls", "--control", "http://x", "--pages", "http://x"])
    assert result.exit_code == 1


def test_command_with_a_bad_tenant_exits_1(command: Command) -> None:
    code, output = command("ls", "--tenant", "a*")
    assert code == 1
    assert "tenant" in output


def test_verify_of_a_sound_fleet_exits_0(fleet: ParkedFleet, command: Command) -> None:
    _two_conversations(fleet)
    report = _json(command, "verify")
    assert (report["num_branches"], report["num_pages_checked"], report["damaged"]) == (2, 5, [])


def test_verify_counts_evicted_pages_as_no_damage(fleet: ParkedFleet, command: Command) -> None:
    pages = fleet.park(fleet.commit("resp_1", input_ids=SYSTEM))
    fleet.pages.delete(pages[0].key)
    code, _ = command("verify")
    assert code == 0
    assert _json(command, "verify")["num_pages_missing"] == 1


@pytest.mark.parametrize("segment", range(len(SEGMENTS)))
def test_verify_of_a_flipped_bit_names_conversation_page_layer_and_plane(
    fleet: ParkedFleet, command: Command, segment: int
) -> None:
    _two_conversations(fleet)
    page = fleet.park(fleet.commit("resp_1", conversation_id="conv_c", input_ids=tuple(range(32))))[1]
    offset = len(page.header) + sum(SEGMENTS[:segment])
    fleet.pages.setrange(page.key, offset, bytes([page.body[sum(SEGMENTS[:segment])] ^ 1]))
    code, output = command("verify")
    assert code == 3
    assert f"{page.key} page 1 of conv_c: SegmentMismatch: layer {segment // 2} plane {'KV'[segment % 2]}" in output


def test_verify_of_another_conversations_record_under_the_key_exits_3(fleet: ParkedFleet, command: Command) -> None:
    (ours,) = fleet.park(fleet.commit("resp_1", input_ids=tuple(range(16))))
    (theirs,) = fleet.park(fleet.commit("resp_2", input_ids=tuple(range(100, 116))))
    fleet.pages.set(ours.key, theirs.record)
    code, _ = command("verify", "resp_1")
    assert code == 3
    assert _finding(_json(command, "verify", "resp_1"))["error"] == "HeaderMismatch"


def test_verify_of_a_sound_record_of_other_tokens_exits_3(fleet: ParkedFleet, command: Command) -> None:
    """The record was resealed for the key, so only the transcript's own tokens tell that it is foreign."""
    (ours,) = fleet.park(fleet.commit("resp_1", input_ids=tuple(range(16))))
    (theirs,) = make_pages(list(range(100, 116)))
    forged = type(theirs)(ours.key, theirs.identity, theirs.body)
    fleet.pages.set(ours.key, forged.record)
    finding = _finding(_json(command, "verify", "resp_1"))
    assert finding["error"] == "ForeignRecord"


def test_verify_of_a_cut_record_says_truncated(fleet: ParkedFleet, command: Command) -> None:
    (page,) = fleet.park(fleet.commit("resp_1", input_ids=tuple(range(16))))
    fleet.pages.set(page.key, page.record[: -PAGE_BYTES // 2])
    report = _json(command, "verify")
    assert report["damaged"][0]["error"] == "TruncatedRecord"


def test_verify_of_a_key_of_another_type_exits_3(fleet: ParkedFleet, command: Command) -> None:
    (page,) = fleet.park(fleet.commit("resp_1", input_ids=tuple(range(16))))
    fleet.pages.delete(page.key)
    fleet.pages.rpush(page.key, b"x")
    assert command("verify")[0] == 3


def test_verify_of_a_damaged_record_that_no_transcript_names_exits_3(fleet: ParkedFleet, command: Command) -> None:
    (page,) = make_pages(list(range(16)))
    fleet.pages.set(page.key, page.record[:-1] + bytes([page.record[-1] ^ 1]))
    assert _finding(_json(command, "verify"))["where"] == page.key


def test_verify_counts_named_records_without_transcript_as_orphans(fleet: ParkedFleet, command: Command) -> None:
    (named,), (stateless,) = make_pages(list(range(16))), make_pages(list(range(50, 66)), stateless=True)
    for page in (named, stateless):
        fleet.pages.set(page.key, page.record)
    report = _json(command, "verify")
    assert (report["num_pages_orphaned"], report["num_pages_checked"]) == (1, 2)


def test_verify_of_a_damaged_transcript_exits_3(fleet: ParkedFleet, command: Command) -> None:
    fleet.control.set(transcript_key("local", "resp_1"), b"\x80\x04\x95")
    code, output = command("verify")
    assert code == 3
    assert "local/resp_1" in output


def test_verify_of_a_lost_parent_says_not_verifiable_and_exits_0(fleet: ParkedFleet, command: Command) -> None:
    fleet.commit("resp_2", parent_id="resp_1", shared_length=3, input_ids=(1,))
    code, output = command("verify")
    assert code == 0
    assert "not verifiable: resp_2" in output


def test_verify_in_the_scope_of_a_conversation_uses_that_chain(fleet: ParkedFleet, command: Command) -> None:
    fleet.park(fleet.commit("resp_1", input_ids=SYSTEM, scope=CacheScope.CONVERSATION, scope_id="resp_1"))
    report = _json(command, "verify")
    assert (report["num_pages_checked"], report["num_pages_orphaned"]) == (2, 0)


def test_commands_change_nothing(fleet: ParkedFleet, command: Command) -> None:
    _two_conversations(fleet)

    def contents() -> list[dict[bytes, bytes | None]]:
        return [{key: client.dump(key) for key in client.keys("*")} for client in (fleet.control, fleet.pages)]

    before = contents()
    for arguments in (("ls",), ("show", "conv_a"), ("verify",)):
        command(*arguments)
    assert contents() == before
