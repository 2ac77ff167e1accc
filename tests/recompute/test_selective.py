"""Selective activation checkpointing: kept outputs change no bit, and only deterministic calls are kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shardwise import checkpointing
from shardwise.errors import UsageError
from shardwise.recompute.selective import _numbered
from tests.harness import on_ranks

ATEN = torch.ops.aten
FUSED = ATEN._scaled_dot_product_flash_attention_for_cpu


class Layer(nn.Module):
    """Fused attention, dropout, and an activation that modifies the output of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16, bias=False)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(mixed), 0.3)
        return x + F.dropout(self.down(self.relu(self.up(x))), 0.3)


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket] += 1
        return func(*args, **(kwargs or {}))


def passes(function: Callable[..., Any], *inputs: torch.Tensor, times: int = 1, **how: Any) -> Any:
    """Gradients of all parameters and inputs, and how often a backward pass calls each operator."""
    torch.manual_seed(3)
    trained = [*inputs, *(function.parameters() if isinstance(function, nn.Module) else [])]
    out = checkpoint(function, *inputs, use_reentrant=False, **how) if how else function(*inputs)
    for time in range(times):
        with Calls() as calls:
            found = torch.autograd.grad(out.square().sum(), trained, retain_graph=time + 1 < times)
    return found, calls.count


def kept(selective: str) -> dict[str, Any]:
    return {"context_fn": partial(checkpointing.selective_contexts, selective)}


@pytest.mark.parametrize(
    ("selective", "attention", "products"), [("attention", 0, 4), ("every_second_matmul", 0, 3), ("matmuls", 0, 1)]
)
def test_what_is_computed_again(selective: str, attention: int, products: int) -> None:
    torch.manual_seed(1)
    layer, x = Layer(), torch.randn(2, 6, 16, requires_grad=True)
    plain, without = passes(layer, x)
    whole, all_again = passes(layer, x, determinism_check="default")
    found, calls = passes(layer, x, **kept(selective))
    for gradients in (whole, found):
        assert all(torch.equal(a, b) for a, b in zip(plain, gradients, strict=True))
    matmuls = [ATEN.mm, ATEN.addmm]
    again = sum(calls[matmul] - without[matmul] for matmul in matmuls)
    assert (all_again[FUSED], sum(all_again[matmul] - without[matmul] for matmul in matmuls)) == (1, 4)
    # The output of `up` is modified in place, so it is computed again in any case.
    assert (calls[FUSED], again) == (attention, products)


def test_a_retained_graph_is_computed_again() -> None:
    torch.manual_seed(1)
    layer, x = Layer(), torch.randn(2, 6, 16, requires_grad=True)
    plain, _ = passes(layer, x)
    again, calls = passes(layer, x, times=2, **kept("matmuls"))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True)) and calls[FUSED] == 1


def test_attention_with_dropout_is_not_kept() -> None:
    function, qkv = ATEN._scaled_dot_product_flash_attention.default, tuple(torch.ones(1, 1, 2, 8) for _ in range(3))
    assert _numbered(function, qkv, {}) and _numbered(function, (*qkv, 0.0, True), {"scale": 1.0})
    assert not _numbered(function, (*qkv, 0.1), {}) and not _numbered(function, qkv, {"dropout_p": 0.1})


def test_a_function_that_does_something_else_is_refused() -> None:
    calls = []

    def other(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return ((x @ weight) if len(calls) == 1 else torch.addmm(x, x, weight)).sigmoid()

    x, weight = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    with pytest.raises(UsageError, match=r"number 1 of the recomputation is aten.addmm.default, and was aten.mm.defau"):
        passes(other, x, weight, **kept("matmuls"))


class _Summed(torch.autograd.Function):
    """An all-reduce in place, of whose writing neither autograd nor a version counter knows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


@on_ranks(2)
def test_outputs_that_a_collective_changes_are_not_kept() -> None:
    torch.manual_seed(dist.get_rank())
    x, weight = (torch.randn(4, 4, requires_grad=True) for _ in range(2))

    def row_parallel(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _Summed.apply(x @ weight).sigmoid()

    plain, _ = passes(row_parallel, x, weight)
    found, _ = passes(row_parallel, x, weight, **kept("matmuls"))
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
