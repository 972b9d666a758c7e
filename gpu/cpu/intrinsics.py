"""Instructions that Numba does not offer: fused multiply-add, bit casts, atomics, raw addresses.

Nothing in this package is compiled with fast-math flags: a multiply and an add fuse only where `fma` says so, and
vectorising a loop never changes a bit.
"""

from __future__ import annotations

import platform
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as _numba_intrinsic

intrinsic: Any = _numba_intrinsic
carray: Any = numba.carray

_f32 = ir.FloatType()
_i8, _i32, _i64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c in f32, rounded once."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_f32, [_f32] * 3)
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.f32"), args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def float_bits(typingctx: Any, value: Any) -> Any:
    """The bits of an f32 as i32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _i32)

    return types.int32(types.float32), codegen


@intrinsic
def bits_float(typingctx: Any, value: Any) -> Any:
    """The f32 with the given i32 bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _f32)

    return types.float32(types.int32), codegen


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:
    """An address as an untyped pointer, for `carray`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], _i8.as_pointer())

    return types.voidptr(types.int64), codegen


@intrinsic
def call_chunk(typingctx: Any, function: Any, task: Any, chunk: Any, scratch: Any) -> Any:
    """Call the C function void(i64, i64, i64) at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_i64] * 3)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def atomic_load(typingctx: Any, array: Any, index: Any) -> Any:
    """array[index] of an i64 array, acquire."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _element(context, builder, signature, args)
        return builder.load_atomic(place, "acquire", 8)

    return types.int64(array, types.intp), codegen


@intrinsic
def atomic_store(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index] = value of an i64 array, release."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _element(context, builder, signature, args)
        builder.store_atomic(args[2], place, "release", 8)
        return context.get_dummy_value()

    return types.none(array, types.intp, types.int64), codegen


@intrinsic
def atomic_add(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index] += value of an i64 array; returns the old value."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _element(context, builder, signature, args)
        return builder.atomic_rmw("add", place, args[2], "acq_rel")

    return types.int64(array, types.intp, types.int64), codegen


@intrinsic
def atomic_swap_if(typingctx: Any, array: Any, index: Any, expected: Any, value: Any) -> Any:
    """Set array[index] to value if it is `expected`; returns whether it was."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _element(context, builder, signature, args)
        pair = builder.cmpxchg(place, args[2], args[3], "acq_rel", "acquire")
        return builder.extract_value(pair, 1)

    return types.boolean(array, types.intp, types.int64, types.int64), codegen


def _element(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return builder.gep(array.data, [args[1]])


@intrinsic
def spin_hint(typingctx: Any) -> Any:
    """Tell the core that this is a spin loop."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        machine = platform.machine()
        if machine in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        elif machine in ("aarch64", "arm64"):
            kind = ir.FunctionType(ir.VoidType(), [_i32])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.hint"), [_i32(1)])
        return context.get_dummy_value()

    return types.none(), codegen
