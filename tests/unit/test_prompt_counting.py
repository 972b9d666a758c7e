"""Prompts are counted in another process, which may die, be asked for too much, or know nothing yet."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.gateway_fleet import byte_bundle
from workers.prompt.builder import PromptBuilder
from workers.prompt.counting import PromptCounter
from workers.prompt.errors import BundleNeeded, PromptError, SandboxFailure, TokenizerError
from workers.prompt.sandbox import TemplateSandbox
from workers.prompt.tokenizer import Tokenizer

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "x", "token_ids": (65, 66, 67)},
    {"role": "user", "content": "and then?"},
]
DIGEST = byte_bundle().digest.hex()
BLOCK = byte_bundle().to_bytes()


@pytest.fixture
def counter() -> Iterator[PromptCounter]:
    counter = PromptCounter()
    yield counter
    counter.close()


def count(counter: PromptCounter, messages: list[dict[str, Any]] | None = None, **changes: Any) -> int:
    options: dict[str, Any] = {"template_time": 1, "tools": (), "template_kwargs": None, "block": BLOCK, **changes}
    return counter.count(options.pop("digest", DIGEST), MESSAGES if messages is None else messages, **options)


def child_pids() -> set[int]:
    listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    return {int(line.split()[0]) for line in listed.stdout.splitlines() if "counting_child" in line}


def test_count_is_what_the_worker_will_build(counter: PromptCounter) -> None:
    sandbox = TemplateSandbox()
    try:
        built = PromptBuilder(Tokenizer(byte_bundle()), sandbox).build(MESSAGES, template_time=1)
    finally:
        sandbox.close()
    assert count(counter) == len(built.ids)


def test_tokenizer_is_asked_for_once(counter: PromptCounter) -> None:
    with pytest.raises(BundleNeeded):
        count(counter, block=None)
    assert count(counter) == count(counter, block=None)


def test_killed_process_is_replaced_and_asks_for_the_tokenizer_again(counter: PromptCounter) -> None:
    expected = count(counter)
    (pid,) = child_pids()
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(BundleNeeded):
        count(counter, block=None)
    assert count(counter) == expected


def test_prompt_that_is_refused_names_the_field_as_the_builder_does(counter: PromptCounter) -> None:
    with pytest.raises(PromptError, match=r"messages\[0\]\.role='wizard'") as refused:
        count(counter, [{"role": "wizard", "content": "x"}])
    assert refused.value.field == "messages[0].role"


def test_bundle_that_cannot_be_used_is_said_and_the_next_count_works(counter: PromptCounter) -> None:
    broken = replace(byte_bundle(), tokenizer_json="{").to_bytes()
    for block in (b"junk", broken):
        with pytest.raises(TokenizerError):
            count(counter, digest="00", block=block)
    assert count(counter) > 0


def test_prompt_that_cannot_travel_is_not_counted(counter: PromptCounter) -> None:
    with pytest.raises(SandboxFailure):
        count(counter, template_kwargs={"n": 1 << 70})
    assert count(counter) > 0


def test_answer_that_does_not_come_ends_the_process() -> None:
    counter = PromptCounter(patience_s=0.0)
    with pytest.raises(SandboxFailure):
        count(counter)
    assert child_pids() == set()


def test_gateway_holds_no_tokenizer_of_its_own() -> None:
    """Loading a vocabulary of 150,000 pieces holds the interpreter, and with it every reply, for more than a second."""
    heavy = ["jinja2", "tokenizers", "workers.prompt.tokenizer"]
    code = f"import sys, gateway.app; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
