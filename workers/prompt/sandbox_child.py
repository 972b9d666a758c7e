"""The template process: renders chat templates for one parent, over its standard input and output.

Started by path, with a bare import path: it needs nothing of this project. Each message is a length (u32 little
endian) and that many bytes of msgpack. A template that exceeds its limits ends this process; the parent sees that and
starts another.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections import OrderedDict
from datetime import UTC, datetime
from typing import Any, BinaryIO, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgpack

MAX_TEMPLATES = 8
MAX_RANGE = 100_000


class TemplateRaised(Exception):
    """The template called raise_exception."""


class OutputTooLong(Exception):
    """The rendered text exceeds the limit."""


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; rendered as its content."""

    tags = {"generation"}  # noqa: RUF012 (the base class's contract)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the block's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def main() -> None:
    """Serve until the parent closes our input."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    limits = msgpack.unpackb(read_frame(requests))
    memory = limits["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # an ignored signal would be inherited
    renderer = Renderer(limits["output_chars"])
    write_frame(answers, {"ready": True})
    while True:
        request = msgpack.unpackb(read_frame(requests))
        # The signal's default action ends the process even inside one long C call.
        signal.setitimer(signal.ITIMER_PROF, limits["cpu_s"])
        answer = renderer.answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(answers, answer)


class Renderer:
    """Compiled templates and the environment that they run in."""

    def __init__(self, output_chars: int) -> None:
        self._output_chars = output_chars
        self._templates: OrderedDict[str, jinja2.Template] = OrderedDict()
        self._environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
        )
        self._environment.filters["tojson"] = _to_json
        self._environment.globals["raise_exception"] = _raise_exception

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Render each context of the request with its template: {"texts": [...]} or {"refused" | "limit": reason}."""
        try:
            template = self._template(request["template"])
            clock = {"strftime_now": _clock(request["time"])}
            return {"texts": [self._render(template, clock | context) for context in request["contexts"]]}
        except OutputTooLong:
            return {"limit": f"output of at most {self._output_chars} characters"}
        except MemoryError:
            return {"limit": "memory"}
        except RecursionError:
            return {"limit": "recursion"}
        except Exception as error:  # whatever a template does wrong is the template's refusal
            return {"refused": f"{type(error).__name__}: {error}"[:500]}

    def _template(self, source: str) -> jinja2.Template:
        template = self._templates.get(source)
        if template is None:
            template = self._templates[source] = self._environment.from_string(source)
            if len(self._templates) > MAX_TEMPLATES:
                self._templates.popitem(last=False)
        return template

    def _render(self, template: jinja2.Template, context: dict[str, Any]) -> str:
        pieces: list[str] = []
        num_chars = 0
        for piece in template.generate(context):
            num_chars += len(piece)
            if num_chars > self._output_chars:
                raise OutputTooLong
            pieces.append(piece)
        return "".join(pieces)


def _clock(template_time: int) -> Any:
    """`strftime_now` of a conversation: always the same moment, in UTC."""
    moment = datetime.fromtimestamp(template_time, UTC)
    return lambda pattern: moment.strftime(pattern)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRaised(message)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, sort_keys: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, sort_keys=sort_keys)


def read_frame(stream: BinaryIO) -> bytes:
    """The next message. Raises SystemExit when the parent has closed its end."""
    size = stream.read(4)
    if len(size) < 4:
        raise SystemExit(0)
    return stream.read(int.from_bytes(size, "little"))


def write_frame(stream: BinaryIO, answer: dict[str, Any]) -> None:
    """Send one answer."""
    block = msgpack.packb(answer)
    stream.write(len(block).to_bytes(4, "little") + block)
    stream.flush()


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        sys.exit(0)
