"""Dropout, recomputation and divided inputs on ranks that have a copy of the model among them."""

from __future__ import annotations

import functools
import warnings
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
from shardwise.recompute import partitioned
from shardwise.utils import safe_get_full_grad
from tests.harness import run_ranks, thorough
from tests.parallel.tensor.models import ROWS, RULES, TOKENS, WIDTH, WORDS, Block, Decoder, data


class Dropping(Block):
    """A block that drops inside of divided layers and after them, and keeps what it has dropped."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.inner, self.outer = nn.Dropout(rate), nn.Dropout(rate)
        self.seen: list[torch.Tensor] = []
        self.seen_outside: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        rate = self.inner.p if self.training else 0.0
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=rate).transpose(1, 2).flatten(-2)
        x = x + self.outer(self.o(y))
        inside = self.inner(nn.functional.gelu(self.up(self.norm2(x))))
        self.seen.append(inside.detach() != 0)
        outside = self.outer(self.down(inside))
        self.seen_outside.append(outside.detach() != 0)
        return x + outside


class Recomputed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpointing.checkpoint(self.block, x)


def model(rate: float, recompute: bool) -> Any:
    torch.manual_seed(0)
    found = Decoder()
    for number in range(2):
        block = Dropping(rate)
        found.blocks[number] = Recomputed(block) if recompute else block
    return found


def config(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "tensor_parallel": {"autotp_size": 2, "partition_config": RULES},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        **more,
    }


def step(rate: float, recompute: bool, **more: Any) -> Any:
    net = model(rate, recompute)
    partitioned.LEAST = 64
    torch.manual_seed(10 + dist.get_rank())  # as scripts do
    engine, *_ = shardwise.initialize(model=net, config=config(**more))
    copy = engine.get_data_parallel_rank()
    losses = []
    for number in range(3):
        loss = engine(data(number, engine.dp_world_size * ROWS)[copy * ROWS : (copy + 1) * ROWS])
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    blocks = [getattr(block, "block", block) for block in net.blocks]
    seen = [(list(block.seen), list(block.seen_outside)) for block in blocks]
    gathered = sum(r.label == "partition_activations" and r.op == "all_gather" for r in engine.ledger.records())
    with shardwise.zero.GatheredParameters([net.head.weight]):
        last = net.head.weight.detach().clone()
    assert engine._tensors is not None and engine._tensors._regions is not None
    active = engine._tensors._regions.active
    engine.destroy()
    return losses, seen, last, active, gathered


def test_what_ranks_drop() -> None:
    results = run_ranks(step, 4, 0.3, False)
    for first in (0, 2):
        (losses, seen, last, active, _), (other, seen_there, last_there, *_) = results[first : first + 2]
        assert active and losses == other
        assert last.shape == last_there.shape
        for block, block_there in zip(seen, seen_there, strict=True):
            for own, theirs in zip(block[0], block_there[0], strict=True):
                assert not torch.equal(own, theirs)  # other features, other numbers
            for own, theirs in zip(block[1], block_there[1], strict=True):
                assert torch.equal(own, theirs)
        kept = torch.stack([own.double().mean() for own in seen[0][0]]).mean()
        assert 0.5 < kept < 0.9
        assert not torch.equal(seen[0][0][0], seen[1][0][0]) and not torch.equal(seen[0][0][0], seen[0][0][1])
    assert not torch.equal(results[0][1][0][1][0], results[2][1][0][1][0])  # copies draw as they were seeded


@pytest.mark.parametrize(
    "section",
    [
        thorough({}),
        thorough({"partition_activations": True}),
        {"partition_activations": True, "cpu_checkpointing": True},
    ],
)
def test_recomputed_regions_drop_the_same(section: dict[str, bool]) -> None:
    plain = run_ranks(step, 2, 0.3, False)
    again = run_ranks(step, 2, 0.3, True, activation_checkpointing=section)
    for (losses, seen, last, *_), (losses_again, seen_again, last_again, _, gathered) in zip(plain, again, strict=True):
        assert losses == losses_again and torch.equal(last, last_again)
        assert gathered == (0 if not section else 2 * 3)
        for (inside, _), (twice, _) in zip(seen, seen_again, strict=True):
            assert len(twice) == 2 * len(inside)
            for number, own in enumerate(inside):
                assert torch.equal(twice[2 * number], own) and torch.equal(twice[2 * number + 1], own)


def test_without_dropout_nothing_is_watched() -> None:
    assert [found[3] for found in run_ranks(step, 2, 0.0, False)] == [False, False]


def adapted() -> dict[str, torch.Tensor]:
    import peft

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
    engine, *_ = shardwise.initialize(
        model=net,
        config=config(tensor_parallel={"autotp_size": 2, "partition_config": rules, "check_division": False}),
    )
    engine(data(0, ROWS))
    engine.destroy()
    return kept


def test_what_adapters_drop() -> None:
    """Before a column layer what all ranks have, of each layer anew; before a row layer a rank's own features."""
    pytest.importorskip("peft")
    first, second = run_ranks(adapted, 2)
    assert first.keys() == {"q", "k", "o", "up", "down"}
    assert {name for name, own in first.items() if torch.equal(own, second[name])} == {"q", "k", "up"}
    assert not torch.equal(first["q"], first["k"])


def shared_keys(rate: float) -> list[torch.Tensor]:
    """Return which attention weights GPTBigCode keeps, whose fused projection has queries and keys that ranks share."""
    transformers = pytest.importorskip("transformers")
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": rate, "attn_implementation": "eager"}
    how = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, **rates}
    net = transformers.GPTBigCodeForCausalLM(transformers.GPTBigCodeConfig(multi_query=True, **how))
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
    engine.destroy()
    return seen


def test_what_heads_drop_whose_keys_ranks_share() -> None:
    first, second = run_ranks(shared_keys, 2, 0.5)
    assert len(first) == 2
    for own, theirs in zip(first, second, strict=True):
        assert own.shape == theirs.shape == (ROWS, 2, TOKENS, TOKENS)
        assert 0.3 < float((own == theirs).double().mean()) < 0.7


# -- sequence-parallel norms -------------------------------------------------------------------------------------------


class Kept(nn.Dropout):
    """Keeps what it has dropped."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ones = super().forward(torch.ones_like(x))
        self.seen.append(ones.detach() != 0)
        return x * ones


OWN, COMMON = ("entry", "inner", "outer", "outer2", "outer3"), ("normed", "last")


class ResidualBlock(Block):
    """Drops own tokens in the residual stream, all tokens behind a norm, and own features of all tokens."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.norm3, self.side = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.entry, self.normed, self.inner, self.outer, self.outer2, self.outer3 = (Kept() for _ in range(6))
        self.again = checkpointing.checkpoint if recompute == "halves" else lambda half, x: half(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.second, self.again(self.first, x))

    def first(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        y = self.normed(self.norm(x))
        q, k, v = (layer(y).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5).transpose(1, 2).flatten(-2)
        return x + self.outer(self.o(y))

    def second(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.outer2(self.down(self.inner(nn.functional.gelu(self.up(self.norm2(x))))))
        return x + self.outer3(self.side(self.norm3(x)))


class ResidualDecoder(Decoder):
    def __init__(self, recompute: str) -> None:
        super().__init__()
        for number in range(2):
            block = ResidualBlock(recompute)
            self.blocks[number] = Recomputed(block) if recompute == "blocks" else block
        self.norm, self.last = nn.LayerNorm(WIDTH), Kept()

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


def drop_tokens(recompute: str) -> Any:
    """Two micro-batches are under way at once."""
    torch.manual_seed(0)
    net = ResidualDecoder(recompute)
    section = {"autotp_size": 2, "sequence_parallel": True, "partition_config": NORMS}
    engine, *_ = shardwise.initialize(model=net, config=config(tensor_parallel=section, gradient_accumulation_steps=2))
    told = []
    for step in range(3):
        losses = [engine(data(2 * step + micro, ROWS)) for micro in range(2)]
        for loss in losses:
            engine.backward(loss)
            engine.step()
        told += [loss.item() for loss in losses]
    masks: dict[str, list[torch.Tensor]] = {}
    for path, module in net.named_modules():
        if isinstance(module, Kept):
            masks[path.replace("block.", "")] = module.seen
    with shardwise.zero.GatheredParameters(list(net.parameters())):
        values = {name.replace("block.", ""): value.detach().clone() for name, value in net.named_parameters()}
    regions = engine._tensors._regions  # type: ignore[union-attr]
    del losses, loss
    known = len(regions._known)  # type: ignore[union-attr]
    state = torch.get_rng_state()
    engine.destroy()
    return told, masks, values, known, state


def seeded_alike() -> Any:
    """Two passes that a script seeds alike, of which the first has gone when the second is recomputed."""
    torch.manual_seed(0)
    net = ResidualDecoder("halves")
    section = {"autotp_size": 2, "sequence_parallel": True, "partition_config": NORMS}
    engine, *_ = shardwise.initialize(model=net, config=config(tensor_parallel=section, gradient_accumulation_steps=2))
    losses = []
    for _ in range(2):
        torch.manual_seed(7)
        losses.append(engine(data(0, ROWS)))
    for _ in range(2):
        engine.backward(losses.pop(0))
        engine.step()
    seen = {path: module.seen for path, module in net.named_modules() if isinstance(module, Kept)}
    engine.destroy()
    return seen


def test_passes_that_are_seeded_alike() -> None:
    for masks in run_ranks(seeded_alike, 2):
        for path, seen in masks.items():
            assert len(seen) == (2 if path == "last" else 4)
            assert all(torch.equal(mask, seen[0]) for mask in seen[1:]), path


def test_what_ranks_drop_of_their_own_tokens() -> None:
    (losses, masks, _, _, state), (other, there, _, _, state_there) = run_ranks(drop_tokens, 2, "")
    assert losses == other and torch.equal(state, state_there)
    for path, seen in masks.items():
        own, theirs = (torch.cat([mask.flatten() for mask in some]) for some in (seen, there[path]))
        assert 0.4 < own.double().mean() < 0.6, path
        alike = float((own == theirs).double().mean())
        if path.rpartition(".")[2] in COMMON:
            assert alike == 1, path
        else:
            assert 0.4 < alike < 0.6, path
        assert not any(torch.equal(seen[0], mask) for mask in seen[1:]), path


@pytest.mark.parametrize("recompute", [thorough("blocks"), "halves"])
def test_own_tokens_are_dropped_again(recompute: str) -> None:
    """Also where a checkpointed function begins with them."""
    for (losses, masks, values, *_), (losses_again, masks_again, values_again, known, _) in zip(
        run_ranks(drop_tokens, 2, ""), run_ranks(drop_tokens, 2, recompute), strict=True
    ):
        assert losses == losses_again
        for path, seen in masks.items():
            twice, steps = masks_again[path], len(seen)
            if path == "last":
                assert len(twice) == steps
            else:
                assert len(twice) == 2 * steps, path
                # both micro-batches forward, then both again
                passes = [twice[4 * step + part * 2 : 4 * step + part * 2 + 2] for step in range(3) for part in (0, 1)]
                first, again = passes[0::2], passes[1::2]
                for step in range(3):
                    for number in range(2):
                        assert torch.equal(first[step][number], seen[2 * step + number]), path
                        assert torch.equal(again[step][number], seen[2 * step + number]), path
        for name, value in values.items():
            assert torch.equal(value, values_again[name]), name
        assert known == 0  # when the passes' graphs are gone


# -- trackers ----------------------------------------------------------------------------------------------------------


def tracked() -> Any:
    from shardwise.parallel import begin_tensors, end_tensors

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
    return drawn, common, after


def test_trackers() -> None:
    (drawn, common, after), (drawn_there, common_there, after_there) = run_ranks(tracked, 2)
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(common, common_there)
    assert not torch.equal(drawn[0], drawn_there[0]) and not torch.equal(after, after_there)
    assert not torch.equal(after, drawn[0])
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


def own_inputs() -> str:
    rules = {
        "layer_specs": [
            {"patterns": ["up"], "partition_type": "column"},
            {"patterns": ["down"], "partition_type": "row"},
        ]
    }
    settings = config(activation_checkpointing={"partition_activations": True})
    settings["tensor_parallel"] = {"autotp_size": 2, "partition_config": rules}
    engine, *_ = shardwise.initialize(model=Other(), config=settings)
    try:
        engine(torch.ones(16, WIDTH))
    except DesyncError as error:
        return str(error)
    finally:
        engine.destroy()
    return "nothing"


def test_inputs_that_differ_are_not_divided() -> None:
    for found in run_ranks(own_inputs, 2):
        assert "an input of a checkpointed function, of shape [16, 64], differs over ranks [0, 1]" in found


class Noisy(nn.Module):
    """Draws numbers without dropout: outside of divided layers, or also between them."""

    def __init__(self, between: bool) -> None:
        super().__init__()
        self.norm, self.between = nn.LayerNorm(WIDTH), between
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.gelu(self.up(self.norm(x)))
        if self.between:
            y = y * torch.rand_like(y)
        y = self.down(y)
        noise = torch.rand_like(y)
        self.kept.append(noise)
        return x + y * (1 + noise)


class Routed(Noisy):
    """Has experts whose router draws numbers, too."""

    def __init__(self, between: bool) -> None:
        super().__init__(between)
        expert = nn.Linear(WIDTH, WIDTH)
        self.experts = MoE(WIDTH, expert, 4, 1, k=1, capacity_factor=0.5, min_capacity=1, noisy_gate_policy="RSample")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.experts(x)[0])


def noisy(between: bool, recompute: bool, seeded: bool, kind: type[Noisy] = Noisy) -> Any:
    net = Decoder()
    torch.manual_seed(0)
    blocks = [kind(between) for _ in range(2)]
    net.blocks = nn.ModuleList(Recomputed(block) if recompute else block for block in blocks)
    rules = {"layer_specs": [{**spec, "patterns": [r"\.(q|up)\."]} for spec in RULES["layer_specs"][:1]]}
    rules["layer_specs"].append({"patterns": [r"\.(o|down)\."], "partition_type": "row"})
    settings = config(tensor_parallel={"autotp_size": 2, "partition_config": rules})
    torch.manual_seed(3)
    engine, *_ = shardwise.initialize(model=net, config=settings)
    if seeded:
        torch.manual_seed(100 + dist.get_rank())
    grads = []
    for number in range(2):
        loss = engine(data(number, ROWS))
        engine.backward(loss)
        grads.append({name: safe_get_full_grad(p) for name, p in net.named_parameters()})
        engine.step()
    engine.destroy()
    return [list(one.values()) for one in grads], [block.kept for block in blocks]


@pytest.mark.parametrize(("between", "kind"), [thorough(False, Noisy), thorough(True, Noisy), (True, Routed)])
def test_numbers_that_are_drawn_without_dropout_are_those_of_the_forward_pass(between: bool, kind: type[Noisy]) -> None:
    """Also in the first pass, in which it is not known yet whether numbers are drawn in divided layers."""
    plain, again = (run_ranks(noisy, 2, between, recompute, False, kind) for recompute in (False, True))
    for (grads, _), (grads_again, kept) in zip(plain, again, strict=True):
        for pass_, pass_again in zip(grads, grads_again, strict=True):
            assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(pass_, pass_again, strict=True))
        for noises in kept:
            assert torch.equal(noises[0], noises[1])


def test_ranks_that_are_seeded_otherwise_after_initialize_draw_the_same() -> None:
    (_, first), (_, second) = run_ranks(noisy, 2, False, False, True)
    for own, other in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(own, other, strict=True))
