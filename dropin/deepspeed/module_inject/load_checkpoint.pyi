from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["load_model_with_checkpoint"]

@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
def load_model_with_checkpoint(*args: Any, **kwargs: Any) -> NoReturn: ...
