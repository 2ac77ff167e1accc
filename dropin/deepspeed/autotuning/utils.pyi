from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["write_experiments"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def write_experiments(*args: Any, **kwargs: Any) -> NoReturn: ...
