"""What clients bring: layers of their own over an mpu, and models that torch has divided."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.parallel.tensor.models import decoder


class Unit:
    """A model-parallel unit as Megatron's. `apart`: ranks of a copy of the model are no neighbours."""

    def __init__(self, size: int, apart: bool = False) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        copies = world // size
        models = [
            list(range(n, world, copies)) if apart else list(range(n * size, (n + 1) * size)) for n in range(copies)
        ]
        self.models = [dist.new_group(ranks) for ranks in models]
        self.columns = [dist.new_group(list(ranks)) for ranks in zip(*models, strict=True)]
        self.model = next(group for group, ranks in zip(self.models, models, strict=True) if rank in ranks)
        place = next(ranks.index(rank) for ranks in models if rank in ranks)
        self.data, self.place, self.size = self.columns[place], place, size

    def get_tensor_model_parallel_group(self) -> Any:
        return self.model

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.size

    def get_tensor_model_parallel_rank(self) -> int:
        return self.place

    def get_data_parallel_group(self) -> Any:
        return self.data

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.data)

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.data)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class Column(nn.Module):
    def __init__(self, whole: nn.Linear, unit: Unit) -> None:
        super().__init__()
        self.unit = unit
        self.weight, self.bias = (
            nn.Parameter(p.detach().chunk(unit.size)[unit.place].clone()) for p in whole.parameters()
        )
        for parameter in (self.weight, self.bias):
            mark(parameter, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(_Copy.apply(x, self.unit.model), self.weight, self.bias)


class Row(nn.Module):
    def __init__(self, whole: nn.Linear, unit: Unit) -> None:
        super().__init__()
        self.unit = unit
        self.weight = nn.Parameter(whole.weight.detach().chunk(unit.size, 1)[unit.place].clone())
        mark(self.weight, 1)
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sum.apply(nn.functional.linear(x, self.weight), self.unit.model) + self.bias


def mark(parameter: Any, dim: int) -> None:
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1


def megatron(unit: Unit) -> Any:
    """A decoder whose linear layers are a client's own."""
    model = decoder()
    for block in model.blocks:
        for name in ("q", "k", "v", "up"):
            setattr(block, name, Column(getattr(block, name), unit))
        for name in ("o", "down"):
            setattr(block, name, Row(getattr(block, name), unit))
    return model


def parallelized(model: Any, size: int, sequence: bool = True) -> Any:
    """Divide a decoder with torch's own styles."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // size, size), mesh_dim_names=("dp", "tp"))["tp"]
    if not sequence:
        plan: dict[str, Any] = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        plan |= {name: RowwiseParallel() for name in ("o", "down")}
    else:
        plan = {"norm": SequenceParallel(), "norm2": SequenceParallel()}
        plan |= {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("q", "k", "v", "up")}
        plan |= {name: RowwiseParallel(output_layouts=Shard(1), use_local_output=False) for name in ("o", "down")}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    more: dict[str, Any] = {"head": ColwiseParallel(output_layouts=Replicate())}
    if sequence:
        more["words"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False)
        more["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(model, mesh, more)
    return model
