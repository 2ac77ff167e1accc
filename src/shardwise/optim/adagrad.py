"""Adagrad (Duchi, Hazan and Singer, 2011)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from typing_extensions import override

from shardwise.config.argument_models import called
from shardwise.config.schema import optimizers as schema
from shardwise.optim.elementwise import Batch, ElementwiseOptimizer


class Adagrad(ElementwiseOptimizer):
    """Adagrad: the learning rate of each element falls with the sum of its squared gradients.

    Options are those of `torch.optim.Adagrad`, with its state (step, sum), and of `ElementwiseOptimizer`. Raises
    ConfigError for an option without meaning.

    >>> weight = torch.ones(3, requires_grad=True)
    >>> optimizer = Adagrad([weight], lr=0.1)
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> weight.detach()
    tensor([0.9000, 0.9000, 0.9000])
    """

    shardwise_sharding = "elementwise"
    state_names: ClassVar[tuple[str, ...]] = ("sum",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        rounding: str = "nearest",
        state_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        called(schema.AdagradArguments, locals(), name=type(self).__name__)
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
        }
        super().__init__(params, defaults, rounding=rounding, state_dtype=state_dtype, seed=seed)

    @override
    def initial(self, name: str, group: Mapping[str, Any]) -> float:
        return float(group["initial_accumulator_value"])

    @override
    def update(self, batch: Batch, group: Mapping[str, Any]) -> None:
        gradients, scratch = batch.gradients, batch.temporary(0)
        if group["weight_decay"]:
            gradients = batch.decayed(group["weight_decay"], 1)
        torch._foreach_copy_(scratch, gradients)
        torch._foreach_mul_(scratch, gradients)
        torch._foreach_add_(batch.states["sum"], scratch)
        torch._foreach_copy_(scratch, batch.states["sum"])
        torch._foreach_sqrt_(scratch)
        torch._foreach_add_(scratch, group["eps"])
        torch._foreach_reciprocal_(scratch)
        torch._foreach_mul_(scratch, gradients)
        torch._foreach_mul_(scratch, _rate(group, batch.step))
        torch._foreach_sub_(batch.values, scratch)

    @override
    def temporaries_of(self, group: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> int:
        return 2 if group["weight_decay"] else 1


def _rate(group: Mapping[str, Any], step: float) -> float:
    return float(group["lr"]) / (1 + (step - 1) * group["lr_decay"])
