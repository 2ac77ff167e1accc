from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["buffers_to_keep_in_fp32", "keep_buffers_in_fp32", "keep_in_fp32_pattern"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def buffers_to_keep_in_fp32(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def keep_buffers_in_fp32(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def keep_in_fp32_pattern(*args: Any, **kwargs: Any) -> NoReturn: ...
