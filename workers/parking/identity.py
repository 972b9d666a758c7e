"""Who writes pages here and what they mean: the constants that every record of this worker carries."""

from __future__ import annotations

from dataclasses import dataclass

from gpu.layout import KVLayout
from snapshot_store.expected_page import ExpectedPage
from snapshot_store.fingerprint import Fingerprint
from snapshot_store.record import PageIdentity
from workers.parking.turn_pages import TurnPages


@dataclass(frozen=True, slots=True)
class WriterIdentity:
    """Fingerprint digests, boot id and page layout of this worker. segments: plane lengths in page order."""

    format_digest: bytes
    numerics_digest: bytes
    boot_id: bytes
    segments: tuple[int, ...]

    @classmethod
    def of(cls, fingerprint: Fingerprint, boot_id: bytes, layout: KVLayout) -> WriterIdentity:
        """Take the digests once: they are needed for every page."""
        segments = tuple(layout.plane(layer, is_v).num_bytes for layer in range(layout.num_layers) for is_v in (0, 1))
        return cls(fingerprint.format_digest, fingerprint.numerics_digest, boot_id, segments)

    def page(self, pages: TurnPages, page_index: int) -> PageIdentity:
        """Identity of a page that this worker computed: of its own numerics, or mixed."""
        return PageIdentity(
            parent=pages.parent(page_index),
            digest=pages.digest(page_index),
            page_index=page_index,
            token_ids=pages.page_ids[page_index],
            format_digest=self.format_digest,
            numerics_digest=pages.sources[page_index],
            writer_boot_id=self.boot_id,
            epoch=pages.epoch,
            stateless=pages.stateless,
        )

    def expected(self, pages: TurnPages, page_index: int, numerics: bytes) -> ExpectedPage:
        """What a record must be to serve as that page here, under numerics that this worker reads."""
        return ExpectedPage(
            pages.parent(page_index, numerics),
            pages.digest(page_index, numerics),
            pages.page_ids[page_index],
            self.format_digest,
            numerics,
        )
