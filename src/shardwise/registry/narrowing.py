"""Whole parameters become parts of tensors, wherever their values are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.boxes import Region, is_within, region, whole
from shardwise.compat import shape_in_graph
from shardwise.errors import UsageError
from shardwise.registry.parts import declare_part, part_of
from shardwise.registry.tensors import cut


class Keeper(Protocol):
    """Who has the values of a parameter that is not there itself."""

    def narrow(self, parameter: torch.nn.Parameter, part: Region) -> None:
        """Have the parameter be a part of what it was; nothing has to be brought here for that (all ranks call)."""


_kept = WeakTensorKeyDictionary()


def keep_elsewhere(parameter: torch.Tensor, keeper: Keeper | None) -> None:
    """Say who has a parameter's values; None: it has them itself again."""
    if keeper is None:
        _kept.pop(parameter, None)
    else:
        _kept[parameter] = keeper


def narrow(
    parameter: torch.nn.Parameter,
    *,
    ranks: Sequence[int],
    box: Sequence[Sequence[int] | Sequence[Sequence[int]]],
    name: str | None = None,
    divisor: int | None = None,
) -> None:
    """Turn a parameter that is a whole tensor into this rank's part of it, and declare it (`declare_part`).

    The parameter keeps its identity. It may have values, of which the part is kept; or have been built under
    `shardwise.zero.Init`: then nothing moves before `initialize()`, which brings the parts of one unit at a time to the
    ranks that have them; or be on the meta device: then `initialize()` has the tensor initialised by its module as one
    process would, and keeps the part. All ranks call, each with its part, for the same parameters in one order.

    Args:
        parameter: the same whole tensor on all ranks.
        ranks: see `declare_part`.
        box: see `declare_part`.
        name: see `declare_part`.
        divisor: see `declare_part`.

    Raises:
        UsageError: the parameter has been narrowed before, the box is not one of it, or a graph of autograd is alive in
            which it is whole; and as `declare_part`.

    Example: the upper half of the rows.
        >>> import torch
        >>> layer = torch.nn.Linear(3, 4, bias=False)
        >>> narrow(layer.weight, ranks=[0], box=[(0, 2), (0, 3)])
        >>> layer.weight.shape
        torch.Size([2, 3])
    """
    shape = tuple(parameter.shape)
    if part_of(parameter).box is not None:
        raise UsageError(f"narrow(): a parameter of shape {list(shape)} is a part of a tensor already")
    try:
        part = region(box)
    except (TypeError, ValueError) as error:
        raise UsageError(f"narrow(box={box}): expected (first, end) in each dimension: {error}") from error
    if not is_within(part, shape):
        raise UsageError(f"narrow(box={box}): expected a part of a tensor of shape {list(shape)}")
    declare_part(parameter, ranks=ranks, name=name, shape=shape, box=box, divisor=divisor)
    if part == whole(shape):
        return
    keeper = _kept.get(parameter)
    if keeper is not None:
        keeper.narrow(parameter, part)
    else:
        parameter.data = cut(parameter.data, part).clone(memory_format=torch.contiguous_format)
        if shape_in_graph(parameter) != tuple(parameter.shape):
            raise UsageError(
                f"a parameter of shape {list(shape)} is to become a part of shape {list(parameter.shape)}, and a graph "
                "of autograd in which it is whole is still alive, so that its gradient could not be taken. Drop what "
                "keeps it (a loss or an output of a forward pass from before: `del loss`)"
            )
