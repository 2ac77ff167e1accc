"""A small training job for checkpoint tests: every kind of state that could be lost, in a model of a few kilobytes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.checkpoint import Checkpoint
from shardwise.data import RepeatingLoader

SAMPLES = 54
FROZEN = ["blocks.0.inner.bias", "blocks.1.inner.bias", "blocks.2.inner.bias", "nothing"]
"""Parameters of `Model` that are not trained; the last has no elements."""

WIDTH = 11  # odd, so that runs of parameters begin and end anywhere


class Block(nn.Module):
    """A residual block with dropout; its bias is frozen."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.inner.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(torch.tanh(self.inner(self.norm(x))), self.dropout, self.training)


class Model(nn.Module):
    """Embedding, blocks, tied head, running statistics that differ between ranks, a parameter of one element.

    Without noise the gradient of a global batch does not depend on how many ranks share it.
    """

    def __init__(self, seed: int, noise: bool = True) -> None:
        super().__init__()
        generator = torch.random.get_rng_state()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(13, WIDTH)
        self.blocks = nn.ModuleList(Block(0.2 if noise else 0.0) for _ in range(3))
        self.statistics = nn.BatchNorm1d(WIDTH, affine=False) if noise else nn.Identity()
        self.head = nn.Linear(WIDTH, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.temperature = nn.Parameter(torch.ones(()) + seed / 100)
        self.nothing = nn.Parameter(torch.zeros(0, 4), requires_grad=False)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        torch.random.set_rng_state(generator)

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(0, 13, (3,), generator=generator)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.statistics(x.float()).to(x.dtype)
        logits = self.head(x) * self.temperature
        return nn.functional.cross_entropy(logits.float(), (tokens + 1) % 13)


def dataset() -> list[torch.Tensor]:
    """Tokens, one a sample."""
    return list(torch.randint(0, 13, (SAMPLES,), generator=torch.Generator().manual_seed(5)))


def config(stage: int, dtype: str = "fp32", optimizer: str = "AdamW", **more: Any) -> dict[str, Any]:
    """Configuration with accumulation over two micro-batches of 3 samples a rank; a key that is None is left out."""
    params: dict[str, Any] = {"lr": 0.02}
    if optimizer == "SGD":
        params["momentum"] = 0.9
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": optimizer, "params": params},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.02}},
        **more,
    }
    if dtype == "bf16":
        found["bf16"] = {"enabled": True}
    if dtype == "fp16":
        found["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3}
    return {key: value for key, value in found.items() if value is not None}


class Layout(NamedTuple):
    """Of a checkpoint, or of an engine that loads it.

    Attributes:
        stage: of ZeRO.
        world: number of ranks.
        tensor, sequence, experts: how many of them share a copy of the model, a sequence, all experts.
        stages, chunks: of a pipeline.
        offload: device of the optimizer.
    """

    stage: int
    world: int
    tensor: int = 1
    sequence: int = 1
    experts: int = 1
    stages: int = 1
    chunks: int = 1
    offload: str = "none"

    @property
    def mesh(self) -> tuple[Any, ...]:
        """All but the stage of ZeRO."""
        return self[1:]

    @property
    def copies(self) -> int:
        """Number of ranks with samples of their own."""
        return self.world // self.stages // self.tensor // self.sequence


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def first_rank(action: Callable[..., Any], *args: Any) -> None:
    """Do something on rank 0 alone, after all ranks have come here and before any goes on."""
    barrier()
    if rank() == 0:
        action(*args)
    barrier()


class Run:
    """An engine with its data.

    Args:
        settings: configuration.
        seed: of the initial weights; two runs with different seeds agree only in what is loaded.
        noise: see `Model`.
    """

    def __init__(self, settings: dict[str, Any], seed: int = 1, noise: bool = True) -> None:
        torch.manual_seed(100 * seed + rank())
        random.seed(seed)
        numpy.random.seed(seed)
        self.model = Model(seed, noise)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        parameters = [{"params": trained[:4]}, {"params": trained[4:], "weight_decay": 0.1, "lr": 0.01}]
        engine, *_ = shardwise.initialize(
            model=self.model, model_parameters=parameters, training_data=dataset(), config=settings
        )
        self.engine = engine
        self._batches = RepeatingLoader(engine.training_dataloader)

    def step(self) -> float:
        """Train one step; return the loss of the last micro-batch."""
        for _ in range(self.engine.gradient_accumulation_steps()):
            self.micro_batch()
        return self.loss

    def until(self, steps: int) -> Run:
        """Train until so many steps have been taken; return itself."""
        while self.engine.global_steps < steps:
            self.step()
        return self

    def micro_batch(self) -> None:
        """One forward, backward and step."""
        loss = self.engine(next(self._batches))
        self.engine.backward(loss)
        self.engine.step()
        self.loss = float(loss.detach())

    def load(self, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint, and go on in the data from there."""
        return self.engine.load_checkpoint(*args, **kwargs)

    def fingerprint(self) -> dict[str, Any]:
        """Return everything that decides how training goes on, as values that can be compared bit by bit."""
        engine = self.engine
        sharded = engine.sharded
        found: dict[str, Any] = {}
        for index, runs in sharded.state.value_runs().items():
            name = sharded.registry[index].name
            for start, stop, view in runs:
                found[f"{name}[{start}:{stop}]"] = view.clone()
            if sharded.update is not None:
                for key, value in sharded.update.state(index).items():
                    pieces = sharded.update.state_pieces(index, key)
                    for start, stop, view in pieces:
                        found[f"{key} of {name}[{start}:{stop}]"] = view.clone()
                    if not pieces:
                        found[f"{key} of {name}"] = value.clone() if isinstance(value, torch.Tensor) else value
        found.update((f"plain {k}", v) for k, v in engine.module_state_dict().items())
        found["python"], found["numpy"] = random.getstate(), numpy.random.get_state()[1].tolist()
        found["torch"] = torch.get_rng_state()
        found["counters"] = [engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.global_samples]
        found["lr"] = engine.get_lr()
        if engine.loss_scaler is not None:
            found["scaler"] = engine.loss_scaler.state_dict()
        found["loader"] = engine.training_dataloader.state_dict()
        return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the names of entries that are not the same, bit by bit."""
    found = sorted(set(one) ^ set(other))
    for name in sorted(set(one) & set(other)):
        a, b = one[name], other[name]
        if isinstance(a, torch.Tensor):
            same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        else:
            same = a == b
        if not same:
            found.append(name)
    return found


def content(path: str) -> dict[str, Any]:
    """Return what the checkpoint `path`/a holds, but for what depends on the layout, for `differences`."""
    with Checkpoint(f"{path}/a") as saved:
        held, optimizer = saved.manifest, saved.manifest.optimizer
        assert optimizer is not None
        found: dict[str, Any] = {f"{t.kind} {t.name}": saved.read(t) for t in held.tensors if t.rank is None}
        found.update((f"values {name}", values) for name, values in optimizer["values"].items())
        # The name of a group of experts is that of the ranks over which they are divided.
        found["groups"] = [
            {k: v for k, v in group.items() if k not in ("fused", "name")} for group in optimizer["groups"]
        ]
        return {
            **found,
            "scheduler": held.scheduler,
            "steps": [held.counters[f"{n}_steps"] for n in ("global", "micro")],
        }
