"""The registry finds logical tensors by index and identity, and knows all their names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from shardwise.errors import UsageError
from shardwise.registry import Registry, declare_as, declare_part, declare_stack, part_of


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.zeros(2, dtype=torch.float64), requires_grad=False)
        self.index = nn.Parameter(torch.arange(3), requires_grad=False)


def test_names_shapes_groups_and_dtypes() -> None:
    model = Tied()
    groups = {id(model.embedding.weight): 1, id(model.head.bias): 0}
    registry = Registry.of(model, compute_dtype=torch.bfloat16, groups=groups)
    assert [t.name for t in registry] == ["frozen", "index", "embedding.weight", "head.bias"]
    frozen, index, tied, _ = registry
    assert tied is registry.find(model.embedding.weight) is registry.find(model.head.weight)
    assert tied.aliases == ("head.weight",)
    assert (tied.shape, tied.numel, tied.group, tied.trainable) == ((5, 3), 15, 1, True)
    assert (tied.source_dtype, tied.dtype) == (torch.float32, torch.bfloat16)
    assert (frozen.trainable, frozen.group, frozen.dtype) == (False, None, torch.bfloat16)
    assert index.dtype == torch.int64
    assert registry.find(torch.zeros(2)) is None
    assert len(registry) == 4
    assert registry[3].index == 3


def test_parameters_without_an_optimizer_group_are_not_trained() -> None:
    model = Tied()
    registry = Registry.of(model, groups={id(model.head.bias): 0})
    assert [t.name for t in registry if t.trainable] == ["head.bias"]


def test_a_parameter_may_be_a_part_of_its_tensor() -> None:
    model = Tied()
    table, bias = model.embedding.weight, model.head.bias
    declare_part(table, shape=(10, 3), box=((5, 10), (0, 3)), ranks=(0, 2))
    declare_part(bias, shape=(5,), box=((0, 5),), name="bias")
    registry = Registry.of(model)
    tied, whole = registry.find(table), registry.find(bias)
    assert tied is not None and whole is not None
    assert (tied.global_shape, tied.box, tied.shape, tied.numel) == ((10, 3), ((5, 10), (0, 3)), (5, 3), 15)
    assert (whole.global_shape, whole.box, whole.shape) == ((5,), None, (5,))
    assert (tied.name, tied.ranks, whole.name, whole.ranks) == ("embedding.weight", (0, 2), "bias", None)
    assert replace(tied, box=((3, 3), (1, 3))).numel == 0


def test_boxes_that_cannot_be_are_refused() -> None:
    model = Tied()
    table = model.embedding.weight
    for box in (((5, 11), (0, 3)), ((-1, 4), (0, 3)), ((6, 5), (0, 3)), ((0, 5),)):
        declare_part(table, shape=(10, 3), box=box)
        with pytest.raises(UsageError, match=r"parameter 'embedding.weight': expected \(first, end\) .* of \[10, 3\]"):
            Registry.of(model)
    declare_part(table, shape=(10, 3), box=((0, 4), (0, 3)))
    with pytest.raises(UsageError, match=r"has shape \[5, 3\], its box \(\(0, 4\), \(0, 3\)\) of \[10, 3\] has"):
        Registry.of(model)


def test_a_declaration_goes_on_to_another_parameter() -> None:
    first, second = nn.Parameter(torch.zeros(2, 4)), nn.Parameter(torch.zeros(2, 4))
    declare_part(first, ranks=[0, 2], name="w", shape=[4, 4], box=[(0, 2), (0, 4)], divisor=2)
    declare_stack(first)
    declare_as(second, part_of(first))
    assert part_of(second) == part_of(first) and part_of(second).is_stack
