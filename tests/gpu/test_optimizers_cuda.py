"""Our optimizers on a CUDA device: as on the host, with factor and copy in the same step, in any cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.optim import Adagrad, AdamW, ElementwiseOptimizer, Lion, elementwise


def run(cls: type[ElementwiseOptimizer], device: str, rounding: str | None) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if rounding else torch.float32
    start = torch.randn(100_000, generator=random)
    weight = torch.nn.Parameter(start.to(device, dtype))
    options: dict[str, Any] = {"rounding": rounding} if rounding else {}
    optimizer = cls([weight], lr=1e-2, weight_decay=0.1, **options)
    output = torch.empty(start.numel(), dtype=torch.bfloat16, device=device)
    for _ in range(4):
        gradient = torch.randn(start.numel(), generator=random).to(device)
        optimizer.step_flat(
            factor=torch.tensor(0.3, device=device), gradients=[(weight, gradient)], outputs=[(weight, output)]
        )
    return [weight.detach().cpu(), output.cpu(), *(optimizer.state[weight][name].cpu() for name in cls.state_names)]


@pytest.mark.parametrize("rounding", [None, "stochastic", "kahan"])
@pytest.mark.parametrize("cls", [AdamW, Adagrad, Lion])
def test_as_on_the_host_in_any_cut(cls: Any, rounding: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    host, device = run(cls, "cpu", rounding), run(cls, "cuda", rounding)
    # Kernels round a last digit differently, which may decide how a bf16 number is rounded.
    tolerance = {"rtol": 2.0**-6, "atol": 1e-5} if rounding else {"rtol": 1e-4, "atol": 1e-6}
    for mine, theirs in zip(device, host, strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), **tolerance)
    monkeypatch.setattr(elementwise, "DEVICE_CHUNK", 1 << 13)
    assert all(torch.equal(a, b) for a, b in zip(run(cls, "cuda", rounding), device, strict=True))
