"""Parameters that only some ranks share: experts of which each rank has some, under every stage.

The same training is done by engines whose ranks have all experts, where an expert that a rank does not use contributes
zeros. Adding zeros changes no bit, so both have the same ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.errors import ConflictError, DesyncError, UsageError
from shardwise.registry import declare_part, part_of
from shardwise.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_set_full_fp32_param
from tests.harness import RankFailure, of_all_ranks, on_ranks, run_ranks, thorough
from tests.harness.training import config_of, engine_of

WORLD, EXPERTS, WIDTH = 4, 2, 12
BUILT_IN = {"Lamb": {"lr": 1e-2}, "AdamW": {"lr": 1e-2, "weight_decay": 0.05}, "Muon": {"lr": 1e-2}}


class Experts(nn.Module):
    """Some of the experts: their weights apart, by name, and what is added in one tensor."""

    def __init__(self, mine: list[int], table: bool = True) -> None:
        super().__init__()
        self.mine = mine
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(WIDTH, WIDTH)) for _ in mine)
        self.shift = nn.Parameter(torch.zeros(len(mine), WIDTH)) if table else None

    def forward(self, values: torch.Tensor, expert: int) -> torch.Tensor:
        place = self.mine.index(expert)
        moved = values @ self.weights[place]
        return moved if self.shift is None else moved + self.shift[place]


class Block(nn.Module):
    def __init__(self, mine: list[int], table: bool) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts(mine, table)

    def forward(self, values: torch.Tensor, expert: int) -> torch.Tensor:
        return values + self.experts(torch.tanh(self.dense(values)), expert)


class Mixture(nn.Module):
    """Blocks with experts, of which this rank has some."""

    def __init__(self, mine: list[int], table: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(mine, table) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, values: torch.Tensor, expert: int, again: bool = False) -> torch.Tensor:
        for block in self.blocks:
            values = block(values, expert)
        if again:
            values = self.blocks[0].experts(values, expert)
        return self.head(values).mean()


def make(*, divided: bool, table: bool = True, divisor: int | None = None) -> Mixture:
    """A model with the same values everywhere; `divided`: with this rank's expert only."""
    torch.manual_seed(3)
    whole = Mixture(list(range(EXPERTS)), table)
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.3)
    if not divided:
        return whole
    rank = dist.get_rank()
    expert = rank % EXPERTS
    model = Mixture([expert], table)
    names = dict(whole.named_parameters())
    same = list(range(expert, dist.get_world_size(), EXPERTS))
    for name, parameter in model.named_parameters():
        if ".weights." in name:
            tensor = name.replace("weights.0", f"weights.{expert}")
            parameter.data.copy_(names[tensor].data)
            declare_part(parameter, ranks=same, name=tensor, divisor=divisor)
        elif name.endswith("shift"):
            parameter.data.copy_(names[name].data[expert : expert + 1])
            box = [(expert, expert + 1), (0, WIDTH)]
            declare_part(parameter, ranks=same, shape=(EXPERTS, WIDTH), box=box, divisor=divisor)
        else:
            parameter.data.copy_(names[name].data)
    return model


def config(stage: int, optimizer: str, precision: str, accumulation: int, **zero: Any) -> dict[str, Any]:
    section = {"type": optimizer, "params": BUILT_IN[optimizer]}
    kind = {precision: {"enabled": True, **({"initial_scale_power": 6} if precision == "fp16" else {})}}
    keys = {"gradient_accumulation_steps": accumulation, "gradient_clipping": 0.05}
    return config_of(stage, section, rows=3, zero=zero, **keys, **(kind if precision != "fp32" else {}))


def batch(step: int, micro: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(100 * step + 10 * micro + dist.get_rank())
    return torch.randn(3, WIDTH).to(dtype)


def steps(engine: Any, first: int, last: int, *, again: bool = False) -> list[tuple[float, ...]]:
    """Train; return the norm, its clipped value and the loss of each step."""
    dtype = next(engine.module.parameters()).dtype
    told = []
    for step in range(first, last):
        for micro in range(engine.gradient_accumulation_steps()):
            twice = again and step == 1 and dist.get_rank() == 1
            loss = engine(batch(step, micro, dtype), dist.get_rank() % EXPERTS, twice)
            engine.backward(loss)
            engine.step()
        told.append((float(engine.last_step.grad_norm), float(engine.last_step.clipped_norm), float(loss.detach())))
    return told


def values(engine: Any) -> dict[str, torch.Tensor]:
    """Masters of what this rank uses: of an engine with all experts, its own one's part."""
    expert, found = dist.get_rank() % EXPERTS, {}
    for name, parameter in engine.module.named_parameters():
        master = safe_get_full_fp32_param(parameter)
        assert master is not None
        if name.endswith("shift"):
            master = master[expert if len(master) > 1 else 0]
        found[part_of(parameter).name or name] = master.clone()
    return {n: v for n, v in found.items() if ".weights." not in n or n.endswith(f".{expert}")}


def assert_same(settings: list[tuple[Any, ...]], table: bool = True, again: bool = False) -> None:
    for setting in settings:
        found = []
        for divided in (True, False):
            engine, *_ = shardwise.initialize(model=make(divided=divided, table=table), config=config(*setting))
            found.append((steps(engine, 0, 2, again=again), values(engine)))
            rescued = engine.sharded.unsharder.late
            assert not again or setting[0] < 3 or rescued or dist.get_rank() != 1
            engine.destroy()
        (told, masters), (expected, others) = found
        assert masters.keys() == others.keys()
        for name, value in masters.items():
            assert torch.equal(value, others[name]), f"{setting}: {name} differs"
        for mine, theirs in zip(told, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-12), setting
            assert mine[0] > mine[1] > 0  # clipped
        assert len(set(of_all_ranks(told[0][0]))) == 1  # one norm on all ranks


@pytest.mark.parametrize(
    ("optimizer", "accumulation", "precision", "stages"),
    [
        ("Lamb", 2, "bf16", (1, 3)),
        *itertools.starmap(
            thorough,
            [("Lamb", 2, "bf16", (0, 2)), ("AdamW", 1, "fp32", range(4)), ("AdamW", 2, "fp16", range(4))],
        ),
    ],
)
def test_the_same_bits_as_ranks_that_have_everything(
    optimizer: str, accumulation: int, precision: str, stages: Iterable[int]
) -> None:
    run_ranks(assert_same, WORLD, [(stage, optimizer, precision, accumulation) for stage in stages])


def test_whole_tensors_are_owned_by_ranks_that_have_them() -> None:
    run_ranks(assert_same, WORLD, [(3, "Muon", "fp32", 1)], False)


@pytest.mark.parametrize("ways", [((0, 1), (2, 2)), thorough(((0, 2), (1, 1), (2, 1), (3, 2)))], ids=str)
def test_what_no_other_rank_has_is_not_divided(ways: tuple[tuple[int, int], ...]) -> None:
    run_ranks(assert_same, EXPERTS, [(stage, "AdamW", "bf16", n) for stage, n in ways])


@pytest.mark.parametrize(("precision", "accumulation"), [("bf16", 2), thorough("fp32", 1)])
def test_units_that_are_needed_once_more(precision: str, accumulation: int) -> None:
    run_ranks(assert_same, WORLD, [(3, "AdamW", precision, accumulation)], True, True)


@pytest.mark.parametrize("ways", [((1, True), (2, False), (3, True)), thorough(((1, True), (3, False)))], ids=str)
@on_ranks(WORLD)
def test_beside_groups_of_ranks(ways: tuple[tuple[int, bool], ...]) -> None:
    """Parameters of all ranks lie in a grid, those of some in another domain."""
    found = []
    for stage, spread in ways:
        zero = {"mics_shard_size": 2, "optimizer_over_replicas": spread}
        model = make(divided=True)
        engine, *_ = shardwise.initialize(model=model, config=config(stage, "AdamW", "fp32", 1, **zero))
        steps(engine, 0, 2)
        found.append(values(engine))
        engine.destroy()
    outcomes = found
    for other in outcomes[1:]:
        assert all(torch.equal(value, other[name]) for name, value in outcomes[0].items())


@on_ranks(WORLD)
def test_the_mean_over_the_ranks_that_have_it() -> None:
    engine, *_ = shardwise.initialize(
        model=make(divided=True, divisor=WORLD // EXPERTS), config=config(3, "AdamW", "fp32", 2)
    )
    for micro in range(2):
        engine.backward(engine(batch(0, micro, torch.float32), dist.get_rank() % EXPERTS))
        if not micro:
            engine.step()
    found = {part_of(p).name or n: safe_get_full_grad(p) for n, p in engine.module.named_parameters()}
    engine.step()
    engine.destroy()
    model = make(divided=False)
    for rank in range(WORLD):
        for micro in range(2):
            torch.manual_seed(10 * micro + rank)
            (model(torch.randn(3, WIDTH), rank % EXPERTS) / 2).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, gradient in found.items():
        wanted = expected[name] / (WORLD // EXPERTS if ".experts." in name else WORLD)
        assert torch.allclose(gradient, wanted, rtol=1e-5, atol=1e-7), name


@on_ranks(WORLD)
def test_an_overflow_of_a_part_is_everybodys() -> None:
    engine, *_ = shardwise.initialize(model=make(divided=True), config=config(3, "AdamW", "fp16", 1))
    before = values(engine)
    loss = engine(batch(0, 0, torch.float16), dist.get_rank() % EXPERTS)
    if dist.get_rank() == 1:
        parameter = engine.module.blocks[1].experts.weights[0]
        parameter.register_hook(lambda grad: torch.full_like(grad, torch.inf))
    engine.backward(loss)
    engine.step()
    assert all(torch.equal(value, before[name]) for name, value in values(engine).items())
    report = engine.last_step.overflow
    assert (report.parameter, report.ranks, report.phase) == ("blocks.1.experts.weights.1", (1,), "backward")
    assert report.numel == report.infinite == WIDTH * WIDTH


# -- memory, access, size ----------------------------------------------------------------------------------------------


@on_ranks(WORLD)
def test_one_parameter_is_read_and_written_by_the_ranks_that_have_it() -> None:
    rank = dist.get_rank()
    engine, *_ = shardwise.initialize(model=make(divided=True), config=config(3, "AdamW", "fp32", 1))
    weight = engine.module.blocks[0].experts.weights[0]
    safe_set_full_fp32_param(weight, torch.full((WIDTH, WIDTH), 1.0 + rank % EXPERTS))
    with shardwise.zero.GatheredParameters(weight, modifier_rank=2), torch.no_grad():
        assert torch.equal(weight, torch.full((WIDTH, WIDTH), 1.0 + rank % EXPERTS))
        weight += 4 * (rank == 2)
    master = safe_get_full_fp32_param(weight)
    assert master is not None and torch.equal(master, torch.full((WIDTH, WIDTH), 2.0 if rank % EXPERTS else 5.0))
    engine.destroy()
    assert torch.equal(weight, master)


@on_ranks(WORLD)
def test_a_part_of_real_size() -> None:
    """A square expert of 16 MiB on each pair of ranks."""
    rank, side = dist.get_rank(), 2048
    model = nn.Sequential(nn.Linear(8, side, bias=False), nn.Linear(side, side, bias=False))
    nn.init.ones_(model[0].weight)
    nn.init.eye_(model[1].weight)
    expert = rank % EXPERTS
    declare_part(model[1].weight, ranks=[expert, expert + EXPERTS], name=f"expert.{expert}")
    engine = engine_of(model, 3, torch.optim.SGD(model.parameters(), lr=1.0))
    engine.backward(engine(torch.full((1, 8), 1.0 + rank)).sum())
    engine.step()
    # d(sum)/d(weight[i, j]) is the input of column j, 8 (1 + rank); a quarter of the sum over two ranks is the mean.
    with shardwise.zero.GatheredParameters(model[1].weight):
        assert float(model[1].weight[0, 1]) == -8 * ((1 + expert) + (3 + expert)) / 4


# -- what does not fit together ----------------------------------------------------------------------------------------


def wrong(kind: str) -> None:
    rank = dist.get_rank()
    model = make(divided=True)
    settings = config(3, "AdamW", "fp32", 1)
    if kind == "others":
        declare_part(model.blocks[0].experts.weights[0], ranks=[(rank + 1) % WORLD])
    elif kind == "overlapping":  # ranks have rows 0 and 1, 1 and 2, ... of one table
        for name, parameter in model.named_parameters():
            if name.endswith("shift"):
                parameter.data = torch.zeros(2, WIDTH)
                declare_part(parameter, ranks=[rank], shape=(5, WIDTH), box=[(rank, rank + 2), (0, WIDTH)])
    elif kind == "units" and rank == 3:
        model.blocks[2].experts.weights = nn.ParameterList()
    elif kind == "init":
        with shardwise.zero.Init():
            model.blocks[1].experts = Experts([rank % EXPERTS])
        for name, parameter in model.blocks[1].experts.named_parameters():
            declare_part(parameter, ranks=[rank % EXPERTS, rank % EXPERTS + EXPERTS], name=f"{name}.{rank % EXPERTS}")
    elif kind == "onebit":
        settings["zero_optimization"]["stage"] = 1
        settings["optimizer"] = {"type": "OneBitAdam", "params": {"lr": 1e-3}}
        settings.pop("gradient_clipping")
    shardwise.initialize(model=model, config=settings)


@pytest.mark.parametrize(
    ("kind", "error", "match"),
    [
        ("others", UsageError, r"is declared as a part of ranks \[\d\], of 4 ranks, by rank"),
        ("overlapping", UsageError, r"shift': rank 0 has declared the part .* of \[5, 12\], rank 1 .* overlap"),
        ("units", DesyncError, r"nits|not given the same"),
        ("init", UsageError, r"is declared as a part that only some ranks have, and was built under zero.Init"),
        ("onebit", ConflictError, r"cannot have parameters that only some ranks share"),
    ],
)
def test_declarations_that_do_not_fit(kind: str, error: type[Exception], match: str) -> None:
    with pytest.raises(RankFailure, match=match) as found:
        run_ranks(wrong, WORLD, kind)
    assert error.__name__ in str(found.value)


def test_arguments() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    for bad in ([], [1, 0], [0, 0], [-1]):
        with pytest.raises(UsageError, match="expected ranks in ascending order"):
            declare_part(parameter, ranks=bad)
    with pytest.raises(UsageError, match="needs ranks"):
        declare_part(parameter, divisor=2)
    for box in ([(0, 1, 2)], [[(0, 1), (0, 2)]], [3]):
        with pytest.raises(UsageError, match=r"declare_part\(box=.*expected \(first, end\) in each dimension"):
            declare_part(parameter, box=box)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="at least 1"):
        declare_part(parameter, ranks=[0], divisor=0)
    assert part_of(parameter) == part_of(nn.Parameter(torch.zeros(1)))
