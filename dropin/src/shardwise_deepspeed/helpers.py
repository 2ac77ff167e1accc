"""Functions of `deepspeed.runtime.utils` and related modules that scripts call."""

from __future__ import annotations

import functools
import os
import random
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy
import torch

from shardwise.errors import UsageError
from shardwise.trees import map_tensors

_Value = TypeVar("_Value")


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None) -> torch.Tensor:
    """Clip the gradients of parameters that no engine owns (engines use `gradient_clipping`), and return their norm.
    Raises UsageError if `mpu` has a model-parallel group, over which the parameters are split.
    """
    if mpu is not None and mpu.get_model_parallel_world_size() > 1:
        raise UsageError("clip_grad_norm_(mpu=...): parameters that several ranks share are not built yet")
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def move_to_device(item: Any, device: Any, criterion_func: Callable[[torch.Tensor], bool] | None = None) -> Any:
    """Move tensors in nested containers to a device: those of `criterion_func`, or all; others are kept."""
    return map_tensors(item, lambda t: t.to(device) if criterion_func is None or criterion_func(t) else t)


def copy_to_device(item: Any, device: Any, criterion_func: Callable[[torch.Tensor], bool]) -> Any:
    """Do as `move_to_device`, and copy tensors that are on the device already."""
    return map_tensors(item, lambda t: t.detach().clone().to(device) if criterion_func(t) else t)


def clone_tensors_for_torch_save(item: Any, device: Any = torch.device("cpu")) -> Any:  # noqa: B008  (never changed)
    """Return nested tensors copied to a device, because `torch.save` writes the full storage of a view."""
    return map_tensors(item, lambda t: t.detach().clone().to(device))


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy and torch."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


empty_cache = torch.cuda.empty_cache  # nothing without a device


def ensure_directory_exists(filename: str | os.PathLike[str]) -> None:
    """Create the directory of a file."""
    directory = os.path.dirname(os.fspath(filename))
    if directory:
        os.makedirs(directory, exist_ok=True)


def get_only_unique_item(items: Iterable[_Value]) -> _Value:
    """Return the value that all items have. Raises RuntimeError if they differ, or there is none."""
    found = list(dict.fromkeys(items))
    if len(found) != 1:
        raise RuntimeError(f"expected items that are all equal, found {found}")
    return found[0]


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Return a call as text.

    >>> call_to_str("f", 1, b="c")
    "f(1, b='c')"
    """
    parts = [repr(value) for value in args] + [f"{name}={value!r}" for name, value in kwargs.items()]
    return f"{base}({', '.join(parts)})"


def noop_decorator(func: _Value) -> _Value:
    """Return a function unchanged."""
    return func


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Return True if the version of torch is between two versions, inclusive.

    >>> required_torch_version(min_version=2.1), required_torch_version(max_version="1.13")
    (True, False)
    """
    have = _numbers(torch.__version__)
    least, most = (None if version is None else _numbers(str(version)) for version in (min_version, max_version))
    return (least is None or have >= least) and (most is None or have[: len(most)] <= most)


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    if match is None:
        raise UsageError(f"{version!r} is not a version of torch")
    return tuple(int(part) for part in match[0].split("."))


def get_torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer that an object is or has (`.optimizer`). Raises TypeError if neither."""
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(candidate, torch.optim.Optimizer):
            return candidate
    raise TypeError(f"{type(optimizer).__name__} is not a torch.optim.Optimizer and has none")


def update_lr(param_groups: list[dict[str, Any]], lrs: Iterable[float]) -> list[float]:
    """Set the learning rate of each group; return the groups' learning rates."""
    for group, rate in zip(param_groups, lrs, strict=True):
        # A tensor is filled in place, because compiled and graph-captured steps read that tensor.
        group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], torch.Tensor) else rate
    return [group["lr"] for group in param_groups]


def recursive_getattr(model: torch.nn.Module, module_name: str) -> Any:
    """Return the attribute of a module by dotted name.

    >>> recursive_getattr(torch.nn.Sequential(torch.nn.Linear(2, 3)), "0.out_features")
    3
    """
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: torch.nn.Module, module_name: str, module: Any) -> None:
    """Set the attribute of a module by dotted name.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    >>> recursive_setattr(model, "0", torch.nn.ReLU())
    >>> model[0]
    ReLU()
    """
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)


def is_compile_supported() -> bool:
    """Return True, because every supported torch has torch.compile."""
    return True


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    """Return this process's rank in the tensor-parallel group."""
    return 0 if mpu is None else int(_first(mpu, "get_tensor_model_parallel_rank", "get_model_parallel_rank")())


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> int:
    """Return the size of the tensor-parallel group."""
    if mpu is None:
        return 1
    return int(_first(mpu, "get_tensor_model_parallel_world_size", "get_model_parallel_world_size")())


def bwc_tensor_model_parallel_group(mpu: Any = None) -> Any:
    """Return the tensor-parallel group, or None without tensor parallelism."""
    return None if mpu is None else _first(mpu, "get_tensor_model_parallel_group", "get_model_parallel_group")()


def bwc_pipeline_parallel_world_size(mpu: Any = None) -> int:
    """Return the number of pipeline stages."""
    getter = _first(mpu, "get_pipeline_model_parallel_world_size", "get_pipe_parallel_world_size")
    return 1 if getter is None else int(getter())


def bwc_pipeline_parallel_group(mpu: Any = None) -> Any:
    """Return the pipeline-parallel group, or None without stages."""
    getter = _first(mpu, "get_pipeline_model_parallel_group", "get_pipe_parallel_group")
    return None if getter is None else getter()


def _first(unit: Any, *names: str) -> Any:
    return next((getattr(unit, name) for name in names if hasattr(unit, name)), None)
