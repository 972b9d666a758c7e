"""What of a step is fixed when it is captured, and rounding up to what a captured step can serve."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

MAX_SKINNY_ROWS: Final = 64
_ROW_BUCKETS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_LENGTH_BUCKETS: Final = tuple(1024 << shift for shift in range(0, 15, 2))


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes that kernels of a step are launched with; tables are padded up to them.

    rows, entries: of the plan. tiles: attention tiles of the first few_rows rows, which belong to sequences with few
    rows; tile_rows: most rows of one; wide_tiles: of the others. sampled: rows that get logits. max_length: cells of
    the longest sequence. general_sampling: whether any row needs more than arg max.
    """

    rows: int
    entries: int
    few_rows: int
    tiles: int
    tile_rows: int
    wide_tiles: int
    sampled: int
    max_length: int
    general_sampling: bool

    @property
    def skinny(self) -> bool:
        """Whether the step is captured and replayed."""
        return self.rows <= MAX_SKINNY_ROWS and self.wide_tiles == 0

    def padded(self) -> StepShape:
        """The shape whose captured step serves this one, for a skinny step."""
        rows = row_bucket(self.rows)
        return StepShape(
            rows=rows,
            entries=rows,
            few_rows=rows,
            tiles=row_bucket(self.tiles),
            tile_rows=self.tile_rows,
            wide_tiles=0,
            sampled=row_bucket(self.sampled) if self.sampled else 0,
            max_length=length_bucket(self.max_length),
            general_sampling=self.general_sampling,
        )


def row_bucket(count: int) -> int:
    """The least bucket of rows that holds `count`, at most MAX_SKINNY_ROWS."""
    return _ROW_BUCKETS[bisect_left(_ROW_BUCKETS, count)]


def length_bucket(num_cells: int) -> int:
    """The least bucket of cells that holds `num_cells`: powers of four times 1024."""
    return _LENGTH_BUCKETS[min(bisect_left(_LENGTH_BUCKETS, num_cells), len(_LENGTH_BUCKETS) - 1)]
