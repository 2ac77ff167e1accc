"""LAMB (You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", arXiv 1904.00962)."""

from __future__ import annotations

import math
from typing import Any

import torch
from typing_extensions import override

from shardwise.config.argument_models import called
from shardwise.config.schema import optimizers as schema
from shardwise.optim.layerwise import Layerwise, trust_ratio


class Lamb(Layerwise):
    """LAMB (You et al., 2020, algorithm 2), for large batches: Adam's direction, scaled by each tensor's norm.

    With m and v the moments of Adam, r = m / (sqrt(v) + eps) + weight_decay * w, and w <- w - lr * clamp(norm(w) /
    norm(r), min_coeff, max_coeff) * r. Norms are of unsharded tensors, hence sharding does not change the numbers. If a
    norm is zero (a fresh bias), the factor is 1. `eps_inside_sqrt` takes sqrt(v + eps). `max_grad_norm` and `amsgrad`
    can only be 0 and False, because the engine clips. Other options as of `Adam`. Raises ConfigError.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> weight.grad = torch.tensor([1.0, -1.0])
        >>> optimizer = Lamb([weight], lr=0.1)
        >>> optimizer.step()
        >>> weight.data, [round(factor, 3) for factor in optimizer.get_lamb_coeffs()]
        (tensor([2.6464, 4.3536]), [3.536])
    """

    shardwise_sharding = "norms"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        called(schema.LambArguments, locals())
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)

    @override
    def direction(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> torch.Tensor:
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        step = float(state["step"])
        corrected = group["bias_correction"]
        root = gradient.copy_(square)
        if group["eps_inside_sqrt"]:
            root.div_(1 - beta2**step if corrected else 1.0).add_(group["eps"]).sqrt_()
        else:
            root.sqrt_().div_(math.sqrt(1 - beta2**step) if corrected else 1.0).add_(group["eps"])
        found = torch.div(mean, root, out=root)
        if corrected:
            found.div_(1 - beta1**step)
        if group["weight_decay"]:
            found.add_(parameter, alpha=group["weight_decay"])
        return found

    @override
    def coefficient(self, weight: torch.Tensor, direction: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return trust_ratio(weight, direction, group["min_coeff"], group["max_coeff"])

    def get_lamb_coeffs(self) -> list[float]:
        """Return the trust ratios of the last step; see `Layerwise.coefficients`."""
        return self.coefficients()
