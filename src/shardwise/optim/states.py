"""What the entries of an optimizer's state are.

The state of an elementwise optimizer is a dictionary of two kinds of entries: tensors with one value per
element of the parameter (moments), which are cut like the parameter, and values for the tensor as a whole
(step counts), which every range needs in a copy of its own, because optimizers advance them in place.
"""

from __future__ import annotations

from typing import Any

import torch

_TENSOR_WIDE = frozenset({"step", "eta", "mu", "mu_product"})
"""Names under which torch.optim keeps one value per tensor.

They tell a step count from the moment of a parameter that has a single element."""


def is_elementwise_state(value: Any, numel: int, name: str = "") -> bool:
    """Return whether a state entry has one value per element of a parameter of `numel` elements.

    Args:
        value: the entry.
        numel: number of elements of the parameter.
        name: key of the entry; it decides only where `numel` is 1, since both kinds have one element there.

    >>> is_elementwise_state(torch.zeros(2, 3), 6), is_elementwise_state(torch.tensor(4.0), 6)
    (True, False)
    """
    if not isinstance(value, torch.Tensor) or value.numel() != numel:
        return False
    if numel == 1:
        return name not in _TENSOR_WIDE
    return True
