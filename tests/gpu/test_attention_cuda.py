"""Sparse attention on a CUDA device, and blocks of ring attention: the values of the CPU, and no wait of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from shardwise.attention import BigBirdSparsityConfig, FixedSparsityConfig, SparseSelfAttention, SparsityConfig
from shardwise.compat import flash_attention_applies
from shardwise.parallel.ring import RingOrder, _Flash, _merge
from tests.gpu.standin import rehearsing

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [[96, 96], [80, 64, 48]])
def test_blocks_of_a_balanced_causal_ring(lengths: list[int], dtype: torch.dtype) -> None:
    """The blocks that all ranks of a ring compute in flash attention, merged, are causal attention over all tokens."""
    torch.manual_seed(0)
    given = [torch.randn(2, heads, sum(lengths), 64).to(dtype) for heads in (4, 2, 2, 4)]
    wide = [x.float().requires_grad_() for x in given[:3]]
    whole = scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
    expected = [whole.detach(), *torch.autograd.grad(whole, wide, given[3].float())]
    device = torch.device("cpu" if rehearsing() else "cuda")  # the stand-in has no flash attention of CUDA
    q, k, v, grad = (x.to(device) for x in given)
    assert flash_attention_applies(q)
    core, order = _Flash(2, 64**-0.5), RingOrder(lengths, True, True)
    found = [torch.zeros(x.shape, device=device) for x in (q, q, k, v)]
    ranks = range(len(lengths))
    places = [order.positions(rank, device) for rank in ranks]
    for rank in ranks:
        own = places[rank]
        blocks = [(source, block) for source in ranks for block in order.blocks(rank, source)]
        out = torch.zeros_like(found[0][:, :, own])
        sums = torch.full(out.shape[:-1], float("-inf"), device=device)
        for source, (queries, keys, causal) in blocks:
            there = places[source][keys]
            block = core.forward(q[:, :, own[queries]], k[:, :, there], v[:, :, there], causal, None)
            _merge(out[:, :, queries], sums[:, :, queries], *block)
        found[0][:, :, own] = out
        for source, (queries, keys, causal) in blocks:
            here, there = own[queries], places[source][keys]
            results = out[:, :, queries].to(dtype), sums[:, :, queries]
            inputs = q[:, :, here], k[:, :, there], v[:, :, there]
            gradients = core.backward(grad[:, :, here], *results, *inputs, causal, None)
            for total, place, one in zip(found[1:], (here, there, there), gradients, strict=True):
                total[:, :, place] += one
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=2e-2, atol=4e-2)
