from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["AutoTPConfig", "AutoTPPresets", "PartitionType", "TPLayerSpec", "merge_autotp_configs"]

@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class AutoTPConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class AutoTPPresets:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class PartitionType:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class TPLayerSpec:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
def merge_autotp_configs(*args: Any, **kwargs: Any) -> NoReturn: ...
