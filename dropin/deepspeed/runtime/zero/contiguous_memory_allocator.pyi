from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["ContiguousMemoryAllocator", "print_rank_0"]

@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class ContiguousMemoryAllocator:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
def print_rank_0(*args: Any, **kwargs: Any) -> NoReturn: ...
