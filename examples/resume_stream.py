"""A stream that breaks off and goes on after the last event that was read, on any gateway process."""

from __future__ import annotations

import os

import openai

client = openai.OpenAI(
    base_url=os.environ.get("KVALET_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id
stream = client.responses.create(
    model=model, input="Count from one to twenty in words.", max_output_tokens=120, stream=True, background=True
)
response_id, last_number, text = "", -1, ""
for event in stream:
    last_number = event.sequence_number
    if event.type == "response.created":
        response_id = event.response.id
    if event.type == "response.output_text.delta":
        text += event.delta
    if last_number == 9:
        stream.close()
        break
print(f"{text}\n-- broken off after event {last_number} --")

for event in client.responses.retrieve(response_id, stream=True, starting_after=last_number):
    if event.type == "response.output_text.delta":
        text += event.delta
print(text)
