"""How long pages live: deep pages go first, since a chain without its head is worthless."""

from __future__ import annotations

from typing import Final

STATELESS_TTL_S: Final = 300
FLOOR: Final = 0.5
HALVING_PAGES: Final = 256


def ttl_for_depth(base_ttl_s: int, page_index: int) -> int:
    """Seconds to live of page `page_index`: `base_ttl_s` for the first, never rising, never under half of it.

    ttl = base (floor + (1 - floor) h / (h + index)) with h = 256 pages, so a server that evicts the shortest time to
    live first (volatile-ttl) takes the tail of a chain before its head.
    """
    falling = (1.0 - FLOOR) * HALVING_PAGES / (HALVING_PAGES + max(0, page_index))
    return max(1, int(base_ttl_s * (FLOOR + falling)))


def ttls_for_pages(base_ttl_s: int, first_page_index: int, num_pages: int) -> list[int]:
    """Seconds to live of consecutive pages of one chain, as `touch` takes them."""
    return [ttl_for_depth(base_ttl_s, first_page_index + index) for index in range(num_pages)]
