"""Sparse attention and its gradients against a plain computation with a mask of all pairs of tokens."""

from __future__ import annotations

import copy
import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from shardwise.attention import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparseSelfAttention,
    SparsityConfig,
    VariableSparsityConfig,
    blocks,
    masked,
)
from shardwise.attention.blocks import BlockPlan, block_attention
from shardwise.attention.masked import block_mask, flex
from shardwise.errors import UsageError
from shardwise.parallel import DistributedAttention, begin, end
from tests.harness import run_ranks, thorough

HEADS, BLOCK = 4, 8

LAYOUTS: dict[str, SparsityConfig] = {
    "dense": DenseSparsityConfig(HEADS, BLOCK),
    "fixed": FixedSparsityConfig(HEADS, BLOCK, True, horizontal_global_attention=True, num_different_global_patterns=4),
    "fixed one way": FixedSparsityConfig(HEADS, BLOCK, attention="unidirectional"),
    "variable": VariableSparsityConfig(HEADS, BLOCK, True, 2, [1, 2, 3], [0, 3], [1, 5]),
    "variable one way": VariableSparsityConfig(HEADS, BLOCK, True, 1, attention="unidirectional"),
    "bigbird": BigBirdSparsityConfig(HEADS, BLOCK, True),
    "bigbird one way": BigBirdSparsityConfig(HEADS, BLOCK, attention="unidirectional"),
    "bslongformer": BSLongformerSparsityConfig(HEADS, BLOCK),
    "bslongformer one way": BSLongformerSparsityConfig(HEADS, BLOCK, attention="unidirectional"),
    "sliding": LocalSlidingWindowSparsityConfig(HEADS, BLOCK),
    "sliding both ways": LocalSlidingWindowSparsityConfig(HEADS, BLOCK, attention="bidirectional"),
}


def seen(config: SparsityConfig, tokens: int, made_for: int = 0) -> torch.Tensor:
    """Return True where a query sees a key, (heads, tokens, tokens), written without the library's masks."""
    layout = config.make_layout(made_for or tokens).bool()
    place = torch.arange(tokens) // config.block
    mask = layout[:, place][:, :, place]
    return mask & torch.ones(tokens, tokens).tril().bool() if config.attention == "unidirectional" else mask


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """Attention of (samples, heads, tokens, width) by a mask; a query that sees nothing has the output 0."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = (q @ k.mT / math.sqrt(q.shape[-1]) + bias).masked_fill(~mask, -math.inf)
    blind = (scores == -math.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0) @ v


def inputs(
    tokens: int, width: int, dtype: torch.dtype = torch.float64, keys: int = HEADS, samples: int = 2
) -> list[torch.Tensor]:
    torch.manual_seed(tokens + width)
    shapes = [(samples, n, tokens, width) for n in (HEADS, keys, keys, HEADS)]
    q, k, v, weights = (torch.randn(shape, dtype=dtype) for shape in shapes)
    return [*(x.requires_grad_() for x in (q, k, v)), weights]


def with_gradients(found: torch.Tensor, weights: torch.Tensor, *given: torch.Tensor) -> list[torch.Tensor]:
    return [found.detach(), *torch.autograd.grad((found * weights).sum(), given)]


LENGTHS = [BLOCK, 61, 128, thorough(1), thorough(7), thorough(33), thorough(200), thorough(257)]
WIDTHS = [16, thorough(1), thorough(5), thorough(64), thorough(80), thorough(128)]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_output_and_gradients_are_those_of_masked_attention(name: str, tokens: int, width: int) -> None:
    """In fp64 to 1e-11; in fp32 errors are at most twice those of the plain computation in fp32, or 1e-6 of the
    norms of what comes in and of the exact value: with one token, gradients of scores are differences of equal numbers.
    """
    config = LAYOUTS[name]
    attention = SparseSelfAttention(config, max_seq_length=tokens)
    q, k, v, weights = inputs(tokens, width)
    expected = with_gradients(plain(q, k, v, seen(config, tokens)), weights, q, k, v)
    found = with_gradients(attention(q, k, v), weights, q, k, v)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    narrow = [x.detach().float().requires_grad_() for x in (q, k, v)]
    small = with_gradients(attention(*narrow), weights.float(), *narrow)
    rough = with_gradients(plain(*narrow, seen(config, tokens)), weights.float(), *narrow)
    for one, other, exact in zip(small, rough, expected, strict=True):
        limit = max(2 * float((other - exact).norm()), 1e-6 * float(weights.norm() + exact.norm()))
        assert float((one - exact).norm()) <= limit


@pytest.mark.parametrize("keys", [1, 2])
def test_heads_may_share_keys(keys: int) -> None:
    config = LAYOUTS["bigbird"]
    q, k, v, weights = inputs(61, 16, keys=keys)
    expected = with_gradients(plain(q, k, v, seen(config, 61, 2048)), weights, q, k, v)
    found = with_gradients(SparseSelfAttention(config)(q, k, v), weights, q, k, v)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def masks(tokens: int, key_mode: str, pair_mode: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return masks of keys and of pairs in their modes, and what both add to scores."""
    generator = torch.Generator().manual_seed(1)
    kept = torch.rand(2, tokens, generator=generator) < 0.7
    kept[1] = False  # a sample of padding only
    pairs = torch.rand(tokens, tokens, generator=generator) < 0.8
    added = [torch.zeros(m.shape, dtype=torch.float64).masked_fill(~m, -math.inf) for m in (kept, pairs)]
    as_given = [m.double() if mode == "mul" else a for m, a, mode in zip((kept, pairs), added, (key_mode, pair_mode))]  # noqa: B905
    return as_given[0], as_given[1], added[0][:, None, None, :] + added[1]


@pytest.mark.parametrize("tokens", [32, 61])
@pytest.mark.parametrize(("key_mode", "pair_mode"), [("add", "mul"), ("mul", "add")])
def test_masks_and_relative_positions(tokens: int, key_mode: str, pair_mode: str) -> None:
    config = LAYOUTS["fixed"]
    q, k, v, weights = inputs(tokens, 16)
    kept, pairs, bias = masks(tokens, key_mode, pair_mode)
    attention = SparseSelfAttention(config, key_mode, pair_mode)
    for shape in ((tokens, tokens), (HEADS, tokens, tokens), (2, HEADS, tokens, tokens)):
        rpe = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        expected = with_gradients(plain(q, k, v, seen(config, tokens, 2048), bias + rpe), weights, q, k, v, rpe)
        found = with_gradients(attention(q, k, v, rpe, kept, pairs), weights, q, k, v, rpe)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    again = attention(q, k, v, key_padding_mask=kept[:, None, None, :])
    assert torch.equal(again, attention(q, k, v, key_padding_mask=kept))


def test_low_precision_is_as_near_as_a_mask_in_low_precision() -> None:
    config = LAYOUTS["bslongformer"]
    exact = inputs(61, 32)
    expected = with_gradients(plain(*exact[:3], seen(config, 61)), exact[3], *exact[:3])
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in exact[:3])
        weights = exact[3].to(dtype)
        found = with_gradients(SparseSelfAttention(config)(q, k, v), weights, q, k, v)
        rough = with_gradients(plain(q, k, v, seen(config, 61)), weights, q, k, v)
        assert found[0].dtype == dtype
        for one, other, right in zip(found, rough, expected, strict=True):
            assert float((one - right).norm()) <= 1.5 * float((other - right).norm())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q, k, v = (x.detach().float().requires_grad_() for x in exact[:3])
        under = with_gradients(SparseSelfAttention(config)(q, k, v), exact[3].float(), q, k, v)
    assert under[0].dtype == torch.bfloat16
    assert under[1].dtype == torch.float32
    assert float((under[1] - expected[1]).norm()) < 0.02 * float(expected[1].norm())


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_block_masks_of_flex_attention(name: str) -> None:
    """The forward pass, uncompiled; and the blocks of the mask, which only a compiled kernel reads."""
    config, tokens = LAYOUTS[name], 300
    plan, causal = BlockPlan(config.make_layout(tokens).numpy(), BLOCK), config.attention == "unidirectional"
    mask = seen(config, tokens)
    q, k, v, _ = inputs(tokens, 16, torch.float32)
    padding = torch.zeros(2, tokens).masked_fill_(torch.arange(tokens) > 280, -math.inf)
    bias = torch.randn(1, HEADS, tokens, tokens)
    with torch.no_grad():
        found = flex(q, k, v, plan, causal=causal, bias=bias, padding=padding, compiled=False)
    expected = plain(q, k, v, mask, bias + padding[:, None, None, :])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    tiles = block_mask(plan, tokens, causal, torch.device("cpu"))
    for head in range(HEADS):
        for row in range(3):
            tile = mask[head, row * 128 : row * 128 + 128]
            states = [tile[:, column * 128 : column * 128 + 128] for column in range(3)]
            partial = tiles.kv_indices[0, head, row, : tiles.kv_num_blocks[0, head, row]].tolist()
            full = tiles.full_kv_indices[0, head, row, : tiles.full_kv_num_blocks[0, head, row]].tolist()
            assert set(partial).isdisjoint(full)
            assert {j for j, state in enumerate(states) if state.any()} <= {*partial, *full}
            assert all(bool(states[column].all()) for column in full)
    with pytest.raises(UsageError, match='no gradients on a CPU; choose "blocks"'):
        flex(q, k, v, plan)


def test_the_block_mask_of_flex_attention_is_built_once() -> None:
    plan = BlockPlan(LAYOUTS["fixed"].make_layout(64).numpy(), BLOCK)
    q, k, v, _ = (x.detach() for x in inputs(64, 16, torch.float32))
    with mock.patch.object(masked, "block_mask", wraps=block_mask) as built:
        with torch.inference_mode():
            first = flex(q, k, v, plan, compiled=False)
        assert torch.equal(flex(q, k, v, plan, compiled=False), first)
        assert built.call_count == 1
        flex(q, k, v, plan, causal=True, compiled=False)
        flex(q[:, :, :61], k[:, :, :61], v[:, :, :61], plan, compiled=False)
        assert built.call_count == 3
    assert not any(mask.kv_indices.is_inference() for mask in plan.masks.values())
    assert not copy.deepcopy(plan).masks


def test_a_device_computes_few_chunks_and_keeps_their_indices() -> None:
    """On the meta device, which has the chunks of devices other than a CPU."""
    plan = BlockPlan(LAYOUTS["variable"].make_layout(509).numpy(), BLOCK)
    meta = torch.device("meta")
    assert len(plan.chunks(64, meta)) * 8 <= len(plan.chunks(64, torch.device("cpu")))
    q, k, v = (x.to(meta).requires_grad_() for x in inputs(509, 16, torch.float32)[:3])
    bias = torch.zeros(1, HEADS, 509, 509, device=meta, requires_grad=True)
    padding = torch.zeros(2, 509, device=meta)
    uploads = list[int]()
    for _ in range(2):
        with mock.patch.object(torch, "from_numpy", wraps=torch.from_numpy) as moved:
            # torch has no autocast of the meta device, which `block_attention` asks for.
            setting = blocks.Setting(plan.causal, 509, True, 0.25, 0.0, 0)
            found = blocks._Attention.apply(setting, q, k, v, bias, padding)
            torch.autograd.grad(found.sum(), (q, k, v, bias))
        uploads.append(moved.call_count)
    assert uploads[0] > 0 and uploads[1] == 0


def test_dropout_is_a_mask_that_recomputation_repeats() -> None:
    plan = BlockPlan(LAYOUTS["fixed"].make_layout(64).numpy(), BLOCK)
    q, k, _, weights = inputs(64, 64)
    v = torch.eye(64, dtype=torch.float64).expand(2, HEADS, 64, 64).clone().requires_grad_()  # shows the weights
    whole = block_attention(q, k, v, plan)
    torch.manual_seed(5)
    dropped = block_attention(q, k, v, plan, dropout=0.25)
    kept = (dropped != 0).double()
    torch.testing.assert_close(dropped, whole * kept / 0.75, rtol=1e-12, atol=1e-12)
    assert abs(float(kept[whole != 0].mean()) - 0.75) < 0.02
    # The gradient for the same mask, through a plain softmax.
    scores = (q @ k.mT / 8).masked_fill(~seen(LAYOUTS["fixed"], 64), -math.inf)
    expected = with_gradients((torch.softmax(scores, -1) * kept / 0.75) @ v, weights, q, k, v)
    for one, other in zip(with_gradients(dropped, weights, q, k, v), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    torch.manual_seed(5)
    again = checkpoint(lambda *x: block_attention(*x, plan, dropout=0.25), q, k, v, use_reentrant=False)
    assert torch.equal(again, dropped)
    for one, other in zip(with_gradients(again, weights, q, k, v), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


class Own(SparsityConfig):
    """A client's layout by `make_layout`."""

    def make_layout(self, seq_len: int) -> torch.Tensor:
        layout = self.setup_layout(seq_len)
        layout[0] = torch.eye(layout.shape[1], dtype=torch.int64)
        layout[:, :, :1] = 1
        return self.check_and_propagate_first_head_layout(layout)


def test_a_layout_of_the_script() -> None:
    config = Own(HEADS, BLOCK)
    q, k, v, _ = inputs(61, 16)
    torch.testing.assert_close(SparseSelfAttention(config)(q, k, v), plain(q, k, v, seen(config, 61)))


def test_the_layout_is_part_of_the_state() -> None:
    first = SparseSelfAttention(BigBirdSparsityConfig(HEADS, BLOCK, True, seed=1), max_seq_length=128)
    second = SparseSelfAttention(BigBirdSparsityConfig(HEADS, BLOCK, True, seed=2), max_seq_length=128)
    q, k, v, _ = inputs(128, 16)
    assert not torch.equal(first(q, k, v), second(q, k, v))
    state = {name: value.long() for name, value in first.state_dict().items()}  # as DeepSpeed stores a layout
    second.load_state_dict(state)
    assert torch.equal(first(q, k, v), second(q, k, v))
    assert torch.equal(second.get_layout(61), first.master_layout[:, :8, :8])


def test_plans_are_few_and_layers_share_them() -> None:
    layers = [SparseSelfAttention(FixedSparsityConfig(HEADS, BLOCK), max_seq_length=20 * BLOCK) for _ in range(2)]
    layers.append(copy.deepcopy(layers[0]))
    for blocks_of in range(1, 21):
        for samples in range(1, 12) if blocks_of == 20 else (1,):
            q = torch.randn(samples, HEADS, blocks_of * BLOCK, 2)
            assert torch.equal(layers[0](q, q, q), layers[1](q, q, q))
    assert len(layers[0]._known) <= 8 and all(layer._known is layers[0]._known for layer in layers)
    assert len(layers[0]._plan(20 * BLOCK)._chunks) <= 8
    layers[1].get_buffer("master_layout").fill_(True)
    assert layers[1].get_layout(BLOCK * 20).all() and not layers[0].get_layout(BLOCK * 20).all()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda a, x: a(x[:, :, :1], x, x), "expected as many keys as queries"),
        (lambda a, x: a(x[:, :2], x[:, :2], x[:, :2]), "a call has 2 heads, and the layout has 4"),
        (lambda a, x: a(x, x, x, key_padding_mask=torch.ones(2, 5)), "key_padding_mask has shape"),
        (lambda a, x: a(x, x, x, attn_mask=torch.ones(3, 61, 61)), "attn_mask has shape"),
        (lambda a, x: a(*[torch.ones(1, 4, 65, 2)] * 3), "max_seq_length is 64"),
        (lambda a, x: SparseSelfAttention(LAYOUTS["fixed"], "or"), 'choose "add" or "mul"'),
        (lambda a, x: SparseSelfAttention(LAYOUTS["fixed"], implementation="triton"), "choose one of blocks, flex"),
    ],
)
def test_wrong_calls_name_the_fix(call: Any, text: str) -> None:
    attention = SparseSelfAttention(LAYOUTS["fixed"], max_seq_length=64)
    with pytest.raises(UsageError, match=text):
        call(attention, torch.ones(2, HEADS, 61, 16))


def test_memory_grows_with_tokens() -> None:
    """What the graph keeps: inputs, the output, and one number for each query."""
    kept: list[int] = []
    config = LocalSlidingWindowSparsityConfig(HEADS, BLOCK)
    for tokens in (512, 1024):
        q, k, v, _ = inputs(tokens, 16, torch.float32, samples=1)
        node: Any = SparseSelfAttention(config)(q, k, v).grad_fn
        kept.append(sum(x.nbytes for x in node.saved_tensors if x is not None))
    assert kept[1] == 2 * kept[0]


def sequence_parallel(name: str, tokens: int) -> list[torch.Tensor]:
    group = begin(2)
    parts = [x.detach().tensor_split(2, dim=2)[group.rank].clone() for x in inputs(tokens, 16)]
    q, k, v = (x.requires_grad_() for x in parts[:3])
    attention = DistributedAttention(
        SparseSelfAttention(LAYOUTS[name], max_seq_length=tokens), scatter_idx=1, gather_idx=2
    )
    found = with_gradients(attention(q, k, v), parts[3], q, k, v)
    end()
    return found


@pytest.mark.parametrize("name", ["fixed", "variable one way"])
def test_heads_of_a_rank_have_their_own_layouts(name: str) -> None:
    q, k, v, weights = inputs(61, 16)
    expected = with_gradients(plain(q, k, v, seen(LAYOUTS[name], 61)), weights, q, k, v)
    first, second = run_ranks(sequence_parallel, 2, name, 61)
    for one, other, whole in zip(first, second, expected, strict=True):
        torch.testing.assert_close(torch.cat([one, other], 2), whole, rtol=1e-11, atol=1e-11)
