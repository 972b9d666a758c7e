"""Embedded servers: real ones, with the roles' own configuration."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from deploy.embedded import EmbeddedServer, EmbeddedSpec, free_port, server_arguments
from deploy.errors import StartFailed

Start = Callable[..., EmbeddedServer]


@pytest.fixture
def folder() -> Iterator[Path]:
    # A unix socket path is limited to 107 bytes, which pytest's own tmp_path can exceed.
    folder = Path(tempfile.mkdtemp(prefix="kv-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    servers: list[EmbeddedServer] = []

    def begin(role: str, maxmemory_mib: int = 64, port: int | None = None) -> EmbeddedServer:
        server = EmbeddedServer(spec_in(folder, role, maxmemory_mib, port))
        servers.append(server)
        server.wait_ready(10)
        return server

    yield begin
    for server in servers:
        server.process.kill()


def spec_in(folder: Path, role: str, maxmemory_mib: int = 64, port: int | None = None) -> EmbeddedSpec:
    name = f"{role}"
    return EmbeddedSpec(
        role,  # type: ignore[arg-type]
        folder / name, folder / f"{name}.sock", folder / f"{name}.log", folder / f"{name}.pid", maxmemory_mib, port,
    )  # fmt: skip


def setting(server: EmbeddedServer, name: str) -> str:
    client = redis.Redis.from_url(server.url, decode_responses=True)
    return str(client.config_get(name)[name])


def test_page_server_of_a_large_machine_answers_with_several_threads(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    pages, control = start("pages"), start("control")
    assert (setting(pages, "io-threads"), setting(control, "io-threads")) == ("4", "1")
    redis.Redis.from_url(pages.url).set("page", bytes(4 << 20))
    assert redis.Redis.from_url(pages.url).get("page") == bytes(4 << 20)


def test_page_server_of_a_small_machine_leaves_the_cores_to_workers(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert setting(start("pages"), "io-threads") == "1"


def test_control_keeps_its_data_when_it_is_killed(start: Start) -> None:
    control = start("control")
    redis.Redis.from_url(control.url).set("turn", "1")
    control.process.kill()
    assert redis.Redis.from_url(start("control").url).get("turn") == b"1"


@pytest.mark.parametrize(
    ("name", "value"), [("appendonly", "yes"), ("appendfsync", "everysec"), ("maxmemory-policy", "noeviction")]
)
def test_control_is_configured_to_lose_nothing(start: Start, name: str, value: str) -> None:
    assert setting(start("control"), name) == value


@pytest.mark.parametrize(
    ("name", "value"), [("appendonly", "no"), ("maxmemory", str(64 << 20)), ("maxmemory-policy", "volatile-ttl")]
)
def test_pages_is_configured_as_a_capped_cache(start: Start, name: str, value: str) -> None:
    assert setting(start("pages"), name) == value


def test_pages_over_its_cap_drops_deep_pages_before_the_head(start: Start) -> None:
    client = redis.Redis.from_url(start("pages", maxmemory_mib=16).url)
    pages = ["head", *(f"depth-{depth}" for depth in range(1, 9))]
    for depth, name in enumerate(pages):
        client.set(name, bytes(3 << 20), ex=10_000 - 1000 * depth)
    assert client.exists("head") == 1
    assert client.exists(*pages) < len(pages)


def test_server_without_a_port_listens_on_none(start: Start) -> None:
    assert setting(start("control"), "port") == "0"


def test_server_with_a_port_answers_there_too(start: Start) -> None:
    port = free_port()
    start("pages", port=port)
    assert redis.Redis(port=port).ping()


def test_server_that_cannot_start_tells_why(folder: Path, start: Start) -> None:
    start("control").process.kill()
    (folder / "control" / "appendonlydir" / "appendonly.aof.manifest").write_text("damaged")
    start_again = EmbeddedServer(spec_in(folder, "control"))
    with pytest.raises(StartFailed) as failed:
        start_again.wait_ready(10)
    assert failed.value.log is not None
    assert "manifest" in failed.value.log.read_text()
    assert len(str(failed.value).splitlines()) == 1


def test_socket_path_that_is_too_long_is_refused(folder: Path) -> None:
    with pytest.raises(StartFailed, match="longer than 107 bytes"):
        server_arguments(spec_in(folder / ("d" * 120), "control"))
