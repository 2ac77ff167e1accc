from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["lazy_init_hp_params_optimizer_state", "link_hp_params"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def lazy_init_hp_params_optimizer_state(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def link_hp_params(*args: Any, **kwargs: Any) -> NoReturn: ...
