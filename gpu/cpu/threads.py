"""Threads that share the chunks of one task at a time, without the interpreter.

A board of i64 words carries the task. `WORD` holds epoch << 32 | chunks not yet claimed: a thread claims a chunk by
lowering it, so a claim always belongs to the task it was made for. The caller works too and waits for finished
chunks, never for threads: a helper that lost its core, or sleeps, delays nobody. Helpers spin for a moment between
tasks, then sleep in Python until the next one.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from gpu.cpu.intrinsics import atomic_add, atomic_load, atomic_store, atomic_swap_if, call_chunk, spin_hint
from gpu.cpu.scalar_math import jit
from gpu.cpu.task import CHUNKS, FUNCTION, TASK_FIELDS
from gpu.errors import LayoutError

WORD, DONE, CLOSED, TASK = 0, 8, 16, 24
BOARD_WORDS = TASK + TASK_FIELDS
SCRATCH_FLOATS = 1 << 18
SPINS = 3000
SPINS_OF_CALLER = 1000
NAP_US = 50
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
        self._scratch = [np.zeros(SCRATCH_FLOATS, np.float32) for _ in range(num_threads)]
        self._sleepers: set[int] = set()
        self._wakes = [threading.Semaphore(0) for _ in range(num_threads)]
        self._helpers = [
            threading.Thread(target=self._serve, args=(i,), name=f"kvalet-cpu-{i}", daemon=True)
            for i in range(1, num_threads)
        ]
        for helper in self._helpers:
            helper.start()

    def run(self, task: Task) -> None:
        """Do every chunk of task: (TASK_FIELDS,) i64, and return when all are done."""
        for index in tuple(self._sleepers):
            self._sleepers.discard(index)
            self._wakes[index].release()
        work(self._board, task, self._scratch[0].ctypes.data, 0)

    def close(self) -> None:
        """End the helpers. Idempotent."""
        self._board[CLOSED] = 1
        for wake in self._wakes:
            wake.release()
        for helper in self._helpers:
            helper.join()

    def _serve(self, index: int) -> None:
        scratch = self._scratch[index].ctypes.data
        nothing = np.zeros(0, np.int64)
        while not self._board[CLOSED]:
            work(self._board, nothing, scratch, SPINS)
            self._sleepers.add(index)
            self._wakes[index].acquire()


@jit
def work(board: Any, task: Any, scratch: int, spins: int) -> None:
    """Caller (task given): publish the task, share its chunks, wait for all. Helper: share chunks until idle."""
    if len(task) > 0:
        _publish(board, task)
    idle = 0
    while True:
        word = atomic_load(board, WORD)
        left = word & _LOW
        if left == 0:
            if len(task) > 0 or idle >= spins or atomic_load(board, CLOSED) != 0:
                break
            spin_hint()
            idle += 1
        elif atomic_swap_if(board, WORD, word, word - 1):
            call_chunk(board[TASK + FUNCTION], board.ctypes.data + 8 * TASK, board[TASK + CHUNKS] - left, scratch)
            atomic_add(board, DONE, 1)
            idle = 0
    waited = 0
    while len(task) > 0 and atomic_load(board, DONE) < task[CHUNKS]:
        spin_hint()
        waited += 1
        if waited > SPINS_OF_CALLER:
            _usleep(NAP_US)


@jit
def _publish(board: Any, task: Any) -> None:
    for i in range(len(task)):
        board[TASK + i] = task[i]
    atomic_store(board, DONE, 0)
    epoch = (atomic_load(board, WORD) >> 32) + 1
    atomic_store(board, WORD, ((epoch & 0x3FFFFFFF) << 32) | task[CHUNKS])
