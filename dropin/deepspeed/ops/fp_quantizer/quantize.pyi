from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["FP_Quantize", "Quantizer"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class FP_Quantize:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class Quantizer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
