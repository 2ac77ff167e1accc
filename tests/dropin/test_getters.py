"""Methods of the engine that read the configuration, by the names that scripts call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardwise.config import Resolution, resolve
from shardwise_deepspeed.getters import ConfigGetters
from tests.harness.tables import tables


class Reader(ConfigGetters):
    def __init__(self, resolution: Resolution) -> None:
        self._resolution = resolution


def reader(**keys: Any) -> Any:
    return Reader(resolve({"train_batch_size": 8, **keys}))


def test_every_getter_works_on_an_empty_configuration_and_says_what_it_reads() -> None:
    engine = reader()
    names = [name for name in dir(ConfigGetters) if not name.startswith("_")]
    assert len(names) > 120
    for name in names:
        method = getattr(engine, name)
        method()
        assert method.__name__ == name
        assert method.__doc__.startswith("Return ") and method.__doc__.endswith(".")


@pytest.mark.parametrize(("keys", "name", "value"), tables(__file__)["values"])
def test_values(keys: dict[str, Any], name: str, value: Any) -> None:
    found = getattr(reader(**keys), name)()
    assert json.loads(json.dumps(found, default=str)) == value


def test_getters_follow_a_changed_configuration() -> None:
    engine = reader()
    engine._resolution.config.gradient_clipping = 2.0
    assert engine.gradient_clipping() == 2.0
