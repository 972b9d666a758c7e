"""Byte layout of a KV page: the same bytes in the mirror, on the device and in the store.

    page  = layer 0 | layer 1 | ...
    layer = K plane | V plane
    plane = codes [head][cell][code bytes] | scales [head][cell][group] fp16      each part 16-byte aligned
"""

from __future__ import annotations

from dataclasses import dataclass

from gpu.errors import LayoutError
from gpu.formats import PlaneFormat

ALIGNMENT = 16
PAGE_SIZES = (64, 32, 16)
MAX_PAGE_SIZE = 128
MAX_PAGE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class PlaneLayout:
    """Offsets of one plane inside a page, in bytes."""

    codes_offset: int
    codes_bytes: int
    scales_offset: int
    scales_bytes: int
    end: int

    @property
    def offset(self) -> int:
        """First byte of the plane."""
        return self.codes_offset

    @property
    def num_bytes(self) -> int:
        """Bytes of the plane with its padding."""
        return self.end - self.codes_offset


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of a page: `page_size` consecutive cells of all layers. Raises LayoutError for shapes that cannot exist."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    k_format: PlaneFormat
    v_format: PlaneFormat

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "head_dim", "page_size"):
            if getattr(self, field) <= 0:
                raise LayoutError(field, getattr(self, field), "must be positive")
        if self.page_size % 16 or self.page_size > MAX_PAGE_SIZE:
            raise LayoutError("page_size", self.page_size, f"must be a multiple of 16 up to {MAX_PAGE_SIZE}")
        if self.head_dim % 8:
            raise LayoutError("head_dim", self.head_dim, "must be a multiple of 8")
        self.k_format.check_head_dim(self.head_dim)
        self.v_format.check_head_dim(self.head_dim)

    def plane(self, layer: int, is_v: int) -> PlaneLayout:
        """Offsets of the K plane (is_v=0) or the V plane (is_v=1) of `layer` inside a page."""
        base = layer * self.layer_bytes + (self._plane_bytes(self.k_format) if is_v else 0)
        fmt = self.v_format if is_v else self.k_format
        codes = self.num_kv_heads * self.page_size * fmt.code_bytes(self.head_dim)
        scales = self.num_kv_heads * self.page_size * fmt.scale_bytes(self.head_dim)
        scales_offset = base + _align(codes)
        return PlaneLayout(base, codes, scales_offset, scales, scales_offset + _align(scales))

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a page."""
        return self._plane_bytes(self.k_format) + self._plane_bytes(self.v_format)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.num_layers * self.layer_bytes

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell without alignment: K and V of one position in every layer."""
        formats = (self.k_format, self.v_format)
        per_head = sum(fmt.code_bytes(self.head_dim) + fmt.scale_bytes(self.head_dim) for fmt in formats)
        return self.num_layers * self.num_kv_heads * per_head

    def _plane_bytes(self, fmt: PlaneFormat) -> int:
        cells = self.num_kv_heads * self.page_size
        return _align(cells * fmt.code_bytes(self.head_dim)) + _align(cells * fmt.scale_bytes(self.head_dim))


def default_page_size(num_layers: int, num_kv_heads: int, head_dim: int, k: PlaneFormat, v: PlaneFormat) -> int:
    """The largest of 64, 32, 16 whose page is at most 8 MiB; 16 if none fits."""
    for page_size in PAGE_SIZES:
        if KVLayout(num_layers, num_kv_heads, head_dim, page_size, k, v).page_bytes <= MAX_PAGE_BYTES:
            return page_size
    return PAGE_SIZES[-1]


def _align(num_bytes: int) -> int:
    return (num_bytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
