from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["matmul_fp8", "matmul_fp8_fallback"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def matmul_fp8(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def matmul_fp8_fallback(*args: Any, **kwargs: Any) -> NoReturn: ...
