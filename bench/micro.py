"""Single operations: rates of the device, an optimizer's step.

    OMP_NUM_THREADS=1 python bench/micro.py --what adam [--elements 50000000] [--rounds 15]
    python bench/micro.py --what optimizers [--elements 200000000] [--segments 150] [--rounds 5]
    python bench/micro.py --what device

*adam*: time of one Adam step on a CPU, per element, beside that of copying the bytes which it cannot avoid to move. All
variants work on the same tensors in one process and take turns. A step with fp32 master weights reads parameter,
gradient and two moments and writes parameter, moments and the bf16 copy: 30 bytes an element, 28 without the copy. The
bound is a copy that reads and writes as many together. "scaled" means that gradients are multiplied by a factor (loss
scale and clipping), too. DeepSpeedCPUAdam takes part where it is installed and can be built.

*optimizers*: bytes that a step of each of our elementwise optimizers moves in a second, as a share of a copy's. Counted
are the fewest bytes that a step must move: it reads gradient, parameter and states once, writes parameter and states
once, and the copy in bf16 where there is one. Gradients are in fp32 and are multiplied by a factor that lies on the
device, as in an engine. Beside them stand torch's own fused AdamW, which neither scales nor copies, and the copy of a
large tensor that moves as much as AdamW with a copy in bf16 must. "host" is the time until a step has been launched.

*device*: a product of matrices counts 2 n^3 operations, a copy on the device bytes read and bytes written, a copy to or
from the host its bytes once. "both ways" copies to and from the host on two streams at once; bytes of both count.
"launch" is the time of the host for one small kernel.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import Device, Row, attempt, options_of, save, show, turns

from shardwise.compat import allow_gradient_dtype
from shardwise.optim import Adagrad, AdamW, ElementwiseOptimizer, Lion

BF16, FP32 = torch.bfloat16, torch.float32
Step = Callable[[], object]

# -- Adam on a CPU -----------------------------------------------------------------------------------------------------

ADAM = {"lr": 1e-3, "weight_decay": 0.01}
BOUNDS = (30, 28, 24)
"""Bytes that a variant moves an element."""


def variants(elements: int) -> dict[str, tuple[int, Step]]:
    """Return the steps by name, with the bytes that each has to move an element; all share their tensors."""
    master = torch.nn.Parameter(torch.randn(elements))
    narrow = torch.nn.Parameter(master.detach().to(BF16))
    gradient, output = torch.randn(elements), narrow.detach()
    moments = {"exp_avg": torch.zeros(elements), "exp_avg_sq": torch.zeros(elements)}
    target = torch.zeros(15 * elements, dtype=torch.uint8)
    source = torch.ones_like(target)
    found: dict[str, tuple[int, Step]] = {}
    for moved in BOUNDS:
        half = moved // 2 * elements
        found[f"copy of {moved} bytes"] = moved, functools.partial(target[:half].copy_, source[:half])

    def adopt(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter = master) -> torch.optim.Optimizer:
        optimizer.state[parameter] = {"step": torch.tensor(10.0), **moments}
        return optimizer

    def step(
        optimizer: torch.optim.Optimizer,
        parameter: torch.nn.Parameter = master,
        scaled: bool = False,
        copied: bool = False,
    ) -> None:
        if scaled:
            gradient.mul_(1.0)  # as long as by any other factor, and the gradient stays what it is
        parameter.grad = gradient
        optimizer.step()
        if copied:
            output.copy_(master)

    def add(name: str, optimizer: torch.optim.Optimizer, scaled: bool = False, copied: bool = False) -> None:
        name = f"{'scaled, then ' * scaled}{name}{', then bf16 copy' * copied}"
        found[name] = 28 + 2 * copied, functools.partial(step, optimizer, scaled=scaled, copied=copied)

    def add_all(name: str, optimizer: torch.optim.Optimizer) -> None:
        for scaled, copied in ((False, False), (False, True), (True, True)):
            add(name, optimizer, scaled, copied)

    add("torch AdamW, loop", adopt(torch.optim.AdamW([master], foreach=False, **ADAM)))
    add_all("torch AdamW, fused", adopt(torch.optim.AdamW([master], fused=True, **ADAM)))
    own = adopt(AdamW([master], **ADAM))
    add("shardwise AdamW", own)
    add("shardwise AdamW", own, scaled=True, copied=True)
    for rounding, moved in (("stochastic", 24), ("kahan", 28)):
        rounded = adopt(AdamW([narrow], rounding=rounding, **ADAM), narrow)
        allow_gradient_dtype(narrow, gradient.dtype)
        run = functools.partial(step, rounded, narrow, scaled=True)
        found[f"shardwise AdamW, scaled, no masters, {rounding}"] = moved, run
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        peer = adopt(DeepSpeedCPUAdam([master], adamw_mode=True, **ADAM))
    except Exception as error:
        print(f"without DeepSpeedCPUAdam: {type(error).__name__}: {str(error).splitlines()[:1]}")
    else:
        add_all("DeepSpeedCPUAdam", peer)
    return found


def adam(options: argparse.Namespace) -> list[Row]:
    """Let the variants take turns; return nanoseconds an element."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    steps = variants(options.elements)

    found = turns({name: step for name, (_, step) in steps.items()}, options.rounds, timed=True)
    times = {name: [seconds / options.elements * 1e9 for seconds in own] for name, own in found.items()}
    rows: list[Row] = []
    for name, (moved, _) in steps.items():
        median, bound = statistics.median(times[name]), statistics.median(times[f"copy of {moved} bytes"])
        rows.append({"system": name, "bytes": moved, "median_ns": median})
        rows[-1] |= {"lowest_ns": min(times[name]), "over_copy": median / bound}
    return rows


# -- elementwise optimizers on a device --------------------------------------------------------------------------------

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
TOGETHER = 5
"""Steps that are timed together, so that the host is ahead of the device."""


def cut(tensor: torch.Tensor, segments: int) -> list[torch.Tensor]:
    """Cut a flat tensor as an engine does, in segments of various lengths at multiples of 64 elements."""
    weights = [1 + number % 7 for number in range(segments)]
    ends = [sum(weights[: number + 1]) * tensor.numel() // sum(weights) // 64 * 64 for number in range(segments)]
    ends[-1] = tensor.numel()
    return [tensor[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def ours(cls: type[ElementwiseOptimizer], precision: str, options: argparse.Namespace) -> tuple[int, Step]:
    """Return the fewest bytes an element, and a step of one of our optimizers."""
    keys = PRECISIONS[precision]
    masters = "rounding" not in keys
    values = torch.randn(options.elements, device=options.device).to(FP32 if masters else BF16)
    gradient = torch.randn(options.elements, device=options.device)
    parts = [torch.nn.Parameter(part) for part in cut(values, options.segments)]
    optimizer = cls(parts, lr=1e-4, weight_decay=0.01, **keys)
    outputs = cut(torch.empty_like(values, dtype=BF16), options.segments) if masters else []
    optimizer.shardwise_origins = {id(part): [(number, 0, 0, part.numel())] for number, part in enumerate(parts)}
    for part, own in zip(parts, cut(gradient, options.segments), strict=True):
        allow_gradient_dtype(part, own.dtype)
        part.grad = own

    def step() -> None:
        gradient.mul_(1.0)
        optimizer.step()
        for output, part in zip(outputs, parts, strict=False):
            output.copy_(part.detach())

    step()  # makes the states
    kept = sum(tensor.itemsize for name, tensor in optimizer.state[parts[0]].items() if name != "step")
    moved = gradient.itemsize + 2 * values.itemsize + 2 * kept + (2 if masters else 0)
    return moved, step


def fused(options: argparse.Namespace) -> tuple[int, Step]:
    """Return the same of torch's fused AdamW in fp32."""
    values = torch.randn(options.elements, device=options.device)
    parts = [torch.nn.Parameter(part) for part in cut(values, options.segments)]
    for part in parts:
        part.grad = torch.randn_like(part)
    return 28, torch.optim.AdamW(parts, lr=1e-4, weight_decay=0.01, fused=True).step


def copy(options: argparse.Namespace) -> tuple[int, Step]:
    """Return the same of a copy that moves 30 bytes an element, read and written ones together."""
    source = torch.ones(15 * options.elements, dtype=torch.uint8, device=options.device)
    target = torch.empty_like(source)
    return 30, lambda: target.copy_(source)


def contestants(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], tuple[int, Step]]]]:
    """Yield optimizer and precision, and what makes the step."""
    yield "copy", functools.partial(copy, options)
    yield "AdamW of torch, fused, fp32", functools.partial(fused, options)
    for cls in CLASSES:
        for precision in PRECISIONS:
            yield f"{cls.__name__}, {precision}", functools.partial(ours, cls, precision, options)


def optimizers(options: argparse.Namespace) -> list[Row]:
    """Return a row for each optimizer and precision, one after the other."""
    device, rows, reached = Device(options.device), list[Row](), 0.0

    def figures(make: Callable[[], tuple[int, Step]]) -> Row:
        moved, step = make()
        for _ in range(3):
            step()
        several = lambda: [step() for _ in range(TOGETHER)]  # noqa: E731
        launched = statistics.median(device.launching(several) for _ in range(options.rounds)) / TOGETHER
        seconds = statistics.median(device.seconds(several) for _ in range(options.rounds)) / TOGETHER
        speed = moved * options.elements / seconds / 1e9
        return {"bytes": moved, "moved_gb_per_s": speed, "median_ms": seconds * 1e3, "host_ms": launched * 1e3}

    for name, make in contestants(options):
        row = attempt({"system": name}, functools.partial(figures, make))
        if "failed" not in row:
            reached = reached or row["moved_gb_per_s"]
            row["of_copy"] = row["moved_gb_per_s"] / reached
        rows.append(row)
    return rows


# -- rates of the device -----------------------------------------------------------------------------------------------

SIDE, COPIED, MOVED, LAUNCHED = 8192, 2 << 30, 1 << 30, 1000


def fastest(device: Device, action: Callable[[], Any], repeat: int = 10) -> float:
    """Return the least seconds of some repetitions, after one that warms up."""
    action()
    return min(device.seconds(action) for _ in range(repeat))


def rates(options: argparse.Namespace) -> list[Row]:
    """Return the FLOP/s of large products, of random numbers, the GB/s of copies, and the time of a launch."""
    device, rows = Device(options.device), list[Row]()
    side = 256 if options.quick else SIDE
    for name, dtype in (("bf16", BF16), ("fp16", torch.float16), ("fp32", FP32)):
        a, b = (torch.randn(side, side, device=device.kind).to(dtype) for _ in range(2))
        seconds = fastest(device, functools.partial(torch.mm, a, b))
        rows.append({"system": f"product, {name}", "tflops": 2 * side**3 / seconds / 1e12})
    source = torch.empty(1 << 20 if options.quick else COPIED, dtype=torch.uint8, device=device.kind).random_()
    target = torch.empty_like(source)

    def moved(name: str, size: int, action: Callable[[], Any]) -> None:
        rows.append({"system": name, "moved_gb_per_s": size / fastest(device, action) / 1e9})

    moved("copy on the device", 2 * source.nbytes, lambda: target.copy_(source))
    size = 1 << 20 if options.quick else MOVED
    down, up = target[:size], source[:size]
    for pinned in (True, False) if device.is_cuda else (False,):
        host, other = (torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2))
        kind = "page-locked" if pinned else "pageable"
        moved(f"to the device, {kind}", size, functools.partial(down.copy_, host, non_blocking=True))
        moved(f"to the host, {kind}", size, functools.partial(host.copy_, up, non_blocking=True))
        if pinned:
            streams = [torch.cuda.Stream() for _ in range(2)]

            def both(host: Any = host, other: Any = other, streams: Any = streams) -> None:
                with torch.cuda.stream(streams[0]):
                    down.copy_(host, non_blocking=True)
                with torch.cuda.stream(streams[1]):
                    other.copy_(up, non_blocking=True)

            moved("both ways, page-locked", 2 * size, both)
    one = torch.zeros(1, device=device.kind)
    many = lambda: [one.add_(1) for _ in range(LAUNCHED)]  # noqa: E731
    many()
    rows.append({"system": "launch", "launched_us": min(device.launching(many) for _ in range(5)) / LAUNCHED * 1e6})
    return rows


MEASURED: dict[str, tuple[str, Callable[[argparse.Namespace], list[Row]]]] = {
    "adam": ("cpu_adam", adam),
    "optimizers": ("gpu_optimizer", optimizers),
    "device": ("gpu_device", rates),
}
"""By what is measured: name of the result, and the function."""


def main() -> None:
    """Measure, print the figures and keep them."""
    options = options_of(
        __doc__,
        quick={"elements": 100_000, "rounds": 2},
        what="adam",
        elements=50_000_000,
        segments=150,
        rounds=15,
    )
    name, measure = MEASURED[options.what]
    rows = measure(options)
    show(rows)
    save(options, name, rows, elements=options.elements, segments=options.segments, rounds=options.rounds)


if __name__ == "__main__":
    main()
