"""Threads that share a task: every chunk once, helpers that sleep and wake, and a clean end."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest

from gpu.cpu.kernels import MODE_PLAIN
from gpu.cpu.product_task import ProductTask, padded_width
from gpu.cpu.threads import SOLO, CpuThreads
from gpu.errors import LayoutError
from gpu.model.tensors import WeightStorage
from tests.kernel_lab import matrix_of, product, same_bits, threads_of


def test_threads_of_less_than_one_name_the_setting() -> None:
    with pytest.raises(LayoutError) as caught:
        CpuThreads(0)
    assert caught.value.field == "num_threads"


def test_threads_closed_twice_end_their_helpers_once() -> None:
    threads = CpuThreads(3)
    threads.close()
    threads.close()
    assert not any(helper.is_alive() for helper in threads._helpers)


def test_threads_of_any_number_give_the_same_product() -> None:
    matrix, x = matrix_of(WeightStorage.Q8, 700, 96), np.random.default_rng(0).standard_normal((5, 96), np.float32)
    alone = product(x, matrix)
    for num_threads in (2, 3):
        for _ in range(50):
            assert same_bits(product(x, matrix, num_threads), alone)


def test_threads_without_a_task_leave_the_cores_alone() -> None:
    threads = threads_of(2)
    product(np.ones((1, 64), np.float32), matrix_of(WeightStorage.F32, 64, 64), 2)
    time.sleep(0.05)
    begun = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - begun < 0.1
    assert threads._helpers[0].is_alive()


def test_threads_dropped_without_close_end_their_helpers() -> None:
    threads = CpuThreads(2)
    helper = threads._helpers[0]
    del threads
    gc.collect()
    helper.join(timeout=5)
    assert not helper.is_alive()


def test_threads_closed_leave_the_caller_to_work_alone() -> None:
    matrix, x = matrix_of(WeightStorage.Q8, 300, 96), np.ones((2, 96), np.float32)
    threads = CpuThreads(2)
    threads.close()
    out = np.zeros((2, padded_width(300)), np.float32)
    ProductTask(MODE_PLAIN, x, [matrix], [out]).run(threads, 2)
    assert same_bits(out[:, :300], product(x, matrix))


def test_threads_that_work_alone_after_a_stall_give_the_same_product() -> None:
    matrix, x = matrix_of(WeightStorage.Q4, 300, 96), np.random.default_rng(0).standard_normal((5, 96), np.float32)
    expected, threads = product(x, matrix, 1), threads_of(2)
    threads._board[SOLO] = 3
    for left in (2, 1, 0):
        assert same_bits(product(x, matrix, 2), expected)
        assert threads._board[SOLO] == left
    assert same_bits(product(x, matrix, 2), expected)
