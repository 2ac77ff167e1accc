from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["BLOOMLayerPolicy", "DSPolicy", "GPTNEOXLayerPolicy", "HFBertLayerPolicy", "HFGPT2LayerPolicy", "HFGPTJLayerPolicy", "HFGPTNEOLayerPolicy", "HFOPTLayerPolicy", "LLAMALayerPolicy", "MegatronLayerPolicy"]

@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class BLOOMLayerPolicy:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class DSPolicy:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class GPTNEOXLayerPolicy:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class HFBertLayerPolicy:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class HFGPT2LayerPolicy:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class HFGPTJLayerPolicy:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class HFGPTNEOLayerPolicy:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class HFOPTLayerPolicy:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class LLAMALayerPolicy:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class MegatronLayerPolicy:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
