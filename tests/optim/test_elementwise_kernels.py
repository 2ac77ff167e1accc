"""Steps in one kernel, interpreted: against the operations of `update`, bit by bit, and what no kernel serves."""

from __future__ import annotations

import contextlib
import sys
import types
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.device import steps
from shardwise.optim import Adagrad, Adam, AdamW, ElementwiseOptimizer, Lion, adam
from tests.device.interpreter import interpret
from tests.optim.test_elementwise_device import Calls

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
    found = {"values": parts, "outputs": [o for _, o in outputs] or [torch.empty(0)]}
    for name in optimizer.state[parts[0]].keys() - {"step"}:
        found[name] = [optimizer.state[p][name] for p in parts]
    return {name: torch.cat([tensor.detach() for tensor in tensors]) for name, tensors in found.items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: n + m)


PRECISIONS: list[dict[str, Any]] = [
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


@pytest.mark.parametrize("how", PRECISIONS, ids=[" ".join(map(str, how.values())) for how in PRECISIONS])
@pytest.mark.parametrize(("cls", "options"), VARIANTS)
@settings(max_examples=3)
@given(bounds=cuts(), seed=st.integers(0, 2**20), factor=st.sampled_from(FACTORS), offset=st.sampled_from([0, 0, 1, 8]))
def test_the_kernel_has_the_bits_of_single_operations(
    cls: Any, options: dict[str, Any], how: dict[str, Any], bounds: list[int], seed: int, factor: Any, offset: int
) -> None:
    found = stepped(cls, options, bounds, factor=factor, seed=seed, offset=offset, **how)
    assert steps._kernel.wanted and steps._kernel._tables._kept
    with steps.without_kernels():
        expected = stepped(cls, options, bounds, factor=factor, seed=seed, **how)
    assert_same(found, expected)


@pytest.mark.parametrize("how", [PRECISIONS[0], PRECISIONS[6], PRECISIONS[8]])
@pytest.mark.parametrize(("cls", "options"), [OPTIONS[i] for i in (0, 3, 5)])
def test_cuts_change_no_bit(cls: Any, options: dict[str, Any], how: dict[str, Any]) -> None:
    whole = stepped(cls, options, [0, 9001], factor=0.3, **how)
    for bounds in ([0, 64, 4160, 9001], [0, 2, 4098, 4100, 9000, 9001]):
        assert_same(stepped(cls, options, bounds, factor=0.3, **how), whole)


def test_random_numbers_where_nothing_comes_from_a_tensor() -> None:
    """Padding gets any number, which is the same in kernels; so does a run that is all padding."""
    found = []
    for wanted in (True, False):
        parameter = torch.nn.Parameter(torch.ones(9000, dtype=BF16))
        optimizer = AdamW([parameter], lr=1e-3, rounding="stochastic")
        with contextlib.nullcontext() if wanted else steps.without_kernels():
            optimizer.step_flat(gradients=[(parameter, torch.ones(9000))], origins=[(parameter, [])])
        found.append(parameter.detach())
    assert torch.equal(*found) and steps._kernel.wanted


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # of NumPy
@pytest.mark.parametrize("how", [{"rounding": "stochastic"}, {"rounding": "kahan"}, {"state_dtype": BF16}])
@pytest.mark.parametrize(("cls", "options"), [OPTIONS[i] for i in (0, 3, 5)])
def test_values_that_are_not_finite(cls: Any, options: dict[str, Any], how: dict[str, Any]) -> None:
    odd = torch.tensor([float("inf"), -float("inf"), float("nan"), 3e38, -0.0, 1e-42])
    odd = torch.cat([odd, torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(FP32)])  # a device's, all ones
    found = []
    for wanted in (True, False):
        parts = [torch.nn.Parameter(torch.ones(64, dtype=BF16)), torch.nn.Parameter(odd.repeat(8).to(BF16))]
        optimizer = cls(parts, **options, **how)
        with contextlib.nullcontext() if wanted else steps.without_kernels():
            for _ in range(2):
                optimizer.step_flat(gradients=[(part, odd.repeat_interleave(8)) for part in parts])
        states = [value for part in parts for key, value in optimizer.state[part].items() if key != "step"]
        found.append([tensor.detach() for tensor in (*parts, *states)])
    for mine, plain in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain, rtol=0, atol=0, equal_nan=True)
    assert found[0][0][16:24].isnan().all() or cls is Lion  # whose direction is then zero
    assert found[0][0][48:].isnan().all() or cls is Lion


# -- what no kernel serves ---------------------------------------------------------------------------------------------


def values_after(cls: Any, start: torch.Tensor, gradient: torch.Tensor, **options: Any) -> torch.Tensor:
    parameter = torch.nn.Parameter(start)
    optimizer = cls([parameter], lr=0.1, **options)
    for _ in range(2):
        optimizer.step_flat(factor=0.3, gradients=[(parameter, gradient)])
    return parameter.detach()


class Backwards(AdamW):
    """Has another update than the class whose formula it inherits."""

    shardwise_sharding = "elementwise"

    def update(self, batch: Any, group: Any) -> None:
        torch._foreach_add_(batch.values, batch.gradients)


def test_what_the_kernel_does_not_serve_is_stepped_by_single_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    launch = steps._Kernel.step

    def watched(self: Any, runs: Any, *others: Any) -> bool:
        launched.append(len(runs))
        return launch(self, runs, *others)

    monkeypatch.setattr(steps._Kernel, "step", watched)
    wide = torch.randn(100)
    cases: list[tuple[Any, torch.Tensor, torch.Tensor, dict[str, Any]]] = [
        (AdamW, wide.double(), wide.double(), {}),
        (AdamW, wide, wide.double(), {}),
        (AdamW, wide, wide, {"state_dtype": FP64}),
        (AdamW, wide, wide.repeat_interleave(2)[::2], {}),
        (AdamW, wide[:0], wide[:0], {}),
        (Backwards, wide, wide, {}),
    ]
    for cls, start, gradient, options in cases:
        found = values_after(cls, start.clone(), gradient, **options)
        with steps.without_kernels():
            assert torch.equal(found, values_after(cls, start.clone(), gradient, **options))
    assert not launched
    square = torch.randn(12, 10)
    found = values_after(AdamW, square.clone().T, wide.repeat(2)[:120].view(10, 12))  # a copy of it is stepped
    with steps.without_kernels():
        assert torch.equal(found, values_after(AdamW, square.clone().T, wide.repeat(2)[:120].view(10, 12)))
    assert launched == [1, 1]


def test_without_triton_or_a_compiler_nothing_is_written_before_operations_of_torch_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, gradient = torch.randn(100), torch.randn(100)
    with steps.without_kernels():
        expected = values_after(AdamW, start.clone(), gradient)

    def compiled(*arguments: Any) -> None:
        raise RuntimeError("failed to find a C compiler")

    broken = types.SimpleNamespace(CHUNK=4096, launch=compiled)
    for module in (None, broken):  # None: importing it fails
        monkeypatch.setattr(steps, "_kernel", steps._Kernel())
        monkeypatch.setitem(sys.modules, "shardwise.device.tritonsteps", module)
        caplog.clear()
        assert torch.equal(values_after(AdamW, start.clone(), gradient), expected)
        assert len(caplog.records) == 1 and "one pass" in caplog.text  # tried, and told, once


def test_a_dry_run_uses_what_the_kernel_would_and_no_scratch() -> None:
    with FakeTensorMode():
        parameter = torch.nn.Parameter(torch.ones(1 << 16, dtype=BF16))
        optimizer = Lion([parameter], lr=0.1, rounding="kahan")
        gradient, output = torch.ones(1 << 16), torch.empty(1 << 16, dtype=FP16)
        for first in (True, False):
            with Calls() as calls:
                optimizer.step_flat(factor=0.3, gradients=[(parameter, gradient)], outputs=[(parameter, output)])
            if not first:  # which makes states
                assert (calls.seen["add_"], calls.seen["copy_"]) == (4, 1)  # one of them counts steps
                assert not [name for name in calls.seen if "foreach" in name or name.startswith("empty")]


def test_tables_are_made_once_for_addresses_that_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    rows = steps._rows
    monkeypatch.setattr(steps, "_rows", lambda *arguments: made.append(1) or rows(*arguments))
    parameter = torch.nn.Parameter(torch.ones(100))
    optimizer = AdamW([parameter], lr=0.1)
    first, second = torch.ones(100), torch.ones(100)
    for gradient in (first, first, second, first):
        optimizer.step_flat(gradients=[(parameter, gradient)])
    assert len(made) == 2
    monkeypatch.setattr(steps, "_KEPT", 3)
    for count in range(2, 9):
        optimizer.step_flat(gradients=[(parameter, torch.ones(count * 100)[:100])])
    assert len(steps._kernel._tables._kept) <= 4
