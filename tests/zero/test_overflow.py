"""Overflows: what the report of a skipped step names, and the loss scale through real training."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.errors import LossScaleError
from tests.harness import of_all_ranks, on_ranks, thorough
from tests.harness.logs import logged
from tests.harness.training import bits, digest, engine_of
from tests.precision.test_scaler import reference

INF, NAN = float("inf"), float("nan")


class Net(nn.Module):
    """Three layers, whose weights' gradients may be spoilt one by one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.spoil: dict[str, list[float]] = {}
        for name, parameter in self.named_parameters():
            parameter.register_hook(lambda gradient, name=name: self._spoilt(name, gradient))

    def _spoilt(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        values = self.spoil.get(name)
        if values is None:
            return gradient
        gradient = torch.zeros_like(gradient)
        gradient.view(-1)[: len(values)] = torch.tensor(values, dtype=gradient.dtype)
        return gradient

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


@dataclass(frozen=True)
class Spoilt:
    """What goes wrong in one micro-batch: on which ranks, of which parameters, or the loss itself."""

    ranks: tuple[int, ...]
    values: tuple[tuple[str, tuple[float, ...]], ...] = ()
    loss: float = 1.0
    plainly: bool = False


FP16 = {"fp16": {"enabled": True, "loss_scale": 64.0}}
BF16 = {"bf16": {"enabled": True, "check_grad_overflow": True}}
FP32 = {"bf16": {"check_grad_overflow": True}}


def build(stage: int, accumulation: int, more: dict[str, Any]) -> Any:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0625, momentum=0.5)
    more = {"gradient_accumulation_steps": accumulation, **more}
    return engine_of(net, stage, optimizer, zero={"reduce_bucket_size": 40}, **more)


def micro_batch(engine: Any, spoilt: Spoilt | None) -> None:
    net = engine.module
    here = spoilt is not None and dist.get_rank() in spoilt.ranks
    net.spoil = {name: list(values) for name, values in spoilt.values} if here and spoilt is not None else {}
    dtype = next(net.parameters()).dtype
    loss = engine(torch.ones(2, 5, dtype=dtype)).float().square().mean() * (spoilt.loss if here and spoilt else 1.0)
    if spoilt is not None and spoilt.plainly:
        loss.backward()
    else:
        engine.backward(loss)


def everything(engine: Any) -> str:
    state = [value for entry in engine.optimizer.state.values() for value in entry.values() if value is not None]
    return bits(engine) + digest(state)


def report_of(stage: int, accumulation: int, more: dict[str, Any], spoilt: Spoilt) -> tuple[Any, list[Any]]:
    """One clean step, a spoilt one, a clean one; return the report, and the lines of the log with how loud they are."""
    engine = build(stage, accumulation, more)
    seen, skipped = [], []
    for step in range(3):
        before = everything(engine)
        with logged(logging.INFO) as heard, logged(logging.WARNING) as warned:
            for micro in range(accumulation):
                micro_batch(engine, spoilt if step == 1 and micro == 0 else None)
                engine.step()
        skipped += [(line, line in warned.lines) for line in heard.lines if "skipped" in line]
        seen.append((engine.last_step.applied, before == everything(engine)))
        if step == 1:
            report = engine.last_step.overflow
            assert engine.last_step.clipped_norm is None
        else:
            assert engine.last_step.overflow is None
    engine.destroy()
    assert seen == [(True, False), (False, True), (True, False)]
    assert len(set(of_all_ranks(str(report)))) == 1
    return report, skipped


WEIGHTS = (("second.weight", (INF, -INF, NAN, 48.0)), ("third.bias", (NAN,)))


@pytest.mark.parametrize(
    "ways",
    [
        [(0, 2, FP16), (1, 1, FP16), (3, 2, FP32), (3, 1, BF16)],
        thorough([(0, 1, FP16), (3, 1, FP16), (0, 2, FP32), (1, 2, FP32)]),
    ],
    ids=["few", "more"],
)
@on_ranks(3)
def test_a_report_names_where_the_first_value_came_from(ways: list[tuple[int, int, Any]]) -> None:
    cases = [(*way, Spoilt((1,), WEIGHTS)) for way in ways]
    cases.append((2, 1, {**FP16, "prescale_gradients": True}, Spoilt((0, 2), WEIGHTS)))
    for stage, accumulation, more, spoilt in cases:
        what = f"stage {stage}, {accumulation} micro-batches, {more}"
        report, lines = report_of(stage, accumulation, more, spoilt)
        scale = 64.0 if "fp16" in more else 1.0
        assert report.origin is None and (report.extent.count, report.extent.last) == (2, "third.bias"), what
        found = report.phase, report.ranks, report.parameter, report.numel, report.loss_scale
        assert found == ("backward", spoilt.ranks, "second.weight", 36, scale), what
        assert report.unit and (report.infinite, report.nan) == (2, 1), what
        if accumulation == 1 and spoilt.ranks == (1,):
            # The largest finite sum over the three ranks; two of them have small gradients.
            assert report.largest == pytest.approx(48.0 / 3 / scale, rel=0.2), what
        if dist.get_rank():
            assert not lines
            continue
        ((line, loud),) = lines
        assert line.startswith("step 1 is skipped: overflow in backward") and str(report) in line
        assert loud is ("fp16" not in more)  # loss scales are searched by skipping
        assert ("'second.weight'" in line and "rank 1" in line) or "ranks 0, 2" in line


WIRE = {**FP32, "communication_data_type": "fp16"}
SUMS = {**FP32, "data_types": {"grad_accum_dtype": "fp16"}, "communication_data_type": "fp32"}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "fp16": {"loss_scale": 4.0}}


@pytest.mark.parametrize(
    ("stage", "more", "spoilt", "phase", "ranks", "parameter"),
    [
        (0, FP16, Spoilt((1,), loss=INF), "forward", (1,), "first.weight"),
        (3, FP16, Spoilt((0, 1), loss=NAN), "forward", (0, 1), "first.weight"),
        (0, BF16, Spoilt((0,), loss=NAN), "forward", (0,), "first.weight"),
        (3, AUTOCAST, Spoilt((0,), WEIGHTS), "backward", (0,), "second.weight"),
        # A plain backward() does not show the engine its loss.
        (0, FP16, Spoilt((0,), loss=INF, plainly=True), "backward", (0,), "first.weight"),
        # Beyond the wire's range, whatever it was before.
        (3, WIRE, Spoilt((0,), (("second.weight", (1e5,)),)), "backward", (0,), "second.weight"),
        (0, SUMS, Spoilt((0, 1), (("second.weight", (40000.0,)),)), "reduce", (), "second.weight"),
    ],
)
@on_ranks(2)
def test_a_report_tells_forward_backward_and_reduction_apart(
    stage: int, more: dict[str, Any], spoilt: Spoilt, phase: str, ranks: tuple[int, ...], parameter: str
) -> None:
    report, _ = report_of(stage, 1, more, spoilt)
    assert (report.phase, report.ranks, report.parameter) == (phase, ranks, parameter)
    assert str(report).startswith(f"{phase}: ")


# -- the loss scale ----------------------------------------------------------------------------------------------------

Trace = list[tuple[float, bool] | str]


def trace_of(stage: int, scaling: dict[str, Any], spoilt: list[int | None]) -> Trace:
    """Train; in each step the gradient of one rank (or of none) is spoilt. Scale before and whether it was skipped."""
    engine = build(stage, 1, {"fp16": {"enabled": True, **scaling}})
    trace: Trace = []
    for rank in spoilt:
        scale = engine.cur_scale
        micro_batch(engine, None if rank is None else Spoilt((rank,), (("first.bias", (INF,)),)))
        try:
            engine.step()
        except LossScaleError as error:
            assert engine.last_step.overflow.parameter == "first.bias"
            assert engine.last_step.overflow.ranks == (rank,)
            assert f"Found: {engine.last_step.overflow}" in str(error)
            for way in ("min_loss_scale", "initial_scale_power", "learning rate", "bf16"):
                assert way in str(error)
            trace.append("error")
            break
        assert engine.last_step.loss_scale == scale
        assert engine.optimizer.overflow is not engine.was_step_applied()
        trace.append((scale, engine.was_step_applied()))
    assert engine.skipped_steps == sum(entry != "error" and not entry[1] for entry in trace)
    return trace


def expected_trace(scaling: dict[str, Any], spoilt: list[int | None]) -> Trace:
    overflows = [rank is not None for rank in spoilt]
    if scaling.get("loss_scale"):
        return [(scaling["loss_scale"], not overflow) for overflow in overflows]
    after = reference(overflows, scaling)
    before = [2.0 ** scaling["initial_scale_power"], *after]
    return [
        "error" if now == "error" else (float(scale), not overflow)
        for scale, now, overflow in zip(before, after, overflows, strict=False)
    ]


@on_ranks(2)
def test_the_scale_follows_the_automaton_through_real_training() -> None:
    choose, seen = random.Random(2), []
    for stage in range(4):
        for number in (stage % 2, 2 + stage % 2):
            scaling: dict[str, Any] = {
                "initial_scale_power": choose.randint(2, 8),
                "loss_scale_window": choose.randint(1, 4),
                "hysteresis": choose.randint(1, 3),
                "consecutive_hysteresis": choose.random() < 0.5,
                "min_loss_scale": choose.choice([0.25, 1.0, 3.0, 4.0]),
            }
            if number == 3:
                scaling = {"loss_scale": 128.0}
            often = choose.choice([0.2, 0.5, 0.9])
            spoilt = [choose.randrange(2) if choose.random() < often else None for _ in range(10)]
            seen += (trace := trace_of(stage, scaling, spoilt))
            assert trace == expected_trace(scaling, spoilt), (stage, scaling, spoilt)
    assert "error" in seen


@on_ranks(2)
def test_the_window_begins_anew_after_an_overflow_at_the_least_scale() -> None:
    engine = build(0, 2, {"fp16": {"enabled": True, "initial_scale_power": 0, "hysteresis": 1, "min_loss_scale": 1.0}})
    for spoilt in (None, Spoilt((1,), (("first.bias", (INF,)),))):
        micro_batch(engine, spoilt)
        if spoilt is None:
            engine.step()
    with pytest.raises(LossScaleError):
        engine.step()
    for expected in (0, 1):
        micro_batch(engine, None)
        engine.step()
        assert engine.global_steps == expected
    assert engine.was_step_applied()
