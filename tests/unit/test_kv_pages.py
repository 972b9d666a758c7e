"""Holds, the free list and the digest index."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from gpu.errors import CapacityError, HoldViolation
from gpu.pages import HoldKind, Page, PagePool, PageState


def make_pool(num_pages: int = 4) -> tuple[PagePool, list[int]]:
    freed: list[int] = []
    return PagePool(num_pages, lambda page: freed.append(page.index)), freed


def take(pool: PagePool, count: int = 1) -> list[Page]:
    return pool.take(count, HoldKind.SEQUENCE, PageState.OPEN)


def test_kv_clean_pages_are_free_and_go_to_new_rows_first_to_restores_last() -> None:
    pool, _ = make_pool()
    clean = [pool.take_to_clean(), pool.take_to_clean()]
    assert pool.num_free == 2
    for page in clean:
        assert page is not None
        pool.put_clean(page)
    assert (pool.num_free, pool.num_clean) == (4, 2)
    assert take(pool) == [clean[1]]
    filling = pool.take(2, HoldKind.FILL, PageState.FILLING)
    assert not any(page.poisoned for page in filling)
    assert pool.take_to_clean() is None
    (last,) = pool.take(1, HoldKind.FILL, PageState.FILLING)
    assert last is clean[0]
    assert last.poisoned
    pool.release(last, HoldKind.FILL)
    assert not last.poisoned


def test_kv_page_is_freed_with_its_last_hold_only() -> None:
    pool, freed = make_pool()
    (page,) = take(pool)
    generation = page.generation
    pool.hold(page, generation, HoldKind.UPLOAD)
    pool.release(page, HoldKind.SEQUENCE)
    assert not freed
    pool.release(page, HoldKind.UPLOAD)
    assert freed == [page.index]


def test_kv_page_release_without_hold_raises_hold_violation() -> None:
    pool, _ = make_pool()
    (page,) = take(pool)
    with pytest.raises(HoldViolation):
        pool.release(page, HoldKind.UPLOAD)


def test_kv_page_hold_after_it_was_freed_raises_hold_violation() -> None:
    pool, _ = make_pool()
    (page,) = take(pool)
    generation = page.generation
    pool.release(page, HoldKind.SEQUENCE)
    with pytest.raises(HoldViolation):
        pool.hold(page, generation, HoldKind.UPLOAD)


def test_kv_page_hold_of_an_older_generation_raises_hold_violation() -> None:
    pool, _ = make_pool(1)
    (page,) = take(pool)
    generation = page.generation
    pool.release(page, HoldKind.SEQUENCE)
    assert take(pool) == [page]
    with pytest.raises(HoldViolation):
        pool.hold(page, generation, HoldKind.UPLOAD)


def test_kv_pool_too_few_pages_raises_capacity_error_and_takes_none() -> None:
    pool, _ = make_pool(3)
    take(pool)
    with pytest.raises(CapacityError) as raised:
        take(pool, 3)
    assert (raised.value.needed, raised.value.free, pool.num_free) == (3, 2, 2)


def test_kv_pool_sealed_page_without_holds_is_cached_and_findable() -> None:
    pool, _ = make_pool()
    (page,) = take(pool)
    pool.publish(page, b"a")
    pool.release(page, HoldKind.SEQUENCE)
    assert (pool.num_cached, pool.lookup(b"a")) == (1, page)


def test_kv_pool_evicts_the_page_released_longest_ago() -> None:
    pool, _ = make_pool(3)
    pages = take(pool, 3)
    for page, digest in zip(pages, (b"a", b"b", b"c"), strict=True):
        pool.publish(page, digest)
        pool.release(page, HoldKind.SEQUENCE)
    pool.lookup(b"a")
    assert take(pool) == [pages[1]]
    assert (pool.lookup(b"b"), pool.lookup(b"a")) == (None, pages[0])


def test_kv_pool_never_evicts_a_held_page() -> None:
    pool, _ = make_pool(1)
    (page,) = take(pool)
    pool.publish(page, b"a")
    pool.hold(page, page.generation, HoldKind.UPLOAD)
    pool.release(page, HoldKind.SEQUENCE)
    with pytest.raises(CapacityError):
        take(pool)


def test_kv_pool_never_evicts_a_cached_page_that_was_held_again() -> None:
    pool, _ = make_pool(1)
    (page,) = take(pool)
    pool.publish(page, b"a")
    pool.release(page, HoldKind.SEQUENCE)
    pool.hold(page, page.generation, HoldKind.SEQUENCE)
    with pytest.raises(CapacityError):
        take(pool)


def test_kv_pool_dropped_page_is_not_found_and_freed_with_its_last_hold() -> None:
    pool, freed = make_pool()
    (page,) = take(pool)
    pool.publish(page, b"a")
    pool.drop(page)
    assert pool.lookup(b"a") is None
    assert not freed
    pool.release(page, HoldKind.SEQUENCE)
    assert freed == [page.index]


def test_kv_pool_shared_page_in_one_step_is_held_per_sequence() -> None:
    pool, freed = make_pool()
    (page,) = take(pool)
    indices = np.array([page.index, page.index])
    generations = pool.hold_step(indices)
    pool.release(page, HoldKind.SEQUENCE)
    assert not freed
    pool.release_step(indices, generations)
    assert freed == [page.index]


def test_kv_pool_step_hold_lost_raises_hold_violation() -> None:
    pool, _ = make_pool()
    (page,) = take(pool)
    indices = np.array([page.index])
    generations = pool.hold_step(indices)
    pool.release_step(indices, generations)
    with pytest.raises(HoldViolation):
        pool.release_step(indices, generations)


def test_kv_pool_page_reused_under_a_step_raises_hold_violation() -> None:
    pool, _ = make_pool(1)
    (page,) = take(pool)
    indices = np.array([page.index])
    generations = pool.hold_step(indices)
    pool.release(page, HoldKind.STEP)
    pool.release(page, HoldKind.SEQUENCE)
    take(pool)
    pool.hold_step(indices)
    with pytest.raises(HoldViolation):
        pool.release_step(indices, generations)


def test_kv_pool_holds_from_many_threads_add_up() -> None:
    pool, freed = make_pool()
    (page,) = take(pool)
    generation = page.generation

    def hold_and_release() -> None:
        for _ in range(500):
            pool.hold(page, generation, HoldKind.UPLOAD)
            pool.release(page, HoldKind.UPLOAD)

    threads = [threading.Thread(target=hold_and_release) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not freed
    assert pool.num_held(HoldKind.UPLOAD) == 0
