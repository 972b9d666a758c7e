"""Figures of the workers, from their heartbeats, as Prometheus metrics: workers themselves serve no HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from workers.registry import WorkerRecord

_LABELS = ["worker", "model"]
_COUNTERS = {
    "restored_pages": "Pages that turns took from the page store",
    "marked_turns": "Runs of turns that other numerics had a part in",
    "parked_bytes": "Bytes of pages sent to the page store",
    "steps": "Engine steps",
    "prefill_rows": "Prompt rows computed",
    "decode_rows": "Reply rows computed",
    "preemptions": "Turns that gave up their pages to an older one",
    "drafted_rows": "Rows that were guessed and verified",
    "accepted_rows": "Guessed rows that the model would have drawn itself",
    "evictions": "Cached pages dropped for new ones",
}
# Name of the label that tells the parts apart.
_SPLIT_COUNTERS = {
    "turns": ("end", "Runs of turns, by how they ended"),
    "recomputed_pages": ("reason", "Pages computed again, by why they could not be restored"),
    "foreign_pages": ("numerics", "Pages reused that other numerics have computed"),
    "parked_pages": ("outcome", "Pages that were to be parked, by outcome"),
}
_GAUGES = {
    "park_backlog": "Pages that wait to be sent to the page store",
    "engine_turns": "Turns in the engine, waiting ones included",
    "pages": "Pages of mirror memory",
    "free_pages": "Pages that hold nothing",
    "cached_pages": "Pages that no turn uses and that can be reused or dropped",
    "resident_pages": "Pages with a device copy",
}


class WorkerFigures(Collector):
    """Shows the last heartbeat of every worker that `workers` returns. Counters start again with their process.

    A worker of another version may send other figures: what is not known or no number is left out.
    """

    def __init__(self, workers: Callable[[], Iterable[WorkerRecord]]) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        """One metric per figure, with a sample for each worker that sends it."""
        seen = [([worker.worker_id, worker.model], worker.info or {}) for worker in self._workers()]
        for name, text in _COUNTERS.items():
            yield _filled(CounterMetricFamily(f"kvalet_worker_{name}", text, labels=_LABELS), name, seen)
        for name, text in _GAUGES.items():
            yield _filled(GaugeMetricFamily(f"kvalet_worker_{name}", text, labels=_LABELS), name, seen)
        for name, (label, text) in _SPLIT_COUNTERS.items():
            family = CounterMetricFamily(f"kvalet_worker_{name}", text, labels=[*_LABELS, label])
            for labels, info in seen:
                parts = info.get(name)
                for part, value in parts.items() if isinstance(parts, Mapping) else ():
                    if (number := _number(value)) is not None:
                        family.add_metric([*labels, str(part)], number)
            yield family


def _filled(
    family: CounterMetricFamily | GaugeMetricFamily, name: str, seen: list[tuple[list[str], Mapping[str, Any]]]
) -> Metric:
    for labels, info in seen:
        if (number := _number(info.get(name))) is not None:
            family.add_metric(labels, number)
    return family


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
