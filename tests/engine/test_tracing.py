"""Where values became infinite or NaN first: module, rank, phase, micro-batch and line, at every stage."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as reentrant

import shardwise
from shardwise.recompute import checkpoint
from tests.engine.test_idle_steps import exchange_rank
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.logs import logged
from tests.harness.training import engine_of


class BadGradient(torch.autograd.Function):
    """Passes values on, and spoils their gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: float) -> torch.Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.value, None


class Spoiler(nn.Module):
    """Passes values on, but for what `how` says."""

    def __init__(self) -> None:
        super().__init__()
        self.how = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "output":
            return x * float("inf")
        return BadGradient.apply(x, float("nan")) if self.how == "input_gradient" else x * 1.0


class Block(nn.Module):
    """Residual, with code of its own between its modules, a mask, and an activation in place."""

    def __init__(self, recomputes: str) -> None:
        super().__init__()
        self.norm, self.up, self.spoiler = nn.LayerNorm(6), nn.Linear(6, 8), Spoiler()
        self.act, self.down, self.soft = nn.ReLU(inplace=True), nn.Linear(8, 6), nn.Softmax(-1)
        self.how = ""
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputes == "reentrant":
            return reentrant(self.run, x, use_reentrant=True)
        return checkpoint(self.run, x) if self.recomputes else self.run(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        if self.how == "code":
            h = (h - h) / (h - h)
        elif self.how == "code_gradient":
            h = BadGradient.apply(h, float("nan"))
        h = self.down(self.act(self.spoiler(h)))
        weights = self.soft(h.masked_fill(torch.arange(6) > 3, float("-inf")))  # infinite, and as it should be
        return x + h + weights


class Net(nn.Module):
    def __init__(self, recomputes: str = "") -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Block(recomputes) for _ in range(3))
        self.last = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 8.0}},
}
HOWS = {
    "output": ("forward", "blocks.1.spoiler", "infinite"),
    "code": ("forward", "blocks.1", "NaN"),
    "batch": ("forward", None, "NaN"),
    "loss": ("forward", None, "NaN"),
    "parameter": ("forward", "blocks.1.down", "NaN"),
    "input_gradient": ("backward", "blocks.1.spoiler", "NaN"),
    "code_gradient": ("backward", "blocks.1", "NaN"),
    "own_gradient": ("backward", "last", "NaN"),
}


SKIP = {"non_finite": "skip", "anomaly_watch": {"enabled": True, "trace": "always"}}


def build(stage: int, recomputes: str = "", **config: Any) -> Any:
    torch.manual_seed(1)
    given = {"gradient_accumulation_steps": 2, **SKIP, **config}
    return engine_of(Net(recomputes), stage, {"type": "SGD", "params": {"lr": 0.01}}, **given)


def window(engine: Any, how: str = "", rank: int = 1, micro_batch: int = 1, value: float = 1.0) -> None:
    """Train one window; on a rank, in one of its micro-batches, something goes wrong."""
    block = engine.module.blocks[1]
    for number in range(2):
        bad = how if exchange_rank() == rank and number == micro_batch else ""
        block.how, block.spoiler.how = bad, bad
        x = torch.linspace(-1, 2, 8).view(2, 4).to(engine.module.first.weight.dtype) * value
        if bad == "batch":
            x[0, 0] = float("nan")
        y = engine(x)
        if bad == "own_gradient":
            engine.module.last.bias.register_hook(lambda gradient: gradient * float("nan"))
        loss = y.float().square().mean()
        engine.backward(loss * float("nan") if bad == "loss" else loss)
        engine.step()
    block.how = block.spoiler.how = ""


def damage(engine: Any, name: str, value: float) -> float:
    """Change one value of a parameter; return what it was."""
    parameter = dict(engine.module.named_parameters())[name]
    with shardwise.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
        before = float(parameter.reshape(-1)[0])
        parameter.view(-1)[0] = value
    return before


@pytest.mark.parametrize(
    ("stage", "precision", "recomputes"),
    [
        (3, "fp32", "reentrant"),
        thorough(0, "fp32", ""),
        thorough(0, "fp16", "blocks"),
        thorough(1, "bf16", "blocks"),
        thorough(2, "fp16", ""),
        thorough(3, "fp32", "blocks"),
        thorough(3, "bf16", ""),
    ],
)
@on_ranks(2)
def test_the_first_module_is_named(stage: int, precision: str, recomputes: str) -> None:
    engine = build(stage, recomputes, **PRECISIONS[precision])
    for how, (phase, module, kind) in HOWS.items():
        if how == "own_gradient" and (stage == 3 or precision == "fp16"):
            continue
        window(engine)
        assert engine.last_step.overflow is None, how
        everywhere = how == "parameter"
        if everywhere:
            before = damage(engine, "blocks.1.down.weight", float("nan"))
        window(engine, how)
        if everywhere:
            damage(engine, "blocks.1.down.weight", before)
        overflow = engine.last_step.overflow
        origin = overflow.origin
        found = (origin.what, origin.phase, origin.module, origin.kind, origin.ranks)
        assert found == (how, phase, module, kind, (0, 1) if everywhere else (1,)), overflow
        assert origin.micro_batch == (None if how == "own_gradient" else 0 if everywhere else 1), how
        assert "test_tracing.py:" in origin.line and str(origin) in str(overflow), how


@pytest.mark.parametrize("recomputes", ["", "reentrant"])
@on_ranks(1)
def test_watching_keeps_no_activation_alive(recomputes: str) -> None:
    """No output of a module is left after the backward pass, before the step."""
    engine = build(0, recomputes, non_finite="warn", anomaly_watch={"enabled": True, "trace": "always"})
    outputs: list[Any] = []
    for module in engine.module.modules():
        module.register_forward_hook(lambda _, args, output: outputs.append(weakref.ref(output)))
    gc.disable()
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    alive = sum(output() is not None for output in outputs)
    gc.enable()
    assert outputs and not alive


@on_ranks(2)
def test_of_the_first_bad_step_the_parameters_tell_where_it_began() -> None:
    """Two steps with the same trouble are skipped; modules are watched after the first."""
    engine = build(3, non_finite="skip", anomaly_watch={"enabled": True, "trace": "after", "trace_steps": 4})
    window(engine)
    window(engine, "input_gradient")
    text, extent = str(engine.last_step.overflow), engine.last_step.overflow.extent
    assert (extent.last, extent.following) == ("blocks.1.up.bias", "blocks.1.down.weight")
    assert f"{extent.count} of {extent.total} parameters have such gradients, the last 'blocks.1.up.bias'" in text
    assert "is finite, and the origin lies between them in the order of the model. Modules are traced for 4" in text
    window(engine, "input_gradient")
    later = str(engine.last_step.overflow)
    assert "module 'blocks.1.spoiler' (Spoiler) made NaN gradients from finite ones" in later
    assert "are traced for" not in later
    assert [one.parameters for one in engine.anomalies] == [("first.weight", "blocks.1.up.bias")] * 2


def searches(scale: dict[str, Any], how: str) -> tuple[list[Any], str]:
    error = ""
    with logged() as kept:
        engine = build(2, fp16={"enabled": True, "hysteresis": 1, **scale}, anomaly_watch={"enabled": True})
        try:
            for _ in range(3):
                window(engine, how)
        except shardwise.errors.LossScaleError as raised:
            error = str(raised)
        watching = bool(engine._step._non_finite.tracer.handles)
        engine.destroy()
    return [watching, [event["kind"] for event in kept.events], len(engine.anomalies)], error


def test_the_search_for_a_loss_scale_is_nothing_unusual() -> None:
    (seen, error), _ = run_ranks(searches, 2, {"initial_scale_power": 24}, "")
    assert (seen, error) == ([False, [], 0], "")
    (seen, error), _ = run_ranks(searches, 2, {"initial_scale_power": 8}, "loss")
    assert seen == [True, ["non_finite"] * 3, 3] and error == ""
    (seen, error), _ = run_ranks(searches, 2, {"initial_scale_power": 1}, "input_gradient")
    assert seen[0] and "module 'blocks.1.spoiler' (Spoiler) made NaN gradients from finite ones" in error


def trained(stage: int, watch: dict[str, Any]) -> list[Any]:
    engine = build(stage, recomputes="blocks", anomaly_watch=watch, non_finite="warn", gradient_clipping=1.0)
    before = engine.ledger.sequence
    for number in range(2):
        window(engine, value=1.0 + number)
    values = [(n, values.clone()) for runs in engine.sharded.state.value_runs().values() for n, _, values in runs]
    launched = engine.ledger.sequence - before
    small = engine.ledger.totals["all_reduce"].count
    return [values, launched, small]


@pytest.mark.parametrize("stage", [thorough(0), 3])
@on_ranks(2)
def test_watching_changes_no_bit_and_sends_nothing_more(stage: int) -> None:
    plain, *plain_counts = trained(stage, {})
    for watch in ({"enabled": True}, {"enabled": True, "trace": "always"}):
        values, *counts = trained(stage, watch)
        assert counts == plain_counts
        assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in zip(values, plain, strict=True))
