"""`POST /v1/chat/completions`: the body, checked, and what it asks for."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from gateway.errors import InvalidValue, UnsupportedField
from gateway.fields import Metadata, Penalty, RequestModel, TokenCount, check_metadata, parse, refuse_extras
from gateway.sampling_fields import Generation, SamplingFields, generation_of, stops_of, top_logprobs_of

_UNSERVED: dict[str, tuple[Any, ...]] = {
    "audio": (), "best_of": (1,), "chat_template": (), "echo": (False,), "function_call": ("none",), "functions": ([],),
    "guided_json": (), "guided_regex": (), "guided_choice": (), "modalities": (["text"],), "moderation": (),
    "parallel_tool_calls": (True,), "prediction": (), "prompt": (), "prompt_cache_options": (),
    "prompt_cache_retention": (), "reasoning_effort": (), "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"), "store": (False,), "tool_choice": ("none", "auto"), "tools": ([],),
    "verbosity": ("medium",), "web_search_options": (),
}  # fmt: skip
_EMPTY_IN_MESSAGES = frozenset({"refusal", "annotations", "audio", "function_call", "tool_calls", "name"})
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class TextPart(RequestModel):
    """One part of a message's content. Only text is served."""

    type: str
    text: str | None = None


class ChatMessage(RequestModel):
    """One message of the history."""

    role: str
    content: str | list[TextPart] | None = None


class StreamOptions(RequestModel):
    """What a stream adds."""

    include_usage: bool = False


class ChatBody(SamplingFields):
    """Fields of a chat completion that are served."""

    model: str
    messages: list[ChatMessage]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    metadata: Metadata | None = None


class ChatRequest:
    """A checked chat completion: the body with everything derived from it."""

    __slots__ = ("body", "generation", "logprobs", "max_tokens", "messages", "num_choices", "stops")

    def __init__(self, body: ChatBody, max_choices: int, max_messages: int) -> None:
        """Check what needs more than one field.

        Raises InvalidRequest or UnsupportedField naming the field.
        """
        self.body = body
        self.messages = chat_messages(body.messages, max_messages)
        self.num_choices = body.n or 1
        if self.num_choices > max_choices:
            raise InvalidValue("n", f"'n' = {body.n} is more than {max_choices}")
        self.max_tokens = _max_tokens(body)
        self.stops = stops_of(body.stop)
        self.logprobs = _logprobs(body)
        check_metadata(body.metadata)
        if body.stream_options is not None:
            if not body.stream:
                raise InvalidValue("stream_options", "'stream_options' needs 'stream': true")
            refuse_extras(body.stream_options, "stream_options")
        self.generation: Generation = generation_of(
            body,
            seed=body.seed,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=body.logit_bias,
            logprobs=self.logprobs,
        )

    @property
    def stream(self) -> bool:
        """Whether the reply comes as server-sent events."""
        return bool(self.body.stream)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.body.stream_options and self.body.stream_options.include_usage)


def parse_chat(body: dict[str, Any], max_choices: int, max_messages: int) -> ChatRequest:
    """Check a chat completion's body. Raises InvalidRequest or UnsupportedField naming the field."""
    return ChatRequest(parse(ChatBody, body, _UNSERVED), max_choices, max_messages)


def chat_messages(messages: list[ChatMessage], max_messages: int) -> tuple[dict[str, Any], ...]:
    """The history as plain role and content; text parts are joined by line ends.

    Raises InvalidRequest for no or too many messages, an unknown role, or content that is not text.
    """
    if not 1 <= len(messages) <= max_messages:
        raise InvalidValue("messages", f"'messages' has {len(messages)} entries, the limits are 1 and {max_messages}")
    return tuple(_plain(message, f"messages[{index}]") for index, message in enumerate(messages))


def _plain(message: ChatMessage, where: str) -> dict[str, Any]:
    role = _ROLES.get(message.role)
    if role is None:
        if message.role in ("tool", "function"):
            raise UnsupportedField(f"{where}.role", message.role, "tools are not served")
        raise InvalidValue(f"{where}.role", f"'{where}.role' = {message.role[:40]!r} is not one of {', '.join(_ROLES)}")
    refuse_extras(message, where, _EMPTY_IN_MESSAGES)
    if message.content is None:
        raise InvalidValue(f"{where}.content", f"'{where}.content' must be a string or a list of text parts")
    return {"role": role, "content": text_of(message.content, f"{where}.content", ("text",))}


def text_of(content: str | list[TextPart], where: str, types: tuple[str, ...]) -> str:
    """The text of a content. Raises UnsupportedField for a part that is no text of the given types."""
    if isinstance(content, str):
        return content
    if not content:
        raise InvalidValue(where, f"'{where}' has no parts")
    texts: list[str] = []
    for index, part in enumerate(content):
        if part.type not in types:
            raise UnsupportedField(f"{where}[{index}].type", part.type, f"allowed: {', '.join(types)}")
        if part.text is None:
            raise InvalidValue(f"{where}[{index}].text", f"'{where}[{index}].text' is missing")
        refuse_extras(part, f"{where}[{index}]", frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"}))
        texts.append(part.text)
    return "\n".join(texts)


def _max_tokens(body: ChatBody) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidValue("max_tokens", f"'max_tokens' = {old} and 'max_completion_tokens' = {new} differ")
    return old if new is None else new


def _logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidValue("top_logprobs", "'top_logprobs' needs 'logprobs': true")
    return top_logprobs_of(body.top_logprobs, "top_logprobs") if body.logprobs else None
