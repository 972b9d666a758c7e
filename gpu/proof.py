"""What makes a page trustworthy: poison that append never writes, counts of mirror stores, byte comparison.

Poison is fp16 -0.0 in every scale of a cell, or, without scales, in the first code of every head. Append stores every
zero as +0.0, so a cell that still holds poison was not stored; as a number poison is a harmless zero.
"""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gpu.errors import LayoutError
from gpu.layout import KVLayout

POISON = np.uint16(0x8000)


class Attest(StrEnum):
    """How often pages are compared with their device copy and tails with their poison."""

    ALWAYS = "always"
    SAMPLED = "sampled"
    OFF = "off"

    @classmethod
    def parse(cls, value: str) -> Attest:
        """Raises LayoutError that lists the known values."""
        try:
            return cls(value)
        except ValueError:
            raise LayoutError("attest", value, f"one of {', '.join(cls)}") from None


class AttestSchedule:
    """Says which of a row of checks to make: all, one in `SAMPLE_EVERY`, none."""

    SAMPLE_EVERY = 16

    def __init__(self, attest: Attest) -> None:
        self.attest = attest
        self._seen = 0

    def due(self) -> bool:
        """Whether this check is made; counts the call."""
        self._seen += 1
        if self.attest is Attest.SAMPLED:
            return self._seen % self.SAMPLE_EVERY == 1
        return self.attest is Attest.ALWAYS


def page_parts(layout: KVLayout, page: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """Views of a page's parts: K codes, K scales, V codes, V scales, without empty ones.

    Each is (num_layers, num_kv_heads, page_size, bytes per head and cell).
    """
    by_layer = page.reshape(layout.num_layers, -1)
    shape = (layout.num_layers, layout.num_kv_heads, layout.page_size, -1)
    return [by_layer[:, start:end].reshape(shape) for start, end in _part_spans(layout)]


def equal_cells(layout: KVLayout, a: NDArray[np.uint8], b: NDArray[np.uint8], num_cells: int) -> bool:
    """Whether two pages have the same bytes in cells 0 .. num_cells - 1, codes and scales of K and V."""
    if num_cells == layout.page_size:
        return bool(np.array_equal(a, b))
    pairs = zip(page_parts(layout, a), page_parts(layout, b), strict=True)
    return all(np.array_equal(x[:, :, :num_cells], y[:, :, :num_cells]) for x, y in pairs)


@lru_cache(maxsize=8)
def _part_spans(layout: KVLayout) -> tuple[tuple[int, int], ...]:
    spans = []
    for plane in (layout.plane(0, 0), layout.plane(0, 1)):
        for offset, size in ((plane.codes_offset, plane.codes_bytes), (plane.scales_offset, plane.scales_bytes)):
            if size:
                spans.append((offset, offset + size))
    return tuple(spans)


class Poison:
    """Sets and finds poison in pages of one layout."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout

    def set(self, page: NDArray[np.uint8], first_cell: int = 0) -> None:
        """Poison cells first_cell .. page_size - 1 of a page."""
        for marks in self._marks(page):
            marks[:, :, first_cell:] = POISON

    def intact(self, page: NDArray[np.uint8], first_cell: int = 0) -> bool:
        """Whether cells first_cell .. page_size - 1 hold poison in every mark: nothing was stored there."""
        return all(bool((marks[:, :, first_cell:] == POISON).all()) for marks in self._marks(page))

    def present(self, page: NDArray[np.uint8]) -> bool:
        """Whether any cell of a page holds poison in any mark."""
        return any(bool((marks == POISON).any()) for marks in self._marks(page))

    def _marks(self, page: NDArray[np.uint8]) -> list[NDArray[np.uint16]]:
        parts = iter(page_parts(self._layout, page))
        marks = []
        for fmt in (self._layout.k_format, self._layout.v_format):
            codes = next(parts)
            marks.append(next(parts).view(np.uint16) if fmt.group_size else codes.view(np.uint16)[..., :1])
        return marks
