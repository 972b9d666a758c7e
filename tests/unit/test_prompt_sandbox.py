"""The template process: what it renders, what it refuses, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from workers.prompt import sandbox as sandbox_module
from workers.prompt.errors import SandboxFailure, TemplateLimit, TemplateRefused
from workers.prompt.sandbox import SandboxLimits, TemplateSandbox

TIME = 1_000_000_000


@pytest.fixture(scope="module")
def sandbox() -> Iterator[TemplateSandbox]:
    sandbox = TemplateSandbox(SandboxLimits(cpu_s=0.5, memory_bytes=1 << 28, output_chars=10_000))
    yield sandbox
    sandbox.close()


def child_pids() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def test_contexts_are_rendered_in_order(sandbox: TemplateSandbox) -> None:
    assert sandbox.render("<{{ x }}>", [{"x": "a"}, {"x": "b"}], TIME) == ["<a>", "<b>"]


def test_time_is_the_given_moment_in_utc(sandbox: TemplateSandbox) -> None:
    assert sandbox.render("{{ strftime_now('%Y-%m-%d %H:%M %Z') }}", [{}], TIME) == ["2001-09-09 01:46 UTC"]


def test_tojson_keeps_characters_and_key_order(sandbox: TemplateSandbox) -> None:
    assert sandbox.render("{{ x | tojson }}", [{"x": {"b": "é<", "a": 1}}], TIME) == ['{"b": "é<", "a": 1}']


def test_blocks_are_trimmed_as_the_published_templates_expect(sandbox: TemplateSandbox) -> None:
    template = "a\n  {% if true %}\nb\n  {% endif %}\nc{% generation %}d{% endgeneration %}"
    assert sandbox.render(template, [{}], TIME) == ["a\nb\ncd"]


def test_loop_controls_are_available(sandbox: TemplateSandbox) -> None:
    template = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert sandbox.render(template, [{}], TIME) == ["01"]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{% for i in range(100001) %}{% endfor %}", "Range too big"),
        ("{{ undefined.field }}", "undefined"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{% include 'x' %}", "TypeError|no loader"),
    ],
)
def test_template_that_does_what_it_may_not_is_refused(sandbox: TemplateSandbox, template: str, reason: str) -> None:
    with pytest.raises(TemplateRefused, match=reason):
        sandbox.render(template, [{"messages": []}], TIME)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(9999) %}{{ 'abc' }}{% endfor %}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ ('%0300000000d' % 1) | length }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ (7 ** 9999999) % 10 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
    ids=["loop", "output", "memory", "one_long_string", "doubling", "one_long_call", "recursion"],
)
def test_template_that_exceeds_a_limit_is_ended(sandbox: TemplateSandbox, template: str) -> None:
    start = time.monotonic()
    with pytest.raises(TemplateLimit):
        sandbox.render(template, [{}], TIME)
    assert time.monotonic() - start < 10
    assert sandbox.render("{{ 1 }}", [{}], TIME) == ["1"]


def test_child_that_was_killed_is_replaced() -> None:
    sandbox = TemplateSandbox()
    before = child_pids()
    sandbox.start()
    [pid] = child_pids() - before
    os.kill(pid, signal.SIGKILL)
    assert sandbox.render("ok", [{}], TIME) == ["ok"]
    assert pid not in child_pids()
    sandbox.close()


def test_child_that_is_stopped_runs_into_the_wall_clock_limit() -> None:
    sandbox = TemplateSandbox(SandboxLimits(wall_s=0.2))
    before = child_pids()
    sandbox.start()
    [pid] = child_pids() - before
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(TemplateLimit, match="time"):
        sandbox.render("ok", [{}], TIME)
    assert child_pids() == before


def test_threads_share_one_child_without_mixing_answers(sandbox: TemplateSandbox) -> None:
    faults: list[str] = []

    def render(name: str) -> None:
        for _ in range(20):
            if sandbox.render("{{ name }}", [{"name": name}], TIME) != [name]:
                faults.append(name)

    threads = [threading.Thread(target=render, args=(f"t{index}",)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_large_contexts_and_answers_pass_the_pipe() -> None:
    sandbox = TemplateSandbox()
    text = "é漢" * 500_000
    assert sandbox.render("{{ x }}", [{"x": text}, {"x": "b"}], TIME) == [text, "b"]
    sandbox.close()


def test_closing_leaves_no_child_behind() -> None:
    before = child_pids()
    sandbox = TemplateSandbox()
    sandbox.start()
    sandbox.close()
    assert child_pids() == before


def test_child_that_cannot_start_is_a_sandbox_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sandbox_module, "_CHILD", tmp_path / "missing.py")
    with pytest.raises(SandboxFailure):
        TemplateSandbox().start()


def test_child_leaves_when_its_parent_is_killed() -> None:
    code = (
        "import time, psutil\nfrom workers.prompt.sandbox import TemplateSandbox\n"
        "sandbox = TemplateSandbox()\nsandbox.start()\n"
        "print(psutil.Process().children()[0].pid, flush=True)\ntime.sleep(60)"
    )
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    try:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
    finally:
        parent.kill()
        parent.wait()
    child.wait(timeout=10)
    assert not child.is_running()
