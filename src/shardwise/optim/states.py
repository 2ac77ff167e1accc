"""Cutting an optimizer's state of one parameter into ranges, and joining ranges again.

The state of an elementwise optimizer is a dictionary of two kinds of entries: tensors with one value per
element of the parameter (moments), which are cut like the parameter, and values for the tensor as a whole
(step counts), which every range needs in a copy of its own, because optimizers advance them in place.

Invariant: `merge_states` of the pieces that `split_state` made gives the state back, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.errors import CheckpointError

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


def split_state(state: Mapping[str, Any], numel: int, start: int, stop: int) -> dict[str, Any]:
    """Return the state of elements `[start, stop)` of a flattened parameter.

    Args:
        state: the optimizer's state of the whole parameter (`optimizer.state[parameter]`), of any shape.
        numel: number of elements of the parameter.
        start: first element of the range.
        stop: end of the range (exclusive).

    Returns:
        A new dictionary: elementwise tensors become flat tensors of `stop - start` elements, everything else
        is copied. No storage is shared with `state`, so the whole can be freed.

    Raises:
        CheckpointError: an entry is a tensor of some other size, so this is not the state of an elementwise
            optimizer.

    >>> split_state({"step": torch.tensor(2.0), "exp_avg": torch.arange(4.0).view(2, 2)}, 4, 1, 3)
    {'step': tensor(2.), 'exp_avg': tensor([1., 2.])}
    """
    if not 0 <= start <= stop <= numel:
        raise ValueError(f"range [{start}, {stop}) does not lie in a parameter of {numel} elements")
    piece: dict[str, Any] = {}
    for name, value in state.items():
        if is_elementwise_state(value, numel, name):
            piece[name] = value.detach().reshape(-1)[start:stop].clone()
        elif isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise CheckpointError(
                    f"optimizer state {name!r}: a tensor of shape {tuple(value.shape)} cannot be cut like its "
                    f"parameter of {numel} elements; expected {numel} elements or one. The optimizer is not elementwise"
                )
            piece[name] = value.detach().clone()
        else:
            piece[name] = copy.deepcopy(value)
    return piece


def merge_states(pieces: Sequence[tuple[int, Mapping[str, Any]]], shape: Sequence[int] | None = None) -> dict[str, Any]:
    """Join the states of consecutive ranges of one parameter.

    Args:
        pieces: (number of elements, state) of each range, in order. Empty ranges are skipped; their state
            may be empty.
        shape: shape that elementwise tensors get; flat if None.

    Returns:
        A new dictionary that shares no storage with the pieces; empty if no range has state.

    Raises:
        CheckpointError: the ranges have different entries, or disagree on a value for the whole tensor.

    >>> merge_states([(1, {"step": 2, "m": torch.ones(1)}), (2, {"step": 2, "m": torch.zeros(2)})])
    {'step': 2, 'm': tensor([1., 0., 0.])}
    """
    # A parameter without elements still has step counts: then any range that has state speaks for it.
    filled = [(numel, state) for numel, state in pieces if numel] or [piece for piece in pieces if piece[1]]
    if not filled:
        return {}
    first = filled[0][1]
    for numel, state in filled:
        if state.keys() != first.keys():
            odd = ", ".join(sorted(state.keys() ^ first.keys()))
            raise CheckpointError(
                f"optimizer state: the range of {numel} elements and the first one differ in the entries {odd}; the "
                "ranges come from different optimizers or steps"
            )
    merged: dict[str, Any] = {}
    for name, value in first.items():
        values = [(numel, state[name]) for numel, state in filled]
        if all(is_elementwise_state(part, numel, name) for numel, part in values):
            flat = torch.cat([part.detach().reshape(-1) for _, part in values])
            merged[name] = flat if shape is None else flat.view(tuple(shape))
            continue
        for _, other in values[1:]:
            if not _same(value, other):
                raise CheckpointError(
                    f"optimizer state {name!r}: ranges of one parameter disagree ({value!r} and {other!r}); they come "
                    "from different steps"
                )
        merged[name] = value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
    return merged


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return value.shape == other.shape and bool((value.cpu() == other.cpu()).all())
    return type(value) is type(other) and bool(value == other)
