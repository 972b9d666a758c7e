"""The command's own HTTP client: events as they are framed, faults as one error."""

from __future__ import annotations

import json

import pytest

from deploy.api import Event, parse_events
from deploy.errors import ServiceError


def lines(*text: str) -> list[str]:
    return list(text)


def test_event_with_name_and_data_is_parsed() -> None:
    stream = lines("event: a.b", "id: 7", 'data: {"x": 1}', "", "data: [DONE]", "")
    assert list(parse_events(iter(stream))) == [Event("a.b", {"x": 1})]


def test_heartbeat_comments_are_skipped() -> None:
    assert list(parse_events(iter(lines(": ping", "", ": ping", "")))) == []


def test_name_does_not_leak_into_the_next_event() -> None:
    stream = lines("event: a", "data: {}", "", "data: {}", "")
    assert [event.name for event in parse_events(iter(stream))] == ["a", "message"]


def test_error_in_a_stream_is_raised() -> None:
    body = json.dumps({"error": {"message": "boom"}})
    with pytest.raises(ServiceError, match="boom"):
        list(parse_events(iter(lines(f"data: {body}", ""))))


@pytest.mark.parametrize("data", ["{", "[1]"])
def test_data_that_is_no_object_is_raised(data: str) -> None:
    with pytest.raises(ServiceError):
        list(parse_events(iter(lines(f"data: {data}", ""))))
