"""What tells an optimizer of an engine from others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from shardwise.errors import ConfigError
from shardwise.optim.sharding import group_shardings
from shardwise.zero.parameters.guards import belongs_to_engine

DeepSpeedOptimizerCallable = Callable[[Iterable[Any]], torch.optim.Optimizer]
"""What `initialize(optimizer=...)` calls with the parameters."""

DeepSpeedSchedulerCallable = Callable[[torch.optim.Optimizer], Any]
"""What `initialize(lr_scheduler=...)` calls with the optimizer."""


class _OfEngine(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.optim.Optimizer) and belongs_to_engine(instance)


class DeepSpeedOptimizer(metaclass=_OfEngine):
    """Class of every optimizer that an engine steps, for `isinstance`.

    Optimizers are not wrapped here: an engine takes the instance that it is given, and edits its groups.
    """


def is_zero_supported_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer can step shards; that is nearly every one of torch's."""
    try:
        group_shardings(optimizer)
    except ConfigError:
        return False
    return True
