"""Sequence-parallel groups of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from shardwise.comm.communicator import Communicator
from shardwise.compat import has_values
from shardwise.engine.asked import RequestedParallelism, told_lines
from shardwise.engine.ranks import RankGrid
from shardwise.errors import UsageError
from shardwise.parallel.proof import difference
from shardwise.parallel.sequence import NAME, SequenceGroup, current, let_go, stay_alone, take_over
from shardwise.trees import tensors_in
from shardwise.zero.passes.modulehook import ModuleHook, weakly


class SharedSequences:
    """The sequence-parallel group of an engine, while it is open; one of a process at a time."""

    def __init__(
        self,
        job: Communicator,
        lines: Sequence[Sequence[int]],
        data: Communicator,
        asked: RequestedParallelism | None,
        *,
        divided: bool = False,
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
        self._job = job
        self._compared, self._divided = False, divided
        self._checked, self._before = False, 0

    def watch(self, model: nn.Module) -> None:
        """Install hooks at the model's forward passes, and check the first one."""
        # Weak references, because the model may outlive the engine.
        self._hooks.append(model.register_forward_pre_hook(ModuleHook(weakly(self._begins))))
        self._hooks.append(model.register_forward_hook(ModuleHook(weakly(self._ended))))

    def _begins(self, *_: Any) -> None:
        self.group.begin_pass()
        self._before = self.group.exchanges

    def _ended(self, model: nn.Module, *_: Any) -> None:
        if self._checked or not model.training or self.group.comparing:
            return
        self._checked = True
        if self.group.exchanges == self._before:
            raise UsageError(
                f"sequence_parallel_size is {self.group.size}, but {type(model).__name__} has run without any exchange "
                "of heads between ranks: its attention sees a rank's own tokens only. Call "
                "shardwise.parallel.share_attention(model) (models of transformers), or wrap the attention in "
                "shardwise.parallel.DistributedAttention"
            )

    def compare(self, model: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Compare outputs before the first training pass with a run on unsharded sequences; raises on all ranks."""
        if self._compared or not model.training or not all(has_values(x) for x in tensors_in((args, kwargs))):
            return
        self._compared = True
        found = difference(run, model, self.group, self._job, args, kwargs, divided=self._divided)
        if found is not None:
            raise UsageError(
                f"sequence parallelism over {self.group.size} ranks: {type(model).__name__} computes something else "
                f"than in one process; {found}. Attention, positions, masks, recurrences or "
                "convolutions are those of a rank's own tokens there: set sequence_parallel_size to 1, or pass the "
                "position_ids that the model takes"
            )

    def close(self) -> None:
        """Remove hooks and group; process groups belong to the job's communicator."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.group.end_passes()
        if self._new:
            let_go(self.group)
        else:
            self.group.detach(self._part)


class OwnSequences:
    """Group of one rank: dataloaders and layers find a group without sequence parallelism, too."""

    def __init__(self, job: Communicator, data: Communicator) -> None:
        self.group = SequenceGroup(Communicator(None, job.ledger, job.device, name=NAME, alone=True), data)
        stay_alone(self.group)

    def watch(self, model: nn.Module) -> None:
        """Do nothing: a single rank has no passes to agree on."""

    def compare(self, model: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Do nothing: a single rank has unsharded sequences."""

    def close(self) -> None:
        """Remove the group."""
        let_go(self.group)


def sequence_lines(
    job: Communicator, size: int, tensor: int, asked: RequestedParallelism | None
) -> list[list[int]] | int:
    """Return the sequence-parallel groups if a caller has named them, otherwise their size (all ranks call)."""
    if size == 1 or asked is None or (asked.lines is None and asked.own is None):
        return size
    lines = asked.lines
    if lines is None:
        assert asked.own is not None
        lines = told_lines(job, asked.own, asked.where, "share sequences")
    if tensor == 1:
        return lines
    wanted = RankGrid.of(job.world, tensor=tensor, sequence=size).sequence
    if sorted(lines) != sorted(wanted):
        raise UsageError(
            f"{asked.where}: the ranks that share sequences are {lines}; with {tensor} ranks to a copy of the model, "
            f"which are neighbours, they have to be {wanted}"
        )
    return size
