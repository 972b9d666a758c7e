"""A parked fleet without workers: transcripts and page records as commit and parking leave them."""

from __future__ import annotations

from dataclasses import dataclass

import redis

from snapshot_store.chain import PrefixChain
from snapshot_store.fingerprint import Fingerprint
from snapshot_store.keys import page_key, transcript_key
from snapshot_store.published import publish_fingerprint
from snapshot_store.record import PageIdentity, build_header
from snapshot_store.redis_store import RedisPageStore
from snapshot_store.salts import tenant_salt
from snapshot_store.transcript import TranscriptEntry
from snapshot_store.transcript_codec import encode_entry
from snapshot_store.transcript_reader import TranscriptReader
from snapshot_store.wire_pool import WireSettings
from tests.services import ValkeyServer
from tests.store_pages import BOOT_ID, FINGERPRINT, SEGMENTS, TTL_S, Page, make_body
from tests.store_transcripts import make_entry


@dataclass(frozen=True)
class ParkedFleet:
    """Writes turns and their pages to two real servers."""

    control_server: ValkeyServer
    pages_server: ValkeyServer
    fingerprint: Fingerprint = FINGERPRINT

    @property
    def control(self) -> redis.Redis:
        return self.control_server.client()

    @property
    def pages(self) -> redis.Redis:
        return self.pages_server.client()

    def commit(self, turn_id: str, **fields: object) -> TranscriptEntry:
        """Commit a turn under this fleet's fingerprint and publish that."""
        publish_fingerprint(self.control, self.fingerprint, TTL_S)
        digests = {
            "format_digest": self.fingerprint.format_digest, "numerics_digest": self.fingerprint.numerics_digest
        }  # fmt: skip
        entry = make_entry(turn_id, **(digests | fields))
        self.control.set(transcript_key(entry.tenant, turn_id), encode_entry(entry))
        return entry

    def park(self, entry: TranscriptEntry) -> list[Page]:
        """Store every full page of the path to a committed turn."""
        token_ids = TranscriptReader(self.control, entry.tenant).token_ids(entry.turn_id)
        page_size = self.fingerprint.format.as_dict()["page_size"]
        assert isinstance(page_size, int)
        own = self.fingerprint
        chain = PrefixChain(
            own.format_digest, own.numerics_digest, tenant_salt(self.control, entry.tenant),
            entry.scope, entry.scope_id, page_size,
        )  # fmt: skip
        digests = chain.digests(token_ids)
        pages = []
        store = RedisPageStore(WireSettings(self.pages_server.url))
        for index, digest in enumerate(digests):
            identity = PageIdentity(
                chain.parent_of(digests, index), digest, index,
                token_ids[index * page_size : (index + 1) * page_size],
                own.format_digest, own.numerics_digest, BOOT_ID, entry.epoch, False,
            )  # fmt: skip
            page = Page(page_key(entry.tenant, digest), identity, make_body(digest, SEGMENTS), SEGMENTS)
            store.put(
                page.key,
                build_header(page.key, identity, memoryview(page.body), SEGMENTS),
                memoryview(page.body),
                TTL_S,
            )
            pages.append(page)
        store.close()
        return pages
