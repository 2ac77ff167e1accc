"""Attributes of DeepSpeed's optimizer, loader and engine that scripts read. DeepSpeed wraps the optimizer; here
descriptors on torch's class return values for optimizers that an engine steps, and raise AttributeError for others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from shardwise._version import __version__
from shardwise.data import EngineDataLoader
from shardwise.engine import Engine
from shardwise.errors import AbsentAttributeError
from shardwise.zero.parameters.guards import belongs_to_engine
from shardwise.zero.units import released

_engines: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Engine]] = weakref.WeakKeyDictionary()


def note(engine: Engine) -> None:
    """Record the engine that steps its optimizer."""
    if isinstance(engine.optimizer, torch.optim.Optimizer):
        _engines[engine.optimizer] = weakref.ref(engine)


class _OfEngine:
    """One attribute of an optimizer, without a setter, because a script may assign its own value."""

    def __init__(self, answer: Callable[[Engine], Any], name: str = "") -> None:
        self._answer, self.name = answer, name

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, optimizer: torch.optim.Optimizer | None, owner: type | None = None) -> Any:
        found = _engines.get(optimizer) if optimizer is not None and belongs_to_engine(optimizer) else None
        engine = None if found is None else found()
        if engine is None:
            raise AttributeError(f"{owner!r} has no attribute {self.name!r}: no engine of deepspeed.initialize has it")
        return self._answer(engine)


class LossScaler:
    """The loss scale of an engine, with the interface of DeepSpeed's scalers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def loss_scale(self) -> float:
        """The scale of the next backward pass; 1.0 without fp16."""
        return self._engine.cur_scale

    cur_scale = loss_scale

    @property
    def dynamic(self) -> bool:
        """Whether overflows change the scale."""
        return self._engine.loss_scaler is not None and self._engine.loss_scaler.dynamic

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> Any:
        """Run `engine.backward`, which scales the loss."""
        return self._engine.backward(loss, retain_graph=retain_graph)


def _set_lr(engine: Engine) -> Callable[[float], None]:
    def set_lr(lr: float) -> None:
        for group in engine.param_groups:
            group["lr"] = lr

    return set_lr


def _reload(engine: Engine) -> Callable[[], None]:
    """Return a function that marks parameters as changed, because changes through `.data` are not detected."""

    def reload_model_params() -> None:
        with torch.no_grad():
            for parameter in engine.module.parameters():
                if not released.is_released(parameter):
                    parameter.mul_(1)

    return reload_model_params


def _absent(name: str) -> Callable[[Engine], Any]:
    def absent(engine: Engine) -> Any:
        raise AbsentAttributeError(
            f"optimizer.{name} is not in shardwise {__version__}: the optimizer is torch's own, and what a rank has is "
            "no flat tensor of a group. deepspeed.utils.safe_get_full_fp32_param(p), safe_get_full_grad(p) and "
            "safe_get_local_fp32_param(p) read the state of a parameter"
        )

    return absent


def _nothing(engine: Engine) -> Callable[..., None]:
    return lambda *args, **kwargs: None  # an engine keeps gradients of master weights from the start


class OptimizerAttributes:
    """The attributes; see the module."""

    loss_scale = _OfEngine(lambda engine: engine.cur_scale)
    cur_scale = _OfEngine(lambda engine: engine.cur_scale)
    get_loss_scale = _OfEngine(lambda engine: lambda: engine.cur_scale)
    loss_scaler = _OfEngine(LossScaler)
    dynamic_loss_scale = _OfEngine(lambda engine: LossScaler(engine).dynamic)
    _global_grad_norm = _OfEngine(lambda engine: engine.get_global_grad_norm())
    backward = _OfEngine(lambda engine: engine.backward)
    update_master_grads = _OfEngine(_nothing)
    reload_model_params = _OfEngine(_reload)
    refresh_fp32_params = _OfEngine(_reload)
    get_lr = _OfEngine(lambda engine: lambda: engine.param_groups[0]["lr"])
    set_lr = _OfEngine(_set_lr)


_FLAT = """
averaged_gradients bit16_groups bit16_groups_flat fp16_groups fp16_groups_flat
fp16_partitioned_groups_flat fp32_groups_flat fp32_partitioned_groups_flat single_partition_of_fp32_groups"""
"""Flat tensors of DeepSpeed's optimizers that scripts access."""

_DESCRIPTORS = {
    **{name: value for name, value in vars(OptimizerAttributes).items() if isinstance(value, _OfEngine)},
    **{name: _OfEngine(_absent(name), name) for name in _FLAT.split()},
}
_ALIASES: tuple[tuple[type, str, Any], ...] = (
    (EngineDataLoader, "data_sampler", property(lambda loader: loader.sampler)),
    (EngineDataLoader, "num_local_io_workers", property(lambda loader: loader.num_workers)),
    (Engine, "store_checkpoint", Engine.save_checkpoint),
)


def attach() -> None:
    """Add the attributes to optimizers, loaders and engines; idempotent."""
    for name, descriptor in _DESCRIPTORS.items():
        setattr(torch.optim.Optimizer, name, descriptor)
    for owner, name, value in _ALIASES:
        setattr(owner, name, value)


def detach() -> None:
    """Undo `attach`."""
    for owner, name in [*((torch.optim.Optimizer, name) for name in _DESCRIPTORS), *(row[:2] for row in _ALIASES)]:
        if name in vars(owner):
            delattr(owner, name)
