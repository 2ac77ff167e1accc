"""The group of ranks that share sequences: each has a run of every sequence's tokens.

    ranks        0 1 2 3 4 5 6 7        sequence_parallel_size 4
    sequence     [a a a a][b b b b]     ranks 0-3 have the parts of one sequence, ranks 4-7 those of another
    data          0 0 0 0  1 1 1 1      which samples a rank gets

Parameters, gradients and optimizer state are divided over all ranks, as the ZeRO stage says; only the samples are dealt
to fewer. One group at a time is the process's own: attention layers that were not given one use that.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.comm.communicator import Communicator, members_of
from shardwise.comm.ledger import Ledger
from shardwise.errors import ConflictError, UsageError

NAME = "sequence_parallel"
"""Of the group, in records."""


def shares(total: int, ranks: int) -> list[int]:
    """Return how many of `total` tokens (or heads) each rank has: as equal as can be, the first ranks one more.

    >>> shares(9, 2), shares(8, 4)
    ([5, 4], [2, 2, 2, 2])
    """
    return [total // ranks + (rank < total % ranks) for rank in range(ranks)]


def run_of(total: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return the first of a rank's tokens (or heads), and the one behind its last.

    >>> run_of(9, 2, 1)
    (5, 9)
    """
    sizes = shares(total, ranks)
    first = sum(sizes[:rank])
    return first, first + sizes[rank]


@dataclass
class Layout:
    """How the sequence of a forward pass lies on the ranks.

    Attributes:
        lengths: tokens of each rank.
        first: position of the first token, if positions go on without a break from rank to rank; else None.
        positions: of all tokens in their samples, (rows, tokens), if several samples are packed into a row; else None.
        kept: which tokens are no padding, (rows, tokens); None: all.
        masks: made from these, by what they are for.
    """

    lengths: list[int]
    first: int | None = None
    positions: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    masks: dict[Any, Any] = field(default_factory=dict)


class SequenceGroup:
    """The ranks that share sequences, this one among them.

    It is what `deepspeed.initialize(mpu=...)` expects: it answers for the group, its size and this process's rank.

    Args:
        comm: of the ranks.
        data: of the ranks at this rank's place in all sequences, which get different samples.

    Attributes:
        data: see above.
        size: number of ranks.
        rank: this process's number among them.
        aligned: a batch has been split in which every rank's part is a sample of its own.
        exchanges: calls of attention layers that have exchanged heads.
        comparing: the model runs in evaluation mode in place of training (`shardwise.parallel.proof`).
    """

    def __init__(self, comm: Communicator, data: Communicator | None = None) -> None:
        self.data = data
        self.size, self.rank = comm.world, comm.rank
        self.aligned = False
        self.exchanges = 0
        self.comparing = False
        self._comms = [comm]
        self._pass: int | None = None
        self._agreed: list[int] | None = None
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @property
    def comm(self) -> Communicator:
        """Carries the exchanges: an engine's part of its own communicator, while there is an engine."""
        return self._comms[-1]

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, for a script's own collectives; all its ranks call, and make it the first time."""
        return self._comms[0].process_group

    @property
    def members(self) -> list[int]:
        """The global numbers of the ranks."""
        return list(self._comms[0].members)

    def attach(self, comm: Communicator) -> None:
        """Exchange through another communicator of the same ranks from now on."""
        self._comms.append(comm)

    def detach(self, comm: Communicator) -> None:
        """Take back `attach`."""
        self._comms = [other for other in self._comms if other is not comm] or self._comms[:1]

    def __deepcopy__(self, memo: Any) -> SequenceGroup:
        return self  # a copy of a model belongs to the same ranks

    # -- what a model-parallel unit answers ----------------------------------------------------------------------------

    def get_sequence_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the process group."""
        return self.group

    def get_sequence_parallel_world_size(self) -> int:
        """Return the number of ranks that share a sequence."""
        return self.size

    def get_sequence_parallel_rank(self) -> int:
        """Return this process's number among them."""
        return self.rank

    # -- the layout of a pass ------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """A forward pass of the model begins: the ranks agree anew on lengths where they are asked for."""
        self._pass = (self._pass or 0) + 1
        self._agreed = None
        self._known = WeakIdKeyDictionary()

    def end_passes(self) -> None:
        """Nobody tells any more where forward passes begin."""
        self._pass = None
        self._agreed = None

    def lengths(self, own: int) -> list[int]:
        """Return how many tokens each rank has (all ranks call, in the same order).

        The ranks tell each other once in a forward pass of an engine, and at every call without one.

        Raises:
            UsageError: another attention layer of the pass has had another length.
        """
        if self._agreed is not None:
            if self._agreed[self.rank] != own:
                raise UsageError(
                    f"sequence parallelism: rank {self.rank} has {own} tokens in an attention layer, and had "
                    f"{self._agreed[self.rank]} in an earlier one of the same forward pass. Where layers have "
                    "sequences of their own, pass the tokens of all ranks: attention(q, k, v, lengths=[...])"
                )
            return self._agreed
        told = [int(length) for length in self.comm.exchange(own, "sequence_lengths")]
        if self._pass is not None:
            self._agreed = told
        return told

    def layout(
        self,
        own: int,
        rows: int,
        positions: torch.Tensor | None,
        kept: torch.Tensor | None,
        device: torch.device,
        *,
        key: torch.Tensor | None = None,
    ) -> Layout:
        """Return how the sequence lies on the ranks, where models give positions along (all ranks call).

        The ranks tell each other once for each tensor of positions; all layers of a model pass the same one. On a
        device the host waits for it, once. Without positions and padding they tell each other once in a forward pass.

        Args:
            own: tokens of this rank.
            rows: of the batch.
            positions: of this rank's tokens in their samples, (rows or 1, tokens).
            kept: which of them are no padding.
            device: for what is made.
            key: the tensor that the two are part of, which all layers of a model pass; None: the first that is there.

        Raises:
            UsageError: every rank has the whole sequence.
        """
        if key is None:
            key = positions if positions is not None else kept
        if key is None:
            return Layout(self.lengths(own))
        if key in self._known:
            version, layout = self._known[key]
            if version == key._version and layout.lengths[self.rank] == own:
                return layout
        runs = runs_of(positions)
        padded = kept is not None and not bool(kept.all())
        told = self.comm.exchange([own, runs, padded], "sequence_layout")
        layout = Layout([int(length) for length, _, _ in told])
        if any(padding for _, _, padding in told):
            here = torch.ones(rows, own, dtype=torch.bool, device=device) if kept is None else kept.bool()
            layout.kept = self.whole(here.expand(rows, own), layout.lengths)
        if positions is not None:
            self._check_split(told)
            ends = [found[1] if found is not None else None for _, found, _ in told]
            begins = [found[0] if found is not None else None for _, found, _ in told]
            if None in ends or any(b != e for b, e in zip(begins[1:], ends, strict=False)):
                layout.positions = self.whole(positions.expand(rows, own).contiguous(), layout.lengths)
            else:
                layout.first = begins[0]
        self._known[key] = (key._version, layout)
        return layout

    def _check_split(self, told: list[Any]) -> None:
        """Refuse whole sequences on every rank, which nobody has split."""
        if self.size > 1 and not self.aligned and all(runs == [0, length] for length, runs, _ in told):
            raise UsageError(
                f"sequence parallelism: all {self.size} ranks have positions 0 to {told[0][0] - 1}, so each has the "
                "whole sequence, or its part without the positions that this has in the whole. Give each rank its "
                "part, with position_ids: wrap the loader in shardwise.parallel.SequenceLoader, or call "
                "shardwise.parallel.split(batch)"
            )

    def whole(self, part: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Return a (rows, tokens) tensor of whole sequences, of which each rank has its tokens; not differentiable."""
        rows = part.shape[0]
        wide = part.detach().to(torch.int64).contiguous().view(-1)
        received = torch.empty(rows * sum(lengths), dtype=torch.int64, device=part.device)
        sizes = [rows * length for length in lengths]
        given = wide.repeat(self.size)
        self.comm.all_to_all(received, given, sizes, [wide.numel()] * self.size, "sequence_whole").wait()
        pieces = received.split(sizes)
        found = torch.cat([piece.view(rows, -1) for piece in pieces], dim=1)
        return found.to(part.dtype)


def runs_of(positions: torch.Tensor | None) -> list[int] | None:
    """Return the first position and the one that would follow, if all rows count up from the same one; else None."""
    if positions is None or positions.shape[-1] == 0:
        return None
    expected = positions[:1, :1] + torch.arange(positions.shape[-1], device=positions.device)
    if not bool((positions == expected).all()):
        return None
    first = int(positions[0, 0])
    return [first, first + positions.shape[-1]]


_whole_for: list[list[int]] = []
"""Ranks of groups each of which has whole sequences for now."""


@contextlib.contextmanager
def whole_sequences(group: SequenceGroup) -> Iterator[None]:
    """Let each rank of a group have whole sequences inside of the block: its attention exchanges nothing."""
    _whole_for.append(group.members)
    try:
        yield
    finally:
        _whole_for.remove(group.members)


def active(group: SequenceGroup) -> SequenceGroup:
    """Return a group, or within `whole_sequences` that of this rank alone."""
    if group.size == 1 or group.members not in _whole_for:
        return group
    return SequenceGroup(Communicator(None, group.comm.ledger, group.comm.device, name=NAME, alone=True))


_current: list[weakref.ref[SequenceGroup]] = []  # they belong to engines, and to `_begun`
_given: dict[dist.ProcessGroup, SequenceGroup] = {}
_begun: list[tuple[SequenceGroup, Communicator]] = []
_alone: list[weakref.ref[SequenceGroup]] = []  # engines that nobody destroys go without it
_of_job: list[Any] = [None]


def current() -> SequenceGroup | None:
    """Return the process's own group; None: every rank has sequences of its own."""
    _settle()
    return next((group for known in reversed(_current) if (group := known()) is not None), None)


def _settle() -> None:
    """Forget groups of ranks whose job has been left (`destroy_process_group`)."""
    default = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if default is not _of_job[0]:
        _current.clear()
        _given.clear()
        _begun.clear()
        _alone.clear()
        _of_job[0] = default


def needed() -> SequenceGroup:
    """Return the process's own group; if there is an engine whose ranks share no sequences, that of this rank alone.

    Raises:
        UsageError: there is no such engine either.
    """
    group = current() or next((own for known in reversed(_alone) if (own := known()) is not None), None)
    if group is None:
        raise UsageError(
            "there is no group of ranks that share sequences: set sequence_parallel_size in the configuration and call "
            "initialize() before the model runs, or call shardwise.parallel.begin(size) before"
        )
    return group


def take_over(group: SequenceGroup) -> None:
    """Make a group the process's own.

    Raises:
        ConflictError: there is one of other ranks.
    """
    before = current()
    if before is not None and before.members != group.members:
        del before
        gc.collect()  # an engine that nobody has any more may wait for this
        before = current()
    if before is not None and before.members != group.members:
        raise ConflictError(
            f"sequences are shared by ranks {before.members} here, and should be by {group.members} now: there is one "
            "such group in a process. Destroy the engine that uses the other one, or call shardwise.parallel.end()"
        )
    _current.append(weakref.ref(group))


def stay_alone(group: SequenceGroup) -> None:
    """Have the group of this rank alone stand in where one is needed and there is no other."""
    _settle()
    _alone.append(weakref.ref(group))


def let_go(group: SequenceGroup) -> None:
    """Take back `take_over`, or `stay_alone`."""
    _current[:] = [other for other in _current if other() not in (group, None)]
    _alone[:] = [other for other in _alone if other() not in (group, None)]


def partition(size: int, world: int) -> list[list[int]]:
    """Return the ranks that share sequences: runs of `size`.

    Raises:
        ConflictError: they do not divide the ranks.
    """
    if size < 1 or world % size:
        near = max(number for number in range(1, world + 1) if world % number == 0 and number <= max(size, 1))
        raise ConflictError(
            f"sequence_parallel_size is {size}, but there are {world} ranks, which are not whole groups of {size}; "
            f"choose a divisor of {world}, such as {near}"
        )
    return [list(range(first, first + size)) for first in range(0, world, size)]


def across(lines: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the ranks at the same place of all sequences.

    >>> across([[0, 1], [2, 3]])
    [[0, 2], [1, 3]]
    """
    return [list(ranks) for ranks in zip(*lines, strict=True)]


def begin(size: int, device: torch.device | None = None) -> SequenceGroup:
    """Make the groups of ranks that share sequences, before there is an engine (all ranks call).

    `initialize()` does it by itself where the configuration has `sequence_parallel_size`. An engine that is made later
    takes this group: pass it as `mpu`.

    Args:
        size: ranks in each group; they are neighbours.
        device: of the tensors; None: this process's.

    Raises:
        ConflictError: `size` does not divide the ranks, or there are such groups of other sizes.

    Example:
        >>> from shardwise.parallel import begin, end
        >>> begin(1).get_sequence_parallel_world_size()
        1
        >>> end()
    """
    from shardwise.comm.setup import local_rank
    from shardwise.device import choose_device

    device = choose_device(local_rank()) if device is None else device
    everybody = Communicator(None, Ledger(), device, call="shardwise.parallel.begin()")
    lines = partition(size, everybody.world)
    if everybody.world == 1:
        group = SequenceGroup(everybody, everybody)
    else:
        group = SequenceGroup(everybody.part(lines, NAME), everybody.part(across(lines), "data_parallel"))
    try:
        take_over(group)
    except ConflictError:
        everybody.destroy()
        raise
    _begun.append((group, everybody))
    return group


def end() -> None:
    """Give back what `begin` has made (all ranks call)."""
    _settle()
    while _begun:
        group, everybody = _begun.pop()
        let_go(group)
        everybody.destroy()


def group_of(given: SequenceGroup | dist.ProcessGroup | None) -> SequenceGroup | None:
    """Return the group that stands for what a layer was given: a group, a process group, or None for the process's own.

    For a process group that belongs to none yet one is made; its ranks call together.
    """
    if given is None or isinstance(given, SequenceGroup):
        return given
    own = current()
    if own is not None and own.members == members_of(given):
        return own
    if given not in _given:
        from shardwise.comm.setup import local_rank
        from shardwise.device import choose_device

        comm = Communicator(given, Ledger(), choose_device(local_rank()), name=NAME, near=False)
        _given[given] = SequenceGroup(comm)
    return _given[given]
