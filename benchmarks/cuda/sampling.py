"""Draws on a CUDA device beside the time that reading the logits once takes.

    python -m benchmarks.cuda.sampling [--json FILE]

Each figure is the median of graph replays, in microseconds for one step's draws. The replayed draws take their logits
from buffers in turn, together more than the second-level cache holds; a step's own logits, just written, may be nearer.
`floor` is one read of the logits at the copy bandwidth of the same run; launches are not in it. Logits are normal with
standard deviation 3: with top_p 0.9 some hundred ids are left of 128k.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks import _record
from gpu.plan import SamplingParams
from gpu.sampling import TokenHistory
from tests.gpu.draw_lab import DrawLab, random_logits, request
from tests.gpu.lab import Lab

ROWS = (1, 8, 32, 64)
VOCAB_SIZES = (128256, 262144)
SECOND_LEVEL_CACHE = 60e6
MAX_COPIES = 24
CASES = {
    "greedy": SamplingParams(0.0),
    "temperature": SamplingParams(0.8, seed=1),
    "top_p": SamplingParams(0.8, top_p=0.95, seed=2),
    "top_k, top_p, min_p": SamplingParams(0.8, top_k=50, top_p=0.95, min_p=0.02, seed=3),
    "top_p, logprobs": SamplingParams(0.8, top_p=0.95, logprobs=20, seed=4),
    "top_p, penalties": SamplingParams(0.8, top_p=0.95, presence_penalty=0.1, repetition_penalty=1.1, seed=5),
    "hot top_p": SamplingParams(2.0, top_p=0.95, seed=6),
    "cold top_k": SamplingParams(0.01, top_k=40, seed=7),
}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=_record.RESULTS / "cuda_sampling.json")
    arguments = parser.parse_args()
    lab = Lab()
    bandwidth = lab.copy_bandwidth()
    figures = [_record.figure("device copy", [bandwidth / 1e12], "TB/s")]
    for vocab_size in VOCAB_SIZES:
        figures += _measure(lab, vocab_size, ROWS if vocab_size == VOCAB_SIZES[0] else ROWS[-2:-1], bandwidth)
    _record.write("cuda.sampling", figures, arguments.json, device=lab.device.name, arch=lab.device.arch)
    lab.close()


def _measure(lab: Lab, vocab_size: int, row_counts: tuple[int, ...], bandwidth: float) -> list[dict[str, Any]]:
    draws, figures = DrawLab(lab, vocab_size), []
    for rows in row_counts:
        num_bytes = 4 * rows * vocab_size
        copies = min(MAX_COPIES, -(-int(2 * SECOND_LEVEL_CACHE) // num_bytes))
        first = lab.array(random_logits(rows, rows, vocab_size, 3.0))
        buffers = [first, *(lab.device.allocate(num_bytes) for _ in range(copies - 1))]
        for buffer in buffers[1:]:
            lab.device.copy_async(buffer.address, first.address, num_bytes, lab.stream)
        for name, params in CASES.items():
            histories = [TokenHistory(range(1000), range(500)) for _ in range(rows)]
            requests = [request(params, row, histories[row]) for row in range(rows)]
            _, general = draws.prepare(requests, None, None, rows)
            micros = lab.time_us(
                lambda stream, i, general=general, buffers=buffers, rows=rows: draws.record(
                    stream, rows, general=general, logits=buffers[i % len(buffers)].address
                ),
                max(copies, 8),
            )
            floor = num_bytes / bandwidth * 1e6
            figures.append(
                _record.figure(
                    name, [micros], "us", rows=rows, vocab_size=vocab_size, floor=round(floor, 2),
                    ratio=round(micros / floor, 2),
                )
            )  # fmt: skip
        lab.sync()
        for buffer in buffers:
            lab.device.free(buffer)
    return figures


if __name__ == "__main__":
    main()
