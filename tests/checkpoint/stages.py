"""A model of stages for checkpoints of any number of stages, which are loaded into any other and into none.

Whatever the layout, the run has the same samples in a step. Parameter groups, which ranks have by name, are not all on
all ranks; buffers differ between ranks; there is a learning-rate schedule, and with fp16 a loss scaler.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise.moe import MoE
from shardwise.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from tests.checkpoint.job import Layout

WORDS, WIDTH, LENGTH, ROWS = 13, 8, 5, 8
"""`ROWS` samples in a step, in micro-batches of one."""


MESHES: list[tuple[int, ...]] = [
    (1, 1, 1, 1, 1, 1),
    (2, 1, 1, 2, 1, 1),
    (2, 2, 1, 1, 1, 1),
    (2, 1, 1, 1, 2, 1),
    (2, 1, 1, 1, 2, 2),
    (4, 1, 1, 2, 2, 1),
    (4, 1, 1, 1, 2, 2),
    (4, 2, 1, 1, 2, 1),
    (4, 1, 1, 1, 4, 1),
    (4, 1, 1, 1, 4, 2),
    (8, 1, 1, 2, 4, 1),
    (8, 2, 1, 1, 2, 1),
]

SOME = [MESHES[number] for number in (0, 2, 4, 5, 8)]
"""For fp16, with a loss scaler."""


def of_meshes(meshes: list[tuple[int, ...]], zero: int | None = None) -> list[Layout]:
    """Return the layouts of meshes: with every stage of ZeRO, or with one, which begins at `zero` and rotates."""
    if zero is None:
        return [Layout(stage, *mesh) for mesh in meshes for stage in range(4)]
    return [Layout((zero + number) % 4, *mesh) for number, mesh in enumerate(meshes)]


RULES = {
    "layer_specs": [
        {"patterns": [r"\.up\.weight$"], "partition_type": "column"},
        {"patterns": [r"\.down\.weight$"], "partition_type": "row"},
    ]
}


class Mlp(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Experts(nn.Module):
    """A residual block of experts."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.experts = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 4, ep_size=size, k=1, drop_tokens=False, use_rts=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts(x)[0]


class Seen(nn.Module):
    """Sums up its inputs, of which ranks have different ones, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.seen += x.detach().abs().mean((0, 1))
        return x


def head(embedding: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the logits of the tied head."""
    return F.linear(x, embedding.weight)


def loss_of(output: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(output.flatten(0, 1).float(), ids.flatten())


def model_of(layout: Layout, seed: int) -> PipelineModule:
    """Return a model of eight layers; some have no matrix and some no vector."""
    torch.manual_seed(seed)
    tied = TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH)
    last = TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH, forward_fn=head)
    middle = [LayerSpec(Mlp), LayerSpec(Experts, layout.experts), LayerSpec(Seen), LayerSpec(Mlp), LayerSpec(Mlp)]
    layers = [tied, *middle, LayerSpec(nn.LayerNorm, WIDTH), last]
    return PipelineModule(layers, num_stages=layout.stages, loss_fn=loss_of, partition_method="uniform")


def optimizer_of(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW with a group of matrices and one of vectors, those of them that have parameters."""
    matrices = {"name": "matrices", "weight_decay": 0.1, "params": [p for p in parameters if p.ndim > 1]}
    vectors = {"name": "vectors", "weight_decay": 0.0, "lr": 0.02, "params": [p for p in parameters if p.ndim < 2]}
    groups = [group for group in (matrices, vectors) if group["params"]]
    return torch.optim.AdamW(groups or [{"params": []}], lr=0.01)


def start(layout: Layout, seed: int, dtype: str = "fp32", **more: Any) -> Any:
    """Return an engine."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": ROWS // layout.copies,
        "zero_optimization": {"stage": layout.stage, "stage3_param_persistence_threshold": 0},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_max_lr": 0.02}},
        "pipeline": {"schedule": "interleaved" if layout.chunks > 1 else "1f1b"},
        **more,
    }
    if layout.offload != "none":
        config["zero_optimization"]["offload_optimizer"] = {"device": layout.offload}
    if layout.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": layout.tensor, "partition_config": RULES}
    if dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3}
    model = model_of(layout, seed)
    return shardwise.initialize(model=model, optimizer=optimizer_of, config=config)[0]


def train(engine: Any, first: int, steps: int) -> list[float]:
    """Train on samples that depend on the step only; return the losses."""
    losses, places, place = [], engine.dp_world_size, engine.get_data_parallel_rank()
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(0, WORDS, (ROWS, 1, LENGTH), generator=generator)
        own = [(row, row) for row in rows[place::places]]
        losses.append(float(engine.train_batch(iter(own))))
    return losses
