"""From messages to prompt ids: a pure function of messages, stored ids, template, arguments and template time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from workers.prompt.errors import NoChatTemplate, PromptError, ReservedText, TemplateRefused
from workers.prompt.messages import (
    ChatMessage,
    check_encodable,
    check_template_kwargs,
    check_template_text,
    read_messages,
)
from workers.prompt.sandbox import TemplateRenderer
from workers.prompt.spans import Content, Literal, Span, find_spans, placeholders
from workers.prompt.tokenizer import Tokenizer


class WholeReason(StrEnum):
    """Why a prompt was tokenized whole: its messages' stored ids are not used then. Counted."""

    CONTENT_CHANGED = "content_changed"
    PLACEHOLDER_REFUSED = "placeholder_refused"


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """ids: the prompt. reason: None when contents were tokenized apart from the template."""

    ids: tuple[int, ...]
    reason: WholeReason | None = None

    @property
    def tokenized_whole(self) -> bool:
        """Whether template and contents were tokenized as one text."""
        return self.reason is not None


class PromptBuilder:
    """Builds prompts for one tokenizer. Safe to share between threads when its renderer is."""

    def __init__(self, tokenizer: Tokenizer, renderer: TemplateRenderer) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer

    def build(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template_time: int,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> PromptTokens:
        """Prompt ids of a chat, up to where the assistant's reply begins.

        messages: {"role", "content", ...}; `token_ids` of an assistant message are its stored output ids and stand
        for the whole reply. template_time: unix seconds that the template takes for now.
        Raises PromptError and its subclasses, and SandboxFailure.
        """
        chat = read_messages(messages, self._tokenizer)
        context = self._context(tools, template_kwargs or {})
        rendered = self._render_twice(chat, context, template_time)
        if rendered is None:
            return self._whole(chat, context, template_time, WholeReason.PLACEHOLDER_REFUSED)
        spans = find_spans(rendered.with_placeholders, rendered.words, rendered.with_contents, rendered.contents)
        if spans is None:
            return self._whole(chat, context, template_time, WholeReason.CONTENT_CHANGED)
        return PromptTokens(self._encode(spans, [chat[index] for index in rendered.owners]))

    def build_completion(self, text: str) -> PromptTokens:
        """Prompt ids of a raw text: BOS where the model wants one, no control token from the text itself."""
        check_encodable(text, "prompt")
        return PromptTokens(tuple(self._tokenizer.encode_completion(text)))

    def _context(self, tools: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        check_template_kwargs(kwargs, self._tokenizer)
        check_template_text(tools, "tools", self._tokenizer)
        return {
            **kwargs,
            "tools": [dict(tool) for tool in tools] or None,
            "add_generation_prompt": True,
            "bos_token": self._tokenizer.bos_text,
            "eos_token": self._tokenizer.eos_text,
        }

    def _render_twice(
        self, chat: Sequence[ChatMessage], context: dict[str, Any], template_time: int
    ) -> _Rendered | None:
        """Render with contents and with placeholders; None when the template takes only the contents.

        A message with stored ids shows its placeholder both times: its text plays no part. Empty contents have
        nothing to protect and stay empty both times.
        """
        owners = [index for index, message in enumerate(chat) if message.content or message.token_ids is not None]
        words = placeholders([chat[index].content for index in owners])
        word_of = dict(zip(owners, words, strict=True))
        shown = [message.content if message.token_ids is None else word_of[index] for index, message in enumerate(chat)]
        hidden = [word_of.get(index, message.content) for index, message in enumerate(chat)]
        contexts = [_with_messages(context, chat, contents) for contents in (shown, hidden)]
        try:
            with_contents, with_placeholders = self._renderer.render(self._template, contexts, template_time)
        except TemplateRefused:
            self._renderer.render(self._template, contexts[:1], template_time)
            return None
        return _Rendered(with_contents, with_placeholders, owners, words, [shown[index] for index in owners])

    def _whole(
        self, chat: Sequence[ChatMessage], context: dict[str, Any], template_time: int, reason: WholeReason
    ) -> PromptTokens:
        contents = [message.content for message in chat]
        for index, content in enumerate(contents):
            if (found := self._tokenizer.find_control_text(content)) is not None:
                raise ReservedText(f"messages[{index}].content", found, "is the text of a control token")
        [text] = self._renderer.render(self._template, [_with_messages(context, chat, contents)], template_time)
        return PromptTokens(self._with_bos(self._tokenizer.encode_template(text, at_start=True)), reason)

    def _encode(self, spans: Sequence[Span], owners: Sequence[ChatMessage]) -> tuple[int, ...]:
        ids: list[int] = []
        for index, span in enumerate(_move_spaces(spans, owners)):
            if isinstance(span, Literal):
                ids += self._tokenizer.encode_template(span.text, at_start=index == 0)
            elif (stored := owners[span.index].token_ids) is not None:
                ids += stored
            else:
                ids += self._tokenizer.encode_text(span.text)
        return self._with_bos(ids)

    def _with_bos(self, ids: list[int]) -> tuple[int, ...]:
        if not ids:
            raise PromptError("messages", len(ids), "the chat template renders them to nothing")
        return (*self._tokenizer.bos_prefix(ids), *ids)

    @property
    def _template(self) -> str:
        if (template := self._tokenizer.bundle.chat_template) is None:
            raise NoChatTemplate("messages", "", "the model has no chat template")
        return template


@dataclass(frozen=True, slots=True)
class _Rendered:
    """owners: message index of each placeholder in words; contents: what stands in their place in with_contents."""

    with_contents: str
    with_placeholders: str
    owners: list[int]
    words: list[str]
    contents: list[str]


def _with_messages(context: dict[str, Any], chat: Sequence[ChatMessage], contents: Sequence[str]) -> dict[str, Any]:
    messages = [{**message.fields, "content": content} for message, content in zip(chat, contents, strict=True)]
    return {**context, "messages": messages}


def _move_spaces(spans: Sequence[Span], owners: Sequence[ChatMessage]) -> list[Span]:
    """Give a single space before a content to the content: vocabularies join a space with the word that follows."""
    moved = list(spans)
    for index in range(len(moved) - 1):
        literal, content = moved[index], moved[index + 1]
        if not isinstance(literal, Literal) or not isinstance(content, Content):
            continue
        ends_in_one_space = literal.text.endswith(" ") and not literal.text[:-1].endswith((" ", "\t", "\n"))
        if ends_in_one_space and owners[content.index].token_ids is None and not content.text[:1].isspace():
            moved[index], moved[index + 1] = Literal(literal.text[:-1]), Content(content.index, " " + content.text)
    return [span for span in moved if span.text]
