from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["BF16_Optimizer", "print_rank_0"]

@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class BF16_Optimizer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def print_rank_0(*args: Any, **kwargs: Any) -> NoReturn: ...
