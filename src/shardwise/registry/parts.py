"""Declared parts: the part of a tensor that a rank's parameter is, and the ranks that have the same part.

Layers that divide tensors themselves (experts, columns of a matrix) declare the part of each parameter. Nothing is
attached to the parameter; the declaration ends with the parameter's lifetime.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.boxes import Region, region
from shardwise.errors import UsageError


@dataclass(frozen=True)
class Part:
    """The declared part of a parameter; fields as the arguments of `declare_part`."""

    ranks: tuple[int, ...] | None = None
    name: str | None = None
    shape: tuple[int, ...] | None = None
    box: Region | None = None
    divisor: int | None = None
    is_stack: bool = False  # the first dimension counts tensors (`declare_stack`)


_declared = WeakTensorKeyDictionary()
_distinct: dict[tuple[int, ...], tuple[int, ...]] = {}  # one tuple of ranks for all parameters that have it


def declare_part(
    parameter: torch.nn.Parameter,
    *,
    ranks: Sequence[int] | None = None,
    name: str | None = None,
    shape: Sequence[int] | None = None,
    box: Sequence[Sequence[int] | Sequence[Sequence[int]]] | None = None,
    divisor: int | None = None,
) -> None:
    """Declare a parameter as a part of a tensor with other parts on other ranks.

    Call it before `initialize()`, on every rank, for the parameters of the same layers. A ZeRO stage then divides the
    parameter's state over `ranks` only. Its gradient is summed over `ranks`, and its squares count once in the gradient
    norm of the whole job. Checkpoints hold the whole tensor; ranks with another division can load them.

    Args:
        parameter: parameter of the model.
        ranks: ranks of the engine's data-parallel group with this part, in ascending order, with this one; None: all.
            The lists of all ranks are a partition of the group.
        name: name of the tensor, the same for all its parts; None: the parameter's name in the model.
        shape: shape of the tensor; None: the parameter's.
        box: the part, as (first, end) in each dimension of the tensor, or as several such ranges, which ascend without
            overlap and are contiguous in the parameter; None: the whole tensor.
        divisor: divisor of the sum of the gradients over `ranks`. None: the number of all ranks, which gives the mean
            of the losses over all ranks if each loss depends on parts of only some ranks.

    Raises:
        UsageError: `ranks` or ranges do not ascend, or `divisor` is below 1 or given without `ranks`.

    Example: each rank of a pair has two of four experts; the other pair has the same.
        >>> import torch
        >>> from shardwise import declare_part
        >>> weights = torch.nn.Parameter(torch.zeros(2, 8, 8))
        >>> declare_part(weights, ranks=[0, 2], shape=[4, 8, 8], box=[(0, 2), (0, 8), (0, 8)])

    Example: queries, keys and values are rows of one matrix; a rank has the first half of each.
        >>> qkv = torch.nn.Parameter(torch.zeros(12, 8))
        >>> declare_part(qkv, ranks=[0], shape=[24, 8], box=[[(0, 4), (8, 12), (16, 20)], (0, 8)])
    """
    members = None if ranks is None else tuple(int(rank) for rank in ranks)
    if members is not None and (not members or members[0] < 0 or sorted(set(members)) != list(members)):
        raise UsageError(f"declare_part(ranks={list(members)}): expected ranks in ascending order, each once")
    if members is not None:
        members = _distinct.setdefault(members, members)
    if divisor is not None and members is None:
        raise UsageError("declare_part(divisor=...) needs ranks: what all ranks share is divided by their number")
    if divisor is not None and divisor < 1:
        raise UsageError(f"declare_part(divisor={divisor}): expected a number of ranks, at least 1")
    try:
        known = None if box is None else region(box)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"declare_part(box={box}): expected (first, end) in each dimension, or several of these: {error}"
        ) from error
    _declared[parameter] = Part(
        members,
        name,
        None if shape is None else tuple(int(size) for size in shape),
        known,
        divisor,
        part_of(parameter).is_stack,
    )


def declare_stack(parameter: torch.nn.Parameter) -> None:
    """Declare the first dimension of a parameter as a stack of tensors, such as the weights of experts."""
    _declared[parameter] = replace(part_of(parameter), is_stack=True)


def declare_as(parameter: torch.nn.Parameter, part: Part) -> None:
    """Declare a parameter as the part that another one was declared as (`part_of`)."""
    _declared[parameter] = part


@contextlib.contextmanager
def without_part(parameter: torch.Tensor) -> Iterator[None]:
    """Remove a parameter's declaration inside the block, because torch swaps only tensors without weak references."""
    part = _declared.pop(parameter, None)
    try:
        yield
    finally:
        if part is not None:
            _declared[parameter] = part


def part_of(parameter: torch.Tensor) -> Part:
    """Return the declared part of a parameter; by default the whole tensor, on all ranks."""
    found = _declared.get(parameter)
    return _WHOLE if found is None else found


def copy_part(parameter: torch.Tensor, copy: torch.Tensor) -> None:
    """Copy the declaration of a parameter to a copy of it."""
    if parameter in _declared:
        _declared[copy] = _declared[parameter]


_WHOLE = Part()
