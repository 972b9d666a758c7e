"""Reading one page from the page server straight into its mirror page, verified as the bytes arrive."""

from __future__ import annotations

from typing import Final

from snapshot_store.deadline import Deadline
from snapshot_store.errors import DamagedRecord, OversizedRecord, TruncatedRecord
from snapshot_store.record import (
    FIXED_BYTES,
    PageHeader,
    check_field_of,
    check_layout,
    check_segment,
    header_length,
    parse_header,
    segment_ends,
)
from snapshot_store.store import (
    FetchOutcome,
    FetchRequest,
    IsQuarantined,
    PageDamaged,
    PageMissing,
    PagePresent,
)
from snapshot_store.wire import WireConnection, packed_command

CHUNK_BYTES: Final = 1 << 19
"""Received before the segments in it are verified, while the server sends on."""


def read_page(
    connection: WireConnection, request: FetchRequest, is_quarantined: IsQuarantined, deadline: Deadline
) -> FetchOutcome:
    """GET one record: header first, and only if it is the expected one, the body into `request.into`.

    Nothing of a foreign or badly described record is written to `into`.
    Raises StoreRefused, StoreUnreachable, WireDesync.
    """
    connection.begin(deadline)
    connection.send([memoryview(packed_command([b"GET", request.key.encode()]))], deadline)
    length = connection.read_bulk_length(deadline)
    if length is None:
        return PageMissing(request.key)
    raw = connection.receive_exactly(min(length, FIXED_BYTES), deadline)
    try:
        raw += connection.receive_exactly(min(length, header_length(memoryview(raw))) - len(raw), deadline)
        header = check_header(request, raw, length)
    except DamagedRecord as error:
        connection.discard_bulk(length - len(raw), deadline)
        return PageDamaged(request.key, error, check_field_of(raw))
    if is_quarantined(header.identity.writer_boot_id):
        connection.discard_bulk(length - len(raw), deadline)
        return PageMissing(request.key, quarantined=True, check=header.check)
    return _read_body(connection, request, header, deadline)


def check_header(request: FetchRequest, raw: bytes, record_bytes: int) -> PageHeader:
    """Parse the header and hold it against request and record length. Raises DamagedRecord."""
    header = parse_header(request.key, memoryview(raw))
    request.expected.check(header)
    check_layout(header, request.segments)
    if record_bytes < header.num_bytes:
        raise TruncatedRecord("record", record_bytes, header.num_bytes)
    if record_bytes > header.num_bytes:
        raise OversizedRecord("record", record_bytes, header.num_bytes)
    return header


def _read_body(
    connection: WireConnection, request: FetchRequest, header: PageHeader, deadline: Deadline
) -> FetchOutcome:
    request.prepare()
    ends = segment_ends(header.segment_lengths)
    into, size = request.into, len(request.into)
    filled = verified = start = 0
    try:
        while filled < size:
            chunk = into[filled : filled + CHUNK_BYTES]
            connection.receive_into(chunk, deadline)
            filled += len(chunk)
            while verified < len(ends) and ends[verified] <= filled:
                check_segment(header, verified, into[start : ends[verified]])
                start, verified = ends[verified], verified + 1
    except DamagedRecord as error:
        connection.discard_bulk(size - filled, deadline)
        return PageDamaged(request.key, error, header.check)
    connection.end_bulk(deadline)
    return PagePresent(request.key, header)
