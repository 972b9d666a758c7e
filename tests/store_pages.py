"""Pages for tests of the store: one small layout, one chain, records made from any token list."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from snapshot_store.chain import PrefixChain
from snapshot_store.expected_page import ExpectedPage
from snapshot_store.fingerprint import Fingerprint, FormatRecord, NumericsRecord
from snapshot_store.keys import page_key
from snapshot_store.record import PageIdentity, build_header
from snapshot_store.store import FetchRequest, PageStore, PutOutcome, nothing_to_prepare
from snapshot_store.transcript import CacheScope

PAGE_SIZE = 16
SEGMENTS = (96, 48, 96, 48, 96, 48)
PAGE_BYTES = sum(SEGMENTS)
SALT = b"s" * 32
BOOT_ID = b"writer-boot-id-1"
TTL_S = 600
FINGERPRINT = Fingerprint(
    FormatRecord.of(
        {
            "num_layers": 3, "num_kv_heads": 1, "head_dim": 64, "page_size": PAGE_SIZE,
            "k_format": "int8", "v_format": "q4", "rope_theta": 10000.0, "weights": b"w" * 32,
        }
    ),
    NumericsRecord.of({"backend": "cpu", "kernels": 1}),
)  # fmt: skip


@dataclass(frozen=True)
class Page:
    """A page ready to be put, and the request that fetches it."""

    key: str
    identity: PageIdentity
    body: bytes
    segments: tuple[int, ...] = SEGMENTS

    @property
    def header(self) -> bytes:
        return build_header(self.key, self.identity, memoryview(self.body), self.segments)

    @property
    def record(self) -> bytes:
        return self.header + self.body

    def put(self, store: PageStore, ttl_s: int = TTL_S) -> PutOutcome:
        return store.put(self.key, self.header, memoryview(self.body), ttl_s)

    def expected(self) -> ExpectedPage:
        own = self.identity
        return ExpectedPage(own.parent, own.digest, own.token_ids, own.format_digest, own.numerics_digest)

    def request(self, into: bytearray, prepare: Callable[[], None] = nothing_to_prepare) -> FetchRequest:
        return FetchRequest(self.key, self.expected(), self.segments, memoryview(into), prepare)


def chain(fingerprint: Fingerprint = FINGERPRINT, page_size: int = PAGE_SIZE, salt: bytes = SALT) -> PrefixChain:
    return PrefixChain(
        fingerprint.format_digest, fingerprint.numerics_digest, salt, CacheScope.TENANT, "local", page_size
    )


def make_pages(
    token_ids: list[int],
    tenant: str = "local",
    fingerprint: Fingerprint = FINGERPRINT,
    segments: tuple[int, ...] = SEGMENTS,
    boot_id: bytes = BOOT_ID,
    page_size: int = PAGE_SIZE,
    stateless: bool = False,
) -> list[Page]:
    """Pages of the full pages of `token_ids`, with bodies that differ from page to page."""
    own = chain(fingerprint, page_size)
    digests = own.digests(token_ids)
    pages = []
    for index, digest in enumerate(digests):
        identity = PageIdentity(
            parent=own.parent_of(digests, index),
            digest=digest,
            page_index=index,
            token_ids=tuple(token_ids[index * page_size : (index + 1) * page_size]),
            format_digest=fingerprint.format_digest,
            numerics_digest=fingerprint.numerics_digest,
            writer_boot_id=boot_id,
            epoch=7,
            stateless=stateless,
        )
        pages.append(Page(page_key(tenant, digest), identity, make_body(digest, segments), segments))
    return pages


def make_body(digest: bytes, segments: tuple[int, ...]) -> bytes:
    """Bytes that are a function of the page's digest."""
    return random.Random(digest).randbytes(sum(segments))
