from __future__ import annotations
from dataclasses import dataclass
from enum import Enum

class Op(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "input gradient"
    BACKWARD_WEIGHT = "weight gradient"
    SEND_FORWARD = "send activations"
    RECV_FORWARD = "receive activations"
    SEND_BACKWARD = "send gradients"
    RECV_BACKWARD = "receive gradients"
    UNSHARD = "unshard"
    RESHARD = "reshard"
    REDUCE = "reduce"
    STEP = "step"

@dataclass(frozen=True, slots=True)
class Action:
    op: Op
    stage: int
    micro_batch: int

@dataclass(frozen=True)
class Schedule:
    name: str
    ranks: int
    stages: int
    micro_batches: int
    rank_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
