"""Schedules on the command line, and classes of schedules that scripts build themselves."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

import pytest
import torch

from shardwise.config.schema.schedules import NATIVE_SCHEDULES
from shardwise.schedules import build
from shardwise_deepspeed.schedule_arguments import (
    add_tuning_arguments,
    get_config_from_args,
    get_lr_from_config,
    override_params,
    parse_arguments,
)
from shardwise_deepspeed.schedules import WarmupDecayLR
from tests.harness.tables import tables

TABLES = tables(__file__)


def parsed(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    assert add_tuning_arguments(parser) is parser
    return parser.parse_args(line.split())


def test_every_argument_of_every_schedule_has_a_flag() -> None:
    names = {name for model in NATIVE_SCHEDULES.values() for name in model.model_fields} - {"last_batch_iteration"}
    assert vars(parsed("")) == {"lr_schedule": None, **dict.fromkeys(names)}


@pytest.mark.parametrize(("line", "params"), TABLES["flags"])
def test_flags_become_a_section_that_can_be_built(line: str, params: dict[str, object]) -> None:
    section, error = get_config_from_args(parsed(line))
    assert error == ""
    assert section == {"type": line.split()[1], "params": params}
    build(section["type"], torch.optim.SGD([torch.zeros(1)], lr=0.1), section["params"])


def test_no_schedule_or_an_unknown_one() -> None:
    assert get_config_from_args(parsed("")) == (None, "--lr_schedule is not given")
    assert get_config_from_args(object()) == (None, "--lr_schedule is not given")
    section, error = get_config_from_args(parsed("--lr_schedule warmup"))
    assert section is None and "--lr_schedule warmup: expected one of LRRangeTest, OneCycle" in error


def test_only_what_is_given_replaces_the_configuration() -> None:
    params = {"warmup_num_steps": 5, "warmup_min_lr": 0.5}
    override_params(parsed("--warmup_min_lr 0 --cycle_first_step_size 3"), params)
    assert params == {"warmup_num_steps": 5, "warmup_min_lr": 0.0, "cycle_first_step_size": 3}


@pytest.mark.parametrize("words", ["--cycle_momentum maybe", "--warmup_num_steps 1.5", "--warmup_type exp"])
def test_wrong_values(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(words)
    assert f"argument {words.split()[0]}: invalid" in capsys.readouterr().err.replace("expected true", "invalid")


def test_reading_the_command_line_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr_schedule", "WarmupLR", "--epochs", "3", "--cycle", "x"])
    args, rest = parse_arguments()
    assert args.lr_schedule == "WarmupLR"
    assert rest == ["--epochs", "3", "--cycle", "x"]


def test_the_rate_of_a_section() -> None:
    assert get_lr_from_config({"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.2}}) == (0.2, "")
    assert get_lr_from_config({"type": "LRRangeTest"}) == (1e-3, "")
    assert get_lr_from_config({"type": "OneCycle", "params": {"cycle_max_lr": [0.2, 0.3]}}) == ([0.2, 0.3], "")
    assert get_lr_from_config({"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.4}}) == (0.4, "")
    for section, error in (
        ({}, "the schedule has no `type`"),
        ({"type": "StepLR"}, "StepLR is none of"),
        ({"type": "OneCycle", "params": {}}, "OneCycle has no `cycle_max_lr`"),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": None}}, "WarmupLR has no `warmup_max_lr`"),
        ({"type": "WarmupCosineLR", "params": {}}, "WarmupCosineLR scales the optimizer's own rate"),
    ):
        rate, found = get_lr_from_config(section)
        assert rate is None and found.startswith(error)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("name", "params", "rates"), TABLES["rates"])
def test_rates_of_classes_without_a_configuration(name: str, params: dict[str, Any], rates: list[float]) -> None:
    """DeepSpeed's defaults: WarmupDecayLR warms up to 0.001, and WarmupLR to the rate of the optimizer."""
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=0.5)
    schedule = getattr(importlib.import_module("deepspeed.runtime.lr_schedules"), name)(optimizer, **params)
    found = []
    for _ in rates:
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert found == pytest.approx(rates, rel=1e-3, abs=1e-9)
    assert isinstance(build(name, optimizer, params), type(schedule))


def test_a_subclass_has_its_own_instances() -> None:
    class Own(WarmupDecayLR):
        pass

    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    built = build("WarmupDecayLR", optimizer, {"total_num_steps": 5})
    assert isinstance(built, WarmupDecayLR) and not isinstance(built, Own)
    assert isinstance(Own(optimizer, 5), Own) and not isinstance(WarmupDecayLR(optimizer, 5), Own)
