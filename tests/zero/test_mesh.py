"""Groups of ranks that have everything among them: HSDP, MiCS, and optimizer state divided over all of them.

Sums are formed within a group first, so all rows of the plan on one mesh have the same bits; they are compared with a
plain loop, and with FSDP2 on the same mesh. Traffic within and between groups is counted.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise
from shardwise.checkpoint import Checkpoint
from shardwise.comm.domain import Arrangement
from shardwise.errors import ConfigError, UsageError
from shardwise.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.training import (
    SGD,
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
    resumed,
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
WORLD = 4


# -- the grid ----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
def test_ranges_contain_those_of_finer_levels(within: int, across: int, replicas: int) -> None:
    world = within * across * replicas
    grid = Arrangement.of_groups(world, within * across, within)
    assert sorted(grid.order) == list(range(world))
    for dimension, size in enumerate(grid.sizes):
        lines = grid.lines(dimension)
        assert sorted(itertools.chain(*lines)) == list(range(world))
        assert all(len(line) == size and line == sorted(line) for line in lines)
    if within > 1:  # neighbours, and what they have is consecutive
        assert grid.lines(0)[0] == list(range(within))
    places = {rank: place for place, rank in enumerate(grid.order)}
    # Ranks of a line of the outermost dimension have places next to one another: one range at the level above.
    for line in grid.lines(len(grid.sizes) - 1):
        assert sorted(places[rank] for rank in line) == list(range(min(map(places.get, line)), places[line[-1]] + 1))  # type: ignore[type-var]


# -- the same numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accumulation", "precision"),
    [thorough(1, "fp32"), thorough(3, "fp32"), (2, "bf16"), thorough(3, "fp16")],
)
def test_rows_of_one_mesh_have_the_same_bits(precision: str, accumulation: int) -> None:
    settings = [
        Setting(stage, accumulation=accumulation, precision=precision, clip=1.0, optimizer="AdamW", lr=1e-2, zero=zero)
        for stage, zero in ((0, PAIRS), (1, SPREAD), (2, PAIRS), (2, SPREAD), (3, PAIRS), (3, SPREAD))
    ]
    outcomes = trained("gpt", settings, WORLD, 2)
    first = dict(zip(settings, outcomes, strict=True))
    for setting, outcome in first.items():
        # Stages 0 and 1 add micro-batches up before ranks, stages 2 and 3 afterwards.
        like = replace(setting, stage=0 if setting.stage < 2 or accumulation == 1 else 2, zero=PAIRS)
        assert_identical(outcome, first[like], f"{setting}")
    if precision == "fp32":
        loop, exact = (plain(CASES["gpt"], settings[0], WORLD, 2, wide=wide) for wide in (False, True))
        for outcome in outcomes:
            assert_no_worse(outcome.masters, loop.masters, exact.masters)


@pytest.mark.thorough
def test_three_levels_have_the_same_bits() -> None:
    """Two groups of two nodes of two: gathers and reductions are chains."""
    settings = [
        Setting(stage, accumulation=accumulation, optimizer="AdamW", lr=1e-2, clip=1.0, zero=zero)
        for accumulation in (1, 2)
        for stage, zero in [
            (0, LEVELS),
            (1, LEVELS_SPREAD),
            (2, LEVELS),
            (2, LEVELS_SPREAD),
            (3, LEVELS),
            (3, LEVELS_SPREAD),
        ]
    ]
    outcomes = trained("gpt", settings, 8)
    for outcome in outcomes[1:6]:
        assert_identical(outcome, outcomes[0])
    assert_identical(outcomes[7], outcomes[6])
    for outcome in outcomes[9:]:
        assert_identical(outcome, outcomes[8])
    case = CASES["gpt"]
    for setting, outcome in ((settings[0], outcomes[0]), (settings[-1], outcomes[-1])):
        loop, exact = plain(case, setting, 8), plain(case, setting, 8, wide=True)
        assert_no_worse(outcome.masters, loop.masters, exact.masters)


def test_models_that_are_not_regular() -> None:
    """Shared, frozen and unused parameters, data-dependent branches, units that are needed once more."""
    settings = [
        Setting(stage, accumulation=2, optimizer="momentum", clip=0.5, zero=zero)
        for stage, zero in [(1, SPREAD), (0, PAIRS), (3, PAIRS), (3, SPREAD)]
    ]
    outcomes = trained("mixed_types", settings, WORLD)
    assert_identical(outcomes[1], outcomes[0])
    for outcome in outcomes[3:]:
        assert_identical(outcome, outcomes[2])
    case = CASES["mixed_types"]
    loop, exact = (plain(case, settings[0], WORLD, wide=wide) for wide in (False, True))
    for outcome in outcomes:
        assert_no_worse(outcome.masters, loop.masters, exact.masters)


def test_branches_that_differ_between_ranks_under_chains() -> None:
    settings = [
        Setting(stage, accumulation=2, clip=0.5, zero=zero) for stage, zero in [(3, LEVELS), (2, LEVELS_SPREAD)]
    ]
    outcomes = trained("router", settings, 8, 2)
    assert_identical(outcomes[1], outcomes[0], "router")


def test_one_rank_a_group_is_a_replica_each() -> None:
    """Nothing is divided, unless optimizer state is: stage 1."""
    settings = [
        Setting(3, optimizer="AdamW", zero=ALONE),
        Setting(3, optimizer="AdamW", zero=(*ALONE, ("optimizer_over_replicas", True))),
        Setting(0, optimizer="AdamW"),
    ]
    outcomes = trained("gpt", settings, 2)
    for outcome in outcomes[1:]:
        assert_identical(outcome, outcomes[0])


def fsdp2(model: nn.Module, optimizer: str, steps: int) -> Tensors:
    """Train with PyTorch's own HSDP on the same mesh and data."""
    from torch.distributed.fsdp import fully_shard

    case = CASES["gpt"]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    stepped = make_optimizer(optimizer, model.parameters(), 1e-2)
    for step in range(steps):
        loss = case.loss(model, case.data(step, 0, dist.get_rank(), torch.float32))
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        stepped.step()
        stepped.zero_grad()
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}


def beside_fsdp2() -> tuple[Tensors, Tensors]:
    case, steps = CASES["gpt"], 3
    theirs = fsdp2(case.make(), "AdamW", steps)
    model = case.make()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    engine = shardwise.initialize(
        model=model,
        optimizer=make_optimizer("AdamW", model.parameters(), 1e-2),
        config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}},
        mesh=mesh,
    )[0]
    take_steps(engine, case, range(steps))
    found = masters(engine.module)
    engine.destroy()
    return found, theirs


def test_a_clients_mesh_trains_like_fsdp2_on_it() -> None:
    found, theirs = run_ranks(beside_fsdp2, WORLD)[0]
    assert found.keys() == theirs.keys()
    case = CASES["gpt"]
    setting = Setting(optimizer="AdamW", lr=1e-2)
    exact = plain(case, setting, WORLD, wide=True)
    assert_no_worse(found, theirs, exact.masters)


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
    engine.destroy()
    return found


def test_what_is_sent_within_and_between_groups() -> None:
    """Two groups of two ranks, bf16 parameters and gradients, fp32 sums; in bytes of all bf16 parameters.

    Within a group: two gathers a micro-batch at stage 3 and a reduction, half of the model each. Between groups: half a
    shard of fp32 sums and, to bring gradients back, another (HSDP); with divided optimizer state the updated bf16
    parameters instead. ZeRO-3 over all ranks sends three quarters of the model for each of the three.
    """
    cases = [(PAIRS, 3, 1), (SPREAD, 3, 3), ((), 3, 3), (SPREAD, 2, 3), (PAIRS, 2, 3)]
    sums = 2 * 0.5 * 0.5  # half of the shard, in fp32
    both, updated = {"reduce_scatter": sums, "all_gather": sums}, {"reduce_scatter": sums, "all_gather": 0.25}
    expected: list[dict[str, dict[str, float]]] = [
        {"shard": {"all_gather": 1.0, "reduce_scatter": 0.5}, "replicate": both},
        {"shard": {"all_gather": 3.0, "reduce_scatter": 1.5}, "replicate": updated},
        {"data_parallel": {"all_gather": 4.5, "reduce_scatter": 2.25}},
        {"shard": {"all_gather": 0.5, "reduce_scatter": 1.5}, "replicate": updated},
        {"shard": {"all_gather": 0.5, "reduce_scatter": 1.5}, "replicate": both},
    ]
    for answer in run_ranks(each, WORLD, sent, cases):
        for case, found, wanted in zip(cases, answer, expected, strict=True):
            assert {g: set(ops) for g, ops in found.items()} == {g: set(ops) for g, ops in wanted.items()}, case
            for group, ops in wanted.items():
                for op, size in ops.items():
                    # The unit that a backward pass begins with is kept from the forward pass before.
                    low = 0.75 if case[1] == 3 and op == "all_gather" and group != "replicate" else 0.99
                    assert low * size <= found[group][op] <= 1.01 * size, (case, group, op, found)


def of_real_size(mib: int) -> tuple[str, str, int]:
    """One layer of which each rank has a shard of so many MiB, which chains carry between groups."""
    found = []
    for zero in (PAIRS, SPREAD):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4096, 128 * mib, bias=False), nn.Linear(128 * mib, 1, bias=False))
        engine = engine_of(model, 3, SGD, zero=dict(zero))
        x = torch.full((1, 4096), 1.0 + dist.get_rank()) / 4096
        engine.backward(engine(x).sum())
        engine.step()
        shard = max(section.shard.nbytes for unit in engine.sharded.units for section in unit.sections)
        found.append(parameters_digest(engine.module))
        engine.destroy()
    return found[0], found[1], shard


def test_shards_of_real_size() -> None:
    answers = run_ranks(of_real_size, WORLD, 9)
    assert all(answer == answers[0] for answer in answers)
    first, second, shard = answers[0]
    assert first == second and shard >= 9 << 20


# -- what else engines do ----------------------------------------------------------------------------------------------


def backward(engine: Any, step: int, micro: int = 0) -> None:
    case = CASES["gpt"]
    engine.backward(case.loss(engine, case.data(step, micro, dist.get_rank(), torch.float32)))


def accessed(zero: Zero, stage: int) -> list[Any]:
    """Whole values, gradients in the middle of a window, and what is set."""
    engine = start(CASES["gpt"], Setting(stage, accumulation=3, optimizer="AdamW", lr=1e-2, zero=zero))
    module = engine.module
    weight = module.get_parameter("blocks.1.up.weight")
    seen: list[Any] = []
    for step in range(2):
        for micro in range(3):
            backward(engine, step, micro)
            seen.append(digest(list(gradients(module).values())))
            if micro == 2 and step == 1:
                gradient = safe_get_full_grad(weight)
                assert gradient is not None
                safe_set_full_grad(weight, 2 * gradient)
                doubled = safe_get_full_grad(weight)
                assert doubled is not None and torch.equal(doubled, 2 * gradient)
            elif micro == 1:
                with pytest.raises(UsageError, match="not reduced yet") if stage else contextlib.nullcontext():
                    safe_set_full_grad(weight, torch.zeros_like(weight))
            engine.step()
    value, state = safe_get_full_fp32_param(weight), safe_get_full_optimizer_state(weight, "exp_avg")
    assert value is not None and state is not None
    seen.append(digest([value, state]))
    safe_set_full_fp32_param(weight, value + 1)
    safe_set_full_optimizer_state(weight, state / 2, "exp_avg")
    with shardwise.zero.GatheredParameters(weight, modifier_rank=None):
        assert torch.equal(weight, value + 1)
    with shardwise.zero.GatheredParameters(module.blocks[0].up.weight, modifier_rank=1), torch.no_grad():
        module.blocks[0].up.weight.fill_(float(dist.get_rank()))
    for micro in range(3):
        backward(engine, 7, micro)
        engine.step()
    halved = safe_get_full_optimizer_state(weight, "exp_avg")
    assert halved is not None
    seen.append(digest([halved, *masters(module).values()]))
    engine.destroy()
    return seen


def test_access_of_single_tensors() -> None:
    answers = run_ranks(each, WORLD, accessed, [(PAIRS, 2), (SPREAD, 3)])
    for answer in answers:
        assert answer == answers[0]
        assert all(seen == answer[0] for seen in answer)


def windows(zero: Zero, stage: int, how: str) -> str:
    """Boundaries that are said late, early, or by hand; windows that go on after their boundary."""
    engine = start(CASES["gpt"], Setting(stage, accumulation=2, optimizer="AdamW", lr=1e-2, zero=zero))
    for step in range(2):
        if how == "late":
            engine.set_gradient_accumulation_boundary(False)
            for micro in range(3):
                backward(engine, step, micro)
            engine.set_gradient_accumulation_boundary(True)
        elif how == "twice":
            for micro, last in ((0, False), (1, True), (2, True)):
                engine.set_gradient_accumulation_boundary(last)
                backward(engine, step, micro)
        else:
            for micro in range(3):
                engine.set_gradient_accumulation_boundary(micro == 2)
                backward(engine, step, micro)
        engine.step()
    found = digest(list(masters(engine.module).values()))
    engine.destroy()
    return found


def test_boundaries_by_hand() -> None:
    cases = [(PAIRS, 2, ""), (SPREAD, 2, "late"), (SPREAD, 3, "")]
    more = [(PAIRS, 2, "twice"), (SPREAD, 3, "twice")]
    for answer in run_ranks(each, WORLD, windows, [*cases, *more]):
        assert len(set(answer[: len(cases)])) == 1
        assert len(set(answer[len(cases) :])) == 1


def trained_bits(setting: Setting) -> str:
    engine = start(CASES["gpt"], setting)
    take_steps(engine, CASES["gpt"], range(2))
    found = bits(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("name", ["Lamb", "Muon"])
def test_optimizers_of_whole_tensors_and_of_their_norms(name: str) -> None:
    setting = Setting(accumulation=2, clip=1.0, optimizer=name, lr=1e-2)
    cases = [(setting.with_stage(stage, zero=zero),) for stage, zero in ((2, PAIRS), (3, SPREAD))]
    for answer in run_ranks(each, WORLD, trained_bits, cases):
        assert len(set(answer)) == 1


def test_gathers_of_codes_within_groups() -> None:
    codes = ("zero_quantized_weights", True)
    cases = [(Setting(3, zero=(*zero, codes)),) for zero in (PAIRS, SPREAD)]
    for first, second in run_ranks(each, WORLD, trained_bits, cases):
        assert first == second


def saved(path: str, zero: Zero, stage: int) -> str:
    engine = start(CASES["gpt"], Setting(stage, optimizer="AdamW", lr=1e-2, precision="bf16", zero=zero))
    take_steps(engine, CASES["gpt"], range(2))
    engine.save_checkpoint(path, tag="a")
    found = digest(list(masters(engine.module).values()))
    engine.destroy()
    return found


def loaded(path: str, zero: Zero, stage: int, target: str) -> str:
    engine = start(CASES["gpt"], Setting(stage, optimizer="AdamW", lr=1e-2, precision="bf16", zero=zero))
    engine.load_checkpoint(path, tag="a")
    found = digest(list(masters(engine.module).values()))
    engine.save_checkpoint(target, tag="a")
    engine.destroy()
    return found


def content(path: str) -> Tensors:
    """Every tensor of a checkpoint, of which each element is stored once."""
    with Checkpoint(os.path.join(path, "a")) as files:
        tensors = [t for t in files.manifest.tensors if t.rank is None]
        for tensor in tensors:
            assert sum(part.stop - part.start for part in tensor.slices) == torch.Size(tensor.shape).numel()
        return {f"{t.kind} {t.name}": files.read(t) for t in tensors}


def test_a_checkpoint_fits_every_layout(tmp_path: Path) -> None:
    """Each tensor is saved once, by whoever; other meshes, stages and numbers of ranks load the same bits."""
    one = str(tmp_path / "one")
    kept = run_ranks(saved, WORLD, one, SPREAD, 2)
    assert len(set(kept)) == 1
    tensors = content(one)
    others: list[tuple[int, Zero, int]] = [
        (2, (), 3),
        (WORLD, PAIRS, 3),
        (8, LEVELS_SPREAD, 3),
    ]
    for number, (world, layout, other) in enumerate(others):
        target = str(tmp_path / str(number))
        found = run_ranks(loaded, world, one, layout, other, target)
        assert set(found) == set(kept), (world, layout, other)
        again = content(target)
        assert again.keys() == tensors.keys()
        assert all(torch.equal(again[name], value) for name, value in tensors.items())


def test_resuming_is_exact(tmp_path: Path) -> None:
    setting = Setting(3, accumulation=2, optimizer="AdamW", lr=1e-2, zero=SPREAD)
    for straight, again in run_ranks(resumed, WORLD, "gpt", setting, setting, str(tmp_path)):
        assert straight == again


# -- what is refused ---------------------------------------------------------------------------------------------------


@on_ranks(WORLD)
def test_meshes_that_cannot_be() -> None:
    words = [
        ["2 x 3 ranks", "there are 4"],
        ["'dp': 2, 'pp': 2", "adjacent", "('pp', 'dp')"],
        ["ascend", "[3, 2]"],
        ["mics_shard_size over 4", "over 2 ranks"],
        ["zero_hpz_partition_size", "mesh passed to initialize()"],
        ["the engine has ranks [0, 1, 2, 3]"],
    ]
    given: list[tuple[Any, dict[str, Any]]] = [
        ((2, 3), {}),
        (init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")), {}),
        (DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("replicate", "shard")), {}),
        (init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), {"mics_shard_size": 4}),
        (init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), {"zero_hpz_partition_size": 2}),
        (init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))["shard"], {}),
    ]
    found = []
    for mesh, zero in given:
        model = nn.Linear(4, 4)
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, **zero}}
        with pytest.raises((UsageError, ConfigError)) as caught:
            shardwise.initialize(
                model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config, mesh=mesh
            )
        found.append(str(caught.value))
    answer = found
    for message, expected in zip(answer, words, strict=True):
        assert all(word in message for word in expected), message
