"""Errors of the `snapshot_store` package.

StoreError
|-- BadKeyPart              a tenant, turn or branch id that cannot be part of a key (refused by the caller's edge)
|-- BadFingerprint          a fingerprint record that cannot be canonical (raised at start)
|-- BadTokenIds             token ids that cannot be packed (raised by the chain and the codec)
|-- BadPage                 a page that cannot become a record: wrong lengths (our own caller's fault)
|-- DamagedRecord           a stored page that must not be read: counts as a miss, is deleted, is recomputed
|   |-- BadMagic            not a page record at all
|   |-- BadVersion          a record of a format version that this build does not read
|   |-- TruncatedRecord     shorter than its own header says
|   |-- OversizedRecord     longer than its own header or the limits allow
|   |-- HeaderMismatch      the header's checksum over key and header fails
|   |-- LayoutMismatch      page size or (layer, plane) lengths differ from the reader's layout
|   |-- SegmentMismatch     the bytes of one layer's plane differ from their checksum
|   `-- ForeignRecord       well formed, but of other tokens, parent, digest or fingerprint
|-- StoreUnreachable        the page server did not answer in time or broke off (counts as a miss)
|-- StoreRefused            the page server answered with an error (memory, loading, read-only)
|-- WireDesync              a connection that holds bytes nobody asked for (closed, never reused)
|-- TranscriptError         a transcript entry that cannot be trusted
|   |-- TranscriptMissing   no entry of that turn
|   `-- TranscriptDamaged   bytes that are no entry of this version
`-- IndexEntryDamaged       a snapshot index entry that cannot be read (a hint: ignored and counted)
"""

from __future__ import annotations


class StoreError(Exception):
    """Root of the package's errors."""


class BadKeyPart(StoreError):
    """An id that cannot be part of a key. The edge that took it from outside answers with a refusal."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}={value!r}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class BadFingerprint(StoreError):
    """A fingerprint field that has no canonical form, or a published record that does not match its digest."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}={value!r}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class BadTokenIds(StoreError):
    """Token ids that are no unsigned 32-bit numbers, or of the wrong count."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}={value!r}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class BadPage(StoreError):
    """A page whose lengths do not fit its layout; the fault of the caller, nothing was written."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}={value!r}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class DamagedRecord(StoreError):
    """A stored page that must not be read. The reader deletes it, counts the reason and recomputes."""


class BadMagic(DamagedRecord):
    """The value does not begin like a page record."""

    def __init__(self, found: bytes) -> None:
        super().__init__(f"magic={found!r}: not a page record")
        self.found = found


class BadVersion(DamagedRecord):
    """A record of another format version."""

    def __init__(self, found: int, known: int) -> None:
        super().__init__(f"version={found}: this build reads version {known}")
        self.found = found
        self.known = known


class TruncatedRecord(DamagedRecord):
    """A record that ends early."""

    def __init__(self, part: str, found: int, needed: int) -> None:
        super().__init__(f"{part}: {found} bytes, {needed} needed")
        self.part = part
        self.found = found
        self.needed = needed


class OversizedRecord(DamagedRecord):
    """A record or one of its lengths is beyond its limit."""

    def __init__(self, part: str, found: int, limit: int) -> None:
        super().__init__(f"{part}: {found}, at most {limit}")
        self.part = part
        self.found = found
        self.limit = limit


class HeaderMismatch(DamagedRecord):
    """The checksum over key and header fails: the header changed, or the record lies under another key."""

    def __init__(self, key: str) -> None:
        super().__init__(f"key={key}: header checksum differs")
        self.key = key


class LayoutMismatch(DamagedRecord):
    """Page size, number of segments or the length of one segment differ from the layout in force."""

    def __init__(self, field: str, found: int, expected: int) -> None:
        super().__init__(f"{field}: {found}, expected {expected}")
        self.field = field
        self.found = found
        self.expected = expected


class SegmentMismatch(DamagedRecord):
    """The bytes of one layer's K or V plane differ from their checksum."""

    def __init__(self, layer: int, plane: str) -> None:
        super().__init__(f"layer {layer} plane {plane}: checksum differs")
        self.layer = layer
        self.plane = plane


class ForeignRecord(DamagedRecord):
    """A sound record of something else: other tokens, parent, digest or fingerprint."""

    def __init__(self, field: str) -> None:
        super().__init__(f"{field} differs from the reader's own")
        self.field = field


class StoreUnreachable(StoreError):
    """The page server did not answer within the deadline, refused the connection or broke off."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class StoreRefused(StoreError):
    """The page server answered with an error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class WireDesync(StoreError):
    """A connection holds bytes that belong to no outstanding request. It is closed and never reused."""


class TranscriptError(StoreError):
    """A transcript entry that is absent or cannot be trusted."""


class TranscriptMissing(TranscriptError):
    """No committed entry of that turn."""

    def __init__(self, turn_id: str) -> None:
        super().__init__(f"turn {turn_id}: no transcript entry")
        self.turn_id = turn_id


class TranscriptDamaged(TranscriptError):
    """Bytes that are no transcript entry of this version. Names field, value and limit."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}={value!r}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class IndexEntryDamaged(StoreError):
    """A snapshot index entry that cannot be read. The index is a hint: the caller goes on without it."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}={value!r}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit
