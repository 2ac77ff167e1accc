"""Gradients that are infinite or NaN without loss scaling: named by rank, step and parameter, on CPUs and late."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from shardwise.engine.nonfinite import NonFinite
from shardwise.errors import NonFiniteError
from tests.device.recorded import imagined
from tests.device.recording import recording
from tests.engine.late import late_reads
from tests.engine.test_idle_steps import exchange_rank, known, same
from tests.engine.test_tracing import BadGradient
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.logs import logged
from tests.harness.training import engine_of


class Net(nn.Module):
    """Two layers, between which gradients can be spoilt."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(4, 6), nn.Linear(6, 1)
        self.spoilt = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.low(x)
        return self.high(BadGradient.apply(x, float("nan")) if self.spoilt else x)


def build(stage: int, **config: Any) -> Any:
    torch.manual_seed(1)
    given = {"optimizer": {"type": "Adam", "params": {"lr": 0.01}}, "scheduler": {"type": "WarmupLR", "params": {}}}
    zero = config.pop("zero_optimization", {})
    return engine_of(Net(), stage, zero=zero, **{**given, **config})


WITHOUT_NORM = {"zero_optimization": {"stage": 1, "compute_grad_norm": False}}


def spoilt_at(stage: int, how: str, late: bool, config: dict[str, Any], steps: int = 3) -> tuple[list[str], list[Any]]:
    """Train; in the second step rank 1 has a bad loss, or a bad gradient below the second layer."""
    with logged() as kept, late_reads(late):
        engine = build(stage, **config)
        seen: list[Any] = []
        for number in range(steps):
            bad = number == 1 and exchange_rank() == 1
            engine.module.spoilt = bad and how == "gradient"
            x = torch.full((2, 4), float("nan") if bad and how == "loss" else 1.0, dtype=engine.module.low.weight.dtype)
            before = known(engine)[:3]
            engine.backward(engine(x).float().mean())
            try:
                engine.step()
            except NonFiniteError as error:
                seen.append(str(error))
            else:
                assert engine.optimizer.overflow is not engine.was_step_applied()
            values = [v for runs in engine.sharded.state.value_runs().values() for _, _, v in runs]
            finite = all(bool(torch.isfinite(value).all()) for value in values)
            seen.append((engine.was_step_applied(), engine.skipped_steps, finite, same(before, known(engine)[:3])))
        optimizer = engine.optimizer
        engine.destroy()
        assert "overflow" not in vars(optimizer)
    return [line for line in kept.lines if "finite" in line or "overflow" in line], seen


@pytest.mark.parametrize(
    ("stage", "how", "config", "late"),
    [
        (0, "loss", {}, True),
        (3, "gradient", {}, True),
        (3, "loss", {"gradient_clipping": 1.0}, False),
        (1, "gradient", WITHOUT_NORM, False),
        (2, "loss", {**WITHOUT_NORM, "bf16": {"enabled": True}}, True),
    ],
)
def test_a_warning_names_step_rank_and_parameter(stage: int, how: str, config: dict[str, Any], late: bool) -> None:
    (told, seen), (others, _) = run_ranks(spoilt_at, 2, stage, how, late, config)
    assert others == [] and len(told) == 1, told
    assert told[0].startswith("step 1: gradients are not finite, and the update makes parameters infinite or NaN")
    cause = "the loss on rank 1 was not finite" if how == "loss" else "gradients on rank 1 were not finite"
    assert cause in told[0] and "First parameter: 'low.weight'" in told[0]
    assert ("of whose 24 elements 0 are infinite and 24 NaN" in told[0]) is not late
    assert [s[:2] for s in seen] == [(True, 0)] * 3  # as it always was


@pytest.mark.parametrize("how", ["destroy", "save_16bit_model", "export", "module_state_dict"])
@on_ranks(1)
def test_the_last_step_is_reported_at_the_end(how: str, tmp_path: Path) -> None:
    with logged() as kept, late_reads():
        engine = build(2)
        engine.module.spoilt = True
        engine.backward(engine(torch.ones(2, 4)).mean())
        engine.step()
        arguments = [] if how in ("destroy", "module_state_dict") else [tmp_path]
        getattr(engine, how)(*arguments)
    assert [line[:36] for line in kept.lines if "finite" in line] == ["step 0: gradients are not finite, an"]


@pytest.mark.parametrize("stage", [thorough(0), 3])
def test_steps_are_skipped_or_end_the_run(stage: int) -> None:
    for config in ({"non_finite": "skip"}, {"bf16": {"check_grad_overflow": True}}):
        (told, seen), _ = run_ranks(spoilt_at, 2, stage, "gradient", False, config)
        assert len(told) == 1 and "step 1 is skipped: overflow in backward: gradients on rank 1" in told[0]
        assert [s[:3] for s in seen] == [(True, 0, True), (False, 1, True), (True, 1, True)]
    for told, seen in run_ranks(spoilt_at, 2, stage, "gradient", False, {"non_finite": "stop"}):
        assert told == [] and "step 1: gradients are not finite" in seen[1] and "rank 1" in seen[1]
        # What the step would have changed is as it was, and training can go on.
        assert seen[2] == (False, 0, True, True) and seen[3][:3] == (True, 0, True)
    (told, _), _ = run_ranks(spoilt_at, 2, stage, "gradient", False, {"non_finite": "ignore"})
    assert told == []


@on_ranks(1)
def test_steps_with_finite_gradients_report_nothing() -> None:
    more = [(False, {"non_finite": action}) for action in ("skip", "stop")]
    for late, config in ((False, {}), (True, {}), (False, WITHOUT_NORM), *more):
        with mock.patch.object(NonFinite, "update", side_effect=AssertionError) as update, late_reads(late):
            engine = build(2, **config)
            for _ in range(3):
                engine.backward(engine(torch.ones(2, 4)).mean())
                engine.step()
            assert engine.was_step_applied() and not update.called
            engine.destroy()


@pytest.mark.parametrize("config", [{}, WITHOUT_NORM])
@on_ranks(1)
def test_a_series_is_reported_once_and_its_end(config: dict[str, Any]) -> None:
    """SGD steps on huge, finite gradients, then on one that is not, and the parameters are mended by hand."""
    with logged() as kept:
        engine = build(0, optimizer={"type": "SGD", "params": {"lr": 1e-30}}, **config)
        for value in (1e25, float("inf"), float("inf"), 1.0):
            engine.backward(engine(torch.ones(2, 4)).mean() * value)
            engine.step()
            with torch.no_grad():
                for parameter in engine.module.parameters():
                    parameter.nan_to_num_(0.5, 0.5, 0.5)
        engine.destroy()
    lines = [line for line in kept.lines if "finite" in line]
    assert len(lines) == 2 and "step 1: gradients are not finite" in lines[0], lines
    assert "step 3: gradients are finite again, after 2 steps" in lines[1]


@pytest.mark.parametrize("spreads", [True, False])
def test_a_device_looks_at_all_gradients_only_after_a_bad_step(spreads: bool) -> None:
    """On a recorded device: a bad value spreads to the unit that is reduced last, and that is enough to name ranks."""
    config = {"non_finite": "skip", "zero_optimization": {"stage": 2, "reduce_bucket_size": 10}}
    with imagined(2, 0), recording() as recorder:
        engine = build(2, **config)
        units, bad = len(engine.sharded.units), False

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            return gradient * float("nan") if bad and not spreads else gradient

        engine.module.high.weight.register_hook(spoil)
        looked, phases = [], []
        for number in range(4):
            bad = number in (1, 2)
            engine.module.spoilt = bad and spreads
            begin = len(recorder.trace.events)
            engine.backward(engine(torch.ones(2, 4)).mean())
            looked.append([event.name for event in recorder.trace.events[begin:]].count("aminmax"))
            engine.step()
            overflow = engine.last_step.overflow
            phases.append(None if overflow is None else overflow.phase)
        with recorder.silent():
            engine.destroy()
    assert units > 1 and looked == [1, 1, units, units]
    assert phases == [None, "backward" if spreads else "gradients", "backward", None]
