"""Models of which checkpoints are written as DeepSpeed lays them out: a plain one, one with experts, a divided one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.moe import MoE
from shardwise_deepspeed.experts import split_params_into_different_moe_groups_for_optimizer
from tests.checkpoint import deepspeed_files as files
from tests.checkpoint.job import Run, config, content
from tests.harness import run_ranks
from tests.harness.training import ADAMW, engine_of

CLIENT = {"epoch": 3, "best": torch.tensor([1.0, 2.0])}


class Kind(NamedTuple):
    """A kind of model.

    Attributes:
        started: makes an engine from a seed, a degree of parallelism, a ZeRO stage, a dtype and more; its module makes
            batches.
        write: writes a checkpoint into a directory from the content, a ZeRO stage, a number of ranks and more.
        layouts: arguments of `write` that are tested.
    """

    started: Callable[..., Any]
    write: Callable[..., str]
    layouts: list[tuple[Any, ...]]

    def saved(self, path: Path, *options: Any) -> files.Content:
        """Train on one rank, save to `path`/a, and return what the checkpoint holds."""
        run_ranks(_save, 1, self.started, str(path), *options)
        found = files.content_of(str(path / "a"))
        found.client = CLIENT
        return found

    def loaded(self, sources: list[str], world: int, degree: int, stage: int, *options: Any) -> list[dict[str, Any]]:
        """Load each on some ranks, save it again, in our format, and return what that holds."""
        run_ranks(_save_again, world, self.started, sources, degree, stage, *options)
        return [content(source + "-again") for source in sources]


def _train(engine: Any, steps: int) -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps * engine.gradient_accumulation_steps()):
        engine.backward(engine(engine.module.batch(generator)))
        engine.step()


def _save(started: Callable[..., Any], path: str, *options: Any) -> None:
    engine = started(1, 1, 1, *options)
    _train(engine, 2)
    engine.save_checkpoint(path, tag="a")


def _save_again(started: Callable[..., Any], sources: list[str], degree: int, stage: int, *options: Any) -> None:
    engine = started(2, degree, stage, *options)
    for source in sources:
        _train(engine, 1)  # so that nothing is left of what was loaded before
        client = engine.load_checkpoint(source)[1]
        assert client["epoch"] == 3 and torch.equal(client["best"], CLIENT["best"])
        engine.save_checkpoint(source + "-again", tag="a")


# -- a plain model -----------------------------------------------------------------------------------------------------


def _plain(seed: int, degree: int, stage: int, dtype: str, optimizer: str = "AdamW") -> Any:
    return Run(config(stage, dtype, optimizer), seed, noise=False).engine


def _write(parent: str, held: files.Content, stage: int, world: int, options: dict[str, Any]) -> str:
    return files.write(parent, "x", held, stage, world, **options)


PLAIN = Kind(
    _plain,
    _write,
    [
        *((stage, world, {}) for stage, world in ((0, 2), (1, 1), (1, 3), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3))),
        (2, 3, {"mappings": False}),
        (2, 2, {"round_robin": True}),
        (1, 3, {"align": 8}),
        (1, 2, {"lean": False}),
        (3, 2, {"sub_group": 30}),
        (1, 2, {"legacy": True}),
    ],
)

# -- experts -----------------------------------------------------------------------------------------------------------


class ExpertNet(nn.Module):
    """Two layers of experts of different sizes, one with an expert that all tokens use, and layers between them."""

    def __init__(self, seed: int, ep_size: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 7)
        self.blocks = nn.ModuleList(self._layer(inner, ep_size) for inner in (5, 3))
        self.last = nn.Linear(7, 1)

    def _layer(self, inner: int, ep_size: int) -> MoE:
        experts = [nn.Sequential(nn.Linear(7, inner), nn.GELU(), nn.Linear(inner, 7)) for _ in range(4)]
        return MoE(7, nn.ModuleList(experts), 4, ep_size, k=2, use_residual=inner == 3, drop_tokens=False)

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(6, 3, generator=generator).to(self.first.weight.dtype)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.first(values)
        total = values.new_zeros(())
        for block in self.blocks:
            made, l_aux, _ = block(values)
            values, total = values + made, total + 0.01 * l_aux
        return self.last(values).square().mean() + total


def _experts(seed: int, ep_size: int, stage: int, dtype: str, limit: int | None = None) -> Any:
    model = ExpertNet(seed, ep_size)
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all", "weight_decay": 0.1}, limit
    )
    bf16 = {"enabled": dtype == "bf16"}
    return engine_of(model, stage, ADAMW, groups=groups, train_micro_batch_size_per_gpu=6, bf16=bf16)


EXPERTS = Kind(
    _experts,
    _write,
    [
        (0, 2, {"ep": 1}),
        (0, 4, {"ep": 2}),
        (0, 4, {"ep": 4, "data_first": True}),
        (1, 2, {"ep": 2}),
        (2, 4, {"ep": 1, "align": 8}),
        (2, 4, {"ep": 2}),
        (1, 4, {"ep": 2, "data_first": True, "lean": False}),
        (2, 6, {"ep": 2, "mappings": False}),
        (2, 4, {"ep": 4, "round_robin": True}),
    ],
)

# -- a model that ranks divide -----------------------------------------------------------------------------------------

WORDS, WIDTH, INNER = 13, 8, 10

RULES = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r"qkv\.weight$"], "partition_type": "column", "shape": [3, -1]},
        {"patterns": [r"up\.weight$"], "partition_type": "column"},
        {"patterns": [r"(o|down)\.weight$"], "partition_type": "row"},
    ],
}


class Block(nn.Module):
    """A fused projection, whose parts are divided each by itself, and layers divided by output and input features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(values)).chunk(3, -1)
        values = values + self.o(torch.tanh(q) * k * v)
        return values + self.down(nn.functional.gelu(self.up(values)))


class DividedNet(nn.Module):
    """Blocks between an embedding and the output layer that is tied to it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("scale", torch.tensor(seed / 2))

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(0, WORDS, (6, 4), generator=generator)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks(self.words(tokens)) * self.scale)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), (tokens.flatten() + 1) % WORDS)


def regions(count: int) -> dict[str, list[Any]]:
    """What each of some model-parallel ranks has of the divided parameters."""
    found: dict[str, list[Any]] = {}
    each, inner = WIDTH // count, [n * INNER // count for n in range(count + 1)]
    for block in range(2):
        for part in range(count):
            fused = tuple((n * WIDTH + part * each, n * WIDTH + (part + 1) * each) for n in range(3))
            some, half = (part * each, (part + 1) * each), (inner[part], inner[part + 1])
            for name, box in {
                "qkv.weight": (fused, (0, WIDTH)),
                "qkv.bias": (fused,),
                "o.weight": ((0, WIDTH), some),
                "up.weight": (half, (0, WIDTH)),
                "up.bias": (half,),
                "down.weight": ((0, WIDTH), half),
            }.items():
                found.setdefault(f"blocks.{block}.{name}", []).append(box)
    return found


def exact(held: files.Content, count: int) -> dict[str, Any]:
    return {"universal_checkpoint_version": 0.4, "affine_map": files.affine_map(held, regions(count))}


def _divided(seed: int, degree: int, stage: int, dtype: str) -> Any:
    divided = {"autotp_size": degree, **({"partition_config": RULES} if degree > 1 else {})}
    bf16 = {"enabled": dtype == "bf16"}
    model = DividedNet(seed)
    return engine_of(model, stage, ADAMW, train_micro_batch_size_per_gpu=6, bf16=bf16, tensor_parallel=divided)


def write_parts(parent: str, held: files.Content, stage: int, world: int, count: int, described: bool = True) -> str:
    """Write the files of some model-parallel ranks, which say how these divide parameters, or do not."""
    for part in files.divided(held, regions(count), exact(held, count) if described else None):
        path = files.write(parent, "x", part, stage, world)
    return path


DIVIDED = Kind(
    _divided,
    write_parts,
    [(stage, world, count) for stage in range(4) for world, count in ((1, 2), (3, 2), (2, 4))],
)
