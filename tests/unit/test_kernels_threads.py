"""Threads that share a task: every chunk once, helpers that sleep and wake, and a clean end."""

from __future__ import annotations

import time

import numpy as np
import pytest

from gpu.cpu.threads import CpuThreads
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


def test_threads_that_fell_asleep_wake_for_the_next_task() -> None:
    matrix, x = matrix_of(WeightStorage.F32, 64, 64), np.ones((1, 64), np.float32)
    threads = threads_of(2)
    product(x, matrix, 2)
    deadline = time.monotonic() + 5
    while not threads._sleepers and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads._sleepers
    product(x, matrix, 2)
    while threads._sleepers == {1} and time.monotonic() < deadline:
        time.sleep(0.001)
        product(x, matrix, 2)
    assert same_bits(product(x, matrix, 2), product(x, matrix, 1))
