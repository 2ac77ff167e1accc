"""Expert-parallel groups, and their all-to-all of rows in both directions.

Every `ep_size` ranks form an expert-parallel group, in which each rank has its own experts:

    4 ranks, ep_size 2, experts A to D

                  A B      C D
    group 0      rank 0   rank 1
    group 1      rank 2   rank 3

Gradients of ranks 0 and 2, which have the same experts, are summed. All layers of one `ep_size` share the groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.comm.communicator import Communicator
from shardwise.comm.native import await_release, users_of
from shardwise.compat import assert_later, backward_pass, has_values
from shardwise.device.streams import Later, numbers_on
from shardwise.errors import ConfigError, UsageError
from shardwise.registry import declare_part, narrow

_experts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def mark_experts(parameters: Iterable[torch.Tensor], ep_size: int) -> None:
    """Mark parameters as expert parameters with the given `ep_size`."""
    for parameter in parameters:
        _experts[parameter] = f"ep_size_{ep_size}"


def expert_group_of(parameter: torch.Tensor) -> str | None:
    """Return the name of an expert parameter's expert-parallel group, or None for other parameters."""
    name: str | None = _experts.get(parameter)
    return name


class ExpertGroup:
    """An expert-parallel group: the ranks that exchange tokens.

    Args:
        comm: communicator of the group; None: this rank only.
        ranks: ranks of the group among the engine's ranks.
        replicas: ranks with the same experts as this one.
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
        return self  # copies of a model use the same group

    def __reduce__(self) -> tuple[type[ExpertGroup], tuple[()]]:
        return ExpertGroup, ()  # a pickled model has no ranks

    def own(self, experts: int) -> tuple[int, int]:
        """Return the first of this rank's experts, and the one after the last."""
        here = experts // self.size
        return self.place * here, (self.place + 1) * here

    def declare(self, parameter: nn.Parameter, *, name: str | None = None, experts: int | None = None) -> None:
        """Declare a parameter of one expert by its tensor's `name`, or of several as a part of a stacked tensor."""
        if self.replicas is None:
            return
        if experts is None:
            declare_part(parameter, ranks=self.replicas, name=name)
            return
        rest = list(parameter.shape[1:])
        box = [self.own(experts), *((0, size) for size in rest)]
        declare_part(parameter, ranks=self.replicas, name=name, shape=[experts, *rest], box=box)

    def narrow(self, parameter: nn.Parameter) -> None:
        """Narrow a parameter with all experts in its first dimension to this rank's experts, and declare it."""
        if self.replicas is None:
            return
        rest = ((0, size) for size in parameter.shape[1:])
        narrow(parameter, ranks=self.replicas, box=[self.own(len(parameter)), *rest])

    def count_rows(self, counts: torch.Tensor, rows: int, label: str, *, on_host: bool = True) -> RowCounts:
        """Exchange the numbers of rows from each rank to each expert, and start to copy them to the host.

        Call it directly after routing: kernels launched before `RowCounts.read` run while the host waits for the
        numbers. `rows` is the sum of `counts`. Without `on_host` only several ranks copy the numbers, as sizes of the
        all-to-all.
        """
        if self.comm is None or not has_values(counts):
            return RowCounts(self, counts, None, rows, on_host=on_host)
        arriving = torch.empty_like(counts)
        each = [len(counts) // self.size] * self.size
        self.comm.all_to_all(arriving, counts, each, each, f"{label}: counts").wait()
        return RowCounts(self, counts, arriving, rows, on_host=True)

    def check_sizes(self, tokens: int, capacity: int, path: str, *, waits: bool) -> None:
        """Check that the ranks have equally many tokens and places for each expert (all ranks call).

        Because NCCL hangs in an exchange of different sizes. If the host `waits`, or on Gloo, raises UsageError.
        Otherwise the device fails in front of the exchange, and each rank prints its numbers.
        """
        if self.comm is None:
            return
        own = numbers_on(self.comm.device, [tokens, capacity], torch.int64)
        every = own.new_empty(2 * self.size)
        self.comm.all_gather([(every, own)], f"{path}: tokens", "explicit").wait()
        every = every.view(-1, 2)
        reason = "drop_tokens=True needs as many on each rank of a group of experts"
        if not (waits or self.comm.waits_on_host):
            rank = self.ranks[self.place]
            found = f"rank {rank} of {list(self.ranks)} has {tokens} tokens and {capacity} places for each expert"
            assert_later((every == own).all(), f"MoE: {found}, other ranks other numbers; {reason} ({path})")
        elif len(set(map(tuple, every.tolist()))) > 1:
            counts, places = every.T.tolist()
            raise UsageError(
                f"{path}: the ranks {list(self.ranks)} have {counts} tokens and {places} places for each expert, and "
                f"{reason}. Give all ranks batches of one size, in training or in evaluation, or build the layer with "
                "drop_tokens=False"
            )

    def exchange(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], label: str) -> torch.Tensor:
        """Run an all-to-all of rows, `sent` and `received` by rank; the backward pass sends gradients back."""
        if self.comm is None:
            return rows
        moved: torch.Tensor = _Exchange.apply(rows, self.comm, tuple(sent), tuple(received), label)
        return moved


class RowCounts:
    """Numbers of rows that this rank sends to and receives from each rank, by expert.

    `arriving` are received rows, from each rank for each of this rank's experts; None: equal to `counts`.
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
    def arriving(self) -> torch.Tensor:
        """Rows from each rank for each of this rank's experts, [ranks, experts], on the device."""
        return (self._counts if self._arriving is None else self._arriving).view(self._size, -1)

    @functools.cached_property
    def on_device(self) -> torch.Tensor:
        """Rows of each of this rank's experts."""
        return self.arriving.sum(0)

    def read(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return sent and received rows, by rank and expert; the first call waits for the device."""
        if self._read is None:
            experts = len(self._counts)
            here = experts // self._size
            if has_values(self._counts):
                numbers = [int(number) for number in (self._coming or self._launch()).read()]
            else:
                # in memory plans, choices are uniform over experts
                numbers = [(self._rows + experts - 1 - expert) // experts for expert in range(experts)]
            by_rank = [numbers[first : first + here] for first in range(0, len(numbers), here)]
            sent, received = by_rank[: self._size], by_rank[self._size :]
            self._read = sent, received or [sent[self._place]] * self._size
        return self._read


class _Exchange(torch.autograd.Function):
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
    sizes_out = [count * width for count in sent]
    rows = rows.contiguous()
    users = users_of(output, rows)
    comm.all_to_all(output.view(-1), rows.view(-1), [count * width for count in received], sizes_out, label).wait()
    await_release(users)
    return output


class ExpertParallelModule(nn.Module):
    """A module with experts, distributed over an expert-parallel group."""

    num_experts: int  # of the whole group
    ep_size: int  # ranks of the group
    group: ExpertGroup | None = None  # None before an engine creates the group
    path = "MoE"  # the module's name in the model, for records
    counting = False  # choices are counted (`shardwise.moe.load`)
    counts: torch.Tensor | None = None  # choices of each expert since the last read

    def count(self, chosen: torch.Tensor) -> None:
        """Add the choices of each expert, if counting is on and this is no recomputation."""
        if self.counting and backward_pass() is None:
            self.counts = chosen.detach().clone() if self.counts is None else self.counts + chosen.detach()

    def bind(self, path: str, group: ExpertGroup) -> None:
        """Set the group, made for `ep_size`, and declare this rank's experts as parts; `path` is the module's name."""
        raise NotImplementedError

    def bound(self) -> ExpertGroup:
        """Return the group; raises a UsageError if no engine has created it."""
        if self.group is not None and self.group.size == self.ep_size:
            return self.group
        if self.ep_size == 1:
            return SINGLE_RANK
        raise UsageError(
            f"MoE without its groups: the layer divides its {self.num_experts} experts over ep_size={self.ep_size} "
            "ranks, and has no engine that has made groups of ranks. Pass the model to shardwise.initialize() before "
            "it is called"
        )


SINGLE_RANK = ExpertGroup()  # group of a single rank with all experts


def bind_experts(
    model: nn.Module,
    comm: Communicator,
    *,
    replicas: Sequence[Sequence[int]] | None = None,
    data_first: bool = False,
    prepare: Callable[[ExpertParallelModule], None] | None = None,
) -> dict[int, ExpertGroup]:
    """Create a model's expert-parallel groups by `ep_size`, and declare each rank's experts (all ranks call).

    Args:
        comm: all ranks.
        replicas: equally long lists of ranks, each with its own expert-parallel groups: the ranks at one place in all
            tensor-parallel groups, because ranks of one such group get the same tokens. None: one list of all ranks.
        data_first: ranks with the same experts are adjacent, instead of ranks of a group
            (`use_data_before_expert_parallelism`).
        prepare: called for each layer before it is bound.

    Raises:
        UsageError: the number of ranks is no multiple of a group's size (in a plan for other ranks a ConfigError).
    """
    groups: dict[int, ExpertGroup] = {}
    for path, module in model.named_modules():
        if isinstance(module, ExpertParallelModule):
            if module.ep_size not in groups:
                groups[module.ep_size] = _group(path, module.ep_size, comm, replicas or [range(comm.world)], data_first)
            if prepare is not None:
                prepare(module)
            module.bind(path, groups[module.ep_size])
    return groups


def _group(
    path: str, size: int, comm: Communicator, replicas: Sequence[Sequence[int]], data_first: bool
) -> ExpertGroup:
    ranks = len(replicas[0])
    if ranks % size:
        each = f" of which {len(replicas)} have a copy of the model" if len(replicas) > 1 else ""
        raise (ConfigError if comm.imagined else UsageError)(
            f"{path}: ep_size={size} does not divide the {comm.world} ranks{each}. Choose a divisor of {ranks}, or "
            f"start a multiple of {size * len(replicas)} ranks"
        )
    if size == 1:
        return ExpertGroup()
    step = ranks // size
    places = [range(first, first + size) for first in range(0, ranks, size)]
    if data_first:
        places = [range(first, ranks, step) for first in range(step)]
    runs = [[alike[place] for place in run] for alike in replicas for run in places]
    own = next(run for run in runs if comm.rank in run)
    place = own.index(comm.rank)
    return ExpertGroup(comm.part(runs, f"experts_{size}"), own, sorted(run[place] for run in runs))
