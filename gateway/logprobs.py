"""Log probabilities of delivered tokens in the two shapes that OpenAI uses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

IMPOSSIBLE = -9999.0


def chat_logprobs(entries: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""
    return {"content": token_logprobs(entries), "refusal": None}


def token_logprobs(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One object per token with its alternatives, as in chat's `content` and in a response's output text."""
    return [
        {
            **_token(entry["token"], entry["logprob"]),
            "top_logprobs": [_token(token, logprob) for _, token, logprob in entry.get("top") or ()],
        }
        for entry in entries
    ]


def _token(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": _finite(logprob), "bytes": list(token.encode("utf-8"))}


def _finite(logprob: float) -> float:
    """JSON has no infinity; a token that cannot be drawn gets OpenAI's own stand-in."""
    return max(float(logprob), IMPOSSIBLE)
