"""Constants and enumerations under the names that scripts import."""

from __future__ import annotations

from enum import Enum, IntEnum

from shardwise.comm.setup import DEFAULT_PORT as TORCH_DISTRIBUTED_DEFAULT_PORT

__all__ = [
    "ADAGRAD_OPTIMIZER",
    "ADAMW_OPTIMIZER",
    "ADAM_OPTIMIZER",
    "DEEPSPEED_OPTIMIZERS",
    "HAS_TRITON",
    "LAMB_OPTIMIZER",
    "LION_OPTIMIZER",
    "MUADAMW_OPTIMIZER",
    "MUADAM_OPTIMIZER",
    "MUON_OPTIMIZER",
    "MUSGD_OPTIMIZER",
    "ONEBIT_ADAM_OPTIMIZER",
    "ONEBIT_LAMB_OPTIMIZER",
    "ROUTE_EVAL",
    "ROUTE_PREDICT",
    "ROUTE_TRAIN",
    "TORCH_DISTRIBUTED_DEFAULT_PORT",
    "ZERO_ONE_ADAM_OPTIMIZER",
    "OffloadDeviceEnum",
    "ZeroStageEnum",
]

ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
ADAGRAD_OPTIMIZER = "adagrad"
LAMB_OPTIMIZER = "lamb"
LION_OPTIMIZER = "lion"
MUON_OPTIMIZER = "muon"
ONEBIT_ADAM_OPTIMIZER = "onebitadam"
ONEBIT_LAMB_OPTIMIZER = "onebitlamb"
ZERO_ONE_ADAM_OPTIMIZER = "zerooneadam"
MUADAM_OPTIMIZER = "muadam"
MUADAMW_OPTIMIZER = "muadamw"
MUSGD_OPTIMIZER = "musgd"
DEEPSPEED_OPTIMIZERS = [
    ADAM_OPTIMIZER,
    ADAMW_OPTIMIZER,
    ADAGRAD_OPTIMIZER,
    LAMB_OPTIMIZER,
    LION_OPTIMIZER,
    MUON_OPTIMIZER,
    ONEBIT_ADAM_OPTIMIZER,
    ONEBIT_LAMB_OPTIMIZER,
    ZERO_ONE_ADAM_OPTIMIZER,
    MUADAM_OPTIMIZER,
    MUADAMW_OPTIMIZER,
    MUSGD_OPTIMIZER,
]
"""Lower-case names of `optimizer.type` that are not torch's."""

ROUTE_TRAIN = "train"
ROUTE_EVAL = "eval"
ROUTE_PREDICT = "predict"

HAS_TRITON = False
"""Whether Triton's kernels are used."""


class ZeroStageEnum(IntEnum):
    """ZeRO stages by the state that they shard."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(str, Enum):
    """Values of the `device` keys of offload sections."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"
