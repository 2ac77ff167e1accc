"""Building an optimizer from the `type` and `params` of the configuration.

Names are resolved in this order: our own (`adam`, `lion`, `lamb`, `muon`, `onebitadam`, those of the package mup and so
on; any case), unless an option is asked for that only torch's class of that name has; the classes of `torch.optim` by
exact name; the classes of `torch.optim` in any case.

Invariant: every option either changes the optimizer or is refused or logged; none disappears.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from shardwise.config.names import NATIVE_OPTIMIZERS
from shardwise.errors import ConfigError, NotBuiltError
from shardwise.optim.adagrad import Adagrad
from shardwise.optim.adam import Adam, AdamW
from shardwise.optim.lamb import Lamb
from shardwise.optim.lion import Lion
from shardwise.optim.muon import Muon, muon_groups
from shardwise.optim.onebit import OnebitAdam, OnebitLamb, ZeroOneAdam

_log = logging.getLogger("shardwise")

Params = Iterable[Any]
"""What `torch.optim` accepts: tensors, (name, tensor) pairs, or dictionaries of a group with its options."""


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

    Args:
        name: `optimizer.type`: one of our own (any case), or the name of a class in torch.optim.
        params: what torch.optim accepts as its first argument.
        options: `optimizer.params`; not changed.
        device: where the step will run; decides whether torch's fused implementation is available.
        named: (name, parameter) pairs of the model, for optimizers that treat parameters by name (`muon`); `params` may
            have names of their own.
        parameter_dtype: what the parameters will be in forward and backward, in which `fp32_optimizer_states` false
            keeps states. None: what they are.

    Returns:
        `adam` and `adamw` give `shardwise.optim.AdamW`, `adam` with `"adam_w_mode": false` gives
        `shardwise.optim.Adam`, our other names the classes of these names; all with weight_decay 0 by default. Options
        that only torch's Adam, AdamW and Adagrad have (such as amsgrad) give those; other names give an instance of the
        class in torch.optim.

    Raises:
        ConfigError: the name or an option is unknown, or a value has no meaning.
        NotBuiltError: a known name asks for something that this version does not have.

    >>> weight = torch.zeros(3, requires_grad=True)
    >>> type(build("Adam", [weight], {"lr": 0.01}, device="cpu")).__name__
    'AdamW'
    >>> build("SDG", [weight], {}, device="cpu")
    Traceback (most recent call last):
        ...
    shardwise.errors.ConfigError: optimizer.type: unknown optimizer 'SDG'; did you mean SGD?
    """
    params = [_group_with_list(entry) for entry in params]
    device = torch.device(device)
    if name.lower() == "muon":
        params = _muon_groups(params, named)
    if (own := _BUILDERS.get(name.lower())) is not None:
        return own(name, params, dict(options), device, parameter_dtype)
    classes = _torch_classes()
    if name in classes:
        return _construct(classes[name], params, dict(options), device)
    by_lower_case = {known.lower(): cls for known, cls in classes.items()}
    if (cls := by_lower_case.get(name.lower())) is not None:
        return _construct(cls, params, dict(options), device)
    raise ConfigError(f"optimizer.type: unknown optimizer {name!r}{_suggestion(name, names())}")


def names() -> list[str]:
    """Return the names that `build` accepts without further packages, in the spelling that always works."""
    classes = _torch_classes()
    served = {name.lower() for name in classes}
    return sorted([*classes, *(name for name in _BUILDERS if name not in served and name not in _MUP)], key=str.lower)


_TORCH_ONLY = {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False,
               "fused": None}  # fmt: skip
"""Options that our classes do not have, with the values that ask for nothing."""


def _adam(
    name: str, params: list[Any], options: dict[str, Any], device: torch.device, parameter_dtype: torch.dtype | None
) -> torch.optim.Optimizer:
    """Build Adam from the options that published configurations have; decay is decoupled by default."""
    decoupled = _pop_flag(options, "adam_w_mode", True)
    if name.lower() == "adamw" and not decoupled:
        raise ConfigError(
            f"optimizer.params.adam_w_mode: false contradicts optimizer.type {name}; use type Adam for weight decay "
            "that is added to the gradient"
        )
    _tell_set_grad_none(options)
    plain = _pop_flag(options, "torch_adam", False)
    options.setdefault("weight_decay", 0.0)
    wanted = _torch_only(options)
    if not plain and not wanted:
        chosen: type[torch.optim.Optimizer] = AdamW if decoupled else Adam
        return _own(chosen, params, options, device, parameter_dtype)
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    cause = "torch_adam" if plain else wanted[0]
    for key in ("bias_correction", "fp32_optimizer_states"):
        if not _pop_flag(options, key, True):
            raise ConfigError(
                f"optimizer.params.{key}: false contradicts optimizer.params.{cause} {options.get(cause, True)!r}: "
                f"torch.optim.{cls.__name__}, which that asks for, does not have it; remove one"
            )
    if plain and options.get("fused"):
        raise ConfigError("optimizer.params.torch_adam: true contradicts optimizer.params.fused true; remove one")
    if options.get("fused") is None and not plain and not options.get("foreach") and not options.get("differentiable"):
        reason = _fused_refusal(cls, params, device)
        options["fused"] = None if reason else True
        if reason:
            _log.warning("%s runs its plain implementation, because torch says: %s", cls.__name__, reason)
    return _construct(cls, params, options, device, extra=tuple(NATIVE_OPTIMIZERS["adam"]))


def _adagrad(
    name: str, params: list[Any], options: dict[str, Any], device: torch.device, parameter_dtype: torch.dtype | None
) -> torch.optim.Optimizer:
    """Build Adagrad, torch's if an option asks for it."""
    wanted = _torch_only(options)
    if not wanted:
        return _own(Adagrad, params, options, device, parameter_dtype)
    if not _pop_flag(options, "fp32_optimizer_states", True):
        raise ConfigError(
            f"optimizer.params.fp32_optimizer_states: false contradicts optimizer.params.{wanted[0]}: that asks for "
            "torch.optim.Adagrad, which does not have it; remove one"
        )
    return _construct(torch.optim.Adagrad, params, options, device, extra=tuple(NATIVE_OPTIMIZERS["adagrad"]))


def _lion(
    name: str, params: list[Any], options: dict[str, Any], device: torch.device, parameter_dtype: torch.dtype | None
) -> torch.optim.Optimizer:
    """Build Lion."""
    return _own(Lion, params, options, device, parameter_dtype)


def _onebit(
    name: str, params: list[Any], options: dict[str, Any], device: torch.device, parameter_dtype: torch.dtype | None
) -> torch.optim.Optimizer:
    """Build one of the optimizers that communicate themselves."""
    return _construct(_ONEBIT[name.lower()], params, options, device)


_ONEBIT: dict[str, type[torch.optim.Optimizer]] = {
    cls.__name__.lower(): cls for cls in (OnebitAdam, OnebitLamb, ZeroOneAdam)
}


def _lamb(
    name: str, params: list[Any], options: dict[str, Any], device: torch.device, parameter_dtype: torch.dtype | None
) -> torch.optim.Optimizer:
    if options.get("max_grad_norm") == 0:
        del options["max_grad_norm"]
    return _construct(Lamb, params, options, device, extra=("max_grad_norm",))


def _muon_groups(params: Iterable[Any], named: Iterable[tuple[str, torch.Tensor]]) -> list[Any]:
    """Divide parameters into those of Muon and of Adam by their names in the model."""
    known: dict[int, list[str]] = {}
    for name, parameter in named:
        known.setdefault(id(parameter), []).append(name)
    return list(muon_groups(params, known))


def _muon(
    name: str, params: list[Any], options: dict[str, Any], device: torch.device, parameter_dtype: torch.dtype | None
) -> torch.optim.Optimizer:
    if _pop_flag(options, "per_head_muon", False):
        raise NotBuiltError(
            "optimizer.params.per_head_muon: true is not available; matrices are orthogonalised as a whole. Remove "
            "the key"
        )
    plain = _pop_flag(options, "torch_adam", False)
    if not plain and (reason := _fused_refusal(torch.optim.AdamW, params, device)):
        _log.warning("the Adam half of Muon runs its plain implementation, because torch says: %s", reason)
        plain = True
    return _construct(Muon, params, {**options, "torch_adam": plain}, device, extra=("per_head_muon",))


def _from_mup(
    name: str, params: list[Any], options: dict[str, Any], device: torch.device, parameter_dtype: torch.dtype | None
) -> torch.optim.Optimizer:
    """Build an optimizer of the package mup (Yang et al., "Tensor Programs V", 2022), which is not ours to install."""
    maker = _MUP[name.lower()]
    try:
        make = getattr(importlib.import_module("mup"), maker)
    except ImportError as error:
        raise ConfigError(
            f"optimizer.type: {name!r} is {maker} of the package mup, which is not installed ({error}); run "
            "'pip install mup', or pass an instance of another optimizer"
        ) from error
    for key, value in options.items():
        _check_option(key, value)
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

Builder = Callable[
    [str, list[Any], dict[str, Any], torch.device, "torch.dtype | None"],
    torch.optim.Optimizer,
]

_BUILDERS: dict[str, Builder] = {
    "adam": _adam,
    "adamw": _adam,
    "adagrad": _adagrad,
    "lion": _lion,
    "lamb": _lamb,
    "muon": _muon,
    **dict.fromkeys(_ONEBIT, _onebit),
    **dict.fromkeys(_MUP, _from_mup),
}


def _own(
    cls: type[torch.optim.Optimizer],
    params: list[Any],
    options: dict[str, Any],
    device: torch.device,
    parameter_dtype: torch.dtype | None,
) -> torch.optim.Optimizer:
    """Build one of our classes from the options that configurations know."""
    _tell_set_grad_none(options)
    internal: dict[str, Any] = {"adam_w_mode": False} if cls is Adam else {}
    if not _pop_flag(options, "fp32_optimizer_states", True):
        internal["state_dtype"] = _narrow_states(params, parameter_dtype)
    if "bias_correction" in options:
        options["bias_correction"] = _pop_flag(options, "bias_correction", True)
    for key in _torch_only_names(options):
        del options[key]  # it asks for nothing
    known = NATIVE_OPTIMIZERS[cls.__name__.lower()]
    return _construct(cls, params, options, device, known=known, internal=internal)


def _narrow_states(params: list[Any], parameter_dtype: torch.dtype | None) -> torch.dtype:
    """Return the one type of the parameters, in which states are to be kept."""
    kinds = {parameter_dtype} if parameter_dtype else {tensor.dtype for tensor in _tensors(params)}
    if len(kinds) == 1 and torch.float16 not in kinds:
        return kinds.pop()
    found = "fp16 parameters" if len(kinds) == 1 else "parameters of several types"
    raise ConfigError(
        f"optimizer.params.fp32_optimizer_states: false keeps states in the parameters' type, found {found}. "
        "fp16 has too little range for averages of gradients and of their squares; use bf16, or remove the key"
    )


def _torch_only_names(options: Mapping[str, Any]) -> list[str]:
    return [key for key in _TORCH_ONLY if key in options]


def _torch_only(options: Mapping[str, Any]) -> list[str]:
    """Return the options that ask for something that only torch's class has."""
    return [key for key in _torch_only_names(options) if options[key] is not _TORCH_ONLY[key]]


def _tell_set_grad_none(options: dict[str, Any]) -> None:
    if "set_grad_none" in options:
        _pop_flag(options, "set_grad_none", True)
        _log.info("optimizer.params.set_grad_none changes nothing: the engine owns the gradients and frees them")


def _fused_refusal(cls: type[torch.optim.Optimizer], params: list[Any], device: torch.device) -> str | None:
    """Ask torch for one fused step on one element of each dtype; return why it refuses, or None.

    A trial rather than a list of devices, because such a list is not public and changes between versions.
    """
    for dtype in dict.fromkeys(tensor.dtype for tensor in _tensors(params)):
        probe = torch.zeros(1, dtype=dtype, device=device)
        probe.grad = torch.zeros_like(probe)
        try:
            cls([probe], fused=True).step()  # type: ignore[call-arg]
        except (RuntimeError, ValueError) as error:
            return str(error).splitlines()[0]
    return None


def _construct(
    cls: type[torch.optim.Optimizer],
    params: list[Any],
    options: dict[str, Any],
    device: torch.device,
    *,
    extra: tuple[str, ...] = (),
    known: Iterable[str] | None = None,
    internal: Mapping[str, Any] | None = None,
) -> torch.optim.Optimizer:
    """Call the class; turn wrong option names and values into errors that name the key.

    Args:
        cls: class of torch.optim, or one of our own.
        params: its first argument.
        options: its keyword arguments, as configured.
        device: where the step will run.
        extra: option names that the caller has dealt with, for suggestions only.
        known: the options that may be configured; None: all that the class has.
        internal: more keyword arguments.
    """
    accepted = [key for key in known or inspect.signature(cls).parameters if key != "params"]
    for key, value in options.items():
        where = _check_option(key, value)
        if key not in accepted:
            raise ConfigError(
                f"{where}: {cls.__name__} has no such option{_suggestion(key, [*accepted, *extra])} (it has "
                f"{', '.join(sorted({*accepted, *extra}))})"
            )
        if isinstance(value, list):
            options[key] = tuple(value)
    if options.get("fused") and (reason := _fused_refusal(cls, params, device)):
        raise ConfigError(f"optimizer.params.fused: true is not possible, because torch says: {reason}; remove the key")
    try:
        return cls(params, **options, **(internal or {}))
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, ConfigError) and str(error).startswith("optimizer."):
            raise
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        origin = "torch.optim" if cls.__module__.startswith("torch.") else "shardwise.optim"
        raise ConfigError(f"optimizer.params: {origin}.{cls.__name__} refuses ({given}): {error}") from error


def _check_option(key: str, value: Any) -> str:
    """Raise for what is no option of any optimizer; return where it is written."""
    where = f"optimizer.params.{key}"
    if key == "max_grad_norm":
        raise ConfigError(f"{where}: clipping is not the optimizer's; use the top-level key gradient_clipping")
    if isinstance(value, str) and value == "auto":
        raise ConfigError(f"{where}: 'auto' has to be replaced by a value before the optimizer is built")
    return where


def _torch_classes() -> dict[str, type[torch.optim.Optimizer]]:
    """Every optimizer class of torch.optim by name."""
    return {
        name: value
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }


def _group_with_list(entry: Any) -> Any:
    """Copy a group whose tensors come from a generator, so that they can be looked at and then used."""
    if isinstance(entry, dict) and not isinstance(entry["params"], torch.Tensor):
        return {**entry, "params": list(entry["params"])}
    return entry


def _tensors(params: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Every tensor in a parameter list of any of torch's three forms."""
    for entry in params:
        if isinstance(entry, dict):
            group = entry["params"]
            yield from _tensors([group] if isinstance(group, torch.Tensor) else group)
        else:
            yield entry[1] if isinstance(entry, tuple) else entry


def _pop_flag(options: dict[str, Any], key: str, default: bool) -> bool:
    value = options.pop(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"optimizer.params.{key}: expected true or false, found {value!r}")
    return value


def _suggestion(name: str, known: Iterable[str]) -> str:
    lower = {entry.lower(): entry for entry in known}
    near = difflib.get_close_matches(name.lower(), lower, n=3)
    return f"; did you mean {' or '.join(lower[entry] for entry in near)}?" if near else ""
