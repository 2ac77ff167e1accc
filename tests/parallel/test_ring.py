"""Ring attention against one process: results, gradients, traffic, and the balance of causal masks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from shardwise.parallel import RingAttention, begin, end, ring
from shardwise.parallel.ring import RingOrder
from tests.harness import run_ranks, thorough
from tests.parallel.test_ulysses import ROWS, WIDTH, whole

PLAIN = mock.patch.object(ring, "flash_attention_applies", lambda query: False)


def ringed(heads: int, keys: int, lengths: list[int], causal: bool, dtype: torch.dtype, plain: bool) -> Any:
    group = begin(len(lengths))
    first = sum(lengths[: group.rank])
    parts = [x[:, :, first : first + lengths[group.rank]].to(dtype) for x in whole(heads, keys, sum(lengths))]
    q, k, v = (x.requires_grad_() for x in parts[:3])
    before = group.comm.ledger.sequence
    with PLAIN if plain else nullcontext():
        found = RingAttention()(q, k, v, is_causal=causal)
    (found * parts[3]).sum().backward()
    records = [record for record in group.comm.ledger.records(before) if record.op == "all_to_all"]
    result = [found.detach(), q.grad, k.grad, v.grad]
    end()
    return result, [(record.label, record.size, record.sent) for record in records]


@pytest.mark.parametrize(
    ("heads", "keys", "lengths", "causal", "dtype", "plain"),
    [
        (1, 1, [6, 6], True, torch.float64, False),
        (4, 2, [5, 4, 4, 4], True, torch.float64, False),
        (2, 1, [3, 5, 2], False, torch.float64, False),
        (2, 1, [3, 5, 2], True, torch.float64, True),
        (4, 2, [8, 8], True, torch.bfloat16, False),
        thorough(2, 1, [1, 2, 1], True, torch.float64, False),
        thorough(4, 1, [700, 900], True, torch.float64, True),
        thorough(4, 2, [5, 4, 4, 4], False, torch.float64, True),
    ],
)
def test_a_ring_needs_no_heads(
    heads: int, keys: int, lengths: list[int], causal: bool, dtype: torch.dtype, plain: bool
) -> None:
    q, k, v, weights = whole(heads, keys, sum(lengths))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    expected = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != keys)
    (expected * weights).sum().backward()
    told = run_ranks(ringed, len(lengths), heads, keys, lengths, causal, dtype, plain)
    close = {"rtol": 1e-10, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 0.03, "atol": 0.06}
    for number, tensor in enumerate([expected.detach(), q.grad, k.grad, v.grad]):
        found = torch.cat([result[number] for result, _ in told], dim=2)
        assert found.dtype == dtype
        torch.testing.assert_close(found, tensor, check_dtype=False, **close)
    if len({*lengths}) == 1 and dtype is torch.float64:
        ranks, size = len(lengths), 2 * ROWS * keys * lengths[0] * WIDTH * 8
        for _, records in told:  # keys and values go round twice, and their gradients once more and home
            assert [sent for label, _, sent in records if label == "sequence_ring"] == [size] * (3 * ranks - 2)
            own = ROWS * lengths[0] * WIDTH * 8  # of a head; queries, keys, values, output, and gradients of all
            order = [size for label, size, _ in records if label == "sequence_ring_order"]
            assert order == [n * own for n in (heads + 2 * keys, heads, heads, heads + 2 * keys)]


def autocast(plain: bool) -> list[Any]:
    group = begin(2)
    parts = [x[:, :, 6 * group.rank : 6 * group.rank + 6] for x in whole(2, 2, 12)]
    q, k, v = (x.to(dtype).requires_grad_() for x, dtype in zip(parts, (*[torch.float32] * 2, torch.bfloat16)))  # noqa: B905
    with torch.autocast("cpu", torch.bfloat16), PLAIN if plain else nullcontext():
        found = RingAttention()(q, k, v)
    (found * parts[3]).sum().backward()
    end()
    return [found.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize("plain", [False, True])
def test_autocast_computes_as_that_of_torch(plain: bool) -> None:
    """Also where rotary embeddings have made q and k wider than v."""
    q, k, v, weights = (x.float() for x in whole(2, 2, 12))
    v = v.bfloat16()
    for tensor in (q, k, v):
        tensor.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        expected = scaled_dot_product_attention(q, k, v, is_causal=True)
    (expected * weights).sum().backward()
    ranks = run_ranks(autocast, 2, plain)
    for number, tensor in enumerate([expected.detach(), q.grad, k.grad, v.grad]):
        assert tensor is not None
        found = torch.cat([parts[number] for parts in ranks], dim=2)
        torch.testing.assert_close(found, tensor, rtol=0.03, atol=0.06)


def test_autocast_leaves_fp64_and_the_meta_device() -> None:
    begin(1)
    attention, tensors = RingAttention(), whole(2, 2, 12)[:3]
    expected = attention(*tensors)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention(*tensors), expected)
        assert attention(*(x.to("meta") for x in tensors)).shape == expected.shape
    end()


def backward_events() -> list[str]:
    """Return the launches and waits of hops of gradients, which are fp32, and the computed blocks."""
    log: list[str] = []

    class Hop(ring._Hop):
        def __init__(self, group: Any, sent: torch.Tensor, coming: int, label: str) -> None:
            super().__init__(group, sent, coming, label)
            self.name = "gradients" if sent.dtype == torch.float32 else "keys"
            log.append(f"launch {self.name}")

        def wait(self) -> torch.Tensor:
            log.append(f"wait for {self.name}")
            return super().wait()

    class Plain(ring._Plain):
        def backward(self, *given: Any) -> tuple[torch.Tensor, ...]:
            log.append("compute")
            return super().backward(*given)

    with mock.patch.multiple(ring, _Hop=Hop, _Plain=Plain):
        ringed(2, 1, [4, 4, 4], False, torch.bfloat16, True)
    return [event for event in log[log.index("compute") - 1 :] if "keys" not in event]


def test_gradients_travel_while_the_next_block_is_computed() -> None:
    turn = ["compute", "wait for gradients", "launch gradients"]
    for found in run_ranks(backward_events, 3):
        assert found == ["compute", "launch gradients", *turn, *turn, "wait for gradients"]


@pytest.mark.parametrize("lengths", [[8, 8], [6, 6, 6], [5, 4, 4, 4], [1, 9, 2], [1, 0, 1], [40] * 5])
@pytest.mark.parametrize("balanced", [True, False])
def test_each_query_sees_each_earlier_key_once(lengths: list[int], balanced: bool) -> None:
    order, ranks = RingOrder(lengths, True, balanced), range(len(lengths))
    places = [order.positions(rank, torch.device("cpu")) for rank in ranks]
    assert torch.cat(places).sort()[0].tolist() == list(range(sum(lengths)))
    seen = torch.zeros(sum(lengths), sum(lengths), dtype=torch.int64)
    work = [[0] * len(lengths) for _ in ranks]
    for rank in ranks:
        for source in ranks:
            for queries, keys, causal in order.blocks(rank, source):
                here = torch.ones(len(places[rank][queries]), len(places[source][keys]), dtype=torch.int64)
                here = here.tril() if causal else here
                seen[places[rank][queries][:, None], places[source][keys]] += here
                work[rank][(rank - source) % len(lengths)] += int(here.sum())
    assert torch.equal(seen, torch.ones_like(seen).tril())
    if balanced and sum(lengths) % (2 * len(lengths)) == 0:
        # In each step all ranks compute equally many scores: of keys of others, half of a full block.
        assert all(steps == work[0] for steps in work)
        tokens = sum(lengths) // len(lengths)
        assert work[0][1:] == [tokens**2 // 2] * (len(lengths) - 1)
