from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["main"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def main(*args: Any, **kwargs: Any) -> NoReturn: ...
