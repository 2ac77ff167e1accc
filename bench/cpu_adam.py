"""Time of one Adam step on a CPU, per element, beside that of copying the bytes which it cannot avoid to move.

    OMP_NUM_THREADS=1 python bench/cpu_adam.py [--elements 50000000] [--rounds 15]

All variants work on the same tensors in one process and take turns, forwards and then backwards through the list, so
that a noisy machine is noisy for all of them; beside time on the wall stands that of the processor.

A step with fp32 master weights reads parameter, gradient and two moments and writes parameter, moments and the bf16
copy: 30 bytes an element, 28 without the copy. The bound is a copy that reads and writes as many together. "scaled"
means that gradients are multiplied by a factor (loss scale and clipping), too. DeepSpeedCPUAdam takes part where it is
installed and can be built.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
from _jobs import parser, read
from _machine import save

from shardwise.compat import allow_gradient_dtype
from shardwise.optim import AdamW

OPTIONS = {"lr": 1e-3, "weight_decay": 0.01}
BOUNDS = {30: "copy of 30 bytes", 28: "copy of 28 bytes", 24: "copy of 24 bytes"}
"""By the bytes that a variant moves an element."""

Step = Callable[[], object]


class Tensors:
    """What the variants work on."""

    def __init__(self, elements: int) -> None:
        self.master = torch.nn.Parameter(torch.randn(elements))
        self.narrow = torch.nn.Parameter(self.master.detach().to(torch.bfloat16))
        self.gradient = torch.randn(elements)
        self.moments = {"exp_avg": torch.zeros(elements), "exp_avg_sq": torch.zeros(elements)}
        self.bytes = torch.zeros(15 * elements, dtype=torch.uint8)
        self.copy = torch.ones_like(self.bytes)

    def adopt(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.optim.Optimizer:
        """Give an optimizer the common moments as its state."""
        optimizer.state[parameter] = {"step": torch.tensor(10.0), **self.moments}
        return optimizer


def variants(tensors: Tensors) -> dict[str, tuple[int, Step]]:
    """Return the steps by name, with the bytes that each has to move an element."""
    master, narrow, gradient = tensors.master, tensors.narrow, tensors.gradient
    found: dict[str, tuple[int, Step]] = {}

    def copies(moved: int) -> Step:
        half = moved // 2 * master.numel()
        return lambda: tensors.bytes[:half].copy_(tensors.copy[:half])

    for moved, name in BOUNDS.items():
        found[name] = moved, copies(moved)

    loop = tensors.adopt(torch.optim.AdamW([master], foreach=False, **OPTIONS), master)
    fused = tensors.adopt(torch.optim.AdamW([master], fused=True, **OPTIONS), master)
    ours = tensors.adopt(AdamW([master], **OPTIONS), master)
    output = narrow.detach()

    def with_gradient(optimizer: torch.optim.Optimizer) -> None:
        master.grad = gradient
        optimizer.step()

    def three_passes() -> None:
        gradient.mul_(1.0)  # as long as by any other factor, and the gradient stays what it is
        with_gradient(fused)
        output.copy_(master)

    def two_passes() -> None:
        with_gradient(fused)
        output.copy_(master)

    found["torch AdamW, loop"] = 28, lambda: with_gradient(loop)
    found["torch AdamW, fused"] = 28, lambda: with_gradient(fused)
    found["torch AdamW, fused, then bf16 copy"] = 30, two_passes
    found["scaled, then torch AdamW, fused, then bf16 copy"] = 30, three_passes
    found["shardwise AdamW"] = 28, lambda: with_gradient(ours)

    def own_scaled() -> None:
        gradient.mul_(1.0)
        with_gradient(ours)
        output.copy_(master)

    found["scaled, then shardwise AdamW, then bf16 copy"] = 30, own_scaled
    for rounding, moved in (("stochastic", 24), ("kahan", 28)):
        own = tensors.adopt(AdamW([narrow], rounding=rounding, **OPTIONS), narrow)
        allow_gradient_dtype(narrow, gradient.dtype)

        def rounded(own: torch.optim.Optimizer = own) -> None:
            gradient.mul_(1.0)
            narrow.grad = gradient
            own.step()

        found[f"shardwise AdamW, scaled, no masters, {rounding}"] = moved, rounded
    peer = deepspeed_adam(master)
    if peer is not None:

        def peer_and_copy() -> None:
            with_gradient(peer)
            output.copy_(master)

        def peer_scaled() -> None:
            gradient.mul_(1.0)
            peer_and_copy()

        found["DeepSpeedCPUAdam"] = 28, lambda: with_gradient(peer)
        found["DeepSpeedCPUAdam, then bf16 copy"] = 30, peer_and_copy
        found["scaled, then DeepSpeedCPUAdam, then bf16 copy"] = 30, peer_scaled
    return found


def deepspeed_adam(master: torch.nn.Parameter) -> torch.optim.Optimizer | None:
    """Return DeepSpeed's optimizer, or None where it is not installed or cannot be built."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        found: torch.optim.Optimizer = DeepSpeedCPUAdam([master], adamw_mode=True, **OPTIONS)
    except Exception as error:
        print(f"without DeepSpeedCPUAdam: {type(error).__name__}: {str(error).splitlines()[:1]}")
        return None
    return found


def main() -> None:
    """Take turns, print the table and keep it."""
    options = parser(__doc__)
    options.add_argument("--elements", type=int, default=50_000_000)
    options.add_argument("--rounds", type=int, default=15)
    chosen = read(options)
    elements, rounds = (100_000, 2) if chosen.quick else (chosen.elements, chosen.rounds)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    steps = variants(Tensors(elements))
    spent: dict[str, list[float]] = {name: [] for name in steps}
    processor: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(-1, rounds):
        for name in steps if turn % 2 == 0 else reversed(steps):
            start, worked = time.perf_counter(), time.process_time()
            steps[name][1]()
            if turn >= 0:
                spent[name].append((time.perf_counter() - start) / elements * 1e9)
                processor[name].append((time.process_time() - worked) / elements * 1e9)
    rows = []
    for name, (moved, _) in steps.items():
        median, lowest = statistics.median(spent[name]), min(spent[name])
        bound = spent.get(BOUNDS.get(moved, ""))
        rows.append(
            {
                "system": name,
                "bytes": moved,
                "median_ns": median,
                "lowest_ns": lowest,
                "over_copy": median / statistics.median(bound) if bound else None,
                "lowest_over_copy": lowest / min(bound) if bound else None,
                "processor_ns": statistics.median(processor[name]),
                "lowest_processor_ns": min(processor[name]),
            }
        )
        over = "" if bound is None else f"{median / statistics.median(bound):5.2f} of the copy"
        print(
            f"{name:52s} {moved:3d} B  median {median:6.3f}  lowest {lowest:6.3f} ns an element  "
            f"processor {statistics.median(processor[name]):6.3f} lowest {min(processor[name]):6.3f}  {over}"
        )
    save(chosen.results, "cpu_adam", rows, elements=elements, rounds=rounds)


if __name__ == "__main__":
    main()
