"""A GGUF file as a `ModelSource`: metadata keys to configuration, Llama row order undone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf.constants import GGMLQuantizationType as QuantType
from numpy.typing import NDArray

from gpu.errors import ModelFileError, TensorMissing, UnsupportedModel
from gpu.model.config import ModelConfig, RopePairing, RopeScaling, RopeScalingKind
from gpu.model.gguf_file import GgufFile
from gpu.model.quantized_groups import has_groups, read_groups
from gpu.model.rope_factors import rope_scaling_from_factors
from gpu.model.tensor_names import EMBEDDING, HEAD
from gpu.model.tensors import WeightMatrix, WeightStorage

Floats = NDArray[np.float32]

# Conversion to GGUF interleaves the two halves of each query and key head for this architecture only.
_INTERLEAVED: Final = frozenset({"llama"})
_ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
_ROPE_FACTORS: Final = "rope_freqs.weight"


class GgufSource:
    """See `gpu.model.load.ModelSource`."""

    def __init__(self, path: Path) -> None:
        """Open `path` and read its configuration. Raises ModelFileError."""
        self.path = path
        self.file = GgufFile(path)
        self.config = _read_config(self.file)

    @property
    def files(self) -> tuple[Path, ...]:
        """The one file."""
        return (self.path,)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor, None when the file lacks it."""
        tensor = self.file.tensors.get(name)
        return None if tensor is None else tensor.shape

    def vector(self, name: str) -> Floats:
        """A one-dimensional tensor, (n,) f32."""
        values = self.file.tensor_f32(name)
        return values if (order := self._row_order(name)) is None else values[order]

    def matrix(self, name: str, storage: WeightStorage | None) -> WeightMatrix:
        """A matrix; by default 4, 5 and 8 bit blocks keep their codes, BF16 stays, F16 becomes f32, the rest bf16."""
        if (tensor := self.file.tensors.get(name)) is None:
            raise TensorMissing(name)
        order = self._row_order(name)
        asked = storage if storage is not None and storage.is_dense else None
        if asked is None and has_groups(tensor.type):
            groups = read_groups(self.file.raw(name), tensor.type)
            return WeightMatrix.from_groups(*(groups if order is None else groups.with_rows(order)))
        values = self.file.tensor_f32(name)
        exact = tensor.type in (QuantType.F32, QuantType.F16, QuantType.F64)
        dense = WeightStorage.F32 if exact else WeightStorage.BF16
        return WeightMatrix.from_f32(values if order is None else values[order], asked or dense)

    def dense(self, name: str) -> NDArray[Any]:
        """A matrix row by row: bf16 as u16 where it is stored so, else f32."""
        if (tensor := self.file.tensors.get(name)) is None:
            raise TensorMissing(name)
        bf16 = tensor.type is QuantType.BF16
        values = self.file.raw(name).view(np.uint16) if bf16 else self.file.tensor_f32(name)
        order = self._row_order(name)
        return values if order is None else values[order]

    def tensor_chunks(self) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
        """(name, type, shape, bytes) of every tensor, by name."""
        return self.file.tensor_chunks()

    def release(self) -> None:
        """Give back the memory of what was read."""
        self.file.release()

    def _row_order(self, name: str) -> NDArray[np.intp] | None:
        """The rows of a query or key tensor in half-pairing order, None where the file has that order already."""
        if self.config.architecture not in _INTERLEAVED:
            return None
        part = name.rsplit(".", 2)[-2]
        num_heads = {"attn_q": self.config.num_heads, "attn_k": self.config.num_kv_heads}.get(part)
        if num_heads is None:
            return None
        rows = np.arange(num_heads * self.config.head_dim)
        return rows.reshape(num_heads, self.config.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _read_config(file: GgufFile) -> ModelConfig:
    architecture = file.metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise UnsupportedModel("architecture", architecture, ", ".join(_ARCHITECTURES))
    if (num_parts := file.metadata.get("split.count", 1)) not in (0, 1):
        raise UnsupportedModel("split.count", num_parts, "files that hold the whole model")
    numbers = _Numbers(file.metadata, architecture)
    if (embedding := file.tensors.get(EMBEDDING)) is None:
        raise TensorMissing(EMBEDDING)
    num_heads = numbers.integer("attention.head_count")
    hidden_size = numbers.integer("embedding_length")
    head_dim = numbers.integer("attention.key_length", hidden_size // max(num_heads, 1))
    if (value_dim := numbers.integer("attention.value_length", head_dim)) != head_dim:
        raise UnsupportedModel("attention.value_length", value_dim, f"key_length, {head_dim}")
    rope_dim = numbers.integer("rope.dimension_count", head_dim)
    context_length = numbers.integer("context_length")
    theta = numbers.real("rope.freq_base", 10_000.0)
    return ModelConfig(
        architecture=architecture,
        num_layers=numbers.integer("block_count"),
        hidden_size=hidden_size,
        intermediate_size=numbers.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=numbers.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        context_length=context_length,
        rms_norm_eps=numbers.real("attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_dim=rope_dim,
        rope_pairing=RopePairing.HALF,
        rope_scaling=_read_rope_scaling(file, numbers, theta, rope_dim, context_length),
        tie_embeddings=HEAD not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors or architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        bos_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_ids=_eos_ids(file.metadata),
    )


def _eos_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    ids = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return tuple(dict.fromkeys(token_id for token_id in ids if isinstance(token_id, int)))


def _read_rope_scaling(
    file: GgufFile, numbers: _Numbers, theta: float, rope_dim: int, context_length: int
) -> RopeScaling:
    if _ROPE_FACTORS in file.tensors:
        return rope_scaling_from_factors(file.tensor_f32(_ROPE_FACTORS), theta, rope_dim)
    kind = numbers.text("rope.scaling.type", "none")
    if kind == "none":
        return RopeScaling()
    if kind == "linear":
        original = numbers.integer("rope.scaling.original_context_length", context_length)
        return RopeScaling(RopeScalingKind.LINEAR, numbers.real("rope.scaling.factor", 1.0), original)
    raise UnsupportedModel("rope.scaling.type", kind, "none, linear, llama3 (as rope_freqs.weight)")


class _Numbers:
    """Typed reading of the architecture's metadata keys."""

    def __init__(self, metadata: dict[str, Any], architecture: str) -> None:
        self._metadata = metadata
        self._architecture = architecture

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelFileError(f"{self._architecture}.{key}", value, "must be one integer")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelFileError(f"{self._architecture}.{key}", value, "must be one number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise ModelFileError(f"{self._architecture}.{key}", value, "must be a string")
        return value

    def _get(self, key: str, default: object) -> object:
        value = self._metadata.get(f"{self._architecture}.{key}", default)
        if value is None:
            raise ModelFileError(f"{self._architecture}.{key}", None, "is missing")
        return value
