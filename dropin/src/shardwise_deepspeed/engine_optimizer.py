"""`DeepSpeedOptimizer`, which recognises the optimizers of engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from shardwise.errors import ConfigError
from shardwise.optim.sharding import group_shardings
from shardwise.zero.parameters.guards import belongs_to_engine

DeepSpeedOptimizerCallable = Callable[[Iterable[Any]], torch.optim.Optimizer]
"""Function for `initialize(optimizer=...)`, called with the parameters."""

DeepSpeedSchedulerCallable = Callable[[torch.optim.Optimizer], Any]
"""Function for `initialize(lr_scheduler=...)`, called with the optimizer."""


class _OfEngine(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.optim.Optimizer) and belongs_to_engine(instance)


class DeepSpeedOptimizer(metaclass=_OfEngine):
    """Class of every optimizer that an engine steps, for `isinstance`; engines do not wrap the client's instance."""


def is_zero_supported_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer can step shards, as nearly all of torch's can."""
    try:
        group_shardings(optimizer)
    except ConfigError:
        return False
    return True
