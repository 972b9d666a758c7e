"""What suffix drafting brings on the CPU: a reply that copies its prompt, and one that does not.

    python -m benchmarks.drafting [MODEL] [--threads 2] [--kv k8v4] [--out FILE]

Replies of one turn on the engine, without drafting and with some rows, in turn (ABBA), the ids compared: a greedy one
behind a paragraph that the prompt holds twice and begins again, and one that is drawn at temperature 1 and repeats
little.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks._record import figure, write
from gpu.cache import HoldKind
from gpu.plan import SamplingParams
from workers.engine.drafting import DraftSettings
from workers.engine.engine import Engine
from workers.engine.requests import EngineRequest, EngineTurn, Token
from workers.model_runtime import load_runtime
from workers.settings import WorkerSettings, default_model_path

ROWS = (3, 8)
MIN_MATCH = 3
REPLY = 160
PARAGRAPH = (
    "The keeper lights the lamp at dusk, writes the hour into the book, and counts the ships that pass the northern "
    "reef: first the salt ships, then the mail boat, last the fishing boats with their blue lanterns. "
)


class _Digests:
    """A digest of its own for every page, so that no reply finds another one's."""

    _count = itertools.count()

    def seal(self, page_index: int, token_ids: tuple[int, ...], own_numerics: bool) -> bytes:
        return next(self._count).to_bytes(16, "little")


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=default_model_path())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv", default="k8v4")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    settings = WorkerSettings(model=arguments.model, threads=arguments.threads, kv_format=arguments.kv)
    write("drafting", _figures(settings), arguments.out, threads=arguments.threads, kv=arguments.kv)


def _figures(settings: WorkerSettings) -> list[dict[str, Any]]:
    engines: dict[int, Engine] = {}
    for rows in (0, *ROWS):
        runtime = load_runtime(settings)
        drafting = DraftSettings(rows, MIN_MATCH) if rows else None
        engines[rows] = Engine(runtime.backend, step_rows=settings.max_step_rows, drafting=drafting)
        engines[rows].launch_thread()
    encode = runtime.source.tokenizer.encode_text
    text = tuple(encode(PARAGRAPH * 2))
    cases = {
        "copies": ((*text, *text[:40]), SamplingParams(temperature=0.0)),
        "does not copy": (tuple(encode("Once upon a time, far in the north,")), SamplingParams(seed=3)),
    }
    figures = []
    for name, (prompt, sampling) in cases.items():
        rates: dict[int, list[float]] = {rows: [] for rows in engines}
        said: set[tuple[int, ...]] = set()
        for rows in (*engines, *reversed(engines)) * 3:
            ids, seconds = _reply(engines[rows], prompt, sampling)
            said.add(ids)
            rates[rows].append((len(ids) - 1) / seconds)
        if len(said) != 1:
            raise SystemExit(f"{name}: replies differ")
        plain = statistics.median(rates[0])
        for rows, samples in rates.items():
            facts = {"rows": rows, "times": round(statistics.median(samples) / plain, 2)}
            figures.append(figure(f"reply that {name}", samples, "tokens/s", **facts))
    for rows, engine in engines.items():
        counters = engine.counters
        share = 100 * counters.accepted / max(1, counters.drafted)
        if rows:
            figures.append(figure(f"accepted of {rows} rows, both replies", [share], "%", drafted=counters.drafted))
        engine.stop()
    return figures


def _reply(engine: Engine, prompt: tuple[int, ...], sampling: SamplingParams) -> tuple[tuple[int, ...], float]:
    """A reply and the seconds from its first token to its last."""
    request = EngineRequest("t", prompt, (), sampling, REPLY, frozenset(), 0, 0)
    pages: Any = _Digests()
    turn = EngineTurn(request, pages, lambda event: engine.cache.release(event.page, HoldKind.UPLOAD))
    running = engine.admit(turn)
    turn.admitted.wait()
    engine.start(running)
    ids: list[int] = []
    begun = time.perf_counter()
    while isinstance(output := turn.outputs.get(), Token):
        if not ids:
            begun = time.perf_counter()
        ids.append(output.token_id)
    return tuple(ids), time.perf_counter() - begun


if __name__ == "__main__":
    main()
