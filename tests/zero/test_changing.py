"""Parameters that `forward` changes in place, as codebooks and clamped weights are, keep the change at every stage."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.errors import UsageError
from shardwise.utils.logging import warn_once
from tests.harness import on_ranks
from tests.harness.logs import logged
from tests.harness.training import WholeSGD, engine_of, masters

STEPS = 3


class Changing(nn.Module):
    """Changes a codebook, a weight of its own, and one of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.ones(5), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(5))
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.codes.mul_(0.9)
            self.scale.clamp_(max=0.98)
            self.last.weight.clamp_(-0.2, 0.2)
        return self.last(self.first(x) * self.codes * self.scale)


class Model(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks, self.head = nn.ModuleList(Changing() for _ in range(2)), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x).float().mean()


def start(stage: int, kind: type = torch.optim.SGD, precision: str = "fp32", recompute: bool = False) -> Any:
    torch.manual_seed(0)
    model = Model(recompute)
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return engine_of(model, stage, optimizer, zero={"reduce_bucket_size": 20}, bf16={"enabled": precision == "bf16"})


def batch(engine: Any, number: int) -> torch.Tensor:
    x = torch.arange(6.0).view(2, 3) + number + dist.get_rank()
    return x.to(engine.module.head.weight.dtype)


def values_of(engine: Any) -> dict[str, torch.Tensor]:
    with shardwise.zero.GatheredParameters(engine.module.parameters()):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def trained(stage: int, kind: type, precision: str, recompute: bool) -> list[dict[str, torch.Tensor]]:
    engine = start(stage, kind, precision, recompute)
    for number in range(STEPS):
        engine.backward(engine(batch(engine, number)))
        engine.step()
    return [values_of(engine), masters(engine.module)]


@pytest.mark.parametrize(
    ("kind", "precision", "recompute"),
    [(torch.optim.SGD, "fp32", False), (WholeSGD, "bf16", True)],
)
@on_ranks(2)
def test_changes_within_forward_are_kept_at_every_stage(kind: type, precision: str, recompute: bool) -> None:
    expected = trained(0, kind, precision, recompute)
    times = STEPS * (2 if recompute else 1)
    torch.testing.assert_close(expected[0]["blocks.0.codes"].float(), torch.full((5,), 0.9**times), rtol=2e-2, atol=0)
    for stage in (2, 3):
        for wanted, got in zip(expected, trained(stage, kind, precision, recompute), strict=True):
            for name, value in wanted.items():
                assert torch.equal(value, got[name]), (stage, name)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_changes_in_passes_that_are_not_differentiated(stage: int) -> None:
    """Alone, and with everything gathered around."""
    engine = start(stage)
    with torch.no_grad():
        for count, around in ((1, contextlib.nullcontext()), (2, engine.gathered())):
            with around:
                engine(batch(engine, 0))
            torch.testing.assert_close(values_of(engine)["blocks.1.codes"], torch.full((5,), 0.9**count))


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_changes_in_a_block_without_a_modifier_are_dropped_with_a_warning(stage: int) -> None:
    warn_once.cache_clear()
    engine = start(stage)
    model, rank = engine.module, dist.get_rank()
    changes: list[tuple[str, Callable[[], Any], bool]] = [
        ("", lambda: None, False),
        ("'blocks.0.codes'", lambda: model.blocks[0].codes.zero_(), True),
        ("'head.weight'", lambda: rank and model.head.weight.zero_(), rank == 1),
        ("", lambda: 1 / int(model.head.bias.zero_().sum()), False),  # raises
    ]
    for name, change, told in changes:
        with (
            logged(logging.WARNING) as heard,
            contextlib.suppress(ZeroDivisionError),
            torch.no_grad(),
            shardwise.zero.GatheredParameters(list(model.parameters())),
        ):
            change()
        assert len(heard.lines) == (told and stage == 3)
        assert all(name in line and "modifier_rank=0" in line for line in heard.lines)
    assert values_of(engine)["blocks.0.codes"].sum() == (5.0 if stage == 3 else 0.0)


@on_ranks(2)
def test_changes_under_init_without_a_modifier_are_dropped_with_a_warning() -> None:
    with shardwise.zero.Init():
        layer = nn.Linear(3, 5)
    for change in (False, True):
        with logged(logging.WARNING) as heard, shardwise.zero.GatheredParameters(layer.weight):
            if change:
                layer.weight.data.fill_(1.0)
        assert len(heard.lines) == change
    assert "weight" in heard.lines[0] and "modifier_rank=0" in heard.lines[0]


@pytest.mark.parametrize("offloaded", [False, True])
@on_ranks(2)
def test_changes_through_data_in_a_block_reach_master_weights(offloaded: bool) -> None:
    zero = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}} if offloaded else {}
    engine = engine_of(Model(recompute=False), 3, {"type": "Adam", "params": {}}, zero=zero, bf16={"enabled": True})
    weight = engine.module.head.weight
    blocks = (engine.gathered, lambda: shardwise.zero.GatheredParameters(weight, modifier_rank=0))
    for number, (block, assigned) in enumerate(itertools.product(blocks, (False, True))):
        wanted = torch.full((1, 3), float(number))
        with block():
            if assigned:
                weight.data = wanted.to(weight.dtype)
            else:
                weight.data.copy_(wanted)
        assert torch.equal(values_of(engine)["head.weight"].float(), wanted), (number, assigned)
        assert torch.equal(masters(engine.module)["head.weight"], wanted), (number, assigned)


class Rewriting(nn.Module):
    """Changes its scale through an alias, as `how` says, in the passes that `when` lists."""

    def __init__(self, how: str, when: tuple[int, ...] = (0,)) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(8)), nn.Linear(8, 1)
        self.how, self.when, self.passes = how, when, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x * self.scale).float().mean()
        if self.passes in self.when:
            before = self.scale.data.clone()
            if self.how == "assigned":
                self.scale.data = before / 2
            elif self.how != "untouched":
                self.scale.data.copy_(before / 2)
            if self.how == "undone":
                self.scale.data.copy_(before)
        self.passes += 1
        return y


def rewriting(stage: int, how: str, when: tuple[int, ...] = (0,), steps: int = 2, **config: Any) -> torch.Tensor:
    torch.manual_seed(0)
    model = Rewriting(how, when)
    engine = engine_of(model, stage, torch.optim.SGD(model.parameters(), lr=0.1), **config)
    for step in range(steps):
        x = torch.full((2, 8), 1.0 + step + dist.get_rank(), dtype=model.layer.weight.dtype)
        engine.backward(engine(x))
        engine.step()
    return values_of(engine)["scale"]


_BF16 = {"bf16": {"enabled": True}}
_OFFLOADED = {"zero": {"offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize(("stage", "config"), [(3, {}), (0, _BF16), (2, _BF16), (3, _BF16), (2, _OFFLOADED)], ids=str)
@on_ranks(2)
def test_changes_through_aliases_that_a_step_would_overwrite_raise_on_every_rank(
    stage: int, config: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=r"\(root\).*parameter\.data.*lost"):
        rewriting(stage, "copied", **config)
    with pytest.raises(UsageError, match="lost"):  # windows are looked at again, now and then
        rewriting(stage, "copied", when=(16,), steps=17, **config)
    with pytest.raises(UsageError, match=r"'scale'.*assignment"):
        rewriting(stage, "assigned", **config)
    assert torch.equal(rewriting(stage, "undone", **config), rewriting(stage, "untouched", **config))


class Branching(nn.Module):
    """Uses `layers[1]` on one rank only, and `layers[2]` never."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: 1 + dist.get_rank()]:
            x = layer(x)
        return x.float().square().mean()


@pytest.mark.parametrize("config", [_BF16, _OFFLOADED], ids=str)
@on_ranks(2)
def test_layers_that_are_not_used_have_not_changed(config: dict[str, Any]) -> None:
    engine = engine_of(model := Branching(), 2, torch.optim.AdamW(model.parameters(), lr=0.1), **config)
    for _ in range(4):
        engine.backward(engine(torch.ones(2, 8, dtype=model.layers[0].weight.dtype)))
        engine.step()


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks(2)
def test_changes_through_aliases_reach_parameters_that_have_no_masters(stage: int) -> None:
    steps = [rewriting(stage, how) for how in ("copied", "untouched")]
    torch.testing.assert_close(steps[0], steps[1] - 0.5, rtol=0, atol=0.05)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_step_that_is_not_taken_leaves_nothing_to_find(stage: int) -> None:
    model = Rewriting("untouched")
    engine = engine_of(
        model, stage, torch.optim.SGD(model.parameters(), lr=0.1), fp16={"enabled": True, "initial_scale_power": 2}
    )
    for step in range(20):
        if step in (1, 15):  # before windows in which changes are looked for
            x = torch.full((2, 8), float("inf"), dtype=torch.float16)
        else:
            x = torch.full((2, 8), 1.0 + dist.get_rank(), dtype=torch.float16)
        engine.backward(engine(x))
        engine.step()
    assert engine.skipped_steps == 2
