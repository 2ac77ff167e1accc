"""Pipeline schedules as data: for each rank a list of actions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from shardwise.errors import ShardwiseError


class ScheduleError(ShardwiseError, ValueError):
    """A pipeline schedule misses or repeats an action, or its ranks wait for each other."""


class Op(Enum):
    """Kind of an action."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "input_gradient"
    BACKWARD_WEIGHT = "weight_gradient"
    SEND_FORWARD = "send_forward"
    RECV_FORWARD = "recv_forward"
    SEND_BACKWARD = "send_backward"
    RECV_BACKWARD = "recv_backward"
    UNSHARD = "unshard"
    RESHARD = "reshard"
    REDUCE = "reduce"
    STEP = "step"


INPUT_GRADIENT = frozenset({Op.BACKWARD, Op.BACKWARD_INPUT})  # compute the gradient of a stage's input
WEIGHT_GRADIENT = frozenset({Op.BACKWARD, Op.BACKWARD_WEIGHT})  # compute the gradients of a stage's parameters
COMPUTATIONS = frozenset({Op.FORWARD}) | INPUT_GRADIENT | WEIGHT_GRADIENT
SENDS = frozenset({Op.SEND_FORWARD, Op.SEND_BACKWARD})
RECEIVES = frozenset({Op.RECV_FORWARD, Op.RECV_BACKWARD})
SHARDING = frozenset({Op.UNSHARD, Op.RESHARD, Op.REDUCE, Op.STEP})


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a rank.

    A SEND has the number of the stage that computed the tensor; a RECV that of the stage that uses the tensor.

    Attributes:
        stage: number of the stage, from 0; -1 for STEP.
        micro_batch: number of the micro-batch, from 0; -1 for UNSHARD, RESHARD, REDUCE and STEP.
    """

    op: Op
    stage: int = -1
    micro_batch: int = -1

    def __str__(self) -> str:
        stage = f" of stage {self.stage}" if self.stage >= 0 else ""
        return f"{self.op.name}{stage}" + (f", micro-batch {self.micro_batch}" if self.micro_batch >= 0 else "")


@dataclass(frozen=True)
class Schedule:
    """Actions of each rank of a pipeline for one batch.

    The SENDs of a link, which is one direction from one rank to another, are in the order of production. RECVs are in
    the order of use. A rank that receives in the order of the SENDs keeps the messages that come before their use.

    Attributes:
        rank_of: rank of each stage.
        actions: for each rank its actions, in order.
    """

    name: str
    ranks: int
    stages: int
    micro_batches: int
    rank_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    def __iter__(self) -> Iterator[Action]:
        for actions in self.actions:
            yield from actions

    def has(self, ops: frozenset[Op]) -> bool:
        """Return True if any rank has an action of these kinds."""
        return any(action.op in ops for action in self)

    def send(self, action: Action) -> Action | None:
        """Return the SEND for the output of an action; None if no other rank uses the output."""
        if action.op is Op.FORWARD:
            return self._message(Op.SEND_FORWARD, action, 1)
        return self._message(Op.SEND_BACKWARD, action, -1) if action.op in INPUT_GRADIENT else None

    def receive(self, action: Action) -> Action | None:
        """Return the RECV for the input of an action; None if no other rank computes the input."""
        if action.op is Op.FORWARD:
            return self._message(Op.RECV_FORWARD, action, -1)
        return self._message(Op.RECV_BACKWARD, action, 1) if action.op in INPUT_GRADIENT else None

    def _message(self, op: Op, action: Action, step: int) -> Action | None:
        peer = action.stage + step
        if 0 <= peer < self.stages and self.rank_of[peer] != self.rank_of[action.stage]:
            return Action(op, action.stage, action.micro_batch)
        return None


def loop_placement(ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the rank of each stage if stage s is on rank s modulo the number of ranks.

    >>> loop_placement(3, 2)
    (0, 1, 2, 0, 1, 2)
    """
    return (*range(ranks),) * chunks


def v_placement(ranks: int) -> tuple[int, ...]:
    """Return the rank of each stage if the second half of the stages takes the ranks in reverse order.

    >>> v_placement(3)
    (0, 1, 2, 2, 1, 0)
    """
    return (*range(ranks), *reversed(range(ranks)))
