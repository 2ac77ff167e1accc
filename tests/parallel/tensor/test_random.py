"""Dropout, recomputation and divided inputs on ranks that have a copy of the model among them."""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise import checkpointing
from shardwise.errors import DesyncError, UsageError
from shardwise.moe import MoE
from shardwise.parallel import begin_tensors, end_tensors
from shardwise.parallel.tensor.mappings import enter
from shardwise.recompute import partitioned
from shardwise.utils import safe_get_full_grad
from tests.families import build
from tests.harness import of_all_ranks, on_ranks, run_ranks, thorough
from tests.harness.engines import forget_engines
from tests.harness.training import SGD, config_of
from tests.parallel.tensor.models import ROWS, TOKENS, WIDTH, Block, Decoder, data
from tests.parallel.tensor.together import RULES


class Recomputed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpointing.checkpoint(self.block, x)


def config(**more: Any) -> dict[str, Any]:
    return config_of(3, SGD, **{"tensor_parallel": {"autotp_size": 2, "partition_config": RULES}, **more})


class Kept(nn.Dropout):
    """Keeps what it has dropped."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ones = super().forward(torch.ones_like(x))
        self.seen.append(ones.detach() != 0)
        return x * ones


class ResidualBlock(Block):
    """Drops in the residual stream, behind a norm, and inside of divided layers."""

    def __init__(self, recompute: str, rate: float) -> None:
        super().__init__()
        self.norm3, self.side = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.entry, self.normed, self.inner, self.outer, self.outer2, self.outer3 = (Kept(rate) for _ in range(6))
        self.again = checkpointing.checkpoint if recompute == "halves" else lambda half, x: half(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.second, self.again(self.first, x))

    def first(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        y = self.normed(self.norm(x))
        q, k, v = (layer(y).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.inner.p).transpose(1, 2).flatten(-2)
        return x + self.outer(self.o(y))

    def second(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.outer2(self.down(self.inner(nn.functional.gelu(self.up(self.norm2(x))))))
        return x + self.outer3(self.side(self.norm3(x)))


class ResidualDecoder(Decoder):
    def __init__(self, recompute: str = "", rate: float = 0.5) -> None:
        super().__init__()
        for number in range(2):
            block = ResidualBlock(recompute, rate)
            self.blocks[number] = Recomputed(block) if recompute == "blocks" else block
        self.norm, self.last = nn.LayerNorm(WIDTH), Kept(rate)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.last(self.norm(x))).flatten(0, 1), ids.roll(-1, 1).flatten())


NORMS = {
    "layer_specs": [
        *RULES["layer_specs"],
        {"patterns": [r"norm\d?$"], "partition_type": "norm"},
        {"patterns": [r"side$"], "partition_type": "whole"},
    ]
}
COMMON = {True: ("normed", "last"), False: ("entry", "normed", "outer", "outer2", "outer3", "last")}
"""What all ranks of a copy of the model drop alike, if they share tokens or not; else own tokens or features."""


def started(tokens: bool, recompute: str = "", rate: float = 0.5, **more: Any) -> Any:
    torch.manual_seed(0)
    net = ResidualDecoder(recompute, rate)
    torch.manual_seed(10 + dist.get_rank())  # as scripts do
    section = {"autotp_size": 2, "sequence_parallel": tokens, "partition_config": NORMS if tokens else RULES}
    return shardwise.initialize(
        model=net, config=config(tensor_parallel=section, gradient_accumulation_steps=2, **more)
    )[0]


@on_ranks(2)
def test_a_newer_engine_of_the_same_model_has_its_layers_and_random_numbers() -> None:
    engine = started(False)
    engine.destroy()
    for _ in range(2):
        former = engine  # stays referenced
        engine = shardwise.initialize(model=former.module, config=config()).engine
        engine.backward(engine(data(0, ROWS)))
        masks, others = of_all_ranks({path: seen[-1] for path, seen in masks_of(engine).items()})
        for path, mask in masks.items():
            assert torch.equal(mask, others[path]) == (path.rpartition(".")[2] in COMMON[False]), path
        former.destroy()
        engine(data(0, ROWS))


@on_ranks(2)
def test_an_engine_that_was_dropped_leaves_no_random_numbers() -> None:
    model = started(False).module
    forget_engines()
    gc.collect()
    engine = shardwise.initialize(model=model, config=config()).engine
    engine(data(0, ROWS))
    masks, others = of_all_ranks({path: seen[-1] for path, seen in masks_of(engine).items()})
    for path, mask in masks.items():
        assert torch.equal(mask, others[path]) == (path.rpartition(".")[2] in COMMON[False]), path


@on_ranks(2)
def test_recomputed_activations_end_with_the_backward_pass() -> None:
    group, made = begin_tensors(2), []

    def function(x: torch.Tensor) -> torch.Tensor:
        entered = enter(x, group)
        made.append(weakref.ref(entered))
        return entered.sin()

    x = torch.ones(3, requires_grad=True)
    y = checkpointing.checkpoint(function, x).sum()
    group.end_pass()  # as behind a forward pass
    y.backward()
    assert len(made) == 2 and made[1]() is None
    end_tensors()


def masks_of(engine: Any) -> dict[str, list[torch.Tensor]]:
    named = engine.module.named_modules()
    return {path.replace("block.", ""): module.seen for path, module in named if isinstance(module, Kept)}


def step(tokens: bool, recompute: str = "", rate: float = 0.5, **more: Any) -> Any:
    """Train three steps, of which both micro-batches are under way at once."""
    partitioned.LEAST = 64
    engine = started(tokens, recompute, rate, **more)
    told = []
    for number in range(3):
        losses = [engine(data(2 * number + micro, ROWS)) for micro in range(2)]
        for loss in losses:
            engine.backward(loss)
            engine.step()
        told += [loss.item() for loss in losses]
    with shardwise.zero.GatheredParameters(list(engine.module.parameters())):
        named = engine.module.named_parameters()
        values = {name.replace("block.", ""): value.detach().clone() for name, value in named}
    del losses, loss
    regions = engine._tensors._regions
    gathered = sum(r.label == "partition_activations" and r.op == "all_gather" for r in engine.ledger.records())
    return told, masks_of(engine), values, len(regions._known), regions.active, gathered


@functools.cache
def plainly(tokens: bool) -> list[Any]:
    return run_ranks(step, 2, tokens)


@pytest.mark.parametrize("tokens", [False, True])
def test_what_ranks_drop(tokens: bool) -> None:
    results = plainly(tokens) if tokens else run_ranks(step, 4, tokens)
    for first in range(0, len(results), 2):
        (losses, masks, *_, active, _), (other, there, *_) = results[first : first + 2]
        assert active and losses == other
        for path, seen in masks.items():
            own, theirs = (torch.cat([mask.flatten() for mask in some]) for some in (seen, there[path]))
            assert 0.4 < own.double().mean() < 0.6, path
            alike = float((own == theirs).double().mean())
            assert alike == 1 if path.rpartition(".")[2] in COMMON[tokens] else 0.4 < alike < 0.6, path
            assert not any(torch.equal(seen[0], mask) for mask in seen[1:]), path
    if not tokens:  # copies draw as they were seeded
        assert not torch.equal(results[0][1]["last"][0], results[2][1]["last"][0])


@pytest.mark.parametrize(
    ("tokens", "recompute", "section"),
    [
        (True, "halves", {}),  # a checkpointed function begins with own tokens
        (False, "blocks", {"partition_activations": True, "cpu_checkpointing": True}),
        thorough(True, "blocks", {}),
        thorough(False, "blocks", {}),
        thorough(False, "blocks", {"partition_activations": True}),
    ],
)
def test_recomputed_regions_drop_the_same(tokens: bool, recompute: str, section: dict[str, bool]) -> None:
    plain = plainly(tokens)
    again = run_ranks(step, 2, tokens, recompute, activation_checkpointing=section)
    for (losses, masks, values, *_), (losses_again, masks_again, values_again, known, _, gathered) in zip(
        plain, again, strict=True
    ):
        assert losses == losses_again
        assert gathered == (2 * 2 * 3 if section else 0)
        assert known == 0  # when the passes' graphs are gone
        for path, seen in masks.items():
            twice = masks_again[path]
            if path != "last":  # both micro-batches forward, then both again
                first, second = ([mask for n, mask in enumerate(twice) if n % 4 // 2 == half] for half in (0, 1))
                assert all(map(torch.equal, first, second)), path
                twice = first
            assert len(twice) == len(seen) and all(map(torch.equal, twice, seen)), path
        assert all(torch.equal(value, values_again[name]) for name, value in values.items())


def test_without_dropout_nothing_is_watched() -> None:
    assert [found[4] for found in run_ranks(step, 2, False, "", 0.0)] == [False, False]


# -- adapters, and keys that ranks share -------------------------------------------------------------------------------


@on_ranks(2)
def test_what_adapters_drop() -> None:
    """Before a column layer what all ranks have, of each layer anew; before a row layer a rank's own features."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    names = ["q", "k", "o", "up", "down"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        net = peft.get_peft_model(Decoder(), peft.LoraConfig(r=2, target_modules=names, lora_dropout=0.5))
    kept: dict[str, torch.Tensor] = {}

    def keep(name: str, dropped: nn.Module, _: Any, made: torch.Tensor) -> None:
        kept.setdefault(name, made.detach() != 0)

    for path, module in net.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(functools.partial(keep, path.split(".")[-3]))
    rules = {"layer_specs": RULES["layer_specs"][:2]}
    section = {"autotp_size": 2, "partition_config": rules, "check_division": False}
    engine, *_ = shardwise.initialize(model=net, config=config(tensor_parallel=section))
    engine(data(0, ROWS))
    first, second = of_all_ranks(kept)
    assert first.keys() == {*names}
    assert {name for name, own in first.items() if torch.equal(own, second[name])} == {"q", "k", "up"}
    assert not torch.equal(first["q"], first["k"])


@on_ranks(2)
def test_what_heads_drop_whose_keys_ranks_share() -> None:
    """Attention weights of GPTBigCode, whose fused projection has queries and keys that ranks share."""
    net = build("bigcode", attn_pdrop=0.5, attn_implementation="eager")
    section = {"autotp_size": 2, "check_division": False}
    engine, *_ = shardwise.initialize(model=net, config=config(tensor_parallel=section))
    seen: list[torch.Tensor] = []
    drop = nn.functional.dropout

    def keep(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        ones = drop(torch.ones_like(x), *args, **kwargs)
        if x.dim() == 4:
            seen.append(ones != 0)
        return x * ones

    with mock.patch.object(nn.functional, "dropout", keep):
        engine(input_ids=data(0, ROWS), labels=data(0, ROWS))
    assert len(seen) == 2
    for own, theirs in zip(*of_all_ranks(seen), strict=True):
        assert own.shape == theirs.shape == (ROWS, 2, TOKENS, TOKENS)
        assert 0.3 < float((own == theirs).double().mean()) < 0.7


# -- trackers ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_trackers() -> None:
    begin_tensors(2)
    checkpointing.model_parallel_cuda_manual_seed(5)
    tracker = checkpointing.get_cuda_rng_tracker()
    drawn: list[torch.Tensor] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            own = torch.rand(3)
        drawn.append(own)
        return (x * own).sin() * torch.rand(3)

    checkpointing.checkpoint(function, torch.ones(3, requires_grad=True)).sum().backward()
    common = torch.rand(3)
    with tracker.fork():
        after = torch.rand(3)
    tracker.reset()
    end_tensors()
    (first, common, mine), (second, common_there, theirs) = of_all_ranks((drawn[0], common, after))
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(common, common_there)
    assert not torch.equal(first, second) and not torch.equal(mine, theirs) and not torch.equal(after, drawn[0])
    tracker = checkpointing.CudaRNGStatesTracker()
    tracker.add("own", 3)
    with pytest.raises(UsageError, match="there is a state named 'own' already"):
        tracker.add("own", 4)
    with pytest.raises(UsageError, match=r"no such state, but \['own'\]"), tracker.fork("other"):
        pass


# -- what cannot be divided --------------------------------------------------------------------------------------------


class Other(nn.Module):
    """Each rank recomputes something of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH * 8), nn.Linear(WIDTH * 8, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(checkpointing.checkpoint(torch.sin, self.up(x))).sum()


@on_ranks(2)
def test_inputs_that_differ_are_not_divided() -> None:
    specs = [{"patterns": ["up"], "partition_type": "column"}, {"patterns": ["down"], "partition_type": "row"}]
    settings = config(
        activation_checkpointing={"partition_activations": True},
        tensor_parallel={"autotp_size": 2, "partition_config": {"layer_specs": specs}},
    )
    engine, *_ = shardwise.initialize(model=Other(), config=settings)
    with pytest.raises(DesyncError, match=r"of shape \[16, 64\], differs over ranks \[0, 1\]"):
        engine(torch.ones(16, WIDTH))


class Noisy(nn.Module):
    """Draws numbers without dropout, outside of divided layers and between them; an expert's router does, too."""

    def __init__(self, between: bool) -> None:
        super().__init__()
        self.norm, self.between = nn.LayerNorm(WIDTH), between
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        few = {"capacity_factor": 0.5, "min_capacity": 1, "noisy_gate_policy": "RSample"}
        self.experts = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 4, 1, k=1, **few) if between else None
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.experts is None else x + self.experts(x)[0]
        y = nn.functional.gelu(self.up(self.norm(x)))
        y = self.down(y * torch.rand_like(y) if self.between else y)
        noise = torch.rand_like(y)
        self.kept.append(noise)
        return x + y * (1 + noise)


def noisy(between: bool, recompute: bool, seeded: bool = False) -> Any:
    net = Decoder()
    torch.manual_seed(0)
    blocks = [Noisy(between) for _ in range(2)]
    net.blocks = nn.ModuleList(Recomputed(block) if recompute else block for block in blocks)
    specs = [
        {"patterns": [r"\.up\."], "partition_type": "column"},
        {"patterns": [r"\.down\."], "partition_type": "row"},
    ]
    settings = config(tensor_parallel={"autotp_size": 2, "partition_config": {"layer_specs": specs}})
    torch.manual_seed(3)
    engine, *_ = shardwise.initialize(model=net, config=settings)
    if seeded:
        torch.manual_seed(100 + dist.get_rank())
    grads = []
    for number in range(2):
        loss = engine(data(number, ROWS))
        engine.backward(loss)
        grads.append([safe_get_full_grad(p) for p in net.parameters()])
        engine.step()
    return grads, [block.kept for block in blocks]


@pytest.mark.parametrize("between", [True, thorough(False)])
def test_numbers_that_are_drawn_without_dropout_are_those_of_the_forward_pass(between: bool) -> None:
    """Also in the first pass, in which it is not known yet whether numbers are drawn in divided layers."""
    plain, again = (run_ranks(noisy, 2, between, recompute) for recompute in (False, True))
    for (grads, _), (grads_again, kept) in zip(plain, again, strict=True):
        for pass_, pass_again in zip(grads, grads_again, strict=True):
            assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(pass_, pass_again, strict=True))
        assert all(torch.equal(noises[0], noises[1]) for noises in kept)


def test_ranks_that_are_seeded_otherwise_after_initialize_draw_the_same() -> None:
    (_, first), (_, second) = run_ranks(noisy, 2, False, False, True)
    for own, other in zip(first, second, strict=True):
        assert all(map(torch.equal, own, other))
