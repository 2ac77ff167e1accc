"""Memory plans of pipelines: those of the ranks that train, in every schedule, and of ranks that are not there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.comm.communicator import Handle
from shardwise.engine.pipeline_dryrun import _PlannedLink, held, planned_schedule
from shardwise.engine.plans import MemoryPlans, plan_model
from shardwise.engine.stages import PipelineRanks
from shardwise.memory import Category
from shardwise.pipe import LayerSpec, PipelineModule, Schedule, TiedLayerSpec, Times, make_schedule, simulate
from shardwise.pipeline.runtime import Runtime
from shardwise.pipeline.schedules import SCHEDULES, placement_of
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.training import each, least_peaks
from tests.models import Block
from tests.pipeline.training import Setting, data, engine_of, head, model_of

VOCABULARY, WIDTH, LENGTH, ROWS = 257, 96, 24, 4
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
BATCH = Setting.batches(0, 0, 0)
SCHEDULED = ["1f1b", "gpipe", "zb-h1", "interleaved", "zbv", "v-half"]


def gpt() -> list[Any]:
    """A decoder whose head is its embedding."""
    tokens = "tokens", nn.Embedding, VOCABULARY, WIDTH
    blocks = [LayerSpec(Block, WIDTH, 4, 0.0) for _ in range(6)]
    return [TiedLayerSpec(*tokens), *blocks, LayerSpec(nn.LayerNorm, WIDTH), TiedLayerSpec(*tokens, forward_fn=head)]


def untied() -> list[Any]:
    """A decoder with a head of its own."""
    return [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), *gpt()[1:-1], LayerSpec(nn.Linear, WIDTH, VOCABULARY)]


def batch(step: int, micro_batch: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + place)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    return ids, ids


def setting_of(
    stages: int, schedule: str, zero: int, precision: str = "bf16", again: bool = False, **more: Any
) -> Setting:
    config = {"train_micro_batch_size_per_gpu": ROWS, **({"bf16": {"enabled": True}} if precision == "bf16" else {})}
    options = {"activation_checkpoint_interval": int(again)}
    return Setting(
        **{
            "stages": stages,
            "schedule": schedule,
            "zero": zero,
            "micro_batches": 6,
            "config": config,
            "made": gpt,
            "batches": batch,
            "options": options,
            **more,
        }
    )


Peaks = dict[str, int]


class SimulatedLink(_PlannedLink):
    """A link to a real peer that keeps each message until the simulated schedule says that the peer takes it."""

    def _is_received(self, label: str, handles: Sequence[Handle], now: str) -> bool:
        # At equal simulated times the peer may first wait for this rank.
        until = time.monotonic() + (5 if self._received[label] < self._sending[now] else 0.1)
        while super()._is_received(label, handles, now) and time.monotonic() < until:
            if all(handle.completed for handle in handles):
                return True
            time.sleep(0.001)
        return False


@contextlib.contextmanager
def as_simulated() -> Iterator[Callable[[Any, int], None]]:
    """Give new engines simulated links: how long messages are under way otherwise depends on the machine's load.

    Yields a function that takes over the times of the last plan for an engine's schedule of some micro-batches.
    """
    links: list[SimulatedLink] = []
    times: list[Times] = []

    def make_link(*arguments: Any) -> SimulatedLink:
        links.append(SimulatedLink(*arguments))
        return links[-1]

    def follow(link: _PlannedLink, schedule: Schedule, given: Times) -> None:
        times[:] = [given]
        _PlannedLink.follow(link, schedule, given)

    def begin(engine: Any, micro_batches: int) -> None:
        for link in links:
            link.follow(engine._made(engine._schedule, micro_batches), times[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.engine.pipeline.Runtime", partial(Runtime, link=make_link))
        patch.setattr(
            "shardwise.engine.pipeline_dryrun._PlannedLink", type("Noting", (_PlannedLink,), {"follow": follow})
        )
        yield begin


def planned_by(setting: Setting, engine: Any = None) -> Peaks:
    report = (engine or engine_of(setting)).memory_report(setting.batches(0, 0, 0))
    return {row.name: row.planned for row in report.rows} | {"total": report.total.planned}


def measured(setting: Setting) -> tuple[Peaks, Peaks]:
    """Return peaks by category, planned before the first step and measured after it."""
    with as_simulated() as begin:
        engine = engine_of(setting)
        planned = planned_by(setting, engine)
        begin(engine, setting.micro_batches)
        for step in range(2):
            engine.train_batch(data(setting, step))
        batches = list(data(setting, 2))
        return planned, least_peaks(engine.accountant, lambda: engine.train_batch(iter(batches)), warm_up=0)


def check(planned: Peaks, peaks: Peaks, where: str) -> None:
    """Compare categories; whether two of them peak together depends on when threads exchange gradients."""
    for name, size in peaks.items():
        share, least = 0.05 if name == "total" else 0.03, 1 << 13 if name == Category.OTHER.value else 0
        what = f"{where}: {name} {planned[name]}, measured {size}"
        assert abs(planned[name] - size) <= share * max(size, least), what


@pytest.mark.parametrize(
    ("stages", "places", "zeros", "schedules", "options"),
    [
        (2, 1, (1,), ["zbv"], {}),
        *(
            thorough(stages, places, zeros, SCHEDULED, options)
            for stages, places, zeros in [(2, 1, (0, 3)), (3, 1, (1,)), *((2, 2, (zero,)) for zero in range(4))]
            for options in ({}, {"again": True}, {"made": untied, "precision": "fp32"})
        ),
    ],
)
def test_plans_are_the_measurements(
    stages: int, places: int, zeros: tuple[int, ...], schedules: list[str], options: dict[str, Any]
) -> None:
    settings = [setting_of(stages, schedule, zero, **options) for zero in zeros for schedule in schedules]
    for rank, found in enumerate(run_ranks(each, stages * places, measured, [(one,) for one in settings], timeout=600)):
        for setting, (planned, peaks) in zip(settings, found, strict=True):
            check(planned, peaks, f"{setting.schedule}, stage {setting.zero}, rank {rank}")


def plans_of(setting: Setting, ranks: int, **more: Any) -> MemoryPlans:
    """Return the plans of all positions, made in this process."""
    config = {
        "gradient_accumulation_steps": setting.micro_batches,
        "gradient_clipping": 0.5,
        "pipeline": {"schedule": setting.schedule, "stages": setting.stages},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        **setting.config,
        **more,
    }
    model = model_of(setting.stages, setting.made, setting.loss, **setting.options)
    return plan_model(model, config, ranks=ranks, stages=[setting.zero], batch=setting.batches(0, 0, 0))


def test_one_process_plans_all_positions_as_the_ranks_do() -> None:
    setting = setting_of(2, "zb-h1", 1, micro_batches=3)
    plans = plans_of(setting, 2)
    assert [plan.position for plan in plans.plans] == [0, 1] and not any(plan.note for plan in plans.plans)
    for rank, planned in enumerate(run_ranks(planned_by, 2, setting)):
        assert plans.plans[rank].peaks | {"total": plans.plans[rank].total} == planned
    facts = plans.schedule
    assert facts is not None and facts.layers == ("0 to 3", "4 to 8") and facts.in_flight == (2, 2)
    assert facts.idle == simulate(make_schedule("zb-h1", 2, 3)).idle
    # The second rank computes the logits, too, which takes the first one's time of waiting.
    assert facts.idle_by_flops is not None and facts.idle_by_flops[1] < facts.idle[1] < facts.idle_by_flops[0]


@on_ranks(2)
def test_limits_and_other_settings() -> None:
    """Each rank of a pipeline is planned with the ranks of its own position."""
    with pytest.raises(shardwise.memory.OutOfMemoryError, match=r"1 rank at each of 2 positions of a pipeline"):
        engine_of(Setting(2, config={"memory_limits": {"device": "1KB"}}))
    engine = engine_of(Setting(2))
    one, two = engine.memory_plans(Setting.batches(0, 0, 0), stages=[3], ranks=[1, 2]).plans
    assert [(plan.setting.ranks, plan.position) for plan in (one, two)] == [(n, dist.get_rank()) for n in (1, 2)]
    assert one.total > two.total


def large() -> list[Any]:
    blocks = [LayerSpec(Block, 768, 12, 0.0) for _ in range(16)]
    return [LayerSpec(nn.Embedding, VOCABULARY, 768), *blocks, LayerSpec(nn.Linear, 768, VOCABULARY)]


@pytest.mark.thorough
def test_shards_of_real_size() -> None:
    """A rank has 38 million parameters, 76 MB in bf16."""
    setting = setting_of(2, "1f1b", 1, made=large, micro_batches=4)
    for rank, (planned, peaks) in enumerate(run_ranks(measured, 2, setting, timeout=600)):
        assert peaks["parameters"] > 64 << 20
        check(planned, peaks, f"rank {rank}")


def test_a_thousand_ranks() -> None:
    """Four positions of 256 ranks each: parameters of one in 4 ranks, optimizer state of one in 1,024."""
    plans = plans_of(setting_of(4, "1f1b", 1, made=untied, micro_batches=4), 1024)
    assert plans.schedule is not None and plans.schedule.in_flight == (4, 3, 2, 1)
    for plan, parameters in zip(plans.plans, plans.schedule.parameters, strict=True):
        assert 2 * parameters <= plan.peaks["parameters"] <= 3 * parameters  # bf16, and padding for 256 ranks
        assert plan.peaks["optimizer state"] < 8 * parameters / 50
        assert plan.peaks["activations"] > 0 and not plan.note


@pytest.mark.parametrize("schedule", ["zbv", thorough("interleaved")])
def test_plans_without_a_batch(schedule: str) -> None:
    """Activations are missing; all other categories that do not depend on the order of passes are there."""
    config = {**ADAM, "train_micro_batch_size_per_gpu": 2, "pipeline": {"stages": 2, "schedule": schedule}}
    plans = [plan_model(model_of(2), config, ranks=4, stages=[3], batch=given).plans for given in (None, BATCH)]
    for without, plan in zip(*plans, strict=True):
        assert not without.note and "activations" not in without.peaks
        for category in ("parameters", "gradients", "optimizer state"):
            assert without.peaks[category] == plan.peaks[category] > 0, category


@pytest.mark.parametrize("name", [name for name, kind in SCHEDULES.items() if kind.trains])
def test_few_micro_batches_hold_what_many_do(name: str) -> None:
    for ranks in (1, 2, 4, 8):
        place = PipelineRanks.of(0, ranks, ranks, placement_of(name, ranks))
        chunks = len(place.rank_of) // ranks
        for micro_batches in (1, 3, ranks, 2 * ranks + 1, 64):
            planned = planned_schedule(name, place, micro_batches)
            whole = make_schedule(name, ranks, micro_batches, chunks, place.placement)
            assert held(planned) == held(whole)
            assert planned.micro_batches <= (micro_batches if name == "gpipe" else 3 * ranks + 3)


def test_what_a_pipeline_is_planned_with_is_refused_with_the_fix() -> None:
    setting = setting_of(2, "1f1b", 1)
    config = {**setting.config, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    module = PipelineModule(gpt(), loss_fn=setting.loss)
    with pytest.raises(shardwise.errors.UsageError, match=r"a pair \(inputs, labels\)"):
        plan_model(module, config, ranks=2, batch=torch.ones(2))
    with pytest.raises(shardwise.errors.ConfigError, match=r"9 layers cannot be divided into 16 .* Use 1 to 9 stages"):
        plan_model(module, {**config, "pipeline": {"stages": 16}}, ranks=16)
    with pytest.raises(shardwise.errors.PipelineError, match=r"neither a shardwise\.pipe.PipelineModule"):
        plan_model(nn.Linear(2, 2), {**config, "pipeline": {"stages": 2}}, ranks=2)
