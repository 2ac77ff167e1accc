from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DecodeGraphCache", "decode_steps_from_generate_kwargs", "validate_cuda_graph_support"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class DecodeGraphCache:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def decode_steps_from_generate_kwargs(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def validate_cuda_graph_support(*args: Any, **kwargs: Any) -> NoReturn: ...
