from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["check_comet_availability", "check_tb_availability", "check_wandb_availability"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def check_comet_availability(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def check_tb_availability(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def check_wandb_availability(*args: Any, **kwargs: Any) -> NoReturn: ...
