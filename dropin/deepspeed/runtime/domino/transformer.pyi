from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["AttnMaskType", "AttnType", "CoreAttention", "DominoBatching", "DominoModule", "DominoTransformer", "DominoTransformerLayer", "DominoUtil", "LayerType", "ModelType", "NoOper", "ShardedAttention", "TransformerModelParallel", "TransformerModuleParallel", "bias_dropout_add"]

@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class AttnMaskType:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class AttnType:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class CoreAttention:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class DominoBatching:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class DominoModule:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class DominoTransformer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class DominoTransformerLayer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class DominoUtil:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class LayerType:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class ModelType:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class NoOper:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class ShardedAttention:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class TransformerModelParallel:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class TransformerModuleParallel:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class bias_dropout_add:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
