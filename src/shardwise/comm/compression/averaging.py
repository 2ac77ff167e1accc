"""Means of flat parameters over the ranks of a mesh dimension, for optimizers that communicate themselves.

Such an optimizer has no reduction in backward. Each rank computes a value from its own gradient (a momentum, or a sum
of local steps), and a method averages the values. `shardwise.optim.comm_optimizer` has the optimizers;
`shardwise.zero.updates.comm_optimizer` connects them to the engine's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from typing_extensions import override

from shardwise.comm.communicator import Communicator

Hold = Callable[[torch.Tensor], None]
"""Counts the memory of a buffer until it is freed."""


@dataclass
class Segment:
    """A range of a block that this rank steps: master weights of `parameter`, in the `params` of its group."""

    parameter: nn.Parameter
    group: int
    start: int
    stop: int


@dataclass
class Block:
    """A flat parameter of a unit (`numel` with padding); this rank steps the range from `start` to `stop`.

    `name` is equal on all ranks and in every run. `lanes` and `tensors` have, of the whole block, (number, start, stop)
    of parameter groups and of the job's tensors; `segments` are of this rank's range. `kept` has tensors of the
    optimizer, of the whole block. `gradient` is, in a step without reduction, this rank's part of the mean; it may be
    overwritten.
    """

    name: str
    numel: int
    start: int
    stop: int
    lanes: list[tuple[int, int, int]]
    tensors: list[tuple[int, int, int]]
    segments: list[Segment] = field(default_factory=list)
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    gradient: torch.Tensor = field(init=False)


class BlockMean:
    """Base of the methods that average one block over ranks, repeatedly. `errors`: the error feedback state by name."""

    def __init__(self) -> None:
        self.errors: dict[str, torch.Tensor] = {}

    def average(self, values: torch.Tensor) -> Iterator[Sequence[torch.Tensor]]:
        """Replace this rank's values by their mean over ranks, with the same bits on all ranks.

        Yields the messages after each launch of a collective, because the averages of blocks overlap.
        """
        raise NotImplementedError


class ExactMean(BlockMean):
    """The exact mean: a reduce-scatter and an all-gather."""

    def __init__(self, comm: Communicator, label: str) -> None:
        super().__init__()
        self._comm, self._label = comm, label

    @override
    def average(self, values: torch.Tensor) -> Iterator[Sequence[torch.Tensor]]:
        own = values.new_empty(values.numel() // self._comm.world)
        handle = self._comm.reduce_scatter([(own, values)], self._label)
        yield (own,)
        handle.wait()
        handle = self._comm.all_gather([(values, own.div_(self._comm.world))], self._label, kind="reduce")
        yield (own,)
        handle.wait()


def average(means: Sequence[BlockMean], values: Sequence[torch.Tensor], hold: Hold) -> None:
    """Replace the values of each block by their mean over ranks (all ranks call); `hold` counts a message."""
    running = [mean.average(own) for mean, own in zip(means, values, strict=True)]
    while running:
        running = advance(running, hold)


def advance(running: Iterable[Iterator[Sequence[torch.Tensor]]], hold: Hold) -> list[Iterator[Sequence[torch.Tensor]]]:
    """Wait for the last collective of each average and launch the next one; return the averages that have one."""
    return [mean for mean in running if _advance(mean, hold)]


def _advance(mean: Iterator[Sequence[torch.Tensor]], hold: Hold) -> bool:
    messages = next(mean, None)
    for message in messages or ():
        hold(message)
    return messages is not None
