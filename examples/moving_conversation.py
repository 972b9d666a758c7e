"""A named conversation that is forced to another worker at each turn (loopback or an admin key)."""

from __future__ import annotations

import os

import httpx
import openai

base_url = os.environ.get("KVALET_BASE_URL", "http://127.0.0.1:8000/v1")
key = os.environ.get("OPENAI_API_KEY", "none")
client = openai.OpenAI(base_url=base_url, api_key=key)
listed = httpx.get(f"{base_url}/workers", headers={"Authorization": f"Bearer {key}"}).json()
workers = [worker["id"] for worker in listed["data"]]
model = client.models.list().data[0].id
conversation = client.conversations.create()

questions = (
    "My sister Ada keeps bees on a roof in Oslo. Write four sentences about her.",
    "What does she keep?",
    "In which city?",
    "What is her name?",
)
for number, question in enumerate(questions):
    response = client.responses.create(
        model=model,
        input=question,
        conversation=conversation.id,
        max_output_tokens=100,
        temperature=0,
        extra_body={"kvalet": {"worker": workers[number % len(workers)]}},
    )
    ran = response.model_extra["kvalet"] if response.model_extra else {}
    usage = response.usage
    cached = usage.input_tokens_details.cached_tokens if usage else 0
    print(f"> {question}\n{response.output_text}")
    print(f"[{ran.get('worker_id')}: {cached} tokens cached, restored in {ran.get('restore_ms')} ms]\n")
