from shardwise_deepspeed.accelerator import get_accelerator as get_accelerator
from shardwise_deepspeed.accelerator import is_current_accelerator_supported as is_current_accelerator_supported
from shardwise_deepspeed.accelerator import set_accelerator as set_accelerator

__all__ = ["get_accelerator", "is_current_accelerator_supported", "set_accelerator"]
