"""Whole tensors of single parameters: what reading and setting them costs, and what stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwise import utils
from shardwise.memory import Accountant, track_activations
from tests.harness import on_ranks, thorough
from tests.harness.training import ADAMW, engine_of

LARGE = (512, 2048)


@pytest.mark.parametrize("stage", [thorough(1), 3])
@on_ranks(4)
def test_whole_tensors_cost_one_parameter_on_any_number_of_ranks(stage: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(LARGE[1], LARGE[0]), nn.Linear(LARGE[0], LARGE[1], bias=False))
    engine = engine_of(model, stage, ADAMW)
    engine.backward(engine(torch.ones(1, LARGE[1])).sum())
    weight, value = engine.module[0].weight, torch.full(LARGE, 0.5)

    def call(name: str, *arguments: Any) -> None:
        first, meter = engine.ledger.sequence, Accountant()
        with track_activations(meter):
            getattr(utils, name)(weight, *arguments)
        sent = sum(record.sent for record in engine.ledger.records(since=first))
        # Each rank sends its values to those that add them up, and what it has added up to all: 3/4 each.
        assert sent <= (0.01 if "set" in name else 1.51) * value.nbytes, name
        assert meter.peak_total <= 2.6 * value.nbytes, name

    call("safe_get_full_grad")
    call("safe_set_full_grad", value)
    engine.step()
    engine.sharded.finish_gathers()
    call("safe_get_full_fp32_param")
    call("safe_set_full_fp32_param", value)
    call("safe_get_full_optimizer_state", "exp_avg")
    call("safe_set_full_optimizer_state", value, "exp_avg")
    assert torch.equal(utils.safe_get_full_fp32_param(weight), value)


@pytest.mark.parametrize("stage", [0, 2])
@on_ranks(2)
def test_changes_of_others_are_kept(stage: int) -> None:
    """Setting one parameter leaves what the script has changed in another of the same unit."""
    engine = engine_of(nn.Linear(3, 5), stage, ADAMW)
    weight, bias = engine.module.weight, engine.module.bias
    with torch.no_grad():
        bias.fill_(7.0)
    utils.safe_set_full_fp32_param(weight, torch.full((5, 3), 2.0))
    assert bool((utils.safe_get_full_fp32_param(bias) == 7).all() and (bias == 7).all() and (weight == 2).all())


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_autograd_and_readers_notice_a_new_value(stage: int) -> None:
    engine = engine_of(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), stage, ADAMW)
    loss, version = engine(torch.ones(2, 3, requires_grad=True)).square().sum(), engine.sharded.values_version
    utils.safe_set_full_fp32_param(engine.module[1].weight, torch.full((2, 5), 2.0))
    assert engine.sharded.values_version > version  # copies for generation are made anew
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(loss)
