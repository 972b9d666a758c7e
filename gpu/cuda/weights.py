"""Weights in device memory: read row by row from a model file, packed on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from gpu.cuda.device import CudaDevice
from gpu.cuda.products import SourceType, pack_matrix
from gpu.cuda.weight_packing import TILE_ROWS, PackedStorage, PackedWeights, packed_bytes
from gpu.errors import ModelFileError
from gpu.model.config import ModelConfig
from gpu.model.tensor_names import EMBEDDING, FINAL_NORM, HEAD, layer_name

_STAGED_BYTES: Final = 256 << 20
_WIDTH: Final = 64


class RowSource(Protocol):
    """What is needed of a model file; `gpu.model.load.ModelSource` has it."""

    def dense(self, name: str) -> NDArray[Any]:
        """A matrix row by row: (num_rows, num_cols), bf16 as u16 or f32."""
        ...

    def vector(self, name: str) -> NDArray[np.float32]:
        """A vector, f32."""
        ...

    def release(self) -> None:
        """Give back the memory of what was read."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceLayer:
    """One decoder layer. qkv: rows of q, k, v; gate_up: tiles alternating. Norms and biases: addresses of f32, 0: none.

    qkv_bias: (q_width + 2 kv_width,). q_norm, k_norm: (head_dim,).
    """

    attn_norm: int
    qkv: PackedWeights
    output: PackedWeights
    ffn_norm: int
    gate_up: PackedWeights
    down: PackedWeights
    qkv_bias: int
    q_norm: int
    k_norm: int


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """All weights of a model. head: the embedding itself where the two are tied."""

    embedding: PackedWeights
    layers: tuple[DeviceLayer, ...]
    final_norm: int
    head: PackedWeights
    num_bytes: int


def check_shapes(config: ModelConfig) -> None:
    """Raise ModelFileError for a model that the products are not made for, with what they need."""
    widths = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size}
    widths["num_heads * head_dim"] = config.q_width
    for name, width in widths.items():
        if width % _WIDTH:
            raise ModelFileError(name, width, f"the cuda backend needs a multiple of {_WIDTH}")


class WeightLoader:
    """Packs matrices of one model into device memory, in `storage`."""

    def __init__(self, device: CudaDevice, config: ModelConfig, source: RowSource, storage: PackedStorage) -> None:
        self._device = device
        self._config = config
        self._source = source
        self._storage = storage
        self._staging = device.allocate(_STAGED_BYTES)
        self._num_bytes = 0

    def load(self) -> DeviceWeights:
        """Read and pack everything. Raises ModelFileError or CapacityError."""
        config = self._config
        check_shapes(config)
        embedding = self._matrix([EMBEDDING], config.vocab_size, config.hidden_size)
        layers = tuple(self._layer(index) for index in range(config.num_layers))
        final_norm = self._vector(FINAL_NORM)
        head = embedding if config.tie_embeddings else self._matrix([HEAD], config.vocab_size, config.hidden_size)
        self._device.compute.sync()
        self._device.free(self._staging)
        self._source.release()
        return DeviceWeights(embedding, layers, final_norm, head, self._num_bytes)

    def _layer(self, index: int) -> DeviceLayer:
        config = self._config

        def name(part: str) -> str:
            return layer_name(index, part)

        qkv = [name(f"attn_{part}.weight") for part in ("q", "k", "v")]
        biases = [name(f"attn_{part}.bias") for part in ("q", "k", "v")]
        gate_up = [name(f"ffn_{part}.weight") for part in ("gate", "up")]
        hidden, intermediate = config.hidden_size, config.intermediate_size
        return DeviceLayer(
            attn_norm=self._vector(name("attn_norm.weight")),
            qkv=self._matrix(qkv, config.q_width + 2 * config.kv_width, hidden),
            output=self._matrix([name("attn_output.weight")], hidden, config.q_width),
            ffn_norm=self._vector(name("ffn_norm.weight")),
            gate_up=self._matrix(gate_up, 2 * intermediate, hidden, interleave=True),
            down=self._matrix([name("ffn_down.weight")], hidden, intermediate),
            qkv_bias=self._vector(*biases) if config.qkv_bias else 0,
            q_norm=self._vector(name("attn_q_norm.weight")) if config.qk_norm else 0,
            k_norm=self._vector(name("attn_k_norm.weight")) if config.qk_norm else 0,
        )

    def _vector(self, *names: str) -> int:
        values = np.concatenate([self._source.vector(name) for name in names]).astype(np.float32)
        buffer = self._device.upload(values)
        self._num_bytes += buffer.num_bytes
        return buffer.address

    def _matrix(self, names: list[str], num_outputs: int, width: int, *, interleave: bool = False) -> PackedWeights:
        """Pack the rows of several tensors into one matrix, one after the other, or tile by tile in turn."""
        buffer = self._device.allocate(packed_bytes(self._storage, num_outputs, width))
        self._num_bytes += buffer.num_bytes
        packed = PackedWeights(buffer.address, self._storage, num_outputs, width)
        stride = len(names) if interleave else 1
        first_tile = 0
        for position, name in enumerate(names):
            rows = self._source.dense(name)
            self._pack(rows, packed, position if interleave else first_tile, stride)
            first_tile += -(-len(rows) // TILE_ROWS)
        return packed

    def _pack(self, rows: NDArray[Any], packed: PackedWeights, first_tile: int, stride: int) -> None:
        """Stage some rows at a time: whole tiles, as many as fit."""
        kind = SourceType.BF16 if rows.dtype == np.uint16 else SourceType.F32
        chunk = max(TILE_ROWS, _STAGED_BYTES // rows[0].nbytes // TILE_ROWS * TILE_ROWS)
        for start in range(0, len(rows), chunk):
            part = np.ascontiguousarray(rows[start : start + chunk])
            self._device.write(self._staging, part)
            tile = first_tile + start // TILE_ROWS * stride
            library, stream = self._device.kernels, self._device.compute
            pack_matrix(
                library, stream, self._staging.address, kind, len(part), packed, first_tile=tile, tile_stride=stride
            )
            stream.sync()
