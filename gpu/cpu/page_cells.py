"""Cells of one head of one page as f32, wherever the page lies."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu.cpu.attention_task import (
    DEVICE,
    DEVICE_PAGES,
    HEAD_DIM,
    K_PLANE,
    MIRROR,
    MIRROR_PAGES,
    PAGE_SIZE,
    TABLE_WIDTH,
    V_PLANE,
)  # fmt: skip
from gpu.cpu.intrinsics import carray, pointer
from gpu.cpu.scalar_math import half_value, jit
from gpu.cpu.store_cells import (
    CODE_BYTES,
    CODES,
    GROUP,
    KIND,
    KIND_F16,
    KIND_INT8,
    KIND_Q4,
    SCALE_BYTES,
    SCALES,
)  # fmt: skip
from gpu.cpu.unpack_cells import key_unpacker, value_unpacker

_keys_f16, _keys_int8, _keys_q4 = (key_unpacker(kind) for kind in (KIND_F16, KIND_INT8, KIND_Q4))
_values_f16, _values_int8, _values_q4 = (value_unpacker(kind) for kind in (KIND_F16, KIND_INT8, KIND_Q4))


@jit
def page_address(task: Any, sequence: int, page: int) -> int:
    """Where the page lies: in the device arena if it is resident, else in the mirror."""
    width = task[TABLE_WIDTH]
    device = carray(pointer(task[DEVICE_PAGES]), ((sequence + 1) * width,), np.int64)
    offset = device[sequence * width + page]
    if offset >= 0:
        return task[DEVICE] + offset
    mirror = carray(pointer(task[MIRROR_PAGES]), ((sequence + 1) * width,), np.int64)
    return task[MIRROR] + mirror[sequence * width + page]


@jit
def unpack_keys(task: Any, page: int, kv_head: int, cells: int, keys: int, scales: int) -> None:
    """K of one head as f32 [dim][page_size], 16 cells at a time; beyond `cells` are values that nobody reads."""
    head_dim, page_size, kind = task[HEAD_DIM], task[PAGE_SIZE], task[K_PLANE + KIND]
    codes, group = _load_plane(task, np.int64(K_PLANE), page, kv_head, cells, scales)
    blocks = (cells + 15) // 16
    if kind == KIND_INT8:
        _keys_int8(codes, scales, blocks, head_dim, keys, page_size, group)
    elif kind == KIND_Q4:
        _keys_q4(codes, scales, blocks, head_dim, keys, page_size, group)
    elif head_dim % 16 == 0:
        _keys_f16(codes, scales, blocks, head_dim, keys, page_size, group)
    else:
        out = carray(pointer(keys), (head_dim, page_size), np.float32)
        _unpack_odd(codes, cells, head_dim, out.T)


@jit
def unpack_values(task: Any, page: int, kv_head: int, cells: int, values: int, padded: int, scales: int) -> None:
    """V of one head as f32 [cell][padded dim]."""
    head_dim, page_size, kind = task[HEAD_DIM], task[PAGE_SIZE], task[V_PLANE + KIND]
    codes, group = _load_plane(task, np.int64(V_PLANE), page, kv_head, cells, scales)
    if kind == KIND_INT8:
        _values_int8(codes, scales, cells, head_dim, values, page_size, group)
    elif kind == KIND_Q4:
        _values_q4(codes, scales, cells, head_dim, values, page_size, group)
    elif head_dim % 16 == 0:
        _values_f16(codes, scales, cells, head_dim, values, page_size, group)
    else:
        out = carray(pointer(values), (page_size, padded), np.float32)
        out[:cells, head_dim:] = np.float32(0)
        _unpack_odd(codes, cells, head_dim, out)


@jit
def _load_plane(task: Any, plane: int, page: int, kv_head: int, cells: int, scales: int) -> Any:
    """Address of a head's codes and the values per scale; its scales go to f32 [group][page_size]."""
    page_size, group, code_bytes = task[PAGE_SIZE], task[plane + GROUP], task[plane + CODE_BYTES]
    codes = page + task[plane + CODES] + kv_head * page_size * code_bytes
    if group == 0:
        return codes, group
    groups = task[HEAD_DIM] // group
    place = page + task[plane + SCALES] + kv_head * page_size * task[plane + SCALE_BYTES]
    halves = carray(pointer(place), (cells, groups), np.uint16)
    out = carray(pointer(scales), (groups, page_size), np.float32)
    for g in range(groups):
        for cell in range(cells):
            out[g, cell] = half_value(np.int32(halves[cell, g]))
    return codes, group


@jit
def _unpack_odd(codes: int, cells: int, head_dim: int, out: Any) -> None:
    """f16 cells whose head_dim is no multiple of 16 to out[cell, dim]."""
    halves = carray(pointer(codes), (cells, head_dim), np.uint16)
    for cell in range(cells):
        for d in range(head_dim):
            out[cell, d] = half_value(np.int32(halves[cell, d]))
