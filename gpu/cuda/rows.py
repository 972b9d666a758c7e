"""Launches of the kernels that work row by row or page by page: append, pages, norms, embedding, publish."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from gpu.cuda.activations import ActivationLayout
from gpu.cuda.kernel import KernelLibrary
from gpu.cuda.kernel_table import Arg, KernelEntry, KernelSource
from gpu.cuda.weight_packing import PackedStorage
from gpu.errors import LayoutError
from gpu.kv_kernels import RopeTable
from gpu.layout import KVLayout

APPEND_WARPS: Final = 8
PAGE_THREADS: Final = 256
EMBED_THREADS: Final = 256
PUBLISH_THREADS: Final = 256
MIRROR_CTAS: Final = 30
COMPARE_CTAS: Final = 2

_P, _I32, _U64, _F32 = Arg.POINTER, Arg.I32, Arg.U64, Arg.F32


def _page_sample(head_dim: int, heads: int, page_size: int, k: int, v: int, **more: int) -> dict[str, int]:
    shape = {"HEAD_DIM": head_dim, "NUM_KV_HEADS": heads, "PAGE_SIZE": page_size, "K_PLANE": k, "V_PLANE": v}
    return {**shape, **more}


def _append_sample(head_dim: int, heads: int, kv_heads: int, k: int, v: int, **more: int) -> dict[str, int]:
    chosen = {"NUM_HEADS": heads, "ROPE_DIM": head_dim, "MIRROR_IN_KERNEL": 1, "HEAD_NORM": 0, **more}
    return _page_sample(head_dim, kv_heads, 64, k, v, **chosen)


APPEND: Final = KernelSource(
    "append.cu",
    (KernelEntry("append_cells", (_P, _P, _P, _P, _P, _F32, _P, _P, _P, _P, _P, _U64, _P, _P, _P)),),
    parameters=(
        "HEAD_DIM", "NUM_KV_HEADS", "PAGE_SIZE", "K_PLANE", "V_PLANE", "NUM_HEADS", "ROPE_DIM", "MIRROR_IN_KERNEL",
        "HEAD_NORM",
    ),
    samples=(
        _append_sample(128, 32, 8, 1, 2),
        _append_sample(128, 32, 8, 0, 0),
        _append_sample(128, 16, 8, 2, 2, HEAD_NORM=1, MIRROR_IN_KERNEL=0),
        _append_sample(64, 9, 3, 1, 2),
        _append_sample(64, 14, 2, 2, 1, ROPE_DIM=32),
    ),
)  # fmt: skip
PAGES: Final = KernelSource(
    "pages.cu",
    (
        KernelEntry("mirror_cells", (_P, _P, _P, _P, _P, _U64, _I32, _P)),
        KernelEntry("poison_pages", (_P,)),
        KernelEntry("compare_pages", (_P, _P, _P, _I32, _I32, _P)),
    ),
    parameters=("HEAD_DIM", "NUM_KV_HEADS", "PAGE_SIZE", "K_PLANE", "V_PLANE"),
    samples=(
        _page_sample(128, 8, 64, 1, 2),
        _page_sample(128, 8, 64, 0, 0),
        _page_sample(64, 3, 16, 2, 1),
    ),
)
ROWS: Final = KernelSource(
    "rows.cu",
    (KernelEntry("rms_norm", (_P, _P, _F32, _P, _P)),),
    parameters=("HIDDEN", "ACTIVATION_LAYOUT"),
    samples=tuple(
        {"HIDDEN": hidden, "ACTIVATION_LAYOUT": layout} for hidden in (576, 4096, 16384) for layout in ActivationLayout
    ),
)
EMBEDDING: Final = KernelSource(
    "embedding.cu",
    (KernelEntry("embed_tokens", (_P, _P, _P, _P, _P)),),
    parameters=("HIDDEN", "STORAGE"),
    samples=tuple({"HIDDEN": 4096, "STORAGE": storage} for storage in PackedStorage),
)
PUBLISH: Final = KernelSource("publish.cu", (KernelEntry("publish_step", (_P, _P, _I32, _P, _I32)),))
SOURCES: Final = (APPEND, PAGES, ROWS, EMBEDDING, PUBLISH)


@dataclass(frozen=True, slots=True)
class RowTables:
    """Addresses of a step's row tables (docs/cuda-kernels.md, section 1).

    slots, positions, entries: (rows,) i32. mirror_pages, device_pages: (rows,) u64.
    """

    slots: int
    positions: int
    entries: int
    mirror_pages: int
    device_pages: int


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm of query and key heads. q_weight, k_weight: addresses of (head_dim,) f32."""

    q_weight: int
    k_weight: int
    eps: float


@dataclass(frozen=True, slots=True)
class DeviceRope:
    """A RoPE table in device memory. cosines, sines: addresses of (max_position, rope_dim / 2) f32."""

    cosines: int
    sines: int
    rope_dim: int

    @staticmethod
    def check(table: RopeTable, head_dim: int) -> None:
        """Raise LayoutError for a table that the append kernel cannot use."""
        step = head_dim // 16
        if table.pairing != "half":
            raise LayoutError("rope pairing", table.pairing, "must be 'half' on CUDA")
        if table.rope_dim % step or table.rope_dim > head_dim:
            raise LayoutError("rope_dim", table.rope_dim, f"must be a multiple of {step} up to {head_dim} on CUDA")


class PageKernels:
    """The kernels of one page layout. Raises LayoutError for shapes that they are not made for."""

    def __init__(self, library: KernelLibrary, layout: KVLayout) -> None:
        if layout.head_dim not in (64, 128):
            raise LayoutError("head_dim", layout.head_dim, "must be 64 or 128 on CUDA")
        self.layout = layout
        self._library = library
        self._shape = {
            "HEAD_DIM": layout.head_dim,
            "NUM_KV_HEADS": layout.num_kv_heads,
            "PAGE_SIZE": layout.page_size,
            "K_PLANE": layout.k_format.kernel_id,
            "V_PLANE": layout.v_format.kernel_id,
        }

    def append(
        self,
        stream: Any,
        layer: int,
        num_rows: int,
        tables: RowTables,
        *,
        num_heads: int,
        rope: DeviceRope,
        qkv: int,
        queries: int,
        counts: int,
        nonfinite: int,
        head_norm: HeadNorm | None = None,
        mirror_in_kernel: bool = True,
    ) -> None:
        """Queue the append of one layer: queries, and K and V into the rows' pages, mirror and device.

        qkv: (num_rows, num_heads + 2 num_kv_heads, head_dim) f32 before norms and RoPE; unchanged. queries:
        (num_rows, num_heads, head_dim) f16, written. counts: (entries, 2) i32 of this layer, grows by one for each
        (row, KV head) stored to a mirror page. nonfinite: (entries,) i32, grows by one for each vector that is not
        finite. mirror_in_kernel: False leaves mirror stores and counts to `mirror`.
        """
        variant = {
            **self._shape,
            "NUM_HEADS": num_heads,
            "ROPE_DIM": rope.rope_dim,
            "MIRROR_IN_KERNEL": int(mirror_in_kernel),
            "HEAD_NORM": int(head_norm is not None),
        }
        norm = head_norm or HeadNorm(0, 0, 0.0)
        grid = (-(-(num_heads + 2 * self.layout.num_kv_heads) // APPEND_WARPS), num_rows)
        self._library.get(APPEND, "append_cells", variant).launch(
            stream, grid, 32 * APPEND_WARPS,
            (qkv, rope.cosines, rope.sines, norm.q_weight, norm.k_weight, norm.eps, tables.slots, tables.positions,
             tables.entries, tables.mirror_pages, tables.device_pages, layer * self.layout.layer_bytes, queries, counts,
             nonfinite),
        )  # fmt: skip

    def mirror(self, stream: Any, layer: int, num_rows: int, tables: RowTables, counts: int) -> None:
        """Queue the mirror half of an append with mirror_in_kernel=False, beside what follows it in the step.

        Copies the rows' cells of one layer from device to mirror pages and counts them. counts: as in `append`.
        """
        arguments = (
            tables.slots, tables.positions, tables.entries, tables.mirror_pages, tables.device_pages,
            layer * self.layout.layer_bytes, num_rows, counts,
        )  # fmt: skip
        self._page_kernel("mirror_cells").launch(stream, MIRROR_CTAS, PAGE_THREADS, arguments)

    def poison(self, stream: Any, pages: int, num_pages: int) -> None:
        """Queue poisoning whole pages. pages: (num_pages,) u64 addresses in device memory."""
        self._page_kernel("poison_pages").launch(stream, (self.layout.num_layers, num_pages), PAGE_THREADS, (pages,))

    def compare(
        self,
        stream: Any,
        device_pages: int,
        mirror_pages: int,
        num_cells: int,
        num_pages: int,
        differing: int,
        num_ctas: int = COMPARE_CTAS,
    ) -> None:
        """Queue a byte comparison of device pages with mirror pages.

        device_pages, mirror_pages: (num_pages,) u64. num_cells: (num_pages,) i32, how many cells of each page count;
        page_size means all bytes. differing: (num_pages,) i32, grows by the number of 16-byte pieces that differ.
        """
        arguments = (device_pages, mirror_pages, num_cells, num_pages, self.layout.num_layers, differing)
        self._page_kernel("compare_pages").launch(stream, num_ctas, PAGE_THREADS, arguments)

    def _page_kernel(self, name: str) -> Any:
        return self._library.get(PAGES, name, self._shape)


def rms_norm(
    library: KernelLibrary,
    stream: Any,
    hidden_size: int,
    num_rows: int,
    *,
    residual: int,
    weight: int,
    eps: float,
    activations: int,
    activation_layout: ActivationLayout,
    row_indices: int = 0,
) -> None:
    """Queue the RMSNorm of residual rows.

    residual: (rows, hidden_size) f32. weight: (hidden_size,) f32. activations: bf16 in `activation_layout`, rows
    0 .. num_rows - 1 are written. row_indices: (num_rows,) i32, the residual row of each, negative to
    leave one out; 0 takes them in order. Raises LayoutError for a width that is no multiple of 64 up to 16384.
    """
    if hidden_size % 64 or not 0 < hidden_size <= 16384:
        raise LayoutError("hidden_size", hidden_size, "must be a multiple of 64 up to 16384 on CUDA")
    kernel = library.get(ROWS, "rms_norm", {"HIDDEN": hidden_size, "ACTIVATION_LAYOUT": activation_layout})
    block = min(512, -(-hidden_size // 256) * 32)
    kernel.launch(stream, num_rows, block, (residual, weight, eps, row_indices, activations))


def embed_tokens(
    library: KernelLibrary,
    stream: Any,
    hidden_size: int,
    num_rows: int,
    *,
    matrix: int,
    storage: PackedStorage,
    token_ids: int,
    slots: int,
    last_tokens: int,
    residual: int,
) -> None:
    """Queue the gather of embedding rows into the residual stream.

    matrix: packed weights (vocab_size, hidden_size). token_ids: (num_rows,) i32, -1
    stands for last_tokens[slots[row]]. residual: (num_rows, hidden_size) f32, written; zeros for slot -1.
    """
    kernel = library.get(EMBEDDING, "embed_tokens", {"HIDDEN": hidden_size, "STORAGE": storage})
    kernel.launch(stream, num_rows, EMBED_THREADS, (matrix, token_ids, slots, last_tokens, residual))


def publish_step(
    library: KernelLibrary, stream: Any, *, target: int, results: int, num_results: int, proofs: int, num_proofs: int
) -> None:
    """Queue the copy of a step's results and proofs to pinned memory; zeroes the proofs for the next step.

    target: address of a u64 in device memory, the address of the pinned buffer, (num_results + num_proofs,) u32.
    results, proofs: addresses of u32 words.
    """
    grid = max(1, min(16, -(-(num_results + num_proofs) // PUBLISH_THREADS)))
    arguments = (target, results, num_results, proofs, num_proofs)
    library.get(PUBLISH, "publish_step", {}).launch(stream, grid, PUBLISH_THREADS, arguments)
