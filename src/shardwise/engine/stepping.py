"""Optimizer and schedule of an engine: construction, and preparation for sharding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shardwise.config import Resolution
from shardwise.config.gradient_compression import method_parameters
from shardwise.config.schema.gradients import DGCOptions
from shardwise.errors import ConfigError, UsageError
from shardwise.optim import ElementwiseOptimizer, Sharding, group_shardings
from shardwise.optim import build as build_optimizer
from shardwise.optim.sharding import COST_METHOD
from shardwise.schedules import build as build_schedule
from shardwise.utils.logging import warn_once
from shardwise.zero.updates.update import Stepping


def make_optimizer(
    settings: Any,
    client: Any,
    parameters: Iterable[Any] | None,
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype | None,
    *,
    of_a_part: bool = False,
) -> torch.optim.Optimizer | None:
    """Return the optimizer of the client (an instance, or a callable of the parameters) or of the configuration; None
    without trainable parameters. `dtype`: compute dtype; None: the parameters' own. `of_a_part`: other ranks have other
    parameters, so the optimizer may have none.
    """
    if isinstance(client, torch.optim.Optimizer):
        return client
    chosen = list(parameters) if parameters is not None else [p for p in model.parameters() if p.requires_grad]
    if chosen and not isinstance(chosen[0], dict):
        # torch's optimizers also take (name, parameter) pairs, and keep the names in their groups.
        chosen = [entry for entry in chosen if (entry[1] if isinstance(entry, tuple) else entry).requires_grad]
    if not chosen:
        if not of_a_part:
            return None
        chosen = [{"params": []}]
    if client is not None:
        if not callable(client):
            raise UsageError(
                f"initialize(optimizer=...) expects an Optimizer or a callable, got {type(client).__name__}"
            )
        made = client(chosen)
        if not isinstance(made, torch.optim.Optimizer):
            raise UsageError(f"the optimizer callable returned {type(made).__name__}, not a torch.optim.Optimizer")
        return made
    if settings.optimizer is None or settings.optimizer.type is None:
        return None
    options = dict(settings.optimizer.params or {})
    # Some optimizers select parameters by name; a tied one has several.
    named = model.named_parameters(remove_duplicate=False)
    return build_optimizer(settings.optimizer.type, chosen, options, device=device, named=named, parameter_dtype=dtype)


def stepping_of(optimizer: torch.optim.Optimizer | None) -> Stepping:
    """Return how the optimizer can be sharded; a ConfigError with the reason, if it cannot be sharded."""
    if optimizer is None:
        return Stepping()
    kinds = group_shardings(optimizer)
    return Stepping(
        whole=frozenset(number for number, kind in enumerate(kinds) if kind is Sharding.WHOLE),
        norms=Sharding.NORMS in kinds,
        cost=getattr(optimizer, COST_METHOD, None),
        communicates=Sharding.COMMUNICATES in kinds,
    )


def prepare_optimizer(optimizer: torch.optim.Optimizer | None, resolution: Resolution, *, masters: bool) -> Stepping:
    """Check an optimizer, prepare its step, and return how it can be sharded; a ConfigError if it is unusable."""
    stepping = stepping_of(optimizer)
    if optimizer is not None:
        _check_momentum(resolution.config, optimizer)
        if not masters:
            _step_parameters(optimizer, resolution, stepping)
    return stepping


def _step_parameters(optimizer: torch.optim.Optimizer, resolution: Resolution, stepping: Stepping) -> None:
    fp16, bf16 = resolution.config.fp16.enabled, resolution.config.bf16
    name = type(optimizer).__name__
    rounding: str = "nearest" if fp16 else bf16.rounding or "nearest"
    ours = "an optimizer of shardwise.optim (optimizer.type Adam, AdamW, Adagrad or Lion)"
    if stepping.communicates:
        raise ConfigError(
            f"bf16.master_weights: {name} averages fp32 momenta and needs fp32 masters beside 16-bit parameters. "
            'Leave the key at "fp32", and `bf16_master_weights_and_grads` and `fp16_master_weights_and_grads` out'
        )
    if isinstance(optimizer, ElementwiseOptimizer) and not stepping.whole:
        if "bf16.rounding" not in resolution.given and optimizer.rounding != "nearest":
            rounding = optimizer.rounding
        narrow = bf16.enabled and bf16.bf16_optimizer_states
        optimizer.set_precision(rounding, torch.bfloat16 if narrow else optimizer.state_dtype)
    elif fp16:
        raise ConfigError(
            f"fp16.fp16_master_weights_and_grads: {name} would keep its state in fp16, like the parameters, which has "
            f"too little range for averages of gradients and of their squares; use {ours}, or remove the key"
        )
    elif rounding != "nearest":
        raise ConfigError(
            f'bf16.rounding: {name} writes its parameters itself, rounded to nearest, and "{rounding}" is asked for '
            f'(it is what `bf16.master_weights` "none" means unless said otherwise). Use {ours}, or write '
            '`bf16.rounding` "nearest", with which small updates are lost'
        )
    elif not bf16.bf16_optimizer_states:
        raise ConfigError(
            f"bf16.bf16_optimizer_states: {name} keeps its state in the parameters' type, which is bf16 without master "
            f"weights. Set the key to true if that is meant; {ours} can keep it in fp32"
        )


def _check_momentum(settings: Any, optimizer: torch.optim.Optimizer) -> None:
    method = method_parameters(settings)
    if not isinstance(method, DGCOptions) or method.momentum == 0:
        return
    for number, group in enumerate(optimizer.param_groups):
        own = {name: group[name] for name in ("momentum", "betas") if name in group}
        first = own["betas"][0] if "betas" in own else own.get("momentum", 0)
        if first:
            warn_once(
                f'compression.type "dgc" applies momentum {method.momentum:g} before it sends, and group {number} of '
                f"{type(optimizer).__name__} applies its own ({', '.join(f'{n} {v}' for n, v in own.items())}) on top. "
                "Set compression.params.momentum to 0, or use SGD without momentum"
            )
            return


def make_scheduler(settings: Any, client: Any, optimizer: torch.optim.Optimizer | None) -> Any:
    """Return the client's scheduler or the configured one, or None; a UsageError for an unusable object."""
    if client is not None:
        return _given_scheduler(client, optimizer)
    section = settings.scheduler
    if section is None or section.type is None or optimizer is None:
        return None
    return build_schedule(section.type, optimizer, dict(section.params or {}))


def _given_scheduler(client: Any, optimizer: torch.optim.Optimizer | None) -> Any:
    if optimizer is None:
        raise UsageError("initialize(lr_scheduler=...): there is no optimizer whose learning rate could be scheduled")
    given = client.__name__ if isinstance(client, type) else type(client).__name__
    if isinstance(client, type) or (callable(client) and not hasattr(client, "step")):
        client = client(optimizer)
        given = f"{given}, which returned {type(client).__name__},"
    if not callable(getattr(client, "step", None)):
        raise UsageError(
            f"initialize(lr_scheduler=...) expects a scheduler (an object with step()), or a callable that makes one "
            f"from the optimizer; {given} is neither"
        )
    own = getattr(client, "optimizer", None)
    # Frameworks wrap optimizers; a wrapper has the same groups.
    if own is not None and getattr(own, "param_groups", None) is not optimizer.param_groups:
        raise UsageError(
            f"initialize(lr_scheduler=...): this {type(client).__name__} sets the learning rates of another optimizer "
            f"({type(own).__name__}) than the engine's {type(optimizer).__name__}. Make it from the optimizer that is "
            "passed as optimizer=, or pass a callable that makes it: lr_scheduler=lambda optimizer: ..."
        )
    return client
