from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise.data import RandomLTDScheduler as RandomLTDScheduler

__all__ = ["BaseScheduler", "RandomLTDScheduler"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class BaseScheduler:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
