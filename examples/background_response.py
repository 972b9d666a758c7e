"""A response that runs without its client: create it, go away, poll, read."""

from __future__ import annotations

import os
import time

import openai

client = openai.OpenAI(
    base_url=os.environ.get("KVALET_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id
response = client.responses.create(
    model=model,
    input="Write a short story about a lost key.",
    max_output_tokens=150,
    temperature=0,
    background=True,
)
print(response.id, response.status)
while response.status in ("queued", "in_progress"):
    time.sleep(0.5)
    response = client.responses.retrieve(response.id)
    print(response.status)
print(response.output_text)
