"""Emitted kernels that turn stored cells of one head into f32: K transposed, [dim][cell], V as [cell][dim].

One kernel per plane format and orientation, in tiles of 16 cells by 16 codes. head_dim must be a multiple of 16.
"""

from __future__ import annotations

from typing import Any

from gpu.cpu.store_cells import KIND_F16, KIND_INT8, KIND_Q4
from gpu.cpu.vector_code import FLOATS, I8, I16, I64, INTS, LANES, VectorCode, emitted_kernel, floats, ints


def key_unpacker(kind: int) -> Any:
    """Make unpack(codes, scales, blocks, head_dim, out, out_stride, group), all i64.

    codes: address of cell 0's codes, cells code_bytes apart. scales: address of f32 [group][out_stride]. blocks: how
    many times 16 cells. out: address of f32 [dim][out_stride]. group: values per scale.
    """

    def emit(code: VectorCode, args: Any) -> None:
        codes, scales, blocks, head_dim, out, out_stride, group = args
        element, dims = (I16, 16) if kind == KIND_F16 else (I8, 16 if kind == KIND_INT8 else 32)
        row = code.builder.udiv(head_dim, I64(dims // LANES))
        with code.loop(blocks) as block, code.loop(code.builder.udiv(head_dim, I64(dims))) as column:
            first = code.offset(0, (block, LANES))
            place = code.offset(0, (code.offset(0, (column, LANES)), 1), (first, row))
            rows = [code.load(codes, code.offset(place, (cell, row)), element) for cell in range(LANES)]
            scale = floats(1.0)
            if kind != KIND_F16:
                index = code.builder.udiv(code.offset(0, (column, dims)), group)
                scale = code.load(scales, code.offset(first, (index, out_stride)))
            for i, values in enumerate(_floats(code, kind, code.transpose(rows), scale)):
                dim = code.offset(i, (column, dims))
                code.store(values, out, code.offset(first, (dim, out_stride)))

    return emitted_kernel(f"kvalet_unpack_keys_{kind}", 7, emit)


def value_unpacker(kind: int) -> Any:
    """Make unpack(codes, scales, cells, head_dim, out, scales_stride, group), all i64; out: address of f32 [cell][dim].

    scales: address of f32 [group][scales_stride]; the rest as for `key_unpacker`.
    """

    def emit(code: VectorCode, args: Any) -> None:
        codes, scales, cells, head_dim, out, scales_stride, group = args
        element, dims = (I16, 16) if kind == KIND_F16 else (I8, 16 if kind == KIND_INT8 else 32)
        row = code.builder.udiv(head_dim, I64(dims // LANES))
        with code.loop(cells) as cell, code.loop(code.builder.udiv(head_dim, I64(dims))) as column:
            raw = code.load(codes, code.offset(0, (column, LANES), (cell, row)), element)
            scale = floats(1.0)
            if kind != KIND_F16:
                index = code.builder.udiv(code.offset(0, (column, dims)), group)
                scale = code.splat(code.load_one(scales, code.offset(cell, (index, scales_stride))))
            parts = _floats(code, kind, [raw], scale)
            if kind == KIND_Q4:
                order = [lane for pair in zip(range(LANES), range(LANES, 2 * LANES), strict=True) for lane in pair]
                parts = [code.shuffle(parts[0], parts[1], half) for half in (order[:LANES], order[LANES:])]
            for i, values in enumerate(parts):
                code.store(values, out, code.offset(LANES * i, (column, dims), (cell, head_dim)))

    return emitted_kernel(f"kvalet_unpack_values_{kind}", 7, emit)


def _floats(code: VectorCode, kind: int, raw: list[Any], scale: Any) -> list[Any]:
    """Codes to values; Q4 gives the low nibbles' value, then the high nibbles', of each."""
    builder = code.builder
    if kind == KIND_F16:
        return [code.from_half(part) for part in raw]
    if kind == KIND_INT8:
        wide = [builder.sext(part, INTS) for part in raw]
    else:
        bytes_ = [builder.zext(part, INTS) for part in raw]
        nibbles = [(builder.and_(part, ints(15)), builder.lshr(part, ints(4))) for part in bytes_]
        wide = [builder.sub(nibble, ints(8)) for pair in nibbles for nibble in pair]
    return [builder.fmul(builder.sitofp(part, FLOATS), scale) for part in wide]
