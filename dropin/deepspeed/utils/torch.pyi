from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise_deepspeed.helpers import required_torch_version as required_torch_version

__all__ = ["is_functorch_transforming", "jit_script_compat", "register_grad_hook", "required_torch_version"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def is_functorch_transforming(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def jit_script_compat(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def register_grad_hook(*args: Any, **kwargs: Any) -> NoReturn: ...
