"""Constants and enumerations under the names that scripts import; constants.toml has those without a home here."""

from __future__ import annotations

from enum import Enum, IntEnum

from shardwise.comm.setup import DEFAULT_PORT as TORCH_DISTRIBUTED_DEFAULT_PORT
from shardwise.config.schema import Config
from shardwise.config.schema.zero import LeafModule
from shardwise.launch.hosts import DEFAULT_HOSTFILE as DLTS_HOSTFILE
from shardwise_deepspeed.entries import read

__all__ = ["DLTS_HOSTFILE", "TORCH_DISTRIBUTED_DEFAULT_PORT"]

globals().update(read("constants.toml"))

GRADIENT_CLIPPING_DEFAULT: float = Config.model_fields["gradient_clipping"].default
OPTIMIZER_TYPE_DEFAULT = SCHEDULER_TYPE_DEFAULT = None
DEFAULT_LEAF_MODULE_CLASSES: list[str] = list(LeafModule.model_fields["classes"].default)
DEFAULT_LEAF_MODULE_NAMES: list[str] = list(LeafModule.model_fields["names"].default)
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = list(LeafModule.model_fields["name_suffixes"].default)


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
