"""Recorded bits of a fixed model: equal on every processor, whatever its vector width.

The same digests were computed with AVX-512, with AVX2 and with plain SSE2, where fused multiply-add is a library call.
When a change to the kernels moves them on purpose, `CPU_NUMERICS_VERSION` moves too: parked pages of the old kernels
must not be taken for pages of the new ones.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from gpu.model.tensors import WeightStorage
from gpu.model.tiny import tiny_config, tiny_weights
from tests.kernel_lab import make_model_lab, matrix_of, product
from workers.fingerprints import CPU_NUMERICS_VERSION

GOLDEN = {
    "f16": "53b84a7b3035aa9218e554c1",
    "int8": "b76cecdc5fc7883469908dcc",
    "q4": "17da1b61e808c8c865184f13",
    "k8v4": "246f354054c4761286222006",
}
GOLDEN_PRODUCT = "6cf38adc139df877a14e5560"


@pytest.mark.parametrize("kv_format", GOLDEN)
def test_kernels_golden_bits_of_logits_and_cells_stay_as_recorded(kv_format: str) -> None:
    config = tiny_config(num_heads=6, num_kv_heads=2)
    lab = make_model_lab(config, tiny_weights(config, 1, WeightStorage.BF16), kv_format)
    sequence = lab.cache.open()
    digest = hashlib.sha256()
    for tokens in (list(range(200)), [1] * 90):
        digest.update(lab.step((sequence, tokens))[0].tobytes())
    digest.update(lab.cell_bytes(sequence))
    assert (CPU_NUMERICS_VERSION, digest.hexdigest()[:24]) == (1, GOLDEN[kv_format])


def test_kernels_golden_bits_of_quantized_products_stay_as_recorded() -> None:
    x = np.random.default_rng(0).standard_normal((9, 64), np.float32)
    digest = hashlib.sha256()
    for storage in (WeightStorage.Q8, WeightStorage.Q4):
        matrix = matrix_of(storage, 100, 64)
        digest.update(product(x, matrix).tobytes() + product(x[:3], matrix).tobytes())
    assert (CPU_NUMERICS_VERSION, digest.hexdigest()[:24]) == (1, GOLDEN_PRODUCT)
