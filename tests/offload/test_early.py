"""Units that are stepped on the host before the step comes: the same bits, and nothing to be seen of it before."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.errors import OffloadError
from shardwise.memory import Category, Tier
from shardwise.optim import AdamW
from shardwise.utils.logging import logger
from shardwise.zero.updates import early
from tests.engine.test_idle_steps import Lines
from tests.harness import run_ranks
from tests.memory import test_report as reports
from tests.models import CASES
from tests.offload.settings import PLACES, offload, played_device
from tests.zero.training import DTYPES, Setting, digest, masters, parameters_digest, start

CASE = CASES["gpt"]
SCALED = {"enabled": True, "initial_scale_power": 16, "hysteresis": 1, "loss_scale_window": 2}
"""Loss scaling whose first steps overflow, and some later ones, too."""


ALONE = {"enabled": True, "master_weights": "none", "rounding": "stochastic"}


@contextlib.contextmanager
def patient() -> Iterator[None]:
    """Have steps wait until all is stepped that has been given to the thread: how many units that are is then known."""
    take = early.EarlySteps.take

    def waiting(self: early.EarlySteps, factor: Any) -> set[int]:
        self.settle()
        return take(self, factor)

    with mock.patch.object(early.EarlySteps, "take", waiting):
        yield


def make(zero: dict[str, Any], stage: int, precision: str, accumulation: int = 1, clip: float = 0.0) -> Any:
    extra = {"fp16": (("fp16", SCALED),), "bf16 alone": (("bf16", ALONE),)}.get(precision, ())
    setting = Setting(
        stage, precision=precision, accumulation=accumulation, clip=clip, zero=tuple(zero.items()), extra=extra
    )
    model = CASE.make()
    parameters = list(CASE.groups(model))
    groups = [{"params": parameters[::2], "lr": 3e-3}, {"params": parameters[1::2], "weight_decay": 0.1}]
    return start(CASE, setting, model, AdamW(groups, lr=1e-2, betas=(0.8, 0.9)))


def batch_of(engine: Any, step: int, micro: int = 0) -> dict[str, Any]:
    dtype = DTYPES["fp16" if engine.fp16_enabled() else "bf16" if engine.bfloat16_enabled() else "fp32"]
    return CASE.data(step, micro, dist.get_rank(), dtype)


def backward(engine: Any, step: int, micro: int = 0) -> None:
    # Norms that differ from step to step: one threshold clips some of them.
    engine.backward(CASE.loss(engine, batch_of(engine, step, micro)) * (1.0, 0.1, 4.0)[step % 3])


def states(engine: Any) -> list[torch.Tensor]:
    """Whole optimizer state of all parameters."""
    found = []
    for parameter in engine.module.parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            value = shardwise.utils.safe_get_full_optimizer_state(parameter, key)
            found += [] if value is None else [value]
    return found


def seen(engine: Any) -> str:
    """Fingerprint of all that the public functions show."""
    counts = [float(state["step"]) for state in engine.optimizer.state.values()]
    values = [*masters(engine.module).values(), *states(engine), torch.tensor(counts)]
    return digest(values) + parameters_digest(engine.module)


def trained(zero: dict[str, Any], far: bool, steps: int, *given: Any) -> tuple[str, list[Any], int]:
    with played_device() if far else contextlib.nullcontext(), patient():
        engine = make(zero, *given)
        told = []
        for step in range(steps):
            for micro in range(engine.gradient_accumulation_steps()):
                backward(engine, step, micro)
                engine.step()
            last = engine.last_step
            clipped = last.clip_coefficient is not None and float(last.clip_coefficient) < 1
            told.append((last.applied, clipped, last.early, last.early_in_vain))
        found, units = seen(engine), len(engine.sharded.units)
        engine.destroy()
        assert not any(any(engine.accountant.live_in(tier).values()) for tier in (Tier.HOST, Tier.DISK))
    assert not any(thread.name.startswith("shardwise-early") for thread in threading.enumerate())
    return found, told, units


def compared(directory: str, places: tuple[str, ...], fars: tuple[bool, ...], *given: Any) -> list[Any]:
    expected, told, _ = trained({}, False, 6, *given)
    kinds = [(applied, clipped) for applied, clipped, _, _ in told]
    for place in places:
        for far in fars:
            zero = offload(place, directory)
            zero["offload_optimizer"]["super_offload"] = True
            found, told, units = trained(zero, far, 6, *given)
            assert found == expected, (place, far)
            assert [(applied, clipped) for applied, clipped, _, _ in told] == kinds, (place, far)
            stepped = 0
            for applied, clipped, kept, lost in told:
                # The first update makes the state.
                count = (units if PLACES[place].get("ratio", 1) == 1 else kept + lost) if stepped else 0
                assert (kept, lost) == ((count, 0) if applied and not clipped else (0, count)), (place, far, told)
                assert bool(count) == bool(stepped)
                stepped += applied
    return kinds


HOST_AND_DISK = ("optimizer on host", "optimizer on disk")


@pytest.mark.parametrize(
    ("world", "stage", "precision", "accumulation", "clip", "places"),
    [
        (1, 1, "bf16", 2, 0.0, HOST_AND_DISK),
        (2, 1, "fp16", 1, 0.4, HOST_AND_DISK),
        (2, 2, "bf16", 2, 1e3, HOST_AND_DISK),
        (
            2,
            3,
            "bf16",
            1,
            0.4,
            (*HOST_AND_DISK, "half of the optimizer on host", "all on host", "some parameters near"),
        ),
        (2, 3, "fp16", 2, 0.0, HOST_AND_DISK),
        (2, 2, "bf16 alone", 1, 0.0, HOST_AND_DISK),
        (1, 3, "fp32", 1, 1e-3, HOST_AND_DISK),
    ],
)
def test_the_same_bits(
    tmp_path: Path, world: int, stage: int, precision: str, accumulation: int, clip: float, places: tuple[str, ...]
) -> None:
    given = (stage, precision, accumulation, clip)
    for kinds in run_ranks(compared, world, str(tmp_path), places, (False, True), *given):
        assert (True, False) in kinds or clip == 1e-3
        assert any(clipped for _, clipped in kinds) == (clip in (0.4, 1e-3))
        assert any(not applied for applied, _ in kinds) == (precision == "fp16")


def hurried(zero: dict[str, Any]) -> None:
    """Steps come while the thread is at work: what it has not begun is stepped as always."""
    bring = early._Copy.bring

    def slow(self: early._Copy) -> None:
        time.sleep(0.001)
        bring(self)

    found = []
    for keys in ({}, zero):
        engine = make(keys, 2, "bf16", 1, 0.4)
        kept = lost = 0
        with mock.patch.object(early._Copy, "bring", slow):
            for step in range(12):
                backward(engine, step)
                engine.step()
                kept, lost = kept + engine.last_step.early, lost + engine.last_step.early_in_vain
        found.append(seen(engine))
        units = len(engine.sharded.units)
        engine.destroy()
    assert found[0] == found[1]
    assert kept + lost < 11 * units


@pytest.mark.parametrize("place", HOST_AND_DISK)
def test_steps_that_come_early(tmp_path: Path, place: str) -> None:
    zero = offload(place, str(tmp_path))
    zero["offload_optimizer"]["super_offload"] = True
    run_ranks(hurried, 2, zero)


def replicated() -> Any:
    """State is divided over two of four ranks, and the gradients are whole only at the end of the pass."""
    zero = {"mics_shard_size": 2, "offload_optimizer": {"device": "cpu", "super_offload": True}}
    expected, *_ = trained({"mics_shard_size": 2}, False, 3, 3, "bf16")
    for far in (False, True):
        found, told, units = trained(zero, far, 3, 3, "bf16")
        assert found == expected
        assert [(kept, lost) for _, _, kept, lost in told] == [(0, 0), (units, 0), (units, 0)]


def test_state_that_replicas_share() -> None:
    run_ranks(replicated, 4)


def interrupted(zero: dict[str, Any], far: bool, directory: str) -> dict[str, list[int]]:
    """Do something between the backward pass and the step; return what became of what had been stepped."""

    def nothing(engine: Any) -> None:
        pass

    def zero_grad(engine: Any) -> None:
        engine.zero_grad()
        backward(engine, 7)

    def again(engine: Any) -> None:
        backward(engine, 7)

    def slower(engine: Any) -> None:
        engine.optimizer.param_groups[1]["lr"] *= 0.5

    def hook(engine: Any) -> None:
        engine.step()
        backward(engine, 7, 1)
        engine.sharded.early and engine.sharded.early.settle()
        engine.optimizer.register_step_pre_hook(lambda *_: None)

    def save(engine: Any) -> None:
        engine.save_checkpoint(f"{directory}/{len(zero)}{far}")

    def look(engine: Any) -> None:
        seen(engine)
        shardwise.utils.safe_get_full_grad(next(engine.module.parameters()))

    def master(engine: Any) -> None:
        parameter = next(engine.module.parameters())
        value = shardwise.utils.safe_get_full_fp32_param(parameter)
        assert value is not None
        shardwise.utils.safe_set_full_fp32_param(parameter, 2 * value)

    def gradient(engine: Any) -> None:
        parameter = next(engine.module.parameters())
        value = shardwise.utils.safe_get_full_grad(parameter)
        assert value is not None
        shardwise.utils.safe_set_full_grad(parameter, 2 * value)

    def load(engine: Any) -> None:
        engine.load_checkpoint(f"{directory}/{len(zero)}{far}")
        backward(engine, 7)

    def state(engine: Any) -> None:
        for kept in engine.optimizer.state.values():
            kept["step"].add_(3)  # by a way that the engine does not see

    def moved(engine: Any) -> None:
        engine.offload_states()
        engine.reload_states()

    def weighted(engine: Any) -> None:
        engine.zero_grad()
        engine.backward(CASE.loss(engine, batch_of(engine, 7)), weight=3.0)

    def cut_short(engine: Any) -> None:
        def fail(gradient: torch.Tensor) -> None:
            raise ZeroDivisionError

        handle = list(engine.module.parameters())[4].register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            backward(engine, 7)
        handle.remove()
        engine.zero_grad()
        backward(engine, 7)

    acts = (
        nothing,
        zero_grad,
        again,
        cut_short,
        slower,
        save,
        look,
        master,
        gradient,
        load,
        state,
        moved,
        weighted,
        hook,
    )
    found: dict[str, list[int]] = {}
    with played_device() if far else contextlib.nullcontext(), patient():
        engines = [make(keys, 2, "bf16") for keys in ({}, zero)]
        for number, act in enumerate(acts):
            for engine in engines:
                backward(engine, number)
                before = engine.sharded.early
                if before is not None:
                    before.settle()
                act(engine)
                engine.step()
                assert engine.was_step_applied(), act.__name__
            first, second = map(seen, engines)
            assert first == second, act.__name__
            found[act.__name__] = [engines[1].last_step.early, engines[1].last_step.early_in_vain]
        for engine in engines:
            engine.destroy()
    return found


@pytest.mark.parametrize("place", HOST_AND_DISK)
@pytest.mark.parametrize("far", [False, True], ids=["cpu", "device"])
def test_what_comes_between_the_backward_pass_and_the_step(tmp_path: Path, place: str, far: bool) -> None:
    zero = offload(place, str(tmp_path / "swap"))
    zero["offload_optimizer"]["super_offload"] = True
    for found in run_ranks(interrupted, 2, zero, far, str(tmp_path)):
        units = found["save"][0]
        kept, lost = found.pop("cut_short")
        assert kept == units > 3 and units <= lost <= 2 * units  # of the pass that fails the thread may have begun some
        assert found == {
            "nothing": [0, 0],  # the first step makes the state
            "zero_grad": [units, units],
            "again": [units, units],
            "slower": [0, units],
            "save": [units, 0],
            "look": [units, 0],
            "master": [0, units],
            "gradient": [0, units],
            "load": [units, units],
            "state": [0, units],
            "moved": [units, 0],
            "weighted": [0, units],
            "hook": [0, units],
        }


def hidden(zero: dict[str, Any], far: bool, directory: str) -> None:
    with played_device() if far else contextlib.nullcontext(), patient():
        engine = make(zero, 3, "bf16")
        backward(engine, 0)
        engine.step()
        before = seen(engine)
        kept = {key: value for state in engine.optimizer.state.values() for key, value in state.items()}
        steps = [state["step"].clone() for state in engine.optimizer.state.values()]
        backward(engine, 1)
        engine.sharded.early.settle()
        assert seen(engine) == before
        assert [state["step"] for state in engine.optimizer.state.values()] == steps
        engine.save_checkpoint(directory, tag=f"{far}")
        engine.step()
        assert engine.last_step.early > 3 and seen(engine) != before
        after = {key: value for state in engine.optimizer.state.values() for key, value in state.items()}
        assert all(after[key] is value for key, value in kept.items())  # whoever has a tensor sees the new values
        later = seen(engine)
        engine.destroy()
        other = make(zero, 3, "bf16")
        other.load_checkpoint(directory, tag=f"{far}")
        assert seen(other) == before
        backward(other, 1)
        other.step()
        assert other.last_step.early > 3 and seen(other) == later
        other.destroy()


@pytest.mark.parametrize("place", HOST_AND_DISK)
@pytest.mark.parametrize("far", [False, True], ids=["cpu", "device"])
def test_nothing_is_seen_before_the_step_and_checkpoints_resume(tmp_path: Path, place: str, far: bool) -> None:
    zero = offload(place, str(tmp_path / "swap"))
    zero["offload_optimizer"]["super_offload"] = True
    run_ranks(hidden, 2, zero, far, str(tmp_path / "saved"))


def failing(zero: dict[str, Any], error: Exception, where: str) -> None:
    engines = [make(keys, 2, "bf16") for keys in ({}, zero)]
    handler = Lines()
    logger.addHandler(handler)
    target: Callable[..., Any] = mock.patch.object
    with patient():
        for step in range(4):
            for engine in engines:
                # The second step fails and is taken up again, the third is thrown away.
                broken = target(early._Copy, where, side_effect=error) if step in (1, 2) else contextlib.nullcontext()
                with broken:
                    backward(engine, step)
                    if engine.sharded.early is not None:
                        engine.sharded.early.settle()
                if step == 1 and engine is engines[1]:
                    with pytest.raises(type(error), match="broken") as caught:
                        engine.step()
                    assert error in (caught.value, caught.value.__cause__)
                    del caught
                if step == 2:
                    engine.zero_grad()
                    backward(engine, step)
                engine.step()
        assert engines[1].last_step.early > 3
        assert seen(engines[0]) == seen(engines[1])
        error.__traceback__ = None  # its frames have the copies
        assert any("has failed" in line and "broken" in line for line in handler.lines)
    logger.removeHandler(handler)
    gc.collect()
    for engine in engines:
        engine.destroy()
        assert not any(any(engine.accountant.live_in(tier).values()) for tier in (Tier.HOST, Tier.DISK))


@pytest.mark.parametrize("place", HOST_AND_DISK)
@pytest.mark.parametrize("where", ["of", "bring", "give_back"])
def test_an_error_in_the_thread_is_raised_by_the_step_which_can_be_taken_again(
    tmp_path: Path, place: str, where: str
) -> None:
    zero = offload(place, str(tmp_path))
    zero["offload_optimizer"]["super_offload"] = True
    run_ranks(failing, 1, zero, OffloadError("broken"), where)


UNENDED = """
import torch, shardwise
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(500, 500) for _ in range(8)])
offload = {"device": "cpu", "super_offload": True}
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 300_000, "offload_optimizer": offload},
}
engine, *_ = shardwise.initialize(model=model, config=config)
for step in range(3):
    engine.backward(engine(torch.ones(1, 500)).sum())
    if step < 2:
        engine.step()
print("ended")
"""


def test_a_process_ends_while_the_thread_has_work() -> None:
    done = subprocess.run([sys.executable, "-c", UNENDED], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
    assert "Traceback" not in done.stderr


def left_out(config: dict[str, Any], client: Callable[[Any], torch.optim.Optimizer] | None) -> list[str]:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    handler = Lines()
    logger.addHandler(handler)
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu", "super_offload": True}}
    given = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **config}
    optimizer = None if client is None else client(model.parameters())
    engine, *_ = shardwise.initialize(model=model, optimizer=optimizer, config=given)
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
        assert engine.last_step.early == engine.last_step.early_in_vain == 0
    engine.destroy()
    logger.removeHandler(handler)
    return [line for line in handler.lines if "super_offload" in line]


@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
def test_what_cannot_be_stepped_early_is_said_once(name: str) -> None:
    ((said,),) = run_ranks(left_out, 1, {}, getattr(torch.optim, name))
    assert f"{name}" in said and ("Lion" in said if name == "AdamW" else "whole tensors" in said)


@contextlib.contextmanager
def in_vain() -> Iterator[None]:
    """Have steps made as always, whatever has been stepped early."""
    take = early.EarlySteps.take

    def dropping(self: early.EarlySteps, factor: Any) -> set[int]:
        self.drop()
        return take(self, factor)

    with mock.patch.object(early.EarlySteps, "take", dropping):
        yield


def reported(zero: dict[str, Any], stage: int, far: bool) -> Any:
    with played_device() if far else contextlib.nullcontext(), patient():
        more = {"gradient_clipping": 0.0}
        circumstances = (contextlib.nullcontext, in_vain)
        before, after = reports.report(
            stage, "bf16", keep=0, accumulation=2, zero=zero, more=more, circumstances=circumstances
        )
    for category in (*reports.ENGINE, Category.ACTIVATIONS):
        assert reports.close(before.row(category).planned, after.row(category).measured), category
    return before.elsewhere, after.elsewhere


@pytest.mark.thorough
@pytest.mark.parametrize("place", HOST_AND_DISK)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("far", [False, True], ids=["cpu", "device"])
def test_plans_are_the_measurements(tmp_path: Path, place: str, stage: int, far: bool) -> None:
    zero = offload(place, str(tmp_path))
    (ordinary, _), *_ = run_ranks(reported, 2, zero, stage, far)
    asked = {"offload_optimizer": {**zero["offload_optimizer"], "super_offload": True}}
    for before, after in run_ranks(reported, 2, asked, stage, far):
        assert [row.name for row in before] == [row.name for row in after]
        for planned, measured in zip(before, after, strict=True):
            assert reports.close(planned.planned, measured.measured), planned.name
        # A copy of masters and state lies where they do, and nowhere else.
        more = {a.name: a.planned - b.planned for a, b in zip(before, ordinary, strict=True)}
        tier = "disk" if place.endswith("disk") else "host"
        assert more[tier] > 0
        if tier == "disk":
            assert more["host"] < 0.3 * more["disk"]
