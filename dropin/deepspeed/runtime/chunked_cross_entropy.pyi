from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["ChunkedCausalLMLoss", "chunked_cross_entropy", "install_chunked_causal_lm_loss", "triton_backend_available"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class ChunkedCausalLMLoss:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def chunked_cross_entropy(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def install_chunked_causal_lm_loss(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def triton_backend_available(*args: Any, **kwargs: Any) -> NoReturn: ...
