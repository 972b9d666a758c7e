"""C41: clients that split lines on U+2028, U+0085, VT, FF or 1C-1E cut the JSON inside an SSE frame.

Reported for codex-lb (#1010), httpx-sse (#34), dify (PR#39008): terminal events are missed. Here the JSON of a frame
is pure ASCII, so that every way to split lines finds the same frames.
"""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from tests.gateway_fleet import MODEL, FakeWorker, Script, chat_body, frames_of, stack
from tests.services import ValkeyServer

MARKS = "\u2028\u2029\u0085\v\f\x1c\x1d\x1e\r\n\r\n\0\ufeffé漢👩‍👩‍👧"
PIECES = tuple(f"a{mark}b" for mark in MARKS)


@pytest.mark.parametrize("lines", [str.splitlines, lambda text: text.split("\n")], ids=["splitlines", "lf"])
def test_c41_every_reader_finds_all_frames(control_server: ValkeyServer, lines: Callable[[str], list[str]]) -> None:
    with stack(control_server, FakeWorker(control_server, script=lambda _: Script(PIECES))) as url:
        chat = httpx.post(f"{url}/v1/chat/completions", json=chat_body("".join(PIECES), stream=True)).content
        response = httpx.post(f"{url}/v1/responses", json={"model": MODEL, "input": "x", "stream": True}).content
    chunks = frames_of(chat.decode("ascii"), lines)
    text = "".join(frame.json["choices"][0]["delta"].get("content") or "" for frame in chunks[:-1])
    assert (text, chunks[-1].data) == ("".join(PIECES), "[DONE]")
    assert frames_of(response.decode("ascii"), lines)[-1].json["response"]["status"] == "completed"
