"""The inner product of all dense kernels and of attention.

Outputs lie across the lanes and inputs are visited one after the other, so an output's sum is one plain chain of fused
multiply-adds, whatever the tile's shape: this is what makes a row's bits independent of its neighbours.
"""

from __future__ import annotations

from typing import Any

from gpu.cpu.vector_code import FLOATS, I8, I16, INTS, LANES, VectorCode, emitted_kernel, floats, ints
from gpu.model.tensors import BLOCK_ROWS, GROUP_COLS

STORED_F32, STORED_BF16, STORED_Q8, STORED_Q4 = 0, 1, 2, 3

_AHEAD = 4096


def product_tile(num_rows: int, num_vectors: int, storage: int) -> Any:
    """Make a kernel that computes num_rows x (16 num_vectors) outputs of a product.

    Arguments (all i64): x address, x row stride, w address, w input stride, scales address, minimums address,
    num_inputs, out address, out row stride, chain. Strides are in elements. Output (r, c) is
    fma(x[r, k], w[k, c], .) over k = 0, 1, ... in order, from 0 (chain 0) or from what out holds (chain 1): the same
    sequence of operations for every tile shape and however the inputs are cut into panels. Q8 and Q4: w =
    fma(scale, code, minimum), 64 outputs, num_inputs a multiple of 32; see `gpu.model.tensors` for the layout.
    """

    def emit(code: VectorCode, args: Any) -> None:
        _Tile(code, args, num_rows, num_vectors, storage).emit()

    return emitted_kernel(f"kvalet_tile_{num_rows}x{num_vectors}_{storage}", 10, emit)


def unpack_tile(storage: int) -> Any:
    """Make a kernel that writes the weights of one block as f32 [input][64]: the values that a product tile uses.

    Arguments (all i64): w address, scales address, minimums address, num_inputs, out address.
    """

    def emit(code: VectorCode, args: Any) -> None:
        w, scales, minimums, num, out = args
        weights = _Weights(code, storage, 4, w, BLOCK_ROWS, scales, minimums)

        def step(k: Any, values: list[Any]) -> None:
            for v, value in enumerate(values):
                code.store(value, out, code.offset(LANES * v, (k, BLOCK_ROWS)))

        weights.visit(num, step)

    return emitted_kernel(f"kvalet_unpack_{storage}", 5, emit)


class _Tile:
    """Emits one product tile: accumulators stay in registers, one step per input."""

    def __init__(self, code: VectorCode, args: Any, num_rows: int, num_vectors: int, storage: int) -> None:
        self.code = code
        self.x, self.x_stride, w, w_stride, scales, minimums, self.num, self.out, self.out_stride, self.chain = args
        self.rows, self.vectors = range(num_rows), range(num_vectors)
        self.weights = _Weights(code, storage, num_vectors, w, w_stride, scales, minimums)
        self.totals = [[code.builder.alloca(FLOATS) for _ in self.vectors] for _ in self.rows]

    def emit(self) -> None:
        code, builder = self.code, self.code.builder
        places = [(r, v, code.offset(LANES * v, (r, self.out_stride))) for r in self.rows for v in self.vectors]
        with builder.if_else(builder.icmp_signed("!=", self.chain, self.chain.type(0))) as (chained, fresh):
            with chained:
                for r, v, place in places:
                    builder.store(code.load(self.out, place), self.totals[r][v])
            with fresh:
                for r, v, _ in places:
                    builder.store(floats(0.0), self.totals[r][v])
        self.weights.visit(self.num, self._step)
        for r, v, place in places:
            code.store(builder.load(self.totals[r][v]), self.out, place)

    def _step(self, k: Any, weights: list[Any]) -> None:
        code, builder = self.code, self.code.builder
        for r in self.rows:
            x = code.splat(code.load_one(self.x, code.offset(k, (r, self.x_stride))))
            for v in self.vectors:
                total = self.totals[r][v]
                builder.store(code.fma(x, weights[v], builder.load(total)), total)


class _Weights:
    """Emits the loop over inputs and makes each input's weights, num_vectors registers of f32."""

    def __init__(
        self, code: VectorCode, storage: int, num_vectors: int, w: Any, w_stride: Any, scales: Any, minimums: Any
    ) -> None:
        self.code, self.storage, self.vectors = code, storage, range(num_vectors)
        self.w, self.w_stride, self.scales, self.minimums = w, w_stride, scales, minimums

    def visit(self, num: Any, step: Any) -> None:
        """Call step(k, weights) for k = 0 .. num - 1 inside the emitted loop."""
        code = self.code
        if self.storage not in (STORED_Q8, STORED_Q4):
            with code.loop(num) as k:
                step(k, self._plain(k))
            return
        with code.loop(code.builder.udiv(num, num.type(GROUP_COLS))) as group:
            first = code.offset(0, (group, BLOCK_ROWS))
            scales = [code.load(self.scales, code.offset(first, LANES * v)) for v in self.vectors]
            minimums = [code.load(self.minimums, code.offset(first, LANES * v)) for v in self.vectors]
            for v in self.vectors:
                for part in (self.scales, self.minimums):
                    code.prefetch(part, code.offset(_AHEAD // 4 + 4 * LANES * v, (first, 4)))
            with code.loop(GROUP_COLS) as inner:
                k = code.offset(inner, (group, GROUP_COLS))
                codes = self._codes(k)
                step(k, [code.fma(scales[v], codes[v], minimums[v]) for v in self.vectors])

    def _plain(self, k: Any) -> list[Any]:
        code, builder = self.code, self.code.builder
        places = [code.offset(LANES * v, (k, self.w_stride)) for v in self.vectors]
        if self.storage == STORED_F32:
            return [code.load(self.w, place) for place in places]
        code.prefetch(self.w, code.offset(_AHEAD, (k, 2 * BLOCK_ROWS)))
        code.prefetch(self.w, code.offset(_AHEAD + BLOCK_ROWS, (k, 2 * BLOCK_ROWS)))
        halves = [builder.zext(code.load(self.w, place, I16), INTS) for place in places]
        return [builder.bitcast(builder.shl(half, ints(16)), FLOATS) for half in halves]

    def _codes(self, k: Any) -> list[Any]:
        """Codes of one input as f32. Q4: byte j holds output j in its low and output j + 32 in its high nibble."""
        code, builder = self.code, self.code.builder
        stride = BLOCK_ROWS if self.storage == STORED_Q8 else BLOCK_ROWS // 2
        code.prefetch(self.w, code.offset(_AHEAD, (k, stride)))
        count = stride // LANES
        raw = [builder.zext(code.load(self.w, code.offset(LANES * v, (k, stride)), I8), INTS) for v in range(count)]
        if self.storage == STORED_Q4:
            raw = [builder.and_(part, ints(15)) for part in raw] + [builder.lshr(part, ints(4)) for part in raw]
        return [builder.sitofp(part, FLOATS) for part in raw]
