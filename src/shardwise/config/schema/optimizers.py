"""The section of the optimizer, and the arguments of each that the configuration knows by name: one model, which the
constructor uses, too. For classes of torch.optim, models are made from their signatures.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import ConfigDict
from typing_extensions import override

from shardwise.errors import ConfigError, ConflictError, NotBuiltError

from .base import (
    Arguments,
    At,
    Betas,
    ConfigSection,
    Contradictions,
    Flag,
    Int,
    Names,
    NotNegative,
    Number,
    PartOfOne,
    key,
)
from .tables import with_unused_keys

CLIPPING = "the engine clips gradients; write `gradient_clipping` at the top level"
"""Fix for an optimizer's own max_grad_norm."""

_LR = "Learning rate."
_BETAS = "Decays of the averages of gradients and of their squares."
_EPS = "Added to the square root."
_DECAY = "Weight decay."
_CORRECTION = "Divide the averages by what they miss in the first steps."
_MAXIMIZE = "Go up the gradient."
_FOREACH = "torch's implementation with one launch for many tensors."
_FUSED = "torch's implementation in one kernel."
_GRAPHS = "torch's implementation that a CUDA graph can hold."
_DIFFERENTIABLE = "torch's implementation that autograd can go through."
_OF_TORCH = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused")


class Elementwise(Arguments):
    """Optimizers that torch has, too. An option of torch's class only selects that class."""

    lr: NotNegative = key(1e-3, _LR)
    weight_decay: NotNegative = key(0.0, _DECAY)
    fp32_optimizer_states: Flag = key(True, "false: states in the parameters' type.")
    set_grad_none: Flag = key(True, "", no_effect="the engine owns the gradients and frees them")

    def torch_only_option(self) -> str | None:
        """Return the first option in use that only torch's class has, or None."""
        fields = type(self).model_fields
        return next((n for n in _OF_TORCH if n in fields and getattr(self, n) is not fields[n].default), None)

    def contradictions(self, at: At) -> Contradictions:
        """Yield the options that torch's class lacks, if another option needs torch's class."""
        cause = self.torch_only_option()
        for name in ("bias_correction", "fp32_optimizer_states"):
            if cause is not None and not getattr(self, name, True):
                option = f"{at(cause)} {json.dumps(getattr(self, cause))}"
                yield (
                    name,
                    f"false contradicts {option}, for which torch's class is built, which lacks this; remove one",
                    ConflictError,
                )


class AdamArguments(Elementwise):
    """Adam, with decoupled weight decay unless `adam_w_mode` is false."""

    betas: Betas = key((0.9, 0.999), _BETAS)
    eps: NotNegative = key(1e-8, _EPS)
    bias_correction: Flag = key(True, _CORRECTION)
    amsgrad: Flag = key(False, "Divide by the largest average of squares so far; torch's class.")
    torch_adam: Flag = key(False, "torch's class and its weight_decay, with the implementation that torch picks.")
    adam_w_mode: Flag = key(
        True, "true: parameters shrink by lr x weight_decay; false: decay is added to the gradient."
    )
    maximize: Flag = key(False, _MAXIMIZE)
    foreach: Flag | None = key(None, _FOREACH)
    capturable: Flag = key(False, _GRAPHS)
    differentiable: Flag = key(False, _DIFFERENTIABLE)
    fused: Flag | None = key(None, _FUSED)

    @override
    def torch_only_option(self) -> str | None:
        return "torch_adam" if self.torch_adam else super().torch_only_option()

    def allows_fused(self) -> bool:
        """Whether torch's class may run its fused implementation."""
        return self.fused is None and not (self.torch_adam or self.foreach or self.differentiable)


class AdamWArguments(AdamArguments):
    """Adam with decoupled weight decay."""

    @override
    def contradictions(self, at: At) -> Contradictions:
        yield from super().contradictions(at)
        if not self.adam_w_mode:
            reason = "false contradicts `optimizer.type` AdamW; use type Adam for decay added to the gradient"
            yield "adam_w_mode", reason, ConflictError


class AdagradArguments(Elementwise):
    """Adagrad."""

    lr: NotNegative = key(1e-2, _LR)
    lr_decay: NotNegative = key(0.0, "The rate of step t is lr / (1 + (t - 1) lr_decay).")
    initial_accumulator_value: NotNegative = key(0.0, "With which the sum of squares begins.")
    eps: NotNegative = key(1e-10, _EPS)
    maximize: Flag = key(False, _MAXIMIZE)
    foreach: Flag | None = key(None, _FOREACH)
    differentiable: Flag = key(False, _DIFFERENTIABLE)
    fused: Flag | None = key(None, _FUSED)


class LionArguments(Elementwise):
    """Lion."""

    betas: Betas = key((0.9, 0.999), "Weight of the average in the direction, and its decay.")


class LambArguments(Arguments):
    """LAMB."""

    lr: NotNegative = key(1e-3, _LR)
    bias_correction: Flag = key(True, _CORRECTION)
    betas: Betas = key((0.9, 0.999), _BETAS)
    eps: NotNegative = key(1e-8, _EPS)
    eps_inside_sqrt: Flag = key(False, "sqrt(v + eps) in place of sqrt(v) + eps.")
    weight_decay: NotNegative = key(0.0, _DECAY)
    max_grad_norm: NotNegative = key(0.0, "Only 0: clipping is the engine's.")
    max_coeff: Number = key(10.0, "Largest factor of a tensor's step.")
    min_coeff: NotNegative = key(0.01, "Smallest factor of a tensor's step.")
    amsgrad: Flag = key(False, "Only false.")

    def contradictions(self, at: At) -> Contradictions:
        """Yield options of other libraries, and limits in the wrong order."""
        if self.max_grad_norm:
            yield "max_grad_norm", f"{CLIPPING}, and 0 here or nothing", ConfigError
        if self.amsgrad:
            yield "amsgrad", "LAMB has no such variant; remove the key", ConfigError
        yield from self.ordered("min_coeff", "max_coeff", at)


class MuonArguments(Arguments):
    """Muon for matrices, Adam for everything else."""

    lr: NotNegative | None = key(None, "Learning rate of both halves; null: 0.02 for Muon, 3e-4 for Adam.")
    momentum: PartOfOne = key(0.95, "Momentum of Muon.")
    weight_decay: NotNegative = key(0.0, _DECAY)
    muon_lr: NotNegative | None = key(None, "Learning rate of Muon, before `lr`.")
    adam_lr: NotNegative | None = key(None, "Learning rate of Adam, before `lr`.")
    betas: Betas = key((0.9, 0.95), _BETAS)
    eps: NotNegative = key(1e-10, _EPS)
    nesterov: Flag = key(True, "Look one step ahead.")
    ns_steps: Int = key(5, "Steps of the Newton-Schulz iteration.", ge=1)
    ns_method: Literal["gram", "standard"] = key("gram", "How the iteration multiplies.")
    stacked: Flag | Names | None = key(
        None,
        "Stacks of matrices among parameters of more than two dimensions: parts of names, true for all, or false for "
        "none (each is a matrix of shape[0] rows). null: such parameters are refused.",
    )
    per_head_muon: Flag = key(False, "Only false: matrices are orthogonalised unsplit.")
    adam_w_mode: Flag = key(True, "false: Adam's half adds the decay to the gradient.")
    torch_adam: Flag = key(False, "Adam's half runs the implementation that torch picks.")

    def contradictions(self, at: At) -> Contradictions:
        """Yield options that this version lacks."""
        if self.per_head_muon:
            reason = "this version orthogonalises matrices unsplit; remove the key"
            yield "per_head_muon", reason, NotBuiltError


class _Onebit(Arguments):
    """Optimizers that communicate themselves."""

    lr: NotNegative = key(1e-3, _LR)
    betas: Betas = key((0.9, 0.999), _BETAS)
    eps: NotNegative = key(1e-8, _EPS)
    weight_decay: NotNegative = key(0.0, _DECAY)
    bias_correction: Flag = key(True, _CORRECTION)
    amsgrad: Flag = key(False, "Only false.")
    eps_inside_sqrt: Flag = key(False, "Only false.")
    cuda_aware: Flag = key(False, "", no_effect="the communication is torch.distributed's")
    comm_backend_name: Literal["nccl", "mpi", "compressed", "hccl", "gloo"] = key(
        "nccl", "", no_effect="the backend is that of torch.distributed's process group"
    )

    def contradictions(self, at: At) -> Contradictions:
        for name, reason in (
            ("amsgrad", "the running maximum of a variance that is frozen would be frozen with it"),
            ("eps_inside_sqrt", "eps is added to the root, as torch.optim.Adam does"),
        ):
            if getattr(self, name):
                yield name, f"only false is possible: {reason}; remove it", ConfigError


class OnebitAdamArguments(_Onebit):
    """1-bit Adam."""

    freeze_step: Int = key(100000, "Steps of warm-up.", ge=1)


class OnebitLambArguments(_Onebit):
    """1-bit LAMB."""

    freeze_step: Int = key(100000, "Steps of warm-up.", ge=1)
    max_coeff: Number = key(10.0, "Largest coefficient in the warm-up.")
    min_coeff: Number = key(0.01, "Smallest coefficient in the warm-up.")
    coeff_beta: Number = key(0.9, "Decay of the moving average of coefficients.")
    factor_max: Number = key(4.0, "Largest factor.")
    factor_min: Number = key(0.5, "Smallest factor.")
    factor_threshold: Number = key(0.1, "Largest relative change of the factor in one step.")

    def contradictions(self, at: At) -> Contradictions:
        """Yield switches that cannot be on, and limits in the wrong order."""
        yield from super().contradictions(at)
        yield from self.ordered("min_coeff", "max_coeff", at)
        yield from self.ordered("factor_min", "factor_max", at)


class ZeroOneAdamArguments(_Onebit):
    """0/1 Adam."""

    var_freeze_step: Int = key(100000, "Step at which the variance is frozen.", ge=1)
    var_update_scaler: Int = key(16, "Updates of the variance at each interval.", ge=1)
    local_step_scaler: Int = key(32678, "Steps for which an interval between averages lasts.", ge=1)
    local_step_clipper: Int = key(16, "Longest interval between averages.", ge=1)


class Mup(Arguments):
    """Optimizers of the package mup, whose arguments only that package knows."""

    model_config = ConfigDict(extra="allow")


ONEBIT_OPTIMIZERS: dict[str, type[Arguments]] = {
    cls.called().lower(): cls for cls in (OnebitAdamArguments, OnebitLambArguments, ZeroOneAdamArguments)
}
"""Optimizers that communicate themselves, by lower-case name."""

NATIVE_OPTIMIZERS: dict[str, type[Arguments]] = {
    **{
        cls.called().lower(): cls
        for cls in (AdamArguments, AdamWArguments, AdagradArguments, LionArguments, LambArguments, MuonArguments)
    },
    **ONEBIT_OPTIMIZERS,
}
"""This library's optimizers, by lower-case name."""


@with_unused_keys
class Optimizer(ConfigSection):
    """`optimizer`: class and arguments of the optimizer that the engine builds."""

    type: str | None = key(
        None,
        "adam, adamw, lamb, muon, onebitadam, onebitlamb, zerooneadam, or muadam, muadamw, musgd of the package mup "
        "(any case), or the exact name of a class in torch.optim. null: the caller passes one.",
    )
    params: dict[str, Any] = key({}, "Arguments of the optimizer, such as lr and weight_decay.", free_form=True)

    @property
    def is_onebit(self) -> bool:
        """True if the optimizer communicates itself."""
        return (self.type or "").lower() in ONEBIT_OPTIMIZERS
