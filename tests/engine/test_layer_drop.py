"""Progressive layer dropping: the same training as a plain loop that skips the same layers."""

from __future__ import annotations

import gc
import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.data.fetch import mixed_seed
from shardwise.errors import ConfigError, ConflictError, UsageError
from tests.harness import of_all_ranks, on_ranks, thorough, training
from tests.harness.engines import forget_engines
from tests.harness.training import assert_close, goes_on, masters, parameters_digest
from tests.parallel.tensor.together import RULES, TOKENS, WORDS, decoder

WIDTH, LAYERS, STEPS = 8, 5, 6
SEED = 7
DROP = {"enabled": True, "theta": 0.3, "gamma": 0.7}


class Block(nn.Module):
    """A residual block, which returns a tuple if `form` says so."""

    def __init__(self, form: str = "") -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.form = form

    def forward(self, hidden_states: torch.Tensor, scale: float = 1.0) -> Any:
        out = hidden_states + scale * self.down(torch.tanh(self.up(self.norm(hidden_states))))
        return {"": out, "tuple": (out, None), "more": (out, out)}[self.form]


class Net(nn.Module):
    """Blocks that are called by position or by name, with and without recomputation."""

    def __init__(self, form: str = "", recompute: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(Block(form) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 2)
        self.recompute = recompute

    def forward(self, x: torch.Tensor, kept: dict[int, float] | None = None) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            probability = 1.0 if kept is None else kept.get(number, 0.0)
            if not probability:
                continue
            if self.recompute is None:
                out = block(hidden_states=x, scale=0.5)
            else:
                out = checkpoint(block, x, 0.5, use_reentrant=self.recompute)
            out = out[0] if isinstance(out, tuple) else out
            x = out if kept is None else x + (out - x) / probability
        return self.head(x)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).requires_grad_()


def kept_layers(step: int, layers: int = LAYERS, seed: int = 1234, micro: int = 0) -> dict[int, float]:
    """Return the probability of each layer that a micro-batch of a step computes."""
    theta = (1 - DROP["theta"]) * math.exp(-DROP["gamma"] * step) + DROP["theta"]
    found = {}
    for layer in range(layers):
        probability = 1 - layer / layers * (1 - theta)
        if probability == 1 or random.Random(mixed_seed(seed, 0, step, micro, 1, layer)).random() < probability:
            found[layer] = probability
    return found


def engine_of(model: nn.Module, stage: int = 0, **config: Any) -> Any:
    optimizer = {"type": "SGD", "params": {"lr": 0.2}}
    return training.engine_of(model, stage, optimizer, **{"rows": 3, "progressive_layer_drop": DROP, **config})


def train(engine: Any, first: int, last: int) -> None:
    for number in range(first, last):
        engine.backward(engine(batch(number, dist.get_rank())).square().mean())
        engine.step()


@pytest.mark.parametrize(
    ("world", "form", "accumulation"), [(1, "tuple", 1), (2, "", 1), (2, "", 2)], ids=["tuples", "tensors", "windows"]
)
@on_ranks("world")
def test_training_is_that_of_a_loop_that_skips_layers(world: int, form: str, accumulation: int) -> None:
    places = [*itertools.product(range(accumulation), range(world))]
    kept = [[kept_layers(step, micro=micro) for micro, _ in places] for step in range(STEPS)]
    assert any(len(one) < LAYERS for step in kept for one in step)
    assert any(one != step[0] for step in kept for one in step) is (accumulation > 1)
    model, digests = Net(form), set()

    def losses(step: int) -> list[torch.Tensor]:
        inputs = [batch(accumulation * step + micro, rank) for micro, rank in places]
        return [model(x, layers).square().mean() for x, layers in zip(inputs, kept[step], strict=True)]

    wanted = training.loop(model, torch.optim.SGD(model.parameters(), lr=0.2), losses, STEPS)
    for stage, recompute in enumerate((None, True, None, False)):
        engine = engine_of(Net(form, recompute), stage, gradient_accumulation_steps=accumulation)
        train(engine, 0, accumulation * STEPS)
        assert_close(masters(engine.module), wanted, 1e-5)
        digests.add(parameters_digest(engine.module))
        assert engine.progressive_layer_drop.get_theta() == pytest.approx(0.3 + 0.7 * math.exp(-0.7 * STEPS))
        engine.eval()
        evaluated = engine(batch(0, 0))
        engine.destroy()
        assert torch.equal(engine.module(batch(0, 0)), evaluated)  # nothing is skipped in evaluation
        assert all("forward" not in vars(block) for block in engine.module.blocks)
    assert len(digests) == accumulation


@on_ranks(2)
def test_training_resumes_bit_for_bit(tmp_path: Path) -> None:
    goes_on(lambda again: engine_of(Net(), 2 if again else 3), train, tmp_path, 3, STEPS)


def text(step: int, rank: int) -> torch.Tensor:
    return torch.randint(WORDS, (2, TOKENS), generator=torch.Generator().manual_seed(9 * step + rank))


@pytest.mark.parametrize("way", ["tensor", thorough("sequence"), thorough("experts")])
@on_ranks(2)
def test_ranks_that_share_a_model_skip_alike(way: str) -> None:
    """A rank that skipped what another computes would wait for it forever, or compute with half of a layer."""
    model = decoder(**{"sequence": {"sequence": True}, "experts": {"experts": 2}}.get(way, {}))
    config: dict[str, Any] = {
        "tensor": {"tensor_parallel": {"autotp_size": 2, "partition_config": RULES}},
        "sequence": {"sequence_parallel_size": 2},
    }.get(way, {})
    engine = engine_of(model, 3, rows=2, data_efficiency={"seed": SEED}, **config)
    calls = []
    model.blocks[1].norm.register_forward_hook(lambda *_: calls.append(engine.global_steps))
    rank = engine.get_data_parallel_rank()
    places = torch.arange(TOKENS).expand(2, -1)
    for step in range(STEPS):
        ids = text(step, rank)
        part = slice(None)
        if way == "sequence":
            part = slice(0, 5) if dist.get_rank() == 0 else slice(5, TOKENS)
        logits = engine(ids[:, part], places[:, part])
        engine.backward(cross_entropy(logits.flatten(0, 1), ids[:, part].flatten()))
        engine.step()
    computed = set(calls)
    assert computed == {step for step in range(STEPS) if 1 in kept_layers(step, 2, SEED)} != set(range(STEPS))
    assert len(set(map(str, of_all_ranks(sorted(computed))))) == 1


class Own(nn.Module):
    """Skips by itself, as the models that DeepSpeed documents."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, progressive_layer_drop: bool = False, pld_theta: float = 1.0) -> torch.Tensor:
        self.seen.append((progressive_layer_drop, pld_theta))
        return self.layer(x)


@on_ranks(1)
def test_a_model_that_takes_theta_skips_by_itself() -> None:
    engine = engine_of(Own())
    train(engine, 0, 2)
    engine.eval()
    engine(batch(0, 0))
    assert engine.module.seen == [(True, 1.0), (True, 0.3 + 0.7 * math.exp(-0.7)), (False, 1.0)]


@on_ranks(1)
def test_what_cannot_be_skipped_is_refused() -> None:
    with pytest.raises(ConfigError, match="progressive_layer_drop: Linear has no list"):
        engine_of(nn.Linear(WIDTH, WIDTH))
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    with pytest.raises(ConflictError, match="is a PipelineModule"):
        engine_of(shardwise.pipe.PipelineModule(layers, num_stages=1, loss_fn=nn.MSELoss()))
    engine = engine_of(Net("more"))
    train(engine, 0, 1)
    with pytest.raises(UsageError, match="the layer returns more than hidden states"):
        engine(batch(1, 0))
    engine = engine_of(Net(recompute=False))
    train(engine, 0, 3)
    losses = [engine(batch(step, 0)).square().mean() for step in range(2)]
    with pytest.raises(UsageError, match="several forward passes have run before this backward pass"):
        engine.backward(losses[0] + losses[1])


@on_ranks(1)
def test_a_dropped_engine_skips_no_layers_of_the_next_one() -> None:
    model = Net(recompute=False)
    train(engine_of(model), 0, 1)
    forget_engines()
    gc.collect()
    engine = engine_of(model, progressive_layer_drop={"enabled": False})
    losses = [engine(batch(step, 0)).square().mean() for step in range(2)]
    engine.backward(losses[0] + losses[1])
    assert not any("forward" in vars(module) for module in model.modules())
