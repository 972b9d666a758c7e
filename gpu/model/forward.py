"""The decoder on the host: every row of a step goes through the same arithmetic, whatever its neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpu.cache import KVCache, StepCells
from gpu.cpu.kernels import MODE_ADD, MODE_GATED, MODE_PLAIN, gather_rows, normalize_heads
from gpu.cpu.product_task import STORED, ProductTask, padded_width
from gpu.cpu.threads import CpuThreads
from gpu.model.config import ModelConfig
from gpu.model.tensors import BLOCK_ROWS, Floats, LayerWeights, ModelWeights


@dataclass(frozen=True, slots=True)
class LayerTasks:
    """The four products of a layer."""

    qkv: ProductTask
    output: ProductTask
    gate_up: ProductTask
    down: ProductTask


class HostModel:
    """Implements `gpu.host_step.StepModel` with the CPU kernels. One thread at a time may call `run`."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, threads: CpuThreads) -> None:
        self.config = config
        self._weights = weights
        self._threads = threads
        self._rows = _RowBuffers(config, 0)
        self._layers: list[LayerTasks] = []
        self._panel = np.empty((config.hidden_size, BLOCK_ROWS), np.float32)

    def run(
        self, token_ids: NDArray[np.int64], sampled_rows: NDArray[np.int64], cells: StepCells, cache: KVCache
    ) -> Floats:
        """Append and attend every layer; return the sampled rows' logits, (n, vocab_size) f32.

        token_ids: (R,) int64, one per row of `cells`. sampled_rows: (n,) int64, rows to sample.
        """
        num_rows = len(token_ids)
        if num_rows > self._rows.max_rows:
            self._grow(num_rows)
        rows, threads = self._rows, self._threads
        self._embed(token_ids)
        for index, (tasks, layer) in enumerate(zip(self._layers, self._weights.layers, strict=True)):
            tasks.qkv.run(threads, num_rows)
            q, k, v = rows.heads(num_rows)
            if layer.q_norm is not None and layer.k_norm is not None:
                eps = np.float32(self.config.rms_norm_eps)
                normalize_heads(q, layer.q_norm, eps)
                normalize_heads(k, layer.k_norm, eps)
            part = cells.at(index)
            cache.append(part, k, v)
            cache.attend(part, q, rows.attended[:num_rows])
            tasks.output.run(threads, num_rows)
            tasks.gate_up.run(threads, num_rows)
            tasks.down.run(threads, num_rows)
        return self._logits(sampled_rows)

    def _embed(self, token_ids: NDArray[np.int64]) -> None:
        matrix = self._weights.embedding
        codes, scales, minimums = (part.ctypes.data for part in (matrix.codes, matrix.scales, matrix.minimums))
        target = self._rows.hidden[: len(token_ids), : self.config.hidden_size]
        gather_rows(STORED[matrix.storage], codes, scales, minimums, token_ids, target, self._panel)

    def _logits(self, sampled_rows: NDArray[np.int64]) -> Floats:
        """Final norm and head of some rows."""
        head, count = self._weights.output_head, len(sampled_rows)
        logits = np.empty((count, padded_width(self.config.vocab_size)), np.float32)
        if count:
            hidden = np.ascontiguousarray(self._rows.hidden[sampled_rows])
            task = ProductTask(MODE_PLAIN, np.empty_like(hidden), [head], [logits])
            task.normalize(hidden, self._weights.final_norm, self.config.rms_norm_eps)
            task.run(self._threads, count)
        return logits[:, : self.config.vocab_size]

    def _grow(self, num_rows: int) -> None:
        self._rows = _RowBuffers(self.config, max(num_rows, 2 * self._rows.max_rows))
        self._layers = [self._layer_tasks(layer) for layer in self._weights.layers]

    def _layer_tasks(self, layer: LayerWeights) -> LayerTasks:
        rows, eps = self._rows, self.config.rms_norm_eps
        biases = (layer.q_bias, layer.k_bias, layer.v_bias)
        qkv = ProductTask(MODE_PLAIN, rows.normed, [layer.q, layer.k, layer.v], [rows.q, rows.k, rows.v], biases)
        output = ProductTask(MODE_ADD, rows.attended.reshape(rows.max_rows, -1), [layer.o], [rows.added])
        gate_up = ProductTask(MODE_GATED, rows.normed, [layer.gate, layer.up], [rows.gate, rows.up])
        down = ProductTask(MODE_ADD, rows.gate, [layer.down], [rows.added])
        return LayerTasks(
            qkv.normalize(rows.hidden, layer.attn_norm, eps),
            output.add_to(rows.hidden),
            gate_up.normalize(rows.hidden, layer.ffn_norm, eps),
            down.add_to(rows.hidden),
        )


class _RowBuffers:
    """Activations of up to `max_rows` rows, (max_rows, padded width) f32 each; `hidden` is the residual stream."""

    def __init__(self, config: ModelConfig, max_rows: int) -> None:
        self.max_rows = max_rows
        self._config = config
        hidden, width = padded_width(config.hidden_size), padded_width(config.intermediate_size)
        self.hidden, self.normed, self.added = (np.zeros((max_rows, hidden), np.float32) for _ in range(3))
        self.gate, self.up = (np.zeros((max_rows, width), np.float32) for _ in range(2))
        self.q = np.zeros((max_rows, padded_width(config.q_width)), np.float32)
        self.k, self.v = (np.zeros((max_rows, padded_width(config.kv_width)), np.float32) for _ in range(2))
        self.attended = np.zeros((max_rows, config.num_heads, config.head_dim), np.float32)

    def heads(self, num_rows: int) -> tuple[Floats, Floats, Floats]:
        """q, k, v of the first rows as (num_rows, heads, head_dim), C-contiguous."""
        config = self._config
        counts = ((self.q, config.num_heads), (self.k, config.num_kv_heads), (self.v, config.num_kv_heads))
        q, k, v = (
            np.ascontiguousarray(x[:num_rows, : heads * config.head_dim]).reshape(num_rows, heads, config.head_dim)
            for x, heads in counts
        )
        return q, k, v
