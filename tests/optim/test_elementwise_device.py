"""Steps of several tensors of any dtype and with any factor: each has its own bits, and all are one kernel."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.optim import AdamW
from tests.optim.reference import step_with
from tests.optim.test_elementwise import OPTIONS, VARIANTS, some

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
CUTS = [0, 64, 128, 1088, 3333]


class Calls(TorchDispatchMode):
    """Counts the operators that are run, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(alias.alias_info and not alias.alias_info.is_write for alias in func._schema.returns):
            self.seen[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("cls", "options"), VARIANTS)
def test_how_a_tensor_is_stepped_does_not_depend_on_what_else_is(cls: Any, options: dict[str, Any]) -> None:
    """Ranks hold different segments of a group, and at different stages different ones together."""
    dtypes = [(FP32, FP32), (BF16, FP32), (FP32, BF16), (FP64, FP64)]

    def stepped(these: list[tuple[torch.dtype, torch.dtype]]) -> list[torch.Tensor]:
        start, gradients = some(100, 3)
        parts = [torch.nn.Parameter(start.to(dtype, copy=True)) for dtype, _ in these]
        optimizer = cls(parts, **options)
        for gradient in gradients:
            given = [gradient.to(kind, copy=True) for _, kind in these]
            step_with(optimizer, factor=0.3, gradients=list(zip(parts, given, strict=True)))
        return [part.detach() for part in parts]

    for together, one in zip(stepped(dtypes), dtypes, strict=True):
        assert torch.equal(together, stepped([one])[0]), one


@pytest.mark.parametrize(("cls", "options"), [OPTIONS[0], OPTIONS[2]])
def test_a_step_is_one_kernel(cls: Any, options: dict[str, Any]) -> None:
    parts = [torch.nn.Parameter(torch.ones(b - a)) for a, b in pairwise(CUTS)]
    optimizer = cls(parts, **options)
    for first in (True, False):
        gradients = [(p, torch.ones_like(p.detach())) for p in parts]
        with Calls() as calls:
            step_with(optimizer, gradients=gradients)
        if first:
            continue  # it makes states
        assert sum(calls.seen[name] for name in calls.seen if name.startswith("_fused")) == 1
        assert not {"copy_", "_foreach_copy_", "_foreach_mul_", "empty.memory_format", "empty"} & calls.seen.keys(), (
            calls.seen
        )


def test_factors_of_zero_and_infinity() -> None:
    for factor in (0.0, torch.tensor(0.0)):
        parameter = torch.nn.Parameter(torch.ones(4))
        gradient = torch.tensor([1.0, -2.0, 0.0, float("inf")])
        optimizer = AdamW([parameter], lr=0.1)
        step_with(optimizer, factor=factor, gradients=[(parameter, gradient)])
        assert parameter[:3].tolist() == [1.0] * 3
        assert bool(parameter[3].isnan())
