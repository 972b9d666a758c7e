"""Lives of pages fall with their depth."""

from __future__ import annotations

from snapshot_store.ttl import ttl_for_depth, ttls_for_pages


def test_ttl_of_the_first_page_is_the_base() -> None:
    assert ttl_for_depth(86_400, 0) == 86_400


def test_ttl_never_rises_with_depth() -> None:
    lives = [ttl_for_depth(86_400, index) for index in range(4000)]
    assert lives == sorted(lives, reverse=True)


def test_ttl_of_a_deep_page_is_shorter_than_of_the_head() -> None:
    assert ttl_for_depth(86_400, 64) < ttl_for_depth(86_400, 0) - 3600


def test_ttl_of_the_deepest_page_is_at_least_half() -> None:
    assert ttl_for_depth(86_400, 10**6) >= 43_200


def test_ttl_of_a_tiny_base_is_a_second() -> None:
    assert ttl_for_depth(1, 10_000) == 1


def test_ttls_of_consecutive_pages_are_those_of_their_depths() -> None:
    assert ttls_for_pages(86_400, 5, 3) == [ttl_for_depth(86_400, index) for index in (5, 6, 7)]
