"""The decoder on the device: the launches of one step, layer by layer, the same for every kind of row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpu.cache import KVCache
from gpu.cuda.activations import ActivationLayout
from gpu.cuda.cell_kernels import AttendedRows, QkvRows, StepCellKernels, StepLaunch
from gpu.cuda.device import CudaDevice, PinnedBuffer
from gpu.cuda.product_plans import Epilogue, RowNorm
from gpu.cuda.products import Products
from gpu.cuda.rows import HeadNorm, embed_tokens, publish_step, rms_norm
from gpu.cuda.sampling import DeviceSampler
from gpu.cuda.step_builder import BuiltStep
from gpu.cuda.step_shape import StepShape
from gpu.cuda.step_tables import SequenceSlots
from gpu.cuda.weight_packing import PackedWeights
from gpu.cuda.weights import DeviceLayer, DeviceWeights
from gpu.model.config import ModelConfig
from gpu.step_cells import StepCells

_HALF: Final = 2
_WORD: Final = 4


@dataclass(frozen=True, slots=True)
class StepWords:
    """What a step left in pinned memory.

    samples: the sampler's words. counts: (num_layers, entries, 2) i32. nonfinite: (entries,) i32.
    """

    samples: NDArray[np.uint32]
    counts: NDArray[np.int32]
    nonfinite: NDArray[np.int32]


class DeviceModel:
    """Weights, buffers of up to max_rows rows, and the launches of a step.

    max_entries: sequences of a step; max_sampled: rows that get logits. num_result_words: of any step.
    """

    def __init__(
        self,
        device: CudaDevice,
        config: ModelConfig,
        weights: DeviceWeights,
        sampler: DeviceSampler,
        slots: SequenceSlots,
        *,
        max_rows: int,
        max_entries: int,
        max_sampled: int,
    ) -> None:
        self.config = config
        self.num_result_words = sampler.num_result_words(max_sampled) + _proof_words(config, max_entries)
        self.proofs = device.allocate(_WORD * _proof_words(config, max_entries)).address
        self._device = device
        self._weights = weights
        self._sampler = sampler
        self._slots = slots
        self._products = Products(device.kernels, device.num_processors)
        self._mirror_stream = device.create_stream()
        self._residual = device.allocate(_WORD * max_rows * config.hidden_size).address
        self._qkv_width = config.q_width + 2 * config.kv_width
        self._qkv = device.allocate(_WORD * max_rows * self._qkv_width).address
        width = max(config.hidden_size, config.q_width)
        self._narrow = device.allocate(_activation_bytes(max_rows, width)).address
        self._wide = device.allocate(_activation_bytes(max_rows, config.intermediate_size)).address
        self._logits = device.allocate(_WORD * max_sampled * config.vocab_size).address
        self._samples = device.allocate(_WORD * sampler.num_result_words(max_sampled)).address
        device.clear_async(self.proofs, _WORD * _proof_words(config, max_entries), device.compute)

    def record(self, stream: Any, built: BuiltStep, cells: StepCells, cache: KVCache, kernels: StepCellKernels) -> None:
        """Launch a step's kernels on a stream, or into a capture. cells: of the step that is launched or captured."""
        shape, rows = built.shape, built.shape.rows
        kernels.begin(self._step_launch(stream, built, kernels))
        self._embed(stream, built)
        for index, layer in enumerate(self._weights.layers):
            self._attention(stream, rows, index, layer, cells, cache)
            self._feed_forward(stream, rows, layer)
        if shape.sampled:
            self._sample(stream, built)
        if shape.wide_tiles:
            stream.wait(self._mirror_stream.record())
        publish_step(
            self._device.kernels, stream, target=built.tables.address("publish_target"), results=self._samples,
            num_results=self._sampler.num_result_words(shape.sampled), proofs=self.proofs,
            num_proofs=_proof_words(self.config, shape.entries),
        )  # fmt: skip

    def read_results(self, shape: StepShape, results: PinnedBuffer) -> StepWords:
        """Views of what a step of this shape published; valid until its buffer is used again."""
        words = results.array.view(np.uint32)
        num_samples = self._sampler.num_result_words(shape.sampled)
        num_counts = self.config.num_layers * shape.entries * 2
        proofs = words[num_samples : num_samples + num_counts + shape.entries].view(np.int32)
        counts = proofs[:num_counts].reshape(self.config.num_layers, shape.entries, 2)
        return StepWords(words[:num_samples], counts, proofs[num_counts:])

    def _step_launch(self, stream: Any, built: BuiltStep, kernels: StepCellKernels) -> StepLaunch:
        shape = built.shape
        sizes = (shape.few_rows, shape.tiles, shape.max_length, shape.tile_rows)
        decode = kernels.decode.plan(*sizes) if shape.tiles else None
        mirror = self._mirror_stream if shape.wide_tiles else None
        return StepLaunch(stream, built.tables, shape.rows, shape.entries, decode, built.prefill, mirror)

    def _embed(self, stream: Any, built: BuiltStep) -> None:
        matrix, tables = self._weights.embedding, built.tables
        embed_tokens(
            self._device.kernels, stream, self.config.hidden_size, built.shape.rows, matrix=matrix.address,
            storage=matrix.storage, token_ids=tables.address("token_ids"), slots=tables.address("slots"),
            last_tokens=self._slots.last_tokens.address, residual=self._residual,
        )  # fmt: skip

    def _attention(
        self, stream: Any, rows: int, index: int, layer: DeviceLayer, cells: StepCells, cache: KVCache
    ) -> None:
        source, norm = self._normed(stream, rows, layer.attn_norm, layer.qkv, Epilogue.STORE)
        self._products.store(stream, layer.qkv, source, self._qkv, rows, bias=layer.qkv_bias, norm=norm)
        qkv = QkvRows(self._qkv, rows, self._head_norm(layer))
        part = cells.at(index)
        cache.append(part, qkv, qkv)
        layout = self._products.input_layout(rows, layer.output.num_outputs)
        cache.attend(part, qkv, AttendedRows(self._narrow, rows, layout))
        self._products.add(stream, layer.output, self._narrow, self._residual, rows)

    def _feed_forward(self, stream: Any, rows: int, layer: DeviceLayer) -> None:
        source, norm = self._normed(stream, rows, layer.ffn_norm, layer.gate_up, Epilogue.SWIGLU)
        layout = self._products.input_layout(rows, layer.down.num_outputs)
        self._products.swiglu(stream, layer.gate_up, source, self._wide, rows, layout, norm=norm)
        self._products.add(stream, layer.down, self._wide, self._residual, rows)

    def _sample(self, stream: Any, built: BuiltStep) -> None:
        """Final norm and head of the sampled rows, and a draw for each."""
        shape, head = built.shape, self._weights.head
        self._norm(stream, shape.sampled, self._weights.final_norm, head, built.tables.address("sampled_rows"))
        self._products.store(stream, head, self._narrow, self._logits, shape.sampled)
        self._sampler.record(
            stream, built.tables, shape.sampled, general=shape.general_sampling, logits=self._logits,
            last_tokens=self._slots.last_tokens.address, results=self._samples,
        )  # fmt: skip

    def _normed(
        self, stream: Any, rows: int, weight: int, reader: PackedWeights, epilogue: Epilogue
    ) -> tuple[int, RowNorm | None]:
        """Where a product finds normed residual rows; or the residual rows, and the norm that it does itself."""
        if self._products.norms(reader, epilogue, rows):
            return self._residual, RowNorm(weight, self.config.rms_norm_eps)
        self._norm(stream, rows, weight, reader)
        return self._narrow, None

    def _norm(self, stream: Any, rows: int, weight: int, reader: PackedWeights, row_indices: int = 0) -> None:
        """Norm of residual rows for a product."""
        rms_norm(
            self._device.kernels, stream, self.config.hidden_size, rows, residual=self._residual, weight=weight,
            eps=self.config.rms_norm_eps, activations=self._narrow,
            activation_layout=self._products.input_layout(rows, reader.num_outputs), row_indices=row_indices,
        )  # fmt: skip

    def _head_norm(self, layer: DeviceLayer) -> HeadNorm | None:
        if not self.config.qk_norm:
            return None
        return HeadNorm(layer.q_norm, layer.k_norm, self.config.rms_norm_eps)


def _proof_words(config: ModelConfig, entries: int) -> int:
    return config.num_layers * entries * 2 + entries


def _activation_bytes(rows: int, width: int) -> int:
    return max(layout.num_bytes(rows, width) for layout in ActivationLayout)
