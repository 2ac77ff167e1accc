"""Attributes of DeepSpeed's optimizer and loader that scripts read. DeepSpeed wraps the optimizer; here descriptors on
torch's class return values for optimizers that an engine steps, and raise AttributeError for others.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, NoReturn

import torch

from shardwise.data import EngineDataLoader
from shardwise.engine import Engine
from shardwise.zero.parameters.guards import belongs_to_engine
from shardwise.zero.units import released
from shardwise_deepspeed.entries import absent_member, absent_members
from shardwise_deepspeed.parameters import Answers, add

_OPTIMIZER = "deepspeed.DeepSpeedOptimizer"
_engines: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Engine]] = weakref.WeakKeyDictionary()


def note(engine: Engine) -> None:
    """Record the engine that steps its optimizer."""
    if isinstance(engine.optimizer, torch.optim.Optimizer):
        _engines[engine.optimizer] = weakref.ref(engine)


def _engine(optimizer: torch.optim.Optimizer) -> Engine | None:
    found = _engines.get(optimizer) if belongs_to_engine(optimizer) else None
    return None if found is None else found()


class LossScaler:
    """The loss scale of an engine, with the interface of DeepSpeed's scalers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.backward = engine.backward

    @property
    def loss_scale(self) -> float:
        """The scale of the next backward pass; 1.0 without fp16."""
        return self._engine.cur_scale

    cur_scale = loss_scale

    @property
    def dynamic(self) -> bool:
        """Whether overflows change the scale."""
        return self._engine.loss_scaler is not None and self._engine.loss_scaler.dynamic


def _set_lr(engine: Engine, lr: float) -> None:
    for group in engine.param_groups:
        group["lr"] = lr


def _reload(engine: Engine) -> None:
    """Mark parameters as changed, because changes through `.data` are not detected."""
    with torch.no_grad():
        for parameter in engine.module.parameters():
            if not released.is_released(parameter):
                parameter.mul_(1)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: an engine keeps gradients of master weights from the start."""


def _absent(name: str, optimizer: torch.optim.Optimizer, engine: Engine) -> NoReturn:
    error = absent_member(_OPTIMIZER, name, "optimizer")
    assert error is not None
    raise error


ANSWERS: Answers = {
    "loss_scale": lambda optimizer, engine: engine.cur_scale,
    "cur_scale": lambda optimizer, engine: engine.cur_scale,
    "get_loss_scale": lambda optimizer, engine: lambda: engine.cur_scale,
    "loss_scaler": lambda optimizer, engine: LossScaler(engine),
    "dynamic_loss_scale": lambda optimizer, engine: LossScaler(engine).dynamic,
    "_global_grad_norm": lambda optimizer, engine: engine.get_global_grad_norm(),
    "backward": lambda optimizer, engine: engine.backward,
    "update_master_grads": lambda optimizer, engine: _nothing,
    "reload_model_params": lambda optimizer, engine: partial(_reload, engine),
    "refresh_fp32_params": lambda optimizer, engine: partial(_reload, engine),
    "get_lr": lambda optimizer, engine: lambda: engine.param_groups[0]["lr"],
    "set_lr": lambda optimizer, engine: partial(_set_lr, engine),
    **{name: partial(_absent, name) for name in absent_members(_OPTIMIZER)},
}
LOADER: Answers = {
    "data_sampler": lambda loader, _: loader.sampler,
    "num_local_io_workers": lambda loader, _: loader.num_workers,
}


def attach() -> None:
    """Add the attributes to optimizers and loaders; idempotent."""
    add(torch.optim.Optimizer, _engine, ANSWERS)
    add(EngineDataLoader, lambda loader: loader, LOADER)
