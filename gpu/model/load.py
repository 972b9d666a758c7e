"""From a model file to `ModelConfig` and `ModelWeights`, whatever the file's format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from gpu.errors import ModelFileError, TensorMissing
from gpu.model.config import ModelConfig
from gpu.model.gguf_source import GgufSource
from gpu.model.safetensors_source import SafetensorsSource
from gpu.model.tensor_names import EMBEDDING, FINAL_NORM, HEAD, layer_name, required_tensors
from gpu.model.tensors import LayerWeights, ModelWeights, WeightMatrix, WeightStorage

Floats = NDArray[np.float32]

MAX_LAYERS: Final = 1024
MAX_CONTEXT: Final = 1 << 24


class ModelSource(Protocol):
    """An opened, checked model file. Tensor names are those of GGUF; rows are in the half-pairing RoPE order."""

    path: Path
    config: ModelConfig

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that holds tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor, None when the file lacks it."""
        ...

    def vector(self, name: str) -> Floats:
        """A one-dimensional tensor, (n,) f32."""
        ...

    def matrix(self, name: str, storage: WeightStorage | None) -> WeightMatrix:
        """A matrix in `storage`; None keeps what the file stores as exactly as a storage can."""
        ...

    def dense(self, name: str) -> NDArray[Any]:
        """A matrix row by row: (num_rows, num_cols), bf16 as u16 where the file stores bf16, else f32."""
        ...

    def tensor_chunks(self) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
        """(name, type, shape, bytes) of every stored tensor in a fixed order, for the weights digest."""
        ...

    def release(self) -> None:
        """Give back the memory of what was read; everything can be read again."""
        ...


def open_source(path: Path) -> ModelSource:
    """Open a GGUF file, a safetensors file or a directory of them, and check that every needed tensor is there.

    Raises ModelFileError (FileTruncated, TensorMissing, UnsupportedModel among them). Reads headers only.
    """
    source = _open(path)
    for field, limit in (("num_layers", MAX_LAYERS), ("context_length", MAX_CONTEXT)):
        if (value := getattr(source.config, field)) > limit:
            raise ModelFileError(field, value, f"at most {limit}")
    for name, shape in required_tensors(source.config).items():
        found = source.shape(name)
        if found is None:
            raise TensorMissing(name)
        if found != shape:
            raise ModelFileError(f"{name} shape", found, f"the architecture's numbers need {shape}")
    return source


def load_weights(source: ModelSource, storage: WeightStorage | None = None) -> ModelWeights:
    """Read and pack all weights. storage None: as exactly as the file stores them. Raises ModelFileError.

    Afterwards the file's own pages take no memory: weights are there once.
    """
    config = source.config
    weights = ModelWeights(
        embedding=source.matrix(EMBEDDING, storage),
        layers=tuple(_load_layer(source, layer, storage) for layer in range(config.num_layers)),
        final_norm=source.vector(FINAL_NORM),
        head=None if config.tie_embeddings else source.matrix(HEAD, storage),
    )
    source.release()
    return weights


def _open(path: Path) -> ModelSource:
    if path.is_dir() or path.suffix == ".safetensors":
        return SafetensorsSource(path)
    return GgufSource(path)


def _load_layer(source: ModelSource, layer: int, storage: WeightStorage | None) -> LayerWeights:
    def matrix(part: str) -> WeightMatrix:
        return source.matrix(layer_name(layer, part), storage)

    def vector(part: str) -> Floats:
        return source.vector(layer_name(layer, part))

    bias, norm = source.config.qkv_bias, source.config.qk_norm
    return LayerWeights(
        attn_norm=vector("attn_norm.weight"),
        q=matrix("attn_q.weight"),
        k=matrix("attn_k.weight"),
        v=matrix("attn_v.weight"),
        o=matrix("attn_output.weight"),
        ffn_norm=vector("ffn_norm.weight"),
        gate=matrix("ffn_gate.weight"),
        up=matrix("ffn_up.weight"),
        down=matrix("ffn_down.weight"),
        q_bias=vector("attn_q.bias") if bias else None,
        k_bias=vector("attn_k.bias") if bias else None,
        v_bias=vector("attn_v.bias") if bias else None,
        q_norm=vector("attn_q_norm.weight") if norm else None,
        k_norm=vector("attn_k_norm.weight") if norm else None,
    )
