"""Plane formats in NumPy: f32 vectors to stored bytes and back.

Every operation rounds to f32 on its own, as the rules of append ask for; nothing here fuses a multiply and an add.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gpu.formats import PlaneFormat
from gpu.kv_kernels import RopeTable

MAX_HALF = np.float32(65504.0)


def rotate_positions(x: NDArray[np.float32], rope: RopeTable, positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """RoPE of x: (R, heads, head_dim) f32 at positions (R,); dims from rope_dim on pass through."""
    half = rope.rope_dim // 2
    first = slice(0, 2 * half, 2) if rope.pairing == "interleaved" else slice(0, half)
    second = slice(1, 2 * half, 2) if rope.pairing == "interleaved" else slice(half, 2 * half)
    cos, sin = rope.cos[positions][:, None, :], rope.sin[positions][:, None, :]
    out = x.copy()
    with np.errstate(all="ignore"):
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def hadamard(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Orthonormal Hadamard rotation of the last axis (a power of two): butterflies 1, 2, 4, ..., then scale.

    Its own inverse.
    """
    dim = x.shape[-1]
    out = x.copy()
    stride = 1
    with np.errstate(all="ignore"):
        while stride < dim:
            pairs = out.reshape(*x.shape[:-1], dim // (2 * stride), 2, stride)
            low, high = pairs[..., 0, :].copy(), pairs[..., 1, :].copy()
            pairs[..., 0, :] = low + high
            pairs[..., 1, :] = low - high
            stride *= 2
        return out * np.float32(1.0 / math.sqrt(dim))


def to_half(x: NDArray[np.float32]) -> NDArray[np.float16]:
    """Round to nearest even, saturate at +-65504, store every zero as +0.0."""
    half = np.clip(x, -MAX_HALF, MAX_HALF).astype(np.float16)
    half[half == 0] = 0
    return half


def encode(fmt: PlaneFormat, x: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Quantize finite vectors x: (..., head_dim) f32, already rotated.

    Returns codes (..., code_bytes) and scales (..., scale_bytes) as bytes.
    """
    if fmt.bits == 16:
        return _as_bytes(to_half(x)), np.zeros((*x.shape[:-1], 0), np.uint8)
    groups = x.reshape(*x.shape[:-1], -1, fmt.group_size)
    codes, scales = _encode_int8(groups) if fmt.bits == 8 else _encode_q4(groups)
    return codes.reshape(*x.shape[:-1], -1), _as_bytes(scales)


def decode(fmt: PlaneFormat, codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Stored codes (..., code_bytes) and scales (..., scale_bytes) back to f32, still rotated where `fmt` rotates."""
    if fmt.bits == 16:
        return np.ascontiguousarray(codes).view(np.float16).astype(np.float32)
    scale = np.ascontiguousarray(scales).view(np.float16).astype(np.float32)
    if fmt.bits == 8:
        values = np.ascontiguousarray(codes).view(np.int8).astype(np.float32)
    else:
        values = np.stack((codes & 15, codes >> 4), axis=-1).astype(np.float32) - np.float32(8)
    groups = values.reshape(*codes.shape[:-1], -1, fmt.group_size) * scale[..., None]
    return groups.reshape(*codes.shape[:-1], -1)


def _encode_int8(groups: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    scale = to_half(np.abs(groups).max(axis=-1) / np.float32(127))
    stored = scale.astype(np.float32)[..., None]
    codes = np.clip(np.rint(_divide(groups, stored)), -127, 127)
    return codes.astype(np.int8).view(np.uint8), scale


def _encode_q4(groups: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    highest, lowest = groups.max(axis=-1), groups.min(axis=-1)
    largest = np.where(highest >= -lowest, highest, lowest)
    scale = to_half(largest / np.float32(-8))
    stored = scale.astype(np.float32)[..., None]
    codes = np.clip(np.trunc(_divide(groups, stored) + np.float32(8.5)), 0, 15).astype(np.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale


def _divide(groups: NDArray[np.float32], stored: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.where(stored == 0, np.float32(0), groups / np.where(stored == 0, np.float32(1), stored))


def _as_bytes(values: NDArray[np.float16]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(values).view(np.uint8)
