"""The memory preflight: plans against limits of each tier, the device's limit in training, and what a step moves."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import shardwise
from shardwise.comm.environment import DEVICE_LIMIT
from shardwise.engine import preflight, traffic
from shardwise.engine.plans import Planner
from shardwise.errors import ConfigError
from shardwise.memory import MemoryLimit, OutOfMemoryError, Tier
from shardwise.offload import measure
from shardwise.offload.files import SwapFile
from tests.harness import of_all_ranks, on_ranks
from tests.memory.test_oom import under_limit

KIB = 1 << 10
BLOCKS, WIDTH = 8, 64
BYTES = 4 * BLOCKS * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH)
"""Of the parameters."""
LAYERS = 24
ROOM = 480
"""MiB of addresses beyond what the process has before the model of 128 MiB exists."""
ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS))
    )


def start(zero: dict[str, Any] | None = None, accumulation: int = 1, **keys: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": ADAM,
        "zero_optimization": zero or {},
        **keys,
    }
    engine, *_ = shardwise.initialize(model=blocks(), config=config)
    return engine


def window(engine: Any) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
        engine.step()


def merged(zero: dict[str, Any], suggestion: dict[str, Any]) -> dict[str, Any]:
    """What a user has after following the advice."""
    return {**zero, **suggestion["zero_optimization"]}


def limited(limits: list[MemoryLimit]) -> Any:
    """Have there be these limits of the host."""
    return mock.patch.object(preflight, "host_limits", lambda: iter(limits))


# -- before training ---------------------------------------------------------------------------------------------------


def test_a_device_that_is_too_small_and_the_setting_that_fits() -> None:
    limits = {"device": f"{BYTES // 8 // KIB}KiB"}
    with pytest.raises(OutOfMemoryError) as told:
        start({"stage": 3}, memory_limits=limits)
    text = str(told.value)
    assert text.startswith("initialize(): this does not fit.") and "(memory_limits.device)" in text
    # Two units at a time are more than an eighth of a model of eight blocks.
    assert told.value.suggestion is None

    limits = {"device": BYTES // 4 * 2}
    with pytest.raises(OutOfMemoryError) as told:
        start({"stage": 3}, memory_limits=limits)
    suggestion = told.value.suggestion
    assert suggestion is not None and json.dumps(suggestion) in str(told.value)
    assert suggestion["zero_optimization"]["offload_param"]["device"] == "cpu"
    engine = start(merged({"stage": 3}, suggestion), memory_limits=limits)
    window(engine)
    assert 0 < engine.accountant.peak_total <= limits["device"]
    engine.destroy()


def test_a_model_eight_times_as_large_as_the_device_trains(tmp_path: Path) -> None:
    def deep() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    size = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
    place = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {
        "stage": 3,
        "offload_optimizer": place,
        "offload_param": {**place, "max_in_cpu": 0},
        "reduce_bucket_size": WIDTH * WIDTH,
    }
    config = {"train_batch_size": 2, "optimizer": ADAM, "zero_optimization": zero}
    found = []
    for limits in ({"device": size // 8}, {}):
        engine, *_ = shardwise.initialize(model=deep(), config={**config, "memory_limits": limits})
        for _ in range(3):
            engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
            engine.step()
        assert engine.accountant.peak_total <= size // 8
        engine.destroy()
        found.append([parameter.detach().clone() for parameter in engine.module.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


OFFLOADED = {"stage": 3, "offload_optimizer": {"device": "cpu"}}


@on_ranks(2)
def test_a_machine_that_is_too_small_counts_all_its_ranks() -> None:
    """Each alone would fit."""
    # Of what is in use, the model will be given back.
    limit = MemoryLimit("physical memory", 8 << 20, (5 << 20) + 2 * BYTES, 0)
    with mock.patch.object(preflight, "SEARCH_S", 0.0), limited([limit]), pytest.raises(OutOfMemoryError) as told:
        start(OFFLOADED, memory_limits={"device": 64 << 20})
    with limited([MemoryLimit("physical memory", 8 << 20, (2 << 20) + BYTES, 0)]):
        engine = start(OFFLOADED, memory_limits={"device": 64 << 20})
        checked = engine.memory_budget.checks
        engine.destroy()
    assert {check.limit for check in checked} == {"physical memory", "memory_limits.device"}
    text = str(told.value)
    suggestion = told.value.suggestion
    assert "device and host: 2 ranks need " in text and "3.00 MiB are there (physical memory)" in text
    assert suggestion is None


@pytest.mark.parametrize("equal", [True, False])
@on_ranks(2)
def test_one_rank_of_a_machine_makes_the_dry_run_for_all_with_equal_parts(equal: bool) -> None:
    optimizer = ADAM if equal else {"type": "Muon", "params": {"lr": 0.1}}  # each rank steps other whole tensors
    with mock.patch.object(preflight.Planner, "window", autospec=True, side_effect=preflight.Planner.window) as window:
        start({"stage": 1}, optimizer=optimizer, memory_limits={"device": 64 << 20}).destroy()
    assert window.call_count == (0 if equal and torch.distributed.get_rank() else 1)


@on_ranks(2)
def test_all_ranks_are_told_the_same() -> None:
    limits = {"host": int(6.5 * BYTES)}
    with pytest.raises(OutOfMemoryError, match=r"2 ranks need.*\(memory_limits\.host\)") as told:
        start({"stage": 0}, memory_limits=limits)
    suggestion = told.value.suggestion
    assert suggestion is not None and suggestion["zero_optimization"]["stage"] >= 1
    assert len({str(answer) for answer in of_all_ranks((str(told.value), suggestion))}) == 1
    engine = start(merged({}, suggestion), memory_limits=limits)
    window(engine)
    engine.destroy()


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    place = {"device": "nvme", "nvme_path": str(tmp_path / "swap")}
    zero = {"stage": 3, "offload_optimizer": place}
    limits: dict[str, Any] = {"device": 64 << 20}
    small = MemoryLimit("a small disk", 1 << 30, (1 << 30) - (1 << 20), 0)
    with mock.patch.object(preflight, "disk_limit", lambda directory: small), pytest.raises(OutOfMemoryError) as told:
        start(zero, memory_limits=limits)
    text = str(told.value)
    assert "1.00 MiB are there (a small disk)" in text
    assert not (tmp_path / "swap").exists()
    assert told.value.suggestion is not None
    assert told.value.suggestion["zero_optimization"]["offload_optimizer"] == {"device": "none"}
    start(merged(zero, told.value.suggestion), memory_limits=limits).destroy()


@pytest.mark.thorough
def test_a_real_limit_is_told_before_anything_is_spread() -> None:
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAM, "zero_optimization": zero}
    (told,) = under_limit(ROOM, 65536, config)
    assert told["text"].startswith("initialize(): this does not fit.") and told["cause"] == "NoneType"
    assert "  device and host: rank 0 needs " in told["text"] and "(RLIMIT_AS (ulimit -v))" in told["text"]


def test_nobody_is_refused_for_want_of_knowledge(caplog: pytest.LogCaptureFixture) -> None:
    class Unplanned(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if any(isinstance(p, torch._subclasses.FakeTensor) for g in self.param_groups for p in g["params"]):
                raise RuntimeError("not in a dry run")
            return super().step(closure)

    model = blocks()
    config = {"train_batch_size": 2, "memory_limits": {"device": 64 << 20}}
    with limited([]), caplog.at_level(logging.WARNING, "shardwise"):
        engine, *_ = shardwise.initialize(model=model, optimizer=Unplanned(model.parameters(), lr=0.1), config=config)
    assert "whether this fits has not been planned" in caplog.text
    assert engine.memory_budget.checks == () and engine.memory_budget.planned == ({},)
    engine.destroy()


def test_little_room_is_told(caplog: pytest.LogCaptureFixture) -> None:
    engine = start(memory_limits={"device": 1 << 30})
    needed = next(check.needed for check in engine.memory_budget.checks if check.tiers == ("device",))
    engine.destroy()
    for limit, said in ((int(needed * 1.05), True), (int(needed * 1.2), False)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "shardwise"):
            start(memory_limits={"device": limit}).destroy()
        assert ("memory will be short" in caplog.text) == said


def test_nothing_is_planned_where_nothing_is_asked_for() -> None:
    with mock.patch.object(preflight, "Planner", side_effect=AssertionError):
        for keys in ({}, {"zero": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}):
            model = nn.Linear(8, 8)
            config = {"train_batch_size": 2, "optimizer": ADAM, "zero_optimization": keys.get("zero", {})}
            engine, *_ = shardwise.initialize(model=model, config=config)
            assert (engine.memory_budget is None) == (not keys)
            engine.destroy()


@pytest.mark.parametrize("written", ["2 cats", 0, -1, True, 1.5])
def test_sizes_that_are_none(written: Any) -> None:
    with pytest.raises(ConfigError, match=r"memory_limits\.host: expected bytes, or a size such as"):
        start(memory_limits={"host": written})


# -- during training ---------------------------------------------------------------------------------------------------


def test_a_limit_that_is_exceeded_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_LIMIT, "5MiB")  # overrules the configuration
    engine = start(memory_limits={"device": "4KiB"})
    window(engine)
    over = pytest.raises(OutOfMemoryError, match=r"(?s)rank 0 has held .*memory_limits\.device allows \(5\.00 MiB\)")
    with shardwise.memory.track_activations(engine.accountant), over:
        engine.backward(engine(torch.ones(2048, WIDTH)).square().mean())
        engine.step()
    engine.destroy()
    monkeypatch.setenv(DEVICE_LIMIT, "3 cats")
    with pytest.raises(ConfigError, match=r"SHARDWISE_DEVICE_LIMIT \(shardwise run --device-limit\)"):
        start()


# -- what a step moves -------------------------------------------------------------------------------------------------


@pytest.fixture
def files() -> Iterator[list[SwapFile]]:
    """Every swap file that is made."""
    made: list[SwapFile] = []
    original: Callable[..., None] = SwapFile.__init__

    def init(self: SwapFile, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(self)

    with mock.patch.object(SwapFile, "__init__", init):
        yield made


def test_planned_bytes_are_those_of_the_files(tmp_path: Path, files: list[SwapFile]) -> None:
    place = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": 3, "offload_optimizer": place, "offload_param": {**place, "max_in_cpu": 0}}
    engine = start(zero, 2, memory_limits={"disk": "1GB"})
    file = files[-1]  # before it the disk may have been measured
    for _ in range(2):
        window(engine)
    before = file.threads.bytes_read, file.threads.bytes_written
    window(engine)
    moved = engine.memory_report().moved["disk"]
    assert moved["read"] == pytest.approx(file.threads.bytes_read - before[0], rel=0.03)
    assert moved["written"] == pytest.approx(file.threads.bytes_written - before[1], rel=0.03)
    (check,) = (check for check in engine.memory_budget.checks if check.limit == "memory_limits.disk")
    assert check.needed == pytest.approx(file.size, rel=0.03)
    target = engine._memory._target()
    plan = Planner(target).plan(target.setting)
    assert plan.moved["disk"] == moved
    assert "A step reads" in engine.memory_report().render()
    engine.destroy()


def test_the_cost_is_told_before_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = {"device": "nvme", "nvme_path": str(tmp_path)}
    limits = {"disk": "1GB"}
    with (
        mock.patch.object(traffic, "WORTH_MEASURING", 1),
        mock.patch.object(measure, "MEASURED", 1 << 20),
        caplog.at_level(logging.INFO, "shardwise"),
    ):
        engine = start({"stage": 1, "offload_optimizer": place}, memory_limits=limits)
    (found,) = engine.memory_budget.traffic
    assert str(found) in caplog.text
    moved = engine.memory_report().moved["disk"]
    assert (found.read, found.written) == (moved["read"], moved["written"])
    assert found.seconds == pytest.approx(found.read / found.read_speed + found.written / found.write_speed)
    assert Tier.DISK.value == found.tier and not list(tmp_path.iterdir())
    engine.destroy()
