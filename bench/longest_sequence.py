"""The longest sequence that fits a limit of memory: alone, in tiles, and shared by ranks in several ways.

    python bench/longest_sequence.py [--limit 640] [--nproc 2] [--ways "plain,tiled,shared,shared tiled"]

A small decoder with a large vocabulary trains on one sequence a group of ranks, by ZeRO stage 3. `--limit` is in MiB of
resident memory of each rank above that before the first long sequence (as in largest_batch.py): it stands for the
activations' part of a device. The length is doubled until some rank's highest resident size in a training step exceeds
the limit, then bisected, in steps of `--step` tokens. Ways: `plain` gives each rank a sequence of its own; `recomputed`
keeps inputs of layers only; `tiled` computes loss and MLP in tiles besides; `shared` lets all ranks share a sequence;
`tensor` divides the layers over all ranks, and the loss by words; with `tokens` ranks have some tokens each outside of
these layers. `DeepSpeed` is its `DistributedAttention` and stage 3, for the tiles its `sequence_tiled_compute`.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from typing import Any

from _jobs import answer, forget_peak, in_job, parser, ranks, read, resident, start_group, trimmed, worst
from largest_batch import largest

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
    import torch
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
            output_unshard_dimension=1,
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
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

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


def measure(options: argparse.Namespace, way: str) -> None:
    """Search on this rank, in step with the others; rank 0 answers with the row."""
    import torch
    import torch.distributed as dist

    start_group("DeepSpeed" if "DeepSpeed" in way else "shardwise")
    world = dist.get_world_size()
    shared = world if "shared" in way else 1
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3},
    }
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
    seconds: dict[int, float] = {}
    peaks: dict[int, float] = {}

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
        trimmed()
        forget_peak()
        start = time.perf_counter()
        step(tokens)
        peaks[tokens], seconds[tokens] = worst((resident("VmHWM") - before) / 2**20, time.perf_counter() - start)
        return peaks[tokens] <= options.limit

    tokens = largest(fits, options.most // options.step) * options.step
    found = {"tokens": tokens, "peak_mib": peaks.get(tokens), "seconds": seconds.get(tokens)}
    engine.destroy()
    answer({"way": way, **found})


def main() -> None:
    """Run every way, print the table and keep it."""
    found = parser(__doc__)
    found.add_argument("--limit", type=float, default=640, help="MiB of a rank above what the model takes")
    found.add_argument("--nproc", type=int, default=2, help="number of ranks")
    found.add_argument("--ways", help="separated by commas; default: all that are installed")
    found.add_argument("--words", type=int, default=32768, help="words of the vocabulary")
    found.add_argument("--width", type=int, default=256)
    found.add_argument("--layers", type=int, default=4)
    found.add_argument("--step", type=int, default=256, help="tokens by which lengths differ")
    found.add_argument("--most", type=int, default=1 << 17, help="no longer sequence is tried")
    found.add_argument("--way", help=argparse.SUPPRESS)
    options = read(found)
    if options.quick:
        options.limit, options.words, options.width, options.layers = 24, 4096, 32, 2
        options.step, options.most = 64, 2048
    if in_job():
        measure(options, options.way)
        return
    from _machine import save

    peers = PEERS if importlib.util.find_spec("deepspeed") is not None and not options.quick else ()
    rows: list[dict[str, Any]] = []
    for way in options.ways.split(",") if options.ways else (*WAYS, *peers):
        row = ranks(options.nproc, "--way", way)
        rows.append(row)
        row["over_plain"] = row["tokens"] / rows[0]["tokens"] if rows[0]["way"] == "plain" else None
        shown = f"{way:28s} {row['tokens']:7d} tokens"
        shown += "" if row["over_plain"] is None else f"  {row['over_plain']:5.1f} x"
        if row["tokens"]:
            shown += f"  peak {row['peak_mib']:5.0f} MiB  training step {row['seconds']:6.2f} s"
        print(shown, flush=True)
    kept = {name: getattr(options, name) for name in ("limit", "words", "width", "layers", "step")}
    save(options.results, f"longest_sequence_{options.nproc}", rows, **kept)


if __name__ == "__main__":
    main()
