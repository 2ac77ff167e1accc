"""Building an optimizer from the `type` and `params` of the configuration.

Names are resolved in this order: this library's in any case, unless an option exists in torch's class only; classes of
`torch.optim` by exact name; classes of `torch.optim` in any case. An option has an effect, is refused, or is logged.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from shardwise.config.argument_models import checked
from shardwise.config.names import canonical_optimizer, model_of, torch_optimizers, unknown
from shardwise.config.schema import optimizers as schema
from shardwise.config.schema.optimizers import NATIVE_OPTIMIZERS
from shardwise.errors import ConfigError
from shardwise.optim.adagrad import Adagrad
from shardwise.optim.adam import Adam, AdamW
from shardwise.optim.lamb import Lamb
from shardwise.optim.lion import Lion
from shardwise.optim.muon import Muon, muon_groups
from shardwise.optim.onebit import OnebitAdam, OnebitLamb, ZeroOneAdam

_log = logging.getLogger("shardwise")

Params = Iterable[Any]
"""Parameters as `torch.optim` accepts them: tensors, (name, tensor) pairs, or dictionaries of groups."""


def build(
    name: str,
    params: Params,
    options: Mapping[str, Any],
    *,
    device: torch.device | str,
    named: Iterable[tuple[str, torch.Tensor]] = (),
    parameter_dtype: torch.dtype | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer that the configuration names.

    `adam` and `adamw` give `shardwise.optim.AdamW`, `adam` with `"adam_w_mode": false` gives `shardwise.optim.Adam`,
    all with weight_decay 0 by default. Options of torch's Adam, AdamW or Adagrad only (amsgrad) give torch's class.
    `device` is that of the step, and decides whether torch's fused implementation is available. `named` has the model's
    (name, parameter) pairs, for `muon`. `parameter_dtype` is that of forward and backward, which states have if
    `fp32_optimizer_states` is false (None: the parameters' dtype).

    Raises:
        ConfigError: the name or an option is unknown, or a value has no meaning.
        NotBuiltError: this version does not support an option of a known name.

    >>> weight = torch.zeros(3, requires_grad=True)
    >>> type(build("Adam", [weight], {"lr": 0.01}, device="cpu")).__name__
    'AdamW'
    >>> build("SDG", [weight], {}, device="cpu")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    shardwise.errors.ConfigError: optimizer.type: there is no optimizer "SDG" (string), ...
    """
    params = [group_with_list(entry) for entry in params]
    device = torch.device(device)
    model = model_of("optimizer", name)
    if model is None:
        raise ConfigError(f"optimizer.type: {unknown('optimizer', name)}")
    found = checked(model, options, "optimizer.params.{}", name)
    given = {key: getattr(found, key) for key in options}
    if isinstance(found, schema.Mup):
        return _from_mup(name, params, given)
    if isinstance(found, schema.Elementwise):
        return _elementwise(name, found, params, given, device, parameter_dtype)
    if isinstance(found, schema.MuonArguments):
        return _muon(_muon_groups(params, named, found.stacked), given, device)
    return _construct(OURS.get(name.lower()) or torch_optimizers()[canonical_optimizer(name)], params, given, device)


def names() -> list[str]:
    """Return the names that `build` accepts without further packages, in their usual spelling."""
    classes = torch_optimizers()
    served = {name.lower() for name in classes}
    return sorted([*classes, *(name for name in NATIVE_OPTIMIZERS if name not in served)], key=str.lower)


OURS: dict[str, type[torch.optim.Optimizer]] = {
    cls.__name__.lower(): cls for cls in (Adam, AdamW, Adagrad, Lion, Lamb, Muon, OnebitAdam, OnebitLamb, ZeroOneAdam)
}
"""This library's classes by name; `shardwise.config.schema.optimizers.NATIVE_OPTIMIZERS` has their arguments."""


def _elementwise(
    name: str,
    found: schema.Elementwise,
    params: list[Any],
    given: dict[str, Any],
    device: torch.device,
    parameter_dtype: torch.dtype | None,
) -> torch.optim.Optimizer:
    if "set_grad_none" in given:
        _log.info("optimizer.params.set_grad_none changes nothing: the engine owns the gradients and frees them")
    cls = OURS[name.lower()]
    if isinstance(found, schema.AdamArguments) and found.adam_w_mode:
        cls = AdamW
    plain = found.torch_only_option() is None
    if not plain:
        cls = getattr(torch.optim, cls.__name__)
    # Options that the class lacks have no effect, or have already decided the class.
    options = {key: given[key] for key in given if key in inspect.signature(cls).parameters}
    if not given.get("torch_adam"):  # which has torch's default
        options.setdefault("weight_decay", 0.0)
    if plain and not found.fp32_optimizer_states:
        options["state_dtype"] = _narrow_states(params, parameter_dtype)
    if not plain and isinstance(found, schema.AdamArguments) and found.allows_fused():
        reason = _fused_refusal(cls, params, device)
        options["fused"] = None if reason else True
        if reason:
            _log.warning("%s runs its plain implementation, because torch says: %s", cls.__name__, reason)
    return _construct(cls, params, options, device)


def _muon_groups(
    params: Iterable[Any], named: Iterable[tuple[str, torch.Tensor]], stacked: bool | list[str] | None
) -> list[Any]:
    known: dict[int, list[str]] = {}
    for name, parameter in named:
        known.setdefault(id(parameter), []).append(name)
    return list(muon_groups(params, known, stacked))


def _muon(params: list[Any], given: dict[str, Any], device: torch.device) -> torch.optim.Optimizer:
    if not given.get("torch_adam") and (reason := _fused_refusal(torch.optim.AdamW, params, device)):
        _log.warning("the Adam half of Muon runs its plain implementation, because torch says: %s", reason)
        given["torch_adam"] = True
    given.pop("per_head_muon", None)
    return _construct(Muon, params, given, device)


def _from_mup(name: str, params: list[Any], options: dict[str, Any]) -> torch.optim.Optimizer:
    # Yang et al., "Tensor Programs V", 2022.
    maker = _MUP[name.lower()]
    try:
        make = getattr(importlib.import_module("mup"), maker)
    except ImportError as error:
        raise ConfigError(
            f"optimizer.type: {name!r} is {maker} of the package mup, which is not installed ({error}); run "
            "'pip install mup', or pass an instance of another optimizer"
        ) from error
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    try:
        made = make(params, **options)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError, AssertionError, AttributeError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise ConfigError(
            f"optimizer.params: mup.{maker} refuses ({given}): {error}. Its parameters must have been given shapes by "
            "mup.set_base_shapes()"
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f"optimizer.type: mup.{maker} returned {type(made).__name__}, not a torch.optim.Optimizer")
    return made


_MUP = {"muadam": "MuAdam", "muadamw": "MuAdamW", "musgd": "MuSGD"}


def _narrow_states(params: list[Any], parameter_dtype: torch.dtype | None) -> torch.dtype:
    kinds = {parameter_dtype} if parameter_dtype else {tensor.dtype for tensor in _tensors(params)}
    if len(kinds) == 1 and torch.float16 not in kinds:
        return kinds.pop()
    found = "fp16 parameters" if len(kinds) == 1 else "parameters of several types"
    raise ConfigError(
        f"optimizer.params.fp32_optimizer_states: false keeps states in the parameters' type, found {found}. "
        "fp16 has too little range for averages of gradients and of their squares; use bf16, or remove the key"
    )


def _fused_refusal(cls: type[torch.optim.Optimizer], params: list[Any], device: torch.device) -> str | None:
    """Try a fused step on one element per dtype; return torch's refusal. Because torch's list of devices is private."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in _tensors(params)):
        probe = torch.zeros(1, dtype=dtype, device=device)
        probe.grad = torch.zeros_like(probe)
        try:
            cls([probe], fused=True).step()  # type: ignore[call-arg]
        except (RuntimeError, ValueError) as error:
            return str(error).splitlines()[0]
    return None


def _construct(
    cls: type[torch.optim.Optimizer], params: list[Any], options: dict[str, Any], device: torch.device
) -> torch.optim.Optimizer:
    if options.get("fused") and (reason := _fused_refusal(cls, params, device)):
        raise ConfigError(f"optimizer.params.fused: true is not possible, because torch says: {reason}; remove the key")
    try:
        return cls(params, **options)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        origin = "torch.optim" if cls.__module__.startswith("torch.") else "shardwise.optim"
        raise ConfigError(f"optimizer.params: {origin}.{cls.__name__} refuses ({given}): {error}") from error


def group_with_list(entry: Any) -> Any:
    """Return a parameter group with a list of its parameters, because a generator can be read only once."""
    if isinstance(entry, dict) and not isinstance(entry["params"], torch.Tensor):
        return {**entry, "params": list(entry["params"])}
    return entry


def _tensors(params: Iterable[Any]) -> Iterator[torch.Tensor]:
    for entry in params:
        if isinstance(entry, dict):
            group = entry["params"]
            yield from _tensors([group] if isinstance(group, torch.Tensor) else group)
        else:
            yield entry[1] if isinstance(entry, tuple) else entry
