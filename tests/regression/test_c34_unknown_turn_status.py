"""C34: the status of an unknown or expired task was "pending" for ever.

Reported for Celery result backends (celery/celery#4450, #3596 and applications on top): an id that nobody knows is
answered like one that waits. Here the record decides: an id without a record is not found.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.gateway_fleet import MODEL, SharedStack, shared_stack, wait_until

STREAM_TTL_S = 1


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedStack]:
    with shared_stack(stream_ttl_s=STREAM_TTL_S) as running:
        yield running


@pytest.fixture(scope="module")
def client(shared: SharedStack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shared.url, timeout=30) as http:
        yield http


@pytest.mark.parametrize(
    "turn_id",
    [
        "086c5e57-5258-4809-b1cc-78977cbed0f5", "resp_b18d181dc04140279e5910f4c75cd607", "..%2Fx", "resp_..%2Fx",
        "resp_x%00", "resp_", "chatcmpl-1",
    ],
)
def test_c34_unknown_id_is_404_for_every_call(client: httpx.Client, turn_id: str) -> None:
    path = f"/v1/responses/{turn_id}"
    answers = [client.get(path), client.get(f"{path}?stream=true"), client.post(f"{path}/cancel"), client.delete(path)]
    assert [answer.status_code for answer in answers] == [404] * 4
    assert all("error" in answer.json() for answer in answers)


def test_c34_expired_turn_is_404(client: httpx.Client) -> None:
    turn = client.post("/v1/responses", json={"model": MODEL, "input": "x", "store": False}).json()["id"]
    wait_until(lambda: client.get(f"/v1/responses/{turn}").status_code == 404, deadline_s=STREAM_TTL_S + 5)


def test_c34_stored_turn_outlives_its_stream_and_says_so(client: httpx.Client) -> None:
    turn = client.post("/v1/responses", json={"model": MODEL, "input": "x"}).json()["id"]
    wait_until(lambda: client.get(f"/v1/responses/{turn}?stream=true").status_code == 404, deadline_s=STREAM_TTL_S + 8)
    assert client.get(f"/v1/responses/{turn}?stream=true").json()["error"]["code"] == "stream_expired"
    assert client.get(f"/v1/responses/{turn}").json()["status"] == "completed"
