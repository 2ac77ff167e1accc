"""Names of torch that differ between versions, or that torch does not document, in one place.

torch 2.13 renamed `all_gather_into_tensor` and `reduce_scatter_tensor` to `*_single` and warns at every call of the old
names, so the new name is taken where it exists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

without_overrides = torch._C.DisableTorchFunctionSubclass
"""Context in which `__torch_function__` of tensor subclasses is not asked."""


def allow_gradient_dtype(parameter: torch.Tensor, dtype: torch.dtype) -> None:
    """Let a parameter have a gradient of another dtype than its own."""
    if dtype is not parameter.dtype and hasattr(parameter, "grad_dtype"):
        parameter.grad_dtype = dtype
