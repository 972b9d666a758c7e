"""A terminal chat against a running service."""

from __future__ import annotations

from rich.console import Console

from deploy.api import Api
from deploy.conversation import Conversation, default_model, served_models
from deploy.errors import BadOption, ServiceError


def chat(api: Api, console: Console, model: str | None, options: dict[str, object]) -> None:
    """Read lines, stream replies, until end of input or `/exit`. One conversation; `/new` begins another."""
    if model is not None and model not in (served := served_models(api)):
        raise BadOption("--model", model, f"the service offers {', '.join(served) or 'no model yet'}")
    name = model or default_model(api)
    console.print(f"[dim]{name}. /new begins a new conversation, /exit or Ctrl-D ends.[/]")
    conversation = Conversation(api, name, options)
    while True:
        try:
            line = console.input("[bold]you>[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line == "/exit":
            return
        if line == "/new":
            conversation = Conversation(api, name, options)
        elif line:
            _answer(console, conversation, line)


def _answer(console: Console, conversation: Conversation, line: str) -> None:
    try:
        for text in conversation.say(line):
            # Reply text is the model's: neither markup nor highlighting may read it.
            console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
    except ServiceError as error:
        console.print(f"\n[red]{error}[/]", highlight=False)
        return
    except KeyboardInterrupt:
        console.print("\n[dim]stopped[/]")
        return
    report = conversation.report
    if report is not None:
        console.print(
            f"\n[dim]{report.worker}: {report.prompt_tokens} prompt tokens, {report.cached_tokens} cached, "
            f"{report.first_token_ms:.0f} ms to the first token, {report.token_ms:.1f} ms per token[/]",
            highlight=False,
        )
