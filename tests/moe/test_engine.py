"""Experts divided over ranks, beneath every ZeRO stage, against one process that has all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.errors import UsageError
from shardwise.memory import Category
from shardwise.moe import MoE
from shardwise.registry import part_of
from shardwise.utils import safe_get_full_fp32_param, safe_get_full_grad
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.training import config_of, least_peaks
from tests.moe.models import EXPERTS, TOKENS, WIDTH, Model, batch, expert

KINDS = (
    Category.PARAMETERS,
    Category.MASTER,
    Category.OPTIMIZER,
    Category.GRADIENTS,
    Category.GATHERED,
    Category.BUFFERS,
)
STEPS, CLIP, RATE = 4, 0.05, 0.05
DROPS = {"k": 2, "capacity_factor": 0.7, "use_rts": False, "top2_2nd_expert_sampling": False}
KEEPS = {"k": 2, "drop_tokens": False, "top2_2nd_expert_sampling": False}
ONE = {"k": 1, "use_rts": False, "use_residual": True}


def config(stage: int, accumulation: int = 1, optimizer: str = "SGD", **more: Any) -> dict[str, Any]:
    params = {"lr": RATE, "momentum": 0.9} if optimizer == "SGD" else {"lr": 1e-2}
    keys = {"gradient_accumulation_steps": accumulation, "gradient_clipping": CLIP, **more}
    return config_of(stage, {"type": optimizer, "params": params}, **keys)


def started(stage: int, ep_size: int, options: dict[str, Any], accumulation: int = 1, **more: Any) -> Any:
    return shardwise.initialize(model=Model(ep_size, **options), config=config(stage, accumulation, **more))[0]


def steps(engine: Any, first: int, last: int) -> list[tuple[float, float, dict[str, torch.Tensor]]]:
    """Train; return loss, norm and gradients of each step, the latter by the names of tensors."""
    told = []
    for step in range(first, last):
        total = 0.0
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(batch(step, micro, dist.get_rank()))
            engine.backward(loss)
            total += loss.item() / engine.gradient_accumulation_steps()
            if engine.is_gradient_accumulation_boundary():
                found = {part_of(p).name or n: safe_get_full_grad(p) for n, p in engine.module.named_parameters()}
            engine.step()
        told.append((total, float(engine.last_step.grad_norm), found))
    return told


def divided(stage: int, ep_size: int, options: dict[str, Any], accumulation: int) -> list[Any]:
    engine = started(stage, ep_size, options, accumulation)
    return steps(engine, 0, STEPS)


def alone(world: int, options: dict[str, Any], accumulation: int, dtype: torch.dtype = torch.float64) -> list[Any]:
    """The same training by one process, which has all experts and each rank's batches, one after the other."""
    model = Model(1, **options).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    told = []
    for step in range(STEPS):
        losses = []
        optimizer.zero_grad(set_to_none=False)
        for rank in range(world):
            own = [model(batch(step, micro, rank).to(dtype)) / accumulation for micro in range(accumulation)]
            (sum(own) / world).backward()  # type: ignore[union-attr]
            losses.append(sum(loss.item() for loss in own))
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        optimizer.step()
        told.append((losses, norm, grads))
    return told


@pytest.mark.parametrize(
    ("world", "stage", "ep_size", "options", "accumulation"),
    [
        (2, 1, 2, DROPS, 2),
        (4, 3, 2, KEEPS, 1),
        thorough(4, 1, 2, DROPS, 2),
        thorough(2, 0, 2, ONE, 1),
        thorough(4, 2, 4, ONE, 2),
        thorough(4, 3, 4, DROPS, 2),
        thorough(2, 3, 1, KEEPS, 2),
        thorough(4, 0, 4, KEEPS, 1),
    ],
)
def test_any_number_of_ranks_is_one_process(
    world: int, stage: int, ep_size: int, options: dict[str, Any], accumulation: int
) -> None:
    """Gradients differ by 1e-6 of a tensor's norm, or where terms cancel by no more than twice a plain loop's,
    or than a ten-millionth of the whole gradient."""
    expected, rounded = (alone(world, options, accumulation, dtype) for dtype in (torch.float64, torch.float32))
    for rank, told in enumerate(run_ranks(divided, world, stage, ep_size, options, accumulation)):
        for step, ((loss, norm, grads), (losses, whole, others)) in enumerate(zip(told, expected, strict=True)):
            assert loss == pytest.approx(losses[rank], rel=1e-6), (rank, step)
            assert norm == pytest.approx(whole, rel=1e-6) and norm > CLIP, (rank, step)
            here = EXPERTS // ep_size
            assert sum(".deepspeed_experts." in name for name in grads) == 2 * here * 4
            for name, grad in grads.items():
                off, plain = ((some - others[name]).norm() for some in (grad, rounded[step][2][name]))
                limit = max(1e-6 * others[name].norm(), 2 * plain, 1e-7 * whole)
                assert off <= limit, (rank, step, name, float(off), float(limit))


# -- what moves, and what is held --------------------------------------------------------------------------------------


def exchanged(options: dict[str, Any], uneven: bool) -> tuple[list[tuple[str, int]], int, list[int]]:
    """Train one micro-batch; return the exchanges of tokens, this rank's number of them and its choices."""
    engine = started(0, 2, options)
    if uneven:  # every token to the first expert, none to the others
        for block in engine.module.blocks:
            gate = block.moe.deepspeed_moe.gate
            gate.register_forward_pre_hook(lambda _, given: (given[0].abs(), *given[1:]))
            weight = torch.zeros_like(gate.wg.weight)
            weight[0] = 1.0
            with torch.no_grad():
                gate.wg.weight.copy_(weight)
    values = batch(0, 0, dist.get_rank())
    if options.get("drop_tokens", True) is False and dist.get_rank() % 2:
        values = values[:1]  # without capacities ranks may have different numbers of tokens
    since = engine.ledger.sequence
    engine.backward(engine(values))
    engine.step()
    records = [(r.label, r.size) for r in engine.ledger.records(since) if r.op == "all_to_all"]
    counts = engine.module.blocks[0].moe(values)[2].tolist()
    return records, values[..., 0].numel(), counts


@pytest.mark.parametrize("uneven", [False, True])
def test_bytes_of_exchanges(uneven: bool) -> None:
    layers, row = 2, 4 * WIDTH
    for records, tokens, counts in run_ranks(exchanged, 4, KEEPS, uneven):
        rows = [size for label, size in records if "counts" not in label]
        sent = [size for label, size in records if "to experts" in label and "backward" not in label]
        assert len(rows) == 4 * layers and sent == [tokens * 2 * row] * layers
        # What comes back of this rank's tokens in the backward pass is as much.
        assert sum(size for label, size in records if "from experts, backward" in label) == layers * tokens * 2 * row
        assert [size for label, size in records if "counts" in label] == [8 * EXPERTS] * layers
        assert sum(counts) == 2 * tokens and (counts[0] == tokens) >= uneven


def test_bytes_of_exchanges_with_capacities() -> None:
    capacity = max(-(-2 * TOKENS * 2 * 7 // (10 * EXPERTS)), 4)
    for records, _, _ in run_ranks(exchanged, 2, DROPS, True):
        assert [size for _, size in records] == [EXPERTS * capacity * 4 * WIDTH] * 8
        assert all(f"{capacity} places" in label for label, _ in records)


LAYERS = 5


class Wide(torch.nn.Module):
    """Nearly all of it are experts."""

    def __init__(self, ep_size: int, drop: bool) -> None:
        super().__init__()
        inner = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
        options: dict[str, Any] = {"drop_tokens": drop, "use_rts": False}
        self.layers = torch.nn.ModuleList(MoE(64, inner, EXPERTS, ep_size, **options) for _ in range(LAYERS))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = values + layer(values)[0]
        return values.square().mean()


@pytest.mark.parametrize(
    ("world", "drop", "settings"),
    [
        (2, True, [(1, 2)]),
        thorough(4, False, [(3, 2)]),
        thorough(4, True, [(0, 2), (1, 1), (1, 4), (2, 2), (3, 1), (3, 2), (3, 4)]),
    ],
)
@on_ranks("world")
def test_memory_is_as_planned_and_falls(world: int, drop: bool, settings: list[tuple[int, int]]) -> None:
    for stage, ep_size in settings:
        keys = config(stage, optimizer="AdamW", bf16={"enabled": True})
        engine, *_ = shardwise.initialize(model=Wide(ep_size, drop), config=keys)
        values = torch.randn(64, 64, dtype=torch.bfloat16)

        def step(engine: Any = engine, values: torch.Tensor = values) -> None:
            engine.backward(engine(values))
            engine.step()

        peaks = least_peaks(engine.accountant, step)
        report = engine.memory_report(values)
        for kind in (*KINDS, Category.ACTIVATIONS):
            planned, measured = report.row(kind).planned, peaks[kind.value]
            # Without capacities the plan takes all experts to be chosen alike.
            limit = 0.35 if kind is Category.ACTIVATIONS and not drop else 0.03
            assert planned is not None, (stage, ep_size, report.notes)
            assert abs(planned - measured) <= limit * max(measured, 1 << 14), (stage, ep_size, kind)
        if stage == 1:
            one, dense = 64 * 256 * 2 + 256 + 64, EXPERTS * 64
            whole = 2 * LAYERS * (EXPERTS // ep_size * one + dense)
            assert abs(report.row(Category.PARAMETERS).measured - whole) <= 0.01 * whole
        engine.destroy()


# -- what does not fit together ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("world", r"ep_size=4 does not divide the 2 ranks"),
        ("order", r"was built with the experts from \d on, and this rank's place in its group has those from \d on"),
        ("meta", r"is on the meta device: experts that are divided over ranks need their values"),
    ],
)
@on_ranks(2)
def test_what_does_not_fit(kind: str, match: str) -> None:
    with torch.device("meta" if kind == "meta" else "cpu"):
        experts = torch.nn.ModuleList(expert() for _ in range(EXPERTS)) if kind == "order" else expert()
        model: Any = MoE(WIDTH, experts, EXPERTS, ep_size=4 if kind == "world" else 2)
    if kind == "order":
        model.__dict__["_first"] = 2 - model.__dict__["_first"]  # as if it had been built elsewhere
    with pytest.raises(UsageError, match=match):
        shardwise.initialize(model=model, config=config(3, use_data_before_expert_parallelism=kind == "order"))


@on_ranks(4)
def test_groups_are_made_once_and_in_either_order() -> None:
    """Neighbours with the same experts; groups of two sizes; a model built under zero.Init; wrapped once more."""
    with shardwise.zero.Init():
        one = MoE(WIDTH, expert(), EXPERTS, ep_size=2)
        two = MoE(WIDTH, expert(), EXPERTS, ep_size=4)
        three = MoE(WIDTH, expert(), EXPERTS, ep_size=2)
    model = torch.nn.ModuleList([one, two, three])
    model.forward = lambda x: sum(layer(x)[0].sum() for layer in model)  # type: ignore[method-assign]
    settings = config(3, use_data_before_expert_parallelism=True)
    engine, *_ = shardwise.initialize(model=model, config=settings)
    engine.backward(engine(torch.ones(3, WIDTH)))
    engine.step()
    group, rank = one.bound(), dist.get_rank()
    assert (group.ranks, group.replicas) == (((0, 2), (1, 3))[rank % 2], ((0, 1), (2, 3))[rank // 2])
    assert three.bound() is group and two.bound().ranks == (0, 1, 2, 3)
    assert engine.has_moe_layers and engine.num_experts == [EXPERTS] * 3
    assert sorted(engine.expert_parallel_group) == ["ep_size_2", "ep_size_4"]
    again, *_ = shardwise.initialize(model=model, config=settings)
    again.backward(again(torch.ones(3, WIDTH)))
    again.step()
    engine.destroy()  # of the former one, which takes nothing off the model any more
    again(torch.ones(3, WIDTH))
    again.destroy()
    with pytest.raises(UsageError, match="MoE without its groups"):
        model(torch.ones(3, WIDTH))


# -- beside other features ---------------------------------------------------------------------------------------------


def values(engine: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in engine.module.named_parameters():
        master = safe_get_full_fp32_param(parameter)
        assert master is not None
        found[part_of(parameter).name or name] = master.clone()
    return found


class Recomputed(Model):
    """The same, whose blocks are computed again in the backward pass."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        total = values.new_zeros(())
        for block in self.blocks:
            values, l_aux = shardwise.checkpointing.checkpoint(block, values)
            total = total + 0.01 * l_aux
        return self.head(values).square().mean() + total


@pytest.mark.parametrize(
    ("kind", "stage", "world"),
    [
        ("recompute", 3, 2),
        *(thorough(kind, stage, 4) for kind, stage in (("recompute", 3), ("offload", 2), ("offload", 3))),
    ],
)
@on_ranks("world")
def test_bits_beside_other_features(kind: str, stage: int, world: int) -> None:
    found = []
    for with_it in (False, True):
        settings = config(stage, 2, "AdamW")
        if kind == "offload" and with_it:
            settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
            if stage == 3:
                settings["zero_optimization"]["offload_param"] = {"device": "cpu"}
        model = (Recomputed if kind == "recompute" and with_it else Model)(2, **KEEPS)
        engine, *_ = shardwise.initialize(model=model, config=settings)
        steps(engine, 0, 2)
        found.append(values(engine))
        engine.destroy()
    plain, other = found
    assert plain.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in plain.items())


@on_ranks(2)
def test_ranks_with_other_numbers_of_tokens_are_named_where_tokens_may_be_dropped() -> None:
    tokens = batch(0, 0, dist.get_rank())[: 1 + dist.get_rank()]
    keeping = started(1, 2, KEEPS)
    keeping.backward(keeping(tokens))
    dropping = started(1, 2, DROPS)
    with pytest.raises(UsageError, match=rf"blocks.0.moe: the ranks \[0, 1\] have \[{TOKENS}, {2 * TOKENS}\] tokens"):
        dropping.backward(dropping(tokens))


@on_ranks(2)
def test_numbers_of_tokens_are_compared_in_each_pass_where_tokens_may_be_dropped() -> None:
    rank, whole = dist.get_rank(), batch(0, 0, 0)
    engine, tokens = started(1, 2, DROPS), whole[: 1 + rank]
    engine.backward(engine(whole))
    engine.step()
    for trains in (False, True):
        engine.train(trains)
        with pytest.raises(UsageError, match=rf"the ranks \[0, 1\] have \[{TOKENS}, {2 * TOKENS}\] tokens"):
            engine(tokens)
    # Capacities also depend on the mode.
    engine.train(rank == 0)
    with pytest.raises(UsageError, match=rf"have \[{2 * TOKENS}, {2 * TOKENS}\] tokens and \[5, 6\] places"):
        engine(whole)
    # On NCCL the device compares.
    comm = engine.module.blocks[0].moe.bound().comm
    assert comm is not None
    comm.__dict__["waits_on_host"] = False
    engine.train()
    engine(whole)
    told = rf"MoE: rank {rank} of \[0, 1\] has {(1 + rank) * TOKENS} tokens and .*blocks"
    with pytest.raises(RuntimeError, match=told):
        engine(tokens)
