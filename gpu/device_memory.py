"""The seam between the cache and a device: slots for page copies, and when mirror stores become visible."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class CellRange:
    """Cells first .. end - 1 of the page at `mirror_offset`: what one step writes to one page."""

    mirror_offset: int
    first: int
    end: int


class DeviceMemory(Protocol):
    """Memory that kernels read fast. Slot i holds a page copy at byte i * page_bytes of its arena.

    num_slots: 0 where the mirror page is itself the resident copy (`cpu`). What `poison` and `copy_in` do is done
    before the next launched step reads the slot, in the order of the calls.
    """

    num_slots: int

    def poison(self, slot: int) -> None:
        """Poison a whole slot before its page is handed out."""
        ...

    def copy_in(self, slot: int, page: NDArray[np.uint8]) -> None:
        """Copy a mirror page (page_bytes,) into a slot (a promotion)."""
        ...

    def equal(self, slot: int, page: NDArray[np.uint8], num_cells: int) -> bool:
        """Whether cells 0 .. num_cells - 1 of a slot equal those of a mirror page, byte for byte."""
        ...

    def stage(self, mirror: NDArray[np.uint8], cells: Items[CellRange]) -> NDArray[np.uint8]:
        """The array that a step's mirror stores go to: the mirror, or a buffer that `land` copies from."""
        ...

    def land(self, mirror: NDArray[np.uint8], cells: Items[CellRange]) -> None:
        """Make a step's mirror stores visible in the mirror; part of its event."""
        ...


class UnifiedMemory:
    """No device copy: kernels work on the mirror itself. arena: what they get as `device`."""

    num_slots = 0

    def __init__(self) -> None:
        self.arena: NDArray[np.uint8] = np.zeros(0, np.uint8)

    def poison(self, slot: int) -> None:
        """There are no slots."""

    def copy_in(self, slot: int, page: NDArray[np.uint8]) -> None:
        """There are no slots."""

    def equal(self, slot: int, page: NDArray[np.uint8], num_cells: int) -> bool:
        """The mirror page is the only copy."""
        return True

    def stage(self, mirror: NDArray[np.uint8], cells: Items[CellRange]) -> NDArray[np.uint8]:
        """Stores go straight to the mirror."""
        return mirror

    def land(self, mirror: NDArray[np.uint8], cells: Items[CellRange]) -> None:
        """Stores are visible at once."""
