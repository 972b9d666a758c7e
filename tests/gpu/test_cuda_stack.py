"""The whole stack on one GPU that two worker processes share: moved, killed in mid-reply, spoken to through HTTP.

TEST_MODEL=model.gguf python -m pytest tests/gpu/test_cuda_stack.py      (default: the default model)
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deploy.model_fetch import default_model_path
from deploy.stack import Stack
from tests.gpu.lab import device_missing
from tests.moving import check_moved, moving_stack

MODEL = Path(os.environ.get("TEST_MODEL") or default_model_path())
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(200),
    pytest.mark.skipif(bool(device_missing()), reason=device_missing() or "a device"),
    pytest.mark.skipif(not MODEL.exists(), reason="the default model is not there: kvalet model fetch"),
]


def settings_of(kv_format: str) -> dict[str, Any]:
    return {"kv_format": kv_format, "model_name": "test", "backend": "cuda", "mirror_mib": 512, "device_kv_mib": 512}


@pytest.mark.parametrize("kv_format", ["k8v4", "f16"])
def test_default_model_moved_between_cuda_workers_says_the_same(kv_format: str) -> None:
    settings = settings_of(kv_format)
    with moving_stack(MODEL, **settings) as stack:
        workers = httpx.get(f"{stack.base_url}/workers", timeout=10).json()["data"]
        assert all(re.fullmatch(r"\S.*, GPU-[0-9a-f-]{36}", worker["device"]) for worker in workers), workers
        check_moved(stack, MODEL, 6, 64, **settings)


def ask(stack: Stack, **changes: Any) -> Any:
    client = openai.OpenAI(base_url=stack.base_url, api_key="local")
    body = {"model": "test", "messages": [{"role": "user", "content": "Count the ships in the harbour."}], **changes}
    return client.chat.completions.create(**body)


def kill_the_busy_worker(stack: Stack) -> None:
    busy: list[str] = []
    deadline = time.monotonic() + 1
    while not busy and time.monotonic() < deadline:
        rows = httpx.get(f"{stack.base_url}/workers", timeout=10).json()["data"]
        busy = [row["id"] for row in rows if row["free"] < row["slots"]]
    assert busy, "not exercised: the reply was over"
    os.kill(stack.pids()[busy[0]], signal.SIGKILL)


def test_stream_goes_on_when_its_cuda_worker_is_killed() -> None:
    options = {"kvalet": {"ignore_eos": True}}
    body = {"max_tokens": 1800, "temperature": 1.0, "seed": 5, "stream": True, "extra_body": options}
    with moving_stack(MODEL, **settings_of("k8v4"), heartbeat_s=0.2, lease_s=3) as stack:
        whole = "".join(choice.delta.content or "" for part in ask(stack, **body) for choice in part.choices)
        pieces: list[str] = []
        killed_at, longest, last = 0.0, 0.0, time.monotonic()
        for part in ask(stack, **body):
            pieces.extend(choice.delta.content or "" for choice in part.choices)
            now = time.monotonic()
            longest, last = max(longest, now - last) if killed_at else 0.0, now
            # Early: a GPU is far ahead of what a client has read.
            if not killed_at and len(pieces) >= 50:
                kill_the_busy_worker(stack)
                killed_at = now
        assert killed_at, "not exercised: the reply was over"
        assert longest > 0.3, "not exercised: no gap"
        assert "".join(pieces) == whole
        assert longest < 20
