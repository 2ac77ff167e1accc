from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise_deepspeed.monitors import CometMonitor as CometMonitor

__all__ = ["CometMonitor", "EventsLogScheduler"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class EventsLogScheduler:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
