"""Our optimizers on a CUDA device: as on the host, scaling and copying in the same step, in any cut, by few kernels."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from shardwise.optim import Adagrad, AdamW, ElementwiseOptimizer, Lion, elementwise


def run(
    cls: type[ElementwiseOptimizer], device: str, rounding: str | None, bounds: tuple[int, ...] = (0, 100_000)
) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if rounding else torch.float32
    start = torch.randn(bounds[-1], generator=random)
    cuts = list(pairwise(bounds))
    parts = [torch.nn.Parameter(start[a:b].to(device, dtype)) for a, b in cuts]
    options: dict[str, Any] = {"rounding": rounding} if rounding else {}
    optimizer = cls(parts, lr=1e-2, weight_decay=0.1, **options)
    outputs = [torch.empty(b - a, dtype=torch.bfloat16, device=device) for a, b in cuts]
    for _ in range(4):
        gradient = torch.randn(start.numel(), generator=random).to(device)
        optimizer.step_flat(
            factor=torch.tensor(0.3, device=device),
            gradients=[(part, gradient[a:b]) for part, (a, b) in zip(parts, cuts, strict=True)],
            outputs=list(zip(parts, outputs, strict=True)),
            origins=[(part, [(0, a, 0, b - a)]) for part, (a, b) in zip(parts, cuts, strict=True)],
        )
    found = [parts, outputs, *([optimizer.state[part][name] for part in parts] for name in cls.state_names)]
    return [torch.cat([tensor.detach().cpu() for tensor in tensors]) for tensors in found]


@pytest.mark.parametrize("rounding", [None, "stochastic", "kahan"])
@pytest.mark.parametrize("cls", [AdamW, Adagrad, Lion])
def test_as_on_the_host_in_any_cut(cls: Any, rounding: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    host, device = run(cls, "cpu", rounding), run(cls, "cuda", rounding)
    # Kernels round a last digit differently, which may decide how a bf16 number is rounded.
    tolerance = {"rtol": 2.0**-6, "atol": 1e-5} if rounding else {"rtol": 1e-4, "atol": 1e-6}
    for mine, theirs in zip(device, host, strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), **tolerance)
    cut = run(cls, "cuda", rounding, (0, 64, 4096, 65_600, 100_000))
    assert all(torch.equal(a, b) for a, b in zip(cut, device, strict=True))
    monkeypatch.setattr(elementwise, "DEVICE_CHUNK", 1 << 12)
    assert all(torch.equal(a, b) for a, b in zip(run(cls, "cuda", rounding), device, strict=True))


@pytest.mark.parametrize("cls", [AdamW, Adagrad])
def test_a_step_is_one_kernel_that_scales_and_one_copy(cls: Any) -> None:
    parts = [torch.nn.Parameter(torch.ones(1 << 20, device="cuda")) for _ in range(8)]
    optimizer = cls(parts, lr=1e-2)
    outputs = [(part, torch.empty(part.numel(), dtype=torch.bfloat16, device="cuda")) for part in parts]
    factor = torch.tensor(0.3, device="cuda")
    for timed in (False, True):
        gradients = [(part, torch.ones_like(part.detach())) for part in parts]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            optimizer.step_flat(factor=factor, gradients=gradients, outputs=outputs)
            torch.cuda.synchronize()
        if timed:
            assert torch.cuda.max_memory_allocated() - before < 1 << 16  # no scratch
            large = [event for event in profile.events() if "multi_tensor_apply" in event.name]
            assert 2 <= len(large) <= 6, [event.name for event in profile.events()]
    assert torch.equal(gradients[0][1], torch.ones(1 << 20, device="cuda") / (1 / factor))


def test_plain_torch_and_the_engine_step_alike() -> None:
    """Without a factor our AdamW is torch's fused kernel."""
    start = torch.randn(10_000, device="cuda")
    mine, other = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    ours, theirs = AdamW([mine], lr=1e-2), torch.optim.AdamW([other], lr=1e-2, weight_decay=0.0, fused=True)
    for seed in range(3):
        mine.grad = torch.randn(10_000, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
        other.grad = mine.grad.clone()
        ours.step()
        theirs.step()
    assert torch.equal(mine, other)
