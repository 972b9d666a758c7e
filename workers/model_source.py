"""Opens a model: its file for `gpu`, its tokenizer for prompts, and the identities of both."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gpu.errors import ModelFileError
from gpu.model.config import ModelConfig
from gpu.model.digest import weights_digest
from gpu.model.gguf_source import GgufSource
from gpu.model.load import ModelSource, load_weights, open_source
from gpu.model.tensors import ModelWeights, WeightStorage
from workers.prompt.bundle import TokenizerBundle
from workers.prompt.errors import TokenizerError
from workers.prompt.gguf_vocabulary import bundle_from_gguf
from workers.prompt.tokenizer import Tokenizer
from workers.prompt.tokenizer_files import bundle_from_files


@dataclass(frozen=True, slots=True)
class LoadedSource:
    """An opened model. name: what the API calls it unless told otherwise; no part of its identity.

    weights_digest: 32 bytes over the stored tensors. tokenizer.bundle.digest is the other half of the identity.
    """

    name: str
    source: ModelSource
    tokenizer: Tokenizer
    weights_digest: bytes

    @property
    def config(self) -> ModelConfig:
        """The model's shape and constants."""
        return self.source.config

    @property
    def bundle(self) -> TokenizerBundle:
        """The tokenizer as data, for publishing."""
        return self.tokenizer.bundle

    def load_weights(self, storage: WeightStorage | None = None) -> ModelWeights:
        """Read and pack the weights; None keeps them as exactly as the file stores them. Raises ModelFileError."""
        return load_weights(self.source, storage)


def open_model(path: Path, cache_dir: Path | None = None) -> LoadedSource:
    """Open a GGUF file, a safetensors file or a model directory; weights are read later.

    cache_dir: where the weights digest is kept, the user's cache directory by default.
    Raises ModelFileError or TokenizerError, with the path as a note.
    """
    try:
        return _open(path, cache_dir or user_cache_dir())
    except (ModelFileError, TokenizerError) as error:
        error.add_note(f"model: {path}")
        raise


def user_cache_dir() -> Path:
    """`kvalet` in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvalet"


def _open(path: Path, cache_dir: Path) -> LoadedSource:
    source = open_source(path)
    if isinstance(source, GgufSource):
        bundle = bundle_from_gguf(source.file.tokenizer_metadata())
    else:
        bundle = bundle_from_files(path if path.is_dir() else path.parent)
    tokenizer = Tokenizer(bundle)
    if tokenizer.vocab_size > source.config.vocab_size:
        raise TokenizerError("vocabulary", tokenizer.vocab_size, f"the model embeds {source.config.vocab_size} ids")
    digest = weights_digest(source, cache_dir)
    return LoadedSource(path.name if path.is_dir() else path.stem, source, tokenizer, digest)
