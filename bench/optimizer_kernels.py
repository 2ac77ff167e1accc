"""What a step of each of our elementwise optimizers moves in a second, as a share of what a copy does.

    python bench/optimizer_kernels.py [--device cuda] [--elements 200000000] [--segments 150] [--rounds 5]

Counted are the fewest bytes that a step must move: it reads gradient, parameter and states once, writes parameter and
states once, and the copy in bf16 where there is one. Gradients are in fp32 and are multiplied by a factor that lies on
the device (loss scale and clipping), as in an engine. Beside them stand torch's own fused AdamW, which neither scales
nor copies, and the copy of a large tensor that moves as much as AdamW with a copy in bf16 must. Host: the time until a
step has been launched.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _gpu import attempt, keep, options_of

from shardwise.compat import allow_gradient_dtype
from shardwise.optim import Adagrad, AdamW, ElementwiseOptimizer, Lion

BF16, FP32 = torch.bfloat16, torch.float32
CLASSES: tuple[type[ElementwiseOptimizer], ...] = (AdamW, Lion, Adagrad)
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32 masters, bf16 copy": {},
    "fp32 masters, bf16 copy, bf16 states": {"state_dtype": BF16},
    "bf16, nearest": {"rounding": "nearest"},
    "bf16, stochastic": {"rounding": "stochastic"},
    "bf16, kahan": {"rounding": "kahan"},
    "bf16, stochastic, bf16 states": {"rounding": "stochastic", "state_dtype": BF16},
    "bf16, kahan, bf16 states": {"rounding": "kahan", "state_dtype": BF16},
}
ASKED = "AdamW, fp32 masters, bf16 copy"
"""What is asked to reach nine tenths of a copy."""
TOGETHER = 5
"""Steps that are timed together, so that the host is ahead of the device."""

Step = Callable[[], object]


def cut(tensor: torch.Tensor, segments: int) -> list[torch.Tensor]:
    """Cut a flat tensor as an engine does, in segments of various lengths at multiples of 64 elements."""
    weights = [1 + number % 7 for number in range(segments)]
    ends = [sum(weights[: number + 1]) * tensor.numel() // sum(weights) // 64 * 64 for number in range(segments)]
    ends[-1] = tensor.numel()
    return [tensor[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def ours(
    cls: type[ElementwiseOptimizer], precision: str, elements: int, segments: int, device: str
) -> tuple[int, Step]:
    """Return the fewest bytes an element, and a step of one of our optimizers."""
    options = PRECISIONS[precision]
    masters = "rounding" not in options
    values = torch.randn(elements, device=device).to(FP32 if masters else BF16)
    gradient = torch.randn(elements, device=device)
    parts = [torch.nn.Parameter(part) for part in cut(values, segments)]
    optimizer = cls(parts, lr=1e-4, weight_decay=0.01, **options)
    outputs = cut(torch.empty_like(values, dtype=BF16), segments) if masters else []
    optimizer.shardwise_origins = {id(part): [(number, 0, 0, part.numel())] for number, part in enumerate(parts)}
    for part, own in zip(parts, cut(gradient, segments), strict=True):
        allow_gradient_dtype(part, own.dtype)
        part.grad = own

    def step() -> None:
        """Scale the gradients, step, and copy."""
        gradient.mul_(1.0)
        optimizer.step()
        for output, part in zip(outputs, parts, strict=False):
            output.copy_(part.detach())

    step()  # makes the states
    kept = sum(tensor.itemsize for name, tensor in optimizer.state[parts[0]].items() if name != "step")
    moved = gradient.itemsize + 2 * values.itemsize + 2 * kept + (2 if masters else 0)
    return moved, step


def fused(elements: int, segments: int, device: str) -> tuple[int, Step]:
    """Return the same of torch's fused AdamW in fp32."""
    parts = [torch.nn.Parameter(part) for part in cut(torch.randn(elements, device=device), segments)]
    for part in parts:
        part.grad = torch.randn_like(part)
    optimizer = torch.optim.AdamW(parts, lr=1e-4, weight_decay=0.01, fused=True)
    return 28, optimizer.step


def copy(elements: int, segments: int, device: str) -> tuple[int, Step]:
    """Return the same of a copy that moves 30 bytes an element, read and written ones together."""
    source = torch.ones(15 * elements, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 30, lambda: target.copy_(source)


def timed(step: Step, device: str, rounds: int) -> tuple[float, float]:
    """Return seconds of a step, and those of the host until it has been launched; medians."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(3):
        step()
    spent, launched = [], []
    for _ in range(rounds):
        wait()
        start = time.perf_counter()
        for _ in range(TOGETHER):
            step()
        launched.append((time.perf_counter() - start) / TOGETHER)
        wait()
        spent.append((time.perf_counter() - start) / TOGETHER)
    return statistics.median(spent), statistics.median(launched)


def contestants(elements: int, segments: int, device: str) -> Iterator[tuple[str, Callable[[], tuple[int, Step]]]]:
    """Yield optimizer and precision, and what makes the step."""
    yield "copy", lambda: copy(elements, segments, device)
    yield "AdamW of torch, fused, fp32", lambda: fused(elements, segments, device)
    for cls in CLASSES:
        for precision in PRECISIONS:
            made = (cls, precision, elements, segments, device)
            yield f"{cls.__name__}, {precision}", lambda made=made: ours(*made)


def measure(elements: int, segments: int, device: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each optimizer and precision: GB/s, share of the copy's, milliseconds of device and host.

    Args:
        elements: that are stepped.
        segments: in which they lie.
        device: "cuda" or "cpu".
        rounds: of which medians are taken.
    """
    reached = 0.0
    for system, make in contestants(elements, segments, device):

        def figures(make: Callable[[], tuple[int, Step]] = make) -> dict[str, Any]:
            moved, step = make()
            seconds, launched = timed(step, device, rounds)
            speed = moved * elements / seconds / 1e9
            return {"bytes": moved, "gb_per_s": speed, "median_ms": seconds * 1e3, "host_ms": launched * 1e3}

        row = attempt({"system": system, "asked": system == ASKED}, figures)
        if "failed" not in row:
            reached = reached or (row["gb_per_s"] if system == "copy" else 0.0)
            row["of_copy"] = row["gb_per_s"] / reached if reached else None
        yield row


def main() -> None:
    """Measure, print the table and keep it."""

    def quick(options: argparse.Namespace) -> None:
        options.elements, options.rounds = 100_000, 2

    options = options_of(__doc__, quick=quick, elements=200_000_000, segments=150, rounds=5)
    rows = []
    for row in measure(options.elements, options.segments, options.device, options.rounds):
        rows.append(row)
        if "failed" not in row:
            share = "" if row["of_copy"] is None else f"{row['of_copy']:6.1%} of the copy"
            line = "{system:60s}{bytes:3d} B {gb_per_s:8.1f} GB/s {median_ms:8.3f} ms, host {host_ms:7.3f} ms"
            print(line.format(**row), share, flush=True)
    keep(options, "optimizer", rows, elements=options.elements, segments=options.segments, rounds=options.rounds)


if __name__ == "__main__":
    main()
