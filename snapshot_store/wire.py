"""One connection to the page server: redis-py sets it up, then page bytes pass through its socket without copies.

redis-py does AUTH, TLS, database selection and unix sockets. At hand-over its parser is proven empty and an ECHO over
the raw socket must come back exactly; from then on only this class reads and writes. RESP2, so nothing arrives that
was not asked for. Every failure closes the connection: a reply that nobody waits for can never answer a later request.
"""

from __future__ import annotations

import secrets
import select
import socket
import ssl
import struct
from collections import deque
from collections.abc import Sequence
from typing import Final, cast

import redis
from redis.connection import Connection

from snapshot_store.deadline import Deadline
from snapshot_store.errors import StoreRefused, StoreUnreachable, WireDesync

Reply = int | bytes | None

LINE_LIMIT: Final = 4096
SMALL_BULK_LIMIT: Final = 1 << 16
DISCARD_LIMIT: Final = 1 << 18
_SCRATCH_BYTES: Final = 512
_CRLF: Final = b"\r\n"


class WireConnection:
    """A proven connection. Not thread-safe but for `abort`, which another thread may call to wake a blocked reader."""

    __slots__ = ("_connection", "_plain", "_scratch", "_socket", "_unread")

    def __init__(self, connection: Connection, deadline: Deadline) -> None:
        """Connect and prove. Raises StoreUnreachable, StoreRefused (authentication), WireDesync."""
        self._connection = connection
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._unread = memoryview(b"")
        try:
            connection.connect()
            parser_holds_bytes = connection.can_read(timeout=0)
        except redis.AuthenticationError as error:
            raise StoreRefused("AUTH", str(error)) from error
        except (redis.RedisError, OSError) as error:
            raise StoreUnreachable(f"connect: {error}") from error
        self._socket = cast("socket.socket", connection._sock)
        self._plain = not isinstance(self._socket, ssl.SSLSocket)
        if parser_holds_bytes:
            self.close()
            raise WireDesync("bytes left in the parser after connecting")
        self._prove(deadline)

    def begin(self, deadline: Deadline) -> None:
        """Make each blocking call of the next operation end by `deadline`. Raises StoreUnreachable."""
        seconds = deadline.remaining()
        if self._plain:
            # The kernel's own timeouts let one call receive a whole chunk; Python's cost two calls for every 64 KB.
            self._socket.settimeout(None)
            timeval = struct.pack("@ll", *divmod(int(seconds * 1_000_000) + 1, 1_000_000))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        else:
            self._socket.settimeout(seconds)

    def command(self, *parts: bytes, deadline: Deadline) -> Reply:
        """Send one small command and read its reply. Raises StoreRefused, StoreUnreachable."""
        self.begin(deadline)
        self.send([memoryview(packed_command(parts))], deadline)
        return self.read_reply(deadline)

    def send(self, parts: Sequence[memoryview], deadline: Deadline) -> None:
        """Send the parts one after the other from the caller's buffers. Raises StoreUnreachable."""
        pending = deque(part for part in parts if len(part))
        while pending:
            sent = self._send_some(pending, deadline)
            while pending and sent >= len(pending[0]):
                sent -= len(pending.popleft())
            if sent:
                pending[0] = pending[0][sent:]

    def read_reply(self, deadline: Deadline) -> Reply:
        """Read an integer, status, small bulk or nil. Raises StoreRefused, StoreUnreachable, WireDesync."""
        kind, rest = self._read_head(deadline)
        if kind == b"$":
            length = self._bulk_length(rest)
            return None if length is None else self._read_small_bulk(length, deadline)
        return int(rest) if kind == b":" else rest

    def read_bulk_length(self, deadline: Deadline) -> int | None:
        """Read the head of a bulk reply: its length, None for nil.

        Raises StoreRefused, StoreUnreachable, WireDesync.
        """
        kind, rest = self._read_head(deadline)
        if kind != b"$":
            raise self._desync(f"{kind!r} where a bulk string was expected")
        return self._bulk_length(rest)

    def receive_into(self, into: memoryview, deadline: Deadline) -> None:
        """Receive the next `len(into)` bytes of a bulk into the caller's buffer. Raises StoreUnreachable."""
        filled = min(len(self._unread), len(into))
        into[:filled] = self._unread[:filled]
        self._unread = self._unread[filled:]
        while filled < len(into):
            filled += self._receive_some(into[filled:], deadline, socket.MSG_WAITALL if self._plain else 0)

    def receive_exactly(self, num_bytes: int, deadline: Deadline) -> bytes:
        """Receive a few bytes of a bulk. Raises StoreUnreachable."""
        buffer = bytearray(num_bytes)
        self.receive_into(memoryview(buffer), deadline)
        return bytes(buffer)

    def end_bulk(self, deadline: Deadline) -> None:
        """Read the end of a bulk whose bytes were all received. Raises StoreUnreachable, WireDesync."""
        if self.receive_exactly(2, deadline) != _CRLF:
            raise self._desync("a bulk string without its end")

    def discard_bulk(self, remaining: int, deadline: Deadline) -> None:
        """Get rid of the rest of a bulk: read it if it is short, else close. Raises StoreUnreachable, WireDesync."""
        if remaining > DISCARD_LIMIT:
            self.close()
            return
        self.receive_exactly(remaining, deadline)
        self.end_bulk(deadline)

    @property
    def is_open(self) -> bool:
        """Whether it can serve another operation."""
        return self._socket.fileno() >= 0

    def is_quiet(self) -> bool:
        """Whether an idle connection is still usable: open, and nothing to read (not even the server's farewell)."""
        if not self.is_open or len(self._unread):
            return False
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return False
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return not poller.poll(0)

    def abort(self) -> None:
        """Wake a thread that is blocked in this connection; that thread closes it. Callable from any thread."""
        try:
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Close it. Only the thread that uses it may call this."""
        self._unread = memoryview(b"")
        self._connection.disconnect()
        self._socket.close()

    def _prove(self, deadline: Deadline) -> None:
        nonce = secrets.token_hex(8).encode()
        if self.command(b"ECHO", nonce, deadline=deadline) != nonce or len(self._unread):
            raise self._desync("the echo at hand-over did not come back")

    def _send_some(self, pending: deque[memoryview], deadline: Deadline) -> int:
        deadline.remaining()
        try:
            return self._socket.sendmsg(list(pending)) if self._plain else self._socket.send(pending[0])
        except OSError as error:
            raise self._broken(error, deadline) from error

    def _read_head(self, deadline: Deadline) -> tuple[bytes, bytes]:
        line = self._read_line(deadline)
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            code, _, message = rest.decode("utf-8", "replace").partition(" ")
            raise StoreRefused(code, message)
        if kind not in (b"+", b":", b"$"):
            raise self._desync(f"reply type {kind!r}")
        return kind, rest

    def _read_line(self, deadline: Deadline) -> bytes:
        line = b""
        while (end := line.find(_CRLF)) < 0:
            if len(line) > LINE_LIMIT:
                raise self._desync("a reply line without end")
            line += self._take_unread() or self._receive_scratch(deadline)
        self._unread = memoryview(line)[end + 2 :]
        return line[:end]

    def _take_unread(self) -> bytes:
        taken = bytes(self._unread)
        self._unread = memoryview(b"")
        return taken

    def _receive_scratch(self, deadline: Deadline) -> bytes:
        received = self._receive_some(memoryview(self._scratch), deadline)
        return bytes(self._scratch[:received])

    def _bulk_length(self, digits: bytes) -> int | None:
        if digits == b"-1":
            return None
        if not digits.isdigit():
            raise self._desync(f"bulk length {digits[:32]!r}")
        return int(digits)

    def _read_small_bulk(self, length: int, deadline: Deadline) -> bytes:
        if length > SMALL_BULK_LIMIT:
            raise self._desync(f"a bulk of {length} bytes where at most {SMALL_BULK_LIMIT} were expected")
        value = self.receive_exactly(length, deadline)
        self.end_bulk(deadline)
        return value

    def _receive_some(self, into: memoryview, deadline: Deadline, flags: int = 0) -> int:
        deadline.remaining()
        try:
            received = self._socket.recv_into(into, 0, flags)
        except OSError as error:
            raise self._broken(error, deadline) from error
        if not received:
            raise self._broken(ConnectionResetError("closed by the server"), deadline)
        return received

    def _broken(self, error: OSError, deadline: Deadline) -> StoreUnreachable:
        self.close()
        reason = (
            f"no answer within {deadline.seconds:g} s"
            if isinstance(error, TimeoutError | BlockingIOError)
            else str(error)
        )
        return StoreUnreachable(reason)

    def _desync(self, what: str) -> WireDesync:
        self.close()
        return WireDesync(what)


def packed_command(parts: Sequence[bytes]) -> bytes:
    """A command of small arguments in RESP."""
    return b"".join((b"*%d\r\n" % len(parts), *(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)))
