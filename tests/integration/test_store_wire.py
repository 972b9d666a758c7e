"""The wire client against servers that misbehave: scripted replies, silence, restarts, passwords, full memory."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshot_store.deadline import Deadline
from snapshot_store.errors import StoreRefused, StoreUnreachable, WireDesync
from snapshot_store.record import check_field_of
from snapshot_store.redis_store import RedisPageStore
from snapshot_store.store import FetchOutcome, PageDamaged, PageMissing, PagePresent, PageUnreachable, PutStatus
from snapshot_store.wire_pool import Priority, WirePool, WireSettings
from tests.services import ValkeyServer
from tests.store_pages import PAGE_BYTES, Page, make_pages

PAGE, SECOND = make_pages(list(range(32)))
Reply = Callable[[list[bytes]], bytes | Iterator[bytes]]


class ScriptedServer:
    """Answers the handshake like a server, every other command with the pieces of `reply`; an EOFError there closes."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self.num_connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream:
            while line := stream.readline():
                command = []
                for _ in range(int(line[1:])):
                    size = int(stream.readline()[1:])
                    command.append(stream.read(size + 2)[:-2])
                answer = self._answer(command)
                try:
                    for piece in [answer] if isinstance(answer, bytes) else answer:
                        connection.sendall(piece)
                except (EOFError, OSError):
                    return

    def _answer(self, command: list[bytes]) -> bytes | Iterator[bytes]:
        if command[0] == b"CLIENT":
            return b"+OK\r\n"
        if command[0] == b"ECHO":
            return b"$%d\r\n%b\r\n" % (len(command[1]), command[1])
        return self._reply(command)


@pytest.fixture
def scripted() -> Iterator[Callable[[Reply], ScriptedServer]]:
    servers: list[ScriptedServer] = []

    def start(reply: Reply) -> ScriptedServer:
        servers.append(ScriptedServer(reply))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def _store(url: str, **changes: float) -> RedisPageStore:
    return RedisPageStore(WireSettings(url, operation_timeout_s=changes.pop("timeout_s", 5.0), **changes))  # type: ignore[arg-type]


def _fetch(store: RedisPageStore, page: Page = PAGE) -> FetchOutcome:
    (outcome,) = store.fetch([page.request(bytearray(PAGE_BYTES))])
    return outcome


def _bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


@pytest.mark.parametrize("chunk", [1, 7, 509])
def test_fetch_of_a_reply_in_small_pieces_is_right(start_server: Callable[..., ValkeyServer], chunk: int) -> None:
    server = start_server("pages")
    store = _store(_relay(server.port, chunk))
    direct = _store(server.url)
    PAGE.put(direct)
    into = bytearray(PAGE_BYTES)
    (outcome,) = store.fetch([PAGE.request(into)])
    assert isinstance(outcome, PagePresent)
    assert bytes(into) == PAGE.body


def _relay(port: int, chunk: int) -> str:
    """A relay to a real server that passes replies on in pieces of `chunk` bytes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        inbound, _ = listener.accept()
        inbound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        outbound = socket.create_connection(("127.0.0.1", port))
        threading.Thread(target=forward, args=(inbound, outbound), daemon=True).start()
        while data := outbound.recv(chunk):
            inbound.sendall(data)

    def forward(inbound: socket.socket, outbound: socket.socket) -> None:
        while data := inbound.recv(4096):
            outbound.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    return f"redis://127.0.0.1:{listener.getsockname()[1]}/0"


NO_BULKS = {
    "status": b"+OK\r\n",
    "integer": b":5\r\n",
    "array": b"*1\r\n+OK\r\n",
    "negative": b"$-7\r\n",
    "letters": b"$1x\r\n",
    "unknown type": b"?what\r\n",
    "endless line": b"x" * 10_000,
    "huge": b"$999999999999999999999999\r\n",
}


@pytest.mark.parametrize("reply", NO_BULKS.values(), ids=NO_BULKS.keys())
def test_fetch_of_a_reply_that_is_no_bulk_is_no_page(scripted: Callable[[Reply], ScriptedServer], reply: bytes) -> None:
    store = _store(scripted(lambda command: reply).url, timeout_s=0.5)
    assert isinstance(_fetch(store), PageUnreachable)


def test_fetch_of_a_bulk_that_says_it_is_huge_reads_only_its_header(
    scripted: Callable[[Reply], ScriptedServer],
) -> None:
    record = PAGE.record
    store = _store(scripted(lambda command: b"$%d\r\n" % (1 << 40) + record).url, timeout_s=2)
    outcome = _fetch(store)
    assert isinstance(outcome, PageDamaged)
    assert outcome.check == check_field_of(record)


def test_fetch_when_the_server_closes_inside_the_body_is_unreachable(
    scripted: Callable[[Reply], ScriptedServer],
) -> None:
    def cut(command: list[bytes]) -> Iterator[bytes]:
        yield _bulk(PAGE.record)[:-100]
        raise EOFError

    outcome = _fetch(_store(scripted(cut).url, timeout_s=20))
    assert isinstance(outcome, PageUnreachable)
    assert "closed" in outcome.reason


def test_fetch_when_the_server_stops_inside_the_body_is_unreachable_by_the_deadline(
    scripted: Callable[[Reply], ScriptedServer],
) -> None:
    outcome = _fetch(_store(scripted(lambda command: _bulk(PAGE.record)[:-100]).url, timeout_s=0.3))
    assert outcome == PageUnreachable(PAGE.key, "no answer within 0.3 s")


def test_fetch_after_a_broken_reply_uses_a_fresh_connection(scripted: Callable[[Reply], ScriptedServer]) -> None:
    replies = iter([_bulk(PAGE.record)[:-1] + b"?", _bulk(PAGE.record)])
    server = scripted(lambda command: next(replies))
    store = _store(server.url, timeout_s=2)
    assert isinstance(_fetch(store), PageUnreachable)
    assert isinstance(_fetch(store), PagePresent)
    assert server.num_connections == 2


def test_fetch_given_up_behind_the_header_never_leaves_the_rest_to_the_next_one(
    scripted: Callable[[Reply], ScriptedServer],
) -> None:
    def late_body(command: list[bytes]) -> Iterator[bytes]:
        yield _bulk(PAGE.record)[: -PAGE_BYTES - 2]
        time.sleep(0.2)
        yield _bulk(PAGE.record)[-PAGE_BYTES - 2 :]

    def fails(boot_id: bytes) -> bool:
        raise LookupError

    store = _store(scripted(late_body).url)
    with pytest.raises(LookupError):
        list(store.fetch([PAGE.request(bytearray(PAGE_BYTES))], fails))
    assert isinstance(_fetch(store), PagePresent)


def test_fetch_of_an_error_reply_is_unreachable_with_its_text(scripted: Callable[[Reply], ScriptedServer]) -> None:
    outcome = _fetch(_store(scripted(lambda command: b"-LOADING dataset in memory\r\n").url))
    assert outcome == PageUnreachable(PAGE.key, "LOADING: dataset in memory")


def test_put_of_an_error_reply_is_refused_and_keeps_the_connection(
    scripted: Callable[[Reply], ScriptedServer],
) -> None:
    server = scripted(lambda command: b"-OOM command not allowed\r\n")
    store = _store(server.url)
    assert PAGE.put(store).reason == "OOM: command not allowed"
    PAGE.put(store)
    assert server.num_connections == 1


def test_touch_with_one_error_inside_the_batch_reads_all_replies(
    scripted: Callable[[Reply], ScriptedServer],
) -> None:
    server = scripted(lambda command: b"-ERR no GT\r\n" if command[0] == b"EXPIRE" else b":1\r\n")
    store = _store(server.url)
    for _ in range(2):
        with pytest.raises(StoreUnreachable, match="no GT"):
            store.touch([PAGE.key, SECOND.key], 60)
    assert server.num_connections == 1


def test_connection_whose_echo_differs_is_refused() -> None:
    class Liar(ScriptedServer):
        def _answer(self, command: list[bytes]) -> bytes | Iterator[bytes]:
            return b"$1\r\nx\r\n" if command[0] == b"ECHO" else super()._answer(command)

    server = Liar(lambda command: b"")
    pool = WirePool(WireSettings(server.url))
    deadline = Deadline(2)
    with pytest.raises(WireDesync, match="echo"), pool.lease(Priority.LOOKUP, deadline):
        pass
    server.close()


def test_connection_with_bytes_left_after_the_handshake_is_refused() -> None:
    class Chatty(ScriptedServer):
        def _answer(self, command: list[bytes]) -> bytes | Iterator[bytes]:
            return b"+OK\r\n+OK\r\n" if command[0] == b"CLIENT" else super()._answer(command)

    server = Chatty(lambda command: b"")
    pool = WirePool(WireSettings(server.url))
    with pytest.raises((WireDesync, StoreUnreachable)), pool.lease(Priority.LOOKUP, Deadline(2)):
        pass
    server.close()


def test_idle_connection_that_got_bytes_unasked_is_not_used_again(
    scripted: Callable[[Reply], ScriptedServer],
) -> None:
    server = scripted(lambda command: b":1\r\n:7\r\n")
    pool = WirePool(WireSettings(server.url))
    for _ in range(2):
        with pool.lease(Priority.LOOKUP, Deadline(2)) as connection:
            assert connection.command(b"EXISTS", b"x", deadline=Deadline(2)) == 1
        time.sleep(0.05)
    assert server.num_connections == 2


def test_store_on_a_server_that_is_away_gives_outcomes_and_no_exception() -> None:
    store = _store("redis://127.0.0.1:1/0")
    assert isinstance(_fetch(store), PageUnreachable)
    assert PAGE.put(store).status is PutStatus.REFUSED
    with pytest.raises(StoreUnreachable):
        store.touch([PAGE.key], 60)


def test_store_on_a_silent_server_answers_by_its_deadline(start_server: Callable[..., ValkeyServer]) -> None:
    server = start_server("pages")
    store = _store(server.url, timeout_s=0.3)
    PAGE.put(store)
    server.pause()
    started = time.monotonic()
    outcome = _fetch(store)
    assert isinstance(outcome, PageUnreachable)
    assert time.monotonic() - started < 2.0


def test_fetch_closed_inside_a_body_returns_at_once_and_writes_nothing_later(
    scripted: Callable[[Reply], ScriptedServer],
) -> None:
    half_sent, go_on = threading.Event(), threading.Event()

    def reply(command: list[bytes]) -> Iterator[bytes]:
        if command[1] == PAGE.key.encode():
            yield _bulk(PAGE.record)
            return
        yield _bulk(SECOND.record)[: -PAGE_BYTES // 2]
        half_sent.set()
        go_on.wait(10)
        yield _bulk(SECOND.record)[-PAGE_BYTES // 2 :]

    store = _store(scripted(reply).url, timeout_s=30)
    into = bytearray(b"\xaa" * PAGE_BYTES)
    outcomes = store.fetch([PAGE.request(bytearray(PAGE_BYTES)), SECOND.request(into)])
    assert isinstance(next(outcomes), PagePresent)
    assert half_sent.wait(5)
    _wait_until(lambda: not into.startswith(b"\xaa" * 16))
    started = time.monotonic()
    outcomes.close()
    assert time.monotonic() - started < 2.0
    at_close = bytes(into)
    go_on.set()
    time.sleep(0.1)
    assert bytes(into) == at_close
    assert at_close.endswith(b"\xaa" * 16)


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_store_after_a_restart_of_the_server_works_again(start_server: Callable[..., ValkeyServer]) -> None:
    server = start_server("pages")
    store = _store(server.url)
    PAGE.put(store)
    server.restart()
    assert _fetch(store) == PageMissing(PAGE.key)
    assert PAGE.put(store).status is PutStatus.STORED


def test_store_with_the_right_password_works(start_server: Callable[..., ValkeyServer]) -> None:
    server = start_server("pages")
    server.client().config_set("requirepass", "secret")
    store = _store(f"redis://:secret@127.0.0.1:{server.port}/0")
    assert PAGE.put(store).status is PutStatus.STORED


def test_put_on_a_full_server_without_anything_to_evict_is_refused(
    start_server: Callable[..., ValkeyServer],
) -> None:
    server = start_server("pages", maxmemory="1", maxmemory_policy="noeviction")
    outcome = PAGE.put(_store(server.url))
    assert outcome.status is PutStatus.REFUSED
    assert outcome.reason.startswith("OOM")


def test_pages_on_a_full_server_push_out_the_deepest_first(start_server: Callable[..., ValkeyServer]) -> None:
    server = start_server("pages", maxmemory="6mb", maxmemory_samples="64")
    store = _store(server.url)
    pages = make_pages(list(range(16 * 12)), segments=(1 << 19, 1 << 19))
    for depth, page in enumerate(pages):
        page.put(store, ttl_s=10_000 - 500 * depth)
    present = store.touch([page.key for page in pages[:-1]], 1)
    assert present[0]
    assert not all(present)
    assert present == sorted(present, reverse=True)


def test_pool_never_holds_more_connections_than_allowed(start_server: Callable[..., ValkeyServer]) -> None:
    server = start_server("pages")
    store = RedisPageStore(WireSettings(server.url, max_connections=3))
    pages = make_pages(list(range(16 * 30)))
    for page in pages:
        page.put(store)
    readers = [
        threading.Thread(target=lambda: list(store.fetch([p.request(bytearray(PAGE_BYTES)) for p in pages])))
        for _ in range(4)
    ]
    for reader in readers:
        reader.start()
    with server.client() as client:
        most = max(sum(c["name"] == "kvalet-pages" for c in client.client_list()) for _ in range(20))
    for reader in readers:
        reader.join(20)
    assert most <= 3
    store.close()


def test_store_with_open_connections_makes_none_later(start_server: Callable[..., ValkeyServer]) -> None:
    server = start_server("pages")
    store = RedisPageStore(WireSettings(server.url, max_connections=4, restore_connections=2))
    store.open_connections()

    def connections() -> set[str]:
        with server.client() as client:
            return {entry["id"] for entry in client.client_list() if entry["name"] == "kvalet-pages"}

    opened = connections()
    assert len(opened) == 4
    pages = make_pages(list(range(16 * 8)))
    for page in pages:
        page.put(store)
    assert sum(isinstance(o, PagePresent) for o in store.fetch([p.request(bytearray(PAGE_BYTES)) for p in pages])) == 8
    assert connections() == opened
    store.close()


def test_store_on_a_server_that_is_away_opens_nothing_and_says_so(tmp_path: Path) -> None:
    store = RedisPageStore(WireSettings(f"unix://{tmp_path / 'away.sock'}"))
    with pytest.raises(StoreUnreachable, match="connect"):
        store.open_connections()
    store.close()


def test_pool_short_of_connections_serves_the_look_up_before_the_park(pages_server: ValkeyServer) -> None:
    pool = WirePool(WireSettings(pages_server.url, max_connections=1, park_connections=1))
    order: list[Priority] = []

    def take(priority: Priority) -> None:
        with pool.lease(priority, Deadline(10)):
            order.append(priority)

    with pool.lease(Priority.RESTORE, Deadline(10)):
        waiters = []
        for priority in (Priority.PARK, Priority.RESTORE, Priority.LOOKUP):
            waiters.append(threading.Thread(target=take, args=(priority,)))
            waiters[-1].start()
            time.sleep(0.05)
    for waiter in waiters:
        waiter.join(10)
    assert order == [Priority.LOOKUP, Priority.RESTORE, Priority.PARK]


def test_pool_keeps_room_beside_parking(pages_server: ValkeyServer) -> None:
    pool = WirePool(WireSettings(pages_server.url, max_connections=3, park_connections=1))
    with pool.lease(Priority.PARK, Deadline(5)):
        with pytest.raises(StoreUnreachable, match="within"), pool.lease(Priority.PARK, Deadline(0.1)):
            pass
        with pool.lease(Priority.RESTORE, Deadline(5)):
            pass


def test_pool_that_is_closed_refuses_a_lease(pages_server: ValkeyServer) -> None:
    pool = WirePool(WireSettings(pages_server.url))
    pool.close()
    with pytest.raises(StoreUnreachable, match="closed"), pool.lease(Priority.LOOKUP, Deadline(1)):
        pass


def test_connection_with_a_wrong_password_is_refused(start_server: Callable[..., ValkeyServer]) -> None:
    server = start_server("pages")
    server.client().config_set("requirepass", "secret")
    pool = WirePool(WireSettings(f"redis://:wrong@127.0.0.1:{server.port}/0"))
    with pytest.raises(StoreRefused, match="AUTH"), pool.lease(Priority.LOOKUP, Deadline(2)):
        pass
