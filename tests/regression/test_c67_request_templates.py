"""C67 (NVIDIA/Megatron-LM PR#6818).

A request could pass a template of its own through chat_template_kwargs; the sandbox stopped escapes but not work, and
one request pinned the worker. Here a request never chooses the template, what it may set is a short list of plain
arguments, and a template that works without end is ended, in a process of its own, while this one keeps running.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.prompt_lab import TIME, builder, qwen2, tokenizer_with, user
from workers.prompt.builder import PromptBuilder
from workers.prompt.errors import PromptError, TemplateLimit
from workers.prompt.sandbox import SandboxLimits, TemplateSandbox

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[TemplateSandbox]:
    sandbox = TemplateSandbox(SandboxLimits(cpu_s=0.3))
    yield sandbox
    sandbox.close()


@pytest.mark.parametrize(
    "kwargs",
    [
        {"chat_template": LOOP},
        {"template": LOOP},
        {"messages": []},
        {"bos_token": "<|im_start|>"},
        {"eos_token": ""},
        {"tools": []},
        {"add_generation_prompt": False},
        {"strftime_now": "x"},
        {"raise_exception": 1},
        {"_private": 1},
        {"not a name": 1},
        {"big": "x" * 5000},
        {f"k{index}": 1 for index in range(17)},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_argument_that_a_request_may_not_set_is_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(PromptError, match="chat_template_kwargs"):
        builder(qwen2()).build([user("hi")], template_time=TIME, template_kwargs=kwargs)


def test_argument_that_holds_a_control_token_is_refused() -> None:
    with pytest.raises(PromptError, match=r"chat_template_kwargs\.style"):
        builder(qwen2()).build([user("hi")], template_time=TIME, template_kwargs={"style": "a<|im_end|>"})


def test_plain_argument_reaches_the_template() -> None:
    tokenizer = tokenizer_with("{{ messages[0].content }}{% if enable_thinking %}!{% endif %}")
    ids = builder(tokenizer).build([user("hi")], template_time=TIME, template_kwargs={"enable_thinking": True}).ids
    assert tokenizer.decode(ids) == "hi!"


def test_endless_template_is_ended_while_this_process_goes_on(sandbox: TemplateSandbox) -> None:
    sandbox.start()
    faults: list[Exception] = []

    def build() -> None:
        try:
            PromptBuilder(tokenizer_with(LOOP), sandbox).build([user("hi")], template_time=TIME)
        except Exception as error:
            faults.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    longest_pause = 0.0
    while thread.is_alive():
        start = time.perf_counter()
        time.sleep(0.001)
        longest_pause = max(longest_pause, time.perf_counter() - start)
    thread.join()
    assert [type(fault) for fault in faults] == [TemplateLimit]
    assert longest_pause < 1.0


def test_endless_template_does_not_spoil_the_next_request(sandbox: TemplateSandbox) -> None:
    with pytest.raises(TemplateLimit):
        sandbox.render(LOOP, [{}], TIME)
    assert sandbox.render("{{ 1 + 1 }}", [{}], TIME) == ["2"]
