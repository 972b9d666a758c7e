"""What a worker will hold, reckoned from its settings and the model's header: before weights or devices are touched."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from gpu.errors import LayoutError
from gpu.formats import cache_format
from gpu.layout import KVLayout, default_page_size
from gpu.model.config import ModelConfig
from workers.settings import WorkerSettings


class ModelPlan(NamedTuple):
    """config: the model's, with the context that is served. num_pages: of the mirror."""

    config: ModelConfig
    layout: KVLayout
    num_pages: int


def plan_model(config: ModelConfig, settings: WorkerSettings) -> ModelPlan:
    """Context, page layout and mirror pages of a model under these settings.

    Page size by default the largest that keeps a page small. Raises LayoutError naming the setting that cannot be.
    """
    asked = settings.context
    if asked is not None and asked > config.context_length:
        raise LayoutError("context", asked, f"the model's context is {config.context_length} tokens")
    formats = cache_format(settings.kv_format)
    shape = (config.num_layers, config.num_kv_heads, config.head_dim)
    page_size = settings.page_size or default_page_size(*shape, formats.k, formats.v)
    layout = KVLayout(*shape, page_size, formats.k, formats.v)
    num_pages = settings.mirror_bytes // layout.page_bytes
    if num_pages < 2:
        needed = -(-2 * layout.page_bytes // (1 << 20))
        raise LayoutError("mirror_mib", settings.mirror_bytes >> 20, f"two pages must fit, {needed} MiB")
    return ModelPlan(replace(config, context_length=asked or config.context_length), layout, num_pages)
