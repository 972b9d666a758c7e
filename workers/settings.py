"""Settings of a worker process: environment `KVALET_*`, then defaults. Unknown or malformed values stop the start."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from workers.setting_checks import check_redis_url

_HOST_WEIGHTS = ("auto", "f32", "bf16")
_CUDA_WEIGHTS = ("auto", "bf16", "int8", "int4")
_LONGEST_S = 86_400.0
_DEVICE = r"^(\d+|(GPU-|MIG-)?[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})$"
_FIRST_DEVICE = "0"
_NUMERICS_IDS = r"(mixed|[0-9a-f]{64})"


def _default_worker_id() -> str:
    return f"{socket.gethostname()}-{uuid.uuid4().hex[:6]}"


class WorkerSettings(BaseSettings):
    """One worker: which model, which servers, how much memory.

    weights: how they are kept in memory. auto: bf16 on `cuda`, as the file has them on the host, where f32 and bf16 can
    be asked for too. `cuda` only: device (number or UUID), device_kv_mib (memory for resident pages, None for what is
    free). draft: what guesses rows that are verified with the next one; draft_rows: how many of a turn in a step;
    suffix_min_match: tokens that must occur again before `suffix` guesses. accept_numerics: whose pages are reused:
    own, any, or numerics ids with commas between. Units are in the names. `control_url` and `pages_url` are redis URLs
    (redis://, rediss://, unix://).
    """

    model_config = SettingsConfigDict(env_prefix="KVALET_", extra="ignore", frozen=True)

    control_url: str = "redis://127.0.0.1:6379/0"
    pages_url: str = "redis://127.0.0.1:6380/0"
    worker_id: str = Field(
        default_factory=_default_worker_id, pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="1 to 64 letters, digits, dots, dashes and underscores",
    )  # fmt: skip
    model: Path = Field(default_factory=lambda: default_model_path())
    model_name: str | None = None
    backend: Literal["cpu", "cuda", "simulated"] = "cpu"
    device: str = Field(default=_FIRST_DEVICE, pattern=_DEVICE, description="a GPU's number or its UUID")
    weights: Literal["auto", "f32", "bf16", "int8", "int4"] = "auto"
    device_kv_mib: int | None = Field(default=None, ge=1)
    kv_format: Literal["f16", "int8", "q4", "k8v4"] = "k8v4"
    page_size: int | None = None
    context: int | None = Field(default=None, ge=16)
    slots: int = Field(default=8, ge=1, le=256)
    threads: int = Field(default_factory=lambda: max(1, len(os.sched_getaffinity(0))), ge=1, le=256)
    mirror_mib: int | None = Field(default=None, ge=1)
    kv_resident: int | None = Field(default=None, ge=0)
    step_rows: int | None = Field(default=None, ge=8, le=8192)
    draft: Literal["off", "suffix"] = "off"
    draft_rows: int = Field(default=3, ge=1, le=8)
    suffix_min_match: int = Field(default=3, ge=1, le=64)
    restore: Literal["auto", "always", "never"] = "auto"
    accept_numerics: str = Field(
        default="own", pattern=f"^(own|any|{_NUMERICS_IDS}(,{_NUMERICS_IDS})*)$",
        description="own, any, or numerics ids of 64 hex digits with commas between",
    )  # fmt: skip
    attest: Literal["always", "sampled", "off"] = "sampled"
    park_stateless: Literal["eager", "never"] = "eager"
    park_ttl_s: int = Field(default=24 * 3600, ge=1)
    park_stateless_ttl_s: int = Field(default=900, ge=1)
    park_queue_mib: int = Field(default=256, ge=1)
    lease_s: float = Field(default=15.0, ge=0.5, le=_LONGEST_S)
    heartbeat_s: float = Field(default=2.0, gt=0, le=_LONGEST_S)
    drain_grace_s: float = Field(default=20.0, ge=0, le=_LONGEST_S)
    sweep_s: float = Field(default=1.0, gt=0, le=_LONGEST_S)
    wire_connections: int = Field(default=4, ge=1, le=64)

    @field_validator("control_url", "pages_url")
    @classmethod
    def _names_a_server(cls, url: str) -> str:
        return check_redis_url(url)

    @field_validator("device", "device_kv_mib")
    @classmethod
    def _backend_has_a_device(cls, value: str | int | None, others: ValidationInfo) -> str | int | None:
        backend = others.data.get("backend")
        if backend not in (None, "cuda") and value not in (_FIRST_DEVICE, None):
            raise ValueError(f"the {backend} backend has no GPU; only cuda does")
        return value

    @field_validator("weights")
    @classmethod
    def _backend_keeps_them_so(cls, weights: str, others: ValidationInfo) -> str:
        backend = others.data.get("backend")
        allowed = _CUDA_WEIGHTS if backend == "cuda" else _HOST_WEIGHTS
        if backend is not None and weights not in allowed:
            raise ValueError(f"{backend} keeps them as {', '.join(allowed)}")
        return weights

    @property
    def mirror_bytes(self) -> int:
        """Size of the mirror arena; by default 512 MiB, on `cuda` 8 GiB."""
        return (self.mirror_mib or (8192 if self.backend == "cuda" else 512)) << 20

    @property
    def max_step_rows(self) -> int:
        """Most rows of a step; by default 128, on `cuda` 2048."""
        return self.step_rows or (2048 if self.backend == "cuda" else 128)


def default_model_path() -> Path:
    """Where the default model is kept in the user's cache directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "kvalet" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
