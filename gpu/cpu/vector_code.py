"""Words for writing LLVM code on vectors of 16 f32, shared by the kernels that are emitted rather than compiled.

A `<16 x float>` is one AVX-512 register, two of AVX, four of NEON or SSE: LLVM splits it without reordering anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from gpu.cpu.intrinsics import intrinsic

LANES = 16
LOG2E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
EXP_FLOOR = -86.0
ROUNDER = 12582912.0

F32, I8, I16, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


def emitted_kernel(name: str, num_args: int, emit: Callable[[VectorCode, Any], None]) -> Any:
    """An intrinsic of `num_args` i64 arguments, without result, whose body `emit(code, arguments)` writes once."""

    def call(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = builder.module.globals.get(name) or _define(builder.module)
        builder.call(function, args)
        return context.get_dummy_value()

    def _define(module: Any) -> Any:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * num_args), name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        code = VectorCode(ir.IRBuilder(function.append_basic_block("entry")))
        emit(code, function.args)
        code.builder.ret_void()
        return function

    def kernel(typingctx: Any, *args: Any) -> Any:
        return types.none(*([types.int64] * num_args)), call

    return intrinsic(_with_arity(kernel, name, num_args))


def _with_arity(kernel: Callable[..., Any], name: str, num_args: int) -> Callable[..., Any]:
    """Numba reads an intrinsic's arity from its signature, so give `kernel` one."""
    names = ", ".join(f"a{i}" for i in range(num_args))
    scope: dict[str, Any] = {"kernel": kernel}
    exec(f"def {name}(typingctx, {names}): return kernel(typingctx, {names})", scope)
    made: Callable[..., Any] = scope[name]
    return made


class VectorCode:
    """An LLVM builder with the operations that the kernels need. Addresses are i64; offsets count elements."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def loop(self, count: Any) -> Any:
        """`with code.loop(count) as index`: index runs over 0 .. count - 1."""
        return _Loop(self.builder, count)

    def offset(self, base: Any, *terms: Any) -> Any:
        """base + sum of terms; each an i64 value, an int, or a pair to multiply."""
        total = base
        for term in terms:
            value = self.builder.mul(*map(_i64, term)) if isinstance(term, tuple) else _i64(term)
            total = self.builder.add(_i64(total), value)
        return total

    def load(self, address: Any, offset: Any, element: Any = F32, lanes: int = LANES) -> Any:
        """`lanes` elements at address[offset]."""
        place = self._place(address, offset, element)
        vector = self.builder.bitcast(place, ir.VectorType(element, lanes).as_pointer())
        return self.builder.load(vector, align=_size(element))

    def load_one(self, address: Any, offset: Any, element: Any = F32) -> Any:
        """The element at address[offset]."""
        return self.builder.load(self._place(address, offset, element), align=_size(element))

    def store(self, value: Any, address: Any, offset: Any) -> None:
        """Store f32 values (a vector or one) at address[offset]."""
        place = self._place(address, offset, F32)
        self.builder.store(value, self.builder.bitcast(place, value.type.as_pointer()), align=4)

    def prefetch(self, address: Any, offset: Any) -> None:
        """Ask for the cache line at byte address + offset; harmless beyond the end."""
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        self.builder.call(function, [self._place(address, offset, I8), I32(0), I32(3), I32(1)])

    def splat(self, value: Any) -> Any:
        """One value in all lanes."""
        kind = ir.VectorType(value.type, LANES)
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
        return self.builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(INTS, [0] * LANES))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, rounded once."""
        kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
        return self.builder.call(
            cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.fma.v{LANES}f32"), [a, b, c]
        )

    def shuffle(self, a: Any, b: Any, order: list[int]) -> Any:
        """Lanes of a (0 ..) and b (16 ..) in the given order."""
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(order)), order))

    def larger(self, a: Any, b: Any) -> Any:
        """The larger of a and b, lane by lane."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def fold(self, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """All lanes combined in a fixed tree: l with l + 8, then l + 4, l + 2, l + 1."""
        distance = LANES // 2
        while distance:
            value = combine(value, self.shuffle(value, value, [(i + distance) % LANES for i in range(LANES)]))
            distance //= 2
        return self.builder.extract_element(value, I32(0))

    def exp(self, x: Any) -> Any:
        """exp of x <= 0; 0 below -86. Cephes expf polynomial in fused steps; the exponent is added as an integer."""
        builder = self.builder
        tiny = builder.fcmp_ordered("<", x, floats(EXP_FLOOR))
        x = builder.select(tiny, floats(EXP_FLOOR), x)
        shifted = self.fma(x, floats(LOG2E), floats(ROUNDER))
        k = builder.fsub(shifted, floats(ROUNDER))
        r = self.fma(k, floats(-LN2_LOW), self.fma(k, floats(-LN2_HIGH), x))
        p = floats(EXP_TERMS[0])
        for term in EXP_TERMS[1:]:
            p = self.fma(p, r, floats(term))
        p = self.fma(p, builder.fmul(r, r), builder.fadd(r, floats(1.0)))
        exponent = builder.shl(builder.bitcast(shifted, INTS), ints(23))
        power = builder.bitcast(builder.add(builder.bitcast(p, INTS), exponent), FLOATS)
        return builder.select(tiny, floats(0.0), power)

    def from_half(self, halves: Any) -> Any:
        """16 fp16 bit patterns (finite) to f32, exactly, subnormals included."""
        builder = self.builder
        bits = builder.zext(halves, INTS)
        size = builder.bitcast(builder.shl(builder.and_(bits, ints(0x7FFF)), ints(13)), FLOATS)
        size = builder.bitcast(builder.fmul(size, floats(2.0**112)), INTS)
        sign = builder.shl(builder.and_(bits, ints(0x8000)), ints(16))
        return builder.bitcast(builder.or_(size, sign), FLOATS)

    def transpose(self, rows: list[Any]) -> list[Any]:
        """16 vectors of 16 lanes, rows for columns: four perfect shuffles."""
        low = [lane for pair in zip(range(8), range(16, 24), strict=True) for lane in pair]
        high = [lane + 8 for lane in low]
        for _ in range(4):
            halves = zip(rows[:8], rows[8:], strict=True)
            rows = [self.shuffle(a, b, order) for a, b in halves for order in (low, high)]
        return rows

    def _place(self, address: Any, offset: Any, element: Any) -> Any:
        return self.builder.gep(self.builder.inttoptr(address, element.as_pointer()), [_i64(offset)])


class _Loop:
    """A counted loop as a context manager that yields the index alone."""

    def __init__(self, builder: Any, count: Any) -> None:
        self._loop = cgutils.for_range(builder, _i64(count))

    def __enter__(self) -> Any:
        return self._loop.__enter__().index

    def __exit__(self, *exc: Any) -> Any:
        return self._loop.__exit__(*exc)


def floats(value: float) -> Any:
    """A constant in all lanes."""
    return ir.Constant(FLOATS, [value] * LANES)


def ints(value: int) -> Any:
    """A constant in all lanes."""
    return ir.Constant(INTS, [value] * LANES)


def _i64(value: Any) -> Any:
    return I64(value) if isinstance(value, int) else value


def _size(element: Any) -> int:
    return 4 if element is F32 else int(element.width) // 8
