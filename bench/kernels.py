"""Single kernels: eager, compiled (torch.compile), and fused ones of torch.

    OMP_NUM_THREADS=1 python bench/kernels.py [--rows 8] [--tokens 128] [--width 512] [--elements 20000000] [--rounds 7]
        [--long 2048]

*encoder layer*: both passes of a layer of BERT (pre-layer-norm) with a fused attention, without dropout. *attention*:
both passes, of plain torch operators and of `scaled_dot_product_attention`. *norm, GELU, residual*: both passes of
elementwise operators, which a compiler can join. *cross entropy*: both passes over a vocabulary of 32,000.
*causal attention, long*: both passes in bf16 over `--long` tokens, by `scaled_dot_product_attention` (fused) and by
ring attention on one rank. *AdamW step*: one tensor after the other, many together (foreach), in one kernel (fused),
and `shardwise.optim.AdamW`.

"compiled" needs a C++ compiler on a CPU and Triton on CUDA; without one the row says so. Ways take turns; the times are
medians. Compilation is not counted.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from harness import Row, attempt, data_of, options_of, save, show, turns
from torch import nn

Way = Callable[[], Any]
WORDS = 32_000


def both_passes(run: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> Way:
    """Return a way that runs the forward and backward pass of `run`."""

    own = run.parameters() if isinstance(run, nn.Module) else []
    trained = [*(x for x in inputs if x.requires_grad), *own]

    def way() -> None:
        found = run(*inputs)
        torch.autograd.grad(found.float().square().mean(), trained)
        if found.is_cuda:
            torch.cuda.synchronize()

    return way


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of separate operators."""
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


def elementwise(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Residual, norm, GELU, residual."""
    joined = x + y
    return joined + F.gelu(F.layer_norm(joined, weight.shape, weight, bias))


def entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy."""
    return F.cross_entropy(logits.float(), labels)


def ways_of(options: argparse.Namespace) -> dict[str, dict[str, Way]]:
    """Return what is measured: by kernel, the ways to compute it."""
    device, rows, tokens, width = options.device, options.rows, options.tokens, options.width

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, requires_grad=True)

    heads = max(1, width // 64)
    layer = nn.TransformerEncoderLayer(
        width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True, device=device
    )
    qkv = [random(rows, heads, tokens, width // heads) for _ in range(3)]
    mixed = [random(rows, tokens, width), random(rows, tokens, width), random(width), random(width)]
    words = [
        random(rows * tokens, WORDS // options.shrink),
        torch.zeros(rows * tokens, dtype=torch.int64, device=device),
    ]

    def compared(run: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> dict[str, Way]:
        return {"eager": both_passes(run, inputs), "compiled": both_passes(torch.compile(run), inputs)}

    found = {
        "encoder layer": compared(layer, [random(rows, tokens, width)]),
        "attention": {
            **compared(plain_attention, qkv),
            "fused": both_passes(F.scaled_dot_product_attention, qkv),
        },
        "norm, GELU, residual": compared(elementwise, mixed),
        "cross entropy": compared(entropy, words),
    }
    return {**found, "causal attention, long": long_ways(options), "AdamW step": optimizer_ways(options)}


def long_ways(options: argparse.Namespace) -> dict[str, Way]:
    """Return causal attention over many tokens, by torch and by one rank of ring attention."""
    from shardwise.parallel import RingAttention, begin

    shape, how = (1, 16, options.long, 64), {"dtype": torch.bfloat16, "device": options.device}
    qkv = [torch.randn(*shape, **how, requires_grad=True) for _ in range(3)]
    begin(1)
    ring = RingAttention()
    return {
        "fused": both_passes(functools.partial(F.scaled_dot_product_attention, is_causal=True), qkv),
        "shardwise": both_passes(lambda *given: ring(*given, lengths=[options.long]), qkv),
    }


def optimizer_ways(options: argparse.Namespace) -> dict[str, Way]:
    """Return steps of AdamW over so many elements in 50 tensors."""
    from shardwise.optim import AdamW

    def step_of(make: Callable[..., torch.optim.Optimizer]) -> Way:
        each = options.elements // 50
        parameters = [nn.Parameter(torch.randn(each, device=options.device)) for _ in range(50)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = make(parameters, lr=1e-3)

        def step() -> None:
            optimizer.step()
            if options.device == "cuda":
                torch.cuda.synchronize()

        return step

    torches = {"eager": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    found = {name: step_of(functools.partial(torch.optim.AdamW, **how)) for name, how in torches.items()}
    return {**found, "shardwise": step_of(AdamW)}


def measure(ways: dict[str, Way], rounds: int) -> Row:
    """Return the time of each way that runs; a compiler that is not there is named."""
    found: Row = {}
    running = {}
    for name, way in ways.items():
        try:
            way()
            running[name] = way
        except Exception as error:
            if name != "compiled":
                raise
            found["compiler"] = f"none: {' '.join(str(error).split())[:120]}"
    for name, times in turns(running, rounds, timed=True).items():
        found[f"{name}_ms"] = 1e3 * statistics.median(times)
    if {"shardwise_ms", "fused_ms"} <= found.keys():
        found["over_fused"] = found["shardwise_ms"] / found["fused_ms"]
    return found


def main() -> None:
    """Measure each kernel, print the table and keep it."""
    options = options_of(__doc__, **data_of("options.toml")["kernels"])
    torch.manual_seed(0)
    rows = []
    for name, ways in ways_of(options).items():
        rows.append(attempt({"system": name}, functools.partial(measure, ways, options.rounds)))
        show(rows[-1:])
    shape = {"batch": [options.rows, options.tokens, options.width], "elements": options.elements}
    save(options, f"{'gpu_' if options.device == 'cuda' else ''}kernels", rows, **shape, rounds=options.rounds)


if __name__ == "__main__":
    main()
