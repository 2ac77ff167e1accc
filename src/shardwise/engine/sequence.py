"""Sequences that ranks share: from what a caller asks for to the groups of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.communicator import members_of
from shardwise.engine.ranks import RankGrid
from shardwise.errors import ConflictError, UsageError
from shardwise.parallel.sequence import NAME, SequenceGroup, current, let_go, take_over
from shardwise.zero.passes.modulehook import ModuleHook

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator

_SEQUENCE = ("sp", "seq", "sequence", "ulysses", "sequence_parallel")
_DATA = ("dp", "data", "shard", "dp_shard", "fsdp", "data_parallel")
"""Names that dimensions of a client's mesh have."""


@dataclass(frozen=True)
class Asked:
    """What a caller asks for besides the configuration.

    Attributes:
        size: ranks that share a sequence.
        where: said so, for messages.
        lines: the ranks of each sequence, by their numbers in the job; None: neighbours.
        own: the global numbers of the ranks of this rank's sequence, where only these are known.
        group: that there is already.
    """

    size: int
    where: str
    lines: list[list[int]] | None = None
    own: list[int] | None = None
    group: SequenceGroup | None = None


def asked_by(mpu: Any, mesh: Any, members: Sequence[int]) -> Asked | None:
    """Return what `initialize(mpu=..., mesh_param=...)` says of sequences; None: nothing.

    Args:
        mpu: a model-parallel unit, or None.
        mesh: a DeviceMesh, a pair (data, sequence), or None.
        members: the engine's ranks, by the numbers that a mesh gives them.

    Raises:
        ConflictError: numbers that do not fit the ranks.
        UsageError: a mesh of other dimensions.
    """
    if isinstance(mesh, (tuple, list)):
        return _pair(mesh, len(members))
    if isinstance(mesh, DeviceMesh) and set(mesh.mesh_dim_names or ()) & set(_SEQUENCE):
        return _of_mesh(mesh, members)
    size = int(getattr(mpu, "get_sequence_parallel_world_size", lambda: 1)())
    if size == 1:
        return None
    if isinstance(mpu, SequenceGroup):
        return Asked(size, "initialize(mpu=...)", own=mpu.members, group=mpu)
    return Asked(size, "initialize(mpu=...)", own=members_of(mpu.get_sequence_parallel_group()))


def _pair(mesh: Sequence[Any], world: int) -> Asked:
    what = f"initialize(mesh_param={tuple(mesh)!r})"
    if len(mesh) != 2 or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in mesh):
        raise UsageError(f"{what}: expected two numbers: ranks with data of their own, and ranks that share a sequence")
    if mesh[0] * mesh[1] != world:
        raise ConflictError(f"{what}: {mesh[0]} x {mesh[1]} ranks, but there are {world}")
    return Asked(mesh[1], what)


def _of_mesh(mesh: DeviceMesh, members: Sequence[int]) -> Asked:
    names = mesh.mesh_dim_names or ()
    what = f"initialize(mesh_param=...): a mesh of {dict(zip(names, mesh.mesh.shape, strict=True))}"
    others = [name for name in names if name not in _SEQUENCE]
    if len(names) > 2 or len(others) != len(names) - 1 or any(name not in _DATA for name in others):
        raise UsageError(
            f"{what} is not supported: besides the dimension of sequences it may have one named {' or '.join(_DATA)}. "
            "State is divided over all its ranks"
        )
    ranks = mesh.mesh.view(1, -1) if len(names) == 1 else mesh.mesh if names[1] in _SEQUENCE else mesh.mesh.T
    if sorted(ranks.flatten().tolist()) != sorted(members):
        raise UsageError(
            f"{what} has ranks {ranks.flatten().tolist()}; the engine has ranks {list(members)}, each once"
        )
    own = {rank: number for number, rank in enumerate(members)}
    lines = [[own[rank] for rank in row] for row in ranks.tolist()]
    if any(line != sorted(line) for line in lines):
        raise UsageError(f"{what}: ranks must ascend along the dimension of sequences, found {ranks.tolist()}")
    return Asked(ranks.shape[1], what, lines)


class SharedSequences:
    """The groups of an engine whose ranks share sequences, as long as it is open.

    Args:
        job: all ranks.
        lines: those of each sequence, by their numbers in the job.
        data: the ranks that get different samples, of which this rank is one: those at its place in all sequences.
        asked: what the caller has said; None: only the configuration has.

    Attributes:
        group: the ranks of this rank's sequence.

    Raises:
        ConflictError: there is a group of other ranks in this process.
    """

    def __init__(
        self, job: Communicator, lines: Sequence[Sequence[int]], data: Communicator, asked: Asked | None
    ) -> None:
        self._part = job.part(lines, NAME)
        existing = asked.group if asked is not None and asked.group is not None else current()
        self._new = existing is None or existing.members != self._part.members
        self.group = SequenceGroup(self._part, data) if self._new or existing is None else existing
        if self._new:
            take_over(self.group)
        else:
            self.group.attach(self._part)
        self._hooks: list[Any] = []
        self._checked, self._before = False, 0

    def watch(self, model: nn.Module) -> None:
        """Know where forward passes of a model begin, and look at the first."""
        self._hooks.append(model.register_forward_pre_hook(ModuleHook(self._begins)))
        self._hooks.append(model.register_forward_hook(ModuleHook(self._ended)))

    def _begins(self, *_: Any) -> None:
        self.group.begin_pass()
        self._before = self.group.exchanges

    def _ended(self, model: nn.Module, *_: Any) -> None:
        if self._checked or not model.training:
            return
        self._checked = True
        if self.group.exchanges == self._before:
            raise UsageError(
                f"sequence_parallel_size is {self.group.size}, but {type(model).__name__} has run without any exchange "
                "of heads between ranks: its attention sees a rank's own tokens only. Call "
                "shardwise.parallel.share_attention(model) (models of transformers), or wrap the attention in "
                "shardwise.parallel.DistributedAttention"
            )

    def close(self) -> None:
        """End it; process groups belong to the job's communicator."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.group.end_passes()
        if self._new:
            let_go(self.group)
        else:
            self.group.detach(self._part)


def sequence_lines(job: Communicator, size: int, tensor: int, asked: Asked | None) -> list[list[int]] | int:
    """Return which ranks share sequences, if a caller has said, else how many (all ranks call).

    Args:
        job: all ranks.
        size: ranks that share a sequence.
        tensor: ranks that have a copy of the model among them.
        asked: what the caller has said; None: only the configuration has.

    Raises:
        UsageError: the ranks that a caller has named are no groups of one size, or lie otherwise than they have to.
    """
    if size == 1 or asked is None or (asked.lines is None and asked.own is None):
        return size
    lines = _named(job, asked)
    if tensor == 1:
        return lines
    wanted = RankGrid.of(job.world, tensor=tensor, sequence=size).sequence
    if sorted(lines) != sorted(wanted):
        raise UsageError(
            f"{asked.where}: the ranks that share sequences are {lines}; with {tensor} ranks to a copy of the model, "
            f"which are neighbours, they have to be {wanted}"
        )
    return size


def _named(job: Communicator, asked: Asked) -> list[list[int]]:
    if asked.lines is not None:
        return asked.lines
    assert asked.own is not None
    numbers = {rank: number for number, rank in enumerate(job.members)}
    told = job.exchange([numbers.get(rank, -1) for rank in asked.own], "sequence_groups")
    lines = [list(line) for line in sorted({tuple(line) for line in told})]
    if sorted(rank for line in lines for rank in line) != list(range(job.world)) or len({*map(len, lines)}) != 1:
        raise UsageError(
            f"{asked.where}: the ranks that share sequences are {lines} by what all ranks say; expected groups of one "
            f"size that have each of {job.world} ranks once"
        )
    return lines
