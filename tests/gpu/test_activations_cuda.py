"""Activations on the host of a CUDA device: the bits, the device's memory, and copies beside what it computes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.device import hostmemory
from shardwise.memory import Accountant, Category, Tier
from shardwise.offload import ActivationOffload, offload_activations
from tests.gpu.standin import rehearsing

_CYCLES = 20_000_000
"""About ten milliseconds."""
_WIDTH = 2048


def _step(model: nn.Module, x: torch.Tensor, around: Any) -> tuple[list[torch.Tensor], int]:
    """Gradients, and bytes that the forward pass has left on the device."""
    torch.manual_seed(4)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with around:
        loss = model(x).square().sum()
    held = torch.cuda.memory_allocated() - before
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return gradients, held


def test_bits_and_memory() -> None:
    layers = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(12)]
    model, x = nn.Sequential(*layers).cuda(), torch.randn(_WIDTH, _WIDTH, device="cuda")
    accountant = Accountant()
    offload = offload_activations(accountant=accountant, stay=[x])
    plain, most = _step(model, x, nullcontext())
    for _ in range(3):
        moved, held = _step(model, x, offload)
        assert all(torch.equal(one, other) for one, other in zip(plain, moved, strict=True))
        assert rehearsing() or held < 0.25 * most
    (lane,) = offload._lanes.values()
    kept = [memory for _, memory in lane.pool._returned]
    assert kept and all(memory is not None and memory.bytes.is_pinned() for memory in kept)
    del kept
    assert accountant.live_in(Tier.HOST)[Category.ACTIVATIONS] > 0.6 * most  # kept, pinned, for the next pass
    offload.close()
    assert accountant.live_in(Tier.HOST)[Category.ACTIVATIONS] == 0


def test_batches_of_varying_lengths_pin_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more than the longest one needs."""
    layers = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(6)]
    model, accountant = nn.Sequential(*layers).cuda(), Accountant()
    offload = offload_activations(min_bytes=1024, accountant=accountant)
    pinned: list[int] = []
    pin = hostmemory.pin
    monkeypatch.setattr(hostmemory, "pin", lambda *given: pinned.append(given[-1]) or pin(*given))
    pins, held = [], []
    for length in (4, 1, 4, 1, 4, 1):
        before = len(pinned)
        with offload:
            loss = model(torch.randn(64 * length, 64, device="cuda")).square().sum()
        loss.backward()
        del loss
        pins.append(len(pinned) - before)
        held.append(accountant.live_in(Tier.HOST)[Category.ACTIVATIONS])
    assert pins[0] > 10 and pins[1:] == [0] * 5
    assert held == [sum(pinned)] * 6
    offload.close()
    assert accountant.live_in(Tier.HOST)[Category.ACTIVATIONS] == 0


def test_values_arrive_before_they_are_read_and_leave_before_they_are_overwritten() -> None:
    x = torch.ones(1 << 22, device="cuda", requires_grad=True)
    offload = ActivationOffload()
    with offload:
        y = x * 2.0
        for _ in range(8):
            torch.cuda._sleep(_CYCLES // 8)
            y = y.sin()
    scratch = [torch.full_like(y, float("nan")) for _ in range(4)]  # takes the memory that has been given back
    del scratch
    y.sum().backward()
    z = x.detach().clone().requires_grad_()
    w = z * 2.0
    for _ in range(8):
        w = w.sin()
    w.sum().backward()
    assert x.grad is not None and z.grad is not None and torch.equal(x.grad, z.grad)
