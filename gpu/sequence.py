"""A branch loaded in the cache: its pages and how far they are written, final and sealed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpu.pages import Page


class Sequence:
    """Cells of one branch, in order.

        0 .. num_sealed * page_size - 1    in shared, read-only pages
        .. accepted - 1                    final: they follow from tokens that will not be taken back
        .. length - 1                      appended by launched steps
        .. len(pages) * page_size - 1      reserved, poisoned

    own_numerics: no page with foreign numerics is attached. failed: a step of this sequence could not be proven; it
    takes no more steps. has_attended: a step of it was launched. last_sampled: token that the newest DECODE or PREFILL
    step sampled, set by the backend.
    """

    __slots__ = (
        "_page_index",
        "accepted",
        "closed",
        "failed",
        "has_attended",
        "last_sampled",
        "length",
        "num_launched",
        "num_sealed",
        "num_stale",
        "own_numerics",
        "pages",
        "sequence_id",
        "truncations",
    )

    def __init__(self, sequence_id: int) -> None:
        self.sequence_id = sequence_id
        self.length = 0
        self.accepted = 0
        self.pages: list[Page] = []
        self.num_sealed = 0
        self.own_numerics = True
        self.failed = False
        self.has_attended = False
        self.closed = False
        self.last_sampled: int | None = None
        self.num_launched = 0
        self.num_stale = 0
        self.truncations = 0
        self._page_index: NDArray[np.int64] = np.zeros(0, np.int64)

    def __repr__(self) -> str:
        return f"Sequence({self.sequence_id}, length={self.length}, accepted={self.accepted}, pages={len(self.pages)})"

    @property
    def page_index(self) -> NDArray[np.int64]:
        """(len(pages),) indices of the pages in the arena."""
        return self._page_index

    def set_pages(self, pages: list[Page]) -> None:
        """Replace the list of pages."""
        self.pages = pages
        self._page_index = np.array([page.index for page in pages], np.int64)
