"""Options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

KEYS_VARIABLE = "KVALET_GATEWAY_KEYS_FILE"

BaseUrl = Annotated[
    str | None,
    typer.Option("--url", envvar="KVALET_BASE_URL", help="Base URL of a service; default: of `kvalet up` on --data."),
]
ApiKey = Annotated[str | None, typer.Option("--api-key", envvar="KVALET_API_KEY", help="API key, if keys are in use.")]
Model = Annotated[Path | None, typer.Option("--model", help="GGUF file or safetensors folder; default: SmolLM2.")]
KvFormat = Annotated[str | None, typer.Option("--kv", help="Cache format: f16, int8, q4 or k8v4.")]
Keys = Annotated[
    Path | None, typer.Option("--keys", envvar=KEYS_VARIABLE, help="API keys, to listen beyond loopback.")
]
Data = Annotated[
    Path | None, typer.Option("--data", envvar="KVALET_DATA", help="Folder of a stack's data, logs and pid files.")
]
Control = Annotated[str | None, typer.Option("--control", help="URL of an existing control server.")]
Pages = Annotated[str | None, typer.Option("--pages", help="URL of an existing pages server.")]
Slots = Annotated[int | None, typer.Option("--slots", help="Turns that one worker runs at once.")]
Threads = Annotated[int | None, typer.Option("--threads", help="Compute threads of one worker.")]
MirrorMib = Annotated[int | None, typer.Option("--mirror-mib", help="MiB of mirror memory of one worker.")]
Context = Annotated[int | None, typer.Option("--context", help="Longest conversation in tokens.")]
Backend = Annotated[str | None, typer.Option("--backend", help="cpu, cuda or simulated.")]
Weights = Annotated[
    str | None, typer.Option("--weights", help="How to keep weights: auto, f32 (CPU), bf16, int8 or int4 (GPU).")
]
Device = Annotated[str | None, typer.Option("--device", help="GPU of a worker: its number or its UUID.")]
DeviceKvMib = Annotated[
    int | None, typer.Option("--device-kv-mib", help="MiB of GPU memory for pages; default: what is free.")
]
Draft = Annotated[
    str | None, typer.Option("--draft", help="Guess the next tokens and verify them in one step: off or suffix.")
]
DraftRows = Annotated[int | None, typer.Option("--draft-rows", help="Guessed tokens of a turn in one step, 1 to 8.")]
SuffixMinMatch = Annotated[
    int | None, typer.Option("--suffix-min-match", help="Tokens that must occur again before suffix drafting guesses.")
]
Restore = Annotated[str | None, typer.Option("--restore", help="auto, always or never.")]
AcceptNumerics = Annotated[
    str | None, typer.Option("--accept-numerics", help="Whose pages to reuse: own, any, or numerics ids (a,b).")
]
Attest = Annotated[str | None, typer.Option("--attest", help="always, sampled or off.")]
