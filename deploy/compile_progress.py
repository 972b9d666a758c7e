"""Tells how far workers are with compiling their kernels, from what they log."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from deploy.process import log_tail
from gpu.warm_up import COMPILED

_LINE = re.compile(re.escape(COMPILED) + r" (\d+)")


class CompileProgress:
    """Watches logs for the number of compiled kernels; what they hold already is of an earlier start."""

    def __init__(self, logs: Iterable[Path], report: Callable[[str], None]) -> None:
        self._report = report
        self._told = {log: _last_count(log) for log in logs}

    def tell(self) -> None:
        """Report a number that has changed since the last call."""
        for log, told in self._told.items():
            if (count := _last_count(log)) != told:
                self._told[log] = count
                if count == "0":
                    self._report("first start: kernels are compiled, which takes about a minute and is kept")
                else:
                    self._report(f"first start: {count} kernels compiled")


def _last_count(log: Path) -> str | None:
    counts = _LINE.findall(log_tail(log))
    return counts[-1] if counts else None
