"""Ranks that have all experts of a layer together, and what they exchange: rows in one all-to-all, both ways.

Runs of `ep_size` ranks form an expert group, in which each rank has its own experts:

    4 ranks, ep_size 2, experts A to D
                  A B      C D
    group 0      rank 0   rank 1
    group 1      rank 2   rank 3

Ranks 0 and 2 have the same experts: their gradients are summed over these two. An engine makes the groups once and all
layers of one `ep_size` share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.comm.communicator import Communicator
from shardwise.compat import has_values
from shardwise.device.later import Later
from shardwise.errors import ConfigError, UsageError
from shardwise.registry import declare_part, narrow

_experts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def mark_experts(parameters: Iterable[torch.Tensor], ep_size: int) -> None:
    """Note that parameters are of experts that are divided over so many ranks."""
    for parameter in parameters:
        _experts[parameter] = f"ep_size_{ep_size}"


def expert_group_of(parameter: torch.Tensor) -> str | None:
    """Return the name of the group of ranks over which an expert's parameter is divided; None: it is no expert's."""
    name: str | None = _experts.get(parameter)
    return name


class ExpertGroup:
    """The ranks among which this rank's tokens travel.

    Args:
        comm: they; None: this rank alone.
        ranks: their numbers among all ranks of the engine.
        replicas: numbers of those that have the same experts as this one.

    Attributes:
        size: number of ranks.
        place: which of them this is.
    """

    def __init__(
        self, comm: Communicator | None = None, ranks: Sequence[int] = (0,), replicas: Sequence[int] | None = None
    ) -> None:
        self.comm = comm
        self.ranks = tuple(ranks)
        self.replicas = None if replicas is None else tuple(replicas)
        self.size = 1 if comm is None else comm.world
        self.place = 0 if comm is None else comm.rank

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertGroup:
        return self  # copies of a model exchange among the same ranks

    def __reduce__(self) -> tuple[type[ExpertGroup], tuple[()]]:
        return ExpertGroup, ()  # a pickled model has no ranks

    def own(self, experts: int) -> tuple[int, int]:
        """Return the first of this rank's experts, and the one after the last."""
        here = experts // self.size
        return self.place * here, (self.place + 1) * here

    def declare(self, parameter: nn.Parameter, *, name: str | None = None, experts: int | None = None) -> None:
        """Say that a parameter is of this rank's experts: by the tensor's name, or as a part of a stacked one.

        Args:
            parameter: of this rank.
            name: the tensor's, for a parameter of one expert.
            experts: their number, for a parameter that has them in its first dimension.
        """
        if self.replicas is None:
            return
        if experts is None:
            declare_part(parameter, ranks=self.replicas, name=name)
            return
        rest = list(parameter.shape[1:])
        box = [self.own(experts), *((0, size) for size in rest)]
        declare_part(parameter, ranks=self.replicas, name=name, shape=[experts, *rest], box=box)

    def narrow(self, parameter: nn.Parameter) -> None:
        """Keep this rank's experts of a parameter that has all in its first dimension, and declare them."""
        if self.replicas is None:
            return
        rest = ((0, size) for size in parameter.shape[1:])
        narrow(parameter, ranks=self.replicas, box=[self.own(len(parameter)), *rest])

    def count_rows(self, counts: torch.Tensor, rows: int, label: str, *, on_host: bool = True) -> RowCounts:
        """Exchange how many rows each rank sends to each expert, and begin to copy these numbers to the host.

        Call it as soon as the router has chosen: what is launched between this call and `RowCounts.read` runs on the
        device while the host waits for the numbers.

        Args:
            counts: rows of this rank for each expert.
            rows: all of them.
            label: for the record.
            on_host: whether the host will read the numbers. Among several ranks it does, because they are the sizes of
                the exchange.
        """
        if self.comm is None or not has_values(counts):
            return RowCounts(self, counts, None, rows, on_host=on_host)
        arriving = torch.empty_like(counts)
        each = [len(counts) // self.size] * self.size
        self.comm.all_to_all(arriving, counts, each, each, f"{label}: counts").wait()
        return RowCounts(self, counts, arriving, rows, on_host=True)

    def exchange(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], label: str) -> torch.Tensor:
        """Send rows to each rank and return what has come from each, in rank order; gradients travel back.

        Args:
            rows: for each rank, in rank order.
            sent: how many for each.
            received: how many from each.
            label: for the record.
        """
        if self.comm is None:
            return rows
        moved: torch.Tensor = _Exchange.apply(rows, self.comm, tuple(sent), tuple(received), label)
        return moved


class RowCounts:
    """How many rows this rank sends to each rank for each of its experts, and receives from each.

    Args:
        group: the ranks.
        counts: rows that this rank sends, for each expert.
        arriving: rows that it receives, from each rank for each of its own experts; None: `counts` are its own.
        rows: the sum of `counts`.
        on_host: begin to copy the numbers to the host.
    """

    def __init__(
        self, group: ExpertGroup, counts: torch.Tensor, arriving: torch.Tensor | None, rows: int, *, on_host: bool
    ) -> None:
        self._size, self._place, self._rows = group.size, group.place, rows
        self._counts, self._arriving = counts, arriving
        self._coming = self._launch() if on_host else None
        self._read: tuple[list[list[int]], list[list[int]]] | None = None

    def _launch(self) -> Later:
        both = [self._counts] if self._arriving is None else [self._counts, self._arriving]
        return Later(torch.cat(both))

    @property
    def on_device(self) -> torch.Tensor:
        """Rows of each of this rank's experts, where no rank sends it any."""
        return self._counts

    def read(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return rows sent and rows received, by rank and expert; the first call waits for the device.

        Where tensors have no values (plans of memory) all experts are chosen alike.
        """
        if self._read is None:
            experts = len(self._counts)
            here = experts // self._size
            if has_values(self._counts):
                numbers = [int(number) for number in (self._coming or self._launch()).read()]
            else:
                numbers = [(self._rows + experts - 1 - expert) // experts for expert in range(experts)]
            by_rank = [numbers[first : first + here] for first in range(0, len(numbers), here)]
            sent, received = by_rank[: self._size], by_rank[self._size :]
            self._read = sent, received or [sent[self._place]] * self._size
        return self._read


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows; its backward pass is the same all-to-all the other way."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        comm: Communicator,
        sent: tuple[int, ...],
        received: tuple[int, ...],
        label: str,
    ) -> torch.Tensor:
        ctx.comm, ctx.sent, ctx.received, ctx.label = comm, sent, received, label
        return _all_to_all(rows, comm, sent, received, label)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back = _all_to_all(gradient, ctx.comm, ctx.received, ctx.sent, f"{ctx.label}, backward")
        return back, None, None, None, None


def _all_to_all(
    rows: torch.Tensor, comm: Communicator, sent: Sequence[int], received: Sequence[int], label: str
) -> torch.Tensor:
    width = rows.shape[-1]
    output = rows.new_empty(sum(received), width)
    comm.all_to_all(
        output.view(-1),
        rows.contiguous().view(-1),
        [count * width for count in received],
        [count * width for count in sent],
        label,
    ).wait()
    return output


class ExpertParallelModule(nn.Module):
    """A module whose experts may be divided over ranks.

    Attributes:
        num_experts: of all ranks of a group.
        ep_size: ranks of a group.
        group: they; None as long as no engine has made groups.
        path: the module's name in the model, for records.
        counting: choices are counted (`shardwise.moe.load`).
        counts: how often each expert has been chosen since they were read.
    """

    num_experts: int
    ep_size: int
    group: ExpertGroup | None = None
    path = "MoE"
    counting = False
    counts: torch.Tensor | None = None

    def count(self, chosen: torch.Tensor) -> None:
        """Add how often each expert has been chosen, if that is asked for."""
        if self.counting:
            self.counts = chosen.detach().clone() if self.counts is None else self.counts + chosen.detach()

    def bind(self, path: str, group: ExpertGroup) -> None:
        """Take the group, and declare this rank's experts as parts.

        Args:
            path: the module's name in the model.
            group: made for `ep_size`.
        """
        raise NotImplementedError

    def bound(self) -> ExpertGroup:
        """Return the group.

        Raises:
            UsageError: there is none.
        """
        if self.group is not None and self.group.size == self.ep_size:
            return self.group
        if self.ep_size == 1:
            return ALONE
        raise UsageError(
            f"MoE without its groups: the layer divides its {self.num_experts} experts over ep_size={self.ep_size} "
            "ranks, and has no engine that has made groups of ranks. Pass the model to shardwise.initialize() before "
            "it is called"
        )


ALONE = ExpertGroup()
"""The group of a rank that has all experts."""


def bind_experts(
    model: nn.Module,
    comm: Communicator,
    *,
    apart: Sequence[Sequence[int]] | None = None,
    data_first: bool = False,
    prepare: Callable[[ExpertParallelModule], None] | None = None,
) -> dict[int, ExpertGroup]:
    """Make the groups for a model's experts, one for each `ep_size`, and declare each rank's part (all ranks call).

    Args:
        model: of the engine.
        comm: all ranks.
        apart: lists of as many ranks, of which each divides experts for itself: those at one place in all copies of a
            model that ranks have in parts, which get the same tokens as those at another. None: one of all.
        data_first: ranks with the same experts are neighbours, not those of a group
            (`use_data_before_expert_parallelism`).
        prepare: is called for each layer, before it takes what is its own.

    Returns:
        The groups by `ep_size`.

    Raises:
        UsageError: the ranks are no whole number of groups.
        ConfigError: the same, in a plan for other ranks.
    """
    groups: dict[int, ExpertGroup] = {}
    for path, module in model.named_modules():
        if isinstance(module, ExpertParallelModule):
            if module.ep_size not in groups:
                groups[module.ep_size] = _group(path, module.ep_size, comm, apart or [range(comm.world)], data_first)
            if prepare is not None:
                prepare(module)
            module.bind(path, groups[module.ep_size])
    return groups


def _group(path: str, size: int, comm: Communicator, apart: Sequence[Sequence[int]], data_first: bool) -> ExpertGroup:
    ranks = len(apart[0])
    if ranks % size:
        each = f" of which {len(apart)} have a copy of the model" if len(apart) > 1 else ""
        raise (ConfigError if comm.imagined else UsageError)(
            f"{path}: ep_size={size} does not divide the {comm.world} ranks{each}. Choose a divisor of {ranks}, or "
            f"start a multiple of {size * len(apart)} ranks"
        )
    if size == 1:
        return ExpertGroup()
    step = ranks // size
    places = [range(first, first + size) for first in range(0, ranks, size)]
    if data_first:
        places = [range(first, ranks, step) for first in range(step)]
    runs = [[alike[place] for place in run] for alike in apart for run in places]
    own = next(run for run in runs if comm.rank in run)
    place = own.index(comm.rank)
    return ExpertGroup(comm.part(runs, f"experts_{size}"), own, sorted(run[place] for run in runs))
