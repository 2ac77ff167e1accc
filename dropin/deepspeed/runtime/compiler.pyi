from typing import Any, NoReturn

from typing_extensions import deprecated

from torch.compiler import disable as disable
from shardwise_deepspeed.helpers import is_compile_supported as is_compile_supported
from torch.compiler import is_compiling as is_compiling

__all__ = ["compile", "compile_autoep_non_moe_regions", "compiled_autograd", "disable", "dummy_decorator", "enable", "is_compile_supported", "is_compiling", "lazy_disable"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def compile(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def compile_autoep_non_moe_regions(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def compiled_autograd(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def dummy_decorator(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def enable(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def lazy_disable(*args: Any, **kwargs: Any) -> NoReturn: ...
