"""Dry runs of optimizers against the optimizers themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.memory import Category, memory_sources, track_activations
from shardwise.optim import Muon
from tests.harness import run_ranks, thorough
from tests.harness.training import engine_of

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "NAdam": torch.optim.NAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Adafactor": torch.optim.Adafactor,
}


shape = st.one_of(st.tuples(st.integers(1, 90)), st.tuples(st.integers(1, 40), st.integers(1, 40)))


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@settings(max_examples=3)
@given(shapes=st.lists(shape, min_size=1, max_size=4))
def test_state_is_exact(name: str, shapes: list[tuple[int, ...]]) -> None:
    lists = [torch.nn.ParameterList([torch.ones(s)]) for s in shapes]
    optimizer = OPTIMIZERS[name]([parameter for one in lists for parameter in one])
    planned = [found.optimizer for found in memory_sources(torch.nn.ModuleList(lists), optimizer=optimizer).modules]
    assert not any(entry.get("step") for entry in optimizer.state.values())  # only asked
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    kept = [[v for v in state.values() if isinstance(v, torch.Tensor)] for state in optimizer.state.values()]
    assert planned == [0, *(sum(v.nbytes for v in values) for values in kept or [()] * len(shapes))]


def wide() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(60, 300, bias=False), torch.nn.Linear(300, 40, bias=False))


@pytest.mark.parametrize("options", [{"ns_method": "gram"}, {"ns_method": "standard"}])
def test_products_of_a_matrix_with_itself_are_planned(options: dict[str, Any]) -> None:
    engine = engine_of(wide(), 0, lambda p: Muon(p, **options))
    planned = engine.memory_report(torch.ones(2, 60))
    for _ in range(3):
        engine.accountant.reset_peak()
        with track_activations(engine.accountant):
            engine.backward(engine(torch.ones(2, 60)).sum())
            engine.step()
    for category in (Category.OTHER, Category.OPTIMIZER):
        measured, row = engine.accountant.peak[category], planned.row(category)
        assert row.planned is not None and abs(row.planned - measured) <= 0.03 * measured, category
    engine.destroy()


def mixed(stage: int) -> Any:
    """Muon steps the matrices, AdamW the biases and the vector."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(60, 300), torch.nn.LayerNorm(300), torch.nn.Linear(300, 41))
    engine = engine_of(net, stage, {"type": "Muon", "params": {"lr": 0.01}})
    report = engine.memory_report(torch.ones(2, 60))
    held = []
    for _ in range(2):
        engine.accountant.reset_peak()
        with track_activations(engine.accountant):
            engine.backward(engine(torch.ones(2, 60)).sum())
            engine.step()
        kept = [v for state in engine.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        held.append((engine.accountant.live[Category.OPTIMIZER], sum(v.untyped_storage().nbytes() for v in kept)))
    row = report.row(Category.OPTIMIZER)
    engine.destroy()
    return held, row.planned, row.floor


@pytest.mark.parametrize(("stage", "world"), [thorough(0, 1), (1, 2), thorough(2, 1), (3, 2)])
def test_both_kinds_of_stepping_are_told(stage: int, world: int) -> None:
    matrices, rest = 300 * (60 + 41), 300 * 3 + 41
    told = run_ranks(mixed, world, stage)
    total = sum(held[-1][0] for held, *_ in told)
    assert total >= (4 * matrices + 8 * rest) * (world if stage == 0 else 1)
    for held, *_ in told:
        assert all(live == kept for live, kept in held), held
        assert held[0] == held[1]
    first, planned, floor = told[0]
    measured = first[0][0]
    assert planned is not None and floor is not None
    assert abs(planned - measured) <= 0.03 * measured
    assert 0.9 * planned <= floor <= planned


class Rebinding(torch.optim.Optimizer):
    """Makes its state anew in every step, as hand-written ones do, and keeps a list of its own."""

    shardwise_sharding = "elementwise"

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.history: list[int] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.history.append(1)
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                self.state[p]["mean"] = 0.9 * self.state[p].get("mean", torch.zeros_like(p)) + 0.1 * p.grad
                p.sub_(0.1 * self.state[p]["mean"])


def test_an_optimizer_of_ones_own_is_planned_and_measured() -> None:
    engine = engine_of(torch.nn.Linear(32, 32), 0, Rebinding)
    planned = engine.memory_report().row(Category.OPTIMIZER).planned
    assert engine.optimizer.history == []
    for _ in range(3):
        engine.accountant.reset_peak()
        with track_activations(engine.accountant):
            engine.backward(engine(torch.ones(2, 32)).sum())
            engine.step()
    state = (32 * 32 + 32) * 4
    assert engine.accountant.live[Category.OPTIMIZER] == state
    assert state < engine.accountant.peak[Category.OPTIMIZER] == planned <= 2 * state  # the old one beside the new
    engine.destroy()
