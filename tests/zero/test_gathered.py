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
from tests.harness import of_all_ranks, on_ranks, thorough
from tests.harness.training import DTYPES, Setting, digest, masters, parameters_digest, start, take_steps
from tests.models import CASES, GPT


@pytest.mark.parametrize(
    ("stage", "precision", "modifier", "optimizer"),
    [
        thorough(0, "fp32", 1, "SGD"),
        thorough(1, "bf16", 1, "Adafactor"),
        (2, "fp32", 1, "SGD"),
        (3, "bf16", 1, "Adafactor"),
        (3, "fp32", None, "SGD"),
    ],
)
@on_ranks(2)
def test_changes_of_the_modifier_reach_masters_on_all_ranks(
    stage: int, precision: str, modifier: int | None, optimizer: str
) -> None:
    """Without a modifier changes to sharded parameters are lost."""
    name = "blocks.1.up.weight"
    engine = start(CASES["gpt"], Setting(stage=stage, precision=precision, optimizer=optimizer, lr=1e-2))
    chosen = engine.module.get_parameter(name)
    expected = masters(engine.module)
    with shardwise.zero.GatheredParameters([chosen], modifier_rank=modifier):
        chosen.data[0].fill_(3.0 if dist.get_rank() == modifier else -1.0)
    if modifier is not None:
        expected[name][0] = 3.0
    after = masters(engine.module)
    assert all(torch.equal(after[n], value) for n, value in expected.items())
    # A step must go on from the changed value: had masters kept the old one, it would come back.
    take_steps(engine, CASES["gpt"], [0])
    with shardwise.zero.GatheredParameters(chosen):
        assert abs(float(chosen[0].float().mean() - expected[name][0].mean())) < 0.1
    assert len(set(of_all_ranks(parameters_digest(engine.module)))) == 1


# -- nesting, passes, other owners -------------------------------------------------------------------------------------


@on_ranks(2)
def test_nested_blocks() -> None:
    model = CASES["gpt"].make()
    start(CASES["gpt"], Setting(stage=3), model)
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
    assert [*values, bool((safe_get_full_fp32_param(second) == 1.5).all())] == [True, True, True]


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
    assert engine.accountant.live[Category.GATHERED] == 0
    with shardwise.zero.GatheredParameters(parameters):
        assert all(bool(torch.isfinite(p).all()) for p in parameters)
    assert engine.accountant.live[Category.GATHERED] == 0


@on_ranks(2)
def test_passes_inside_a_block() -> None:
    """Forward and backward passes inside a block neither end it nor see anything else than its values."""
    case = CASES["gpt"]
    model = case.make()
    engine = start(case, Setting(stage=3), model)
    batch = case.data(0, 0, 0, torch.float32)
    expected = float(case.loss(engine, batch).detach())
    with shardwise.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        assert [float(case.loss(engine, batch).detach()) for _ in range(2)] == [expected] * 2
        engine.backward(case.loss(engine, batch))
        assert float(sum(p.detach().norm() for p in model.parameters())) > 0
        if dist.get_rank() == 0:
            model.get_parameter("norm.weight").data.zero_()
    assert float(case.loss(engine, batch).detach()) != expected
    engine.step()
    assert engine.accountant.live[Category.GATHERED] == engine.sharded.unsharder.late == 0


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
    start(CASES["gpt"], Setting(stage=3), model)
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


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (2, "bf16"), (3, "fp32")])
@on_ranks(2)
def test_destroy_leaves_a_plain_model_and_gives_memory_back_at_once(stage: int, precision: str) -> None:
    """Without the collector of cycles."""
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
        assert len(storages) > 20 and engine.accountant.total > 0
        del held
        expected = parameters_digest(model)
        engine.destroy()
        engine.destroy()
        parameters = list(model.parameters())
        assert digest(parameters) == expected and not model._forward_hooks
        assert all(type(p) is nn.Parameter and p.dtype is DTYPES[precision] for p in parameters)
        assert len({p.untyped_storage().data_ptr() for p in parameters}) == len(parameters)
        assert not any(storage() is not None for storage in storages) and engine.accountant.total == 0
        own = [p for group in optimizer.param_groups for p in group["params"]]
        assert all(a is b for a, b in zip(own, parameters, strict=True))
        ref = weakref.ref(model)
        del engine, model, own, optimizer, parameters
        assert ref() is None
    finally:
        gc.enable()


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
    assert [outcomes[0] != outcomes[1], set(steps)] == [True, {1.0}]


# -- steps, ends and errors inside of a block --------------------------------------------------------------------------


@on_ranks(2)
def test_a_step_inside_a_block_is_refused_and_taken_after_it() -> None:
    digests = set()
    for inside in (False, True):
        engine = start(CASES["gpt"], Setting(stage=3, optimizer="SGD"))
        case, parameter = CASES["gpt"], next(engine.module.parameters())
        engine.backward(case.loss(engine, case.data(0, 0, dist.get_rank(), torch.float32)))
        for block in (engine.gathered, lambda p=parameter: shardwise.zero.GatheredParameters(p, modifier_rank=0)):
            if inside:
                with block(), pytest.raises(UsageError, match="leave the block first"):
                    engine.step()
        engine.step()
        refused = pytest.raises(UsageError, match="leave the block first")
        with shardwise.zero.GatheredParameters(parameter, modifier_rank=0), refused:
            engine.refresh()
        digests.add(parameters_digest(engine.module))
        engine.destroy()
    assert len(digests) == 1


@on_ranks(2)
def test_an_engine_destroyed_inside_a_block_leaves_whole_parameters() -> None:
    for block in (lambda e: e.gathered(), lambda e: shardwise.zero.GatheredParameters(e.module.parameters())):
        engine = start(CASES["gpt"], Setting(stage=3, optimizer="SGD"))
        before = parameters_digest(engine.module)
        with block(engine):
            engine.destroy()
        assert digest(list(engine.module.parameters())) == before
    engine = start(CASES["gpt"], Setting(stage=3, optimizer="SGD"))
    with (
        pytest.raises(UsageError, match="has been destroyed"),
        shardwise.zero.GatheredParameters(engine.module.parameters(), modifier_rank=0),
    ):
        engine.destroy()
