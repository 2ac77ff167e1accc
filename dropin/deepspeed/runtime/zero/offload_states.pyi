from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise.engine.states import get_state_devices as get_state_devices

__all__ = ["get_state_devices", "offload_adam_states", "offload_optimizer_states", "reload_adam_states", "reload_optimizer_states", "unpin_offloaded_optimizer_states"]

@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
def offload_adam_states(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
def offload_optimizer_states(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
def reload_adam_states(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
def reload_optimizer_states(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
def unpin_offloaded_optimizer_states(*args: Any, **kwargs: Any) -> NoReturn: ...
