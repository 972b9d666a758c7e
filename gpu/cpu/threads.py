"""Threads that share the chunks of one task at a time, without the interpreter.

A board of i64 words carries the task. `WORD` holds epoch << 32 | chunks not yet claimed: a thread claims a chunk by
lowering it, so a claim always belongs to the task it was made for. The caller works too and waits for finished
chunks, never for threads. Helpers live in compiled code: between tasks they spin for a moment, then nap. They never
touch the interpreter lock, which a helper without a core would keep from the caller.

A helper that loses its core in the middle of a chunk stalls the caller for a time slice. After such a stall the caller
works alone for a while, longer each time, so that a busy neighbour costs no more than the second core.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from gpu.cpu.intrinsics import atomic_add, atomic_load, atomic_store, atomic_swap_if, call_chunk, spin_hint
from gpu.cpu.scalar_math import jit
from gpu.cpu.task import CHUNKS, FUNCTION, TASK_FIELDS
from gpu.errors import LayoutError

WORD, DONE, CLOSED, SOLO, BACKOFF, TASK = 0, 8, 16, 24, 25, 32
BOARD_WORDS = TASK + TASK_FIELDS
SCRATCH_FLOATS = 1 << 18
SPINS, CALLER_SPINS = 3000, 1000
SHORT_NAP_US, LONG_NAP_US, SHORT_NAPS = 50, 2000, 200
STALL_NAPS = 12
MIN_SOLO, MAX_SOLO = 64, 1024
_LOW = 0xFFFFFFFF

Task = NDArray[np.int64]
_usleep: Any = types.ExternalFunction("usleep", types.int32(types.uint32))


class CpuThreads:
    """A caller and `num_threads` - 1 helpers. One thread at a time may call `run`."""

    def __init__(self, num_threads: int = 1) -> None:
        if num_threads < 1:
            raise LayoutError("num_threads", num_threads, "must be at least 1")
        self.num_threads = num_threads
        self._board = np.zeros(BOARD_WORDS, np.int64)
        self._scratch = np.zeros(SCRATCH_FLOATS, np.float32)
        self._helpers = [
            threading.Thread(target=_help, args=(self._board,), name=f"kvalet-cpu-{index}", daemon=True)
            for index in range(1, num_threads)
        ]
        for helper in self._helpers:
            helper.start()
        self._end = weakref.finalize(self, _end_helpers, self._board, self._helpers)

    def run(self, task: Task) -> None:
        """Do every chunk of task: (TASK_FIELDS,) i64, and return when all are done."""
        work(self._board, task, self._scratch.ctypes.data)

    def close(self) -> None:
        """End the helpers; the caller can still work alone. Idempotent, and done at exit."""
        self._end()


def _help(board: Task) -> None:
    scratch = np.zeros(SCRATCH_FLOATS, np.float32)
    work(board, np.zeros(0, np.int64), scratch.ctypes.data)


def _end_helpers(board: Task, helpers: list[threading.Thread]) -> None:
    board[CLOSED] = 1
    for helper in helpers:
        helper.join()


@jit
def work(board: Any, task: Any, scratch: int) -> None:
    """Caller (task given): publish the task, share its chunks, wait for all. Helper: share chunks until closed."""
    if len(task) > 0:
        if board[SOLO] > 0:
            board[SOLO] -= 1
            for chunk in range(task[CHUNKS]):
                call_chunk(task[FUNCTION], task.ctypes.data, chunk, scratch)
            return
        _publish(board, task)
    idle = 0
    while True:
        word = atomic_load(board, WORD)
        left = word & _LOW
        if left == 0:
            if len(task) > 0 or atomic_load(board, CLOSED) != 0:
                break
            idle += 1
            if idle < SPINS:
                spin_hint()
            else:
                _usleep(SHORT_NAP_US if idle < SPINS + SHORT_NAPS else LONG_NAP_US)
        elif atomic_swap_if(board, WORD, word, word - 1):
            call_chunk(board[TASK + FUNCTION], board.ctypes.data + 8 * TASK, board[TASK + CHUNKS] - left, scratch)
            atomic_add(board, DONE, 1)
            idle = 0
    if len(task) > 0:
        _wait_for_chunks(board, task[CHUNKS])


@jit
def _wait_for_chunks(board: Any, num_chunks: int) -> None:
    """Spin, then nap until all chunks are done; after a stall plan to work alone for a while."""
    waited = 0
    while atomic_load(board, DONE) < num_chunks:
        spin_hint()
        waited += 1
        if waited > CALLER_SPINS:
            _usleep(SHORT_NAP_US)
    if waited > CALLER_SPINS + STALL_NAPS:
        board[BACKOFF] = min(max(2 * board[BACKOFF], MIN_SOLO), MAX_SOLO)
        board[SOLO] = board[BACKOFF]
    elif board[BACKOFF] > 0:
        board[BACKOFF] -= 1


@jit
def _publish(board: Any, task: Any) -> None:
    for i in range(len(task)):
        board[TASK + i] = task[i]
    atomic_store(board, DONE, 0)
    epoch = (atomic_load(board, WORD) >> 32) + 1
    atomic_store(board, WORD, ((epoch & 0x3FFFFFFF) << 32) | task[CHUNKS])
