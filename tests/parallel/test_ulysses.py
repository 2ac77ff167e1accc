"""Attention over shared sequences against one process: results, gradients, traffic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from shardwise.parallel import DistributedAttention, begin, end
from tests.harness import run_ranks, thorough

ROWS, WIDTH = 2, 8


def whole(heads: int, keys: int, tokens: int) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [torch.randn(ROWS, n, tokens, WIDTH, dtype=torch.float64) for n in (heads, keys, keys, heads)]


def alone(heads: int, keys: int, tokens: int) -> list[torch.Tensor]:
    """Result and gradients of one process."""
    q, k, v, weights = whole(heads, keys, tokens)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    found = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != keys)
    (found * weights).sum().backward()
    return [found.detach(), *(tensor.grad for tensor in (q, k, v))]  # type: ignore[list-item]


def shared(heads: int, keys: int, lengths: list[int], transposed: bool) -> Any:
    """The same of this rank's tokens, and what was sent."""
    group = begin(len(lengths))
    rank = group.rank
    first = sum(lengths[:rank])
    parts = [x[:, :, first : first + lengths[rank]].clone() for x in whole(heads, keys, sum(lengths))]
    q, k, v = (x.requires_grad_() for x in parts[:3])
    before = group.comm.ledger.sequence
    if transposed:  # (tokens, rows, heads, width)

        def local(*given: torch.Tensor, **how: Any) -> torch.Tensor:
            return scaled_dot_product_attention(*(x.permute(1, 2, 0, 3) for x in given), **how).permute(2, 0, 1, 3)

        attention = DistributedAttention(local, group)
        found = attention(*(x.permute(2, 0, 1, 3) for x in (q, k, v)), 1, is_causal=True).permute(1, 2, 0, 3)
    else:
        attention = DistributedAttention(scaled_dot_product_attention, scatter_idx=1, gather_idx=2)
        found = attention(q, k, v, is_causal=True)
    forward = group.comm.ledger.sequence
    (found * parts[3]).sum().backward()
    records = [
        (r.op, r.size, r.sent, r.sequence >= forward) for r in group.comm.ledger.records(before) if r.op == "all_to_all"
    ]
    result = [found.detach(), q.grad, k.grad, v.grad]
    end()
    return result, records


@pytest.mark.parametrize(
    ("heads", "keys", "lengths"),
    [
        (4, 4, [6, 6]),
        (3, 3, [6, 6]),  # heads that do not divide
        (4, 4, [7, 6]),  # tokens that do not divide
        (4, 1, [6, 6]),  # fewer key heads than ranks
        (6, 2, [5, 4, 4, 4]),  # ranks whose query heads belong to several key heads
    ],
)
@pytest.mark.parametrize("transposed", [thorough(False), True])
def test_attention_and_gradients_are_those_of_one_process(
    heads: int, keys: int, lengths: list[int], transposed: bool
) -> None:
    expected = alone(heads, keys, sum(lengths))
    told = run_ranks(shared, len(lengths), heads, keys, lengths, transposed)
    for number, tensor in enumerate(expected):
        found = torch.cat([result[number] for result, _ in told], dim=2)
        torch.testing.assert_close(found, tensor, rtol=1e-12, atol=1e-12)


def test_two_exchanges_each_way_each_of_a_part() -> None:
    """q, k and v, then the result, and back: of N bytes on a rank N (P - 1) / P leave it."""
    ranks, heads, tokens = 2, 4, 12
    for _, records in run_ranks(shared, ranks, heads, heads, [tokens // ranks] * ranks, False):
        size = ROWS * heads * (tokens // ranks) * WIDTH * 8
        exchanged = [(3 * size, False), (size, False), (size, True), (3 * size, True)]
        assert records == [("all_to_all", n, n * (ranks - 1) // ranks, back) for n, back in exchanged]


def test_a_key_head_is_sent_to_those_that_need_it_only() -> None:
    heads, keys, lengths = 4, 2, [3, 3, 3, 3]
    for rank, (_, records) in enumerate(run_ranks(shared, 4, heads, keys, lengths, False)):
        one = ROWS * 3 * WIDTH * 8  # a head of a rank's tokens
        # Each rank has one query head and the key head of it; one of its four pieces stays here.
        assert [found for *found, back in records if not back] == [
            ["all_to_all", 12 * one, 9 * one],
            ["all_to_all", 4 * one, 3 * one],
        ], rank
