"""A parked conversation on another worker: restored, or recomputed.

python -m benchmarks.restore [MODEL] [--threads 2] [--kv k8v4] [--out FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks._fleet import fleet_of
from benchmarks._record import figure, write
from workers.settings import default_model_path

RESTORED_TOKENS, RESTORES = 4000, 3


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=default_model_path())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv", default="k8v4", help="format of the cache")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    settings = {"threads": arguments.threads, "kv_format": arguments.kv}
    write("restore", _figures(arguments.model, settings), arguments.out, **settings)


def _figures(model: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """A parked conversation of 4000 tokens: claim to the first new token, restored on another worker or recomputed."""
    restored, recomputed = [], []
    with fleet_of(model, settings) as fleet:
        fleet.worker("never", restore="never")
        for repeat in range(RESTORES):
            first = f"{repeat} " + "ledger " * (RESTORED_TOKENS - 64)
            conversation = fleet.conversation()
            fleet.say("writer", first, conversation_id=conversation, max_tokens=32)
            fleet.settle()
            view = fleet.say(f"reader{repeat}", "Go on.", conversation_id=conversation, max_tokens=4)
            assert view.usage["restored_pages"] > 0, "not exercised"
            restored.append(view.usage["first_token_ms"])
            view = fleet.say("never", "Go on.", conversation_id=conversation, max_tokens=4)
            assert view.usage["cached_tokens"] == 0 or repeat, "not exercised"
            recomputed.append(view.usage["first_token_ms"])
            fleet.stop(f"reader{repeat}")
    ratio = [b / a for a, b in zip(restored, recomputed, strict=True)]
    return [
        figure("4000 tokens restored", restored, "ms"),
        figure("4000 tokens recomputed", recomputed, "ms"),
        figure("recompute / restore", ratio, "times"),
    ]


if __name__ == "__main__":
    main()
