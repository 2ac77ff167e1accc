from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise.config.schema.parallel import TPSize as TPConfig
from shardwise.config.schema.parallel import TensorParallel as TPTrainingConfig

__all__ = ["AUTOTP_MODE", "TPConfig", "TPTrainingConfig", "_get_hf_tp_plan", "get_tensor_parallel_config", "resolve_tp_config"]

@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class AUTOTP_MODE:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
def _get_hf_tp_plan(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def get_tensor_parallel_config(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
def resolve_tp_config(*args: Any, **kwargs: Any) -> NoReturn: ...
