"""The page record: one header and the page's bytes, one value under one key. All numbers little endian.

    offset  bytes  field
         0      8  magic "KVLTPAGE"
         8      2  version
        10      2  flags: bit 0 stateless
        12      4  header bytes H: 208 + 4 T + 12 S
        16     16  check: xxh3-128 of key, then of the header without this field
        32      8  body bytes B
        40      4  T, token ids in this page (the page size)
        44      4  S, segments: 2 per layer
        48      8  epoch of the writer's lease
        56      4  page index in the chain
        60      4  zero
        64     16  parent digest
        80     16  own digest
        96     32  format digest
       128     32  numerics digest
       160     16  writer's boot id
       176     32  zero (room for an encryption nonce and tag)
       208    4 T  token ids, u32
            + 4 S  segment lengths, u32, in page order: layer 0 K, layer 0 V, layer 1 K, ...
            + 8 S  segment checksums, xxh3-64 seeded with the segment's index
         H      B  the page, segment after segment

`parse_header` is the only reader: every length is checked against a limit before anything is sized by it. xxh3 is no
authenticator: it finds faults, not forgers; without encryption the page server is trusted.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from xxhash import xxh3_64_intdigest, xxh3_128

from snapshot_store.chain import RECORD_VERSION, PageDigest, pack_token_ids
from snapshot_store.errors import (
    BadMagic,
    BadPage,
    BadVersion,
    HeaderMismatch,
    LayoutMismatch,
    OversizedRecord,
    SegmentMismatch,
    TruncatedRecord,
)

MAGIC: Final = b"KVLTPAGE"
CHECK_OFFSET: Final = 16
CHECK_BYTES: Final = 16
BOOT_ID_BYTES: Final = 16
FIXED_BYTES: Final = 208
MAX_TOKENS: Final = 128
MAX_SEGMENTS: Final = 2048
MAX_BODY_BYTES: Final = 256 << 20

_FIXED: Final = struct.Struct("<8sHHI16sQIIQII16s16s32s32s16s32s")
_STATELESS: Final = 1
_RESERVED: Final = bytes(32)


@dataclass(frozen=True, slots=True)
class PageIdentity:
    """What a page is: its place in a chain, its tokens, its fingerprint, its writer.

    writer_boot_id: 16 bytes drawn at the writer's start. epoch: of the lease under which it was written.
    stateless: the page belongs to no named conversation, so no transcript leads to it.
    """

    parent: PageDigest
    digest: PageDigest
    page_index: int
    token_ids: tuple[int, ...]
    format_digest: bytes
    numerics_digest: bytes
    writer_boot_id: bytes
    epoch: int
    stateless: bool


@dataclass(frozen=True, slots=True)
class PageHeader:
    """A header whose checksum holds. segment_lengths, segment_checksums: per layer and plane, in page order."""

    identity: PageIdentity
    segment_lengths: tuple[int, ...]
    segment_checksums: tuple[int, ...]
    check: bytes

    @property
    def body_bytes(self) -> int:
        """Bytes of the page behind the header."""
        return sum(self.segment_lengths)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole record."""
        return header_bytes(len(self.identity.token_ids), len(self.segment_lengths)) + self.body_bytes


def header_bytes(num_tokens: int, num_segments: int) -> int:
    """Bytes of a header for that many token ids and segments."""
    return FIXED_BYTES + 4 * num_tokens + 12 * num_segments


def build_header(key: str, identity: PageIdentity, body: memoryview, segments: Sequence[int]) -> bytes:
    """Header of the record that holds `body` under `key`. segments: byte lengths in page order. Raises BadPage."""
    _check_page(identity, body, segments)
    ends = segment_ends(segments)
    checksums = [
        xxh3_64_intdigest(body[start:end], seed=index) for index, (start, end) in enumerate(pairwise((0, *ends)))
    ]
    num_tokens, num_segments = len(identity.token_ids), len(segments)
    header = bytearray(header_bytes(num_tokens, num_segments))
    flags = _STATELESS if identity.stateless else 0
    lengths = (len(header), bytes(CHECK_BYTES), len(body), num_tokens, num_segments, identity.epoch)
    place = (identity.page_index, 0, identity.parent, identity.digest)
    origin = (identity.format_digest, identity.numerics_digest, identity.writer_boot_id, _RESERVED)
    _FIXED.pack_into(header, 0, MAGIC, RECORD_VERSION, flags, *lengths, *place, *origin)
    tables_at = FIXED_BYTES + 4 * num_tokens
    header[FIXED_BYTES:tables_at] = pack_token_ids(identity.token_ids)
    struct.pack_into(f"<{num_segments}I{num_segments}Q", header, tables_at, *segments, *checksums)
    header[CHECK_OFFSET : CHECK_OFFSET + CHECK_BYTES] = _check_field(key, memoryview(header))
    return bytes(header)


def header_length(fixed: memoryview) -> int:
    """Bytes of the whole header, from its first 208 bytes, before its checksum is known. Raises DamagedRecord."""
    if len(fixed) < FIXED_BYTES:
        raise TruncatedRecord("header", len(fixed), FIXED_BYTES)
    magic, version, _, declared, _, body_bytes, num_tokens, num_segments = struct.unpack_from("<8sHHI16sQII", fixed)
    if magic != MAGIC:
        raise BadMagic(magic)
    if version != RECORD_VERSION:
        raise BadVersion(version, RECORD_VERSION)
    for part, found, limit in (
        ("token ids", num_tokens, MAX_TOKENS),
        ("segments", num_segments, MAX_SEGMENTS),
        ("body bytes", body_bytes, MAX_BODY_BYTES),
    ):
        if found > limit:
            raise OversizedRecord(part, found, limit)
    needed = header_bytes(num_tokens, num_segments)
    if declared != needed:
        raise LayoutMismatch("header bytes", declared, needed)
    return needed


def parse_header(key: str, raw: memoryview) -> PageHeader:
    """Read the header of the record under `key`; bytes behind it are ignored. Raises DamagedRecord."""
    needed = header_length(raw)
    if len(raw) < needed:
        raise TruncatedRecord("header", len(raw), needed)
    raw = raw[:needed]
    check = bytes(raw[CHECK_OFFSET : CHECK_OFFSET + CHECK_BYTES])
    if _check_field(key, raw) != check:
        raise HeaderMismatch(key)
    return _decode(raw, check)


def check_field_of(raw: bytes | memoryview) -> bytes:
    """The check field as it stands in a record's first bytes; shorter, or empty, where the record is."""
    return bytes(raw[CHECK_OFFSET : CHECK_OFFSET + CHECK_BYTES])


def check_layout(header: PageHeader, segments: Sequence[int]) -> None:
    """Raise LayoutMismatch unless the header's segments are those of the layout in force."""
    if len(header.segment_lengths) != len(segments):
        raise LayoutMismatch("segments", len(header.segment_lengths), len(segments))
    for index, (found, expected) in enumerate(zip(header.segment_lengths, segments, strict=True)):
        if found != expected:
            layer, plane = segment_name(index)
            raise LayoutMismatch(f"bytes of layer {layer} plane {plane}", found, expected)


def check_body(header: PageHeader, body: memoryview) -> None:
    """Raise TruncatedRecord, OversizedRecord or SegmentMismatch unless `body` is what the header describes."""
    if len(body) < header.body_bytes:
        raise TruncatedRecord("body", len(body), header.body_bytes)
    if len(body) > header.body_bytes:
        raise OversizedRecord("body", len(body), header.body_bytes)
    start = 0
    for index, end in enumerate(segment_ends(header.segment_lengths)):
        check_segment(header, index, body[start:end])
        start = end


def check_segment(header: PageHeader, index: int, segment: memoryview) -> None:
    """Raise SegmentMismatch unless the bytes of segment `index` match their checksum."""
    if xxh3_64_intdigest(segment, seed=index) != header.segment_checksums[index]:
        raise SegmentMismatch(*segment_name(index))


def damaged_segments(header: PageHeader, body: memoryview) -> list[SegmentMismatch]:
    """Every segment that does not match, for inspection; a body cut short counts as mismatching from there on."""
    found: list[SegmentMismatch] = []
    start = 0
    for index, end in enumerate(segment_ends(header.segment_lengths)):
        try:
            check_segment(header, index, body[start:end])
        except SegmentMismatch as error:
            found.append(error)
        start = end
    return found


def segment_ends(segments: Sequence[int]) -> tuple[int, ...]:
    """End offset of each segment in the body."""
    ends, end = [], 0
    for length in segments:
        end += length
        ends.append(end)
    return tuple(ends)


def segment_name(index: int) -> tuple[int, str]:
    """Layer number and plane letter of a segment."""
    return index // 2, "KV"[index % 2]


def _check_field(key: str, header: memoryview) -> bytes:
    state = xxh3_128(key.encode())
    state.update(header[:CHECK_OFFSET])
    state.update(header[CHECK_OFFSET + CHECK_BYTES :])
    return state.digest()


def _decode(raw: memoryview, check: bytes) -> PageHeader:
    _, _, flags, _, _, body_bytes, num_tokens, num_segments, *rest = _FIXED.unpack_from(raw)
    epoch, page_index, _, parent, digest, format_digest, numerics_digest, boot_id, _ = rest
    if flags & ~_STATELESS:
        raise LayoutMismatch("flags", flags, _STATELESS)
    tables_at = FIXED_BYTES + 4 * num_tokens
    numbers = struct.unpack_from(f"<{num_segments}I{num_segments}Q", raw, tables_at)
    header = PageHeader(
        identity=PageIdentity(
            parent=PageDigest(parent),
            digest=PageDigest(digest),
            page_index=page_index,
            token_ids=struct.unpack_from(f"<{num_tokens}I", raw, FIXED_BYTES),
            format_digest=format_digest,
            numerics_digest=numerics_digest,
            writer_boot_id=boot_id,
            epoch=epoch,
            stateless=bool(flags & _STATELESS),
        ),
        segment_lengths=numbers[:num_segments],
        segment_checksums=numbers[num_segments:],
        check=check,
    )
    if header.body_bytes != body_bytes:
        raise LayoutMismatch("body bytes", body_bytes, header.body_bytes)
    return header


def _check_page(identity: PageIdentity, body: memoryview, segments: Sequence[int]) -> None:
    facts = (
        ("token_ids", len(identity.token_ids), 1, MAX_TOKENS),
        ("segments", len(segments), 1, MAX_SEGMENTS),
        ("body", len(body), 1, MAX_BODY_BYTES),
        ("epoch", identity.epoch, 0, (1 << 64) - 1),
        ("page_index", identity.page_index, 0, (1 << 32) - 1),
        ("writer_boot_id", len(identity.writer_boot_id), BOOT_ID_BYTES, BOOT_ID_BYTES),
        ("format_digest", len(identity.format_digest), 32, 32),
        ("numerics_digest", len(identity.numerics_digest), 32, 32),
    )
    for field, value, low, high in facts:
        if not low <= value <= high:
            raise BadPage(field, value, f"in [{low}, {high}]")
    if body.itemsize != 1 or not body.c_contiguous:
        raise BadPage("body", body.format, "contiguous bytes")
    if sum(segments) != len(body):
        raise BadPage("segments", sum(segments), f"sum to the body's {len(body)} bytes")
