"""A streamed chat. The client resends the history; what did not change is not computed again."""

from __future__ import annotations

import os

import openai

client = openai.OpenAI(
    base_url=os.environ.get("KVALET_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id
history: list[dict[str, str]] = []

for question in ("Tell me in five sentences what a lighthouse is for.", "Which of these is the oldest use?"):
    history.append({"role": "user", "content": question})
    print(f"> {question}")
    stream = client.chat.completions.create(
        model=model,
        messages=history,  # type: ignore[arg-type]
        max_tokens=120,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    reply = ""
    for chunk in stream:
        if chunk.choices:
            piece = chunk.choices[0].delta.content or ""
            reply += piece
            print(piece, end="", flush=True)
        elif chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            cached = details.cached_tokens if details else 0
            print(f"\n[{chunk.usage.prompt_tokens} prompt tokens, {cached} of them from the cache]\n")
    history.append({"role": "assistant", "content": reply})
