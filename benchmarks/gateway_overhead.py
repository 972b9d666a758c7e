"""What gateway and queue add to the time to the first token.

    python -m benchmarks.gateway_overhead [MODEL] [--pairs 60] [--threads 2]

Pairs in turn: a streamed chat over HTTP through gateway, Celery and a worker process, and the same prompt submitted to
an engine thread in this process. Every prompt is new, so nothing is reused. The difference is what the way costs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import httpx

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


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=default_model_path())
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    runtime = load_runtime(WorkerSettings(model=arguments.model, threads=arguments.threads, attest="off"))
    direct = DirectEngine(runtime)
    environment = {"KVALET_MODEL": str(arguments.model), "KVALET_THREADS": str(arguments.threads)}
    environment |= {"KVALET_MODEL_NAME": "bench", "KVALET_ATTEST": "off"}
    through, alone = [], []
    with (
        tempfile.TemporaryDirectory(prefix="kvalet-bench-") as folder,
        Stack(StackOptions(Path(folder), num_workers=1, environment=environment), lambda _: None) as stack,
    ):
        client = httpx.Client(base_url=stack.base_url, timeout=60, trust_env=False)
        for index in range(-3, arguments.pairs):
            text = f"Ship {index}: what did it carry, and when did it sail from the harbour?"
            samples = (_over_http(client, text), direct.first_token_s(text))
            if index >= 0:
                through.append(1e3 * samples[0])
                alone.append(1e3 * samples[1])
    direct.close()
    added = [a - b for a, b in zip(through, alone, strict=True)]
    figures = [
        figure("first token over HTTP", through, "ms"),
        figure("first token from the engine", alone, "ms"),
        figure("added by gateway and queue", added, "ms"),
    ]
    write("gateway_overhead", figures, threads=arguments.threads)


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


def _over_http(client: httpx.Client, text: str) -> float:
    """Seconds from sending a streamed chat request to its first piece of text."""
    body = {"model": "bench", "stream": True, "temperature": 0, "max_tokens": MAX_TOKENS}
    body |= {"messages": [{"role": "user", "content": text}]}
    begun = time.perf_counter()
    first = 0.0
    with client.stream("POST", "/chat/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not first and line.startswith("data: {") and _has_text(json.loads(line[6:])):
                first = time.perf_counter() - begun
    return first


def _has_text(chunk: dict[str, object]) -> bool:
    choices = chunk.get("choices")
    return isinstance(choices, list) and bool(choices) and bool(choices[0].get("delta", {}).get("content"))


if __name__ == "__main__":
    main()
