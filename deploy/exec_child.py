"""Runs a command that the kernel kills when its parent dies: `python exec_child.py PARENT_PID COMMAND ...`.

Started as a plain file with `-I -S`, so it needs nothing but the interpreter and costs some ten milliseconds. The
signal is tied to the parent's *thread* that started the child: start children from a thread that lives as long as
they should.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def run(parent_pid: int, command: list[str]) -> None:
    """Ask for SIGKILL at the parent's death, then become `command`. Does not return."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # The parent may have died before the request: then nobody would ever send the signal.
    if os.getppid() != parent_pid:
        os._exit(128 + signal.SIGKILL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[2:])
