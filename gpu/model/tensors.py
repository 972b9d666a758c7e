"""Weights in the form that the CPU products read.

A matrix of `num_rows` outputs by `num_cols` inputs is packed into blocks of 64 outputs, inputs outermost, so that a
product walks memory once, in order, and broadcasts one input over 64 outputs at a time:

    codes     [block][input][64]          f32, bf16 (as u16), Q8 u8
              [block][input][32]          Q4 u8: output j in the low nibble of byte j, output j + 32 in the high one
    scales    [block][input / 32][64]     f32, Q8 and Q4: value = scale * code + minimum
    minimums  [block][input / 32][64]     f32, Q8 and Q4

Rows beyond `num_rows` in the last block are zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.errors import ModelFileError

BLOCK_ROWS = 64
GROUP_COLS = 32

_MAX_NIBBLE = np.uint8(15)

Floats = NDArray[np.float32]


class WeightStorage(StrEnum):
    """How weights lie in memory. Q4 and Q8 keep the codes of 4, and of 5 to 8 bit file formats without any loss."""

    F32 = "f32"
    BF16 = "bf16"
    Q8 = "q8"
    Q4 = "q4"

    @property
    def is_dense(self) -> bool:
        """Whether values are stored themselves, without codes and scales."""
        return self in (WeightStorage.F32, WeightStorage.BF16)


@dataclass(frozen=True, slots=True)
class WeightMatrix:
    """A packed matrix; made by `from_f32` or `from_groups`, never changed afterwards."""

    num_rows: int
    num_cols: int
    storage: WeightStorage
    codes: NDArray[Any]
    scales: Floats
    minimums: Floats

    @classmethod
    def from_f32(cls, values: Floats, storage: WeightStorage = WeightStorage.BF16) -> WeightMatrix:
        """Pack values: (num_rows, num_cols) f32. BF16 rounds to nearest even; Q8 and Q4 raise ModelFileError."""
        if values.ndim != 2:
            raise ModelFileError("matrix.ndim", values.ndim, "must be 2")
        dense = np.asarray(values, np.float32)
        codes: NDArray[Any]
        if storage is WeightStorage.F32:
            codes = dense
        elif storage is WeightStorage.BF16:
            codes = _to_bf16(dense)
        else:
            raise ModelFileError("storage", str(storage), "dense values pack as f32 or bf16")
        none = np.zeros((0, 0, BLOCK_ROWS), np.float32)
        return cls(dense.shape[0], dense.shape[1], storage, _pack(codes), none, none)

    @classmethod
    def from_groups(cls, codes: NDArray[np.uint8], scales: Floats, minimums: Floats) -> WeightMatrix:
        """Pack quantized rows: value = scale * code + minimum, one scale and minimum per 32 inputs of a row.

        codes: (num_rows, num_cols) u8; scales, minimums: (num_rows, num_cols / 32) f32. A signed code c is given as
        c + 128 with minimum -128 * scale. Codes below 16 are stored as Q4, else Q8. With fp16 scales and minimums
        scale * code is exact in f32, so a product has the same bits as with the dequantized matrix. Raises
        ModelFileError if shapes do not agree.
        """
        num_rows, num_cols = codes.shape
        if num_cols % GROUP_COLS:
            raise ModelFileError("matrix.num_cols", num_cols, f"must be a multiple of {GROUP_COLS}")
        for name, part in (("scales", scales), ("minimums", minimums)):
            if part.shape != (num_rows, num_cols // GROUP_COLS):
                raise ModelFileError(f"matrix.{name}", part.shape, f"must be {(num_rows, num_cols // GROUP_COLS)}")
        packed = (_pack(np.asarray(part, np.float32)) for part in (scales, minimums))
        blocks = _pack(np.asarray(codes, np.uint8))
        if blocks.max(initial=0) > _MAX_NIBBLE:
            return cls(num_rows, num_cols, WeightStorage.Q8, blocks, *packed)
        nibbles = blocks[..., : BLOCK_ROWS // 2] | (blocks[..., BLOCK_ROWS // 2 :] << np.uint8(4))
        return cls(num_rows, num_cols, WeightStorage.Q4, nibbles, *packed)

    def to_f32(self) -> Floats:
        """Unpack into (num_rows, num_cols) f32: the values that a product uses."""
        if self.storage in (WeightStorage.Q8, WeightStorage.Q4):
            codes = self.codes
            if self.storage is WeightStorage.Q4:
                codes = np.concatenate((codes & _MAX_NIBBLE, codes >> np.uint8(4)), axis=-1)
            scales, minimums = (np.repeat(part, GROUP_COLS, axis=1) for part in (self.scales, self.minimums))
            dense = scales * codes.astype(np.float32) + minimums
        elif self.storage is WeightStorage.BF16:
            dense = (self.codes.astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            dense = self.codes
        rows = dense.transpose(0, 2, 1).reshape(-1, self.num_cols)[: self.num_rows]
        return np.ascontiguousarray(rows, np.float32)

    @property
    def num_bytes(self) -> int:
        """Bytes that a product over the whole matrix reads."""
        return int(self.codes.nbytes + self.scales.nbytes + self.minimums.nbytes)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Biases and head norms are None where the architecture has none.

    attn_norm, ffn_norm: (hidden_size,) f32. q_bias: (q_width,), k_bias, v_bias: (kv_width,) f32.
    q_norm, k_norm: (head_dim,) f32.
    """

    attn_norm: Floats
    q: WeightMatrix
    k: WeightMatrix
    v: WeightMatrix
    o: WeightMatrix
    ffn_norm: Floats
    gate: WeightMatrix
    up: WeightMatrix
    down: WeightMatrix
    q_bias: Floats | None = None
    k_bias: Floats | None = None
    v_bias: Floats | None = None
    q_norm: Floats | None = None
    k_norm: Floats | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights. embedding: (vocab_size, hidden_size); head None means the embedding is also the head."""

    embedding: WeightMatrix
    layers: tuple[LayerWeights, ...]
    final_norm: Floats
    head: WeightMatrix | None = None

    @property
    def output_head(self) -> WeightMatrix:
        """The matrix that turns the last hidden state into logits."""
        return self.embedding if self.head is None else self.head


def _to_bf16(values: Floats) -> NDArray[np.uint16]:
    """Round f32 to the upper 16 bits, to nearest even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)


def _pack(rows: NDArray[Any]) -> NDArray[Any]:
    """(num_rows, n) -> (blocks, n, 64), zero rows added at the end."""
    num_rows, width = rows.shape
    blocks = -(-num_rows // BLOCK_ROWS)
    packed = np.zeros((blocks, width, BLOCK_ROWS), rows.dtype)
    whole = num_rows // BLOCK_ROWS
    if whole:
        packed[:whole] = rows[: whole * BLOCK_ROWS].reshape(whole, BLOCK_ROWS, width).transpose(0, 2, 1)
    if whole < blocks:
        packed[whole, :, : num_rows - whole * BLOCK_ROWS] = rows[whole * BLOCK_ROWS :].T
    return packed
