"""Single switches of the configuration: a training step with each, over the same step without, and its memory.

    python bench/features.py [--only selective,float8,registered,ring] [--nproc 1] [--size 1.4B] [--rounds 5]

Each way has a job of its own, and trains a GPT in bf16 at stage 3. *selective*: blocks are recomputed, with outputs of
some operators kept. *float8*: linear layers in float8 (with several ranks also gathered in 8 bits). *registered*:
buffers of collectives in memory that NCCL has registered. *ring*: both passes of causal attention over `--tokens`
tokens by ring attention of all ranks; the first way is one rank's `scaled_dot_product_attention` of its own tokens,
which has 1 / ranks of a rank's work in the ring.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import Device, Row, data_of, group_of, job, options_of, save, serve, show
from systems import GPT, SIZES, Case, shardwise

SELECTIVE = (None, "attention", "every_second_matmul", "matmuls")
WARM = 2


class Recomputed(GPT):
    """Blocks are recomputed as the section `activation_checkpointing` says."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of the ids themselves."""
        from shardwise import checkpointing

        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpointing.checkpoint(block, x)
        return self.loss(x, ids)


def ways_of(options: argparse.Namespace, feature: str) -> dict[str, dict[str, Any]]:
    """Return the ways of a feature, the one without it first, and the keys of the configuration of each."""
    if feature == "selective":
        return {str(kept): {"activation_checkpointing": {"selective": kept}} for kept in SELECTIVE}
    if feature == "float8":
        on = {"enabled": True, "emulate": options.device == "cpu"}
        found = {"bf16": {}, **{recipe: {"float8": {**on, "recipe": recipe}} for recipe in ("tensorwise", "rowwise")}}
        return found | ({"gathered": {"float8": {**on, "all_gather": True}}} if options.nproc > 1 else {})
    if feature == "registered":
        return {"as usual": {}, "registered": {"registered_buffers": True}}
    return {"scaled_dot_product_attention": {}, "ring": {}}


def step_of(options: argparse.Namespace, feature: str, keys: dict[str, Any]) -> Callable[[], None]:
    """Return a training step."""
    size = SIZES["tiny" if options.quick else options.size]
    build = functools.partial(Recomputed, size) if feature == "selective" else None
    run = shardwise(Case(size, bf16=True, device=options.device, build=build), 3, keys=keys)

    def step() -> None:
        run.step()
        run.finish()

    return step


def attention_of(options: argparse.Namespace, way: str) -> Callable[[], None]:
    """Return both passes of causal attention."""
    from shardwise.parallel import RingAttention, begin

    own = options.tokens // options.nproc
    shape = (1, options.heads, own, 128)
    q, k, v = (torch.randn(shape, device=options.device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    attend: Any = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    if way == "ring":
        attend = functools.partial(RingAttention(begin(dist.get_world_size())), lengths=[own] * options.nproc)

    def both() -> None:
        torch.autograd.grad(attend(q, k, v).float().square().mean(), (q, k, v))

    return both


def measure(options: argparse.Namespace) -> Row:
    """Measure one way on this rank."""
    feature, _, way = options.role.partition(":")
    device, keys = Device(options.device), ways_of(options, feature)[way]
    step = attention_of(options, way) if feature == "ring" else step_of(options, feature, keys)
    for _ in range(WARM):
        step()
    device.forget()
    times = [device.seconds(step) for _ in range(options.rounds)]
    return {"median_ms": 1e3 * statistics.median(times), "peak_mib": device.peaks()[0] / 2**20}


def main() -> None:
    """Measure, print the figures and keep them."""
    options = options_of(__doc__, **data_of("options.toml")["features"])
    serve(measure, options, group_of("shardwise", options.device))
    rows: list[Row] = []
    for feature in options.only.split(","):
        first = 0.0
        for way in ways_of(options, feature):
            row = {"system": way, "setting": {"feature": feature}, **job(options.nproc, "--role", f"{feature}:{way}")}
            first = first or row["median_ms"]
            rows.append(row | {"ratio": row["median_ms"] / first})
            show(rows[-1:])
    save(options, f"features_{options.nproc}", rows, size=options.size, tokens=options.tokens, heads=options.heads)


if __name__ == "__main__":
    main()
