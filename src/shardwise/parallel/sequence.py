"""Sequence-parallel groups: each rank has a range of every sequence's tokens.

    ranks        0 1 2 3 4 5 6 7        sequence_parallel_size 4
    sequence     [a a a a][b b b b]     ranks 0-3 are one sequence-parallel group, ranks 4-7 another
    data          0 0 0 0  1 1 1 1      data-parallel index

Parameters, gradients and optimizer state are sharded over all ranks by the ZeRO stage. Samples are split over the
data-parallel ranks only. A process has one default group at a time, for attention layers without an explicit group.
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
from shardwise.compat import backward_pass, has_values
from shardwise.errors import ConflictError, UsageError

NAME = "sequence_parallel"  # of the group in records


def shares(total: int, ranks: int) -> list[int]:
    """Return the number of tokens (or heads) of each rank; the first ranks may have one more.

    >>> shares(9, 2), shares(8, 4)
    ([5, 4], [2, 2, 2, 2])
    """
    return [total // ranks + (rank < total % ranks) for rank in range(ranks)]


def run_of(total: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return the range [first, end) of a rank's tokens (or heads).

    >>> run_of(9, 2, 1)
    (5, 9)
    """
    sizes = shares(total, ranks)
    first = sum(sizes[:rank])
    return first, first + sizes[rank]


@dataclass
class Layout:
    """Layout of a forward pass's sequence on the ranks."""

    lengths: list[int]  # tokens of each rank
    first: int | None = None  # position of the first token, if positions are consecutive over ranks
    # of all tokens in their samples, (rows, tokens), if samples are packed into rows
    positions: torch.Tensor | None = None
    kept: torch.Tensor | None = None  # True for tokens that are no padding, (rows, tokens); None: all
    masks: dict[Any, Any] = field(default_factory=dict)  # built masks, by kind


class SequenceGroup:
    """A sequence-parallel group with this rank; also an `mpu` for `deepspeed.initialize(mpu=...)`.

    Attributes:
        aligned: a batch was split in which every rank's part is a sample of its own.
        exchanges: number of attention calls that have exchanged heads.
        comparing: the model runs for the check of `shardwise.parallel.proof`.
    """

    def __init__(self, comm: Communicator, data: Communicator | None = None) -> None:
        self.size, self.rank = comm.world, comm.rank
        self.aligned = False
        self.exchanges = 0
        self.comparing = False
        self._comms = {comm: data}
        self._running = comm
        self._inside: bool | None = None  # in a forward pass of an engine's model; None: passes are not reported
        self._agreed: list[int] | None = None
        self._usual: list[int] | None = None
        self._vary = False
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @property
    def comm(self) -> Communicator:
        """Communicator for exchanges: that of the engine whose pass has begun last, or else the newest engine's."""
        living = self._living
        return self._running if self._running in living else living[-1]

    @property
    def data(self) -> Communicator | None:
        """Communicator of the ranks with the same index in all sequence-parallel groups."""
        return self._comms[self._living[0]]

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Process group for a script's own collectives. All its ranks call; the first call creates it."""
        return self._living[0].process_group

    @property
    def members(self) -> list[int]:
        """Global ranks."""
        return list(self.comm.members)

    @property
    def _living(self) -> list[Communicator]:
        return [comm for comm in self._comms if not comm.destroyed] or list(self._comms)

    def carries(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor has values to communicate (no traced fake tensor), or a dry run counts its bytes."""
        return has_values(tensor) or self.comm.imagined

    def attach(self, comm: Communicator, data: Communicator) -> None:
        """Use the communicators of an engine over the same ranks from now on."""
        self._comms[comm], self._running = data, comm

    def detach(self, comm: Communicator) -> None:
        """Undo `attach`; the last communicator stays."""
        if len(self._comms) > 1:
            del self._comms[comm]
            self._running = self.comm

    def __deepcopy__(self, memo: Any) -> SequenceGroup:
        return self  # copies of a model use the same ranks

    # -- interface of a model-parallel unit ----------------------------------------------------------------------------

    def get_sequence_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the process group."""
        return self.group

    def get_sequence_parallel_world_size(self) -> int:
        """Return the number of ranks."""
        return self.size

    def get_sequence_parallel_rank(self) -> int:
        """Return this process's index in the group."""
        return self.rank

    # -- the layout of a pass ------------------------------------------------------------------------------------------

    def begin_pass(self, comm: Communicator | None = None) -> None:
        """Begin a forward pass, of the engine with a communicator: lengths are exchanged again when needed."""
        self._running = comm or self._running
        self._inside = True
        self._agreed = None
        self._known = WeakIdKeyDictionary()

    def end_pass(self, *_: Any) -> None:
        """End a forward pass: calls outside of one exchange their lengths."""
        self._inside = False

    def end_passes(self) -> None:
        """Stop caching lengths, because begins of forward passes are no longer reported."""
        self._inside = None
        self._agreed = None

    def lengths(self, own: int, rows: int) -> list[int]:
        """Return the number of tokens of each rank (all ranks call, in the same order).

        Raises a UsageError on all ranks if they have other numbers of rows.

        Exchanged once in a forward pass of an engine, and at every call outside of one. A backward pass recomputes
        layers of several forward passes, and exchanges at every call if their lengths have ever differed.
        """
        backward = backward_pass() is not None
        if self._agreed is not None and (not self._vary if backward else self._inside):
            if self._agreed[self.rank] != own:
                raise UsageError(
                    f"sequence parallelism: rank {self.rank} has {own} tokens in an attention layer, and had "
                    f"{self._agreed[self.rank]} in an earlier one of the same forward pass. Where layers have "
                    "sequences of their own, pass the tokens of all ranks: attention(q, k, v, lengths=[...])"
                )
            return self._agreed
        found = self.comm.exchange([own, rows], "sequence_lengths")
        _check_rows([there for _, there in found])
        told = [int(length) for length, _ in found]
        if self._inside is not None and not backward:
            if self._inside:
                self._agreed = told
            if not self.comparing:
                self._vary |= self._usual not in (None, told)
                self._usual = told
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
        """Return the layout of the sequence on the ranks (all ranks call).

        Exchanged once for each `key`, the tensor of positions or padding that all layers of a model share (None: the
        first of both); without one, once in a forward pass. On a device the host waits for the exchange. `positions`
        are those in samples, (rows or 1, tokens). Raises a UsageError if every rank has the whole sequence, or
        ranks have other numbers of rows.
        """
        if key is None:
            key = positions if positions is not None else kept
        if key is None:
            return Layout(self.lengths(own, rows))
        if key in self._known:
            version, layout = self._known[key]
            if version == _version(key) and layout.lengths[self.rank] == own:
                return layout
        runs = runs_of(positions)
        padded = kept is not None and not bool(kept.all())
        found = self.comm.exchange([own, runs, padded, rows], "sequence_layout")
        _check_rows([there for *_, there in found])
        told = [values for *values, _ in found]
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
        self._known[key] = (_version(key), layout)
        return layout

    def _check_split(self, told: list[Any]) -> None:
        """Refuse unsplit sequences, whose positions start at 0 on every rank."""
        if self.size > 1 and not self.aligned and all(runs == [0, length] for length, runs, _ in told):
            raise UsageError(
                f"sequence parallelism: all {self.size} ranks have positions 0 to {told[0][0] - 1}, so each has the "
                "whole sequence, or its part without the positions that this has in the whole. Give each rank its "
                "part, with position_ids: wrap the loader in shardwise.parallel.SequenceLoader, or call "
                "shardwise.parallel.split(batch)"
            )

    def whole(self, part: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """All-gather a (rows, tokens) tensor along its tokens; not differentiable."""
        rows = part.shape[0]
        wide = part.detach().to(torch.int64).contiguous().view(-1)
        received = torch.empty(rows * sum(lengths), dtype=torch.int64, device=part.device)
        sizes = [rows * length for length in lengths]
        given = wide.repeat(self.size)
        self.comm.all_to_all(received, given, sizes, [wide.numel()] * self.size, "sequence_whole").wait()
        pieces = received.split(sizes)
        found = torch.cat([piece.view(rows, -1) for piece in pieces], dim=1)
        return found.to(part.dtype)


def _check_rows(rows: Sequence[int]) -> None:
    if len(set(rows)) > 1:
        raise UsageError(
            f"sequence parallelism: the ranks of a group have {list(rows)} rows of a batch, and should have tokens of "
            "the same samples. Let these ranks read one batch: wrap the loader in shardwise.parallel.SequenceLoader, "
            "or call shardwise.parallel.split(batch)"
        )


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def runs_of(positions: torch.Tensor | None) -> list[int] | None:
    """Return the position range [first, end), if all rows are consecutive from the same start; else None."""
    if positions is None or positions.shape[-1] == 0:
        return None
    expected = positions[:1, :1] + torch.arange(positions.shape[-1], device=positions.device)
    if not bool((positions == expected).all()):
        return None
    first = int(positions[0, 0])
    return [first, first + positions.shape[-1]]


_whole_for: list[list[int]] = []  # members of groups inside `whole_sequences`


@contextlib.contextmanager
def whole_sequences(group: SequenceGroup) -> Iterator[None]:
    """Use unsplit sequences inside the block: attention of the group exchanges nothing."""
    _whole_for.append(group.members)
    try:
        yield
    finally:
        _whole_for.remove(group.members)


def active(group: SequenceGroup) -> SequenceGroup:
    """Return the group, or a single-rank group inside `whole_sequences`."""
    if group.size == 1 or group.members not in _whole_for:
        return group
    return SequenceGroup(Communicator(None, group.comm.ledger, group.comm.device, name=NAME, alone=True))


# Groups and their owners: engines, or groups of `begin` themselves. An entry lives as long as its owner.
_current: list[tuple[weakref.ref[SequenceGroup], weakref.ref[Any]]] = []
_given: dict[dist.ProcessGroup, SequenceGroup] = {}
_begun: list[tuple[SequenceGroup, Communicator]] = []
_alone: list[weakref.ref[SequenceGroup]] = []  # weak, because scripts may drop engines without destroy()


class DefaultGroup:
    """Detects changes of torch's default process group.

    The reference is weak. A destroyed group that stays referenced would keep its threads until the interpreter ends.
    """

    def __init__(self) -> None:
        self._seen: weakref.ref[dist.ProcessGroup] | None = None

    def changed(self) -> bool:
        """Return True if the group has been created, destroyed or replaced since the last call."""
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        seen = self._seen
        self._seen = None if group is None else weakref.ref(group)
        return seen is not None if group is None else seen is None or seen() is not group


_default_group = DefaultGroup()


def current() -> SequenceGroup | None:
    """Return the process's sequence-parallel group; None without sequence parallelism."""
    _settle()
    found = (known() for known, owner in reversed(_current) if owner() is not None)
    return next((group for group in found if group is not None), None)


def comparing() -> bool:
    """Return True if a model runs for the check of `shardwise.parallel.proof`."""
    group = current()
    return group is not None and group.comparing


def _settle() -> None:
    """Drop groups of a destroyed default process group (`destroy_process_group`)."""
    if _default_group.changed():
        _current.clear()
        _given.clear()
        _begun.clear()
        _alone.clear()


def needed() -> SequenceGroup:
    """Return the process's group, or an engine's one-rank group; raises a UsageError without either."""
    group = current() or next((own for known in reversed(_alone) if (own := known()) is not None), None)
    if group is None:
        raise UsageError(
            "there is no group of ranks that share sequences: set sequence_parallel_size in the configuration and call "
            "initialize() before the model runs, or call shardwise.parallel.begin(size) before"
        )
    return group


def take_over(group: SequenceGroup, owner: Any = None) -> None:
    """Set the process's sequence-parallel group, as long as `owner` lives (None: the group). Raises a ConflictError if
    a group of other ranks is set.
    """
    before = current()
    if before is not None and before.members != group.members:
        del before
        gc.collect()  # collect engines without references
        before = current()
    if before is not None and before.members != group.members:
        raise ConflictError(
            f"sequences are shared by ranks {before.members} here, and should be by {group.members} now: there is one "
            "such group in a process. Destroy the engine that uses the other one, or call shardwise.parallel.end()"
        )
    _current.append((weakref.ref(group), weakref.ref(group if owner is None else owner)))


def stay_alone(group: SequenceGroup) -> None:
    """Set the single-rank group that is used without sequence parallelism."""
    _settle()
    _alone.append(weakref.ref(group))


def let_go(group: SequenceGroup, owner: Any = None) -> None:
    """Undo `take_over` by the owner, or `stay_alone`."""
    pair = group, group if owner is None else owner
    _current[:] = [entry for entry in _current if (entry[0](), entry[1]()) != pair]
    _alone[:] = [known for known in _alone if known() is not group]


@contextlib.contextmanager
def imagined(group: SequenceGroup) -> Iterator[None]:
    """Use the group of a dry run inside the block, instead of an engine's."""
    _settle()
    known = weakref.ref(group)
    entry = known, known
    _current.append(entry)
    try:
        yield
    finally:
        _current[:] = [other for other in _current if other is not entry]


def partition(size: int, world: int) -> list[list[int]]:
    """Return groups of `size` consecutive ranks. Raises a ConflictError if `size` does not divide `world`."""
    if size < 1 or world % size:
        near = max(number for number in range(1, world + 1) if world % number == 0 and number <= max(size, 1))
        raise ConflictError(
            f"sequence_parallel_size is {size}, but the number of ranks is {world}, no multiple of {size}; "
            f"choose a divisor of {world}, such as {near}"
        )
    return [list(range(first, first + size)) for first in range(0, world, size)]


def across(lines: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the ranks with the same index in all groups.

    >>> across([[0, 1], [2, 3]])
    [[0, 2], [1, 3]]
    """
    return [list(ranks) for ranks in zip(*lines, strict=True)]


def begin(size: int, device: torch.device | None = None) -> SequenceGroup:
    """Create sequence-parallel groups of consecutive ranks before there is an engine (all ranks call).

    `initialize()` does so if `sequence_parallel_size` is configured. To use this group in a later engine, pass it as
    `mpu`. Raises a ConflictError if `size` does not divide the ranks, or a group of another size exists.

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
    """Destroy the groups of `begin` (all ranks call)."""
    _settle()
    while _begun:
        group, everybody = _begun.pop()
        let_go(group)
        everybody.destroy()


def group_of(given: SequenceGroup | dist.ProcessGroup | None) -> SequenceGroup | None:
    """Return the group of a layer's argument; None for the process's group."""
    if given is None or isinstance(given, SequenceGroup):
        return given
    own = current()
    if own is not None and own.members == members_of(given):
        return own
    # The ranks of a new process group call together.
    if given not in _given:
        from shardwise.comm.setup import local_rank
        from shardwise.device import choose_device

        comm = Communicator(given, Ledger(), choose_device(local_rank()), name=NAME, near=False)
        _given[given] = SequenceGroup(comm)
    return _given[given]
