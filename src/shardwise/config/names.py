"""Names and arguments of optimizers and learning-rate schedules: what exists, what it takes, what is wrong.

The classes themselves live elsewhere. torch is imported only when a class of torch.optim has to be looked at.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

REQUIRED = inspect.Parameter.empty
"""Marks an argument without a default."""

_ADAM: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "bias_correction": True,
    "amsgrad": False,
    "torch_adam": False,
    "adam_w_mode": True,
    "fp32_optimizer_states": True,
    "set_grad_none": True,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
_ADAGRAD: dict[str, Any] = {
    "lr": 1e-2,
    "lr_decay": 0.0,
    "weight_decay": 0.0,
    "initial_accumulator_value": 0.0,
    "eps": 1e-10,
    "fp32_optimizer_states": True,
    "set_grad_none": True,
    "maximize": False,
    "foreach": None,
    "differentiable": False,
    "fused": None,
}
_LION: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "weight_decay": 0.0,
    "fp32_optimizer_states": True,
    "set_grad_none": True,
}
NATIVE_OPTIMIZERS: dict[str, dict[str, Any]] = {"adam": _ADAM, "adamw": _ADAM, "adagrad": _ADAGRAD, "lion": _LION}
"""Our own optimizers by the names that configurations use, in any case, with the arguments of torch and the peers."""

_COMPRESSED = "compressed optimizers are not available"
_MUP = "optimizers of the package mup are not built by name; pass an instance instead"
UNBUILT_OPTIMIZERS: dict[str, str] = {
    "lamb": "it is not part of torch.optim; pass an instance of a LAMB class instead",
    "onebitadam": _COMPRESSED,
    "zerooneadam": _COMPRESSED,
    "onebitlamb": _COMPRESSED,
    "muadam": _MUP,
    "muadamw": _MUP,
    "musgd": _MUP,
    "muon": "elsewhere this name means Muon for matrices with Adam for the rest; write Muon (exactly) for "
    "torch.optim.Muon, which takes matrices only",
}
"""Names, in lower case, that configurations use and that this version does not have, with what to do."""

UNUSABLE_OPTIMIZERS: dict[str, str] = {
    "LBFGS": "it takes inner products over all parameters and evaluates the loss several times per step; use an "
    "optimizer that steps once per gradient",
    "SparseAdam": "it takes sparse gradients only, and reduced gradients are dense; use Adam",
    "Optimizer": "it is the base class of optimizers",
}
"""Classes of torch.optim that no engine step can drive, with the reason."""

_WARMUP: dict[str, Any] = {"warmup_num_steps": 1000, "warmup_type": "log", "last_batch_iteration": -1}
NATIVE_SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": None, **_WARMUP},
    "WarmupDecayLR": {"total_num_steps": REQUIRED, "warmup_min_lr": 0.0, "warmup_max_lr": None, **_WARMUP},
    "WarmupCosineLR": {
        "total_num_steps": REQUIRED,
        "warmup_min_ratio": 0.0,
        "cos_min_ratio": 1e-4,
        **_WARMUP,
    },
}
"""Our own schedules (exact names) with arguments and defaults; warmup_max_lr None: the optimizer's lr."""

UNBUILT_SCHEDULES: dict[str, str] = {
    "LRRangeTest": "pass a schedule object as lr_scheduler instead",
    "OneCycle": "torch's OneCycleLR has the same shape",
}
"""Names that configurations use and that this version does not have, with what to do."""

UNUSABLE_SCHEDULES: dict[str, str] = {
    "ReduceLROnPlateau": "it needs a metric at every step; build it in the script and step it there",
    "LambdaLR": "it takes functions; build it in the script and pass it as lr_scheduler",
    "MultiplicativeLR": "it takes functions; build it in the script and pass it as lr_scheduler",
    "ChainedScheduler": "it takes schedule objects; build it in the script and pass it as lr_scheduler",
    "SequentialLR": "it takes schedule objects; build it in the script and pass it as lr_scheduler",
    "LRScheduler": "it is the base class of schedules",
}
"""Schedules of torch that a configuration cannot describe, with the reason."""


@dataclass(frozen=True)
class Signature:
    """Arguments that a class takes: name -> default (`REQUIRED` if there is none)."""

    name: str
    arguments: dict[str, Any]


def torch_optimizers() -> dict[str, type]:
    """Optimizer classes of the installed torch by name."""
    import torch

    return _classes(torch.optim, torch.optim.Optimizer)


def torch_schedules() -> dict[str, type]:
    """Learning-rate schedules of the installed torch by name."""
    import torch

    return _classes(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)


def _classes(module: Any, base: type) -> dict[str, type]:
    return {name: item for name, item in vars(module).items() if isinstance(item, type) and issubclass(item, base)}


def optimizer_signature(name: str) -> Signature | None:
    """Arguments of an optimizer by its configured name, or None if there is no such optimizer."""
    native = NATIVE_OPTIMIZERS.get(name.lower())
    if native is not None:
        return Signature(name, native)
    found = torch_optimizers().get(canonical_optimizer(name))
    return Signature(name, _arguments(found)) if found is not None else None


def schedule_signature(name: str) -> Signature | None:
    """Arguments of a schedule by its configured name, or None if there is no such schedule."""
    native = NATIVE_SCHEDULES.get(name)
    if native is not None:
        return Signature(name, native)
    found = torch_schedules().get(name)
    return Signature(name, _arguments(found)) if found is not None else None


def canonical_optimizer(name: str) -> str:
    """The name under which the code knows an optimizer: ours in lower case, else torch's spelling.

    A name that matches nothing is returned unchanged.

    >>> canonical_optimizer("AdamW"), canonical_optimizer("rmsprop"), canonical_optimizer("SGD")
    ('adamw', 'RMSprop', 'SGD')
    """
    lower = name.lower()
    if lower in NATIVE_OPTIMIZERS:
        return lower
    known = torch_optimizers()
    if name in known:
        return name
    if lower in UNBUILT_OPTIMIZERS:
        return lower
    return next((spelled for spelled in known if spelled.lower() == lower), name)


def _arguments(found: type) -> dict[str, Any]:
    """Arguments of a constructor without the object itself and what the engine passes."""
    parameters = inspect.signature(found).parameters.values()
    return {item.name: item.default for item in parameters if item.name not in ("params", "optimizer")}
