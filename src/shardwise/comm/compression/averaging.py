"""Means of flat parameters over the ranks of a mesh dimension, for optimizers that communicate themselves.

Such an optimizer has no reduction in backward. Each rank computes a value from its own gradient (a momentum, or a sum
of local steps), and a method averages the values. `shardwise.optim.comm_optimizer` has the optimizers;
`shardwise.zero.updates.comm_optimizer` connects them to the engine's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.comm.communicator import Communicator, Handle


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
    of parameter groups and of the job's tensors; `segments` are of this rank's range. `gradient` is, in a step without
    reduction, this rank's part of the mean; it may be overwritten.
    """

    name: str
    numel: int
    start: int
    stop: int
    lanes: list[tuple[int, int, int]]
    tensors: list[tuple[int, int, int]]
    segments: list[Segment] = field(default_factory=list)
    gradient: torch.Tensor | None = None


class BlockMean(Protocol):
    """A method that averages one block over ranks, repeatedly.

    A reduction has three parts, because reductions of blocks overlap. All ranks call each part for all blocks in order.
    """

    @property
    def scratch(self) -> Sequence[torch.Tensor]:
        """Messages in flight."""

    def launch(self, values: torch.Tensor) -> None:
        """Send this rank's values, which are not changed, and may be overwritten afterwards."""

    def combine(self) -> None:
        """Average the received values of this rank's range, and send the mean."""

    def finish(self, out: torch.Tensor) -> None:
        """Write the mean into `out`, with the same bits on all ranks."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the error feedback state of this rank."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of the same block on the same rank of as many ranks."""


class ExactMean:
    """The exact mean: a reduce-scatter and an all-gather."""

    def __init__(self, comm: Communicator, label: str) -> None:
        self._comm = comm
        self._label = label
        self._own: torch.Tensor | None = None
        self._handle: Handle | None = None

    @property
    def scratch(self) -> list[torch.Tensor]:
        return [] if self._own is None else [self._own]

    def launch(self, values: torch.Tensor) -> None:
        self._own = values.new_empty(values.numel() // self._comm.world)
        self._handle = self._comm.reduce_scatter([(self._own, values)], self._label)

    def combine(self) -> None:
        assert self._handle is not None and self._own is not None
        self._handle.wait()
        self._own.div_(self._comm.world)

    def finish(self, out: torch.Tensor) -> None:
        assert self._own is not None
        self._comm.all_gather([(out, self._own)], self._label, kind="reduce").wait()
        self._own = self._handle = None

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load nothing."""


class Averages:
    """Means of all blocks by one method, created by `make` for each block; `hold` counts a message."""

    def __init__(self, make: Callable[[Block], BlockMean], hold: Callable[[torch.Tensor], None]) -> None:
        self.means: dict[str, BlockMean] = {}
        self._make = make
        self._hold = hold

    def of(self, block: Block) -> BlockMean:
        """Return the method of a block, created at the first call."""
        if block.name not in self.means:
            self.means[block.name] = self._make(block)
        return self.means[block.name]

    def average(self, blocks: Sequence[Block], values: Sequence[torch.Tensor]) -> None:
        """Replace the values of each block by their mean over ranks (all ranks call)."""
        means = [self.of(block) for block in blocks]
        for mean, own in zip(means, values, strict=True):
            mean.launch(own)
            self._count(mean)
        for mean in means:
            mean.combine()
            self._count(mean)
        for mean, out in zip(means, values, strict=True):
            mean.finish(out)

    def _count(self, mean: BlockMean) -> None:
        for message in mean.scratch:
            self._hold(message)
