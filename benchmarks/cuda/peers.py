"""The peer that is at hand on most machines, beside our figures: transformers with PyTorch, Llama-3 8B shape, bf16.

    python -m benchmarks.cuda.peers [--json FILE]

Random weights made on the device. Eager decode at 1k cells, prefill of 4096 tokens with scaled dot-product attention.
Needs `torch` and `transformers`, which Kvalet itself does not use.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import _record

PREFILL_TOKENS, CONTEXT, STEPS = 4096, 1024, 40
PACES = {"one at a time": 0.5, "back to back": 0.0}
"""Seconds before each prompt."""


def load() -> Any:
    """The model, in evaluation."""
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=131072, rope_theta=500_000.0,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        return transformers.LlamaForCausalLM(config).eval()


def measure(model: Any) -> list[dict[str, Any]]:
    """Prefill and decode, tokens per second."""
    ids = torch.randint(0, 128256, (1, PREFILL_TOKENS), device="cuda")
    prefill: dict[str, list[float]] = {pace: [] for pace in PACES}
    decode = []
    with torch.inference_mode():
        for pace, pause in PACES.items():
            for _ in range(6):
                time.sleep(pause)
                torch.cuda.synchronize()
                begun = time.perf_counter()
                model(ids, use_cache=True, logits_to_keep=1)
                torch.cuda.synchronize()
                prefill[pace].append(PREFILL_TOKENS / (time.perf_counter() - begun))
        answer = model(ids[:, :CONTEXT], use_cache=True, logits_to_keep=1)
        cache, token = answer.past_key_values, answer.logits[:, -1].argmax(-1, keepdim=True)
        for _ in range(STEPS):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            answer = model(token, past_key_values=cache, use_cache=True)
            cache, token = answer.past_key_values, answer.logits[:, -1].argmax(-1, keepdim=True)
            torch.cuda.synchronize()
            decode.append(1 / (time.perf_counter() - begun))
    return [
        *(
            _record.figure(f"transformers prefill {PREFILL_TOKENS}, {pace}", rates[2:], "tokens/s")
            for pace, rates in prefill.items()
        ),
        _record.figure(f"transformers decode 1 x {CONTEXT}", decode[5:], "tokens/s"),
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=_record.RESULTS / "cuda_peers.json")
    arguments = parser.parse_args()
    figures = measure(load())
    facts = {"torch": torch.__version__, "transformers": transformers.__version__}
    _record.write("cuda.peers", figures, arguments.json, device=torch.cuda.get_device_name(), **facts)


if __name__ == "__main__":
    main()
