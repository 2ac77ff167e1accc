from deepspeed.runtime.activation_checkpointing import checkpointing as checkpointing
from deepspeed.runtime.activation_checkpointing import config as config
from deepspeed.runtime.activation_checkpointing import offload_activations as offload_activations

__all__ = ["checkpointing", "config", "offload_activations"]
