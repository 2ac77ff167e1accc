"""ZeRO++: quantised gathers (qwZ), secondary shards (hpZ) and quantised reductions in two hops (qgZ).

Four ranks stand for two nodes of two. What they compute is compared with the same arithmetic in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.comm.compression import BlockCode
from shardwise.errors import ConfigError, UsageError
from shardwise.zero.build import _look_for_nodes
from tests.comm.blocks import Simulation, rounded
from tests.harness import on_ranks, run_ranks
from tests.harness.training import (
    DTYPES,
    Setting,
    Tensors,
    assert_close,
    assert_identical,
    digest,
    each,
    engine_of,
    gradients,
    make_optimizer,
    masters,
    parameters_digest,
    resumed,
    trained,
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


def start(
    case: Case,
    zero: Zero,
    *,
    precision: str = "fp32",
    accumulation: int = 1,
    model: nn.Module | None = None,
    **more: Any,
) -> Any:
    model = case.make() if model is None else model
    more = {"gradient_accumulation_steps": accumulation, "bf16": {"enabled": precision == "bf16"}, **more}
    return engine_of(model, 3, make_optimizer("AdamW", case.groups(model), 1e-2), zero=zero, **more)


def backward(engine: Any, case: Case, step: int, micro: int = 0, precision: str = "fp32") -> float:
    loss = case.loss(engine, case.data(step, micro, dist.get_rank(), DTYPES[precision]))
    engine.backward(loss)
    return float(loss.detach())


# -- the same arithmetic in one process --------------------------------------------------------------------------------

Layout = list[tuple[str, int, bool, list[tuple[str, int, int]]]]
"""Sections: a name, padded elements, whether they are sharded, and (parameter, first element, elements)."""


def layout_of(engine: Any) -> Layout:
    registry = engine.sharded.registry
    return [
        (
            f"{unit.name}.{place}",
            section.layout.numel,
            unit.sharded,
            [(registry[slot.index].name, slot.offset, slot.numel) for slot in section.layout.slots],
        )
        for unit in engine.sharded.units
        for place, section in enumerate(unit.sections)
    ]


def recorded(zero: Zero, accumulation: int, precision: str = "fp32", steps: int = 2) -> dict[str, Any]:
    case = CASES["gpt"]
    engine = start(case, zero, precision=precision, accumulation=accumulation)
    seen: dict[str, Any] = {"layout": layout_of(engine), "masters": [], "gradients": []}
    for step in range(steps):
        seen["masters"].append(masters(engine.module))
        for micro in range(accumulation):
            backward(engine, case, step, micro, precision)
            if micro == accumulation - 1:
                seen["gradients"].append(gradients(engine.module))
            engine.step()
    seen["masters"].append(masters(engine.module))
    seen["parameters"] = parameters_digest(engine.module)
    engine.destroy()
    values = [value for tensors in (*seen["masters"], *seen["gradients"]) for value in tensors.values()]
    seen["digest"] = digest(values)
    if dist.get_rank():
        seen["masters"] = seen["gradients"] = None
    return seen


def in_flat(tensors: Tensors, numel: int, slots: Sequence[tuple[str, int, int]]) -> torch.Tensor:
    flat = torch.zeros(numel)
    for name, offset, size in slots:
        flat[offset : offset + size] = tensors[name].flatten()
    return flat


def rounded_weights(exact: Tensors, layout: Layout) -> Tensors:
    """What all ranks compute with: matrices in 8 bits in blocks of each rank's range, vectors as they are."""
    values = {name: value.clone() for name, value in exact.items()}
    for _, numel, _, slots in layout:
        matrices = {name: value if value.dim() > 1 else torch.zeros_like(value) for name, value in exact.items()}
        ranges = in_flat(matrices, numel, slots).split(numel // WORLD)
        flat = torch.cat([rounded(part, 8, 256) for part in ranges])
        for name, offset, size in slots:
            if exact[name].dim() > 1:
                values[name] = flat[offset : offset + size].view_as(exact[name]).clone()
    return values


def check_against_one_process(seen: dict[str, Any], zero: Zero, accumulation: int) -> None:
    """Each step's gradient, from the masters that the ranks had."""
    case = CASES["gpt"]
    loco = zero.get("zeropp_loco_param")
    simulation = Simulation(WORLD, NODE, 4, 256, loco["err_beta"] if loco else None)
    for step, exact in enumerate(seen["masters"][:-1]):
        model = case.make()
        weights = rounded_weights(exact, seen["layout"]) if "zero_quantized_weights" in zero else exact
        model.load_state_dict({name: weights.get(name, value) for name, value in model.state_dict().items()})
        model.head.weight = model.tokens.weight
        total: Tensors = {}
        for micro in range(accumulation):
            local: list[Tensors] = []
            for rank in range(WORLD):
                model.zero_grad()
                case.loss(model, case.data(step, micro, rank, torch.float32)).backward()
                local.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
            for name, numel, _, slots in seen["layout"]:
                fulls = [in_flat(gradients, numel, slots) for gradients in local]
                if "zero_quantized_gradients" in zero:
                    summed = simulation.reduce(name, fulls)
                else:
                    summed = torch.stack(fulls).sum(0)
                for parameter, offset, size in slots:
                    part = summed[offset : offset + size].view_as(exact[parameter]) / (WORLD * accumulation)
                    total[parameter] = total[parameter] + part if parameter in total else part
        assert_close(seen["gradients"][step], total, 1e-6, f"{zero}, step {step}")


def test_gradients_are_those_of_one_process() -> None:
    settings = [(LOCO, 2), (ALL, 1), (HP, 1), (EXACT, 1)]
    answers = run_ranks(each, WORLD, recorded, settings)
    for number, (zero, accumulation) in enumerate(settings):
        first, *others = [answer[number] for answer in answers]
        for other in others:
            assert (other["digest"], other["parameters"]) == (first["digest"], first["parameters"]), zero
        if zero is not HP:
            check_against_one_process(first, zero, accumulation)
    near, exact = answers[0][-2:]
    assert near["digest"] == exact["digest"], "secondary shards change nothing"


# -- training ----------------------------------------------------------------------------------------------------------


def losses(settings: Sequence[Zero], precision: str, accumulation: int) -> list[float]:
    """The mean loss of the last steps of a longer training, for each setting."""
    case, found = CASES["gpt"], []
    for zero in settings:
        engine = start(case, zero, precision=precision, accumulation=accumulation)
        seen = []
        for step in range(12 // accumulation):
            for micro in range(accumulation):
                seen.append(backward(engine, case, step % 4, micro, precision))
                engine.step()
        found.append(sum(seen[-4:]) / 4)
        engine.destroy()
    return found


def test_training_comes_to_where_exact_training_does() -> None:
    exact, *others = torch.tensor(run_ranks(losses, WORLD, [EXACT, ALL], "bf16", 2)).mean(0)
    assert all(abs(other - exact) < 0.03 * exact for other in others), (exact, others)


def digests(name: str, variants: Sequence[tuple[Zero, bool]]) -> list[str]:
    """Masters and parameters after a few steps, with and without recomputing activations."""
    case, found = CASES[name], []
    for zero, recompute in variants:
        model = case.make()
        if recompute:
            model.run = lambda block, x: checkpoint(block, x, use_reentrant=False)
        engine = start(case, zero, model=model)
        for step in range(4):
            backward(engine, case, step)
            engine.step()
        found.append(digest(list(masters(engine.module).values())) + parameters_digest(engine.module))
        engine.destroy()
    return found


def test_prefetching_and_recomputing_change_no_bit() -> None:
    changes = [({}, False), ({"stage3_prefetch_bucket_size": 0}, False), ({}, True)]
    for answer in run_ranks(digests, WORLD, "gpt", [({**ALL, **more}, again) for more, again in changes]):
        assert len(set(answer)) == 1


def test_ranks_agree_whatever_their_branches() -> None:
    answers = run_ranks(digests, WORLD, "router", [(ALL, False), (HP, False), (EXACT, False)])
    assert all(answer == answers[0] for answer in answers)
    assert answers[0][1] == answers[0][2]


def test_resuming_is_exact(tmp_path: Path) -> None:
    setting = Setting(3, optimizer="AdamW", lr=1e-2, zero=tuple(ALL.items()))
    for straight, again in run_ranks(resumed, WORLD, "gpt", setting, setting, str(tmp_path)):
        assert straight == again


def test_compression_in_blocks_is_the_same_at_every_stage() -> None:
    codes = ("compression", {"type": "int8", "params": {"use_error_feedback": True, "block_size": 32}})
    outcomes = trained("gpt", [Setting(stage, optimizer="AdamW", lr=1e-2, extra=(codes,)) for stage in range(4)], 2)
    for outcome in outcomes[1:]:
        assert_identical(outcome, outcomes[0])


@on_ranks(WORLD)
def test_an_overflow_on_one_rank_is_found_by_all() -> None:
    case = CASES["gpt"]
    engine = start(
        case, LOCO, bf16={"enabled": False}, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    )
    before = digest(list(masters(engine.module).values()))
    loss = case.loss(engine, case.data(0, 0, dist.get_rank(), torch.float16))
    engine.backward(loss * (float("inf") if dist.get_rank() == 1 else 1.0))
    engine.step()
    skipped = (engine.skipped_steps, digest(list(masters(engine.module).values())) == before)
    for step in range(3):
        backward(engine, case, step, precision="fp16")
        engine.step()
    after = masters(engine.module)
    engine.destroy()
    finite = all(bool(value.isfinite().all()) for value in after.values())
    assert [*skipped, finite, digest(list(after.values())) != before] == [1, True, True, True]


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
    precision = "bf16"
    size = DTYPES["bf16"].itemsize
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
        engine = start(STACK, {"reduce_bucket_size": WIDE * WIDE, **zero}, precision=precision)
        for step in range(2):
            since = engine.ledger.sequence
            backward(engine, STACK, step, precision=precision)
            engine.step()
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


def outcome(action: Any) -> str:
    try:
        action()
    except UsageError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def access() -> list[Any]:
    """What the script sees is exact; what a pass computes with is rounded."""
    case = CASES["gpt"]
    engine = start(case, ALL)
    module = engine.module
    seen: list[Any] = []
    exact = masters(module)
    with shardwise.zero.GatheredParameters(list(module.parameters())):
        seen.append(all(torch.equal(p, exact[n]) for n, p in module.named_parameters()))
    within: Tensors = {}
    block = module.blocks[0]

    def look(*_: Any) -> None:
        within.update({f"blocks.0.{name}": p.detach().clone() for name, p in block.named_parameters()})

    hook = block.register_forward_pre_hook(look)
    backward(engine, case, 0)
    weights = rounded_weights(exact, layout_of(engine))
    seen.append(all(torch.equal(value, weights[name]) for name, value in within.items()))
    seen.append(any(not torch.equal(value, exact[name]) for name, value in within.items()))
    with torch.no_grad():  # evaluation: exact values, between a forward pass and its backward pass, too
        loss = case.loss(engine, case.data(0, 0, dist.get_rank(), torch.float32))
        seen.append(all(torch.equal(value, exact[name]) for name, value in within.items()))
    loss = case.loss(engine, case.data(0, 1, dist.get_rank(), torch.float32))
    with torch.no_grad():
        case.loss(engine, case.data(0, 2, dist.get_rank(), torch.float32))
    engine.backward(loss)
    with engine.gathered():
        case.loss(engine, case.data(0, 2, dist.get_rank(), torch.float32)).detach()
        seen.append(all(torch.equal(value, exact[name]) for name, value in within.items()))
    hook.remove()
    engine.step()
    with shardwise.zero.GatheredParameters(block.up.weight, modifier_rank=0), torch.no_grad():
        block.up.weight.fill_(float(1 + dist.get_rank()))
    seen.append(bool((masters(module)["blocks.0.up.weight"] == 1).all()))
    seen.append(bool((engine.module_state_dict()["blocks.0.up.weight"] == 1).all()))
    inside = []

    def change(*_: Any) -> None:
        with shardwise.zero.GatheredParameters(block.up.weight, modifier_rank=0):
            pass

    hook = block.up.register_forward_pre_hook(lambda *_: inside.append(outcome(change)))
    backward(engine, case, 1)
    hook.remove()
    seen.append(inside[0])
    engine.destroy()
    return seen


def test_access_is_exact_and_passes_are_rounded() -> None:
    for answer in run_ranks(access, WORLD):
        assert answer[:-1] == [True] * 7
        assert "zero_quantized_weights" in answer[-1] and "between passes" in answer[-1]


def changing() -> list[str]:
    found = []
    for zero in (QW, HP):
        torch.manual_seed(0)
        model = ChangingModel(recompute=False)
        owned = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        engine = engine_of(model, 3, owned, zero={"reduce_bucket_size": 20, **zero})

        def steps(engine: Any = engine) -> None:
            for number in range(3):
                engine.backward(engine(torch.arange(6.0).view(2, 3) + number + dist.get_rank()))
                engine.step()

        found.append(outcome(steps))
        if zero is HP:
            found.append(digest(list(masters(engine.module).values())))
        engine.destroy()
    return found


def built_for_codes(flag: bool) -> list[Any]:
    torch.manual_seed(7)
    with shardwise.zero.Init(zero_quantized_weights=flag):
        model = CASES["gpt"].build()
    engine = start(CASES["gpt"], {}, model=model)
    backward(engine, CASES["gpt"], 0)
    found = [engine.sharded.plan.quantized_weights, any(unit.codes is not None for unit in engine.sharded.units)]
    engine.destroy()
    return found


def test_what_forward_changes_in_place_is_refused_under_codes_and_kept_in_second_shards() -> None:
    refused, kept, digest_ = run_ranks(changing, WORLD)[0]
    assert "in place inside of a pass: blocks.0." in refused and "zero_quantized_weights" in refused
    assert kept == "nothing"
    assert digest_
    assert run_ranks(built_for_codes, 2, True) == [[True, True]] * 2
    assert run_ranks(built_for_codes, 2, False) == [[False, False]] * 2


def unequal_nodes(sizes: Sequence[int]) -> tuple[str, list[int]]:
    import os

    first = next(start for start in range(WORLD) if start <= dist.get_rank() < start + _size(sizes, start))
    told = {"LOCAL_WORLD_SIZE": str(_size(sizes, first)), "LOCAL_RANK": str(dist.get_rank() - first)}
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        engine = start(CASES["gpt"], {"zero_quantized_gradients": True})
    except ConfigError as error:
        return str(error), []
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
    hops = engine.sharded.compressor.hops
    engine.destroy()
    return "", [hops.node.world, hops.across.world] if hops is not None else []


def _size(sizes: Sequence[int], first: int) -> int:
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return sizes[starts.index(first)] if first in starts else 0


def test_second_shards_that_lie_on_several_nodes_are_told(caplog: pytest.LogCaptureFixture) -> None:
    for nodes, size in ((["a", "a", "b", "b"], 2), (["a"] * 4, 4), (["a", "a", "b", "b"], 1)):
        _look_for_nodes(nodes, size)
    assert not caplog.records
    _look_for_nodes(["a", "b", "a", "b"], 2)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "zero_optimization.zero_hpz_partition_size is 2, and such runs of ranks lie on"
    )


def test_nodes_are_those_that_the_launcher_tells() -> None:
    assert run_ranks(unequal_nodes, WORLD, [2, 2]) == [("", [2, 2])] * WORLD
    assert run_ranks(unequal_nodes, WORLD, [4]) == [("", [])] * WORLD
    assert run_ranks(unequal_nodes, WORLD, [1, 1, 1, 1]) == [("", [])] * WORLD
    for message, _ in run_ranks(unequal_nodes, WORLD, [3, 1]):
        assert "runs of 3, 1 ranks" in message and "zero_node_size" in message


class Half:
    """Two data-parallel groups of two ranks each."""

    def __init__(self) -> None:
        self.groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.groups[dist.get_rank() // 2]


def engines_of_halves() -> list[str]:
    case, found = CASES["gpt"], []
    for _ in range(2):
        mpu = Half()
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **QW, **HP},
        }
        model = case.make()
        optimizer = make_optimizer("AdamW", case.groups(model), 1e-2)
        engine = shardwise.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)[0]
        backward(engine, case, 0)
        engine.step()
        found.append(parameters_digest(engine.module))
        engine.destroy()
    return found


def test_groups_of_some_of_the_ranks_can_be_made_again() -> None:
    answers = run_ranks(engines_of_halves, WORLD)
    assert answers[0] == answers[1] and answers[2] == answers[3]
    assert all(first == second for first, second in answers)
