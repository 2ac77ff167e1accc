"""Kinds of optimizer state: per element (a moment), sharded like the parameter, or per tensor (a step count).

Every range has its own copy of the latter, because optimizers advance it in place.
"""

from __future__ import annotations

from typing import Any

import torch

_TENSOR_WIDE = frozenset({"step", "eta", "mu", "mu_product"})
"""torch.optim's names of values per tensor: they separate the step count of a one-element parameter from its moment."""


def is_elementwise_state(value: Any, numel: int, name: str = "") -> bool:
    """Return True if a state entry has one value per element of a parameter; the name decides only for one element.

    >>> is_elementwise_state(torch.zeros(2, 3), 6), is_elementwise_state(torch.tensor(4.0), 6)
    (True, False)
    """
    if not isinstance(value, torch.Tensor) or value.numel() != numel:
        return False
    if numel == 1:
        return name not in _TENSOR_WIDE
    return True
