"""Steps of elementwise optimizers as a kernel in Triton; imported by `shardwise.device.steps` where Triton is there.

One kernel for all: switches tell it what to read, which algorithm to follow and how to round. A program updates a chunk
of a run: it looks up in a table which, and where its tensors are.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from shardwise.device.steps import Formula

CHUNK = 4096
"""Elements of a program: enough for looking up to cost nothing, and few enough for all processors to end together."""

_BLOCK = tl.constexpr(512)
"""Elements at a time: 4 for each of 128 threads, which is 16 bytes of fp32. More would make threads hold 16 bytes of
bf16, and read fp32 with gaps between them.
"""

_COLUMNS = tl.constexpr(9)
"""Of the table of runs: elements, number of the first chunk, whether all addresses are multiples of 16; addresses of
gradient, parameter, states, compensation and output."""

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# Annotations would be taken for types of Triton's, so that jitted functions have none but `tl.constexpr`.
# mypy: allow-untyped-defs, disable-error-code=no-untyped-def


@triton.jit
def _at(address, start, TYPE: tl.constexpr, FULL: tl.constexpr):
    """Point to an element of a tensor."""
    pointer = address.to(tl.pointer_type(TYPE)) + start
    return tl.multiple_of(pointer, 16) if FULL else pointer


@triton.jit
def _read(pointer, place, there, FULL: tl.constexpr):
    found = tl.load(pointer + place) if FULL else tl.load(pointer + place, mask=there)
    return found.to(tl.float32)


@triton.jit
def _write(pointer, place, there, values, FULL: tl.constexpr):
    values = values.to(pointer.dtype.element_ty)
    if FULL:
        tl.store(pointer + place, values)
    else:
        tl.store(pointer + place, values, mask=there)


# -- rounding (see shardwise.optim.rounding) ---------------------------------------------------------------------------


@triton.jit
def _noise(place, first, last, spans, keys, FULL: tl.constexpr):
    """Return the 16 random bits of elements (of a run) in the lower half of 32.

    Args:
        place: of the elements.
        first, last: range of the origins that there are among them; FULL: all are of the first.
        spans: first pair of elements of each origin, and that behind its last.
        keys: that of the stream, then what each origin adds to the number of a pair.
    """
    pair = place >> 1
    if FULL:
        x = pair + tl.load(keys + 1 + first)
    else:
        x = tl.full(pair.shape, 0, tl.int32)
        for origin in range(first, last):
            inside = (pair >= tl.load(spans + 2 * origin)) & (pair < tl.load(spans + 2 * origin + 1))
            x = tl.where(inside, pair + tl.load(keys + 1 + origin), x)
    x = x.to(tl.uint32, bitcast=True)
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x += tl.load(keys).to(tl.uint32, bitcast=True)
    x *= 0x846CA68B
    x ^= x >> 16
    return (x >> ((place & 1) * 16).to(tl.uint32)) & 0xFFFF


@triton.jit
def _stochastic(values, noise):
    """Round to numbers that bf16 has, up or down at random; what is not a number stays so."""
    # As numbers with a sign the random ones begin at -0x8000, which is added to them again.
    bits = (values.to(tl.uint32, bitcast=True) + (noise ^ 0x8000)) & 0xFFFF0000
    return tl.where(values == values, bits.to(tl.float32, bitcast=True), values)


@triton.jit
def _compensated(values, rest):
    limit = tl.abs(values) * 0.00390625
    rest = tl.minimum(rest, limit, propagate_nan=tl.PropagateNan.ALL)
    return values + tl.maximum(rest, -limit, propagate_nan=tl.PropagateNan.ALL)


# -- algorithms (each as the `update` of its class, operation by operation) --------------------------------------------


@triton.jit
def _adam(value, gradient, average, square, DECAY: tl.constexpr, decay, rate, eps, keep1, add1, keep2, add2, unbias):
    if DECAY == "value":
        value = value * decay
    elif DECAY == "gradient":
        gradient = value * decay + gradient
    average = average * keep1 + gradient * add1
    square = square * keep2 + gradient * gradient * add2
    scale = tl.div_rn(1.0, tl.sqrt_rn(square) * unbias + eps)
    return value - scale * average * rate, average, square


@triton.jit
def _lion(value, gradient, average, DECAY: tl.constexpr, decay, rate, keep1, add1, keep2, add2):
    direction = average * keep1 + gradient * add1
    if DECAY == "value":
        value = value * decay
    sign = tl.where(direction > 0, 1.0, tl.where(direction < 0, -1.0, 0.0))
    return value - sign * rate, average * keep2 + gradient * add2


@triton.jit
def _adagrad(value, gradient, square, DECAY: tl.constexpr, decay, rate, eps):
    if DECAY == "gradient":
        gradient = value * decay + gradient
    square = square + gradient * gradient
    scale = tl.div_rn(1.0, tl.sqrt_rn(square) + eps)
    return value - scale * gradient * rate, square


# -- the kernel --------------------------------------------------------------------------------------------------------


@triton.jit
def _update(
    row,
    start,
    size,
    first,
    last,
    spans,
    keys,
    stride,
    scale,
    decay,
    rate,
    eps,
    keep1,
    add1,
    keep2,
    add2,
    unbias,
    ALGORITHM: tl.constexpr,
    DECAY: tl.constexpr,
    ROUNDING: tl.constexpr,
    GRADIENT: tl.constexpr,
    PARAMETER: tl.constexpr,
    STATE: tl.constexpr,
    OUTPUT: tl.constexpr,
    SCALES: tl.constexpr,
    CHUNK: tl.constexpr,
    FULL: tl.constexpr,
):
    """Update `size` elements of a run from `start` on.

    FULL: they are as many as a chunk has, at aligned addresses, and of one origin.
    """
    gradients = _at(tl.load(row + 3), start, GRADIENT, FULL)
    parameters = _at(tl.load(row + 4), start, PARAMETER, FULL)
    firsts = _at(tl.load(row + 5), start, STATE, FULL)
    seconds = _at(tl.load(row + 6), start, STATE, FULL)
    rests = _at(tl.load(row + 7), start, PARAMETER, FULL)
    outputs = _at(tl.load(row + 8), start, PARAMETER if OUTPUT is None else OUTPUT, FULL)
    for begin in range(0, CHUNK if FULL else size, _BLOCK):
        place = begin + tl.arange(0, _BLOCK)
        there = place < size
        in_run = start.to(tl.int32) + place
        gradient = _read(gradients, place, there, FULL)
        value = _read(parameters, place, there, FULL)
        first_state = _read(firsts, place, there, FULL)
        if ROUNDING == "kahan":
            value = _compensated(value, _read(rests, place, there, FULL))
        if SCALES:
            gradient = gradient * scale
        if ALGORITHM == "adam":
            second_state = _read(seconds, place, there, FULL)
            value, first_state, second_state = _adam(
                value, gradient, first_state, second_state, DECAY, decay, rate, eps, keep1, add1, keep2, add2, unbias
            )
            if STATE.is_bf16():
                second_state = _stochastic(second_state, _noise(in_run, first, last, spans, keys + 2 * stride, FULL))
            _write(seconds, place, there, second_state, FULL)
        elif ALGORITHM == "lion":
            value, first_state = _lion(value, gradient, first_state, DECAY, decay, rate, keep1, add1, keep2, add2)
        else:
            value, first_state = _adagrad(value, gradient, first_state, DECAY, decay, rate, eps)
        if STATE.is_bf16():
            first_state = _stochastic(first_state, _noise(in_run, first, last, spans, keys + stride, FULL))
        _write(firsts, place, there, first_state, FULL)
        if ROUNDING == "stochastic":
            value = _stochastic(value, _noise(in_run, first, last, spans, keys, FULL))
        rounded = value.to(PARAMETER)
        _write(parameters, place, there, rounded, FULL)
        if ROUNDING == "kahan":
            _write(rests, place, there, value - rounded.to(tl.float32), FULL)
        if OUTPUT is not None:
            _write(outputs, place, there, rounded.to(tl.float32), FULL)


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["factor"])
def _step(
    chunks,
    spans,
    rows,
    keys,
    stride,
    factor,
    decay,
    rate,
    eps,
    keep1,
    add1,
    keep2,
    add2,
    unbias,
    ALGORITHM: tl.constexpr,
    DECAY: tl.constexpr,
    ROUNDING: tl.constexpr,
    GRADIENT: tl.constexpr,
    PARAMETER: tl.constexpr,
    STATE: tl.constexpr,
    OUTPUT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Update one chunk.

    Args:
        chunks: int32, four for each chunk: its run, the range of origins that there are in it, and whether it is whole
            and of one origin (of any, where there are no random numbers).
        rows: int64, `_COLUMNS` for each run.
        spans, keys: int32, see `_noise`; a row of `keys` for the parameter and each state, or None.
        stride: of the rows of `keys`.
        factor: gradients are multiplied by, on the device; or None.
        decay, rate, eps, keep1, add1, keep2, add2, unbias: see `shardwise.device.steps.Formula`.
    """
    number = tl.program_id(0)
    chunk = chunks + number.to(tl.int64) * 4
    row = rows + tl.load(chunk).to(tl.int64) * _COLUMNS
    first, last = tl.load(chunk + 1), tl.load(chunk + 2)
    start = (number - tl.load(row + 1)) * CHUNK
    size = tl.load(row) - start
    scale = 1.0
    if factor is not None:
        scale = tl.load(factor).to(tl.float32)
    if (tl.load(chunk + 3) != 0) & (tl.load(row + 2) != 0):
        _update(
            row,
            start,
            CHUNK,
            first,
            last,
            spans,
            keys,
            stride,
            scale,
            decay,
            rate,
            eps,
            keep1,
            add1,
            keep2,
            add2,
            unbias,
            ALGORITHM,
            DECAY,
            ROUNDING,
            GRADIENT,
            PARAMETER,
            STATE,
            OUTPUT,
            factor is not None,
            CHUNK,
            True,
        )
    else:
        _update(
            row,
            start,
            tl.minimum(size, CHUNK).to(tl.int32),
            first,
            last,
            spans,
            keys,
            stride,
            scale,
            decay,
            rate,
            eps,
            keep1,
            add1,
            keep2,
            add2,
            unbias,
            ALGORITHM,
            DECAY,
            ROUNDING,
            GRADIENT,
            PARAMETER,
            STATE,
            OUTPUT,
            factor is not None,
            CHUNK,
            False,
        )


def launch(
    chunks: torch.Tensor,
    spans: torch.Tensor,
    rows: torch.Tensor,
    keys: torch.Tensor | None,
    factor: torch.Tensor | None,
    formula: Formula,
    kind: tuple[torch.dtype | None, ...],
    rounding: str,
) -> None:
    """Step all runs of a table.

    Args:
        chunks, spans, rows, keys, factor: see `_step`.
        formula: what is computed.
        kind: dtypes of gradients, parameters, states and output; None: there is none.
        rounding: of parameters.
    """
    algorithm, decay_of, *numbers = dataclasses.astuple(formula)
    gradient, parameter, state, output = (None if dtype is None else _TYPES[dtype] for dtype in kind)
    _step[(chunks.shape[0],)](
        chunks,
        spans,
        rows,
        keys,
        0 if keys is None else keys.shape[1],
        factor,
        *map(float, numbers),
        algorithm,
        decay_of,
        rounding,
        gradient,
        parameter,
        state,
        output,
        CHUNK,
        enable_fp_fusion=False,
    )
