"""Precision, adapters, frozen stages, offload and recomputation in pipelines: equal to one process or to one stage."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shardwise.memory import Category
from shardwise.pipe import LayerSpec
from shardwise.runfiles import steps_file
from tests.harness import run_ranks, thorough
from tests.harness.logs import logged
from tests.harness.training import each
from tests.pipeline.families import setting_of, with_lora
from tests.pipeline.gradients import compare, gradients_alone
from tests.pipeline.training import (
    LENGTH,
    MICRO_BATCHES,
    ROWS,
    WIDTH,
    WORDS,
    Block,
    Logits,
    Setting,
    data,
    engine_of,
    train,
    untied,
)

SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "gradient_clipping": 0.3}

# -- precision ---------------------------------------------------------------------------------------------------------


class Overflowing(Block):
    """A block of which the gradients overflow in the second step of 4 micro-batches."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)
        self.calls += torch.is_grad_enabled()
        if y.requires_grad and self.calls == 6:
            y.register_hook(lambda gradient: gradient * float("inf"))
        return y


def overflowing() -> list[Any]:
    return [LayerSpec(nn.Embedding, WORDS, WIDTH), LayerSpec(Overflowing), *untied()[2:]]


def in_half(setting: Setting) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Train; return loss, norm, loss scale and whether the step was taken, and the parameters at the end."""
    engine = engine_of(setting)
    found: list[Any] = []
    for step in range(setting.steps):
        before = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
        loss = float(engine.train_batch(data(setting, step)))
        report = engine.last_step
        norm = float(report.grad_norm) if report.applied else 0.0
        found.append((loss, norm, engine.cur_scale, report.applied))
        if not report.applied and setting.zero < 3:
            assert all(torch.equal(p, before[n]) for n, p in engine.module.named_parameters())
    values = {n: p.detach().clone().float() for n, p in engine.module.named_parameters()}
    return found, values


@pytest.mark.parametrize(
    ("schedule", "zero", "stages"),
    [("zb-h1", 1, 2), thorough("zbv", 2, 2), thorough("1f1b", 3, 4)],
)
def test_an_overflow_on_one_stage_skips_the_step_on_all(schedule: str, zero: int, stages: int) -> None:
    """The overflow is in the first stage, whose gradients no other stage reads."""
    config = {**SGD, "fp16": {"enabled": True, "initial_scale_power": 6, "hysteresis": 1}}
    setting = Setting(stages, schedule, zero, steps=4, made=overflowing, config=config)
    one = run_ranks(in_half, 1, replace(setting, stages=1, schedule="1f1b"))[0]
    assert [entry[2:] for entry in one[0]] == [(64.0, True), (32.0, False), (32.0, True), (32.0, True)]
    for found, values in run_ranks(in_half, stages, setting):
        assert [entry[2:] for entry in found] == [entry[2:] for entry in one[0]]
        torch.testing.assert_close([e[:2] for e in found], [e[:2] for e in one[0]], rtol=1e-3, atol=1e-4)
        for name, parameter in values.items():
            torch.testing.assert_close(parameter, one[1][name], rtol=0, atol=2e-3, msg=name)


@pytest.mark.parametrize(("precision", "schedule"), [("bf16", "zb-h1"), thorough("fp16", "zbv")])
def test_half_precision_gives_the_parameters_of_one_stage_with_sgd(precision: str, schedule: str) -> None:
    """Adam-like optimizers would hide a factor of all gradients of a stage."""
    section = {"enabled": True} | ({"initial_scale_power": 6} if precision == "fp16" else {})
    setting = Setting(2, schedule, 1, steps=3, made=untied, config={**SGD, precision: section})
    one = run_ranks(in_half, 1, replace(setting, stages=1, schedule="1f1b"))[0]
    for found, values in run_ranks(in_half, 2, setting):
        torch.testing.assert_close(found, one[0], rtol=1e-3, atol=1e-4)
        for name, parameter in values.items():
            torch.testing.assert_close(parameter, one[1][name], rtol=0, atol=2e-3, msg=name)


# -- adapters and frozen layers ----------------------------------------------------------------------------------------


class Adapted(Block):
    """A frozen block with a trained adapter of rank 2."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(x) + self.b(self.a(x))
        return found


class Frozen(nn.Module):
    """A frozen layer."""

    def __init__(self, kind: type[nn.Module], *sizes: int) -> None:
        super().__init__()
        self.inner = kind(*sizes).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        return found


FROZEN_BLOCKS = [LayerSpec(Frozen, Block, WIDTH) for _ in range(3)]
FROZEN_WORDS = LayerSpec(Frozen, nn.Embedding, WORDS, WIDTH)


def adapted() -> list[Any]:
    return [FROZEN_WORDS, *(LayerSpec(Adapted) for _ in range(4)), LayerSpec(Logits)]


def frozen_middle() -> list[Any]:
    ends = [LayerSpec(Logits), LayerSpec(nn.Linear, WORDS, WORDS)]
    return [LayerSpec(nn.Embedding, WORDS, WIDTH), LayerSpec(Block, WIDTH), *FROZEN_BLOCKS[:2], *ends]


def frozen_first() -> list[Any]:
    return [FROZEN_WORDS, *FROZEN_BLOCKS, *untied()[1:4], LayerSpec(Logits)]


def frozen_last() -> list[Any]:
    return [*untied()[:4], *FROZEN_BLOCKS, LayerSpec(Frozen, Logits)]


@pytest.mark.parametrize(
    ("made", "stages", "zero"),
    [
        (frozen_middle, 3, 0),
        (frozen_first, 2, 1),
        thorough(frozen_last, 2, 1),
        thorough(adapted, 2, 1),
        thorough(adapted, 3, 3),
        thorough(frozen_middle, 3, 2),
    ],
)
def test_adapters_and_frozen_stages_have_all_gradients(made: Any, stages: int, zero: int) -> None:
    options = {"partition_method": "uniform"}
    schedules = ("1f1b", "zb-h1") if stages == 3 else ("1f1b", "zb-h1", "zbv")
    compare([Setting(stages, name, zero, made=made, options=options) for name in schedules], stages)


# -- models of transformers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "ranks"),
    [
        (setting_of("t5", 3), 3),
        (setting_of("llama", 2, tensor_parallel={"autotp_size": 2}), 4),
        thorough(setting_of("gpt2", 2, "zb-h1", 2), 4),
        thorough(setting_of("llama", 2, "zbv", 3), 4),
        thorough(setting_of("t5", 4, zero=1), 8),
        thorough(setting_of("bloom", 2, zero=1, tensor_parallel={"autotp_size": 2}), 8),
        thorough(setting_of("llama", 2, "zb-h1", 3, tensor_parallel={"autotp_size": 2}), 8),
    ],
    ids=lambda value: None if isinstance(value, int) else f"{value.given.keywords['family']} {value.schedule}",
)
def test_models_of_transformers_have_all_gradients(setting: Setting, ranks: int) -> None:
    size = setting.config.get("tensor_parallel", {}).get("autotp_size", 1)
    compare([setting], ranks, places=ranks // setting.stages // size)


@pytest.mark.parametrize(
    ("schedule", "zero", "ranks"), [("zb-h1", 1, 2), thorough("1f1b", 3, 4), thorough("zbv", 0, 2)]
)
def test_lora_of_peft_trains_adapters_only(schedule: str, zero: int, ranks: int) -> None:
    pytest.importorskip("peft")
    setting = setting_of("llama", 2, schedule, zero, with_lora)
    compare([setting], ranks)
    assert all("lora_" in name for name in gradients_alone(setting, 1) if "inv_freq" not in name)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "zero"),
    [
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, 1),
        thorough({"activation_checkpointing": {"cpu_checkpointing": True, "partition_activations": False}}, 0),
        thorough({"activation_offload": {"enabled": True}}, 1),
        thorough({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, 3),
    ],
    ids=lambda value: str(value)[:60],
)
def test_offload_of_state_and_activations_changes_no_gradient(config: dict[str, Any], zero: int) -> None:
    for interval in (0, 2):
        options = {"activation_checkpoint_interval": interval}
        schedules = ("1f1b", "zb-h1")
        compare([Setting(2, n, zero, made=untied, config=config, options=options) for n in schedules], 2)


def flops(config: dict[str, Any], interval: int) -> int:
    engine = engine_of(Setting(2, made=untied, config=config, options={"activation_checkpoint_interval": interval}))
    with FlopCounterMode(display=False) as counter:
        engine.train_batch(data(Setting(2, made=untied), 0))
    engine.destroy()
    return counter.get_total_flops()


def test_kept_outputs_are_not_computed_again() -> None:
    section = {"activation_checkpointing": {"selective": "matmuls"}}
    plain, again, kept = (run_ranks(flops, 2, *given)[0] for given in (({}, 0), ({}, 2), (section, 2)))
    assert plain == kept < again


WIDE = 256


def wide() -> list[Any]:
    """Return layers that are large enough to be sharded: each block is a unit."""
    blocks = [LayerSpec(Block, WIDE) for _ in range(8)]
    return [LayerSpec(nn.Embedding, WORDS, WIDE), *blocks, LayerSpec(nn.Linear, WIDE, WORDS, bias=False)]


def measure(setting: Setting) -> tuple[Counter[str], list[int], int, dict[Category, int]]:
    """Return the collectives of a step by kind, bytes of the units, late unshards, and peaks of memory."""
    engine = engine_of(setting)
    for step in range(2):
        engine.train_batch(data(setting, step))
    first, accountant = engine.ledger.sequence, engine.sharded.accountant
    accountant.reset_peak()
    engine.train_batch(data(setting, 2))
    kinds = Counter(record.kind for record in engine.ledger.records(since=first))
    sizes = [sum(section.layout.numel * 4 for section in unit.sections) for unit in engine.sharded.units]
    late, peaks = engine.sharded.unsharder.late, dict(accountant.peak)
    return kinds, sizes, late, peaks


def case(schedule: str, zero: int, *marks: Any) -> Any:
    """Return the case of a schedule and ZeRO stage."""
    chunks = {"pipeline": {"chunks": 2}} if schedule == "interleaved" else {}
    return pytest.param(Setting(2, schedule, zero, made=wide, config=chunks), id=f"{schedule}-{zero}", marks=marks)


@pytest.mark.parametrize(
    "setting",
    [
        case("zbv", 3),
        *(case(schedule, 3, pytest.mark.thorough) for schedule in ("1f1b", "interleaved")),
        case("zbv", 1, pytest.mark.thorough),
        case("1f1b", 2, pytest.mark.thorough),
    ],
)
def test_each_unit_is_unsharded_twice_and_reduced_once_a_micro_batch(setting: Setting) -> None:
    for kinds, sizes, late, peaks in run_ranks(measure, 4, setting):
        units, passes = len(sizes), MICRO_BATCHES if setting.zero > 1 else 1
        assert late == 0
        assert kinds["reduce"] == passes * units
        if setting.zero == 3:
            # The first unit of the backward pass may be kept from the forward pass.
            assert 2 * passes * (units - 1) <= kinds["gather"] <= 2 * passes * units
            # A rank may have one unit more for peers that are ahead.
            assert peaks[Category.GATHERED] <= 3 * max(sizes)
        else:
            assert kinds["gather"] == units
        assert peaks[Category.BUFFERS] <= 5 * max(sizes)


@pytest.mark.parametrize("schedule", ["zbv", pytest.param("interleaved", marks=pytest.mark.thorough)])
def test_units_may_stay_unsharded_over_several_passes(schedule: str) -> None:
    step, run, every = (
        Setting(2, schedule, 3, made=wide, config={"pipeline": {"unsharded_for": value, "chunks": 2}})
        for value in ("step", "run", "pass")
    )
    whole, some = zip(*run_ranks(each, 4, measure, [(step,), (run,)]), strict=True)
    for kinds, sizes, late, peaks in whole:
        assert late == 0
        assert kinds["gather"] == len(sizes)
        assert kinds["reduce"] == MICRO_BATCHES * len(sizes)
        assert peaks[Category.GATHERED] == sum(sizes)
    for kinds, sizes, late, peaks in some:
        assert late == 0
        assert len(sizes) < kinds["gather"] < 2 * MICRO_BATCHES * (len(sizes) - 1)
        assert peaks[Category.GATHERED] < sum(sizes)
    for runs in run_ranks(each, 4, train, [(replace(setting, steps=1),) for setting in (step, run, every)]):
        for one in runs[:2]:
            assert one.losses == runs[2].losses
            assert all(torch.equal(one.parameters[name], runs[2].parameters[name]) for name in one.parameters)


def counted(directory: Path) -> list[str]:
    """Train three steps with a profile and a run log; return the lines about throughput."""
    sections = {
        "steps_per_print": 1,
        "flops_profiler": {"enabled": True, "profile_step": 0, "output_file": str(directory / "profile.txt")},
        "run_log": {"enabled": True, "path": str(directory), "plan": False},
    }
    setting = Setting(2, "interleaved", steps=3, made=untied, config=sections)
    engine = engine_of(setting)
    with logged() as kept:
        for step in range(setting.steps):
            engine.train_batch(data(setting, step))
    engine.destroy()
    return [line for line in kept.lines if "throughput" in line]


def test_tokens_and_micro_batches_of_several_stages_of_a_rank_are_counted_once(tmp_path: Path) -> None:
    lines, others = run_ranks(counted, 2, tmp_path)
    assert len(lines) == 2 and others == []
    for line in lines:
        samples, tokens = (float(re.findall(rf"([\d.e+]+) {what}", line)[0]) for what in ("samples/s", "tokens/s"))
        assert tokens == pytest.approx(samples * LENGTH, rel=1e-2)
    rows = [json.loads(row) for row in (tmp_path / steps_file(0)).read_text().splitlines()]
    assert [row["tokens"] for row in rows] == [MICRO_BATCHES * ROWS * LENGTH] * 3
    assert f"computes for {MICRO_BATCHES} micro-batches of {ROWS} samples" in (tmp_path / "profile.txt").read_text()
