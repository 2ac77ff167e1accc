"""Optimizers of `shardwise.optim` with the arguments of DeepSpeed's classes, which run on any device; and
`DeepSpeedOptimizer`, which recognises the optimizers of engines.

`amsgrad` must be False. `set_grad_none` has no effect, because an engine owns the gradients. `fp32_optimizer_states`
False keeps states in the parameters' dtype. Constructors raise ConfigError for an option without meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from shardwise.errors import ConfigError
from shardwise.optim import Adagrad, Adam, Lion
from shardwise.optim.sharding import group_shardings
from shardwise.zero.parameters.guards import belongs_to_engine

Betas = tuple[float, float]

DeepSpeedOptimizerCallable = Callable[[Iterable[Any]], torch.optim.Optimizer]
"""Function for `initialize(optimizer=...)`, called with the parameters."""

DeepSpeedSchedulerCallable = Callable[[torch.optim.Optimizer], Any]
"""Function for `initialize(lr_scheduler=...)`, called with the optimizer."""


class _OfEngine(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.optim.Optimizer) and belongs_to_engine(instance)


class DeepSpeedOptimizer(metaclass=_OfEngine):
    """Class of every optimizer that an engine steps, for `isinstance`; engines do not wrap the client's instance."""


def is_zero_supported_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer can step shards, as nearly all of torch's can."""
    try:
        group_shardings(optimizer)
    except ConfigError:
        return False
    return True


def _refuse_amsgrad(optimizer: torch.optim.Optimizer, amsgrad: bool) -> None:
    if amsgrad:
        raise ConfigError(
            f"{type(optimizer).__name__}(amsgrad=True): it has no such variant; leave it out, or use "
            "torch.optim.AdamW(amsgrad=True)"
        )


def _with_state(optimizer: torch.optim.Optimizer, given: Iterable[Any], fp32: bool) -> dict[str, Any]:
    """Return the arguments `params` and `state_dtype`: the single dtype of the parameters, or None for the default.

    Parameters are listed, because they are read twice. Groups stay the same dictionaries, because Accelerate passes
    those in which the script's schedule writes its learning rate.
    """
    params, kinds = list(given), set[torch.dtype]()
    for entry in params:
        if isinstance(entry, dict) and not isinstance(entry["params"], torch.Tensor):
            entry["params"] = list(entry["params"])
        held = entry["params"] if isinstance(entry, dict) else [entry]
        for one in [held] if isinstance(held, torch.Tensor) else held:
            kinds.add((one[1] if isinstance(one, tuple) else one).dtype)
    if not fp32 and (len(kinds) != 1 or torch.float16 in kinds):
        raise ConfigError(
            f"{type(optimizer).__name__}(fp32_optimizer_states=False): states are kept in the parameters' one type, "
            f"which cannot be fp16 (its range is too small); found {', '.join(sorted(map(str, kinds)))}"
        )
    return {"params": params, "state_dtype": None if fp32 else kinds.pop()}


class FusedAdam(Adam):
    """`shardwise.optim.Adam` with the arguments of DeepSpeed's class for GPUs."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _refuse_amsgrad(self, amsgrad)
        super().__init__(params, lr, betas, eps, weight_decay, adam_w_mode=adam_w_mode, bias_correction=bias_correction)


class DeepSpeedCPUAdam(Adam):
    """`shardwise.optim.Adam` with the arguments of DeepSpeed's CPU class; `adamw_mode` is `adam_w_mode`."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _refuse_amsgrad(self, amsgrad)
        given = _with_state(self, model_params, fp32_optimizer_states)
        given |= {"adam_w_mode": adamw_mode, "bias_correction": bias_correction}
        super().__init__(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **given)


class DeepSpeedCPUAdagrad(Adagrad):
    """`shardwise.optim.Adagrad` with the arguments of DeepSpeed's class for the CPU."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _refuse_amsgrad(self, amsgrad)
        given = _with_state(self, model_params, fp32_optimizer_states)
        super().__init__(lr=lr, weight_decay=weight_decay, eps=eps, **given)


class FusedLion(Lion):
    """`shardwise.optim.Lion` with the arguments of DeepSpeed's class for GPUs."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay)


class DeepSpeedCPULion(Lion):
    """`shardwise.optim.Lion` with the arguments of DeepSpeed's class for the CPU."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        given = _with_state(self, model_params, fp32_optimizer_states)
        super().__init__(lr=lr, betas=betas, weight_decay=weight_decay, **given)
