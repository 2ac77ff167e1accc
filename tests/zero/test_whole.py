"""Units that stay gathered at stage 3: which ones, what they send, and that nothing else can be told from it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.memory import Category
from shardwise.zero.units.released import is_released
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.training import (
    Setting,
    assert_identical,
    parameters_digest,
    resumes,
    start,
    take_steps,
    trained,
)
from tests.models import CASES

MIXED = Setting(stage=3, cap=50, keep=25)
"""Nearly every parameter is a unit; the smaller ones stay gathered."""


# -- the choice --------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_keys() -> None:
    def built(keep: int | None, total: int | None = None) -> tuple[list[int], list[int]]:
        """Return sizes of the units that stay gathered, and of the others."""
        zero: dict[str, Any] = {"stage": 3, "reduce_bucket_size": 50, "stage3_param_persistence_threshold": keep}
        if total is not None:
            zero["stage3_model_persistence_threshold"] = total
        engine = start(CASES["gpt"], Setting(extra=(("zero_optimization", zero),)))
        units, live = engine.sharded.units, dict(engine.accountant.live)
        held = sum(s.layout.shard if u.sharded else s.layout.numel for u in units for s in u.sections)
        assert live[Category.PARAMETERS] == 4 * held and live[Category.GATHERED] == 0
        kept, released = ([sum(t.numel for t in u.tensors) for u in units if u.sharded is how] for how in (False, True))
        engine.destroy()
        return sorted(kept), released

    kept, released = built(0)
    assert not kept and released
    (*_, second, tied), _ = built(25)
    assert tied == 31 * 12 and 0 < second <= 25  # the tied one as well
    assert 50 < sum(built(10**6, 100)[0]) - 31 * 12 <= 100
    kept, released = built(None)
    assert kept == [31 * 12] and released  # tied to the head, it is needed first and last


# -- the same training -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ways",
    [({"keep": None}, {"keep": 25, "extra": (("strict_sync", True),)}), thorough(({"keep": 25},))],
    ids=["strict", "not"],
)
def test_bits_do_not_depend_on_what_stays_whole(ways: tuple[dict[str, Any], ...]) -> None:
    base = Setting(stage=3, cap=50, optimizer="AdamW", lr=1e-2, clip=0.5, accumulation=2)
    first, *others = trained("gpt", [base.with_stage(2), *(base.with_stage(3, **way) for way in ways)], 2, 2)
    for way, outcome in zip(ways, others, strict=True):
        assert_identical(first, outcome, str(way))


@on_ranks(2)
def test_a_kept_unit_is_gathered_once_a_step_and_reduced_as_before() -> None:
    engine = start(CASES["gpt"], MIXED.with_stage(3, accumulation=3))
    take_steps(engine, CASES["gpt"], range(2))
    engine.sharded.finish_gathers()
    first = engine.ledger.sequence
    take_steps(engine, CASES["gpt"], [2])
    found = Counter((r.op, r.label) for r in engine.ledger.records(since=first))
    engine.sharded.finish_gathers()
    units = engine.sharded.units
    expected: Counter[tuple[str, str]] = Counter({("all_reduce", "gradient_norm"): 1})
    for unit in units:
        expected["reduce_scatter", unit.name] += 3
        expected["all_gather", unit.name] += 3 * 2 if unit.sharded else 1
    # The unit that the backward pass needs first waits for it since the forward pass.
    expected["all_gather", next(units[i].name for i in engine.sharded.order[1] if units[i].sharded)] -= 3
    assert found == expected and {unit.sharded for unit in units} == {True, False}
    assert all(not is_released(p) for unit in units if not unit.sharded for p in unit.parameters)


# -- access and checkpoints --------------------------------------------------------------------------------------------


def test_resuming_is_exact(tmp_path: Path) -> None:
    base = MIXED.with_stage(3, precision="bf16", optimizer="AdamW", lr=1e-2)
    run_ranks(resumes, 2, "gpt", base, base.with_stage(3, keep=0), str(tmp_path))


# -- the unit that waits for the backward pass -------------------------------------------------------------------------


@pytest.mark.parametrize(("what", "gathers"), [thorough("nothing", 1), ("gather", 3), ("one rank releases", 1)])
@on_ranks(2)
def test_what_comes_between_forward_and_backward(what: str, gathers: int) -> None:
    case = CASES["gpt"]
    digests = []
    for between in ("nothing", what):
        engine = start(case, Setting(stage=3))
        take_steps(engine, case, [0])
        waiting = engine.sharded.units[engine.sharded.order[1][0]]
        first = engine.ledger.sequence
        loss = case.loss(engine, case.data(1, 0, dist.get_rank(), torch.float32))
        assert is_released(waiting.parameters[0]) and engine.accountant.live[Category.GATHERED] == 4 * waiting.numel
        if between == "gather":
            with shardwise.zero.GatheredParameters(waiting.parameters):
                assert bool(waiting.parameters[0].isfinite().all())
            assert engine.accountant.live[Category.GATHERED] == 0
        if between == "one rank releases" and dist.get_rank() == 1:
            engine.empty_partition_cache()
            assert engine.accountant.live[Category.GATHERED] == 0
        engine.backward(loss)
        engine.step()
        engine.sharded.finish_gathers()
        records = engine.ledger.records(since=first)
        found = sum(record.op == "all_gather" and record.label == waiting.name for record in records)
        assert engine.accountant.live[Category.GATHERED] == 0
        digests.append(parameters_digest(engine.module))
        engine.destroy()
    assert found == gathers and digests[0] == digests[1]
