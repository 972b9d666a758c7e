"""Holds two conversations that change worker process at every turn, and checks them against the same ones that stay.

Worker processes, Celery, Valkey, restore from the store. Token ids are compared three ways: moved, kept on one
worker, and one teacher-forced pass over the whole id list. A run that reused nothing fails as not exercised.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deploy.stack import Stack, StackOptions
from gpu.plan import SamplingParams
from snapshot_store.transcript import CacheScope
from tests.fleet import StackClient
from tests.teacher import resampled, teacher
from workers.turns.events import TurnState

SAMPLINGS: tuple[dict[str, Any], dict[str, Any]] = (
    {"temperature": 0.0, "seed": 1},
    {"temperature": 1.0, "top_p": 0.95, "seed": 4711},
)
FIRST = "The ledger of the harbour lists ship {0}, its cargo of salt, copper and figs, and the day it sailed. " * 9
NEXT = "Now page {0} of the ledger: which ship came in, and what did it carry?"
FORMATS = ("f16", "int8", "q4", "k8v4")
OUTPUT_TOKENS = 104


@contextmanager
def moving_stack(model: Path, **settings: Any) -> Iterator[Stack]:
    """Two worker processes on a model, restoring always. settings: KVALET_* values by lower-case name."""
    environment = {f"KVALET_{name.upper()}": str(value) for name, value in settings.items()}
    with tempfile.TemporaryDirectory(prefix="kvalet-test-") as directory:
        options = StackOptions(
            Path(directory),
            num_workers=2,
            grace_s=5.0,
            environment={"KVALET_MODEL": str(model), "KVALET_RESTORE": "always", **environment},
        )
        with Stack(options, lambda line: None) as stack:
            yield stack


def _hold(
    client: StackClient, workers: tuple[str, str], num_turns: int
) -> tuple[list[list[str]], list[list[dict[str, Any]]]]:
    """Hold both conversations side by side; conversation i runs turn t on workers[(t + i) % 2]."""
    conversations = [client.conversation() for _ in SAMPLINGS]
    turn_ids: list[list[str]] = [[], []]
    usages: list[list[dict[str, Any]]] = [[], []]
    for turn in range(num_turns):
        sent = []
        for i, conversation in enumerate(conversations):
            text = (NEXT if turn else FIRST).format(turn + 100 * i)
            asked = {"conversation_id": conversation, "scope": CacheScope.CONVERSATION, "sampling": SAMPLINGS[i]}
            sent.append(client.send(text, worker=workers[(turn + i) % 2], max_tokens=OUTPUT_TOKENS, **asked))
        for i, turn_id in enumerate(sent):
            view = client.wait(turn_id)
            assert view.state is TurnState.INCOMPLETE, view.error
            assert view.worker_id == workers[(turn + i) % 2]
            client.wait_parked(turn_id)
            turn_ids[i].append(turn_id)
            usages[i].append(view.usage)
    return turn_ids, usages


def check_moved(stack: Stack, model: Path, num_turns: int, page_size: int, **settings: Any) -> None:
    """Hold both conversations moved and kept; compare their ids with each other and with a teacher-forced pass."""
    client = StackClient(stack.control_url, settings["model_name"])
    first, second = stack.worker_ids
    moved, usages = _hold(client, (first, second), num_turns)
    stayed, _ = _hold(client, (first, first), num_turns)
    runtime = teacher(model, kv_format=settings["kv_format"], backend=settings.get("backend", "cpu"), threads=2)
    try:
        for i in range(2):
            path = client.path(moved[i][-1])
            assert client.token_ids(moved[i][-1]) == client.token_ids(stayed[i][-1])
            samplings = [SamplingParams(**SAMPLINGS[i])] * num_turns
            assert resampled(runtime, path, samplings) == [entry.output_ids for entry in path]
            assert path[0].prompt_tokens >= 200
            _check_reuse(path, usages[i], page_size)
    finally:
        runtime.close()


def _check_reuse(path: Any, usages: list[dict[str, Any]], page_size: int) -> None:
    """From turn 2 on every page that earlier turns sealed is reused, and what another worker wrote is restored."""
    for before, usage in zip(path, usages[1:], strict=False):
        cells = before.prompt_tokens + len(before.output_ids) - 1
        assert usage["cached_tokens"] >= cells // page_size * page_size, f"not exercised: {usage}"
        assert usage["restored_pages"] > 0, f"not exercised: {usage}"
