"""The inner product of all dense kernels and of attention, as LLVM code.

A `<16 x float>` is one AVX-512 register, two of AVX, four of NEON or SSE: LLVM splits it without reordering. Outputs
lie across the lanes and inputs are visited one after the other, so an output's sum is one plain chain of fused
multiply-adds, whatever the tile's shape: this is what makes a row's bits independent of its neighbours.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gpu.model.tensors import GROUP_COLS

LANES = 16
STORED_F32, STORED_BF16, STORED_Q8 = 0, 1, 2

_f32 = ir.FloatType()
_i32, _i64 = ir.IntType(32), ir.IntType(64)
_vec = ir.VectorType(_f32, LANES)
_ivec = ir.VectorType(_i32, LANES)
_fma_type = ir.FunctionType(_vec, [_vec] * 3)


def product_tile(num_rows: int, num_vectors: int, storage: int) -> Any:
    """Make an intrinsic that computes num_rows x (16 num_vectors) outputs of a product.

    Signature (all i64): x address, x row stride, w address, w input stride, scales address, minimums address,
    num_inputs, out address, out row stride, chain. Strides are in elements. Output (r, c) is
    fma(x[r, k], w[k, c], .) over k = 0, 1, ... in order, from 0 (chain 0) or from what out holds (chain 1): the same
    sequence of operations for every tile shape and however the inputs are cut into panels. Q8: w = fma(scale, code,
    minimum), scales and minimums [k / 32][stride of w], num_inputs a multiple of 32.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(
        typingctx: Any,
        x: Any,
        ldx: Any,
        w: Any,
        ldw: Any,
        scales: Any,
        mins: Any,
        num: Any,
        out: Any,
        ldo: Any,
        chain: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.call(_tile_function(builder.module, num_rows, num_vectors, storage), args)
            return context.get_dummy_value()

        return types.none(*([types.int64] * 10)), codegen

    return tile


def _tile_function(module: Any, num_rows: int, num_vectors: int, storage: int) -> Any:
    name = f"kvalet_tile_{num_rows}x{num_vectors}_{storage}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_i64] * 10), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    _TileBuilder(function, num_rows, num_vectors, storage).emit()
    return function


class _TileBuilder:
    """Emits the body of one tile function: accumulators stay in registers, one step per input."""

    def __init__(self, function: Any, num_rows: int, num_vectors: int, storage: int) -> None:
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        self.x, self.ldx, self.w, self.ldw, self.scales, self.mins, self.num, self.out, self.ldo, self.chain = (
            function.args
        )
        self.fma = cgutils.get_or_insert_function(function.module, _fma_type, f"llvm.fma.v{LANES}f32")
        self.rows, self.vectors, self.storage = range(num_rows), range(num_vectors), storage
        self.acc = [[self.builder.alloca(_vec) for _ in self.vectors] for _ in self.rows]

    def emit(self) -> None:
        builder = self.builder
        self._start()
        if self.storage == STORED_Q8:
            groups = builder.udiv(self.num, _i64(GROUP_COLS))
            with cgutils.for_range(builder, groups) as loop:
                offset = builder.mul(loop.index, self.ldw)
                scales = [self._load(self.scales, offset, v) for v in self.vectors]
                mins = [self._load(self.mins, offset, v) for v in self.vectors]
                first = builder.mul(loop.index, _i64(GROUP_COLS))
                with cgutils.for_range(builder, _i64(GROUP_COLS)) as inner:
                    self._step(builder.add(first, inner.index), scales, mins)
        else:
            with cgutils.for_range(builder, self.num) as loop:
                self._step(loop.index, [], [])
        for r in self.rows:
            for v in self.vectors:
                builder.store(builder.load(self.acc[r][v]), self._out(r, v), align=4)
        builder.ret_void()

    def _start(self) -> None:
        builder = self.builder
        zero = ir.Constant(_vec, [0.0] * LANES)
        chained = builder.icmp_signed("!=", self.chain, _i64(0))
        with builder.if_else(chained) as (then, otherwise):
            with then:
                for r in self.rows:
                    for v in self.vectors:
                        builder.store(builder.load(self._out(r, v), align=4), self.acc[r][v])
            with otherwise:
                for r in self.rows:
                    for v in self.vectors:
                        builder.store(zero, self.acc[r][v])

    def _step(self, k: Any, scales: list[Any], mins: list[Any]) -> None:
        """acc[r][v] = fma(x[r, k], w[k, v], acc[r][v]) for all r and v."""
        builder = self.builder
        offset = builder.mul(k, self.ldw)
        weights = [self._weights(offset, v, scales, mins) for v in self.vectors]
        for r in self.rows:
            x = self._broadcast(r, k)
            for v in self.vectors:
                total = builder.call(self.fma, [x, weights[v], builder.load(self.acc[r][v])])
                builder.store(total, self.acc[r][v])

    def _broadcast(self, r: int, k: Any) -> Any:
        builder = self.builder
        place = builder.gep(self._pointer(self.x, _f32), [builder.add(builder.mul(_i64(r), self.ldx), k)])
        one = builder.insert_element(ir.Constant(_vec, ir.Undefined), builder.load(place, align=4), _i32(0))
        return builder.shuffle_vector(one, ir.Constant(_vec, ir.Undefined), ir.Constant(_ivec, [0] * LANES))

    def _weights(self, offset: Any, v: int, scales: list[Any], mins: list[Any]) -> Any:
        builder = self.builder
        if self.storage == STORED_F32:
            return self._load(self.w, offset, v)
        bits = 16 if self.storage == STORED_BF16 else 8
        raw = builder.zext(self._load(self.w, offset, v, ir.IntType(bits)), _ivec)
        if self.storage == STORED_BF16:
            return builder.bitcast(builder.shl(raw, ir.Constant(_ivec, [16] * LANES)), _vec)
        return builder.call(self.fma, [scales[v], builder.sitofp(raw, _vec), mins[v]])

    def _load(self, address: Any, offset: Any, v: int, element: Any = _f32) -> Any:
        builder = self.builder
        place = builder.gep(self._pointer(address, element), [builder.add(offset, _i64(LANES * v))])
        align = 4 if element is _f32 else element.width // 8
        return builder.load(builder.bitcast(place, ir.VectorType(element, LANES).as_pointer()), align=align)

    def _out(self, r: int, v: int) -> Any:
        builder = self.builder
        offset = builder.add(builder.mul(_i64(r), self.ldo), _i64(LANES * v))
        return builder.bitcast(builder.gep(self._pointer(self.out, _f32), [offset]), _vec.as_pointer())

    def _pointer(self, address: Any, element: Any) -> Any:
        return self.builder.inttoptr(address, element.as_pointer())
