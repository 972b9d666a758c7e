"""KV cache formats as data: how one plane (K or V of one layer) stores its numbers.

A cache format is a pair of plane formats. Nothing outside a kernel branches on a name: offsets, sizes and poison
follow from the descriptor.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpu.errors import LayoutError


@dataclass(frozen=True, slots=True)
class PlaneFormat:
    """How a vector of `head_dim` f32 values is stored.

    bits: bits per code. group_size: values that share one fp16 scale, 0 for none. rotated: an orthonormal Hadamard
    rotation over head_dim precedes quantization.
    """

    name: str
    kernel_id: int
    bits: int
    group_size: int
    rotated: bool

    def code_bytes(self, head_dim: int) -> int:
        """Bytes of codes per head and cell."""
        return head_dim * self.bits // 8

    def scale_bytes(self, head_dim: int) -> int:
        """Bytes of fp16 scales per head and cell; 0 for a format without scales."""
        return 0 if self.group_size == 0 else 2 * (head_dim // self.group_size)

    def check_head_dim(self, head_dim: int) -> None:
        """Raise LayoutError if this format cannot store vectors of `head_dim` values."""
        if self.group_size and head_dim % self.group_size:
            raise LayoutError("head_dim", head_dim, f"plane format {self.name} needs a multiple of {self.group_size}")
        if self.rotated and head_dim & (head_dim - 1):
            raise LayoutError("head_dim", head_dim, f"plane format {self.name} rotates and needs a power of two")


F16 = PlaneFormat("f16", 0, 16, 0, False)
INT8 = PlaneFormat("int8", 1, 8, 64, False)
Q4 = PlaneFormat("q4", 2, 4, 32, True)


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """A pair of plane formats."""

    name: str
    k: PlaneFormat
    v: PlaneFormat


CACHE_FORMATS: dict[str, CacheFormat] = {
    "f16": CacheFormat("f16", F16, F16),
    "int8": CacheFormat("int8", INT8, INT8),
    "q4": CacheFormat("q4", Q4, Q4),
    "k8v4": CacheFormat("k8v4", INT8, Q4),
}


def cache_format(name: str) -> CacheFormat:
    """Look a cache format up by name. Raises LayoutError that lists the known ones."""
    try:
        return CACHE_FORMATS[name]
    except KeyError:
        raise LayoutError("kv_format", name, f"one of {', '.join(CACHE_FORMATS)}") from None
