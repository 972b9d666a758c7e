"""Errors of prompt building.

PromptError                    the request cannot become a prompt (the gateway answers 400)
|-- ReservedText               a text holds a control token's text where it would be tokenized as one
|-- TemplateRefused            the template itself refused the messages (raise_exception, or an undefined value)
|-- TemplateLimit              rendering exceeded its time, memory or output limit
`-- NoChatTemplate             the model has no chat template
TokenizerError                 a vocabulary that cannot be used (raised at load; the worker refuses to start)
SandboxFailure                 the template process could not be started (the turn is tried elsewhere)
BundleNeeded                   the counting process does not hold that tokenizer (it is sent, and asked again)
"""

from __future__ import annotations


class PromptError(Exception):
    """A request that cannot become a prompt. Answered with 400; names field, value and limit."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}={value!r}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class ReservedText(PromptError):
    """A text holds a control token's text at a place where it would become that token."""


class TemplateRefused(PromptError):
    """The model's chat template refused the messages."""


class TemplateLimit(PromptError):
    """Rendering a chat template exceeded its limit of time, memory or output."""


class NoChatTemplate(PromptError):
    """The model has no chat template, so it takes no messages."""


class TokenizerError(Exception):
    """A vocabulary or tokenizer file that cannot be used. Raised at load; names field, value and limit."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}={value!r}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class SandboxFailure(Exception):
    """The template process could not be started or does not answer. The caller may try again."""


class BundleNeeded(Exception):
    """The counting process does not hold a tokenizer. The caller sends its bundle."""

    def __init__(self, digest: str) -> None:
        super().__init__(f"bundle={digest[:16]}: not loaded")
        self.digest = digest
