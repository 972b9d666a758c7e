"""Token counts and the `kvalet` extension object, from a terminal event's usage and info."""

from __future__ import annotations

from typing import Any

from workers.turns.events import TurnEvent

_COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens")


def chat_usage(usages: list[dict[str, Any]]) -> dict[str, Any]:
    """OpenAI's chat usage over the choices of one request: they share a prompt, which counts once."""
    prompt = max((_count(usage, "prompt_tokens") for usage in usages), default=0)
    completion = sum(_count(usage, "completion_tokens") for usage in usages)
    cached = max((_count(usage, "cached_tokens") for usage in usages), default=0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def response_usage(usage: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's usage of a response."""
    prompt, completion = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": _count(usage, "cached_tokens"), "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }


def extension(turn_id: str, usage: dict[str, Any], info: dict[str, Any]) -> dict[str, Any]:
    """The `kvalet` object: who ran the turn and what was restored; everything the worker reports beyond the counts."""
    details = {key: value for key, value in usage.items() if key not in _COUNTS}
    return {"turn_id": turn_id, **details, **info}


def extension_of(turn_id: str, terminal: TurnEvent) -> dict[str, Any]:
    """`extension` of a terminal event."""
    return extension(turn_id, terminal.usage, terminal.info)


def _count(usage: dict[str, Any], name: str) -> int:
    return int(usage.get(name) or 0)
