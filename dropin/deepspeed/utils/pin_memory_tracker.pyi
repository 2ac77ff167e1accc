from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["pinned_memory_summary", "track_pinned_memory"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def pinned_memory_summary(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def track_pinned_memory(*args: Any, **kwargs: Any) -> NoReturn: ...
