"""The largest batch, and the longest sequence, with which a training step fits a limit of memory.

    python bench/limits.py --what batch [--limit 640] [--length 32] [--size 27M] [--nproc 2] [--systems "DDP;FSDP2"]
    python bench/limits.py --what sequence [--limit 320] [--nproc 2] [--systems "plain;tiled;shared;shared tiled"]

Every system runs in a job of its own. The limit, in MiB of resident memory of each rank, stands for the device. The
batch or the length is doubled until the highest resident size of a training step of some rank exceeds the limit, then
bisected; freed memory is given back to the system before every try.

*batch*: above the bare process, as in train.py. Optimizer state exists before the search. Times are medians of a few
steps (training) and forward passes (evaluation) with the batch that was found, of the slowest rank; samples a second
are those of all ranks.

*sequence*: above the resident size before the first long sequence. A small decoder with a large vocabulary trains on
one sequence a group of ranks, by ZeRO stage 3; lengths differ by `--step` tokens. Ways: `plain` gives each rank a
sequence of its own; `recomputed` keeps inputs of layers only; `tiled` computes loss and MLP in tiles besides; `shared`
lets all ranks share a sequence; `tensor` divides the layers over all ranks, and the loss by words; with `tokens` ranks
have some tokens each outside of these layers. `DeepSpeed` is its `DistributedAttention` and stage 3, for the tiles its
`sequence_tiled_compute`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import (
    Device,
    Row,
    data_of,
    group_of,
    job,
    most_that,
    options_of,
    over_ranks,
    save,
    serve,
    show,
    spent,
    trimmed,
)
from systems import SETS, SIZES, Case, config_of, installed, loaded
from torch import nn
from torch.utils.checkpoint import checkpoint

REPEATS, MOST = 3, 1024
"""Steps whose median is taken; no larger batch is tried."""
LEFT_OUT = ("alone", "FSDP2 no reshard", "shardwise 3 Init")


def highest(action: Callable[[], Any], before: int) -> Row:
    """Return the highest resident size of an action above one before, and its seconds, of the worst rank."""
    figures: dict[str, float] = {}
    peak = Device("cpu").taken(lambda: figures.update(spent(action)), before)
    return over_ranks({"peak_mib": peak / 2**20, "step_s": figures["wall"]}, "max")


def slowest(action: Callable[[], Any]) -> float:
    """Return the median seconds of an action, of the slowest rank."""
    return statistics.median(over_ranks(spent(action), "max")["wall"] for _ in range(REPEATS))


def largest_batch(options: argparse.Namespace) -> Row:
    """Search on this rank, in step with the others; return the row."""
    make = SETS["zero"][options.systems]
    one = Case(dataclasses.replace(SIZES[options.size], rows=1, length=options.length), options.dtype == "bf16")
    bare = loaded(make, one)
    run = make(one)

    def step() -> None:
        run.step()
        run.finish()

    step()
    step()
    found: dict[int, Row] = {0: {}}

    def fits(rows: int) -> bool:
        run.ids = dataclasses.replace(one, size=dataclasses.replace(one.size, rows=rows)).batch()
        found[rows] = highest(step, bare)
        return found[rows]["peak_mib"] <= options.limit

    rows = most_that(fits, MOST)
    row: Row = {"batch_per_rank": rows, "peak_mib": found[rows].get("peak_mib")}
    if rows:
        fits(rows)  # the batch from now on
        train, evaluation = slowest(step), slowest(run.evaluate)
        samples = rows * dist.get_world_size()
        row |= {"train_ms": train * 1e3, "eval_ms": evaluation * 1e3}
        row |= {"train_samples_per_s": samples / train, "eval_samples_per_s": samples / evaluation}
    return row


# -- sequences ---------------------------------------------------------------------------------------------------------

WAYS = (
    "plain",
    "recomputed",
    "tiled",
    "shared",
    "shared recomputed",
    "shared tiled",
    "tensor",
    "tensor recomputed",
    "tensor tokens",
    "tensor tokens recomputed",
)
PEERS = ("DeepSpeed shared", "DeepSpeed shared recomputed", "DeepSpeed shared tiled")
TILES, HEADS = 64, 4
RULES = [
    {"patterns": [r"\.qkv\.weight$"], "partition_type": "column", "shape": [3, -1]},
    {"patterns": [r"\.mlp\.0\.weight$", r"^head\.weight$"], "partition_type": "column"},
    {"patterns": [r"\.(out|mlp\.2)\.weight$"], "partition_type": "row"},
]


def attention_of(way: str) -> Any:
    """Return attention of (rows, heads, tokens, width) that works on shared sequences if there are any."""
    from torch.nn.functional import scaled_dot_product_attention as core

    if "shared" not in way:
        return core
    if "DeepSpeed" not in way:
        from shardwise.parallel import DistributedAttention

        return DistributedAttention(core, scatter_idx=1, gather_idx=2)
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.sequence.layer import DistributedAttention as Theirs

    def local(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return core(*(part.transpose(1, 2) for part in (q, k, v)), **options).transpose(1, 2)

    shared = Theirs(local, parallel_state_sp.get_sequence_parallel_group(), scatter_idx=2, gather_idx=1)

    def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return shared(*(part.transpose(1, 2) for part in (q, k, v)), 0, **options).transpose(1, 2)

    return attention


def tiled_parts(way: str) -> tuple[Any, Any]:
    """Return what makes an MLP one in tiles, and the loss of hidden states in tiles."""
    from shardwise.parallel import TiledMLP, tiled_loss

    if "DeepSpeed" not in way:
        return TiledMLP, lambda head, hidden, labels: tiled_loss(head, hidden, labels, tiles=TILES)
    from deepspeed.runtime.sequence_parallel.ulysses_sp import sequence_tiled_compute

    def compute(module: Any, function: Any, reduction: str | None, **sharded: Any) -> Any:
        return sequence_tiled_compute(
            function,
            sharded["x"].shape[1],
            TILES,
            sharded,
            {"self": module},
            "x",
            compute_params=list(module.parameters()),
            output_unshard_dimension=1 if reduction is None else 0,
            output_reduction=reduction,
        )

    class InTiles(torch.nn.Module):
        def __init__(self, mlp: Any) -> None:
            super().__init__()
            self.mlp = mlp

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return compute(self.mlp, lambda self, x: self(x), None, x=x)

    def loss(head: Any, hidden: torch.Tensor, labels: torch.Tensor) -> Any:
        def tile(self: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self(x).flatten(0, 1), labels.flatten())

        return compute(head, tile, "mean", x=hidden, labels=labels), labels.numel()

    return InTiles, loss


def decoder(words: int, width: int, layers: int, way: str) -> Any:
    """Return a decoder that gives loss and tokens."""
    from shardwise.parallel import token_loss
    from shardwise.parallel.tensor.loss import words_cross_entropy

    tiled, recomputed = "tiled" in way, "recomputed" in way or "tiled" in way
    in_tiles, loss_in_tiles = tiled_parts(way)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            self.mlp = in_tiles(mlp) if tiled else mlp
            self.attention = attention_of(way)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, width // HEADS)).permute(2, 0, 3, 1, 4)
            x = x + self.out(self.attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            return x + self.mlp(self.norm2(x))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.blocks = nn.Embedding(words, width), nn.ModuleList(Block() for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
            x = self.words(ids)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if recomputed else block(x)
            hidden = self.norm(x)
            if tiled:
                return loss_in_tiles(self.head, hidden, labels)
            if "tensor" in way:
                sizes = self.head.cut.sizes
                return words_cross_entropy(self.head(hidden), labels, self.head.group, sizes), labels.numel()
            return token_loss(self.head(hidden), labels)

    torch.manual_seed(0)
    return Decoder()


def longest_sequence(options: argparse.Namespace) -> Row:
    """Search on this rank, in step with the others; return the row."""
    way = options.systems
    world = dist.get_world_size()
    shared = world if "shared" in way else 1
    config = config_of(1, zero_optimization={"stage": 3})
    if "DeepSpeed" in way:
        import deepspeed
        from deepspeed.runtime.sequence_parallel import parallel_state_sp

        parallel_state_sp.initialize_sequence_parallel(shared)
        model = decoder(options.words, options.width, options.layers, way)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        del config["optimizer"]
        config |= {"zero_allow_untested_optimizer": True, "steps_per_print": 10**9}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=parallel_state_sp)
    else:
        import shardwise

        config["sequence_parallel_size"] = shared
        if "tensor" in way:
            rules = {"layer_specs": RULES, "use_default_specs": False}
            config["tensor_parallel"] = {"autotp_size": world, "partition_config": rules}
            config["tensor_parallel"]["sequence_parallel"] = "tokens" in way
        model = decoder(options.words, options.width, options.layers, way)
        engine, *_ = shardwise.initialize(model=model, config=config)
    found: dict[int, Row] = {0: {}}

    def step(tokens: int) -> None:
        whole = torch.randint(options.words, (1, tokens + 1), generator=torch.Generator().manual_seed(tokens))
        pair = (whole[:, :-1], whole[:, 1:])
        if shared > 1:
            place = dist.get_rank() % shared
            pair = tuple(part.tensor_split(shared, 1)[place].contiguous() for part in pair)
        loss, counted = engine(*pair)
        engine.backward(loss, **({} if "DeepSpeed" in way else {"weight": counted}))
        engine.step()

    for _ in range(2):
        step(4 * dist.get_world_size())
    before = trimmed()

    def fits(steps: int) -> bool:
        tokens = steps * options.step
        found[tokens] = highest(functools.partial(step, tokens), before)
        return found[tokens]["peak_mib"] <= options.limit

    tokens = most_that(fits, options.most // options.step) * options.step
    engine.destroy()
    return {"tokens": tokens, **found[tokens]}


def main() -> None:
    """Run every system, print the table and keep it."""
    options = options_of(__doc__, **data_of("options.toml")["limits"])
    is_batch = options.what == "batch"
    options.limit = options.limit or ((4 if is_batch else 24) if options.quick else 640)
    group = "DeepSpeed" if "DeepSpeed" in options.systems else options.systems if is_batch else "shardwise"
    serve(largest_batch if is_batch else longest_sequence, options, group_of(group))
    every = [name for name in SETS["zero"] if name not in LEFT_OUT] if is_batch else [*WAYS, *PEERS]
    rows: list[Row] = []
    for name in options.systems.split(";") if options.systems else installed(every):
        found = job(options.nproc, "--systems", name, "--limit", str(options.limit))
        rows.append({"system": name, "setting": {} if is_batch else {"ranks": options.nproc}, **found})
        if not is_batch:
            rows[-1]["setting"]["limit_mib"] = round(options.limit)
            if rows[0]["system"] == "plain":
                rows[-1]["over_plain"] = rows[-1]["tokens"] / rows[0]["tokens"]
        show(rows[-1:])
    batch = f"largest_batch_{options.size}_{options.dtype}_{options.nproc}"
    notes = {name: getattr(options, name) for name in ("limit", "length", "words", "width", "layers", "step")}
    save(options, batch if is_batch else f"longest_sequence_{options.nproc}", rows, **notes)


if __name__ == "__main__":
    main()
