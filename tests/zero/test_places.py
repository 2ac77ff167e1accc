"""State that lives elsewhere than on the device: the same bits, and nothing of it on the device at rest."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.errors import ConflictError
from shardwise.memory import Category, Tier
from shardwise.optim import ZeroOneAdam
from shardwise.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from tests.checkpoint import matrix
from tests.device import checking
from tests.device.recorded import record_all
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.training import DTYPES, Outcome, Setting, assert_identical, masters, start, take_steps, train_all
from tests.models import CASES
from tests.zero.elsewhere import Held, living_elsewhere

ALL = ("optimizer", "gradients", "parameters")
KINDS = [thorough(ALL[:1]), thorough(ALL[1:2]), thorough(ALL[2:]), ALL]
STAGES = (0, 1, 2, 3)


def both_ways(name: str, settings: list[Setting], kinds: tuple[str, ...], frees: bool) -> tuple[Any, Any, int, int]:
    """Outcomes of training with everything on the device, and with some kinds of state elsewhere."""
    resident = train_all(name, settings, 2)
    with living_elsewhere(*kinds, frees=frees) as place:
        away = train_all(name, settings, 2)
    return resident, away, place.tiered, place.acquired


def check_both(world: int, name: str, settings: list[Setting], kinds: tuple[str, ...], frees: bool = True) -> None:
    for resident, away, tiered, acquired in run_ranks(both_ways, world, name, settings, kinds, frees):
        assert tiered and not acquired
        for setting, first, second in zip(settings, resident, away, strict=True):
            assert first.masters.keys() == second.masters.keys()
            if first.gradients:
                assert_identical(first, second, f"{setting}")


@pytest.mark.parametrize("frees", [True, thorough(False)])
@pytest.mark.parametrize("kinds", [ALL, *(thorough((kind,)) for kind in ALL)], ids="+".join)
def test_it_has_the_bits_of_what_lives_on_the_device(kinds: tuple[str, ...], frees: bool) -> None:
    setting = Setting(accumulation=2, precision="bf16", clip=1.0, optimizer="AdamW", lr=1e-2)
    check_both(2, "gpt", [setting.with_stage(stage) for stage in STAGES], kinds, frees)


@pytest.mark.parametrize("name", ["router", thorough("borrower"), thorough("mixed_types"), thorough("lora")])
def test_models_that_are_not_regular(name: str) -> None:
    settings = [Setting(stage, accumulation=2, optimizer="momentum", clip=0.5) for stage in (0, 2, 3)]
    check_both(2, name, settings, ALL)


@pytest.mark.parametrize(
    "zero",
    [
        {"mics_shard_size": 2},
        thorough({"zero_hpz_partition_size": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True}),
    ],
    ids="+".join,
)
def test_sources_of_gathers_compose(zero: dict[str, Any]) -> None:
    setting = Setting(3, precision="bf16", optimizer="AdamW", lr=1e-2, accumulation=2, zero=tuple(zero.items()))
    stage = 2 if "mics_shard_size" in zero else 3
    check_both(4, "gpt", [setting, setting.with_stage(stage)], ALL)


# -- optimizers --------------------------------------------------------------------------------------------------------


class Counting(torch.optim.SGD):
    """Counts its calls: it cannot be stepped part by part."""

    shardwise_sharding = "elementwise"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / group["calls"])


def train_with(kind: str) -> list[Outcome]:
    settings = [Setting(stage, precision="bf16", clip=1.0, optimizer=kind, lr=1e-2) for stage in (0, 1, 3)]
    if kind != "counting":
        return train_all("gpt_groups", settings)
    found = []
    for setting in settings:
        case = CASES["gpt_groups"]
        model = case.make()
        engine = start(case, setting, model, Counting(list(case.groups(model)), lr=0.05))
        take_steps(engine, case, range(3))
        found.append(Outcome(masters(model)))
        engine.destroy()
    return found


def optimizers_both_ways(kind: str) -> tuple[list[Outcome], list[Outcome], int]:
    resident = train_with(kind)
    with living_elsewhere(*ALL) as place:
        return resident, train_with(kind), place.tiered


@pytest.mark.parametrize("kind", ["subclass", "counting", thorough("Lamb"), thorough("Muon"), thorough("Lion")])
def test_optimizers(kind: str) -> None:
    for resident, away, tiered in run_ranks(optimizers_both_ways, 2, kind):
        assert tiered
        for first, second in zip(resident, away, strict=True):
            assert_identical(first, second, kind)


def refused() -> str:
    model = CASES["gpt"].make()
    with living_elsewhere("optimizer"), pytest.raises(ConflictError) as error:
        start(CASES["gpt"], Setting(0), model, ZeroOneAdam(model.parameters()))
    return str(error.value)


def test_an_optimizer_that_communicates_is_refused() -> None:
    assert "elsewhere than on the device" in run_ranks(refused, 1)[0]


# -- what is where -----------------------------------------------------------------------------------------------------


def bytes_held(kinds: tuple[str, ...], stage: int) -> dict[str, Any]:
    """Train, and look at what is held when."""
    case, setting = CASES["gpt"], Setting(stage, precision="bf16", accumulation=2, optimizer="AdamW", cap=2000)
    with living_elsewhere(*kinds):
        engine = start(case, setting)
    accountant, sharded = engine.accountant, engine.sharded
    seen: dict[str, Any] = {"rest": [], "released": all(unit.sharded for unit in sharded.units)}
    for step in range(3):
        for micro in range(2):
            batch = case.data(step, micro, dist.get_rank(), torch.bfloat16)
            accountant.reset_peak()
            engine.backward(case.loss(engine, batch))
            seen["backward"] = accountant.peak
            accountant.reset_peak()
            engine.step()
            seen["step"] = accountant.peak
            live = accountant.live
            seen["rest"].append((micro, live))
    seen["host"] = accountant.live_in(Tier.HOST)
    sections = [section for unit in sharded.units for section in unit.trainable]
    seen["units"] = len(sharded.units)
    seen["stepped"] = [section.master_stop - section.master_start for section in sections]
    seen["report"] = str(engine.memory_report().render())
    engine.destroy()
    seen["end"] = sum(accountant.live_in(Tier.HOST).values())
    return seen


@pytest.mark.parametrize(("world", "stage"), [(2, 3), thorough(1, 3), thorough(2, 1)])
def test_nothing_is_on_the_device_at_rest_and_little_in_a_step(world: int, stage: int) -> None:
    for seen in run_ranks(bytes_held, world, ALL, stage):
        assert seen["released"] and seen["units"] > 4
        for micro, live in seen["rest"]:
            assert live[Category.MASTER] == live[Category.GRADIENTS] == live[Category.PARAMETERS] == 0
            assert live[Category.OPTIMIZER] <= 8 * len(seen["stepped"])  # counts of steps
            # Between two passes of a window a unit waits for what comes next.
            assert micro == 0 or live[Category.GATHERED] == 0
        total, largest = sum(seen["stepped"]), 2 * max(seen["stepped"])
        assert 3 * largest < 2 * total  # else the following says nothing
        assert 0 < seen["step"][Category.MASTER] <= 4 * largest
        assert seen["step"][Category.OPTIMIZER] <= 8 * largest + 8 * len(seen["stepped"])
        assert seen["host"][Category.MASTER] == 4 * total
        assert seen["host"][Category.OPTIMIZER] == 8 * total
        assert "on host" in seen["report"]
        assert seen["end"] == 0


@on_ranks(1)
def test_on_one_rank_parameters_that_live_elsewhere_are_released() -> None:
    with living_elsewhere("parameters"):
        engine = start(CASES["gpt"], Setting(0))
    units = engine.sharded.units
    seen = [not section.full.numel() for unit in units for section in unit.sections]
    with shardwise.zero.GatheredParameters(list(engine.module.parameters())):
        seen += [unit.state.value == "unsharded" for unit in units]
    seen += [not section.full.numel() for unit in units for section in unit.sections]
    engine.destroy()
    seen += [bool(parameter.isfinite().all()) for parameter in engine.module.parameters()]
    assert len(seen) > 20 and all(seen)


# -- access and checkpoints --------------------------------------------------------------------------------------------


def changed(stage: int, precision: str) -> Outcome:
    """Train, and change everything that can be changed on the way."""
    case, setting = CASES["gpt"], Setting(stage, precision=precision, optimizer="AdamW", accumulation=2, lr=1e-2)
    engine = start(case, setting)
    outcome = Outcome()
    names = [name for name, _ in engine.module.named_parameters()]
    for step in range(3):
        for micro in range(2):
            loss = case.loss(engine, case.data(step, micro, dist.get_rank(), DTYPES[precision]))
            engine.backward(loss)
            parameter = engine.module.get_parameter(names[step])
            if micro:
                gradient = safe_get_full_grad(parameter)
                assert gradient is not None
                safe_set_full_grad(parameter, gradient * 2)
                state = safe_get_full_optimizer_state(parameter, "exp_avg")
                assert (state is None) == (step == 0)
                if state is not None:
                    safe_set_full_optimizer_state(parameter, state + 0.25, "exp_avg")
            engine.step()
        value = safe_get_full_fp32_param(parameter)
        assert value is not None
        safe_set_full_fp32_param(parameter, value + 0.125)
        other = engine.module.get_parameter(names[-1])
        with shardwise.zero.GatheredParameters(other, modifier_rank=0), torch.no_grad():
            other.mul_(0.5)
    values = engine.module_state_dict()
    engine.load_module_state_dict({name: value * 2 for name, value in values.items()})
    outcome.masters = {**masters(engine.module), **{f"{name}.half": value for name, value in values.items()}}
    engine.destroy()
    return outcome


def changed_both_ways(precision: str) -> list[tuple[Outcome, Outcome]]:
    found = []
    for stage in (1, 3):
        resident = changed(stage, precision)
        with living_elsewhere(*ALL):
            found.append((resident, changed(stage, precision)))
    return found


def test_values_are_read_and_changed() -> None:
    for found in run_ranks(changed_both_ways, 2, "bf16"):
        for resident, away in found:
            assert_identical(resident, away)


@on_ranks(2)
def test_checkpoints(tmp_path: Path) -> None:
    """Fingerprints that should be the same, of checkpoints and of engines that have gone on from them."""
    root = str(tmp_path)
    entry = matrix.Entry("AdamW", "AdamW", "bf16")
    background = True
    found = []
    for stage in (0, 3):
        layout = matrix.Layout(stage, dist.get_world_size() if dist.is_initialized() else 1)
        ends, contents = [], []
        for number, place in enumerate((contextlib.nullcontext(), living_elsewhere(*ALL))):
            path = f"{root}/{stage}.{number}"
            with place:
                engine = matrix.start(entry, layout, seed=1)
            matrix.train(engine, 0, matrix.BEFORE)
            engine.save_checkpoint(path, tag="a", asynchronous=background)
            matrix.train(engine, matrix.BEFORE, matrix.AFTER)
            ends.append(matrix.whole(engine))
            engine.destroy()
            contents.append(matrix.Content(path).fingerprint())
        # Loaded from what the other one has saved.
        for number, place in enumerate((living_elsewhere(*ALL), contextlib.nullcontext())):
            with place:
                engine = matrix.start(entry, layout, seed=2)
            engine.load_checkpoint(f"{root}/{stage}.{number}", tag="a")
            if number == 0:
                live = engine.accountant.live
                assert live[Category.MASTER] == live[Category.PARAMETERS] == 0
                assert live[Category.OPTIMIZER] <= 8 * len(list(engine.module.parameters()))
            matrix.train(engine, matrix.BEFORE, matrix.AFTER)
            ends.append(matrix.whole(engine))
            engine.destroy()
        found += [(contents[0], contents[1]), *((ends[0], end) for end in ends[1:])]
    assert len(found) == 8
    for first, second in found:
        assert first == second


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_every_schedule_of_streams_is_in_order(kinds: tuple[str, ...]) -> None:
    setting = Setting(3, clip=1.0, optimizer="momentum", precision="bf16", accumulation=2)
    with living_elsewhere(*kinds):
        traces = record_all(CASES["gpt"], setting, world=2)
    assert any(event.stream == "transfers" for event in traces[0].events)
    assert [str(problem) for problem in checking.check(traces)] == []


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_a_loan_that_is_not_waited_for_is_found(kinds: tuple[str, ...]) -> None:
    def finish(self: Held) -> None:
        self._state = "lent"

    setting = Setting(3, optimizer="momentum", precision="bf16", accumulation=2)
    wait = mock.patch.object(Held, "finish", finish)
    if kinds == ("parameters",):
        wait = mock.patch.object(Held, "copy_to", lambda self, target: target.view(torch.uint8).copy_(self._values))
    with living_elsewhere(*kinds), wait:
        assert checking.check(record_all(CASES["gpt"], setting, world=2))
