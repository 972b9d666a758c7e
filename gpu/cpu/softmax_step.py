"""One online-softmax step of one query over one page, as LLVM code with its own exponential."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gpu.cpu.product_tile import LANES

LOG2E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
EXP_FLOOR = -86.0
ROUNDER = 12582912.0

_f32 = ir.FloatType()
_i1, _i32, _i64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)
_vec = ir.VectorType(_f32, LANES)
_ivec = ir.VectorType(_i32, LANES)


@intrinsic  # type: ignore[untyped-decorator]
def softmax_step(typingctx: Any, scores: Any, num_cells: Any, width: Any, old_max: Any, new_max_at: Any) -> Any:
    """Replace scores by exp(score - new max) and return their sum.

    scores: address of `width` f32 (a multiple of 16), of which the first `num_cells` count; the rest become 0.
    old_max: f32. new_max_at: address of one f32 that receives max(old_max, scores). The sum runs over 16 lanes, then
    over a fixed tree.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.call(_step_function(builder.module), args)

    return types.float32(types.int64, types.int64, types.int64, types.float32, types.int64), codegen


def _step_function(module: Any) -> Any:
    name = "kvalet_softmax_step"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(_f32, [_i64, _i64, _i64, _f32, _i64]), name)
    function.linkage = "internal"
    _StepBuilder(function).emit()
    return function


class _StepBuilder:
    """Emits two passes over the scores: the maximum, then exponentials and their sum."""

    def __init__(self, function: Any) -> None:
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        self.module = function.module
        self.scores, self.num_cells, self.width, self.old_max, self.new_max_at = function.args
        self.total = self.builder.alloca(_vec)

    def emit(self) -> None:
        builder = self.builder
        steps = builder.udiv(self.width, _i64(LANES))
        builder.store(self._splat(self.old_max), self.total)
        with cgutils.for_range(builder, steps) as loop:
            score = builder.load(self._place(loop.index), align=4)
            masked = builder.select(self._counts(loop.index), score, self._splat(self.old_max))
            builder.store(self._larger(builder.load(self.total), masked), self.total)
        new_max = self._fold(builder.load(self.total), self._larger)
        builder.store(new_max, builder.inttoptr(self.new_max_at, _f32.as_pointer()))
        builder.store(_constant(0.0), self.total)
        with cgutils.for_range(builder, steps) as loop:
            place = self._place(loop.index)
            power = self._exp(builder.fsub(builder.load(place, align=4), self._splat(new_max)))
            kept = builder.select(self._counts(loop.index), power, _constant(0.0))
            builder.store(kept, place, align=4)
            builder.store(builder.fadd(builder.load(self.total), kept), self.total)
        builder.ret(self._fold(builder.load(self.total), builder.fadd))

    def _exp(self, x: Any) -> Any:
        """exp of x <= 0; 0 below -86. Cephes expf polynomial with fused steps; the exponent is added as an integer."""
        builder = self.builder
        tiny = builder.fcmp_ordered("<", x, _constant(EXP_FLOOR))
        x = builder.select(tiny, _constant(EXP_FLOOR), x)
        shifted = self._fma(x, _constant(LOG2E), _constant(ROUNDER))
        k = builder.fsub(shifted, _constant(ROUNDER))
        r = self._fma(k, _constant(-LN2_HIGH), x)
        r = self._fma(k, _constant(-LN2_LOW), r)
        p = _constant(EXP_TERMS[0])
        for term in EXP_TERMS[1:]:
            p = self._fma(p, r, _constant(term))
        p = self._fma(p, builder.fmul(r, r), builder.fadd(r, _constant(1.0)))
        exponent = builder.shl(builder.bitcast(shifted, _ivec), ir.Constant(_ivec, [23] * LANES))
        power = builder.bitcast(builder.add(builder.bitcast(p, _ivec), exponent), _vec)
        return builder.select(tiny, _constant(0.0), power)

    def _fma(self, a: Any, b: Any, c: Any) -> Any:
        kind = ir.FunctionType(_vec, [_vec] * 3)
        return self.builder.call(cgutils.get_or_insert_function(self.module, kind, f"llvm.fma.v{LANES}f32"), [a, b, c])

    def _counts(self, index: Any) -> Any:
        """Lanes whose cell is below num_cells."""
        builder = self.builder
        left = builder.trunc(builder.sub(self.num_cells, builder.mul(index, _i64(LANES))), _i32)
        return builder.icmp_signed("<", ir.Constant(_ivec, list(range(LANES))), self._splat(left))

    def _larger(self, a: Any, b: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def _fold(self, value: Any, combine: Any) -> Any:
        """Combine lanes l and l + 8, then l and l + 4, and so on."""
        distance = LANES // 2
        while distance:
            order = [(lane + distance) % LANES for lane in range(LANES)]
            moved = self.builder.shuffle_vector(value, value, ir.Constant(_ivec, order))
            value = combine(value, moved)
            distance //= 2
        return self.builder.extract_element(value, _i32(0))

    def _place(self, index: Any) -> Any:
        first = self.builder.gep(
            self.builder.inttoptr(self.scores, _f32.as_pointer()), [self.builder.mul(index, _i64(LANES))]
        )
        return self.builder.bitcast(first, _vec.as_pointer())

    def _splat(self, value: Any) -> Any:
        kind = ir.VectorType(value.type, LANES)
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, _i32(0))
        return self.builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(_ivec, [0] * LANES))


def _constant(value: float) -> Any:
    return ir.Constant(_vec, [value] * LANES)
