"""Whole parameters become parts: plain ones, those built under zero.Init, and those on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.errors import ReleasedParameterError, UsageError
from shardwise.registry import narrow, part_of
from tests.harness import RankFailure, on_ranks, run_ranks, thorough
from tests.harness.training import engine_of

TP = 2


class Layer(nn.Module):
    """Linear in its parameters, whatever part of them there is."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))
        self.bias = nn.Parameter(torch.empty(columns))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        nn.init.uniform_(self.bias)

    def forward(self, factor: float) -> torch.Tensor:
        return ((self.weight * self.weight).sum() + self.bias.sum()) * factor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(5 + n, 7) for n in range(3))
        self.norm = Layer(3, 3)

    def forward(self, factor: float) -> torch.Tensor:
        return torch.stack([layer(factor) for layer in [*self.layers, self.norm]]).sum()


def build(how: str) -> Model:
    """The same model in every way: rank 0's seed counts."""
    torch.manual_seed(3 if how == "plain" else 3 + 10 * dist.get_rank())
    if how == "meta":
        with torch.device("meta"):
            return Model()
    with shardwise.zero.Init(enabled=how != "plain", dtype=None):
        return Model()


def boxes(place: int) -> dict[str, list[Any]]:
    """Columns in two ranges of the one, rows of the other; uneven."""
    return {
        "layers.0.weight": [(0, 5), [(0, 2), (4, 6)] if place == 0 else [(2, 4), (6, 7)]],
        "layers.1.weight": [(0, 4) if place == 0 else (4, 6), (0, 7)],
        "layers.1.bias": [(0, 3) if place == 0 else (3, 7)],
    }


def divide(model: Model) -> None:
    place, world = dist.get_rank() % TP, dist.get_world_size()
    for name, box in boxes(place).items():
        narrow(model.get_parameter(name), ranks=range(place, world, TP), box=box, divisor=world // TP)


def taken(whole: torch.Tensor, box: list[Any]) -> torch.Tensor:
    for dim, ends in enumerate(box):
        pairs = ends if isinstance(ends, list) else [ends]
        whole = torch.cat([whole.narrow(dim, first, end - first) for first, end in pairs], dim)
    return whole


@pytest.mark.parametrize("how", ["plain", thorough("meta"), "init"])
@on_ranks(4)
def test_parts_of_a_model_however_it_was_built(how: str) -> None:
    model = build(how)
    parameters = dict(model.named_parameters())
    whole = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    divide(model)
    own = boxes(dist.get_rank() % TP)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    for name, box in own.items():
        assert part_of(parameters[name]).shape == whole[name]
        assert parameters[name].shape == taken(torch.empty(whole[name]), box).shape
    if how == "init":
        with pytest.raises(ReleasedParameterError, match=r"layers|weight"):
            parameters["layers.0.weight"].sum()
        with shardwise.zero.GatheredParameters(parameters["layers.0.weight"]):
            assert parameters["layers.0.weight"].shape == (5, 4 if dist.get_rank() % TP == 0 else 3)
        assert parameters["layers.0.weight"].partition_numel() <= -(-35 // 4)
    engine = engine_of(model, 3 if how == "init" else 1, {"type": "SGD", "params": {"lr": 0.5}})
    engine.backward(engine(1.0))
    engine.step()
    engine.destroy()
    for name, value in build("plain").named_parameters():
        expected = value.detach() - 0.5 * (2 * value.detach() if name.endswith("weight") else 1)
        expected = taken(expected, own[name]) if name in own else expected
        assert torch.allclose(expected, parameters[name].detach(), rtol=1e-6, atol=1e-6), name


def wrong(kind: str) -> None:
    model = build("init")
    weight = model.layers[0].weight
    rank = dist.get_rank()
    if kind == "twice":
        narrow(weight, ranks=[rank], box=[(0, 2), (0, 7)])
        narrow(weight, ranks=[rank], box=[(0, 1), (0, 7)])
    elif kind == "outside":
        narrow(weight, ranks=[rank], box=[(0, 9), (0, 7)])
    elif kind == "changed":
        narrow(weight, ranks=[rank], box=[(0, 2), (0, 7)])
        with shardwise.zero.GatheredParameters(weight, modifier_rank=0):
            pass
    else:
        shardwise.declare_part(weight, ranks=[rank], name=f"own.{rank}")
        shardwise.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1})


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("twice", r"narrow\(\): a parameter of shape \[2, 7\] is a part of a tensor already"),
        ("outside", r"narrow\(box=.*\): expected a part of a tensor of shape \[5, 7\]"),
        ("changed", r"modifier_rank=0\): parameter 'weight' of a Layer has been built under zero.Init and is a part"),
        ("declared", r"'own.\d' is declared as a part that only some ranks have, and was built under zero.Init"),
    ],
)
def test_what_cannot_be_done(kind: str, match: str) -> None:
    with pytest.raises(RankFailure, match=match) as found:
        run_ranks(wrong, 2, kind)
    assert UsageError.__name__ in str(found.value)


def test_a_graph_that_knows_the_whole_is_named() -> None:
    """It would fail in the first backward pass, inside of autograd."""
    layer = torch.nn.Linear(3, 4, bias=False)
    loss = layer(torch.ones(2, 3)).sum()
    with pytest.raises(UsageError, match=r"shape \[4, 3\] is to become a part of shape \[2, 3\].*del loss"):
        narrow(layer.weight, ranks=[0], box=[(0, 2), (0, 3)])
    del loss
    layer = torch.nn.Linear(3, 4, bias=False)
    layer(torch.ones(2, 3)).sum().backward()
    narrow(layer.weight, ranks=[0], box=[(0, 2), (0, 3)])
    layer.weight.grad = None
    layer(torch.ones(2, 3)).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.shape == (2, 3)
