"""Sparse attention on a CUDA device: the values of the CPU, and no wait of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise.attention import BigBirdSparsityConfig, FixedSparsityConfig, SparseSelfAttention, SparsityConfig

LAYOUTS: dict[str, Callable[[], SparsityConfig]] = {
    "bigbird": lambda: BigBirdSparsityConfig(4, 16, True),
    "one way": lambda: FixedSparsityConfig(4, 16, attention="unidirectional"),
}


def passes(attention: Any, device: str) -> list[torch.Tensor]:
    """Return the output and gradients on the host."""
    torch.manual_seed(0)
    q, k, v, weights = (torch.randn(2, 4, 300, 64).to(device) for _ in range(4))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    found = attention(q, k, v)
    return [x.cpu() for x in (found.detach(), *torch.autograd.grad(found, (q, k, v), weights))]


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_blocks_on_a_device(name: str) -> None:
    attention = SparseSelfAttention(LAYOUTS[name](), max_seq_length=512)
    expected = passes(attention, "cpu")
    moved = attention.cuda()
    for one, other in zip(passes(moved, "cuda"), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
    q = torch.randn(2, 4, 300, 64, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved(q, q, q).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert q.grad is not None


@pytest.mark.needs_device
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_flex_attention_on_a_device(name: str) -> None:
    pytest.importorskip("triton")
    expected = passes(SparseSelfAttention(LAYOUTS[name](), max_seq_length=512), "cpu")
    attention = SparseSelfAttention(LAYOUTS[name](), max_seq_length=512, implementation="flex").cuda()
    for one, other in zip(passes(attention, "cuda"), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
