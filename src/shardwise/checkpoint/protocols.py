"""What saving and loading need to know of a sharded model: a few methods, and nothing of how it is sharded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from shardwise.boxes import Region
from shardwise.comm.communicator import Communicator
from shardwise.registry import HeldPart, LogicalTensor, Registry

T = TypeVar("T")


Bring = Callable[[Sequence[tuple[str, torch.Tensor]], Callable[[Sequence[str]], None]], None]
"""Has tensors that have keys brought to where they can be read, a few at a time; see `CheckpointedModel.bring`."""


def at_hand(tensors: Sequence[tuple[T, torch.Tensor]], use: Callable[[Sequence[T]], None]) -> None:
    """Bring values that are there (a `Bring`)."""
    use([stands for stands, _ in tensors])


Run = tuple[int, int, torch.Tensor]
"""(start, stop, 1-D view) of elements of a flattened box of a logical tensor (`CheckpointedModel.box_of`) that lie in
this rank's memory."""


class OptimizerShards(Protocol):
    """The optimizer's state on this rank, by parameter."""

    def state(self, index: int) -> Mapping[str, Any]:
        """Return what the optimizer holds on this rank for a parameter; empty if nothing."""

    def state_pieces(self, index: int, key: str) -> list[Run]:
        """Return the runs of an entry that has one value per element; none for any other entry."""

    def clear_state(self) -> None:
        """Forget all state."""

    def stepped_together(self, key: str) -> list[list[int]]:
        """Return sets of parameters that have, on this rank, one value of an entry that is not elementwise."""

    def make_state(
        self, index: int, elementwise: Mapping[str, torch.dtype], whole: Mapping[str, Any], *, filled: bool = False
    ) -> None:
        """Give a parameter state: zeros for entries with one value per element, and values for it as a whole.

        With `filled` the caller writes every element of every parameter, and only what lies between them is zeroed.
        """


class GatheredUnit(Protocol):
    """Parameters that are gathered together."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameter objects."""

    @property
    def tensors(self) -> Sequence[LogicalTensor]:
        """The same parameters as logical tensors."""


class CheckpointedModel(Protocol):
    """A model whose values are spread over ranks."""

    @property
    def module(self) -> nn.Module:
        """The user's module."""

    @property
    def registry(self) -> Registry:
        """Its parameters; other ranks may have others, or other boxes of the same."""

    @property
    def comm(self) -> Communicator:
        """The ranks."""

    @property
    def device(self) -> torch.device:
        """Where values and state live."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, if there is one."""

    @property
    def update(self) -> OptimizerShards | None:
        """Its state; None without an optimizer."""

    @property
    def units(self) -> Sequence[GatheredUnit]:
        """All parameters, in units."""

    @property
    def away(self) -> bool:
        """Whether some of what is saved lives elsewhere than on the device: it has to be brought to be read."""

    def bring(self, tensors: Sequence[tuple[T, torch.Tensor]], use: Callable[[Sequence[T]], None]) -> None:
        """Read values wherever they live, in their order: call `use` with what stands for those that are there now."""

    def lent_in_turn(self) -> Iterator[Collection[int]]:
        """Yield all parameters, some at a time; values and state of these are there meanwhile, and may be written."""

    def box_of(self, tensor: LogicalTensor) -> Region | None:
        """Return the box of a tensor of which this rank's runs of values and state are; None: all of it."""

    def share_changes(self) -> None:
        """Take over values that a script has changed, wherever they are stepped (a collective)."""

    def value_runs(self) -> dict[int, list[Run]]:
        """Return the values that count (master weights where there are any) on this rank, by parameter.

        What lives elsewhere has no memory but inside of `bring` and `lent_in_turn`.
        """

    def shown(self, index: int) -> AbstractContextManager[None]:
        """Let views be made of a parameter's values and state inside of the block, wherever they live."""

    def saved_ranges(self) -> dict[int, list[tuple[int, int]]]:
        """Return the elements of each parameter that this rank saves; over all ranks each exactly once.

        Ranks with the same box of a logical tensor have the same parameter; other boxes are other elements.
        """

    def parts_of(self, index: int) -> Sequence[HeldPart]:
        """Return the parts of tensors that ranks have at the place of this rank's parameter in the units.

        Each part is there once, in one order on all ranks. None where all ranks have the same tensors.
        """

    def finish_gathers(self) -> None:
        """Wait for values that are on their way."""

    def publish(self) -> None:
        """Bring all copies of the values up to date after `value_runs` have been written (a collective)."""

    def gather_parts(self, parameters: Iterable[nn.Parameter]) -> list[Any]:
        """Make the whole values of this rank's parts valid on every rank (a collective)."""

    def put_parts_back(self, parameters: Iterable[nn.Parameter], gathered: Any, src: int | None) -> None:
        """End a `gather_parts`; values of global rank `src`, if given, become everybody's."""
