"""Layers that ranks divide among them, declared as parts: a fused projection, column and row matrices, heads that some
ranks share, and a scale of which ranks have partial gradients. The same model in one process is a `Tower` of size 1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.registry import declare_part

WIDTH, HIDDEN, HEADS, HEAD = 6, 8, 2, 5
BATCH = 4
NAMES = ("dense.weight", "dense.bias", "scale", "both", "keys", "query", "down")
SHAPES = {
    "scale": (WIDTH,),
    "both": (WIDTH, 2 * HIDDEN),  # as GPT-2 has it: inputs x outputs, two matrices beside each other
    "keys": (HEADS * HEAD, WIDTH),
    "query": (4 * HEAD, WIDTH),
    "down": (WIDTH, HIDDEN),
}


class Copied(torch.autograd.Function):
    """The identity, whose gradient is summed over the ranks that go on differently."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient.contiguous()
        if ctx.group is not None:
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Summed(torch.autograd.Function):
    """The sum over ranks, after which all go on alike."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        values = values.clone()
        if group is not None:
            dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class Layer(nn.Module):
    """One of `size` ranks that divide the layer: `place` says which; all of it with a size of 1."""

    def __init__(self, size: int, place: int, group: Any = None) -> None:
        super().__init__()
        self.size, self.place, self.group = size, place, group
        self.dense = nn.Linear(WIDTH, WIDTH)
        for name, box in self.boxes().items():
            shape = [sum(end - first for first, end in some) for some in box]
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def boxes(self) -> dict[str, list[list[tuple[int, int]]]]:
        """Return the ranges that this rank has in each dimension of each parameter."""

        def own(count: int, first: int = 0) -> tuple[int, int]:
            return first + count * self.place // self.size, first + count * (self.place + 1) // self.size

        width = [(0, WIDTH)]
        head = own(HEADS) if self.size <= HEADS else (self.place * HEADS // self.size,) * 2
        heads = (head[0] * HEAD, max(head[1], head[0] + 1) * HEAD)
        return {
            "scale": [width],
            "both": [width, [own(HIDDEN), own(HIDDEN, HIDDEN)]],
            "keys": [[heads], width],
            "query": [[own(4 * HEAD)], width],
            "down": [width, [own(HIDDEN)]],
        }

    def declare(self, prefix: str, world: int, *, fused: bool = False) -> None:
        """Say which part of which tensor each parameter is, of `world` ranks.

        Args:
            prefix: of names.
            world: number of ranks.
            fused: queries and keys are parts of one tensor, `attention`.
        """
        replicas = world // self.size
        ranks = range(self.place, world, self.size)
        share = max(1, self.size // HEADS)  # ranks that have the same head
        first = self.place // share * share
        with_head = [base + first + n for base in range(0, world, self.size) for n in range(share)]
        for name, box in self.boxes().items():
            among = {"scale": range(world), "keys": with_head}.get(name, ranks)
            shape = SHAPES[name]
            tensor = name
            if fused and name in ("query", "keys"):
                tensor, shape = "attention", (SHAPES["query"][0] + SHAPES["keys"][0], WIDTH)
                before = SHAPES["query"][0] if name == "keys" else 0
                box = [[(before + first, before + end) for first, end in box[0]], box[1]]
            declare_part(
                getattr(self, name),
                ranks=list(among),
                name=f"{prefix}{tensor}",
                shape=shape,
                box=box,
                divisor=replicas,
            )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = values + torch.tanh(self.dense(values))
        values = Copied.apply(values, self.group) * self.scale
        one, other = (values @ self.both).chunk(2, dim=-1)
        found = (one.sigmoid() * other) @ self.down.T
        keys = (values @ self.keys.T).view(len(values), -1, HEAD)
        queries = (values @ self.query.T).view(len(values), -1, HEAD)
        keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
        found = found + (keys * queries).mean(-1).sum(-1, keepdim=True)
        return Summed.apply(found, self.group) / WIDTH


class Tower(nn.Module):
    """Layers, and what every rank has; the values are those of one seed, whatever the size."""

    def __init__(self, size: int = 1, place: int = 0, group: Any = None, seed: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(size, place, group) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        generator = torch.Generator().manual_seed(seed)
        for layer in self.layers:
            boxes = layer.boxes()
            for name in NAMES:
                parameter = layer.get_parameter(name)
                values = torch.randn(SHAPES.get(name, parameter.shape), generator=generator) / 2
                for dimension, some in enumerate(boxes.get(name, ())):
                    index = torch.tensor([i for ends in some for i in range(*ends)])
                    values = values.index_select(dimension, index)
                parameter.data.copy_(values)
        for parameter in self.head.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = values + layer(values)
        return self.head(values).square().mean()


def build(size: int, seed: int = 3, *, fused: bool = False) -> Tower:
    """Return this rank's part of the model, of which `size` ranks have all together (all ranks call)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    model = Tower(size, rank % size, groups[rank // size] if size > 1 else None, seed)
    for number, layer in enumerate(model.layers):
        if size > 1:
            layer.declare(f"layers.{number}.", world, fused=fused)
    return model


def rows(step: int, replica: int) -> torch.Tensor:
    """What a copy of the model sees in a step."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    return torch.randn(BATCH, WIDTH, generator=generator)
