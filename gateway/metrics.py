"""Prometheus metrics of one gateway process and, scraped through it, of the fleet's demand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

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
        self.abandoned = Counter(
            "kvalet_turns_abandoned_total", "Turns cancelled because their client left", registry=self.registry
        )
        self._waiting = Gauge(
            "kvalet_waiting_requests", "Requests that wait for a reply, by kind of answer", ["kind"], registry=self.registry
        )

    @contextmanager
    def waiting(self, kind: str) -> Iterator[None]:
        """Count a request as waiting (`whole` or `stream`) while the block runs."""
        self.open_requests += 1
        self._waiting.labels(kind).inc()
        try:
            yield
        finally:
            self.open_requests -= 1
            self._waiting.labels(kind).dec()

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self.registry)
