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

    def page(self, pages: TurnPages, page_index: int, token_ids: tuple[int, ...]) -> PageIdentity:
        """Identity of a page that this worker computed."""
        return PageIdentity(
            parent=pages.parent_of(page_index),
            digest=pages.digests[page_index],
            page_index=page_index,
            token_ids=token_ids,
            format_digest=self.format_digest,
            numerics_digest=self.numerics_digest,
            writer_boot_id=self.boot_id,
            epoch=pages.epoch,
            stateless=pages.stateless,
        )

    def expected(self, pages: TurnPages, page_index: int, token_ids: tuple[int, ...]) -> ExpectedPage:
        """What a record must be to serve as that page here."""
        return ExpectedPage(
            pages.parent_of(page_index),
            pages.digests[page_index],
            token_ids,
            self.format_digest,
            self.numerics_digest,
        )
