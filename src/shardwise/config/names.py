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
_LAMB: dict[str, Any] = {
    "lr": 1e-3,
    "bias_correction": True,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "eps_inside_sqrt": False,
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
    "max_coeff": 10.0,
    "min_coeff": 0.01,
    "amsgrad": False,
}
_MUON: dict[str, Any] = {
    "lr": None,
    "momentum": 0.95,
    "weight_decay": 0.0,
    "muon_lr": None,
    "adam_lr": None,
    "betas": (0.9, 0.95),
    "eps": 1e-10,
    "nesterov": True,
    "ns_steps": 5,
    "ns_method": "gram",
    "per_head_muon": False,
    "adam_w_mode": True,
    "torch_adam": False,
}
_ONEBIT: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "bias_correction": True,
    "amsgrad": False,
    "eps_inside_sqrt": False,
    "cuda_aware": False,
    "comm_backend_name": "nccl",
}
ONEBIT_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "onebitadam": {**_ONEBIT, "freeze_step": 100000},
    "onebitlamb": {
        **_ONEBIT,
        "freeze_step": 100000,
        "max_coeff": 10.0,
        "min_coeff": 0.01,
        "coeff_beta": 0.9,
        "factor_max": 4.0,
        "factor_min": 0.5,
        "factor_threshold": 0.1,
    },
    "zerooneadam": {
        **_ONEBIT,
        "var_freeze_step": 100000,
        "var_update_scaler": 16,
        "local_step_scaler": 32678,
        "local_step_clipper": 16,
    },
}
"""Optimizers that communicate themselves, by names in any case, with their arguments."""

ONEBIT_STAGES = {"onebitadam": 1, "onebitlamb": 1, "zerooneadam": 0}
"""The highest ZeRO stage of each."""

ONEBIT_STAGE_REASONS = (
    "stage 0: between averages ranks have parameters of their own, so that none can be divided",
    "stage 0 or 1: every rank compresses a momentum with its own whole gradient, which higher stages divide",
)
"""Why, by the highest stage."""

ONEBIT_REFUSED = {
    "amsgrad": "the running maximum of a variance that is frozen would be frozen with it",
    "eps_inside_sqrt": "eps is added to the root, as torch.optim.Adam does",
}
"""Switches of these that cannot be on, and why."""

ONEBIT_COUNTS = (
    "freeze_step",
    "var_freeze_step",
    "var_update_scaler",
    "local_step_scaler",
    "local_step_clipper",
)
"""Arguments of these that count steps."""

ONEBIT_BACKENDS = ("nccl", "mpi", "compressed", "hccl", "gloo")
"""Values of comm_backend_name in published configurations."""

ONEBIT_ORDERED = (("min_coeff", "max_coeff"), ("factor_min", "factor_max"))
"""Pairs of arguments of which the first may not be above the second."""

ONEBIT_WITHOUT_EFFECT = {
    "cuda_aware": "the communication is torch.distributed's",
    "comm_backend_name": "the backend is that of torch.distributed's process group",
}
"""Arguments of these that change nothing, and why."""

NATIVE_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "adagrad": _ADAGRAD,
    "lion": _LION,
    "lamb": _LAMB,
    "muon": _MUON,
    **ONEBIT_OPTIMIZERS,
}
"""Our own, by the names that configurations use, in any case, with the arguments of torch and of the peers."""

MUP_OPTIMIZERS = frozenset({"muadam", "muadamw", "musgd"})
"""Names, in lower case, of optimizers that the package mup makes, whose arguments only that package knows."""

UNUSABLE_OPTIMIZERS: dict[str, str] = {
    "LBFGS": "it takes inner products over all parameters and evaluates the loss several times per step; use an "
    "optimizer that steps once per gradient",
    "SparseAdam": "it takes sparse gradients only, and reduced gradients are dense; use Adam",
    "Optimizer": "it is the base class of optimizers",
}
"""Classes of torch.optim that no engine step can drive, with the reason."""

_WARMUP: dict[str, Any] = {"warmup_num_steps": 1000, "warmup_type": "log", "last_batch_iteration": -1}
NATIVE_SCHEDULES: dict[str, dict[str, Any]] = {
    "LRRangeTest": {
        "lr_range_test_min_lr": 1e-3,
        "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
        "last_batch_iteration": -1,
    },
    "OneCycle": {
        "cycle_min_lr": REQUIRED,
        "cycle_max_lr": REQUIRED,
        "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": None,
        "cycle_first_stair_count": 0,
        "cycle_second_stair_count": None,
        "decay_step_size": 0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
        "last_batch_iteration": -1,
    },
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
    """The name under which the code knows an optimizer: our own in lower case, else torch's spelling.

    A name that matches nothing is returned unchanged.

    >>> canonical_optimizer("AdamW"), canonical_optimizer("rmsprop"), canonical_optimizer("SGD")
    ('adamw', 'RMSprop', 'SGD')
    """
    lower = name.lower()
    if lower in NATIVE_OPTIMIZERS or lower in MUP_OPTIMIZERS:
        return lower
    known = torch_optimizers()
    if name in known:
        return name
    return next((spelled for spelled in known if spelled.lower() == lower), name)


def _arguments(found: type) -> dict[str, Any]:
    """Arguments of a constructor without the object itself and what the engine passes."""
    parameters = inspect.signature(found).parameters.values()
    return {item.name: item.default for item in parameters if item.name not in ("params", "optimizer")}
