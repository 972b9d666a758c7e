"""The weights digest: the identity of a model's numbers, whatever its file is called.

    blake2b-256 over, per tensor: name, type, shape, byte count (each length-prefixed), then the tensor's bytes

Hashing a large model takes as long as reading it, so the digest is kept in the user's cache directory under the
file's path, size, modification time and inode.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Final

from gpu.model.load import ModelSource

DIGEST_BYTES: Final = 32
_CHUNK_BYTES: Final = 1 << 24
_DOMAIN: Final = b"kvalet weights 1"


def weights_digest(source: ModelSource, cache_dir: Path) -> bytes:
    """Digest of the source's tensors, 32 bytes; taken from `cache_dir` while no file has changed.

    A cache that cannot be read or written costs the hashing, nothing else.
    """
    entry = cache_dir / "weights-digests" / _identity(source.files)
    if (known := _read_entry(entry)) is not None:
        return known
    digest = compute_weights_digest(source)
    _write_entry(entry, digest)
    return digest


def compute_weights_digest(source: ModelSource) -> bytes:
    """Hash every tensor of the source, 32 bytes."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES, person=_DOMAIN)
    for name, kind, shape, block in source.tensor_chunks():
        for part in (name, kind, ",".join(map(str, shape)), str(len(block))):
            encoded = part.encode()
            state.update(len(encoded).to_bytes(4, "little") + encoded)
        for start in range(0, len(block), _CHUNK_BYTES):
            state.update(block[start : start + _CHUNK_BYTES])
    return state.digest()


def _identity(files: tuple[Path, ...]) -> str:
    state = hashlib.blake2b(digest_size=16, person=_DOMAIN)
    for path in files:
        facts = path.stat()
        state.update(repr((str(path.resolve()), facts.st_size, facts.st_mtime_ns, facts.st_ino)).encode())
    return state.hexdigest()


def _read_entry(entry: Path) -> bytes | None:
    try:
        digest = bytes.fromhex(entry.read_text("ascii"))
    except (OSError, ValueError):
        return None
    return digest if len(digest) == DIGEST_BYTES else None


def _write_entry(entry: Path, digest: bytes) -> None:
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=entry.parent)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(digest.hex())
        os.replace(name, entry)
    except OSError:
        return
