"""Five hundred turns on one worker process: what grows?

    python -m benchmarks.soak [MODEL] [--turns 500]

Resident memory, file descriptors, threads and free pages of the worker at turn 100 and at the end. Conversations of ten
turns follow one another, so the mirror is full long before turn 100.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import psutil

from benchmarks._record import figure, write
from deploy.stack import Stack, StackOptions
from tests.fleet import StackClient
from workers.registry import list_workers
from workers.settings import default_model_path

FIRST_MARK = 100
TURNS_PER_CONVERSATION = 10


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=default_model_path())
    parser.add_argument("--turns", type=int, default=500)
    arguments = parser.parse_args()
    environment = {"KVALET_MODEL": str(arguments.model), "KVALET_MODEL_NAME": "bench", "KVALET_MIRROR_MIB": "16"}
    with (
        tempfile.TemporaryDirectory(prefix="kvalet-bench-") as folder,
        Stack(StackOptions(Path(folder), num_workers=1, environment=environment), lambda _: None) as stack,
    ):
        marks = _run(stack, StackClient(stack.control_url, "bench"), arguments.turns)
    first, last = marks[FIRST_MARK], marks[arguments.turns]
    figures = [
        figure(
            f"{name} at turn {arguments.turns} / {FIRST_MARK}", [last[name] / first[name]], "times", first=first[name]
        )
        for name in first
    ]
    write("soak", figures, turns=arguments.turns)


def _run(stack: Stack, client: StackClient, num_turns: int) -> dict[int, dict[str, float]]:
    process = psutil.Process(stack.pids()[stack.worker_ids[0]])
    marks: dict[int, dict[str, float]] = {}
    conversation = ""
    for turn in range(1, num_turns + 1):
        if turn % TURNS_PER_CONVERSATION == 1:
            conversation = client.conversation()
        text = f"Turn {turn}: which ship came in, and what did it carry?"
        turn_id = client.send(text, conversation_id=conversation, max_tokens=16)
        view = client.wait(turn_id)
        assert view.error is None, view.error
        if turn in (FIRST_MARK, num_turns):
            client.wait_parked(turn_id)
            marks[turn] = _usage(process, client)
    return marks


def _usage(process: Any, client: StackClient) -> dict[str, float]:
    [worker] = client.control.run(list_workers())
    info = worker.info or {}
    return {
        "resident memory": float(process.memory_info().rss),
        "file descriptors": float(len(os.listdir(f"/proc/{process.pid}/fd"))),
        "threads": float(process.num_threads()),
        "free and cached pages": float(info["free_pages"] + info["cached_pages"]),
    }


if __name__ == "__main__":
    main()
