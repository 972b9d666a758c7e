"""What gateway and queue add to the time to the first token.

    python -m benchmarks.gateway_overhead [MODEL] [--pairs 100] [--threads 1 2]

Pairs: a streamed chat over HTTP through gateway, Celery and a worker process, and the same prompt submitted to an
engine thread in this process; which of the two goes first alternates, and each begins after a short pause, so that
neither waits for what the one before leaves to do. Every prompt is new, so nothing is reused. The difference is what
the way costs. The client is the standard library's, so that a client library's own work is not counted.
"""

from __future__ import annotations

import argparse
import http.client
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._record import figure, write
from deploy.stack import Stack, StackOptions
from gpu.cache import HoldKind
from gpu.plan import SamplingParams
from snapshot_store.chain import SALT_BYTES, PrefixChain
from snapshot_store.transcript import CacheScope
from workers.engine.engine import Engine
from workers.engine.requests import EngineRequest, EngineTurn, SealedEvent, Token
from workers.model_runtime import ModelRuntime, load_runtime
from workers.parking.turn_pages import TurnPages
from workers.prompt.builder import PromptBuilder
from workers.prompt.sandbox import TemplateSandbox
from workers.settings import WorkerSettings, default_model_path

MAX_TOKENS = 4
WARM_UP_PAIRS = 10
PAUSE_S = 0.05


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=default_model_path())
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="kernel threads, measured one by one")
    arguments = parser.parse_args()
    figures = [row for threads in arguments.threads for row in _measure(arguments.model, threads, arguments.pairs)]
    write("gateway_overhead", figures)


def _measure(model: Path, threads: int, num_pairs: int) -> list[dict[str, Any]]:
    runtime = load_runtime(WorkerSettings(model=model, threads=threads, attest="off"))
    direct = DirectEngine(runtime)
    environment = {"KVALET_MODEL": str(model), "KVALET_THREADS": str(threads)}
    environment |= {"KVALET_MODEL_NAME": "bench", "KVALET_ATTEST": "off"}
    through, alone = [], []
    with (
        tempfile.TemporaryDirectory(prefix="kvalet-bench-") as folder,
        Stack(StackOptions(Path(folder), num_workers=1, environment=environment), lambda _: None) as stack,
    ):
        client = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=60)
        for index in range(-WARM_UP_PAIRS, num_pairs):
            text = f"Ship {index}: what did it carry, and when did it sail from the harbour?"
            if index % 2:
                samples = (_over_http(client, text), direct.first_token_s(text))
            else:
                samples = (direct.first_token_s(text), _over_http(client, text))[::-1]
            if index >= 0:
                through.append(1e3 * samples[0])
                alone.append(1e3 * samples[1])
    direct.close()
    added = [a - b for a, b in zip(through, alone, strict=True)]
    return [
        figure("first token over HTTP", through, "ms", threads=threads),
        figure("first token from the engine", alone, "ms", threads=threads),
        figure("added by gateway and queue", added, "ms", threads=threads),
    ]


class DirectEngine:
    """An engine thread of this process; turns are submitted to it without gateway, queue or store."""

    def __init__(self, runtime: ModelRuntime) -> None:
        self._runtime = runtime
        self._engine = Engine(runtime.backend, step_rows=128)
        self._engine.launch_thread()
        self._sandbox = TemplateSandbox()
        self._sandbox.start()
        self._prompts = PromptBuilder(runtime.source.tokenizer, self._sandbox)

    def first_token_s(self, text: str) -> float:
        """Seconds from submitting a prompt to its first token; the reply is drawn to its end."""
        prompt = self._prompts.build([{"role": "user", "content": text}], template_time=0).ids
        sampling = SamplingParams(0.0)
        time.sleep(PAUSE_S)
        begun = time.perf_counter()
        request = EngineRequest("bench", prompt, (), sampling, MAX_TOKENS, frozenset(), 0, 0)
        turn = EngineTurn(request, self._pages(), self._release)
        running = self._engine.admit(turn)
        turn.admitted.wait()
        self._engine.start(running)
        first = 0.0
        while isinstance(turn.outputs.get(timeout=30), Token):
            first = first or time.perf_counter() - begun
        self._engine.discard(running)
        return first

    def close(self) -> None:
        """Stop the engine."""
        self._engine.stop()
        self._sandbox.close()
        self._runtime.close()

    def _pages(self) -> TurnPages:
        layout = self._runtime.layout
        chain = PrefixChain(bytes(32), bytes(32), bytes(SALT_BYTES), CacheScope.TENANT, "bench", layout.page_size)
        return TurnPages("bench", chain, stateless=True, epoch=1)

    def _release(self, event: SealedEvent) -> None:
        self._engine.cache.release(event.page, HoldKind.UPLOAD)


def _over_http(client: http.client.HTTPConnection, text: str) -> float:
    """Seconds from sending a streamed chat request to its first piece of text; the reply is read to its end."""
    body = {"model": "bench", "stream": True, "temperature": 0, "max_tokens": MAX_TOKENS}
    body |= {"messages": [{"role": "user", "content": text}]}
    time.sleep(PAUSE_S)
    begun = time.perf_counter()
    first = 0.0
    client.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    answer = client.getresponse()
    if answer.status != 200:
        raise ValueError(f"status {answer.status}: {answer.read(1000)!r}")
    while line := answer.readline():
        if not first and line.startswith(b"data: {") and _has_text(json.loads(line[6:])):
            first = time.perf_counter() - begun
    return first


def _has_text(chunk: dict[str, object]) -> bool:
    choices = chunk.get("choices")
    return isinstance(choices, list) and bool(choices) and bool(choices[0].get("delta", {}).get("content"))


if __name__ == "__main__":
    main()
