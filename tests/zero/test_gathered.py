"""Access to whole parameters between passes: GatheredParameters, gathered(), and what raises without them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.errors import ReleasedParameterError, UsageError
from shardwise.memory import Category
from shardwise.utils import safe_get_full_fp32_param
from tests.harness import on_ranks, run_ranks
from tests.harness.training import DTYPES, Setting, digest, masters, parameters_digest, start, take_steps
from tests.models import CASES, GPT


def modify(stage: int, precision: str, modifier: int | None, sharded_optimizer: str) -> list[Any]:
    """Rank `modifier` changes one parameter, every other rank writes something else into it."""
    model = CASES["gpt"].make()
    setting = Setting(stage=stage, precision=precision, optimizer=sharded_optimizer, lr=1e-2)
    engine = start(CASES["gpt"], setting, model)
    chosen = model.get_parameter("blocks.1.up.weight")
    before = masters(model)
    with shardwise.zero.GatheredParameters([chosen], modifier_rank=modifier):
        if modifier is not None:
            wanted = 3.0 if dist.get_rank() == modifier else -1.0
            chosen.data[0].fill_(wanted)
    after = masters(model)
    others = all(torch.equal(before[n], after[n]) for n in before if n != "blocks.1.up.weight")
    row = safe_get_full_fp32_param(chosen)[0]
    rest = torch.equal(before["blocks.1.up.weight"][1:], after["blocks.1.up.weight"][1:])
    # A step must go on from the changed value: had masters kept the old one, it would come back.
    take_steps(engine, CASES["gpt"], [0])
    with shardwise.zero.GatheredParameters(chosen):
        stepped = float(chosen[0].float().mean())
    result = [others, rest, row.tolist(), stepped, parameters_digest(model)]
    engine.destroy()
    return result


@pytest.mark.parametrize(
    ("stage", "precision", "optimizer"),
    [(0, "fp32", "SGD"), (1, "bf16", "Adafactor"), (2, "fp32", "SGD"), (3, "bf16", "Adafactor")],
)
def test_changes_of_the_modifier_reach_masters_on_all_ranks(stage: int, precision: str, optimizer: str) -> None:
    found = run_ranks(modify, 2, stage, precision, 1, optimizer)
    for others, rest, row, stepped, _ in found:
        assert others and rest
        assert row == [3.0] * len(row)
        assert abs(stepped - 3.0) < 0.1
    assert found[0][4] == found[1][4]


def test_without_a_modifier_changes_to_sharded_parameters_are_lost() -> None:
    def mean(row: list[float]) -> float:
        return sum(row) / len(row)

    for others, rest, row, stepped, _ in run_ranks(modify, 2, 3, "fp32", None, "SGD"):
        assert others and rest
        assert mean(row) != 3.0
        assert abs(stepped - mean(row)) < 0.1


# -- nesting, passes, other owners -------------------------------------------------------------------------------------


@on_ranks(2)
def test_nested_blocks() -> None:
    model = CASES["gpt"].make()
    engine = start(CASES["gpt"], Setting(stage=3), model)
    first, second = model.get_parameter("blocks.1.up.weight"), model.get_parameter("blocks.1.up.bias")
    with shardwise.zero.GatheredParameters(first):
        with pytest.raises(UsageError, match="already gathered"):
            shardwise.zero.GatheredParameters([second, first]).__enter__()
        # Another parameter of the same unit; the inner block must not take the outer one's values away.
        with shardwise.zero.GatheredParameters(second, modifier_rank=0):
            second.data.fill_(1.5)
        values = bool(torch.isfinite(first).all()), bool((second == 1.5).all())
    with shardwise.zero.GatheredParameters([first, first]):
        pass
    with shardwise.zero.GatheredParameters(first, enabled=False), pytest.raises(ReleasedParameterError):
        first.sum()
    master = safe_get_full_fp32_param(second)
    engine.destroy()
    assert [*values, bool((master == 1.5).all())] == [True, True, True]


@on_ranks(2)
def test_a_block_that_cannot_be_entered_leaves_nothing_behind() -> None:
    """Gathering the second of two units fails on all ranks; afterwards nothing is left of the attempt."""
    model = CASES["gpt"].make()
    engine = start(CASES["gpt"], Setting(stage=3), model)
    parameters = list(model.parameters())
    all_gather, calls = engine.sharded.comm.all_gather, []

    def fail_later(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 2:
            raise RuntimeError("no connection")
        return all_gather(*args, **kwargs)

    engine.sharded.comm.all_gather = fail_later
    with pytest.raises(RuntimeError, match="no connection"):
        shardwise.zero.GatheredParameters(parameters).__enter__()
    gathered = engine.accountant.live[Category.GATHERED]
    with shardwise.zero.GatheredParameters(parameters):
        whole = all(bool(torch.isfinite(p).all()) for p in parameters)
    result = [gathered == 0, whole, engine.accountant.live[Category.GATHERED] == 0]
    engine.destroy()
    assert result == [True, True, True]


@on_ranks(2)
def test_passes_inside_a_block() -> None:
    """Forward and backward passes inside a block neither end it nor see anything else than its values."""
    case = CASES["gpt"]
    model = case.make()
    engine = start(case, Setting(stage=3), model)
    batch = case.data(0, 0, 0, torch.float32)
    expected = float(case.loss(engine, batch).detach())
    with shardwise.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        losses = [float(case.loss(engine, batch).detach()) for _ in range(2)]
        engine.backward(case.loss(engine, batch))
        norm = float(sum(p.detach().norm() for p in model.parameters()))
        if dist.get_rank() == 0:
            model.get_parameter("norm.weight").data.zero_()
    changed = float(case.loss(engine, batch).detach())
    engine.step()
    released = engine.sharded.accountant.live
    result = [losses == [expected] * 2, norm > 0, changed != expected, released, engine.sharded.unsharder.late]
    engine.destroy()
    same, whole, changed, live, rescues = result
    assert same and whole and changed
    assert {c.value: size for c, size in live.items()}["gathered window"] == 0
    assert rescues == 0


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_arrays_that_share_a_parameters_memory_stay_valid(stage: int) -> None:
    """numpy() shares the memory of a parameter, which can then not be given back to the system while it is in use."""
    case = CASES["gpt"]
    model = case.make()
    engine = start(case, Setting(stage=stage), model)
    with shardwise.zero.GatheredParameters(list(model.parameters())):
        arrays = {name: p.detach().numpy() for name, p in model.named_parameters()}
        before = {name: array.copy() for name, array in arrays.items()}
    take_steps(engine, case, range(2))
    kept = all((arrays[name] == before[name]).all() for name in arrays) if stage == 3 else True
    after = digest(list(masters(model).values()))
    engine.destroy()
    other = CASES["gpt"].make()
    engine = start(case, Setting(stage=stage), other)
    take_steps(engine, case, range(2))
    same = after == digest(list(masters(other).values()))
    engine.destroy()
    assert kept and same


@on_ranks(2)
def test_parameters_of_no_engine_are_passed_over() -> None:
    layer = nn.Linear(2, 2)
    with shardwise.zero.GatheredParameters(layer.weight, modifier_rank=0):
        layer.weight.data.zero_()
    assert bool((layer.weight == 0).all())


# -- without a block ---------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_looking_at_a_sharded_parameter_names_it() -> None:
    model = GPT(layers=2)
    engine = start(CASES["gpt"], Setting(stage=3), model)
    parameter = model.get_parameter("blocks.1.up.weight")
    assert tuple(parameter.shape) == (24, 12) and parameter.numel() == 288 and parameter.dtype == torch.float32
    assert parameter.requires_grad and parameter.is_leaf and parameter.dim() == 2 and len(parameter) == 24
    assert parameter.grad is None and parameter.element_size() == 4 and parameter.device.type == "cpu"
    assert torch.zeros_like(parameter).shape == parameter.shape and "released" in repr(parameter)
    assert parameter.type() == "torch.FloatTensor"
    for look in (
        lambda: parameter.sum(),
        lambda: parameter[0, 0].item(),
        lambda: parameter.data,
        lambda: torch.zeros(24, 12).copy_(parameter),
        lambda: parameter.data.zero_(),
        lambda: torch.stack([parameter, parameter]),
        lambda: parameter.detach().numpy(),
        lambda: parameter.type(torch.float64),
    ):
        with pytest.raises(ReleasedParameterError, match=r"'blocks.1.up.weight' \(shape \(24, 12\)\)"):
            look()
    engine.destroy()


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (3, "fp32")])
@on_ranks(2)
def test_destroy_leaves_a_plain_model(stage: int, precision: str) -> None:
    case = CASES["gpt"]
    engine = start(case, Setting(stage=stage, precision=precision))
    take_steps(engine, case, [0])
    expected = parameters_digest(engine.module)
    model = engine.module
    engine.destroy()
    plain = all(type(p) is nn.Parameter and p.dtype is DTYPES[precision] for p in model.parameters())
    apart = len({p.untyped_storage().data_ptr() for p in model.parameters()}) == len(list(model.parameters()))
    assert plain and apart and digest(list(model.parameters())) == expected and not model._forward_hooks


def memory_after_destroy(stage: int, precision: str) -> list[Any]:
    """What is left of an engine without the collector of cycles."""
    case = CASES["gpt"]
    model = case.make()
    gc.collect()
    gc.disable()
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        engine = start(case, Setting(stage=stage, precision=precision), model, optimizer)
        take_steps(engine, case, range(2))
        held = [t for u in engine.sharded.units for s in u.sections for t in (s.full, s.shard, s.master, s.gradient)]
        held += [value for state in optimizer.state.values() for value in state.values()]
        storages = [weakref.ref(tensor.untyped_storage()) for tensor in held if tensor is not None]
        counted = engine.accountant.total
        del held
        engine.destroy()
        engine.destroy()
        left = sum(storage() is not None for storage in storages)
        kept = engine.accountant.total
        own = [p for group in optimizer.param_groups for p in group["params"]]
        groups = all(a is b for a, b in zip(own, model.parameters(), strict=True))
        ref = weakref.ref(model)
        del engine, model, own, optimizer
        return [len(storages) > 20, counted > 0, left, kept, groups, ref() is None]
    finally:
        gc.enable()


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (2, "bf16"), (3, "fp32")])
def test_destroy_gives_memory_back_at_once(stage: int, precision: str) -> None:
    for found in run_ranks(memory_after_destroy, 2, stage, precision):
        assert found == [True, True, 0, 0, True, True]


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_model_and_its_optimizer_can_be_wrapped_again(stage: int) -> None:
    case, setting = CASES["gpt"], Setting(stage=stage, optimizer="AdamW", lr=1e-2)
    model = case.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outcomes = []
    for _ in range(2):  # the second time without destroying the first engine
        engine = start(case, setting, model, optimizer)
        take_steps(engine, case, [0])
        outcomes.append(parameters_digest(model))
    steps = [float(state["step"]) for state in optimizer.state.values()]
    engine.destroy()
    assert [outcomes[0] != outcomes[1], set(steps)] == [True, {1.0}]
