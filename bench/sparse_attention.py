"""Forward and backward pass of one attention layer with layouts of blocks, next to dense attention of torch.

    python bench/sparse_attention.py [--tokens 4096,8192,16384] [--heads 8] [--width 64] [--block 64] [--rounds 5]

Each system and length has a process of its own. "dense" is `scaled_dot_product_attention`, "all blocks" the
block-sparse code with a layout that has all. The time is the median of both passes together. Memory is the highest
resident size above that before the forward pass (on a CUDA device: the highest allocated bytes), the gradients
included. "share" is the part of the blocks that a layout has. On a CUDA device "flex ..." are the same layouts by flex
attention of torch.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable
from typing import Any

import torch
from harness import Device, Row, child, data_of, options_of, save, serve, show
from torch.nn.functional import scaled_dot_product_attention

DENSE = "dense"


def layouts(heads: int, block: int) -> dict[str, Any]:
    """Return the layouts by name."""
    from shardwise import attention as own

    return {
        "all blocks": own.DenseSparsityConfig(heads, block),
        "fixed": own.FixedSparsityConfig(heads, block),
        "variable": own.VariableSparsityConfig(heads, block, num_random_blocks=1),
        "bigbird": own.BigBirdSparsityConfig(heads, block),
        "bslongformer": own.BSLongformerSparsityConfig(heads, block),
        "local_sliding_window": own.LocalSlidingWindowSparsityConfig(heads, block),
    }


def systems(options: argparse.Namespace) -> list[str]:
    """Return the names of what is measured."""
    names = list(layouts(options.heads, options.block))
    return [DENSE, *names, *(f"flex {name}" for name in names if options.device == "cuda")]


def prepared(options: argparse.Namespace, system: str, tokens: int) -> tuple[Callable[..., torch.Tensor], float]:
    """Return the attention, and the share of blocks that it has."""
    from shardwise.attention.blocks import BlockPlan, block_attention
    from shardwise.attention.masked import flex

    if system == DENSE:
        return scaled_dot_product_attention, 1.0
    layout = layouts(options.heads, options.block)[system.removeprefix("flex ")].make_layout(tokens)
    plan = BlockPlan(layout.numpy(), options.block)
    attend: Any = flex if system.startswith("flex") else block_attention
    return lambda q, k, v: attend(q, k, v, plan), float(layout.float().mean())


def measure(options: argparse.Namespace) -> Row:
    """Return time and memory of both passes."""
    torch.manual_seed(1)
    device = Device(options.device)
    tokens = int(options.tokens)
    shape = (1, options.heads, tokens, options.width)
    q, k, v, weights = (torch.randn(shape, device=options.device) for _ in range(4))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    attend, share = prepared(options, options.system, tokens)

    def both() -> None:
        torch.autograd.grad(attend(q, k, v), (q, k, v), weights)

    both()
    taken = device.taken(both)
    times = [device.seconds(both) for _ in range(options.rounds)]
    return {"time_s": statistics.median(times), "memory_mib": taken / 2**20, "share": share}


def main() -> None:
    """Measure each system at each length, print the table and keep it."""
    options = options_of(__doc__, **data_of("options.toml")["sparse_attention"])
    serve(measure, options, contextlib.nullcontext())
    rows: list[Row] = []
    notes = {name: getattr(options, name) for name in ("heads", "width", "block", "rounds")}
    asked = [(system, int(tokens)) for tokens in options.tokens.split(",") for system in systems(options)]
    for system, tokens in asked:
        row: Row = {"system": system, "setting": {"tokens": tokens}}
        rows.append(row | child("--system", system, "--tokens", str(tokens), limit=options.limit))
        show(rows[-1:])
        name = f"{'gpu_' if options.device == 'cuda' else ''}sparse_attention"
        save(options, name, rows, partial=len(rows) < len(asked), **notes)


if __name__ == "__main__":
    main()
