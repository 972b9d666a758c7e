"""Writes results: raw samples, commit, command, machine. Used by the benchmarks of this folder."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def figure(name: str, raw: Sequence[float], unit: str, **facts: Any) -> dict[str, Any]:
    """One figure: the median of its raw samples. Printed as it is made."""
    median = statistics.median(raw)
    shown = " ".join(f"{key}={value}" for key, value in facts.items())
    print(f"{name:34} {median:12.3f} {unit:9} n={len(raw):<4} {shown}", flush=True)
    return {"name": name, "median": round(median, 4), "unit": unit, **facts, "raw": [round(v, 4) for v in raw]}


def write(module: str, figures: Sequence[dict[str, Any]], out: Path | None = None, **facts: Any) -> Path:
    """Write `results/<module>.json`."""
    path = out or RESULTS / f"{module}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "command": ["python", "-m", f"benchmarks.{module}", *(Path(word).name for word in sys.argv[1:])],
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "machine": {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)), "load_after": os.getloadavg()[0]},
        "python": platform.python_version(),
        **facts,
        "figures": list(figures),
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {path.name}")
    return path


def cpu_name() -> str:
    """The processor's own name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    """The commit of the sources; SOURCE_COMMIT where they are not in a clone."""
    if told := os.environ.get("SOURCE_COMMIT"):
        return told
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()
