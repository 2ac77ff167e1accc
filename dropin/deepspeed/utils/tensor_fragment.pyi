from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise.zero.access import safe_get_full_fp32_param as safe_get_full_fp32_param
from shardwise.zero.access import safe_get_full_grad as safe_get_full_grad
from shardwise.zero.access import safe_get_full_optimizer_state as safe_get_full_optimizer_state
from shardwise.zero.access import safe_get_local_fp32_param as safe_get_local_fp32_param
from shardwise.zero.access import safe_get_local_grad as safe_get_local_grad
from shardwise.zero.access import safe_get_local_optimizer_state as safe_get_local_optimizer_state
from shardwise.zero.access import safe_set_full_fp32_param as safe_set_full_fp32_param
from shardwise.zero.access import safe_set_full_grad as safe_set_full_grad
from shardwise.zero.access import safe_set_full_optimizer_state as safe_set_full_optimizer_state
from shardwise.zero.access import safe_set_local_fp32_param as safe_set_local_fp32_param
from shardwise.zero.access import safe_set_local_grad as safe_set_local_grad
from shardwise.zero.access import safe_set_local_optimizer_state as safe_set_local_optimizer_state
from shardwise.zero.access import safe_update_full_grad_vectorized as safe_update_full_grad_vectorized

__all__ = ["fragment_address", "get_full_hp_grad", "get_full_hp_param", "get_hp_fragment_mapping", "lazy_init_hp_params_optimizer_state", "link_hp_params", "map_to_flat_opt_states", "safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state", "safe_get_local_fp32_param", "safe_get_local_grad", "safe_get_local_optimizer_state", "safe_set_full_fp32_param", "safe_set_full_grad", "safe_set_full_optimizer_state", "safe_set_local_fp32_param", "safe_set_local_grad", "safe_set_local_optimizer_state", "safe_update_full_grad_vectorized", "set_full_hp_grad", "set_full_hp_param", "tensor_fragment"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class fragment_address:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def get_full_hp_grad(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def get_full_hp_param(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def get_hp_fragment_mapping(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def lazy_init_hp_params_optimizer_state(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def link_hp_params(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def map_to_flat_opt_states(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def set_full_hp_grad(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def set_full_hp_param(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class tensor_fragment:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
