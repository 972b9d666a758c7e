"""Shape and constants of a decoder model, independent of the file it came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from gpu.errors import ModelFileError


class RopePairing(StrEnum):
    """Which two elements of a head one rotation turns: (2i, 2i + 1), or (i, i + rope_dim / 2)."""

    INTERLEAVED = "interleaved"
    HALF = "half"


class RopeScalingKind(StrEnum):
    """How the rotary frequencies are stretched beyond the trained context."""

    NONE = "none"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Parameters of a scaling kind; those that a kind does not use keep their defaults.

    factor: stretch. original_context: trained context in tokens. low_freq_factor, high_freq_factor: `llama3` only.
    """

    kind: RopeScalingKind = RopeScalingKind.NONE
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        _require(self.factor >= 1.0, "rope_scaling.factor", self.factor, "must be at least 1")
        if self.kind is RopeScalingKind.LLAMA3:
            _require(self.original_context > 0, "rope_scaling.original_context", self.original_context, "must be > 0")
            low, high = self.low_freq_factor, self.high_freq_factor
            _require(0 < low < high, "rope_scaling.low_freq_factor", low, f"must lie between 0 and {high}")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-type decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU. Impossible shapes raise ModelFileError.

    rope_dim: leading elements of a head that are rotated. qkv_bias: q, k and v carry biases (Qwen2). qk_norm: RMSNorm
    of each query and key head before RoPE (Qwen3). eos_ids: every id that ends a reply. context_length: tokens,
    after rope scaling.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_dim: int = 0
    rope_pairing: RopePairing = RopePairing.HALF
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.rope_dim == 0:
            object.__setattr__(self, "rope_dim", self.head_dim)
        for name in _POSITIVE_FIELDS:
            _require(getattr(self, name) > 0, name, getattr(self, name), "must be positive")
        _require(
            self.num_heads % self.num_kv_heads == 0, "num_heads", self.num_heads, f"a multiple of {self.num_kv_heads}"
        )
        _require(self.rope_dim <= self.head_dim, "rope_dim", self.rope_dim, f"at most head_dim {self.head_dim}")
        _require(self.rope_dim % 2 == 0, "rope_dim", self.rope_dim, "must be even")
        for name, ids in (("bos_id", () if self.bos_id is None else (self.bos_id,)), ("eos_ids", self.eos_ids)):
            for token_id in ids:
                _require(0 <= token_id < self.vocab_size, name, token_id, f"must lie in 0..{self.vocab_size - 1}")

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def q_width(self) -> int:
        """Elements of all query heads of one row."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of all key (or value) heads of one row."""
        return self.num_kv_heads * self.head_dim


_POSITIVE_FIELDS = (
    "num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size",
    "context_length", "rms_norm_eps", "rope_theta", "rope_dim",
)  # fmt: skip


def _require(condition: bool, name: str, value: object, limit: str) -> None:
    if not condition:
        raise ModelFileError(name, value, limit)
