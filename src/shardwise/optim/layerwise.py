"""Layer-wise optimizers: the step of each tensor is scaled by a function of its norms."""

from __future__ import annotations

from typing import Any, cast

import torch

from shardwise.optim.base import Optimizer
from shardwise.precision.tensornorms import TensorNorms


class Layerwise(Optimizer):
    """Base of optimizers that are elementwise except for one coefficient per tensor.

    A subclass defines `direction` and `coefficient`, and declares `shardwise_sharding = "norms"`. An engine passes flat
    ranges of tensors and sets `shardwise_norms`, the norms of the unsharded tensors.

    Example:
        >>> class Normalised(Layerwise):
        ...     shardwise_sharding = "norms"
        ...
        ...     def direction(self, parameter, gradient, state, group):
        ...         return gradient
        ...
        ...     def coefficient(self, weight, direction, group):
        ...         return 1 / direction
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> Normalised([weight], {"lr": 1.0}).step()
        >>> weight.data
        tensor([-0.6000, -0.8000])
    """

    shardwise_norms: TensorNorms | None = None
    _coefficients: torch.Tensor | None = None
    _local: tuple[list[tuple[int, bool]], TensorNorms] | None = None

    def direction(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> torch.Tensor:
        """Return the update direction of each element; zero if parameter and gradient have always been zero (padding).

        `parameter` may be flat ranges of tensors. `gradient` may be overwritten and returned. New `state` is empty.
        """
        raise NotImplementedError

    def coefficient(self, weight: torch.Tensor, direction: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Return the factor of each tensor's direction, from fp64 norms of the tensors and of their directions."""
        raise NotImplementedError

    def move(
        self, parameter: torch.Tensor, direction: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """Move a parameter along its direction, which has been multiplied by the coefficients."""
        parameter.add_(direction, alpha=-group["lr"])

    def _step(self) -> None:
        norms = self.shardwise_norms or self._local_norms()
        weights: dict[torch.Tensor, torch.Tensor] = {}
        directions: dict[torch.Tensor, torch.Tensor] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    weights[parameter] = parameter.detach()
                    gradient = self._own_gradient(parameter, norms.overwrites)
                    directions[parameter] = self.direction(weights[parameter], gradient, self.state[parameter], group)
        weight, direction = norms.of(weights, directions)
        coefficients = torch.ones_like(weight)
        for number, group in enumerate(self.param_groups):
            members = norms.members(number)
            coefficients[members] = self.coefficient(weight[members], direction[members], group).to(torch.float64)
        self._coefficients = coefficients
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in directions:
                    self._scale(parameter, directions[parameter], coefficients, norms)
                    self.move(weights[parameter], directions[parameter], self.state[parameter], group)

    def coefficients(self) -> list[float]:
        """Return the coefficients of the last step by parameter, equal on all ranks (synchronizes with the device)."""
        return [] if self._coefficients is None else cast("list[float]", self._coefficients.tolist())

    def _local_norms(self) -> TensorNorms:
        every = [(id(p), p.grad is not None) for group in self.param_groups for p in group["params"]]
        # Made once: it has indices on the device.
        if self._local is None or self._local[0] != every:
            self._local = every, TensorNorms.local(self.param_groups)
        return self._local[1]

    @staticmethod
    def _own_gradient(parameter: torch.Tensor, overwrites: bool) -> torch.Tensor:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise RuntimeError("norms of tensors need dense gradients; the gradient of a parameter is sparse")
        if overwrites and gradient.dtype is parameter.dtype:
            return gradient
        return gradient.to(parameter.dtype, copy=True)

    @staticmethod
    def _scale(
        parameter: torch.Tensor, direction: torch.Tensor, coefficients: torch.Tensor, norms: TensorNorms
    ) -> None:
        # A single product rounds alike in any kernel and from any first element.
        own = coefficients[norms.numbers(parameter)].to(direction.device, direction.dtype)
        runs = [run.of(direction) for run in norms.runs(parameter)]
        if runs:
            torch._foreach_mul_(runs, list(own.unbind()))


def trust_ratio(
    weight_norm: torch.Tensor, update_norm: torch.Tensor, min_coeff: float, max_coeff: float
) -> torch.Tensor:
    """Return LAMB's coefficients: |parameter| / |update|, between two limits; 1 if either norm is zero.

    >>> trust_ratio(torch.tensor([3.0, 0.0, 8.0]), torch.tensor([2.0, 1.0, 0.1]), 0.01, 10.0).tolist()
    [1.5, 1.0, 10.0]
    """
    ratio = (weight_norm / update_norm).clamp(min_coeff, max_coeff)
    return torch.where((weight_norm > 0) & (update_norm > 0), ratio, 1.0)
