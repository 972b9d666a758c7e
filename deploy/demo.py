"""`kvalet demo`: a conversation that changes worker at every turn says the same as one that stays.

Both run on one stack, in their own cache scope, so that neither finds the other's pages. Sampling is seeded, not
greedy: a single differing bit in a restored page would show.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deploy.api import Api
from deploy.conversation import Conversation, TurnReport, default_model
from deploy.errors import DemoFailed, ServiceError
from deploy.stack import Report, Stack, StackOptions

MESSAGES = (
    (
        "I am writing a children's story about Anselm, a clockmaker who is afraid of heights and inherits a lighthouse "
        "by the sea. He has a cat called Pim and a neighbour, Mrs. Bell, who bakes bread and mends nets. Please write "
        "the first paragraph of the story, warm and a little funny, and end it with a knock at the door."
    ),
    "Who is at the door? Write the next paragraph.",
    "Now a storm comes, and somebody has to climb up to the lamp. Go on.",
    "What is the cat called, and what is Anselm afraid of?",
    "Write the last paragraph, with a happy end.",
)
MAX_OUTPUT_TOKENS = 96


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Reports of both conversations, turn by turn."""

    moved: tuple[TurnReport, ...]
    stayed: tuple[TurnReport, ...]


def run_demo(console: Console, report: Report, environment: Mapping[str, str]) -> DemoResult:
    """Start a stack, hold both conversations, print them, stop the stack. Raises DemoFailed when they differ."""
    with tempfile.TemporaryDirectory(prefix="kvalet-demo-") as directory:
        options = StackOptions(
            Path(directory), num_workers=2, environment={"KVALET_RESTORE": "always", **environment}
        )
        with Stack(options, report) as stack, Api(stack.base_url) as api:
            model = default_model(api)
            report(f"{model}: one conversation, another worker at each turn")
            moved = _hold(console, api, model, _alternating(stack.worker_ids, len(MESSAGES)))
            report("the same conversation, kept on one worker")
            stayed = _hold(None, api, model, (stack.worker_ids[0],) * len(MESSAGES))
            pids = stack.pids()
        _expect_gone(pids)
    result = DemoResult(moved, stayed)
    console.print(turn_table(result))
    check(result)
    return result


def check(result: DemoResult) -> None:
    """Raises DemoFailed unless the conversation moved, was restored, and says what the one that stayed says."""
    for number, (moved, stayed) in enumerate(zip(result.moved, result.stayed, strict=True), start=1):
        if moved.text != stayed.text:
            raise DemoFailed(f"turn {number}: the moved conversation says {moved.text!r}, the other {stayed.text!r}")
    for number, (before, now) in enumerate(zip(result.moved, result.moved[1:], strict=False), start=2):
        if now.worker == before.worker:
            raise DemoFailed(f"turn {number}: ran on {now.worker} again, it should have moved")
        if now.cached_tokens == 0 or now.restored_pages == 0:
            raise DemoFailed(f"turn {number}: nothing was restored, so nothing was shown")


def turn_table(result: DemoResult) -> Table:
    """The moved conversation, a row per turn. Times in milliseconds; first token and token times as the client saw."""
    title = "moved at every turn (times in ms)"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1))
    headings = (
        "turn", "worker", "prompt\ntokens", "cached\ntokens", "restored\npages", "restored\nbytes", "restore\ntime",
        "first\ntoken", "ms per\ntoken", "same\ntext",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True, min_width=4)
    for number, (turn, other) in enumerate(zip(result.moved, result.stayed, strict=True), start=1):
        table.add_row(
            str(number), turn.worker, str(turn.prompt_tokens), str(turn.cached_tokens), str(turn.restored_pages),
            f"{turn.restored_bytes:,}", f"{turn.restore_ms:.1f}", f"{turn.first_token_ms:.0f}", f"{turn.token_ms:.1f}",
            "yes" if turn.text == other.text else "NO",
        )  # fmt: skip
    return table


def _alternating(worker_ids: Sequence[str], num_turns: int) -> tuple[str, ...]:
    return tuple(worker_ids[turn % len(worker_ids)] for turn in range(num_turns))


def _hold(console: Console | None, api: Api, model: str, worker_ids: Sequence[str]) -> tuple[TurnReport, ...]:
    options = {"temperature": 0.7, "top_p": 0.95, "max_output_tokens": MAX_OUTPUT_TOKENS}
    conversation = Conversation(api, model, options)
    reports = []
    for turn, (message, worker_id) in enumerate(zip(MESSAGES, worker_ids, strict=True)):
        if console is not None:
            console.print(f"\n[bold]you>[/] {message}\n[bold]{worker_id}>[/] ", end="", highlight=False)
        extension = {"worker": worker_id, "scope": "conversation"}
        for text in conversation.say(message, seed=1000 + turn, kvalet=extension):
            if console is not None:
                console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
        if conversation.report is None:
            raise ServiceError("the turn ended without a report")
        reports.append(conversation.report)
    if console is not None:
        console.print("\n")
    return tuple(reports)


def _expect_gone(pids: Mapping[str, int]) -> None:
    deadline = time.monotonic() + 5.0
    alive = dict(pids)
    while alive and time.monotonic() < deadline:
        alive = {name: pid for name, pid in alive.items() if Path(f"/proc/{pid}").exists()}
        time.sleep(0.02)
    if alive:
        raise DemoFailed(f"still running: {alive}")
