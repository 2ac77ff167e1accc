"""The names and arguments that the configuration checks are those of the classes that are then built."""

from __future__ import annotations

import inspect

import pytest
import torch

from shardwise.config import names
from shardwise.config.names import canonical_optimizer, optimizer_signature, schedule_signature
from shardwise.optim import Muon
from shardwise.optim import build as build_optimizer
from shardwise.schedules import registry as schedules


@pytest.mark.parametrize("name", names.NATIVE_SCHEDULES)
def test_our_schedules_have_the_arguments_of_the_table(name: str) -> None:
    parameters = inspect.signature(getattr(schedules, name)).parameters
    real = {item.name: item.default for item in parameters.values() if item.name != "optimizer"}
    assert real == names.NATIVE_SCHEDULES[name]


@pytest.mark.parametrize("name", names.ONEBIT_OPTIMIZERS)
def test_optimizers_that_communicate_have_the_arguments_of_the_table(name: str) -> None:
    built = build_optimizer(name.upper(), [torch.zeros(2, requires_grad=True)], {}, device="cpu")
    parameters = inspect.signature(type(built)).parameters
    assert {item.name: item.default for item in parameters.values() if item.name != "params"} == (
        names.ONEBIT_OPTIMIZERS[name]
    )
    assert names.ONEBIT_STAGES[name] == (0 if built.ranks_differ else 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["adam", "adamw", "adagrad", "lion"])
def test_elementwise_optimizers_are_built_with_the_defaults_of_the_table(name: str) -> None:
    table = names.NATIVE_OPTIMIZERS[name]
    built = build_optimizer(name, [torch.zeros(2, requires_grad=True)], {}, device="cpu").defaults
    assert built.keys() <= {*table, "decoupled_weight_decay"}
    for argument in built.keys() & table.keys():
        assert built[argument] == table[argument], argument
    options = {argument: value for argument, value in table.items() if value is not None}
    build_optimizer(name, [torch.zeros(2, requires_grad=True)], options, device="cpu")
    torch_class = {"adam": torch.optim.AdamW, "adamw": torch.optim.AdamW, "adagrad": torch.optim.Adagrad}.get(name)
    if torch_class is not None:
        assert set(inspect.signature(torch_class).parameters) - {"params"} <= set(table)


@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_our_own_optimizers_have_the_arguments_of_the_table(name: str) -> None:
    options = dict(names.NATIVE_OPTIMIZERS[name])
    built = build_optimizer(name, [torch.zeros(2, 2, requires_grad=True)], options, device="cpu")
    real = {item.name: item.default for item in inspect.signature(type(built)).parameters.values()}
    table = {"params": inspect.Parameter.empty, **options}
    table.pop("per_head_muon", None)  # accepted where it is false
    assert real == table


def test_every_accepted_optimizer_can_be_built() -> None:
    for name in names.torch_optimizers().keys() - names.UNUSABLE_OPTIMIZERS.keys():
        weight = torch.zeros(2, 2, requires_grad=True)
        assert build_optimizer(name, [weight], {}, device="cpu").param_groups
        signature = optimizer_signature(name)
        assert signature is not None and "lr" in signature.arguments
        assert canonical_optimizer(name.lower()) in (name, name.lower())


def test_unusable_names_are_refused_by_the_builders_too() -> None:
    weight = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for name in names.UNUSABLE_SCHEDULES:
        with pytest.raises(ValueError, match="cannot be built"):
            schedules.build(name, optimizer, {})


def test_muon_is_ours_in_any_case() -> None:
    assert canonical_optimizer("Muon") == canonical_optimizer("muon") == "muon"
    assert type(build_optimizer("Muon", [torch.zeros(2, 2, requires_grad=True)], {}, device="cpu")) is Muon
    assert schedule_signature("NoSuchSchedule") is None and optimizer_signature("NoSuchOptimizer") is None
