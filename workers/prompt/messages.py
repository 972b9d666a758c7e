"""Checks chat messages and brings them into the one form that templates see."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from workers.prompt.errors import PromptError, ReservedText
from workers.prompt.tokenizer import Tokenizer

MAX_MESSAGES: Final = 10_000
MAX_CONTENT_CHARS: Final = 1 << 23
MAX_KWARGS: Final = 16
MAX_KWARGS_CHARS: Final = 4096

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
# What the builder itself gives to a template, or what would change how it is chosen.
RESERVED_KWARGS: Final = frozenset(
    {
        "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize", "template",
        "chat_template", "bos_token", "eos_token", "pad_token", "unk_token", "strftime_now", "raise_exception",
        "template_time", "contexts",
    }
)  # fmt: skip

_TEXT_PARTS: Final = ("text", "input_text", "output_text")
_OTHER_KEYS: Final = ("name", "tool_calls", "tool_call_id")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """content: the text that the template gets. token_ids: stored output ids that replace it in the prompt, or None.

    fields: everything else that the template gets, role included.
    """

    content: str
    token_ids: tuple[int, ...] | None
    fields: dict[str, Any]


def read_messages(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> list[ChatMessage]:
    """Check messages. Raises PromptError or ReservedText that names the message and field."""
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise PromptError("messages", len(messages), f"1 to {MAX_MESSAGES} messages")
    read = [_read_message(message, f"messages[{index}]", tokenizer) for index, message in enumerate(messages)]
    if (num_chars := sum(len(message.content) for message in read)) > MAX_CONTENT_CHARS:
        raise PromptError("messages", num_chars, f"at most {MAX_CONTENT_CHARS} characters in all")
    return read


def check_template_kwargs(kwargs: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Refuse what a request may not set. Raises PromptError or ReservedText that names the argument."""
    if len(kwargs) > MAX_KWARGS:
        raise PromptError("chat_template_kwargs", len(kwargs), f"at most {MAX_KWARGS} arguments")
    for name, value in kwargs.items():
        if name in RESERVED_KWARGS or not name.isidentifier() or name.startswith("_"):
            raise PromptError("chat_template_kwargs", name, "this argument cannot be set by a request")
        if (size := len(json.dumps(value))) > MAX_KWARGS_CHARS:
            raise PromptError(f"chat_template_kwargs.{name}", size, f"at most {MAX_KWARGS_CHARS} characters")
        check_template_text(value, f"chat_template_kwargs.{name}", tokenizer)


def check_template_text(value: Any, field: str, tokenizer: Tokenizer) -> None:
    """Refuse control token texts in values that become template text. Raises ReservedText or PromptError."""
    for text in _texts(value):
        check_encodable(text, field)
        if (found := tokenizer.find_control_text(text)) is not None:
            raise ReservedText(field, found, "is the text of a control token")


def check_encodable(text: str, field: str) -> None:
    """Refuse lone surrogates, which no UTF-8 text has. Raises PromptError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(field, text[error.start : error.end], "must be valid Unicode text") from None


def _read_message(message: Mapping[str, Any], field: str, tokenizer: Tokenizer) -> ChatMessage:
    role = message.get("role")
    if role not in ROLES:
        raise PromptError(f"{field}.role", role, f"one of {', '.join(ROLES)}")
    if unknown := message.keys() - {"role", "content", "token_ids", *_OTHER_KEYS}:
        raise PromptError(field, sorted(unknown), "unknown keys")
    token_ids = None if message.get("token_ids") is None else tuple(message["token_ids"])
    content = _read_content(message.get("content"), f"{field}.content")
    if token_ids is not None:
        # The ids hold the whole reply, calls and reasoning included.
        return ChatMessage(content or tokenizer.decode(token_ids), token_ids, {"role": role})
    fields = {"role": "system" if role == "developer" else role}
    for key in _OTHER_KEYS:
        if message.get(key) is not None:
            check_template_text(message[key], f"{field}.{key}", tokenizer)
            fields[key] = message[key]
    if "tool_calls" in fields:
        fields["tool_calls"] = [_with_parsed_arguments(call, f"{field}.tool_calls") for call in fields["tool_calls"]]
    return ChatMessage(content, None, fields)


def _read_content(content: Any, field: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        check_encodable(content, field)
        return content
    if not isinstance(content, list | tuple):
        raise PromptError(field, type(content).__name__, "text or a list of text parts")
    return "".join(_part_text(part, f"{field}[{index}]") for index, part in enumerate(content))


def _part_text(part: Any, field: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") not in _TEXT_PARTS:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise PromptError(f"{field}.type", kind, f"one of {', '.join(_TEXT_PARTS)}")
    text = part.get("text")
    if not isinstance(text, str):
        raise PromptError(f"{field}.text", type(text).__name__, "must be text")
    check_encodable(text, f"{field}.text")
    return text


def _with_parsed_arguments(call: Any, field: str) -> dict[str, Any]:
    """Templates expect arguments as an object; the API carries them as JSON text."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        raise PromptError(field, type(call).__name__, "objects with a function")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return dict(call)
    try:
        parsed = json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError):
        return dict(call)
    return {**call, "function": {**function, "arguments": parsed}}


def _texts(value: Any) -> Iterator[str]:
    """Every string inside a JSON value, keys included. Raises PromptError for values that are not JSON."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, list | tuple):
            pending.extend(item)
        elif item is not None and not isinstance(item, bool | int | float):
            raise PromptError("value", type(item).__name__, "must be a JSON value")
