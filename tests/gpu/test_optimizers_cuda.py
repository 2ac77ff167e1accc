"""Our optimizers on a CUDA device: nearly the host's values, and the same bits in any cut."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from shardwise.optim import Adagrad, AdamW, ElementwiseOptimizer, Lion, elementwise
from tests.gpu.standin import needs_device, rehearsing
from tests.optim.reference import step_with

BF16 = torch.bfloat16
HOW: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, bf16 states": {"state_dtype": BF16},
    "bf16, nearest": {"rounding": "nearest"},
    "bf16, stochastic": {"rounding": "stochastic"},
    "bf16, kahan": {"rounding": "kahan"},
    "bf16, stochastic, bf16 states": {"rounding": "stochastic", "state_dtype": BF16},
}
# torch's kernel for the CPU rounds the last few elements of a tensor otherwise than those before.
CUTS = (0, 64, 4096, *(() if rehearsing() else (4098,)), 65_600, 100_000)


def run(
    cls: Any,
    device: str,
    how: str,
    bounds: tuple[int, ...] = (0, 100_000),
    *,
    offset: int = 0,
    gradients: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Step a tensor in segments, `offset` elements into memory; return values, outputs and states."""
    random = torch.Generator().manual_seed(0)
    options = HOW[how]
    start = torch.randn(bounds[-1], generator=random).to(BF16 if "rounding" in options else torch.float32)
    cuts = list(pairwise(bounds))

    def placed(values: torch.Tensor) -> torch.Tensor:
        return torch.empty(values.numel() + offset, dtype=values.dtype, device=device)[offset:].copy_(values)

    parts = [torch.nn.Parameter(placed(start[a:b])) for a, b in cuts]
    optimizer: ElementwiseOptimizer = cls(parts, lr=1e-2, weight_decay=0.1, **options)
    outputs = [placed(torch.empty(b - a, dtype=BF16)) for a, b in cuts]
    for _ in range(4):
        gradient = torch.randn(start.numel(), generator=random).to(gradients)
        step_with(
            optimizer,
            factor=torch.tensor(0.3, device=device),
            gradients=[(part, placed(gradient[a:b])) for part, (a, b) in zip(parts, cuts, strict=True)],
            outputs=list(zip(parts, outputs, strict=True)),
            origins=[(part, [(0, a, 0, b - a)]) for part, (a, b) in zip(parts, cuts, strict=True)],
        )
    found = {"values": parts, "outputs": outputs}
    for name in optimizer.state[parts[0]].keys() - {"step"}:
        found[name] = [optimizer.state[part][name] for part in parts]
    return {name: torch.cat([tensor.detach().cpu() for tensor in tensors]) for name, tensors in found.items()}


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, int]:
    """Return how many elements differ, by name."""
    counts = {name: int((tensor != expected[name]).sum()) for name, tensor in found.items()}
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("cls", [AdamW, Adagrad, Lion])
def test_cuts_and_addresses_change_no_bit(cls: Any, how: str) -> None:
    whole = run(cls, "cuda", how)
    assert not differing(run(cls, "cuda", how, CUTS), whole)
    assert not differing(run(cls, "cuda", how, offset=1), whole)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("cls", [AdamW, Adagrad, Lion])
def test_as_on_the_host_in_any_cut(cls: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host, device = run(cls, "cpu", how), run(cls, "cuda", how)
    # Kernels of torch round a last digit differently, which may decide how a bf16 number is rounded.
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if how == "fp32" else {"rtol": 2.0**-6, "atol": 1e-3}
    for name, tensor in device.items():
        if name != "compensation":
            torch.testing.assert_close(tensor.float(), host[name].float(), **tolerance)
    assert not differing(run(cls, "cuda", how, CUTS), device)
    monkeypatch.setattr(elementwise, "DEVICE_CHUNK", 1 << 12)
    assert not differing(run(cls, "cuda", how), device)


@needs_device
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("cls", [AdamW, Adagrad, Lion])
def test_a_step_waits_for_nothing(cls: Any, how: str) -> None:
    dtype = BF16 if "rounding" in HOW[how] else torch.float32
    parts = [torch.nn.Parameter(torch.ones(1 << 20, device="cuda", dtype=dtype)) for _ in range(8)]
    optimizer = cls(parts, lr=1e-2, **HOW[how])
    outputs = [(part, torch.empty(part.numel(), dtype=BF16, device="cuda")) for part in parts]
    gradients = [(part, torch.ones(part.numel(), device="cuda")) for part in parts]
    factor = torch.tensor(0.3, device="cuda")
    step_with(optimizer, factor=factor, gradients=gradients, outputs=outputs)  # makes states
    torch.cuda.set_sync_debug_mode("error")
    try:
        step_with(optimizer, factor=factor, gradients=gradients, outputs=outputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_plain_torch_steps_alike() -> None:
    start = torch.randn(10_000, device="cuda")
    gradients = [torch.randn(10_000, device="cuda") for _ in range(3)]

    def stepped(cls: Any, **options: Any) -> torch.Tensor:
        weight = torch.nn.Parameter(start.clone())
        optimizer = cls([weight], lr=1e-2, weight_decay=0.0, **options)
        for gradient in gradients:
            weight.grad = gradient
            optimizer.step()
        return weight.detach()

    theirs = stepped(torch.optim.AdamW, fused=True)
    assert torch.equal(stepped(AdamW), theirs)  # by the same kernel
