"""`compression`: methods by name, typed parameters, combinations, and what editors are told of them."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from shardwise.config import effective, resolve
from shardwise.config.export import json_schema
from shardwise.config.gradient_compression import method_parameters
from shardwise.config.schema.gradients import PowerSGDOptions
from shardwise.errors import ConfigError, ConflictError, NotBuiltError


def with_compression(method: Any, params: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    section = {"type": method} if params is None else {"type": method, "params": params}
    return {"train_micro_batch_size_per_gpu": 1, "compression": section, **keys}


@pytest.mark.parametrize("spelled", ["powerSGD", "powersgd", "POWERSGD"])
def test_names_in_any_case(spelled: str) -> None:
    found = resolve(with_compression(spelled, {"matrix_approximation_rank": 2.0}), world_size=2)
    assert found.config.compression.type == "powerSGD"
    assert method_parameters(found.config) == PowerSGDOptions(matrix_approximation_rank=2)
    assert not found.no_effect


def test_other_names_and_auto() -> None:
    config = resolve(with_compression("powerSGD", {"start_powerSGD_iter": 3, "random_seed": "auto"})).config
    assert method_parameters(config) == PowerSGDOptions(start_compressing_after_step=3)


def test_the_effective_configuration_has_all_parameters() -> None:
    first = effective(resolve(with_compression("TOPK", {"ratio": 0.5})))
    params = {"ratio": 0.5, "start_compressing_after_step": 0, "use_error_feedback": True}
    assert first["compression"] == {"type": "topk", "params": params}
    assert effective(resolve(first)) == first


def test_one_rank_is_told_that_nothing_travels() -> None:
    (note,) = resolve(with_compression("topk")).no_effect
    assert (note.path, note.reason) == ("compression", "there is one rank, so no gradient travels")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"communication_data_type": "fp16"}, "communication_data_type"),
        ({"optimizer": {"type": "OneBitAdam"}}, "compresses what it sends itself"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, "zero_quantized_gradients"),
    ],
)
def test_combinations_that_are_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(with_compression("topk", **keys), world_size=2)
    problems = [problem for problem in caught.value.problems if problem.error is not NotBuiltError]
    assert [problem.error for problem in problems] == [ConflictError]
    assert words in str(problems[0])


@pytest.mark.parametrize("keys", [{"gradient_allreduce_op": "sum"}, {"prescale_gradients": True}, {"fp16": {}}])
def test_combinations_that_work(keys: dict[str, Any]) -> None:
    resolve(with_compression("dgc", **keys), world_size=2)
    resolve(with_compression("powerSGD", communication_data_type="fp16"), world_size=2)  # its factors are fp32


def test_a_ratio_that_saves_nothing_is_warned_of() -> None:
    (warning,) = resolve(with_compression("topk", {"ratio": 0.6})).warnings
    assert "no fewer bytes" in warning
    assert not resolve(with_compression("topk", {"ratio": 0.2})).warnings


def test_editors_know_the_parameters_of_each_method() -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    for method, params, good in [
        ("PowerSGD", {"matrix_approximation_rank": 2}, True),
        ("powerSGD", {"start_powerSGD_iter": "auto"}, True),
        ("powerSGD", {"ratio": 0.1}, False),
        ("topk", {"ratio": 2}, False),
        (None, {}, True),
    ]:
        assert validator.is_valid(with_compression(method, params)) is good, (method, params)
