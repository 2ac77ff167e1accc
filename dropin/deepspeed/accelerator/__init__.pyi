from deepspeed.accelerator import abstract_accelerator as abstract_accelerator
from deepspeed.accelerator import real_accelerator as real_accelerator
from shardwise_deepspeed.accelerator import Accelerator as DeepSpeedAccelerator
from shardwise_deepspeed.accelerator import get_accelerator as get_accelerator
from shardwise_deepspeed.accelerator import is_current_accelerator_supported as is_current_accelerator_supported
from shardwise_deepspeed.accelerator import set_accelerator as set_accelerator

__all__ = ["DeepSpeedAccelerator", "abstract_accelerator", "get_accelerator", "is_current_accelerator_supported", "real_accelerator", "set_accelerator"]
