"""ZeRO++: quantised gathers (qwZ), secondary shards (hpZ) and quantised reductions in two hops (qgZ).

Four ranks stand for two nodes of two. `tests/comm/test_quantize.py` has the arithmetic of the codes and of the hops.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.comm.compression import BlockCode
from shardwise.comm.environment import MACHINE
from shardwise.comm.machines import groups_of
from shardwise.errors import ConfigError, UsageError
from shardwise.zero.build import _look_for_nodes
from tests.comm.blocks import rounded
from tests.harness import of_all_ranks, on_ranks, run_ranks, thorough
from tests.harness.training import (
    Setting,
    Tensors,
    bits,
    digest,
    engine_of,
    gradients,
    masters,
    resumes,
    start,
    take_steps,
)
from tests.models import CASES, Case
from tests.zero.test_changing import Model as ChangingModel

Zero = dict[str, Any]

EXACT: Zero = {}
QW: Zero = {"zero_quantized_weights": True}
HP: Zero = {"zero_hpz_partition_size": 2}
QG: Zero = {"zero_quantized_gradients": True, "zero_node_size": 2}
LOCO: Zero = {**QG, "zeropp_loco_param": {"err_beta": 0.5}}
ALL: Zero = {**QW, **HP, **LOCO}
WORLD, NODE = 4, 2


def setting(zero: Zero, **more: Any) -> Setting:
    return Setting(3, optimizer="AdamW", lr=1e-2, zero=tuple(zero.items()), **more)


def backward(engine: Any, step: int, micro: int = 0, factor: float = 1.0) -> None:
    case, dtype = CASES["gpt"], next(engine.module.parameters()).dtype
    engine.backward(case.loss(engine, case.data(step, micro, dist.get_rank(), dtype)) * factor)


def parameters_in_codes(engine: Any, exact: Tensors) -> Tensors:
    """What all ranks compute with: matrices in 8 bits in blocks of each rank's range, vectors as they are."""
    registry, found = engine.sharded.registry, {name: value.clone() for name, value in exact.items()}
    for section in (section for unit in engine.sharded.units for section in unit.sections):
        flat = torch.zeros(section.layout.numel)
        matrices = [(slot, registry[slot.index].name) for slot in section.layout.slots]
        matrices = [(slot, name) for slot, name in matrices if exact[name].dim() > 1]
        for slot, name in matrices:
            flat[slot.offset : slot.offset + slot.numel] = exact[name].flatten()
        flat = torch.cat([rounded(part, 8, 256) for part in flat.split(section.layout.numel // WORLD)])
        for slot, name in matrices:
            found[name] = flat[slot.offset : slot.offset + slot.numel].view_as(exact[name]).clone()
    return found


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coded", [(QG, ALL), thorough((QG, LOCO))], ids=["all", "loco"])
@on_ranks(WORLD)
def test_gradients_are_those_of_exact_reductions_within_their_rounding(coded: tuple[Zero, Zero]) -> None:
    """Codes of 4 bits round by a seventh of the largest element of a block at most; errors may be fed back."""
    found = []
    for zero in (EXACT, *coded):
        engine = start(CASES["gpt"], setting(zero, accumulation=2))
        for micro in range(2):
            backward(engine, 0, micro)
            if micro == 0:
                engine.step()
        found.append(gradients(engine.module))
        engine.destroy()
    exact, *others = (torch.cat([value.flatten() for value in one.values()]) for one in found)
    for other in others:
        assert float((other - exact).norm()) < 0.2 * float(exact.norm())
    assert not torch.equal(others[0], others[1])


def digests(name: str, variants: Sequence[tuple[Zero, bool]]) -> list[str]:
    """Masters and parameters after a few steps, with and without recomputing activations."""
    case, found = CASES[name], []
    for zero, recompute in variants:
        model = case.make()
        if recompute:
            model.run = lambda block, x: checkpoint(block, x, use_reentrant=False)
        engine = start(case, setting(zero), model)
        take_steps(engine, case, range(2))
        found.append(bits(engine))
        engine.destroy()
    return found


@pytest.mark.parametrize(
    "changes",
    [
        [({}, False), ({"stage3_prefetch_bucket_size": 0}, True)],
        thorough([({}, True), ({"stage3_prefetch_bucket_size": 0}, False)]),
    ],
    ids=["both", "either"],
)
@on_ranks(WORLD)
def test_ranks_agree_and_prefetching_and_recomputing_change_no_bit(changes: list[tuple[Zero, bool]]) -> None:
    alike = digests("gpt", [({**ALL, **more}, again) for more, again in changes])
    coded, near, exact = digests("router", [(ALL, False), (HP, False), (EXACT, False)])
    for found in (alike, [coded], [near, exact]):
        assert len({one for some in of_all_ranks(found) for one in some}) == 1


def test_resuming_is_exact(tmp_path: Path) -> None:
    run_ranks(resumes, WORLD, "gpt", setting(ALL), setting(ALL), str(tmp_path))


@on_ranks(WORLD)
def test_an_overflow_on_one_rank_is_found_by_all() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    engine = start(CASES["gpt"], setting(LOCO, precision="fp16", extra=(("fp16", fp16),)))
    before = digest(list(masters(engine.module).values()))
    backward(engine, 0, factor=float("inf") if dist.get_rank() == 1 else 1.0)
    engine.step()
    assert engine.skipped_steps == 1 and digest(list(masters(engine.module).values())) == before
    take_steps(engine, CASES["gpt"], range(3))
    after = list(masters(engine.module).values())
    assert all(bool(value.isfinite().all()) for value in after) and digest(after) != before


# -- bytes and memory --------------------------------------------------------------------------------------------------

WIDE, LAYERS = 256, 4
STACK = Case(
    "stack",
    lambda: nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(LAYERS))),
    lambda generator, seed: {"x": torch.randn(2, WIDE, generator=generator)},
    lambda model, batch: model(batch["x"]).float().square().mean(),
)


@on_ranks(WORLD)
def test_bytes_are_those_of_the_closed_form() -> None:
    """Bytes of each collective of one step, by group and operation."""
    settings = [EXACT, QW, HP, QG, ALL]
    size = 2
    shard = WIDE * WIDE // WORLD
    nodes = WORLD // NODE
    exact = (WORLD - 1) * shard * size
    int8 = (WORLD - 1) * (shard + 4 * shard // 256)
    int4 = BlockCode(4).nbytes(shard)
    assert int4 == shard // 2 + 4 * shard // 256
    near = (NODE - 1) * WIDE * WIDE // NODE * size
    gathers, again = [exact] * LAYERS, [exact] * (LAYERS - 1)  # the unit that the backward pass needs first is kept
    found = []
    for zero in settings:
        engine = start(STACK, setting({"reduce_bucket_size": WIDE * WIDE, **zero}, precision="bf16"))
        take_steps(engine, STACK, [0])
        since = engine.ledger.sequence
        take_steps(engine, STACK, [1])
        seen: dict[tuple[str, str], list[int]] = {}
        for record in engine.ledger.records(since):
            seen.setdefault((record.group, record.op), []).append(record.sent)
        found.append(seen)
        engine.destroy()
    plain, qw, hp, qg, everything = found
    assert plain["data_parallel", "all_gather"] == [*gathers, *again]
    assert plain["data_parallel", "reduce_scatter"] == gathers
    assert qw["data_parallel", "all_gather"] == [int8] * (2 * LAYERS - 1)
    assert hp["data_parallel", "all_gather"] == gathers
    assert hp["secondary", "all_gather"] == [near] * (LAYERS - 1)
    assert qg["node", "all_to_all"] == [(NODE - 1) * nodes * int4] * LAYERS
    assert qg["across_nodes", "all_to_all"] == [(nodes - 1) * int4] * LAYERS
    assert ("data_parallel", "reduce_scatter") not in qg
    assert everything["data_parallel", "all_gather"] == [int8] * LAYERS
    assert everything["secondary", "all_gather"] == [near] * (LAYERS - 1)
    assert everything["across_nodes", "all_to_all"] == qg["across_nodes", "all_to_all"]


# -- what is refused, and access ---------------------------------------------------------------------------------------


@on_ranks(WORLD)
def test_access_is_exact_and_passes_are_rounded() -> None:
    case = CASES["gpt"]
    engine = start(case, setting(ALL))
    module, rank = engine.module, dist.get_rank()
    exact = masters(module)
    with shardwise.zero.GatheredParameters(list(module.parameters())):
        assert all(torch.equal(p, exact[n]) for n, p in module.named_parameters())
    within: Tensors = {}
    block = module.blocks[0]

    def look(*_: Any) -> None:
        within.update({f"blocks.0.{name}": p.detach().clone() for name, p in block.named_parameters()})

    def evaluate() -> None:
        with torch.no_grad():
            case.loss(engine, case.data(0, 2, rank, torch.float32))
        assert all(torch.equal(value, exact[name]) for name, value in within.items())

    hook = block.register_forward_pre_hook(look)
    backward(engine, 0)
    weights = parameters_in_codes(engine, exact)
    assert all(torch.equal(value, weights[name]) for name, value in within.items())
    assert any(not torch.equal(value, exact[name]) for name, value in within.items())
    evaluate()
    loss = case.loss(engine, case.data(0, 1, rank, torch.float32))
    evaluate()  # between a forward pass and its backward pass, too
    engine.backward(loss)
    with engine.gathered():
        evaluate()
    hook.remove()
    engine.step()
    with shardwise.zero.GatheredParameters(block.up.weight, modifier_rank=0), torch.no_grad():
        block.up.weight.fill_(float(1 + rank))
    assert bool((masters(module)["blocks.0.up.weight"] == 1).all())
    assert bool((engine.module_state_dict()["blocks.0.up.weight"] == 1).all())

    def change(*_: Any) -> None:
        refused = pytest.raises(UsageError, match=r"zero_quantized_weights.*between passes|between passes.*zero_quan")
        with refused, shardwise.zero.GatheredParameters(block.up.weight, modifier_rank=0):
            pass

    hook = block.up.register_forward_pre_hook(change)
    backward(engine, 1)
    hook.remove()


@pytest.mark.parametrize("zero", [QW, HP], ids=["codes", "second shards"])
@on_ranks(WORLD)
def test_what_forward_changes_in_place_is_refused_under_codes_and_kept_in_second_shards(zero: Zero) -> None:
    torch.manual_seed(0)
    model = ChangingModel(recompute=False)
    owned = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    engine = engine_of(model, 3, owned, zero={"reduce_bucket_size": 20, **zero})
    refused = pytest.raises(UsageError, match=r"in place inside of a pass: blocks\.0\..*zero_quantized_weights")
    with refused if "zero_quantized_weights" in zero else contextlib.nullcontext():
        for number in range(3):
            engine.backward(engine(torch.arange(6.0).view(2, 3) + number + dist.get_rank()))
            engine.step()


@pytest.mark.parametrize("flag", [True, False])
@on_ranks(2)
def test_models_built_for_codes_are_gathered_as_codes(flag: bool) -> None:
    torch.manual_seed(7)
    with shardwise.zero.Init(zero_quantized_weights=flag):
        model = CASES["gpt"].build()
    engine = start(CASES["gpt"], setting(EXACT), model)
    backward(engine, 0)
    assert engine.sharded.plan.quantized_weights is flag
    assert any(unit.codes is not None for unit in engine.sharded.units) is flag


def hops_of(sizes: Sequence[int]) -> tuple[str, list[int]]:
    """Return the sizes of both hops on machines of so many ranks, or the refusal."""
    rank, ends = dist.get_rank(), list(itertools.accumulate(sizes))
    node = next(number for number, end in enumerate(ends) if rank < end)
    try:
        with mock.patch.dict("os.environ", {MACHINE: f"m{node}"}):
            engine = start(CASES["gpt"], setting({"zero_quantized_gradients": True}))
    except ConfigError as error:
        return str(error), []
    hops = engine.sharded.compressor.hops
    return "", [hops.node.world, hops.across.world] if hops is not None else []


def test_second_shards_that_lie_on_several_nodes_are_told(caplog: pytest.LogCaptureFixture) -> None:
    for nodes, size in ((["a", "a", "b", "b"], 2), (["a"] * 4, 4), (["a", "a", "b", "b"], 1), (["a", "b"] * 2, 2)):
        _look_for_nodes(nodes, groups_of(nodes, size))
    assert not caplog.records
    _look_for_nodes(["a", "a", "a", "b"], groups_of(["a", "a", "a", "b"], 2))
    (record,) = caplog.records
    assert "is 2, and 1 of 2 such groups lie on several machines, which have 1 or 3 ranks" in record.getMessage()


@pytest.mark.parametrize(("nodes", "hops"), [([2, 2], [2, 2]), ([4], []), ([1, 1, 1, 1], [])])
def test_nodes_are_the_machines_of_the_ranks(nodes: list[int], hops: list[int]) -> None:
    assert run_ranks(hops_of, WORLD, nodes) == [("", hops)] * WORLD


def test_nodes_of_different_sizes_are_refused() -> None:
    for message, _ in run_ranks(hops_of, WORLD, [3, 1]):
        assert "1 on m1 and 3 on m0" in message and "zero_node_size" in message
