"""What workers send with their heartbeats is what Prometheus sees."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from gateway.worker_metrics import WorkerFigures
from workers.registry import WorkerRecord


def rendered(**infos: dict[str, Any] | None) -> list[str]:
    workers = [WorkerRecord(name, "b", "tiny", 2, 2, info=info) for name, info in infos.items()]
    registry = CollectorRegistry()
    registry.register(WorkerFigures(lambda: workers))
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def test_figures_of_each_worker_are_shown_with_its_name() -> None:
    lines = rendered(w1={"restored_pages": 3, "free_pages": 7}, w2={"restored_pages": 4})
    assert lines == [
        'kvalet_worker_restored_pages_total{model="tiny",worker="w1"} 3.0',
        'kvalet_worker_restored_pages_total{model="tiny",worker="w2"} 4.0',
        'kvalet_worker_free_pages{model="tiny",worker="w1"} 7.0',
    ]


def test_reused_pages_of_other_numerics_are_counted_by_numerics() -> None:
    lines = rendered(w1={"foreign_pages": {"mixed": 2, "ab" * 32: 1}, "marked_turns": 3})
    assert lines == [
        'kvalet_worker_marked_turns_total{model="tiny",worker="w1"} 3.0',
        'kvalet_worker_foreign_pages_total{model="tiny",numerics="mixed",worker="w1"} 2.0',
        f'kvalet_worker_foreign_pages_total{{model="tiny",numerics="{"ab" * 32}",worker="w1"}} 1.0',
    ]


def test_reasons_of_recomputed_pages_are_labels() -> None:
    lines = rendered(w1={"recomputed_pages": {"late": 2, "missing": 1}})
    assert lines == [
        'kvalet_worker_recomputed_pages_total{model="tiny",reason="late",worker="w1"} 2.0',
        'kvalet_worker_recomputed_pages_total{model="tiny",reason="missing",worker="w1"} 1.0',
    ]


def test_figures_of_another_version_are_left_out() -> None:
    assert (
        rendered(w1={"steps": "many", "turns": 3, "pages": True, "new": 1, "parked_pages": {"x": None}}, w2=None) == []
    )
