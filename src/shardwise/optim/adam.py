"""Adam and AdamW (Kingma and Ba, 2015; Loshchilov and Hutter, 2019)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from typing_extensions import override

from shardwise.compat import fused_step
from shardwise.config.argument_models import called
from shardwise.config.schema import optimizers as schema
from shardwise.optim.elementwise import Batch, ElementwiseOptimizer


class Adam(ElementwiseOptimizer):
    """Adam; by default with decoupled weight decay, which is AdamW. The state is that of `torch.optim.Adam`.

    With `adam_w_mode`, parameters shrink by `lr * weight_decay`; else `weight_decay` times the parameter is added to
    the gradient. Other options as of `torch.optim.AdamW` and `ElementwiseOptimizer`. Raises ConfigError.

    >>> weight = torch.ones(3, requires_grad=True)
    >>> optimizer = Adam([weight], lr=0.1)
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> weight.detach()
    tensor([0.9000, 0.9000, 0.9000])
    """

    shardwise_sharding = "elementwise"
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    temporaries: ClassVar[int] = 2
    arguments: ClassVar[type[schema.AdamArguments]] = schema.AdamArguments

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        rounding: str = "nearest",
        state_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        called(self.arguments, locals(), name=type(self).__name__)
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": adam_w_mode,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults, rounding=rounding, state_dtype=state_dtype, seed=seed)

    @override
    def update(self, batch: Batch, group: Mapping[str, Any]) -> None:
        kernel = _kernel(group, batch.device, batch.values[0].dtype)
        beta1, beta2 = group["betas"]
        lr, decay, eps = float(group["lr"]), group["weight_decay"], group["eps"]
        # After very many steps the bias correction is 1.
        step = batch.step if group["bias_correction"] else float("inf")
        averages, squares = batch.states["exp_avg"], batch.states["exp_avg_sq"]
        if kernel is not None:
            kernel(
                batch.values,
                batch.gradients,
                averages,
                squares,
                [],
                [torch.full((), step, dtype=torch.float32, device=batch.device)] * len(batch.values),
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                weight_decay=decay,
                eps=eps,
                amsgrad=False,
                maximize=False,
            )
            return
        gradients, scratch = batch.gradients, batch.temporary(0)
        if decay and group["decoupled_weight_decay"]:
            torch._foreach_mul_(batch.values, 1 - lr * decay)
        elif decay:
            gradients = batch.decayed(decay, 1)
        torch._foreach_copy_(scratch, gradients)
        torch._foreach_mul_(scratch, 1 - beta1)
        torch._foreach_mul_(averages, beta1)
        torch._foreach_add_(averages, scratch)
        torch._foreach_copy_(scratch, gradients)
        torch._foreach_mul_(scratch, gradients)
        torch._foreach_mul_(scratch, 1 - beta2)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_add_(squares, scratch)
        torch._foreach_copy_(scratch, squares)
        torch._foreach_sqrt_(scratch)
        torch._foreach_mul_(scratch, (1 - beta2**step) ** -0.5)
        torch._foreach_add_(scratch, eps)
        torch._foreach_reciprocal_(scratch)
        torch._foreach_mul_(scratch, averages)
        torch._foreach_mul_(scratch, lr / (1 - beta1**step))
        torch._foreach_sub_(batch.values, scratch)

    @override
    def temporaries_of(self, group: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> int:
        if _kernel(group, device, dtype) is not None:
            return 0
        return 2 if group["weight_decay"] and not group["decoupled_weight_decay"] else 1


class AdamW(Adam):
    """AdamW: `Adam` with `adam_w_mode` True. `weight_decay` is 0 by default, where torch has 0.01."""

    shardwise_sharding = "elementwise"
    arguments = schema.AdamWArguments


def _kernel(group: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    return fused_step("adamw" if group["decoupled_weight_decay"] else "adam", device, dtype)
