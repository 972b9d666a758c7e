"""The fleet as control knows it: heartbeats of workers, models and their tokenizers, demand, quarantined writers.

A worker is alive while its key lives; its free slots also follow claims and ends between two heartbeats.

Processes of several versions share the registry: a reader passes over fields that it does not know and takes the
default of those that are not there. A field of a wrong type is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from types import MappingProxyType
from typing import Any, Final, get_origin, get_type_hints

from workers.turns.codec import pack, unpack
from workers.turns.errors import BadTurnData
from workers.turns.replies import text
from workers.turns.script import ScriptCall, load_script

HEARTBEAT_TTL_S: Final = 10.0
MODEL_RETENTION_S: Final = 30 * 24 * 3600
MAX_BUNDLE_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One heartbeat. Times are unix seconds.

    free: slots without a lease; read back as control counts them now, whatever was sent. hot_branches: branches whose
    cells this worker holds. info: whatever else an operator may want to see.
    """

    worker_id: str
    boot_id: str
    model: str
    slots: int
    free: int
    pid: int = 0
    host: str = ""
    device: str = ""
    backend: str = ""
    kv_format: str = ""
    format_digest: str = ""
    numerics_digest: str = ""
    context_length: int = 0
    started_at: float = 0.0
    seen_at: float = 0.0
    draining: bool = False
    hot_branches: tuple[str, ...] = ()
    urls: Mapping[str, str] | None = None
    info: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A model that the fleet serves or has served. bundle_digest names its tokenizer bundle (hex)."""

    name: str
    bundle_digest: str
    context_length: int
    created_at: float
    info: Mapping[str, Any] | None = None


_FIELD_TYPES: Final[Mapping[type, Mapping[str, Any]]] = MappingProxyType(
    {kind: get_type_hints(kind) for kind in (WorkerRecord, ModelRecord)}
)


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """Demand of one model for autoscaling: open turns (waiting, queued, in progress), those in progress, live slots."""

    model: str
    open_turns: int
    in_progress: int
    slots: int
    free: int
    num_workers: int
    service_s: float


def beat(record: WorkerRecord, *, ttl_s: float = HEARTBEAT_TTL_S) -> ScriptCall[None]:
    """Write a heartbeat. The server stamps `seen_at` and counts `free`."""
    args = (
        record.worker_id, record.boot_id, record.model, record.slots, int(record.draining),
        int(ttl_s * 1000), pack(_plain(record)),
    )  # fmt: skip
    return ScriptCall(load_script("beat"), (), args, lambda _: None)


def retire(worker_id: str, boot_id: str) -> ScriptCall[None]:
    """Remove a worker that stops, unless another process has taken its id."""
    return ScriptCall(load_script("retire"), (), (worker_id, boot_id), lambda _: None)


def list_workers() -> ScriptCall[tuple[WorkerRecord, ...]]:
    """Read all live workers, by id. Raises BadTurnData for a record that is none."""

    def parse(reply: Any) -> tuple[WorkerRecord, ...]:
        records = []
        for packed, free, seen_ms in reply:
            known = _known_fields("worker", packed, WorkerRecord)
            records.append(WorkerRecord(**{**known, "free": int(free), "seen_at": int(seen_ms) / 1000}))
        return tuple(sorted(records, key=lambda record: record.worker_id))

    return ScriptCall(load_script("list_workers", flags="no-writes"), (), (), parse)


def take_dead_workers() -> ScriptCall[tuple[str, ...]]:
    """Forget workers whose heartbeat has ended and return their ids; each is returned to one caller only."""
    return ScriptCall(load_script("take_dead_workers"), (), (), lambda reply: tuple(map(text, reply)))


def publish_model(record: ModelRecord, bundle: bytes) -> ScriptCall[None]:
    """Publish a model and its tokenizer bundle (kept 30 days after the last publication). Raises BadTurnData."""
    if len(bundle) > MAX_BUNDLE_BYTES:
        raise BadTurnData("bundle", f"{len(bundle)} bytes", f"at most {MAX_BUNDLE_BYTES} bytes")
    args = (record.name, pack(_plain(record)), record.bundle_digest, bundle, MODEL_RETENTION_S)
    return ScriptCall(load_script("publish_model", flags=""), (), args, lambda _: None)


def list_models() -> ScriptCall[tuple[ModelRecord, ...]]:
    """Read all published models, by name. Raises BadTurnData for a record that is none."""

    def parse(reply: Any) -> tuple[ModelRecord, ...]:
        records = (ModelRecord(**_known_fields("model", packed, ModelRecord)) for packed in reply)
        return tuple(sorted(records, key=lambda record: record.name))

    return ScriptCall(load_script("list_models", flags="no-writes"), (), (), parse)


def get_bundle(digest: str) -> ScriptCall[bytes | None]:
    """Read a tokenizer bundle; None when it is not there."""
    return ScriptCall(load_script("get_bundle", flags="no-writes"), (), (digest,), lambda reply: reply)


def demand() -> ScriptCall[tuple[ModelDemand, ...]]:
    """Read demand and slots of every model that has workers or open turns, by name."""

    def parse(reply: Any) -> tuple[ModelDemand, ...]:
        return tuple(
            ModelDemand(text(model), int(opened), int(running), int(slots), int(free), int(num), int(average_ms) / 1000)
            for model, opened, running, slots, free, num, average_ms in sorted(reply)
        )

    return ScriptCall(load_script("demand", flags="no-writes"), (), (), parse)


def quarantine(boot_id: str, reason: str) -> ScriptCall[None]:
    """Distrust everything that this worker process has written: its pages count as misses from now on."""
    return ScriptCall(load_script("quarantine"), (), (boot_id, reason), lambda _: None)


def quarantined() -> ScriptCall[frozenset[str]]:
    """Read the boot ids of all quarantined worker processes."""
    return ScriptCall(load_script("quarantined", flags="no-writes"), (), (), lambda reply: frozenset(map(text, reply)))


def _plain(record: WorkerRecord | ModelRecord) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _known_fields(field: str, packed: bytes, kind: type[WorkerRecord] | type[ModelRecord]) -> dict[str, Any]:
    """The fields of a packed record that `kind` has. Raises BadTurnData when one is of a wrong type or lacking."""
    body = unpack(field, packed)
    if not isinstance(body, dict):
        raise BadTurnData(field, type(body).__name__, "a map")
    known: dict[str, Any] = {}
    for name, hint in _FIELD_TYPES[kind].items():
        if name in body:
            if not _is_of_type(body[name], hint):
                raise BadTurnData(f"{field}.{name}", body[name], f"of type {getattr(hint, '__name__', hint)}")
            known[name] = tuple(body[name]) if get_origin(hint) is tuple else body[name]
    needed = {known_field.name for known_field in fields(kind) if known_field.default is MISSING}
    if not needed <= known.keys():
        raise BadTurnData(field, sorted(known), f"with {sorted(needed)}")
    return known


def _is_of_type(value: object, hint: Any) -> bool:
    """Whether an unpacked value can stand in a field with this annotation: a number, text, list of texts or map."""
    if get_origin(hint) is tuple:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool)
    if hint in (str, bool):
        return isinstance(value, hint)
    return value is None or isinstance(value, dict)
