from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["NativePinnedMemory", "get_active_native_pinned_memory", "get_native_pinned_memory"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class NativePinnedMemory:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def get_active_native_pinned_memory(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def get_native_pinned_memory(*args: Any, **kwargs: Any) -> NoReturn: ...
