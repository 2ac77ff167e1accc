"""The names and arguments that the configuration checks are those of the classes that are then built."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.config import names, resolve
from shardwise.config.names import canonical_optimizer, model_of
from shardwise.config.schema.base import Arguments
from shardwise.errors import ConfigError
from shardwise.optim import AdamW, Muon
from shardwise.optim import build as build_optimizer
from shardwise.schedules import registry as schedules
from tests.harness.tables import tables


def defaults(model: type[Arguments]) -> dict[str, Any]:
    """The arguments of a model with their defaults, as a signature has them."""
    fields = model.model_fields.items()
    return {name: inspect.Parameter.empty if field.is_required() else field.default for name, field in fields}


def signature(cls: Any, *without: str) -> dict[str, Any]:
    return {item.name: item.default for item in inspect.signature(cls).parameters.values() if item.name not in without}


@pytest.mark.parametrize("name", names.NATIVE_SCHEDULES)
def test_our_schedules_have_the_arguments_of_the_model(name: str) -> None:
    assert signature(getattr(schedules, name), "optimizer") == defaults(names.NATIVE_SCHEDULES[name])


@pytest.mark.parametrize("name", names.ONEBIT_STAGES)
def test_optimizers_that_communicate_have_the_arguments_of_the_model(name: str) -> None:
    built = build_optimizer(name.upper(), [torch.zeros(2, requires_grad=True)], {}, device="cpu")
    table = defaults(names.NATIVE_OPTIMIZERS[name])
    named = signature(type(built), "params", "ignored")
    assert named == {argument: table[argument] for argument in named}
    without_effect = {"amsgrad", "comm_backend_name", "cuda_aware", "eps_inside_sqrt"}
    assert table.keys() - named.keys() == without_effect & table.keys()
    build_optimizer(name, [torch.zeros(2, requires_grad=True)], table, device="cpu")
    assert names.ONEBIT_STAGES[name] == (0 if built.ranks_differ else 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["adam", "adamw", "adagrad", "lion"])
def test_elementwise_optimizers_are_built_with_the_defaults_of_the_model(name: str) -> None:
    table = defaults(names.NATIVE_OPTIMIZERS[name])
    built = build_optimizer(name, [torch.zeros(2, requires_grad=True)], {}, device="cpu").defaults
    assert built.keys() <= {*table, "decoupled_weight_decay"}
    for argument in built.keys() & table.keys():
        assert built[argument] == table[argument], argument
    build_optimizer(name, [torch.zeros(2, requires_grad=True)], table, device="cpu")
    torch_class = {"adam": torch.optim.AdamW, "adamw": torch.optim.AdamW, "adagrad": torch.optim.Adagrad}.get(name)
    if torch_class is not None:
        assert set(inspect.signature(torch_class).parameters) - {"params"} <= set(table)


@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_our_own_optimizers_have_the_arguments_of_the_model(name: str) -> None:
    table = defaults(names.NATIVE_OPTIMIZERS[name])
    built = build_optimizer(name, [torch.zeros(2, 2, requires_grad=True)], table, device="cpu")
    table.pop("per_head_muon", None)  # accepted where it is false
    assert signature(type(built), "params") == table


@pytest.mark.parametrize(("name", "params", "message"), tables(__file__)["wrong"])
def test_the_builder_says_what_the_configuration_says(name: str, params: dict[str, Any], message: str) -> None:
    """One check for both, so that a script that builds an optimizer itself learns as much."""
    with pytest.raises(ConfigError) as built:
        build_optimizer(name, [torch.zeros(2, 2, requires_grad=True)], params, device="cpu")
    with pytest.raises(ConfigError) as resolved:
        resolve({"train_batch_size": 2, "optimizer": {"type": name, "params": params}})
    assert str(resolved.value) == f"in the config dict: {built.value}"
    assert type(resolved.value) is type(built.value)
    assert [problem.path for problem in built.value.problems] == [f"optimizer.params.{message}"]


def test_numbers_that_are_tensors_and_numbers_of_numpy() -> None:
    weight = torch.zeros(2, requires_grad=True)
    rate = torch.tensor(0.5)
    for name in ("adam", "SGD", "lamb"):
        built = build_optimizer(name, [weight], {"lr": rate}, device="cpu")
        assert built.defaults["lr"] is rate
        assert resolve({"train_batch_size": 1, "optimizer": {"type": name, "params": {"lr": rate}}})
        for wrong in (torch.tensor(-0.5), torch.ones(2)):
            with pytest.raises(ConfigError, match=r"optimizer\.params\.lr: expected a number >= 0, found "):
                build_optimizer(name, [weight], {"lr": wrong}, device="cpu")
    assert AdamW([weight], lr=np.float32(0.25)).defaults["lr"] == 0.25


def test_every_accepted_optimizer_can_be_built() -> None:
    for name in names.torch_optimizers().keys() - names.UNUSABLE_OPTIMIZERS.keys():
        weight = torch.zeros(2, 2, requires_grad=True)
        assert build_optimizer(name, [weight], {}, device="cpu").param_groups
        model = model_of("optimizer", name)
        assert model is not None and "lr" in model.model_fields
        assert canonical_optimizer(name.lower()) in (name, name.lower())


def test_muon_is_ours_in_any_case() -> None:
    assert canonical_optimizer("Muon") == canonical_optimizer("muon") == "muon"
    assert type(build_optimizer("Muon", [torch.zeros(2, 2, requires_grad=True)], {}, device="cpu")) is Muon
    assert model_of("scheduler", "NoSuchSchedule") is None and model_of("optimizer", "NoSuchOptimizer") is None
