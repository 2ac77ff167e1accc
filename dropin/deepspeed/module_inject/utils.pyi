from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["policy_to_ds_container", "transpose"]

@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
def policy_to_ds_container(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
def transpose(*args: Any, **kwargs: Any) -> NoReturn: ...
