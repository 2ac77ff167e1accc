"""torch.autocast around the forward pass: parameters stay fp32, selected operators compute in 16 bits.

Gradients of fp32 parameters are then fp32. Because matrix products and convolutions compute them from 16-bit values,
these gradients have at most 16 bits of precision and may be communicated in 16 bits; sums stay fp32. Gradients of other
modules (normalisations, embeddings) are communicated in fp32.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.precision.dtypes import parse_dtype

if TYPE_CHECKING:
    from shardwise.config import Config

SAFE_MODULES = ("torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d")
"""Default module classes of which the gradients are communicated in the autocast dtype."""

_KEY = "torch_autocast.lower_precision_safe_modules"


def autocast_dtype(config: Config) -> torch.dtype | None:
    """Return the autocast dtype (bf16 by default), or None without autocast."""
    section = config.torch_autocast
    if not section.enabled:
        return None
    return torch.bfloat16 if section.dtype is None else parse_dtype(section.dtype, "torch_autocast.dtype")


def autocast(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Return the autocast context of a forward pass; a null context without a dtype or under the caller's autocast.

    >>> with autocast(torch.device("cpu"), torch.bfloat16):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.bfloat16
    """
    if dtype is None or torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    # The cache holds casts for the backward pass. Without one it would only keep a second copy of all weights.
    remembers = torch.is_grad_enabled() and torch.is_autocast_cache_enabled()
    return torch.autocast(device.type, dtype=dtype, cache_enabled=remembers)


def wire_dtypes(module: nn.Module, config: Config) -> dict[int, torch.dtype]:
    """Return the communication dtype of gradients by `id(parameter)`, for fp32 parameters of safe modules only.

    A parameter shared with another module (a tied embedding) has no entry. An unknown class is a ConfigError.
    """
    dtype = autocast_dtype(config)
    if dtype is None:
        return {}
    given = config.torch_autocast.lower_precision_safe_modules
    classes = tuple(_class(name) for name in (SAFE_MODULES if given is None else given))
    found: dict[int, bool] = {}
    for part in module.modules():
        safe = isinstance(part, classes)
        for parameter in part.parameters(recurse=False):
            found[id(parameter)] = found.get(id(parameter), True) and safe and parameter.dtype is torch.float32
    return {key: dtype for key, safe in found.items() if safe}


def _class(name: str) -> type[nn.Module]:
    """Return the class of a dotted name, only from imported modules: a configuration must not cause imports."""
    path, _, last = name.rpartition(".")
    found = getattr(sys.modules.get(path), last, None)
    if isinstance(found, type) and issubclass(found, nn.Module):
        return found
    raise ConfigError(
        f"{_KEY}: expected dotted names of torch.nn.Module classes that the script has imported, such as "
        f'"torch.nn.Linear"; found {name!r}{_hint(path, last)}'
    )


def _hint(path: str, last: str) -> str:
    if not path:
        return f', which has no module in front of it: write "<module>.{last}"'
    if path not in sys.modules:
        return f": no module {path} has been imported"
    return f": {path} has no such class"


def described(dtypes: Iterable[torch.dtype]) -> str:
    """Return short dtype names for a log.

    >>> described([torch.float32, torch.bfloat16, torch.float32])
    'bf16, fp32'
    """
    short = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}
    return ", ".join(sorted({short.get(dtype, str(dtype).removeprefix("torch.")) for dtype in dtypes}))
