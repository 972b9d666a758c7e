"""What the fleet looks like now: one poll a second per process, read by readiness, admission, streams and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from dataclasses import dataclass
from typing import Any, cast

from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError, ResponseError

from gateway.errors import ApiError, Unavailable
from gateway.metrics import GatewayMetrics
from gateway.settings import GatewaySettings
from gateway.turns import TurnService
from workers import registry
from workers.registry import ModelDemand, ModelRecord, WorkerRecord
from workers.turns.end_tasks import end_tasks
from workers.turns.keys import hub_key

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_PROBE_TTL_S = 60


@dataclass(frozen=True, slots=True)
class Reason:
    """Why the service is not ready."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class _Sight:
    """One poll's result. now: control's clock, unix seconds. is_durable: a confirmed write survives a lost host.

    num_delayed_fsyncs: control's own count since its start; None where it keeps no append-only file or hides it.
    """

    now: float
    workers: tuple[WorkerRecord, ...]
    models: tuple[ModelRecord, ...]
    demand: tuple[ModelDemand, ...]
    write_fault: Reason | None
    is_durable: bool
    num_delayed_fsyncs: int | None


class FleetMonitor:
    """Polls control. Between polls everything here is answered from memory."""

    def __init__(self, turns: TurnService, settings: GatewaySettings, metrics: GatewayMetrics) -> None:
        self._turns = turns
        self._settings = settings
        self._metrics = metrics
        self._sight: _Sight | None = None
        self._opened_at = self._seen_at = time.monotonic()
        self._beat_at: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None
        metrics.event_subscriptions.set_function(lambda: turns.num_followed)
        self._probe_key = hub_key(f"probe-{secrets.token_hex(8)}")

    async def open(self) -> None:
        """Look once, if control answers, then keep looking."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._look(), _POLL_S)
        self._task = asyncio.create_task(self._poll(), name="kvalet-fleet")

    async def close(self) -> None:
        """Stop looking."""
        if self._task is not None:
            await end_tasks(self._task)

    @property
    def models(self) -> tuple[ModelRecord, ...]:
        """Models that were ever published and are kept, those with a live worker first."""
        if self._sight is None:
            return ()
        served = {worker.model for worker in self.live_workers()}
        return tuple(sorted(self._sight.models, key=lambda model: (model.name not in served, model.name)))

    def model(self, name: str) -> ModelRecord | None:
        """The model of that name; None when no worker has ever published it.

        Raises Unavailable when control has not been seen yet.
        """
        if self._sight is None:
            raise Unavailable("turn control is out of reach for now", code="control_unavailable")
        return next((model for model in self._sight.models if model.name == name), None)

    def live_workers(self, model: str | None = None) -> tuple[WorkerRecord, ...]:
        """Workers whose heartbeat was fresh at the last poll, of one model or of all."""
        if self._sight is None:
            return ()
        limit = self._settings.worker_stale_s
        return tuple(w for w in self._sight.workers if self._age(w) <= limit and model in (None, w.model))

    def shown_workers(self) -> list[dict[str, Any]]:
        """Every worker with a heartbeat, for operators."""
        return [] if self._sight is None else [_worker_object(w, self._age(w)) for w in self._sight.workers]

    def num_workers(self, model: str) -> int:
        """Live workers of a model."""
        return len(self.live_workers(model))

    @property
    def has_host_durability(self) -> bool:
        """Whether control can promise that an accepted turn survives a lost host."""
        return self._sight is not None and self._sight.is_durable

    def check_served(self, model: str, has_started: bool) -> None:
        """Raise Unavailable when a reply can't go on: control silent, or a started turn without any live worker.

        A turn that has not started may wait for a worker to come. A worker's restart within `unserved_s` is waited for.
        """
        now = time.monotonic()
        limit = self._settings.unserved_s
        if now - self._seen_at > limit:
            raise Unavailable("turn control is out of reach for now", code="control_unavailable")
        if has_started and now - self._beat_at.get(model, self._opened_at) > limit:
            raise Unavailable("no worker is left to finish the reply", code="no_worker")

    def unready_reason(self) -> Reason | None:
        """Why an accepted turn would not run now; None when it would."""
        if self._sight is None or time.monotonic() - self._seen_at > self._settings.control_timeout_s:
            return Reason("control_unavailable", "turn control does not answer")
        if self._sight.write_fault is not None:
            return self._sight.write_fault
        if self._settings.durability == "host" and not self._sight.is_durable:
            return Reason("durability_unsupported", "durability 'host' needs appendonly yes and appendfsync always")
        if not self._sight.workers:
            return Reason("no_worker", "no worker has registered")
        live = self.live_workers()
        if not live:
            oldest = min(self._age(worker) for worker in self._sight.workers)
            return Reason("worker_stale", f"the freshest worker heartbeat is {oldest:.0f} s old")
        if all(worker.draining for worker in live):
            return Reason("draining", "every worker is draining")
        full = {d.model for d in self._sight.demand if d.open_turns >= self._settings.max_queued}
        if all(worker.model in full for worker in live):
            return Reason("queue_full", f"{self._settings.max_queued} turns are open")
        return None

    def _age(self, worker: WorkerRecord) -> float:
        return max(0.0, self._sight.now - worker.seen_at) if self._sight else float("inf")

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                await self._look()
            except Exception:
                # Readiness tells: what was seen grows old.
                logger.exception("a poll of the fleet failed")

    async def _look(self) -> None:
        try:
            sight = await self._read()
        except (ApiError, RedisError, OSError) as error:
            logger.warning("control was not seen: %s", error)
            self._metrics.control_up.set(0)
            return
        self._show_delayed_fsyncs(sight.num_delayed_fsyncs)
        self._sight, self._seen_at = sight, time.monotonic()
        for worker in sight.workers:
            beat_at = self._seen_at - self._age(worker)
            self._beat_at[worker.model] = max(beat_at, self._beat_at.get(worker.model, beat_at))
        self._metrics.show_fleet(sight.demand, [(w.worker_id, w.model, self._age(w)) for w in sight.workers])
        self._metrics.control_up.set(sight.write_fault is None)

    def _show_delayed_fsyncs(self, num_now: int | None) -> None:
        """Export the count, and warn when it has grown since the last poll: accepted turns were not on disk in time."""
        self._metrics.control_delayed_fsyncs.set(float("nan") if num_now is None else num_now)
        before = self._sight.num_delayed_fsyncs if self._sight else None
        if num_now is not None and before is not None and num_now > before:
            logger.warning(
                "control waited for its disk %d times since the last poll (aof_delayed_fsync = %d): "
                "a lost host now loses more than a second of accepted turns",
                num_now - before,
                num_now,
            )

    async def _read(self) -> _Sight:
        seconds, microseconds = await self._turns.control.client.time()
        return _Sight(
            now=seconds + microseconds / 1e6,
            workers=await self._turns.run(registry.list_workers()),
            models=await self._turns.run(registry.list_models()),
            demand=await self._turns.run(registry.demand()),
            write_fault=await self._try_write(),
            is_durable=await self._has_fsync_always(),
            num_delayed_fsyncs=await self._count_delayed_fsyncs(),
        )

    async def _has_fsync_always(self) -> bool:
        try:
            config = await self._turns.control.client.config_get("append*")
        except ResponseError:
            # Managed servers hide their configuration: what can't be checked is not promised.
            return False
        plain = {_plain(name): _plain(value) for name, value in config.items()}
        return (plain.get("appendonly"), plain.get("appendfsync")) == ("yes", "always")

    async def _count_delayed_fsyncs(self) -> int | None:
        try:
            info = await self._turns.control.client.info("persistence")
        except ResponseError:
            return None
        return int(info.get("aof_delayed_fsync", 0)) if info.get("aof_enabled") else None

    async def _try_write(self) -> Reason | None:
        try:
            await cast("Any", self._turns.control.client.set(self._probe_key, b"1", ex=_PROBE_TTL_S))
        except ReadOnlyError:
            return Reason("control_read_only", "turn control takes no writes")
        except OutOfMemoryError:
            return Reason("control_full", "turn control has no memory left")
        except ResponseError:
            return Reason("control_read_only", "turn control refuses writes")
        return None


def _worker_object(worker: WorkerRecord, age_s: float) -> dict[str, Any]:
    return {
        "id": worker.worker_id,
        "object": "worker",
        "model": worker.model,
        "boot_id": worker.boot_id,
        "host": worker.host,
        "pid": worker.pid,
        "device": worker.device,
        "backend": worker.backend,
        "kv_format": worker.kv_format,
        "format_digest": worker.format_digest,
        "numerics_digest": worker.numerics_digest,
        "context_length": worker.context_length,
        "slots": worker.slots,
        "free": worker.free,
        "draining": worker.draining,
        "num_hot_branches": len(worker.hot_branches),
        "started_at": worker.started_at,
        "heartbeat_age_s": round(age_s, 3),
        "info": dict(worker.info or {}),
    }


def _plain(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
