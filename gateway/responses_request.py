"""`POST /v1/responses`: the body, checked, and what it asks for."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from gateway.chat_request import TextPart, text_of
from gateway.errors import InvalidRequest, InvalidValue, UnsupportedField
from gateway.fields import Metadata, Penalty, RequestModel, TokenCount, check_metadata, parse, refuse_extras
from gateway.sampling_fields import Generation, SamplingFields, generation_of, stops_of, top_logprobs_of

_TEXT = {"type": "text"}
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "access_programs": (), "background_options": (), "chat_template": (), "context_management": (), "image": (),
    "max_tool_calls": (), "moderation": (), "parallel_tool_calls": (True,), "prompt": (), "prompt_cache_options": (),
    "prompt_cache_retention": (), "reasoning": ({},), "service_tier": ("auto", "default"),
    "text": ({}, {"format": _TEXT}, {"format": _TEXT, "verbosity": "medium"}, {"verbosity": "medium"}),
    "tool_choice": ("none", "auto"), "tools": ([],), "truncation": ("disabled",),
}  # fmt: skip
_INCLUDABLE = "message.output_text.logprobs"
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class InputItem(RequestModel):
    """One item of `input`. Only messages are served; `id` and `status` of items that were handed out are ignored."""

    type: str = "message"
    role: str | None = None
    content: str | list[TextPart] | None = None
    id: str | None = None
    status: str | None = None


class ConversationRef(RequestModel):
    """A conversation named by an object."""

    id: str


class ResponsesStreamOptions(RequestModel):
    """What a stream adds. Nothing is obfuscated, so both values are honoured."""

    include_obfuscation: bool | None = None


class ResponsesBody(SamplingFields):
    """Fields of a response that are served."""

    model: str
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    background: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationRef | None = None
    max_output_tokens: TokenCount | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None
    metadata: Metadata | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None


class ResponsesRequest:
    """A checked response request. conversation_id and parent_id exclude each other."""

    __slots__ = ("background", "body", "conversation_id", "generation", "messages", "parent_id", "stops", "store")

    def __init__(self, body: ResponsesBody, max_messages: int) -> None:
        """Check what needs more than one field.

        Raises InvalidRequest or UnsupportedField naming the field.
        """
        self.body = body
        self.parent_id = body.previous_response_id
        self.conversation_id = _conversation_id(body.conversation)
        if self.parent_id is not None and self.conversation_id is not None:
            raise InvalidValue("previous_response_id", "'previous_response_id' and 'conversation' exclude each other")
        self.store = True if body.store is None else body.store
        self.background = bool(body.background)
        if self.background and not self.store:
            raise InvalidValue("background", "'background': true needs 'store': true")
        if self.conversation_id is not None and not self.store:
            raise InvalidValue("store", "'conversation' needs 'store': true")
        check_metadata(body.metadata)
        self.messages = input_messages(body.input, max_messages)
        self.stops = stops_of(body.stop)
        self.generation: Generation = generation_of(
            body,
            seed=body.seed,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=body.logit_bias,
            logprobs=_logprobs(body),
        )

    @property
    def stream(self) -> bool:
        """Whether the reply comes as server-sent events."""
        return bool(self.body.stream)


def parse_responses(body: dict[str, Any], max_messages: int) -> ResponsesRequest:
    """Check a response request's body. Raises InvalidRequest or UnsupportedField naming the field."""
    return ResponsesRequest(parse(ResponsesBody, body, _UNSERVED), max_messages)


def input_messages(items: str | list[InputItem] | None, max_messages: int) -> tuple[dict[str, Any], ...]:
    """The request's own messages as plain role and content.

    Raises InvalidRequest for no or too many items, an unknown role, an item or content that is no text message.
    """
    if isinstance(items, str):
        return ({"role": "user", "content": items},)
    if not items:
        raise InvalidRequest("'input' is required", code="missing_required_parameter", param="input")
    if len(items) > max_messages:
        raise InvalidValue("input", f"'input' has {len(items)} items, the limit is {max_messages}")
    return tuple(plain_item(item, f"input[{index}]") for index, item in enumerate(items))


def plain_item(item: InputItem, where: str) -> dict[str, Any]:
    """One item as role and content. Raises InvalidRequest or UnsupportedField."""
    if item.type != "message":
        raise UnsupportedField(f"{where}.type", item.type, "allowed: message")
    role = _ROLES.get(item.role or "")
    if role is None:
        raise InvalidValue(
            f"{where}.role", f"'{where}.role' = {(item.role or '')[:40]!r} is not one of {', '.join(_ROLES)}"
        )
    refuse_extras(item, where, frozenset({"phase"}))
    if item.content is None:
        raise InvalidValue(f"{where}.content", f"'{where}.content' must be a string or a list of text parts")
    return {"role": role, "content": text_of(item.content, f"{where}.content", ("input_text", "output_text", "text"))}


def _conversation_id(reference: str | ConversationRef | None) -> str | None:
    if isinstance(reference, ConversationRef):
        refuse_extras(reference, "conversation")
        return reference.id
    return reference


def _logprobs(body: ResponsesBody) -> int | None:
    for name in body.include or []:
        if name != _INCLUDABLE:
            raise UnsupportedField("include", name, f"allowed: {_INCLUDABLE}")
    if body.include:
        return top_logprobs_of(body.top_logprobs, "top_logprobs")
    if body.top_logprobs:
        raise InvalidValue("top_logprobs", f"'top_logprobs' needs '{_INCLUDABLE}' in 'include'")
    return None
