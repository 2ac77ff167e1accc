"""Interface of a sharded model for saving and loading, independent of its sharding."""

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


Fetch = Callable[[Sequence[tuple[str, torch.Tensor]], Callable[[Sequence[str]], None]], None]
"""Makes keyed tensors readable, a few at a time; see `CheckpointedModel.fetch`."""


def in_place(tensors: Sequence[tuple[T, torch.Tensor]], use: Callable[[Sequence[T]], None]) -> None:
    """Use tensors that are readable already (a `Fetch`)."""
    use([key for key, _ in tensors])


Run = tuple[int, int, torch.Tensor]
"""(start, stop, 1-D view) of this rank's elements of a flattened box of a logical tensor (`box_of`)."""


class OptimizerShards(Protocol):
    """The optimizer's state on this rank, by parameter."""

    def state(self, index: int) -> Mapping[str, Any]:
        """Return the optimizer state of a parameter on this rank; empty if there is none."""

    def state_pieces(self, index: int, key: str) -> list[Run]:
        """Return the runs of an elementwise entry; none for any other entry."""

    def clear_state(self) -> None:
        """Clear all state."""

    def make_state(
        self, index: int, elementwise: Mapping[str, torch.dtype], whole: Mapping[str, Any], *, filled: bool = False
    ) -> None:
        """Allocate a parameter's state: zeros for elementwise entries, and the values of the other entries. With
        `filled` the caller writes every element, and only the gaps between parameters are zeroed.
        """


class GatheredUnit(Protocol):
    """Parameters that are unsharded together."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameter objects."""

    @property
    def tensors(self) -> Sequence[LogicalTensor]:
        """The same parameters as logical tensors."""


class CheckpointedModel(Protocol):
    """A model sharded over ranks."""

    @property
    def module(self) -> nn.Module:
        """The user's module."""

    @property
    def registry(self) -> Registry:
        """Parameters of this rank; other ranks may have others, or other boxes of the same."""

    @property
    def comm(self) -> Communicator:
        """Communicator of all ranks, which save and load together."""

    @property
    def pass_group(self) -> Communicator:
        """Communicator of the ranks that have the same units as this rank."""

    @property
    def replica(self) -> Communicator:
        """Communicator of ranks that together have all units; more than one such group: with `local_sgd`."""

    @property
    def place(self) -> Mapping[str, tuple[int, int]]:
        """Coordinate of this rank in each dimension of the mesh, with the size of the dimension; empty: not known."""

    @property
    def device(self) -> torch.device:
        """Device of values and state."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, if there is one."""

    @property
    def update(self) -> OptimizerShards | None:
        """Optimizer state; None without an optimizer."""

    @property
    def units(self) -> Sequence[GatheredUnit]:
        """All parameters, in units."""

    @property
    def is_offloaded(self) -> bool:
        """Whether some of the saved state is offloaded, and must be fetched."""

    def fetch(self, tensors: Sequence[tuple[T, torch.Tensor]], use: Callable[[Sequence[T]], None]) -> None:
        """Read values on any tier, in order: call `use` with the keys of those that are readable now."""

    def iter_resident(self) -> Iterator[Collection[int]]:
        """Yield all parameters, some at a time; their values and state can be read and written meanwhile."""

    def box_of(self, tensor: LogicalTensor) -> Region | None:
        """Return the box of a tensor in which this rank's runs count; None: the entire tensor."""

    def share_changes(self) -> None:
        """Copy values that a script has changed to their owners (a collective)."""

    def cut_states(self, shared: Mapping[int, Any]) -> None:
        """Give parameters with different step counts state of their own; may drop all state.

        `shared` has the entries that are not elementwise, in any form that can be compared.
        """

    def value_runs(self) -> dict[int, list[Run]]:
        """Return this rank's master weights (or parameters), which are resident in `fetch` and `iter_resident` only."""

    def materialized(self, index: int) -> AbstractContextManager[None]:
        """Context in which views of a parameter's values and state can be made, on any tier."""

    def owned_ranges(self) -> dict[int, list[tuple[int, int]]]:
        """Return the elements of each parameter that this rank saves; over all ranks each exactly once."""

    def parts_of(self, index: int) -> Sequence[HeldPart]:
        """Return the boxes of tensors that ranks of the pass group have at the position of this rank's parameter in the
        units, each once, in one order on all ranks. Empty if these ranks have the same tensors.
        """

    def finish_gathers(self) -> None:
        """Wait for pending all-gathers."""

    def publish(self) -> None:
        """Update all copies of the values after `value_runs` have been written (a collective)."""

    def gather_parts(self, parameters: Iterable[nn.Parameter]) -> list[Any]:
        """Unshard this rank's parameters on every rank (a collective)."""

    def put_parts_back(self, parameters: Iterable[nn.Parameter], gathered: Any, src: int | None) -> None:
        """Reshard after `gather_parts`; values of global rank `src`, if given, are broadcast."""
