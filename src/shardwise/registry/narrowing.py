"""Narrowing of whole parameters to this rank's part of the tensor."""

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
    """Storage of a parameter's values outside the parameter object."""

    def narrow(self, parameter: torch.nn.Parameter, part: Region) -> None:
        """Narrow the parameter to a part of the tensor without gathering its values; all ranks call."""


_kept = WeakTensorKeyDictionary()


def keep_elsewhere(parameter: torch.Tensor, keeper: Keeper | None) -> None:
    """Register the keeper of a parameter's values; None: the parameter holds its values again."""
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
    """Narrow a whole parameter, the same tensor on all ranks, to this rank's part of it, and declare the part.

    Arguments are as of `declare_part`. The parameter keeps its identity. All ranks call, each with its part, for the
    same parameters in the same order.

    - A parameter with values keeps the values of the part.
    - A parameter built under `shardwise.zero.Init` is narrowed in `initialize()`, which sends the parts of one unit at
      a time to their ranks.
    - A parameter on the meta device is initialised in `initialize()` by its module as in one process, then narrowed.

    Raises:
        UsageError: the parameter is narrowed already, the box exceeds it, or a live autograd graph uses the whole
            parameter; and as `declare_part`.

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
