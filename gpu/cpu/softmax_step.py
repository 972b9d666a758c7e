"""Emitted kernels with an exponential: the online-softmax step of one query over one page, and the gate of SwiGLU."""

from __future__ import annotations

from typing import Any

from gpu.cpu.vector_code import FLOATS, I64, INTS, LANES, VectorCode, emitted_kernel, floats


def _emit_softmax(code: VectorCode, args: Any) -> None:
    scores, num_cells, width, state, state_width, peak, total = args
    builder = code.builder
    kept = builder.alloca(FLOATS)
    steps = builder.udiv(width, I64(LANES))
    old_peak = code.load_one(peak, 0)
    builder.store(code.splat(old_peak), kept)
    with code.loop(steps) as i:
        score = code.load(scores, code.offset(0, (i, LANES)))
        masked = builder.select(_visible(code, i, num_cells), score, code.splat(old_peak))
        builder.store(code.larger(builder.load(kept), masked), kept)
    new_peak = code.fold(builder.load(kept), code.larger)
    code.store(new_peak, peak, 0)
    builder.store(floats(0.0), kept)
    with code.loop(steps) as i:
        place = code.offset(0, (i, LANES))
        power = code.exp(builder.fsub(code.load(scores, place), code.splat(new_peak)))
        power = builder.select(_visible(code, i, num_cells), power, floats(0.0))
        code.store(power, scores, place)
        builder.store(builder.fadd(builder.load(kept), power), kept)
    shrink = code.exp(builder.fsub(code.splat(old_peak), code.splat(new_peak)))
    added = code.splat(code.fold(builder.load(kept), builder.fadd))
    grown = code.fma(code.splat(code.load_one(total, 0)), shrink, added)
    code.store(builder.extract_element(grown, INTS.element(0)), total, 0)
    with code.loop(builder.udiv(state_width, I64(LANES))) as i:
        place = code.offset(0, (i, LANES))
        code.store(builder.fmul(code.load(state, place), shrink), state, place)


def _visible(code: VectorCode, step: Any, num_cells: Any) -> Any:
    """Lanes whose cell is below num_cells."""
    builder = code.builder
    left = builder.trunc(builder.sub(num_cells, builder.mul(step, I64(LANES))), INTS.element)
    return builder.icmp_signed("<", INTS(list(range(LANES))), code.splat(left))


def _emit_gate(code: VectorCode, args: Any) -> None:
    gate, up, width = args
    builder = code.builder
    with code.loop(builder.udiv(width, I64(LANES))) as i:
        place = code.offset(0, (i, LANES))
        x = code.load(gate, place)
        positive = builder.fcmp_ordered(">=", x, floats(0.0))
        e = code.exp(builder.select(positive, builder.fneg(x), x))
        top = builder.select(positive, floats(1.0), e)
        silu = builder.fmul(x, builder.fdiv(top, builder.fadd(e, floats(1.0))))
        code.store(builder.fmul(silu, code.load(up, place)), gate, place)


softmax_step: Any = emitted_kernel("kvalet_softmax_step", 7, _emit_softmax)
"""softmax_step(scores, num_cells, width, state, state_width, peak, total), all i64; addresses of f32 but the counts.

scores: `width` scores (a multiple of 16), of which the first `num_cells` count; they become exp(score - new peak), the
rest 0. peak, total: the query's running maximum and sum, updated; the sum of a page runs over 16 lanes, then a fixed
tree. state: `state_width` values, scaled by exp(old peak - new peak).
"""

gate_step: Any = emitted_kernel("kvalet_gate_step", 3, _emit_gate)
"""gate_step(gate, up, width), all i64: gate = silu(gate) * up over `width` f32 (a multiple of 16)."""
