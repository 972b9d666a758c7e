"""Prometheus metrics of one gateway process and, scraped through it, of the fleet's demand."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from workers.registry import ModelDemand

_MODEL_GAUGES = {
    "demand": "Open turns of a model: waiting, queued and in progress",
    "in_progress": "Turns that a worker runs",
    "slots": "Slots of the model's live workers",
    "free_slots": "Slots without a turn",
    "workers": "Live workers",
    "service_seconds": "Moving average of a turn's run time",
}
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class GatewayMetrics:
    """Counters and gauges, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.open_requests = 0
        self.requests = Counter(
            "kvalet_http_requests_total", "HTTP requests", ["method", "route", "status"], registry=self.registry
        )
        self.latency = Histogram(
            "kvalet_http_request_seconds",
            "Time to the response's headers",
            ["method", "route"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.first_event = Histogram(
            "kvalet_first_event_seconds",
            "Time from accept to the first event of a turn",
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.abandoned = Counter(
            "kvalet_turns_abandoned_total", "Turns cancelled since nobody could get their reply", registry=self.registry
        )
        self.control_up = Gauge(
            "kvalet_control_up", "Whether control answered and took a write at the last poll", registry=self.registry
        )
        self.control_delayed_fsyncs = Gauge(
            "kvalet_control_aof_delayed_fsync",
            "Writes of control that waited for its disk, since its start; NaN without an append-only file",
            registry=self.registry,
        )
        self.event_subscriptions = Gauge(
            "kvalet_event_subscriptions", "Turns whose events this process follows", registry=self.registry
        )
        self._demand = Gauge(
            "kvalet_demand", "Open turns of all models: waiting, queued and in progress", registry=self.registry
        )
        self._slots = Gauge("kvalet_slots", "Slots of all live workers", registry=self.registry)
        self._by_model = {
            name: Gauge(f"kvalet_model_{name}", text, ["model"], registry=self.registry)
            for name, text in _MODEL_GAUGES.items()
        }
        self._heartbeat_age = Gauge(
            "kvalet_worker_heartbeat_age_seconds",
            "Age of each worker's last heartbeat",
            ["worker", "model"],
            registry=self.registry,
        )
        self._waiting = Gauge(
            "kvalet_waiting_requests",
            "Requests that wait for a reply, by kind of answer",
            ["kind"],
            registry=self.registry,
        )

    def show_fleet(self, demand: Iterable[ModelDemand], heartbeats: Iterable[tuple[str, str, float]]) -> None:
        """Take over what a poll saw. heartbeats: worker id, model, age in seconds."""
        rows = list(demand)
        self._demand.set(sum(row.open_turns for row in rows))
        self._slots.set(sum(row.slots for row in rows))
        for gauge in (*self._by_model.values(), self._heartbeat_age):
            gauge.clear()
        for row in rows:
            values = {
                "demand": row.open_turns,
                "in_progress": row.in_progress,
                "slots": row.slots,
                "free_slots": row.free,
                "workers": row.num_workers,
                "service_seconds": row.service_s,
            }
            for name, value in values.items():
                self._by_model[name].labels(row.model).set(value)
        for worker_id, model, age_s in heartbeats:
            self._heartbeat_age.labels(worker_id, model).set(age_s)

    def begin_waiting(self, kind: str) -> None:
        """Count a request that waits for a reply, `whole` or `stream`, until `end_waiting`."""
        self.open_requests += 1
        self._waiting.labels(kind).inc()

    def end_waiting(self, kind: str) -> None:
        """See `begin_waiting`."""
        self.open_requests -= 1
        self._waiting.labels(kind).dec()

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self.registry)
