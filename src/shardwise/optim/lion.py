"""Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from typing_extensions import override

from shardwise.config.argument_models import called
from shardwise.config.schema import optimizers as schema
from shardwise.optim.elementwise import Batch, ElementwiseOptimizer


class Lion(ElementwiseOptimizer):
    """Lion: each element moves by the learning rate, in the direction of an average of its gradients.

    With m the average, the direction is `sign(beta1 * m + (1 - beta1) * g)`; then `m = beta2 * m + (1 - beta2) * g`.
    The state is half of Adam's: step, exp_avg. The paper takes 1/10 to 1/3 of Adam's learning rate, and 3 to 10 times
    its weight decay, which is decoupled. Raises ConfigError for an option without meaning.

    >>> weight = torch.ones(3, requires_grad=True)
    >>> optimizer = Lion([weight], lr=0.1)
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> weight.detach()
    tensor([0.9000, 0.9000, 0.9000])
    """

    shardwise_sharding = "elementwise"
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg",)
    temporaries: ClassVar[int] = 2

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        *,
        rounding: str = "nearest",
        state_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        called(schema.LionArguments, locals(), name=type(self).__name__)
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay}
        super().__init__(params, defaults, rounding=rounding, state_dtype=state_dtype, seed=seed)

    @override
    def update(self, batch: Batch, group: Mapping[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        lr, averages = float(group["lr"]), batch.states["exp_avg"]
        direction, part = batch.temporary(0), batch.temporary(1)
        torch._foreach_copy_(direction, averages)
        torch._foreach_mul_(direction, beta1)
        torch._foreach_copy_(part, batch.gradients)
        torch._foreach_mul_(part, 1 - beta1)
        torch._foreach_add_(direction, part)
        torch._foreach_sign_(direction)
        torch._foreach_mul_(direction, lr)
        if group["weight_decay"]:
            torch._foreach_mul_(batch.values, 1 - lr * group["weight_decay"])
        torch._foreach_sub_(batch.values, direction)
        torch._foreach_copy_(part, batch.gradients)
        torch._foreach_mul_(part, 1 - beta2)
        torch._foreach_mul_(averages, beta2)
        torch._foreach_add_(averages, part)
