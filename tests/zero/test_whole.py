"""Units that stay gathered at stage 3: which ones, what they send, and that nothing else can be told from it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.errors import ReleasedParameterError
from shardwise.memory import Category
from shardwise.utils import safe_set_full_fp32_param
from shardwise.zero.units.peaks import Orders, best_whole, gathered_together
from shardwise.zero.units.released import is_released
from tests.harness import run_ranks
from tests.harness.training import (
    Setting,
    assert_identical,
    parameters_digest,
    resumed,
    start,
    take_steps,
    trained,
)
from tests.models import CASES

MIXED = Setting(stage=3, cap=50, keep=25)
"""Nearly every parameter is a unit; the smaller ones stay gathered."""


# -- the choice --------------------------------------------------------------------------------------------------------


def choose(sizes: list[int], world: int, back: list[int] | None = None, ahead: int | None = 0) -> list[int]:
    whole = dict(enumerate(sizes))
    orders = (list(whole), back or list(whole)[::-1])
    return sorted(best_whole(orders, whole, {i: size // world for i, size in whole.items()}, whole, ahead))


def test_what_saves_nothing_stays_whole() -> None:
    assert choose([8] * 4, 2) == [0, 1, 2, 3]  # half of it in shards, half of it gathered: all of it
    assert choose([8] * 5, 2) == []
    assert choose([8] * 3, 4) == []
    assert choose([8] * 3, 2, ahead=None) == []  # one at a time is gathered
    assert choose([64], 8) == [0]


def test_a_tied_embedding_is_whole_at_the_peak_in_any_case() -> None:
    sizes = [64, *[4] * 20]
    back = [0, *range(20, 0, -1)]
    for world in (2, 8, 64):
        assert choose(sizes, world, back) == [0]
    assert choose([10, 12, 12, 12, 12, 12], 2, [0, 5, 4, 3, 2, 1]) == [0]  # also if it is not the largest unit
    assert choose(sizes, 64) == []  # needed once in a pass it is not


def peak(
    kept: Collection[int], orders: Orders, sizes: dict[int, int], shards: dict[int, int], ahead: int | None
) -> int:
    sets = gathered_together(orders, sizes.keys() - set(kept), sizes, ahead)
    most = max((sum(sizes[i] for i in (*around, *coming)) for around, coming in sets), default=0)
    return most + sum(size if i in kept else shards[i] for i, size in sizes.items())


def test_the_choice_is_never_worse_than_all_or_nothing() -> None:
    draw = random.Random(3)
    for _ in range(300):
        count, world = draw.randint(1, 8), draw.choice([2, 4, 8])
        sizes = {index: draw.choice([8, 16, 64, 128]) for index in range(count)}
        shards = {index: size // world for index, size in sizes.items()}
        back = list(sizes)[::-1]
        for _ in range(draw.randint(0, 2)):
            back.insert(0, back.pop(draw.randrange(count)))
        orders, ahead = (list(sizes), back), draw.choice([None, 0, 64])
        chosen = best_whole(orders, sizes, shards, sizes, ahead)
        found = peak(chosen, orders, sizes, shards, ahead)
        assert found <= min(peak(kept, orders, sizes, shards, ahead) for kept in ((), sizes))
        # Nothing is released that saves nothing.
        for index in sizes.keys() - chosen:
            assert peak(chosen | {index}, orders, sizes, shards, ahead) > found


def built(keep: int | None, total: int | None = None) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": 3, "reduce_bucket_size": 50, "stage3_param_persistence_threshold": keep}
    if total is not None:
        zero["stage3_model_persistence_threshold"] = total
    engine = start(CASES["gpt"], Setting(extra=(("zero_optimization", zero),)))
    kept = [sum(t.numel for t in unit.tensors) for unit in engine.sharded.units if not unit.sharded]
    released = [sum(t.numel for t in unit.tensors) for unit in engine.sharded.units if unit.sharded]
    live = dict(engine.accountant.live)
    whole = sum(s.layout.numel for u in engine.sharded.units for s in u.sections if not u.sharded)
    shards = sum(s.layout.shard for u in engine.sharded.units for s in u.sections if u.sharded)
    assert live[Category.PARAMETERS] == 4 * (whole + shards) and live[Category.GATHERED] == 0
    engine.destroy()
    return {"kept": kept, "released": released}


def test_keys() -> None:
    none, small, budget, automatic = (run_ranks(built, 2, *keys)[0] for keys in ((0,), (25,), (10**6, 100), (None,)))
    assert not none["kept"] and none["released"]
    assert sorted(small["kept"])[-1] == 31 * 12 and 0 < sorted(small["kept"])[-2] <= 25  # the tied one as well
    assert 50 < sum(budget["kept"]) - 31 * 12 <= 100
    # Tied to the head, it is needed first and last.
    assert automatic["kept"] == [31 * 12] and automatic["released"]


# -- the same training -------------------------------------------------------------------------------------------------


def test_bits_do_not_depend_on_what_stays_whole() -> None:
    base = Setting(stage=3, cap=50, optimizer="AdamW", lr=1e-2, clip=0.5, accumulation=2)
    settings = [
        base.with_stage(2),
        base.with_stage(3, keep=25),
        base.with_stage(3, keep=None),
        base.with_stage(3, keep=25, extra=(("strict_sync", True),)),
    ]
    first, *others = trained("gpt", settings, 2, 2)
    for setting, outcome in zip(settings[1:], others, strict=True):
        assert_identical(first, outcome, str(setting))


def traffic(setting: Setting) -> dict[str, Any]:
    engine = start(CASES["gpt"], setting)
    take_steps(engine, CASES["gpt"], range(2))
    engine.sharded.finish_gathers()
    first = engine.ledger.sequence
    take_steps(engine, CASES["gpt"], [2])
    during = Counter((r.op, r.label) for r in engine.ledger.records(since=first))
    engine.sharded.finish_gathers()
    units = engine.sharded.units
    found = {
        "calls": during,
        "kept": [unit.name for unit in units if not unit.sharded],
        "released": [unit.name for unit in units if unit.sharded],
        "first_back": next(units[i].name for i in engine.sharded.order[1] if units[i].sharded),
    }
    assert all(not is_released(p) for unit in units if not unit.sharded for p in unit.parameters)
    engine.destroy()
    return found


def test_a_kept_unit_is_gathered_once_a_step_and_reduced_as_before() -> None:
    setting = MIXED.with_stage(3, accumulation=3)
    for found in run_ranks(traffic, 2, setting):
        assert found["kept"] and found["released"]
        names = Counter(found["kept"] + found["released"])
        expected: Counter[tuple[str, str]] = Counter({("all_reduce", "gradient_norm"): 1})
        for name, count in names.items():
            expected["reduce_scatter", name] = 3 * count
        for name in found["kept"]:
            expected["all_gather", name] += 1
        for name in found["released"]:
            expected["all_gather", name] += 3 * 2
        expected["all_gather", found["first_back"]] -= 3
        assert found["calls"] == expected


# -- access and checkpoints --------------------------------------------------------------------------------------------


def changed(setting: Setting) -> str:
    """Change parameters in every way between steps."""
    engine = start(CASES["gpt"], setting)
    take_steps(engine, CASES["gpt"], [0])
    parameters = list(engine.module.parameters())
    with shardwise.zero.GatheredParameters(parameters[1:3], modifier_rank=1):
        if dist.get_rank() == 1:
            for parameter in parameters[1:3]:
                parameter.data.mul_(0.5)
    for parameter in parameters[3:6]:
        safe_set_full_fp32_param(parameter, torch.full(parameter.shape, 0.01))
    with engine.gathered():
        CASES["gpt"].loss(engine, CASES["gpt"].data(7, 0, 0, torch.float32))
    take_steps(engine, CASES["gpt"], [1])
    seen = parameters_digest(engine.module)
    engine.destroy()
    assert not any(is_released(parameter) for parameter in parameters)
    return seen


def test_access_and_destroy() -> None:
    answers = {
        run_ranks(changed, 2, MIXED.with_stage(stage, keep=keep))[0] for stage, keep in ((2, 0), (3, 25), (3, 0))
    }
    assert len(answers) == 1


def test_resuming_is_exact(tmp_path: Path) -> None:
    base = MIXED.with_stage(3, precision="bf16", optimizer="AdamW", lr=1e-2)
    for straight, again in run_ranks(resumed, 2, "gpt", base, base.with_stage(3, keep=0), str(tmp_path)):
        assert straight == again


def built_sharded(keep: int) -> str:
    torch.manual_seed(7)
    with shardwise.zero.Init():
        model = CASES["gpt"].make()
    engine = start(CASES["gpt"], MIXED.with_stage(3, keep=keep), model)
    take_steps(engine, CASES["gpt"], [0])
    seen = parameters_digest(engine.module)
    engine.destroy()
    return seen


def test_models_built_sharded() -> None:
    assert run_ranks(built_sharded, 2, 25) == run_ranks(built_sharded, 2, 0)


# -- the unit that waits for the backward pass -------------------------------------------------------------------------


def between_the_passes(what: str) -> tuple[str, int, str]:
    """Do something between forward and backward; return the bits after a step, and gathers of the waiting unit."""
    setting = Setting(stage=3)
    case = CASES["gpt"]
    engine = start(case, setting)
    take_steps(engine, CASES["gpt"], [0])
    waiting = engine.sharded.units[engine.sharded.order[1][0]]
    first = engine.ledger.sequence
    loss = case.loss(engine, case.data(1, 0, dist.get_rank(), torch.float32))
    told = ""
    assert is_released(waiting.parameters[0]) and engine.accountant.live[Category.GATHERED] == 4 * waiting.numel
    if what == "read":
        with pytest.raises(ReleasedParameterError) as error:
            waiting.parameters[0].sum()
        told = str(error.value)
    if what == "gather":
        with shardwise.zero.GatheredParameters(waiting.parameters):
            assert bool(waiting.parameters[0].isfinite().all())
        assert engine.accountant.live[Category.GATHERED] == 0
    if what == "another forward":
        with torch.no_grad():
            case.loss(engine, case.data(2, 0, dist.get_rank(), torch.float32))
    if what == "one rank releases" and dist.get_rank() == 1:
        engine.empty_partition_cache()
        assert engine.accountant.live[Category.GATHERED] == 0
    engine.backward(loss)
    engine.step()
    engine.sharded.finish_gathers()
    gathers = sum(r.op == "all_gather" and r.label == waiting.name for r in engine.ledger.records(since=first))
    assert engine.accountant.live[Category.GATHERED] == 0
    seen = parameters_digest(engine.module)
    engine.destroy()
    return seen, gathers, told


@pytest.mark.parametrize(
    ("what", "gathers"),
    [("gather", 3), ("one rank releases", 1)],
)
def test_what_comes_between_forward_and_backward(what: str, gathers: int) -> None:
    plain = run_ranks(between_the_passes, 2, "")[0]
    assert plain[1] == 1
    for seen, count, told in run_ranks(between_the_passes, 2, what):
        assert (seen, count) == (plain[0], gathers)
        assert bool(told) == (what == "read")
