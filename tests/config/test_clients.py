"""What clients write in the place of "auto", and what they read, goes through."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from shardwise.config import resolve
from shardwise.config.integrations import FILLS, READ
from shardwise.config.schema_index import lookup
from tests.config.dotted import config_of
from tests.harness.tables import tables

SENT = tables(__file__)["sent"]
"""Values that clients really send in the place of "auto"."""
KEYS = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler.type": "WarmupDecayLR",
    "scheduler.params": {"warmup_min_lr": 0, "warmup_num_steps": 1, "total_num_steps": 9},
    "zero_optimization.stage": 3,
}
"""Those of a configuration of the Trainer's kind."""


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, values in SENT.items() for value in values])
def test_every_value_that_a_client_sends_is_taken(path: str, value: Any) -> None:
    keys = copy.deepcopy(KEYS)
    if path in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        del keys["train_batch_size"]
        keys["train_micro_batch_size_per_gpu"] = 1
    config = resolve(config_of({**keys, path: value})).config
    *above, last = path.split(".")
    place: Any = config
    for name in above:
        place = place[name] if isinstance(place, dict) else getattr(place, name)
    found = place.get(last) if isinstance(place, dict) else getattr(place, last)
    assert found == (0.0 if (path, value) == ("gradient_clipping", None) else value)


def test_the_tables_name_keys_that_there_are() -> None:
    assert SENT.keys() == FILLS.keys()
    for path in (*FILLS, *READ):
        section, _, rest = path.partition(".params.")
        assert lookup(f"{section}.params" if rest else path)
