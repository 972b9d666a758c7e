"""Looks at what a start needs before anything is started, so that a slip costs one line and not a start."""

from __future__ import annotations

from collections.abc import Callable, Container

from deploy.configuration import PREFIX
from deploy.doctor.cuda import examine_cuda
from deploy.doctor.pinned_memory import memory_limits
from deploy.errors import BadOption
from deploy.options import flag
from workers.errors import WorkerStartError
from workers.server_check import check_two_servers, server_run_id
from workers.settings import WorkerSettings, default_model_path

Fetch = Callable[[], object]


def check_worker(settings: WorkerSettings, given: Container[str], fetch: Fetch) -> None:
    """Look at device, model and memory of a worker.

    given: variables that stand for options of the command line; others are named as variables. fetch: called when the
    default model is wanted and not there. Raises BadOption.
    """
    if settings.backend == "cuda":
        missing = [finding for finding in examine_cuda(demanded=True, mirror_bytes=1 << 20) if finding.missing]
        if missing:
            raise BadOption(_name("backend", given), settings.backend, missing[0].detail)
    check_memory(_name("mirror_mib", given), settings.mirror_bytes)
    if settings.model == default_model_path():
        fetch()
    check_model(settings, given)


def check_memory(field: str, num_bytes: int) -> None:
    """Raise BadOption for more than the machine, or the control group around this process, has."""
    limits = memory_limits()
    most = limits.control_group_bytes or limits.physical_bytes
    if num_bytes >= most:
        whose = "the control group" if limits.control_group_bytes else "the machine"
        raise BadOption(field, num_bytes >> 20, f"{whose} has {most >> 20} MiB")


def check_model(settings: WorkerSettings, given: Container[str] = ()) -> str:
    """Read the model's header and plan its memory; what was found, in words. Raises BadOption with what is wrong."""
    # Imported here: only commands that start workers have the worker extra and need NumPy.
    from gpu.errors import GpuError, LayoutError
    from gpu.model.load import open_source
    from workers.model_plan import plan_model

    path = settings.model
    if not path.exists():
        raise BadOption(_name("model", given), str(path), "no such file or folder")
    try:
        plan = plan_model(open_source(path).config, settings)
    except LayoutError as error:
        known = error.field in WorkerSettings.model_fields
        raise BadOption(_name(error.field, given) if known else error.field, error.value, error.limit) from error
    except (GpuError, OSError) as error:
        raise BadOption(_name("model", given), str(path), str(error)) from error
    config = plan.config
    return f"{path}, {config.architecture}, {config.context_length} tokens of context, {plan.num_pages} pages of mirror"


def check_servers(control_url: str | None, pages_url: str | None) -> None:
    """Look at the servers that are named by URL; None: not ours to look at. Raises BadOption."""
    try:
        if control_url is not None and pages_url is not None:
            check_two_servers(control_url, pages_url)
        elif (url := control_url or pages_url) is not None:
            server_run_id("control_url" if control_url else "pages_url", url)
    except WorkerStartError as error:
        raise BadOption(flag(error.field), error.value, error.limit) from error


def _name(field: str, given: Container[str]) -> str:
    variable = PREFIX + field.upper()
    return flag(field) if variable in given else variable
