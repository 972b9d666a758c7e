"""Tokenizers, templates and a renderer for prompt tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jinja2.sandbox

from gpu.model.gguf_file import GgufFile
from tests.model_files import byte_vocabulary, qwen2_merges
from workers.prompt.builder import PromptBuilder
from workers.prompt.errors import TemplateRefused
from workers.prompt.gguf_vocabulary import bundle_from_gguf
from workers.prompt.tokenizer import Tokenizer
from workers.settings import default_model_path

TIME = 1_700_000_000
CHATML_PARTS = ("<|im_start|>{}\n", "<|im_end|>\n", "<|im_start|>assistant\n")
LLAMA3_CONTROLS = (
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"
)  # fmt: skip
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


class LocalRenderer:
    """Renders in this process, for tests that are not about the sandbox."""

    def __init__(self) -> None:
        self.templates: dict[str, jinja2.Template] = {}
        self.environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def render(self, template: str, contexts: Sequence[dict[str, Any]], template_time: int) -> list[str]:
        try:
            return [self._compiled(template).render(**context) for context in contexts]
        except jinja2.TemplateError as error:
            raise TemplateRefused("chat template", str(error), "refused") from None

    def _compiled(self, template: str) -> jinja2.Template:
        if template not in self.templates:
            self.templates[template] = self.environment.from_string(template)
        return self.templates[template]


RENDERER = LocalRenderer()


@cache
def smollm_metadata() -> dict[str, Any]:
    """`tokenizer.*` metadata of the default model."""
    return GgufFile(default_model_path()).tokenizer_metadata()


@cache
def smollm() -> Tokenizer:
    """The default model's tokenizer."""
    return Tokenizer(bundle_from_gguf(smollm_metadata()))


@cache
def qwen2() -> Tokenizer:
    """The first merges of Qwen2's vocabulary, ChatML, no BOS."""
    return Tokenizer(bundle_from_gguf(byte_vocabulary(qwen2_merges(), add_bos_token=False)))


@cache
def llama3() -> Tokenizer:
    """Llama 3's splitting, control tokens and template over the same merges."""
    return tokenizer_with(LLAMA3, "llama-bpe", LLAMA3_CONTROLS, bos_token_id=256 + 4600)


def tokenizer_with(template: str, pre: str = "qwen2", controls: Sequence[str] | None = None, **more: Any) -> Tokenizer:
    """A tokenizer with a template of the test's own."""
    extra = {} if controls is None else {"controls": controls}
    vocabulary = byte_vocabulary(qwen2_merges(), pre, **extra, **more)
    return Tokenizer(bundle_from_gguf(vocabulary | {"tokenizer.chat_template": template}))


def builder(tokenizer: Tokenizer) -> PromptBuilder:
    """A builder that renders in this process."""
    return PromptBuilder(tokenizer, RENDERER)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, ids: Sequence[int] | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | ({} if ids is None else {"token_ids": tuple(ids)})
