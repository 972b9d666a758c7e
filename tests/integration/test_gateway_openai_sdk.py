"""The unmodified OpenAI SDK against a real gateway on a real Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from tests.gateway_fleet import MODEL, FakeWorker, Script, SharedStack, shared_stack

TEXT = "the quick brown fox"
HI = [{"role": "user", "content": TEXT}]


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedStack]:
    with shared_stack() as running:
        yield running


@pytest.fixture
def worker(shared: SharedStack) -> FakeWorker:
    return shared.fresh_worker()


@pytest.fixture
def url(shared: SharedStack, worker: FakeWorker) -> str:
    return shared.url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as sdk:
        yield sdk


def test_sdk_chat_completion_is_whole(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=HI)
    assert reply.choices[0].message.content == TEXT
    assert (reply.choices[0].finish_reason, reply.usage.total_tokens) == ("stop", 9)
    assert reply.usage.prompt_tokens_details.cached_tokens == 3
    assert reply.kvalet["worker_id"] == "w1"


def test_sdk_chat_stream_gives_the_same_text(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=HI, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == TEXT
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]


def test_sdk_chat_choices_come_back_in_order(client: openai.OpenAI, worker: FakeWorker) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=HI, n=3)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert sorted(request.sampling["choice"] for request in worker.seen if "choice" in request.sampling) == [1, 2]


def test_sdk_chat_logprobs_are_objects(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=HI, logprobs=True, top_logprobs=2)
    assert [entry.token for entry in reply.choices[0].logprobs.content] == ["the ", "quick ", "brown ", "fox"]
    assert len(reply.choices[0].logprobs.content[0].top_logprobs) == 2


def test_sdk_response_is_whole_and_can_be_read_again(client: openai.OpenAI) -> None:
    reply = client.responses.create(model=MODEL, input=TEXT, metadata={"a": "b"}, instructions="be brief")
    again = client.responses.retrieve(reply.id)
    assert (reply.output_text, reply.status) == (TEXT, "completed")
    assert (again.output_text, again.metadata, again.instructions) == (TEXT, {"a": "b"}, "be brief")


def test_sdk_response_stream_ends_completed(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model=MODEL, input=TEXT, stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == TEXT
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert events[-1].response.output_text == TEXT


def test_sdk_response_stream_helper_accumulates(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input=TEXT) as stream:
        final = stream.get_final_response()
    assert final.output_text == TEXT


def test_sdk_response_in_background_is_polled(client: openai.OpenAI) -> None:
    reply = client.responses.create(model=MODEL, input=TEXT, background=True)
    assert reply.status in ("queued", "in_progress")
    while reply.status in ("queued", "in_progress"):
        reply = client.responses.retrieve(reply.id)
    assert (reply.status, reply.output_text) == ("completed", TEXT)


def test_sdk_response_in_background_is_cancelled(client: openai.OpenAI, worker: FakeWorker) -> None:
    worker.script = lambda _: Script(("x ",) * 1000, pause_s=0.02)
    reply = client.responses.create(model=MODEL, input=TEXT, background=True)
    assert client.responses.cancel(reply.id).status == "cancelled"
    assert client.responses.retrieve(reply.id).status == "cancelled"


def test_sdk_response_continues_by_id(client: openai.OpenAI, worker: FakeWorker) -> None:
    first = client.responses.create(model=MODEL, input="one")
    second = client.responses.create(model=MODEL, input="two", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert worker.seen[-1].messages == ({"role": "user", "content": "two"},)


def test_sdk_response_stream_resumes_after_any_number(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model=MODEL, input=TEXT, stream=True, background=True))
    for after in (0, 3, 5, len(events) - 2):
        rest = list(client.responses.retrieve(events[0].response.id, stream=True, starting_after=after))
        assert [e.sequence_number for e in rest] == list(range(after + 1, len(events)))


def test_sdk_response_deleted_is_gone(client: openai.OpenAI) -> None:
    reply = client.responses.create(model=MODEL, input=TEXT)
    client.responses.delete(reply.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(reply.id)


def test_sdk_response_input_items_are_listed(client: openai.OpenAI) -> None:
    reply = client.responses.create(model=MODEL, input=TEXT, instructions="be brief")
    items = client.responses.input_items.list(reply.id)
    assert [(item.role, item.content[0].text) for item in items.data] == [("user", TEXT)]


def test_sdk_conversation_holds_its_turns(client: openai.OpenAI) -> None:
    conversation = client.conversations.create(metadata={"a": "b"})
    client.responses.create(model=MODEL, input="one", conversation=conversation.id)
    client.responses.create(model=MODEL, input="two", conversation=conversation.id)
    items = client.conversations.items.list(conversation.id, order="asc")
    texts = [(item.role, item.content[0].text) for item in items]
    assert texts == [("user", "one"), ("assistant", "one"), ("user", "two"), ("assistant", "two")]


def test_sdk_conversation_items_page_by_page(client: openai.OpenAI) -> None:
    conversation = client.conversations.create()
    for text in ("one", "two", "three"):
        client.responses.create(model=MODEL, input=text, conversation=conversation.id)
    texts = [item.content[0].text for item in client.conversations.items.list(conversation.id, order="asc", limit=2)]
    assert texts == ["one", "one", "two", "two", "three", "three"]


def test_sdk_conversation_starts_with_items(client: openai.OpenAI, worker: FakeWorker) -> None:
    items = [{"type": "message", "role": "user", "content": "before"}]
    conversation = client.conversations.create(items=items)
    client.responses.create(model=MODEL, input="now", conversation=conversation.id)
    assert [message["content"] for message in worker.seen[-1].messages] == ["before", "now"]


def test_sdk_conversation_is_updated_and_deleted(client: openai.OpenAI) -> None:
    conversation = client.conversations.create(metadata={"a": "b"})
    client.conversations.update(conversation.id, metadata={"c": "d"})
    assert client.conversations.retrieve(conversation.id).metadata == {"c": "d"}
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)


def test_sdk_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "kvalet"


def test_sdk_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nonsense", messages=HI)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_sdk_completions_are_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="/v1/completions is not served"):
        client.completions.create(model=MODEL, prompt="x")


def test_sdk_async_streams_run_side_by_side(url: str) -> None:
    async def one(client: openai.AsyncOpenAI, text: str) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text}], stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def everyone() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, f"number {n} of many") for n in range(12)))

    assert asyncio.run(everyone()) == [f"number {n} of many" for n in range(12)]
