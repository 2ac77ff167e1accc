from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["drop_tokens", "gather_tokens"]

@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
def drop_tokens(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
def gather_tokens(*args: Any, **kwargs: Any) -> NoReturn: ...
