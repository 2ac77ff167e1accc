from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["CheckpointActivationOffloadStats", "CheckpointHiddenStatesOffload", "get_checkpoint_hidden_states_offloading_ctx_manager", "patch_gradient_checkpointing_layer_marker"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class CheckpointActivationOffloadStats:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("activations live on the host inside of shardwise.offload_activations(), or by the configuration's activation_checkpointing.cpu_checkpointing or activation_offload")
class CheckpointHiddenStatesOffload:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("activations live on the host inside of shardwise.offload_activations(), or by the configuration's activation_checkpointing.cpu_checkpointing or activation_offload")
def get_checkpoint_hidden_states_offloading_ctx_manager(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def patch_gradient_checkpointing_layer_marker(*args: Any, **kwargs: Any) -> NoReturn: ...
