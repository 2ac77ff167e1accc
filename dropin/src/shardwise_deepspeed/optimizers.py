"""Optimizers of `shardwise.optim` with the arguments of DeepSpeed's classes; they run on any device. `amsgrad` must be
False. `set_grad_none` has no effect, because an engine owns the gradients. `fp32_optimizer_states` False keeps states
in the parameters' dtype. Constructors raise ConfigError for an option without meaning.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from shardwise.errors import ConfigError
from shardwise.optim import Adagrad, Adam, Lion

Betas = tuple[float, float]


def _refuse_amsgrad(name: str, amsgrad: bool) -> None:
    if amsgrad:
        raise ConfigError(f"{name}(amsgrad=True): it has no such variant; use torch.optim.AdamW(amsgrad=True)")


def _state_dtype(name: str, params: list[Any], fp32: bool) -> torch.dtype | None:
    """Return the single dtype of the parameters, if states are kept in it, else None for the default."""
    if fp32:
        return None
    tensors = [t for entry in params for t in (entry["params"] if isinstance(entry, dict) else [entry])]
    kinds = {tensor.dtype for tensor in tensors}
    if len(kinds) != 1 or torch.float16 in kinds:
        found = ", ".join(sorted(map(str, kinds)))
        raise ConfigError(
            f"{name}(fp32_optimizer_states=False): states are kept in the parameters' one type, which cannot be fp16 "
            f"(its range is too small); found {found}"
        )
    return kinds.pop()


def _listed(params: Iterable[Any]) -> list[Any]:
    """Return parameters or groups as lists, because they are read twice. Groups stay the same dictionaries, because
    Accelerate passes those in which the script's schedule writes its learning rate.
    """
    entries = list(params)
    for entry in entries:
        if isinstance(entry, dict) and not isinstance(entry["params"], torch.Tensor):
            entry["params"] = list(entry["params"])
    return entries


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
        _refuse_amsgrad("FusedAdam", amsgrad)
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
        _refuse_amsgrad("DeepSpeedCPUAdam", amsgrad)
        params = _listed(model_params)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            adam_w_mode=adamw_mode,
            bias_correction=bias_correction,
            state_dtype=_state_dtype("DeepSpeedCPUAdam", params, fp32_optimizer_states),
        )


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
        if amsgrad:
            raise ConfigError("DeepSpeedCPUAdagrad(amsgrad=True): Adagrad has no such variant; leave it out")
        params = _listed(model_params)
        state = _state_dtype("DeepSpeedCPUAdagrad", params, fp32_optimizer_states)
        super().__init__(params, lr, weight_decay=weight_decay, eps=eps, state_dtype=state)


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
        params = _listed(model_params)
        state = _state_dtype("DeepSpeedCPULion", params, fp32_optimizer_states)
        super().__init__(params, lr, betas, weight_decay, state_dtype=state)
