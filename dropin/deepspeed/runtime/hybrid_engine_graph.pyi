from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DecodeGraphCache", "decode_steps_from_generate_kwargs", "validate_cuda_graph_support"]

@deprecated('answers run without CUDA graphs (engine.compile(mode="reduce-overhead") records them)')
class DecodeGraphCache:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('answers run without CUDA graphs (engine.compile(mode="reduce-overhead") records them)')
def decode_steps_from_generate_kwargs(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('answers run without CUDA graphs (engine.compile(mode="reduce-overhead") records them)')
def validate_cuda_graph_support(*args: Any, **kwargs: Any) -> NoReturn: ...
