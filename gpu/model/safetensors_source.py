"""Safetensors files with their config.json as a `ModelSource`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpu.errors import ModelFileError, TensorMissing, UnsupportedModel
from gpu.model.config import ModelConfig, RopePairing, RopeScaling, RopeScalingKind
from gpu.model.safetensors_file import SafetensorsFile, open_shards, read_json
from gpu.model.tensor_names import safetensors_name
from gpu.model.tensors import WeightMatrix, WeightStorage

Floats = NDArray[np.float32]

MAX_CONFIG_BYTES: Final = 1 << 20

# Class name -> our architecture name; MiMo is Qwen2 with extra prediction layers, which are not read here.
_ARCHITECTURES: Final = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "MiMoForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


class SafetensorsSource:
    """See `gpu.model.load.ModelSource`."""

    def __init__(self, path: Path) -> None:
        """Open a directory or one file (config.json beside it). Raises ModelFileError."""
        self.path = path
        directory = path if path.is_dir() else path.parent
        self._shards = open_shards(path) if path.is_dir() else [SafetensorsFile(path)]
        self._owners: dict[str, SafetensorsFile] = {}
        for shard in self._shards:
            for name in shard.tensors:
                if name in self._owners:
                    raise ModelFileError("tensor name", name, f"is in {self._owners[name].path.name} as well")
                self._owners[name] = shard
        self.config = read_config(read_json(directory / "config.json", MAX_CONFIG_BYTES))

    @property
    def files(self) -> tuple[Path, ...]:
        """Every shard."""
        return tuple(shard.path for shard in self._shards)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor, None when the files lack it."""
        stored = safetensors_name(name)
        owner = self._owners.get(stored)
        return None if owner is None else owner.tensors[stored].shape

    def vector(self, name: str) -> Floats:
        """A one-dimensional tensor, (n,) f32."""
        return self._owner(name).tensor_f32(safetensors_name(name))

    def matrix(self, name: str, storage: WeightStorage | None) -> WeightMatrix:
        """A matrix; by default bf16 stays bf16 and everything else becomes f32, both exact."""
        owner = self._owner(name)
        stored = safetensors_name(name)
        exact = WeightStorage.BF16 if owner.tensors[stored].dtype == "BF16" else WeightStorage.F32
        asked = storage if storage is not None and storage.is_dense else None
        return WeightMatrix.from_f32(owner.tensor_f32(stored), asked or exact)

    def dense(self, name: str) -> NDArray[Any]:
        """A matrix row by row: bf16 as u16 where it is stored so, else f32."""
        owner, stored = self._owner(name), safetensors_name(name)
        bits = owner.tensor_bf16(stored)
        return owner.tensor_f32(stored) if bits is None else bits

    def tensor_chunks(self) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
        """(name, type, shape, bytes) of every tensor, by file, then by name."""
        for shard in self._shards:
            yield from shard.tensor_chunks()

    def release(self) -> None:
        """Give back the memory of what was read."""
        for shard in self._shards:
            shard.release()

    def _owner(self, name: str) -> SafetensorsFile:
        try:
            return self._owners[safetensors_name(name)]
        except KeyError:
            raise TensorMissing(name) from None


def read_config(fields: dict[str, Any]) -> ModelConfig:
    """Turn a config.json into ModelConfig. Raises UnsupportedModel or ModelFileError that names the field."""
    names = fields.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    architecture = _ARCHITECTURES.get(name) if isinstance(name, str) else None
    if architecture is None:
        raise UnsupportedModel("architecture", name, ", ".join(_ARCHITECTURES))
    _refuse_unserved(fields, architecture)
    num_heads = _integer(fields, "num_attention_heads")
    hidden_size = _integer(fields, "hidden_size")
    head_dim = _integer(fields, "head_dim", hidden_size // max(num_heads, 1))
    context_length = _integer(fields, "max_position_embeddings")
    rope = fields.get("rope_parameters") or {}
    return ModelConfig(
        architecture=architecture,
        num_layers=_integer(fields, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=_integer(fields, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=_integer(fields, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        vocab_size=_integer(fields, "vocab_size"),
        context_length=context_length,
        rms_norm_eps=_real(fields, "rms_norm_eps", 1e-6),
        rope_theta=_real(rope if "rope_theta" in rope else fields, "rope_theta", 10_000.0),
        rope_dim=head_dim,
        rope_pairing=RopePairing.HALF,
        rope_scaling=_rope_scaling(fields.get("rope_scaling") or rope, context_length),
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "qwen2" or bool(fields.get("attention_bias", False)),
        qk_norm=architecture == "qwen3",
        bos_id=_optional_id(fields, "bos_token_id"),
        eos_ids=_ids(fields, "eos_token_id"),
    )


def _refuse_unserved(fields: dict[str, Any], architecture: str) -> None:
    """Options that change the model's function and that we do not have must not be passed over."""
    activation = fields.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel("hidden_act", activation, "silu")
    window = fields.get("sliding_window")
    uses_window = architecture == "llama" or bool(fields.get("use_sliding_window", False))
    if window is not None and uses_window and window < fields.get("max_position_embeddings", 0):
        raise UnsupportedModel("sliding_window", window, "full attention")
    if architecture == "llama" and fields.get("attention_bias", False):
        raise UnsupportedModel("attention_bias", True, "Llama models without biases")
    if fields.get("mlp_bias", False):
        raise UnsupportedModel("mlp_bias", True, "models without MLP biases")
    if fields.get("quantization_config") is not None:
        raise UnsupportedModel("quantization_config", "present", "f32, f16 and bf16 weights, or GGUF")
    if (partial := fields.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel("partial_rotary_factor", partial, "1.0")


def _rope_scaling(fields: dict[str, Any], context_length: int) -> RopeScaling:
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind == "default":
        return RopeScaling()
    factor = _real(fields, "factor", 1.0)
    original = _integer(fields, "original_max_position_embeddings", context_length)
    if kind == "linear":
        return RopeScaling(RopeScalingKind.LINEAR, factor, original)
    if kind == "llama3":
        low, high = _real(fields, "low_freq_factor", 1.0), _real(fields, "high_freq_factor", 4.0)
        return RopeScaling(RopeScalingKind.LLAMA3, factor, original, low, high)
    raise UnsupportedModel("rope_scaling.rope_type", kind, "default, linear, llama3")


def _integer(fields: dict[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelFileError(name, value, "must be an integer")
    return value


def _real(fields: dict[str, Any], name: str, default: float) -> float:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelFileError(name, value, "must be a number")
    return float(np.float32(value))  # as GGUF stores it, so that both formats give one configuration


def _optional_id(fields: dict[str, Any], name: str) -> int | None:
    return None if fields.get(name) is None else _integer(fields, name)


def _ids(fields: dict[str, Any], name: str) -> tuple[int, ...]:
    value = fields.get(name)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise ModelFileError(name, value, "must be an id or a list of ids")
    return tuple(ids)
