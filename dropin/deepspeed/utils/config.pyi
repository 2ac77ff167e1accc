from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DeepSpeedThroughputTimerConfig", "get_timers_config"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class DeepSpeedThroughputTimerConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def get_timers_config(*args: Any, **kwargs: Any) -> NoReturn: ...
