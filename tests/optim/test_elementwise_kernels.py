"""Steps in one kernel, interpreted: against the operations of `update`, bit by bit, and what no kernel serves."""

from __future__ import annotations

import importlib
import logging
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.device import steps
from shardwise.optim import Adagrad, Adam, AdamW, ElementwiseOptimizer, Lion, adam
from shardwise.optim.rounding import key_of, random_bits
from tests.device.interpreter import interpret

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
OPTIONS: list[tuple[type[ElementwiseOptimizer], dict[str, Any]]] = [
    (AdamW, {"lr": 0.1, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-6}),
    (Adam, {"lr": 0.1, "weight_decay": 0.1, "adam_w_mode": False}),
    (Adam, {"lr": 0.1, "bias_correction": False, "betas": (0.0, 0.9)}),
    (Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1}),
    (Adagrad, {"lr": 0.1}),
    (Lion, {"lr": 0.1, "weight_decay": 0.1, "betas": (0.8, 0.9)}),
    (Lion, {"lr": 0.1}),
]
VARIANTS = [pytest.param(cls, options, id=f"{cls.__name__}-{i}") for i, (cls, options) in enumerate(OPTIONS)]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step by the kernel, interpreted; and otherwise by single operations, not by a kernel of torch's."""
    interpret(monkeypatch, "shardwise.device.tritonsteps")
    monkeypatch.setattr(steps, "compiles_for", lambda device: steps._kernel.wanted)
    monkeypatch.setattr(steps, "_kernel", steps._Kernel())
    monkeypatch.setattr(adam, "fused_step", lambda *_: None)
    monkeypatch.setattr(torch, "_foreach_sqrt_", nearest_roots)


def nearest_roots(tensors: list[torch.Tensor]) -> None:
    """Take roots as IEEE 754 has them; those of MKL, which torch uses on a CPU, may differ in the last bit."""
    for tensor in tensors:
        tensor.copy_(torch.from_numpy(np.sqrt(tensor.numpy())))


def some(numel: int, count: int, seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A start and gradients of very different sizes, with zeros in them."""
    random = torch.Generator().manual_seed(seed)
    scales = [10.0 ** torch.randint(-9, 4, (numel,), generator=random) for _ in range(count)]
    kept = [torch.rand(numel, generator=random) > 0.1 for _ in range(count)]
    return torch.randn(numel, generator=random), [
        torch.randn(numel, generator=random) * scale * keep for scale, keep in zip(scales, kept, strict=True)
    ]


def stepped(
    cls: type[ElementwiseOptimizer],
    options: dict[str, Any],
    bounds: list[int],
    *,
    parameter: torch.dtype = FP32,
    gradient: torch.dtype = FP32,
    output: torch.dtype | None = None,
    factor: float | torch.Tensor = 1.0,
    offset: int = 0,
    seed: int = 0,
    served: bool = True,
    **how: Any,
) -> dict[str, torch.Tensor]:
    """Step a tensor of two origins in segments, `offset` elements into memory; return all that has been written."""
    start, gradients = some(bounds[-1], 3, seed)

    def placed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(values.numel() + offset, dtype=dtype)[offset:].copy_(values)

    cuts = list(pairwise(bounds))
    parts = [torch.nn.Parameter(placed(start[a:b], parameter)) for a, b in cuts]
    optimizer = cls(parts, **options, **how)
    outputs = [(p, placed(p.detach(), output)) for p in parts] if output else []
    half = bounds[-1] // 4 * 2  # where the second origin begins, after a gap of two elements
    whole = [(3, 10, 0, half), (8, 0, half + 2, max(0, bounds[-1] - half - 2))]
    origins = []
    for p, (a, b) in zip(parts, cuts, strict=True):
        inside = [(t, max(a, at), min(b, at + count), first - at) for t, first, at, count in whole]
        origins.append((p, [(t, low + shift, low - a, high - low) for t, low, high, shift in inside if low < high]))
    for values in gradients:
        given = [(p, placed(values[a:b], gradient)) for p, (a, b) in zip(parts, cuts, strict=True)]
        kept = [g.clone() for _, g in given]
        optimizer.step_flat(factor=factor, gradients=given, outputs=outputs, origins=origins)
        assert all(torch.equal(g, before) for (_, g), before in zip(given, kept, strict=True))
    assert not served or steps._kernel._module is not None
    found = {"values": parts, "outputs": [o for _, o in outputs] or [torch.empty(0)]}
    for name in optimizer.state[parts[0]].keys() - {"step"}:
        found[name] = [optimizer.state[p][name] for p in parts]
    return {name: torch.cat([tensor.detach() for tensor in tensors]) for name, tensors in found.items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: n + m)


PRECISIONS = [
    {"parameter": FP32, "output": BF16},
    {"parameter": FP32, "output": FP16, "gradient": BF16},
    {"parameter": FP32, "gradient": FP16, "state_dtype": BF16},
    {"parameter": FP16, "gradient": FP16, "output": FP32},
    {"parameter": BF16, "rounding": "nearest", "gradient": BF16},
    {"parameter": BF16, "rounding": "stochastic"},
    {"parameter": BF16, "rounding": "stochastic", "state_dtype": BF16, "gradient": BF16, "output": FP16},
    {"parameter": BF16, "rounding": "kahan", "output": BF16},
    {"parameter": BF16, "rounding": "kahan", "state_dtype": BF16, "gradient": BF16},
]
FACTORS = [1.0, 0.3, torch.tensor(0.3), torch.tensor(0.3, dtype=FP64)]


@st.composite
def cuts(draw: st.DrawFn) -> list[int]:
    """Ends of consecutive ranges: even, then the end, which may be anywhere; chunks begin at multiples of 4096."""
    numel = draw(st.sampled_from([1, 2, 511, 512, 4095, 4096, 4097, 8192, 9001]))
    inner = draw(st.lists(st.integers(0, numel // 2), max_size=3))
    return sorted({0, numel, *(2 * cut for cut in inner)})


@pytest.mark.parametrize("how", PRECISIONS, ids=lambda how: "-".join(str(v).removeprefix("torch.") for v in how.values()))
@pytest.mark.parametrize(("cls", "options"), VARIANTS)
@settings(max_examples=4)
@given(
    bounds=cuts(), seed=st.integers(0, 2**20), factor=st.sampled_from(FACTORS), offset=st.sampled_from([0, 0, 1, 8])
)
def test_the_kernel_has_the_bits_of_single_operations(
    cls: Any, options: dict[str, Any], how: dict[str, Any], bounds: list[int], seed: int, factor: Any, offset: int
) -> None:
    found = stepped(cls, options, bounds, factor=factor, seed=seed, offset=offset, **how)
    with steps.without_kernels():
        expected = stepped(cls, options, bounds, factor=factor, seed=seed, **how)
    assert_same(found, expected)


@pytest.mark.parametrize("how", [PRECISIONS[0], PRECISIONS[6], PRECISIONS[8]])
@pytest.mark.parametrize(("cls", "options"), [OPTIONS[i] for i in (0, 3, 5)])
def test_cuts_change_no_bit(cls: Any, options: dict[str, Any], how: dict[str, Any]) -> None:
    whole = stepped(cls, options, [0, 9001], factor=0.3, **how)
    for bounds in ([0, 64, 4160, 9001], [0, 2, 4098, 4100, 9000, 9001]):
        assert_same(stepped(cls, options, bounds, factor=0.3, **how), whole)
