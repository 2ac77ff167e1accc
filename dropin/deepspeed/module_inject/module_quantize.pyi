from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["quantize_module", "quantize_transformer_layer"]

@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
def quantize_module(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
def quantize_transformer_layer(*args: Any, **kwargs: Any) -> NoReturn: ...
