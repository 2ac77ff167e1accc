"""Loss scaling, by `engine.backward(loss)` or at the model's outputs for a plain `loss.backward()`; gradient scales.

For a plain `loss.backward()` the model returns its outputs as aliases with a scaling backward, and takes its inputs as
aliases that undo it, so that what computed the inputs (another engine, an earlier call) gets unscaled gradients.
Gradients between outputs inside the model do not pass through the aliases, so they are not scaled twice. If no alias
has run in a pass, its loss was not scaled, and stepping raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch

from shardwise.compat import never_compiled, will_run
from shardwise.precision.autocast import autocast_dtype
from shardwise.trees import map_tensors

if TYPE_CHECKING:
    from shardwise.config import Config
    from shardwise.zero.units.plan import Plan


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, leaf: torch.Tensor, factor: Callable[[bool], float]) -> torch.Tensor:
        ctx.factor = factor
        return tensor.detach()  # autograd lets scripts change it in place, as it would not a view

    @staticmethod
    @never_compiled
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # A pass for some tensors (torch.autograd.grad) does not run the node of the leaf.
        return gradient * ctx.factor(will_run(ctx.next_functions[1][0])), None, None


@never_compiled  # the factor changes at every backward pass
def scale_gradients_of(values: Any, factor: Callable[[bool], float]) -> Any:
    """Return `values` with differentiable tensors replaced by aliases that scale gradients by `factor(whole)`.

    `whole`: the backward pass accumulates into all leaves, and is not one for some tensors.
    """
    leaf = torch.zeros((), device="cpu", requires_grad=True)

    def alias(value: torch.Tensor) -> torch.Tensor:
        return _Scale.apply(value, leaf, factor) if value.requires_grad else value

    return map_tensors(values, alias)


def cast_floats(values: Any, dtype: torch.dtype) -> Any:
    """Return nested `values` with every floating tensor cast to `dtype`."""

    return map_tensors(values, lambda value: value.to(dtype) if value.is_floating_point() else value)


def scales_loss(config: Config) -> bool:
    """Whether gradients are computed in fp16, which needs a loss scale against underflow."""
    return bool(config.fp16.enabled) or autocast_dtype(config) is torch.float16


OnNonFinite = Literal["warn", "skip", "stop", "rewind", "ignore"]


def on_non_finite(config: Config) -> OnNonFinite:
    """Return the reaction of a step to a non-finite gradient."""
    if scales_loss(config):
        return "skip"  # the search for a loss scale skips steps
    if config.bf16.check_grad_overflow and config.non_finite in ("warn", "ignore"):
        return "skip"
    return config.non_finite


def checks_overflow(config: Config) -> bool:
    """Whether steps with non-finite gradients are skipped or stopped, which must be known before the update."""
    return on_non_finite(config) in ("skip", "stop", "rewind")


def computes_norm(config: Config) -> bool:
    """Whether steps compute the gradient norm: for clipping, overflow checks, anomaly watch or reports."""
    watch = config.anomaly_watch
    watched = watch.enabled and watch.grad_norm_spike != "ignore"
    asked = config.gradient_clipping or config.zero_optimization.compute_grad_norm or watched
    return bool(asked) or checks_overflow(config)


def prescale_of(config: Config, ranks: int) -> float:
    """Return the factor of gradients before they are summed over `ranks`."""
    return 1.0 / (ranks if config.prescale_gradients else float(config.gradient_predivide_factor))


def plain_gradients(config: Config, plan: Plan) -> bool | None:
    """Return whether `.grad` without an optimizer holds means over ranks (True) or sums (False).
    None: it is dropped, because parameters are sharded, or the loss scale would stay in it.
    """
    if plan.shard_optimizer or plan.reduces_micro_batches or plan.releases or scales_loss(config):
        return None
    return config.gradient_allreduce_op == "mean"
