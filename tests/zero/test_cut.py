"""Tensors cut over ranks (columns, rows) under optimizers that look at whole tensors: the same bits as without cuts.

Losses are linear in the parameters, with gradients that are small multiples of 1/16: every sum is exact, in whichever
order, so whole tensors on one rank a replica and parts on two have the same gradients to the bit. What an optimizer
makes of them is the same if it sees whole tensors, or their true norms.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import shardwise
from shardwise.boxes import Box
from shardwise.memory import Category
from shardwise.registry import declare_part
from shardwise.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param
from tests.harness import RankFailure, run_ranks, thorough
from tests.harness.training import engine_of

SHAPES = {
    "embed.weight": (14, 10),
    "columns.weight": (12, 10),
    "columns.bias": (12,),
    "rows.weight": (8, 12),
    "rows.bias": (8,),
    "square.weight": (6, 6),
}
CUT = {"embed.weight": 0, "columns.weight": 0, "columns.bias": 0, "rows.weight": 1}
"""The dimension along which a tensor is cut; the others are whole on all ranks."""


class OwnAdamW(torch.optim.AdamW):
    """Declares nothing: gets whole tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                assert p.grad is not None and tuple(p.shape) in SHAPES.values()
                p.grad /= p.grad.norm() + 1e-3
        super().step(closure)


def make_optimizer(kind: str, model: nn.Module) -> Any:
    if kind == "own":
        return OwnAdamW(model.parameters(), lr=1e-2)
    if kind == "Adafactor":
        return torch.optim.Adafactor(model.parameters(), lr=1e-2)
    return {"type": kind, "params": {"lr": 1e-2}}


def cut(shape: tuple[int, ...], dimension: int | None, tp: int, number: int) -> Box | None:
    """Return the part of a tensor that a rank has: uneven ones."""
    if dimension is None or tp == 1:
        return None
    middle = shape[dimension] // 2 + 1
    box = [(0, size) for size in shape]
    box[dimension] = (0, middle) if number == 0 else (middle, shape[dimension])
    return tuple(box)


class Layer(nn.Module):
    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)

    clamps = False

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.clamps:
            with torch.no_grad():
                self.weight.clamp_(-0.5, 0.5)
        return torch.stack([(p.float() * gradients[n]).sum() for n, p in self.named_parameters()]).sum()


class Model(nn.Module):
    """All of the tensors (tp 1), or this rank's parts (tp 2)."""

    def __init__(self, tp: int) -> None:
        super().__init__()
        self.rank, self.replicas = dist.get_rank() % tp, dist.get_world_size() // tp
        self.replica = dist.get_rank() // tp
        generator = torch.Generator().manual_seed(5)
        self.boxes: dict[str, Box | None] = {}
        layers: dict[str, dict[str, nn.Parameter]] = {}
        for name, shape in SHAPES.items():
            values = torch.randn(shape, generator=generator)
            box = self.boxes[name] = cut(shape, CUT.get(name), tp, self.rank)
            parameter = nn.Parameter(self.own(name, values).clone())
            if box is not None:
                same = range(self.rank, dist.get_world_size(), tp)
                declare_part(parameter, ranks=same, shape=shape, box=box, divisor=self.replicas)
            layer, key = name.split(".")
            layers.setdefault(layer, {})[key] = parameter
        for name, parameters in layers.items():
            self.add_module(name, Layer(parameters))

    def own(self, name: str, values: torch.Tensor) -> torch.Tensor:
        return values[tuple(slice(*ends) for ends in self.boxes[name] or ())]

    def forward(self, step: int, micro: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1 + 7 * step + 3 * micro + 100 * self.replica)
        drawn = {n: torch.randint(-8, 9, shape, generator=generator) / 16 for n, shape in SHAPES.items()}
        total = torch.zeros(())
        for name, layer in self.named_children():
            keys = [n for n in SHAPES if n.startswith(f"{name}.")]
            total = total + layer({n.split(".")[1]: self.own(n, drawn[n]) for n in keys})
        return total


def start(tp: int, kind: str, stage: int, precision: str = "fp32", **more: Any) -> Any:
    model = Model(tp)
    section = {} if precision == "fp32" else {precision: {"enabled": True}}
    return engine_of(model, stage, make_optimizer(kind, model), zero=more, gradient_accumulation_steps=2, **section)


def train(engine: Any, first: int, last: int) -> list[float]:
    norms = []
    for step in range(first, last):
        for micro in range(2):
            engine.backward(engine(step, micro))
            engine.step()
        norms.append(float(engine.last_step.grad_norm))
    return norms


def values(engine: Any) -> dict[str, torch.Tensor]:
    """Return parameters and their masters, as whole tensors."""
    with shardwise.zero.GatheredParameters(list(engine.module.parameters())):
        found = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    for name, parameter in engine.module.named_parameters():
        master = safe_get_full_fp32_param(parameter)
        assert master is not None
        found[f"{name}, master"] = master
    return found


def trained(tp: int, kind: str, stages: list[tuple[int, str]], more: dict[str, Any]) -> list[Any]:
    found = []
    for stage, precision in stages:
        engine = start(tp, kind, stage, precision, **more)
        norms = train(engine, 0, 3)
        found.append((norms, values(engine)))
        engine.destroy()
    return found


def assert_same(parts: list[Any], whole: list[Any], what: str) -> None:
    for rank, found in enumerate(parts):
        for (norms, mine), (expected, theirs) in zip(found, whole[rank // 2], strict=True):
            assert norms == pytest.approx(expected, rel=1e-9), what
            for name, value in mine.items():
                assert torch.equal(value, theirs[name]), f"{what}: {name} differs on rank {rank}"


ALL_STAGES = [(stage, precision) for stage in range(4) for precision in ("fp32", "bf16")]


@pytest.mark.parametrize(
    ("kind", "world"),
    [("own", 2), thorough("own", 4), thorough("Adafactor", 2), thorough("Muon", 2), thorough("Lamb", 4)],
)
def test_the_same_bits_as_whole_tensors(kind: str, world: int) -> None:
    stages = ALL_STAGES if world == 2 else [(0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "bf16")]
    parts = run_ranks(trained, world, 2, kind, stages, {})
    whole = run_ranks(trained, world // 2, 1, kind, stages, {})
    assert_same(parts, whole, kind)


def test_state_on_the_host() -> None:
    more = {"offload_optimizer": {"device": "cpu"}}
    parts = run_ranks(trained, 2, 2, "Muon", [(2, "bf16")], more)
    assert_same(parts, run_ranks(trained, 1, 1, "Muon", [(2, "bf16")], {}), "Muon")


def owners(stage: int) -> tuple[int, int]:
    """Return how many elements this rank steps, and how many there are of its parts."""
    engine = start(2, "own", stage)
    stepped = sum(p.numel() for group in engine.optimizer.param_groups for p in group["params"])
    kept = sum(p.numel() for p in engine.module.parameters())
    engine.destroy()
    return stepped, kept


def test_owners_are_balanced_over_all_ranks() -> None:
    numel = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
    found = run_ranks(owners, 4, 3)
    assert sum(stepped for stepped, _ in found) == sum(numel.values())  # each tensor once
    assert max(stepped for stepped, _ in found) <= max(numel.values())


def planned() -> list[tuple[int | None, int | None]]:
    found = []
    for stage in (0, 3):
        engine = start(2, "own", stage, "bf16")
        before = engine.memory_report((0, 0))
        train(engine, 0, 1)
        engine.accountant.reset_peak()
        train(engine, 1, 2)
        found += [(before.row(kind).planned, engine.accountant.peak[kind]) for kind in HELD]
        engine.destroy()
    return found


HELD = (Category.PARAMETERS, Category.MASTER, Category.OPTIMIZER, Category.GRADIENTS)


def test_plans_know_that_tensors_are_owned() -> None:
    """Rank 0 owns the larger tensors; a plan of it holds them, and what arrives of them, whole."""
    found = run_ranks(planned, 2)[0]
    for planned_bytes, measured in found:
        assert planned_bytes is not None and measured
        assert abs(planned_bytes - measured) <= 0.1 * measured + 512, found


# -- checkpoints -------------------------------------------------------------------------------------------------------


def saving(path: str, tp: int, kind: str, stage: int) -> list[Any]:
    engine = start(tp, kind, stage, "bf16")
    train(engine, 0, 2)
    engine.save_checkpoint(path, tag="a")
    norms = train(engine, 2, 4)
    found = [(norms, values(engine))]
    engine.destroy()
    return found


def loading(path: str, tp: int, kind: str, stage: int) -> list[Any]:
    engine = start(tp, kind, stage, "bf16")
    engine.load_checkpoint(path, tag="a")
    norms = train(engine, 2, 4)
    found = [(norms, values(engine))]
    engine.destroy()
    return found


def test_checkpoints_have_state_of_whole_tensors(tmp_path: Path) -> None:
    kind, path = "Adafactor", str(tmp_path)
    run_ranks(saving, 4, path, 2, kind, 2)
    whole = run_ranks(saving, 2, str(tmp_path / "whole"), 1, kind, 2)
    for stage in (0, 3):
        assert_same(run_ranks(loading, 4, path, 2, kind, stage), whole, f"{kind}, stage {stage}")
    found = run_ranks(loading, 2, path, 1, kind, 1)
    assert_same([found[0], found[0], found[1], found[1]], whole, kind)


# -- changes by the script ---------------------------------------------------------------------------------------------


def changed(tp: int, stage: int, how: str) -> list[Any]:
    engine = start(tp, "own", stage, "bf16")
    train(engine, 0, 1)
    names = ["columns.weight", "square.weight"]
    some = [engine.module.get_parameter(name) for name in names]
    if how == "gathered":
        with shardwise.zero.GatheredParameters(some, modifier_rank=0), torch.no_grad():
            for parameter in some:
                parameter.mul_(1.5)
    elif how == "in place":
        with torch.no_grad():
            for parameter in some:
                parameter.clamp_(-0.5, 0.5)
    elif how == "loaded":
        state = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
        engine.module.load_state_dict(state)  # the same values: masters lose their further digits
    else:
        engine.module.columns.clamps = True
    norms = train(engine, 1, 2)
    engine.module.columns.clamps = False
    found = [(norms + train(engine, 2, 3), values(engine))]
    engine.destroy()
    return found


def accessed(tp: int, stage: int) -> list[Any]:
    engine = start(tp, "own", stage, "bf16")
    train(engine, 0, 1)
    found = {}
    for name, parameter in engine.module.named_parameters():
        master, state = safe_get_full_fp32_param(parameter), safe_get_full_optimizer_state(parameter, "exp_avg")
        assert master is not None and state is not None
        found[name] = state
        safe_set_full_fp32_param(parameter, master * 2)
    norms = train(engine, 1, 2)
    result = [(norms, {**values(engine), **found})]
    engine.destroy()
    return result


def test_masters_and_state_are_got_and_set_whole() -> None:
    assert_same(run_ranks(accessed, 4, 2, 3), run_ranks(accessed, 2, 1, 3), "stage 3")


@pytest.mark.parametrize(
    ("stage", "how"),
    [(2, "in place"), (1, "in forward"), thorough(3, "gathered"), thorough(2, "loaded")],
)
def test_changes_reach_masters_on_other_ranks(stage: int, how: str) -> None:
    assert_same(run_ranks(changed, 4, 2, stage, how), run_ranks(changed, 2, 1, stage, how), how)


def saved_at_once(path: str, tp: int, stage: int) -> dict[str, torch.Tensor]:
    engine = start(tp, "own", stage, "bf16")
    train(engine, 0, 1)
    parameter = engine.module.get_parameter("columns.weight")
    with shardwise.zero.GatheredParameters(parameter, modifier_rank=0), torch.no_grad():
        parameter.mul_(1.5)
    engine.save_checkpoint(path, tag="a")
    engine.destroy()
    shardwise.checkpoint.export(f"{path}/a", f"{path}/rank{dist.get_rank()}")
    return load_file(f"{path}/rank{dist.get_rank()}/model.safetensors")


def test_changes_are_saved(tmp_path: Path) -> None:
    found = run_ranks(saved_at_once, 2, str(tmp_path / "parts"), 2, 3)[0]
    expected = run_ranks(saved_at_once, 1, str(tmp_path / "whole"), 1, 3)[0]
    assert found.keys() == expected.keys() == SHAPES.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


# -- what does not fit together ----------------------------------------------------------------------------------------


def wrong(kind: str) -> None:
    model, rank = Model(2), dist.get_rank()
    weight = model.get_parameter("columns.weight")
    if kind == "hole" and rank == 0:
        weight.data = weight.data[:6].clone()
        declare_part(weight, ranks=[0], shape=(12, 10), box=((0, 6), (0, 10)), divisor=1)
    elif kind == "shape" and rank == 1:
        declare_part(weight, ranks=[1], shape=(15, 10), box=((7, 12), (0, 10)), divisor=1)
    elif kind == "twice" and rank == 1:
        declare_part(weight, ranks=[1], shape=(12, 10), box=((6, 11), (0, 10)), divisor=1)
    optimizer = OwnAdamW(model.parameters(), lr=1e-2)
    if kind == "state":
        for parameter in model.parameters():
            optimizer.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
    shardwise.initialize(
        model=model,
        optimizer=optimizer,
        config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}},
    )


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("hole", r"'columns.weight': the parts that ranks have are 110 of its 120 elements \[12, 10\], and the"),
        ("state", r"OwnAdamW steps whole tensors, and has state for 'embed.weight', of which this rank has the box"),
    ],
)
def test_what_does_not_fit(kind: str, match: str) -> None:
    with pytest.raises(RankFailure, match=match):
        run_ranks(wrong, 2, kind)
