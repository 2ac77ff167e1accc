"""Wrong configurations: each is refused with the path of the mistake and the way out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from shardwise.config import resolve
from shardwise.errors import BatchSizeError, ConfigError, ConflictError, NotBuiltError
from tests.config.dotted import config_of
from tests.harness.tables import tables

CASES = [(kind, *row) for kind, rows in tables(__file__).items() for row in rows]
"""Kind, keys, path of the mistake, key that the advice names."""


def only_problem(config: dict[str, Any]) -> ConfigError:
    """Resolve and return the error, which must list exactly one problem."""
    with pytest.raises(ConfigError) as caught:
        resolve(config)
    assert len(caught.value.problems) == 1, str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("kind", "keys", "path", "advised"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_path_and_advice(kind: str, keys: dict[str, Any], path: str, advised: str) -> None:
    error = only_problem(config_of(keys))
    message = error.problems[0].message
    assert error.problems[0].path == path and f"{path}: " in str(error) and "the config dict" in str(error)
    assert not advised or f"`{advised}`" in message
    assert isinstance(error, ValueError)
    if kind == "values":
        assert re.search("expected .+found ", message)
    if kind == "conflicts":
        assert isinstance(error, ConflictError) and isinstance(error, AssertionError)


def test_everything_wrong_is_reported_at_once() -> None:
    keys = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 3,
        "fp61": {},
        "zero_optimization.stagee": 1,
        "zero_optimization.stage": 7,
        "optimizer": {"type": "Adam", "params": {"lrr": 1}},
        "nebula.enabled": True,
        "fp16.enabled": True,
        "bf16.enabled": True,
    }
    with pytest.raises(ConfigError) as caught:
        resolve(config_of(keys))
    wrong = keys.keys() - {"train_micro_batch_size_per_gpu", "optimizer", "bf16.enabled"} | {"optimizer.params.lrr"}
    assert {problem.path for problem in caught.value.problems} == wrong
    assert type(caught.value) is ConfigError
    assert str(caught.value).startswith("7 problems in the config dict:\n  1. ")


def test_class_of_the_error_says_what_kind_of_problem_it_is() -> None:
    assert type(only_problem(config_of({"nebula.enabled": True}))) is NotBuiltError
    assert type(only_problem({"gradient_accumulation_steps": 8})) is BatchSizeError
    assert only_problem({"train_batch_sise": 8}).problems[0].path == "train_batch_sise"
    with pytest.raises(ValueError, match="world_size must be at least 1, found 0"):
        resolve({"train_batch_size": 8}, world_size=0)
