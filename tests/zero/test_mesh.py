"""Groups of ranks that have everything among them: HSDP, MiCS, and optimizer state divided over all of them.

Sums are formed within a group first, so all rows of the plan on one mesh have the same bits; they are compared with a
plain loop. Traffic within and between groups is counted.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise
from shardwise.checkpoint import Checkpoint
from shardwise.errors import ConfigError, ConflictError, UsageError
from shardwise.optim import OnebitAdam
from shardwise.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from tests.harness import of_all_ranks, on_ranks, run_ranks, thorough
from tests.harness.training import (
    SGD,
    Outcome,
    Setting,
    Tensors,
    assert_identical,
    assert_no_worse,
    bits,
    digest,
    each,
    engine_of,
    gradients,
    make_optimizer,
    masters,
    parameters_digest,
    plain,
    resumes,
    start,
    take_steps,
    trained,
)
from tests.models import CASES

Zero = tuple[tuple[str, Any], ...]

PAIRS: Zero = (("mics_shard_size", 2),)
SPREAD: Zero = (*PAIRS, ("optimizer_over_replicas", True))
LEVELS: Zero = (("mics_shard_size", 4), ("mics_hierarchical_params_gather", True), ("zero_node_size", 2))
LEVELS_SPREAD: Zero = (*LEVELS, ("optimizer_over_replicas", True))
ALONE: Zero = (("mics_shard_size", 1),)
CODES = ("zero_quantized_weights", True)
WORLD = 4


# -- the same numbers --------------------------------------------------------------------------------------------------


ROWS = ((0, PAIRS), (1, SPREAD), (2, PAIRS), (2, SPREAD), (3, PAIRS), (3, SPREAD))
IN_LEVELS = ((0, LEVELS), (1, LEVELS_SPREAD), (2, LEVELS), (2, LEVELS_SPREAD), (3, LEVELS), (3, LEVELS_SPREAD))
ADAMW = Setting(clip=1.0, optimizer="AdamW", lr=1e-2)
HALF = Setting(accumulation=2, clip=0.5)


@pytest.mark.parametrize(
    ("name", "world", "rows", "base"),
    [
        thorough("gpt", WORLD, ROWS, ADAMW),
        thorough("gpt", WORLD, ROWS, replace(ADAMW, accumulation=3)),
        ("gpt", WORLD, (ROWS[0], ROWS[5]), replace(ADAMW, precision="bf16")),
        thorough("gpt", WORLD, ROWS, replace(ADAMW, accumulation=2, precision="bf16")),
        thorough("gpt", WORLD, ROWS, replace(ADAMW, accumulation=3, precision="fp16")),
        # Two groups of two nodes of two: gathers and reductions are chains.
        thorough("gpt", 8, IN_LEVELS, ADAMW),
        thorough("gpt", 8, IN_LEVELS, replace(ADAMW, accumulation=2)),
        # One rank a group is a replica each: nothing is divided, unless optimizer state is.
        ("gpt", 2, ((3, ALONE), (3, (*ALONE, ("optimizer_over_replicas", True))), (0, ())), ADAMW),
        # Shared, frozen and unused parameters, branches that differ between ranks, units that are needed once more.
        ("mixed_types", WORLD, ((1, SPREAD), (0, PAIRS), (3, PAIRS), (3, SPREAD)), replace(HALF, optimizer="momentum")),
        ("router", 8, ((3, LEVELS_SPREAD),), HALF),
        thorough("router", 8, ((3, LEVELS), (2, LEVELS_SPREAD)), HALF),
    ],
)
def test_rows_of_one_mesh_have_the_same_bits(
    name: str, world: int, rows: tuple[tuple[int, Zero], ...], base: Setting
) -> None:
    settings = [base.with_stage(stage, zero=zero) for stage, zero in rows]
    outcomes = trained(name, settings, world, 2)
    families: dict[bool, Outcome] = {}
    for setting, outcome in zip(settings, outcomes, strict=True):
        # Stages 0 and 1 add micro-batches up before ranks, stages 2 and 3 afterwards.
        first = families.setdefault(setting.accumulation > 1 and setting.stage >= 2, outcome)
        assert_identical(outcome, first, f"{setting}")
    if base.precision == "fp32":
        loop, exact = (plain(CASES[name], base, world, 2, wide=wide) for wide in (False, True))
        for outcome in outcomes[-1:] if world == 8 else families.values():
            assert_no_worse(outcome.masters, loop.masters, exact.masters)


@on_ranks(WORLD)
def test_a_clients_mesh_is_that_of_the_configuration() -> None:
    found = set()
    setting = Setting(3, optimizer="AdamW", lr=1e-2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    for zero, given in ((PAIRS, None), ((), mesh)):
        model = CASES["gpt"].make()
        config = setting.with_stage(3, zero=zero).config()
        optimizer = make_optimizer("AdamW", model.parameters(), 1e-2)
        engine = shardwise.initialize(model=model, optimizer=optimizer, config=config, mesh=given)[0]
        take_steps(engine, CASES["gpt"], range(3))
        assert {record.group for record in engine.ledger.records()} >= {"shard", "replicate"}
        found |= set(of_all_ranks(bits(engine)))
        engine.destroy()
    assert len(found) == 1


# -- traffic and memory ------------------------------------------------------------------------------------------------


def sent(zero: Zero, stage: int, accumulation: int) -> dict[str, dict[str, float]]:
    """Return, by group and kind of collective, what the second step sends on this rank, in parameters' bytes."""
    case = CASES["gpt"]
    engine = start(case, Setting(stage, accumulation=accumulation, optimizer="AdamW", precision="bf16", zero=zero))
    take_steps(engine, case, [0])
    engine.sharded.finish_gathers()
    begin = engine.ledger.sequence
    take_steps(engine, case, [1])
    engine.sharded.finish_gathers()
    numel = sum(unit.numel for unit in engine.sharded.units)
    found: dict[str, dict[str, float]] = {}
    for record in engine.ledger.records(begin):
        if record.op != "all_reduce":
            ops = found.setdefault(record.group, {})
            ops[record.op] = ops.get(record.op, 0.0) + record.sent / (2 * numel)
    return found


SUMS = 2 * 0.5 * 0.5  # half of the shard, in fp32
BOTH, UPDATED = {"reduce_scatter": SUMS, "all_gather": SUMS}, {"reduce_scatter": SUMS, "all_gather": 0.25}


@pytest.mark.parametrize(
    ("zero", "stage", "accumulation", "expected"),
    [
        (PAIRS, 3, 1, {"shard": {"all_gather": 1.0, "reduce_scatter": 0.5}, "replicate": BOTH}),
        (SPREAD, 3, 2, {"shard": {"all_gather": 2.0, "reduce_scatter": 1.0}, "replicate": UPDATED}),
        (PAIRS, 2, 2, {"shard": {"all_gather": 0.5, "reduce_scatter": 1.0}, "replicate": BOTH}),
        thorough((), 3, 3, {"data_parallel": {"all_gather": 4.5, "reduce_scatter": 2.25}}),
        thorough(SPREAD, 2, 3, {"shard": {"all_gather": 0.5, "reduce_scatter": 1.5}, "replicate": UPDATED}),
    ],
)
def test_what_is_sent_within_and_between_groups(
    zero: Zero, stage: int, accumulation: int, expected: dict[str, dict[str, float]]
) -> None:
    """Two groups of two ranks, bf16 parameters and gradients, fp32 sums; in bytes of all bf16 parameters.

    Within a group: two gathers a micro-batch at stage 3 and a reduction, half of the model each. Between groups: half a
    shard of fp32 sums and, to bring gradients back, another (HSDP); with divided optimizer state the updated bf16
    parameters instead.
    """
    for found in run_ranks(sent, WORLD, zero, stage, accumulation):
        assert {g: set(ops) for g, ops in found.items()} == {g: set(ops) for g, ops in expected.items()}
        for group, ops in expected.items():
            for op, size in ops.items():
                # The unit that a backward pass begins with is kept from the forward pass before.
                low = 0.75 if stage == 3 and op == "all_gather" and group != "replicate" else 0.99
                assert low * size <= found[group][op] <= 1.01 * size, (group, op, found)


@on_ranks(WORLD)
def test_shards_of_real_size() -> None:
    """One layer of which each rank has a shard of 9 MiB, which chains carry between groups."""
    found = set()
    for zero in (PAIRS, SPREAD):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4096, 128 * 9, bias=False), nn.Linear(128 * 9, 1, bias=False))
        engine = engine_of(model, 3, SGD, zero=dict(zero))
        engine.backward(engine(torch.full((1, 4096), 1.0 + dist.get_rank()) / 4096).sum())
        engine.step()
        assert max(section.shard.nbytes for unit in engine.sharded.units for section in unit.sections) >= 9 << 20
        found |= set(of_all_ranks(parameters_digest(engine.module)))
        engine.destroy()
    assert len(found) == 1


# -- what else engines do ----------------------------------------------------------------------------------------------


def backward(engine: Any, step: int, micro: int = 0) -> None:
    case = CASES["gpt"]
    engine.backward(case.loss(engine, case.data(step, micro, dist.get_rank(), torch.float32)))


def changed(zero: Zero, stage: int) -> str:
    """Set a gradient at a boundary, and values and state after the step; read gradients in windows on the way."""
    engine = start(CASES["gpt"], Setting(stage, accumulation=2, optimizer="AdamW", lr=1e-2, zero=zero))
    module = engine.module
    weight, seen = module.get_parameter("blocks.1.up.weight"), ""
    for step in range(2):
        for micro in range(2):
            backward(engine, step, micro)
            seen += digest(list(gradients(module).values()))
            if micro == 1:
                safe_set_full_grad(weight, 2 * safe_get_full_grad(weight))
            else:
                with pytest.raises(UsageError, match="not reduced yet"):
                    safe_set_full_grad(weight, torch.zeros_like(weight))
            engine.step()
        value = safe_get_full_fp32_param(weight)
        safe_set_full_fp32_param(weight, value + 1)
        safe_set_full_optimizer_state(weight, safe_get_full_optimizer_state(weight, "exp_avg") / 2, "exp_avg")
        with shardwise.zero.GatheredParameters(weight):
            assert torch.equal(weight, value + 1)
        with shardwise.zero.GatheredParameters(module.blocks[0].up.weight, modifier_rank=1), torch.no_grad():
            module.blocks[0].up.weight.fill_(float(dist.get_rank()))
    seen += bits(engine)
    return seen


def test_single_tensors_are_set_on_all_replicas() -> None:
    answers = run_ranks(each, WORLD, changed, [(PAIRS, 2), (SPREAD, 3)])
    assert len({found for answer in answers for found in answer}) == 1


def windows(zero: Zero, stage: int, counts: tuple[int, ...], late: bool) -> str:
    """Windows whose boundary is said before the last backward pass, or behind it."""
    engine = start(CASES["gpt"], Setting(stage, accumulation=2, optimizer="AdamW", lr=1e-2, zero=zero))
    for step, count in enumerate(counts):
        for micro in range(count):
            engine.set_gradient_accumulation_boundary(micro == count - 1 and not late)
            backward(engine, step, micro)
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
    return bits(engine)


@pytest.mark.parametrize("other", [(SPREAD, 2, (3, 1), True), thorough((PAIRS, 2, (3, 1), False))], ids=str)
def test_boundaries_by_hand(other: Any) -> None:
    answers = run_ranks(each, WORLD, windows, [(SPREAD, 3, (3, 1), False), other])
    assert len({found for answer in answers for found in answer}) == 1


def trained_bits(setting: Setting) -> str:
    engine = start(CASES["gpt"], setting)
    take_steps(engine, CASES["gpt"], range(2))
    return bits(engine)


@pytest.mark.parametrize(
    ("setting", "rows"),
    [
        (Setting(accumulation=2, clip=1.0, optimizer="Lamb", lr=1e-2), ((2, PAIRS), (3, SPREAD))),
        (Setting(accumulation=2, clip=1.0, optimizer="Muon", lr=1e-2), ((2, PAIRS), (3, SPREAD))),
        (Setting(), ((3, (*PAIRS, CODES)), (3, (*SPREAD, CODES)))),
    ],
    ids=["norms of tensors", "whole tensors", "gathers of codes"],
)
def test_what_needs_more_than_elements(setting: Setting, rows: tuple[tuple[int, Zero], ...]) -> None:
    cases = [(setting.with_stage(stage, zero=zero),) for stage, zero in rows]
    for answer in run_ranks(each, WORLD, trained_bits, cases):
        assert len(set(answer)) == 1


def passed_on(path: str, zero: Zero, stage: int, source: str | None = None) -> str:
    """Train, or load what others have saved; save."""
    engine = start(CASES["gpt"], Setting(stage, optimizer="AdamW", lr=1e-2, precision="bf16", zero=zero))
    if source is None:
        take_steps(engine, CASES["gpt"], range(2))
    else:
        engine.load_checkpoint(source, tag="a")
    engine.save_checkpoint(path, tag="a")
    return bits(engine)


def content(path: str) -> Tensors:
    """Every tensor of a checkpoint, of which each element is stored once."""
    with Checkpoint(os.path.join(path, "a")) as files:
        tensors = [t for t in files.manifest.tensors if t.rank is None]
        for tensor in tensors:
            assert sum(part.stop - part.start for part in tensor.slices) == torch.Size(tensor.shape).numel()
        return {f"{t.kind} {t.name}": files.read(t) for t in tensors}


@pytest.mark.parametrize(
    "others", [((2, ()), (WORLD, LEVELS_SPREAD)), thorough(((WORLD, PAIRS), (8, LEVELS_SPREAD)))], ids=["few", "more"]
)
def test_a_checkpoint_fits_every_layout(tmp_path: Path, others: tuple[tuple[int, Zero], ...]) -> None:
    """Each tensor is saved once; other meshes, stages and numbers of ranks load the same bits."""
    one = str(tmp_path / "one")
    kept = run_ranks(passed_on, WORLD, one, SPREAD, 2)
    assert len(set(kept)) == 1
    tensors = content(one)
    for number, (world, layout) in enumerate(others):
        target = str(tmp_path / str(number))
        assert set(run_ranks(passed_on, world, target, layout, 3, one)) == set(kept), (world, layout)
        again = content(target)
        assert again.keys() == tensors.keys()
        assert all(torch.equal(again[name], value) for name, value in tensors.items())


def test_resuming_is_exact(tmp_path: Path) -> None:
    setting = Setting(3, accumulation=2, optimizer="AdamW", lr=1e-2, zero=SPREAD)
    run_ranks(resumes, WORLD, "gpt", setting, setting, str(tmp_path))


# -- leaving, and part of the ranks ------------------------------------------------------------------------------------


@on_ranks(WORLD)
def test_engines_leave_no_sockets_and_no_threads() -> None:
    def held() -> tuple[int, int, list[str]]:
        threads = sorted(thread.name for thread in threading.enumerate())
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), threads

    found = []
    for stage, zero in 2 * [(2, SPREAD), (3, LEVELS)]:
        engine = start(CASES["gpt"], Setting(stage, zero=zero))
        take_steps(engine, CASES["gpt"], [0])
        engine.destroy()
        del engine
        if zero is LEVELS:
            # The watchdog of an engine that an earlier test has left runs again after each of these.
            found.append(held())
    first, deadline = found[0], time.monotonic() + 10
    while any(now > before for now, before in zip(held(), first[:2], strict=False)) and time.monotonic() < deadline:
        time.sleep(0.01)  # Gloo ends its threads a little later
    files, tasks, threads = last = held()
    assert files <= first[0] and tasks <= first[1] and threads == first[2], (first, last)


@on_ranks(8)
def test_groups_in_half_of_the_ranks() -> None:
    """Two engines of four ranks in a job of eight, in groups of the configuration and of a mesh."""
    half = dist.get_rank() // 4
    group = [dist.new_group(list(range(4))), dist.new_group(list(range(4, 8)))][half]
    mpu = SimpleNamespace(get_data_parallel_group=lambda: group)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pipe", "replicate", "shard"))["replicate", "shard"]
    found = set()
    for zero, given in ((SPREAD, None), ((("optimizer_over_replicas", True),), mesh)):
        model = CASES["gpt"].make()
        engine, *_ = shardwise.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            config=Setting(3, zero=zero).config(),
            mpu=mpu,
            mesh=given,
        )
        take_steps(engine, CASES["gpt"], [0], rank=dist.get_rank() % 4)
        with shardwise.zero.GatheredParameters(model.norm.weight, modifier_rank=4 * half + 3), torch.no_grad():
            model.norm.weight.fill_(float(dist.get_rank() % 4))
        found |= set(of_all_ranks(digest(list(masters(model).values()))))
        engine.destroy()
    assert len(found) == 1


# -- what is refused ---------------------------------------------------------------------------------------------------


@on_ranks(WORLD)
def test_meshes_that_cannot_be() -> None:
    groups = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    refused: list[tuple[Any, dict[str, Any], str]] = [
        ((2, 3), {}, r"2 x 3 ranks.*the number of ranks is 4"),
        (init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")), {}, r"\('pp', 'dp'\)"),
        (DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("replicate", "shard")), {}, r"ascend.*\[3, 2\]"),
        (groups, {"mics_shard_size": 4}, "mics_shard_size over 4"),
        (groups, {"zero_hpz_partition_size": 2}, "zero_hpz_partition_size"),
        (groups, {**dict(LEVELS), "mics_shard_size": 2, "zero_node_size": 1}, "mics_hierarchical_params_gather"),
        (groups["shard"], {}, r"the engine has ranks \[0, 1, 2, 3\]"),
    ]
    for mesh, zero, words in refused:
        with pytest.raises((UsageError, ConfigError), match=f"(?s){words}"):
            config = {"train_batch_size": 4, "optimizer": SGD, "zero_optimization": {"stage": 3, **zero}}
            shardwise.initialize(model=nn.Linear(4, 4), config=config, mesh=mesh)
    model = nn.Linear(4, 4)
    with pytest.raises(ConflictError, match="OnebitAdam"):
        optimizer = OnebitAdam(model.parameters(), lr=1e-3)
        shardwise.initialize(model=model, optimizer=optimizer, config={"train_batch_size": 4}, mesh=groups)
